"""Fashion-MNIST with three tasks of unequal size (Ali & Arafa 2024, Fig. 3): accuracy per task,
one-shot against random clusters.

python -m securecluster.benchmarks.papers.oneshot_fig3 [--seeds 6] [--full] [--minutes 10]

The paper: five users with clothes, three with shoes, two with bags, and a minority of the others'
    labels; fewer samples from task to task;
a 784-32-10 network, pixels as features; six runs averaged; one-shot clusters reach a higher
accuracy with less variance than random ones, above all for the third task. It prints no numbers,
nor samples, rounds, learning rate and batch size: these are ours, and so are the common layers, the
first one. Random clusters are as large as the tasks and train in the same way. Accuracy is the mean
over a task's users, each on test samples dealt as its training ones. `--full` deals as many samples
as the tasks allow. Images are read from SECURECLUSTER_DATA or the hub.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from securecluster.benchmarks.papers.oneshot_runs import CLUSTERS, compared, curves, trained
from securecluster.benchmarks.papers.sheet import Cell, Sheet, options

COMMON: dict[str, Any] = {
    "data": "fashion_mnist",
    "clients": 10,
    "minority": 0.1,
    "features": "identity",
    "model": "mlp-32",
    "gps_every": 1,
}
SCALES: dict[str, dict[str, Any]] = {
    "cpu": {"samples": 1200, "batch_size": 20, "epochs": 1, "lr": 0.05, "rounds": 40},
    "full": {"samples": None, "batch_size": 20, "epochs": 1, "lr": 0.05, "rounds": 100},
}
TASKS = ("clothes", "shoes", "bag")


def cells(scale: str, seeds: int) -> list[Cell]:
    """Both kinds of clusters, by seed."""
    fixed = {
        "scale": scale,
        **COMMON,
        **SCALES[scale],
        "paper": "one-shot above random, with less variance",
    }
    return [
        {**fixed, "clusters": clusters, "seed": seed}
        for seed in range(seeds)
        for clusters in CLUSTERS
    ]


def main(argv: Sequence[str] | None = None) -> Path:
    """Measure what is missing, print, draw."""
    chosen, sheet = options(__doc__, argv, seeds=6), Sheet("oneshot_fig3")
    rows = sheet.fill(cells(chosen.scale, chosen.seeds), trained, chosen.minutes)
    sheet.expect(cells("full", chosen.seeds))
    print(*compared(rows, TASKS), sep="\n")
    return sheet.save(curves(rows, TASKS), chosen.scale)


if __name__ == "__main__":
    print(main())
