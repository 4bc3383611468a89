"""DBSCAN on similarities, and the choice of its eps."""

from __future__ import annotations

from collections.abc import Sequence
from numbers import Integral, Real

import numpy as np

from securecluster.clustering.labels import Array, relabel
from securecluster.errors import UsageError

TRIED = 50  # values of DBSCAN's eps


def dbscan(distance: Array, eps: float, least: int) -> list[int]:
    """DBSCAN's clusters, numbered from 0, of points that are known by their distances (m, m) (Ester
    et al. 1996); noise is -1.

    Args:
        eps: points are neighbours up to this distance.
        least: neighbours, itself among them, that make a point a core of a cluster.
    """
    from sklearn.cluster import DBSCAN

    found: list[int] = (
        DBSCAN(eps=max(eps, np.finfo(float).tiny), min_samples=least, metric="precomputed")
        .fit_predict(distance)
        .tolist()
    )
    return found


def check_dbscan(eps: object, least: object) -> None:
    """Raise UsageError for what is no distance, or no number of neighbours; None leaves either
    open.
    """
    if eps is not None and not (isinstance(eps, Real) and 0 <= float(eps) < np.inf):
        raise UsageError(
            f"eps = {eps!r} is no distance: give a finite number from 0, or leave it out"
        )
    if least is not None and not (isinstance(least, Integral) and int(least) >= 1):
        raise UsageError(
            f"min_samples = {least!r} is not possible: it is a whole number from 1, or left out"
        )


def most_similar(similarity: Array, labels: Sequence[int]) -> list[int]:
    """For each of some points, the cluster to whose members it is most similar on average (ours).

    Args:
        similarity: to the m points that are in clusters, (n, m).
        labels: of these, (m,).
    """
    clusters = sorted(set(labels))
    means = np.stack([similarity[:, np.equal(labels, c)].mean(1) for c in clusters], axis=1)
    return [clusters[k] for k in means.argmax(1)]


def neighbourhood(similarity: Array, least: int) -> float:
    """An eps for `dbscan` on 1 - similarity (m, m): of those at which users become cores, the one
    of the largest modularity (ours).
    """
    distance = 1 - similarity
    # where each has `least` neighbours
    cores = np.sort(distance, axis=1)[:, min(least, len(distance)) - 1]
    tried = np.unique(np.quantile(cores, np.linspace(0, 1, TRIED)).clip(0))
    return max(
        (modularity(similarity, relabel(dbscan(distance, float(eps), least))), float(eps))
        for eps in tried
    )[1]


def modularity(similarity: Array, labels: Sequence[int]) -> float:
    """How far the similarity within clusters exceeds what the clusters' shares of all similarity
    let expect (Newman 2004, weighted).

    One cluster has 0, and clusters of one less than that. The diagonal is not read.
    """
    weight = similarity - np.diag(np.diag(similarity))
    member = np.equal.outer(np.unique(labels), np.asarray(labels)).astype(np.float64)  # (K, m)
    between = member @ weight @ member.T
    total = max(float(between.sum()), np.finfo(float).tiny)
    return float(np.trace(between) / total - ((between.sum(1) / total) ** 2).sum())
