"""Count how often IFCA finds the clusters from one start, and from the best of several short ones.

python -m benchmarks.clusters.starts [--seeds 20] [--full] [--minutes 10]

The data are digits with labels swapped in four clusters; 20 clients train with k = 4 for 20 or 40
rounds, those of all starts included. `--full` is the same at 80 rounds.
"""

from __future__ import annotations

from typing import Any

from benchmarks.grid import Grid, with_seeds
from benchmarks.sheet import Cell
from benchmarks.table import SEEDED
from securecluster import Federation
from securecluster.protocols import IFCA

# IFCA restarts from random models (the paper); that starts are short is not in it. By rounds, the
# number of starts, and the rounds of each; the last ones are the default
RESTARTS = {
    20: ((1, 1), (5, 2), (3, 3), (2, 5)),
    40: ((1, 1), (10, 2), (6, 3), (4, 5)),
    80: ((1, 1), (10, 2), (10, 4), (8, 5)),
}
FIRST = 200  # of the seeds
ROUNDS = {"cpu": (20, 40), "full": (80,)}


def cells(scale: str, seeds: int) -> list[Cell]:
    """Return restarts by seed.

    Args:
        scale: a key of `ROUNDS`.
        seeds: how many.
    """
    settings = []
    for rounds in ROUNDS[scale]:
        for starts, start_rounds in RESTARTS[rounds]:
            restarts = {"starts": starts, "start_rounds": start_rounds}
            settings.append({"scale": scale, "rounds": rounds, **restarts})
    return with_seeds(settings, range(FIRST, FIRST + seeds))


def measure(cell: Cell) -> dict[str, Any]:
    """Run IFCA once.

    Args:
        cell: one of `cells`.

    Returns:
        Whether the clusters are the true ones (exact), and accuracy.
    """
    names = ("rounds", "starts", "start_rounds")
    protocol = IFCA(**{name: cell[name] for name in names})
    federation = Federation.simulate("digits", seed=cell["seed"])
    fitted = protocol.fit(federation, SEEDED)
    assert fitted.agreement_ is not None
    return {"exact": fitted.agreement_["exact"], "accuracy": fitted.history_[-1]["accuracy"]}


GRID = Grid(
    __doc__,
    "starts",
    cells,
    measure,
    by=["rounds", "starts", "start_rounds"],
    values=["exact", "accuracy"],
    seeds=20,
)

if __name__ == "__main__":
    print(GRID.main())
