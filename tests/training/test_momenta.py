"""Momentum that lives on between rounds.

The oracle is one torch.optim.SGD for each client's whole run.
"""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from securecluster import Federation
from securecluster.core.randomness import Randomness
from securecluster.errors import PolicyError, UsageError
from securecluster.messaging.messages import Rows
from securecluster.models import architectures, validation
from securecluster.models.optimizers import Momenta
from securecluster.parties.endpoints import build_client
from securecluster.protocols import IFCA, SRFCA, FedAvg, Settings
from securecluster.training.local_trainer import LocalTrainer, LocalTraining, check_training

PLAN = LocalTraining(0.05, 2, 10, momentum=0.9)
KEPT = replace(PLAN, keep_momentum=True)
EXACT = Settings(dtype="float64", transcript="full")
OPTIONS: dict[str, Any] = {"momentum": 0.9, "lr": 0.05, "epochs": 1, "keep_momentum": True}
NETWORKS = {
    "by hand": lambda s, c: nn.Sequential(
        nn.Flatten(), nn.Linear(64, 8), nn.ReLU(), nn.Linear(8, c)
    ),
    "tanh": lambda s, c: nn.Sequential(nn.Flatten(), nn.Linear(64, 7), nn.Tanh(), nn.Linear(7, c)),
    "convolution": lambda s, c: nn.Sequential(
        nn.Conv2d(1, 2, 3), nn.ReLU(), nn.Flatten(), nn.Linear(72, c)
    ),
}


@pytest.fixture(autouse=True)
def more_networks(monkeypatch: pytest.MonkeyPatch) -> None:
    """One stack by hand, one that goes through torch.func, and one that trains client by client."""
    for name, make in NETWORKS.items():
        monkeypatch.setitem(architectures.IMAGES, name, make)


def cohort_of(federation: Federation, model: str) -> LocalTrainer:
    draws = Randomness(5)
    made = validation.build(model, federation.shape, federation.classes, draws)
    return LocalTrainer(federation, made, draws, torch.device("cpu"), torch.float64)


class Theirs:
    """A client in plain torch: its module, its samples, and one optimizer for the whole run."""

    def __init__(self, federation: Federation, cohort: LocalTrainer, client: int) -> None:
        self.module = copy.deepcopy(cohort.model.module).double()
        self.optimizer = torch.optim.SGD(self.module.parameters(), lr=0.05, momentum=0.9)
        shard = federation.shards[client]
        self.x, self.y = torch.as_tensor(shard.x).double(), torch.as_tensor(shard.y)
        self.cohort, self.client = cohort, client

    def update(self, start: torch.Tensor, plan: LocalTraining, step: int) -> torch.Tensor:
        with torch.no_grad():
            nn.utils.vector_to_parameters(start.clone(), self.module.parameters())
        for batch in self.cohort.batches(self.client, plan, step):
            own = batch - self.cohort._offsets[self.client]
            self.optimizer.zero_grad()
            nn.functional.cross_entropy(self.module(self.x[own]), self.y[own]).backward()
            self.optimizer.step()
        return nn.utils.parameters_to_vector(self.module.parameters()).detach() - start


@pytest.mark.parametrize("model", NETWORKS)
def test_calls_go_on_as_one_optimizer_does(model: str, small: Federation) -> None:
    cohort = cohort_of(small, model)
    theirs = [Theirs(small, cohort, i) for i in range(6)]
    start = cohort.start + 0.01 * torch.arange(6, dtype=torch.float64)[:, None]
    for step, who in ((3, range(6)), (4, (5, 1)), (9, range(6))):
        rows = start[list(who)] + 0.001 * step  # what a round brings from elsewhere
        found = cohort.train(Rows(rows), who, KEPT, step)
        expected = [theirs[i].update(row, KEPT, step) for i, row in zip(who, rows, strict=True)]
        torch.testing.assert_close(found, torch.stack(expected), rtol=0, atol=1e-11)
    fresh = cohort_of(small, model).train(Rows(rows), who, PLAN, 9)
    assert float((found - fresh).abs().max()) > 1e-3


@pytest.mark.parametrize("share", [1.0, 0.5])
def test_fedavg_is_that_of_one_optimizer_a_client(share: float, small: Federation) -> None:
    made = FedAvg(rounds=4, model="linear", participation=share, **OPTIONS)
    fitted = made.fit(small, EXACT)
    cohort = build_client(made, small, EXACT).client.cohort
    plan = made.training.usual(made, {"lr": 0.05})
    theirs = [Theirs(small, cohort, i) for i in range(6)]
    weight = torch.tensor([float(len(s.y)) for s in small.shards], dtype=torch.float64)
    theta, asked = cohort.start.clone(), []
    for entry in fitted.transcript_.entries:
        if entry.method == "contribute":
            own = list(entry.to)
            updates = torch.stack([theirs[i].update(theta, plan, entry.step) for i in own])
            theta = theta + (weight[own, None] * updates).sum(0) / weight[own].sum()
            asked.append(entry.to)
    assert (len(set(asked)) > 1) == (share < 1)
    torch.testing.assert_close(fitted.client_models_.row(0), theta, rtol=0, atol=1e-10)
    other = FedAvg(
        rounds=4, model="linear", participation=share, **{**OPTIONS, "keep_momentum": False}
    )
    assert not torch.allclose(
        other.fit(small, EXACT).client_models_.row(0), theta, rtol=0, atol=1e-3
    )


def test_who_is_asked_again_answers_the_same_and_a_late_request_is_refused(
    small: Federation,
) -> None:
    cohort = cohort_of(small, "tanh")
    start = Rows(cohort.start[None], (0, 0))
    first = cohort.train(start, (0, 1), KEPT, 3)
    assert torch.equal(cohort.train(start, (0, 1), KEPT, 3), first)
    second = cohort.train(start, (0, 1), KEPT, 4)
    assert not torch.equal(second, first)
    assert torch.equal(cohort.train(start, (0, 1), KEPT, 4), second)
    before = {name: value.clone() for name, value in cohort.memory().items()}
    with pytest.raises(PolicyError, match="comes too late"):
        cohort.train(Rows(cohort.start[None], (0, 0)), (2, 1), KEPT, 3)
    assert all(torch.equal(value, before[name]) for name, value in cohort.memory().items())


def test_what_is_remembered_is_enough(small: Federation) -> None:
    cohort, other = cohort_of(small, "by hand"), cohort_of(small, "by hand")
    start = Rows(cohort.start[None], (0,) * 6)
    cohort.train(start, range(6), KEPT, 1)
    assert set(cohort.memory()) == {"momentum", "momentum_before", "momentum_calls"}
    other.recall({name: value.clone() for name, value in cohort.memory().items()})
    for step in (1, 2):
        found = [one.train(start, range(6), KEPT, step) for one in (cohort, other)]
        assert torch.equal(found[0], found[1])
    other.recall({})
    assert other.memory() == {}


def test_without_the_option_nothing_is_remembered(small: Federation) -> None:
    cohort = cohort_of(small, "by hand")
    start = Rows(cohort.start[None], (0,) * 6)
    cohort.train(start, range(6), PLAN, 1)
    after = cohort.train(start, range(6), PLAN, 2)
    assert cohort.memory() == {}
    assert torch.equal(cohort_of(small, "by hand").train(start, range(6), PLAN, 2), after)


def test_a_buffer_that_overflows_starts_anew() -> None:
    kept = Momenta(2, torch.zeros(3))
    kept.begin([0, 1], 1)
    kept.end([0, 1], torch.tensor([[1.0, torch.inf, 0.0], [1.0, 2.0, 3.0]]))
    kept.begin([0, 1], 2)
    assert kept.start([1, 0]).tolist() == [[1, 2, 3], [0, 0, 0]]


@pytest.mark.parametrize(
    ("made", "word"),
    [
        (FedAvg(keep_momentum=True), "give a momentum too"),
        (FedAvg(keep_momentum=True, optimizer="adam"), "the momentum of sgd"),
        (FedAvg(**OPTIONS, clip=1.0, noise=1.0, dp_unit="example"), "take dp_unit client"),
        (IFCA(k=2, **OPTIONS), "ifca.*leave keep_momentum out"),
        (SRFCA(**OPTIONS), "srfca.*leave keep_momentum out"),
        (FedAvg(momentum=0.9, keep_momentum=1), "give True or False"),  # type: ignore[arg-type]
    ],
)
def test_where_no_momentum_can_live_on_it_is_refused(
    made: Any, word: str, small: Federation
) -> None:
    with pytest.raises(UsageError, match=word):
        made.fit(small)


def test_updates_with_noise_for_clients_may_keep_their_momentum(small: Federation) -> None:
    made = FedAvg(rounds=2, model="linear", clip=1.0, noise=1.0, **OPTIONS)
    other = FedAvg(rounds=2, model="linear", clip=1.0, noise=1.0)
    prices = [one.fit(small).ledger_.price(1e-5) for one in (made, other)]
    assert prices[0] == prices[1]
    check_training(KEPT)
