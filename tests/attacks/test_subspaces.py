"""What shared eigenvectors tell of records, classes and means."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from attacked import FULL, digits, samples_of, scene

from securecluster import Dirichlet, Federation, Pathological
from securecluster.attacks import base, subspaces
from securecluster.attacks.base import Guess, Knowledge, Truth, View
from securecluster.attacks.scoring import Score, evaluate, score
from securecluster.messaging.parties import SERVER
from securecluster.protocols import FedAvg, OneShot

SMALL: dict[str, Any] = {"rounds": 1, "epochs": 1, "model": "linear", "tasks": 2}
ATTACKS = (subspaces.SubspaceMembership(), subspaces.SubspaceComposition(), subspaces.MeanImage())


@pytest.fixture(scope="module")
def federation() -> Federation:
    return digits(scenario=Pathological(), clients=10, samples=8)


def attacked(
    federation: Federation, parties: Any = SERVER, colluders: tuple[int, ...] = (), **params: Any
) -> tuple[View, Knowledge, Truth]:
    fitted = OneShot(**{**SMALL, **params}).fit(federation, FULL)
    # all clients' samples, and as many others
    other = digits(scenario=Dirichlet(alpha=100.0), clients=5, samples=16, seed=9)
    samples = samples_of(federation, other)
    return scene(fitted, federation, samples, parties=parties, colluders=colluders)


def test_open_eigenvectors_tell_of_records_classes_and_means(federation: Federation) -> None:
    view, knowledge, truth = attacked(federation, mask="none", sealed=False)
    results = [evaluate(attack, view, knowledge, truth) for attack in ATTACKS]
    for result in results:
        assert isinstance(result, Score)
        assert result.beats_chance and result.units == 10
    membership, classes, mean = results
    assert isinstance(membership, Score) and isinstance(classes, Score) and isinstance(mean, Score)
    assert membership.value > 0.95 and abs(membership.chance - 0.5) < 0.02
    assert classes.value > 0.9 and abs(classes.chance - 0.5) < 0.02
    assert mean.value > 0.99 and mean.chance < 0.9
    guess = subspaces.SubspaceMembership().run(view, knowledge)
    at_low_rate = score(subspaces.MembershipAtLowRate(), guess, truth)
    assert at_low_rate.value > 0.5 and at_low_rate.beats_chance


def test_the_vectors_read_are_those_of_numpy(federation: Federation) -> None:
    view, knowledge, _ = attacked(federation, mask="none", sealed=False)
    found = subspaces.observed_subspaces(view, knowledge)
    assert sorted(found) == list(range(10))
    for client, shard in enumerate(federation.shards):
        rows = np.asarray(shard.x, float).reshape(8, -1)
        _, _, right = np.linalg.svd(rows, full_matrices=False)
        cosines = np.abs(found[client] @ right[:5].T)
        assert np.allclose(cosines, np.eye(5), atol=1e-3)


@pytest.mark.few(1)
@pytest.mark.parametrize("params", [{}, {"sealed": False}, {"sealed": False, "mask": "rotation"}])
def test_a_client_reads_all_others_however_they_are_sealed(
    federation: Federation, params: dict[str, Any]
) -> None:
    view, knowledge, truth = attacked(federation, 3, (3,), **params)
    result = evaluate(subspaces.SubspaceMembership(), view, knowledge, truth)
    assert isinstance(result, Score)
    assert result.units == 9
    assert result.value > 0.95
    # the server has the same frames and no seed
    server, unaided, _ = attacked(federation, **params)
    for attack in ATTACKS:
        assert "sealed or masked" in str(attack.applies(server, unaided))
    assert subspaces.observed_subspaces(server, unaided) == {}


@pytest.mark.always
def test_noise_in_gram_matrices_brings_the_attacks_to_chance(federation: Federation) -> None:
    view, knowledge, truth = attacked(federation, mask="none", sealed=False, gram_noise=20.0)
    for attack in ATTACKS[:2]:
        result = evaluate(attack, view, knowledge, truth)
        assert isinstance(result, Score)
        assert not result.beats_chance
        assert abs(result.value - 0.5) < 0.15


def test_attacks_on_subspaces_say_why_they_do_not_apply(federation: Federation) -> None:
    fitted = FedAvg(rounds=1, epochs=1, model="linear").fit(federation, FULL)
    view, knowledge, _ = scene(fitted, federation)
    for attack in ATTACKS:
        said = attack.applies(view, knowledge)
        assert said == "not applicable: clients of this protocol share no eigenvectors"
    view, knowledge, _ = attacked(federation, mask="none", sealed=False, features="dct")
    assert "of features" in str(subspaces.MeanImage().applies(view, knowledge))


class Told(subspaces.Detection):
    """Answers that a guess has beside its scores."""

    def answers(self, guess: Guess, truth: Truth, client: int) -> Any:
        return guess.details["answers"][client]


class Counted(Told):
    """Another score of the same answers."""

    def summary(self, units: Any) -> float:
        return float(units[..., 1].sum())


@pytest.mark.parametrize("scorer", [Told(), Counted()])
def test_resamples_and_shuffles_have_the_scores_of_their_units(
    scorer: Told, federation: Federation
) -> None:
    draw = np.random.default_rng(3)
    scores = draw.integers(0, 5, (6, 7)).astype(float)  # with ties
    answers = draw.random((6, 7)) < 0.3
    guess = Guess("answers", dict(enumerate(scores)), {"answers": answers})
    truth = Truth(federation)
    units = scorer.units(guess, truth)
    of_resample = scorer.of_resamples(units)
    for chosen in draw.integers(0, 6, (50, 6)):
        assert of_resample(chosen) == pytest.approx(scorer.summary(units[chosen]))
    begun = [np.random.default_rng(4) for _ in range(2)]
    expected = base.Scorer.controls(scorer, guess, truth, begun[0], 9)
    assert scorer.controls(guess, truth, begun[1], 9) == pytest.approx(expected)
    assert scorer.of_resamples(units[:1])(np.array([0])) == scorer.summary(units[:1])


def test_energies_and_rates_are_those_of_cases_by_hand() -> None:
    vectors = np.array([[1.0, 0.0, 0.0], [0.0, 0.0, 0.0]])
    samples = np.array([[3.0, 4.0, 0.0], [0.0, 1.0, 0.0], [0.0, 0.0, 0.0]])
    assert subspaces.energies(vectors, samples).tolist() == [9 / 25, 0.0, 0.0]
    assert subspaces.auc(np.array([3.0, 2.0, 1.0, 2.0]), np.array([1, 0, 0, 1])) == pytest.approx(
        3.5 / 4
    )
    assert subspaces.auc(np.array([1.0, 2.0]), np.array([1, 1])) == 0.5
    scores = torch.arange(200).double().numpy()
    positive = scores >= 150
    assert subspaces.true_positive_rate(scores, positive) == 1.0
    assert subspaces.true_positive_rate(-scores, positive) == 0.0


def test_what_scorers_keep_of_a_guess_is_of_one_truth_alone() -> None:
    first = digits(scenario=Pathological(), clients=2, samples=8, seed=1)
    second = digits(scenario=Pathological(), clients=2, samples=8, seed=2)
    candidates = np.concatenate([first.shards[0].x[:2], second.shards[0].x[:3]])
    guess = base.Guess("membership", {0: np.zeros(5)}, {"candidates": candidates})
    scorer = subspaces.SampleMembership()
    for _ in range(2):
        assert scorer.answers(guess, Truth(first), 0).tolist() == [True] * 2 + [False] * 3
        assert scorer.answers(guess, Truth(second), 0).tolist() == [False] * 2 + [True] * 3
