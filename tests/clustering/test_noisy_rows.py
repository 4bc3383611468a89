"""Clusters of rows with known noise: counts, distances and directions by their definitions."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import numpy as np
import pytest
from cases import seeds
from numpy.typing import NDArray

from securecluster.clustering.metrics import agreement
from securecluster.clustering.noisy_rows import (
    NoisyBlocks,
    NoisyRows,
    centred_products,
    leading_directions,
    weighted_mean,
    without_negative,
)

Array = NDArray[np.float64]
M, Q = 24, 16
TRUTH = np.repeat([0, 1, 2], [4, 8, 12])


def rows(separation: float, noise: float, seed: int = 0) -> NoisyRows:
    """Return rows of three clusters whose centres have a distance of √2 · separation."""
    draw = np.random.default_rng(seed)
    centres = separation * np.eye(Q)[:3]
    values = centres[TRUTH] + noise * draw.normal(size=(M, Q))
    return NoisyRows(values, np.full(M, noise), np.zeros(M), Q)


def test_clusters_in_noise_are_found_with_and_without_their_number() -> None:
    clear = rows(8.0, 1.0)
    assert clear.count() == 3
    for k in (3, None):
        assert agreement(clear.clusters(k, 0), TRUTH)["exact"]


@pytest.mark.parametrize("seed", range(5))
def test_noise_alone_is_one_cluster(seed: int) -> None:
    alone = rows(0.0, 1.0, seed)
    assert alone.count() == 1
    assert alone.clusters(None, 0) == [0] * M


def test_noise_that_is_taken_to_be_smaller_looks_like_clusters() -> None:
    alone = rows(0.0, 1.0)
    assert NoisyRows(alone.values, np.full(M, 0.5), np.zeros(M), Q).count() > 1
    # what sampling adds counts as noise does
    assert NoisyRows(alone.values, np.full(M, 0.5), np.full(M, 0.75), Q).count() == 1


def test_clusters_are_counted_from_the_rows_that_are_given_for_it() -> None:
    clear = rows(8.0, 1.0)
    noise = rows(0.0, 1.0).values
    assert NoisyRows(clear.values, clear.deviations, clear.sampling, Q, noise).count() == 1


def test_equal_rows_are_one_cluster() -> None:
    equal = NoisyRows(np.ones((M, Q)), np.zeros(M), np.zeros(M), Q)
    assert equal.clusters(None, 0) == [0] * M


def test_directions_are_those_of_an_eigendecomposition_and_zeros_beyond_the_rank() -> None:
    values = rows(8.0, 1.0).values
    covariance = np.cov(values.T)
    _, vectors = np.linalg.eigh(covariance)
    found = leading_directions(values, 2)
    expected = vectors[:, ::-1][:, :2].T
    np.testing.assert_allclose(np.abs(np.sum(found * expected, 1)), 1.0)
    few = leading_directions(values[:3], 6)
    np.testing.assert_allclose(few @ few.T, np.diag([1.0, 1.0, 0.0, 0.0, 0.0, 0.0]), atol=1e-12)
    assert not leading_directions(np.ones((4, 3)), 2).any()


def test_the_weighted_mean_has_the_least_variance() -> None:
    first, second = np.array([[1.0]]), np.array([[4.0]])
    assert weighted_mean(first, 2.0, second, 1.0).item() == pytest.approx(3.0)


def loop_distance(one: NoisyBlocks, i: int, other: NoisyBlocks, j: int) -> tuple[float, float]:
    """Return distance and score of two clients by a loop over classes."""
    total = weights = 0.0
    classes = one.blocks.shape[1]
    for label in range(classes):
        parts = []
        for of, k in ((one, i), (other, j)):
            deviation = float(of.deviations[k])
            share = max(float(of.blocks[k, label, -1]), 0.5 * deviation)
            mean = of.blocks[k, label, :-1] / share
            spread = deviation**2 * (1 + float(mean @ mean) / of.width)
            variance = (spread + float(of.sampling[k]) * share) / share**2
            parts.append((mean, variance))
        (mean, variance), (other_mean, other_variance) = parts
        joint = variance + other_variance
        gap = mean - other_mean
        total += (float(gap @ gap) - one.width * joint) / joint
        weights += 1 / joint
    return total / weights, total / math.sqrt(2 * one.width * classes)


def class_blocks(seed: int = 0, clusters: int = 3, noise: float = 0.002) -> NoisyBlocks:
    """Return blocks of clients with random shares of five classes, whose means cluster."""
    draw = np.random.default_rng(seed)
    means = draw.normal(size=(clusters, 5, 4))
    shares = draw.dirichlet(np.full(5, 3.0), size=M)[:, :, None]
    blocks = np.concatenate([means[TRUTH % clusters] * shares, shares], axis=2)
    noisy = blocks + noise * draw.normal(size=blocks.shape)
    return NoisyBlocks(noisy, np.full(M, noise), np.full(M, 1e-5), 4)


def test_block_distances_are_those_of_a_loop_over_classes() -> None:
    one, other = class_blocks(0), class_blocks(1)
    found = one.distances(other)
    for i, j in ((0, 0), (3, 20), (23, 7)):
        distance, score = loop_distance(one, i, other, j)
        assert found.distance[i, j] == pytest.approx(distance, rel=1e-6)
        assert found.score[i, j] == pytest.approx(score, rel=1e-6)


@pytest.mark.parametrize("k", [3, None])
def test_blocks_find_clusters_whatever_the_shares_of_classes(k: int | None) -> None:
    assert agreement(class_blocks().clusters(k, 0), TRUTH)["exact"]


def test_blocks_of_one_cluster_are_one() -> None:
    assert class_blocks(clusters=1).clusters(None, 0) == [0] * M


@pytest.mark.parametrize("declared", [1e-6, 1e-3, 1.0])
@pytest.mark.parametrize("clusters", [1, 3])
def test_clusters_are_counted_whatever_sampling_adds(clusters: int, declared: float) -> None:
    # class means scatter by far more, or far less, than was declared
    draw = np.random.default_rng(1)
    means = draw.normal(size=(clusters, 10, 12))[TRUTH % clusters]
    shares = draw.dirichlet(np.full(10, 5.0), size=M)[:, :, None]
    for spread in (0.3, 0.001):
        scattered = means + spread * draw.normal(size=means.shape)
        blocks = np.concatenate([scattered * shares, shares], axis=2)
        made = NoisyBlocks(blocks, np.zeros(M), np.full(M, declared), 12)
        assert made.count() == clusters, spread


def test_known_noise_counts_where_it_explains_the_distances() -> None:
    # noise alone makes gaps of any size between few rows
    for seed in range(5):
        assert class_blocks(seed, clusters=1, noise=0.05).count() == 1


def test_a_class_that_a_client_lacks_does_not_count_without_noise() -> None:
    whole = class_blocks(noise=0.0)
    blocks = whole.blocks.copy()
    blocks[0, 2] = 0.0
    lacking = NoisyBlocks(blocks, whole.deviations, whole.sampling, 4)
    same_cluster = lacking.distances(lacking).distance[0, 1]
    others = lacking.distances(lacking).distance[0, 12]
    assert abs(same_cluster) < 1e-3 * others


def sampled_blocks(sizes: Sequence[int], clusters: int, seed: int) -> NoisyBlocks:
    """Return exact blocks of clients with samples of ten classes, some of which they lack."""
    draw = np.random.default_rng(seed)
    centres = draw.normal(size=(clusters, 10, 12))
    blocks = np.zeros((len(sizes), 10, 13))
    for i, size in enumerate(sizes):
        labels = draw.integers(0, 10, size)
        samples = centres[i % clusters, labels] + draw.normal(size=(size, 12))
        np.add.at(blocks[i], labels, np.column_stack([samples, np.ones(size)]) / size)
    counts = np.array(sizes, dtype=float)
    return NoisyBlocks(blocks, np.zeros(len(sizes)), 1.0 / counts, 12)


def test_exact_block_distances_are_those_of_a_loop_over_common_classes() -> None:
    sizes = (15, 40, 600, 7)
    made = sampled_blocks(sizes, clusters=2, seed=3)
    found = made.distances(made)
    for i, j in itertools.product(range(4), repeat=2):
        ratios = []
        for label in range(10):
            (share, other) = made.blocks[i, label, -1], made.blocks[j, label, -1]
            if share and other:
                gap = made.blocks[i, label, :-1] / share - made.blocks[j, label, :-1] / other
                variance = 1 / (share * sizes[i]) + 1 / (other * sizes[j])
                ratios.append(float(gap @ gap) / (12 * variance))
        assert 3 <= len(ratios) <= 10
        mean = float(np.mean(ratios))
        assert found.spread[i, j] == pytest.approx(mean)
        assert found.distance[i, j] == pytest.approx(mean)
        deviations = (mean - 1) * math.sqrt(12 * len(ratios) / 2)
        assert found.score[i, j] == pytest.approx(deviations)


@pytest.mark.parametrize("seed", seeds(3, of=10))
def test_clients_with_few_samples_are_in_the_cluster_of_those_with_many(seed: int) -> None:
    sizes = [20, 60, 180, 600] * 4
    alone = sampled_blocks(sizes, clusters=1, seed=seed)
    assert alone.clusters(None, 0) == [0] * 16
    same = alone.distances(alone).spread[~np.eye(16, dtype=bool)]
    assert same.mean() == pytest.approx(1.0, abs=0.1)
    # by the first client's number of samples for all, clusters are of clients of one size
    unknown = NoisyBlocks(alone.blocks, alone.deviations, np.full(16, 1 / 20), 12)
    assert len(set(unknown.clusters(None, 0))) > 1
    two = sampled_blocks([size for size in sizes for _ in range(2)], clusters=2, seed=seed)
    assert agreement(two.clusters(None, 0), np.arange(32) % 2)["exact"]


def test_clients_without_a_common_class_are_as_far_apart_as_the_others() -> None:
    made = sampled_blocks((50, 50, 50), clusters=1, seed=0)
    blocks = made.blocks.copy()
    blocks[0, :5], blocks[1, 5:] = 0.0, 0.0
    apart = NoisyBlocks(blocks, made.deviations, made.sampling, 12).distances
    spread = apart(NoisyBlocks(blocks, made.deviations, made.sampling, 12)).spread
    pairs = [spread[i, j] for i in range(3) for j in range(3) if {i, j} != {0, 1}]
    assert spread[0, 1] == pytest.approx(np.mean(pairs))
    nothing = NoisyBlocks(np.zeros_like(blocks), made.deviations, made.sampling, 12)
    assert np.isfinite(nothing.distances(nothing).spread).all()


def test_products_are_those_of_points_less_their_mean() -> None:
    points = np.random.default_rng(0).standard_normal((7, 3)) + 5.0
    difference = points[:, None] - points[None]
    centred = points - points.mean(0)
    products = centred_products(np.square(difference).sum(2))
    np.testing.assert_allclose(products, centred @ centred.T, atol=1e-10)


def test_noise_is_subtracted_from_squared_distances_on_average() -> None:
    draw = np.random.default_rng(0)
    points = draw.standard_normal((2, 50))
    deviations = np.array([0.5, 2.0])
    measured = []
    for _ in range(400):
        noisy = points + deviations[:, None] * draw.standard_normal(points.shape)
        rows = NoisyRows(noisy, deviations, np.zeros(2), 50)
        measured.append(rows.squared_distances(rows)[0, 1])
    exact = np.square(points[0] - points[1]).sum()
    assert abs(np.mean(measured) - exact) < 4 * np.std(measured) / 20
    assert np.std(measured) < exact


def test_distances_that_noise_made_negative_keep_their_order() -> None:
    squared = np.array([[9.0, -1.0, 2.0], [-1.0, 9.0, 0.0], [2.0, 0.0, 9.0]])
    expected = np.array([[0.0, 0.0, 3.0], [0.0, 0.0, 1.0], [3.0, 1.0, 0.0]])
    np.testing.assert_array_equal(without_negative(squared), expected)
    positive = np.array([[0.0, 4.0], [4.0, 0.0]])
    np.testing.assert_array_equal(without_negative(positive), positive)
