"""How good a clustering is, against the true one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypedDict

import numpy as np


class Agreement(TypedDict):
    """Clustering scores; 1 is perfect for each. `exact`: the same partition up to the names of the clusters."""

    ari: float
    nmi: float
    purity: float
    exact: bool


def agreement(labels: Sequence[int], truth: Sequence[int]) -> Agreement:
    """Adjusted Rand index, normalised mutual information, purity and exact recovery of `truth` by `labels`."""
    from sklearn.metrics import adjusted_rand_score, normalized_mutual_info_score
    from sklearn.metrics.cluster import contingency_matrix

    table = contingency_matrix(truth, labels)
    exact = bool((np.count_nonzero(table, axis=0) == 1).all() and (np.count_nonzero(table, axis=1) == 1).all())
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
    """The share of clients whose value reaches the target, of those that have test data; None where nobody has."""
    known = values[~np.isnan(values)]
    return float((known >= target).mean()) if known.size else None


def pearson(one: np.ndarray[Any, Any], other: np.ndarray[Any, Any]) -> float | None:
    """Pearson's correlation of two series (n,); None where one of them is constant, or there are fewer than two numbers."""
    a, b = (np.asarray(v, dtype=np.float64) - np.mean(v) if len(v) else np.zeros(0) for v in (one, other))
    size = float(np.sqrt((a @ a) * (b @ b)))
    flat = min((float(np.abs(own).max(initial=0)) for own in (a, b)), default=0.0) < 1e-12
    return None if flat or size == 0 else float(np.clip(a @ b / size, -1, 1))
