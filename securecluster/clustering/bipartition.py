"""Bipartitions by single linkage, and how far apart their halves are."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from securecluster.clustering.labels import Array
from securecluster.errors import UsageError


class Bipartition(NamedTuple):
    """Two halves (sorted positions; the first holds position 0) and the largest similarity across
    them.
    """

    first: tuple[int, ...]
    second: tuple[int, ...]
    cross_max: float


def bipartition(alpha: Array) -> Bipartition:
    """The bipartition whose largest cross-similarity is smallest, in O(m²) (Sattler et al. 2019,
    eq. 35 and Algorithm 1).

    An optimum is the cut of the weakest edge of the maximum spanning tree, which is the last merge
    of single linkage on -alpha. Cutting at that merge, and not at its height, gives two non-empty
    halves under ties as well.

    Args:
        alpha: similarities, (m, m), symmetric, m >= 2; the diagonal is not read.

    Raises:
        UsageError: fewer than two rows, not square, or not finite.
    """
    from scipy.cluster.hierarchy import linkage
    from scipy.spatial.distance import squareform

    m = len(alpha)
    if m < 2 or alpha.shape != (m, m) or not np.isfinite(alpha).all():
        raise UsageError(
            "a bipartition needs a finite square similarity matrix of at least two clients, not "
            f"{alpha.shape}"
        )
    if m == 2:
        return Bipartition((0,), (1,), float(alpha[0, 1]))
    distance = -alpha.astype(np.float64)
    np.fill_diagonal(distance, 0.0)
    groups = {k: {k} for k in range(m)}
    for n, (a, b, *_) in enumerate(linkage(squareform(distance, checks=False), "single")[:-1]):
        groups[m + n] = groups.pop(int(a)) | groups.pop(int(b))
    left, _ = groups.values()
    here = tuple(k for k in range(m) if (k in left) == (0 in left))
    there = tuple(k for k in range(m) if (k in left) != (0 in left))
    return Bipartition(here, there, float(alpha[np.ix_(here, there)].max()))


def intra_min(alpha: Array, members: tuple[int, ...]) -> float:
    """The smallest similarity within a group (1 for a group of one)."""
    inside = alpha[np.ix_(members, members)][~np.eye(len(members), dtype=bool)]
    return float(inside.min()) if inside.size else 1.0


class Separated(NamedTuple):
    """How far the best separated cluster stands apart, and all clusters that stand apart at all."""

    score: float
    labels: list[int]
    best: tuple[int, ...]


def separated(alpha: Array) -> Separated:
    """Score clusters C by (|C| - 1)·(α_intra^min(C) - α_cross^max(C, rest)), in O(m²) (ours).

    A positive score is Sattler et al.'s separation gap (2019, eq. 28) of one cluster against all
    others, so it does not vanish where both halves of a correct bipartition hold several clusters.
    Clusters count by size, since two of many noisy updates align by chance while larger groups do
    not. A cluster whose least similarity exceeds those to the rest is one of single linkage, so
    only these are looked at; α_cross^max of each is where it is merged with another.

    Args:
        alpha: similarities, (m, m), symmetric and finite, m >= 2; the diagonal is not read.

    Returns:
        The largest score, minus infinity for two clients; a partition (m,): disjoint clusters with
        a positive score, those with larger scores first, and one group of all clients that are in
        none; and the members of the best cluster.
    """
    from scipy.cluster.hierarchy import linkage
    from scipy.spatial.distance import squareform

    m = len(alpha)
    distance = -alpha.astype(np.float64)
    np.fill_diagonal(distance, 0.0)
    tree = linkage(squareform(distance, checks=False), "single")
    groups: dict[int, list[int]] = {k: [k] for k in range(m)}
    least = dict.fromkeys(range(m), math.inf)  # of the similarities within
    scored: list[tuple[float, list[int]]] = []
    for new, (left, right, height, _) in enumerate(tree, start=m):
        first, second = groups.pop(int(left)), groups.pop(int(right))
        for child, own in ((int(left), first), (int(right), second)):
            if len(own) > 1:
                scored.append(((len(own) - 1) * (least[child] + float(height)), own))
        across = float(alpha[np.ix_(first, second)].min())
        least[new] = min(across, least[int(left)], least[int(right)])
        groups[new] = first + second
    scored.sort(key=lambda one: -one[0])
    clusters = np.full(m, -1)
    for number, (score, own) in enumerate(scored):
        if score > 0 and (clusters[own] < 0).all():
            clusters[own] = number
    labels: list[int] = np.unique(clusters, return_inverse=True)[1].tolist()
    score, best = scored[0] if scored else (-math.inf, [])
    return Separated(score, labels, tuple(sorted(best)))
