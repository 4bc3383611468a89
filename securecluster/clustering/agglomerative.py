"""Agglomerative clustering of a distance matrix: merges, where to cut them, and the clusters of a
cut (Briggs et al. 2020, I-C).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from securecluster.clustering.labels import members
from securecluster.clustering.similarity import mean_row
from securecluster.core.lazy_torch import torch
from securecluster.errors import UsageError, unknown

Array = NDArray[np.float64]
LINKAGES = ("single", "complete", "average", "centroid", "ward")
EUCLIDEAN = ("centroid", "ward")  # linkages that are about points, not about distances alone
POINTS = ("l2", "chord")  # metrics that are distances of points
GAPS = {"single": 1.15, "complete": 1.2, "average": 1.2, "centroid": 1.2, "ward": 1.4}
ANGLE = 0.26  # least gap between clusters of `tasks_of`, in radians; found by trial, as GAPS
# where R has noise, or so many times the range of all angles below it; found by trial
# (`benchmarks.papers.oneshot_noise`)
SCATTER = 2.0
# least share of the largest gap of a lower one that counts, where R has noise; found by trial, as
# SCATTER
NESTED = 0.25
TINY = 1e-9  # share of the last merge's height below which heights are rounding


def check_linkage(metric: str, linkage: str) -> None:
    """Raise UsageError for an unknown linkage, or one that needs Euclidean distances beside another
    metric.
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
    """scipy's linkage matrix (m − 1, 4): the two clusters of each merge, its height, its size; in
    the order of heights.

    "average" is UPGMA; "centroid" (L2), which the paper's words describe, is offered beside it.
    Heights of centroid linkage can fall from one merge to the next (an inversion): `cut` and
    `threshold` use the running maximum, so that a cut is a partition.

    Args:
        distance: (m, m), symmetric; for centroid and ward it must be Euclidean (`check_linkage`).

    Raises:
        UsageError: an unknown linkage, fewer than two rows, not square, or not finite.
    """
    from scipy.cluster.hierarchy import linkage as agglomerate
    from scipy.spatial.distance import squareform

    check_linkage("l2", linkage)
    m = len(distance)
    if m < 2 or distance.shape != (m, m) or not np.isfinite(distance).all():
        raise UsageError(
            "clustering needs a finite square distance matrix of at least two clients, not "
            f"{distance.shape}"
        )
    return np.asarray(agglomerate(squareform(distance, checks=False), linkage), dtype=np.float64)


def heights(tree: Array) -> Array:
    """Heights of the merges (m − 1,), inversions lifted to the height before them."""
    return np.maximum.accumulate(tree[:, 2])


def gap_of(metric: str, linkage: str) -> float:
    """The least ratio of consecutive heights that counts as a gap between clusters (ours, found by
    trial).

    IID clients' heights rise by less, merge by merge. A cosine distance is half a squared distance
    of unit vectors, hence the square.
    """
    return GAPS[linkage] ** (2 if metric == "cosine" else 1)


def threshold(tree: Array, gap: float) -> float:
    """Where to cut when nobody knows (ours): within the largest relative gap of consecutive
    heights, if it is at least `gap`.

    No fixed number can serve all metrics and models: heights are in the hundreds under L1 and below
    1 under cosine. Only cuts into at most m / 2 clusters are considered, so that a client has
    company on average: the lowest merges always have gaps among them. Without such a gap, and for
    fewer than four clients, everyone is one cluster. Identical updates (height 0) are never parted.

    Returns:
        a height between the gap's two merges (their geometric mean), or that of the last merge.
    """
    high = heights(tree)
    m = len(high) + 1
    safe = np.maximum(high, TINY * high[-1])
    if m < 4 or safe[-1] == 0:
        return float(high[-1])
    ratio = safe[1:] / safe[:-1]
    ratio[: m - 1 - m // 2] = 0  # ratio[k] is above k + 1 merges, hence m − 1 − k clusters
    k = int(ratio.argmax())
    return float(np.sqrt(safe[k] * safe[k + 1])) if ratio[k] >= gap else float(high[-1])


def cut(tree: Array, at: float) -> list[int]:
    """Each client's cluster when all merges up to height `at` are made, (m,), numbered from 0 in
    the order of their first members.

    The same as scipy's `fcluster(tree, at, "distance")` where heights do not fall.
    """
    return _after(tree, int(np.searchsorted(heights(tree), at, side="right")))


def into(tree: Array, count: int) -> list[int]:
    """Each client's cluster when merges are made, in order, until `count` clusters are left, also
    where heights are tied; as `cut`.
    """
    return _after(tree, len(tree) + 1 - count)


def between(tree: Array, count: int) -> float:
    """A height at which `count` clusters are left, as `into` makes them; where heights are tied,
    that of the tie.
    """
    high, made = heights(tree), len(tree) + 1 - count
    return float((high[max(0, made - 1)] + high[min(made, len(tree) - 1)]) / 2)


def tasks_of(tree: Array, noisy: bool = False) -> float:
    """Where to cut merges of 1 − R when neither the number of tasks nor a height is given (ours):
    within the largest gap of angles.

    Heights of 1 − R lie in [0, 1], and those of IID clients scatter the more the nearer they are to
    ½, as shares do; so gaps are taken between the angles 2·arcsin √height, whose scatter is nearly
    the same everywhere. The largest is where to cut if it is at least `ANGLE`, else everyone is one
    cluster. Only cuts into at most m / 2 clusters are considered, as in `threshold`, of which two
    or more have company: clients with few samples are unlike everyone, each in a way of its own.
    Fewer than four clients are one cluster.

    Args:
        tree: merges of m clients by average linkage, heights in [0, 1] (`benchmarks.tasks` tells
            how often the rule is right).
        noisy: R compares the few eigenvectors that stand out of noise, by which clients of other
            tasks, too, are fairly alike. A gap then also counts if it is at least `SCATTER` times
            the range of all angles below it. The lowest such gap of at least `NESTED` times the
            largest is where to cut: the largest gap may lie between groups of tasks.

    Returns:
        the mean of the heights on both sides of the gap, or that of the last merge.
    """
    high = heights(tree)
    m = len(high) + 1
    if m < 4:
        return float(high[-1])
    angles = 2 * np.arcsin(np.sqrt(high.clip(0, 1)))
    gap = np.diff(angles)
    gap[: m - 1 - m // 2] = 0  # as in `threshold`
    gap[~_with_company(tree)[:-1]] = 0
    k = int(gap.argmax())
    apart = bool(gap[k] >= ANGLE)
    if noisy:
        below = angles[:-1] - angles[0]
        clear = (below > 0) & (gap >= SCATTER * below) & (gap >= NESTED * gap[k])
        if clear.any():
            k, apart = int(clear.argmax()), True
    return float((high[k] + high[k + 1]) / 2) if apart else float(high[-1])


def _with_company(tree: Array) -> NDArray[np.bool_]:
    """Return, after each merge (m − 1,), whether two or more clusters have two or more members."""
    m = len(tree) + 1
    large = 0
    found = []
    for a, b, *_ in tree:
        large += 1 - int(a >= m) - int(b >= m)
        found.append(large >= 2)
    return np.array(found)


def _after(tree: Array, made: int) -> list[int]:
    m = len(tree) + 1
    groups = {k: [k] for k in range(m)}
    for n, (a, b, *_) in enumerate(tree[:made]):
        groups[m + n] = groups.pop(int(a)) + groups.pop(int(b))
    labels = [0] * m
    for number, own in enumerate(sorted(groups.values(), key=min)):
        for i in own:
            labels[i] = number
    return labels


def representatives(
    rows: torch.Tensor, labels: Sequence[int], linkage: str
) -> tuple[torch.Tensor, list[int], list[int]]:
    """What a later client must be compared with: rows, the cluster of each, and how many clients
    each stands for.

    The mean of each cluster under centroid and ward, which need no more; else every row (m, d).
    """
    if linkage not in EUCLIDEAN:
        return rows, list(labels), [1] * len(labels)
    clusters = members(labels)
    return (
        torch.stack([mean_row(rows, own) for own in clusters]),
        list(range(len(clusters))),
        [len(own) for own in clusters],
    )


def nearest(
    distance: Array, labels: Sequence[int], sizes: Sequence[int], linkage: str
) -> list[int]:
    """The cluster that each new client, a cluster of one, would be merged with first, (n,); ties go
    to the first (ours).

    Args:
        distance: (n, r) to the r `representatives`, whose clusters and sizes follow.
    """
    join = {"single": np.min, "complete": np.max}.get(linkage, np.mean)
    near = np.stack([join(distance[:, own], axis=1) for own in members(labels)], axis=1)
    # the height at which clusters of 1 and s with centres at distance x merge is x·sqrt(2s / (s +
    # 1))
    if linkage == "ward":
        size = np.asarray(sizes, dtype=np.float64)
        near = near * np.sqrt(2 * size / (size + 1))
    return [int(c) for c in near.argmin(1)]
