"""Clusters of similarities by density, and where newcomers go."""

from __future__ import annotations

import numpy as np
import pytest

from securecluster.clustering.density import (
    check_dbscan,
    dbscan,
    modularity,
    most_similar,
    neighbourhood,
)
from securecluster.clustering.labels import relabel
from securecluster.errors import UsageError


def similar(sizes: list[int], within: float, across: float, seed: int = 0) -> np.ndarray:
    """Blocks of alike users, with a little noise."""
    blocks = np.repeat(np.arange(len(sizes)), sizes)
    noise = np.random.default_rng(seed).uniform(-0.05, 0.05, (len(blocks), len(blocks)))
    found = np.where(np.equal.outer(blocks, blocks), within, across) + (noise + noise.T) / 2
    np.fill_diagonal(found, 1)
    return np.asarray(found)


def test_numbered_keeps_clusters_and_gives_each_lone_point_its_own() -> None:
    assert relabel([3, -1, 3, 0, -1]) == [0, 1, 0, 2, 3]
    assert relabel([]) == []


def test_dbscan_by_hand() -> None:
    places = np.array([0, 1, 2, 3.5, 10, 11, 30.0])
    distance = np.abs(np.subtract.outer(places, places))
    assert dbscan(distance, 1.0, 2) == [0, 0, 0, -1, 1, 1, -1]
    assert dbscan(distance, 1.0, 3) == [0, 0, 0, -1, -1, -1, -1]  # only the second is a core
    assert dbscan(distance, 0.0, 1) == list(range(7))


def test_modularity_is_the_sum_over_pairs() -> None:
    similarity, labels = similar([3, 4, 2], 0.8, 0.3), [0, 0, 1, 1, 1, 2, 2, 0, 2]
    weight = similarity - np.eye(9)
    degree, total = weight.sum(1), weight.sum()
    wanted = sum(
        (weight[i, j] - degree[i] * degree[j] / total) / total
        for i in range(9)
        for j in range(9)
        if labels[i] == labels[j]
    )  # Newman 2004, eq. 5
    assert modularity(similarity, labels) == pytest.approx(wanted)
    assert modularity(similarity, [0] * 9) == pytest.approx(0)
    assert modularity(similarity, list(range(9))) < 0


@pytest.mark.parametrize("sizes", [[10, 10], [4, 8, 12], [3, 3, 3, 3]])
def test_the_chosen_neighbourhood_finds_blocks(sizes: list[int]) -> None:
    similarity = similar(sizes, 0.8, 0.3)
    truth = np.repeat(np.arange(len(sizes)), sizes).tolist()
    assert relabel(dbscan(1 - similarity, neighbourhood(similarity, 2), 2)) == truth


def test_users_that_are_all_alike_are_one_cluster() -> None:
    similarity = similar([12], 0.8, 0.8)
    assert set(dbscan(1 - similarity, neighbourhood(similarity, 2), 2)) == {0}
    for m in (2, 3):  # more neighbours wanted than there are
        assert 0 <= neighbourhood(similar([m], 0.5, 0.5), 9) <= 1


def test_newcomers_go_where_the_mean_is_largest() -> None:
    similarity = np.array([[0.9, 0.1, 0.6], [0.2, 0.3, 0.1]])
    assert most_similar(similarity, [0, 0, 4]) == [4, 0]


def test_what_is_no_parameter_is_refused() -> None:
    check_dbscan(None, None)
    for eps in (-1, np.inf, "0.5"):
        with pytest.raises(UsageError, match="eps"):
            check_dbscan(eps, 2)
    for least in (0, 1.5, "2"):
        with pytest.raises(UsageError, match="min_samples"):
            check_dbscan(0.5, least)
