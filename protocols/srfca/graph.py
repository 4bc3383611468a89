"""Graphs of what lies close together, and the trimmed mean.

The graphs are those of Vardhan et al. 2024, Algorithms 1 and 4; the mean is that of Algorithm 3.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from numbers import Integral, Real

import numpy as np
from numpy.typing import NDArray

from securecluster.clustering.similarity import BLOCK
from securecluster.core.lazy_torch import torch
from securecluster.errors import UsageError

Array = NDArray[np.float64]
UNASSIGNED = -1  # the label of those in no cluster yet


def components(
    distance: Array, threshold: float, least: int, sizes: Sequence[int] | None = None
) -> list[int]:
    """Return the connected components of a graph, (m,), numbered by their first members.

    The graph has an edge wherever `distance` ≤ `threshold`.

    Args:
        distance: (m, m), symmetric; the diagonal is not read.
        least: components of fewer clients are no clusters: their members have the label OUTSIDE.
        sizes: how many clients each node stands for, (m,); one without it.
    """
    from scipy.sparse.csgraph import connected_components

    found = connected_components(np.asarray(distance) <= threshold, directed=False)[1].tolist()
    clients: list[int] = [0] * (1 + max(found, default=-1))
    for c, size in zip(found, [1] * len(found) if sizes is None else sizes, strict=True):
        clients[c] += size
    return renumbered([c if clients[c] >= least else UNASSIGNED for c in found])


def renumbered(labels: Sequence[int]) -> list[int]:
    """The same clusters, numbered from 0 in the order of their first members; OUTSIDE stays."""
    order = {c: n for n, c in enumerate(dict.fromkeys(c for c in labels if c != UNASSIGNED))}
    return [order.get(c, UNASSIGNED) for c in labels]


def groups(labels: Sequence[int]) -> list[list[int]]:
    """The members of clusters 0 … K − 1, in order; who is OUTSIDE is in none."""
    return [
        [i for i, own in enumerate(labels) if own == c]
        for c in range(1 + max(labels, default=UNASSIGNED))
    ]


def pairwise(distance: Array) -> Array:
    """The distances of all pairs, (m(m − 1)/2,)."""
    found: Array = distance[np.triu_indices(len(distance), 1)]
    return found


def spanning_tree_edges(distance: Array) -> Array:
    """Return the edges of the minimum spanning tree, (m − 1,), in ascending order.

    They are the heights at which single linkage merges.
    """
    from scipy.cluster.hierarchy import linkage

    heights: Array = (
        linkage(pairwise(distance), "single")[:, 2] if len(distance) > 1 else np.zeros(0)
    )
    return heights


def choose_threshold(distance: Array, threshold: float | None, quantile: float | None) -> float:
    """Return the λ that is given, as it is or as a quantile of all pairwise distances (m, m).

    Of fewer than two models the quantile is 0.
    """
    if threshold is not None:
        return float(threshold)
    distances = pairwise(distance)
    return (
        float(np.quantile(distances, quantile)) if quantile is not None and len(distances) else 0.0
    )


def check_clustering(size: object, clients: int, threshold: object, quantile: object) -> None:
    """Raise UsageError for a t or a λ that cannot cluster so many clients."""
    if not isinstance(size, Integral) or not 2 <= int(size) <= clients:
        raise UsageError(
            f"size = {size!r} of {clients} clients: it is a whole number from 2 to that of clients"
        )
    if threshold is not None and quantile is not None:
        raise UsageError("threshold and quantile both say what λ is: give one of them")
    if threshold is not None and not (
        isinstance(threshold, Real) and 0 <= float(threshold) < math.inf
    ):
        raise UsageError(
            f"threshold = {threshold!r} is no distance: give a finite number from 0, or leave it "
            "out"
        )
    if quantile is not None and not (isinstance(quantile, Real) and 0 <= float(quantile) <= 1):
        raise UsageError(
            f"quantile = {quantile!r} is no share of the pairwise distances: give a number in [0, "
            "1]"
        )


def trimmed_mean(rows: torch.Tensor, trim: float, who: Sequence[int] | None = None) -> torch.Tensor:
    """Return TrMean_β of rows (s, d), or of those of `who`, (d,).

    For each coordinate it is the mean without its ⌊β·s⌋ least and as many greatest. It takes a
    block of columns at a time, so that no second (s, d) is made.
    """
    pick = torch.arange(len(rows)) if who is None else torch.as_tensor(who, dtype=torch.long)
    s, cut = len(pick), math.floor(trim * len(pick))
    width = max(1, BLOCK // max(s, 1))
    parts = [
        block[pick].sort(0).values[cut : s - cut].mean(0)
        for block in torch.split(rows, width, dim=1)
    ]
    return torch.cat(parts)
