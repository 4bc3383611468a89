"""Batched local training against plain PyTorch, client by client."""

from __future__ import annotations

import copy
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, cast

import numpy as np
import pytest
import torch
from torch import nn

from securecluster import Federation
from securecluster.core.devices import choose_device, cpu_threads
from securecluster.core.randomness import Randomness
from securecluster.errors import UsageError
from securecluster.messaging.messages import Rows
from securecluster.models import architectures, validation
from securecluster.models.flat_model import FlatModel
from securecluster.training import evaluation, local_trainer
from securecluster.training.local_trainer import LocalTrainer, LocalTraining, check_training

# below the batch of 10, equal to it, one more, not divisible, a single sample, divisible
SIZES = (3, 10, 11, 25, 1, 20)
EVERYONE = range(len(SIZES))
PLANS = {
    "sgd": LocalTraining(0.3, 2, 10),
    "momentum": LocalTraining(0.1, 3, 10, momentum=0.9),
    "adam": LocalTraining(0.01, 3, 10, optimizer="adam"),
    "steps": LocalTraining(0.1, 1, 10, momentum=0.5, steps=7),
    "adam steps": LocalTraining(0.01, 1, 4, optimizer="adam", steps=5),
}
CPU = torch.device("cpu")


def close(found: torch.Tensor, expected: torch.Tensor, atol: float = 1e-12) -> None:
    torch.testing.assert_close(found, expected, rtol=0, atol=atol)


class Branch(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.sin() if float(x.detach().abs().max()) >= 0 else x


# two that go through torch.func, one with gradients by hand, and one that vmap refuses
OWN: dict[str, Callable[..., nn.Module]] = {
    "tanh": lambda s, c: nn.Sequential(nn.Flatten(), nn.Linear(16, 7), nn.Tanh(), nn.Linear(7, c)),
    "cnn": lambda s, c: nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.GroupNorm(2, 4), nn.ReLU(), nn.Flatten(), nn.Linear(16, c)
    ),
    "stack": lambda s, c: nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(4, c)
    ),
    "branch": lambda s, c: nn.Sequential(nn.Flatten(), nn.Linear(16, 6), Branch(), nn.Linear(6, c)),
}
NETWORKS = ("mlp", "linear", *OWN)


@pytest.fixture(autouse=True)
def more_networks(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, make in OWN.items():
        monkeypatch.setitem(architectures.IMAGES, name, make)


def federation() -> Federation:
    rng = np.random.default_rng(0)
    arrays = {
        f"c{k}": (rng.normal(size=(n, 1, 4, 4)), rng.integers(0, 3, n)) for k, n in enumerate(SIZES)
    }
    held = {
        name: (rng.normal(size=(4 + k, 1, 4, 4)), rng.integers(0, 3, 4 + k))
        for k, name in enumerate(arrays)
    }
    held["c2"] = ([], [])
    return Federation.from_arrays(arrays, test=held, seed=5)


def cohort(model: str = "mlp", clients: list[int] | None = None) -> LocalTrainer:
    return trainer(validation.build(model, (1, 4, 4), 3, Randomness(5)), 5, clients)


def trainer(flat: FlatModel, seed: int, clients: list[int] | None = None) -> LocalTrainer:
    return LocalTrainer(federation(), flat, Randomness(seed), CPU, torch.float64, clients)


def moved(batched: LocalTrainer, plan: LocalTraining, step: int = 1) -> torch.Tensor:
    """What all clients move by, each from a model of its own."""
    return batched.train(Rows(starts(batched)), EVERYONE, plan, step)


def starts(batched: LocalTrainer) -> torch.Tensor:
    """Another model for each client."""
    return batched.start + 0.01 * torch.arange(len(batched.ids), dtype=torch.float64)[:, None]


def module_at(batched: LocalTrainer, flat: torch.Tensor) -> nn.Module:
    module = copy.deepcopy(batched.model.module).double()
    nn.utils.vector_to_parameters(flat.clone(), module.parameters())
    return module


def plain_loop(
    batched: LocalTrainer, client: int, start: torch.Tensor, plan: LocalTraining, steps: list[int]
) -> torch.Tensor:
    """Where torch.optim takes one client, with one optimizer over all `steps`."""
    module = module_at(batched, start)
    adam, sgd = torch.optim.Adam, torch.optim.SGD
    own = list(module.parameters())
    optimizer: torch.optim.Optimizer = sgd(own, lr=plan.lr, momentum=plan.momentum)
    if plan.optimizer == "adam":
        optimizer = adam(own, lr=plan.lr)
    shard, offset = federation().shards[batched.ids[client]], batched._offsets[client]
    x, y = torch.as_tensor(shard.x).double(), torch.as_tensor(shard.y)
    for step in steps:
        for batch in batched.batches(client, plan, step):
            optimizer.zero_grad()
            nn.functional.cross_entropy(module(x[batch - offset]), y[batch - offset]).backward()
            optimizer.step()
    return nn.utils.parameters_to_vector(module.parameters()).detach()


@pytest.mark.few(10)
@pytest.mark.parametrize("model", NETWORKS)
@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
def test_training_equals_a_plain_loop_per_client(model: str, plan: LocalTraining) -> None:
    batched = cohort(model)
    updates = batched.train(Rows(starts(batched)), EVERYONE, plan, 3)
    for k, (start, update) in enumerate(zip(starts(batched), updates, strict=True)):
        close(start + update, plain_loop(batched, k, start, plan, [3]), 1e-10)
        assert update.abs().max() > 1e-3


@pytest.mark.few(3)
@pytest.mark.parametrize("model", ["mlp", "cnn"])
@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
def test_a_client_is_a_batch_of_one(model: str, plan: LocalTraining) -> None:
    batched = cohort(model)
    whole = moved(batched, plan)
    for k in EVERYONE:
        start = Rows(starts(batched)[k : k + 1])
        close(batched.train(start, [k], plan, 1)[0], whole[k])
        close(cohort(model, [k]).train(start, [0], plan, 1)[0], whole[k])


@pytest.mark.parametrize("model", ["mlp", "linear"])
def test_one_clients_overflow_stays_its_own(model: str) -> None:
    batched = cohort(model)
    whole = moved(batched, PLANS["sgd"])
    batched._x[0] = torch.inf
    found = moved(batched, PLANS["sgd"])
    assert not found[0].isfinite().all()
    assert torch.equal(found[1:], whole[1:])


def test_training_does_not_depend_on_the_callers_grad_mode() -> None:
    batched = cohort("tanh")
    whole = moved(batched, PLANS["sgd"])
    with torch.no_grad(), cpu_threads(1):
        close(moved(batched, PLANS["sgd"]), whole)


@pytest.mark.parametrize("who", [[4, 0, 3], [5, 4, 3, 2, 1, 0], [2]])
def test_who_else_trains_and_in_which_order_does_not_matter(who: list[int]) -> None:
    batched, plan = cohort(), PLANS["momentum"]
    whole = moved(batched, plan)
    close(batched.train(Rows(starts(batched)[who]), who, plan, 1), whole[who])


@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
@pytest.mark.parametrize("chunk", [1, 2, 4])
def test_the_chunk_does_not_matter(
    plan: LocalTraining, chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    batched, sizes = cohort(), list[int]()
    table = torch.stack([batched.start, batched.start + 0.1])
    start = Rows(table, (0, 1, 0, 0, 1, 1))
    whole = batched.train(start, EVERYONE, plan, 1)
    monkeypatch.setattr(local_trainer, "CPU_CHUNK", chunk * batched.model.dimension)
    inner = batched.train_chunk

    def counted(request: Any, model: Any) -> None:
        sizes.append(len(request.clients))
        inner(request, model)

    monkeypatch.setattr(batched, "train_chunk", counted)
    close(batched.train(start, EVERYONE, plan, 1), whole)
    assert max(sizes) <= chunk and sum(sizes) == len(SIZES)
    assert len(sizes) >= len(SIZES) // chunk


@pytest.mark.few(3)
@pytest.mark.parametrize("model", NETWORKS)
def test_the_number_of_threads_does_not_matter(model: str) -> None:
    batched, found = cohort(model), []
    for threads in (1, 2, 5):
        with cpu_threads(threads):
            found.append(moved(batched, PLANS["momentum"]))
            assert torch.get_num_threads() == threads
    close(found[1], found[0])
    close(found[2], found[0])


def test_two_threads_repeat_themselves_to_the_bit() -> None:
    batched = cohort("tanh")
    with cpu_threads(2):
        one, two = (moved(batched, PLANS["adam"]) for _ in range(2))
    assert torch.equal(one, two)


def test_a_scale_multiplies_each_update_and_room_is_zero_after_it() -> None:
    batched, scale = cohort(), [1.0, 2.0, -3.0, 0.5, 0.0, 4.0]
    plainly = moved(batched, PLANS["sgd"])
    d = batched.model.dimension
    scaled = batched.train(Rows(starts(batched)), EVERYONE, PLANS["sgd"], 1, d + 3, scale)
    assert torch.equal(scaled[:, :d], plainly * torch.tensor(scale)[:, None])
    assert not scaled[:, d:].any()


def test_an_error_in_a_thread_reaches_the_caller(monkeypatch: pytest.MonkeyPatch) -> None:
    batched = cohort()
    monkeypatch.setattr(local_trainer, "sgd_step", lambda *rest: 1 / 0)
    with cpu_threads(2), pytest.raises(ZeroDivisionError):
        moved(batched, PLANS["sgd"])


def test_after_an_error_the_other_threads_do_not_work_off_the_queue() -> None:
    failed, jobs, done = threading.Event(), deque(range(1000)), list[int]()

    def work(model: Any) -> None:
        if model == "second":
            failed.set()
            raise ZeroDivisionError
        failed.wait()
        while jobs:
            done.append(jobs.popleft())
            time.sleep(0.002)

    with cpu_threads(2), pytest.raises(ZeroDivisionError):
        local_trainer._each_in_a_thread(work, cast(Any, ["first", "second"]), jobs)
    assert len(done) < 1000


def test_after_an_error_the_other_threads_end_with_the_step_they_are_at(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    batched, lock, steps = cohort(), threading.Lock(), list[int]()

    def step(model: Any, params: Any, x: torch.Tensor, *rest: Any) -> None:
        if lock.acquire(blocking=False):  # the first to come
            raise ZeroDivisionError
        steps.append(1)
        time.sleep(0.002)

    monkeypatch.setattr(local_trainer, "sgd_step", step)
    with cpu_threads(2), pytest.raises(ZeroDivisionError):
        batched.train(Rows(starts(batched)), EVERYONE, LocalTraining(0.1, 1, 10, steps=1000), 1)
    assert len(steps) < 900


def dropping(seed: int, clients: list[int] | None = None) -> tuple[LocalTrainer, nn.Module]:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Flatten(), nn.Linear(16, 32), nn.Dropout(0.5), nn.Linear(32, 3))
    flat = validation.build(module, (1, 4, 4), 3, Randomness(seed))
    return trainer(flat, seed, clients), module


def normal(count: int, batched: LocalTrainer) -> torch.Tensor:
    """Random models."""
    draw = torch.Generator().manual_seed(0)
    return torch.randn(count, batched.model.dimension, dtype=torch.float64, generator=draw)


def test_dropout_follows_the_seed_the_client_and_the_step_alone() -> None:
    with torch.random.fork_rng():
        whole = (batched := dropping(5)[0]).train(Rows(starts(batched)), EVERYONE, PLANS["sgd"], 1)
        again = dropping(5)[0].train(Rows(starts(batched)), EVERYONE, PLANS["sgd"], 1)
        alone = dropping(5, [3])[0].train(Rows(starts(batched)[3:4]), [0], PLANS["sgd"], 1)
        off, module = dropping(5)
    close(again, whole, 0)
    close(alone[0], whole[3])
    off.model.dropouts[0].p = 0.0
    assert not torch.allclose(
        off.train(Rows(starts(off)), EVERYONE, PLANS["sgd"], 1), whole, atol=1e-3
    )
    shard = federation().shards[0]
    x, y = torch.as_tensor(shard.x_test).double(), torch.as_tensor(shard.y_test)
    expected = (module.double().eval()(x).argmax(1) == y).double().mean()
    assert off.scores(Rows(off.start[None].expand(len(SIZES), -1)))[0] == expected


@pytest.mark.parametrize("plan", [PLANS["momentum"], PLANS["adam"]], ids=["momentum", "adam"])
def test_momentum_does_not_leak_between_rounds(plan: LocalTraining) -> None:
    batched = cohort()
    start = starts(batched)
    first = start + batched.train(Rows(start), EVERYONE, plan, 1)
    second = first + batched.train(Rows(first), EVERYONE, plan, 2)
    for k in EVERYONE:
        close(second[k], plain_loop(batched, k, first[k], plan, [2]), 1e-10)
        assert not torch.allclose(
            second[k], plain_loop(batched, k, start[k], plan, [1, 2]), rtol=0, atol=1e-6
        )


def test_training_leaves_the_models_it_starts_from_alone() -> None:
    batched = cohort()
    table = batched.start[None].clone()
    batched.train(Rows(table, (0,) * len(SIZES)), EVERYONE, PLANS["adam"], 1)
    assert torch.equal(table[0], cohort().start)


def test_an_epoch_visits_each_own_sample_once_in_an_order_of_its_own() -> None:
    batched, plan = cohort(), LocalTraining(0.1, 2, 10)
    for k, size in enumerate(SIZES):
        batches = list(batched.batches(k, plan, 1))
        own, first = np.concatenate(batches), sum(SIZES[:k])
        assert [len(b) for b in batches] == 2 * (
            [10] * (size // 10) + [size % 10] * (size % 10 > 0)
        )
        assert sorted(own[:size]) == sorted(own[size:]) == list(range(first, first + size))
    orders = [
        tuple(np.concatenate(list(batched.batches(3, LocalTraining(0.1, 1, 10), step))))
        for step in (1, 1, 2)
    ]
    assert orders[0] == orders[1] != orders[2]
    twice = np.concatenate(list(batched.batches(3, plan, 1)))
    assert list(twice[:25]) != list(twice[25:])


def test_steps_cut_and_extend_epochs() -> None:
    batched = cohort()
    two = LocalTraining(0.1, 1, 10, steps=2)
    assert [len(list(batched.batches(k, two, 1))) for k in EVERYONE] == [2] * len(SIZES)
    three = batched.batches(0, replace(two, steps=3), 1)
    epochs = batched.batches(0, LocalTraining(0.1, 3, 10), 1)
    assert np.array_equal(np.concatenate(list(three)), np.concatenate(list(epochs)))


@pytest.mark.parametrize("model", ["mlp", "cnn"])
@pytest.mark.parametrize("index", [None, (0, 1, 0, 0, 1, 2)])
def test_accuracy_is_the_share_of_a_clients_own_test_samples(
    model: str, index: tuple[int, ...] | None
) -> None:
    batched = cohort(model)
    noise = normal(len(SIZES), batched)
    table = noise if index is None else noise[:3]
    found = batched.scores(Rows(table, index))
    assert np.isnan(found[2]) and np.isnan(found).sum() == 1
    for k, shard in enumerate(federation().shards):
        if k != 2:
            module = module_at(batched, table[k if index is None else index[k]])
            with torch.no_grad():
                guess = module(torch.as_tensor(shard.x_test).double()).argmax(1)
            assert found[k] == np.mean(guess.numpy() == shard.y_test)
    assert len(set(found[~np.isnan(found)])) > 1


@pytest.mark.parametrize("model", ["mlp", "cnn"])
@pytest.mark.parametrize("who", [[0, 1, 2, 3, 4, 5], [5, 2, 0], [3]])
@pytest.mark.parametrize("shared", [False, True])
def test_loss_is_the_mean_cross_entropy_of_a_clients_training_samples(
    model: str, who: list[int], shared: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    batched = cohort(model)
    monkeypatch.setattr(evaluation, "EVALUATED", 7)
    noise = normal(len(who), batched)
    flat = Rows(noise[:1], (0,) * len(who)) if shared else Rows(noise)
    for k, found, own in zip(who, batched.loss(flat, who), flat.values, strict=True):
        shard = federation().shards[k]
        with torch.no_grad():
            logits = module_at(batched, own)(torch.as_tensor(shard.x).double()).numpy()
        shifted = logits - logits.max(1, keepdims=True)
        losses = np.log(np.exp(shifted).sum(1)) - shifted[np.arange(len(shard.y)), shard.y]
        assert found == pytest.approx(losses.mean(), abs=1e-12)


def test_dropout_is_off_where_a_loss_is_measured() -> None:
    with torch.random.fork_rng():
        batched, module = dropping(5)
    shard = federation().shards[0]
    logits = module.double().eval()(torch.as_tensor(shard.x).double())
    expected = float(nn.functional.cross_entropy(logits, torch.as_tensor(shard.y)).detach())
    (found,) = batched.loss(Rows(batched.start[None]), [0])
    assert found == pytest.approx(expected, abs=1e-12)


WRONG: dict[str, Sequence[object]] = {
    "lr": (0.0, -1.0, math.inf, math.nan, "0.1"),
    "epochs": (1.5, 0),
    "batch_size": (2.0, 0),
    "steps": ("7", 0),
    "momentum": (None, 1.0, -0.1),
}


@pytest.mark.parametrize(
    ("change", "word"),
    [
        *(({name: value}, name) for name, values in WRONG.items() for value in values),
        ({"optimizer": "adagrad"}, "adagrad"),
        ({"optimizer": "adam", "momentum": 0.9}, "momentum"),
    ],
)
def test_plans_that_cannot_train_are_refused_in_one_sentence(
    change: dict[str, object], word: str
) -> None:
    good: dict[str, object] = {"lr": 0.1, "epochs": 1, "batch_size": 1}
    with pytest.raises(UsageError, match=word) as caught:
        check_training(LocalTraining(**{**good, **change}))  # type: ignore[arg-type]
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
def test_plans_that_can_train_pass(plan: LocalTraining) -> None:
    check_training(plan)


def test_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert choose_device("auto") == choose_device("cpu") == torch.device("cpu")
    for name in ("cuda", "tpu"):
        with pytest.raises(UsageError, match="cpu"):
            choose_device(name)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert choose_device("auto") == choose_device("cuda") == torch.device("cuda")
    assert choose_device("cpu") == torch.device("cpu")


def test_samples_are_not_copied_where_none_are_kept_aside(monkeypatch: pytest.MonkeyPatch) -> None:
    made, given = federation(), list[Any]()

    def of(x: Any, *rest: Any) -> evaluation.Samples:
        given.append(x)
        return evaluation.Samples(*[torch.zeros(0)] * 2, np.zeros(7))

    monkeypatch.setattr(local_trainer.Samples, "of", of)
    flat = validation.build("linear", (1, 4, 4), 3, Randomness(0))
    LocalTrainer(made, flat, Randomness(0), CPU)
    assert all(x is shard.x for x, shard in zip(given[0], made.shards, strict=True))


def test_inputs_are_a_clients_own_training_samples() -> None:
    batched, fed = cohort(), federation()
    for k in EVERYONE:
        assert torch.equal(batched.inputs(k), torch.as_tensor(fed.shards[k].x).double())
    assert torch.equal(cohort(clients=[3]).inputs(0), torch.as_tensor(fed.shards[3].x).double())
