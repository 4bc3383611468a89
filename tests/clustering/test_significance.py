"""The null distribution of a significance test, against what it was estimated from, and its
p-values against exact ones.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from numpy.typing import NDArray

from securecluster.clustering.significance import DRAWN_TOGETHER, Null, _batch_sizes, p_value

Array = NDArray[np.float64]


def cosines(rows: Array) -> Array:
    unit = rows / np.linalg.norm(rows, axis=1, keepdims=True)
    return np.asarray(unit @ unit.T)


def spread_of(drawn: Array) -> float:
    """The standard deviation of the cosines of different clients."""
    return float(drawn[np.triu_indices(len(drawn), 1)].std())


def spreads_of(drawn: Array) -> Iterator[float]:
    """The `spread_of` each of several draws."""
    return map(spread_of, drawn)


@pytest.mark.parametrize("directions", [5, 40, 2000])
def test_draws_scatter_at_least_as_much_as_what_they_were_estimated_from(directions: int) -> None:
    generator = np.random.default_rng(0)
    true = [spread_of(cosines(generator.normal(size=(20, directions)))) for _ in range(30)]
    drawn = []
    for _ in range(30):
        similarity = cosines(generator.normal(size=(20, directions)))
        drawn.append(spread_of(Null.within(similarity, [0] * 20).cosines(1, generator)[0]))
    assert np.mean(true) <= np.mean(drawn) <= 3 * np.mean(true)


def test_clusters_do_not_widen_the_null_that_they_are_tested_against() -> None:
    generator = np.random.default_rng(1)
    noise = generator.normal(size=(24, 500))
    labels = np.arange(24) % 4
    centres = 30 * generator.normal(size=(4, 500))
    apart = Null.within(cosines(noise + centres[labels]), labels.tolist())
    together = Null.within(cosines(noise + centres[labels]), [0] * 24)
    assert apart.spread.max() < 0.01 * together.spread.max()


def test_the_mean_of_clients_without_clusters_is_kept() -> None:
    rows = np.random.default_rng(2).normal(size=(30, 400)) + 1.0  # cosines of about a half
    similarity = cosines(rows)
    drawn = Null.within(similarity, [0] * 30).cosines(1, np.random.default_rng(3))[0]
    different = np.triu_indices(30, 1)
    assert drawn[different].mean() == pytest.approx(similarity[different].mean(), abs=0.05)
    assert drawn.diagonal() == pytest.approx(np.ones(30))
    assert np.array_equal(drawn, drawn.T)


def test_a_single_contrast_tells_nothing_of_further_directions() -> None:
    null = Null.within(cosines(np.random.default_rng(4).normal(size=(3, 100))), [0, 0, 1])
    assert null.bulk == 0 and len(null.spread) == 1


@pytest.mark.parametrize("clients", [2, 3, 20, 33])
@pytest.mark.parametrize("directions", [1, 2, 30])
@pytest.mark.parametrize("bulk", [0.0, 0.3])
def test_draws_made_together_are_those_made_one_by_one(
    clients: int, directions: int, bulk: float
) -> None:
    spread = np.random.default_rng(6).random(directions)
    null = Null(clients, spread, bulk, bulk / 10)
    together = null.cosines(7, np.random.default_rng(7))
    generator = np.random.default_rng(7)
    for drawn in together:
        assert np.array_equal(drawn, null.cosines(1, generator)[0])


@pytest.mark.parametrize("clients", [3, 20, 100, 300])
@pytest.mark.parametrize("draws", [1, 9, 999])
def test_all_draws_are_made_and_each_one_is_tested(clients: int, draws: int) -> None:
    asked = list(_batch_sizes(draws, clients))
    assert sum(asked) == draws
    assert max(asked) * clients**2 <= DRAWN_TOGETHER or max(asked) == 1


def test_p_values_are_uniform_where_the_statistic_is_drawn_from_the_null() -> None:
    null = Null(6, np.full(4, 0.25), 0.0, 0.0)
    generator = np.random.default_rng(5)
    found = []
    for _ in range(400):
        spread = spread_of(null.cosines(1, generator)[0])
        found.append(p_value(spreads_of, spread, null, 0.05, generator))
    assert sum(p <= 0.05 for p in found) == pytest.approx(20, abs=15)
    assert min(found) == 1 / 20
    assert sum(p == 1 for p in found) == pytest.approx(200, abs=40)


def test_draws_stop_at_the_first_that_reaches_the_observed_value() -> None:
    null, made = Null(4, np.ones(3), 0.0, 0.0), [0]

    def statistic(drawn: Array) -> Iterator[float]:
        for _ in drawn:
            made[0] += 1
            yield float(made[0])

    assert p_value(statistic, 7.0, null, 0.01, np.random.default_rng(0)) == 1 / 7
    assert made[0] == 7
    assert p_value(statistic, np.inf, null, 0.01, np.random.default_rng(0)) == 0.01
    assert made[0] == 7 + 99


def test_each_tested_draw_is_told() -> None:
    null, told = Null(4, np.ones(3), 0.0, 0.0), []

    def statistic(drawn: Array) -> Array:
        return np.full(len(drawn), float(len(told) >= 20))

    def watch(tested: int, draws: int) -> None:
        told.append((tested, draws))

    p_value(statistic, 1.0, null, 0.01, np.random.default_rng(0), watch)
    assert told == [(tested, 99) for tested in range(1, 26)]


def test_variances_add_up_to_that_of_clients_around_their_groups_means() -> None:
    rows = np.random.default_rng(0).normal(size=(9, 6))
    labels = [0, 0, 0, 1, 1, 1, 1, 2, 2]
    null = Null.within(rows @ rows.T, labels)
    groups = [rows[np.array(labels) == label] for label in range(3)]
    squares = sum(float(((group - group.mean(0)) ** 2).sum()) for group in groups)
    assert float(null.spread.sum()) + null.bulk == pytest.approx(squares / (9 - 3))
