"""k-means on inner products."""

from __future__ import annotations

import warnings

import numpy as np

from securecluster.clustering.labels import Array


def kmeans(inner: Array, k: int, seed: int) -> list[int]:
    """k-means clusters, numbered from 0, of points that are known by their inner products (m, m).

    Points of m or fewer numbers have the same inner products, and so the same distances: the
    clusters are those of the points themselves. Of ten starts the best is taken; there are fewer
    clusters where fewer points differ.
    """
    from sklearn.cluster import KMeans
    from sklearn.exceptions import ConvergenceWarning

    centred = inner - inner.mean(0) - inner.mean(1)[:, None] + inner.mean()
    values, vectors = np.linalg.eigh((centred + centred.T) / 2)
    points = vectors * np.sqrt(values.clip(0))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)  # points that coincide
        found = KMeans(min(k, len(points)), n_init=10, random_state=seed % (1 << 32)).fit_predict(
            points
        )
    labels: list[int] = np.unique(found, return_inverse=True)[1].tolist()
    return labels
