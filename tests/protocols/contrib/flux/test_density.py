"""FLUX's clustering against scikit-learn, and its elbow against kneed."""

from __future__ import annotations

import numpy as np
import pytest
from sklearn.cluster import DBSCAN
from sklearn.preprocessing import MinMaxScaler

from securecluster.protocols.contrib.flux.density import (
    Scaling,
    centroids,
    density_clusters,
    elbow,
    radius,
)

# KneeLocator(range(n), values, curve="convex", direction="increasing").elbow of kneed 0.9
KNEED = [
    ([1.0, 1.1, 1.2, 1.3, 5.0, 6.0], 3),
    ([0.0, 0.0, 0.0, 1.0, 1.0, 9.0], 4),
    ([0.5, 0.52, 0.55, 0.6, 0.62, 0.7, 1.5, 3.0], 5),
    ([1.0, 2.0, 3.0], None),
    ([1.0, 5.0, 5.5, 5.7], 3),
]


def blobs(spread: float = 0.1, seed: int = 0) -> np.ndarray:
    """Return 15 rows around three corners, and one row far from all others."""
    draw = np.random.default_rng(seed)
    corners = np.repeat([[0.0, 0.0], [5.0, 0.0], [0.0, 5.0]], 5, 0)
    return np.vstack([corners + spread * draw.normal(size=(15, 2)), [[20.0, 20.0]]])


@pytest.mark.parametrize(("values", "position"), KNEED)
def test_the_elbow_is_kneeds(values: list[float], position: int | None) -> None:
    assert elbow(np.array(values)) == position


def test_short_and_flat_curves_have_no_elbow() -> None:
    for values in ([], [1.0], [1.0, 2.0], [3.0, 3.0, 3.0, 3.0]):
        assert elbow(np.array(values)) is None


def test_the_radius_is_the_distance_to_the_nearest_row_at_the_elbow() -> None:
    rows = blobs()
    distances = np.linalg.norm(rows[:, None] - rows[None], axis=2)
    np.fill_diagonal(distances, np.inf)
    nearest = np.sort(distances.min(1))
    position = elbow(nearest)
    assert position is not None
    assert radius(rows) == pytest.approx(nearest[position])
    # without an elbow, the largest
    assert radius(rows[:2]) == pytest.approx(np.linalg.norm(rows[0] - rows[1]))


def test_clusters_are_scikit_learns_and_outliers_are_alone() -> None:
    rows = blobs()
    labels, eps = density_clusters(rows, 3.0)
    assert eps == pytest.approx(3 * radius(rows))
    expected = DBSCAN(eps=eps, min_samples=2).fit_predict(rows)
    assert expected[-1] == -1
    assert labels == [*np.repeat([0, 1, 2], 5), 3]
    for i, j in np.ndindex(16, 16):
        together = expected[i] == expected[j] and (expected[i] >= 0 or i == j)
        assert (labels[i] == labels[j]) == together
    assert labels[0] == 0 and set(labels) == set(range(max(labels) + 1))


def test_the_nearest_pair_at_the_radius_is_together() -> None:
    for seed in range(20):
        rows = np.random.default_rng(seed).normal(size=(8, 220))
        labels, _ = density_clusters(rows)
        assert max(labels) < 7, "someone is at the radius of another one"


def test_rows_that_are_all_the_same_are_one_cluster() -> None:
    labels, eps = density_clusters(np.ones((4, 3)))
    assert labels == [0, 0, 0, 0] and eps == 0


def test_groups_are_scaled_as_scikit_learn_scales_them_and_newcomers_alike() -> None:
    draw = np.random.default_rng(0)
    descriptors = draw.normal(size=(6, 4, 3)) * np.array([1.0, 10.0, 0.1, 1.0])[:, None]
    descriptors[:, 3] = -1.0  # a class that nobody has
    scaling = Scaling.of(descriptors)
    rows = scaling.scaled(descriptors)
    newcomer = draw.normal(size=(1, 4, 3))
    told = scaling.scaled(newcomer[:, :2])
    assert rows.shape == (6, 12) and told.shape == (1, 6)
    for b in range(4):
        scaler = MinMaxScaler().fit(descriptors[:, b].reshape(-1, 1))
        expected = scaler.transform(descriptors[:, b].reshape(-1, 1)).reshape(6, 3)
        np.testing.assert_allclose(rows[:, 3 * b : 3 * b + 3], expected)
        if b < 2:
            own = scaler.transform(newcomer[:, b].reshape(-1, 1)).reshape(1, 3)
            np.testing.assert_allclose(told[:, 3 * b : 3 * b + 3], own)


def test_centroids_are_means_of_clusters() -> None:
    rows = blobs()
    labels = [*np.repeat([0, 1, 2], 5), 1]
    found = centroids(rows, labels)
    np.testing.assert_allclose(found[0], rows[:5].mean(0))
    np.testing.assert_allclose(found[1], np.vstack([rows[5:10], rows[15:]]).mean(0))
