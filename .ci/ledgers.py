"""Write the ledgers of small runs of the tests' protocols, by unit of privacy and placement, with
dropouts, for a second accountant.

python .ci/ledgers.py FILE, where `tests` can be imported

FILE is a JSON list with, for each run, its name, δ, the ε that its ledger claims for a blanked and
for a replaced unit, the clients' numbers of samples, and the ledger's events.
"""

from __future__ import annotations

import dataclasses
import json
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from securecluster import Federation
from securecluster.errors import SecureClusterWarning, UsageError
from securecluster.protocols import Settings
from tests.protocols import cases

SIZES = (40, 40, 64, 64, 90, 90)
USUAL: dict[str, Any] = {
    "rounds": 4, "epochs": 1, "batch_size": 16, "model": "linear", "clip": 0.7, "noise": 1.3,
    "delta": 1e-5,
}  # fmt: skip
WAYS = {
    **cases.WAYS,
    "distributed": {"dp_unit": "client", "placement": "distributed", "aggregation": "secagg"},
    "half": {"dp_unit": "client", "participation": 0.5},
    "uneven batches": {"dp_unit": "example", "batch_size": 9},
}


def federation() -> Federation:
    """Return clients with linear labels of their own, in two clusters."""
    clients: dict[str, Any] = {}
    for i, n in enumerate(SIZES):
        x = np.random.default_rng(i).normal(size=(n, 1, 8, 8)).astype(np.float32)
        true = np.random.default_rng(100 + i % 2).normal(size=(64, 10))
        clients[f"c{i}"] = (x, (x.reshape(n, 64) @ true).argmax(1))
    return Federation.from_arrays(clients, classes=10, seed=0)


def ledgers() -> Iterator[dict[str, Any]]:
    """Yield what a second accountant needs of the ledger of each run that is not refused."""
    known = federation()
    for name in cases.VARIANTS:
        _, own = cases.VARIANTS[name]
        noise = {option: 0.9 for option in own if option.endswith("_noise")}
        for way, protection in WAYS.items():
            try:
                method = cases.variant(name, **{**USUAL, **noise, **protection})
                ledger = method.fit(known, Settings(dropout=0.15)).ledger_
            except UsageError:
                continue
            yield {
                "run": f"{name}, {way}",
                "delta": USUAL["delta"],
                "epsilon": ledger.price(USUAL["delta"]).epsilon,
                "epsilon_replace": ledger.price(USUAL["delta"], "replace").epsilon,
                "samples": {str(i): n for i, n in ledger.samples.items()},
                "events": [dataclasses.asdict(event) for event in ledger.events],
            }


if __name__ == "__main__":
    warnings.simplefilter("ignore", SecureClusterWarning)
    with pytest.MonkeyPatch.context() as patch:
        cases.stub_pair_network(patch)
        found = list(ledgers())
    Path(sys.argv[1]).write_text(json.dumps(found))
    print(f"{len(found)} ledgers in {sys.argv[1]}")
