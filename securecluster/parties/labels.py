"""Checks of the labels that a protocol's own methods return."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from securecluster.errors import UsageError

UNKNOWN_LABEL = -1  # of a client whose cluster a server does not know


def checked_labels(
    method: str, labels: Sequence[int], count: int, existing: int | None = None
) -> list[int]:
    """Return labels as a list of ints, after a check.

    Args:
        method: name of the method that returned them.
        labels: one for each client.
        count: number of clients.
        existing: number of clusters that labels may name; None allows any.

    Raises:
        UsageError: another number of labels, or labels that name no cluster.
    """
    try:
        values = np.asarray(labels)
    except ValueError:  # parts of unequal lengths
        values = np.empty(0)
    if values.shape != (count,) or not np.issubdtype(values.dtype, np.integer):
        raise UsageError(
            f"{method} returns one label for each of {count} clients: return a list of {count} "
            "whole numbers"
        )
    numbers: list[int] = values.tolist()
    if min(numbers, default=0) < 0:
        raise UsageError(f"{method} returns {numbers}: number the clusters from 0")
    if existing is not None and max(numbers, default=0) >= existing:
        raise UsageError(
            f"{method} returns {numbers}: the run has the clusters 0 to {existing - 1}, and "
            "newcomers join one of these"
        )
    return numbers


def check_numbering(method: str, labels: Sequence[int]) -> None:
    """Raise UsageError unless labels number the clusters from 0 without gaps.

    Args:
        method: name of the method that returned them.
        labels: of all clients.
    """
    numbers = set(labels)
    if numbers != set(range(len(numbers))):
        raise UsageError(f"{method} returns {list(labels)}: number the clusters from 0, no gaps")
