"""k-means on points, or on their inner products."""

from __future__ import annotations

import warnings

import numpy as np

from securecluster.clustering.labels import Array

STARTS = 10  # random initializations, of which the best one is returned
SEEDS = 1 << 32  # scikit-learn takes seeds below this


def kmeans(inner: Array, k: int, seed: int) -> list[int]:
    """Cluster points by k-means, given only their inner products.

    Points in at most m dimensions with these inner products have the same pairwise distances as the
    original points, so they have the same clusters.

    Args:
        inner: inner products, (m, m).
        k: number of clusters.
        seed: seed of the random starts.

    Returns:
        Labels (m,) from 0; fewer than k clusters if fewer points are distinct.
    """
    return _clusters(_embedding(inner), k, seed)


def kmeans_of_points(points: Array, k: int, seed: int) -> list[int]:
    """Cluster points by k-means, in time and memory that are linear in their number.

    Args:
        points: (m, q).
        k: number of clusters.
        seed: seed of the random starts.

    Returns:
        Labels as of `kmeans` on the inner products of the points.
    """
    if points.shape[1] > len(points):  # then the inner products are fewer numbers
        return kmeans(points @ points.T, k, seed)
    return _clusters(points - points.mean(0), k, seed)


def _clusters(points: Array, k: int, seed: int) -> list[int]:
    """Return the clusters of centred points, (m,)."""
    from sklearn.cluster import KMeans
    from sklearn.exceptions import ConvergenceWarning

    estimator = KMeans(min(k, len(points)), n_init=STARTS, random_state=seed % SEEDS)
    with warnings.catch_warnings():
        # Points that coincide give fewer clusters than k, which scikit-learn warns of.
        warnings.simplefilter("ignore", ConvergenceWarning)
        predicted = estimator.fit_predict(points)
    _, positions = np.unique(predicted, return_inverse=True)
    labels: list[int] = positions.tolist()
    return labels


def _embedding(inner: Array) -> Array:
    """Return centred points (m, m) with the given inner products (classical scaling)."""
    column_means = inner.mean(0)
    row_means = inner.mean(1)[:, None]
    centred = inner - column_means - row_means + inner.mean()
    # Averaging with the transpose undoes asymmetry by rounding, which eigh would ignore.
    symmetric = (centred + centred.T) / 2
    values, vectors = np.linalg.eigh(symmetric)
    # Rounding and noisy inner products can make the smallest eigenvalues negative.
    scales = np.sqrt(values.clip(0))
    return np.asarray(vectors * scales)
