"""How often FL+HC's default threshold is right: for every metric and linkage, on IID clients (one
cluster) and on known clusters.

python -m securecluster.benchmarks.gaps [--seeds 10] [--rounds 10]

The updates are those of one clustering round after `--rounds` rounds of FedAvg, taken from the
transcript; every pair of metric and linkage clusters the same ones. `possible`: how often some cut
of the merges is right. Image sets are read from SECURECLUSTER_DATA or the hub.
"""

from __future__ import annotations

import argparse
from typing import Any

import numpy as np

from securecluster import Federation
from securecluster.benchmarks.table import write
from securecluster.clustering.agglomerative import (
    EUCLIDEAN,
    LINKAGES,
    POINTS,
    cut,
    gap_of,
    heights,
    merges,
)
from securecluster.clustering.distances import METRICS, alike, distances
from securecluster.clustering.metrics import agreement
from securecluster.clustering.noise_robust import default_threshold
from securecluster.core.lazy_torch import torch
from securecluster.data.scenarios import scenario
from securecluster.protocols import FLHC, Settings

SETTINGS: list[dict[str, Any]] = [
    *(
        {"data": "digits", "scenario": name, "clients": 20}
        for name in ("iid", "label-swap", "rotation", "label-permutation")
    ),
    *({"data": "digits", "scenario": "iid", "clients": m, "samples": 60} for m in (2, 4, 6)),
    *(
        {"data": "digits", "scenario": "label-swap", "clients": m, "samples": 60, "clusters": 2}
        for m in (4, 6)
    ),
    *(
        {"data": "mnist", "scenario": name, "clients": 20, "samples": 200}
        for name in ("iid", "label-swap", "rotation", "label-permutation")
    ),
    *(
        {"data": "mnist", "scenario": name, "clients": 100, "samples": 100}
        for name in ("iid", "label-swap")
    ),
]
PAIRS = [
    (metric, linkage)
    for metric in METRICS
    for linkage in LINKAGES
    if metric in POINTS or linkage not in EUCLIDEAN
]


def updates(federation: Federation, rounds: int) -> torch.Tensor:
    """All clients' updates (m, d) in the clustering round."""
    fitted = FLHC(rounds=rounds + 1, pre_rounds=rounds, mask="none").fit(
        federation, Settings(transcript="full")
    )
    place = next(k for k, entry in enumerate(fitted.transcript_.entries) if entry.method == "train")
    found: torch.Tensor = fitted.transcript_.content(place)[1].reply.delta.values
    return found


def judge(rows: torch.Tensor, truth: tuple[int, ...], metric: str, linkage: str) -> dict[str, Any]:
    """Whether the default threshold gives the true clusters, whether any would, and the gap that
    decided.
    """
    tree = merges(distances(rows, metric).cpu().numpy(), linkage)
    high = heights(tree)
    found = cut(
        tree,
        default_threshold(
            tree, gap_of(metric, linkage), alike(rows, "cosine").cpu().numpy(), seed=0
        ),
    )
    possible = any(agreement(cut(tree, at), truth)["exact"] for at in (0.0, *high))
    clusters = len(set(truth))
    gap = float(high[-clusters + 1] / high[-clusters]) if 1 < clusters < len(truth) else None
    ari = agreement(found, truth)["ari"]
    return {
        "exact": ari == 1,
        "ari": round(ari, 4),
        "clusters": 1 + max(found),
        "possible": possible,
        "gap_at_truth": gap and round(gap, 3),
    }


def measure(setting: dict[str, Any], seed: int, rounds: int) -> list[dict[str, Any]]:
    """All pairs on one federation."""
    given: dict[str, Any] = {name: setting.get(name) for name in ("data", "clients", "samples")}
    kind = scenario(setting["scenario"], setting.get("clusters"))
    federation = Federation.simulate(**given, scenario=kind, seed=seed)
    rows, key = (
        updates(federation, rounds),
        {**given, "scenario": setting["scenario"], "rounds": rounds, "seed": seed},
    )
    return [
        {**key, "metric": m, "linkage": k, **judge(rows, federation.truth or (), m, k)}
        for m, k in PAIRS
    ]


def main() -> None:
    """Run, write after each federation, print counts."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--rounds", type=int, default=10)
    options = parser.parse_args()
    table: list[dict[str, Any]] = []
    for setting in SETTINGS:
        mine = [
            row for seed in range(options.seeds) for row in measure(setting, seed, options.rounds)
        ]
        table += mine
        write("gaps", table)
        for metric, linkage in PAIRS:
            own = [row for row in mine if (row["metric"], row["linkage"]) == (metric, linkage)]
            right, best = (
                int(np.sum([row[name] for row in own])) for name in ("exact", "possible")
            )
            print(
                f"{' '.join(map(str, setting.values()))}, {metric} {linkage}: {right} of "
                f"{len(own)} (possible {best})",
                flush=True,
            )


if __name__ == "__main__":
    main()
