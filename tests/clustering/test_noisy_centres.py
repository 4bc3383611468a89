"""Centres from sums of points: each function against its definition, and together k-means."""

from __future__ import annotations

import math

import numpy as np
import pytest
from sklearn.cluster import KMeans
from sklearn.metrics import adjusted_rand_score

from securecluster.clustering import noisy_centres as centres
from securecluster.clustering.labels import Array


def points(count: int, q: int, seed: int = 0) -> Array:
    return np.random.default_rng(seed).standard_normal((count, q))


def test_unit_rows_are_directions_and_what_has_none_is_zero() -> None:
    rows = np.array([[3.0, 4.0], [0.0, 0.0], [1e300, 0.0], [np.nan, 1.0], [np.inf, 1.0]])
    expected = [[0.6, 0.8], [0, 0], [1, 0], [0, 0], [0, 0]]
    np.testing.assert_allclose(centres.unit(rows), expected, atol=1e-15)


def test_packed_moments_have_the_norm_of_the_matrix_and_give_its_eigenvectors() -> None:
    rows = points(30, 5) * np.array([5.0, 1.0, 4.0, 1.0, 1.0])
    packed = centres.second_moments(rows)
    np.testing.assert_allclose(np.linalg.norm(packed, axis=1), (rows**2).sum(1))
    found = centres.leading_directions(packed.sum(0), 2)
    _, vectors = np.linalg.eigh(rows.T @ rows)
    cosines = np.abs((found * vectors[:, ::-1][:, :2]).sum(0))
    np.testing.assert_allclose(cosines, 1.0)
    np.testing.assert_allclose(found.T @ found, np.eye(2), atol=1e-12)
    assert all(found[np.abs(column).argmax(), n] > 0 for n, column in enumerate(found.T))


def test_no_row_is_longer_than_one_whatever_the_point() -> None:
    wild = np.concatenate([points(50, 3), 1e6 * points(50, 3), np.zeros((1, 3))])
    book = centres.code_book(3, 8)
    for reach in (centres.CELL_REACH, centres.STEP_REACH):
        rows = centres.displacement_rows(wild, book, reach)
        norms = np.linalg.norm(rows.reshape(len(rows), -1), axis=1)
        assert norms.max() <= 1 + 1e-12
        assert norms.max() > 0.99  # the bound is reached


def test_rows_of_parts_have_norm_one_and_hold_the_point() -> None:
    draw = np.random.default_rng(3)
    parts, weights = draw.standard_normal((20, 4, 6)), draw.random((20, 4))
    rows = centres.part_rows(parts, weights)
    np.testing.assert_allclose(np.linalg.norm(rows.reshape(20, -1), axis=1), 1.0)
    plain = centres.residuals(rows, np.zeros((4, 6)))
    np.testing.assert_allclose(plain, centres.unit(parts.sum(1)), atol=1e-12)
    wild = np.stack([np.full((4, 6), np.nan), np.zeros((4, 6)), np.full((4, 6), 1e300)])
    norms = np.linalg.norm(centres.part_rows(wild, np.ones((3, 4))).reshape(3, -1), axis=1)
    np.testing.assert_allclose(norms, [math.sqrt(0.5), math.sqrt(0.5), 1.0])


def test_residuals_do_not_follow_which_classes_an_owner_lacks() -> None:
    draw = np.random.default_rng(4)
    classes = 2 * draw.standard_normal((4, 6))
    weights = draw.random((200, 4)) * (draw.random((200, 4)) > 0.4)
    weights[~weights.any(1)] = 1.0
    truth = np.arange(200) % 2
    own = (2 * truth - 1)[:, None, None] * np.eye(1, 6)[None]  # what two kinds of owners differ in
    rows = centres.part_rows(weights[:, :, None] * (classes[None] + own), weights)
    plain = centres.residuals(rows, np.zeros((4, 6)))
    left = centres.residuals(rows, centres.mean_parts(rows.sum(0), 0.0))
    found = []
    for points in (plain, left):
        labels = KMeans(2, n_init=10, random_state=0).fit_predict(points)
        found.append(adjusted_rand_score(truth, labels))
    assert found[0] < 0.1 and found[1] == 1.0


def test_a_class_whose_weight_may_be_noise_is_subtracted_in_part() -> None:
    total = np.array([[40.0, 20.0], [2.0, 20.0], [-1.0, 20.0]])
    least = centres.PART_DEVIATIONS * 5.0
    found = centres.mean_parts(total, 5.0)
    np.testing.assert_allclose(found[:, 0], [0.5, 20 / least, 20 / least])
    np.testing.assert_allclose(centres.mean_parts(total[:2], 0.0)[:, 0], [0.5, 10.0])


def test_counts_and_mean_displacements_are_read_from_the_sum() -> None:
    book = np.array([[0.5, 0.0], [-0.5, 0.0]])
    at = np.array([[0.6, 0.1], [0.4, 0.1], [-0.5, 0.2]])
    total = centres.displacement_rows(at, book, centres.STEP_REACH).sum(0)
    np.testing.assert_allclose(centres.counts_of(total), [2, 1])
    moved = centres.moved_centres(total, book, deviation=0.0)
    np.testing.assert_allclose(moved, [[0.5, 0.1], [-0.5, 0.2]])


def test_a_centre_whose_count_may_be_noise_stays() -> None:
    book = np.array([[0.5, 0.0], [-0.5, 0.0]])
    at = np.array([[0.5, 0.2]] * 9 + [[-0.5, 0.2]])
    total = centres.displacement_rows(at, book, centres.STEP_REACH).sum(0)
    moved = centres.moved_centres(total, book, deviation=1.0)  # 3 clients of noise in a count
    np.testing.assert_allclose(moved, [[0.5, 0.2], [-0.5, 0.0]])


@pytest.mark.parametrize(("r", "count"), [(1, 2), (2, 6), (3, 8)])
def test_the_code_book_is_spread_over_the_ball(r: int, count: int) -> None:
    book = centres.code_book(r, count)
    assert book.shape == (count, r)
    np.testing.assert_allclose(np.linalg.norm(book, axis=1), centres.CELL_RADIUS)
    np.testing.assert_allclose(book.mean(0), 0, atol=0.1)
    assert np.array_equal(book, centres.code_book(r, count))


def test_small_clusters_go_only_where_no_noise_explains_them() -> None:
    counts = np.array([5.0, 1.0, 4.0])
    assert centres.large_enough(counts, 0.0, 2) == [0, 2]
    assert centres.large_enough(counts, 0.5, 2) == [0, 1, 2]
    assert centres.large_enough(np.array([0.0, 1.0]), 0.0, 9) == [1]


@pytest.mark.parametrize("k", [2, 4])
def test_clusters_are_found_from_the_sums_alone(k: int) -> None:
    draw = np.random.default_rng(3)
    truth = np.repeat(np.arange(k), 20)
    where = 3 * np.eye(6)[:k] + 5.0
    rows = centres.unit(where[truth] + 0.3 * draw.standard_normal((len(truth), 6)))
    mean = rows.sum(0) / len(rows)
    directions = centres.directions_from(rows, mean)
    basis = centres.leading_directions(centres.second_moments(directions).sum(0), k - 1)
    places = centres.projections(directions, basis)
    book = centres.code_book(k - 1, 2 * k)
    cells = centres.displacement_rows(places, book, centres.CELL_REACH).sum(0)
    found = centres.centres_from_cells(cells, book, k, deviation=0.0, seed=0)
    steps = centres.displacement_rows(places, found, centres.STEP_REACH).sum(0)
    moved = centres.moved_centres(steps, found, deviation=0.0)
    labels = centres.nearest_centres(places, moved)
    assert adjusted_rand_score(truth, labels) == 1.0
    # one step of Lloyd's algorithm from centres that are right already, with short displacements
    for label in range(k):
        steps_of_members = []
        for member in places[labels == label] - found[label]:
            length = math.hypot(*member)
            steps_of_members.append(member * min(1.0, centres.STEP_REACH / length))
        expected = found[label] + np.mean(steps_of_members, axis=0)
        np.testing.assert_allclose(moved[label], expected, atol=1e-9)


def test_there_are_more_cells_where_the_noise_leaves_them_points() -> None:
    assert centres.cells_for(4, 200, 0.0) == 16
    assert centres.cells_for(4, 200, 1e6) == 8
    # 16 cells of 12.5 points each, whose counts have √2 times the deviation
    edge = 12.5 / (centres.POINTS_PER_DEVIATION * math.sqrt(2))
    assert centres.cells_for(4, 200, 0.99 * edge) == 16
    assert centres.cells_for(4, 200, 1.01 * edge) == 8
    assert centres.cells_for(4, 2000, 1.01 * edge) == 16


def test_clusters_of_unequal_sizes_are_found_without_noise() -> None:
    """With two cells a cluster, cells that two clusters share hide the smaller one."""
    draw = np.random.default_rng(0)
    truth = np.repeat(np.arange(4), [13, 27, 53, 107])
    right = {2: [], 4: []}  # type: dict[int, list[float]]
    for _ in range(10):
        basis = np.linalg.qr(draw.standard_normal((3, 3)))[0]
        where = 0.7 * centres.unit(np.array([[1, 0, 0], [0, 1, 0], [-1, -1, 0], [0, 0.4, 1.0]]))
        places = (where @ basis)[truth] + 0.1 * draw.standard_normal((200, 3))
        for per_cluster, found in right.items():
            book = centres.code_book(3, per_cluster * 4)
            total = centres.displacement_rows(places, book, centres.CELL_REACH).sum(0)
            started = centres.centres_from_cells(total, book, 4, 0.0, seed=0)
            labels = centres.nearest_centres(places, started)
            found.append(float(adjusted_rand_score(truth, labels)))
    assert np.mean(right[4]) > max(0.97, np.mean(right[2]) + 0.005)


def test_the_separation_is_the_share_of_squared_length_between_centres() -> None:
    """By definition, it is the between-cluster part of the variance of unit vectors."""
    draw = np.random.default_rng(4)
    rows = centres.unit(draw.standard_normal((60, 3)))
    labels = draw.integers(0, 3, 60)
    found = np.stack([rows[labels == c].mean(0) for c in range(3)])
    counts = np.bincount(labels).astype(float)
    within = ((rows - found[labels]) ** 2).sum() / 60
    mean = rows.mean(0)
    between = 1.0 - within - mean @ mean
    assert centres.separation(found, counts) == pytest.approx(between)
    # counts below zero, which noise makes, are nobody
    more = np.concatenate([found, [[1.0, 0.0, 0.0]]])
    assert centres.separation(more, np.append(counts, -5.0)) == pytest.approx(between)
    assert centres.separation(found, np.zeros(3)) == 0.0
