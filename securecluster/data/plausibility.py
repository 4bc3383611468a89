"""Doubts about users' own data: labels, scales and columns that are probably not meant.

The scale thresholds follow `benchmarks.scales`: scikit-learn's digits, wine and breast cancer data,
standardised, six clients, 20 rounds of FedAvg with the default network. One more column of noise
does no harm up to a root mean square of 10 and breaks training on digits and wine at 20; all values
may have one of 3.9, and digits diverge at 8; digits whose samples have norm 0.16 reach an accuracy
of 0.46 to 0.62, at 0.4 of 0.85 to 0.90. The limit of 3.8 on all values is for values that are not
centred: digits reach 0.97 to 0.99 at 2.9, and 0.19 to 0.87 at 3.9.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from securecluster.data.feature_columns import listed
from securecluster.errors import UsageError

Array = NDArray[Any]

LARGE = 3.8  # root mean square of all values of the samples
LARGE_COLUMN = 10.0  # root mean square of one column among others
SMALL = 0.2  # root mean square of the norms of samples
SURE_CLASSES = 1000  # so many classes need no justification
SPARSE = 10  # beyond them: classes for each label that occurs
ROWS = 100  # fewer rows may all differ by chance
DISTINCT = 0.95  # share of rows
SITES = 3  # fewer clients may all differ by chance
SAMPLE = 1000  # rows that are looked at before all of them are


def count_classes(labels: Sequence[Array]) -> tuple[int, list[str]]:
    """Return the number of classes that clients' labels (n,) ask for, and doubts about them.

    Raises:
        UsageError: nearly all of these classes would have no sample.
    """
    every = np.concatenate(labels)
    occurring = np.unique(every)
    # negative labels are refused with their client's name
    if not len(occurring) or occurring[0] < 0:
        return 1 + max(0, int(every.max(initial=0))), []
    classes, kinds, lowest = 1 + int(occurring[-1]), len(occurring), int(occurring[0])
    cure = f"number labels from 0 without gaps, or pass classes={classes} if that is meant"
    if classes > max(SURE_CLASSES, SPARSE * kinds):
        raise UsageError(
            f"the largest label is {classes - 1}, and only {kinds} different labels occur: {cure}"
        )
    doubts = []
    if lowest > 0:
        doubts.append(f"labels start at {lowest}, so {classes} classes are learned: {cure}")
    elif classes > 2 * kinds:
        doubts.append(f"{classes} classes are learned, and only {kinds} of them occur: {cure}")
    if kinds >= ROWS and 2 * kinds > len(every):
        doubts.append(
            f"{len(every)} samples have {kinds} different labels: labels are classes, not numbers "
            "to predict, so group them"
        )
    return classes, doubts


def feature_doubts(samples: Sequence[Array], names: Sequence[str] | None, leave: str) -> list[str]:
    """Return doubts about clients' features.

    Args:
        samples: an array (n, …) of each client, before any cast to single precision.
        names: the names of the columns of samples (n, k).
        leave: in words, how a user leaves a column out.
    """
    if samples[0].ndim != 2:
        return _image_doubts(samples)
    width = samples[0].shape[1]
    known = names if names is not None and len(names) == width else None
    called = [repr(name) for name in known] if known else [str(k) for k in range(width)]
    rows, sites = _id_columns(samples)
    doubts = []
    for found, why in (
        (rows, "a whole number that differs in nearly every row"),
        (sites, "one whole number for each client"),
    ):
        if found:
            doubts.append(f"{_subject(called, found)} like an id ({why}): {leave}")
    return doubts + _scale_doubts(samples, called, {*rows, *sites})


def _subject(called: Sequence[str], found: Sequence[int]) -> str:
    columns = listed([called[k] for k in found])
    return f"columns {columns} look" if len(found) > 1 else f"column {columns} looks"


def _scale_doubts(samples: Sequence[Array], called: Sequence[str], ids: set[int]) -> list[str]:
    total = sum(len(x) for x in samples)
    squares = sum(np.square(x.astype(np.float64)).sum(axis=0) for x in samples) / total
    root = np.sqrt(squares)
    rest = [k for k in range(len(root)) if k not in ids]
    everything = float(np.sqrt(squares[rest].mean())) if rest else 0.0
    limit = LARGE if everything > LARGE else LARGE_COLUMN
    large = [k for k in rest if root[k] > limit]
    if large:
        sizes = listed([f"{root[k]:.3g}" for k in large])
        columns = listed([called[k] for k in large])
        return [
            f"the root mean square of column{'s' * (len(large) > 1)} {columns} is {sizes}, and "
            "above"
            f" {limit:g} a network often learns nothing: standardise the features, (x - mean) / std"
        ]
    return _small_doubts(float(np.sqrt(squares.sum())))


def _image_doubts(samples: Sequence[Array]) -> list[str]:
    total = sum(x.size for x in samples)
    squares = sum(float(np.square(x.astype(np.float64)).sum()) for x in samples) / max(1, total)
    root = squares**0.5
    if root > LARGE:
        largest = max(float(np.abs(x).max(initial=0)) for x in samples)
        return [
            f"the root mean square of the samples' values is {root:.3g}, and above {LARGE:g} a "
            "network"
            f" often learns nothing: divide them by the largest, {largest:g}, or standardise them"
        ]
    return _small_doubts(root * float(np.prod(samples[0].shape[1:])) ** 0.5)


def _small_doubts(norm: float) -> list[str]:
    if not 0 < norm < SMALL:
        return []
    return [
        f"the root mean square of the samples' norms is {norm:.2g}, and below {SMALL:g} a network "
        "hardly learns: standardise the features, (x - mean) / std"
    ]


def _id_columns(samples: Sequence[Array]) -> tuple[list[int], list[int]]:
    """Return the columns that look like ids of rows, and those that look like ids of clients."""
    sites = _client_ids(samples)
    rows = [k for k in _row_ids(samples) if k not in sites]
    return rows, sites


def _client_ids(samples: Sequence[Array]) -> list[int]:
    """Return the columns with one whole number in each client, another one in every client."""
    if len(samples) < SITES or min(len(x) for x in samples) < 2:
        return []
    first = np.stack([x[0] for x in samples]).astype(np.float64)  # (clients, k)
    candidates = np.flatnonzero(_whole(first).all(axis=0))
    different = [k for k in candidates.tolist() if len(np.unique(first[:, k])) == len(samples)]
    return [k for k in different if all(bool((x[:, k] == x[0, k]).all()) for x in samples)]


def _row_ids(samples: Sequence[Array]) -> list[int]:
    """Return the columns with a whole number that differs in nearly every row."""
    total = sum(len(x) for x in samples)
    if total < ROWS:
        return []
    step = max(1, total // SAMPLE)
    # a few rows of all columns
    some = np.concatenate([x[::step] for x in samples]).astype(np.float64)
    candidates = [k for k in range(some.shape[1]) if _nearly_distinct(some[:, k])]
    return [k for k in candidates if _nearly_distinct(np.concatenate([x[:, k] for x in samples]))]


def _nearly_distinct(given: Array) -> bool:
    values = given.astype(np.float64)
    if not _whole(values).all():
        return False
    return len(np.unique(values)) >= DISTINCT * len(values)


def _whole(values: Array) -> Array:
    """Return which values are whole numbers of less than 2^53.

    Beyond 2^53 every float is a whole number, and that says nothing.
    """
    found: Array = (values == np.floor(values)) & (np.abs(values) < 2.0**53)
    return found
