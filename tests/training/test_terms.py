"""Terms of the loss that depend on no sample, and learning rates by rounds, against plain torch."""

from __future__ import annotations

import copy
import hashlib
import warnings
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from securecluster import FedAvg, Federation, FineTune
from securecluster.core.randomness import Randomness
from securecluster.errors import UsageError
from securecluster.messaging.messages import Rows
from securecluster.models import validation
from securecluster.models.foreign import ForeignModel
from securecluster.runtime.settings import Settings
from securecluster.training.config import Schedule
from securecluster.training.local_trainer import (
    LinearTerm,
    LocalTrainer,
    LocalTraining,
    MeanRegularizer,
)

pytestmark = pytest.mark.filterwarnings("ignore::securecluster.SecureClusterWarning")

SIZES = (17, 9)
NETWORKS: dict[str, Any] = {
    "fused": lambda: nn.Sequential(nn.Flatten(), nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 3)),
    "autograd": lambda: nn.Sequential(nn.Flatten(), nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3)),
}
TERMS: dict[str, dict[str, Any]] = {
    "decay": {"weight_decay": 0.3},
    "decay and momentum": {"weight_decay": 0.3, "momentum": 0.8},
    "decay and adam": {"weight_decay": 0.3, "optimizer": "adam"},
    "proximal": {"proximal": 0.7},
    "all, with a clip": {"proximal": 0.7, "weight_decay": 0.2, "clip": 0.3},
}


class Keys:
    """Keys that follow from what is asked for."""

    def seed(self, client: int, purpose: str, step: int, about: bytes = b"") -> bytes:
        return hashlib.sha256(repr((client, purpose, step, about)).encode()).digest()


def federation() -> Federation:
    draw = np.random.default_rng(0)
    clients = {}
    for k, size in enumerate(SIZES):
        x = draw.normal(size=(size, 6)).astype(np.float32)
        clients[f"c{k}"] = (x, draw.integers(3, size=size))
    return Federation.from_arrays(clients, test=dict.fromkeys(clients, ([], [])), classes=3, seed=0)


def gradients(module: nn.Module, x: Any, y: Any, plan: LocalTraining) -> list[torch.Tensor]:
    """Return the mean of the samples' gradients, each of them clipped where the plan says so."""
    own = list(module.parameters())
    if not plan.clip:
        return list(torch.autograd.grad(nn.functional.cross_entropy(module(x), y), own))
    total = [torch.zeros_like(p) for p in own]
    for sample, label in zip(x, y, strict=True):
        loss = nn.functional.cross_entropy(module(sample[None]), label[None])
        found = torch.autograd.grad(loss, own)
        norm = float(torch.cat([g.flatten() for g in found]).norm())
        for part, g in zip(total, found, strict=True):
            part += g / max(1.0, norm / plan.clip) / len(y)
    return total


@pytest.mark.parametrize("given", ["no term", "mean", "linear"])
@pytest.mark.parametrize("options", TERMS.values(), ids=list(TERMS))
@pytest.mark.parametrize("network", NETWORKS)
def test_terms_are_those_of_torch(network: str, options: dict[str, Any], given: str) -> None:
    fed = federation()
    plan = LocalTraining(0.1, 4, 1 << 40, **options)
    torch.manual_seed(1)
    model = validation.build(NETWORKS[network](), fed.shape, 3, Randomness(5))
    cpu = torch.device("cpu")
    batched = LocalTrainer(fed, model, Randomness(5), cpu, torch.float64, secret=Keys())
    centre = torch.linspace(-1, 1, len(batched.start), dtype=torch.float64)
    term_of = {
        "mean": MeanRegularizer(Rows(centre[None], (0, 0)), 0.4),
        "linear": LinearTerm(Rows(torch.stack([centre, -2 * centre]))),
    }
    start = Rows(batched.start[None], (0, 0))
    found = batched.train(start, range(2), plan, 1, regularizer=term_of.get(given))
    for k, shard in enumerate(fed.shards):
        module = copy.deepcopy(model.module).double()
        begun = nn.utils.parameters_to_vector(module.parameters()).detach()
        optimizer: torch.optim.Optimizer = torch.optim.SGD(
            module.parameters(), plan.lr, plan.momentum, weight_decay=plan.weight_decay
        )
        if plan.optimizer == "adam":
            optimizer = torch.optim.Adam(
                module.parameters(), plan.lr, weight_decay=plan.weight_decay
            )
        x, y = torch.as_tensor(shard.x).double(), torch.as_tensor(shard.y)
        for _ in range(plan.epochs):
            now = nn.utils.parameters_to_vector(module.parameters())
            term = plan.proximal / 2 * (now - begun).square().sum()
            if given == "mean":
                term = term + 0.4 / 2 * (now - centre).square().sum()
            if given == "linear":
                term = term + (1, -2)[k] * (now @ centre)
            of_term = torch.autograd.grad(term, list(module.parameters()))
            both = zip(gradients(module, x, y, plan), of_term, strict=True)
            for p, (g, of_p) in zip(module.parameters(), both, strict=True):
                p.grad = g + of_p
            optimizer.step()
        moved = nn.utils.parameters_to_vector(module.parameters()).detach() - begun
        torch.testing.assert_close(found[k], moved, rtol=0, atol=1e-10)


class SameKeys(Keys):
    """Keys that do not follow from the request, so that two requests have the same noise."""

    def seed(self, client: int, purpose: str, step: int, about: bytes = b"") -> bytes:
        return super().seed(client, purpose, step)


@pytest.mark.parametrize("same", [True, False])
@pytest.mark.parametrize("network", NETWORKS)
def test_a_linear_term_acts_after_clip_and_noise(network: str, same: bool) -> None:
    """So it costs nothing where it follows from releases; another term draws other noise."""
    fed = federation()
    torch.manual_seed(1)
    model = validation.build(NETWORKS[network](), fed.shape, 3, Randomness(5))
    secret = SameKeys() if same else Keys()
    cpu = torch.device("cpu")
    trainer = LocalTrainer(fed, model, Randomness(5), cpu, torch.float64, secret=secret)
    plan = LocalTraining(0.1, 1, 1 << 40, steps=1, clip=0.01, noise=3.0)
    start = Rows(trainer.start[None], (0, 0))
    # far longer than the clip
    term = torch.full((2, len(trainer.start)), 7.0).double()
    plain = trainer.train(start, range(2), plan, 1)
    corrected = trainer.train(start, range(2), plan, 1, regularizer=LinearTerm(Rows(term)))
    moved = corrected - plain + 0.1 * term
    assert (moved.abs().max() < 1e-10) == same
    # of the noise of both, at most
    assert moved.abs().max() < 0.1 * 3 * 0.01 * 8


RATES: dict[str, Any] = {
    "cosine": lambda o: torch.optim.lr_scheduler.CosineAnnealingLR(o, 7),
    "linear": lambda o: torch.optim.lr_scheduler.LinearLR(o, 1, 0, 7),
    "exponential": lambda o: torch.optim.lr_scheduler.ExponentialLR(o, 0.5),
    "step": lambda o: torch.optim.lr_scheduler.StepLR(o, 2, 0.5),
}


@pytest.mark.parametrize("kind", RATES)
def test_rates_are_those_of_torch(kind: str) -> None:
    schedule = Schedule(kind, 7, 0.5, 2)
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=0.3)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # no steps are made
        scheduler = RATES[kind](optimizer)
        for number in range(1, 8):
            plan = LocalTraining(0.3, 1, 5, schedule=schedule).at(number)
            assert plan.lr == pytest.approx(scheduler.get_last_lr()[0], rel=1e-9, abs=1e-9)
            scheduler.step()
    assert schedule.factor(0) == 1 and schedule.factor(8) == schedule.factor(7)


EXACT = Settings(dtype="float64", threads=1)
FULL: dict[str, Any] = {"model": "linear", "lr": 0.4, "epochs": 2, "batch_size": 100}


def initial(fed: Federation) -> nn.Linear:
    model = validation.build("linear", fed.shape, 3, Randomness(fed.seed))
    module = nn.Linear(6, 3).double()
    nn.utils.vector_to_parameters(model.initial().double(), module.parameters())
    return module


def descend(module: nn.Module, shard: Any, plan: LocalTraining, near: torch.Tensor) -> None:
    """Make the plan's steps on all samples, with its terms."""
    x, y = torch.as_tensor(shard.x).double(), torch.as_tensor(shard.y)
    own = list(module.parameters())
    for _ in range(plan.epochs):
        now = nn.utils.parameters_to_vector(own)
        term = plan.proximal / 2 * (now - near).square().sum()
        term = term + plan.weight_decay / 2 * now.square().sum()
        found = zip(gradients(module, x, y, plan), torch.autograd.grad(term, own), strict=True)
        with torch.no_grad():
            for p, (g, of_p) in zip(own, found, strict=True):
                p -= plan.lr * (g + of_p)


@pytest.mark.parametrize("clip", [0.0, 0.5])
def test_each_round_has_its_rate_and_terms(clip: float) -> None:
    fed = federation()
    private = {"clip": clip, "dp_unit": "example"} if clip else {}
    terms = {"proximal": 0.3, "weight_decay": 0.1}
    rates = {"lr_schedule": "step", "lr_gamma": 0.5, "lr_step": 1}
    found = FedAvg(**FULL, **private, **terms, **rates, rounds=3).fit(fed, EXACT)
    module = initial(fed)
    for number in range(3):
        plan = LocalTraining(0.4 * 0.5**number, 2, 100, clip=clip, **terms)
        start = nn.utils.parameters_to_vector(module.parameters()).detach()
        mean = torch.zeros_like(start)
        for shard in fed.shards:
            own = copy.deepcopy(module)
            descend(own, shard, plan, start)
            trained = nn.utils.parameters_to_vector(own.parameters()).detach()
            mean += trained * len(shard.y) / sum(SIZES)
        nn.utils.vector_to_parameters(mean, module.parameters())
    for own, known in zip(found.models_[0].values(), module.parameters(), strict=True):
        torch.testing.assert_close(own, known.detach(), rtol=0, atol=1e-10)


@pytest.mark.parametrize("protocol", [FedAvg, FineTune])
def test_own_models_of_ditto_stay_near_the_runs(protocol: Any) -> None:
    fed = federation()
    found = protocol(**FULL, rounds=5, tune_rounds=3, ditto=0.8).fit(fed, EXACT)
    for k, shard in enumerate(fed.shards):
        module = initial(fed)
        state = dict(zip(("weight", "bias"), found.models_[0].values(), strict=True))
        module.load_state_dict(state)
        start = nn.utils.parameters_to_vector(module.parameters()).detach()
        descend(module, shard, LocalTraining(0.4, 6, 100, proximal=0.8), start)
        own = found.model_of(f"c{k}")
        for value, known in zip(own.values(), module.parameters(), strict=True):
            torch.testing.assert_close(value, known.detach(), rtol=0, atol=1e-10)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"ditto": 1.0}, "tune_rounds"),
        ({"proximal": -1.0}, "proximal"),
        ({"lr_schedule": "warm"}, "lr_schedule"),
        ({"lr_gamma": 0.0}, "lr_gamma"),
    ],
)
def test_terms_that_cannot_be_are_refused(options: Any, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        FedAvg(rounds=1, model="linear", **options).fit(federation())


@pytest.mark.parametrize("name", ["proximal", "weight_decay", "ditto", "class_weight"])
def test_functions_of_users_have_losses_of_their_own(name: str) -> None:
    foreign = ForeignModel([np.zeros((6, 3))], train=lambda theta, x, y, call: theta)
    given: Any = "balanced" if name == "class_weight" else 0.1
    with pytest.raises(UsageError, match=f"{name} changes the loss"):
        FedAvg(rounds=1, model=foreign, tune_rounds=1, **{name: given}).fit(federation())


def test_options_at_their_defaults_are_in_no_configuration() -> None:
    config = FedAvg(model="linear").config(federation(), "float32")
    assert not {"proximal", "weight_decay", "ditto", "lr_schedule", "lr_gamma"} & config.keys()
    config = FedAvg(model="linear", lr_schedule="cosine").config(federation(), "float32")
    assert config["lr_schedule"] == "cosine" and "lr_gamma" not in config


@pytest.mark.parametrize("network", [*NETWORKS, "dropout"])
def test_accumulated_batches_are_one(network: str) -> None:
    fed = federation()
    torch.manual_seed(1)
    dropout = nn.Sequential(nn.Flatten(), nn.Linear(6, 5), nn.Dropout(0.5), nn.Linear(5, 3))
    module = NETWORKS[network]() if network in NETWORKS else dropout
    options = {**FULL, "model": module, "rounds": 2, "momentum": 0.5}
    parts = FedAvg(**{**options, "batch_size": 2, "accumulate": 4}).fit(fed, EXACT)
    whole = FedAvg(**{**options, "batch_size": 8}).fit(fed, EXACT)
    differences = [
        (one - other).abs().max()
        for one, other in zip(parts.models_[0].values(), whole.models_[0].values(), strict=True)
    ]
    # each part draws masks of its own
    assert (max(differences) > 1e-6) == (network == "dropout")
    assert max(differences) < 1e-12 or network == "dropout"


def test_accumulated_batches_cost_what_large_ones_do() -> None:
    private = {**FULL, "clip": 0.5, "dp_unit": "example", "noise": 1.0, "rounds": 2}
    epsilons = []
    for batch in ({"batch_size": 2, "accumulate": 4}, {"batch_size": 8}, {"batch_size": 2}):
        epsilons.append(FedAvg(**{**private, **batch}).fit(federation()).ledger_.epsilon)
    assert epsilons[0] == epsilons[1] != epsilons[2]
