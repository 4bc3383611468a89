"""Run every protocol on five scenarios of MNIST.

python -m benchmarks.clusters.protocols [--seeds 3] [--full] [--minutes 10]

The table has agreement with the true clusters, accuracy before and after clusters, bytes and
seconds. There are 20 clients with 200 training samples each (`--full`: all, 3000). All protocols
have CFL's default network and learning rate, and their own default number of rounds: 40; for SR-FCA
that counts local training and refinements. IFCA (with its default ten starts), Local-KMeans and the
random clusters are given the true number of clusters, and four for IID clients. One-shot clustering
compares features and cannot see swapped labels. MNIST is read from SECURECLUSTER_DATA or the hub.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from benchmarks.grid import Grid, product, with_seeds
from benchmarks.sheet import Cell
from benchmarks.table import SEEDED
from securecluster import Federation, Iid, LabelSwap, Pathological, Rotation, Tasks
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

# each with the number of clusters that protocols with a `k` are given
SCENARIOS: dict[str, tuple[Any, int]] = {
    # 20 clients in four clusters (Sattler et al. 2019)
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
# training samples of each of 20 clients; None are all of MNIST's, 3000 each
SAMPLES = {"cpu": 200, "full": None}


def cells(scale: str, seeds: int) -> list[Cell]:
    """Return protocol by scenario by seed.

    Args:
        scale: "cpu" or "full".
        seeds: how many.
    """
    settings = product(
        scale=[scale], data=["mnist"], clients=[20], scenario=SCENARIOS, protocol=PROTOCOLS
    )
    return with_seeds(settings, range(seeds))


def measure(cell: Cell) -> dict[str, Any]:
    """Run one protocol.

    Args:
        cell: one of `cells`.

    Returns:
        ari, exact, the number of clusters, accuracy before the first clusters and at the end, the
        share of clients that reach the target accuracy (at_99), bytes, and seconds of the fit.
    """
    scenario, k = SCENARIOS[cell["scenario"]]
    federation = Federation.simulate(
        cell["data"],
        scenario=scenario,
        clients=cell["clients"],
        samples=SAMPLES[cell["scale"]],
        seed=cell["seed"],
    )
    protocol = PROTOCOLS[cell["protocol"]]()
    # k is an oracle here: CFL, FL+HC and SR-FCA find the number of clusters themselves
    if "k" in protocol.get_params():
        protocol.set_params(k=k)
    fitted = protocol.fit(federation, SEEDED)
    assert fitted.agreement_ is not None
    clusters = len(set(fitted.labels_))
    # of runs that ended in several clusters only: else the two accuracies are of one model
    before = None
    if clusters > 1:
        before = _accuracy_before(fitted.history_)
    last_line = fitted.history_[-1]
    return {
        "ari": fitted.agreement_["ari"],
        "exact": fitted.agreement_["exact"],
        "clusters": clusters,
        "accuracy_before": before,
        "accuracy": last_line["accuracy"],
        "at_99": last_line["at_target"],
        "bytes": fitted.bytes_["up"] + fitted.bytes_["down"],
        "bytes_servers": fitted.bytes_["servers"],
        "fit_seconds": fitted.seconds_,
    }


def _accuracy_before(history: Sequence[dict[str, Any]]) -> float | None:
    """Return the accuracy of the last model that all clients had in common.

    Args:
        history: lines of a run, one a round.

    Returns:
        None if there was no such model.
    """
    for line in history:
        # a split's round still has the joint model
        if line.get("splits"):
            accuracy: float | None = line["accuracy"]
            return accuracy
    before = None
    for line in history:
        if line["clusters"] == 1:
            before = line["accuracy"]
    return before


GRID = Grid(
    __doc__,
    "protocols",
    cells,
    measure,
    by=["scenario", "protocol"],
    values=["ari", "accuracy_before", "accuracy", "bytes", "fit_seconds"],
    full="last",
)

if __name__ == "__main__":
    print(GRID.main())
