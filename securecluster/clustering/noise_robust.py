"""Clusterings that are robust to noise in the similarities.

Average linkage, spectral clustering and k-means of similarities, and the number of clusters.

The largest of many noisy similarities depends on the noise most. So all clusterers but the paper's
decide on a split by mean similarities, and by the probability that noise alone would cause it; the
number of clusters is that of the eigenvalues before the largest gap of the normalised affinity.

Of more than `TESTED` clients, `TESTED_BY_MEANS` with a clusterer other than the paper's, a random
sample is drawn and tested: a draw takes m³ operations, and a p-value of 0.001 needs 999 draws. The
sample does not depend on the similarities, and clients without clusters are exchangeable, so the
level holds. The clusters are those of all clients; only the p-value is of the sample, for these
clusters and not for clusters of its own. For the paper's clusterer it can only err upwards; for
others this is measured (docs/evidence/scale.md), not proven. Draws whose score is certainly
below the clients' are not scored, which changes no p-value.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from securecluster.clustering.agglomerative import cut, cut_into, merges, threshold
from securecluster.clustering.bipartition import (
    Bipartition,
    bipartition,
    intra_min,
    separated,
    separation_of,
    separation_scores,
)
from securecluster.clustering.k_means import kmeans, kmeans_of_points
from securecluster.clustering.labels import is_finite_square, members, relabel
from securecluster.clustering.significance import Null, Watch, p_value
from securecluster.errors import UsageError, unknown

Array = NDArray[np.float64]
LEVEL = 0.05  # of the test by which a smaller gap of merges than usual counts, too
# share of the largest gap of merges, in logarithms, that a lower one needs to be cut at; found on
# the first sides of `benchmarks.clusters.robust`
NESTED = 0.7
CLUSTERERS = ("paper", "average", "spectral", "kmeans")
NOISE_ROBUST = CLUSTERERS[1:]  # not in the paper
# largest numbers of clients that the test draws, so that a thousand draws take about two seconds
TESTED = 150
TESTED_BY_MEANS = 80


class SplitEvidence(NamedTuple):
    """Evidence that a group of clients has clusters.

    Attributes:
        separation: separation of the clusters found among all clients.
        p_value: how often clients without clusters are as separated.
    """

    separation: float
    p_value: float


def partition(similarity: Array, clusterer: str, k: int | None = None, seed: int = 0) -> list[int]:
    """Cluster points, given only their similarities.

    "average" merges by average linkage of 1 − similarity. "kmeans" is k-means of points with these
    inner products. "spectral" is k-means of the unit rows of the first k eigenvectors of `affinity`
    (Ng, Jordan, Weiss 2001).

    Args:
        similarity: (m, m) in [-1, 1], symmetric.
        clusterer: one of `CLUSTERERS`, but not "paper".
        k: number of clusters; None: `eigengap`.
        seed: seed of the starts of k-means.

    Returns:
        Labels (m,), numbered from 0 in the order of first members. Equal points stay together where
        k permits it; there may be fewer clusters than k where fewer points are distinct.

    Raises:
        UsageError: an unknown clusterer, or a matrix that is not finite and square.
    """
    if clusterer not in NOISE_ROBUST:
        raise unknown("clusterer", clusterer, CLUSTERERS)
    m = len(similarity)
    if not is_finite_square(similarity):
        raise UsageError(
            f"clustering needs a finite square similarity matrix, not {similarity.shape}"
        )
    if k is None:
        k = eigengap(similarity)
    k = min(m, k)
    if k < 2:
        return [0] * m
    if clusterer == "average":
        distance = _without_diagonal(1 - similarity)
        return cut_into(merges(distance, "average"), k)
    if clusterer == "kmeans":
        return relabel(kmeans(similarity, k, seed))
    points = _spectral_points(similarity, k)
    return relabel(kmeans_of_points(points, k, seed))


def contrasted(distance: Array) -> Array:
    """Return the similarities exp(−d / mean d), which differ however small distances are.

    Similarities that are all near 1 leave only the diagonal's eigenvalues to spectral clustering.

    Args:
        distance: (m, m).

    Returns:
        (m, m) in [0, 1].
    """
    off_diagonal = distance[~np.eye(len(distance), dtype=bool)]
    mean = 0.0
    if off_diagonal.size:
        mean = float(off_diagonal.mean())
    # Without any distance there is no scale.
    if not mean > 0:
        return 1 - distance
    return np.exp(-distance / mean)


def affinity(similarity: Array) -> Array:
    """Return the normalised affinity D^-½·W·D^-½, whose eigenvalues lie in [-1, 1].

    W is similarity where it is positive and off the diagonal, else 0; D contains its row sums.

    Args:
        similarity: (m, m), symmetric.

    Returns:
        (m, m); rows of points without positive similarity are 0.
    """
    weight = _without_diagonal(similarity.clip(0))
    degree = weight.sum(1)
    # Isolated points are replaced before the division, which would warn.
    connected = degree > 0
    safe_degree = np.where(connected, degree, 1.0)
    scale = np.where(connected, 1 / np.sqrt(safe_degree), 0.0)
    return np.asarray(weight * scale[:, None] * scale)


def eigengap(similarity: Array) -> int:
    """Return the number of clusters by the largest gap of eigenvalues of `affinity`.

    Not in the paper. Points that are similar within clusters only give one eigenvalue 1 for each
    cluster. Points without clusters, or with similarities that noise dominates, give a single one
    (von Luxburg 2007, 8.3).

    Args:
        similarity: (m, m), symmetric.

    Returns:
        The number of eigenvalues before the gap, from 1 to m / 2.
    """
    ascending = np.linalg.eigvalsh(affinity(similarity))
    # A single point's gap is to 0.
    values = np.append(ascending[::-1], 0.0)
    maximum = max(1, len(ascending) // 2)
    gaps = values[:maximum] - values[1 : maximum + 1]
    return int(gaps.argmax()) + 1


def split_into_two(alpha: Array, clusterer: str, seed: int = 0) -> Bipartition:
    """Return a clusterer's bipartition with the mean similarity across it (not in the paper).

    "paper" gives `bipartition`, with the largest similarity across it. The largest and smallest of
    many similarities follow their noise; means do not.

    Args:
        alpha: similarities, (m, m), symmetric, m >= 2.
        clusterer: one of `CLUSTERERS`.
        seed: seed of the clusterer's starts.
    """
    if clusterer == "paper" or len(alpha) < 3:
        return bipartition(alpha)
    # Splitting in two at once would cut through clusters where there are more than two.
    count = max(2, eigengap(alpha))
    labels = np.asarray(partition(alpha, clusterer, count, seed))
    if not labels.any():  # equal points
        return bipartition(alpha)
    sides = _two_groups(alpha, labels)[labels]
    first, second = members(sides.tolist())
    across = alpha[np.ix_(first, second)]
    return Bipartition(tuple(first), tuple(second), float(across.mean()))


def gap_between(alpha: Array, sides: Bipartition) -> float:
    """Return the separation gap of a bipartition's more coherent group.

    Args:
        alpha: similarities, (m, m).
        sides: the bipartition.

    Returns:
        The group's smallest similarity less the one across; −2 if no group has two members.
    """
    coherences = []
    for half in (sides.first, sides.second):
        if len(half) > 1:
            coherences.append(intra_min(alpha, half))
    # No difference of two cosines is smaller.
    if not coherences:
        return -2.0
    return max(coherences) - sides.cross_max


def without_isolated_client(alpha: Array, candidate: Bipartition) -> Bipartition:
    """Replace a bipartition that isolates one client (not in the paper).

    The client that is least similar to all others, often the one with the fewest samples, is no
    evidence of a cluster, and the clusters of the others lie elsewhere. Others with few samples
    lower the smallest similarity of their cluster, which is then better separated without them: so
    a client outside of it joins it if the most similar client is inside.

    Args:
        alpha: similarities, (m, m).
        candidate: a bipartition of the m clients.

    Returns:
        The best separated cluster, with those that join it, and the rest, if the bipartition
        isolates a client and these do not; else the bipartition itself.
    """
    if not _isolates_one(candidate.first, candidate.second):
        return candidate
    inside = np.zeros(len(alpha), dtype=bool)
    inside[list(separated(alpha).best)] = True
    if min(inside.sum(), (~inside).sum()) < 2:
        return candidate
    of_others = np.asarray(alpha, np.float64).copy()
    np.fill_diagonal(of_others, -math.inf)
    nearest_inside = of_others[:, inside].max(1)
    nearest_outside = of_others[:, ~inside].max(1)
    joining = ~inside & (nearest_inside > nearest_outside)
    if (~inside & ~joining).sum() >= 2:
        inside |= joining
    # By convention the first group contains position 0.
    in_first = inside == inside[0]
    first = tuple(np.flatnonzero(in_first).tolist())
    second = tuple(np.flatnonzero(~in_first).tolist())
    across = alpha[np.ix_(first, second)]
    return Bipartition(first, second, float(across.max()))


def evidence_for_split(
    alpha: Array,
    clusterer: str,
    minimum: float,
    level: float,
    seed: int,
    watch: Watch = lambda tested, draws: None,
) -> SplitEvidence:
    """Test if clients are more separated than clients without clusters (not in the paper).

    The separation is `bipartition.separated` for the paper's bipartition, and `mean_separation` of
    the clusters that another clusterer makes of each draw. The null distribution is
    `significance.Null`, the residual noise within the clusters found.

    Of more than `tested_together` clients a random sample is tested. Clients without clusters are
    exchangeable, so any sample that does not depend on the similarities has the same null
    distribution. The sample's separation is that of the clusters found among all clients, and not
    of clusters of its own. So what is split has to be significant, and many clients help to find
    it. For the paper's bipartition it is at most that of the sample's own clusters, which is what
    each draw has: the test errs on the side of no clusters.

    Args:
        alpha: cosines, (m, m), m >= 2.
        clusterer: one of `CLUSTERERS`.
        minimum: separations up to this are not tested: their p-value is 1.
        level: draws are made until one is as separated, or until the p-value is known to be at most
            this.
        seed: seed of the sample, of the draws, and of the clusterer's starts.
        watch: called after each draw, with how many are tested, and how many may be.

    Returns:
        The separation of all clients, and the p-value of the tested ones.
    """
    separation, labels = _separation(alpha, clusterer, seed)
    # Among a hundred clients a few pairs are more similar than Gaussian noise makes them, but they
    # are not a cluster that is worth a model.
    if separation <= minimum:
        return SplitEvidence(separation, 1.0)
    generator = np.random.default_rng(seed)
    observed = separation
    if len(alpha) > tested_together(clusterer):
        alpha, labels = _sample(alpha, labels, tested_together(clusterer), generator)
        observed = _separation_of(alpha, labels, clusterer)
    # The null needs noise within a cluster, and something to test.
    if len(set(labels)) in (1, len(labels)):
        return SplitEvidence(separation, 1.0)

    def statistic(drawn: Array) -> Iterable[float]:
        if clusterer == "paper":
            return separation_scores(drawn, observed)
        # One at a time, since no draw after the first as separated one is asked for.
        return (_separation(cosines, clusterer, seed)[0] for cosines in drawn)

    null = Null.within(alpha, labels)
    p = p_value(statistic, observed, null, level, generator, watch)
    return SplitEvidence(separation, p)


def tested_together(clusterer: str) -> int:
    """Return the largest number of clients that `evidence_for_split` draws.

    Each of some thousand draws takes m³ operations, and those of the other clusterers many more
    than those of the paper's.

    Args:
        clusterer: one of `CLUSTERERS`.
    """
    return TESTED if clusterer == "paper" else TESTED_BY_MEANS


def default_threshold(tree: Array, gap: float, alpha: Array, linkage: str, seed: int) -> float:
    """Return where to cut merges without a given height (not in the paper).

    The cut is at the largest gap of heights, if it is large or the clusters below it are
    significant; or at a lower gap that is nearly as large, since clusters of unequal sizes make
    groups.

    Args:
        tree: scipy's linkage matrix of m clients.
        gap: the ratio of heights from which a gap is large (`agglomerative.gap_of`).
        alpha: cosines of the merged rows, (m, m), for `evidence_for_clusters` where the gap is
            smaller.
        linkage: of the tree, and of the draws' merges.
        seed: seed of the test's draws.

    Returns:
        A height; that of the last merge if all clients are one cluster.
    """
    single_cluster = threshold(tree, math.inf)
    large = threshold(tree, gap, NESTED)
    if large < single_cluster:
        return large
    candidate = threshold(tree, 1.0, NESTED)
    labels = cut(tree, candidate)
    if evidence_for_clusters(alpha, labels, linkage, LEVEL, seed) > LEVEL:
        return single_cluster
    return candidate


def evidence_for_clusters(
    alpha: Array, labels: Sequence[int], linkage: str, level: float, seed: int
) -> float:
    """Test if clusters are more separated than those found among clients without any.

    Not in the paper. The separation is `mean_separation`; a draw of the null distribution,
    `significance.Null` of the clusters, is merged by the same linkage of its chords into as many
    clusters. Of more than `TESTED` clients a random sample is tested, with the clusters found
    among all of them.

    Args:
        alpha: cosines, (m, m).
        labels: the clusters, (m,).
        linkage: of the merges that found them.
        level: draws are made until one is as separated, or until the p-value is known to be at most
            this.
        seed: seed of the sample and of the draws.

    Returns:
        The p-value; 1 without something to test.
    """
    generator = np.random.default_rng(seed)
    if len(alpha) > TESTED:
        alpha, labels = _sample(alpha, labels, TESTED, generator)
    count = len(set(labels))
    # The null needs noise within a cluster, and something to test.
    if count in (1, len(labels)):
        return 1.0

    def statistic(drawn: Array) -> Iterable[float]:
        for cosines in drawn:
            chords = np.sqrt(np.maximum(2 - 2 * cosines, 0))
            drawn_labels = cut_into(merges(_without_diagonal(chords), linkage), count)
            yield mean_separation(cosines, drawn_labels)

    null = Null.within(alpha, labels)
    return p_value(statistic, mean_separation(alpha, labels), null, level, generator)


def mean_separation(alpha: Array, labels: Sequence[int]) -> float:
    """Return the mean similarity within clusters less that across clusters (not in the paper).

    The largest and smallest of many similarities follow their noise; means do not.

    Args:
        alpha: similarities, (m, m); the diagonal is not read.
        labels: each client's cluster, (m,).

    Returns:
        The difference over all pairs; minus infinity if all or no pairs are within clusters.
    """
    pair = ~np.tri(len(alpha), dtype=bool)
    clusters = np.asarray(labels)
    together = np.equal.outer(clusters, clusters)
    within = alpha[pair & together]
    across = alpha[pair & ~together]
    if not within.size or not across.size:
        return -math.inf
    return float(within.mean() - across.mean())


def _isolates_one(first: Sequence[int], second: Sequence[int]) -> bool:
    return len(first) < 2 or len(second) < 2


def _without_diagonal(matrix: Array) -> Array:
    off_diagonal = matrix.copy()
    np.fill_diagonal(off_diagonal, 0.0)
    return off_diagonal


def _spectral_points(similarity: Array, k: int) -> Array:
    """Return the unit rows (m, k) of the first k eigenvectors, about 0 for isolated points."""
    _, eigenvectors = np.linalg.eigh(affinity(similarity))
    # Eigenvalues ascend.
    vectors = eigenvectors[:, -k:]
    norms = np.linalg.norm(vectors, axis=1, keepdims=True)
    # A row of rounding errors has no direction.
    rounding = np.sqrt(len(similarity)) * np.finfo(float).eps
    scales = np.where(norms > rounding, norms, 1)
    return np.asarray(vectors / scales)


def _two_groups(alpha: Array, labels: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the group 0 or 1 of each cluster (k,), by average linkage of the clusters.

    Args:
        alpha: similarities, (m, m).
        labels: each client's cluster, (m,), from 0.
    """
    clusters = np.arange(labels.max() + 1)
    sizes = np.bincount(labels)[:, None]
    averaging = np.equal.outer(clusters, labels) / sizes  # (k, m), rows of sum 1
    distance = 1 - averaging @ alpha @ averaging.T
    np.fill_diagonal(distance, 0.0)
    return np.asarray(cut_into(merges(distance, "average"), 2))


def _sample(
    alpha: Array, labels: Sequence[int], size: int, generator: np.random.Generator
) -> tuple[Array, list[int]]:
    """Return the similarities and clusters of a random sample of clients.

    Args:
        alpha: similarities, (m, m).
        labels: each client's cluster, (m,).
        size: of the sample.
        generator: source of a generator of the sample, which takes none of its own draws.

    Returns:
        (size, size), and (size,) numbered from 0 in the order of first members.
    """
    (sampling,) = generator.spawn(1)
    drawn = sampling.choice(len(alpha), size, replace=False)
    positions = np.sort(drawn)
    return alpha[np.ix_(positions, positions)], relabel([labels[k] for k in positions])


def _separation_of(alpha: Array, labels: Sequence[int], clusterer: str) -> float:
    """Return the separation of clusters (m,), as `_separation` measures it."""
    if clusterer == "paper":
        return separation_of(alpha, labels)
    return mean_separation(alpha, labels)


def _separation(alpha: Array, clusterer: str, seed: int) -> tuple[float, list[int]]:
    """Return the clients' separation and the clusters (m,) that have it."""
    if clusterer == "paper":
        best = separated(alpha)
        return best.score, best.labels
    count = max(2, eigengap(alpha))
    labels = partition(alpha, clusterer, count, seed)
    return mean_separation(alpha, labels), labels
