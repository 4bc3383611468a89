"""Measure learning rates at which FedAvg and local training work on every data set.

python -m benchmarks.clusters.rates [--seeds 1] [--minutes 10] [--full]

The default rates of `securecluster.models.architectures` were chosen from this table. Eight clients
with 100 training samples each (images) train for 20 rounds at the default epochs and batch size,
with plain SGD at several rates. Each run gives the mean of the clients' test metric, and the mean
of the true cluster with the lowest one. `--full` has 20 clients with 200 samples and 40 rounds.
Data sets are read from SECURECLUSTER_DATA or the hub.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from benchmarks.grid import Grid, product, with_seeds
from benchmarks.sheet import Cell
from benchmarks.table import RESULTS, SEEDED
from securecluster import Federation
from securecluster.errors import UpdateError
from securecluster.protocols import FedAvg, Local

# the defaults of dense networks are among them: 0.2, and 0.03 for images of large norm
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
# data and scenarios of each network, and the methods it is trained by
NETWORKS: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "mlp": (IMAGES, ("fedavg", "local")),
    "cnn-ali": (CNN, ("fedavg",)),
}
CLIENTS = {"cpu": 8, "full": 20}
SAMPLES = {"cpu": 100, "full": 200}
ROUNDS = {"cpu": 20, "full": 40}


def cells(scale: str, seeds: int) -> list[Cell]:
    """Return data set by scenario by network by method by rate by seed.

    Args:
        scale: "cpu" or "full".
        seeds: how many.
    """
    settings: list[Cell] = []
    for model, (data_sets, methods) in NETWORKS.items():
        for data, scenarios in data_sets.items():
            settings += product(
                scale=[scale],
                model=[model],
                data=[data],
                scenario=scenarios,
                method=methods,
                lr=RATES,
            )
    return with_seeds(settings, range(seeds))


def measure(cell: Cell) -> dict[str, Any]:
    """Run one cell.

    Args:
        cell: one of `cells`.

    Returns:
        The clients' mean accuracy and that of the worst true cluster, None where training diverged.
    """
    scale = cell["scale"]
    federation = Federation.simulate(
        cell["data"],
        scenario=cell["scenario"],
        clients=CLIENTS[scale],
        samples=SAMPLES[scale],
        seed=cell["seed"],
    )
    method = METHODS[cell["method"]]
    protocol = method(model=cell["model"], lr=cell["lr"], rounds=ROUNDS[scale])
    # plain SGD diverges at some of the rates, which is a result
    try:
        scores = protocol.fit(federation, SEEDED).scores_
    except UpdateError:
        return {"accuracy": None, "worst": None}
    truth = np.array(federation.truth or (0,) * len(federation))
    clusters = []
    for cluster in np.unique(truth):
        # a rate may suit most clusters and fail in one: images of large norm need a lower rate
        cluster_scores = scores[truth == cluster]
        clusters.append(float(np.nanmean(cluster_scores)))
    # a client without test samples has no score
    accuracy = float(np.nanmean(scores))
    return {"accuracy": round(accuracy, 4), "worst": round(min(clusters), 4)}


GRID = Grid(
    __doc__,
    "rates",
    cells,
    measure,
    by=["model", "data", "scenario", "method", "lr"],
    values=["accuracy", "worst"],
    folder=RESULTS,
)

if __name__ == "__main__":
    print(GRID.main())
