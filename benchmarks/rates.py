"""Learning rates at which FedAvg and training alone work on every data set: where `networks.RATES`
comes from.

python -m securecluster.benchmarks.rates [--seeds 1] [--minutes 10] [--full]

Eight clients with 100 training samples each (images), 20 rounds at the default epochs and batch
size, plain SGD at several rates. Of each run: the mean of clients' test metric, and that of the
true cluster that does worst. `--full` has 20 clients with 200 samples. Data sets are read from
SECURECLUSTER_DATA or the hub.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from securecluster import Federation
from securecluster.benchmarks.papers.sheet import Cell, Sheet, options, summarise
from securecluster.benchmarks.table import RESULTS
from securecluster.errors import UpdateError
from securecluster.protocols import FedAvg, Local

RATES = (0.01, 0.03, 0.06, 0.1, 0.2)
METHODS: dict[str, Any] = {"fedavg": FedAvg, "local": Local}
IMAGES = {
    "digits": ("iid", "label-swap", "inversion"),
    "mnist": ("iid", "label-swap", "inversion"),
    "fashion_mnist": ("iid", "label-swap", "inversion"),
    "cifar10": ("iid", "label-swap", "inversion"),
    "cifar100": ("iid", "inversion"),
    "femnist": ("natural", "label-swap", "inversion"),
}
CNN = {"mnist": ("label-swap", "inversion"), "femnist": ("natural",), "cifar10": ("iid",)}
CLIENTS = {"cpu": 8, "full": 20}
SAMPLES = {"cpu": 100, "full": 200}
ROUNDS = {"cpu": 20, "full": 40}


def cells(scale: str, seeds: int) -> list[Cell]:
    """Return data set by scenario by network by method by rate by seed."""
    dense = [
        ("mlp", data, scenario) for data, scenarios in IMAGES.items() for scenario in scenarios
    ]
    convolved = [
        ("cnn-ali", data, scenario) for data, scenarios in CNN.items() for scenario in scenarios
    ]
    found: list[Cell] = []
    for seed in range(seeds):
        for model, data, scenario in dense + convolved:
            for method in METHODS if model == "mlp" else ("fedavg",):
                for lr in RATES:
                    cell = {"scale": scale, "model": model, "data": data, "scenario": scenario}
                    found.append({**cell, "method": method, "lr": lr, "seed": seed})
    return found


def measure(cell: Cell) -> dict[str, Any]:
    """Run one cell; its accuracies are empty where training diverged."""
    scale = cell["scale"]
    federation = Federation.simulate(
        cell["data"],
        scenario=cell["scenario"],
        clients=CLIENTS[scale],
        samples=SAMPLES[scale],
        seed=cell["seed"],
    )
    made = METHODS[cell["method"]](model=cell["model"], lr=cell["lr"], rounds=ROUNDS[scale])
    try:
        scores = made.fit(federation).scores_
    except UpdateError:
        return {"accuracy": None, "worst": None}
    truth = np.array(federation.truth or (0,) * len(federation))
    clusters = [float(np.nanmean(scores[truth == c])) for c in np.unique(truth)]
    return {"accuracy": round(float(np.nanmean(scores)), 4), "worst": round(min(clusters), 4)}


def main(argv: Sequence[str] | None = None) -> Path:
    """Measure what is missing, and print."""
    chosen, sheet = options(__doc__, argv), Sheet("rates", RESULTS)
    rows = sheet.fill(cells(chosen.scale, chosen.seeds), measure, chosen.minutes)
    summarise(rows, ["model", "data", "scenario", "method", "lr"], ["accuracy", "worst"])
    return sheet.path


if __name__ == "__main__":
    print(main())
