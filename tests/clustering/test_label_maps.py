"""Label maps: matching against all orders, buckets, and what the server computes from sums."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from securecluster.clustering import label_maps


@pytest.fixture
def draw() -> np.random.Generator:
    return np.random.default_rng(0)


def test_a_label_map_is_the_closest_of_all_orders(draw: np.random.Generator) -> None:
    anchors = draw.standard_normal((5, 3))
    means = label_maps.unit_means(draw.standard_normal((20, 5, 3)), draw.random((20, 5)))
    np.testing.assert_allclose(np.linalg.norm(means.reshape(20, -1), axis=1), 1.0)
    for own, found in zip(means, label_maps.label_maps(means, anchors), strict=True):
        orders = itertools.permutations(range(5))
        distances = {order: ((own[list(order)] - anchors) ** 2).sum() for order in orders}
        assert tuple(found) == min(distances, key=distances.__getitem__)


def test_owners_whose_labels_are_permuted_have_maps_that_differ_by_the_permutation(
    draw: np.random.Generator,
) -> None:
    anchors = draw.standard_normal((6, 8))
    order = draw.permutation(6)
    rows = np.stack([anchors, anchors[order]])
    maps = label_maps.label_maps(rows, anchors)
    np.testing.assert_array_equal(order[maps[1]], np.arange(6))
    np.testing.assert_allclose(label_maps.in_order(rows, maps)[1], anchors)


@pytest.mark.parametrize("swaps", [0, 1, 2])
def test_an_owner_takes_the_cluster_of_the_closest_map_of_two_swaps(
    swaps: int, draw: np.random.Generator
) -> None:
    anchors = draw.standard_normal((6, 8))
    true_map = np.arange(6)
    other = np.roll(true_map, 1)
    buckets = 1 << 20  # hardly any collisions
    places = [label_maps.bucket_of(other, buckets, 1), label_maps.bucket_of(true_map, buckets, 1)]
    means = anchors.copy()
    own = true_map.copy()
    for pair in ([0, 1], [2, 3])[:swaps]:
        own[pair] = own[pair[::-1]]
        means[pair] = 0.0  # the owner lacks both classes
    assert label_maps.nearest_place(means, anchors, own, places, buckets, 1) == 1


def test_coherence_is_the_squared_norm_of_the_mean_without_the_noise(
    draw: np.random.Generator,
) -> None:
    mean = draw.standard_normal((10, 40))
    mean *= 0.8 / np.linalg.norm(mean)
    deviation = 0.03
    found = []
    for _ in range(400):
        noisy = mean + deviation * draw.standard_normal((2, *mean.shape))
        found.append(label_maps.coherence(*noisy, deviation))
    error = np.std(found) / np.sqrt(len(found))
    assert abs(np.mean(found) - 0.64) < 4 * error < 0.02


def test_noise_alone_rarely_passes_the_level(draw: np.random.Generator) -> None:
    passed = 0
    for _ in range(200):
        counts = 5.0 * draw.standard_normal(1024)
        passed += int((counts > label_maps.noise_level(1024, 5.0)).sum() >= 2)
    assert passed < 10
    assert [label_maps.buckets_for(k) for k in (2, 4, 8)] == [128, 256, 1024]
