"""Cluster models by their profiles of dissimilarities, for when nobody gives a λ (ours; Vardhan et al. 2024 leave λ to tuning).

The single distance of two models mixes what separates them with how well each model generalises: a model trained on few samples
is far from everyone. The profile of model i, its dissimilarities with all others, shows the difference: two models of one
distribution have parallel profiles, whatever their levels.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from securecluster.components import OUTSIDE, components, renumbered, tree_edges

Array = NDArray[np.float64]
WAITING = 0.25  # the largest share of models that may be left in no cluster
CONTRAST = 1.1  # the least mean dissimilarity of two clusters, in units of the mean within them
LEAST_RATIO = 1.15  # of consecutive edges of profile distances, however many models there are: losses have heavy tails
RESOLUTION = 0.01  # a difference of profiles below this share of the dissimilarities counts as none
LEAST_LOSS = 0.02  # losses below this share of the median loss count as this much
FEWEST = 4  # models, of which two clusters can be told apart
DIVIDED = 8  # the fewest members of a cluster that is divided again: the profiles of fewer are too short for a second look


@dataclass(frozen=True)
class Partition:
    """Clusters found without a λ.

    Args:
        labels: (m,) each model's cluster; OUTSIDE where it has none.
        threshold: a λ, in the unit of the distances: between the mean within clusters and the least mean across two.
    """

    labels: list[int]
    threshold: float


def cluster_without_threshold(distance: Array, least: int, squared: bool) -> Partition:
    """Return the clusters of models whose profiles run parallel.

    The profile distances' minimum spanning tree is cut at the largest ratio of consecutive edges, among the cuts that give two
    clusters or more and leave no more than a quarter of the models in none. All models are one cluster where no ratio exceeds
    what chance gives (`chance_ratio`), or where two clusters are not farther from each other than their own members are
    (`CONTRAST`). Each cluster of eight
    or more is then divided in the same way: two that are near to each other show once a third is out of sight.

    Args:
        distance: (m, m), symmetric: mean losses in nats, or norms of differences of weights; the diagonal is not read.
        least: the fewest models of a cluster.
        squared: whether squares of the distances add up (weights), rather than the distances themselves (losses).
    """
    dissimilarity = np.asarray(distance, dtype=float) ** (2 if squared else 1)
    np.fill_diagonal(dissimilarity, 0)
    found = _divided(dissimilarity, least, squared)
    labels = renumbered(found)
    if len(_numbers(labels)) < 2:
        return Partition([0] * len(labels), float(tree_edges(distance).max(initial=0.0)))
    means = block_means(dissimilarity, labels)
    within = max(float(np.diag(means).mean()), 0.0)
    across = float(means[np.triu_indices(len(means), 1)].min())
    middle = math.sqrt(within * across)
    return Partition(labels, math.sqrt(middle) if squared else middle)


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


def chance_ratio(models: int) -> float:
    """Return how large a ratio of consecutive edges chance may give without clusters: e^(3 / (m − 3)), at least `LEAST_RATIO`.

    Of 200 draws of m alike models with Gaussian differences 99 % stay below it for m = 5 to 100 (m = 8: 1.67 against 1.82; m = 20:
    1.08 against 1.19): a standard deviation over m − 2 others is the more certain the more there are.
    """
    return max(LEAST_RATIO, math.exp(3 / (models - 3)))


def block_means(dissimilarity: Array, labels: Sequence[int]) -> Array:
    """Return the mean over the pairs of two clusters, and of different members of one, (K, K); labels are 0 … K − 1 or OUTSIDE."""
    own = np.array([[float(label == c) for label in labels] for c in _numbers(labels)])
    sizes = own.sum(1)
    between = np.where(np.eye(len(dissimilarity), dtype=bool), 0.0, dissimilarity)
    pairs = np.outer(sizes, sizes) - np.diag(sizes)
    found: Array = own @ between @ own.T / np.maximum(pairs, 1)
    return found


def _numbers(labels: Sequence[int]) -> list[int]:
    return sorted(set(labels) - {OUTSIDE})


def _divided(dissimilarity: Array, least: int, squared: bool) -> list[int]:
    """Return the labels of the smallest clusters that can be told apart, in any numbering."""
    labels = _cut_once(dissimilarity, least, squared)
    numbers = _numbers(labels)
    if len(numbers) < 2:
        return labels
    found = [OUTSIDE] * len(labels)
    used = 0
    for c in numbers:
        members = [i for i, label in enumerate(labels) if label == c]
        inner = [0] * len(members)
        if len(members) >= DIVIDED:
            inner = _divided(dissimilarity[np.ix_(members, members)], least, squared)
        for i, label in zip(members, inner, strict=True):
            found[i] = label if label == OUTSIDE else used + label
        used += 1 + max(inner)
    return found


def _cut_once(dissimilarity: Array, least: int, squared: bool) -> list[int]:
    """Return the labels of one cut, 0 for everyone where the models cannot be told apart."""
    together = [0] * len(dissimilarity)
    if len(dissimilarity) < FEWEST:
        return together
    others = ~np.eye(len(dissimilarity), dtype=bool)
    unit = float(np.median(dissimilarity[others]))
    if not 0 < unit < math.inf:
        return together
    relative = dissimilarity / unit
    level = relative if squared else np.log(np.maximum(relative, LEAST_LOSS))
    labels = _widest_cut(profile_distances(level), least)
    return labels if _apart(dissimilarity, labels) else together


def _apart(dissimilarity: Array, labels: Sequence[int]) -> bool:
    """Return whether every two clusters are farther from each other than their own members are."""
    means = block_means(dissimilarity, labels)
    within = np.diag(means)
    own = (within[:, None] + within) / 2
    pairs = np.triu_indices(len(means), 1)
    return bool(np.all(means[pairs] >= CONTRAST * own[pairs]))


def _widest_cut(distance: Array, least: int) -> list[int]:
    """Return the labels at the largest ratio of consecutive edges above chance; 0 for everyone where there is none."""
    m = len(distance)
    edges = tree_edges(distance)
    ratios = (edges[1:] + RESOLUTION) / (edges[:-1] + RESOLUTION)
    for k in np.argsort(-ratios, kind="stable"):
        if ratios[k] <= chance_ratio(m):
            break
        middle = float(edges[k] + edges[k + 1]) / 2
        labels = components(distance, middle, least)
        if labels.count(OUTSIDE) <= m * WAITING and len(_numbers(labels)) > 1:
            return labels
    return [0] * m
