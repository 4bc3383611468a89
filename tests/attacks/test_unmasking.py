"""Masks against known plaintext and a public model."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from attacked import FULL, scene, score_of
from cases import exhaustive, two_clusters

from securecluster import Federation
from securecluster.attacks.base import Tap
from securecluster.attacks.experiments import tapped, with_malicious_updates
from securecluster.attacks.mask_known_plaintext import MaskKnownPlaintext
from securecluster.attacks.mask_public_model import MaskPublicModel
from securecluster.attacks.scoring import Score, evaluate, score
from securecluster.attacks.unmasking import (
    RecoveredCoordinates,
    UnmaskedCosine,
    by_rank,
    by_span,
    true_row,
)
from securecluster.attacks.views import knowledge_of
from securecluster.errors import UsageError
from securecluster.protocols import FedAvg

SMALL: dict[str, Any] = {"rounds": 1, "epochs": 1, "model": "linear"}


@pytest.fixture(scope="module")
def federation() -> Federation:
    return two_clusters(6, 30)


def attacked(
    federation: Federation, colluders: list[int], **params: Any
) -> tuple[Any, Any, Any, Any]:
    fitted, taps = tapped(FedAvg(**{**SMALL, **params}), federation, FULL)
    return MaskKnownPlaintext(), *scene(fitted, federation, taps=taps, colluders=colluders)


@pytest.mark.parametrize("mask", ["permutation", "signed-permutation"])
def test_one_known_update_undoes_a_permutation(federation: Federation, mask: str) -> None:
    attack, view, knowledge, truth = attacked(federation, [2], mask=mask)
    result = evaluate(attack, view, knowledge, truth)
    assert isinstance(result, Score)
    assert result.value > 0.999 and result.beats_chance
    assert abs(result.chance) < 0.2
    guess = attack.run(view, knowledge)
    assert sorted(client for _, _, client in guess.values) == [0, 1, 3, 4, 5]
    coordinates = score(RecoveredCoordinates(), guess, truth)
    assert coordinates.value > 0.95 and coordinates.beats_chance
    assert coordinates.chance < 0.05
    # what is missing are the known client's zeros
    (subject, row), *_ = guess.values.items()
    known = true_row(truth, (*subject[:2], 2))
    true = true_row(truth, subject)
    assert np.isclose(row, true, rtol=1e-4, atol=0)[known != 0].mean() > 0.99


@pytest.mark.parametrize("mask", ["rotation", exhaustive("haar")])
def test_an_orthonormal_map_is_undone_on_the_span_of_known_updates(
    federation: Federation, mask: str
) -> None:
    attack, view, knowledge, truth = attacked(federation, [0, 1, 2], mask=mask)
    cosines = UnmaskedCosine().units(attack.run(view, knowledge), truth)
    subjects = list(attack.run(view, knowledge).values)
    method, step, _ = subjects[0]
    basis, _ = np.linalg.qr(np.stack([true_row(truth, (method, step, k)) for k in range(3)]).T)
    for subject, cosine in zip(subjects, cosines, strict=True):
        row = true_row(truth, subject)
        assert cosine == pytest.approx(
            np.linalg.norm(basis.T @ row) / np.linalg.norm(row), abs=1e-3
        )
    fewer = attacked(federation, [0], mask=mask)
    single = UnmaskedCosine().units(attack.run(*fewer[1:3]), fewer[3])
    assert single[-3:].mean() < cosines.mean()


def test_noise_of_clients_leaves_little_to_known_plaintext(federation: Federation) -> None:
    attack, view, knowledge, truth = attacked(
        federation, [2], mask="permutation", clip=1.0, noise=2.0
    )
    result = evaluate(attack, view, knowledge, truth)
    assert isinstance(result, Score)
    assert result.value < 0.3


@pytest.mark.always
def test_masked_weights_fall_to_the_public_model_and_displacements_do_not(
    federation: Federation,
) -> None:
    shares = {}
    for lr in (0.1, 0.0001):
        protocol = FedAvg(**SMALL, mask="permutation", lr=lr)
        fitted, taps = tapped(protocol, federation, FULL)
        result = score_of(MaskPublicModel(), fitted, federation, taps=taps)
        assert not result.beats_chance and result.value < 0.02
        initial = knowledge_of(fitted).initial
        shares[lr] = _share_of_weights(protocol, federation, initial, taps)
    assert shares[0.0001] > 0.9
    assert shares[0.1] < 0.4


def _share_of_weights(
    protocol: FedAvg, federation: Federation, initial: torch.Tensor, taps: list[Tap]
) -> float:
    """The attack's score if clients sent masked weights, their sums of 30 samples."""

    def weights(client: int, update: torch.Tensor, round: int) -> torch.Tensor:
        return update + 30 * initial

    fitted = with_malicious_updates(protocol, federation, range(6), weights, FULL)
    view, knowledge, truth = scene(fitted, federation, taps=taps)
    shares = []
    for subject, row in MaskPublicModel().run(view, knowledge).values.items():
        true = true_row(truth, subject) + initial.numpy()
        shares.append(np.isclose(row, true, rtol=1e-4, atol=0).mean())
    return float(np.mean(shares))


def test_attacks_on_masks_say_why_they_do_not_apply(federation: Federation) -> None:
    attack, view, knowledge, _ = attacked(federation, [0])
    assert attack.applies(view, knowledge) == "not applicable: updates are not masked"
    assert MaskPublicModel().applies(view, knowledge) == "not applicable: updates are not masked"
    attack, view, knowledge, truth = attacked(federation, [], mask="rotation")
    assert "no client gives" in str(attack.applies(view, knowledge))
    assert "mixes numbers" in str(MaskPublicModel().applies(view, knowledge))
    fitted = FedAvg(**SMALL, mask="permutation", aggregation="secagg").fit(federation, FULL)
    view, knowledge, _ = scene(fitted, federation, colluders=[0])
    for tried in (attack, MaskPublicModel()):
        assert "no single update" in str(tried.applies(view, knowledge))
    with pytest.raises(UsageError, match="repeat the run with"):
        true_row(truth, ("train", 99, 0))


def test_known_rows_undo_a_map_that_this_test_draws() -> None:
    draw = np.random.default_rng(0)
    rows = draw.normal(size=(5, 40))
    rows[0, :10] = 0  # values that one pair cannot tell apart, and two can
    order = draw.permutation(40)
    signs = draw.choice([-1.0, 1.0], 40)
    for flips in (np.ones(40), signs):
        masked = rows[:, order] * flips
        signed = bool((flips < 0).any())
        one = by_rank(rows[:1], masked[:1], masked[2:], signed)
        assert np.allclose(one[:, 10:], rows[2:, 10:])
        assert not np.allclose(one, rows[2:])
        two = by_rank(rows[:2], masked[:2], masked[2:], signed)
        assert np.allclose(two, rows[2:])
    rotation, _ = np.linalg.qr(draw.normal(size=(40, 40)))
    mixed = rows @ rotation
    inside = np.array([[0.5, -2.0, 1.0]]) @ rows[:3]
    assert np.allclose(by_span(rows[:3], mixed[:3], inside @ rotation), inside)
    assert np.allclose(by_span(rows[:3], mixed[:3], mixed[3:]) @ rows[:3].T, rows[3:] @ rows[:3].T)
