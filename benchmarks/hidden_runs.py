"""Compare whole runs of hidden assignment with DP-FedAvg, at one ε for clusters and training.

python -m securecluster.benchmarks.hidden_runs [--seeds 3] [--minutes 10]

1000 clients with 100 MNIST images each, four clusters with swapped labels, one hidden layer of 32
units. ε is at most 4 for the whole run and a whole client that is added or removed, δ = 1e-5. A
trusted server adds the noise (`--placement central`), which simulates secure sums with noise in
shares at a part of their cost. Seeds are 20 and up. MNIST is read from SECURECLUSTER_DATA or the
hub.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np

from securecluster import Federation, Iid, LabelSwap
from securecluster.benchmarks.papers.sheet import Cell, Sheet, options, summarise
from securecluster.protocols import FedAvg, Hidden

CLIENTS = 1000
SAMPLES = 100
FIRST_SEED = 20
DELTA = 1e-5
PROTOCOLS: dict[str, Any] = {"hidden": Hidden, "fedavg": FedAvg}
SETTINGS: dict[str, Any] = {
    "rounds": 20,
    "epochs": 3,
    "model": "mlp-32",
    "mask": "none",
    "aggregation": "plain",
    "placement": "central",
    "clip": 0.5,
    "target_epsilon": 4.0,
    "delta": DELTA,
}


def cells(seeds: int) -> list[Cell]:
    """Return seed by protocol.

    Args:
        seeds: how many.
    """
    pairs = product(range(FIRST_SEED, FIRST_SEED + seeds), PROTOCOLS)
    return [{"protocol": name, "seed": seed} for seed, name in pairs]


def measure(cell: Cell) -> dict[str, Any]:
    """Run a protocol.

    Args:
        cell: one of `cells`.

    Returns:
        Mean accuracy over clients, adjusted Rand index, and ε of the whole run.
    """
    federation = Federation.simulate(
        "mnist",
        scenario=Iid(overlap=True) + LabelSwap(clusters=4),
        clients=CLIENTS,
        samples=SAMPLES,
        seed=cell["seed"],
    )
    fitted = PROTOCOLS[cell["protocol"]](**SETTINGS).fit(federation)
    return {
        "accuracy": float(np.nanmean(fitted.scores_)),
        "ari": fitted.agreement_["ari"],
        "epsilon": fitted.ledger_.price(DELTA).epsilon,
        "noise": fitted.kept_.learned.config["noise"],
    }


def main(argv: Sequence[str] | None = None) -> Path:
    """Measure what is missing, and print."""
    chosen = options(__doc__, argv)
    sheet = Sheet("hidden_runs")
    rows = sheet.fill(cells(chosen.seeds), measure, chosen.minutes)
    summarise(rows, ["protocol"], ["accuracy", "ari", "epsilon"])
    return sheet.path


if __name__ == "__main__":
    print(main())
