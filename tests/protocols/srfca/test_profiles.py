"""Clusters without a λ, on matrices of dissimilarities whose clusters are known."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from scipy.spatial.distance import cdist
from sklearn.metrics import adjusted_rand_score

from securecluster.protocols.srfca.profiles import (
    block_means,
    cluster_without_threshold,
    fit_offsets,
    profile_distances,
)


def losses(
    rng: np.random.Generator, means: Any, labels: Any, level: Any = 0.0, noise: float = 0.1
) -> Any:
    """Draw cross-losses: a mean for each pair of clusters, a level for each model (log), and noise
    (log).
    """
    labels = np.asarray(labels)
    drawn = rng.normal(size=(len(labels), len(labels))) * noise
    logs = np.log(np.asarray(means)[labels[:, None], labels]) + (drawn + drawn.T) / 2
    own = np.broadcast_to(level, len(labels))
    return np.exp(logs + (own[:, None] + own) / 2)


@pytest.mark.parametrize("m", [4, 5, 9])
def test_profile_distances_are_standard_deviations_over_third_models(m: int) -> None:
    rng = np.random.default_rng(m)
    level = rng.normal(size=(m, m)) * 3 + 50
    level = level + level.T
    found = profile_distances(level)
    for i in range(m):
        assert found[i, i] == 0
        for j in set(range(m)) - {i}:
            third = [k for k in range(m) if k not in (i, j)]
            expected = np.std(level[i, third] - level[j, third], ddof=1)
            assert found[i, j] == pytest.approx(expected, rel=1e-9)


def test_block_means_are_those_of_pairs() -> None:
    distance = np.array([[9.0, 1, 4, 6], [1, 9, 5, 7], [4, 5, 9, 3], [6, 7, 3, 9]])
    np.testing.assert_allclose(block_means(distance, [0, 0, 1, 1]), [[1, 5.5], [5.5, 3]])


@pytest.mark.parametrize(
    "labels", [[0] * 9, [0, 0, 0, 1, 1, 1, 1, 1, 1], [0, 1, 0, 1, 2, 2, 0, 1, 2]], ids=str
)
def test_offsets_are_those_of_least_squares(labels: list[int]) -> None:
    rng = np.random.default_rng(0)
    level = rng.normal(size=(9, 9))
    level = level + level.T
    names = [(c, d) for c in range(1 + max(labels)) for d in range(c)]
    rows, values = [], []
    for i in range(9):
        for j in range(i):
            pair = (max(labels[i], labels[j]), min(labels[i], labels[j]))
            rows.append(
                [float(k in (i, j)) for k in range(9)] + [float(pair == name) for name in names]
            )
            values.append(level[i, j])
    solved, residual, rank, _ = np.linalg.lstsq(np.array(rows), np.array(values), rcond=None)
    fit = fit_offsets(level, labels)
    expected = dict(zip(names, solved[9:], strict=True))
    order = [expected[d, c] for c in range(1 + max(labels)) for d in range(c + 1, 1 + max(labels))]
    np.testing.assert_allclose(fit.offsets, order, rtol=1e-9, atol=1e-9)
    cost = rank * np.log(36) + 18 * np.log(1 + max(labels))
    assert fit.criterion == pytest.approx(36 * np.log(residual[0] / 36 + 0.02**2) + cost, rel=1e-9)


@pytest.mark.parametrize("seed", range(5))
def test_two_clusters_that_a_third_far_away_makes_look_alike_are_told_apart(seed: int) -> None:
    """The largest absolute gap of the spanning tree's edges would join them.

    The edges are about 0.5, 1.9 and 3.5.
    """
    means = [[0.4, 1.9, 5], [1.9, 0.4, 3.5], [5, 3.5, 0.4]]
    truth = [0] * 7 + [1] * 7 + [2] * 6
    partition = cluster_without_threshold(
        losses(np.random.default_rng(seed), means, truth), 2, squared=False
    )
    assert adjusted_rand_score(truth, partition.labels) == 1
    assert 0.4 < partition.threshold < 1.9


@pytest.mark.parametrize("seed", range(5))
def test_a_model_of_few_samples_is_far_from_everyone_and_still_of_its_cluster(seed: int) -> None:
    means = 0.8 + 2.0 * (1 - np.eye(4))
    truth = [i % 4 for i in range(20)]
    level = np.repeat([1.6, 0.5, 0.2, 0.0, -0.2], 4)  # of 20, 50, 100, 200 and 400 samples
    distance = losses(np.random.default_rng(seed), means, truth, level)
    same = np.equal.outer(truth, truth) & ~np.eye(20, dtype=bool)
    assert distance[same].max() > distance[~same & ~np.eye(20, dtype=bool)].min()
    partition = cluster_without_threshold(distance, 2, squared=False)
    assert adjusted_rand_score(truth, partition.labels) == 1


@pytest.mark.parametrize("seed", range(5))
def test_clusters_that_overlap_are_told_apart(seed: int) -> None:
    """As of clients with 40 % foreign samples: cross-losses of 4.5 beside 3.2, and levels that blur
    them.
    """
    rng = np.random.default_rng(seed)
    truth = [i % 4 for i in range(20)]
    distance = losses(rng, 3.2 + 1.3 * (1 - np.eye(4)), truth, rng.normal(size=20) * 0.1, 0.06)
    partition = cluster_without_threshold(distance, 2, squared=False)
    assert adjusted_rand_score(truth, partition.labels) == 1
    assert 3.2 < partition.threshold < 4.5


@pytest.mark.few(1)
@pytest.mark.parametrize("m", [4, 6, 8, 12, 20, 50])
def test_alike_models_are_one_cluster_that_the_threshold_joins(m: int) -> None:
    for seed in range(20):
        rng = np.random.default_rng(seed)
        distance = losses(rng, [[0.5]], [0] * m, rng.normal(size=m) * 0.3)
        partition = cluster_without_threshold(distance, 2, squared=False)
        assert partition.labels == [0] * m
        assert np.all(
            distance.min(1, where=~np.eye(m, dtype=bool), initial=np.inf) <= partition.threshold
        )


def test_alike_weights_are_one_cluster_also_where_clients_trained_for_longer() -> None:
    """Models of more steps lie farther along what all have in common.

    That alone makes no cluster.
    """
    for seed in range(10):
        rng = np.random.default_rng(seed)
        steps = np.repeat([0.97, 1.0, 1.03, 1.06], 5)
        rows = steps[:, None] * (np.ones(400) + rng.normal(size=(20, 400)) * 0.8)
        assert cluster_without_threshold(cdist(rows, rows), 2, squared=True).labels == [0] * 20


@pytest.mark.parametrize("seed", range(5))
def test_clusters_of_weights_are_found_by_squared_distances(seed: int) -> None:
    rng = np.random.default_rng(seed)
    truth = [i % 3 for i in range(15)]
    centres = rng.normal(size=(3, 300)) * 0.5
    rows = centres[truth] + rng.normal(size=(15, 300)) * rng.uniform(0.7, 1.3, size=(15, 1))
    partition = cluster_without_threshold(cdist(rows, rows), 2, squared=True)
    assert adjusted_rand_score(truth, partition.labels) == 1


def test_distances_of_zero_neither_fail_nor_make_clusters() -> None:
    assert cluster_without_threshold(np.zeros((8, 8)), 2, squared=False).labels == [0] * 8
    truth = [0] * 4 + [1] * 4
    split = 3.0 * (1 - np.equal.outer(truth, truth))
    assert cluster_without_threshold(split, 2, squared=False).labels == truth
    assert cluster_without_threshold(split, 2, squared=True).labels == truth
    # ratios of losses near zero are as those of others
    nearly = losses(np.random.default_rng(0), [[1e-9]], [0] * 12)
    assert cluster_without_threshold(nearly, 2, squared=False).labels == [0] * 12
    # with noise a loss may lie below zero
    noisy = losses(np.random.default_rng(1), [[1.0]], [0] * 20) - 1
    found = cluster_without_threshold(noisy, 2, squared=False)
    assert np.isfinite(found.threshold) and len(found.labels) == 20


@pytest.mark.parametrize("m", [0, 1, 2, 3])
def test_three_models_are_one_cluster(m: int) -> None:
    distance = np.full((m, m), 2.0)
    partition = cluster_without_threshold(distance, 2, squared=False)
    assert partition.labels == [0] * m
    assert partition.threshold == (2.0 if m > 1 else 0.0)


def test_a_lone_model_joins_the_nearest_cluster_and_hides_none() -> None:
    means = np.array([[0.4, 3, 2], [3, 0.4, 4], [2, 4, 0.4]])
    truth = [0] * 5 + [1] * 5 + [2]
    found = cluster_without_threshold(
        losses(np.random.default_rng(0), means, truth), 2, squared=False
    )
    assert found.labels == [0] * 5 + [1] * 5 + [0]
    assert found.aside == (10,)


@pytest.mark.parametrize("distance", [2.3, 3.5, 9.0])
@pytest.mark.parametrize("seed", range(3))
def test_one_odd_model_hides_no_two_clusters_of_three(seed: int, distance: float) -> None:
    """As of a client with random labels, or with features of zeros."""
    means = np.array([[0.5, 3.9, distance], [3.9, 0.5, distance], [distance, distance, 1.5]])
    rng = np.random.default_rng(seed)
    found = cluster_without_threshold(
        losses(rng, means, [0, 1, 0, 0, 1, 1, 2], noise=0.05), 2, squared=False
    )
    assert found.labels[:6] == [0, 1, 0, 0, 1, 1]
    assert found.aside == (6,)
    assert 0.5 < found.threshold < 3.9
    alike = cluster_without_threshold(
        losses(rng, means, [0] * 6 + [2], noise=0.05), 2, squared=False
    )
    assert alike.labels == [0] * 7 and not alike.aside


def test_clusters_have_as_many_models_as_they_must() -> None:
    means = 0.4 + 3.0 * (1 - np.eye(3))
    truth = [0] * 6 + [1] * 6 + [2] * 3
    distance = losses(np.random.default_rng(0), means, truth)
    assert cluster_without_threshold(distance, 3, squared=False).labels == truth
    found = cluster_without_threshold(distance, 4, squared=False).labels
    assert found[:12] == truth[:12] and max(found) == 1
    assert cluster_without_threshold(distance, 9, squared=False).labels == [0] * 15


def test_losses_that_noise_made_negative_and_equal_models_are_clustered_all_the_same() -> None:
    rng = np.random.default_rng(0)
    for _ in range(50):
        drawn = rng.normal(size=(6, 6), scale=5.0) + 2.0
        found = cluster_without_threshold((drawn + drawn.T) / 2, minimum=2, squared=False)
        assert len(found.labels) == 6 and np.isfinite(found.threshold)
    equal = np.where(np.equal.outer([0, 0, 0, 1, 1, 1], [0, 0, 0, 1, 1, 1]), 0.0, 3.0)
    for squared in (True, False):
        assert cluster_without_threshold(equal, minimum=2, squared=squared).labels == [
            0, 0, 0, 1, 1, 1,
        ]  # fmt: skip
    assert cluster_without_threshold(np.zeros((6, 6)), minimum=2, squared=True).labels == [0] * 6
