"""Clustering of models by their dissimilarities without a threshold (not in the paper).

Vardhan et al. 2024 leave λ to tuning.

A single dissimilarity mixes two effects: how much the distributions of two models differ, and how
well each model generalises. A model trained on few samples is far from every other one. The profile
of a model, its dissimilarities to all others, separates the two: models of one distribution have
parallel profiles, whatever their levels. Candidate clusters are therefore groups of parallel
profiles. They are compared by a model of the whole matrix that has a level for each model and an
offset for each pair of clusters.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from securecluster.protocols.srfca.graph import pairwise, renumbered, spanning_tree_edges

Array = NDArray[np.float64]
# by how much the criterion of clusters must be lower, per model, than that of no clusters
EVIDENCE = 4.0
# smallest mean distance of two clusters, in units of the mean distance within them
CONTRAST = 1.05
SHARE = 0.25  # smallest offset of two clusters, in units of the largest offset
RESOLUTION = 0.02  # relative differences of this size count as none
LEAST_LOSS = 0.02  # losses below this share of the median loss count as this much
FEWEST = 4  # models; among fewer, two clusters cannot be distinguished
ASIDE = 0.15  # largest share of odd models, which clusters are found without: one of seven


@dataclass(frozen=True)
class ProfileClustering:
    """Clusters that were determined without a threshold.

    Args:
        labels: (m,) the models' clusters, numbered by their first members.
        threshold: a λ for MERGE, in the unit of the distances. For several clusters it is the
            geometric mean of the mean distance within clusters and the smallest mean distance of
            two clusters; for one cluster it is the smallest λ that connects all models.
        aside: positions of odd models, which are in no cluster of their own: they join the nearest
            one, and λ does not depend on them.
        gain: by how much, per model, the criterion of several clusters is at most below that of
            one; −∞ where no candidate was admitted.
    """

    labels: list[int]
    threshold: float
    aside: tuple[int, ...] = ()
    gain: float = -math.inf


@dataclass(frozen=True)
class OffsetFit:
    """A least-squares model of a matrix of dissimilarities.

    It has a level for each model and an offset for each pair of clusters.

    Args:
        criterion: −2 log-likelihood, plus the cost of levels and offsets (BIC) and of labels (2 log
            K each).
        offsets: (K(K − 1)/2,) the amounts by which dissimilarities of two clusters exceed the sum
            of their models' levels.
    """

    criterion: float
    offsets: Array


def cluster_without_threshold(distance: Array, minimum: int, squared: bool) -> ProfileClustering:
    """Return the clusters of models that best explain their distances.

    Candidates are the cuts of average linkage over `profile_distances`. A candidate is admitted if

    - each two of its clusters are farther from each other than their members are (`CONTRAST`), and
    - its offsets are of comparable size (`SHARE`): otherwise a single cluster would be divided
      wherever other clusters are far away.

    Models in clusters below the minimum are odd, and a candidate is judged without them: a model
    that is far from all others blurs the offsets of their clusters. The admitted candidate whose
    criterion (`fit_offsets`) is the farthest below that of one cluster of the same models is
    returned, or one cluster where none is better by `EVIDENCE`.

    Args:
        distance: (m, m), symmetric: mean losses in nats, or norms of differences of weights; the
            diagonal is not read.
        minimum: the fewest models of a cluster.
        squared: True if squares of distances are additive (weights), False if their logarithms are
            (losses).
    """
    m = len(distance)
    longest_edge = spanning_tree_edges(distance).max(initial=0.0)
    result = ProfileClustering([0] * m, float(longest_edge))
    if m < FEWEST:
        return result
    unit = _unit(distance, squared)
    if not 0 < unit < math.inf:
        return result

    if squared:
        level = distance**2 / unit
    else:
        # noise can make losses negative, and those near zero would dominate their logarithms
        distance = np.maximum(distance, LEAST_LOSS * unit)
        level = np.log(distance / unit)

    best = 0.0
    largest = -math.inf
    for labels, aside in _cuts(profile_distances(level), minimum):
        others = np.setdiff1d(np.arange(m), aside)
        inner = np.ix_(others, others)
        inner_labels = [labels[k] for k in others]
        means = block_means(distance[inner], inner_labels)
        fit = fit_offsets(level[inner], inner_labels)
        if _ratios(means).min() < CONTRAST:
            continue
        if fit.offsets.min() < SHARE * fit.offsets.max():
            continue
        one_cluster = fit_offsets(level[inner], [0] * len(others))
        gain = one_cluster.criterion - fit.criterion
        largest = max(largest, gain / len(others))
        if gain - EVIDENCE * len(others) <= best:
            continue
        best = gain - EVIDENCE * len(others)
        result = ProfileClustering(labels, _threshold_between(means), aside)
    return replace(result, gain=largest)


def _threshold_between(means: Array) -> float:
    """Return a λ between the distances within clusters and those across.

    Args:
        means: (K, K) mean distances of clusters, K ≥ 2.
    """
    within = float(np.diag(means).mean())
    across = pairwise(means).min()
    return math.sqrt(within * across)


def profile_distances(level: Array) -> Array:
    """Return the distances of the models' profiles.

    The distance of models i and j is the standard deviation of level_ik − level_jk over all third
    models k. A term that is common to a row, or to a column, cancels out.

    Args:
        level: (m, m), symmetric, m ≥ 4; the diagonal is not read.

    Returns:
        (m, m), symmetric, with a zero diagonal.
    """
    m = len(level)
    off_diagonal = ~np.eye(m, dtype=bool)
    # centred first, so that sums of squares lose no digits
    mean = level[off_diagonal].mean()
    centred = np.where(off_diagonal, level - mean, 0.0)
    row_sum = centred.sum(1)
    row_square = (centred**2).sum(1)

    # sums over k of level_ik − level_jk and its square, without the terms of k = i and k = j: these
    # cancel in the first sum and are level_ij² each in the second
    difference = row_sum[:, None] - row_sum
    squares = row_square[:, None] + row_square
    squares = squares - 2 * centred @ centred
    squares = squares - 2 * centred**2

    # m − 2 third models, hence m − 3 degrees of freedom
    variance = (squares - difference**2 / (m - 2)) / (m - 3)
    distances: Array = np.sqrt(np.maximum(variance, 0))
    np.fill_diagonal(distances, 0)
    return distances


def fit_offsets(level: Array, labels: Sequence[int]) -> OffsetFit:
    """Return the least-squares fit of level_ij ≈ a_i + a_j + b_cc'.

    Model i is in cluster c, model j in cluster c', and b_cc = 0. Once the mean of each block is
    subtracted, the remaining part of a_i is the row's sum divided by m − 2.

    Args:
        level: (m, m), symmetric, m ≥ 4; the diagonal is not read.
        labels: (m,) 0 … K − 1, each of two models or more.
    """
    m = len(level)
    clusters = 1 + max(labels)
    off_diagonal = ~np.eye(m, dtype=bool)
    means = block_means(level, labels)
    within_blocks = level - means[np.ix_(labels, labels)]
    within_blocks = np.where(off_diagonal, within_blocks, 0.0)
    levels = within_blocks.sum(1) / (m - 2)
    residual = within_blocks - levels[:, None] - levels
    residual = np.where(off_diagonal, residual, 0.0)

    # the criterion; RESOLUTION² bounds the likelihood of matrices that fit exactly
    pairs = m * (m - 1) // 2
    squares = float((residual**2).sum()) / 2  # the matrix has each pair twice
    variance = squares / pairs
    offset_count = clusters * (clusters - 1) // 2
    cost_of_parameters = (m + offset_count) * math.log(pairs)
    cost_of_labels = 2 * m * math.log(clusters)
    cost = cost_of_parameters + cost_of_labels
    criterion = pairs * math.log(variance + RESOLUTION**2) + cost

    within = np.diag(means)
    excess = means - (within[:, None] + within) / 2
    return OffsetFit(criterion, pairwise(excess))


def block_means(distance: Array, labels: Sequence[int]) -> Array:
    """Return the mean distance over all pairs of two clusters.

    Within one cluster, the pairs are those of different members.

    Args:
        distance: (m, m), symmetric; the diagonal is not read.
        labels: (m,) 0 … K − 1.

    Returns:
        (K, K), symmetric.
    """
    sizes = np.bincount(labels)
    diagonal = np.eye(len(distance), dtype=bool)
    between = np.where(diagonal, 0.0, distance)
    pairs = np.outer(sizes, sizes) - np.diag(sizes)
    sums_by_model = _sums_by_cluster(between, labels).T  # (m, K)
    sums = _sums_by_cluster(sums_by_model, labels)
    means: Array = sums / np.maximum(pairs, 1)
    return means


def _sums_by_cluster(rows: Array, labels: Sequence[int]) -> Array:
    """Return the sum of each cluster's rows, in time that does not grow with the clusters.

    Args:
        rows: (m, n).
        labels: (m,) 0 … K − 1, each of one row or more.

    Returns:
        (K, n)
    """
    by_cluster = np.argsort(labels, kind="stable")
    ends = np.bincount(labels).cumsum()
    starts = np.concatenate([[0], ends[:-1]])
    sums: Array = np.add.reduceat(rows[by_cluster], starts, axis=0)
    return sums


def _unit(distance: Array, squared: bool) -> float:
    """Return the median distance of two different models, or of its square."""
    off_diagonal = ~np.eye(len(distance), dtype=bool)
    power = 2 if squared else 1
    return float(np.median(distance[off_diagonal] ** power))


def _ratios(means: Array) -> Array:
    """Return the mean distance across each two clusters over that within them.

    Args:
        means: (K, K), as `block_means` returns them.

    Returns:
        (K(K − 1)/2,)
    """
    within = np.diag(means)
    within_pairs = (within[:, None] + within) / 2
    smallest = np.finfo(float).eps * means.max()  # equal models are at distance zero
    denominators = np.maximum(pairwise(within_pairs), smallest)
    ratios: Array = pairwise(means) / denominators
    return ratios


def _cuts(distance: Array, minimum: int) -> Iterator[tuple[list[int], tuple[int, ...]]]:
    """Yield average linkage's cuts into two clusters or more, and the models of smaller ones.

    Members of clusters that are too small join the nearest other cluster. They are odd models if
    they are few (`ASIDE`), and members as others are if not.

    Args:
        distance: (m, m), symmetric.
        minimum: the fewest members of a cluster.
    """
    from scipy.cluster.hierarchy import fcluster, linkage

    m = len(distance)
    tree = linkage(pairwise(distance), "average")
    yielded = set[tuple[tuple[int, ...], tuple[int, ...]]]()
    for clusters in range(2, m):
        cut = fcluster(tree, clusters, "maxclust") - 1
        sizes = np.bincount(cut)
        large = np.flatnonzero(sizes >= minimum)
        # finer cuts have no larger clusters
        if not len(large):
            break
        mean_distance = _sums_by_cluster(distance, cut.tolist()).T / sizes
        nearest = large[mean_distance[:, large].argmin(1)]
        is_large = sizes[cut] >= minimum
        labels = renumbered(np.where(is_large, cut, nearest).tolist())
        odd = np.flatnonzero(~is_large)
        if len(odd) > ASIDE * m:
            odd = odd[:0]

        # different cuts may agree once small clusters have been joined to others
        candidate = (tuple(labels), tuple(odd.tolist()))
        if max(labels) and candidate not in yielded:
            yielded.add(candidate)
            yield labels, candidate[1]
