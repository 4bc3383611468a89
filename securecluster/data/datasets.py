"""Registry of data sets.

It contains scikit-learn's digits, image sets in parquet files or from the Hugging Face hub, text
and trajectories.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache, partial
from importlib.metadata import EntryPoint
from importlib.util import find_spec
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from securecluster.core import installed_packages
from securecluster.core.optional_packages import need
from securecluster.data.dataset import Source, Task
from securecluster.data.locations import FOLDER, folder, hub_rows, parquet_files
from securecluster.data.pools import ArrayPool, Halved, HubPool, ParquetPool, Pool
from securecluster.data.text import ag_news, shakespeare
from securecluster.data.trajectories import mobility
from securecluster.errors import UsageError

GROUP = "securecluster.data"  # entry points of installed packages


@dataclass(frozen=True)
class ImageSet:
    """Metadata of an image set on the Hugging Face hub.

    Args:
        hub: name of the set on the hub.
        classes: number of classes.
        shape: (channels, height, width) of an image.
        tasks: groups of labels.
        image: name of the image column.
        label: name of the label column.
        owner: name of the column of clients, or None.
        test: whether the set has a test split.
    """

    hub: str
    classes: int
    shape: tuple[int, int, int]
    tasks: tuple[Task, ...]
    image: str = "image"
    label: str = "label"
    owner: str | None = None
    test: bool = True


DIGITS = (Task("0-4", (0, 1, 2, 3, 4)), Task("5-9", (5, 6, 7, 8, 9)))
# The paper has five, three and two users, and "significantly" fewer samples from task to task. The
# sizes 12 : 10 : 5 are not in the paper: they divide the 36,000, 18,000 and 6,000 images of the
# three tasks among their users.
FASHION = (
    Task("clothes", (0, 1, 2, 3, 4, 6), 5, 12),
    Task("shoes", (5, 7, 9), 3, 10),
    Task("bag", (8,), 2, 5),
)
CIFAR10 = (Task("vehicles", (0, 1, 8, 9)), Task("animals", (2, 3, 4, 5, 6, 7)))
# fine labels of the coarse classes "vehicles 1" and "vehicles 2"
VEHICLES = (8, 13, 41, 48, 58, 69, 81, 85, 89, 90)
OTHERS = tuple(k for k in range(100) if k not in VEHICLES)
CIFAR100 = (Task("vehicles", VEHICLES), Task("rest", OTHERS))
CHARACTERS = (
    Task("digits", tuple(range(10))),
    Task("upper", tuple(range(10, 36))),
    Task("lower", tuple(range(36, 62))),
)

IMAGE_SETS = {
    "mnist": ImageSet("ylecun/mnist", 10, (1, 28, 28), DIGITS),
    "fashion_mnist": ImageSet("zalando-datasets/fashion_mnist", 10, (1, 28, 28), FASHION),
    "cifar10": ImageSet("uoft-cs/cifar10", 10, (3, 32, 32), CIFAR10, image="img"),
    "cifar100": ImageSet(
        "uoft-cs/cifar100", 100, (3, 32, 32), CIFAR100, image="img", label="fine_label"
    ),
    "femnist": ImageSet(
        "flwrlabs/femnist",
        62,
        (1, 28, 28),
        CHARACTERS,
        label="character",
        owner="writer_id",
        test=False,
    ),
}


@cache
def digits() -> Source:
    """Return scikit-learn's handwritten digits: 1797 images of 8 × 8, ten classes, one pool.

    The images are part of scikit-learn, and nothing is downloaded.
    """
    table = _digits_table()
    images = (table[:, :-1] / 16).astype(np.float32)  # scikit-learn's values are 0 … 16
    x = images.reshape(-1, 1, 8, 8)  # one channel
    y = table[:, -1].astype(np.int64)
    return Source("digits", 10, (1, 8, 8), ArrayPool(x, y), tasks=DIGITS)


def _digits_table() -> NDArray[np.float64]:
    """Return the pixels and the label of each of scikit-learn's digits, (1797, 65).

    Its file is read without importing scikit-learn, which takes longer to load than torch.
    """
    package = find_spec("sklearn")
    locations = package.submodule_search_locations if package else None
    for location in locations or ():
        path = Path(location, "datasets", "data", "digits.csv.gz")
        if path.is_file():
            return np.loadtxt(path, delimiter=",")
    # another version may keep it elsewhere
    from sklearn.datasets import load_digits

    bunch = load_digits()
    return np.column_stack([bunch.data, bunch.target])


def image_set(name: str) -> Source:
    """Return an image set of the Hugging Face hub.

    It is read from parquet files in the folder SECURECLUSTER_DATA if that is set, otherwise from
    the hub through `datasets`.

    Args:
        name: in `IMAGE_SETS`.

    Raises:
        UsageError: files, packages or the connection are missing, or the files have another layout
            than the hub's.
    """
    spec = IMAGE_SETS[name]
    train = _images(name, spec, "train")
    test = None
    if spec.test:
        test = _images(name, spec, "test")
    _check_labels(name, spec, train)
    if test is not None:
        _check_labels(name, spec, test)
    return Source(name, spec.classes, spec.shape, train, test, spec.tasks)


def _check_labels(name: str, spec: ImageSet, pool: Pool) -> None:
    """Raise UsageError if a pool has labels that the set on the hub does not have."""
    if not len(pool.y):
        return
    smallest = pool.y.min()
    largest = pool.y.max()
    if smallest < 0 or largest >= spec.classes:
        raise UsageError(
            f"{name} has a label outside 0 … {spec.classes - 1}: this is not the data set that "
            f"the hub calls {spec.hub}"
        )


def _images(name: str, spec: ImageSet, split: str) -> Pool:
    """Return one split of an image set.

    Args:
        name: of the set.
        spec: its metadata.
        split: "train" or "test".
    """
    data_folder = folder()
    if data_folder is not None:
        files = parquet_files(data_folder, name, spec.hub, split)
        return ParquetPool(files, spec.image, spec.label, spec.shape, spec.owner)
    columns = [spec.image, spec.label]
    if spec.owner:
        columns.append(spec.owner)
    rows = hub_rows(name, spec.hub, split, columns)
    # the pool decodes images itself, and only those of the rows that are read
    encoded_image = need("datasets").Image(decode=False)
    encoded = rows.cast_column(spec.image, encoded_image)
    return HubPool(encoded, spec.image, spec.label, spec.shape, spec.owner)


def halved(name: str, whole: Source) -> Source:
    """Return an image set at half the side.

    Args:
        name: of the result.
        whole: the set.
    """
    channels, height, width = whole.shape
    test = None if whole.test is None else Halved(whole.test)
    return replace(
        whole,
        name=name,
        shape=(channels, height // 2, width // 2),
        train=Halved(whole.train),
        test=test,
    )


def _mnist14() -> Source:
    """Return MNIST at 14 × 14."""
    return halved("mnist14", image_set("mnist"))


def _femnist14() -> Source:
    """Return FEMNIST at 14 × 14."""
    return halved("femnist14", image_set("femnist"))


def _hospitals() -> Source:
    """Return heart patients of four hospitals."""
    from securecluster.data.tables.hospitals import hospitals

    return hospitals()


SOURCES: dict[str, Callable[[], Source]] = {
    "digits": digits,
    **{name: partial(image_set, name) for name in IMAGE_SETS},
    "mnist14": _mnist14,
    "femnist14": _femnist14,
    "hospitals": _hospitals,
    "ag_news": ag_news,
    "shakespeare": shakespeare,
    "mobility": mobility,
}
# default scenarios of sets that are not in `IMAGE_SETS`
_SCENARIOS = {
    "ag_news": "topics", "shakespeare": "natural", "mobility": "natural", "femnist14": "natural",
    "hospitals": "natural",
}  # fmt: skip


# sets whose images have a mean squared norm of 700 and more; that of digits is 15, of mnist 90, of
# fashion_mnist 160
BRIGHT = frozenset({"cifar10", "cifar100", "femnist"})
# sets whose negatives have a mean squared norm of 670 and 500; that of digits is 40
DARK = frozenset({"mnist", "fashion_mnist"})

# mean number of a training sample of each set, to two digits
MEANS = {
    "digits": 0.31,
    "mnist": 0.13,
    "fashion_mnist": 0.29,
    "cifar10": 0.47,
    "cifar100": 0.48,
    "femnist": 0.96,
    "mnist14": 0.13,
    "femnist14": 0.96,
}


def is_bright(name: str, scenario: str) -> bool:
    """Return True if images are so bright that training needs a lower learning rate.

    The result is public: it depends on the names of the set and the scenario only.

    Args:
        name: of the data set.
        scenario: names of the scenario's parts joined by "+".
    """
    inverted = "inversion" in scenario.split("+")
    return name in BRIGHT or (inverted and name in DARK)


PARTS = installed_packages.Parts("data", GROUP, SOURCES, "SECURECLUSTER_SOURCES")


def source_names() -> list[str]:
    """Return the names of all data sets, those of installed packages last."""
    return PARTS.names()


def named(name: str) -> str:
    """Return the name of a data set, which is known by it from then on.

    Args:
        name: of a data set, or "module:function" of a function that returns a `Source`, where the
            module may lie in the current folder.

    Raises:
        UsageError: it cannot be imported, is no function, or has the name of another data set.
    """
    if re.fullmatch(r"[\w.]+:[\w.]+", name) and not Path(name).exists():
        return PARTS.give(name, _loaded)
    return name


def source(name: str) -> Source:
    """Return the named data set.

    Args:
        name: in `SOURCES`, or that under which an installed package declares a function, which
            takes no arguments and returns a `Source`, as an entry point of `GROUP`; or of one that
            was given by its path (`named`).

    Raises:
        UsageError: an unknown name, a set that cannot be read, or a declaration that does not lead
            to a data set.
    """
    if name in SOURCES:
        return SOURCES[name]()
    return _loaded(PARTS.point(name))()


def _loaded(point: EntryPoint) -> Callable[[], Source]:
    """Return the function of an entry point, which returns a data set of its name.

    Raises:
        UsageError: it cannot be imported, or is no such function.
    """
    declaration, made = PARTS.loaded(point)
    if not callable(made):
        raise UsageError(f"{declaration}, is no function: name one that returns a Source")

    def checked() -> Source:
        found = made()
        if not isinstance(found, Source):
            raise UsageError(
                f"{declaration}, returns no Source: return a securecluster.data.Source"
            )
        return found

    return checked


def default_scenario(name: str) -> str:
    """Return the name of a data set's default scenario.

    It is natural for sets with clients of their own, topics for sets with groups of samples, and
    label-swap for all others.
    """
    if name in _SCENARIOS:
        return _SCENARIOS[name]
    if name in IMAGE_SETS and IMAGE_SETS[name].owner:
        return "natural"
    return "label-swap"


__all__ = [
    "FOLDER",
    "IMAGE_SETS",
    "MEANS",
    "SOURCES",
    "ImageSet",
    "Source",
    "Task",
    "default_scenario",
    "digits",
    "image_set",
    "is_bright",
    "source",
]
