"""Bipartitions by single linkage, and the separation of clusters from the rest."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from securecluster.clustering.labels import Array, is_finite_square, members
from securecluster.errors import UsageError


class Bipartition(NamedTuple):
    """Two groups of clients and the largest similarity across them.

    Attributes:
        first: sorted positions of the group that contains position 0.
        second: sorted positions of the other group.
        cross_max: largest similarity of a member of one group to one of the other.
    """

    first: tuple[int, ...]
    second: tuple[int, ...]
    cross_max: float


class Separated(NamedTuple):
    """Clusters that are separated from the rest, and the score of the best one.

    Attributes:
        score: the largest score of a cluster; minus infinity for two clients.
        labels: each client's cluster, (m,).
        best: sorted positions of the cluster with the largest score.
    """

    score: float
    labels: list[int]
    best: tuple[int, ...]


class _Scored(NamedTuple):
    score: float
    cluster: list[int]


def bipartition(alpha: Array) -> Bipartition:
    """Return the bipartition that minimises the largest cross-similarity, in O(m²).

    This is Sattler et al. 2019, eq. 35 and Algorithm 1. An optimum is the cut of the weakest edge
    of the maximum spanning tree, which is the last merge of single linkage on −alpha. Cutting at
    that merge, and not at its height, gives two non-empty groups under ties as well.

    Args:
        alpha: similarities, (m, m), symmetric, m >= 2; the diagonal is not read.

    Raises:
        UsageError: fewer than two rows, not square, or not finite.
    """
    m = len(alpha)
    if m < 2 or not is_finite_square(alpha):
        raise UsageError(
            "a bipartition needs a finite square similarity matrix of at least two clients, not "
            f"{alpha.shape}"
        )
    if m == 2:
        cross_similarity = float(alpha[0, 1])
        return Bipartition((0,), (1,), cross_similarity)
    tree = _single_linkage(alpha)
    groups = {position: {position} for position in range(m)}
    # All merges but the last one.
    for merged, (one, other, *_) in enumerate(tree[:-1], start=m):
        one_group = groups.pop(int(one))
        other_group = groups.pop(int(other))
        groups[merged] = one_group | other_group
    first, second = sorted(groups.values(), key=min)
    first_positions = tuple(sorted(first))
    second_positions = tuple(sorted(second))
    across = alpha[np.ix_(first_positions, second_positions)]
    return Bipartition(first_positions, second_positions, float(across.max()))


def intra_min(alpha: Array, members: tuple[int, ...]) -> float:
    """Return the smallest similarity within a group.

    Args:
        alpha: similarities, (m, m).
        members: positions of the group's members.

    Returns:
        The smallest similarity of two different members; 1 for a group of one.
    """
    block = alpha[np.ix_(members, members)]
    # A client's similarity to itself says nothing.
    diagonal = np.eye(len(members), dtype=bool)
    off_diagonal = block[~diagonal]
    if not off_diagonal.size:
        return 1.0
    return float(off_diagonal.min())


def separated(alpha: Array) -> Separated:
    """Find the clusters that are separated from all other clients, in O(m²) (not in the paper).

    A cluster C scores (|C| − 1)·(α_intra^min(C) − α_cross^max(C, rest)). A positive score is
    Sattler et al.'s separation gap (2019, eq. 28) of one cluster against all others, so it does not
    vanish where both groups of a correct bipartition hold several clusters. Clusters count by size,
    since two of many noisy updates align by chance while larger groups do not.

    Args:
        alpha: similarities, (m, m), symmetric and finite, m >= 2; the diagonal is not read.

    Returns:
        The largest score; a partition into disjoint clusters with a positive score, chosen by
        descending score, and one group of all other clients; and the best cluster.
    """
    scored = _scored_clusters(alpha)
    if not scored:
        one_cluster = [0] * len(alpha)
        return Separated(-math.inf, one_cluster, ())
    # Stable, so that ties are resolved by the order of merges.
    scored.sort(key=lambda candidate: -candidate.score)
    best = scored[0]
    labels = _disjoint_labels(scored, len(alpha))
    return Separated(best.score, labels, tuple(sorted(best.cluster)))


def separation_scores(alphas: Array, minimum: float = -math.inf) -> Array:
    """Return the score of `separated` for each of many similarity matrices.

    The scores are the same to the last bit, and take a small part of the time for many matrices of
    few clients. In the order of `_spanning_trees` the members of each cluster that single linkage
    makes stand side by side.

    Args:
        alphas: similarities, (n, m, m), symmetric and finite; the diagonals are not read.
        minimum: the smallest score of interest.

    Returns:
        (n,); minus infinity for two clients. A score below `minimum` may be replaced by another
        number below `minimum`, which is found sooner.
    """
    count, m, _ = alphas.shape
    if m < 3:
        return np.full(count, -math.inf)
    order, edges = _spanning_trees(alphas)
    matrix = np.arange(count)[:, None]
    # Edge k, between positions k and k + 1, makes a cluster of all positions around it up to edges
    # that are merged later: weaker ones, and tied ones on its right.
    ends = np.full((count, 1), -math.inf)
    bounded = np.hstack([ends, edges, ends])
    own_edges = edges[:, :, None]
    left_edges = bounded[:, None, :-1]
    right_edges = bounded[:, None, 1:]
    on_the_left = np.tri(m - 1, m, dtype=bool)
    on_the_right = ~on_the_left
    weaker_left = on_the_left & (left_edges < own_edges)
    weaker_right = on_the_right & (right_edges <= own_edges)
    # the nearest weaker edge on each side bounds the cluster
    leftwards = weaker_left[:, :, ::-1]
    first = m - 1 - leftwards.argmax(2)
    last = weaker_right.argmax(2)
    left_bound = bounded[matrix, first]
    right_bound = bounded[matrix, last + 1]
    # It is merged with the rest at the stronger of its two bounds.
    cross_max = np.maximum(left_bound, right_bound)
    others = last - first
    # The cluster of all clients has no rest.
    no_rest = cross_max == -math.inf
    # A cluster's smallest similarity is at most the edge that made it.
    ceilings = others * (edges - cross_max)
    ceilings[no_rest] = -math.inf
    best: Array = ceilings.max(1)
    open_ones = np.flatnonzero(best >= minimum)
    if not len(open_ones):
        return best
    inner_min = _inner_minima(alphas, order, open_ones)
    open_index = np.arange(len(open_ones))[:, None]
    intra_min = inner_min[open_index, first[open_ones], last[open_ones]]
    scores = others[open_ones] * (intra_min - cross_max[open_ones])
    scores[no_rest[open_ones]] = -math.inf
    best[open_ones] = scores.max(1)
    return best


def separation_of(alpha: Array, labels: Sequence[int]) -> float:
    """Return the largest score of some clusters, as `separated` scores them.

    No score above 0 is larger than that of `separated`.

    Args:
        alpha: similarities, (m, m), symmetric and finite.
        labels: each client's cluster, (m,).

    Returns:
        Minus infinity if no cluster has both two members and a rest.
    """
    best = -math.inf
    clusters = np.asarray(labels)
    for number, group in enumerate(members(labels)):
        inside = clusters == number
        if len(group) < 2 or inside.all():
            continue
        across = alpha[np.ix_(inside, ~inside)]
        gap = intra_min(alpha, tuple(group)) - float(across.max())
        best = max(best, (len(group) - 1) * gap)
    return best


def _single_linkage(alpha: Array) -> Array:
    """Return the linkage matrix (m − 1, 4) of −alpha by single linkage.

    It is that of scipy's `linkage`, also under ties. To load scipy would take longer than all split
    tests of a run.

    Args:
        alpha: similarities, (m, m), of which only those above the diagonal are read.
    """
    m = len(alpha)
    above = np.triu(alpha, 1).astype(np.float64)
    (order,), (edges,) = _spanning_trees((above + above.T)[None])
    # A cluster stands side by side in `order`: its node by its first position, and its ends by each
    # other.
    node_at = order.tolist()
    first_of = list(range(m))
    last_of = list(range(m))
    tree = np.empty((m - 1, 4))
    strongest_first = np.argsort(-edges, kind="stable")
    for row, edge in enumerate(strongest_first.tolist()):
        first = first_of[edge]
        right = edge + 1
        last = last_of[right]
        one, other = sorted((node_at[first], node_at[right]))
        tree[row] = one, other, -edges[edge], last - first + 1
        first_of[last] = first
        last_of[first] = last
        node_at[first] = m + row
    return tree


def _spanning_trees(alphas: Array) -> tuple[NDArray[np.intp], Array]:
    """Return the maximum spanning tree of each of many similarity matrices by Prim's algorithm.

    It starts at position 0, and of tied positions the first is next, as in scipy's `linkage`.

    Args:
        alphas: similarities, (n, m, m).

    Returns:
        The positions in the order in which they are reached, (n, m), and the similarity by which
        each but the first is reached, (n, m - 1).
    """
    count, m, _ = alphas.shape
    rows = alphas.reshape(count * m, m)
    # row of each matrix's position 0 in `rows`, and its place in the flat views below
    start = np.arange(count) * m
    order = np.zeros((count, m), dtype=np.intp)
    edges = np.empty((count, m - 1))
    nearest = np.full((count, m), -math.inf)
    reached = np.zeros((count, m))
    nearest_flat = nearest.ravel()
    reached_flat = reached.ravel()
    for step in range(m - 1):
        position = order[:, step]
        flat_index = start + position
        # Subtracted, so that a position is reached once.
        reached_flat[flat_index] = math.inf
        similarities = rows[flat_index]
        np.maximum(nearest, similarities, out=nearest)
        remaining = nearest - reached
        following = remaining.argmax(1)
        order[:, step + 1] = following
        edge = start + following
        edges[:, step] = nearest_flat[edge]
    return order, edges


def _inner_minima(alphas: Array, order: NDArray[np.intp], matrices: NDArray[np.intp]) -> Array:
    """Return the smallest similarity of members that stand side by side, for some matrices.

    Args:
        alphas: similarities, (n, m, m).
        order: the order of each matrix's clients, (n, m).
        matrices: numbers of the k matrices.

    Returns:
        (k, m, m): at [:, first, last] that of two members that stand from first to last, where
        first < last.
    """
    rows = order[matrices, :, None]
    columns = order[matrices, None, :]
    ordered = alphas[matrices[:, None, None], rows, columns]
    up_to_diagonal = np.tri(alphas.shape[1], dtype=bool)
    inner_min = np.where(up_to_diagonal, math.inf, ordered)
    np.minimum.accumulate(inner_min, axis=2, out=inner_min)
    from_below = inner_min[:, ::-1]
    np.minimum.accumulate(from_below, axis=1, out=from_below)
    return inner_min


def _scored_clusters(alpha: Array) -> list[_Scored]:
    """Return the score of each cluster of two or more clients that single linkage makes.

    A cluster with a positive score is always one of these: its smallest inner similarity exceeds
    all those to the rest. α_cross^max of each is minus the height at which it is merged.
    """
    m = len(alpha)
    groups = {position: [position] for position in range(m)}
    # A cluster of one has no inner similarity.
    inner_min = dict.fromkeys(range(m), math.inf)
    scored = []
    for merged, (one, other, height, _) in enumerate(_single_linkage(alpha), start=m):
        children = (int(one), int(other))
        for child in children:
            size = len(groups[child])
            if size > 1:
                score = (size - 1) * (inner_min[child] + float(height))
                scored.append(_Scored(score, groups[child]))
        first, second = [groups.pop(child) for child in children]
        across = alpha[np.ix_(first, second)]
        within = [inner_min[child] for child in children]
        inner_min[merged] = min(float(across.min()), *within)
        groups[merged] = first + second
    return scored


def _disjoint_labels(scored: Sequence[_Scored], m: int) -> list[int]:
    """Return the partition (m,) by the first disjoint clusters with a positive score."""
    clusters = np.full(m, -1)
    for number, (score, cluster) in enumerate(scored):
        free = clusters[cluster] < 0
        if score > 0 and free.all():
            clusters[cluster] = number
    _, numbers = np.unique(clusters, return_inverse=True)
    labels: list[int] = numbers.tolist()
    return labels
