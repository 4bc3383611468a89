"""Clusters from landmarks against scipy, plain loops, and a bound on what is held at once."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
import torch
from scipy.cluster.hierarchy import fcluster, linkage
from scipy.spatial.distance import cdist
from sklearn.metrics import adjusted_rand_score

from securecluster.clustering import landmarks
from securecluster.clustering.bipartition import Bipartition
from securecluster.clustering.landmarks import extended_halves, extended_labels, sketch_clusters
from securecluster.clustering.similarity import row_norms


def rows_of_clusters(m: int, noise: float, seed: int = 0) -> tuple[torch.Tensor, list[int]]:
    """Rows around four orthogonal directions."""
    draw = np.random.default_rng(seed)
    truth = np.arange(m) % 4
    rows = np.eye(4, 16)[truth] + noise * draw.standard_normal((m, 16))
    return torch.from_numpy(rows), truth.tolist()


def test_as_many_landmarks_as_rows_are_scipys_clusters() -> None:
    rows, _ = rows_of_clusters(40, noise=0.5)
    unit = rows.numpy() / np.linalg.norm(rows.numpy(), axis=1, keepdims=True)
    expected = fcluster(linkage(unit, "ward"), 5, "maxclust")
    found = sketch_clusters(rows, 1000, count=5)
    assert adjusted_rand_score(expected, found) == 1


def test_few_landmarks_find_the_clusters_of_all_rows() -> None:
    rows, truth = rows_of_clusters(3000, noise=0.1)
    assert sketch_clusters(rows, 40, count=4) == truth
    assert sketch_clusters(rows, 40) == truth


def test_the_draw_of_landmarks_depends_on_the_seed_alone() -> None:
    rows, _ = rows_of_clusters(200, noise=1.0)
    first = sketch_clusters(rows, 20, seed=1, count=4)
    assert sketch_clusters(rows, 20, seed=1, count=4) == first
    assert sketch_clusters(rows, 20, seed=2, count=4) != first


@pytest.mark.parametrize(("name", "reduce"), [("single", min), ("complete", max)])
def test_others_join_the_cluster_that_they_would_be_merged_with(name: str, reduce: object) -> None:
    rows, _ = rows_of_clusters(60, noise=0.7)
    chosen = list(range(5, 25))
    labels = [k % 3 for k in range(20)]
    distance = cdist(rows.numpy(), rows.numpy()[chosen])
    found = extended_labels(rows, chosen, labels, "l2", name)
    assert [found[k] for k in chosen] == labels
    for i in set(range(60)) - set(chosen):
        heights = []
        for c in range(3):
            to_cluster = [distance[i, k] for k in range(20) if labels[k] == c]
            heights.append(reduce(to_cluster))  # type: ignore[operator]
        assert found[i] == int(np.argmin(heights))


def test_no_more_than_a_block_of_distances_is_held(monkeypatch: pytest.MonkeyPatch) -> None:
    rows, truth = rows_of_clusters(300, noise=0.1)
    whole = sketch_clusters(rows, 16, linkage="average", count=4)
    sizes = []
    compute = landmarks.distances

    def counted(block: torch.Tensor, *options: object) -> torch.Tensor:
        sizes.append(len(block))
        return compute(block, *options)  # type: ignore[arg-type]

    monkeypatch.setattr(landmarks, "distances", counted)
    monkeypatch.setattr(landmarks, "BLOCK_ROWS", 20)
    blocks = sketch_clusters(rows, 16, linkage="average", count=4)
    assert max(sizes) == 16 + 20
    # one square of the landmarks, and the 284 others by 20
    assert len(sizes) == 1 + 15
    assert blocks == whole == truth


def test_halves_extend_by_the_largest_cosine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(landmarks, "BLOCK_ROWS", 7)
    rows = torch.from_numpy(np.random.default_rng(3).standard_normal((50, 5)))
    compared = [2, 3, 11, 30, 31, 49]
    sides = Bipartition((0, 2, 5), (1, 3, 4), 0.0)
    first, second = extended_halves(rows, compared, sides)
    cosine = 1 - cdist(rows.numpy(), rows.numpy(), "cosine")
    for i in range(50):
        if i in compared:
            expected = compared.index(i) in sides.first
        else:
            expected = cosine[i, [2, 11, 49]].max() > cosine[i, [3, 30, 31]].max()
        assert (i in first) == expected
    assert sorted(first + second) == list(range(50))
    assert all(a < b for a, b in pairwise(first))


def test_norms_of_rows_are_those_of_numpy_less_the_noise() -> None:
    rows = torch.from_numpy(np.random.default_rng(0).standard_normal((9, 4)))
    positions = [1, 4, 5]
    squares = (rows.numpy()[positions] ** 2).sum(1)
    np.testing.assert_allclose(row_norms(rows, positions).numpy(), np.sqrt(squares))
    largest = float(squares.max())
    assert not row_norms(rows, positions, largest).any()
