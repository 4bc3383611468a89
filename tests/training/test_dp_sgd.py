"""DP-SGD against a plain loop over single examples, opacus' per-sample gradients,
torch.func.jacrev, and statistics of its draws.
"""

from __future__ import annotations

import copy
import functools
import hashlib
import itertools
import math
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from pretended import PRETENDED, pretending
from scipy import stats
from torch import nn

from securecluster import Federation
from securecluster.core.devices import cpu_threads
from securecluster.core.randomness import Randomness
from securecluster.errors import UsageError
from securecluster.messaging.messages import Rows
from securecluster.models import architectures, validation
from securecluster.models.flat_model import FlatModel
from securecluster.models.objectives import Language, Objective, Trajectory
from securecluster.models.per_example_gradients import Each, Outer, clipped
from securecluster.models.sequence_architectures import LanguageLSTM, TrajectoryLSTM
from securecluster.privacy.dp.grid_noise import GridNoise
from securecluster.training import local_trainer
from securecluster.training.dp_sgd import DPSGDState
from securecluster.training.local_trainer import LocalTrainer, LocalTraining, check_training

# scales are extreme on purpose
pytestmark = pytest.mark.filterwarnings("ignore::securecluster.SecureClusterWarning")

SIZES = (3, 10, 11, 25, 1, 20)
EVERYONE = range(len(SIZES))
CPU = torch.device("cpu")
PLANS = {
    "sgd": LocalTraining(0.3, 2, 10, clip=0.5, noise=1.1),
    "momentum": LocalTraining(0.1, 2, 5, momentum=0.9, clip=0.2, noise=0.7),
    "adam": LocalTraining(0.01, 2, 10, optimizer="adam", clip=0.3, noise=0.4),
    "steps": LocalTraining(0.1, 1, 2, momentum=0.5, steps=6, clip=0.1, noise=0.5),
    "all at once": LocalTraining(0.1, 1, 1 << 62, clip=0.3, noise=0.5),
    "no noise": LocalTraining(0.3, 2, 4, clip=0.2),
}
PLAIN = LocalTraining(0.1, 1, 10)
NETWORKS: dict[str, Callable[..., nn.Module]] = {
    "linear": lambda s, c: nn.Sequential(nn.Flatten(), nn.Linear(36, c)),
    "mlp": lambda s, c: nn.Sequential(
        nn.Flatten(), nn.Linear(36, 7, bias=False), nn.ReLU(), nn.Linear(7, c)
    ),
    "tanh": lambda s, c: nn.Sequential(nn.Flatten(), nn.Linear(36, 7), nn.Tanh(), nn.Linear(7, c)),
    "cnn": lambda s, c: nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.GroupNorm(2, 4), nn.ReLU(), nn.Flatten(), nn.Linear(64, c)
    ),
    "stack": lambda s, c: nn.Sequential(
        nn.Conv2d(1, 4, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(4, 4, 2, groups=2, bias=False),
        nn.Flatten(),
        nn.Linear(16, c),
    ),
    "branch": lambda s, c: nn.Sequential(nn.Flatten(), nn.Linear(36, 6), Branch(), nn.Linear(6, c)),
}


def close(found: torch.Tensor, expected: torch.Tensor, atol: float = 1e-12) -> None:
    torch.testing.assert_close(found, expected, rtol=0, atol=atol)


def test_noise_on_a_device_is_new_each_step_and_belongs_to_the_sums() -> None:
    def drawn(value: float, start: float = 0.0) -> list[torch.Tensor]:
        weights = torch.full((2, 30), start, dtype=torch.float64)
        plan = LocalTraining(0.3, 2, 10, clip=0.5, noise=1.0)
        with pretending():
            state = DPSGDState(
                Keys(), [0, 1], [20, 9], weights.to(PRETENDED), plan, 1, 1, [b"a", b"b"]
            )
            found = []
            for clients in (2, 1):  # the second has no more batches
                sums = torch.full((clients, 30), value, dtype=torch.float64)
                there = sums.to(PRETENDED)
                state.add_noise(there)
                found += list(there.cpu() - value)
        return found

    once = drawn(0.0)
    for noise, batch in zip(once, (10, 9, 10), strict=True):  # σ = z C / (q n)
        assert 0.6 < noise.std() * batch / 0.5 < 1.5
    assert all(torch.equal(noise, again) for noise, again in zip(once, drawn(0.0), strict=True))
    every = [*once, *drawn(0.5), *drawn(0.0, start=1.0)]
    assert len({tuple((noise * 2**20).round().tolist()) for noise in every}) == len(every)


def test_steps_on_a_device_begin_from_no_sums_also_with_empty_batches() -> None:
    draw = np.random.default_rng(0)
    arrays = {"a": (draw.random((25, 36)).astype(np.float32), draw.integers(3, size=25))}
    federation = Federation.from_arrays(arrays, test={"a": ([], [])}, classes=3, seed=0)
    flat = FlatModel(NETWORKS["mlp"](36, 3))
    plan = LocalTraining(0.1, 1, 1, steps=12, clip=0.5)

    def trained(device: torch.device) -> torch.Tensor:
        cohort = LocalTrainer(federation, flat, Randomness(0), device, torch.float64, secret=Keys())
        return cohort.train(Rows(cohort.start[None], (0,)), [0], plan, 1).cpu()

    here = trained(CPU)
    with pretending():
        there = trained(PRETENDED)
    assert here.any()
    close(there, here)


class Branch(nn.Module):
    """What vmap refuses."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.sin() if float(x.detach().abs().max()) >= 0 else x


class Keys:
    """A key for each client; what was asked for is kept."""

    def __init__(self, seed: int = 0) -> None:
        self._seed, self.asked = seed, list[tuple[int, str, int, bytes]]()

    def seed(self, client: int, purpose: str, step: int, about: bytes = b"") -> bytes:
        self.asked.append((client, purpose, step, about))
        return hashlib.sha256(repr((self._seed, client, purpose, step, about)).encode()).digest()


@pytest.fixture(autouse=True)
def own_networks(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, make in NETWORKS.items():
        monkeypatch.setitem(architectures.IMAGES, name, make)


def of_arrays(arrays: Any, seed: int = 0, **more: Any) -> Federation:
    """Clients that hold nothing out."""
    clients = {f"c{k}": samples for k, samples in enumerate(arrays)}
    return Federation.from_arrays(clients, test=dict.fromkeys(clients, ([], [])), seed=seed, **more)


def federation() -> Federation:
    rng = np.random.default_rng(0)
    return of_arrays(((rng.normal(size=(n, 1, 6, 6)), rng.integers(0, 3, n)) for n in SIZES), 5)


def trainer(fed: Federation, flat: FlatModel, dtype: torch.dtype = torch.float64) -> LocalTrainer:
    return LocalTrainer(fed, flat, Randomness(0), CPU, dtype, secret=Keys())


def cohort(
    model: str | nn.Module = "mlp",
    clients: list[int] | None = None,
    seed: int = 0,
    dtype: torch.dtype = torch.float64,
) -> LocalTrainer:
    fed = federation()
    flat = validation.build(model, fed.shape, 3, Randomness(5))
    return LocalTrainer(fed, flat, Randomness(5), CPU, dtype, clients, secret=Keys(seed))


def moved(batched: LocalTrainer, plan: LocalTraining, step: int = 1) -> torch.Tensor:
    """What all clients move by, each from a model of its own."""
    return batched.train(Rows(starts(batched)), EVERYONE, plan, step)


def starts(batched: LocalTrainer) -> torch.Tensor:
    return batched.start + 0.01 * torch.arange(len(batched.ids), dtype=batched.dtype)[:, None]


def private(
    batched: LocalTrainer, k: int, start: torch.Tensor, plan: LocalTraining, step: int
) -> DPSGDState:
    """The client's draws, alone."""
    assert batched.secret is not None
    own, size, digest = batched.ids[k], batched.sizes[k], batched._train_on.digest(k)
    return DPSGDState(batched.secret, [own], [size], start[None], plan, step, 1, [digest])


def plain_loop(
    batched: LocalTrainer, k: int, start: torch.Tensor, plan: LocalTraining, step: int
) -> tuple[torch.Tensor, list[int]]:
    """Algorithm 1 of Abadi et al. 2016 as it is printed: one client, one example at a time,
    torch.optim for the step; and batch sizes.
    """
    module = copy.deepcopy(batched.model.module).double()
    nn.utils.vector_to_parameters(start.clone(), module.parameters())
    own = list(module.parameters())
    optimizer: torch.optim.Optimizer = torch.optim.SGD(own, lr=plan.lr, momentum=plan.momentum)
    if plan.optimizer == "adam":
        optimizer = torch.optim.Adam(own, lr=plan.lr)
    shard = federation().shards[batched.ids[k]]
    given = private(batched, k, start, plan, step)
    batches = list(given.batches(0))
    for batch in batches:
        total = torch.zeros_like(start)
        for example in batch:
            x, y = torch.as_tensor(shard.x[[example]]).double(), torch.as_tensor(shard.y[[example]])
            found = torch.autograd.grad(nn.functional.cross_entropy(module(x), y), own)
            flat = torch.cat([g.flatten() for g in found])
            total = total + flat / max(1.0, float(flat.norm()) / plan.clip)
        total = total / min(plan.batch_size, len(shard.y))
        if plan.noise:
            given.add_noise(total[None])
        for p, g in zip(own, total.split([p.numel() for p in own]), strict=True):
            p.grad = g.view_as(p).clone()
        optimizer.step()
    return nn.utils.parameters_to_vector(own).detach(), [len(batch) for batch in batches]


def trained(plans: Sequence[str], each: int) -> list[Any]:
    """Return networks with plans: each network with every `each`-th plan by default, so that each
    plan has networks, too, and with all plans under --exhaustive.
    """
    found = []
    for (i, model), (j, plan) in itertools.product(enumerate(NETWORKS), enumerate(plans)):
        marks = [pytest.mark.exhaustive] if (i + j) % each else []
        found.append(pytest.param(model, PLANS[plan], id=f"{model}-{plan}", marks=marks))
    return found


@pytest.mark.few(2)
@pytest.mark.parametrize(("model", "plan"), trained(list(PLANS), 3))
def test_training_equals_the_printed_algorithm(model: str, plan: LocalTraining) -> None:
    batched, sizes = cohort(model), list[int]()
    updates = batched.train(Rows(starts(batched)), EVERYONE, plan, 3)
    for k, (start, update) in enumerate(zip(starts(batched), updates, strict=True)):
        expected, own = plain_loop(batched, k, start, plan, 3)
        close(start + update, expected, 1e-10)
        assert update.abs().max() > 1e-3
        sizes += own
    if plan is PLANS["steps"]:
        # an empty batch takes its noise; others are larger than B
        assert 0 in sizes and max(sizes) > 2


@pytest.mark.parametrize("model", NETWORKS)
def test_without_noise_or_a_bound_that_binds_a_step_on_everyone_is_a_plain_one(model: str) -> None:
    batched = cohort(model)
    plan = LocalTraining(0.3, 1, 1 << 62, clip=1e9)
    found = moved(batched, plan)
    plainly = batched.train(Rows(starts(batched)), EVERYONE, replace(plan, clip=0.0), 1)
    close(found, plainly)


@pytest.mark.few(1)
@pytest.mark.parametrize(("model", "plan"), trained(["momentum", "adam"], 2))
def test_chunks_threads_and_a_batch_of_one_do_not_matter(
    model: str, plan: LocalTraining, monkeypatch: pytest.MonkeyPatch
) -> None:
    batched = cohort(model)
    whole = moved(batched, plan)
    for k in EVERYONE:
        start = Rows(starts(batched)[k : k + 1])
        close(cohort(model, [k]).train(start, [0], plan, 1)[0], whole[k])
    for chunk in (1, 2):
        # also: blocks of one and two examples
        monkeypatch.setattr(local_trainer, "CPU_CHUNK", chunk * batched.model.dimension)
        for threads in (1, 3):
            with cpu_threads(threads):
                found = batched.train(Rows(starts(batched)[[5, 0, 3]]), [5, 0, 3], plan, 1)
        close(found, whole[[5, 0, 3]])


def test_blocks_of_convolved_examples_do_not_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    from securecluster.training import dp_sgd

    batched = cohort("stack")
    whole = moved(batched, PLANS["adam"])
    monkeypatch.setattr(dp_sgd, "CONVOLVED", 3)
    close(moved(batched, PLANS["adam"]), whole)


def test_sums_that_round_otherwise_have_another_noise() -> None:
    """Under the same noise the difference of two releases would be that of the sums."""
    batched, plan = cohort("mlp"), PLANS["sgd"]
    start = starts(batched)[3]
    draw = torch.Generator().manual_seed(0)
    sums = 0.01 * torch.randn(len(start), dtype=torch.float64, generator=draw)

    def release(changed: float = 0.0, steps: int = 1) -> torch.Tensor:
        own, row = private(batched, 3, start, plan, 1), sums.clone()
        row[0] += changed
        for _ in range(steps):
            released = row[None].clone()
            own.add_noise(released)
        return released[0]

    own = private(batched, 3, start, plan, 1)
    sigma, grid = own._sigma[0], own._grid[0]
    assert torch.equal(release(), release(changed=grid / 1e6))
    for other in (release(changed=grid), release(steps=2)):
        assert float((release() - other).std()) == pytest.approx(math.sqrt(2) * sigma, rel=0.25)


def test_float32_is_float64_rounded(monkeypatch: pytest.MonkeyPatch) -> None:
    def known(self: DPSGDState, sums: torch.Tensor) -> None:
        draw = torch.Generator().manual_seed(self._steps)
        sums += 0.1 * torch.randn(sums.shape[1], dtype=torch.float64, generator=draw).to(sums)
        self._steps += 1

    monkeypatch.setattr(DPSGDState, "add_noise", known)
    one, two = cohort("mlp", dtype=torch.float32), cohort("mlp")
    start = Rows(one.start[None], (0,) * len(SIZES))
    plan, found = PLANS["sgd"], one.train(start, EVERYONE, PLANS["sgd"], 1)
    for k in EVERYONE:  # the draws are of the weights in float32
        given, row = private(one, k, one.start, plan, 1), one.start.double()
        batches = list(given.batches(0))
        step = private(two, k, row, plan, 1)
        step.batches = lambda _, own=batches: iter(own)  # type: ignore[method-assign,assignment,misc]
        two._private = lambda *rest, own=step: own  # type: ignore[method-assign,assignment,misc]
        expected = two.train(Rows(row[None]), [k], plan, 1)[0]
        close(found[k].double(), expected, 1e-5)


def test_asked_the_same_a_client_answers_the_same_and_else_draws_anew() -> None:
    batched, plan = cohort(), PLANS["steps"]
    start = Rows(starts(batched))

    def drawn(
        batched: LocalTrainer, start: torch.Tensor, plan: LocalTraining, step: int, k: int = 3
    ) -> tuple[Any, ...]:
        draws = private(batched, k, start, plan, step)
        row = torch.empty_like(start)[None]
        draws.add_noise(row.zero_())
        return [list(b) for b in draws.batches(0)], row[0].tolist()

    assert torch.equal(
        batched.train(start, EVERYONE, plan, 1), batched.train(start, EVERYONE, plan, 1)
    )
    one = starts(batched)[3]
    same = drawn(batched, one, plan, 1)
    assert drawn(cohort(), one.clone(), replace(plan), 1) == same
    typed = replace(plan, lr=np.float64(plan.lr), batch_size=np.int64(plan.batch_size))
    assert drawn(batched, one, typed, 1) == same  # as a plan may be before it is written down
    moved = one.clone()
    moved[0] += 1e-12
    altered = cohort()
    altered._train_on = replace(altered._train_on, y=altered._train_on.y.flip(0))
    others = [
        drawn(altered, one, plan, 1),
        drawn(batched, moved, plan, 1),
        drawn(batched, one, replace(plan, lr=0.2), 1),
        drawn(batched, one, plan, 2),
        drawn(cohort(seed=1), one, plan, 1),
        drawn(batched, one, plan, 1, 5),
    ]
    for batches, noise in others:
        assert batches != same[0] and noise != same[1]


# --- per-example gradients ---


def of_every_example(module: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """(n, d) by torch.func.jacrev of all losses."""
    named = {name: p.detach() for name, p in module.named_parameters()}
    losses = lambda p: nn.functional.cross_entropy(  # noqa: E731
        torch.func.functional_call(module, p, (x,)), y, reduction="none"
    )
    return torch.cat([g.flatten(1) for g in torch.func.jacrev(losses)(named).values()], 1)


def by_opacus(
    module: nn.Module,
    x: torch.Tensor,
    losses: Callable[[torch.Tensor], torch.Tensor],
    like: Sequence[str] = (),
) -> torch.Tensor:
    """(n, d), its parameters in the order of `like`."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of its own imports and hooks
        from opacus import GradSampleModule

        wrapped = GradSampleModule(copy.deepcopy(module), loss_reduction="sum")
        losses(wrapped(x)).sum().backward()
    rows = {
        n.replace("_module.", "").replace(".lstm.", "."): p.grad_sample
        for n, p in wrapped.named_parameters()
    }
    order = like or list(rows)
    # opacus takes a Linear on (n L, H) for one of n L samples
    return torch.cat([rows[n].reshape(len(x), -1, rows[n][0].numel()).sum(1) for n in order], 1)  # type: ignore[index]


def samples(shape: Sequence[int] = (1, 6, 6), n: int = 9) -> tuple[torch.Tensor, torch.Tensor]:
    draw = torch.Generator().manual_seed(3)
    return torch.randn(n, *shape, generator=draw, dtype=torch.float64), torch.randint(
        3, (n,), generator=draw
    )


def hold(batched: LocalTrainer, x: torch.Tensor, y: torch.Tensor) -> None:
    """Give the first client these samples."""
    batched._x, batched._y = x.clone(), y
    batched._offsets, batched._sizes = np.array([0, len(y)]), [len(y)]


def summed(batched: LocalTrainer, x: torch.Tensor, y: torch.Tensor, clip: float) -> torch.Tensor:
    """The sum of clipped gradients by one step without noise."""
    hold(batched, x, y)
    plan = LocalTraining(1.0, 1, 1 << 62, clip=clip)
    return -len(y) * batched.train(Rows(batched.start[None]), [0], plan, 1)[0]


@pytest.mark.parametrize("oracle", ["opacus", "jacrev"])
@pytest.mark.parametrize("model", ["linear", "mlp", "tanh", "cnn", "stack"])
def test_clipped_sums_are_those_of_other_peoples_per_sample_gradients(
    model: str, oracle: str
) -> None:
    batched, (x, y) = cohort(model), samples()
    module = copy.deepcopy(batched.model.module).double()
    rows = of_every_example(module, x, y)
    if oracle == "opacus":
        losses = functools.partial(nn.functional.cross_entropy, reduction="none")
        rows = by_opacus(module, x, lambda out: losses(out, y))
    norms = rows.norm(dim=1)
    clip = float(norms.median())
    expected = (rows * (clip / norms).clamp(max=1)[:, None]).sum(0)
    torch.testing.assert_close(summed(batched, x, y, clip), expected, rtol=1e-9, atol=1e-12)
    assert (norms > clip * 1.01).any() and (norms < clip * 0.99).any()


def lstms() -> dict[str, tuple[nn.Module, Objective, torch.Tensor, torch.Tensor]]:
    draw = torch.Generator().manual_seed(1)
    tokens = torch.randint(7, (5, 7), generator=draw)
    places = torch.rand(5, 6, 2, generator=draw, dtype=torch.float64)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        words, tracks = LanguageLSTM(7, 3, 4), TrajectoryLSTM(2, 2, dropout=0.0)
    following = torch.rand(5, 2, generator=draw, dtype=torch.float64)
    return {
        "language": (words, Language(), tokens[:, :-1], tokens[:, 1:]),
        "trajectory": (tracks, Trajectory(), places, following),
    }


def with_opacus_lstm(module: nn.Module) -> nn.Module:
    """The same network through opacus' own LSTM."""
    from opacus.layers import DPLSTM

    class First(nn.Module):
        def __init__(self, own: Any) -> None:
            super().__init__()
            self.lstm = DPLSTM(own.inputs, own.cells, batch_first=True)
            self.lstm.load_state_dict({name: p.detach() for name, p in own.named_parameters()})

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = self.lstm(x)[0]
            return out

    found = copy.deepcopy(module)
    for name, part in list(found.named_children()):
        if type(part).__name__ == "LSTM":
            setattr(found, name, First(part).double())
    return found


@pytest.mark.parametrize("name", ["language", "trajectory"])
@pytest.mark.filterwarnings("ignore")
def test_lstms_have_opacus_per_sample_gradients(name: str) -> None:
    module, objective, x, y = lstms()[name]
    module = module.double()
    names = [name for name, _ in module.named_parameters()]
    theirs = with_opacus_lstm(module)
    rows = by_opacus(theirs, x, lambda out: objective.losses(out, y), names)
    flat = FlatModel(module, objective=objective)
    views = {n: p.expand(len(y), *p.shape[1:]) for n, p in flat.views(flat.initial()[None]).items()}
    weights = torch.ones(len(y), 1, dtype=torch.float64)
    gradients = flat.gradients(views, x[:, None], y[:, None], weights, None).values()
    assert rows.shape == (5, flat.dimension)
    found = torch.cat([gradient.flatten(1) for gradient in gradients], 1)
    torch.testing.assert_close(found, rows, rtol=1e-8, atol=1e-12)


def test_clients_with_lstms_train_as_each_alone() -> None:
    module, objective, x, y = lstms()["trajectory"]
    arrays = ((np.tile(x, (k, 1, 1)), np.tile(y, (k, 1))) for k in (1, 2, 3))
    fed = of_arrays(arrays, objective=objective, classes=2)
    batched = trainer(fed, validation.prepare_module(module, fed.shape, 2, objective=objective))
    plan = LocalTraining(0.1, 2, 4, clip=0.01, noise=1.0)
    whole = batched.train(Rows(batched.start[None], (0, 0, 0)), range(3), plan, 1)
    for k in range(3):
        close(batched.train(Rows(batched.start[None]), [k], plan, 1)[0], whole[k])


# --- the bound ---


@pytest.mark.parametrize("model", NETWORKS)
@pytest.mark.parametrize("size", [1e-30, 1.0, 1e6, 1e25, np.inf, np.nan])
def test_no_example_moves_the_sum_by_more_than_the_bound(model: str, size: float) -> None:
    batched, (x, y) = cohort(model), samples()
    clip = 0.1
    without = summed(batched, x[1:], y[1:], clip)
    x[0] *= size
    y[0] = (y[0] + 1) % 3
    moved = summed(batched, x, y, clip) - without
    assert moved.norm() <= clip * (1 + 1e-9)
    if size == 1.0:
        assert moved.norm() > 0.01
    if not np.isfinite(size):
        assert moved.abs().max() < 1e-9  # it counts as nothing


@pytest.mark.parametrize("model", ["mlp", "tanh"])
def test_in_float32_neither(model: str) -> None:
    batched, (x, y) = cohort(model, dtype=torch.float32), samples(n=2)
    x = x.float()
    for size in (1e-42, 1.0, 1e10, 1e18, 1e30):
        big = x.clone()
        big[0] *= size
        moved = summed(batched, big, y, 0.5) - summed(batched, x[1:], y[1:], 0.5)
        assert bool(moved.isfinite().all()) and moved.norm() <= 0.5 * (1 + 1e-5)


def test_clipping_by_hand() -> None:
    left = torch.tensor([[[3.0], [torch.nan], [0.0]]])
    right = torch.tensor([[[4.0, 0.0], [1.0, 1.0], [1.0, 0.0]]])
    parts = {"w": Outer(left, right), "b": Each(torch.tensor([[[5.0], [1.0], [0.0]]]))}
    found, factors = clipped(parts, torch.tensor([[0.5, 1.0, 1.0]]), 1.0)
    torch.testing.assert_close(factors, torch.tensor([[0.5 / 13, 0.0, 1.0]]))  # 13² = (3·4)² + 5²
    total = torch.ones(1, 1, 2)
    found["w"].add_to(total, factors)
    torch.testing.assert_close(total, torch.tensor([[[1 + 6 / 13, 1.0]]]))


def test_a_tiny_and_a_huge_side_do_not_hide_a_gradient() -> None:
    """1e-24 · 1e19 = 1e-5, though the square of 1e-24 is nothing in float32."""
    part, total = Outer(torch.tensor([[[1e-24]]]), torch.tensor([[[1e19]]])), torch.zeros(1, 1, 1)
    found, factors = clipped({"w": part}, torch.ones(1, 1), 1e-7)
    found["w"].add_to(total, factors)
    assert float(total) == pytest.approx(1e-7, rel=1e-4)


# --- draws ---


def test_batches_are_poisson_samples() -> None:
    plan, size, steps = LocalTraining(0.1, 1, 7, steps=4000, clip=1.0), 20, 4000
    rate = 7 / 20
    state = DPSGDState(Keys(), [0], [size], torch.zeros(1, 3), plan, 1, 1, [b"own"])
    batches = list(state.batches(0))
    hits = np.zeros((steps, size))
    for s, batch in enumerate(batches):
        assert list(batch) == sorted(set(batch.tolist()))
        hits[s, batch] = 1
    counts = np.bincount(hits.sum(1).astype(int), minlength=size + 1)
    expected = stats.binom(size, rate).pmf(np.arange(size + 1)) * steps
    enough = expected >= 5
    seen, expected = counts[enough], expected[enough]
    assert stats.chisquare(seen, expected * seen.sum() / expected.sum()).pvalue > 1e-4
    assert stats.chisquare(hits.sum(0), np.full(size, hits.sum() / size)).pvalue > 1e-4
    away = np.corrcoef(hits.T) - np.eye(size)
    assert np.abs(away).max() < 6 / np.sqrt(steps)  # examples are drawn on their own
    lagged = ((hits[1:] - rate) * (hits[:-1] - rate)).mean() / (rate * (1 - rate))
    assert abs(lagged) < 5 / np.sqrt(steps * size)


def test_rates_and_numbers_of_steps() -> None:
    plan = LocalTraining(0.1, 3, 10, clip=1.0)
    assert [plan.rate(n) for n in (4, 10, 40)] == [1.0, 1.0, 0.25]
    assert [plan.number(n) for n in (4, 10, 41)] == [3, 3, 15]
    assert replace(plan, steps=7).number(1000) == 7


def test_noise_has_the_variance_that_is_priced() -> None:
    """Of a data set without gradients: the step is the noise, z C / (q n) a coordinate, anew for
    each step and client.
    """
    clients, size, batch = 4, 30, 5
    plan = LocalTraining(1.0, 1, batch, steps=1, clip=0.25, noise=1.5)
    fed = of_arrays([(np.zeros((size, 100)), np.zeros(size, dtype=int))] * clients, classes=40)
    module = nn.Sequential(nn.Flatten(), nn.Linear(100, 40, bias=False))  # x = 0: no gradient
    batched = trainer(fed, validation.prepare_module(module, fed.shape, 40), torch.float32)
    start = Rows(torch.zeros(1, 4000), (0,) * clients)
    one, two = (
        batched.train(start, range(clients), replace(plan, steps=s), 1).double() for s in (1, 2)
    )
    std = 1.5 * 0.25 / batch
    for found, steps in ((one, 1), (two, 2)):
        scaled = found / (std * np.sqrt(steps))
        for row in scaled:
            assert stats.kstest(row.numpy(), "norm").pvalue > 1e-4
            assert 1e-5 < stats.chi2(4000).cdf(float(row.square().sum())) < 1 - 1e-5
        assert (torch.corrcoef(scaled) - torch.eye(clients)).abs().max() < 5 / np.sqrt(4000)
    noise = GridNoise([Keys().seed(0, "dp-sgd noise", 1)])
    drawn = [torch.zeros(1, 4000) for _ in range(3)]
    for rows in drawn:
        noise.add_to(rows, [2.0**-20], [1.0])
    drawn = [rows[0] for rows in drawn]
    assert (torch.corrcoef(torch.stack(drawn)) - torch.eye(3)).abs().max() < 5 / np.sqrt(4000)


@pytest.mark.always
@pytest.mark.parametrize("batch", [5, 2])
def test_one_example_shows_as_the_priced_mechanism_says(batch: int) -> None:
    """Of five examples one has a gradient, of a known direction and longer than C: along it, T
    steps add N(k C, T z² C²)/(q n).

    k ~ Bin(T, q). This is the distribution that accountants price, with the example and, at k = 0,
    without it.
    """
    clients, size, steps, rate = 2000, 5, 4, batch / 5
    x, y = np.zeros((size, 1)), np.zeros(size, dtype=int)
    x[2] = 1e4
    fed = of_arrays([(x, y)] * clients, classes=2)
    module = nn.Sequential(nn.Flatten(), nn.Linear(1, 2, bias=False))
    batched = trainer(fed, validation.prepare_module(module, fed.shape, 2))
    plan = LocalTraining(1e-6, 1, batch, steps=steps, clip=0.7, noise=0.8)
    start = Rows(torch.zeros(1, 2, dtype=torch.float64), (0,) * clients)
    updates = batched.train(start, range(clients), plan, 1).numpy() * rate * size / (1e-6 * 0.7)
    along, across = (updates @ np.array(v) / np.sqrt(2) for v in ((1.0, -1.0), (1.0, 1.0)))
    std, k = 0.8 * np.sqrt(steps), np.arange(steps + 1)
    seen = lambda v: (  # noqa: E731
        stats.binom(steps, rate).pmf(k) * stats.norm.cdf((np.asarray(v)[..., None] - k) / std)
    ).sum(-1)
    assert stats.kstest(along, seen).pvalue > 1e-4
    assert stats.kstest(across, stats.norm(0, std).cdf).pvalue > 1e-4
    assert stats.kstest(along, stats.norm(0, std).cdf).pvalue < 1e-6  # without the example


@pytest.mark.always
@pytest.mark.few(1)
@pytest.mark.parametrize(
    "change", [{}, {"momentum": 0.9}, {"steps": 1, "momentum": 0.5}, {"batch_size": 20}], ids=str
)
def test_the_noise_of_an_update_is_as_large_as_is_said(change: dict[str, Any]) -> None:
    """Two runs that differ in nothing but their keys differ by twice its variance."""
    plan = replace(LocalTraining(1e-3, 6, 1 << 62, clip=0.5, noise=2.0), **change)
    k, runs = 5, 40
    found = []
    for seed in range(runs):
        batched = cohort(seed=seed)
        found.append(batched.train(Rows(batched.start[None]), [k], plan, 1)[0])
    measured = float(torch.stack(found).var(0).mean())
    numbers = (runs - 1) * len(found[0])  # the mean of so many squares
    assert measured / plan.variance(SIZES[k]) == pytest.approx(1, abs=5 * np.sqrt(2 / numbers))


def test_a_full_steps_noise_is_exact_and_adams_is_not_told() -> None:
    full = LocalTraining(0.5, 1, 1 << 62, clip=3.0, noise=2.0)
    assert full.variance(100) == pytest.approx((0.5 * 2 * 3 / 100) ** 2)
    twice = replace(full, epochs=2, batch_size=10, momentum=0.5)
    assert twice.variance(10) == pytest.approx(0.3**2 * (1 + 1.5**2))
    assert replace(full, batch_size=10, optimizer="adam").variance(100) == 0
    assert LocalTraining(0.5, 1, 10).variance(100) == 0


def test_masks_of_dropout_belong_to_examples() -> None:
    """Whoever else is in a batch: else one example more would change the gradients of all."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        module = nn.Sequential(nn.Flatten(), nn.Linear(36, 32), nn.Dropout(0.5), nn.Linear(32, 3))
    batched, (x, y) = cohort(module), samples()
    plan = LocalTraining(1.0, 1, 1 << 62, clip=1e9)

    def of(batches: list[int]) -> torch.Tensor:
        hold(batched, x, y)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(DPSGDState, "batches", lambda self, k: iter([np.array(batches)]))
            return batched.train(Rows(batched.start[None]), [0], plan, 1)[0]

    close(of([0, 4, 7]), of([0]) + of([4]) + of([7]))
    masks = of([0])
    x[4], y[4] = x[0], y[0]
    assert not torch.allclose(of([4]), masks, atol=1e-6)  # and differ
    assert torch.equal(of([4]), of([4]))


# --- refusals ---


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"noise": 1.0}, "clip"),
        *(({"clip": clip}, "clip") for clip in (-1.0, math.nan, math.inf, "1", True)),
        *(({"clip": 1.0, "noise": z}, "noise") for z in (-1.0, math.nan, math.inf, None)),
    ],
)
def test_what_cannot_be_private_is_refused_in_one_sentence(
    change: dict[str, Any], word: str
) -> None:
    with pytest.raises(UsageError, match=word) as caught:
        check_training(LocalTraining(0.1, 1, 10, **change))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
def test_private_plans_pass(plan: LocalTraining) -> None:
    check_training(plan)


def test_without_keys_there_is_no_private_training() -> None:
    batched = cohort()
    batched.secret = None
    with pytest.raises(UsageError, match="key"):
        moved(batched, PLANS["sgd"])
    assert not torch.equal(moved(batched, PLAIN)[0], batched.start)


def test_plain_training_asks_for_no_secret() -> None:
    batched = cohort()
    moved(batched, PLAIN)
    assert isinstance(batched.secret, Keys) and batched.secret.asked == []
