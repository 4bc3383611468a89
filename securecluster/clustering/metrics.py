"""How good a clustering is, against the true one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypedDict

import numpy as np


class Agreement(TypedDict):
    """Clustering scores; 1 is perfect for each. `exact`: the same partition up to the names of the
    clusters.
    """

    ari: float
    nmi: float
    purity: float
    exact: bool


def agreement(labels: Sequence[int], truth: Sequence[int]) -> Agreement:
    """Adjusted Rand index, normalised mutual information, purity and exact recovery of `truth` by
    `labels`.
    """
    from sklearn.metrics import adjusted_rand_score, normalized_mutual_info_score
    from sklearn.metrics.cluster import contingency_matrix

    table = contingency_matrix(truth, labels)
    exact = bool(
        (np.count_nonzero(table, axis=0) == 1).all()
        and (np.count_nonzero(table, axis=1) == 1).all()
    )
    return {
        "ari": float(adjusted_rand_score(truth, labels)),
        "nmi": float(normalized_mutual_info_score(truth, labels)),
        "purity": float(table.max(axis=0).sum() / table.sum()),
        "exact": exact,
    }


def mean(values: np.ndarray[Any, Any]) -> float | None:
    """The mean over clients that have test data; None where nobody has."""
    known = values[~np.isnan(values)]
    return float(known.mean()) if known.size else None


def share_at(values: np.ndarray[Any, Any], target: float) -> float | None:
    """The share of clients whose value reaches the target, of those that have test data; None where
    nobody has.
    """
    known = values[~np.isnan(values)]
    return float((known >= target).mean()) if known.size else None


def pearson(a: np.ndarray[Any, Any], b: np.ndarray[Any, Any]) -> float:
    """Pearson's correlation of two arrays of one shape, in float64; NaN where one of them is
    constant or has fewer than two numbers.
    """
    x, y = (
        values.astype(np.float64).ravel() - np.mean(values, dtype=np.float64)
        if values.size
        else values
        for values in (a, b)
    )
    scale = float(np.sqrt((x * x).sum() * (y * y).sum()))
    return float(x @ y) / scale if scale > 0 else float("nan")
