"""DBSCAN on similarities, and the choice of its eps."""

from __future__ import annotations

from collections.abc import Sequence
from numbers import Integral, Real

import numpy as np

from securecluster.clustering.labels import Array, relabel
from securecluster.errors import UsageError

TRIED = 50  # values of DBSCAN's eps


def dbscan(distance: Array, eps: float, min_samples: int) -> list[int]:
    """Cluster points by DBSCAN, given only their distances (Ester et al. 1996).

    Args:
        distance: (m, m), symmetric.
        eps: points up to this distance are neighbours.
        min_samples: neighbours, the point itself included, that make a point a core of a cluster.

    Returns:
        Labels (m,) from 0; -1 for noise.
    """
    from sklearn.cluster import DBSCAN

    # scikit-learn refuses eps = 0, at which equal points are still neighbours.
    positive_eps = max(eps, np.finfo(float).tiny)
    estimator = DBSCAN(eps=positive_eps, min_samples=min_samples, metric="precomputed")
    labels: list[int] = estimator.fit_predict(distance).tolist()
    return labels


def check_dbscan(eps: object, min_samples: object) -> None:
    """Check DBSCAN's options; None leaves an option to its default.

    Args:
        eps: largest distance of neighbours.
        min_samples: neighbours of a core point.

    Raises:
        UsageError: `eps` is not a finite number from 0, or `min_samples` no whole number from 1.
    """
    if eps is not None and not _is_distance(eps):
        raise UsageError(
            f"eps = {eps!r} is no distance: give a finite number from 0, or leave it out"
        )
    if min_samples is not None and not _is_count(min_samples):
        raise UsageError(
            f"min_samples = {min_samples!r} is not possible: it is a whole number from 1, or left "
            "out"
        )


def most_similar(similarity: Array, labels: Sequence[int]) -> list[int]:
    """Assign each of n points to the cluster of largest mean similarity (not in the paper).

    Args:
        similarity: similarities to the m points that are in clusters, (n, m).
        labels: clusters of these m points, (m,).

    Returns:
        Labels (n,).
    """
    clusters = sorted(set(labels))
    means = []
    for cluster in clusters:
        in_cluster = np.equal(labels, cluster)
        to_cluster = similarity[:, in_cluster]
        means.append(to_cluster.mean(1))
    best = np.stack(means, axis=1).argmax(1)
    return [clusters[position] for position in best]


def neighbourhood(similarity: Array, min_samples: int) -> float:
    """Choose the eps of `dbscan` on 1 − similarity by the modularity of its clusters (not in the
    paper).

    Args:
        similarity: (m, m).
        min_samples: neighbours, the point itself included, that make a point a core.

    Returns:
        The candidate eps of largest modularity, the largest one of several.
    """
    distance = 1 - similarity
    # Labels can change at these distances: from them on a point has `min_samples` neighbours.
    farthest = min(min_samples, len(distance)) - 1
    core_distances = np.sort(distance, axis=1)[:, farthest]
    levels = np.linspace(0, 1, TRIED)
    quantiles = np.quantile(core_distances, levels)
    candidates = np.unique(quantiles.clip(0))
    scored = []
    for eps in candidates:
        # Noise counts as clusters of one point each, so that a partition can be scored.
        labels = relabel(dbscan(distance, float(eps), min_samples))
        score = modularity(similarity, labels)
        scored.append((score, float(eps)))
    _, best_eps = max(scored)
    return best_eps


def modularity(similarity: Array, labels: Sequence[int]) -> float:
    """Return the weighted modularity of a clustering (Newman 2004).

    It is the share of similarity within clusters, less the share expected from the clusters'
    weights. A single cluster has 0, and clusters of one point each have less.

    Args:
        similarity: weights of all pairs, (m, m); the diagonal is not read.
        labels: each point's cluster, (m,).
    """
    diagonal = np.diag(similarity)
    weight = similarity - np.diag(diagonal)
    is_member = np.equal.outer(np.unique(labels), np.asarray(labels))
    indicator = is_member.astype(np.float64)  # (K, m)
    between = indicator @ weight @ indicator.T
    # Positive, so that similarities that are all zero do not divide by zero.
    tiny = np.finfo(float).tiny
    volume = max(float(between.sum()), tiny)
    observed = np.trace(between) / volume
    cluster_shares = between.sum(1) / volume
    expected = (cluster_shares**2).sum()
    return float(observed - expected)


def _is_distance(value: object) -> bool:
    return isinstance(value, Real) and 0 <= float(value) < np.inf


def _is_count(value: object) -> bool:
    return isinstance(value, Integral) and int(value) >= 1
