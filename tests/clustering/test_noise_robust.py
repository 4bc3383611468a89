"""Clusterers of similarities against scikit-learn's, under ties, and what noise may not make of
them.
"""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from sklearn.cluster import AgglomerativeClustering, KMeans, SpectralClustering
from sklearn.metrics import adjusted_rand_score

from securecluster.clustering.bipartition import bipartition
from securecluster.clustering.noise_robust import (
    CLUSTERERS,
    affinity,
    contrasted,
    eigengap,
    evidence_for_split,
    gap_between,
    mean_separation,
    partition,
    split_into_two,
    with_company,
)
from securecluster.errors import UsageError

NOISY = CLUSTERERS[1:]


def points(
    seed: int, k: int, each: int = 6, spread: float = 0.3
) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
    """Points around the corners of a simplex, so that clusters' similarities are negative, and
    their clusters.
    """
    draw, labels = np.random.default_rng(seed), np.arange(k * each) % k
    corners = np.eye(k) - 1 / k if k > 1 else np.ones((1, 1))
    wide = np.pad(corners, ((0, 0), (0, 20)))[labels]
    return wide + spread * draw.normal(size=wide.shape) / np.sqrt(wide.shape[1]), labels


def cosines(x: NDArray[np.float64]) -> NDArray[np.float64]:
    unit = x / np.linalg.norm(x, axis=1, keepdims=True)
    return np.asarray((unit @ unit.T).clip(-1, 1))


@pytest.mark.few(4)
@pytest.mark.parametrize("k", [2, 3, 4, 5])
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_clusters_are_scikit_learns(k: int, seed: int) -> None:
    x, truth = points(seed, k, spread=0.9)
    alpha = cosines(x)
    unit = x / np.linalg.norm(x, axis=1, keepdims=True)
    theirs = {
        "average": AgglomerativeClustering(k, metric="precomputed", linkage="average").fit_predict(
            1 - alpha
        ),
        "kmeans": KMeans(k, n_init=10, random_state=0).fit_predict(unit),
        "spectral": SpectralClustering(k, affinity="precomputed", random_state=0).fit_predict(
            alpha.clip(0) + 1e-9
        ),
    }
    for name, expected in theirs.items():
        assert adjusted_rand_score(partition(alpha, name, k), expected) == 1.0, name
    clean = cosines(points(seed, k)[0])
    assert all(adjusted_rand_score(partition(clean, name), truth) == 1.0 for name in NOISY)


@pytest.mark.parametrize("clusterer", NOISY)
def test_labels_are_numbered_by_first_members_and_the_same_again(clusterer: str) -> None:
    alpha = cosines(points(3, 4)[0])
    found = partition(alpha, clusterer, None, 7)
    assert found == partition(alpha, clusterer, None, 7) == partition(alpha.copy(), clusterer, 4, 7)
    assert [found.index(c) for c in range(4)] == sorted(found.index(c) for c in range(4))


def test_a_gap_of_eigenvalues_counts_clusters() -> None:
    for k in range(1, 6):
        assert eigengap(cosines(points(0, k)[0])) == k
    for seed in range(20):  # noise alone, and clients that are all alike: one
        draw = np.random.default_rng(seed)
        assert eigengap(cosines(draw.normal(size=(20, 64)))) == 1
        assert eigengap(cosines(3 + draw.normal(size=(20, 64)))) == 1
    values = np.linalg.eigvalsh(affinity(cosines(points(1, 3)[0])))
    assert values.min() >= -1 - 1e-12 and values.max() == pytest.approx(1)


@given(
    st.integers(1, 7),
    st.integers(0, 10**6),
    st.sampled_from(NOISY),
    st.one_of(st.none(), st.integers(1, 9)),
)
def test_ties_few_points_and_no_similarity_at_all(
    m: int, seed: int, clusterer: str, k: int | None
) -> None:
    draw = np.random.default_rng(seed)
    half = np.triu(draw.choice([-1.0, 0.0, 0.5, 1.0], size=(m, m)), 1)
    alpha = half + half.T + np.eye(m)
    labels = partition(alpha, clusterer, k, seed)
    assert (
        len(labels) == m
        and set(labels) == set(range(max(labels) + 1))
        and max(labels) < (k or max(1, m // 2))
    )
    for equal in (np.ones((m, m)), np.eye(m)):
        assert partition(equal, clusterer) == [0] * m
    if m > 1:
        first, second, _ = split_into_two(alpha, clusterer, seed)
        assert sorted(first + second) == list(range(m)) and first and second and first[0] == 0


def test_equal_points_stay_together() -> None:
    truth = [0, 1, 0, 1, 1, 0, 2, 2]
    alpha = np.where(np.equal.outer(truth, truth), 1.0, -0.2)
    for clusterer in NOISY:
        assert partition(alpha, clusterer, 3) == truth and partition(alpha, clusterer) == truth


@pytest.mark.parametrize("clusterer", NOISY)
def test_halves_cut_between_clusters_where_there_are_more_than_two(clusterer: str) -> None:
    for seed in range(5):
        x, truth = points(seed, 4, spread=1.0)
        alpha = cosines(x)
        found = split_into_two(alpha, clusterer)
        assert all(
            len({truth[i] for i in h} & {truth[i] for i in g}) == 0
            for h, g in [(found.first, found.second)]
        )
        assert found.cross_max == pytest.approx(alpha[np.ix_(found.first, found.second)].mean())


def test_the_papers_halves_are_as_they_were() -> None:
    alpha = cosines(points(0, 3)[0])
    assert split_into_two(alpha, "paper") == bipartition(alpha)
    assert gap_between(alpha, bipartition(alpha)) > 0.5
    assert gap_between(alpha[:2, :2], bipartition(alpha[:2, :2])) == -2.0


def test_a_lone_client_is_parted_only_from_a_cluster() -> None:
    alpha = np.full((7, 7), 0.0)
    alpha[:3, :3], alpha[3:6, 3:6] = 0.8, 0.7
    alpha[6, :] = alpha[:, 6] = -0.3
    np.fill_diagonal(alpha, 1.0)
    alone = bipartition(alpha)
    assert alone.second == (6,)
    assert with_company(alpha, alone) == ((0, 1, 2), (3, 4, 5, 6), 0.0)
    three = np.ix_((0, 1, 2, 6), (0, 1, 2, 6))
    assert with_company(alpha[three], bipartition(alpha[three])) == ((0, 1, 2), (3,), -0.3)
    two = bipartition(alpha[:6, :6])
    assert with_company(alpha[:6, :6], two) == two


def test_mean_separation_is_the_gap_of_means_over_pairs() -> None:
    alpha = np.full((6, 6), 0.1)
    alpha[:3, :3], alpha[3:5, 3:5] = 0.6, 0.9
    alpha[0, 1] = alpha[1, 0] = 0.0
    assert mean_separation(alpha, [0, 0, 0, 1, 1, 2]) == pytest.approx(
        (0.0 + 0.6 + 0.6 + 0.9) / 4 - 0.1
    )
    assert mean_separation(alpha, [0] * 6) == mean_separation(alpha, list(range(6))) == -np.inf


@pytest.mark.parametrize("clusterer", ["paper", "average"])
def test_a_split_between_clusters_is_rare_by_chance(clusterer: str) -> None:
    for k, each in ((2, 5), (3, 4), (4, 5), (8, 3)):
        alpha = cosines(points(k, k, each=each, spread=0.6)[0])
        assert evidence_for_split(alpha, clusterer, 0.25, 0.01, seed=1).p_value <= 0.01, (k, each)


@pytest.mark.parametrize("clusterer", ["paper", "average"])
@pytest.mark.parametrize("directions", [4, 30, 1000])
def test_a_split_of_noise_is_no_rarer_than_it_is(clusterer: str, directions: int) -> None:
    """Vectors that vary in few directions count, too.

    They pass any fixed threshold of cosines.
    """
    for m in (6, 20):
        made = [
            cosines(np.random.default_rng([seed, m]).normal(size=(m, directions)))
            for seed in range(20)
        ]
        chances = [
            evidence_for_split(alpha, clusterer, 0.0, 0.01, seed=2).p_value for alpha in made
        ]
        assert sum(chance <= 0.01 for chance in chances) <= 2, m


@pytest.mark.few(1)
@pytest.mark.parametrize("clusterer", NOISY)
def test_noisy_similarities_of_clusters_are_told_from_noise(clusterer: str) -> None:
    together = np.equal.outer(np.arange(20) % 2, np.arange(20) % 2)
    for seed in range(4):
        half = np.triu(np.random.default_rng(seed).normal(scale=0.1, size=(20, 20)), 1)
        noise = half + half.T
        pure, mixed = 0.3 + noise, np.where(together, 0.4, -0.4) + noise
        for alpha in (pure, mixed):
            np.fill_diagonal(alpha, 1.0)
        assert evidence_for_split(pure, clusterer, 0.0, 0.05, seed).p_value > 0.05
        assert evidence_for_split(mixed, clusterer, 0.0, 0.05, seed).p_value <= 0.05


def test_what_is_refused() -> None:
    with pytest.raises(UsageError, match="unknown clusterer"):
        partition(np.eye(3), "dbscan")
    for bad in (np.full((3, 3), np.nan), np.ones((2, 3))):
        with pytest.raises(UsageError, match="finite square"):
            partition(bad, "average")


def test_similarities_that_are_all_near_one_are_told_apart() -> None:
    """Three groups on a line: one eigenvector tells them apart, and the next is of rounding."""
    draw = np.random.default_rng(0)
    truth = np.repeat([0, 1, 2], [5, 3, 2])
    places = np.array([0.0, 0.1, -0.1])[truth] + 0.005 * draw.normal(size=10)
    distance = np.subtract.outer(places, places) ** 2
    assert partition(contrasted(distance), "spectral", 3, 0) == truth.tolist()
    assert partition(1 - distance, "spectral", 3, 0) != truth.tolist()
    near = contrasted(np.array([[0.0, 0.2], [0.2, 0.0]]))
    np.testing.assert_allclose(near, [[1, np.exp(-1)], [np.exp(-1), 1]])
    np.testing.assert_array_equal(contrasted(np.zeros((3, 3))), np.ones((3, 3)))
