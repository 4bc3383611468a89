"""Attacks by clients' models: membership by loss, and which client owned a record."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from securecluster import Federation
from securecluster.attacks import scoring
from securecluster.attacks.client_models import candidate_losses, first_models
from securecluster.attacks.loss_threshold import LossThreshold
from securecluster.attacks.scoring import Score, evaluate
from securecluster.attacks.source_inference import SourceInference
from securecluster.attacks.views import knowledge_of, truth_of, view_of
from securecluster.protocols import CFL, FedAvg, Settings

FULL = Settings(transcript="full", threads=1)
LONG: dict[str, Any] = {"rounds": 1, "epochs": 60, "batch_size": 8, "lr": 0.2, "model": "linear"}


@pytest.fixture(scope="module")
def federation() -> Federation:
    return Federation.simulate("digits", clients=5, samples=20, seed=0)


@pytest.fixture(autouse=True)
def few_resamples(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scoring, "RESAMPLES", 100)
    monkeypatch.setattr(scoring, "SHUFFLES", 50)


def candidates(federation: Federation) -> tuple[Any, Any]:
    """All clients' own records: to each client, the others' are not members."""
    x = np.concatenate([np.asarray(shard.x) for shard in federation.shards])
    y = np.concatenate([np.asarray(shard.y) for shard in federation.shards])
    return x, y


def scored(attack: Any, made: Any, federation: Federation) -> Score | str:
    fitted = made.fit(federation, FULL)
    view = view_of(fitted)
    known = knowledge_of(fitted, samples=candidates(federation))
    return evaluate(attack, view, known, truth_of(fitted, federation, view))


@pytest.mark.parametrize("attack", [LossThreshold(), SourceInference()], ids=["members", "owners"])
def test_models_tell_whose_records_they_learned_and_noisy_ones_do_not(
    attack: Any, federation: Federation
) -> None:
    plain = scored(attack, CFL(**LONG, mask="none"), federation)
    assert isinstance(plain, Score)
    assert plain.beats_chance and plain.value > plain.chance + 0.15
    noisy = scored(attack, CFL(**LONG, mask="none", clip=0.1, noise=10.0), federation)
    assert isinstance(noisy, Score)
    assert not noisy.beats_chance


def test_a_record_is_owned_by_one_of_five(federation: Federation) -> None:
    found = scored(SourceInference(), CFL(**LONG, mask="none"), federation)
    assert isinstance(found, Score)
    assert found.units == 100
    assert found.chance == pytest.approx(1 / 5, abs=0.03)


def test_losses_are_torchs_own(federation: Federation) -> None:
    fitted = CFL(**LONG, mask="none").fit(federation, FULL)
    samples = candidates(federation)
    known = knowledge_of(fitted, samples=samples)
    model = first_models(view_of(fitted), known)[3]
    losses = candidate_losses(model, known)
    outputs = known.network.call(known.parameters(model), torch.as_tensor(samples[0]).to(model))
    log_shares = outputs.log_softmax(-1)[torch.arange(100), torch.as_tensor(samples[1])]
    assert np.allclose(losses, -log_shares.numpy(), atol=1e-5)


def test_masks_and_sums_are_not_applicable(federation: Federation) -> None:
    short = {**LONG, "epochs": 1}
    assert scored(LossThreshold(), CFL(**short, mask="permutation"), federation) == (
        "not applicable: no model can be evaluated under a mask"
    )
    summed = FedAvg(**short, mask="none", aggregation="secagg")
    assert scored(SourceInference(), summed, federation) == (
        "not applicable: no single updates of a first round were observed"
    )
