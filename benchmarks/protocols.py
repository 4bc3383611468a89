"""Every protocol on five scenarios of MNIST: agreement, accuracy before and after clusters, bytes,
seconds.

python -m securecluster.benchmarks.protocols [--seeds 3] [--full] [--minutes 10]

20 clients with 200 training samples each (`--full`: all, 3000), CFL's default network and learning
rate for everyone, and each protocol's own number of rounds: 40, of SR-FCA those of its training
alone and its refinements. Protocols that are told the number of clusters (IFCA, with its default
ten starts, Local-KMeans and the random clusters) are told the true one, four for IID clients;
one-shot clustering, which compares features, cannot see swapped labels. MNIST is read from
SECURECLUSTER_DATA or the hub.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from securecluster import Federation, Iid, LabelSwap, Pathological, Rotation, Tasks
from securecluster.benchmarks.papers.sheet import Cell, Sheet, options, summarise
from securecluster.protocols import (
    CFL,
    FLHC,
    IFCA,
    SRFCA,
    FedAvg,
    FineTune,
    Local,
    LocalKMeans,
    OneShot,
    RandomClusters,
)

SCENARIOS: dict[str, tuple[Any, int]] = {
    "label-swap": (LabelSwap(clusters=4), 4),
    "rotation": (Rotation(clusters=4), 4),
    "pathological": (Pathological(clusters=5), 5),
    "tasks": (Tasks(), 2),
    "iid": (Iid(), 4),
}
PROTOCOLS: dict[str, Any] = {
    p.name: p
    for p in (CFL, FLHC, OneShot, SRFCA, IFCA, LocalKMeans, RandomClusters, FedAvg, FineTune, Local)
}
SAMPLES = {"cpu": 200, "full": None}


def cells(scale: str, seeds: int) -> list[Cell]:
    """Protocol by scenario by seed."""
    kinds = [
        (seed, scenario, name)
        for seed in range(seeds)
        for scenario in SCENARIOS
        for name in PROTOCOLS
    ]
    return [
        {"scale": scale, "data": "mnist", "clients": 20, "scenario": s, "protocol": p, "seed": seed}
        for seed, s, p in kinds
    ]


def measure(cell: Cell) -> dict[str, Any]:
    """One run."""
    scenario, k = SCENARIOS[cell["scenario"]]
    samples = SAMPLES[cell["scale"]]
    federation = Federation.simulate(
        cell["data"], scenario=scenario, clients=cell["clients"], samples=samples, seed=cell["seed"]
    )
    method = PROTOCOLS[cell["protocol"]]
    fitted = method(**({"k": k} if "k" in method().get_params() else {})).fit(federation)
    assert fitted.agreement_ is not None
    # a split's round still has the joint model
    first = [line["accuracy"] for line in fitted.history_ if line.get("splits")][:1]
    before = (
        first
        or [line["accuracy"] for line in fitted.history_ if line["clusters"] == 1][-1:]
        or [None]
    )[0]
    return {
        "ari": fitted.agreement_["ari"],
        "exact": fitted.agreement_["exact"],
        "clusters": len(set(fitted.labels_)),
        "accuracy_before": before if len(set(fitted.labels_)) > 1 else None,
        "accuracy": fitted.history_[-1]["accuracy"],
        "at_99": fitted.history_[-1]["at_target"],
        "bytes": fitted.bytes_["up"] + fitted.bytes_["down"],
        "bytes_servers": fitted.bytes_["servers"],
        "fit_seconds": fitted.seconds_,
    }


def main(argv: Sequence[str] | None = None) -> Path:
    """Measure what is missing, and print."""
    chosen, sheet = options(__doc__, argv), Sheet("protocols")
    rows = sheet.fill(cells(chosen.scale, chosen.seeds), measure, chosen.minutes)
    sheet.expect(cells("full", chosen.seeds))
    summarise(
        rows,
        ["scenario", "protocol"],
        ["ari", "accuracy_before", "accuracy", "bytes", "fit_seconds"],
    )
    return sheet.path


if __name__ == "__main__":
    print(main())
