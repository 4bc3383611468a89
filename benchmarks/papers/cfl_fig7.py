"""Both norms of the split test over rounds, with congruent and incongruent clients (Sattler et al.
2019, Fig. 7; eq. 32 and 33).

python -m securecluster.benchmarks.papers.cfl_fig7 [--seeds 3] [--full] [--minutes 10]

The paper: MNIST, two clients, 1000 rounds; congruent: one holds all digits 0–4, the other all of
    5–9; incongruent: random subsets, each
client with two labels of its own swapped. ‖mean Δ‖ goes to zero in both; max ‖Δ‖ falls along with
it in the congruent case, and stagnates or grows in the other. The norms here are those of
weight-updates over 3 epochs. `--full` has 20,000 samples a client, 1000 rounds and cnn-briggs; the
scale for a CPU 2000 samples, 100 rounds and cnn-ali. With few samples the network comes to know
each image, swapped labels and all, and clients that hold different images are congruent after all:
so samples before rounds. Images are read from SECURECLUSTER_DATA or the hub.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from securecluster import Federation, LabelSwap
from securecluster.benchmarks.papers.cfl_runs import NEVER, training
from securecluster.benchmarks.papers.sheet import (
    Cell,
    Row,
    Sheet,
    figure,
    numbers,
    options,
    summarise,
)
from securecluster.core.randomness import Randomness
from securecluster.data.datasets import source
from securecluster.protocols import CFL

COMMON = {"data": "mnist", "epochs": 3, "lr": 0.05, "batch_size": 100}
SCALES: dict[str, dict[str, Any]] = {
    "cpu": {"model": "cnn-ali", "samples": 2000, "rounds": 100},
    "full": {
        "model": "cnn-briggs",
        "samples": 20000,
        "rounds": 1000,
    },  # of the 30,000 a client has in the paper; a fifth as many is held out
}
PAPER = {
    "congruent": "max norm falls along with the mean's",
    "incongruent": "max norm stagnates or grows while the mean's falls",
}
NORMS = ("mean_norm", "max_norm")
POINTS = 200  # of each curve in the file


def cells(scale: str, seeds: int) -> list[Cell]:
    """Return the cells of both cases."""
    settings: list[Cell] = []
    for seed in range(seeds):
        for case, paper in PAPER.items():
            fixed = {"scale": scale, "case": case, **COMMON, **SCALES[scale]}
            settings.append({**fixed, "seed": seed, "paper": paper})
    return settings


def halves(data: str, samples: int, seed: int) -> Federation:
    """Return two clients, one with the lower half of the labels and one with the upper.

    Args:
        data: the data set.
        samples: training samples of a client; a fifth of what it gets in all is held out.
        seed: the seed of the draws.
    """
    data_set = source(data)
    labels = data_set.train.y
    middle = data_set.classes // 2
    shards = {}
    for name, low, high in (("lower", 0, middle), ("upper", middle, data_set.classes)):
        rng = Randomness(seed).generator("benchmark", "fig7", name)
        candidates = np.flatnonzero((labels >= low) & (labels < high))
        rows = rng.permutation(candidates)[: samples * 5 // 4]
        shards[name] = (data_set.train.read(rows), labels[rows])
    return Federation.from_arrays(shards, seed=seed)


def trend(norms: Sequence[float]) -> float:
    """Return the factor by which a norm grows in 100 rounds.

    It is from a least-squares line through the norm's logarithm over the second half of the rounds.
    """
    late = np.log(np.maximum(norms[len(norms) // 2 :], 1e-12))
    slope = np.polyfit(np.arange(len(late)), late, 1)[0]
    return float(np.exp(100 * slope))


def measure(cell: Cell) -> dict[str, Any]:
    """Return both norms: means over the first and the last tenth of the rounds, and more.

    Of each norm there are also the largest, the late trend, and the curve.
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
    history = CFL(**NEVER, **training(cell)).fit(federation).history_
    tenth = max(1, len(history) // 10)
    step = -(-len(history) // POINTS)  # rounded up
    results: dict[str, Any] = {"accuracy": history[-1]["accuracy"], "every": step}
    for name in NORMS:
        curve = [line["split_tests"][0][name] for line in history]
        results[f"{name}_first"] = float(np.mean(curve[:tenth]))
        results[f"{name}_last"] = float(np.mean(curve[-tenth:]))
        results[f"{name}_peak"] = max(curve)
        results[f"{name}_trend"] = trend(curve)
        results[name] = curve[::step]
    return results


def draw(rows: Sequence[Row]) -> Any:
    """Draw incongruent left and congruent right, as in the paper, with a line for each seed."""
    labels = dict(zip(NORMS, ("‖mean Δ‖", "max ‖Δ‖"), strict=True))
    picture, axes = figure(9.6, 3.8, columns=2)
    for axis, case in zip(axes.flat, ("incongruent", "congruent"), strict=True):
        done = [row for row in rows if row["case"] == case and row.get("every")]
        for n, row in enumerate(done):
            for k, (name, label) in enumerate(labels.items()):
                curve = numbers(row[name])
                rounds = 1 + int(row["every"]) * np.arange(len(curve))
                # one entry of the legend for all seeds
                legend = None if n else label
                axis.plot(rounds, curve, color=f"C{k}", linewidth=0.8, alpha=0.8, label=legend)
        axis.set(title=case, xlabel="round", yscale="log")
        if done:
            axis.legend(fontsize=8)
    return picture


def main(argv: Sequence[str] | None = None) -> Path:
    """Measure what is missing, print, draw."""
    chosen = options(__doc__, argv)
    sheet = Sheet("cfl_fig7")
    requested = cells(chosen.scale, chosen.seeds)
    rows = sheet.fill(requested, measure, chosen.minutes)
    sheet.expect(cells("full", chosen.seeds))
    values: list[str] = []
    for name in NORMS:
        values += [f"{name}_{value}" for value in ("first", "peak", "last", "trend")]
    summarise(rows, ["case"], values)
    return sheet.save(draw(rows), chosen.scale)


if __name__ == "__main__":
    print(main())
