"""Clusters of rows that depend on shares of classes, against plain k-means and planted clusters."""

from __future__ import annotations

import numpy as np
import pytest

from securecluster.clustering.k_means import kmeans
from securecluster.clustering.metrics import agreement
from securecluster.clustering.noisy_residuals import (
    CrowdMeans,
    NoisyResiduals,
    designs,
    shares_of,
    without_common,
)
from securecluster.clustering.pairs import VARIABLE
from securecluster.errors import UsageError

CLASSES = 5
WIDTH = 4


def planted(
    seed: int, sizes: tuple[int, ...] = (5, 5, 5), alpha: float = 1.0, noise: float = 0.01
) -> tuple[NoisyResiduals, list[int]]:
    """Return rows W_i·b_c with noise, and their clusters."""
    draw = np.random.default_rng(seed)
    truth = np.repeat(np.arange(len(sizes)), sizes)
    own = draw.normal(size=(len(sizes), CLASSES, WIDTH))
    shares = np.full((len(truth), CLASSES), 1 / CLASSES)
    if alpha:
        shares = draw.dirichlet(np.full(CLASSES, alpha), len(truth))
    rows = shares[:, :, None] * own[truth]
    rows += noise * draw.normal(size=rows.shape)
    flat = rows.reshape(len(rows), -1)
    _, _, vectors = np.linalg.svd(flat - flat.mean(0), full_matrices=False)
    directions = vectors[:6].reshape(6, CLASSES, WIDTH)
    values = flat @ directions.reshape(6, -1).T
    made = designs(shares * CLASSES, directions)
    variance = np.full(len(rows), noise**2)
    return NoisyResiduals(values, made, variance, 1e-9 + 0 * variance), truth.tolist()


def test_with_equal_shares_designs_are_the_identity_and_clusters_are_those_of_k_means() -> None:
    rows, _ = planted(0, alpha=0.0, noise=0.1)
    np.testing.assert_allclose(rows.designs, np.broadcast_to(np.eye(6), (15, 6, 6)), atol=1e-9)
    centred = rows.values - rows.values.mean(0)
    ours = rows.clusters(3, 0)
    assert agreement(ours, kmeans(centred @ centred.T, 3, 0))["ari"] == 1
    np.testing.assert_allclose(rows._estimates, rows.values, atol=1e-9)


def test_clients_with_other_shares_are_in_the_clusters_that_were_planted() -> None:
    ours = []
    plain = []
    for seed in range(8):
        rows, truth = planted(seed, alpha=0.7)
        ours.append(agreement(rows.clusters(3, 0), truth)["ari"])
        centred = rows.values - rows.values.mean(0)
        plain.append(agreement(kmeans(centred @ centred.T, 3, 0), truth)["ari"])
    assert np.mean(ours) > 0.9
    assert np.mean(plain) < np.mean(ours) - 0.1


@pytest.mark.parametrize("sizes", [(5, 5, 5), (3, 6, 6, 6), (4,) * 7])
def test_with_equal_shares_the_number_of_clusters_is_found(sizes: tuple[int, ...]) -> None:
    rows, truth = planted(4, sizes=sizes, alpha=0.0, noise=0.1)
    assert rows.count() == len(sizes)
    assert agreement(rows.clusters(None, 0), truth)["ari"] == 1


@pytest.mark.parametrize("seed", range(4))
def test_no_partition_that_was_planted_is_better_than_what_is_found(seed: int) -> None:
    rows, truth = planted(seed, sizes=(6, 4, 3), noise=0.4)
    assert rows._best(3, 0)[0] <= rows._loss(np.array(truth), 3) * (1 + 1e-9)


@pytest.mark.parametrize("clients", [8, 21, 40])
def test_noise_alone_is_one_cluster(clients: int) -> None:
    draw = np.random.default_rng(clients)
    values = draw.normal(size=(clients, 6))
    identity = np.broadcast_to(np.eye(6), (clients, 6, 6))
    ones = np.ones(clients)
    for stated in (0.3, 1.0):  # sampling may be underrated
        rows = NoisyResiduals(values, identity, 0.5 * stated * ones, 0.5 * stated * ones)
        assert rows.clusters(None, 0) == [0] * clients


def test_some_rows_are_compared_as_all_are() -> None:
    rows, _ = planted(1)
    some = [3, 7, 8, 12]
    whole = rows.squared_distances(rows)
    np.testing.assert_allclose(
        rows.select(some).squared_distances(rows.select(some)), whole[np.ix_(some, some)]
    )


def blocks_of(shares: np.ndarray, means: np.ndarray, noise: float, seed: int) -> np.ndarray:
    """Return class blocks of clients that have the same means of classes."""
    draw = np.random.default_rng(seed)
    sums = shares[:, :, None] * means
    blocks = np.concatenate([sums, shares[:, :, None]], axis=2)
    return blocks + noise * draw.normal(size=blocks.shape)


def test_means_and_shares_without_noise_are_those_of_the_clients() -> None:
    draw = np.random.default_rng(0)
    means = draw.normal(size=(CLASSES, WIDTH))
    shares = draw.dirichlet(np.ones(CLASSES), 12)
    crowd = CrowdMeans.of(blocks_of(shares, means, 0.0, 0), np.zeros(12), np.full(12, 1e9), WIDTH)
    np.testing.assert_allclose(crowd.means, means)
    np.testing.assert_allclose(crowd.shares, shares)
    np.testing.assert_allclose(crowd.crowd, shares.mean(0))
    assert crowd.trust == pytest.approx(1.0)
    expected = np.mean(np.square(shares - shares.mean(0))) * CLASSES**2
    assert crowd.spread == pytest.approx(expected, rel=1e-6)


def test_shares_that_noise_hides_are_drawn_to_those_of_all() -> None:
    draw = np.random.default_rng(1)
    means = draw.normal(size=(CLASSES, WIDTH))
    shares = np.full((200, CLASSES), 1 / CLASSES)
    noise = 0.1
    deviations = np.full(200, noise)
    blocks = blocks_of(shares, means, noise, 1)
    crowd = CrowdMeans.of(blocks, deviations, np.full(200, 1e9), WIDTH)
    assert crowd.spread < 3 * crowd.spread_error
    assert np.abs(crowd.shares - 1 / CLASSES).max() < noise / 2
    # the error of the spread is what noise alone gives it
    spreads = []
    for seed in range(40):
        one = CrowdMeans.of(
            blocks_of(shares, means, noise, seed), deviations, np.full(200, 1e9), WIDTH
        )
        told = one.spread
        spreads.append(told)
        assert told < 5 * one.spread_error
    assert max(spreads) > 0.3 * crowd.spread_error


def test_skewed_shares_are_told_beyond_their_noise() -> None:
    draw = np.random.default_rng(2)
    shares = draw.dirichlet(np.ones(CLASSES), 60)
    blocks = blocks_of(shares, np.ones((CLASSES, WIDTH)), 0.02, 2)
    deviations = np.full(60, 0.02)
    crowd = CrowdMeans.of(blocks, deviations, np.full(60, 1e9), WIDTH)
    true_spread = np.mean(np.square(shares - shares.mean(0))) * CLASSES**2
    assert crowd.spread == pytest.approx(true_spread, rel=0.2)
    assert crowd.spread > 10 * crowd.spread_error
    again = shares_of(blocks[:3], deviations[:3], crowd.crowd, crowd.spread)
    np.testing.assert_allclose(again, crowd.shares[:3], atol=0.02)


def test_what_residuals_have_in_common_is_taken_off_by_share() -> None:
    draw = np.random.default_rng(3)
    shares = draw.dirichlet(np.ones(CLASSES), 30)
    common = draw.normal(size=(CLASSES, WIDTH))
    crowd = CrowdMeans.of(blocks_of(shares, common, 0.0, 0), np.zeros(30), np.full(30, 1e9), WIDTH)
    sums = shares[:, :, None] * common
    left, rest = without_common(sums, np.zeros(30), crowd, WIDTH)
    np.testing.assert_allclose(rest, common, atol=1e-9)
    np.testing.assert_allclose(left, 0, atol=1e-9)


def test_rows_of_too_many_clients_are_not_merged(monkeypatch: pytest.MonkeyPatch) -> None:
    rows, _ = planted(2, (6, 6))
    monkeypatch.setenv(VARIABLE, "11")
    with pytest.raises(UsageError, match="all pairs of 12 clients"):
        rows.clusters(2, 0)
