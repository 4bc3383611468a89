"""Cluster labels and checks of what is clustered."""

from __future__ import annotations

from collections.abc import Sequence
from numbers import Integral

import numpy as np
from numpy.typing import NDArray

from securecluster.errors import UsageError

Array = NDArray[np.float64]


def members(labels: Sequence[int]) -> list[list[int]]:
    """Return the positions of each cluster's members.

    Args:
        labels: each client's cluster, (m,), from 0.

    Returns:
        One ascending list for each cluster 0 … max(labels); empty for an unused number.
    """
    count = 1 + max(labels, default=-1)
    clusters: list[list[int]] = [[] for _ in range(count)]
    for position, label in enumerate(labels):
        clusters[label].append(position)
    return clusters


def largest(labels: Sequence[int]) -> int:
    """Return the largest cluster, the first one of several.

    It is the most likely cluster of a client without any data to compare (not in the paper).

    Args:
        labels: each client's cluster, (m,), from 0; not empty.
    """
    clusters = range(1 + max(labels))
    return max(clusters, key=list(labels).count)


def is_finite_square(matrix: Array) -> bool:
    """Return True for a square matrix of finite numbers.

    Args:
        matrix: any array.
    """
    side = len(matrix)
    return matrix.shape == (side, side) and is_finite(matrix)


def is_finite(numbers: Array) -> bool:
    """Return True if all numbers of an array are finite, without a second array of its size.

    Args:
        numbers: any array.
    """
    # the extremes are NaN where any number is
    return not numbers.size or bool(np.isfinite(numbers.min()) and np.isfinite(numbers.max()))


def check_clusters(k: object, clients: int, name: str = "k") -> None:
    """Check a number of clusters.

    Args:
        k: the number to check.
        clients: the number of clients to cluster.
        name: the option's name, for the message.

    Raises:
        UsageError: `k` is not a whole number from 1 to `clients`.
    """
    # bool is an Integral, and True is no number of clusters
    if not isinstance(k, Integral) or isinstance(k, bool) or not 1 <= int(k) <= clients:
        raise UsageError(
            f"{name} = {k!r} clusters cannot be made of {clients} clients: it is a whole number "
            "from 1 to that of clients"
        )


def relabel(labels: Sequence[int]) -> list[int]:
    """Number clusters from 0 in the order of their first members.

    Args:
        labels: each client's cluster, (m,); each -1 becomes a cluster of its own.
    """
    numbers: dict[tuple[int, int], int] = {}
    relabelled = []
    for position, label in enumerate(labels):
        # The position keeps two noise points apart; members of a cluster share the key (label, -1).
        key = (label, -1)
        if label < 0:
            key = (label, position)
        number = numbers.setdefault(key, len(numbers))
        relabelled.append(number)
    return relabelled
