"""Clusterings that bear noise: average linkage, spectral clustering and k-means of similarities, and how many clusters there are."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from securecluster.clustering import Bipartition, bipartition, evidence, kmeans, members, numbered
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


def contrasted(distance: Array) -> Array:
    """Return exp(−d / mean d) of distances (m, m): similarities that differ however small distances are.

    Similarities that are all near 1 leave spectral clustering the eigenvalues of the diagonal alone.
    """
    others = distance[~np.eye(len(distance), dtype=bool)]
    mean = float(others.mean()) if others.size else 0.0
    return np.exp(-distance / mean) if mean > 0 else 1 - distance


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
    """The bipartition that a clusterer makes, with the mean similarity across it (ours); "paper" is `bipartition`, with the largest.

    As many clusters as `eigengap` sees, two at least, are put together into two: halving at once would cut through clusters where there
    are more. The largest and smallest of many similarities follow their noise; means do not.
    """
    if clusterer == "paper" or len(alpha) < 3:
        return bipartition(alpha)
    labels = np.asarray(partition(alpha, clusterer, max(2, eigengap(alpha)), seed))
    if not labels.any():  # equal points
        return bipartition(alpha)
    member = np.equal.outer(np.arange(labels.max() + 1), labels) / np.bincount(labels)[:, None]  # (k, m), rows of sum 1
    apart = 1 - member @ alpha @ member.T
    np.fill_diagonal(apart, 0.0)
    side = np.asarray(into(merges(apart, "average"), 2))[labels]
    first, second = (tuple(own) for own in members(side.tolist()))
    return Bipartition(first, second, float(alpha[np.ix_(first, second)].mean()))


def weighed(alpha: Array, halves: Bipartition, clusterer: str, scatter: float = 0.0) -> tuple[float, float]:
    """The evidence for a split, as `clustering.evidence`; for clusterers other than the paper's from means instead of extremes (ours).

    Then the gap is that of the mean similarity within halves to the mean across, but at most the least over clients of the mean similarity
    to the others of its half less that to the other half, to which twice the scatter is granted; it is weighed by the smaller half's size
    less one: an outlier is no cluster. It counts only if the means differ by more than noise alone gives the best of all 2^(m − 1) − 1
    bipartitions but with a probability of a thousandth (union bound over Gaussians).

    Args:
        scatter: the standard deviation that noise gives a similarity.
    """
    if clusterer == "paper":
        return evidence(alpha, halves)
    first, second = np.array(halves.first), np.array(halves.second)
    least = min(len(first), len(second))
    if least < 2:
        return -2.0, 0.0
    own = [(alpha[np.ix_(h, h)].sum(1) - alpha.diagonal()[h]) / (len(h) - 1) for h in (first, second)]
    apart = [alpha[np.ix_(h, g)].mean(1) for h, g in ((first, second), (second, first))]
    worst = min(float((o - a).min()) for o, a in zip(own, apart, strict=True))
    pairs = [len(h) * (len(h) - 1) / 2 for h in (first, second)]
    gap = float((pairs[0] * own[0].mean() + pairs[1] * own[1].mean()) / sum(pairs) - apart[0].mean())
    chance = math.sqrt(2 * ((len(alpha) - 1) * math.log(2) + math.log(1000)))
    drowned = gap <= chance * scatter * math.sqrt(1 / sum(pairs) + 1 / (len(first) * len(second)))
    return gap, 0.0 if drowned else (least - 1) * min(gap, worst + 2 * scatter)
