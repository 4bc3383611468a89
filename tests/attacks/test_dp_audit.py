"""DP audits: known answers, never above the ledger's ε, and halved noise is refuted."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from attacked import FULL, digits, result_of, score_of

from securecluster import Federation
from securecluster.attacks import dp_audit
from securecluster.attacks.base import Guess, Truth
from securecluster.attacks.dp_audit import (
    OneRunAudit,
    TwoWorldAudit,
    one_run_epsilon,
    one_run_p_value,
    with_canaries,
)
from securecluster.attacks.scoring import Score, score
from securecluster.errors import UsageError
from securecluster.privacy.dp.accounting import gaussian_epsilon
from securecluster.protocols import CFL, FLHC, FedAvg

RESAMPLES = (5, 10)

SMALL: dict[str, Any] = {"rounds": 1, "epochs": 1, "model": "linear", "clip": 0.5}
NOISED: dict[str, Any] = {**SMALL, "noise": 1.0}
# so little that no bound is zero by chance
LITTLE: dict[str, Any] = {**SMALL, "noise": 0.5}


@pytest.fixture(scope="module")
def federation() -> Federation:
    return digits(clients=100, samples=4)


def bounds(made: Any, federation: Federation) -> tuple[float, Score, Score]:
    """The ledger's ε at the audit's δ, and both audits' scores."""
    fitted, taps = with_canaries(made, federation, FULL)
    one_run = score_of(OneRunAudit(planted=True), fitted, federation, taps=taps)
    two_worlds = score_of(TwoWorldAudit(planted=True), fitted, federation, taps=taps)
    return fitted.ledger_.price(dp_audit.DELTA).epsilon, one_run, two_worlds


@pytest.mark.parametrize(
    ("canaries", "guesses", "correct", "delta", "epsilon"),
    [(100, 100, 100, 0.0, 3.4930), (1000, 1000, 900, 1e-5, 2.0206), (1000, 100, 95, 1e-5, 2.1652)],
)
def test_one_run_has_the_known_answers(
    canaries: int, guesses: int, correct: int, delta: float, epsilon: float
) -> None:
    assert one_run_epsilon(canaries, guesses, correct, delta) == pytest.approx(epsilon, abs=6e-5)


def test_all_guesses_right_have_a_bound_in_closed_form() -> None:
    # (1/(1 + e^-ε))^m = p
    right = 0.05 ** (1 / 40)
    assert one_run_epsilon(40, 40, 40, 0.0) == pytest.approx(math.log(right / (1 - right)))
    assert one_run_epsilon(40, 40, 20, 0.0) == 0.0
    assert one_run_p_value(40, 40, 0, 1.0, 1e-5) == 1.0
    with pytest.raises(UsageError, match="5 correct of 4 guesses"):
        one_run_epsilon(10, 4, 5, 0.0)


def test_the_bound_of_randomized_response_is_rarely_above_its_epsilon() -> None:
    # its guesses are right with probability e^ε/(1 + e^ε) exactly, the worst case of the theorem
    draw = np.random.default_rng(0)
    correct = draw.binomial(200, 1 / (1 + math.exp(-1.0)), 400)
    above = [one_run_epsilon(200, 200, int(count), 0.0) > 1.0 for count in correct]
    assert np.mean(above) < 0.08
    assert np.mean([one_run_epsilon(200, 200, int(v), 0.0) > 0.5 for v in correct]) > 0.9


@pytest.mark.few(1)
@pytest.mark.parametrize(
    "made",
    [CFL(**LITTLE), FLHC(**LITTLE, pre_rounds=0), FedAvg(**LITTLE, placement="central")],
    ids=["cfl", "flhc", "central sum"],
)
def test_bounds_are_below_the_ledgers_epsilon_and_not_zero(
    made: Any, federation: Federation
) -> None:
    claimed, one_run, two_worlds = bounds(made, federation)
    assert 0 < one_run.value < claimed
    assert 0 < two_worlds.value < claimed
    assert one_run.chance < 0.1
    assert two_worlds.chance < 1.0


def test_the_terms_of_a_plain_sum_are_read_and_have_the_noise_of_one_client(
    federation: Federation,
) -> None:
    claimed, one_run, two_worlds = bounds(FedAvg(**NOISED), federation)
    assert 0 < two_worlds.value < claimed
    assert one_run.value < claimed


@pytest.mark.parametrize("outlier", [0.0, 3.0, 1000.0])
def test_one_client_beyond_its_bound_is_not_lost_in_means(outlier: float) -> None:
    draw = np.random.default_rng(0)
    present, absent = draw.normal(size=20), draw.normal(size=20)
    present[0] += outlier
    bound = dp_audit.by_outlier(present, absent)
    assert bound > 30 if outlier == 1000.0 else bound < 3


def test_half_of_the_noise_takes_clients_enough_to_be_found() -> None:
    bounds_of = {}
    for clients in (10, 400):
        statistics = dict.fromkeys(range(clients), 0.0)
        planted = dp_audit.Planted(statistics, dp_audit.heads(clients), claimed=8.0)
        bounds_of[clients] = dp_audit.with_half_the_noise(planted, dp_audit.TwoWorldScorer(), 20)
    assert bounds_of[10] < 8.0 < bounds_of[400]


@pytest.mark.exhaustive
def test_several_rounds_are_audited_as_a_whole(federation: Federation) -> None:
    once, _, first = bounds(CFL(**NOISED), federation)
    several, _, all_rounds = bounds(CFL(**{**NOISED, "rounds": 4}), federation)
    assert once < several
    assert first.value < all_rounds.value < several


@pytest.mark.exhaustive  # `tests/audits/test_claims.py` has both in small
@pytest.mark.parametrize(
    ("protocol", "params"),
    [(CFL, {}), (FedAvg, {"placement": "central"})],
    ids=["local", "central"],
)
def test_halved_noise_is_refuted(
    protocol: Any, params: dict[str, Any], federation: Federation
) -> None:
    # a ledger that claims z = 1 of a mechanism that adds half of it
    claimed = gaussian_epsilon(1.0, dp_audit.DELTA)
    genuine, _, allowed = bounds(protocol(**SMALL, noise=1.0, **params), federation)
    _, _, halved = bounds(protocol(**SMALL, noise=0.5, **params), federation)
    assert genuine == pytest.approx(claimed, rel=1e-6)
    assert allowed.value < claimed < halved.value


def test_without_noise_every_coin_is_guessed(federation: Federation) -> None:
    claimed, one_run, two_worlds = bounds(FedAvg(**SMALL), federation)
    assert claimed == math.inf
    assert one_run.value == one_run_epsilon(100, 100, 100, dp_audit.DELTA) > 3
    assert one_run.beats_chance
    assert two_worlds.value > 1000


def test_a_run_without_canaries_says_why(federation: Federation) -> None:
    fitted = FedAvg(**SMALL).fit(federation, FULL)
    reason = result_of(OneRunAudit(), fitted, federation)
    assert isinstance(reason, str) and reason.startswith("not applicable: the run has no canaries")
    with pytest.raises(UsageError, match="the taps of with_canaries"):
        result_of(OneRunAudit(planted=True), fitted, federation)
    with pytest.raises(UsageError, match="needs a clip"):
        with_canaries(FedAvg(rounds=1), federation, FULL)


@pytest.mark.always
@pytest.mark.few(4)
@pytest.mark.parametrize("canaries", [*range(2, 61), 75, 100, 149, 200, 301, 400])
def test_a_release_that_says_nothing_gets_a_bound_in_at_most_5_percent_of_all_coins(
    canaries: int,
) -> None:
    """All coins, counted by how many of them the guesses of one half get right."""
    wrong = 0
    for correct in range(canaries + 1):
        if one_run_epsilon(canaries, canaries, correct, dp_audit.DELTA) > 0:
            wrong += math.comb(canaries, correct)
    assert 20 * wrong <= 2**canaries


def test_coins_are_independent() -> None:
    tosses = np.array([dp_audit.tossed(12, seed) for seed in range(4000)], float)
    # a number of heads varies as a binomial one does, and not by 0 as that of halves
    assert tosses.sum(1).var() == pytest.approx(12 / 4, rel=0.1)
    correlations = np.corrcoef(tosses.T) - np.eye(12)
    assert np.abs(correlations).max() < 5 / math.sqrt(4000)
    np.testing.assert_allclose(tosses.mean(0), 0.5, atol=5 * 0.5 / math.sqrt(4000))


@pytest.mark.few(2)
@pytest.mark.parametrize(("canaries", "epsilon"), [(40, 0.5), (100, 2.0), (200, 1.0)])
def test_randomised_response_is_refuted_in_at_most_5_percent_of_runs(
    canaries: int, epsilon: float
) -> None:
    draw = np.random.default_rng(canaries)
    kept = 1 / (1 + math.exp(-epsilon))
    refuted = []
    for seed in range(400):
        coins = dp_audit.tossed(canaries, 1000 * canaries + seed)
        told = np.where(draw.random(canaries) < kept, coins, ~np.array(coins))
        guess = Guess("canaries", dict(enumerate(told + 1e-9 * draw.random(canaries))))
        truth = Truth(None, taps=(dp_audit.tap_of(coins, balanced=False),))  # type: ignore[arg-type]
        scorer = dp_audit.OneRunScorer()
        refuted.append(scorer.summary(scorer.units(guess, truth)) > epsilon)
    assert np.mean(refuted) <= 0.05


def test_one_run_refuses_halves_and_both_refuse_statistics_that_rank_nowhere() -> None:
    coins = (True, False, True, False)
    fine = Guess("canaries", dict(enumerate([1.0, 0.0, 2.0, 0.5])))
    halves, tossed = (
        Truth(None, taps=(dp_audit.tap_of(coins, balanced=balanced),))  # type: ignore[arg-type]
        for balanced in (True, False)
    )
    with pytest.raises(UsageError, match="takes coins that are tossed one by one"):
        score(dp_audit.OneRunScorer(), fine, halves)
    for number in (math.nan, math.inf):
        wrong = Guess("canaries", dict(enumerate([1.0, number, 2.0, 0.5])))
        for scorer in (dp_audit.OneRunScorer(), dp_audit.TwoWorldScorer(), dp_audit.RateScorer()):
            with pytest.raises(UsageError, match="infinite or no number"):
                score(scorer, wrong, tossed)


def test_each_audit_repeats_a_run_with_its_own_coins(federation: Federation) -> None:
    one, two = (
        audit.planted_in(FedAvg(**SMALL), federation, FULL)
        for audit in (OneRunAudit(), TwoWorldAudit())
    )
    assert (one.balanced, two.balanced, sum(two.coins)) == (False, True, 50)
    assert one.coins == dp_audit.tossed(100)
    assert OneRunAudit.release != TwoWorldAudit.release
