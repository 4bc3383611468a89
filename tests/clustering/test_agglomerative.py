"""Merges and cuts against scipy and scikit-learn; the default threshold on hand-made and drawn
distances.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from scipy.cluster.hierarchy import fcluster, linkage
from scipy.spatial.distance import pdist, squareform
from sklearn.cluster import AgglomerativeClustering

from securecluster.clustering.agglomerative import (
    EUCLIDEAN,
    GAPS,
    LINKAGES,
    check_linkage,
    cut,
    gap_of,
    heights,
    merges,
    tasks_of,
    threshold,
)
from securecluster.clustering.distances import alike, distances
from securecluster.clustering.noise_robust import default_threshold
from securecluster.errors import UsageError

Points = NDArray[np.float64]


def apart(points: Points, metric: str = "euclidean") -> Points:
    return squareform(pdist(points, metric))


def partition(labels: list[int] | NDArray[np.int64]) -> set[frozenset[int]]:
    return {frozenset(np.flatnonzero(np.asarray(labels) == c).tolist()) for c in set(labels)}


def groups(seed: int, sizes: list[int], far: float, d: int = 50) -> tuple[Points, list[int]]:
    """Normal points around centres that lie `far` apart, and whose each is."""
    draw = np.random.default_rng(seed)
    truth = [k for k, n in enumerate(sizes) for _ in range(n)]
    return far / np.sqrt(2) * np.eye(len(sizes), d)[truth] + draw.normal(
        size=(len(truth), d)
    ) / np.sqrt(d), truth


@given(st.integers(2, 30), st.integers(0, 10**6), st.sampled_from(LINKAGES), st.floats(0, 1))
def test_a_cut_is_scipys(m: int, seed: int, kind: str, quantile: float) -> None:
    points = np.random.default_rng(seed).normal(size=(m, 6))
    tree = merges(apart(points), kind)
    np.testing.assert_allclose(tree, linkage(points, kind), rtol=1e-9)
    at = float(np.quantile(tree[:, 2], quantile))
    monotone = tree.copy()
    # scipy's fcluster is undefined where heights fall
    monotone[:, 2] = np.maximum.accumulate(tree[:, 2])
    found = cut(tree, at)
    assert partition(found) == partition(fcluster(monotone, at, "distance"))
    firsts = [found.index(c) for c in range(max(found) + 1)]
    assert firsts == sorted(firsts)


@given(
    st.integers(3, 25),
    st.integers(0, 10**6),
    st.sampled_from(["single", "complete", "average", "ward"]),
    st.floats(0.2, 0.95),
)
def test_a_cut_is_scikit_learns(m: int, seed: int, kind: str, quantile: float) -> None:
    points = np.random.default_rng(seed).normal(size=(m, 6))
    tree = merges(apart(points), kind)
    at = float(np.quantile(tree[:, 2], quantile)) * (1 + 1e-9)
    model = AgglomerativeClustering(None, metric="euclidean", linkage=kind, distance_threshold=at)
    assert partition(cut(tree, at)) == partition(model.fit_predict(points))


@pytest.mark.parametrize("metric", ["cityblock", "cosine"])
@pytest.mark.parametrize("kind", ["single", "complete", "average"])
def test_other_metrics_are_scikit_learns_too(metric: str, kind: str) -> None:
    points = np.random.default_rng(0).normal(size=(20, 6))
    tree = merges(apart(points, metric), kind)
    for clusters in range(1, 21):
        heights = {1: np.inf, 20: 0}
        at = heights[clusters] if clusters in heights else float(tree[20 - clusters - 1, 2])
        labels = AgglomerativeClustering(clusters, metric=metric, linkage=kind).fit_predict(points)
        assert partition(cut(tree, at)) == partition(labels)


def test_inversions_of_centroid_linkage_still_give_partitions() -> None:
    # the third is nearer to the middle of two than they are to each other
    points = np.array([[0, 0], [1, 0], [0.5, 0.9], [5, 5.0]])
    tree = merges(apart(points), "centroid")
    assert tree[1, 2] < tree[0, 2]
    assert heights(tree).tolist() == [1.0, 1.0, pytest.approx(float(tree[2, 2]))]
    assert cut(tree, 0.95) == [0, 1, 2, 3]
    assert cut(tree, 1.0) == [0, 0, 0, 1]
    assert cut(tree, 10.0) == [0, 0, 0, 0]


def test_the_ends_of_a_tree() -> None:
    tree = merges(apart(np.arange(5.0)[:, None] ** 2), "single")
    assert cut(tree, 0.0) == [0, 1, 2, 3, 4]
    assert cut(tree, np.inf) == [0] * 5
    assert cut(tree, float(tree[-1, 2])) == [0] * 5
    assert cut(tree, 1.0) == [0, 0, 1, 2, 3]
    assert cut(tree, 0.999) == [0, 1, 2, 3, 4]


def test_labels_are_numbered_by_their_first_members() -> None:
    tree = merges(apart(np.array([[9.0], [0.0], [9.1], [0.1], [5.0]])), "average")
    assert cut(tree, 1.0) == [0, 1, 0, 1, 2]


@pytest.mark.parametrize("kind", LINKAGES)
@pytest.mark.parametrize("sizes", [[5, 5, 5, 5], [12, 4, 4], [2, 2], [30, 20]])
def test_the_default_finds_groups_that_lie_apart(kind: str, sizes: list[int]) -> None:
    for seed in range(5):
        points, truth = groups(seed, sizes, far=6)
        for scale in (1e-6, 1.0, 1e6):
            tree = merges(apart(points * scale), kind)
            assert cut(tree, threshold(tree, gap_of("l2", kind))) == truth


@pytest.mark.parametrize("kind", LINKAGES)
@pytest.mark.parametrize("m", [2, 3, 4, 20, 100])
def test_the_default_leaves_noise_together(kind: str, m: int) -> None:
    for seed in range(10):
        points, _ = groups(seed, [m], far=0, d=300)
        tree = merges(apart(points), kind)
        assert cut(tree, threshold(tree, gap_of("l2", kind))) == [0] * m


@pytest.mark.parametrize("kind", LINKAGES)
def test_identical_updates_and_ties_are_never_parted(kind: str) -> None:
    for m in (2, 3, 8, 21):
        for distance in (np.zeros((m, m)), 1 - np.eye(m), 1e-300 * (1 - np.eye(m))):
            tree = merges(distance, kind)
            # equal distances, but merged points lie at other heights
            if kind in EUCLIDEAN and distance.any():
                continue
            assert cut(tree, threshold(tree, 1.2)) == [0] * m
    twins = apart(np.repeat(np.eye(4), 3, axis=0))
    tree = merges(twins, kind)
    assert cut(tree, threshold(tree, gap_of("l2", kind))) == [0, 0, 0, 1, 1, 1, 2, 2, 2, 3, 3, 3]
    rounding = twins + 1e-17 * (1 - np.eye(12)) * np.arange(12)
    tree = merges((rounding + rounding.T) / 2, kind)
    assert cut(tree, threshold(tree, gap_of("l2", kind))) == [0, 0, 0, 1, 1, 1, 2, 2, 2, 3, 3, 3]


def test_a_gap_among_the_lowest_merges_is_no_cut() -> None:
    points, _ = groups(0, [20], far=0, d=300)
    points[1] = points[0] + 1e-6  # two clients with almost the same update
    tree = merges(apart(points), "average")
    assert cut(tree, threshold(tree, gap_of("l2", "average"))) == [0] * 20


def test_the_cut_lies_within_the_gap_and_the_gap_decides() -> None:
    distance = np.full((6, 6), 2.0)
    distance[:3, :3] = distance[3:, 3:] = 1.0
    np.fill_diagonal(distance, 0)
    tree = merges(distance, "average")
    assert threshold(tree, 1.9) == pytest.approx(np.sqrt(2))
    assert threshold(tree, 2.1) == pytest.approx(2.0)
    assert [gap_of("cosine", kind) == GAPS[kind] ** 2 for kind in LINKAGES] == [True] * 5


def test_clients_with_larger_updates_are_no_cluster_by_chords() -> None:
    """As where some train on more samples, and so take more steps."""
    for seed in range(10):
        draw = np.random.default_rng(seed)
        truth = [0, 1, 2] * 6
        centres = draw.normal(size=(3, 300))
        size = np.repeat([1.0, 1.0, 4.0, 4.0, 16.0, 16.0], 3)[:, None]
        rows = torch.from_numpy(size * (centres[truth] + 1.2 * draw.normal(size=(18, 300))))
        cosines = alike(rows, "cosine").numpy()
        found = {}
        for metric in ("l2", "chord"):
            tree = merges(distances(rows, metric).numpy(), "ward")
            found[metric] = cut(
                tree, default_threshold(tree, gap_of(metric, "ward"), cosines, "ward", seed)
            )
        assert found["chord"] == truth
        assert found["l2"] != truth


def test_a_small_gap_of_significant_clusters_counts_and_of_noise_does_not() -> None:
    draw = np.random.default_rng(0)
    noise = draw.normal(size=(20, 400))
    clusters = noise + 0.55 * draw.normal(size=(5, 400))[np.arange(20) % 5]
    for rows, expected in ((noise, 1), (clusters, 5)):
        each = torch.from_numpy(rows)
        tree = merges(distances(each, "chord").numpy(), "ward")
        assert threshold(tree, gap_of("chord", "ward")) == threshold(tree, np.inf), "no large gap"
        at = default_threshold(
            tree, gap_of("chord", "ward"), alike(each, "cosine").numpy(), "ward", seed=0
        )
        assert 1 + max(cut(tree, at)) == expected


def test_clusters_of_unequal_sizes_are_cut_below_their_groups() -> None:
    """Of heights 1, 2, 3.9 and 7.6 above the others, ratios 2, 1.95 and 1.95 make four clusters."""
    heights_of = [*np.linspace(1, 1.05, 7), 2.0, 4.0, 8.4]
    tree = np.zeros((10, 4))
    tree[:, 2] = heights_of
    # the largest ratio is the last, 2.1; the first of nearly its size lies below three merges
    assert threshold(tree, 1.4) == pytest.approx(np.sqrt(4.0 * 8.4))
    assert threshold(tree, 1.4, 0.7) == pytest.approx(np.sqrt(1.05 * 2.0))
    # 1.2 is no rival of 2.1: log 1.2 / log 2.1 is a quarter
    tree[:, 2] = [*np.linspace(1, 1.05, 7), 1.26, 4.0, 8.4]
    assert threshold(tree, 1.4, 0.7) == pytest.approx(np.sqrt(1.26 * 4.0))
    tree[:, 2] = [*np.linspace(1, 1.05, 7), 1.26, 1.3, 2.73]
    assert threshold(tree, 1.4, 0.7) == threshold(tree, 1.4) == pytest.approx(np.sqrt(1.3 * 2.73))
    assert threshold(tree, 3.0, 0.7) == 2.73, "no large gap"


def test_linkages_that_need_euclid_are_refused_elsewhere() -> None:
    for kind in EUCLIDEAN:
        check_linkage("l2", kind)
        check_linkage("chord", kind)
        for metric in ("l1", "cosine"):
            refused = (
                f"{kind}.*metrics l2 and chord only, not for {metric}: use one of these, or "
                "single, complete, average"
            )
            with pytest.raises(UsageError, match=refused):
                check_linkage(metric, kind)
    with pytest.raises(UsageError, match="unknown linkage 'wards'"):
        merges(np.zeros((2, 2)), "wards")


@pytest.mark.parametrize(
    "distance",
    [np.zeros((1, 1)), np.zeros((2, 3)), np.array([[0, np.nan], [np.nan, 0]]), np.zeros(4)],
)
def test_what_is_no_distance_matrix_is_refused(distance: Points) -> None:
    with pytest.raises(UsageError, match="finite square distance matrix"):
        merges(distance, "single")


def tasks(sizes: list[int], within: float, across: float) -> tuple[Points, list[int]]:
    """1 − R of tasks with so many users, alike within a task and across."""
    truth = np.repeat(np.arange(len(sizes)), sizes)
    apart = np.where(truth[:, None] == truth, within, across)
    np.fill_diagonal(apart, 0)
    return apart, truth.tolist()


SPLIT, TOGETHER = (
    [(0.02, 0.69), (0.0, 0.1), (0.1, 0.2), (0.5, 0.64)],
    [(0.1, 0.18), (0.5, 0.62), (0.3, 0.3), (0.0, 0.0)],
)


@pytest.mark.parametrize("sizes", [[5, 3, 2], [2, 2], [10, 10], [5, 5, 5, 5], [2, 18]])
@pytest.mark.parametrize(
    ("within", "across", "found"),
    [*((*two, True) for two in SPLIT), *((*two, False) for two in TOGETHER)],
)
def test_the_number_of_tasks_comes_of_the_largest_gap_of_angles(
    sizes: list[int], within: float, across: float, found: bool
) -> None:
    """2·arcsin √0.1, √0.18, √0.2, √0.5, √0.62, √0.64 are 0.644, 0.876, 0.927, 1.571, 1.813, 1.855;
    the least gap is 0.26.
    """
    apart, truth = tasks(sizes, within, across)
    tree = merges(apart, "average")
    assert cut(tree, tasks_of(tree)) == (truth if found else [0] * len(truth))


def test_the_papers_own_matrix_has_two_tasks() -> None:
    r = np.array([
        [1, 0.97, 0.31, 0.31, 0.32],
        [0.97, 1, 0.31, 0.32, 0.32],
        [0.31, 0.31, 1, 0.97, 0.98],
        [0.31, 0.32, 0.97, 1, 0.98],
        [0.32, 0.32, 0.98, 0.98, 1],
    ])  # fmt: skip
    tree = merges(1 - r, "average")  # Ali & Arafa 2024, Table I
    assert cut(tree, tasks_of(tree)) == [0, 0, 1, 1, 1]
    assert 0.03 < tasks_of(tree) < 0.68


@pytest.mark.parametrize("m", [2, 3])
def test_a_handful_of_clients_is_one_task(m: int) -> None:
    tree = merges(tasks([m - 1, 1], 0.0, 0.9)[0], "average")
    assert cut(tree, tasks_of(tree)) == [0] * m


def test_clients_without_company_are_no_tasks() -> None:
    apart, _ = tasks([2, 1, 1, 1, 1], 0.0, 0.8)  # five tasks among six users
    tree = merges(apart, "average")
    assert cut(tree, tasks_of(tree)) == [0] * 6


@pytest.mark.parametrize(
    ("sizes", "found"), [([6, 1, 1], 1), ([5, 1, 1, 1, 1], 1), ([6, 2], 2), ([4, 4, 1], 3)]
)
def test_one_task_and_clients_unlike_everyone_are_one_task(sizes: list[int], found: int) -> None:
    tree = merges(tasks(sizes, 0.02, 0.69)[0], "average")
    assert 1 + max(cut(tree, tasks_of(tree))) == found


@pytest.mark.parametrize(
    ("angles", "clean", "noisy"),
    [
        ([0.10, 0.12, 0.13, 0.15, 0.14 + 0.13], 1, 2),  # a gap of 0.12 above a range of 0.05
        ([0.10, 0.12, 0.13, 0.15, 0.15 + 0.09], 1, 1),  # less than twice the range
        ([0.10, 0.20, 0.30, 0.40, 0.40 + 0.27], 2, 2),  # more than `ANGLE`: noise changes nothing
        ([0.10, 0.10, 0.10, 0.10, 0.10], 1, 1),  # no gap at all
        ([0.10, 0.10, 0.10, 0.10, 0.20], 1, 1),  # no range to compare with
        ([0.10, 0.10, 0.10, 0.10, 0.40], 2, 2),
    ],
)
def test_under_noise_a_gap_counts_beside_the_range_below_it(
    angles: list[float], clean: int, noisy: int
) -> None:
    high = np.sin(np.array(angles) / 2) ** 2
    merged = [[0, 1, 2], [6, 2, 3], [3, 4, 2], [8, 5, 3], [7, 9, 6]]
    tree = np.insert(np.array(merged, dtype=float), 2, high, axis=1)
    assert [1 + max(cut(tree, tasks_of(tree, noise))) for noise in (False, True)] == [clean, noisy]


@pytest.mark.parametrize(
    ("angles", "clean", "noisy"),
    [
        ([0.05, 0.05, 0.06, 0.06, 0.07, 0.07, 0.36, 0.37, 0.70], 2, 4),  # two pairs of tasks
        (
            [0.05, 0.05, 0.06, 0.06, 0.07, 0.07, 0.13, 0.13, 0.70],
            2,
            2,
        ),  # less than a quarter of the largest gap
        (
            [0.05, 0.05, 0.10, 0.15, 0.20, 0.25, 0.45, 0.50, 0.90],
            2,
            2,
        ),  # less than twice the range below
        ([0.05, 0.40, 0.41, 0.42, 0.43, 0.44, 0.45, 0.46, 0.47], 1, 1),  # more clusters than m / 2
    ],
)
def test_under_noise_the_lowest_clear_gap_is_where_to_cut(
    angles: list[float], clean: int, noisy: int
) -> None:
    high = np.sin(np.array(angles) / 2) ** 2
    first = [[0, 1], [10, 2], [3, 4], [5, 6], [13, 7], [8, 9], [11, 12], [14, 15], [16, 17]]
    tree = np.array([[*pair, h, 2] for pair, h in zip(first, high, strict=True)])
    found = [1 + max(cut(tree, tasks_of(tree, noise))) for noise in (False, True)]
    assert found == [clean, noisy]
