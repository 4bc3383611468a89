"""Measure SR-FCA and its baselines on FEMNIST by writers (Vardhan et al. 2024, real data).

python -m benchmarks.papers.srfca_femnist [--seeds 3] [--full] [--minutes 20]

The paper trains a CNN for 1000 iterations with one REFINE step and t = 2, tunes λ, β and the
baselines' number of clusters in {2, 3, 4, 5}, and says that SR-FCA outperforms all baselines. The
excerpt of it that was at hand prints no accuracies and no number of clients.

`--full` has all 100 writers of the stored set, all their samples and cnn-briggs; the scale for a
CPU has 30 writers and mlp-200. Both have about 1000 iterations of a writer of middle size: 60
rounds of one epoch in batches of 10. Not in the paper: the network, batches and the learning rate
(0.03, since at 0.2, the default for images, nothing is learned). λ and β are not tuned: λ is the
library's default, β that of `srfca_runs`.

IFCA and Local-KMeans have a row for each k of the paper's. The best of these by test accuracy, as a
tuning on the test samples would choose it, flatters them. True clusters are not known. Other
columns are `srfca_runs`'s. Images are read from SECURECLUSTER_DATA or the hub.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from typing import Any

from benchmarks.papers.sheet import Cell, Sheet, options
from benchmarks.papers.srfca_runs import MADE, OWN, table

TOLD = ("ifca", "local-kmeans")  # methods that receive the number of clusters
KS = (2, 3, 4, 5)  # among which the paper tunes K of the clustered baselines
COMMON: dict[str, Any] = {
    "data": "femnist",
    "scenario": "natural",
    "samples": None,
    "overlap": False,
    "optimizer": "sgd",
    "lr": 0.03,  # at 0.2, the default for images, nothing is learned
    "batch_size": 10,
    "rounds": 60,  # about the paper's 1000 iterations of a writer of middle size
    "epochs": 1,
    "participation": 1.0,
}
SCALES: dict[str, dict[str, Any]] = {
    "cpu": {"clients": 30, "model": "mlp-200"},
    "full": {"clients": 100, "model": "cnn-briggs"},
}
PAPER = {"srfca": "outperforms all baselines"}


def cells(scale: str, seeds: int) -> list[Cell]:
    """Return all methods by seed, those that receive k once for each k.

    Args:
        scale: "cpu" or "full".
        seeds: the number of seeds.
    """
    settings: list[Cell] = []
    for seed, method in product(range(seeds), MADE):
        common = {"scale": scale, **COMMON, **SCALES[scale], "seed": seed}
        extra = {**OWN.get(method, {}), "paper": PAPER.get(method)}
        if method == "srfca":
            # one REFINE step on real data, in place of two
            extra["refine"] = 1
        if method not in TOLD:
            settings.append({**common, "method": method, "clusters": None, **extra})
            continue
        for k in KS:
            settings.append({**common, "method": f"{method} k={k}", "clusters": k, **extra})
    return settings


def main(argv: Sequence[str] | None = None) -> Sheet:
    """Measure what is missing, print, draw."""
    return table("srfca_femnist", cells, options(__doc__, argv, minutes=20.0))


if __name__ == "__main__":
    main()
