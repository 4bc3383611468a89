"""Count how often SR-FCA finds the true clusters without the number of clusters and without λ.

python -m benchmarks.clusters.graphs [--seeds 20]

Clusters are compared with the true ones right after ONE_SHOT (`graph`) and at the end (`refined`).
There are 20 clients of scikit-learn's digits (label swap, and one distribution for all), and of
MNIST with 200 samples each (label swap, rotation), where SECURECLUSTER_DATA or the hub has it.
Distances are the cross-cluster loss and l2. One short refinement is enough, since what is counted
is the graph of the one-shot models and what RECLUSTER and MERGE make of it. A client that the graph
leaves in no cluster counts against `graph`, and not against `refined` if it is then sent to the
right cluster.
"""

from __future__ import annotations

from typing import Any

from benchmarks.grid import counts
from benchmarks.table import SEEDED, tabulate
from securecluster import Federation, Iid, LabelSwap, Rotation
from securecluster.clustering.metrics import agreement
from securecluster.data import Scenario
from securecluster.protocols import SRFCA

CLIENTS = 20
CASES: list[tuple[str, Scenario, int | None]] = [
    ("digits", LabelSwap(), None),
    # one true cluster: a false split counts as an error, too
    ("digits", Iid(), None),
    ("mnist", LabelSwap(), 200),
    ("mnist", Rotation(), 200),
]


def measure(
    data: str, scenario: Scenario, samples: int | None, distance: str, seed: int
) -> dict[str, Any]:
    """Run SR-FCA once.

    Args:
        data: a data set's name.
        scenario: how clusters differ.
        samples: training samples of each client; None are all that it is dealt.
        distance: between models, "loss" or "l2".
        seed: of the federation and the run.

    Returns:
        Whether the clusters of the graph and those at the end are the true ones, the clients that
        the graph leaves out, λ, and the lengths of the spanning tree's edges next to λ: the longest
        one below (joined) and the shortest one above (apart).
    """
    federation = Federation.simulate(
        data, scenario=scenario, clients=CLIENTS, samples=samples, seed=seed
    )
    # λ is left out, so it follows from the one-shot models (not in the paper, where λ is given)
    fitted = SRFCA(distance=distance, rounds=5, refine=1).fit(federation, SEEDED)
    # the round of ONE_SHOT, whose line has the graph
    line = next(line for line in fitted.history_ if "lambda" in line)
    assert federation.truth is not None
    assert fitted.agreement_ is not None
    labels = _graph_labels(line["clustered"])
    cut = line["lambda"]
    joined = [edge for edge in line["edges"] if edge <= cut]
    separated = [edge for edge in line["edges"] if edge > cut]
    clustered_clients = sum(len(members) for members in line["clustered"])
    return {
        "data": data,
        "scenario": str(scenario),
        "distance": distance,
        "seed": seed,
        "graph": agreement(labels, federation.truth)["exact"],
        "refined": fitted.agreement_["exact"],
        # in clusters of fewer than t clients, which ONE_SHOT drops (Vardhan et al. 2024)
        "waiting": CLIENTS - clustered_clients,
        "lambda": f"{cut:.4g}",
        # components of the graph dist ≤ λ are those of the spanning tree's edges up to λ; here λ is
        # derived from the clusters, and serves MERGE
        "joined": f"{max(joined, default=0):.4g}",
        "apart": f"{min(separated, default=0):.4g}",
    }


def _graph_labels(clusters: list[list[int]]) -> list[int]:
    """Return each client's cluster in the graph, with a number of its own for one in no cluster.

    Args:
        clusters: members of each cluster.
    """
    clustered: dict[int, int] = {}
    for cluster, members in enumerate(clusters):
        for client in members:
            clustered[client] = cluster
    # numbers that no cluster has, so that a client without a cluster counts as an error
    first = len(clusters)
    return [clustered.get(client, first + client) for client in range(CLIENTS)]


def main() -> None:
    """Run, write, print counts."""
    options = counts(__doc__, seeds=20)
    measured = (
        [measure(data, scenario, samples, distance, seed)]
        for data, scenario, samples in CASES
        for distance in ("loss", "l2")
        for seed in range(options.seeds)
    )
    by = ("data", "scenario", "distance")
    print(tabulate("graphs", measured, by, counted=("graph", "refined")))


if __name__ == "__main__":
    main()
