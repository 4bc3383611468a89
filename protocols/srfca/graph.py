"""Threshold graphs of models and the trimmed mean of Vardhan et al. 2024.

The graphs are those of Algorithms 1 (ONE_SHOT) and 4 (MERGE); the mean is that of Algorithm 3
(TRIMMED_MEAN_GD).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from numbers import Integral, Real

import numpy as np
from numpy.typing import NDArray

from securecluster.clustering.similarity import BLOCK
from securecluster.core.lazy_torch import torch
from securecluster.protocols import authoring as fl

Array = NDArray[np.float64]
UNASSIGNED = -1  # the label of clients without a cluster


def components(
    distance: Array, threshold: float, minimum: int, sizes: Sequence[int] | None = None
) -> list[int]:
    """Return the connected components of a threshold graph.

    The graph has an edge wherever `distance` ≤ `threshold`.

    Args:
        distance: (m, m), symmetric; the diagonal is not read.
        threshold: λ, in the unit of the distances.
        minimum: t, the fewest clients of a cluster. Members of smaller components are labelled
            UNASSIGNED.
        sizes: (m,) the number of clients that each node represents; None means one each.

    Returns:
        (m,) labels, numbered in the order of the components' first members.
    """
    from scipy.sparse.csgraph import connected_components

    adjacency = np.asarray(distance) <= threshold
    _, component_array = connected_components(adjacency, directed=False)
    component_of = component_array.tolist()
    if sizes is None:
        sizes = [1] * len(component_of)

    clients = [0] * (1 + max(component_of, default=-1))
    for component, size in zip(component_of, sizes, strict=True):
        clients[component] += size

    labels = []
    for component in component_of:
        large_enough = clients[component] >= minimum
        labels.append(component if large_enough else UNASSIGNED)
    return renumbered(labels)


def renumbered(labels: Sequence[int]) -> list[int]:
    """Number clusters from 0 in the order of their first members.

    Args:
        labels: (m,) any integers; UNASSIGNED is left as it is.

    Returns:
        (m,) the same clusters with labels 0 … K − 1.
    """
    new_label = {UNASSIGNED: UNASSIGNED}
    clusters = 0
    for label in labels:
        if label not in new_label:
            new_label[label] = clusters
            clusters += 1
    return [new_label[label] for label in labels]


def groups(labels: Sequence[int]) -> list[list[int]]:
    """Return the members of clusters 0 … K − 1, in ascending order.

    Args:
        labels: (m,) the clients' clusters; clients labelled UNASSIGNED are in no group.
    """
    clusters = 1 + max(labels, default=UNASSIGNED)
    members: list[list[int]] = [[] for _ in range(clusters)]
    for client, label in enumerate(labels):
        if label != UNASSIGNED:
            members[label].append(client)
    return members


def pairwise(distance: Array) -> Array:
    """Return the distances of all pairs as one row.

    Args:
        distance: (m, m), symmetric; only the part above the diagonal is read.

    Returns:
        (m(m − 1)/2,) in scipy's condensed order.
    """
    upper = np.triu_indices(len(distance), 1)
    condensed: Array = distance[upper]
    return condensed


def spanning_tree_edges(distance: Array) -> Array:
    """Return the edge lengths of the minimum spanning tree.

    They are the heights at which single linkage merges.

    Args:
        distance: (m, m), symmetric; the diagonal is not read.

    Returns:
        (m − 1,) in ascending order.
    """
    from scipy.cluster.hierarchy import linkage

    # scipy's own spanning tree reads a distance of zero as a missing edge, linkage does not
    if len(distance) < 2:
        return np.zeros(0)
    tree = linkage(pairwise(distance), "single")
    heights: Array = tree[:, 2]
    return heights


def choose_threshold(distance: Array, threshold: float | None, quantile: float | None) -> float:
    """Return λ as the user specified it.

    Args:
        distance: (m, m) distances of one-shot models.
        threshold: λ itself; takes precedence over the quantile.
        quantile: λ as a quantile of all pairwise distances, in [0, 1].

    Returns:
        λ; 0 for a quantile of fewer than two models.
    """
    if threshold is not None:
        return float(threshold)
    distances = pairwise(distance)
    if quantile is None or not len(distances):
        return 0.0
    return float(np.quantile(distances, quantile))


def check_clustering(size: object, clients: int, threshold: object, quantile: object) -> None:
    """Check the options of ONE_SHOT(λ, t).

    Args:
        size: t, the fewest clients of a cluster.
        clients: m, the clients of the run.
        threshold: λ, or None.
        quantile: λ as a quantile of the pairwise distances, or None.

    Raises:
        UsageError: t or λ is out of range, or λ is given twice.
    """
    if not isinstance(size, Integral) or not 2 <= int(size) <= clients:
        raise fl.UsageError(
            f"size = {size!r} of {clients} clients: it is a whole number from 2 to that of clients"
        )
    if threshold is not None and quantile is not None:
        raise fl.UsageError("threshold and quantile both say what λ is: give one of them")
    if threshold is not None:
        is_distance = isinstance(threshold, Real) and 0 <= float(threshold) < math.inf
        if not is_distance:
            raise fl.UsageError(
                f"threshold = {threshold!r} is no distance: give a finite number from 0, or leave "
                "it out"
            )
    if quantile is not None:
        is_share = isinstance(quantile, Real) and 0 <= float(quantile) <= 1
        if not is_share:
            raise fl.UsageError(
                f"quantile = {quantile!r} is no share of the pairwise distances: give a number in "
                "[0, 1]"
            )


def trimmed_mean(
    rows: torch.Tensor, trim: float, positions: Sequence[int] | None = None
) -> torch.Tensor:
    """Return the coordinate-wise trimmed mean TrMean_β of Algorithm 3.

    In each coordinate, the ⌊β·s⌋ smallest and as many largest of s values are left out.

    Args:
        rows: (n, d) updates.
        trim: β, in [0, 0.5).
        positions: the s rows to average; None means all.

    Returns:
        (d,) the mean.
    """
    if positions is None:
        selected = torch.arange(len(rows))
    else:
        selected = torch.as_tensor(positions, dtype=torch.long)
    s = len(selected)
    cut = math.floor(trim * s)

    # by blocks of columns, so that no second (s, d) matrix is allocated
    width = max(1, BLOCK // max(s, 1))
    means = []
    for block in torch.split(rows, width, dim=1):
        ascending = block[selected].sort(0).values
        means.append(ascending[cut : s - cut].mean(0))
    return torch.cat(means)
