"""Users' own arrays, checked and converted to clients' samples.

Rows of X and y belong together by their index where both have one, else by position; an index that
does not tell is refused.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from numbers import Integral
from typing import Any

import numpy as np
from numpy.typing import NDArray

from securecluster.core.client_names import name_of
from securecluster.core.randomness import Randomness
from securecluster.data.feature_columns import Columns
from securecluster.errors import UsageError
from securecluster.models.objectives import Classification, Language, Objective, Trajectory

Labels = NDArray[np.int64]
Pair = tuple[NDArray[Any], NDArray[Any]]


def by_name(argument: str, value: Any) -> dict[str, Any]:
    """Return a mapping with strings as the clients' names.

    Args:
        argument: "clients", "test" or "truth", for errors.
        value: of the argument, a mapping from a client's name, of any type; for "truth" also a
            Series (pandas).

    Raises:
        UsageError: no mapping, a key that is no name, or two clients of the same name.
    """
    is_series = argument == "truth" and _index(value) is not None and hasattr(value, "items")
    if not (isinstance(value, Mapping) or is_series):
        raise _no_mapping(argument, type(value).__name__)
    by_text: dict[str, Any] = {}
    keys: dict[str, Any] = {}
    for key, item in value.items():
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


def _no_mapping(argument: str, type_name: str) -> UsageError:
    """Return the error for an argument that is no mapping."""
    example = "{name: (X, y)}"
    advice = "with an entry for every client"
    if argument == "truth":
        example = "{name: cluster}"
    if argument == "clients":
        advice = "dict(enumerate(…)) makes one of a list"
    return UsageError(f"{argument} is a mapping {example}, not {type_name}: {advice}")


def stream(key: Any) -> str | int:
    """Return the name of a client's random stream for its split.

    Args:
        key: the client's name as the user has it, an integer or of any other type.
    """
    if isinstance(key, Integral):
        return int(key)
    return str(key)


def read_pair(name: str, pair: Any, columns: Columns) -> Pair:
    """Return X and y of a client as arrays, X with its columns in the shared order.

    Where both have an index, y is put in the order of X by it.

    Args:
        name: of the client.
        pair: as the user has it; tables and tensors become arrays.
        columns: of all clients.

    Raises:
        UsageError: no pair, no arrays, columns that differ from other clients', or indices of X
            and y that do not go together.
    """
    is_sequence = isinstance(pair, tuple | list)
    if not is_sequence or len(pair) != 2:
        raise UsageError(f"client {name!r}: its samples are a pair (X, y)")
    table, targets = pair
    x = _array(name, table)
    y = _array(name, targets)
    order = _row_order(name, table, targets)
    if order is not None:
        y = y[order]
    return columns.arranged(name, table, x), y


def _index(values: Any) -> Any:
    """Return the labels of rows (pandas), or None for values without such labels."""
    index = getattr(values, "index", None)
    # of a list or a tuple it is a method
    return index if hasattr(index, "get_indexer") else None


def _row_order(name: str, table: Any, targets: Any) -> Labels | None:
    """Return the positions in y of the rows of X; None where rows go by position.

    Args:
        name: of the client.
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
            f"client {name!r}: X and y have rows of other labels or in another order, and some "
            f"labels repeat, so nothing says which belong together: {advice}"
        )
    positions: Labels = target_rows.get_indexer(rows)
    if len(rows) != len(target_rows) or (positions < 0).any():
        raise UsageError(f"client {name!r}: the index of X has other rows than that of y: {advice}")
    return positions


def own_samples(
    name: str,
    pair: Pair,
    test_pair: Pair | None,
    objective: Objective,
    randomness: Randomness,
    key: str | int,
) -> tuple[Pair, Pair]:
    """Return a client's samples (X, y) to train on, and those held out.

    Args:
        name: of the client.
        pair: its samples X and y.
        test_pair: held-out samples; None holds out a random fifth of `pair`, or the last fifth of
            sequences.
        objective: of training.
        randomness: of the federation.
        key: name of the client's random stream.

    Raises:
        UsageError: samples that are not numbers, or do not fit each other.
    """
    classified = objective.kind == Classification.kind
    convert = _sequences
    if classified:
        convert = _labelled
    x, y = convert(name, pair, objective)
    if test_pair is not None:
        if test_pair[0].size or test_pair[1].size:
            return (x, y), convert(name, test_pair, objective)
        # an empty array may have any shape, so it takes that of the training samples
        no_samples = (x[:0], y[:0])
        return (x, y), no_samples
    # sequences remain in order: random windows would overlap with held-out ones
    order = np.arange(len(y))
    if classified:
        draw = randomness.generator("split", key)
        order = draw.permutation(len(y))
    train_size = len(y) - len(y) // 5
    train, test = np.split(order, [train_size])
    train_pair = (x[train], y[train])
    test_pair = (x[test], y[test])
    return train_pair, test_pair


def outputs(pairs: Sequence[Pair], objective: Objective) -> int:
    """Return the number of outputs that the network needs.

    Args:
        pairs: samples (x, y) of all clients.
        objective: of training, which determines whether outputs are classes, tokens or coordinates.
    """
    if objective.kind == Trajectory.kind:
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
            return np.asarray(values.detach().cpu())
        return np.asarray(values)
    except (ValueError, TypeError):
        raise _no_numbers(name) from None


def _labelled(name: str, pair: Pair, objective: Objective) -> Pair:
    """Return X (n, …) as float32 and y (n,) as int64.

    Raises:
        UsageError: samples without a feature, not one label per sample, or invalid values.
    """
    features = _single(name, pair[0])
    labels = _class_numbers(name, pair[1])
    has_features = features.ndim >= 2 and features.shape[1]
    if not has_features or labels.shape != features.shape[:1]:
        raise UsageError(
            f"client {name!r}: X {features.shape} and y {labels.shape} must have one label per "
            "sample of at least one feature"
        )
    return features, labels.astype(np.int64)


def _class_numbers(name: str, labels: NDArray[Any]) -> NDArray[Any]:
    """Return labels as integers (n,).

    Args:
        name: of the client.
        labels: integers, booleans or whole floats, (n,) or (n, 1).

    Raises:
        UsageError: labels of another type.
    """
    if labels.ndim == 2 and labels.shape[1] == 1:
        labels = labels[:, 0]
    # an empty array may have any type
    if not labels.size or labels.dtype.kind in "iu":
        return labels
    is_boolean = labels.dtype.kind == "b"
    is_float = labels.dtype.kind == "f"
    if is_boolean or (is_float and _whole(labels)):
        return labels.astype(np.int64)
    raise UsageError(
        f"client {name!r}: labels are class numbers (integers from 0), not {labels.dtype}"
    )


def _whole(values: NDArray[Any]) -> bool:
    """Return True if all floats are whole numbers that an integer represents exactly."""
    in_range = np.abs(values) < 2**53
    is_exact = np.isfinite(values) & in_range
    is_whole = is_exact & (values == np.floor(values))
    return bool(is_whole.all())


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
        return _single(name, values)
    # never through floats, in which large tokens would become equal
    return values.astype(np.int64)


def _single(name: str, values: NDArray[Any]) -> NDArray[np.float32]:
    """Return a client's values as float32."""
    if values.dtype.kind in "cmM":  # a cast would drop imaginary parts, or make numbers of dates
        raise _no_numbers(name)
    try:
        # values beyond the range become infinite, which is refused later with the client's name
        with np.errstate(over="ignore"):
            return values.astype(np.float32)
    except (ValueError, TypeError):
        raise _no_numbers(name) from None


def _no_numbers(name: str) -> UsageError:
    """Return the error for samples that are no array of numbers."""
    return UsageError(f"client {name!r}: its samples are not a rectangular array of numbers")


__all__ = ["Pair", "by_name", "outputs", "own_samples", "read_pair", "stream"]
