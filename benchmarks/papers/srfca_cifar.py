"""Measure SR-FCA on rotated and label-split CIFAR-10 (Vardhan et al. 2024).

python -m benchmarks.papers.srfca_cifar [--seeds 3] [--full] [--minutes 20]

It is compared with IFCA, one global and local models. There are 32 clients in two clusters, half of
them in each round: images and images turned by 180 degrees, or the first and the last seven labels,
of which they share four.

The paper: 3125 and 4375 samples a client, which is possible only if some clients hold the same
samples, 2400 iterations of a ResNet-9 and two REFINE steps. `--full` has these, with 38 and 27
rounds of one epoch in batches of 50 (batch, learning rate and group norm are not in the paper), and
`overlap` in its rows flags the samples held twice.

The scale for a CPU is not in the paper: cnn-ali, 300 samples a client, none held twice, 20 rounds,
Adam at 0.001 in batches of 10. Methods and columns are `srfca_runs`'s; clients that train alone do
so every round. Images are read from SECURECLUSTER_DATA or the hub.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from benchmarks.papers.sheet import Cell, Sheet, options
from benchmarks.papers.srfca_runs import cells as all_cells
from benchmarks.papers.srfca_runs import table

METHODS = ("global", "local", "ifca", "srfca")
COMMON = {"data": "cifar10", "clients": 32, "clusters": 2, "participation": 0.5}
SCALES: dict[str, dict[str, Any]] = {
    "cpu": {
        "model": "cnn-ali",
        "optimizer": "adam",
        "lr": 1e-3,
        "batch_size": 10,
        "overlap": False,
    },
    # 32 · 3125 and 32 · 4375 samples are more than the 50,000 of CIFAR-10, so clients overlap
    "full": {"model": "resnet9", "optimizer": "sgd", "lr": 0.05, "batch_size": 50, "overlap": True},
}
OWN: dict[str, dict[str, dict[str, int]]] = {
    "cpu": {
        "rotation": {"samples": 300, "rounds": 20},
        "label-split": {"samples": 300, "rounds": 20},
    },
    # about the paper's 2400 iterations
    "full": {
        "rotation": {"samples": 3125, "rounds": 38},  # 62.5 batches of 50 a round
        "label-split": {"samples": 4375, "rounds": 27},  # 87.5 batches a round
    },
}
PAPER = {"srfca": "the correct clusters without k; five points above IFCA"}


def cells(scale: str, seeds: int) -> list[Cell]:
    """Return both scenarios with the methods.

    Args:
        scale: "cpu" or "full".
        seeds: the number of seeds.
    """
    settings = {}
    for name, training in OWN[scale].items():
        settings[name] = {**COMMON, **SCALES[scale], **training}
    return all_cells(settings, METHODS, scale, seeds, PAPER)


def main(argv: Sequence[str] | None = None) -> Sheet:
    """Measure what is missing, print, draw."""
    return table("srfca_cifar", cells, options(__doc__, argv, minutes=20.0))


if __name__ == "__main__":
    main()
