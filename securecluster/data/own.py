"""Users' own arrays as a client's samples."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from securecluster.errors import UsageError
from securecluster.objectives import Classification, Language, Objective, Trajectory
from securecluster.randomness import Randomness

Pair = tuple[NDArray[Any], NDArray[Any]]


def own_samples(name: str, pair: Any, held: Any, objective: Objective, randomness: Randomness) -> tuple[Pair, Pair]:
    """What a client trains on and what is held out: `held` where it is given, else a fifth, at random or of sequences the last.

    Raises:
        UsageError: samples that are not arrays of numbers, or do not fit each other.
    """
    classified = objective.kind == Classification.kind
    read = _labelled if classified else _sequences
    x, y = read(name, _arrays(name, pair), objective)
    if held is not None:
        rest = _arrays(name, held)
        return (x, y), read(name, rest, objective) if rest[0].size or rest[1].size else (x[:0], y[:0])
    train = len(y) - len(y) // 5
    order = randomness.generator("split", name).permutation(len(y)) if classified else np.arange(len(y))
    return (x[order[:train]], y[order[:train]]), (x[order[train:]], y[order[train:]])


def outputs(targets: Sequence[Pair], objective: Objective) -> int:
    """The number of outputs that samples (x, y) ask for: classes, tokens or coordinates."""
    if objective.kind == Trajectory.kind:
        y = targets[0][1]
        return y.shape[1] if y.ndim > 1 else 1
    both = objective.kind == Language.kind
    return 1 + max(int(part.max(initial=0)) for pair in targets for part in (pair if both else pair[1:]))


def _arrays(name: str, pair: Any) -> Pair:
    if not isinstance(pair, tuple | list) or len(pair) != 2:
        raise UsageError(f"client {name!r}: its samples are a pair (X, y)")
    try:
        return np.asarray(pair[0]), np.asarray(pair[1])
    except (ValueError, TypeError):
        raise _no_numbers(name) from None


def _labelled(name: str, pair: Pair, objective: Objective) -> Pair:
    """X (n, …) float32 and y (n,) int64."""
    features, labels = _single(name, pair[0]), pair[1]
    if labels.size and not np.issubdtype(labels.dtype, np.integer):
        raise UsageError(f"client {name!r}: labels are class numbers (integers from 0), not {labels.dtype}")
    if features.ndim < 2 or not features.shape[1] or labels.shape != features.shape[:1]:
        raise UsageError(f"client {name!r}: X {features.shape} and y {labels.shape} must have one label per sample of at least one feature")
    return features, labels.astype(np.int64)


def _sequences(name: str, pair: Pair, objective: Objective) -> Pair:
    """Positions as float32, tokens as int64 and never through floats; their shapes and ranges are the objective's to check."""
    x, y = (_single(name, part) if objective.kind == Trajectory.kind or part.dtype.kind not in "iu" else part for part in pair)
    if x.ndim < 2 or not y.ndim or len(x) != len(y):
        raise UsageError(f"client {name!r}: X {x.shape} and y {y.shape} must have one target per sample of at least one step")
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


__all__ = ["Pair", "outputs", "own_samples"]
