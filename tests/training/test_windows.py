"""Windows of deferred steps against a plain loop of `torch.optim.SGD`, in float64."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from securecluster import Federation
from securecluster.core.randomness import Randomness
from securecluster.messaging.messages import Rows
from securecluster.models import deferred_steps, validation
from securecluster.training import local_trainer
from securecluster.training.local_trainer import LocalTrainer, LocalTraining

SIZES = (4, 17, 30, 9, 1)
EVERYONE = range(len(SIZES))
# 40 outputs: 20 rows in a window, so 6 steps of 3
PLAN = LocalTraining(lr=0.3, epochs=2, batch_size=3)
MODELS: dict[str, Callable[[], nn.Module]] = {
    "mlp": lambda: nn.Sequential(nn.Flatten(), nn.Linear(64, 40), nn.ReLU(), nn.Linear(40, 3)),
    "no bias": lambda: nn.Sequential(
        nn.Flatten(), nn.Linear(64, 40, bias=False), nn.ReLU(), nn.Linear(40, 3)
    ),
    "relu first, three layers": lambda: nn.Sequential(
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(64, 40),
        nn.ReLU(),
        nn.Linear(40, 20),
        nn.ReLU(),
        nn.Linear(20, 3),
    ),
    "convolutions": lambda: nn.Sequential(
        nn.ReLU(),
        nn.Conv2d(1, 4, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(4, 3, 3, padding=1, bias=False),
        nn.Flatten(),
        nn.Linear(48, 40),
        nn.ReLU(),
        nn.Linear(40, 3),
    ),
}


@pytest.fixture(autouse=True)
def windows_of_small_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deferred_steps, "SMALLEST", 1)
    monkeypatch.setattr(local_trainer, "CONVOLUTION_CHUNK", len(SIZES))


@pytest.fixture
def windows(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Rows of each window, as they are trained."""
    rows: list[int] = []
    inner = deferred_steps.DeferredSteps.finish

    def finish(window: deferred_steps.DeferredSteps) -> None:
        rows.append(window._x.shape[1])
        inner(window)

    monkeypatch.setattr(deferred_steps.DeferredSteps, "finish", finish)
    return rows


def federation() -> Federation:
    rng = np.random.default_rng(0)
    clients = {}
    for k, size in enumerate(SIZES):
        clients[f"c{k}"] = (rng.normal(size=(size, 1, 8, 8)), rng.integers(0, 3, size))
    return Federation.from_arrays(clients, test=dict.fromkeys(clients, ([], [])), seed=5)


def trainer(model: str) -> LocalTrainer:
    torch.manual_seed(0)
    fed = federation()
    flat = validation.build(MODELS[model](), fed.shape, 3, Randomness(5))
    return LocalTrainer(fed, flat, Randomness(5), torch.device("cpu"), torch.float64)


def plain_loop(
    batched: LocalTrainer, client: int, start: torch.Tensor, plan: LocalTraining
) -> torch.Tensor:
    """Where torch.optim takes one client."""
    module = copy.deepcopy(batched.model.module).double()
    nn.utils.vector_to_parameters(start.clone(), module.parameters())
    optimizer = torch.optim.SGD(module.parameters(), lr=plan.lr, momentum=plan.momentum)
    for batch in batched.batches(client, plan, 1):
        optimizer.zero_grad()
        nn.functional.cross_entropy(module(batched._x[batch]), batched._y[batch]).backward()
        optimizer.step()
    return nn.utils.parameters_to_vector(module.parameters()).detach()


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("apart", [0.0, 0.01])
def test_windows_make_the_steps_of_a_plain_loop(
    model: str, apart: float, windows: list[int]
) -> None:
    batched = trainer(model)
    offsets = apart * torch.arange(len(SIZES), dtype=torch.float64)[:, None]
    starts = batched.start + offsets
    models = Rows(starts)
    if not apart:
        models = Rows(batched.start[None], (0,) * len(SIZES))
    updates = batched.train(models, EVERYONE, PLAN, 1)
    for k in EVERYONE:
        expected = plain_loop(batched, k, starts[k], PLAN) - starts[k]
        torch.testing.assert_close(updates[k], expected, rtol=0, atol=1e-12)
        assert expected.abs().max() > 1e-3
    if model == "convolutions" and apart:
        # each client by itself, since it starts from weights of its own: 20, 12, 6, 4 and 2 steps
        assert windows == [18, 18, 18, 6, 18, 18, 18, 12, 2]
    else:
        # 20 steps of the largest client, 6 in a window, and two left over
        assert windows == [18, 18, 18, 6]


def test_clients_that_start_from_one_model_train_together(monkeypatch: pytest.MonkeyPatch) -> None:
    windows: list[tuple[int, bool]] = []
    begin = deferred_steps.DeferredSteps.__init__

    def spied(window: deferred_steps.DeferredSteps, *, x: torch.Tensor, **more: Any) -> None:
        windows.append((len(x), more["equal"]))
        begin(window, x=x, **more)

    monkeypatch.setattr(deferred_steps.DeferredSteps, "__init__", spied)
    batched = trainer("convolutions")
    starts = torch.stack([batched.start, batched.start + 0.01])
    models = Rows(starts, (0, 1, 0, 1, 1))
    updates = batched.train(models, EVERYONE, PLAN, 1)
    for k in EVERYONE:
        start = models.row(k)
        expected = plain_loop(batched, k, start, PLAN) - start
        torch.testing.assert_close(updates[k], expected, rtol=0, atol=1e-12)
    # clients of 30 and 4 samples, then of 17, 9 and 1; their weights differ after the first window
    assert windows == [(2, True), (1, False), (1, False), (1, False), (3, True), (1, False)]


def test_more_clients_train_together_where_steps_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    batched = trainer("mlp")
    models = Rows(batched.start[None], (0,) * len(SIZES))
    whole = batched.train(models, EVERYONE, PLAN, 1)
    monkeypatch.setattr(local_trainer, "WINDOWS", 2)
    monkeypatch.setattr(local_trainer, "CPU_CHUNK", batched.model.dimension)
    requests: list[int] = []
    inner = batched.train_chunk

    def counted(request: Any, model: Any) -> None:
        requests.append(len(request.clients))
        inner(request, model)

    monkeypatch.setattr(batched, "train_chunk", counted)
    found = batched.train(models, EVERYONE, PLAN, 1)
    torch.testing.assert_close(found, whole, rtol=0, atol=1e-12)
    assert requests == [2, 2, 1]
    requests.clear()
    batched.train(models, EVERYONE, replace(PLAN, momentum=0.9), 1)
    assert requests == [1] * len(SIZES)


def test_a_client_trains_in_windows_as_it_does_alone(windows: list[int]) -> None:
    batched = trainer("mlp")
    models = Rows(batched.start[None], (0,) * len(SIZES))
    together = batched.train(models, EVERYONE, PLAN, 1)
    for k in EVERYONE:
        alone = batched.train(Rows(batched.start[None]), [k], PLAN, 1)
        torch.testing.assert_close(alone[0], together[k], rtol=0, atol=1e-12)
    assert windows


def test_in_a_window_one_clients_overflow_stays_its_own(windows: list[int]) -> None:
    batched = trainer("mlp")
    models = Rows(batched.start[None], (0,) * len(SIZES))
    whole = batched.train(models, EVERYONE, PLAN, 1)
    # the first row of the table of all samples, which padding must not point to
    batched._x[0] = torch.inf
    found = batched.train(models, EVERYONE, PLAN, 1)
    assert not found[0].isfinite().all()
    assert torch.equal(found[1:], whole[1:])
    assert windows


@pytest.mark.parametrize(
    "plan",
    [
        LocalTraining(lr=0.3, epochs=2, batch_size=3, momentum=0.9),
        LocalTraining(lr=0.3, epochs=2, batch_size=3, optimizer="adam"),
        # 20 rows are 3 such steps
        LocalTraining(lr=0.3, epochs=2, batch_size=6),
    ],
    ids=["momentum", "adam", "large batches"],
)
def test_other_steps_do_not_wait(plan: LocalTraining, windows: list[int]) -> None:
    batched = trainer("mlp")
    batched.train(Rows(batched.start[None], (0,) * len(SIZES)), EVERYONE, plan, 1)
    assert not windows


def test_small_layers_do_not_wait(monkeypatch: pytest.MonkeyPatch, windows: list[int]) -> None:
    monkeypatch.setattr(deferred_steps, "SMALLEST", 64 * 40 + 1)
    batched = trainer("mlp")
    batched.train(Rows(batched.start[None], (0,) * len(SIZES)), EVERYONE, PLAN, 1)
    assert not windows
