"""Measure both norms of the split test over rounds (Sattler et al. 2019, Fig. 7; eq. 32 and 33).

python -m benchmarks.papers.cfl.fig7 [--seeds 3] [--full] [--minutes 10]

There are two cases, of congruent and of incongruent clients.

The paper: MNIST, two clients and 1000 rounds. In the congruent case one client holds all digits 0
to 4 and the other all of 5 to 9; in the incongruent case they hold random subsets, each with two
labels of its own swapped. ‖mean Δ‖ goes to zero in both. max ‖Δ‖ falls along with it in the
congruent case, and stagnates or grows in the other. The norms here are those of weight-updates over
3 epochs.

`--full` has 20,000 samples a client, 1000 rounds and cnn-briggs; the scale for a CPU has 2000
samples, 100 rounds and cnn-ali. With few samples the network learns each image by heart, swapped
labels included, and clients that hold different images are congruent after all. The scale for a CPU
therefore saves rounds rather than samples. Images are read from SECURECLUSTER_DATA or the hub.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from typing import Any

import numpy as np

from benchmarks.grid import Grid, with_seeds
from benchmarks.papers.cfl.runs import NEVER, training
from benchmarks.sheet import Cell, Row, figure, numbers
from benchmarks.table import SEEDED
from securecluster import Federation, LabelSwap
from securecluster.core.randomness import Randomness
from securecluster.data.datasets import source
from securecluster.protocols import CFL

# learning rate and batch size are not in the paper
COMMON = {"data": "mnist", "epochs": 3, "lr": 0.05, "batch_size": 100}
SCALES: dict[str, dict[str, Any]] = {
    # rounds are saved and not samples: swapped labels of few images are learned by heart
    "cpu": {"model": "cnn-ali", "samples": 2000, "rounds": 100},
    "full": {
        "model": "cnn-briggs",
        "samples": 20000,  # 30,000 in the paper, but here a fifth of a client's is held out
        "rounds": 1000,
    },
}
PAPER = {
    "congruent": "max norm falls along with the mean's",
    "incongruent": "max norm stagnates or grows while the mean's falls",
}
NORMS = ("mean_norm", "max_norm")  # eq. 32 and 33, of weight-updates in place of gradients
LABELS = ("‖mean Δ‖", "max ‖Δ‖")
POINTS = 200  # of each curve in the file


def cells(scale: str, seeds: int) -> list[Cell]:
    """Return the cells of both cases."""
    settings = []
    for case, paper in PAPER.items():
        setting = {"scale": scale, "case": case, **COMMON, **SCALES[scale], "paper": paper}
        settings.append(setting)
    return with_seeds(settings, range(seeds))


def halves(data: str, samples: int, seed: int) -> Federation:
    """Return two clients, one with the lower half of the labels and one with the upper.

    Args:
        data: the data set.
        samples: training samples of a client, beside which the federation holds out a fifth of all
            its samples.
        seed: the seed of the draws.
    """
    data_set = source(data)
    labels = data_set.train.y
    middle = data_set.classes // 2  # digits 0 to 4 and 5 to 9 (VI-B)
    # four fifths of a client's samples are for training
    count = samples * 5 // 4
    shards = {}
    for name, low, high in (("lower", 0, middle), ("upper", middle, data_set.classes)):
        rng = Randomness(seed).generator("benchmark", "fig7", name)
        selected = (labels >= low) & (labels < high)
        candidates = np.flatnonzero(selected)
        rows = rng.permutation(candidates)[:count]
        images = data_set.train.read(rows)
        shards[name] = (images, labels[rows])
    return Federation.from_arrays(shards, seed=seed)


def trend(norms: Sequence[float]) -> float:
    """Return the factor by which a norm grows in 100 rounds.

    It is from a least-squares line through the norm's logarithm over the second half of the rounds.

    Args:
        norms: the norm in each round.
    """
    middle = len(norms) // 2
    # a norm may fall to zero, which has no logarithm
    late = np.maximum(norms[middle:], 1e-12)
    rounds = np.arange(len(late))
    slope, _ = np.polyfit(rounds, np.log(late), 1)
    return float(np.exp(100 * slope))  # the slope is per round


def measure(cell: Cell) -> dict[str, Any]:
    """Return both norms: means over the first and the last tenth of the rounds, and more.

    Of each norm there are also the largest, the late trend, and the curve.

    Args:
        cell: the case, and the setting of the run.
    """
    if cell["case"] == "congruent":
        federation = halves(cell["data"], cell["samples"], cell["seed"])
    else:
        federation = Federation.simulate(
            cell["data"],
            scenario=LabelSwap(clusters=2),
            clients=2,
            samples=cell["samples"],
            seed=cell["seed"],
        )
    fitted = CFL(**NEVER, **training(cell)).fit(federation, SEEDED)
    history = fitted.history_
    tenth = max(1, len(history) // 10)
    # rounded up, so that a curve has at most POINTS values
    step = -(-len(history) // POINTS)
    # every: rounds between two values of a stored curve
    last_round = history[-1]
    results: dict[str, Any] = {"accuracy": last_round["accuracy"], "every": step}
    for name in NORMS:
        curve = [line["split_tests"][0][name] for line in history]
        first = np.mean(curve[:tenth])
        last = np.mean(curve[-tenth:])
        results[f"{name}_first"] = float(first)
        results[f"{name}_last"] = float(last)
        results[f"{name}_peak"] = max(curve)
        results[f"{name}_trend"] = trend(curve)
        results[name] = curve[::step]
    return results


def draw(rows: Sequence[Row]) -> Any:
    """Draw incongruent left and congruent right, as in the paper, with a line for each seed."""
    picture, axes = figure(9.6, 3.8, columns=2)
    for axis, case in zip(axes.flat, ("incongruent", "congruent"), strict=True):
        measured = [row for row in rows if row["case"] == case and row.get("every")]
        # one entry of the legend for all seeds
        labels: Sequence[str | None] = LABELS
        for row in measured:
            _norms(axis, row, labels)
            labels = (None, None)
        axis.set(title=case, xlabel="round", yscale="log")
        if measured:
            axis.legend(fontsize=8)
    return picture


def _norms(axis: Any, row: Row, labels: Sequence[str | None]) -> None:
    """Draw both norms of one seed over rounds.

    Args:
        axis: the panel.
        row: the seed's measurements.
        labels: the legend's text of each norm, if any.
    """
    step = int(row["every"])
    for k, name in enumerate(NORMS):
        curve = numbers(row[name])
        rounds = 1 + step * np.arange(len(curve))
        axis.plot(rounds, curve, color=f"C{k}", linewidth=0.8, alpha=0.8, label=labels[k])


GRID = Grid(
    __doc__,
    "cfl_fig7",
    cells,
    measure,
    by=["case"],
    values=["_".join(pair) for pair in product(NORMS, ("first", "peak", "last", "trend"))],
    full="last",
    draw=draw,
)

if __name__ == "__main__":
    print(GRID.main())
