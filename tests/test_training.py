"""Batched training against a plain PyTorch loop, client by client."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import nn

from securecluster import Federation, models
from securecluster.cohort import Cohort, LocalTraining, check_training
from securecluster.errors import UsageError
from securecluster.messages import Rows
from securecluster.models import FlatModel
from securecluster.randomness import Randomness

CPU = torch.device("cpu")
SIZES = (3, 10, 11, 25, 1)  # below the batch, equal to it, one over it, several batches, one sample


def federation() -> Federation:
    rng = np.random.default_rng(0)
    arrays = {f"c{n}": (rng.normal(size=(n, 1, 4, 4)), rng.integers(0, 3, n)) for n in SIZES}
    held = {name: (x[:1], y[:1]) for name, (x, y) in arrays.items()}
    return Federation.from_arrays(arrays, test=held, seed=5)


def convolution(shape: tuple[int, ...], classes: int) -> nn.Module:
    return nn.Sequential(nn.Conv2d(1, 3, 3), nn.Tanh(), nn.Flatten(), nn.Linear(12, classes))


def cohort(model: str, clients: list[int] | None = None) -> Cohort:
    fed = federation()
    flat = models.build(model, fed.shape, 3, Randomness(5))
    return Cohort(fed, flat, Randomness(5), CPU, torch.float64, clients)


def plain_loop(batched: Cohort, client: int, start: torch.Tensor, plan: LocalTraining, step: int) -> torch.Tensor:
    module = batched.model.module.double()
    nn.utils.vector_to_parameters(start.clone(), module.parameters())
    optimizer = (
        torch.optim.Adam(module.parameters(), plan.lr)
        if plan.optimizer == "adam"
        else torch.optim.SGD(module.parameters(), plan.lr, momentum=plan.momentum)
    )
    for batch in batched._batches(client, plan, step):
        optimizer.zero_grad()
        nn.functional.cross_entropy(module(batched._x[batch]), batched._y[batch]).backward()
        optimizer.step()
    return nn.utils.parameters_to_vector(module.parameters()).detach() - start


PLANS = {
    "sgd": LocalTraining(0.1, 2, 10),
    "momentum": LocalTraining(0.1, 3, 10, momentum=0.9),
    "adam": LocalTraining(0.01, 3, 10, optimizer="adam"),
    "steps": LocalTraining(0.1, 1, 10, momentum=0.5, steps=7),
    "adam steps": LocalTraining(0.01, 1, 4, optimizer="adam", steps=5),
}


@pytest.mark.parametrize("model", ["mlp", "linear", "convolution"])
@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
def test_batched_training_equals_the_plain_loop(model: str, plan: LocalTraining, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(models.MODELS, "convolution", convolution)
    batched = cohort(model)
    starts = batched.start + 0.01 * torch.arange(len(SIZES), dtype=torch.float64)[:, None]
    updates = batched.train(Rows(starts), range(len(SIZES)), plan, step=3)
    for client, update in enumerate(updates):
        torch.testing.assert_close(update, plain_loop(batched, client, starts[client], plan, 3), rtol=0, atol=1e-12)


def test_each_epoch_visits_every_sample_once_in_a_new_order() -> None:
    batched = cohort("linear")
    batches = list(batched._batches(3, LocalTraining(0.1, 2, 10), step=1))
    assert [len(b) for b in batches] == [10, 10, 5, 10, 10, 5]
    first, second = np.concatenate(batches[:3]), np.concatenate(batches[3:])
    assert sorted(first) == sorted(second) == list(range(24, 49))
    assert list(first) != list(second)


def test_steps_run_on_into_further_epochs() -> None:
    batched = cohort("linear")
    assert [len(b) for b in batched._batches(0, LocalTraining(0.1, 1, 2, steps=5), 1)] == [2, 1, 2, 1, 2]


@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
def test_a_client_is_a_batch_of_one(plan: LocalTraining) -> None:
    together = cohort("mlp").train(Rows(cohort("mlp").start[None], (0,) * 5), range(5), plan, 2)
    for client in range(5):
        alone = cohort("mlp", [client])
        torch.testing.assert_close(alone.train(Rows(alone.start[None], (0,)), [0], plan, 2)[0], together[client], rtol=0, atol=1e-13)


def test_who_else_trains_and_in_which_order_and_chunk_does_not_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    batched, plan = cohort("mlp"), PLANS["momentum"]
    shared: Callable[[int], Rows] = lambda n: Rows(batched.start[None], (0,) * n)  # noqa: E731
    whole = batched.train(shared(5), range(5), plan, 2)
    some = batched.train(shared(3), [4, 0, 3], plan, 2)
    torch.testing.assert_close(some, whole[[4, 0, 3]], rtol=0, atol=1e-13)
    monkeypatch.setattr(FlatModel, "dimension", property(lambda self: 1 << 21))  # two clients a chunk
    torch.testing.assert_close(batched.train(shared(5), range(5), plan, 2), whole, rtol=0, atol=1e-13)


def test_another_step_draws_other_batches() -> None:
    batched, plan = cohort("mlp"), PLANS["sgd"]
    one, two, again = (batched.train(Rows(batched.start[None], (0,) * 5), range(5), plan, step) for step in (1, 2, 1))
    assert torch.equal(one, again)
    assert not torch.allclose(one, two)


def test_the_dense_path_equals_the_general_one() -> None:
    fed = federation()
    flat = models.build("mlp", fed.shape, 3, Randomness(1))
    rows, x = torch.randn(4, flat.dimension, dtype=torch.float64), torch.randn(4, 6, 1, 4, 4, dtype=torch.float64)
    general = torch.stack([torch.func.functional_call(flat.module, flat.views(r), (b,)) for r, b in zip(rows, x, strict=True)])
    torch.testing.assert_close(flat.stacked(rows, x), general)


def test_accuracy_is_each_clients_own() -> None:
    batched = cohort("linear")
    table = torch.stack([batched.start, -batched.start])
    found = batched.accuracy(Rows(table, (0, 1, 0, 1, 0)))
    for k, shard in enumerate(federation().shards):
        torch.as_tensor(shard.x_test).double()
        logits = torch.func.functional_call(
            batched.model.module, batched.model.views(table[k % 2]), (torch.as_tensor(shard.x_test).double(),)
        )
        assert found[k] == (logits.argmax(1).numpy() == shard.y_test).mean()


def test_batch_norm_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(
        models.MODELS, "normed", lambda shape, classes: nn.Sequential(nn.Flatten(), nn.BatchNorm1d(16), nn.Linear(16, classes))
    )
    with pytest.raises(UsageError, match="group norm"):
        models.build("normed", (1, 4, 4), 3, Randomness(0))


def test_initial_weights_follow_the_seed_and_leave_the_global_generator_alone() -> None:
    before = torch.get_rng_state()
    one, two, other = (models.build("mlp", (4,), 3, Randomness(seed)).initial() for seed in (0, 0, 1))
    assert torch.equal(one, two)
    assert not torch.equal(one, other)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("plan", [LocalTraining(0, 1, 1), LocalTraining(1, 0, 1), LocalTraining(1, 1, 0), LocalTraining(1, 1, 1, steps=0)])
def test_plans_that_cannot_train_are_refused(plan: LocalTraining) -> None:
    with pytest.raises(UsageError):
        check_training(plan)
