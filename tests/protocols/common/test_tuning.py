"""Rounds in which every client tunes its final model alone: what they give, cost and show."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import cases
import numpy as np
import pytest
import torch

from securecluster import Federation, at
from securecluster.errors import UsageError
from securecluster.parties.endpoints import build_client
from securecluster.protocols import CFL, FLHC, MRMTL, FedAvg, Local, Settings
from securecluster.protocols.common.client import TrainingClient
from securecluster.statements.result_json import Subject, result_of

EXACT = Settings(dtype="float64", transcript="full")
# batches of all samples, so that a round of tuning is one step of gradient descent
FULL: dict[str, Any] = {"rounds": 4, "epochs": 1, "batch_size": 1000, "lr": 0.1, "model": "linear"}
TUNE_ROUNDS = 2
CLUSTERED = [
    protocol
    for protocol in cases.EVERY_PROTOCOL
    if protocol.__name__ not in ("FineTune", "NSIM", "MRMTL")
]
PRIVATE: dict[str, Any] = {"clip": 1.0, "noise": 0.7, "dp_unit": "client"}


def fitted(protocol: Any, federation: Federation, **params: Any) -> Any:
    made = protocol(**{**FULL, **cases.SMALL[protocol], **params})
    return made.fit(federation, EXACT)


def descended(state: dict[str, Any], x: Any, y: Any, steps: int) -> list[torch.Tensor]:
    """Return weight and bias of a linear model after steps of gradient descent, by numpy alone."""
    weight, bias = (value.double().numpy().copy() for value in state.values())
    samples = x.reshape(len(x), -1).astype(np.float64)
    for _ in range(steps):
        logits = samples @ weight.T + bias
        odds = np.exp(logits - logits.max(1, keepdims=True))
        error = odds / odds.sum(1, keepdims=True)
        error[np.arange(len(y)), y] -= 1
        weight -= 0.1 * error.T @ samples / len(y)
        bias -= 0.1 * error.mean(0)
    return [torch.as_tensor(weight), torch.as_tensor(bias)]


@pytest.mark.few(3)
@pytest.mark.parametrize("protocol", CLUSTERED, ids=lambda protocol: protocol.__name__)
def test_every_client_ends_with_its_own_descent_from_its_clusters_model(
    protocol: Any, small: Federation
) -> None:
    plain = fitted(protocol, small)
    tuned = fitted(protocol, small, tune_rounds=TUNE_ROUNDS)
    for i, shard in enumerate(small.shards):
        expected = descended(plain.model_of(at(i)), shard.x, shard.y, TUNE_ROUNDS)
        found = list(tuned.model_of(at(i)).values())
        for own, known in zip(found, expected, strict=True):
            torch.testing.assert_close(own, known, rtol=0, atol=1e-10)
    assert tuned.labels_.tolist() == plain.labels_.tolist()


@pytest.mark.few(3)
@pytest.mark.parametrize("protocol", CLUSTERED, ids=lambda protocol: protocol.__name__)
def test_nobody_is_told_and_nothing_is_paid(protocol: Any, small: Federation) -> None:
    plain = fitted(protocol, small)
    tuned = fitted(protocol, small, tune_rounds=TUNE_ROUNDS)
    calls = [(e.method, e.to) for e in plain.transcript_.entries]
    assert [(e.method, e.to) for e in tuned.transcript_.entries] == calls
    assert tuned.bytes_ == plain.bytes_
    if protocol is Local:
        return
    # other configurations draw other noise
    plain = fitted(protocol, small, **PRIVATE)
    tuned = fitted(protocol, small, tune_rounds=TUNE_ROUNDS, **PRIVATE)
    assert tuned.ledger_.epsilon == plain.ledger_.epsilon
    released = {event.method for event in plain.ledger_.events}
    assert {event.method for event in tuned.ledger_.events} == released


def test_a_run_without_tuning_is_what_it_was(small: Federation) -> None:
    plain = fitted(FedAvg, small)
    zero = fitted(FedAvg, small, tune_rounds=0)
    assert "tune_rounds" not in zero.kept_.learned.config
    assert zero.kept_.learned.config == plain.kept_.learned.config
    assert torch.equal(zero.client_models_.values, plain.client_models_.values)


def test_clusters_keep_their_models_and_clients_have_their_own(
    small: Federation, tmp_path: Path
) -> None:
    plain = fitted(CFL, small)
    tuned = fitted(CFL, small, tune_rounds=TUNE_ROUNDS)
    for before, after in zip(plain.models_, tuned.models_, strict=True):
        assert all(torch.equal(before[name], after[name]) for name in before)
    x = small.shards[0].x.astype(np.float64)
    shared = tuned.module_of(cluster=0)(torch.as_tensor(x))
    own = tuned.module_of(at(0))(torch.as_tensor(x))
    assert not torch.equal(shared, own)
    assert tuned.predict_samples(at(0), x).tolist() == own.argmax(1).tolist()
    shard = small.shards[0]
    assert tuned.score(at(0), shard.x_test, shard.y_test) == pytest.approx(tuned.scores_[0])
    tuned.export(tmp_path / "out", clients=[at(0)])
    content = json.loads((tmp_path / "out" / "clusters.json").read_text())
    assert len(content["personal"]) == len(small) and list(content["own"]) == [small.names[0]]
    tuned.save(tmp_path / "saved")
    again = CFL.load(tmp_path / "saved")
    assert torch.equal(again.client_models_.values, tuned.client_models_.values)
    kept = tuned.models_[0]
    assert all(torch.equal(value, kept[name]) for name, value in again.models_[0].items())


def test_the_result_says_that_tuned_models_are_kept_at_the_client(small: Federation) -> None:
    tuned = fitted(CFL, small, tune_rounds=TUNE_ROUNDS)
    said = str(result_of(Subject.of(small), tuned.result_))
    assert "kept at the client" in said and "(2 rounds, without noise)" in said
    plain = fitted(CFL, small).result_
    assert "kept at the client" not in str(result_of(Subject.of(small), plain))


def test_a_lone_client_shares_no_model_under_noise(small: Federation) -> None:
    apart = {"threshold": 0.0, **PRIVATE}
    tuned = fitted(FLHC, small, tune_rounds=TUNE_ROUNDS, **apart)
    sizes = np.bincount(tuned.labels_)
    alone = np.flatnonzero(sizes == 1).tolist()
    assert tuned.unshared_labels_ == alone and alone
    assert [model is None for model in tuned.models_] == (sizes == 1).tolist()


def test_a_personal_model_is_tuned_and_the_mean_stays(small: Federation) -> None:
    plain, tuned = fitted(MRMTL, small), fitted(MRMTL, small, tune_rounds=TUNE_ROUNDS)
    mean = plain.models_[0]
    assert all(torch.equal(value, mean[name]) for name, value in tuned.models_[0].items())
    assert not torch.equal(plain.client_models_.values, tuned.client_models_.values)


def test_an_update_that_is_not_finite_is_left_out(
    small: Federation, monkeypatch: pytest.MonkeyPatch
) -> None:
    client: TrainingClient = build_client(FedAvg(**FULL), small, EXACT).client
    before = client.models.values.clone()
    train = client.cohort.train

    def diverging(*arguments: Any, **options: Any) -> torch.Tensor:
        update = train(*arguments, **options)
        update[0] = float("nan")
        return update

    monkeypatch.setattr(client.cohort, "train", diverging)
    after = client.tuned(client.models, 2).values
    assert torch.equal(after[0], before[0])
    assert not torch.equal(after[1], before[1]) and bool(after.isfinite().all())


def test_tuning_changes_no_state_of_clients(small: Federation) -> None:
    momentum = {"momentum": 0.9, "keep_momentum": True}
    endpoint = build_client(FedAvg(**FULL, **momentum), small, EXACT)
    client: TrainingClient = endpoint.client
    memory = {name: value.clone() for name, value in client.checked_memory().items()}
    first = client.tuned(client.models, 2).values
    second = client.tuned(client.models, 2).values
    assert torch.equal(first, second)
    assert all(torch.equal(memory[name], now) for name, now in client.checked_memory().items())


@pytest.mark.parametrize("wrong", [-1, 1.5, "2", None])
def test_rounds_of_tuning_are_a_whole_number(wrong: Any, small: Federation) -> None:
    with pytest.raises(UsageError, match="tune_rounds"):
        CFL(tune_rounds=wrong).fit(small)
