"""CIFAR-10 with two tasks (Ali & Arafa 2024, Fig. 2): accuracy per task over rounds, one-shot
clusters against random ones.

python -m securecluster.benchmarks.papers.oneshot_fig2 [--seeds 6] [--full] [--minutes 10]

The paper: five users with vehicles and five with animals, 10 % of each one's labels from the other
    task; a network of two 5×5 convolutions,
two pools and dense layers of 120 and 84, whose convolutions are the common layers; six runs
averaged; one-shot clusters reach a higher accuracy with less variance than random ones. It prints
no numbers, nor samples, rounds, learning rate and batch size: these are ours, and Φ is the
untrained network "conv", since ImageNet weights are not at hand. Random clusters are as large as
the tasks and train in the same way. Accuracy is the mean over a task's users, each on test samples
dealt as its training ones. `--full` deals all of CIFAR-10 and needs a GPU. Images are read from
SECURECLUSTER_DATA or the hub.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from securecluster.benchmarks.papers.oneshot_runs import CLUSTERS, compared, curves, trained
from securecluster.benchmarks.papers.sheet import Cell, Sheet, options

COMMON: dict[str, Any] = {
    "data": "cifar10",
    "clients": 10,
    "minority": 0.1,
    "features": "conv",
    "model": "cnn-ali",
    "gps_every": 1,
}
SCALES: dict[str, dict[str, Any]] = {
    "cpu": {"samples": 300, "batch_size": 10, "epochs": 1, "lr": 0.1, "rounds": 40},
    "full": {"samples": 4000, "batch_size": 50, "epochs": 1, "lr": 0.05, "rounds": 200},
}
TASKS = ("vehicles", "animals")


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
    chosen, sheet = options(__doc__, argv, seeds=6), Sheet("oneshot_fig2")
    rows = sheet.fill(cells(chosen.scale, chosen.seeds), trained, chosen.minutes)
    sheet.expect(cells("full", chosen.seeds))
    print(*compared(rows, TASKS), sep="\n")
    return sheet.save(curves(rows, TASKS), chosen.scale)


if __name__ == "__main__":
    print(main())
