"""k-means on points is k-means on their inner products, without a matrix of all pairs."""

from __future__ import annotations

import numpy as np
import pytest
from sklearn.cluster import KMeans
from sklearn.metrics import adjusted_rand_score

from securecluster.clustering import k_means
from securecluster.clustering.k_means import kmeans, kmeans_of_points


@pytest.mark.parametrize("shape", [(60, 3), (60, 60), (12, 40)])
@pytest.mark.parametrize("k", [1, 2, 4, 100])
def test_points_have_the_clusters_of_their_inner_products(shape: tuple[int, int], k: int) -> None:
    draw = np.random.default_rng(7)
    points = draw.normal(size=shape) + 9 * draw.integers(0, 3, size=(shape[0], 1)) + 5
    found = kmeans_of_points(points, k, 3)
    assert adjusted_rand_score(found, kmeans(points @ points.T, k, 3)) == 1
    if k == 4:
        own = KMeans(k, n_init=10, random_state=3).fit_predict(points)
        assert adjusted_rand_score(found, own) == 1


def test_many_points_need_no_inner_products(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(k_means, "_embedding")
    points = np.repeat(np.eye(3), 40, 0)
    assert adjusted_rand_score(kmeans_of_points(points, 3, 0), np.arange(120) // 40) == 1


def test_points_that_coincide_give_fewer_clusters() -> None:
    assert kmeans_of_points(np.ones((7, 2)), 3, 0) == [0] * 7
