"""Label distributions from columns over clients: readable through a permutation."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from attacked import FULL, NO_UPDATES, digits, result_of, score_of

from securecluster import Federation, Pathological
from securecluster.attacks.base import Guess, Truth
from securecluster.attacks.label_distributions import LabelDistributions, MatchedCorrelation
from securecluster.attacks.scoring import Score
from securecluster.protocols import FedAvg

ROUND: dict[str, Any] = {"rounds": 1, "epochs": 2, "model": "mlp-32"}


@pytest.fixture(scope="module")
def federation() -> Federation:
    return digits(scenario=Pathological(), clients=16, samples=40)


def scored(federation: Federation, **params: Any) -> Score:
    fitted = FedAvg(**ROUND, **params).fit(federation, FULL)
    return score_of(LabelDistributions(), fitted, federation)


def test_a_permutation_leaves_label_distributions_readable(federation: Federation) -> None:
    result = scored(federation, mask="permutation")
    assert result.value > 0.7 and result.beats_chance
    assert result.chance_interval.high < 0.65


def test_much_noise_brings_the_attack_to_chance(federation: Federation) -> None:
    result = scored(federation, mask="permutation", clip=1.0, noise=5.0)
    assert not result.beats_chance
    assert abs(result.value - result.chance) < 0.15


def test_the_score_is_numpys_correlation_whatever_the_names_of_labels(
    federation: Federation,
) -> None:
    truth = Truth(federation)
    shares = np.stack([truth.label_counts(k) / 40 for k in range(16)])
    renamed = 3 * np.roll(shares, 4, axis=1) - 1
    scorer = MatchedCorrelation()
    exact = scorer.units(Guess("label shares", dict(enumerate(renamed))), truth)
    assert scorer.summary(exact) == pytest.approx(1)
    draw = np.random.default_rng(0)
    noisy = shares[:, :1] + 0.3 * draw.normal(size=(16, 1))
    single = scorer.units(Guess("label shares", dict(enumerate(noisy))), truth)
    correlations = [np.corrcoef(noisy[:, 0], shares[:, c])[0, 1] for c in range(10)]
    assert scorer.summary(single) == pytest.approx(max(correlations))


def test_where_no_updates_are_observed_the_attack_says_why(federation: Federation) -> None:
    fitted = FedAvg(**ROUND, aggregation="secagg").fit(federation, FULL)
    assert result_of(LabelDistributions(), fitted, federation) == NO_UPDATES
