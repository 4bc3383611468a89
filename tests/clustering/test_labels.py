"""The bipartition against brute force, against Sattler's Algorithm 1 written out here, and against
scikit-learn.
"""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from numpy.typing import NDArray
from sklearn.cluster import AgglomerativeClustering, KMeans

from securecluster.clustering.bipartition import Bipartition, bipartition, intra_min, separated
from securecluster.clustering.k_means import kmeans
from securecluster.clustering.labels import check_clusters
from securecluster.errors import UsageError

Alpha = NDArray[np.float64]


def symmetric(upper: Alpha) -> Alpha:
    """The upper triangle mirrored, with a diagonal that must not matter."""
    half = np.triu(upper, 1)
    return half + half.T + np.eye(len(upper))


def matrices(most: int) -> st.SearchStrategy[Alpha]:
    """Similarities without ties, with many, and with nothing but ties."""
    sizes = st.integers(2, most)

    def tied(m: int) -> st.SearchStrategy[Alpha]:
        return hnp.arrays(np.float64, (m, m), elements=st.integers(-2, 2).map(float))

    def constant(m: int) -> st.SearchStrategy[Alpha]:
        return st.sampled_from([0.0, 1.0, -1.0, 0.3]).map(lambda v: np.full((m, m), v))

    def free(m: int) -> st.SearchStrategy[Alpha]:
        return st.integers(0, 2**32 - 1).map(
            lambda seed: np.random.default_rng(seed).uniform(-1, 1, (m, m))
        )

    return sizes.flatmap(lambda m: st.one_of(free(m), tied(m), constant(m))).map(symmetric)


def brute_force(alpha: Alpha) -> tuple[float, list[tuple[int, ...]]]:
    """The smallest cross maximum over all bipartitions, and each first half (with 0) that reaches
    it.
    """
    m = len(alpha)
    best, optima = float("inf"), []
    for mask in range(2 ** (m - 1) - 1):
        inside = np.array([True, *(mask >> k & 1 for k in range(m - 1))], dtype=bool)
        cross = float(alpha[inside][:, ~inside].max())
        if cross < best:
            best, optima = cross, []
        if cross == best:
            optima.append(tuple(np.flatnonzero(inside).tolist()))
    return best, optima


def algorithm_1(alpha: Alpha) -> set[frozenset[int]]:
    """Sattler et al. 2019, Algorithm 1: all pairs by descending similarity are merged until two
    components are left.
    """
    m = len(alpha)
    component = list(range(m))
    pairs = sorted(((i, j) for i in range(m) for j in range(i)), key=lambda p: -alpha[p])
    for i, j in pairs:
        if len(set(component)) == 2:
            break
        component = [component[i] if c == component[j] else c for c in component]
    return {frozenset(k for k in range(m) if component[k] == c) for c in component}


def cross_max(alpha: Alpha, halves: set[frozenset[int]]) -> float:
    first, second = (sorted(h) for h in halves)
    return max(float(alpha[i, j]) for i in first for j in second)


def as_set(found: Bipartition) -> set[frozenset[int]]:
    return {frozenset(found.first), frozenset(found.second)}


@given(matrices(12))
def test_it_is_an_optimum_over_all_bipartitions(alpha: Alpha) -> None:
    found = bipartition(alpha)
    best, optima = brute_force(alpha)
    assert found.cross_max == best
    assert found.first in optima
    assert sorted(found.first + found.second) == list(range(len(alpha)))


@given(matrices(30))
def test_it_is_as_good_as_algorithm_1_and_always_two_halves(alpha: Alpha) -> None:
    found, direct = bipartition(alpha), algorithm_1(alpha)
    assert found.cross_max == cross_max(alpha, direct) == cross_max(alpha, as_set(found))
    assert found.first and found.second and found.first[0] == 0
    assert list(found.first) == sorted(found.first) and list(found.second) == sorted(found.second)
    assert sorted(found.first + found.second) == list(range(len(alpha)))


@pytest.mark.parametrize("m", [3, 12, 60])
def test_without_ties_it_is_algorithm_1s_and_single_linkages_own_partition(m: int) -> None:
    for seed in range(10):
        alpha = symmetric(np.random.default_rng(seed).uniform(-1, 1, (m, m)))
        found = as_set(bipartition(alpha))
        labels = AgglomerativeClustering(2, metric="precomputed", linkage="single").fit_predict(
            1 - alpha
        )
        assert found == algorithm_1(alpha)
        assert found == {frozenset(np.flatnonzero(labels == c).tolist()) for c in (0, 1)}


@pytest.mark.parametrize("value", [-1.0, 0.0, 1.0, 1 - 2**-53, 1e-300])
@pytest.mark.parametrize("m", [2, 3, 8, 33])
def test_all_equal_similarities_still_give_two_halves(m: int, value: float) -> None:
    found = bipartition(np.full((m, m), value))
    assert found.first and found.second
    assert sorted(found.first + found.second) == list(range(m))
    assert found.cross_max == value


def test_similarities_closer_than_the_rounding_of_one_minus_alpha_are_told_apart() -> None:
    alpha = np.full((4, 4), 1e-20)
    alpha[:2, :2] = alpha[2:, 2:] = 2e-20
    assert bipartition(alpha)[:2] == ((0, 1), (2, 3))


@given(matrices(10), st.floats(-1, 1))
def test_the_diagonal_is_not_read_and_nothing_is_written(alpha: Alpha, value: float) -> None:
    other, copy = alpha.copy(), alpha.copy()
    np.fill_diagonal(other, value)
    assert bipartition(other) == bipartition(alpha)
    assert (alpha == copy).all()


@pytest.mark.parametrize(
    "alpha",
    [
        np.ones((0, 0)), np.ones((1, 1)), np.ones((2, 3)), np.ones(4), np.ones((2, 2, 2)),
        np.array([[1, np.nan], [np.nan, 1]]), np.where(np.eye(5, k=3) > 0, np.nan, 0.0),
        np.where(np.eye(5, k=3) > 0, np.inf, 0.0),
    ],
)  # fmt: skip
def test_what_is_no_similarity_matrix_is_refused(alpha: Alpha) -> None:
    with pytest.raises(UsageError) as caught:
        bipartition(alpha)
    assert "\n" not in str(caught.value)


def test_the_weakest_similarity_within_a_group() -> None:
    alpha = symmetric(
        np.array([[0, 0.9, 0.1, -0.5], [0, 0, 0.4, -0.2], [0, 0, 0, 0.8], [0, 0, 0, 0]])
    )
    assert intra_min(alpha, (0, 1, 2)) == 0.1
    assert intra_min(alpha, (2, 0)) == 0.1
    assert intra_min(alpha, (0, 1, 2, 3)) == -0.5
    assert intra_min(alpha, (3,)) == 1.0
    assert intra_min(np.array([[1.0, 2.0], [2.0, 1.0]]), (0, 1)) == 2.0


def test_the_best_separated_cluster_scores_its_gap_by_its_size() -> None:
    alpha = np.full((5, 5), 0.1)
    alpha[:3, :3], alpha[3:, 3:] = 0.6, 0.9
    assert separated(alpha) == (pytest.approx(1.0), [0, 0, 0, 1, 1], (0, 1, 2))
    assert separated(alpha[2:4, 2:4]).score == -np.inf
    alpha[:3, :3] = 0.05
    assert separated(alpha) == (pytest.approx(0.8), [0, 0, 0, 1, 1], (3, 4))


def test_separated_clusters_are_those_of_brute_force() -> None:
    draw = np.random.default_rng(0)
    for m in (3, 4, 5, 6):
        for _ in range(20):
            half = np.triu(draw.uniform(-1, 1, size=(m, m)), 1)
            alpha = half + half.T + np.eye(m)
            scores = []
            for size in range(2, m):
                for own in itertools.combinations(range(m), size):
                    rest = [k for k in range(m) if k not in own]
                    scores.append(
                        (size - 1) * (intra_min(alpha, own) - alpha[np.ix_(own, rest)].max())
                    )
            score = separated(alpha).score
            assert score == pytest.approx(max(scores)) if max(scores) > 0 else score <= 0


@pytest.mark.parametrize("seed", range(5))
def test_k_means_from_inner_products_is_k_means_on_the_points(seed: int) -> None:
    rng = np.random.default_rng(seed)
    centres = rng.normal(size=(4, 300))[rng.integers(4, size=40)]
    points = centres + rng.normal(scale=1.5, size=(40, 300)) + 100
    fits = [KMeans(4, n_init=20, random_state=s).fit(points) for s in range(3)]
    best = min(fits, key=lambda found: float(found.inertia_))
    found = np.array(kmeans(points @ points.T, 4, seed))
    assert set(found) == set(range(4))
    inertia = sum(
        float(((points[found == c] - points[found == c].mean(0)) ** 2).sum()) for c in range(4)
    )
    assert inertia == pytest.approx(best.inertia_, rel=0.01)
    assert kmeans(points @ points.T, 4, seed) == list(found)


def test_k_means_of_points_that_coincide_has_fewer_clusters_and_no_warning() -> None:
    assert kmeans(np.ones((5, 5)), 3, 0) == [0] * 5
    assert sorted(kmeans(np.eye(2), 3, 0)) == [0, 1]


@pytest.mark.parametrize("k", [0, 7, 1.5, "2", None, True])
def test_a_number_of_clusters_is_a_whole_number_up_to_that_of_clients(k: object) -> None:
    check_clusters(6, 6)
    check_clusters(np.int64(1), 6)
    with pytest.raises(UsageError, match=r"clusters cannot be made of 6 clients"):
        check_clusters(k, 6)
