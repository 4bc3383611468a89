"""Clusters of models by their dissimilarities without a threshold (ours).

Vardhan et al. 2024 leave λ to tuning.

A single dissimilarity mixes what separates two models with how well each of them generalises: a
model trained on few samples is far from everyone. The profile of a model, its dissimilarities with
all others, shows which it is: models of one distribution have parallel profiles, whatever their
levels. So clusters are searched among parallel profiles, and chosen by a model of the whole matrix
in which every model has a level, and every two clusters an offset.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from securecluster.protocols.srfca.graph import renumbered, spanning_tree_edges

Array = NDArray[np.float64]
# by how much the criterion of clusters must be lower, per model, than that of no clusters
EVIDENCE = 4.0
# the least mean distance of two clusters, in units of the mean distance within them
CONTRAST = 1.05
SHARE = 0.25  # the least offset of two clusters, in units of the largest
RESOLUTION = 0.02  # relative differences of this size count as none
LEAST_LOSS = 0.02  # losses below this share of the median loss count as this much
FEWEST = 4  # models, of which two clusters can be told apart


@dataclass(frozen=True)
class ProfileClustering:
    """Clusters found without a threshold.

    Args:
        labels: (m,) each model's cluster, numbered by their first members.
        threshold: a λ, in the unit of the distances: the geometric mean of the mean distance within
            clusters and the least mean distance of two; of one cluster the least λ that joins
            everyone.
    """

    labels: list[int]
    threshold: float


@dataclass(frozen=True)
class OffsetFit:
    """A model of a matrix of dissimilarities.

    It has a level for every model, and an offset for every two clusters.

    Args:
        criterion: −2 log-likelihood, plus the cost of levels and offsets (BIC) and of labels (2 log
            K each).
        offsets: (K(K − 1)/2,) what two clusters add to their models' levels.
    """

    criterion: float
    offsets: Array


def cluster_without_threshold(distance: Array, least: int, squared: bool) -> ProfileClustering:
    """Return the clusters of models that explain their distances best.

    Candidates are the cuts of average linkage over `profile_distances`. One is admitted whose
    clusters are all farther from each other than their members are (`CONTRAST`), by offsets of
    comparable size (`SHARE`: a cluster must not fall apart beside others that are far away). The
    best of them by `fit_offsets` is taken, or one cluster where it is not better by far
    (`EVIDENCE`).

    Args:
        distance: (m, m), symmetric: mean losses in nats, or norms of differences of weights; the
            diagonal is not read.
        least: the fewest models of a cluster.
        squared: whether squares of the distances add up (weights); otherwise their logarithms do
            (losses).
    """
    m = len(distance)
    together = ProfileClustering([0] * m, float(spanning_tree_edges(distance).max(initial=0.0)))
    if m < FEWEST:
        return together
    unit = _unit(distance, squared)
    if not 0 < unit < math.inf:
        return together
    if not squared:
        distance = np.maximum(distance, LEAST_LOSS * unit)  # noise can make them negative
    level = distance**2 / unit if squared else np.log(distance / unit)
    bar = fit_offsets(level, [0] * m).criterion - EVIDENCE * m
    found = together
    for labels in _cuts(profile_distances(level), least):
        means = block_means(distance, labels)
        fit = fit_offsets(level, labels)
        contrast = _ratios(means).min()
        if (
            contrast < CONTRAST
            or fit.offsets.min() < SHARE * fit.offsets.max()
            or fit.criterion >= bar
        ):
            continue
        bar = fit.criterion
        across = means[np.triu_indices(len(means), 1)].min()
        found = ProfileClustering(labels, math.sqrt(float(np.diag(means).mean() * across)))
    return found


def profile_distances(level: Array) -> Array:
    """Return the standard deviation over all third models k of level_ik − level_jk, (m, m).

    What i has in common with everyone cancels out, and so does what k has.

    Args:
        level: (m, m), symmetric, m ≥ 4; the diagonal is not read.
    """
    m = len(level)
    others = ~np.eye(m, dtype=bool)
    centred = np.where(others, level - level[others].mean(), 0.0)
    total = centred.sum(1)
    square = (centred**2).sum(1)
    difference = total[:, None] - total
    squares = square[:, None] + square - 2 * centred @ centred - 2 * centred**2
    variance = (squares - difference**2 / (m - 2)) / (m - 3)
    found: Array = np.sqrt(np.maximum(variance, 0))
    np.fill_diagonal(found, 0)
    return found


def fit_offsets(level: Array, labels: Sequence[int]) -> OffsetFit:
    """Return the least-squares fit of level_ij ≈ a_i + a_j + b_cc'.

    Here i is in c, j in c', and b_cc = 0. Once the means of all blocks are taken off, what is left
    of a_i is the row's sum over m − 2.

    Args:
        level: (m, m), symmetric, m ≥ 4; the diagonal is not read.
        labels: (m,) 0 … K − 1, of two models or more each.
    """
    m, clusters = len(level), 1 + max(labels)
    others = ~np.eye(m, dtype=bool)
    means = block_means(level, labels)
    rest = np.where(others, level - means[np.ix_(labels, labels)], 0.0)
    own = rest.sum(1) / (m - 2)
    residual = np.where(others, rest - own[:, None] - own, 0.0)
    pairs = m * (m - 1) // 2
    variance = float((residual**2).sum()) / 2 / pairs
    offsets = clusters * (clusters - 1) // 2
    cost = (m + offsets) * math.log(pairs) + 2 * m * math.log(clusters)
    within = np.diag(means)
    excess = means - (within[:, None] + within) / 2
    return OffsetFit(
        pairs * math.log(variance + RESOLUTION**2) + cost, excess[np.triu_indices(clusters, 1)]
    )


def block_means(distance: Array, labels: Sequence[int]) -> Array:
    """Return the mean over the pairs of two clusters, (K, K).

    Within one cluster, the pairs are those of different members. Labels are 0 … K − 1.
    """
    own = np.eye(1 + max(labels))[list(labels)].T
    sizes = own.sum(1)
    between = np.where(np.eye(len(distance), dtype=bool), 0.0, distance)
    pairs = np.outer(sizes, sizes) - np.diag(sizes)
    found: Array = own @ between @ own.T / np.maximum(pairs, 1)
    return found


def _unit(distance: Array, squared: bool) -> float:
    """Return the median of the distances, or of their squares, between different models."""
    others = ~np.eye(len(distance), dtype=bool)
    return float(np.median(distance[others] ** (2 if squared else 1)))


def _ratios(means: Array) -> Array:
    """Return the mean across every two clusters over that within them, (K(K − 1)/2,)."""
    within = np.diag(means)
    own = (within[:, None] + within) / 2
    pairs = np.triu_indices(len(means), 1)
    least = np.finfo(float).eps * means.max()  # equal models are at distance zero
    return np.asarray(means[pairs] / np.maximum(own[pairs], least))


def _cuts(distance: Array, least: int) -> Iterator[list[int]]:
    """Yield the labels of average linkage's cuts into two clusters or more.

    Clusters of too few members join the nearest other.
    """
    from scipy.cluster.hierarchy import fcluster, linkage

    m = len(distance)
    tree = linkage(distance[np.triu_indices(m, 1)], "average")
    seen = set[tuple[int, ...]]()
    for clusters in range(2, m):
        raw = fcluster(tree, clusters, "maxclust") - 1
        sizes = np.bincount(raw)
        kept = np.flatnonzero(sizes >= least)
        if not len(kept):
            break
        member = np.eye(len(sizes))[raw]
        near = (distance @ member / sizes)[:, kept].argmin(1)
        labels = renumbered(
            [int(c) if sizes[c] >= least else int(kept[n]) for c, n in zip(raw, near, strict=True)]
        )
        if max(labels) and tuple(labels) not in seen:
            seen.add(tuple(labels))
            yield labels
