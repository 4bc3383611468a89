"""Measure R of five CIFAR-10 users with two tasks for several feature maps.

This is Table I of Ali & Arafa 2024.

python -m benchmarks.papers.oneshot.table1 [--seeds 6] [--full] [--minutes 10]

The paper: users 1 and 2 have vehicles, users 3 to 5 animals; Φ is an ImageNet ResNet-18 up to its
average pool; R is 0.97 to 0.98 within a task and 0.31 to 0.32 across. It prints neither the number
of samples nor that of eigenvectors.

Here users have 1000 samples (`--full` 5000) and share p = 5 eigenvectors, with and without the 10 %
minority that the paper's training has. pca takes CIFAR-100 as its public data. resnet18 runs where
torchvision and its weights are at hand; else its rows have the status "not run". Images are read
from SECURECLUSTER_DATA or the hub.
"""

from __future__ import annotations

from itertools import product
from typing import Any

from benchmarks.grid import Grid
from benchmarks.papers.oneshot.runs import by_task, dealt, judged, mapped, matrices, usable
from benchmarks.sheet import Cell
from securecluster import Federation
from securecluster.data.scenarios import Tasks

SAMPLES = {"cpu": 1000, "full": 5000}  # not in the paper
USERS = (2, 3)  # of each task
VECTORS = 5  # not in the paper
# resnet18 is the paper's
FEATURES = ("identity", "pca", "conv", "resnet18")


def cells(scale: str, seeds: int) -> list[Cell]:
    """Return features by minority by seed.

    Args:
        scale: "cpu" or "full".
        seeds: the number of seeds.
    """
    fixed = {
        "scale": scale,
        "data": "cifar10",
        "samples": SAMPLES[scale],
        "vectors": VECTORS,
        "paper": "0.97 within, 0.31 across",
    }
    settings: list[Cell] = []
    # Table I mentions no minority; 0.1 is that of the paper's training
    for features, minority, seed in product(FEATURES, (0.0, 0.1), range(seeds)):
        varied = {"minority": minority, "features": features, "seed": seed}
        settings.append({**fixed, **varied})
    return settings


def measure(cell: Cell) -> dict[str, Any]:
    """Return R's values within and across tasks, and R itself, row by row, first task first.

    Args:
        cell: the feature map, and the setting of the federation.
    """
    federation = Federation.simulate(
        dealt(cell["data"], USERS),
        scenario=Tasks(minority=cell["minority"]),
        clients=sum(USERS),
        samples=cell["samples"],
        seed=cell["seed"],
    )
    shards, truth = by_task(federation)
    inputs = [shard.x for shard in shards]
    features = mapped(inputs, cell["features"], cell["data"], cell["seed"])
    (r,) = matrices(features, (cell["vectors"],))
    dimension = features[0].shape[1]
    return {"dimension": dimension, **judged(r, truth), "R": r.flatten()}


GRID = Grid(
    __doc__,
    "oneshot_table1",
    cells,
    measure,
    by=["features", "minority"],
    values=["within", "across", "exact", "exact_without_T"],
    seeds=6,
    full="last",
    measurable=usable,
)

if __name__ == "__main__":
    print(GRID.main())
