"""Similarity of sequences by their longest common subsequence (LCSS).

The similarity is that of Vlachos, Kollios, Gunopulos, "Discovering similar multidimensional
trajectories", ICDE 2002.

In the dynamic programme, neighbours in a column differ by 0 or 1, so a column is stored as a number
with one bit a row, and one addition computes the next column: V ← (V + (V & M)) | (V & ~M), where M
marks the points that match (Crochemore, Iliopoulos, Pinzon, Reid, "A fast and practical bit-vector
algorithm for the longest common subsequence problem", 2001). All sequences that one is compared
with are bits of the same number, separated by zeros, at which carries end.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from numbers import Integral, Real
from typing import Any

import numpy as np
from numpy.typing import NDArray

from securecluster.protocols import authoring as fl

Array = NDArray[np.float64]
BLOCK = 1 << 16  # distances that are compared at once: they stay in cache


def similarities(sequences: Sequence[Any], radius: float, window: int | None = None) -> Array:
    """Return the LCSS of all pairs of sequences, divided by the shorter length.

    The division is not in the paper.

    Args:
        sequences: m sequences (n_i, k) of points.
        radius: two points match up to this Euclidean distance (Vlachos et al. compare each
            coordinate).
        window: δ, two points match only if their positions in their sequences differ by no more;
            None is no bound.

    Returns:
        (m, m) in [0, 1], symmetric.

    Raises:
        UsageError: an invalid radius or window, or a sequence that is empty, not finite, or of
            another number of coordinates.
    """
    points, sizes = _checked(sequences, radius, window)
    m = len(points)
    # the points of the shorter sequence are the columns, those of the longer ones are bits
    order = np.argsort(sizes, kind="stable")
    result = np.ones((m, m))
    for n, i in enumerate(order[:-1]):
        longer = order[n + 1 :]
        others = [points[j] for j in longer]
        common = _against(points[i], others, float(radius), window)
        similarity_of_longer = common / sizes[i]
        result[i, longer] = similarity_of_longer
        result[longer, i] = similarity_of_longer
    return result


def similarity(a: Any, b: Any, radius: float, window: int | None = None) -> float:
    """Return the similarity of two sequences.

    Args:
        a: (n, k).
        b: (r, k).
        radius: as in `similarities`.
        window: as in `similarities`.
    """
    return float(similarities([a, b], radius, window)[0, 1])


def _against(
    shorter: Array, others: Sequence[Array], radius: float, window: int | None
) -> NDArray[np.int64]:
    """Return the length of the longest common subsequence with each of several sequences.

    Args:
        shorter: (n, k).
        others: sequences of n points or more.
        radius: two points match up to this distance.
        window: largest difference of the positions of two points, or None.

    Returns:
        (len(others),)
    """
    sizes = np.array([len(other) for other in others])
    separators = np.cumsum(sizes + 1) - 1  # the bit after the points of each sequence
    is_point = np.ones(separators[-1] + 1, bool)
    is_point[separators] = False
    # separators are infinitely far away, so that they match no point
    shape = (shorter.shape[1], len(is_point))
    points = np.full(shape, np.inf)
    points[:, is_point] = np.concatenate(others).T
    steps = np.zeros(len(is_point), np.int64)
    steps[is_point] = np.concatenate([np.arange(n) for n in sizes])

    # the initial column: one bit for each point, none for separators
    bits = _number(np.packbits(is_point, bitorder="little"))
    column = bits
    for matching in _matches(shorter, points, steps, radius, window):
        hit = column & matching
        column = ((column + hit) | (column ^ hit)) & bits

    # each bit that has become zero is one point of the common subsequence
    column_bytes = column.to_bytes(len(is_point) // 8 + 1, "little")
    remaining = np.unpackbits(np.frombuffer(column_bytes, np.uint8), bitorder="little")
    remaining = remaining[: len(is_point)]
    starts = np.concatenate([[0], separators[:-1] + 1])
    ones = np.add.reduceat(remaining, starts, dtype=np.int64)
    return np.asarray(sizes - ones, dtype=np.int64)


def _matches(
    shorter: Array, points: Array, steps: NDArray[np.int64], radius: float, window: int | None
) -> Iterator[int]:
    """Yield the matching points of each point of a sequence, as the bits of a number.

    Args:
        shorter: (n, k), the sequence.
        points: (k, N) of all other sequences, separators among them.
        steps: (N,) their positions in their sequences.
        radius: two points match up to this distance.
        window: largest difference of the positions of two points, or None.
    """
    # by blocks of rows, whose distances stay in cache
    height = max(1, BLOCK // points.shape[1])
    for start in range(0, len(shorter), height):
        block = shorter[start : start + height]
        square = _squared(block[:, :1], points[0])
        for c in range(1, len(points)):
            coordinate = block[:, c : c + 1]
            square += _squared(coordinate, points[c])
        match = square <= radius * radius
        if window is not None:
            positions = np.arange(start, start + len(block))
            shift = np.abs(steps - positions[:, None])
            match &= shift <= window
        for row in np.packbits(match, axis=1, bitorder="little"):
            yield _number(row)


def _squared(one: Array, other: Array) -> Array:
    """Return the squares of all differences, without a second array of their size."""
    difference = other - one
    return np.multiply(difference, difference, out=difference)


def _number(bits: NDArray[np.uint8]) -> int:
    """Return packed bits, the lowest first, as one integer."""
    return int.from_bytes(bits.tobytes(), "little")


def _checked(
    sequences: Sequence[Any], radius: float, window: int | None
) -> tuple[list[Array], NDArray[np.int64]]:
    """Return the sequences in float64, and their lengths (m,).

    Raises:
        UsageError: as in `similarities`.
    """
    is_distance = isinstance(radius, Real) and not isinstance(radius, bool)
    if not (is_distance and 0 <= float(radius) < math.inf):
        raise fl.UsageError(f"radius = {radius!r} is no distance: give a finite number from 0")
    if window is not None and not (isinstance(window, Integral) and window >= 0):
        raise fl.UsageError(
            f"window = {window!r} is no number of places: give a whole number from 0, or None for "
            "no window"
        )
    points = [np.asarray(sequence, dtype=np.float64) for sequence in sequences]
    for number, sequence in enumerate(points):
        if not _is_comparable(sequence, points[0]):
            raise fl.UsageError(
                f"sequence {number} of shape {sequence.shape} cannot be compared: give points (n, "
                "k), at least one, finite, and of as many coordinates in all sequences"
            )
    sizes = np.array([len(sequence) for sequence in points], dtype=np.int64)
    return points, sizes


def _is_comparable(sequence: Array, first: Array) -> bool:
    """Return whether a sequence is (n, k), n > 0, finite, and has the first one's k."""
    if sequence.ndim != 2 or not sequence.size:
        return False
    if sequence.shape[1] != first.shape[1]:
        return False
    return bool(np.isfinite(sequence).all())
