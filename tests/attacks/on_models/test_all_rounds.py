"""Membership from the updates of all rounds, with the other clients as the null."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from attacked import FULL, digits, result_of, samples_of, scene, score_of
from scipy.stats import zscore
from sklearn.metrics import roc_auc_score

from securecluster import Federation
from securecluster.attacks.on_models.all_rounds import AllRounds, against_others, started_from
from securecluster.attacks.scoring import further_scores
from securecluster.attacks.views import observed_updates
from securecluster.protocols import FedAvg

RESAMPLES = (100, 100)
OPTIONS: dict[str, Any] = {"epochs": 1, "batch_size": 100, "model": "linear", "mask": "none"}


@pytest.fixture(scope="module")
def federation() -> Federation:
    return digits(clients=8, samples=12)


def candidates(federation: Federation) -> tuple[Any, Any]:
    inside, outside = samples_of(federation), samples_of(federation, part="_test")
    return tuple(np.concatenate(pair) for pair in zip(inside, outside, strict=True))  # type: ignore[return-value]


def test_a_client_is_compared_with_all_others_and_not_with_itself() -> None:
    table = np.random.default_rng(0).standard_normal((5, 7))
    found = against_others(table)
    # leaving one out is a one-to-one function of the z-score among all (Thompson's statistic)
    z = zscore(table, ddof=1)
    n = len(table)
    expected = z * n / (n - 1) * np.sqrt((n - 2) / (n - 1 - n * z**2 / (n - 1)))
    assert np.allclose(found, expected)


def test_more_rounds_tell_more_and_noise_tells_nothing(federation: Federation) -> None:
    samples = candidates(federation)
    scores = {}
    for rounds in (1, 6):
        fitted = FedAvg(rounds=rounds, **OPTIONS).fit(federation, FULL)
        scores[rounds] = score_of(AllRounds(), fitted, federation, samples)
    assert scores[6].beats_chance and scores[6].value > 0.7
    assert scores[6].value > scores[1].value - 0.02
    noisy = FedAvg(rounds=6, clip=1.0, noise=3.0, **OPTIONS).fit(federation, FULL)
    assert score_of(AllRounds(), noisy, federation, samples).at_chance


def test_the_auc_and_the_exact_interval_are_those_of_other_libraries(
    federation: Federation,
) -> None:
    samples = candidates(federation)
    fitted = FedAvg(rounds=2, **OPTIONS).fit(federation, FULL)
    view, knowledge, truth = scene(fitted, federation, samples)
    attack = AllRounds()
    guess = attack.run(view, knowledge)
    answers = np.concatenate([attack.scorer.answers(guess, truth, i) for i in guess.values])  # type: ignore[attr-defined]
    scores = np.concatenate(guess.listed)
    units = attack.scorer.units(guess, truth)
    assert attack.scorer.summary(units) == pytest.approx(roc_auc_score(answers, scores))
    rate = further_scores(attack, guess, truth)["membership TPR at 1 % FPR"]
    assert not isinstance(rate, str) and rate.interval is not None
    assert rate.interval_by.startswith("exact")
    assert rate.interval.low <= rate.value <= rate.interval.high < 1


@pytest.mark.parametrize(("found", "low", "high"), [(0, 0, 0.30850), (5, 0.18709, 0.81291)])
def test_the_interval_of_a_rate_is_that_of_the_tables(found: int, low: float, high: float) -> None:
    # Clopper and Pearson (1934), of ten at 95 %
    members = np.stack([np.r_[np.ones(found), -np.ones(10 - found)], np.ones(10)], axis=1)
    others = np.zeros((100, 2))
    interval = AllRounds.further[0].exact_interval(np.concatenate([members, others])[None])
    assert interval == pytest.approx((low, high), abs=1e-5)


def test_models_that_clients_train_from_are_those_of_the_run(federation: Federation) -> None:
    fitted = FedAvg(rounds=2, **OPTIONS).fit(federation, FULL)
    view, knowledge, _ = scene(fitted, federation)
    starts = started_from(view, knowledge)
    steps = sorted({step for _, step in starts})
    assert np.array_equal(starts[0, steps[0]].numpy(), knowledge.initial.numpy())
    # what every client is sent last is the mean of what they learned, from one model to the next
    updates = [row for row in observed_updates(view, knowledge) if row.step == steps[0]]
    mean = np.mean([row.row.double().numpy() for row in updates], axis=0)
    moved = (starts[0, steps[1]] - knowledge.initial).numpy()
    assert np.allclose(moved, mean, atol=1e-5)


@pytest.mark.parametrize(
    ("options", "reason"),
    [({"aggregation": "secagg"}, "no call shows"), ({"mask": "permutation"}, "under a mask")],
)
def test_sums_and_masks_leave_nothing_to_compare(
    federation: Federation, options: dict[str, Any], reason: str
) -> None:
    fitted = FedAvg(rounds=1, **{**OPTIONS, **options}).fit(federation, FULL)
    assert reason in result_of(AllRounds(), fitted, federation, candidates(federation))
