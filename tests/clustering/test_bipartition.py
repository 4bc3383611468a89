"""The bipartition against brute force and against the paper's Algorithm 1, written out here."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from scipy.cluster.hierarchy import linkage

from securecluster.clustering.bipartition import (
    _single_linkage,
    bipartition,
    separated,
    separation_of,
    separation_scores,
)
from securecluster.errors import UsageError

Alpha = NDArray[np.float64]


def symmetric(m: int, draw: np.random.Generator, levels: int | None) -> Alpha:
    """Random similarities; with few levels, tied ones."""
    raw = (
        draw.uniform(-1, 1, (m, m))
        if levels is None
        else draw.integers(0, levels, (m, m)) / max(levels - 1, 1) * 2 - 1
    )
    upper = np.triu(raw, 1)
    return upper + upper.T + np.eye(m)


def brute_force(alpha: Alpha) -> tuple[float, list[set[int]]]:
    """The smallest possible largest cross-similarity, and every first half (the one with client 0)
    that reaches it.
    """
    m, best, sides = len(alpha), np.inf, []
    for size in range(m - 1):
        for others in combinations(range(1, m), size):
            first = [0, *others]
            second = [i for i in range(m) if i not in first]
            cross = alpha[np.ix_(first, second)].max()
            if cross < best:
                best, sides = cross, []
            if cross == best:
                sides.append(set(first))
    return float(best), sides


def algorithm_1(alpha: Alpha) -> float:
    """Merge by descending similarity until two clusters are left.

    This is Algorithm 1 of Sattler et al. 2019.
    """
    m = len(alpha)
    clusters = [{i} for i in range(m)]
    for s in np.argsort(-alpha, axis=None, kind="stable"):
        one, two = divmod(int(s), m)
        touched = [c for c in clusters if one in c or two in c]
        clusters = [c for c in clusters if c not in touched] + [set().union(*touched)]
        if len(clusters) == 2:
            break
    return float(alpha[np.ix_(sorted(clusters[0]), sorted(clusters[1]))].max())


LEVELS = st.sampled_from([None, 1, 2, 3, 6])


@given(st.integers(2, 12), st.integers(0, 10**6), LEVELS)
def test_it_is_optimal_and_the_optimum_where_that_is_unique(
    m: int, seed: int, levels: int | None
) -> None:
    alpha = symmetric(m, np.random.default_rng(seed), levels)
    found = bipartition(alpha)
    best, sides = brute_force(alpha)
    assert found.cross_max == best
    assert set(found.first) in sides
    assert sorted(found.first + found.second) == list(range(m))
    assert found.first[0] == 0
    assert found.second


@given(st.integers(3, 60), st.integers(0, 10**6), LEVELS)
def test_it_agrees_with_algorithm_1(m: int, seed: int, levels: int | None) -> None:
    alpha = symmetric(m, np.random.default_rng(seed), levels)
    assert bipartition(alpha).cross_max == algorithm_1(alpha)


@given(st.integers(2, 60), st.integers(0, 10**6), LEVELS)
def test_single_linkage_is_that_of_scipy_also_under_ties(
    m: int, seed: int, levels: int | None
) -> None:
    alpha = symmetric(m, np.random.default_rng(seed), levels)
    above = alpha[np.triu_indices(m, 1)]
    # neither reads what is below the diagonal
    alpha[np.tri(m, dtype=bool)] = 9.0
    assert np.array_equal(_single_linkage(alpha), linkage(-above, "single"))


@pytest.mark.parametrize("value", [-1.0, 0.0, 1.0, 1 - 2**-53, 1e-300])
@pytest.mark.parametrize("m", [2, 3, 8])
def test_degenerate_similarities_still_give_two_halves(m: int, value: float) -> None:
    found = bipartition(np.full((m, m), value))
    assert found.first
    assert found.second
    assert found.cross_max == value


def test_similarities_closer_than_rounding_of_one_minus_alpha_are_told_apart() -> None:
    alpha = np.full((4, 4), 1e-20)
    alpha[:2, :2] = alpha[2:, 2:] = 2e-20
    assert bipartition(alpha)[:2] == ((0, 1), (2, 3))


@pytest.mark.parametrize(
    "alpha", [np.ones((1, 1)), np.ones((2, 3)), np.array([[1, np.nan], [np.nan, 1]])]
)
def test_what_is_no_similarity_matrix_is_refused(alpha: Alpha) -> None:
    with pytest.raises(UsageError):
        bipartition(alpha)


@given(st.integers(2, 40), st.integers(1, 5), st.integers(0, 10**6), LEVELS)
def test_scores_of_many_matrices_are_those_of_each_to_the_last_bit(
    m: int, count: int, seed: int, levels: int | None
) -> None:
    generator = np.random.default_rng(seed)
    alphas = np.stack([symmetric(m, generator, levels) for _ in range(count)])
    before = alphas.copy()
    expected = [separated(alpha).score for alpha in alphas]
    assert separation_scores(alphas).tolist() == expected
    assert np.array_equal(alphas, before)


@pytest.mark.parametrize("diagonal", [-5.0, 1.0, 5.0])
def test_scores_of_clusters_do_not_depend_on_the_diagonal(diagonal: float) -> None:
    alpha = np.full((7, 7), -0.25)
    alpha[:4, :4] = 0.5
    alpha[5:, 5:] = 0.75
    np.fill_diagonal(alpha, diagonal)
    # 3 · (0.5 + 0.25), more than 1 · (0.75 + 0.25)
    assert separation_scores(alpha[None]).tolist() == [2.25]
    assert separated(alpha).score == 2.25


@given(st.integers(3, 12), st.integers(0, 10**6), st.sampled_from([None, 3, 8]), st.integers(-4, 8))
def test_scores_of_interest_are_exact_and_all_others_stay_below(
    m: int, seed: int, levels: int | None, quarters: int
) -> None:
    generator = np.random.default_rng(seed)
    alphas = np.stack([symmetric(m, generator, levels) for _ in range(6)])
    exact = [separated(alpha).score for alpha in alphas]
    for least in (quarters / 4, exact[0], exact[1]):
        found = separation_scores(alphas, least).tolist()
        of_interest = [score for score in exact if score >= least]
        assert [score for score in found if score >= least] == of_interest
        assert [score >= least for score in found] == [score >= least for score in exact]


@given(st.integers(3, 9), st.integers(0, 10**6), st.sampled_from([None, 3]))
def test_no_clusters_score_more_than_the_best_separated_one(
    m: int, seed: int, levels: int | None
) -> None:
    generator = np.random.default_rng(seed)
    alpha = symmetric(m, generator, levels)
    best = separated(alpha)
    for clusters in (2, 3, m):
        labels = generator.integers(0, clusters, m).tolist()
        assert separation_of(alpha, labels) <= max(0.0, best.score)
    if best.score > 0:
        assert separation_of(alpha, best.labels) == best.score


def test_the_separation_of_clusters_by_hand() -> None:
    alpha = np.full((6, 6), -0.25)
    alpha[:3, :3] = 0.5
    alpha[0, 1] = alpha[1, 0] = 0.25
    alpha[3:5, 3:5] = 0.75
    # 2 · (0.25 + 0.25), and 1 · (0.75 + 0.25) of the second one less an edge to the third
    assert separation_of(alpha, [0, 0, 0, 1, 1, 2]) == 1.0
    alpha[3, 5] = alpha[5, 3] = 0.5
    assert separation_of(alpha, [2, 2, 2, 0, 0, 1]) == 1.0
    assert separation_of(alpha[3:, 3:], [0, 0, 1]) == 0.25
    # no cluster has both two members and a rest
    assert separation_of(alpha, [0] * 6) == separation_of(alpha, list(range(6))) == -np.inf


def test_a_chain_scores_by_its_smallest_similarity_and_not_by_its_edges() -> None:
    alpha = np.zeros((4, 4))
    alpha[0, 1] = alpha[1, 0] = alpha[1, 2] = alpha[2, 1] = 0.5
    alpha[0, 2] = alpha[2, 0] = 0.25
    # 2 · 0.25, where the chain's edges alone would give 2 · 0.5
    for least in (0.25, 0.5, 1.0):
        assert separation_scores(alpha[None], least).tolist() == [0.5]
    assert separation_scores(alpha[None], 1.25).item() < 1.25
