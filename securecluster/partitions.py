"""Clusterings that bear noise: average linkage, spectral clustering and k-means of similarities, and how many clusters there are."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from securecluster.clustering import Bipartition, bipartition, kmeans, members, numbered
from securecluster.errors import UsageError, unknown
from securecluster.hierarchy import into, merges

Array = NDArray[np.float64]
CLUSTERERS = ("paper", "average", "spectral", "kmeans")


def partition(similarity: Array, clusterer: str, k: int | None = None, seed: int = 0) -> list[int]:
    """Clusters of points that are known by their similarities (m, m) in [-1, 1], numbered from 0 in the order of their first members.

    "average" merges by average linkage of 1 − similarity, "kmeans" is k-means of points with these inner products, "spectral" that of
    the unit rows of the first k eigenvectors of the normalised affinity, which is similarity where it is positive, else 0 (Ng, Jordan,
    Weiss 2001). Equal points stay together where k lets them; there may be fewer clusters than k where fewer points differ.

    Args:
        k: how many clusters; None: `eigengap`.

    Raises:
        UsageError: an unknown clusterer, or a matrix that is not finite and square.
    """
    if clusterer not in CLUSTERERS[1:]:
        raise unknown("clusterer", clusterer, CLUSTERERS)
    m = len(similarity)
    if similarity.shape != (m, m) or not np.isfinite(similarity).all():
        raise UsageError(f"clustering needs a finite square similarity matrix, not {similarity.shape}")
    k = min(m, eigengap(similarity) if k is None else k)
    if k < 2:
        return [0] * m
    if clusterer == "average":
        return into(merges(np.where(np.eye(m, dtype=bool), 0.0, 1 - similarity), "average"), k)
    if clusterer == "kmeans":
        return numbered(kmeans(similarity, k, seed))
    vectors = np.linalg.eigh(affinity(similarity))[1][:, -k:]
    size = np.linalg.norm(vectors, axis=1, keepdims=True)
    points = vectors / np.where(size > np.sqrt(m) * np.finfo(float).eps, size, 1)
    return numbered(kmeans(points @ points.T, k, seed))


def affinity(similarity: Array) -> Array:
    """D^-½·W·D^-½ of W = max(similarity, 0) off the diagonal, 0 on it; D its row sums. Eigenvalues lie in [-1, 1]."""
    weight = np.where(np.eye(len(similarity), dtype=bool), 0.0, similarity.clip(0))
    total = weight.sum(1)
    scale = np.where(total > 0, 1 / np.sqrt(np.where(total > 0, total, 1.0)), 0.0)
    return np.asarray(weight * scale[:, None] * scale)


def eigengap(similarity: Array) -> int:
    """How many clusters, where nobody knows (ours): as many as eigenvalues of `affinity` stand before its largest gap, at most m / 2.

    Points that are alike within clusters only give an eigenvalue 1 for each, points without clusters, or with similarities that noise
    has drowned, one alone (von Luxburg 2007, 8.3).
    """
    values = np.linalg.eigvalsh(affinity(similarity))[::-1]
    most = max(1, len(values) // 2)
    return int((values[:most] - np.append(values, 0.0)[1 : most + 1]).argmax()) + 1


def halves(alpha: Array, clusterer: str, seed: int = 0) -> Bipartition:
    """The bipartition that a clusterer makes, with the mean similarity across it: "paper" is `bipartition` itself, with the largest (the rest is ours).

    The largest and smallest of many similarities follow their noise; means do not.
    """
    if clusterer == "paper" or len(alpha) < 3:
        return bipartition(alpha)
    labels = partition(alpha, clusterer, 2, seed)
    if max(labels) == 0:  # equal points
        return bipartition(alpha)
    first, second = (tuple(own) for own in members(labels))
    return Bipartition(first, second, float(alpha[np.ix_(first, second)].mean()))
