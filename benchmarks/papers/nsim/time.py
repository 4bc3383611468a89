"""Measure what each step of NSIM costs in one run (Pacheco et al. 2021, Section 3.1).

python -m benchmarks.papers.nsim.time [--seeds 1] [--full] [--minutes 10]

The paper: its score "is achieved with significantly less computing cost than directly comparing
user datasets with the LCSS algorithm"; it prints no times.

Here all times are processor seconds of one process with one thread: `lcss` and `predict` are of all
pairs of real users, `ratio` is the first by the second. LCSS is computed by bits
(`securecluster.protocols.nsim.lcss`), and not by a plain dynamic programme, which takes much
longer. The steps that have to come before a prediction are beside it: synthetic users, their LCSS,
their training, the grid search and fit, and clients' own training.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import product
from typing import Any

import torch

from benchmarks.grid import Grid, with_seeds
from benchmarks.papers.nsim.runs import RADIUS, STRIDE, TRAINED, federation, models, network, timed
from benchmarks.sheet import Cell, Row, figure
from securecluster.core.devices import cpu_threads
from securecluster.core.randomness import Randomness
from securecluster.protocols.nsim.client import find_layer
from securecluster.protocols.nsim.random_walks import Format, RandomWalk, generated
from securecluster.protocols.nsim.similarity_model import Fitted, fit, predict
from securecluster.protocols.nsim.synthetic_users import true_similarity

# once in a run, before any client is compared; fit includes the grid search
STEPS = ("walks", "lcss_synthetic", "train_synthetic", "fit")
REAL = ("train_clients", "predict", "lcss")
CLIENTS = (50, 100, 200, 400)
SYNTHETIC = {"cpu": 400, "full": 4000}  # 100 in the paper


def cells(scale: str, seeds: int) -> list[Cell]:
    """Return one run a seed."""
    setting = {
        "scale": scale,
        "synthetic": SYNTHETIC[scale],
        **TRAINED,
        "clients": CLIENTS[-1],
        "paper": "less than LCSS",
    }
    return with_seeds([setting], range(seeds))


def measured(cell: Cell) -> dict[str, Any]:
    """Return processor seconds by step; those of real users for some numbers of them.

    Args:
        cell: numbers of users, their training, and the seed.
    """
    seed = cell["seed"]
    results: dict[str, Any] = {}
    # threads would add up in processor seconds, and differ from machine to machine
    with cpu_threads(1):
        real = [(shard.x, shard.y) for shard in federation(cell).shards]
        draws = Randomness(seed).generator("walks")
        make = partial(generated, RandomWalk(), Format(), cell["synthetic"], draws)
        users, results["walks"] = timed(make)
        positions = [y for _, y in users]
        compare = partial(true_similarity, positions, RADIUS, STRIDE)
        true, results["lcss_synthetic"] = timed(compare)
        train = partial(models, cell, users, "common", seed + 1)
        trained, results["train_synthetic"] = timed(train)
        layer = find_layer(network(cell), "hidden")

        def fitting() -> Fitted:
            return fit(layer.rows(trained), torch.from_numpy(true), Randomness(seed))

        fitted, results["fit"] = timed(fitting)
        counts = {min(m, len(real)) for m in CLIENTS}
        for m in sorted(counts):
            results |= _of_clients(cell, real[:m], layer, fitted.estimator)
    return results


def _of_clients(cell: Cell, real: list[Any], layer: Any, estimator: Any) -> dict[str, Any]:
    """Return processor seconds of the steps that real users shape.

    Args:
        cell: the cell.
        real: the samples of these users, (x, y) each.
        layer: the layer that the pair network reads.
        estimator: the fitted pair network.
    """
    m = len(real)
    positions = [y for _, y in real]
    train = partial(models, cell, real, "common", cell["seed"])
    trained, training = timed(train)
    rows = layer.rows(trained)
    _, prediction = timed(partial(predict, estimator, rows, rows))
    # all positions of real users, without the stride of synthetic ones
    _, lcss = timed(partial(true_similarity, positions, RADIUS))
    return {
        f"train_clients_{m}": training,
        f"predict_{m}": prediction,
        f"lcss_{m}": lcss,
        f"ratio_{m}": lcss / prediction,  # the paper: “significantly less”, without numbers
    }


def draw(rows: Sequence[Row]) -> Any:
    """Draw processor seconds over the number of users, with a line for each step and seed."""
    picture, axes = figure(5.6, 3.8)
    axis = axes[0, 0]
    for n, step in enumerate(REAL):
        for row in rows:
            texts = {m: row.get(f"{step}_{m}", "") for m in CLIENTS}
            users = [m for m, text in texts.items() if text]
            if not users:
                continue
            seconds = [float(texts[m]) for m in users]
            label = None
            if row is rows[0]:
                label = step
            axis.plot(users, seconds, color=f"C{n}", marker=".", label=label)
    axis.set(
        title="all pairs of real users", xlabel="users", ylabel="processor seconds", yscale="log"
    )
    axis.legend(fontsize=8)
    return picture


GRID = Grid(
    __doc__,
    "nsim_time",
    cells,
    measured,
    by=["clients"],
    values=[*STEPS, *(f"{step}_{m}" for m, step in product(CLIENTS, (*REAL, "ratio")))],
    seeds=1,
    full="last",
    draw=draw,
)

if __name__ == "__main__":
    print(GRID.main())
