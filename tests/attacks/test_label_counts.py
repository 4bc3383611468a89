"""Label counts from the last bias: exact for one full-batch step, and not under a permutation."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from attacked import FULL, NO_UPDATES, digits, result_of, scene, score_of

from securecluster import Dirichlet, Federation
from securecluster.attacks.base import Guess
from securecluster.attacks.label_counts import LabelCounts, least_steps, rounded
from securecluster.attacks.scoring import Score
from securecluster.protocols import CFL, FedAvg

STEP: dict[str, Any] = {"rounds": 1, "epochs": 1, "batch_size": 1000, "model": "mlp-32"}


@pytest.fixture(scope="module")
def federation() -> Federation:
    return digits(scenario=Dirichlet(alpha=1.0), clients=8, samples=30)


def guessed(fitted: Any, federation: Federation) -> Guess:
    view, knowledge, _ = scene(fitted, federation)
    return LabelCounts().run(view, knowledge)


def scored(federation: Federation, **params: Any) -> Score:
    fitted = FedAvg(**{**STEP, **params}).fit(federation, FULL)
    return score_of(LabelCounts(), fitted, federation)


def test_the_counts_of_a_step_over_thirty_samples_are_exact(federation: Federation) -> None:
    guess = guessed(FedAvg(**STEP).fit(federation, FULL), federation)
    for client, shard in enumerate(federation.shards):
        counts = np.bincount(shard.y, minlength=10)
        assert counts.sum() == 30
        assert guess.values[client].tolist() == counts.tolist()


def test_single_updates_of_other_methods_tell_the_same(federation: Federation) -> None:
    fitted = CFL(**STEP, average="weighted", mask="none").fit(federation, FULL)
    guess = guessed(fitted, federation)
    assert guess.values[5].tolist() == np.bincount(federation.shards[5].y, minlength=10).tolist()


def test_the_score_beats_chance_without_a_mask_and_not_under_a_permutation(
    federation: Federation,
) -> None:
    plain = scored(federation)
    masked = scored(federation, mask="permutation")
    assert (plain.value, plain.units, plain.higher) == (0.0, 8, False)
    assert plain.beats_chance and plain.chance > 0.3
    assert not masked.beats_chance
    assert masked.value > 0.2
    assert masked.interval is not None
    assert masked.interval.low <= masked.chance <= masked.interval.high


def test_several_local_steps_blur_the_counts(federation: Federation) -> None:
    blurred = scored(federation, epochs=2, batch_size=10)
    assert 0 < blurred.value < blurred.chance
    assert blurred.beats_chance


def test_without_a_size_the_guess_is_the_share_of_each_label(federation: Federation) -> None:
    guess = guessed(CFL(**STEP, mask="none").fit(federation, FULL), federation)
    assert guess.details["without size"] == tuple(range(8))
    for client, shard in enumerate(federation.shards):
        shares = guess.values[client]
        assert shares.sum() == pytest.approx(1.0)
        # exact to less than half a sample, although nobody told that there are thirty
        assert np.rint(30 * shares).tolist() == np.bincount(shard.y, minlength=10).tolist()


def test_without_a_size_the_score_is_as_good_as_with_it(federation: Federation) -> None:
    several: dict[str, Any] = {"epochs": 2, "batch_size": 10}
    with_size = scored(federation, **several)
    fitted = CFL(**{**STEP, **several}, mask="none").fit(federation, FULL)
    without = score_of(LabelCounts(), fitted, federation)
    assert without.beats_chance
    assert without.value < with_size.value + 0.05


def test_the_number_of_steps_is_that_at_which_a_missing_class_has_no_share() -> None:
    prediction = np.array([0.1, 0.4, 0.5])
    shares = np.array([0.0, 0.7, 0.3])
    for steps in (2, 4, 6, 12):
        gradients = steps * (shares - prediction)
        assert least_steps(prediction, gradients, epochs=2) == steps
    assert least_steps(prediction, np.zeros(3), epochs=3) == 3


def test_where_nothing_is_observed_the_attack_says_why(federation: Federation) -> None:
    fitted = FedAvg(**STEP, aggregation="secagg").fit(federation, FULL)
    assert result_of(LabelCounts(), fitted, federation) == NO_UPDATES


def test_counts_are_rounded_to_their_total() -> None:
    assert rounded(np.array([0.5, 0.26, 0.24]), 10).tolist() == [5, 3, 2]
    assert rounded(np.array([-0.2, 0.5, 0.5]), 3).tolist() == [0, 2, 1]
    assert rounded(np.array([-1.0, 0.0]), 4).tolist() == [2, 2]
