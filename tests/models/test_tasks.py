"""Regression, several labels and binary classes, beside torch's own losses and steps."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from scipy.optimize import minimize
from scipy.special import huber
from sklearn.metrics import hamming_loss, log_loss, mean_absolute_error
from torch import nn

from securecluster import Federation
from securecluster.core.randomness import Randomness
from securecluster.data import Shard
from securecluster.errors import UsageError
from securecluster.messaging.messages import Rows
from securecluster.models.flat_model import FlatModel
from securecluster.models.objectives import (
    TASKS,
    Binary,
    MultiLabel,
    Objective,
    Regression,
    objective,
    task_name,
    task_of,
)
from securecluster.models.validation import build, output_doubts
from securecluster.training.chance_level import at_chance
from securecluster.training.local_trainer import LocalTrainer, LocalTraining

functional: Any = nn.functional
# torch's loss of each task, and the number of its targets
LOSSES: dict[str, tuple[Objective, Callable[..., torch.Tensor], int]] = {
    "squared": (Regression(), functional.mse_loss, 1),
    "two targets": (Regression(), functional.mse_loss, 2),
    "absolute": (Regression("absolute"), functional.l1_loss, 2),
    "huber": (Regression("huber", 0.4), partial(functional.huber_loss, delta=0.4), 2),
    "multilabel": (MultiLabel(), functional.binary_cross_entropy_with_logits, 3),
    "binary": (Binary(), functional.binary_cross_entropy_with_logits, 1),
}
N = 12
WIDE = 1  # outputs of a user's module that no target is for


class Keys:
    """A key for each client, of which a step without noise on everyone shows nothing."""

    def seed(self, client: int, purpose: str, step: int, about: bytes = b"") -> bytes:
        return hashlib.sha256(repr((client, purpose, step, about)).encode()).digest()


def targets(kind: Objective, number: int, draw: np.random.Generator, n: int = N) -> Any:
    y = draw.normal(size=(n, number))
    return (y if isinstance(kind, Regression) else y > 0).astype(np.float32)


def federation(kind: Objective, number: int) -> Federation:
    draw, shards = np.random.default_rng(0), []
    for _ in range(2):
        x = draw.normal(size=(2 * N, 5)).astype(np.float32)
        y = targets(kind, number, draw, 2 * N)
        shards.append(Shard(x[:N], y[:N], x[N:], y[N:]))
    return Federation(("a", "b"), tuple(shards), number, 0, objective=kind)


def networks(number: int) -> dict[str, nn.Module]:
    """One that is fused, and one that goes through autograd; both have an output too many."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        outputs = number + WIDE
        fused = nn.Sequential(nn.Flatten(), nn.Linear(5, 4), nn.ReLU(), nn.Linear(4, outputs))
        return {"fused": fused, "general": nn.Sequential(nn.Linear(5, outputs), nn.Softplus())}


def trainer(kind: Objective, number: int, network: str) -> LocalTrainer:
    fed = federation(kind, number)
    flat = build(networks(number)[network], fed.shape, number, Randomness(0), kind)
    assert (flat.stack is not None) == (network == "fused")
    return LocalTrainer(fed, flat, Randomness(0), torch.device("cpu"), torch.float64, secret=Keys())


@pytest.mark.parametrize("network", ["fused", "general"])
@pytest.mark.parametrize("task", LOSSES)
def test_full_batches_train_as_torch_does(task: str, network: str) -> None:
    kind, loss_of, number = LOSSES[task]
    made = trainer(kind, number, network)
    plan = LocalTraining(0.3, 3, N)
    found = made.train(Rows(made.start[None], (0, 0)), range(2), plan, step=0)
    for k, shard in enumerate(federation(kind, number).shards):
        module = networks(number)[network].double()
        x, y = torch.as_tensor(shard.x).double(), torch.as_tensor(shard.y).double()
        optimizer = torch.optim.SGD(module.parameters(), lr=0.3)
        for _ in range(3):
            optimizer.zero_grad()
            loss_of(module(x)[:, :number], y).backward()
            optimizer.step()
        after = nn.utils.parameters_to_vector(module.parameters()).detach()
        torch.testing.assert_close(made.start + found[k], after, rtol=1e-9, atol=1e-12)
        mean = float(loss_of(module(x)[:, :number], y).detach())
        assert made.loss(Rows((made.start + found[k])[None]), [k]) == pytest.approx(mean)


@pytest.mark.parametrize("network", ["fused", "general"])
@pytest.mark.parametrize("task", LOSSES)
def test_dp_sgd_clips_the_gradients_of_torch_func(task: str, network: str) -> None:
    kind, loss_of, number = LOSSES[task]
    made = trainer(kind, number, network)
    shard = federation(kind, number).shards[0]
    x, y = torch.as_tensor(shard.x).double(), torch.as_tensor(shard.y).double()
    module = networks(number)[network].double()
    named = {name: p.detach() for name, p in module.named_parameters()}

    def losses(p: dict[str, torch.Tensor]) -> torch.Tensor:
        outputs = torch.func.functional_call(module, p, (x,))[:, :number]
        return loss_of(outputs, y, reduction="none").mean(1)

    rows = torch.cat([g.flatten(1) for g in torch.func.jacrev(losses)(named).values()], 1)
    norms = rows.norm(dim=1)
    clip = float(norms.median())
    expected = (rows * (clip / norms).clamp(max=1)[:, None]).sum(0)
    plan = LocalTraining(1.0, 1, 1 << 62, clip=clip)
    update = made.train(Rows(made.start[None]), [0], plan, 1)[0]
    torch.testing.assert_close(-N * update, expected, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("task", LOSSES)
def test_scores_are_scikit_learns(task: str) -> None:
    kind, _, number = LOSSES[task]
    draw = np.random.default_rng(1)
    y, outputs = targets(kind, number, draw), draw.normal(size=(N, number + WIDE))
    given = torch.as_tensor(outputs), torch.as_tensor(y).double()
    found = kind.judged(kind.scores(*given).mean(0, keepdim=True).numpy())[0]
    known = outputs[:, :number]
    expected = mean_absolute_error(y, known)
    if isinstance(kind, MultiLabel):
        expected = 1 - hamming_loss(y.astype(int).ravel(), (known > 0).astype(int).ravel())
        shares = kind.predicted(given[0])[:, :number].numpy()
        entropies = [log_loss(y[:, j], shares[:, j]) for j in range(number)]
        assert float(kind.losses(*given).mean()) == pytest.approx(np.mean(entropies))
    assert found == pytest.approx(expected)


def test_bounds_put_scores_in_the_targets_own_unit_and_cut_off_what_is_trained_on() -> None:
    draw = np.random.default_rng(0)
    x, y = draw.normal(size=(40, 3)), 1000 + 300 * draw.normal(size=40)
    kind = Regression(bounds=[(400, 1400)])  # type: ignore[arg-type]
    fed = Federation.from_arrays({"a": (x, y), "b": (x, y)}, objective=kind, seed=0)
    shard = fed.shards[0]
    assert shard.y.min() >= -1 and shard.y.max() == 1
    found, expected = np.r_[shard.y, shard.y_test], (y[:, None] - 900) / 500
    inside = np.sort(expected[np.abs(expected) < 1])
    assert np.sort(found[np.abs(found) < 1]) == pytest.approx(inside, abs=1e-5)
    assert len(inside) < 40 and np.abs(shard.y_test).max() > 1
    outputs = torch.zeros(len(shard.y_test), 1)
    away = kind.scores(outputs, torch.as_tensor(shard.y_test)).mean()
    assert float(away) == pytest.approx(np.abs(500 * shard.y_test).mean(), rel=1e-5)


@pytest.mark.parametrize("task", LOSSES)
def test_chance_is_the_best_answer_without_input(task: str) -> None:
    kind, loss_of, number = LOSSES[task]
    y = targets(kind, number, np.random.default_rng(2), 31)

    def mean(answer: Any) -> float:
        outputs = torch.as_tensor(np.broadcast_to(answer, y.shape).copy()).double()
        return float(loss_of(outputs, torch.as_tensor(y).double()))

    found = minimize(mean, np.zeros(number), method="Nelder-Mead", options={"xatol": 1e-8})
    assert kind.chance_loss(y, number) == pytest.approx(found.fun, rel=1e-4)
    if kind.higher:
        best = [max((y[:, j] == v).mean() for v in (0, 1)) for j in range(number)]
        assert kind.constant_score(y) == pytest.approx(np.mean(best))


@pytest.mark.parametrize("task", LOSSES)
def test_a_model_that_ignores_its_input_is_at_chance(task: str) -> None:
    kind, _, number = LOSSES[task]
    made = trainer(kind, number, "fused")
    models = Rows(torch.zeros_like(made.start)[None], (0, 0))
    found = at_chance(made, models, made.scores(models))
    assert found.clients == [0, 1]


@pytest.mark.parametrize(
    ("kind", "bound"),
    [
        (Regression(bounds=((0, 9),)), 1.0),
        (Regression("absolute", bounds=((0, 9),)), 1.0),
        (Regression("huber", bounds=((0, 9),)), 0.5),
        (Regression("huber", 0.5, bounds=((0, 9),)), float(huber(0.5, 1.0))),
        (Regression(standardised=True), 1.5),
        (Regression("huber", 0.5), 1.5 * float(huber(0.5, 1.0))),
        (MultiLabel(), 1.5 * math.log(2)),
        (Binary(), 1.5 * math.log(2)),
    ],
    ids=repr,
)
def test_released_losses_are_clipped_at_what_the_middle_of_the_scale_loses(
    kind: Objective, bound: float
) -> None:
    assert kind.loss_bound(3) == pytest.approx(bound)
    assert objective(kind.as_json()) == kind and hash(objective(kind.as_json())) == hash(kind)


@pytest.mark.parametrize(
    ("task", "made"),
    [
        ("regression", Regression()),
        ("regression:absolute", Regression("absolute")),
        ("regression:huber", Regression("huber")),
        ("regression:huber:0.25", Regression("huber", 0.25)),
        ("multilabel", MultiLabel()),
        ("binary", Binary()),
        ("auto", None),
        (None, None),
    ],
)
def test_a_task_names_an_objective(task: str | None, made: Objective | None) -> None:
    assert task_of(task) == made
    assert task_of(task_name(made)) == made


@pytest.mark.parametrize(
    ("task", "said"),
    [
        ("regresion", "did you mean 'regression'"),
        ("language", "choose one of " + ", ".join(sorted(TASKS))),
        ("regression:cubic", "choose one of absolute, huber, squared"),
        ("regression:squared:1", "only regression:huber has one more"),
        ("regression:huber:x", "delta"),
        ("regression:huber:-1", "positive"),
        ("binary:2", "only a regression has a loss"),
        (3, "pass Classification"),
    ],
)
def test_what_is_no_task_is_refused(task: Any, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        task_of(task)


@pytest.mark.parametrize(
    ("kind", "y", "said"),
    [
        (Regression(), np.full((4, 1), np.nan), "NaN or infinite"),
        (Regression(), np.zeros(4), "as many for each sample"),
        (Regression(bounds=((0, 1), (0, 1))), np.zeros((4, 1)), "give one for each"),
        (Regression(standardised=True), np.zeros((4, 2)), "give their public bounds"),
        (MultiLabel(), np.full((4, 1), 2.0), "each of several labels is 0 or 1"),
        (Binary(), np.full((4, 1), 2.0), "take the task classification"),
    ],
    ids=repr,
)
def test_targets_that_do_not_suit_the_task_are_refused(kind: Objective, y: Any, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        kind.check("ward", np.zeros((4, 2)), y, y.shape[1] if y.ndim > 1 else 1)


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: Regression(delta=0), "positive"),
        (lambda: Regression(bounds=((1, 0),)), "a low and a high number"),
        (lambda: Regression(bounds=(3, 4)), "a low and a high number"),  # type: ignore[arg-type]
        (lambda: Regression(bounds=((0, 1),), standardised=True), "give one of them"),
    ],
)
def test_what_is_no_regression_is_refused(make: Callable[[], Regression], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        make()


def test_a_sigmoid_of_the_users_own_is_doubted() -> None:
    module = nn.Sequential(nn.Linear(5, 3), nn.Sigmoid())
    (doubt,) = output_doubts(module, (5,), 3, MultiLabel())
    assert "sigmoid" in doubt
    assert output_doubts(nn.Linear(5, 3), (5,), 3, MultiLabel()) == []
    assert FlatModel(module, objective=Regression()).stack is None
