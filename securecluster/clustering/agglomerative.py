"""Agglomerative clustering of a distance matrix (Briggs et al. 2020, I-C).

Merges, where to cut them, and the clusters of a cut.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from securecluster.clustering.labels import is_finite, members
from securecluster.clustering.similarity import mean_row
from securecluster.core.lazy_torch import torch
from securecluster.errors import UsageError, unknown

Array = NDArray[np.float64]
LINKAGES = ("single", "complete", "average", "centroid", "ward")
EUCLIDEAN = ("centroid", "ward")  # linkages that need points, not just distances
POINTS = ("l2", "chord")  # metrics that are distances of points
# ratio of consecutive heights from which they are a gap between clusters; found by trial
GAPS = {"single": 1.15, "complete": 1.2, "average": 1.2, "centroid": 1.2, "ward": 1.4}
ANGLE = 0.26  # smallest gap between clusters of `tasks_of`, in radians; found by trial, as GAPS
# where R has noise, or so many times the range of all angles below it; found by trial
# (`benchmarks.papers.oneshot.noise`)
SCATTER = 2.0
# share of the largest gap from which a lower one counts, where R has noise; found by trial, as
# SCATTER
NESTED = 0.25
BLOCK = 1 << 20  # distances that are compared at once
LEAST_MERGES = 3  # of fewer clients than four all are one cluster
TINY = 1e-9  # share of the last merge's height below which heights are rounding


def check_linkage(metric: str, linkage: str) -> None:
    """Check that a linkage exists and is defined for a metric.

    Args:
        metric: name of the metric.
        linkage: name of the linkage.

    Raises:
        UsageError: an unknown linkage, or a linkage of points with a metric that has no points.
    """
    if linkage not in LINKAGES:
        raise unknown("linkage", linkage, LINKAGES)
    if linkage in EUCLIDEAN and metric not in POINTS:
        others = ", ".join(name for name in LINKAGES if name not in EUCLIDEAN)
        raise UsageError(
            f"linkage {linkage!r} is defined for the metrics l2 and chord only, not for {metric}: "
            f"use one of these, or {others}"
        )


def merges(distance: Array, linkage: str) -> Array:
    """Return scipy's linkage matrix.

    "average" is UPGMA; "centroid" (L2) is what the paper's words describe. Heights of centroid
    linkage can fall from one merge to the next (an inversion): `cut` and `threshold` use the
    running maximum, so that a cut is a partition.

    Args:
        distance: (m, m), symmetric, or as scipy condenses it, (m(m − 1)/2,); for centroid and ward
            it must be Euclidean (`check_linkage`).
        linkage: one of `LINKAGES`.

    Returns:
        (m − 1, 4): the two clusters of each merge, its height and its size, in the order of merges.

    Raises:
        UsageError: an unknown linkage, fewer than two rows, not square, or not finite.
    """
    from scipy.cluster.hierarchy import linkage as agglomerate

    # "l2" goes with every linkage: the caller checks the metric.
    check_linkage("l2", linkage)
    square = distance.ndim == 2 and len(set(distance.shape)) == 1
    if (square or distance.ndim == 1) and not is_finite(distance):
        raise UsageError(
            "clustering needs a finite square distance matrix, and some distances are NaN or "
            "infinite: check what they are computed from"
        )
    pairs = math.comb(len(distance), 2) if square else _pairs_of(distance)
    if not pairs:
        raise UsageError(
            "clustering needs a finite square distance matrix of at least two clients, not "
            f"{distance.shape}"
        )
    condensed = upper_triangle(distance) if square else distance
    return np.asarray(agglomerate(condensed, linkage), dtype=np.float64)


def _pairs_of(condensed: Array) -> int:
    """Return the number of pairs of condensed distances; 0 if it is that of no number of rows."""
    rows = math.isqrt(2 * condensed.size) + 1
    return condensed.size if condensed.shape == (math.comb(rows, 2),) else 0


def upper_triangle(distance: Array) -> Array:
    """Return the distances of all pairs as scipy condenses them, (m(m − 1)/2,).

    scipy's `squareform` copies the matrix first where another object owns its memory, as torch.

    Args:
        distance: (m, m).
    """
    m = len(distance)
    condensed = np.empty(m * (m - 1) // 2)
    start = 0
    for row in range(m):
        end = start + m - 1 - row
        condensed[start:end] = distance[row, row + 1 :]
        start = end
    return condensed


def heights(tree: Array) -> Array:
    """Return the merges' heights with inversions lifted to the height before them.

    Args:
        tree: scipy's linkage matrix of m clients.

    Returns:
        (m − 1,), ascending.
    """
    return np.maximum.accumulate(tree[:, 2])


def gap_of(metric: str, linkage: str) -> float:
    """Return the smallest ratio of consecutive heights that is a gap between clusters.

    Found by trial (not in the paper): IID clients' heights rise by less from merge to merge.

    Args:
        metric: name of the metric.
        linkage: one of `LINKAGES`.
    """
    # A cosine distance is half a squared distance of unit vectors.
    exponent = 2 if metric == "cosine" else 1
    return GAPS[linkage] ** exponent


def ratios(tree: Array) -> Array:
    """Return the ratios of consecutive heights, zero where no cut is considered, (m − 2,).

    Args:
        tree: scipy's linkage matrix of m clients; of fewer than four there are no ratios.
    """
    high = heights(tree)
    # Ratios of heights that are rounding mean nothing.
    safe = np.maximum(high, TINY * high[-1])
    if len(high) < LEAST_MERGES or safe[-1] == 0:
        return np.zeros(0)
    ratio = np.asarray(safe[1:] / safe[:-1])
    ratio[: _first_gap(len(high) + 1)] = 0
    return ratio


def threshold(tree: Array, gap: float, nested: float = 1.0) -> float:
    """Return where to cut without a given height: at the largest relative gap of heights.

    Not in the paper. No fixed number can serve all metrics and models: heights are in the hundreds
    under L1 and below 1 under cosine. Without a gap of at least `gap`, and for fewer than four
    clients, all clients are one cluster. Identical updates (height 0) are never separated.

    Args:
        tree: scipy's linkage matrix of m clients.
        gap: smallest ratio of consecutive heights that counts, as of `gap_of`.
        nested: where the largest gap counts, the cut is at the lowest one whose logarithm is at
            least this share of its own. Below 1 the cut is not between groups of clusters, which
            are further apart where their sizes differ.

    Returns:
        A height between the gap's two merges (their geometric mean), or that of the last merge.
    """
    high = heights(tree)
    ratio = ratios(tree)
    if not len(ratio):
        return float(high[-1])
    safe = np.maximum(high, TINY * high[-1])
    largest = int(ratio.argmax())
    if ratio[largest] < gap:
        return float(high[-1])
    if nested < 1:
        large = ratio >= ratio[largest] ** nested
        largest = int(large.argmax())
    below = safe[largest]
    above = safe[largest + 1]
    return float(np.sqrt(below * above))


def cut(tree: Array, height: float) -> list[int]:
    """Return the clusters when all merges up to a height are made.

    The result is that of scipy's `fcluster(tree, height, "distance")` where heights do not fall.

    Args:
        tree: scipy's linkage matrix of m clients.
        height: largest height of a merge.

    Returns:
        Labels (m,), numbered from 0 in the order of first members.
    """
    merged = np.searchsorted(heights(tree), height, side="right")
    return _labels_after(tree, int(merged))


def cut_into(tree: Array, count: int) -> list[int]:
    """Return the clusters when merges are made in order until `count` are left, also under ties.

    Args:
        tree: scipy's linkage matrix of m clients.
        count: number of clusters, from 1 to m.

    Returns:
        Labels (m,), numbered as those of `cut`.
    """
    clients = len(tree) + 1
    return _labels_after(tree, clients - count)


def linkage_clusters(
    distance: Array, linkage: str, count: int | None = None, height: float | None = None
) -> list[int]:
    """Return the clusters of a distance matrix by agglomerative clustering.

    Args:
        distance: (m, m), symmetric, with zeros on the diagonal; or as scipy condenses it,
            (m(m − 1)/2,), which takes half the memory.
        linkage: one of `LINKAGES`.
        count: number of clusters; more than m are m.
        height: largest distance at which clusters are merged. Without a count or a height the cut
            is at the largest relative gap (`threshold`).

    Returns:
        Labels (m,), numbered from 0 in the order of first members.

    Raises:
        UsageError: a count and a height, or distances that are not symmetric.
    """
    if count is not None and height is not None:
        raise UsageError("a count and a height both say where to cut: give one of them")
    tree = merges(distance, linkage)
    if distance.ndim == 2 and not _symmetric(distance):
        raise UsageError(
            "clustering needs the distance of two clients to be the same in both directions: "
            "average the matrix and its transpose"
        )
    if count is not None:
        return cut_into(tree, min(count, len(tree) + 1))
    if height is None:
        height = threshold(tree, GAPS[linkage])
    return cut(tree, height)


def _symmetric(distance: Array) -> bool:
    """Return whether distances are the same in both directions, up to rounding."""
    # by blocks of rows, since a comparison of all needs several more matrices
    height = max(1, BLOCK // len(distance))
    firsts = range(0, len(distance), height)
    rows = [slice(first, first + height) for first in firsts]
    for block in rows:
        forward = distance[block]
        backward = distance[:, block].T
        if not (np.array_equal(forward, backward) or np.allclose(forward, backward)):
            return False
    return True


def between(tree: Array, count: int) -> float:
    """Return a height at which `count` clusters are left, as `cut_into` makes them.

    Args:
        tree: scipy's linkage matrix of m clients.
        count: number of clusters, from 1 to m.

    Returns:
        The mean of the heights of the last merge made and the next one; under ties that of the tie.
    """
    high = heights(tree)
    merged = len(tree) + 1 - count
    below = high[max(0, merged - 1)]
    last = len(tree) - 1
    above = high[min(merged, last)]
    return float((below + above) / 2)


def angle_gaps(tree: Array) -> tuple[Array, Array]:
    """Return the angles of heights, (m − 1,), and their gaps where `tasks_of` may cut, (m − 2,).

    Args:
        tree: as for `tasks_of`, of m clients, four or more.
    """
    high = heights(tree)
    # Rounding can lead out of [0, 1], where arcsin is not defined.
    shares = high.clip(0, 1)
    angles = 2 * np.arcsin(np.sqrt(shares))
    gaps = np.diff(angles)
    gaps[: _first_gap(len(high) + 1)] = 0
    allowed = _two_large_clusters(tree)[:-1]
    gaps[~allowed] = 0
    return angles, gaps


def tasks_of(tree: Array, noisy: bool = False) -> float:
    """Return where to cut merges of 1 − R when neither a number of tasks nor a height is given.

    Not in the paper. Heights of 1 − R lie in [0, 1], and those of IID clients scatter the more the
    nearer they are to ½, as shares do. So gaps are taken between the angles 2·arcsin √height, whose
    scatter is nearly the same everywhere. The cut is at the largest gap if it is at least `ANGLE`;
    else, and for fewer than four clients, all clients are one cluster. Only cuts with two or more
    clusters of at least two clients are considered: clients with few samples differ from all
    others, each in a direction of its own.

    Args:
        tree: merges of m clients by average linkage, heights in [0, 1]. `benchmarks.clusters.tasks`
            measures how often the rule is right.
        noisy: R compares the few eigenvectors that stand out of noise, by which clients of other
            tasks, too, are fairly similar. A gap then also counts if it is at least `SCATTER` times
            the range of all angles below it. The lowest such gap of at least `NESTED` times the
            largest one is where to cut: the largest gap may lie between groups of tasks.

    Returns:
        The mean of the heights on both sides of the gap, or that of the last merge.
    """
    high = heights(tree)
    if len(high) < LEAST_MERGES:
        return float(high[-1])
    angles, gaps = angle_gaps(tree)
    position = int(gaps.argmax())
    clear = bool(gaps[position] >= ANGLE)
    if noisy:
        below = angles[:-1] - angles[0]
        beyond_scatter = gaps >= SCATTER * below
        large = gaps >= NESTED * gaps[position]
        candidates = (below > 0) & beyond_scatter & large
        if candidates.any():
            position = int(candidates.argmax())
            clear = True
    if not clear:
        return float(high[-1])
    below_gap = high[position]
    above_gap = high[position + 1]
    return float((below_gap + above_gap) / 2)


def representatives(
    rows: torch.Tensor, labels: Sequence[int], linkage: str
) -> tuple[torch.Tensor, list[int], list[int]]:
    """Return the rows that a later client must be compared with.

    Centroid and ward need the mean of each cluster only, all other linkages every row.

    Args:
        rows: (m, d).
        labels: each row's cluster, (m,).
        linkage: one of `LINKAGES`.

    Returns:
        The r representatives (r, d), the cluster of each, and the number of clients that each
        stands for.
    """
    if linkage not in EUCLIDEAN:
        return rows, list(labels), [1] * len(labels)
    clusters = members(labels)
    means = [mean_row(rows, cluster) for cluster in clusters]
    numbers = list(range(len(clusters)))
    sizes = [len(cluster) for cluster in clusters]
    return torch.stack(means), numbers, sizes


def nearest(
    distance: Array, labels: Sequence[int], linkage: str, sizes: Sequence[int] | None = None
) -> list[int]:
    """Return the cluster that each new client would be merged with first (not in the paper).

    Args:
        distance: from n new clients to r `representatives`, (n, r).
        labels: cluster of each representative, (r,).
        linkage: one of `LINKAGES`.
        sizes: number of clients that each representative stands for, (r,), for ward; None is one.

    Returns:
        Clusters (n,); ties go to the first one.

    Raises:
        UsageError: an unknown linkage.
    """
    check_linkage("l2", linkage)
    reductions = {"single": np.min, "complete": np.max}
    reduce = reductions.get(linkage, np.mean)
    columns = []
    for cluster in members(labels):
        to_cluster = distance[:, cluster]
        columns.append(reduce(to_cluster, axis=1))
    height = np.stack(columns, axis=1)
    if linkage == "ward":
        # Clusters of 1 and s clients with centres at distance x merge at x·sqrt(2s / (s + 1)).
        counts = [1] * len(labels) if sizes is None else sizes
        size = np.asarray(counts, dtype=np.float64)
        ratio = 2 * size / (size + 1)
        height = height * np.sqrt(ratio)
    return [int(cluster) for cluster in height.argmin(1)]


def _first_gap(m: int) -> int:
    """Return the first gap of heights at which a cut leaves at most m / 2 clusters.

    Gap k is above k + 1 merges, so a cut there leaves m − 1 − k clusters. Finer cuts are not
    considered, so that clusters have two members on average: the lowest merges always have gaps.
    """
    return m - 1 - m // 2


def _two_large_clusters(tree: Array) -> NDArray[np.bool_]:
    """Return, after each merge (m − 1,), if two or more clusters have two or more members."""
    m = len(tree) + 1
    large = 0
    enough = []
    for first, second, *_ in tree:
        # scipy numbers merged clusters from m: they are large already, and become one.
        large_before = int(first >= m) + int(second >= m)
        large += 1 - large_before
        enough.append(large >= 2)
    return np.array(enough)


def _labels_after(tree: Array, merged: int) -> list[int]:
    """Return labels (m,) after so many merges, numbered in the order of first members."""
    m = len(tree) + 1
    # from the last merge down, each cluster passes its own number on to the two that it is made of
    top = list(range(m + merged))
    pairs: list[list[int]] = tree[:merged, :2].astype(int).tolist()
    for number in reversed(range(m, m + merged)):
        for child in pairs[number - m]:
            top[child] = top[number]
    label_of: dict[int, int] = {}
    return [label_of.setdefault(cluster, len(label_of)) for cluster in top[:m]]
