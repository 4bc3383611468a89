"""Measure what comparing a sample of the clients costs in accuracy of the clusters.

python -m benchmarks.clusters.landmarks [--seeds 3] [--minutes 8]

100 clients of MNIST with 100 samples each: four groups with swapped labels, or, for `oneshot`, two
tasks. Every protocol compares all pairs, and then 25 and 12 landmarks.
"""

from __future__ import annotations

from typing import Any

from benchmarks.grid import Grid, product, with_seeds
from benchmarks.sheet import Cell
from benchmarks.table import RESULTS, SEEDED
from securecluster import Federation
from securecluster.protocols.registry import protocol_class

CLIENTS = 100
SAMPLES = 100
# rounds that reach the clustering; the number of tasks is given
OWN: dict[str, dict[str, Any]] = {
    "flhc": {"rounds": 11, "pre_rounds": 10},
    "cfl": {"rounds": 30},
    "oneshot": {"rounds": 1, "tasks": 2},
    "srfca": {"rounds": 5, "local_rounds": 10},
}
COMPARED: tuple[int, ...] = (CLIENTS, 25, 12)


def measure(cell: Cell) -> dict[str, Any]:
    """Run one protocol.

    Args:
        cell: a protocol, the number of landmarks, and a seed.

    Returns:
        ari, seconds, and bytes up and down.
    """
    name = cell["protocol"]
    scenario = "tasks" if name == "oneshot" else "label-swap"
    federation = Federation.simulate(
        "mnist", scenario=scenario, clients=CLIENTS, samples=SAMPLES, seed=cell["seed"]
    )
    params = {"model": "linear", "landmarks": cell["landmarks"], **OWN[name]}
    protocol = protocol_class(name)(**params)
    fitted = protocol.fit(federation, SEEDED)
    assert fitted.agreement_ is not None
    return {
        "ari": fitted.agreement_["ari"],
        "up": fitted.bytes_["up"],
        "down": fitted.bytes_["down"],
    }


def cells(scale: str, seeds: int) -> list[Cell]:
    """Return protocol by landmarks by seed; there is one scale."""
    return with_seeds(product(protocol=OWN, landmarks=COMPARED), range(seeds))


GRID = Grid(
    __doc__,
    "landmarks",
    cells,
    measure,
    by=["protocol", "landmarks"],
    values=["ari", "down"],
    minutes=8.0,
    folder=RESULTS,
)

if __name__ == "__main__":
    print(GRID.main())
