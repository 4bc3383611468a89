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
from securecluster.benchmarks.papers.sheet import Cell, Sheet, figure, numbers, options, summarise
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
    """One run a seed."""
    fixed = {
        "scale": scale,
        "synthetic": SYNTHETIC[scale],
        **TRAINED,
        "clients": CLIENTS[-1],
        "paper": "less than LCSS",
    }
    return [{**fixed, "seed": seed} for seed in range(seeds)]


def measured(cell: Cell) -> dict[str, Any]:
    """Processor seconds by step, of real users for some numbers of them."""
    with cpu_threads(1):
        real = [(s.x, s.y) for s in federation(cell).shards]
        draw = Randomness(cell["seed"]).generator("walks")
        users, walks = timed(lambda: generated(RandomWalk(), Format(), cell["synthetic"], draw))
        true, lcss_synthetic = timed(lambda: true_similarity([y for _, y in users], RADIUS, STRIDE))
        made, train_synthetic = timed(lambda: models(cell, users, "common", cell["seed"] + 1))
        layer = find_layer(network(cell), "hidden")
        fitted, fitting = timed(
            lambda: fit(layer.rows(made), torch.from_numpy(true), Randomness(cell["seed"]))
        )
        found: dict[str, Any] = dict(
            zip(STEPS, (walks, lcss_synthetic, train_synthetic, fitting), strict=True)
        )
        for m in sorted({min(m, len(real)) for m in CLIENTS}):
            own, train_clients = timed(lambda m=m: models(cell, real[:m], "common", cell["seed"]))  # type: ignore[misc]
            rows = layer.rows(own)
            _, predicting = timed(lambda rows=rows: predict(fitted.estimator, rows, rows))  # type: ignore[misc]
            _, lcss = timed(lambda m=m: true_similarity([y for _, y in real[:m]], RADIUS))  # type: ignore[misc]
            found |= {
                f"{step}_{m}": v
                for step, v in zip(REAL, (train_clients, predicting, lcss), strict=True)
            }
            found[f"ratio_{m}"] = lcss / predicting
    return found


def main(argv: Sequence[str] | None = None) -> Path:
    """Measure what is missing, print, draw."""
    chosen = options(__doc__, argv, seeds=1)
    sheet = Sheet("nsim_time")
    rows = sheet.fill(cells(chosen.scale, chosen.seeds), measured, chosen.minutes)
    sheet.expect(cells("full", chosen.seeds))
    summarise(
        rows, ("clients",), (*STEPS, *(f"{step}_{m}" for m in CLIENTS for step in (*REAL, "ratio")))
    )
    made, axes = figure(5.6, 3.8)
    for n, step in enumerate(REAL):
        for row in rows:
            known = [(m, numbers(row[f"{step}_{m}"])[0]) for m in CLIENTS if row.get(f"{step}_{m}")]
            axes[0, 0].plot(
                *zip(*known, strict=True),
                color=f"C{n}",
                marker=".",
                label=step if row is rows[0] else None,
            )
    axes[0, 0].set(
        title="all pairs of real users", xlabel="users", ylabel="processor seconds", yscale="log"
    )
    axes[0, 0].legend(fontsize=8)
    return sheet.save(made, chosen.scale)


if __name__ == "__main__":
    print(main())
