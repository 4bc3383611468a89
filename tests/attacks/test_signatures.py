"""What signatures of gradients tell: label counts and membership, without noise and with it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from attacked import FULL, digits, result_of, scene
from scipy.stats import multivariate_normal
from sklearn.metrics import roc_auc_score

from securecluster import Dirichlet, Federation
from securecluster.attacks import signatures
from securecluster.attacks.base import Attack, Guess, Truth
from securecluster.attacks.scoring import BETTER, CHANCE
from securecluster.attacks.views import knowledge_of, view_of
from securecluster.audits.run_audit import known_samples
from securecluster.protocols import FedAvg, Signature

RESAMPLES = (200, 100)

SMALL: dict[str, Any] = {"rounds": 1, "epochs": 1, "model": "linear", "mask": "none", "k": 2}
KINDS = ("blocks", "plain")
# noise multiplier of one Gaussian release with ε = 1 at δ = 1e-5
NOISE = 3.73


@pytest.fixture(scope="module")
def federation() -> Federation:
    return digits(scenario=Dirichlet(alpha=1.0), clients=12, samples=30)


def scored(attack: Attack, federation: Federation, **params: Any) -> Any:
    fitted = Signature(**{**SMALL, **params}).fit(federation, FULL)
    samples = known_samples(federation, isinstance(attack, signatures.SignatureMembership))
    return result_of(attack, fitted, federation, samples)


@pytest.mark.parametrize("mask", ["none", "permutation"])
def test_class_blocks_tell_the_counts_under_a_mask_too(mask: str, federation: Federation) -> None:
    fitted = Signature(**{**SMALL, "mask": mask}, signature_blocks="blocks").fit(federation, FULL)
    view, knowledge, _ = scene(fitted, federation, known_samples(federation, False))
    guess = signatures.SignatureLabelCounts().run(view, knowledge)
    wrong = 0
    for client, shard in enumerate(federation.shards):
        counts = np.bincount(shard.y, minlength=10)
        assert guess.values[client].sum() == 30
        wrong += int(np.abs(guess.values[client] - counts).sum()) // 2
    assert len(guess.values) == 12 and wrong <= 1


def test_class_blocks_tell_nearly_as_much_without_samples(federation: Federation) -> None:
    fitted = Signature(**SMALL, signature_blocks="blocks").fit(federation, FULL)
    guess = signatures.SignatureLabelCounts().run(view_of(fitted), knowledge_of(fitted))
    for client, shard in enumerate(federation.shards):
        counts = np.bincount(shard.y, minlength=10)
        assert np.abs(guess.values[client] - counts).sum() / 2 <= 2


@pytest.mark.parametrize("kind", KINDS)
def test_without_noise_labels_are_told(kind: str, federation: Federation) -> None:
    found = scored(signatures.SignatureLabelCounts(), federation, signature_blocks=kind)
    assert found.verdict == BETTER
    assert found.value < 0.1 < 0.35 < found.chance


@pytest.mark.parametrize("kind", KINDS)
def test_noise_for_clients_hides_labels_and_noise_for_examples_does_not(
    kind: str, federation: Federation
) -> None:
    # ε = 1 of a client, and ε = 2 of an example
    for unit, noise, verdict in (("client", NOISE, CHANCE), ("example", 2.0, BETTER)):
        options: dict[str, Any] = {"signature_noise": noise, "dp_unit": unit}
        found = scored(
            signatures.SignatureLabelCounts(), federation, signature_blocks=kind, **options
        )
        assert found.verdict == verdict, unit


@pytest.mark.few(1)
@pytest.mark.parametrize("kind", KINDS)
def test_members_are_told_without_noise_alone(kind: str, federation: Federation) -> None:
    found = scored(signatures.SignatureMembership(), federation, signature_blocks=kind)
    assert found.verdict == BETTER and found.value > 0.62
    assert abs(found.chance - 0.5) < 0.03
    for unit in ("client", "example"):
        options: dict[str, Any] = {"signature_noise": NOISE, "dp_unit": unit}
        noisy = scored(
            signatures.SignatureMembership(), federation, signature_blocks=kind, **options
        )
        assert noisy.verdict == CHANCE, unit


def test_under_a_mask_samples_cannot_be_compared(federation: Federation) -> None:
    masked: dict[str, Any] = {"mask": "permutation", "signature_blocks": "plain"}
    said = "not applicable: signatures are under a mask, and the adversary's samples are not"
    assert scored(signatures.SignatureLabelCounts(), federation, **masked) == said
    assert scored(signatures.SignatureMembership(), federation, **masked) == said


def test_what_is_missing_is_said(federation: Federation) -> None:
    fitted = Signature(**SMALL, signature_blocks="plain").fit(federation, FULL)
    reason = signatures.SignatureMembership().applies(view_of(fitted), knowledge_of(fitted))
    assert reason == "not applicable: the adversary has no samples with labels"
    other = FedAvg(rounds=1, epochs=1, model="linear").fit(federation, FULL)
    for attack in (signatures.SignatureLabelCounts(), signatures.SignatureMembership()):
        assert attack.applies(view_of(other), knowledge_of(other)) == (
            "not applicable: clients of this run send no signatures of gradients"
        )


def test_signatures_of_keys_are_none_of_gradients(federation: Federation) -> None:
    # keys of the mask are signed, too, before any gradient is sent
    params: dict[str, Any] = {**SMALL, "signature_blocks": "plain"}
    plain = Signature(**params).fit(federation, FULL)
    masked = Signature(**{**params, "mask": "permutation"}).fit(federation, FULL)
    found = signatures.observed_signatures(view_of(masked), knowledge_of(masked))
    expected = signatures.observed_signatures(view_of(plain), knowledge_of(plain))
    assert found.keys() == expected.keys() == set(range(12))
    for client, signature in found.items():
        # a permutation leaves the numbers
        assert np.array_equal(np.sort(signature.rows), np.sort(expected[client].rows))


def test_a_ratio_is_that_of_two_normal_densities() -> None:
    draw = np.random.default_rng(0)
    rows = draw.normal(size=(5, 3))
    residual = draw.normal(size=3)
    factor = draw.normal(size=(3, 3))
    covariance = factor @ factor.T + np.eye(3)
    found = signatures.likelihood_ratios(rows, residual, np.linalg.inv(covariance), 4.0)
    without = multivariate_normal.logpdf(residual, np.zeros(3), covariance)
    for row, ratio in zip(rows, found, strict=True):
        member = multivariate_normal.logpdf(residual, row / 4, covariance)
        assert ratio == pytest.approx(member - without)


def test_the_weights_of_a_mixture_of_classes_are_found() -> None:
    draw = np.random.default_rng(1)
    labels = np.repeat(np.arange(3), 20)
    rows = draw.normal(size=(60, 8)) + 3 * draw.normal(size=(3, 8))[labels]
    known = signatures.PublicRows(rows, labels, 4)
    means = [rows[labels == label].mean(0) for label in range(3)]
    mixture = 0.5 * means[0] + 0.3 * means[1] + 0.2 * means[2]
    found = signatures.explained_weights(mixture, known, 20.0, 0.0)
    # no sample of class 3 is known
    assert np.allclose(found, [0.5, 0.3, 0.2, 0.0], atol=1e-6)


def test_membership_is_compared_within_each_client(federation: Federation) -> None:
    samples = known_samples(federation, True)
    assert samples is not None
    candidates = samples[0]
    draw = np.random.default_rng(2)
    values = {client: draw.normal(size=len(candidates)) for client in range(3)}
    guess = Guess("membership", values, {"candidates": candidates})
    scorer = signatures.OwnSampleMembership()
    scores = []
    answers = []
    for client in range(3):
        shard = federation.shards[client]
        for position, candidate in enumerate(candidates):
            in_train = bool((shard.x == candidate).all(tuple(range(1, shard.x.ndim))).any())
            in_test = bool((shard.x_test == candidate).all(tuple(range(1, shard.x.ndim))).any())
            if in_train or in_test:
                scores.append(values[client][position])
                answers.append(in_train)
    found = scorer.summary(scorer.units(guess, Truth(federation)))
    assert 0 < sum(answers) < len(answers) < 3 * len(candidates)
    assert found == pytest.approx(roc_auc_score(answers, scores))
    # the control asks about the same samples, and keeps how many are members
    shuffled = scorer.shuffled(guess, Truth(federation), draw)
    rows = shuffled[~np.isnan(shuffled[..., 1])]
    assert len(rows) == len(answers) and rows[:, 1].sum() == sum(answers)
