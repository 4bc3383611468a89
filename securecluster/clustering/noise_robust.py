"""Clusterings that bear noise: average linkage, spectral clustering and k-means of similarities,
and how many clusters there are.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from securecluster.clustering.agglomerative import into, merges, threshold
from securecluster.clustering.bipartition import Bipartition, bipartition, intra_min, separated
from securecluster.clustering.k_means import kmeans
from securecluster.clustering.labels import members, relabel
from securecluster.clustering.significance import Null, p_value
from securecluster.errors import UsageError, unknown

Array = NDArray[np.float64]
LEVEL = 0.01  # of the test by which a smaller gap of merges than usual counts, too
EVIDENCE = 0.25  # the least separation that is tested; found by trial
CLUSTERERS = ("paper", "average", "spectral", "kmeans")


def partition(similarity: Array, clusterer: str, k: int | None = None, seed: int = 0) -> list[int]:
    """Clusters of points that are known by their similarities (m, m) in [-1, 1], numbered from 0 in
    the order of their first members.

    "average" merges by average linkage of 1 − similarity, "kmeans" is k-means of points with these
    inner products, "spectral" that of the unit rows of the first k eigenvectors of the normalised
    affinity, which is similarity where it is positive, else 0 (Ng, Jordan, Weiss 2001). Equal
    points stay together where k lets them; there may be fewer clusters than k where fewer points
    differ.

    Args:
        k: how many clusters; None: `eigengap`.

    Raises:
        UsageError: an unknown clusterer, or a matrix that is not finite and square.
    """
    if clusterer not in CLUSTERERS[1:]:
        raise unknown("clusterer", clusterer, CLUSTERERS)
    m = len(similarity)
    if similarity.shape != (m, m) or not np.isfinite(similarity).all():
        raise UsageError(
            f"clustering needs a finite square similarity matrix, not {similarity.shape}"
        )
    k = min(m, eigengap(similarity) if k is None else k)
    if k < 2:
        return [0] * m
    if clusterer == "average":
        return into(merges(np.where(np.eye(m, dtype=bool), 0.0, 1 - similarity), "average"), k)
    if clusterer == "kmeans":
        return relabel(kmeans(similarity, k, seed))
    vectors = np.linalg.eigh(affinity(similarity))[1][:, -k:]
    size = np.linalg.norm(vectors, axis=1, keepdims=True)
    points = vectors / np.where(size > np.sqrt(m) * np.finfo(float).eps, size, 1)
    return relabel(kmeans(points @ points.T, k, seed))


def contrasted(distance: Array) -> Array:
    """Return exp(−d / mean d) of distances (m, m): similarities that differ however small distances
    are.

    Similarities that are all near 1 leave spectral clustering the eigenvalues of the diagonal
    alone.
    """
    others = distance[~np.eye(len(distance), dtype=bool)]
    mean = float(others.mean()) if others.size else 0.0
    return np.exp(-distance / mean) if mean > 0 else 1 - distance


def affinity(similarity: Array) -> Array:
    """D^-½·W·D^-½ of W = max(similarity, 0) off the diagonal, 0 on it; D its row sums. Eigenvalues
    lie in [-1, 1].
    """
    weight = np.where(np.eye(len(similarity), dtype=bool), 0.0, similarity.clip(0))
    total = weight.sum(1)
    scale = np.where(total > 0, 1 / np.sqrt(np.where(total > 0, total, 1.0)), 0.0)
    return np.asarray(weight * scale[:, None] * scale)


def eigengap(similarity: Array) -> int:
    """How many clusters, where nobody knows (ours): as many as eigenvalues of `affinity` stand
    before its largest gap, at most m / 2.

    Points that are alike within clusters only give an eigenvalue 1 for each, points without
    clusters, or with similarities that noise has drowned, one alone (von Luxburg 2007, 8.3).
    """
    values = np.linalg.eigvalsh(affinity(similarity))[::-1]
    most = max(1, len(values) // 2)
    return int((values[:most] - np.append(values, 0.0)[1 : most + 1]).argmax()) + 1


def split_into_two(alpha: Array, clusterer: str, seed: int = 0) -> Bipartition:
    """The bipartition that a clusterer makes, with the mean similarity across it (ours); "paper" is
    `bipartition`, with the largest.

    As many clusters as `eigengap` sees, two at least, are put together into two: halving at once
    would cut through clusters where there are more. The largest and smallest of many similarities
    follow their noise; means do not.
    """
    if clusterer == "paper" or len(alpha) < 3:
        return bipartition(alpha)
    labels = np.asarray(partition(alpha, clusterer, max(2, eigengap(alpha)), seed))
    if not labels.any():  # equal points
        return bipartition(alpha)
    # (k, m), rows of sum 1
    member = np.equal.outer(np.arange(labels.max() + 1), labels) / np.bincount(labels)[:, None]
    apart = 1 - member @ alpha @ member.T
    np.fill_diagonal(apart, 0.0)
    side = np.asarray(into(merges(apart, "average"), 2))[labels]
    first, second = (tuple(own) for own in members(side.tolist()))
    return Bipartition(first, second, float(alpha[np.ix_(first, second)].mean()))


def gap_between(alpha: Array, halves: Bipartition) -> float:
    """Return how far the more coherent half's least similarity exceeds the one across; -2 without a
    half of two.
    """
    coherent = [intra_min(alpha, half) for half in (halves.first, halves.second) if len(half) > 1]
    if not coherent:
        return -2.0
    return max(coherent) - halves.cross_max


def with_company(alpha: Array, found: Bipartition) -> Bipartition:
    """Return a bipartition as it is, or, where it parts a lone client from all others, the best
    separated cluster and its rest (ours).

    The client that is least like anyone, often the one with the fewest samples, is no evidence of a
    cluster, and that of the others lies elsewhere, unless they are the best separated cluster
    themselves.
    """
    if min(len(found.first), len(found.second)) > 1:
        return found
    best = separated(alpha).best
    rest = tuple(k for k in range(len(alpha)) if k not in best)
    if len(best) < 2 or len(rest) < 2:
        return found
    first, second = (best, rest) if 0 in best else (rest, best)
    return Bipartition(first, second, float(alpha[np.ix_(first, second)].max()))


class SplitEvidence(NamedTuple):
    """How separated clients are, and how often clients without clusters would be as separated."""

    separation: float
    p_value: float


def evidence_for_split(
    alpha: Array, clusterer: str, least: float, level: float, seed: int
) -> SplitEvidence:
    """Return how separated clients are, and the p-value: how often clients without clusters would
    be as separated (ours).

    The separation is `clustering.separated` for the paper's bipartition, and `mean_separation` of
    the clusters that another clusterer makes of each draw. The null distribution is
    `significance.Null`, the residual noise within the clusters found. Among a hundred clients a few
    pairs are more alike than Gaussian noise makes them, though they are no cluster that is worth a
    model: hence `least`.

    Args:
        alpha: cosines, (m, m), m >= 2.
        least: separations up to this are not tested: their p-value is 1.
        level: draws are made until one is as separated, or until the p-value is known to be at most
            this.
        seed: of the draws, and of the clusterer's starts.
    """

    def score(drawn: Array) -> tuple[float, list[int]]:
        if clusterer == "paper":
            return separated(drawn)[:2]
        labels = partition(drawn, clusterer, max(2, eigengap(drawn)), seed)
        return mean_separation(drawn, labels), labels

    observed, labels = score(alpha)
    if observed <= least or len(set(labels)) in (1, len(labels)):
        return SplitEvidence(observed, 1.0)
    null = Null.within(alpha, labels)
    return SplitEvidence(
        observed,
        p_value(lambda drawn: score(drawn)[0], observed, null, level, np.random.default_rng(seed)),
    )


def default_threshold(tree: Array, gap: float, alpha: Array, seed: int) -> float:
    """Return where to cut merges when nobody knows (ours): at their largest gap, if it is large or
    clusters are significant.

    Args:
        tree: scipy's linkage matrix.
        gap: the ratio of heights from which a gap is large (`hierarchy.gap_of`).
        alpha: cosines of what was merged, (m, m); `evidence_for_split` of these is tested where the
            gap is smaller.
        seed: of the test's draws.
    """
    everyone = threshold(tree, math.inf)
    found = threshold(tree, gap)
    if found < everyone:
        return found
    significant = evidence_for_split(alpha, "paper", EVIDENCE, LEVEL, seed).p_value <= LEVEL
    return threshold(tree, 1.0) if significant else everyone


def mean_separation(alpha: Array, labels: Sequence[int]) -> float:
    """Return the mean similarity of pairs of clients in one cluster less that of pairs in different
    clusters (ours).

    The largest and smallest of many similarities follow their noise; means do not. Minus infinity
    where either kind of pair is missing.

    Args:
        alpha: similarities, (m, m); the diagonal is not read.
        labels: each client's cluster, (m,).
    """
    pair = np.triu(np.ones(alpha.shape, dtype=bool), 1)
    together = np.equal.outer(np.asarray(labels), np.asarray(labels))
    within, across = alpha[pair & together], alpha[pair & ~together]
    return float(within.mean() - across.mean()) if within.size and across.size else -math.inf
