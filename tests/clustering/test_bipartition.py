"""The bipartition against brute force and against the paper's Algorithm 1, written out here."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from scipy.cluster.hierarchy import linkage

from securecluster.clustering.bipartition import (
    _single_linkage,
    separated,
    separation_of,
    separation_scores,
)

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


LEVELS = st.sampled_from([None, 1, 2, 3, 6])


@given(st.integers(2, 60), st.integers(0, 10**6), LEVELS)
def test_single_linkage_is_that_of_scipy_also_under_ties(
    m: int, seed: int, levels: int | None
) -> None:
    alpha = symmetric(m, np.random.default_rng(seed), levels)
    above = alpha[np.triu_indices(m, 1)]
    # neither reads what is below the diagonal
    alpha[np.tri(m, dtype=bool)] = 9.0
    assert np.array_equal(_single_linkage(alpha), linkage(-above, "single"))


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
