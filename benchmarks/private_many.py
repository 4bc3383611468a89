"""Clients with a thousand samples each: what DP-SGD at an ε that means something leaves of clusters
and accuracy.

python -m securecluster.benchmarks.private_many [--seeds 3] [--minutes 20]

12 clients of Fashion-MNIST with four swapped labels, 1000 samples each, 20 rounds of one epoch in
batches of 50 (`oneshot`: 10 clients in three tasks, T given, 16 public frequencies); the unit of
privacy is one sample, its gradient is clipped to norm 1 (chosen by trial on these data), and every
noise has the same multiplier: methods are set side by side at equal noise, not at equal ε, which
stands beside. IFCA has its default ten starts, and three, which cost less; it, Local-KMeans and
`oneshot` are told the true number of clusters. SR-FCA averages for 10 rounds twice, after 10 alone;
"average" is `--clusterer average`. δ = 1e-5.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from securecluster import Federation
from securecluster.benchmarks.papers.sheet import Cell, Sheet, options, summarise
from securecluster.benchmarks.private_runs import DELTA, PROTOCOLS
from securecluster.benchmarks.table import RESULTS
from securecluster.data.scenarios import Tasks

NOISES = (0.0, 1.0, 2.0)
OWN: dict[str, dict[str, Any]] = {
    "cfl": {},
    "cfl average": {"clusterer": "average"},
    "flhc": {},
    "flhc average": {"clusterer": "average"},
    "srfca": {"local_rounds": 10, "rounds": 10, "distance": "loss"},
    "ifca": {},
    "ifca, three starts": {"starts": 3},
    "local-kmeans": {"local_rounds": 10},
    "oneshot": {"tasks": 3, "features": "dct"},
    "fedavg": {},
}
PLAN: dict[str, Any] = {"rounds": 20, "epochs": 1, "batch_size": 50}


def measure(cell: Cell) -> dict[str, Any]:
    """One whole run."""
    name, z = cell["protocol"], cell["noise"]
    scenario = Tasks(minority=0.1) if name == "oneshot" else None
    federation = Federation.simulate(
        "fashion_mnist",
        scenario=scenario,
        clients=10 if scenario else 12,
        samples=1000,
        seed=cell["seed"],
    )
    private = (
        {"clip": 1.0, "noise": z, "dp_unit": "example"} | ({"gram_noise": z} if scenario else {})
        if z
        else {}
    )
    fitted = PROTOCOLS[name.split()[0].rstrip(",")](**{**PLAN, **OWN[name], **private}).fit(
        federation
    )
    price = fitted.ledger_.price(DELTA)
    assert fitted.agreement_ is not None
    return {
        "epsilon": price.epsilon,
        "ari": fitted.agreement_["ari"],
        "accuracy": float(np.nanmean(fitted.scores_)),
        **{way: fitted.bytes_[way] for way in ("up", "down")},
    }


def main(argv: Sequence[str] | None = None) -> Path:
    """Measure what is missing, and print."""
    chosen = options(__doc__, argv, seeds=3, minutes=20)
    cells = [
        {"protocol": p, "noise": z, "seed": s}
        for s in range(chosen.seeds)
        for p in OWN
        for z in NOISES
    ]
    sheet = Sheet("private_many", RESULTS)
    summarise(
        sheet.fill(cells, measure, chosen.minutes),
        ("protocol", "noise"),
        ("epsilon", "ari", "accuracy"),
    )
    print(sheet.path)
    return sheet.path


if __name__ == "__main__":
    main()
