"""Attacks by clients' models: membership by loss, and which client owned a record."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from attacked import FULL, digits, result_of, samples_of, score_of

from securecluster import Federation
from securecluster.attacks.client_models import candidate_losses, first_models
from securecluster.attacks.loss_threshold import LossThreshold
from securecluster.attacks.scoring import Score
from securecluster.attacks.source_inference import SourceInference
from securecluster.attacks.views import knowledge_of, view_of
from securecluster.protocols import CFL, FedAvg

RESAMPLES = (100, 50)

LONG: dict[str, Any] = {"rounds": 1, "epochs": 60, "batch_size": 8, "lr": 0.2, "model": "linear"}


@pytest.fixture(scope="module")
def federation() -> Federation:
    return digits(clients=5, samples=20)


def scored(attack: Any, made: Any, federation: Federation) -> Score:
    # all clients' own records: to each client, the others' are not members
    return score_of(attack, made.fit(federation, FULL), federation, samples_of(federation))


@pytest.mark.parametrize("attack", [LossThreshold(), SourceInference()], ids=["members", "owners"])
def test_models_tell_whose_records_they_learned_and_noisy_ones_do_not(
    attack: Any, federation: Federation
) -> None:
    plain = scored(attack, CFL(**LONG, mask="none"), federation)
    assert plain.beats_chance and plain.value > plain.chance + 0.15
    assert not scored(
        attack, CFL(**LONG, mask="none", clip=0.1, noise=10.0), federation
    ).beats_chance


def test_a_record_is_owned_by_one_of_five(federation: Federation) -> None:
    found = scored(SourceInference(), CFL(**LONG, mask="none"), federation)
    assert found.units == 100
    assert found.chance == pytest.approx(1 / 5, abs=0.03)


def test_losses_are_torchs_own(federation: Federation) -> None:
    fitted = CFL(**LONG, mask="none").fit(federation, FULL)
    samples = samples_of(federation)
    known = knowledge_of(fitted, samples=samples)
    model = first_models(view_of(fitted), known)[3]
    losses = candidate_losses(model, known)
    outputs = known.network.call(known.parameters(model), torch.as_tensor(samples[0]).to(model))
    log_shares = outputs.log_softmax(-1)[torch.arange(100), torch.as_tensor(samples[1])]
    assert np.allclose(losses, -log_shares.numpy(), atol=1e-5)


def test_masks_and_sums_are_not_applicable(federation: Federation) -> None:
    short: dict[str, Any] = {**LONG, "epochs": 1}
    masked = CFL(**short, mask="permutation")
    summed = FedAvg(**short, mask="none", aggregation="secagg")
    for attack, made, reason in (
        (LossThreshold(), masked, "no model can be evaluated under a mask"),
        (SourceInference(), summed, "no single updates of a first round were observed"),
    ):
        found = result_of(attack, made.fit(federation, FULL), federation, samples_of(federation))
        assert found == f"not applicable: {reason}"
