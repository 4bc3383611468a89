"""What each step of NSIM costs, and prediction against LCSS on raw data (Pacheco et al. 2021,
Section 3.1), in one run.

python -m securecluster.benchmarks.papers.nsim_time [--seeds 1] [--full] [--minutes 10]

The paper: its score "is achieved with significantly less computing cost than directly comparing
    user datasets with the LCSS algorithm";
it prints no times. Here all are processor seconds of one process with one thread: `lcss` and
`predict` are of all pairs of real users, `ratio` is the first by the second. LCSS is ours, by bits
(`securecluster.protocols.nsim.lcss`), and no plain dynamic programme, which takes much longer. What
has to come before a prediction is beside it: synthetic users, their LCSS, their training, the grid
search and fit, and clients' own training.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from securecluster.benchmarks.papers.nsim_runs import (
    RADIUS,
    STRIDE,
    TRAINED,
    federation,
    models,
    network,
    timed,
)
from securecluster.benchmarks.papers.sheet import (
    Cell,
    Row,
    Sheet,
    figure,
    numbers,
    options,
    summarise,
)
from securecluster.core.devices import cpu_threads
from securecluster.core.randomness import Randomness
from securecluster.protocols.nsim.client import find_layer
from securecluster.protocols.nsim.random_walks import Format, RandomWalk, generated
from securecluster.protocols.nsim.similarity_model import fit, predict
from securecluster.protocols.nsim.synthetic_users import true_similarity

STEPS = ("walks", "lcss_synthetic", "train_synthetic", "fit")
REAL = ("train_clients", "predict", "lcss")
CLIENTS = (50, 100, 200, 400)
SYNTHETIC = {"cpu": 400, "full": 4000}


def cells(scale: str, seeds: int) -> list[Cell]:
    """Return one run a seed."""
    fixed = {
        "scale": scale,
        "synthetic": SYNTHETIC[scale],
        **TRAINED,
        "clients": CLIENTS[-1],
        "paper": "less than LCSS",
    }
    return [{**fixed, "seed": seed} for seed in range(seeds)]


def measured(cell: Cell) -> dict[str, Any]:
    """Return processor seconds by step; those of real users for some numbers of them."""
    seed = cell["seed"]
    results: dict[str, Any] = {}
    with cpu_threads(1):
        real = [(s.x, s.y) for s in federation(cell).shards]
        draw = Randomness(seed).generator("walks")
        users, results["walks"] = timed(
            lambda: generated(RandomWalk(), Format(), cell["synthetic"], draw)
        )
        true, results["lcss_synthetic"] = timed(
            lambda: true_similarity([y for _, y in users], RADIUS, STRIDE)
        )
        trained, results["train_synthetic"] = timed(lambda: models(cell, users, "common", seed + 1))
        layer = find_layer(network(cell), "hidden")
        fitted, results["fit"] = timed(
            lambda: fit(layer.rows(trained), torch.from_numpy(true), Randomness(seed))
        )
        for m in sorted({min(m, len(real)) for m in CLIENTS}):
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
    trained, train_clients = timed(lambda: models(cell, real, "common", cell["seed"]))
    rows = layer.rows(trained)
    _, predicting = timed(lambda: predict(estimator, rows, rows))
    _, lcss = timed(lambda: true_similarity([y for _, y in real], RADIUS))
    seconds = dict(zip(REAL, (train_clients, predicting, lcss), strict=True))
    results = {f"{step}_{m}": value for step, value in seconds.items()}
    results[f"ratio_{m}"] = lcss / predicting
    return results


def main(argv: Sequence[str] | None = None) -> Path:
    """Measure what is missing, print, draw."""
    chosen = options(__doc__, argv, seeds=1)
    sheet = Sheet("nsim_time")
    requested = cells(chosen.scale, chosen.seeds)
    rows = sheet.fill(requested, measured, chosen.minutes)
    sheet.expect(cells("full", chosen.seeds))
    values = list(STEPS)
    for m in CLIENTS:
        values += [f"{step}_{m}" for step in (*REAL, "ratio")]
    summarise(rows, ("clients",), values)
    return sheet.save(draw(rows), chosen.scale)


def draw(rows: Sequence[Row]) -> Any:
    """Draw processor seconds over the number of users, with a line for each step and seed."""
    picture, axes = figure(5.6, 3.8)
    axis = axes[0, 0]
    for n, step in enumerate(REAL):
        for row in rows:
            users = [m for m in CLIENTS if row.get(f"{step}_{m}")]
            if not users:
                continue
            seconds = [numbers(row[f"{step}_{m}"])[0] for m in users]
            label = step if row is rows[0] else None
            axis.plot(users, seconds, color=f"C{n}", marker=".", label=label)
    axis.set(
        title="all pairs of real users", xlabel="users", ylabel="processor seconds", yscale="log"
    )
    axis.legend(fontsize=8)
    return picture


if __name__ == "__main__":
    print(main())
