"""Count how often IFCA finds the clusters from one start, and from the best of several short ones.

python -m benchmarks.clusters.starts [--seeds 20] [--full] [--minutes 10]

The data are digits with labels swapped in four clusters; 20 clients train for 20 rounds with k = 4.
`--full` is the same at 40 rounds.
"""

from __future__ import annotations

from typing import Any

from benchmarks.grid import Grid, with_seeds
from benchmarks.sheet import Cell
from benchmarks.table import SEEDED
from securecluster import Federation
from securecluster.protocols import IFCA

# IFCA restarts from random models (the paper); that starts are short is not in it. 10 starts of 5
# rounds are the default: 19 of 20 runs exact, and 14 from a single start
RESTARTS = ((1, 1), (10, 3), (10, 5))  # the number of starts, and rounds of each
ROUNDS = {"cpu": 20, "full": 40}


def cells(scale: str, seeds: int) -> list[Cell]:
    """Return restarts by seed.

    Args:
        scale: a key of `ROUNDS`.
        seeds: how many.
    """
    settings = []
    for starts, start_rounds in RESTARTS:
        restarts = {"starts": starts, "start_rounds": start_rounds}
        settings.append({"scale": scale, "rounds": ROUNDS[scale], **restarts})
    return with_seeds(settings, range(seeds))


def measure(cell: Cell) -> dict[str, Any]:
    """Run IFCA once.

    Args:
        cell: one of `cells`.

    Returns:
        Whether the clusters are the true ones (exact), accuracy, and bytes up and down.
    """
    names = ("rounds", "starts", "start_rounds")
    protocol = IFCA(**{name: cell[name] for name in names})
    federation = Federation.simulate("digits", seed=cell["seed"])
    fitted = protocol.fit(federation, SEEDED)
    assert fitted.agreement_ is not None
    return {
        "exact": fitted.agreement_["exact"],
        "accuracy": fitted.history_[-1]["accuracy"],
        # those of all starts included: more starts cost bytes
        "bytes": fitted.bytes_["up"] + fitted.bytes_["down"],
    }


GRID = Grid(
    __doc__,
    "starts",
    cells,
    measure,
    by=["rounds", "starts", "start_rounds"],
    values=["exact", "accuracy", "bytes"],
    seeds=20,
)

if __name__ == "__main__":
    print(GRID.main())
