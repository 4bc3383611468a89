"""Users' own arrays, checked and converted to clients' samples.

Rows of X and y belong together by their index where both have one, else by position; an index that
does not tell is refused.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from numbers import Integral
from typing import Any

import numpy as np
from numpy.typing import NDArray

from securecluster.core.client_names import name_of
from securecluster.core.randomness import Randomness
from securecluster.data.class_names import EMPTY, class_labels
from securecluster.data.feature_columns import Columns, names_of
from securecluster.data.scaling import Scale
from securecluster.data.splits import Split
from securecluster.data.torch_samples import pair_in
from securecluster.errors import UsageError
from securecluster.models.objectives import (
    CLASSIFICATION,
    Classification,
    Language,
    Objective,
    Regression,
    Trajectory,
)

Labels = NDArray[np.int64]
Pair = tuple[NDArray[Any], NDArray[Any]]


def by_name(argument: str, value: Any, numbered: bool) -> dict[str, Any]:
    """Return a mapping with strings as the clients' names.

    Args:
        argument: "clients", "test" or "truth", for errors.
        value: of the argument, as `keyed` takes it.
        numbered: as for `keyed`.

    Raises:
        UsageError: no mapping, a key that is no name, or two clients of the same name.
    """
    by_text: dict[str, Any] = {}
    keys: dict[str, Any] = {}
    for key, item in keyed(argument, value, numbered):
        name = name_of(key)
        # such as 1 and "1"
        if name in keys:
            raise UsageError(
                f"{argument}: {keys[name]!r} and {key!r} would both be the client {name!r}: give "
                "them different names"
            )
        by_text[name] = item
        keys[name] = key
    return by_text


def keyed(argument: str, value: Any, numbered: bool) -> list[tuple[Any, Any]]:
    """Return what a user gives of each client, with what the client is called.

    Args:
        argument: "clients", "test" or "truth", for errors.
        value: of the argument: a mapping from a client's name, of any type, or a Series (pandas),
            or a list.
        numbered: True if clients are called by their positions, as those of a list are.

    Raises:
        UsageError: none of these.
    """
    is_series = _index(value) is not None and getattr(value, "ndim", 1) == 1
    if isinstance(value, Mapping) or is_series:
        return list(value.items())
    if numbered and isinstance(value, list | tuple | np.ndarray):
        return list(enumerate(value))
    example, advice = "{name: (X, y)}", "with an entry for every client"
    if argument == "truth":
        example = "{name: cluster}"
    if argument.endswith("test rows"):
        example = "{name: values}"
    if argument == "clients":
        advice = "or a list of pairs; Federation.from_frame takes one table of all clients"
    raise UsageError(f"{argument} is a mapping {example}, not {type(value).__name__}: {advice}")


def stream(key: Any) -> str | int:
    """Return the name of a client's random stream for its split.

    Args:
        key: the client's name as the user has it, an integer or of any other type.
    """
    if isinstance(key, Integral):
        return int(key)
    return str(key)


def read_pair(
    name: str, samples: Any, columns: Columns, objective: Objective = CLASSIFICATION
) -> Pair:
    """Return X and y of a client as arrays, X with its columns in the shared order.

    Where both have an index, y is put in the order of X by it.

    Args:
        name: of the client.
        samples: a pair (X, y), of which tables, sparse matrices and tensors become arrays; or a
            torch Dataset or DataLoader.
        columns: of all clients.
        objective: of training; of classes y becomes one label for each sample, and of other
            targets, unless they are sequences, a row of them (n, k).

    Raises:
        UsageError: no pair, no arrays, columns that differ from other clients', or indices of X
            and y that do not go together.
    """
    pair = pair_in(name, samples) or samples
    if not isinstance(pair, tuple | list):
        kind = f"{type(pair).__module__}.{type(pair).__qualname__}".removeprefix("builtins.")
        raise UsageError(
            f"client {name!r}: its samples are a pair (X, y), or a torch Dataset, not {kind}: give "
            "the features and the labels apart"
        )
    if len(pair) != 2:
        raise UsageError(
            f"client {name!r}: its samples are a pair (X, y), and {len(pair)} things came: give "
            "the features and the labels"
        )
    table, targets = pair
    x = _array(name, table)
    y = _array(name, targets)
    if not objective.sequential:
        _check_columns(name, table, x)
    if not (objective.sequential or objective.one_label):
        y = _target_rows(name, y)
    if objective.one_label:
        # NumPy makes text of numbers beside text
        if y.dtype.kind == "U" and isinstance(targets, list | tuple):
            y = np.asarray(targets, dtype=object)
        y = class_labels(name, targets, y)
    order = _row_order(f"client {name!r}", table, targets)
    if order is not None:
        y = y[order]
    return columns.arranged(name, table, x), y


def _check_columns(name: str, table: Any, x: NDArray[Any]) -> None:
    """Raise UsageError for a column of a table that holds no numbers.

    Args:
        name: of the client.
        table: as the user has it, with the columns' names if it has any.
        x: the same as an array.
    """
    # an array of numbers holds nothing else
    if x.ndim != 2 or x.dtype.kind not in "OUS":
        return
    columns = names_of(table) or range(x.shape[1])
    for column, values in zip(columns, x.T, strict=True):
        try:
            values.astype(np.float64)
        except (ValueError, TypeError):
            raise UsageError(
                f"client {name!r}: column {column!r} holds {_content(values)}, not numbers: leave "
                "it out of X, or encode it as numbers"
            ) from None


def _content(values: NDArray[Any]) -> str:
    """Return what a column that is not of numbers holds, in words."""
    words = {"str": "text", "str_": "text", "Timestamp": "dates", "date": "dates"}
    words |= dict.fromkeys(EMPTY, "empty cells")
    for value in values.tolist():
        type_name = type(value).__name__
        try:
            float(value)
        except (ValueError, TypeError):
            return words.get(type_name, type_name)
    return str(values.dtype)


def by_group(table: Any, targets: Any, groups: Any) -> dict[Any, tuple[Any, Any]]:
    """Return the rows of X and y of each group, by what the group is called.

    Args:
        table: X as the user has it, n rows.
        targets: y as the user has it, n labels.
        groups: (n,), what each row's client is called.

    Raises:
        UsageError: other numbers of rows, indices that do not go together, or groups without an
            order.
    """
    sizes = {}
    for name, rows in (("X", table), ("y", targets), ("groups", groups)):
        shape = getattr(rows, "shape", None)
        sizes[name] = len(rows) if shape is None else shape[0]
    if len(set(sizes.values())) > 1:
        counted = ", ".join(f"{name} {size}" for name, size in sizes.items())
        advice = ": give the column itself, X[groups]" if isinstance(groups, str) else ""
        raise UsageError(f"X, y and groups have a row for each sample, and not {counted}{advice}")
    rows, group_rows = _index(table), _index(groups)
    if rows is not None and group_rows is not None and not rows.equals(group_rows):
        raise UsageError(
            "the index of groups is another one than that of X: give groups.to_numpy() if its rows "
            "are in the order of X"
        )
    order = _row_order("fit", table, targets)
    try:
        names, positions = np.unique(np.asarray(groups), return_inverse=True)
    except TypeError:
        raise UsageError(
            "groups hold values of several types, or empty ones: give text or whole numbers"
        ) from None
    pairs: dict[Any, tuple[Any, Any]] = {}
    for k, name in enumerate(names.tolist()):
        of_group = np.flatnonzero(positions.reshape(-1) == k)
        of_targets = of_group if order is None else order[of_group]
        pairs[name] = (_rows(table, of_group), _rows(targets, of_targets))
    return pairs


def _rows(values: Any, positions: Labels) -> Any:
    """Return some rows of samples or labels as the user has them.

    Args:
        values: a table, an array, a sparse matrix, a tensor or a list.
        positions: of the rows.
    """
    if hasattr(values, "iloc"):
        return values.iloc[positions]
    if isinstance(values, list | tuple):
        return [values[position] for position in positions]
    # such as one in coordinates (scipy), which has no rows
    if hasattr(values, "tocsr"):
        values = values.tocsr()
    return values[positions]


def _index(values: Any) -> Any:
    """Return the labels of rows (pandas), or None for values without such labels."""
    index = getattr(values, "index", None)
    # of a list or a tuple it is a method
    return index if hasattr(index, "get_indexer") else None


def _row_order(subject: str, table: Any, targets: Any) -> Labels | None:
    """Return the positions in y of the rows of X; None where rows go by position.

    Args:
        subject: of the errors.
        table: X as the user has it.
        targets: y as the user has it.

    Raises:
        UsageError: both have an index, and these do not go together.
    """
    rows = _index(table)
    target_rows = _index(targets)
    if rows is None or target_rows is None or rows.equals(target_rows):
        return None
    advice = "give them the same index, or y.to_numpy() if its rows are in the order of X"
    if not (rows.is_unique and target_rows.is_unique):
        raise UsageError(
            f"{subject}: X and y have rows of other labels or in another order, and some "
            f"labels repeat, so nothing says which belong together: {advice}"
        )
    positions: Labels = target_rows.get_indexer(rows)
    if len(rows) != len(target_rows) or (positions < 0).any():
        raise UsageError(f"{subject}: the index of X has other rows than that of y: {advice}")
    return positions


def own_split(name: str, split: Split, samples: Any, values: Any) -> Split:
    """Return the split of one client's rows, with their values in the order of X.

    Args:
        name: of the client.
        split: of all clients.
        samples: the client's pair (X, y) as the user has it.
        values: of its rows, for the field of the split that is given.

    Raises:
        UsageError: indices of X and the values that do not go together.
    """
    subject = f"client {name!r}, {split.given[0]} of its test rows as y"
    return split.with_values(in_order_of_x(subject, samples, values))


def in_order_of_x(subject: str, samples: Any, values: Any) -> Any:
    """Return values of one client's rows in the order of X, where both have an index.

    Args:
        subject: of the errors.
        samples: the client's pair (X, y) as the user has it.
        values: of its rows.

    Raises:
        UsageError: indices of X and the values that do not go together.
    """
    order = None
    if isinstance(samples, tuple | list):
        order = _row_order(subject, samples[0], values)
    return values if order is None else _rows(values, order)


def own_samples(
    name: str,
    pair: Pair,
    held: Pair | Split,
    objective: Objective,
    randomness: Randomness,
    key: str | int,
) -> tuple[Pair, Pair]:
    """Return a client's samples (X, y) to train on, and those held out.

    Args:
        name: of the client.
        pair: its samples X and y.
        held: held-out samples; or which of `pair` are, where sequences are held out from the end.
        objective: of training.
        randomness: of the federation.
        key: name of the client's random stream.

    Raises:
        UsageError: samples that are not numbers, or do not fit each other.
    """
    convert = _sequences
    if not objective.sequential:
        convert = _labelled
    x, y = convert(name, pair, objective)
    if not isinstance(held, Split):
        if held[0].size or held[1].size:
            return (x, y), convert(name, held, objective)
        # an empty array may have any shape, so it takes that of the training samples
        no_samples = (x[:0], y[:0])
        return (x, y), no_samples
    # sequences remain in order: random windows would overlap with held-out ones
    if objective.sequential and not held.given:
        held = replace(held, time=np.arange(len(y)))
    if not objective.one_label:
        held = replace(held, stratify=False)
    draw = randomness.generator("split", key)
    train, test = held.sides(f"client {name!r}", y, draw)
    return (x[train], y[train]), (x[test], y[test])


def weights_of(name: str, values: Any, samples: int) -> NDArray[np.float64]:
    """Return the weights of a client's samples, (n,).

    Args:
        name: of the client.
        values: as the user has them.
        samples: n.

    Raises:
        UsageError: not a finite number from 0 for each sample, or none above 0.
    """
    weights: NDArray[np.float64] = _floats(name, _array(name, values), np.float64)
    fits = weights.shape == (samples,)
    if not fits or not np.isfinite(weights).all() or (weights < 0).any() or not weights.any():
        raise UsageError(
            f"client {name!r}: weights are a number from 0 for each of its {samples} samples, and "
            f"some above 0: mend those that came (shape {weights.shape})"
        )
    return weights


def outputs(pairs: Sequence[Pair], objective: Objective) -> int:
    """Return the number of outputs that the network needs.

    Args:
        pairs: samples (x, y) of all clients.
        objective: of training, which determines whether outputs are classes, tokens or coordinates.
    """
    if objective.kind not in (Classification.kind, Language.kind):
        _, y = pairs[0]
        if y.ndim > 1:
            return int(y.shape[1])
        return 1
    arrays = [y for _, y in pairs]
    if objective.kind == Language.kind:
        # a token may occur in x only
        arrays += [x for x, _ in pairs]
    largest = max(int(array.max(initial=0)) for array in arrays)
    return 1 + largest


def _array(name: str, values: Any) -> NDArray[Any]:
    """Return a client's samples or targets as an array."""
    try:
        # tensors, which may have gradients or lie on a GPU
        if hasattr(values, "detach"):
            if str(values.dtype) == "torch.bfloat16":  # which NumPy does not have
                values = values.float()
            return np.asarray(values.detach().cpu())
        # sparse matrices (scipy); networks take dense samples
        if hasattr(values, "toarray"):
            values = values.toarray()
        return np.asarray(values)
    except (ValueError, TypeError):
        raise _no_numbers(name) from None


def _labelled(name: str, pair: Pair, objective: Objective) -> Pair:
    """Return X (n, …) as floats without loss, until they are scaled, and y as it is trained on.

    Labels are int64 (n,), or float32 (n, 1) of a single output; other targets are (n, k).

    Raises:
        UsageError: samples without a feature, not one target per sample, or invalid values.
    """
    kept = pair[0].dtype.kind in "biuf"
    precision = np.result_type(pair[0].dtype, np.float32) if kept else np.float64
    features = _floats(name, pair[0], precision)
    labels = pair[1]
    has_features = features.ndim >= 2 and features.shape[1]
    axes = 1 if objective.one_label else 2
    if not has_features or labels.ndim != axes or len(labels) != len(features):
        raise UsageError(
            f"client {name!r}: X {features.shape} and y {labels.shape} must have one label per "
            "sample of at least one feature"
        )
    if objective.kind == Classification.kind:
        return features, labels.astype(np.int64)
    if objective.one_label:
        labels = labels[:, None]
    # numbers keep their precision until they are scaled
    return features, labels if objective.kind == Regression.kind else labels.astype(np.float32)


def scaled_targets(pair: Pair, test_pair: Pair, objective: Objective) -> tuple[Pair, Scale | None]:
    """Return a client's targets (y, y_test) on the scale that they are trained on, and the scale.

    Numbers to train on are cut off at public bounds, and those held out are not.

    Args:
        pair: samples (x, y) to train on.
        test_pair: held-out samples.
        objective: of training.

    Returns:
        The client's own scale, if it standardises its targets.
    """
    y, y_test = pair[1], test_pair[1]
    if not isinstance(objective, Regression) or not y.size:
        return (y, y_test), None
    scale = None
    if objective.bounds:
        low, high = np.asarray(objective.bounds).T
        scale = Scale(tuple((low + high) / 2), tuple((high - low) / 2))
        y = y.clip(low, high)
    if objective.standardised:
        own = Scale.of(y)
        # equal targets are at 0, and the unit of what differs from them stays
        scale = replace(own, width=tuple(width or 1.0 for width in own.width))
    if scale is None:
        # values beyond the range become infinite, which is refused later with the client's name
        with np.errstate(over="ignore"):
            return (y.astype(np.float32), y_test.astype(np.float32)), None
    return (scale.applied(y), scale.applied(y_test)), scale if objective.standardised else None


def _target_rows(name: str, y: NDArray[Any]) -> NDArray[Any]:
    """Return targets that are numbers as rows (n, k).

    Raises:
        UsageError: text, dates or other things.
    """
    try:
        if y.dtype.kind in "cmMUS":
            raise ValueError("no numbers")
        rows = y.astype(np.float64)
    except (ValueError, TypeError):
        raise UsageError(
            f"client {name!r}: targets of this task are numbers, and y holds others: take the task "
            "classification, or encode them"
        ) from None
    return rows[:, None] if rows.ndim == 1 else rows


def _sequences(name: str, pair: Pair, objective: Objective) -> Pair:
    """Return positions as float32, or tokens as int64.

    The objective checks their shapes and ranges later.

    Raises:
        UsageError: not one target per sample, or values that are no numbers.
    """
    x = _step_numbers(name, pair[0], objective)
    y = _step_numbers(name, pair[1], objective)
    if x.ndim < 2 or not y.ndim or len(x) != len(y):
        raise UsageError(
            f"client {name!r}: X {x.shape} and y {y.shape} must have one target per sample of at "
            "least one step"
        )
    return x, y


def _step_numbers(name: str, values: NDArray[Any], objective: Objective) -> NDArray[Any]:
    """Return positions or tokens in the type that they are trained on."""
    if objective.kind == Trajectory.kind or values.dtype.kind not in "iu":
        return _floats(name, values, np.float32)
    # never through floats, in which large tokens would become equal
    return values.astype(np.int64)


def _floats(name: str, values: NDArray[Any], precision: Any) -> NDArray[Any]:
    """Return a client's values as floats of a precision (a dtype)."""
    if values.dtype.kind in "cmM":  # a cast would drop imaginary parts, or make numbers of dates
        raise _no_numbers(name)
    try:
        # values beyond the range become infinite, which is refused later with the client's name
        with np.errstate(over="ignore"):
            return values.astype(precision)
    except (ValueError, TypeError):
        raise _no_numbers(name) from None


def _no_numbers(name: str) -> UsageError:
    """Return the error for samples that are no array of numbers."""
    return UsageError(f"client {name!r}: its samples are not a rectangular array of numbers")


__all__ = [
    "Pair", "by_group", "by_name", "keyed", "outputs", "own_samples", "own_split", "read_pair",
    "scaled_targets", "stream", "weights_of",
]  # fmt: skip
