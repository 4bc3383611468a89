"""Users' own arrays as a client's samples."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from numbers import Integral
from typing import Any

import numpy as np
from numpy.typing import NDArray

from securecluster.core.randomness import Randomness
from securecluster.data.feature_columns import Columns
from securecluster.errors import UsageError
from securecluster.models.objectives import Classification, Language, Objective, Trajectory

Pair = tuple[NDArray[Any], NDArray[Any]]


def by_name(what: str, given: Any) -> dict[str, Any]:
    """Return a mapping with clients' names as text.

    Raises:
        UsageError: no mapping, or two clients of the same name.
    """
    if not isinstance(given, Mapping):
        example = "{name: cluster}" if what == "truth" else "{name: (X, y)}"
        cure = "with an entry for every client"
        if what == "clients":
            cure = "dict(enumerate(…)) makes one of a list"
        raise UsageError(f"{what} is a mapping {example}, not {type(given).__name__}: {cure}")
    by_text: dict[str, Any] = {}
    keys: dict[str, Any] = {}
    for key, value in given.items():
        name = str(key)
        if name in keys:
            raise UsageError(
                f"{what}: {keys[name]!r} and {key!r} would both be the client {name!r}: give "
                "them different names"
            )
        by_text[name] = value
        keys[name] = key
    return by_text


def stream(key: Any) -> str | int:
    """Return the key of a client's random split: its name, or its number where it has one."""
    if isinstance(key, Integral):
        return int(key)
    return str(key)


def read_pair(name: str, pair: Any, columns: Columns) -> Pair:
    """Return X and y of a client as arrays, X with its columns in the shared order.

    Raises:
        UsageError: no pair, no arrays, or columns that differ from other clients'.
    """
    if not isinstance(pair, tuple | list) or len(pair) != 2:
        raise UsageError(f"client {name!r}: its samples are a pair (X, y)")
    given_x, given_y = pair
    x, y = _array(name, given_x), _array(name, given_y)
    return columns.arranged(name, given_x, x), y


def own_samples(
    name: str,
    pair: Pair,
    held: Pair | None,
    objective: Objective,
    randomness: Randomness,
    key: str | int,
) -> tuple[Pair, Pair]:
    """Return the samples that a client trains on, and those that are held out.

    Args:
        name: of the client.
        pair: its samples, X and y.
        held: what is held out; None is a fifth of `pair`, at random or of sequences the last.
        objective: what is learned.
        randomness: of the federation.
        key: what the random split is drawn by.

    Raises:
        UsageError: samples that are not numbers, or do not fit each other.
    """
    classified = objective.kind == Classification.kind
    read = _labelled if classified else _sequences
    x, y = read(name, pair, objective)
    if held is not None:
        if held[0].size or held[1].size:
            return (x, y), read(name, held, objective)
        return (x, y), (x[:0], y[:0])
    order = np.arange(len(y))
    if classified:
        order = randomness.generator("split", key).permutation(len(y))
    train, test = np.split(order, [len(y) - len(y) // 5])
    return (x[train], y[train]), (x[test], y[test])


def outputs(targets: Sequence[Pair], objective: Objective) -> int:
    """Return the number of outputs that samples (x, y) ask for: classes, tokens or coordinates."""
    if objective.kind == Trajectory.kind:
        _, y = targets[0]
        return y.shape[1] if y.ndim > 1 else 1
    numbers = [y for _, y in targets]
    if objective.kind == Language.kind:
        numbers += [x for x, _ in targets]
    return 1 + max(int(part.max(initial=0)) for part in numbers)


def _array(name: str, part: Any) -> NDArray[Any]:
    """Return samples or targets as an array; of a tensor its values, without its gradient."""
    try:
        if hasattr(part, "detach"):
            return np.asarray(part.detach().cpu())
        return np.asarray(part)
    except (ValueError, TypeError):
        raise _no_numbers(name) from None


def _labelled(name: str, pair: Pair, objective: Objective) -> Pair:
    """Return X (n, …) float32 and y (n,) int64."""
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
    """Return labels as integers.

    Labels (n, 1) are a column, truth values become 0 and 1, and floats must be whole.
    """
    if labels.ndim == 2 and labels.shape[1] == 1:
        labels = labels[:, 0]
    if not labels.size or labels.dtype.kind in "iu":
        return labels
    if labels.dtype.kind == "b" or (labels.dtype.kind == "f" and _whole(labels)):
        return labels.astype(np.int64)
    raise UsageError(
        f"client {name!r}: labels are class numbers (integers from 0), not {labels.dtype}"
    )


def _whole(values: NDArray[Any]) -> bool:
    """Return whether all floats are whole numbers that an integer holds exactly."""
    exact = np.isfinite(values) & (np.abs(values) < 2**53)
    return bool((exact & (values == np.floor(values))).all())


def _sequences(name: str, pair: Pair, objective: Objective) -> Pair:
    """Return positions as float32, and tokens as int64 and never through floats.

    Their shapes and ranges are the objective's to check.
    """
    x, y = (_step_numbers(name, part, objective) for part in pair)
    if x.ndim < 2 or not y.ndim or len(x) != len(y):
        raise UsageError(
            f"client {name!r}: X {x.shape} and y {y.shape} must have one target per sample of at "
            "least one step"
        )
    return x, y


def _step_numbers(name: str, part: NDArray[Any], objective: Objective) -> NDArray[Any]:
    """Return positions or tokens in the type that they are trained on."""
    if objective.kind == Trajectory.kind or part.dtype.kind not in "iu":
        return _single(name, part)
    return part.astype(np.int64)


def _single(name: str, part: NDArray[Any]) -> NDArray[np.float32]:
    if part.dtype.kind in "cmM":  # a cast would drop imaginary parts, or make numbers of dates
        raise _no_numbers(name)
    try:
        with np.errstate(over="ignore"):  # what becomes infinite is refused by name later
            return part.astype(np.float32)
    except (ValueError, TypeError):
        raise _no_numbers(name) from None


def _no_numbers(name: str) -> UsageError:
    return UsageError(f"client {name!r}: its samples are not a rectangular array of numbers")


__all__ = ["Pair", "by_name", "outputs", "own_samples", "read_pair", "stream"]
