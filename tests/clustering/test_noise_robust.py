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

from securecluster.clustering import noise_robust
from securecluster.clustering.agglomerative import cut_into, merges
from securecluster.clustering.bipartition import bipartition, separated
from securecluster.clustering.noise_robust import (
    CLUSTERERS,
    TESTED,
    TESTED_BY_MEANS,
    _sample,
    affinity,
    contrasted,
    eigengap,
    evidence_for_clusters,
    evidence_for_split,
    gap_between,
    mean_separation,
    partition,
    split_into_two,
    without_isolated_client,
)
from securecluster.clustering.significance import Null, p_value
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
    average = AgglomerativeClustering(k, metric="precomputed", linkage="average")
    spectral = SpectralClustering(k, affinity="precomputed", random_state=0)
    theirs = {
        "average": average.fit_predict(1 - alpha),
        "kmeans": KMeans(k, n_init=10, random_state=0).fit_predict(unit),
        "spectral": spectral.fit_predict(alpha.clip(0) + 1e-9),
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
    assert len(labels) == m
    assert set(labels) == set(range(max(labels) + 1))
    assert max(labels) < (k or max(1, m // 2))
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
        assert not {truth[i] for i in found.first} & {truth[i] for i in found.second}
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
    assert without_isolated_client(alpha, alone) == ((0, 1, 2), (3, 4, 5, 6), 0.0)
    three = np.ix_((0, 1, 2, 6), (0, 1, 2, 6))
    assert without_isolated_client(alpha[three], bipartition(alpha[three])) == (
        (0, 1, 2),
        (3,),
        -0.3,
    )
    two = bipartition(alpha[:6, :6])
    assert without_isolated_client(alpha[:6, :6], two) == two


def test_clients_with_few_samples_stay_with_their_cluster() -> None:
    """Noise shrinks all cosines of a client: without client 0 its cluster is better separated."""
    truth = [0] * 5 + [1] * 5 + [2] * 5
    few = [0.5, 0.75, 0.35, 0.6, 0.6, 0.75]
    reliability = [*few[:2], 0.85, 0.9, 0.95, *few[2:4], 0.8, 0.9, 0.95, *few[4:], 0.85, 0.9, 0.95]
    alpha = np.where(np.equal.outer(truth, truth), 1.0, 0.5) * np.outer(reliability, reliability)
    np.fill_diagonal(alpha, 1.0)
    alone = bipartition(alpha)
    assert alone.second == (5,)
    assert separated(alpha).best == (1, 2, 3, 4)
    found = without_isolated_client(alpha, alone)
    assert found == (tuple(range(5)), tuple(range(5, 15)), pytest.approx(0.5 * 0.95**2))


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
        draws = [np.random.default_rng([seed, m]) for seed in range(20)]
        made = [cosines(draw.normal(size=(m, directions))) for draw in draws]
        chances = [
            evidence_for_split(alpha, clusterer, 0.0, 0.01, seed=2).p_value for alpha in made
        ]
        assert sum(chance <= 0.01 for chance in chances) <= 2, m


def merged(rows: NDArray[np.float64], count: int) -> tuple[NDArray[np.float64], list[int]]:
    """Return the cosines of rows, and their clusters by Ward's linkage of chords."""
    alpha = cosines(rows)
    chords = np.sqrt(np.maximum(2 - 2 * alpha, 0))
    np.fill_diagonal(chords, 0)
    return alpha, cut_into(merges(chords, "ward"), count)


def test_clusters_are_rare_by_chance_and_those_of_noise_are_not() -> None:
    """Of four clusters of four, of one odd vector, and of noise in few or many directions."""
    for seed in range(5):
        draw = np.random.default_rng(seed)
        noise = draw.normal(size=(16, 200))
        fours = noise + 0.9 * draw.normal(size=(4, 200))[np.arange(16) % 4]
        one = noise + 2 * draw.normal(size=200)
        one[3] = noise[3]
        for rows, count in ((fours, 4), (one, 2)):
            assert evidence_for_clusters(*merged(rows, count), "ward", 0.05, seed) <= 0.05
        few = draw.normal(size=(16, 4))
        for rows, count in ((noise, 4), (noise, 2), (few, 3)):
            assert evidence_for_clusters(*merged(rows, count), "ward", 0.05, seed) > 0.05
    assert evidence_for_clusters(alpha := np.eye(3), [0, 0, 0], "ward", 0.05, 0) == 1.0
    assert evidence_for_clusters(alpha, [0, 1, 2], "ward", 0.05, 0) == 1.0


def draws_of_all(
    alpha: NDArray[np.float64], clusterer: str, level: float, seed: int
) -> tuple[float, float]:
    """The separation and p-value by draws of all clients, one at a time, by the definition."""

    def separation(cosines: NDArray[np.float64]) -> tuple[float, list[int]]:
        if clusterer == "paper":
            found = separated(cosines)
            return found.score, found.labels
        labels = partition(cosines, clusterer, max(2, eigengap(cosines)), seed)
        return mean_separation(cosines, labels), labels

    observed, labels = separation(alpha)
    null, generator = Null.within(alpha, labels), np.random.default_rng(seed)
    draws = round(1 / level) - 1
    for drawn in range(1, draws + 1):
        rows = generator.standard_normal((len(alpha), len(null.spread))) * np.sqrt(null.spread)
        inner = rows @ rows.T + null.mean + null.bulk * np.eye(len(alpha))
        norms = np.sqrt(inner.diagonal())
        if separation(np.clip(inner / np.outer(norms, norms), -1, 1))[0] >= observed:
            return observed, 1 / drawn
    return observed, 1 / (draws + 1)


@pytest.mark.parametrize(
    ("clusterer", "m"), [("paper", 5), ("paper", 40), ("paper", TESTED), ("average", 60)]
)
def test_of_clients_that_are_tested_together_every_one_is_drawn(clusterer: str, m: int) -> None:
    for wide in (0.4, 1.5, 4.0):
        alpha = cosines(points(m, 2, each=m // 2, spread=wide)[0])
        expected = draws_of_all(alpha, clusterer, 0.02, seed=3)
        found = evidence_for_split(alpha, clusterer, -1.0, 0.02, seed=3)
        assert found.separation == expected[0]
        assert found.p_value == pytest.approx(expected[1])


@pytest.mark.parametrize(("clusterer", "most"), [("paper", TESTED), ("average", TESTED_BY_MEANS)])
def test_of_many_clients_a_sample_is_drawn(
    clusterer: str, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn = []

    def noted(*arguments: object) -> float:
        null = arguments[2]
        assert isinstance(null, Null)
        drawn.append((null.clients, len(null.spread)))
        return p_value(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(noise_robust, "p_value", noted)
    for few in (500, 100, 30):
        truth = np.arange(1000) < few
        wide = np.where(truth[:, None], np.eye(1, 200), np.eye(1, 200, 1))
        noise = np.random.default_rng(few).normal(scale=0.05, size=(1000, 200))
        evidence = evidence_for_split(cosines(wide + noise), clusterer, 0.25, 0.05, seed=4)
        assert evidence.p_value == pytest.approx(0.05), few
    # of two clusters m - 2 contrasts are left
    assert drawn == [(most, most - 2)] * 3


def sampled(m: int, size: int, seed: int) -> list[int]:
    """The clients that are tested of m."""
    numbered = np.tile(np.arange(float(m)), (m, 1))
    found, _ = _sample(numbered, [0] * m, size, np.random.default_rng(seed))
    return [int(place) for place in found[0]]


def test_a_sample_depends_on_the_seed_alone_and_takes_no_draw_of_the_test() -> None:
    places = sampled(300, 40, seed=5)
    assert len(set(places)) == 40 and places == sorted(places)
    alpha = np.random.default_rng(0).random((300, 300))
    generator = np.random.default_rng(5)
    found, labels = _sample(alpha, list(range(300)), 40, generator)
    np.testing.assert_array_equal(found, alpha[np.ix_(places, places)])
    assert labels == list(range(40))
    assert generator.random() == np.random.default_rng(5).random()
    assert sampled(300, 40, seed=6) != places


def test_a_sample_is_tested_for_the_clusters_of_all_and_not_for_its_own() -> None:
    """Two sides are bridged by a client outside of the sample, so they are not what is split."""
    inside = sampled(300, TESTED, seed=9)
    outside = [k for k in range(300) if k not in inside]
    together = np.equal.outer(np.arange(300) % 2, np.arange(300) % 2)
    alpha = np.where(together, 0.6, 0.0)
    bridge, pair = outside[0], [inside[0], outside[1]]
    alpha[bridge, :] = alpha[:, bridge] = 0.6
    alpha[pair, :] = alpha[:, pair] = 0.0
    alpha[np.ix_(pair, pair)] = 0.9
    np.fill_diagonal(alpha, 1.0)
    assert separated(alpha).best == tuple(sorted(pair))
    assert evidence_for_split(alpha, "paper", 0.25, 0.05, seed=9) == (0.9, 1.0)
    sides = alpha[np.ix_(inside[1:], inside[1:])]
    assert evidence_for_split(sides, "paper", 0.25, 0.05, seed=9).p_value <= 0.05


def test_many_clients_without_clusters_are_seldom_split() -> None:
    """The binomial chance of more than 6 of 40 at 0.05 is below one in 200."""
    for clusterer in ("paper", "average"):
        split = 0
        for seed in range(40):
            noise = np.random.default_rng([7, seed]).normal(size=(240, 120))
            evidence = evidence_for_split(cosines(noise), clusterer, 0.0, 0.05, seed)
            split += evidence.p_value <= 0.05
        assert split <= 6, clusterer


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
