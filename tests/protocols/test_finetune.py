"""FedAvg with local fine-tuning, against plain torch, and what noise and a price it has."""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from cases import two_clusters
from safetensors.torch import load_file

from securecluster import Federation, LabelSwap
from securecluster.messaging.messages import Call, Rows
from securecluster.parties.deployment import build_network
from securecluster.parties.endpoints import build_client
from securecluster.privacy.dp.accounting import gaussian_epsilon
from securecluster.protocols import FedAvg, FineTune, Settings
from securecluster.protocols.common.client import TUNING_STEP
from securecluster.runtime.run import Run
from securecluster.runtime.transport import InProcess
from securecluster.training.local_trainer import LocalTrainer, LocalTraining

EXACT = Settings(dtype="float64", transcript="full")
WAYS: dict[str, dict[str, Any]] = {
    "local": {"clip": 1.0, "noise": 0.7, "dp_unit": "client"},
    "central": {"clip": 1.0, "noise": 0.7, "dp_unit": "client", "placement": "central"},
    "example": {"clip": 1.0, "noise": 0.7, "dp_unit": "example"},
}
FEATURES, CLASSES, SIZES = 5, 3, (8, 16, 24)


def unequal() -> tuple[dict[str, Any], Federation]:
    draw = np.random.default_rng(0)
    data = {
        f"c{n}": (draw.normal(size=(n, FEATURES)).astype(np.float32), draw.integers(0, CLASSES, n))
        for n in SIZES
    }
    return data, Federation.from_arrays(data, test=data, classes=CLASSES, seed=0)


def module() -> torch.nn.Sequential:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        return torch.nn.Sequential(
            torch.nn.Linear(FEATURES, 7), torch.nn.ReLU(), torch.nn.Linear(7, CLASSES)
        )


def sgd(net: torch.nn.Module, x: Any, y: Any, steps: int) -> torch.nn.Module:
    """Train a copy by steps over all samples."""
    own = copy.deepcopy(net)
    optimizer = torch.optim.SGD(own.parameters(), lr=0.3)
    for _ in range(steps):
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(
            own(torch.as_tensor(x).double()), torch.as_tensor(y)
        ).backward()
        optimizer.step()
    return own


@pytest.mark.parametrize("mask", ["none", "permutation", "rotation"])
def test_it_is_plain_fedavg_and_then_plain_sgd_at_every_client(mask: str) -> None:
    data, federation = unequal()
    params: dict[str, Any] = {"rounds": 5, "epochs": 2, "batch_size": 100, "lr": 0.3, "mask": mask}
    fitted = FineTune(tune_rounds=2, model=module(), **params).fit(federation, EXACT)
    shared = module().double()
    for _ in range(3):
        trained = [sgd(shared, *data[name], steps=2) for name in federation.names]
        weights = np.array(SIZES) / sum(SIZES)
        with torch.no_grad():
            for p, *own in zip(
                shared.parameters(), *(t.parameters() for t in trained), strict=True
            ):
                p.copy_(sum(w * one for w, one in zip(weights, own, strict=True)))
    for name in federation.names:
        expected = sgd(shared, *data[name], steps=4).state_dict()
        torch.testing.assert_close(fitted.model_of(name), expected, rtol=0, atol=1e-9)
    torch.testing.assert_close(fitted.models_[0], dict(shared.state_dict()), rtol=0, atol=1e-9)
    assert list(fitted.labels_) == [0, 0, 0]


@pytest.mark.parametrize("mask", ["none", "permutation"])
def test_without_rounds_of_tuning_it_is_fedavg(mask: str, small: Federation) -> None:
    one = FineTune(rounds=3, tune_rounds=0, mask=mask).fit(small)
    other = FedAvg(rounds=3, mask=mask).fit(small)
    assert torch.equal(one.client_models_.values, other.client_models_.values)
    assert all(torch.equal(value, other.models_[0][name]) for name, value in one.models_[0].items())
    assert one.bytes_ == other.bytes_
    assert one.history_ == other.history_


def test_the_model_of_the_cluster_is_fedavgs_and_is_saved(
    small: Federation, tmp_path: Path
) -> None:
    fitted = FineTune(rounds=5, tune_rounds=2, mask="permutation").fit(small)
    shared = FedAvg(rounds=3, mask="permutation").fit(small).models_[0]
    assert fitted.unshared_labels_ == []
    assert all(torch.equal(value, shared[name]) for name, value in fitted.models_[0].items())
    assert len({tuple(fitted.model_of(i)["3.bias"].tolist()) for i in range(6)}) == 6
    fitted.save(tmp_path)
    assert all(
        torch.equal(load_file(tmp_path / "models.safetensors")[f"cluster0.{name}"], shared[name])
        for name in shared
    )
    again = FineTune.load(tmp_path)
    assert all(torch.equal(value, shared[name]) for name, value in again.models_[0].items())
    assert torch.equal(again.client_models_.values, fitted.client_models_.values)


def test_at_most_all_rounds_but_one_are_for_tuning(small: Federation) -> None:
    fitted = FineTune(rounds=3, tune_rounds=10).fit(small, Settings(transcript="sizes"))
    assert [(e.round, e.method) for e in fitted.transcript_.entries] == [
        (1, "contribute"),
        (2, "receive"),
    ]
    same = FineTune(rounds=3, tune_rounds=2).fit(small)
    assert torch.equal(fitted.client_models_.values, same.client_models_.values)


def test_everyone_tunes_whatever_the_participation(small: Federation) -> None:
    fitted = FineTune(rounds=5, tune_rounds=2, participation=0.3).fit(
        small, Settings(transcript="sizes")
    )
    assert [len(e.to) for e in fitted.transcript_.entries if e.method == "contribute"] == [2, 2, 2]
    assert len({tuple(row.tolist()) for row in fitted.client_models_.values}) == 6


@pytest.mark.parametrize("mask", ["none", "permutation"])
def test_who_missed_rounds_tunes_the_model_of_all(mask: str, small: Federation) -> None:
    made = FineTune(rounds=5, tune_rounds=2, mask=mask)
    endpoint = build_client(made, small, EXACT)

    def lost(call: Call) -> set[int]:
        return {2} if call.round in (2, 3) else set()

    net = build_network(made, InProcess(endpoint.answer, lost), made.config(small, "float64"))
    state = made.run_server(net, Run(begin=lambda number: setattr(net, "round", number)))
    client: Any = endpoint.client
    models = made.observer.final_models(client, state).values
    torch.testing.assert_close(models[2], models[0], rtol=0, atol=1e-12)
    kept = made.observer.kept_models(client, state).values
    plan = made.training.usual(made, {"lr": 0.2})
    own = models[2]
    for number in range(2):
        start = Rows(own[None], (0,))
        own = own + client.cohort.train(start, [2], plan, TUNING_STEP + number)[0]
    torch.testing.assert_close(kept[2], own, rtol=0, atol=1e-12)


@pytest.mark.few(2)
@pytest.mark.parametrize("way", WAYS)
def test_tuning_has_no_noise_and_no_price(
    way: str, small: Federation, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its price is that of FedAvg alone, and what clients train for themselves is trained without
    noise.
    """
    plans: list[LocalTraining] = []
    train = LocalTrainer.train

    def spied(
        self: LocalTrainer,
        start: Rows,
        who: Sequence[int],
        plan: LocalTraining,
        *rest: Any,
        **more: Any,
    ) -> torch.Tensor:
        plans.append(plan)
        return train(self, start, who, plan, *rest, **more)

    monkeypatch.setattr(LocalTrainer, "train", spied)
    params: dict[str, Any] = {"mask": "permutation", "epochs": 1, **WAYS[way]}
    fitted = FineTune(rounds=5, tune_rounds=2, **params).fit(small, EXACT)
    assert {e.method for e in fitted.ledger_.events} == {"contribute"}
    assert [plan.private for plan in plans[-2:]] == [False, False]
    assert all(plan.private == (way == "example") for plan in plans[:-2])
    plain = FedAvg(rounds=3, **params).fit(small, EXACT)
    assert fitted.ledger_.epsilon == plain.ledger_.epsilon < math.inf
    if way != "example":
        assert fitted.ledger_.epsilon == pytest.approx(gaussian_epsilon(math.sqrt(3) / 0.7, 1e-5))
    shared = fitted.models_[0]
    assert shared is not None
    assert all(shared[name].shape == value.shape for name, value in plain.models_[0].items())
    assert not torch.equal(shared["3.weight"], fitted.model_of(0)["3.weight"])
    assert fitted.kept_.learned.local == []


def test_a_target_is_met_by_the_rounds_that_are_shared(small: Federation) -> None:
    params: dict[str, Any] = {"clip": 1.0, "target_epsilon": 8.0, "epochs": 1}
    tuned = FineTune(rounds=5, tune_rounds=2, **params).fit(small)
    plain = FedAvg(rounds=3, **params).fit(small)
    assert tuned.kept_.learned.config["noise"] == plain.kept_.learned.config["noise"]
    assert 7.9 < tuned.ledger_.epsilon <= 8.0


def test_newcomers_get_the_shared_model_and_release_nothing(small: Federation) -> None:
    fitted = FineTune(rounds=3, tune_rounds=1, mask="permutation", **WAYS["example"]).fit(small)
    before = fitted.ledger_.epsilon
    later = two_clusters(9, 40).select([6, 7, 8])
    assert list(fitted.join(later)) == [0, 0, 0]
    assert fitted.joined_.ledger.events == []
    assert fitted.ledger_.epsilon == before


def test_tuning_helps_where_clients_differ() -> None:
    federation = Federation.simulate("digits", scenario=LabelSwap(clusters=4), clients=12, seed=0)
    tuned = FineTune(rounds=15).fit(federation).accuracy_
    assert np.mean(tuned) > 0.1 + np.mean(FedAvg(rounds=15).fit(federation).accuracy_)
