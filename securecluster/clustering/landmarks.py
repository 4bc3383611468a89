"""Clusters of many clients from a sample of them, without a matrix of all pairs.

A random sample of the clients, the landmarks, is clustered by comparing all its pairs. Each other
client then joins the cluster that it would be merged with first. Time and memory are linear in the
number of clients. CLARA (Kaufman & Rousseeuw 1990) extends a clustering from a sample to all points
in the same way; its repeated samples are left out here.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from securecluster.clustering.agglomerative import (
    linkage_clusters,
    nearest,
    representatives,
    upper_triangle,
)
from securecluster.clustering.bipartition import Bipartition
from securecluster.clustering.distances import distances
from securecluster.clustering.labels import relabel
from securecluster.clustering.similarity import cross_cosine
from securecluster.core.lazy_torch import torch

# clients that are compared with the landmarks at once, at least
BLOCK_ROWS = 512


def extended_labels(
    rows: torch.Tensor,
    landmarks: Sequence[int],
    labels: Sequence[int],
    metric: str,
    linkage: str,
    noise: float = 0.0,
) -> list[int]:
    """Return the clusters of all rows, from those of the landmarks.

    Each other row joins the cluster that it would be merged with first, as newcomers do
    (`agglomerative.nearest`). The distances of a block of b = max(s, `BLOCK_ROWS`) rows and s
    landmarks, (s + b)² numbers, are held at once.

    Args:
        rows: (m, d).
        landmarks: positions of the s rows that were clustered.
        labels: their clusters, (s,).
        metric: of `distances`.
        linkage: one of `agglomerative.LINKAGES`.
        noise: expected squared norm of the noise in each row.

    Returns:
        Labels (m,), numbered as those of the landmarks.
    """
    clustered = list(landmarks)
    references, clusters, sizes = representatives(rows[clustered], labels, linkage)
    count = len(references)
    # the mean of n noisy rows has 1/n of their noise
    reference_noise = noise / torch.tensor(sizes, dtype=torch.float64)
    extended = np.full(len(rows), -1)
    extended[clustered] = labels
    others = np.flatnonzero(extended < 0)
    block_rows = max(count, BLOCK_ROWS)
    for start in range(0, len(others), block_rows):
        positions = others[start : start + block_rows]
        block = rows[positions.tolist()]
        block_noise = torch.full((len(block),), noise, dtype=torch.float64)
        together = torch.cat([references, block])
        noises = torch.cat([reference_noise, block_noise]).to(together.device)
        distance = distances(together, metric, noises).cpu().numpy()
        extended[positions] = nearest(distance[count:, :count], clusters, linkage, sizes)
    every_label: list[int] = extended.tolist()
    return every_label


def sketch_clusters(
    rows: torch.Tensor,
    landmarks: int,
    seed: int = 0,
    metric: str = "chord",
    linkage: str = "ward",
    count: int | None = None,
) -> list[int]:
    """Cluster sketches or other rows of any number of clients in linear time and memory.

    With as many landmarks as rows, the result is that of `linkage_clusters`.

    Args:
        rows: (m, d), finite.
        landmarks: the number of rows whose pairs are compared.
        seed: of the draw of landmarks.
        metric: of `distances`.
        linkage: one of `agglomerative.LINKAGES`.
        count: number of clusters; None cuts at the largest gap.

    Returns:
        Labels (m,), numbered from 0 in the order of first members.
    """
    generator = np.random.default_rng(seed)
    size = min(landmarks, len(rows))
    drawn = generator.choice(len(rows), size, replace=False)
    chosen = sorted(int(position) for position in drawn)
    distance = distances(rows[chosen], metric).cpu().numpy()
    if size > 1:  # half of a large matrix is let go before scipy copies the other half
        distance = upper_triangle(distance)
    labels = linkage_clusters(distance, linkage, count)
    return relabel(extended_labels(rows, chosen, labels, metric, linkage))


def extended_halves(
    rows: torch.Tensor, compared: Sequence[int], sides: Bipartition
) -> tuple[list[int], list[int]]:
    """Extend a bipartition of some rows to all rows (Sattler et al. 2019, Algorithm 4, 6–12).

    Each other row joins the half with the largest cosine to any of its rows, as the paper assigns
    newcomers; the second half under ties.

    Args:
        rows: (m, d).
        compared: positions of the s rows, ascending.
        sides: by position in `compared`.

    Returns:
        The positions of each half, ascending.
    """
    first = [compared[k] for k in sides.first]
    second = [compared[k] for k in sides.second]
    references = rows[list(compared)]
    taken = set(compared)
    others = [position for position in range(len(rows)) if position not in taken]
    for start in range(0, len(others), BLOCK_ROWS):
        block = others[start : start + BLOCK_ROWS]
        alpha = cross_cosine(rows[block], references)
        to_first = alpha[:, list(sides.first)].amax(1)
        to_second = alpha[:, list(sides.second)].amax(1)
        joins_first = (to_first > to_second).tolist()
        for position, joins in zip(block, joins_first, strict=True):
            half = first if joins else second
            half.append(position)
    return sorted(first), sorted(second)
