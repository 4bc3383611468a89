"""Write the ledgers of small runs of every protocol, unit of privacy and placement, with dropouts,
for a second accountant.

python .ci/ledgers.py FILE

FILE is a JSON list with, for each run, its name, δ, the ε that its ledger claims for a blanked and
for a replaced unit, the clients' numbers of samples, and the ledger's events.
"""

from __future__ import annotations

import dataclasses
import json
import sys
import warnings
from pathlib import Path
from typing import Any

import numpy as np

from securecluster import Federation
from securecluster.errors import SecureClusterWarning
from securecluster.protocols import (
    CFL,
    CFLGP,
    FLHC,
    FLUX,
    IFCA,
    MRMTL,
    NSIM,
    PACFL,
    RDPCFL,
    SRFCA,
    CLoVE,
    ClusteringProtocol,
    FedAvg,
    FineTune,
    LocalKMeans,
    OneShot,
    RandomClusters,
    Settings,
)
from securecluster.protocols.nsim import synthetic_users
from securecluster.protocols.nsim.pair_network import PairNetworkConfig
from securecluster.protocols.nsim.similarity_model import fit

SIZES = (40, 40, 64, 64, 90, 90)
FEATURES, CLASSES = 12, 4
DELTA = 1e-5


def federation() -> Federation:
    """Return clients with linear labels of their own, in two clusters."""
    clients: dict[str, Any] = {}
    for i, n in enumerate(SIZES):
        draw = np.random.default_rng(i)
        x = draw.normal(size=(n, FEATURES)).astype(np.float32)
        true = np.random.default_rng(100 + i % 2).normal(size=(FEATURES, CLASSES))
        clients[f"c{i}"] = (x, (x @ true).argmax(1))
    return Federation.from_arrays(clients, classes=CLASSES, seed=0)


def walks(form: Any, users: int, draw: np.random.Generator) -> list[Any]:
    """Return synthetic users for NSIM."""
    found = []
    for k in range(users):
        x = draw.random((20, FEATURES)).astype(np.float32)
        found.append((x, draw.integers(k % 2, CLASSES, 20)))
    return found


def brief_fit(rows: Any, true: Any, draws: Any, grid: Any, networks: int) -> Any:
    """Train NSIM's pair network for three steps: what it tells costs nothing."""
    return fit(rows, true, draws, grid=(PairNetworkConfig(steps=3),), networks=1)


SPLIT = {"criterion": "absolute", "eps1": 100.0, "eps2": 1e-6, "gamma_max": 0.0}
PROTOCOLS: dict[str, tuple[type[ClusteringProtocol], dict[str, Any]]] = {
    "fedavg": (FedAvg, {"rounds": 4, "participation": 0.5}),
    "fedavg adam": (FedAvg, {"rounds": 3, "optimizer": "adam", "batch_size": 9}),
    "finetune": (FineTune, {"rounds": 4, "tune_rounds": 2}),
    "mrmtl": (MRMTL, {"rounds": 3}),
    "random": (RandomClusters, {"k": 2, "rounds": 3}),
    "cfl": (CFL, {**SPLIT, "rounds": 4, "fallback": 0.25}),
    "cfl of gradients": (CFL, {**SPLIT, "rounds": 3, "similarity": "gradient"}),
    "cfl of sketches": (CFL, {**SPLIT, "rounds": 4, "sketch": 32, "compress": "8bit"}),
    "flhc": (FLHC, {"rounds": 4, "pre_rounds": 2}),
    "srfca": (SRFCA, {"rounds": 2, "local_rounds": 2, "refine": 2}),
    "srfca l2": (SRFCA, {"rounds": 2, "local_rounds": 1, "refine": 1, "distance": "l2"}),
    "srfca gradients": (
        SRFCA,
        {"rounds": 2, "local_rounds": 1, "refine": 1, "variant": "gradient"},
    ),
    "oneshot": (OneShot, {"rounds": 3, "tasks": 2, "gram_noise": 0.9}),
    "nsim": (
        NSIM,
        {
            "rounds": 3,
            "synthetic": 8,
            "walks": walks,
            "radius": 0.0,
            "layer": "last",
            "local_rounds": 1,
            "eps": 1.0,
        },
    ),
    "ifca": (IFCA, {"rounds": 3, "k": 2, "starts": 2, "start_rounds": 1}),
    "clove": (CLoVE, {"rounds": 4, "k": 2, "stable_rounds": 2}),
    "cflgp": (CFLGP, {"rounds": 4, "k": 2}),
    "flux": (FLUX, {"rounds": 4, "pre_rounds": 1, "k": 2}),
    "rdpcfl": (RDPCFL, {"rounds": 4, "k": 2}),
    "pacfl": (PACFL, {"rounds": 2, "k": 2, "gram_noise": 0.9}),
    "local-kmeans": (LocalKMeans, {"rounds": 3, "k": 2, "local_rounds": 2}),
}
WAYS: dict[str, dict[str, Any]] = {
    "client, local": {"dp_unit": "client"},
    "client, central": {"dp_unit": "client", "placement": "central"},
    "example": {"dp_unit": "example"},
}
# protocols whose updates leave in sums only
DISTRIBUTED = ("fedavg", "fedavg adam", "finetune", "random", "nsim")
SHARES = {"dp_unit": "client", "placement": "distributed", "aggregation": "secagg"}


def ledger_of(name: str, way: str, known: Federation) -> dict[str, Any]:
    """Run a protocol, and return what a second accountant needs of its ledger."""
    kind, own = PROTOCOLS[name]
    protection = SHARES if way == "client, distributed" else WAYS[way]
    usual = {"epochs": 1, "batch_size": 16, "clip": 0.7, "noise": 1.3, "delta": DELTA}
    fitted = kind(**{**usual, **own, **protection}).fit(known, Settings(dropout=0.15))
    ledger = fitted.ledger_
    return {
        "run": f"{name}, {way}",
        "delta": DELTA,
        "epsilon": ledger.price(DELTA).epsilon,
        "epsilon_replace": ledger.price(DELTA, "replace").epsilon,
        "samples": {str(i): n for i, n in ledger.samples.items()},
        "events": [dataclasses.asdict(event) for event in ledger.events],
    }


def main(target: Path) -> None:
    """Write all ledgers."""
    warnings.simplefilter("ignore", SecureClusterWarning)
    synthetic_users.fit = brief_fit
    known = federation()
    found = [ledger_of(name, way, known) for name in PROTOCOLS for way in WAYS]
    found += [ledger_of(name, "client, distributed", known) for name in DISTRIBUTED]
    target.write_text(json.dumps(found))
    print(f"{len(found)} ledgers in {target}")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
