"""Membership by likelihood ratios: the statistic, its moments, and runs that do and do not tell."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from attacked import FULL, digits, samples_of, scene
from scipy.stats import norm

from securecluster import Federation, Iid
from securecluster.attacks import likelihood_ratio
from securecluster.attacks.base import Guess, Knowledge, Truth, View
from securecluster.attacks.client_models import first_models, shown_models
from securecluster.attacks.likelihood_ratio import (
    LikelihoodRatio,
    OfflineLikelihoodRatio,
    as_sent,
    confidences,
    dealt,
    scores,
)
from securecluster.attacks.loss_threshold import LossThreshold
from securecluster.attacks.scoring import Score, evaluate, further_scores, score
from securecluster.attacks.shadow_training import locally_trained
from securecluster.attacks.subspaces import MembershipAtLowRate
from securecluster.errors import UsageError
from securecluster.protocols import CFL, IFCA, SRFCA, FedAvg

RESAMPLES = (100, 50)

LONG: dict[str, Any] = {
    "rounds": 1, "epochs": 40, "batch_size": 8, "lr": 0.2, "model": "linear", "mask": "none",
}  # fmt: skip
ATTACKS = (LikelihoodRatio(shadows=24), OfflineLikelihoodRatio(shadows=24))


@pytest.fixture(scope="module")
def federation() -> Federation:
    return digits(scenario=Iid(), clients=5, samples=20)


def attacked(made: Any, federation: Federation) -> tuple[View, Knowledge, Truth]:
    # all clients' own records: to each client, the others' are not members
    return scene(made.fit(federation, FULL), federation, samples_of(federation))


@pytest.fixture(scope="module")
def overfitted(federation: Federation) -> tuple[View, Knowledge, Truth]:
    return attacked(CFL(**LONG), federation)


def drawn(shadows: int) -> tuple[Any, Any, Any]:
    draw = np.random.default_rng(3)
    inside = draw.permuted(np.arange(shadows)[:, None] % 2 == np.zeros((1, 6)), axis=0)
    known = draw.normal(size=(shadows, 6)) * np.linspace(0.5, 2, 6) + 1.5 * inside
    return draw.normal(size=6), known, inside


def test_a_score_is_scipys_ratio_of_two_normal_densities() -> None:
    asked, known, inside = drawn(160)
    online = scores(asked, known, inside)
    offline = scores(asked, known, inside, online=False)
    for k in range(6):
        present = known[inside[:, k], k]
        absent = known[~inside[:, k], k]
        member = norm(present.mean(), present.std(ddof=1))
        other = norm(absent.mean(), absent.std(ddof=1))
        assert np.exp(online[k]) == pytest.approx(member.pdf(asked[k]) / other.pdf(asked[k]))
        # the paper's 1 − Pr[Z > φ]
        assert norm.cdf(offline[k]) == pytest.approx(1 - other.sf(asked[k]))


def test_few_shadow_models_give_all_candidates_one_variance() -> None:
    asked, known, inside = drawn(16)
    squares = 0.0
    squares_out = 0.0
    for k in range(6):
        squares += 7 * known[inside[:, k], k].var(ddof=1)
        squares_out += 7 * known[~inside[:, k], k].var(ddof=1)
    both = np.sqrt((squares + squares_out) / (12 * 7))
    online = scores(asked, known, inside)
    offline = scores(asked, known, inside, online=False)
    for k in range(6):
        mean_in = known[inside[:, k], k].mean()
        mean_out = known[~inside[:, k], k].mean()
        ratio = norm.logpdf(asked[k], mean_in, both) - norm.logpdf(asked[k], mean_out, both)
        assert online[k] == pytest.approx(ratio)
        alone = np.sqrt(squares_out / (6 * 7))
        assert norm.cdf(offline[k]) == pytest.approx(norm.cdf(asked[k], mean_out, alone))


def test_a_model_that_is_surer_than_every_shadow_model_has_its_member_found() -> None:
    # under label skew clients' models are surer of their few classes than shadow models are
    _, known, inside = drawn(16)
    known[inside] *= 0.5
    mean_in = np.array([known[inside[:, k], k].mean() for k in range(6)])
    mean_out = np.array([known[~inside[:, k], k].mean() for k in range(6)])
    far = scores(100 * np.sign(mean_in - mean_out), known, inside)
    assert (far > 0).all()


def test_a_candidate_that_no_shadow_model_saw_has_a_score_by_the_others_shift() -> None:
    asked, known, inside = drawn(16)
    inside[:, 2] = False
    asked[2] = known[:, 2].mean() + 5.0
    online = scores(asked, known, inside)
    assert np.isfinite(online).all()
    assert online[2] > 0  # far on the side of members
    assert np.isfinite(scores(asked, known, np.zeros_like(inside))).all()


def test_the_statistic_is_the_log_odds_of_the_label(
    overfitted: tuple[View, Knowledge, Truth],
) -> None:
    view, known, _ = overfitted
    assert known.samples is not None
    model = first_models(view, known)[2]
    found = confidences(model[None], known)[0]
    outputs = known.network.call(known.parameters(model), torch.as_tensor(known.samples[0]))
    shares = outputs.double().softmax(-1).numpy()[np.arange(100), known.samples[1]]
    assert np.allclose(found, np.log(shares) - np.log(1 - shares), atol=1e-4)
    # of a model that is sure to the last digit, too
    sure = confidences(1000 * model[None], known)[0]
    assert np.isfinite(sure).all() and sure.max() > 100


@pytest.mark.parametrize(("count", "size"), [(100, 20), (100, 90), (33, 8), (2, 40)])
def test_candidates_are_dealt_evenly_and_never_to_more_than_half(count: int, size: int) -> None:
    inside = dealt(count, size, 64, 512, np.random.default_rng(0))
    hand = min(size, count // 2)
    assert (inside.sum(1) == hand).all()
    seen = inside.sum(0)
    assert seen.min() >= 2 and (~inside).sum(0).min() >= 2
    assert seen.max() - seen.min() <= len(inside) // 4


def test_rare_candidates_have_more_shadow_models() -> None:
    inside = dealt(1000, 10, 64, 512, np.random.default_rng(0))
    assert len(inside) == 400
    assert (inside.sum(0) == 4).all()
    # a large network has no room for more
    assert len(dealt(1000, 10, 64, 30, np.random.default_rng(0))) == 30


def test_shadow_models_are_trained_as_clients_are(
    federation: Federation, overfitted: tuple[View, Knowledge, Truth]
) -> None:
    view, known, _ = overfitted
    shown = shown_models(view, known)
    moved = locally_trained(known, federation.shards, range(5), shown[0].steps, known.initial)
    for client, model in shown.items():
        # the number of threads changes what trains side by side, and so the last bits
        torch.testing.assert_close(model.model, known.initial + moved[client])


def test_models_that_were_trained_alone_for_several_rounds_are_shown(
    federation: Federation,
) -> None:
    alone = SRFCA(rounds=1, epochs=1, model="linear", mask="none", local_rounds=3)
    view, known, _ = attacked(alone, federation)
    shown = shown_models(view, known)
    assert {model.steps for model in shown.values()} == {(1, 2, 3)}
    moved = locally_trained(known, federation.shards, range(5), (1, 2, 3), known.initial)
    for client, model in shown.items():
        assert torch.allclose(model.model, known.initial + moved[client], atol=1e-6)


def test_models_of_clients_that_choose_begin_with_their_choice(federation: Federation) -> None:
    choosing = IFCA(rounds=1, starts=1, k=3, epochs=1, model="linear", mask="none")
    view, known, _ = attacked(choosing, federation)
    shown = shown_models(view, known)
    assert len({model.number for model in shown.values()}) > 1
    for client, model in shown.items():
        shards = [federation.shards[client]]
        moved = locally_trained(known, shards, [client], model.steps, model.initial)
        assert torch.allclose(model.model, model.initial + moved[0], atol=1e-6)
    assert len(LikelihoodRatio(shadows=8).run(view, known).values) == 5


def test_overfitted_models_tell_their_members_and_better_than_losses_do(
    overfitted: tuple[View, Knowledge, Truth],
) -> None:
    view, known, truth = overfitted
    found = {}
    low = {}
    for attack in (*ATTACKS, LossThreshold()):
        guess = attack.run(view, known)
        found[attack.name] = score(attack.scorer, guess, truth)
        at_low_rate = further_scores(attack, guess, truth)["membership TPR at 1 % FPR"]
        assert isinstance(at_low_rate, Score)
        low[attack.name] = at_low_rate.value
    for attack in ATTACKS:
        result = found[attack.name]
        assert result.beats_chance and result.value > 0.85 and result.units == 5
        assert result.chance == pytest.approx(0.5, abs=0.03)
        assert low[attack.name] > 0.1
        assert low[attack.name] > low[LossThreshold.name]
    assert found[LikelihoodRatio.name].value > found[LossThreshold.name].value


def test_noise_brings_the_ratio_to_chance(federation: Federation) -> None:
    noisy = attacked(CFL(**{**LONG, "epochs": 5}, clip=0.1, noise=10.0), federation)
    for attack in ATTACKS:
        result = evaluate(attack, *noisy)
        assert isinstance(result, Score)
        assert not result.beats_chance and abs(result.value - 0.5) < 0.1


@pytest.mark.exhaustive
def test_many_samples_and_one_epoch_bring_the_ratio_near_chance() -> None:
    many = Federation.simulate("digits", scenario=Iid(), clients=4, samples=200, seed=0)
    short = {**LONG, "epochs": 1, "batch_size": 50, "lr": 0.05}
    view, known, truth = attacked(CFL(**short), many)
    attack = LikelihoodRatio(shadows=16)
    units = attack.scorer.units(attack.run(view, known), truth)
    assert 0.4 < attack.scorer.summary(units) < 0.6


def test_shadow_models_are_clipped_and_noised_as_clients_updates_are(
    overfitted: tuple[View, Knowledge, Truth],
) -> None:
    _, known, _ = overfitted
    moved = torch.ones(3, 650)
    assert as_sent(moved, known, 0) is moved
    clip = {**known.config, "clip": 2.0}
    clipped = as_sent(moved, replace(known, config=clip), 0)
    assert clipped.norm(dim=1).tolist() == pytest.approx([2.0] * 3, rel=1e-4)
    noisy = as_sent(moved, replace(known, config={**clip, "noise": 3.0}), 0)
    assert float((noisy - clipped).std()) == pytest.approx(6.0, rel=0.05)
    # a trusted server's noise is in no client's update
    central = {**clip, "noise": 3.0, "placement": "central"}
    assert torch.equal(as_sent(moved, replace(known, config=central), 0), clipped)


def test_too_few_non_members_for_a_rate_are_a_sentence(
    overfitted: tuple[View, Knowledge, Truth],
) -> None:
    _, known, truth = overfitted
    assert known.samples is not None
    values = {client: np.zeros(100) for client in range(5)}
    guess = Guess("membership", values, {"candidates": known.samples[0]})
    found = further_scores(LossThreshold(), guess, truth)
    assert isinstance(found["membership TPR at 1 % FPR"], Score)
    said = found["membership TPR at 0.1 % FPR"]
    assert said == (
        "a false positive rate of 0.1 % takes 1000 non-members or more, and the attack was asked "
        "about 400"
    )
    with pytest.raises(UsageError, match="there is no membership TPR at 0"):
        score(MembershipAtLowRate(0.001), guess, truth)
    assert MembershipAtLowRate(1 / 400).why_not(guess, truth) is None
    assert MembershipAtLowRate(1 / 401).why_not(guess, truth) is not None


@pytest.mark.exhaustive
def test_clients_of_other_sizes_have_shadow_models_of_their_own(
    federation: Federation, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = (20, 20, 12, 8, 5)
    shards = []
    for shard, size in zip(federation.shards, sizes, strict=True):
        shards.append(replace(shard, x=shard.x[:size], y=shard.y[:size]))
    uneven = replace(federation, shards=tuple(shards), recipe=None)
    asked = []
    original = likelihood_ratio.dealt

    def noted(candidates: int, size: int, *rest: Any) -> Any:
        asked.append(size)
        return original(candidates, size, *rest)

    monkeypatch.setattr(likelihood_ratio, "dealt", noted)
    weighted = CFL(**{**LONG, "epochs": 1}, average="weighted")
    view, known, _ = attacked(weighted, uneven)
    guess = LikelihoodRatio(shadows=4).run(view, known)
    assert list(guess.values) == [0, 1, 2, 3, 4]
    assert len(asked) == 3 and min(asked) < 8 and max(asked) == 20


def test_masks_sums_and_data_without_labels_are_not_applicable(federation: Federation) -> None:
    short = {**LONG, "epochs": 1}
    masked = attacked(CFL(**{**short, "mask": "permutation"}), federation)
    assert evaluate(LikelihoodRatio(), *masked) == (
        "not applicable: no model can be evaluated under a mask"
    )
    summed = attacked(FedAvg(**short, aggregation="secagg"), federation)
    assert evaluate(OfflineLikelihoodRatio(), *summed) == (
        "not applicable: no single updates of a first round were observed"
    )
