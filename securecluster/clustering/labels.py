"""Clusterings of similarity matrices."""

from __future__ import annotations

from collections.abc import Sequence
from numbers import Integral

import numpy as np
from numpy.typing import NDArray

from securecluster.errors import UsageError

Array = NDArray[np.float64]


def members(labels: Sequence[int]) -> list[list[int]]:
    """The clients of each cluster 0 … max(labels), in order."""
    found: list[list[int]] = [[] for _ in range(1 + max(labels, default=-1))]
    for i, label in enumerate(labels):
        found[label].append(i)
    return found


def largest(labels: Sequence[int]) -> int:
    """The cluster with most clients, of equal ones the first: where a client of which nothing is
    known most likely belongs (ours).
    """
    return max(range(1 + max(labels)), key=list(labels).count)


def check_number(k: object, clients: int, name: str = "k") -> None:
    """Raise UsageError for a number of clusters that cannot be made of so many clients."""
    if not isinstance(k, Integral) or not 1 <= int(k) <= clients:
        raise UsageError(
            f"{name} = {k!r} clusters cannot be made of {clients} clients: it is a whole number "
            "from 1 to that of clients"
        )


def relabel(labels: Sequence[int]) -> list[int]:
    """Clusters numbered from 0 in the order of their first members; each of those labelled -1 is
    one of its own.
    """
    found: dict[tuple[int, int], int] = {}
    return [
        found.setdefault((label, k if label < 0 else -1), len(found))
        for k, label in enumerate(labels)
    ]
