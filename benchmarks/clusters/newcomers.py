"""Count how many clients that join a finished run are sent to their true cluster, plain and masked.

python -m benchmarks.clusters.newcomers [--seeds 3] [--full] [--minutes 10]

20 clients run, and 20 others of the same clusters join (MNIST: 100 training samples each, with
`--full` 1500). A newcomer counts as right if its true cluster is that of most clients with its
label. One-shot clustering compares features, so its clients hold tasks; clients of the other
protocols have swapped labels or turned images. MNIST is read from SECURECLUSTER_DATA or the hub.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from benchmarks.grid import Grid, product, with_seeds
from benchmarks.sheet import Cell
from benchmarks.table import SEEDED
from securecluster import Federation, LabelSwap, Rotation, Tasks
from securecluster.core.client_names import at
from securecluster.protocols import CFL, FLHC, IFCA, SRFCA, OneShot

RUNS = 20
LATER = 20
PROTOCOLS: dict[str, Any] = {p.name: p for p in (CFL, FLHC, IFCA, SRFCA, OneShot)}
# four clusters of swapped labels as in Sattler et al. 2019, and four turns by multiples of 90° as
# in Vardhan et al. 2024
SCENARIOS: dict[str, Any] = {
    "label-swap": LabelSwap(clusters=4),
    "rotation": Rotation(clusters=4),
    "tasks": Tasks(),
}
MASKS = ("none", "permutation", "rotation")
SAMPLES: dict[str, dict[str, int | None]] = {
    "digits": {"cpu": None, "full": None},
    # all 60,000 training images among 40 clients are 1500 each
    "mnist": {"cpu": 100, "full": 1500},
}


def cells(scale: str, seeds: int) -> list[Cell]:
    """Return data by scenario by protocol by mask by seed.

    Args:
        scale: "cpu" or "full".
        seeds: how many.
    """
    settings = []
    cases = product(scale=[scale], data=SAMPLES, scenario=SCENARIOS, protocol=PROTOCOLS, mask=MASKS)
    for case in cases:
        # one-shot clustering cannot see swapped labels: it has tasks instead, and no other has
        if (case["protocol"] == "oneshot") == (case["scenario"] == "tasks"):
            settings.append(case)
    return with_seeds(settings, range(seeds))


def measure(cell: Cell) -> dict[str, Any]:
    """Run a protocol, and assign the clients that join later.

    Args:
        cell: one of `cells`.

    Returns:
        How many newcomers are sent to their true cluster (right), and of how many; whether the
        run's own clusters are the true ones; and a newcomer's bytes up and down.
    """
    all_clients = Federation.simulate(
        cell["data"],
        scenario=SCENARIOS[cell["scenario"]],
        clients=RUNS + LATER,
        samples=SAMPLES[cell["data"]][cell["scale"]],
        seed=cell["seed"],
    )
    federation = all_clients.select(map(at, range(RUNS)))
    # of the same draw, so that both halves share clusters and no samples
    newcomers = all_clients.select(map(at, range(RUNS, RUNS + LATER)))
    protocol = PROTOCOLS[cell["protocol"]](mask=cell["mask"])
    fitted = protocol.fit(federation, SEEDED)
    assert federation.truth is not None
    assert newcomers.truth is not None
    assert fitted.agreement_ is not None
    # labels are arbitrary, so a newcomer is compared with its cluster's majority
    majority = _majorities(fitted.labels_.tolist(), federation.truth)
    labels = fitted.join(newcomers).tolist()
    right = 0
    for label, truth in zip(labels, newcomers.truth, strict=True):
        right += majority[label] == truth
    joined_bytes = fitted.joined_.bytes
    return {
        "right": right,
        "of": LATER,
        "run_exact": fitted.agreement_["exact"],
        "bytes_each_up": joined_bytes["up"] // LATER,
        "bytes_each_down": joined_bytes["down"] // LATER,
    }


def _majorities(labels: Sequence[int], truth: Sequence[int]) -> dict[int, int]:
    """Return the true cluster of most clients in each cluster, by the cluster's label.

    Args:
        labels: the clients' clusters.
        truth: the clients' true clusters.
    """
    true_clusters: dict[int, Counter[int]] = {}
    for label, true_cluster in zip(labels, truth, strict=True):
        counter = true_clusters.setdefault(label, Counter())
        counter[true_cluster] += 1
    majorities = {}
    for label, counter in true_clusters.items():
        # of equally frequent ones, the first that occurred
        ((true_cluster, _),) = counter.most_common(1)
        majorities[label] = true_cluster
    return majorities


GRID = Grid(
    __doc__,
    "newcomers",
    cells,
    measure,
    by=["data", "scenario", "protocol", "mask"],
    values=["right", "run_exact", "bytes_each_up", "bytes_each_down"],
    full="last",
)

if __name__ == "__main__":
    print(GRID.main())
