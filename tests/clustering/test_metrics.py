"""Scores of a clustering against scikit-learn, brute force and hand-made cases."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from sklearn.metrics import adjusted_rand_score, normalized_mutual_info_score

from securecluster.clustering.metrics import agreement, mean, spread

PAIRS = st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3)), min_size=1, max_size=12)


def purity_by_counting(labels: list[int], truth: list[int]) -> float:
    """Every found cluster's most frequent true cluster is right."""
    right = 0
    for c in set(labels):
        inside = [t for found, t in zip(labels, truth, strict=True) if found == c]
        right += max(inside.count(t) for t in set(inside))
    return right / len(labels)


@given(PAIRS)
def test_scores_are_scikit_learns_and_exact_means_the_same_partition(
    pairs: list[tuple[int, int]],
) -> None:
    labels, truth = [a for a, _ in pairs], [b for _, b in pairs]
    found = agreement(labels, truth)
    assert found["ari"] == pytest.approx(adjusted_rand_score(truth, labels))
    assert found["nmi"] == pytest.approx(normalized_mutual_info_score(truth, labels))
    assert found["purity"] == pytest.approx(purity_by_counting(labels, truth))
    same = all((a == c) == (b == d) for a, b in pairs for c, d in pairs)
    assert found["exact"] is same


@given(st.lists(st.integers(0, 3), min_size=1, max_size=12), st.permutations(range(4)))
def test_the_names_of_the_clusters_do_not_matter(truth: list[int], names: list[int]) -> None:
    found = agreement([names[t] for t in truth], truth)
    assert found == {"ari": 1.0, "nmi": pytest.approx(1.0), "purity": 1.0, "exact": True}


@pytest.mark.parametrize(
    ("labels", "truth", "purity", "exact"),
    [
        ([0, 0, 1, 1, 1], [0, 0, 0, 1, 1], 0.8, False),
        ([0, 0, 0, 0], [0, 0, 1, 1], 0.5, False),
        ([0, 1, 2, 3], [0, 0, 1, 1], 1.0, False),  # purity alone rewards splitting
        ([0, 0, 1, 1], [0, 1, 2, 3], 0.5, False),
        ([5, 5, 2], [0, 0, 1], 1.0, True),
        ([0], [0], 1.0, True),
        ([0, 0], [7, 7], 1.0, True),
    ],
)
def test_hand_made_scores(labels: list[int], truth: list[int], purity: float, exact: bool) -> None:
    found = agreement(labels, truth)
    assert found["purity"] == pytest.approx(purity)
    assert found["exact"] is exact


def test_the_mean_leaves_out_clients_without_test_data() -> None:
    assert mean(np.array([np.nan, 0.5, 1.0])) == 0.75
    assert mean(np.array([0.0])) == 0.0
    assert mean(np.array([np.nan, np.nan])) is None
    assert mean(np.array([])) is None


def test_the_spread_is_of_clients_with_test_data() -> None:
    scores = np.array([np.nan, 0.9, 0.1, 0.5, 0.3, 0.7])
    expected = {"lowest": 0.1, "lower_quartile": 0.3, "upper_quartile": 0.7, "highest": 0.9}
    assert spread(scores) == expected
    assert spread(np.array([np.nan])) == {}
    assert set(spread(np.array([0.5])).values()) == {0.5}
    # perplexities
    assert spread(np.array([np.inf, np.inf, 2.0]))["highest"] == np.inf
