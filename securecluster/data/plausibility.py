"""Plausibility of users' own data: labels, scales and columns that are probably mistakes.

The scale thresholds follow `benchmarks.clusters.scales`: scikit-learn's digits, wine and breast
cancer data, standardised, six clients, 20 rounds of FedAvg with the default network. One more
column of noise does no harm up to a root mean square of 10 and breaks training on digits and wine
at 20; all values may have one of 3.9, and digits diverge at 8; digits whose samples have norm 0.16
reach an accuracy of 0.46 to 0.62, at 0.4 of 0.85 to 0.90. The limit of 3.8 on all values is for
values that are not centred: digits reach 0.97 to 0.99 at 2.9, and 0.19 to 0.87 at 3.9.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from securecluster.data.feature_columns import listed
from securecluster.data.scaling import Categories, Scaling, codes_of
from securecluster.errors import UsageError

Array = NDArray[Any]

LARGE = 3.8  # root mean square of all values of the samples
LARGE_COLUMN = 10.0  # root mean square of one column among others
SMALL = 0.2  # root mean square of the norms of samples
SURE_CLASSES = 1000  # up to so many classes are never refused
SPARSE = 10  # beyond them, the largest number of classes per label that occurs
ROWS = 100  # values of fewer rows may be distinct by chance
MANY = 10  # classes of numbers that are probably none, if they are rare
RARE = 5  # samples of such a class, on average
FEW_ROWS = 10  # labels of fewer rows may all be different by chance
DISTINCT = 0.95  # share of distinct values from which a column is probably an id
CHANNELS = (1, 3, 4)  # grey, colours, and colours with opacity
KEPT = 0.9  # share of different values that single precision should keep
SITES = 3  # values of fewer clients may be distinct by chance
SAMPLE = 1000  # rows in which a column is examined before all rows are


def count_classes(labels: Sequence[Array], are_numbers: bool = True) -> tuple[int, list[str]]:
    """Return the number of classes, and doubts about the labels.

    Args:
        labels: of each client (n,), integers.
        are_numbers: whether the user has numbers for labels, and not text.

    Returns:
        One more than the largest label, and the doubts as sentences.

    Raises:
        UsageError: nearly all classes would have no sample.
    """
    all_labels = np.concatenate(labels)
    distinct = np.unique(all_labels)
    # negative labels are refused later with their client's name
    if not len(distinct) or distinct[0] < 0:
        largest = int(all_labels.max(initial=0))
        return 1 + max(0, largest), []
    lowest = int(distinct[0])
    classes = 1 + int(distinct[-1])
    occurring = len(distinct)
    remedy = f"number labels from 0 without gaps, or pass classes={classes} if that is meant"
    if classes > max(SURE_CLASSES, SPARSE * occurring):
        raise UsageError(
            f"the largest label is {classes - 1}, and only {occurring} different labels occur: "
            f"{remedy}"
        )
    doubts = []
    if lowest > 0:
        doubts.append(f"labels start at {lowest}, so {classes} classes are learned: {remedy}")
    elif classes > 2 * occurring:
        doubts.append(
            f"{classes} classes are learned, and only {occurring} of them occur: {remedy}"
        )
    nearly_unique = occurring >= ROWS and 2 * occurring > len(all_labels)
    rarest = np.unique(all_labels, return_counts=True)[1].min()
    few_of_each = len(all_labels) < RARE * occurring or rarest == 1
    numbers_of_things = are_numbers and occurring > MANY and few_of_each
    if nearly_unique or numbers_of_things or FEW_ROWS <= occurring == len(all_labels):
        doubts.append(
            f"{len(all_labels)} samples have {occurring} different labels, and {rarest} has the "
            "rarest: labels are classes, so group them, or predict numbers (task regression)"
        )
    return classes, doubts


def feature_doubts(
    samples: Sequence[Array],
    names: Sequence[str] | None,
    advice: str,
    scaled: Sequence[Array] | None = None,
) -> list[str]:
    """Return doubts about clients' features as sentences.

    Args:
        samples: of each client (n, …), before any cast to single precision.
        names: of the columns of samples (n, k), or None.
        advice: how a user leaves a column out.
        scaled: the samples on the scale that they are trained on, if that is another one.
    """
    unscaled = scaled is None
    scaled = samples if scaled is None else scaled
    if samples[0].ndim != 2:
        return _axis_doubts(samples[0]) + _image_doubts(scaled)
    column_names = _column_names(samples[0].shape[1], names)
    client_ids = _client_ids(samples)
    row_ids = [k for k in _row_ids(samples) if k not in client_ids]
    doubts = []
    if row_ids:
        subject = _subject(column_names, row_ids)
        reason = "a whole number that differs in nearly every row"
        doubts.append(f"{subject} like an id ({reason}): {advice}")
    if client_ids:
        subject = _subject(column_names, client_ids)
        reason = "one whole number for each client"
        doubts.append(f"{subject} like an id ({reason}): {advice}")
    # ids are large numbers, whose scale needs no doubt of its own
    ids = {*row_ids, *client_ids}
    if unscaled:
        doubts += _precision_doubts(samples, column_names, ids)
    return doubts + _scale_doubts(scaled, column_names, ids)


def _precision_doubts(
    samples: Sequence[Array], column_names: Sequence[str], ids: set[int]
) -> list[str]:
    """Return a doubt about columns of which single precision makes many values alike.

    Args:
        samples: of each client (n, k), which are not scaled.
        column_names: for sentences.
        ids: columns to leave out.
    """
    if samples[0].dtype != np.float64:
        return []
    # of some clients: what merges one's values merges those of others
    clients = int(np.searchsorted(np.cumsum([len(x) for x in samples]), SAMPLE)) + 1
    some = [x[:SAMPLE] for x in samples[:clients]]
    before = np.sum([_distinct(x) for x in some], axis=0)
    with np.errstate(over="ignore"):
        after = np.sum([_distinct(x.astype(np.float32)) for x in some], axis=0)
    merged = [k for k in np.flatnonzero(after < KEPT * before).tolist() if k not in ids]
    if not merged:
        return []
    columns = listed([column_names[k] for k in merged])
    return [
        f"single precision makes values of {columns} alike, of {before[merged[0]]} different ones "
        f"{after[merged[0]]}: scale them (scaling), or subtract what they have in common"
    ]


def _distinct(values: Array) -> Array:
    """Return the number of different values in each column (k,)."""
    different: Array = 1 + (np.diff(np.sort(values, axis=0), axis=0) != 0).sum(axis=0)
    return different


def client_doubts(names: Sequence[str]) -> list[str]:
    """Return a doubt about clients whose names differ in case alone, or in zeros of a number.

    Args:
        names: of all clients.
    """
    seen: dict[str, str] = {}
    read = [re.sub(r"^0*(\d+)(\.0*)?$", r"\1", name.casefold()) for name in names]
    pairs = [(seen.setdefault(key, name), name) for key, name in zip(read, names, strict=True)]
    alike = [f"{first!r} and {name!r}" for first, name in pairs if first != name]
    if not alike:
        return []
    return [f"names of clients differ in case alone, or in zeros ({listed(alike)}): are they one?"]


def bounds_doubts(
    samples: Sequence[Array], scaling: Scaling | None, names: Sequence[str] | None
) -> list[str]:
    """Return a doubt about values beyond the bounds that features are scaled by.

    Args:
        samples: of each client (n, …).
        scaling: of all clients; None for none.
        names: of the columns, or None.
    """
    if scaling is None or not scaling.low:
        return []
    beyond = 0
    columns: set[int] = set()
    for x in samples:
        outside = (x < scaling.low) | (x > scaling.high)
        beyond += int(outside.sum())
        if x.ndim == 2:
            columns.update(np.flatnonzero(outside.any(axis=0)).tolist())
    if not beyond:
        return []
    location = ""
    if columns:
        column_names = _column_names(samples[0].shape[1], names)
        noun = "column" if len(columns) == 1 else "columns"
        outside_columns = [column_names[k] for k in sorted(columns)]
        location = f" in {noun} {listed(outside_columns)}"
    return [f"values{location} lie beyond the bounds, and are cut off there: {beyond} of them"]


def far_doubts(
    samples: Array, seen: Array, names: Sequence[str] | None, categories: Sequence[Categories] = ()
) -> list[str]:
    """Return a doubt about values far outside of what a client trained on.

    Numbers lie beyond its smallest or largest value by more than the distance between these two; of
    categories they are none that the run has.

    Args:
        samples: of a table (n, k).
        seen: the smallest and the largest value of each column (2, k).
        names: of the columns, or None.
        categories: of each column, where the run fills gaps.
    """
    low, high = seen
    # single precision tells no closer values apart
    margin = high - low + np.abs(seen).max(axis=0) * np.finfo(np.float32).eps
    far = (samples < low - margin) | (samples > high + margin)
    column_names = _column_names(samples.shape[1], names)
    had = [f"it had {smallest:g} to {largest:g}" for smallest, largest in seen.T]
    for k, kinds in enumerate(categories):
        if kinds is not None:
            far[:, k] = ~(np.isin(samples[:, k], codes_of(kinds)) | np.isnan(samples[:, k]))
            had[k] = f"the run has {listed([repr(kind) for kind in kinds])}"
    columns = np.flatnonzero(far.any(axis=0)).tolist()
    if not columns:
        return []
    parts = []
    for k in columns:
        first = float(samples[far[:, k], k][0])
        kinds = categories[k] if categories else None
        shown = "other text" if kinds and isinstance(kinds[0], str) else f"{first:g}"
        parts.append(f"{column_names[k]} ({shown}, where {had[k]})")
    return [
        f"values in {int(far.any(axis=1).sum())} of {len(samples)} rows lie far outside of what "
        f"the client trained on: {listed(parts)}; its model has seen nothing like them"
    ]


def test_doubts(clients: Sequence[str], of: int) -> list[str]:
    """Return a doubt about clients without test samples.

    Args:
        clients: their names.
        of: number of all clients.
    """
    if not clients:
        return []
    subject = f"client {clients[0]!r} has"
    whose = "its"
    if len(clients) > 1:
        subject = f"clients {listed(clients)} have"
        whose = "their"
    advice = "give five samples or more, of which one is held out, or give test"
    if len(clients) == of:
        advice += "; or does another column name the clients?"
    return [f"{subject} no test samples, so {whose} score is NaN: {advice}"]


def _axis_doubts(samples: Array) -> list[str]:
    """Return a doubt about images whose channels are probably their last axis.

    Args:
        samples: of a client (n, …).
    """
    shape = samples.shape[1:]
    if len(shape) != 3 or shape[2] not in CHANNELS or shape[0] in CHANNELS:
        return []
    return [
        f"samples of shape {shape} look like images with the channels last, and networks take "
        "them first: give channels='last'"
    ]


def _column_names(width: int, names: Sequence[str] | None) -> list[str]:
    """Return the quoted names of columns for a sentence, or their numbers.

    Args:
        width: number of columns.
        names: of the columns, which are not used unless there is one for each column.
    """
    if names and len(names) == width:
        return [repr(name) for name in names]
    return [str(k) for k in range(width)]


def _subject(column_names: Sequence[str], columns: Sequence[int]) -> str:
    """Return the subject and the verb of a sentence about columns."""
    names = listed([column_names[k] for k in columns])
    if len(columns) > 1:
        return f"columns {names} look"
    return f"column {names} looks"


def _scale_doubts(
    samples: Sequence[Array], column_names: Sequence[str], ids: set[int]
) -> list[str]:
    """Return doubts about the scale of the columns of a table.

    Args:
        samples: of each client (n, k).
        column_names: for sentences.
        ids: columns to leave out.
    """
    row_count = sum(len(x) for x in samples)
    sums_of_squares = sum(_squares(x).sum(axis=0) for x in samples)
    mean_squares = sums_of_squares / row_count
    rms = np.sqrt(mean_squares)
    features = [k for k in range(len(rms)) if k not in ids]
    overall_rms = 0.0
    if features:
        overall_mean_square = mean_squares[features].mean()
        overall_rms = float(np.sqrt(overall_mean_square))
    # one large column does less harm than large values in all columns
    limit = LARGE_COLUMN
    if overall_rms > LARGE:
        limit = LARGE
    large = [k for k in features if rms[k] > limit]
    if not large:
        sample_norm = float(np.sqrt(mean_squares.sum()))
        return _small_doubts(sample_norm)
    noun = "column"
    if len(large) > 1:
        noun = "columns"
    columns = listed([column_names[k] for k in large])
    sizes = listed([f"{rms[k]:.3g}" for k in large])
    return [
        f"the root mean square of {noun} {columns} is {sizes}, and above {limit:g} a network often "
        "learns nothing: standardise the features, (x - mean) / std"
    ]


def _image_doubts(samples: Sequence[Array]) -> list[str]:
    """Return doubts about the scale of samples that are no table, such as images."""
    value_count = sum(x.size for x in samples)
    sum_of_squares = sum(float(_squares(x).sum()) for x in samples)
    mean_square = sum_of_squares / max(1, value_count)
    rms = mean_square**0.5
    if rms > LARGE:
        largest = max(float(np.abs(x).max(initial=0)) for x in samples)
        return [
            f"the root mean square of the samples' values is {rms:.3g}, and above {LARGE:g} a "
            f"network often learns nothing: divide them by the largest, {largest:g}, or "
            "standardise them"
        ]
    shape = samples[0].shape[1:]
    values_per_sample = float(np.prod(shape))
    return _small_doubts(rms * values_per_sample**0.5)


def _squares(x: Array) -> Array:
    """Return the squares of values in double precision."""
    squares: Array = np.square(x.astype(np.float64))
    return squares


def _small_doubts(norm: float) -> list[str]:
    """Return a doubt about samples with small norms.

    Args:
        norm: root mean square of the samples' norms.
    """
    # zeros only are no question of scale
    if not 0 < norm < SMALL:
        return []
    return [
        f"the root mean square of the samples' norms is {norm:.2g}, and below {SMALL:g} a network "
        "hardly learns: standardise the features, (x - mean) / std"
    ]


def _client_ids(samples: Sequence[Array]) -> list[int]:
    """Return the columns that are probably ids of clients.

    Such a column has one integer throughout a client's samples, and another one in every client.

    Args:
        samples: of each client (n, k).
    """
    smallest_client = min(len(x) for x in samples)
    if len(samples) < SITES or smallest_client < 2:
        return []
    first_rows = np.stack([x[0] for x in samples])  # (clients, k)
    first_rows = first_rows.astype(np.float64)
    all_integers = _whole(first_rows).all(axis=0)
    columns = []
    for k in np.flatnonzero(all_integers).tolist():
        distinct = np.unique(first_rows[:, k])
        if len(distinct) < len(samples):
            continue
        if all(_is_constant(x[:, k]) for x in samples):
            columns.append(k)
    return columns


def _is_constant(values: Array) -> bool:
    """Return True if all values are equal."""
    return bool((values == values[0]).all())


def _row_ids(samples: Sequence[Array]) -> list[int]:
    """Return the columns that are probably ids of rows.

    Such a column has integers, nearly all of which are distinct.

    Args:
        samples: of each client (n, k).
    """
    row_count = sum(len(x) for x in samples)
    if row_count < ROWS:
        return []
    # some rows are examined first, since they rule out most columns already
    step = max(1, row_count // SAMPLE)
    some_rows = np.concatenate([x[::step] for x in samples])
    some_rows = some_rows.astype(np.float64)
    columns = []
    for k in range(some_rows.shape[1]):
        if not _nearly_distinct(some_rows[:, k]):
            continue
        values = [x[:, k] for x in samples]
        if _nearly_distinct(np.concatenate(values)):
            columns.append(k)
    return columns


def _nearly_distinct(column: Array) -> bool:
    """Return True if a column has integers, nearly all of which are distinct."""
    values = column.astype(np.float64)
    if not _whole(values).all():
        return False
    return len(np.unique(values)) >= DISTINCT * len(values)


def _whole(values: Array) -> Array:
    """Return a mask of the values that are integers of less than 2^53."""
    # from 2^53 on every float is an integer
    is_exact = np.abs(values) < 2.0**53
    mask: Array = is_exact & (values == np.floor(values))
    return mask
