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
        example = {"truth": "{name: cluster}"}.get(what, "{name: (X, y)}")
        made = (
            "dict(enumerate(…)) makes one of a list"
            if what == "clients"
            else "with an entry for every client"
        )
        raise UsageError(f"{what} is a mapping {example}, not {type(given).__name__}: {made}")
    found: dict[str, Any] = {}
    spelled: dict[str, Any] = {}
    for key, value in given.items():
        name = str(key)
        if name in found:
            raise UsageError(
                f"{what}: {spelled[name]!r} and {key!r} would both be the client {name!r}: give "
                "them different names"
            )
        found[name], spelled[name] = value, key
    return found


def stream(key: Any) -> str | int:
    """Return what a client's random split is drawn by: its name, or its number where it has one."""
    return int(key) if isinstance(key, Integral) else str(key)


def read_pair(name: str, pair: Any, columns: Columns) -> Pair:
    """Return X and y of a client as arrays, X with its columns in the shared order.

    Raises:
        UsageError: no pair, no arrays, or columns that differ from other clients'.
    """
    if not isinstance(pair, tuple | list) or len(pair) != 2:
        raise UsageError(f"client {name!r}: its samples are a pair (X, y)")
    x, y = (_array(name, part) for part in pair)
    return columns.arranged(name, pair[0], x), y


def own_samples(
    name: str,
    pair: Pair,
    held: Pair | None,
    objective: Objective,
    randomness: Randomness,
    key: str | int,
) -> tuple[Pair, Pair]:
    """What a client trains on and what is held out: `held` where it is given, else a fifth, at
    random or of sequences the last.

    Raises:
        UsageError: samples that are not numbers, or do not fit each other.
    """
    classified = objective.kind == Classification.kind
    read = _labelled if classified else _sequences
    x, y = read(name, pair, objective)
    if held is not None:
        return (x, y), read(name, held, objective) if held[0].size or held[1].size else (
            x[:0],
            y[:0],
        )
    train = len(y) - len(y) // 5
    order = (
        randomness.generator("split", key).permutation(len(y)) if classified else np.arange(len(y))
    )
    return (x[order[:train]], y[order[:train]]), (x[order[train:]], y[order[train:]])


def outputs(targets: Sequence[Pair], objective: Objective) -> int:
    """The number of outputs that samples (x, y) ask for: classes, tokens or coordinates."""
    if objective.kind == Trajectory.kind:
        y = targets[0][1]
        return y.shape[1] if y.ndim > 1 else 1
    both = objective.kind == Language.kind
    return 1 + max(
        int(part.max(initial=0)) for pair in targets for part in (pair if both else pair[1:])
    )


def _array(name: str, part: Any) -> NDArray[Any]:
    """Return samples or targets as an array; of a tensor its values, without its gradient."""
    try:
        return np.asarray(part.detach().cpu() if hasattr(part, "detach") else part)
    except (ValueError, TypeError):
        raise _no_numbers(name) from None


def _labelled(name: str, pair: Pair, objective: Objective) -> Pair:
    """X (n, …) float32 and y (n,) int64."""
    features, labels = _single(name, pair[0]), _class_numbers(name, pair[1])
    if features.ndim < 2 or not features.shape[1] or labels.shape != features.shape[:1]:
        raise UsageError(
            f"client {name!r}: X {features.shape} and y {labels.shape} must have one label per "
            "sample of at least one feature"
        )
    return features, labels.astype(np.int64)


def _class_numbers(name: str, labels: NDArray[Any]) -> NDArray[Any]:
    """Return labels as integers: of (n, 1) the column, of truth values 0 and 1, of floats those
    that are whole.
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
    return bool(
        (np.isfinite(values) & (np.abs(values) < 2**53) & (values == np.floor(values))).all()
    )


def _sequences(name: str, pair: Pair, objective: Objective) -> Pair:
    """Positions as float32, tokens as int64 and never through floats; their shapes and ranges are
    the objective's to check.
    """
    x, y = (
        _single(name, part)
        if objective.kind == Trajectory.kind or part.dtype.kind not in "iu"
        else part
        for part in pair
    )
    if x.ndim < 2 or not y.ndim or len(x) != len(y):
        raise UsageError(
            f"client {name!r}: X {x.shape} and y {y.shape} must have one target per sample of at "
            "least one step"
        )
    return tuple(part.astype(np.int64) if part.dtype.kind in "iu" else part for part in (x, y))  # type: ignore[return-value]


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
