"""Intervals of scores."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from scipy.stats import binomtest

from securecluster.attacks import scoring
from securecluster.attacks.base import Guess, Truth
from securecluster.attacks.dp_audit import TwoWorldScorer
from securecluster.attacks.label_distributions import MatchedCorrelation
from securecluster.attacks.subspaces import MembershipAtLowRate, auc, true_positive_rate
from securecluster.errors import UsageError


def test_the_interval_of_a_biased_score_is_shifted_to_the_score() -> None:
    draw = np.random.default_rng(0)
    resampled = 0.61 + 0.01 * draw.standard_normal(1000)
    interval = scoring._unbiased(resampled, 0.6)
    # two standard deviations, nearly, beside the score and not beside the resamples' mean
    assert interval.low == pytest.approx(0.6 - 0.0196, abs=0.002)
    assert interval.high == pytest.approx(0.6 + 0.0196, abs=0.002)


def test_a_few_far_resamples_do_not_move_the_interval_off_the_score() -> None:
    # one resample in a thousand has no spread, and a bound that is as good as infinite
    resampled = np.zeros(1000)
    resampled[0] = 5e5
    interval = scoring._unbiased(resampled, 0.0)
    assert (interval.low, interval.high) == (0.0, 0.0)


def test_a_true_positive_rate_has_the_interval_that_scipy_finds() -> None:
    answers = np.repeat([1.0, 0.0], [20, 200])
    for found in (0, 7, 20):
        scores = np.zeros(220)
        scores[:found] = 1
        interval = MembershipAtLowRate(0.01).exact_interval(np.column_stack([scores, answers]))
        assert interval == pytest.approx(tuple(binomtest(found, 20).proportion_ci()), abs=1e-12)


class Given(scoring.Scorer):
    """The mean of units that are given."""

    metric = "given"

    def __init__(self, units: Any) -> None:
        self._units = np.asarray(units, dtype=float)

    def units(self, guess: Guess, truth: Truth) -> Any:
        return self._units

    def shuffled(self, guess: Guess, truth: Truth, draw: np.random.Generator) -> Any:
        return draw.integers(0, 2, len(self._units)).astype(float)


def scored(scorer: scoring.Scorer) -> scoring.Score:
    return scoring.score(scorer, Guess("x", {}), Truth(federation=None))  # type: ignore[arg-type]


def test_a_score_without_spread_has_no_interval_and_stands_for_itself() -> None:
    # eight clients of eight are no proof that every client would be found
    for units in ([0.7] * 6, [1.0] * 8, [1.0]):
        result = scored(Given(units))
        assert result.interval is None and result.interval_by == scoring.OF_EQUALS
    assert scored(Given([0.5] * 30)).verdict == scoring.CHANCE
    assert scored(Given([0.99] * 30)).verdict == scoring.BETTER


class Matched(MatchedCorrelation):
    """A guess of the shares of ten labels by forty clients, with noise."""

    def __init__(self, noise: float, seed: int) -> None:
        draw = np.random.default_rng(seed)
        shares = draw.dirichlet(np.ones(10), 40)
        guess = shares[:, draw.permutation(10)] + noise * draw.normal(size=(40, 10))
        self._rows_given = np.stack([guess, shares], axis=1)

    def units(self, guess: Guess, truth: Truth) -> Any:
        return self._rows_given

    def shuffled(self, guess: Guess, truth: Truth, draw: np.random.Generator) -> Any:
        rows = self._rows_given.copy()
        rows[:, 1] = rows[draw.permutation(len(rows)), 1]
        return rows


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("noise", [0.05, 1.0])
def test_the_interval_of_a_best_match_does_not_begin_at_the_score(noise: float, seed: int) -> None:
    result = scored(Matched(noise, seed))
    assert result.interval is not None and result.interval_by == scoring.BOOTSTRAP
    below = result.value - result.interval.low
    above = result.interval.high - result.value
    assert below > 0.01 and above > 0.01


class Exact(TwoWorldScorer):
    """Statistics that tell every coin."""

    def units(self, guess: Guess, truth: Truth) -> Any:
        return np.array([[10.0, 1], [11, 1], [10, 1], [0, 0], [1, 0], [0, 0]])


def test_a_bound_has_no_interval_and_few_shuffles_do_not_move_its_chance() -> None:
    result = scored(Exact())
    assert result.interval is None and result.interval_by == scoring.OF_BOUND
    # one of 20 orders of the coins is the true one
    assert result.chance == 0 < result.value


@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf])
def test_scores_that_rank_nowhere_are_refused(number: float) -> None:
    scores, positive = np.array([0.1, number, 0.3, 0.2]), np.array([True, True, False, False])
    for measure in (auc, true_positive_rate):
        with pytest.raises(UsageError, match="rank nowhere"):
            measure(scores, positive)
