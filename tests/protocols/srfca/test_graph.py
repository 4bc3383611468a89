"""Graph components, spanning trees, thresholds and trimmed means against brute force and scipy."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import torch
from scipy.sparse.csgraph import minimum_spanning_tree
from scipy.spatial.distance import cdist
from scipy.stats import trim_mean

from securecluster.clustering.distances import to_others
from securecluster.errors import UsageError
from securecluster.protocols.srfca import graph
from securecluster.protocols.srfca.graph import (
    UNASSIGNED,
    check_clustering,
    choose_threshold,
    components,
    groups,
    renumbered,
    spanning_tree_edges,
    trimmed_mean,
)


def random_distance(rng: np.random.Generator, m: int) -> Any:
    square = rng.integers(1, 9, (m, m)).astype(float)  # ties are likely
    return np.triu(square, 1) + np.triu(square, 1).T


@pytest.mark.parametrize("seed", range(20))
def test_components_are_those_that_paths_of_short_edges_connect(seed: int) -> None:
    rng = np.random.default_rng(seed)
    m, threshold, least = (
        int(rng.integers(1, 9)),
        float(rng.integers(0, 9)),
        int(rng.integers(1, 5)),
    )
    distance, sizes = random_distance(rng, m), rng.integers(1, 4, m).tolist()
    near = (distance <= threshold) | np.eye(m, dtype=bool)
    reached = np.linalg.matrix_power(near.astype(int), m) > 0
    found = components(distance, threshold, least, sizes)
    for i, j in itertools.product(range(m), repeat=2):
        if found[i] != UNASSIGNED:
            assert (found[i] == found[j]) == bool(reached[i, j])
        assert (found[i] == UNASSIGNED) == (sum(np.array(sizes)[reached[i]]) < least)
    assert list(dict.fromkeys(c for c in found if c != UNASSIGNED)) == list(
        range(1 + max(found, default=UNASSIGNED))
    )


def test_one_client_counts_as_one_and_an_edge_may_be_as_long_as_the_reach() -> None:
    distance = np.array([[0.0, 2, 9], [2, 0, 9], [9, 9, 0]])
    assert components(distance, 2.0, 2) == [0, 0, UNASSIGNED]
    assert components(distance, 1.9, 2) == [UNASSIGNED] * 3
    assert components(distance, 1.9, 1) == [0, 1, 2]


@pytest.mark.parametrize("seed", range(10))
def test_tree_edges_are_those_of_the_minimum_spanning_tree(seed: int) -> None:
    distance = random_distance(np.random.default_rng(seed), 7)
    np.testing.assert_allclose(
        spanning_tree_edges(distance), np.sort(minimum_spanning_tree(distance).data)
    )
    assert len(spanning_tree_edges(np.zeros((1, 1)))) == 0
    # of clients with equal models, which a sparse graph would take for no edge
    assert spanning_tree_edges(np.zeros((3, 3))).tolist() == [0, 0]


def test_the_reach_is_the_threshold_or_a_quantile_of_all_pairs() -> None:
    places = np.array([0, 1, 2.1, 7, 8.3, 9.3])
    distance = np.abs(np.subtract.outer(places, places))
    assert choose_threshold(distance, None, 0.25) == np.quantile(
        distance[np.triu_indices(6, 1)], 0.25
    )
    assert choose_threshold(distance, 0.5, None) == 0.5
    assert choose_threshold(np.zeros((1, 1)), None, 0.5) == 0


@pytest.mark.parametrize("trim", [0.0, 0.1, 0.15, 0.25, 0.49])
@pytest.mark.parametrize("s", [1, 2, 5, 7, 20])
def test_the_trimmed_mean_is_scipys(trim: float, s: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graph, "BLOCK", 40)  # several blocks of columns
    rows = torch.as_tensor(np.random.default_rng(s).normal(size=(s + 2, 23)))
    who = list(range(1, s + 1))
    np.testing.assert_allclose(
        trimmed_mean(rows, trim, who).numpy(),
        trim_mean(rows.numpy()[who], trim, axis=0),
        atol=1e-12,
    )
    np.testing.assert_allclose(
        trimmed_mean(rows, trim).numpy(), trim_mean(rows.numpy(), trim, axis=0), atol=1e-12
    )


def test_distances_to_others_are_scipys() -> None:
    rng = np.random.default_rng(0)
    rows, others = rng.normal(size=(5, 300)), rng.normal(size=(3, 300))
    np.testing.assert_allclose(
        to_others(torch.as_tensor(rows), torch.as_tensor(others)).numpy(),
        cdist(rows, others),
        rtol=1e-12,
    )
    assert to_others(torch.as_tensor(rows).float(), torch.as_tensor(rows[:1]).float())[0, 0] == 0


def test_clusters_are_numbered_in_the_order_of_their_first_members() -> None:
    assert renumbered([4, UNASSIGNED, 2, 4, 0]) == [0, UNASSIGNED, 1, 0, 2]
    assert groups([0, UNASSIGNED, 1, 0]) == [[0, 3], [2]]
    assert groups([UNASSIGNED, UNASSIGNED]) == []


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"size": 1}, "from 2 to"),
        ({"size": 7}, "7 of 6 clients"),
        ({"size": 2.5}, "whole number"),
        ({"threshold": -1}, "no distance"),
        ({"threshold": float("inf")}, "no distance"),
        ({"quantile": 1.5}, "no share"),
        ({"quantile": "a"}, "no share"),
        ({"threshold": 1, "quantile": 0.5}, "one of them"),
    ],
)
def test_what_cannot_cluster_is_refused(given: dict[str, Any], told: str) -> None:
    with pytest.raises(UsageError, match=told):
        check_clustering(**{"size": 2, "clients": 6, "threshold": None, "quantile": None, **given})
