"""Similarity of sequences by their longest common subsequence (Vlachos, Kollios, Gunopulos,
"Discovering similar multidimensional trajectories", ICDE 2002).

The dynamic programme's columns differ by 0 or 1 from row to row, so a column is a number with a bit
a row, and one addition makes the next (Crochemore, Iliopoulos, Pinzon, Reid, "A fast and practical
bit-vector algorithm for the longest common subsequence problem", 2001): V ← (V + (V & M)) | (V &
~M), where M tells which points match. All sequences that one is compared with are bits of the same
number, a zero between them, where carries end.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from numbers import Integral, Real
from typing import Any

import numpy as np
from numpy.typing import NDArray

from securecluster.errors import UsageError

Array = NDArray[np.float64]
BLOCK = 1 << 16  # distances that are compared at once: they stay in cache


def similarities(sequences: Sequence[Any], radius: float, window: int | None = None) -> Array:
    """LCSS of all pairs of sequences (n_i, k), divided by the shorter length (ours), (m, m) in [0,
    1].

    Args:
        radius: two points match up to this Euclidean distance (Vlachos et al. compare each
            coordinate).
        window: δ, two points match only if their places in their sequences differ by no more; None
            lets all match.

    Raises:
        UsageError: a radius or window that is none, or a sequence that is empty, not finite, or of
            another number of coordinates.
    """
    points, sizes = _checked(sequences, radius, window)
    m = len(points)
    order = np.argsort(sizes, kind="stable")  # the shorter is walked through, the longer are bits
    found = np.ones((m, m))
    for place, i in enumerate(order[:-1]):
        others = order[place + 1 :]
        common = _against(points[i], [points[j] for j in others], float(radius), window)
        found[i, others] = found[others, i] = common / sizes[i]
    return found


def similarity(a: Any, b: Any, radius: float, window: int | None = None) -> float:
    """Of two sequences, (n, k) and (r, k)."""
    return float(similarities([a, b], radius, window)[0, 1])


def _against(
    walked: Array, others: Sequence[Array], radius: float, window: int | None
) -> NDArray[np.int64]:
    """The length of the longest common subsequence of one sequence (n, k) with each of some others,
    (len(others),).
    """
    sizes = np.array([len(own) for own in others])
    last = np.cumsum(sizes + 1) - 1  # of each sequence, the bit after its points
    there = np.ones(last[-1] + 1, bool)
    there[last] = False
    # what lies between sequences is near nothing
    points = np.full((walked.shape[1], len(there)), np.inf)
    points[:, there] = np.concatenate(others).T
    steps = np.zeros(len(there), np.int64)
    steps[there] = np.concatenate([np.arange(n) for n in sizes])
    bits = _number(np.packbits(there, bitorder="little"))
    column = bits
    for matching in _matches(walked, points, steps, radius, window):
        hit = column & matching
        column = ((column + hit) | (column ^ hit)) & bits
    left = np.unpackbits(
        np.frombuffer(column.to_bytes(len(there) // 8 + 1, "little"), np.uint8), bitorder="little"
    )[: len(there)]
    first = np.concatenate([[0], last[:-1] + 1])
    return np.asarray(sizes - np.add.reduceat(left, first, dtype=np.int64), dtype=np.int64)


def _matches(
    walked: Array, points: Array, steps: NDArray[np.int64], radius: float, window: int | None
) -> Iterator[int]:
    """For each point that is walked through, which of the points (k, N) match it, as the bits of a
    number.
    """
    height = max(1, BLOCK // points.shape[1])
    for start in range(0, len(walked), height):
        block = walked[start : start + height]
        square = _squared(block[:, :1], points[0])
        for c in range(1, len(points)):
            square += _squared(block[:, c : c + 1], points[c])
        near = square <= radius * radius
        if window is not None:
            near &= np.abs(steps - np.arange(start, start + len(block))[:, None]) <= window
        for row in np.packbits(near, axis=1, bitorder="little"):
            yield _number(row)


def _squared(one: Array, other: Array) -> Array:
    away = other - one
    return np.multiply(away, away, out=away)


def _number(bits: NDArray[np.uint8]) -> int:
    return int.from_bytes(bits.tobytes(), "little")


def _checked(
    sequences: Sequence[Any], radius: float, window: int | None
) -> tuple[list[Array], NDArray[np.int64]]:
    if isinstance(radius, bool) or not (isinstance(radius, Real) and 0 <= float(radius) < math.inf):
        raise UsageError(f"radius = {radius!r} is no distance: give a finite number from 0")
    if window is not None and not (isinstance(window, Integral) and window >= 0):
        raise UsageError(
            f"window = {window!r} is no number of places: give a whole number from 0, or None for "
            "no window"
        )
    points = [np.asarray(own, dtype=np.float64) for own in sequences]
    for number, own in enumerate(points):
        if (
            own.ndim != 2
            or not own.size
            or own.shape[1] != points[0].shape[1]
            or not np.isfinite(own).all()
        ):
            raise UsageError(
                f"sequence {number} of shape {own.shape} cannot be compared: give points (n, k), "
                "at least one, finite, and of as many coordinates in all sequences"
            )
    return points, np.array([len(own) for own in points], dtype=np.int64)
