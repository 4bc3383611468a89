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
    lowest = int(occurring[0])
    classes = 1 + int(occurring[-1])
    kinds = len(occurring)
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
    called = _column_names(samples[0].shape[1], names)
    rows, sites = _id_columns(samples)
    reasons = (
        (rows, "a whole number that differs in nearly every row"),
        (sites, "one whole number for each client"),
    )
    doubts = []
    for columns, reason in reasons:
        if columns:
            doubts.append(f"{_subject(called, columns)} like an id ({reason}): {leave}")
    return doubts + _scale_doubts(samples, called, {*rows, *sites})


def _column_names(width: int, names: Sequence[str] | None) -> list[str]:
    """Return the names of columns for a sentence: their numbers where they have no names."""
    if names and len(names) == width:
        return [repr(name) for name in names]
    return [str(k) for k in range(width)]


def _subject(called: Sequence[str], columns: Sequence[int]) -> str:
    """Return the subject of a sentence about columns, and its verb."""
    names = listed([called[k] for k in columns])
    if len(columns) > 1:
        return f"columns {names} look"
    return f"column {names} looks"


def _scale_doubts(samples: Sequence[Array], called: Sequence[str], ids: set[int]) -> list[str]:
    """Return doubts about the scale of columns that are no ids."""
    total = sum(len(x) for x in samples)
    mean_squares = sum(_squares(x).sum(axis=0) for x in samples) / total
    root = np.sqrt(mean_squares)
    rest = [k for k in range(len(root)) if k not in ids]
    of_all_values = 0.0
    if rest:
        of_all_values = float(np.sqrt(mean_squares[rest].mean()))
    limit = LARGE if of_all_values > LARGE else LARGE_COLUMN
    large = [k for k in rest if root[k] > limit]
    if large:
        plural = "s" if len(large) > 1 else ""
        columns = listed([called[k] for k in large])
        sizes = listed([f"{root[k]:.3g}" for k in large])
        return [
            f"the root mean square of column{plural} {columns} is {sizes}, and above {limit:g} a "
            "network often learns nothing: standardise the features, (x - mean) / std"
        ]
    return _small_doubts(float(np.sqrt(mean_squares.sum())))


def _image_doubts(samples: Sequence[Array]) -> list[str]:
    """Return doubts about the scale of samples that are no table."""
    total = sum(x.size for x in samples)
    mean_square = sum(float(_squares(x).sum()) for x in samples) / max(1, total)
    root = mean_square**0.5
    if root > LARGE:
        largest = max(float(np.abs(x).max(initial=0)) for x in samples)
        return [
            f"the root mean square of the samples' values is {root:.3g}, and above {LARGE:g} a "
            f"network often learns nothing: divide them by the largest, {largest:g}, or "
            "standardise them"
        ]
    values = float(np.prod(samples[0].shape[1:]))
    return _small_doubts(root * values**0.5)


def _squares(x: Array) -> Array:
    squares: Array = np.square(x.astype(np.float64))
    return squares


def _small_doubts(norm: float) -> list[str]:
    """Return a doubt about samples whose norms have a small root mean square."""
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
    columns = []
    for k in np.flatnonzero(_whole(first).all(axis=0)).tolist():
        differs = len(np.unique(first[:, k])) == len(samples)
        if differs and all(_is_constant(x[:, k]) for x in samples):
            columns.append(k)
    return columns


def _is_constant(values: Array) -> bool:
    return bool((values == values[0]).all())


def _row_ids(samples: Sequence[Array]) -> list[int]:
    """Return the columns with a whole number that differs in nearly every row."""
    total = sum(len(x) for x in samples)
    if total < ROWS:
        return []
    # a few rows of all columns come first, since most columns fail there already
    step = max(1, total // SAMPLE)
    some = np.concatenate([x[::step] for x in samples]).astype(np.float64)
    columns = []
    for k in range(some.shape[1]):
        if not _nearly_distinct(some[:, k]):
            continue
        if _nearly_distinct(np.concatenate([x[:, k] for x in samples])):
            columns.append(k)
    return columns


def _nearly_distinct(column: Array) -> bool:
    """Return whether nearly all values of a column are different whole numbers."""
    values = column.astype(np.float64)
    if not _whole(values).all():
        return False
    return len(np.unique(values)) >= DISTINCT * len(values)


def _whole(values: Array) -> Array:
    """Return which values are whole numbers of less than 2^53.

    Beyond 2^53 every float is a whole number, and that says nothing.
    """
    whole: Array = (values == np.floor(values)) & (np.abs(values) < 2.0**53)
    return whole
