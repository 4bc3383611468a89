"""Scores of a clustering against the true one, and summaries over clients."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, TypedDict

import numpy as np

Values = np.ndarray[Any, Any]


class Agreement(TypedDict):
    """Scores of a clustering against the true one; 1 is perfect for each.

    `exact` is True for the same partition, whatever the clusters are numbered.
    """

    ari: float
    nmi: float
    purity: float
    exact: bool


def agreement(labels: Sequence[int], truth: Sequence[int]) -> Agreement:
    """Compare a clustering with the true one.

    Args:
        labels: each client's cluster, (m,).
        truth: each client's true cluster, (m,).

    Returns:
        Adjusted Rand index, normalised mutual information, purity, and exact recovery.
    """
    # A run asks for it in every round, and clusters seldom change.
    return _agreement(tuple(labels), tuple(truth)).copy()


@lru_cache(maxsize=64)
def _agreement(labels: tuple[int, ...], truth: tuple[int, ...]) -> Agreement:
    """Return the scores of `agreement`, which are stored."""
    from sklearn.metrics import adjusted_rand_score, normalized_mutual_info_score
    from sklearn.metrics.cluster import contingency_matrix

    table = contingency_matrix(truth, labels)
    # The partitions are the same if each cluster meets one true cluster only, and the reverse.
    true_clusters_met = np.count_nonzero(table, axis=0)
    clusters_met = np.count_nonzero(table, axis=1)
    exact = bool((true_clusters_met == 1).all() and (clusters_met == 1).all())
    majorities = table.max(axis=0)
    return {
        "ari": float(adjusted_rand_score(truth, labels)),
        "nmi": float(normalized_mutual_info_score(truth, labels)),
        "purity": float(majorities.sum() / table.sum()),
        "exact": exact,
    }


def mean(values: Values) -> float | None:
    """Return the mean over the clients that have test data.

    Args:
        values: one value a client, (m,); NaN for a client without test data.

    Returns:
        The mean, or None if no client has test data.
    """
    present = _present(values)
    if not present.size:
        return None
    return float(present.mean())


def share_at(values: Values, target: float) -> float | None:
    """Return the share of clients that reach a target value.

    Args:
        values: one value a client, (m,); NaN for a client without test data, which does not count.
        target: the least value that reaches it.

    Returns:
        The share in [0, 1], or None if no client has test data.
    """
    present = _present(values)
    if not present.size:
        return None
    reached = present >= target
    return float(reached.mean())


def pearson(a: Values, b: Values) -> float:
    """Return Pearson's correlation of two arrays of one shape, in float64.

    Args:
        a: numbers of any shape.
        b: numbers of the same shape.

    Returns:
        The correlation; NaN if an array is constant or has fewer than two numbers.
    """
    x = _centred(a)
    y = _centred(b)
    x_square = (x * x).sum()
    y_square = (y * y).sum()
    scale = float(np.sqrt(x_square * y_square))
    if not scale > 0:
        return float("nan")
    return float(x @ y) / scale


def _present(values: Values) -> Values:
    return values[~np.isnan(values)]


def _centred(values: Values) -> Values:
    """Return the numbers less their mean, flattened, float64."""
    # The mean of no numbers is NaN, with a warning.
    if not values.size:
        return values
    flat = values.astype(np.float64).ravel()
    return np.asarray(flat - np.mean(values, dtype=np.float64))
