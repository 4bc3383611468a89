"""Where samples come from: scikit-learn's digits, and image sets in parquet files or from the Hugging Face hub."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path

import numpy as np

from securecluster.data.pools import ArrayPool, HubPool, ParquetPool, Pool, need
from securecluster.errors import UsageError, unknown
from securecluster.objectives import CLASSIFICATION, Objective

FOLDER = "SECURECLUSTER_DATA"


@dataclass(frozen=True)
class Task:
    """A group of labels that clients learn together (Ali & Arafa 2024); relative number of clients, and of samples per client."""

    name: str
    labels: tuple[int, ...]
    clients: float = 1
    samples: float = 1


@dataclass(frozen=True)
class Source:
    """A data set: a pool to train on and, where the set has an official one, a pool to test on.

    Samples have `shape`, images (channels, height, width) with values in [0, 1]; labels lie in 0 … classes − 1. Other objectives than
    classification have other samples and targets, and `classes` is the number of outputs: words, or coordinates.
    """

    name: str
    classes: int
    shape: tuple[int, ...]
    train: Pool
    test: Pool | None = None
    tasks: tuple[Task, ...] = ()
    objective: Objective = CLASSIFICATION

    @property
    def is_image(self) -> bool:
        """Whether samples are images (channels, height, width)."""
        return len(self.shape) == 3


@dataclass(frozen=True)
class ImageSet:
    """An image set on the hub: names of its columns, and what is known of it."""

    hub: str
    classes: int
    shape: tuple[int, int, int]
    tasks: tuple[Task, ...]
    image: str = "image"
    label: str = "label"
    owner: str | None = None
    test: bool = True


DIGITS = (Task("0-4", (0, 1, 2, 3, 4)), Task("5-9", (5, 6, 7, 8, 9)))
# The paper has five, three and two users and "significantly" fewer samples from task to task. The sizes 12 : 10 : 5 are ours: so many
# samples does each user get when the 36,000, 18,000 and 6,000 images of the three tasks are dealt to their users.
FASHION = (Task("clothes", (0, 1, 2, 3, 4, 6), 5, 12), Task("shoes", (5, 7, 9), 3, 10), Task("bag", (8,), 2, 5))
CIFAR10 = (Task("vehicles", (0, 1, 8, 9)), Task("animals", (2, 3, 4, 5, 6, 7)))
VEHICLES = (8, 13, 41, 48, 58, 69, 81, 85, 89, 90)  # the fine labels of the coarse classes "vehicles 1" and "vehicles 2"
CIFAR100 = (Task("vehicles", VEHICLES), Task("rest", tuple(k for k in range(100) if k not in VEHICLES)))
CHARACTERS = (Task("digits", tuple(range(10))), Task("upper", tuple(range(10, 36))), Task("lower", tuple(range(36, 62))))

IMAGE_SETS = {
    "mnist": ImageSet("ylecun/mnist", 10, (1, 28, 28), DIGITS),
    "fashion_mnist": ImageSet("zalando-datasets/fashion_mnist", 10, (1, 28, 28), FASHION),
    "cifar10": ImageSet("uoft-cs/cifar10", 10, (3, 32, 32), CIFAR10, image="img"),
    "cifar100": ImageSet("uoft-cs/cifar100", 100, (3, 32, 32), CIFAR100, image="img", label="fine_label"),
    "femnist": ImageSet("flwrlabs/femnist", 62, (1, 28, 28), CHARACTERS, label="character", owner="writer_id", test=False),
}


@cache
def digits() -> Source:
    """scikit-learn's bundled handwritten digits: 1797 images of 8 × 8, ten classes, one pool; nothing is downloaded."""
    from sklearn.datasets import load_digits

    bunch = load_digits()
    pool = ArrayPool((bunch.images / 16).astype(np.float32)[:, None], bunch.target.astype(np.int64))
    return Source("digits", 10, (1, 8, 8), pool, tasks=DIGITS)


def image_set(name: str) -> Source:
    """An image set: parquet files under the folder SECURECLUSTER_DATA where that is set, else the hub through `datasets`.

    Raises:
        UsageError: files, packages or the connection are missing, or the files are not in the hub's layout.
    """
    spec, folder = IMAGE_SETS[name], os.environ.get(FOLDER)
    pool = partial(_parquet, name, spec, Path(folder)) if folder else partial(_hub, name, spec)
    train, test = pool("train"), pool("test") if spec.test else None
    for part in (train, test):
        if part is not None and len(part.y) and not 0 <= part.y.min() <= part.y.max() < spec.classes:
            raise UsageError(f"{name} has a label outside 0 … {spec.classes - 1}: this is not the data set that the hub calls {spec.hub}")
    return Source(name, spec.classes, spec.shape, train, test, spec.tasks)


def _parquet(name: str, spec: ImageSet, folder: Path, split: str) -> Pool:
    files = sorted(p for pattern in (f"{split}.parquet", f"{split}-*.parquet") for p in (folder / name).rglob(pattern))
    if not files:
        raise UsageError(
            f"{FOLDER} is {folder}, where no {name}/{split}-*.parquet lies: put {spec.hub} there, or unset {FOLDER} to load it from the hub"
        )
    return ParquetPool(tuple(files), spec.image, spec.label, spec.shape, spec.owner)


def _hub(name: str, spec: ImageSet, split: str) -> Pool:
    datasets = need("datasets")
    try:
        rows = datasets.load_dataset(spec.hub, split=split)
    except Exception as error:  # a registry's, a server's and a file system's errors have no common base
        raise UsageError(
            f"{name} could not be loaded from the hub as {spec.hub!r} ({type(error).__name__}): "
            f"check the connection, or set {FOLDER} to a folder that holds {name}/{split}-*.parquet"
        ) from error
    for column in filter(None, (spec.image, spec.label, spec.owner)):
        if column not in rows.column_names:
            raise unknown(f"column of {spec.hub}", column, rows.column_names)
    rows = rows.cast_column(spec.image, datasets.Image(decode=False))
    return HubPool(rows, spec.image, spec.label, spec.shape, spec.owner)


SOURCES: dict[str, Callable[[], Source]] = {"digits": digits, **{name: partial(image_set, name) for name in IMAGE_SETS}}


def source(name: str) -> Source:
    """The named data set.

    Raises:
        UsageError: an unknown name, or a set that cannot be read.
    """
    if name not in SOURCES:
        raise unknown("data", name, SOURCES)
    return SOURCES[name]()


def default_scenario(name: str) -> str:
    """The scenario a data set is dealt in unless another is named: natural where it has clients of its own, else label-swap."""
    return "natural" if name in IMAGE_SETS and IMAGE_SETS[name].owner else "label-swap"


__all__ = ["FOLDER", "IMAGE_SETS", "SOURCES", "ImageSet", "Source", "Task", "default_scenario", "digits", "image_set", "source"]
