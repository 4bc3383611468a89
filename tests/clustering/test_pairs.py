"""All pairs of very many clients are compared by those alone who say so."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from securecluster.clustering import similarity
from securecluster.clustering.agglomerative import linkage_clusters, merges, upper_triangle
from securecluster.clustering.distances import METRICS, distances
from securecluster.clustering.noisy_rows import squared_gaps
from securecluster.clustering.pairs import VARIABLE, check_pairs
from securecluster.clustering.similarity import gram, symmetrise_
from securecluster.errors import UsageError

ROWS = torch.from_numpy(np.random.default_rng(0).normal(size=(11, 5)))


def test_the_bound_is_20_000_clients_and_the_sentence_says_what_to_do(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    check_pairs(20_000)
    with pytest.raises(UsageError, match=r"of 100,000 clients takes 75 GiB a matrix.* set SECURE"):
        check_pairs(100_000)
    monkeypatch.setenv(VARIABLE, "100000")
    check_pairs(100_000)
    monkeypatch.setenv(VARIABLE, "many")
    with pytest.raises(UsageError, match="is 'many': give a number of clients"):
        check_pairs(2)


@pytest.mark.parametrize(
    "compare",
    [*METRICS, lambda rows: gram(rows), lambda rows: squared_gaps(rows.numpy(), rows.numpy())],
)
def test_a_matrix_of_all_pairs_is_made_up_to_the_bound(
    compare: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = compare if callable(compare) else lambda rows: distances(rows, compare)
    monkeypatch.setenv(VARIABLE, "11")
    made(ROWS)
    monkeypatch.setenv(VARIABLE, "10")
    with pytest.raises(UsageError, match="all pairs of 11 clients"):
        made(ROWS)


def test_a_matrix_that_is_made_in_tiles_is_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = {metric: distances(ROWS, metric) for metric in METRICS}
    skewed = torch.arange(121.0).view(11, 11)
    mean = (skewed + skewed.T) / 2
    monkeypatch.setattr(similarity, "TILE", 3)
    assert torch.equal(symmetrise_(skewed), mean)
    for metric, distance in whole.items():
        tiled = distances(ROWS, metric)
        assert torch.equal(tiled, tiled.T)
        torch.testing.assert_close(tiled, distance, rtol=0, atol=1e-9)


@pytest.mark.parametrize("linkage", ["average", "ward"])
def test_condensed_distances_have_the_clusters_of_their_matrix(linkage: str) -> None:
    distance = distances(ROWS, "l2").numpy()
    condensed = upper_triangle(distance)
    assert condensed.tolist() == distance[np.triu_indices(11, 1)].tolist()
    assert merges(condensed, linkage).tolist() == merges(distance, linkage).tolist()
    for count in (None, 3, 50):
        found = linkage_clusters(condensed, linkage, count)
        assert found == linkage_clusters(distance, linkage, count)
    with pytest.raises(UsageError, match="finite square distance matrix"):
        merges(condensed[:-1], linkage)
