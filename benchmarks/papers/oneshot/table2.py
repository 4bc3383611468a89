"""Measure R between users of two data sets (Ali & Arafa 2024, Table II).

python -m benchmarks.papers.oneshot.table2 [--seeds 6] [--full] [--minutes 10]

The users have vehicles of CIFAR-10, vehicles of CIFAR-100, and the other classes of CIFAR-100.

The paper: R of user 1 (CIFAR-10 vehicles) is 0.62 with user 2 (CIFAR-100 vehicles) and 0.39 with
user 3 (its other classes), with an ImageNet ResNet-18 as Φ.

Not in the paper: vehicles of CIFAR-100 are the fine labels of its two coarse classes of that name;
users have 250 samples (`--full` 5000, all there are of user 2's) and share p = 5 eigenvectors. pca
is left out, since its public data, CIFAR-100, are the users' own here. resnet18 runs where
torchvision and its weights are at hand. Images are read from SECURECLUSTER_DATA or the hub; the
scale for a CPU needs only a subset of CIFAR-100, 25 images a class.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.grid import Grid, product
from benchmarks.papers.oneshot.runs import mapped, matrices, usable
from benchmarks.sheet import Cell
from securecluster.core.randomness import Randomness
from securecluster.data.datasets import source
from securecluster.errors import UsageError

# 5000 are all samples of vehicles in CIFAR-100
SAMPLES = {"cpu": 250, "full": 5000}
# users 1, 2 and 3 of Table II
USERS = (("cifar10", "vehicles"), ("cifar100", "vehicles"), ("cifar100", "rest"))
# without pca, whose public data would be the users' own
FEATURES = ("identity", "conv", "resnet18")


def cells(scale: str, seeds: int) -> list[Cell]:
    """Return features by seed."""
    return product(
        scale=[scale],
        samples=[SAMPLES[scale]],
        vectors=[5],  # not in the paper
        paper=["0.62 with user 2, 0.39 with user 3"],
        features=FEATURES,
        seed=range(seeds),
    )


def samples(data: str, task: str, count: int, seed: int) -> NDArray[np.float32]:
    """Draw training samples with a task's labels.

    Args:
        data: the data set.
        task: the task's name.
        count: the number of samples.
        seed: the seed of the draw.

    Raises:
        UsageError: the data set has fewer samples of this task.
    """
    data_set = source(data)
    labels_of = {t.name: t.labels for t in data_set.tasks}
    in_task = np.isin(data_set.train.y, labels_of[task])
    rows = np.flatnonzero(in_task)
    if len(rows) < count:
        raise UsageError(
            f"{data} here has {len(rows)} training samples of {task}, and {count} are wanted: use "
            "the whole data set"
        )
    rng = Randomness(seed).generator("table2", data, task)
    drawn = rng.permutation(rows)[:count]
    return data_set.train.read(np.sort(drawn))


def measure(cell: Cell) -> dict[str, Any]:
    """Return R of the three pairs of users; user 1 should be nearer to user 2 than to user 3.

    Args:
        cell: the feature map, samples, eigenvectors and seed.
    """
    seed = cell["seed"]
    count = cell["samples"]
    users = [samples(data, task, count, seed) for data, task in USERS]
    features = mapped(users, cell["features"], "cifar10", seed)
    (r,) = matrices(features, (cell["vectors"],))
    r12 = r[0, 1]
    r13 = r[0, 2]
    r23 = r[1, 2]
    return {"R12": r12, "R13": r13, "R23": r23, "nearer": bool(r12 > r13)}


GRID = Grid(
    __doc__,
    "oneshot_table2",
    cells,
    measure,
    by=["features"],
    values=["R12", "R13", "R23", "nearer"],
    seeds=6,
    full="last",
    measurable=usable,
)

if __name__ == "__main__":
    print(GRID.main())
