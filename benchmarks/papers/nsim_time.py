"""What each step of NSIM costs, and prediction against LCSS on raw data (Pacheco et al. 2021, Section 3.1), in one run.

python -m securecluster.benchmarks.papers.nsim_time [--seeds 1] [--full] [--minutes 10]

The paper: its score "is achieved with significantly less computing cost than directly comparing user datasets with the LCSS algorithm";
it prints no times. Here all are processor seconds of one process with one thread: `lcss` and `predict` are of all pairs of real users,
`ratio` is the first by the second. LCSS is ours, by bits (`securecluster.lcss`), and no plain dynamic programme, which takes much longer.
What has to come before a prediction is beside it: synthetic users, their LCSS, their training, the grid search and fit, and clients' own
training.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from securecluster.benchmarks.papers.nsim_runs import RADIUS, SCALES, STRIDE, TRAINED, federation, models, network, timed
from securecluster.benchmarks.papers.sheet import Cell, Sheet, figure, numbers, options, summarise

from securecluster.devices import cpu_threads
from securecluster.estimator import fit, predict
from securecluster.layers import find_layer
from securecluster.randomness import Randomness
from securecluster.synthetic import true_similarity
from securecluster.walks import Format, RandomWalk, generated

STEPS = ("walks", "lcss_synthetic", "train_synthetic", "fit", "train_clients", "predict", "lcss")
CLIENTS = {"cpu": (50, 100, 200, 400), "full": (400,)}
SYNTHETIC = {scale: own["synthetic"] for scale, own in SCALES.items()}


def cells(scale: str, seeds: int) -> list[Cell]:
    """By number of clients."""
    fixed = {"scale": scale, "synthetic": SYNTHETIC[scale], **TRAINED}
    return [{**fixed, "clients": m, "seed": seed, "paper": "less than LCSS"} for seed in range(seeds) for m in CLIENTS[scale]]


def measured(cell: Cell) -> dict[str, Any]:
    """Processor seconds by step."""
    with cpu_threads(1):
        shards = federation(cell).shards
        real = [(s.x, s.y) for s in shards]
        draw = Randomness(cell["seed"]).generator("walks")
        users, walks = timed(lambda: generated(RandomWalk(), Format(), cell["synthetic"], draw))
        true, lcss_synthetic = timed(lambda: true_similarity([y for _, y in users], RADIUS, STRIDE))
        made, train_synthetic = timed(lambda: models(cell, users, "common", cell["seed"] + 1))
        layer = find_layer(network(cell), "hidden")
        fitted, fitting = timed(lambda: fit(layer.rows(made), torch.from_numpy(true), Randomness(cell["seed"])))
        own, train_clients = timed(lambda: models(cell, real, "common", cell["seed"]))
        rows = layer.rows(own)
        _, predicting = timed(lambda: predict(fitted.estimator, rows, rows))
        _, lcss = timed(lambda: true_similarity([y for _, y in real], RADIUS))
    spent = (walks, lcss_synthetic, train_synthetic, fitting, train_clients, predicting, lcss)
    return {**dict(zip(STEPS, spent, strict=True)), "ratio": lcss / predicting, "pairs": len(real) * (len(real) - 1) // 2}


def main(argv: Sequence[str] | None = None) -> Path:
    """Measure what is missing, print, draw."""
    chosen, sheet = options(__doc__, argv, seeds=1), Sheet("nsim_time")
    rows = sheet.fill(cells(chosen.scale, chosen.seeds), measured, chosen.minutes)
    sheet.expect(cells("full", chosen.seeds))
    summarise(rows, ("clients",), ("ratio", *STEPS))
    made, axes = figure(5.6, 3.8)
    done = [row for row in rows if row.get("ratio")]
    for step in ("lcss", "predict", "train_clients"):
        axes[0, 0].plot([int(row["clients"]) for row in done], [numbers(row[step])[0] for row in done], marker=".", label=step)
    axes[0, 0].set(title="all pairs of real users", xlabel="users", ylabel="processor seconds", yscale="log")
    axes[0, 0].legend(fontsize=8)
    return sheet.save(made, chosen.scale)


if __name__ == "__main__":
    print(main())
