"""Clusters of unknown number: DBSCAN at the elbow of nearest distances, and scaled descriptors.

DBSCAN with two points to a core, at the radius of the elbow; clients in no cluster are clusters of
their own (Fenoglio et al. 2025, and the authors' program). The elbow is that of Satopää, Albrecht,
Irwin, Raghavan, "Finding a 'Kneedle' in a Haystack", 2011, at sensitivity 1.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from securecluster.protocols import authoring as fl

torch = fl.torch

Array = NDArray[np.float64]
SENSITIVITY = 1.0
ROUNDING = 1e-9


@dataclass
class Scaling:
    """The range of each moment over the clients of the run, to which it is scaled.

    Attributes:
        low: (blocks,) least numbers.
        width: (blocks,) of the ranges; 1 where all numbers are equal.
    """

    low: torch.Tensor
    width: torch.Tensor

    @classmethod
    def of(cls, descriptors: Array) -> Scaling:
        """Return the ranges of the run's descriptors (r, blocks, l), over clients and numbers."""
        low = descriptors.min((0, 2))
        width = descriptors.max((0, 2)) - low
        width[width == 0] = 1.0
        return cls(torch.from_numpy(low), torch.from_numpy(width))

    def scaled(self, descriptors: Array) -> Array:
        """Return the moments of all blocks at one scale, as rows (r, b · l).

        Args:
            descriptors: (r, b, l), the first b blocks of each descriptor.
        """
        blocks = descriptors.shape[1]
        low = self.low.numpy()[:blocks, None]
        width = self.width.numpy()[:blocks, None]
        scaled = (descriptors - low) / width
        return np.asarray(scaled.reshape(len(descriptors), -1))


def elbow(values: Array) -> int | None:
    """Return the position of the elbow of a convex curve that grows; None without one.

    Args:
        values: (n,) sorted, the smallest first.
    """
    n = len(values)
    height = values[-1] - values[0] if n else 0.0
    if n < 3 or not height > 0:
        return None
    x = np.linspace(0, 1, n)
    # Turned around both axes, the elbow of a convex curve is the knee of a concave one.
    turned = (values[-1] - values)[::-1] / height
    above = turned - x
    drop = SENSITIVITY / (n - 1)
    # A peak is the knee once the curve has fallen by the usual step of x, before the next valley.
    knee = None
    for i in range(n - 1):
        before = above[max(i - 1, 0)]
        after = above[i + 1]
        if before <= above[i] >= after:
            knee = i
        if before >= above[i] <= after:
            knee = None
        if knee is not None and after < above[knee] - drop:
            return n - 1 - knee
    return None


def radius(rows: Array) -> float:
    """Return the radius of DBSCAN: the distance to the nearest client, at the elbow.

    Without an elbow it is the largest of these distances (not in the paper).

    Args:
        rows: (r, q).
    """
    from sklearn.neighbors import NearestNeighbors

    distances, _ = NearestNeighbors(n_neighbors=2).fit(rows).kneighbors(rows)
    nearest = np.sort(distances[:, 1])
    position = elbow(nearest)
    if position is None:
        position = len(nearest) - 1
    return float(nearest[position])


def density_clusters(rows: Array, scale: float = 1.0) -> tuple[list[int], float]:
    """Return the cluster of each row, numbered from 0, and the radius.

    Args:
        rows: (r, q), r from 2.
        scale: factor of the radius.
    """
    from sklearn.cluster import DBSCAN

    eps = scale * radius(rows)
    # The pair whose distance is the radius is within it, however both are rounded. Rows that are
    # all the same have no distance, and DBSCAN takes no radius of 0.
    reach = max(eps * (1 + ROUNDING), np.finfo(np.float64).tiny)
    labels = DBSCAN(eps=reach, min_samples=2).fit_predict(rows)
    return fl.relabel(labels.tolist()), eps


def centroids(rows: Array, labels: list[int]) -> Array:
    """Return the mean of each cluster's rows, (K, q).

    Args:
        rows: (r, q).
        labels: (r,) numbered from 0 without gaps.
    """
    members = np.asarray(labels)
    return np.stack([rows[members == c].mean(0) for c in range(max(labels) + 1)])
