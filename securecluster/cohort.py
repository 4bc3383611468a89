"""Clients' data on one device, and their local training as one batch over stacked models.

A client is a batch of one: every operation here has a leading client axis, and client i's numbers do not depend on who else is in
the batch (to float tolerance).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from securecluster.backend import torch
from securecluster.data import Federation
from securecluster.errors import UsageError
from securecluster.messages import Rows
from securecluster.randomness import Randomness

if TYPE_CHECKING:
    from securecluster.models import FlatModel

OPTIMIZERS = ("sgd", "adam")


@dataclass(frozen=True)
class LocalTraining:
    """What SGD_n(θ, D_i) means: `steps` mini-batches where given, else `epochs` passes over the client's own data."""

    lr: float
    epochs: int
    batch_size: int
    optimizer: str = "sgd"
    momentum: float = 0.0
    steps: int | None = None


@dataclass
class _Plan:
    """Batches of a chunk of clients, sorted by number of steps, so that the clients still training are always the first ones."""

    index: torch.Tensor  # (S, b, B) rows of the cohort's data
    weight: torch.Tensor  # (S, b, B) 1 / (size of that batch), 0 for padding
    active: list[int]  # S counts


class Cohort:
    """The data of some clients, (N, …) concatenated, and batched training on it.

    Args:
        clients: which clients of the federation live here (all by default; a deployed node holds one).
    """

    def __init__(
        self,
        federation: Federation,
        model: FlatModel,
        randomness: Randomness,
        device: torch.device,
        dtype: torch.dtype | None = None,
        clients: Sequence[int] | None = None,
    ) -> None:
        self.ids = tuple(range(len(federation)) if clients is None else clients)
        self.model, self.device, self.dtype = model, device, dtype or torch.float32
        self.start = model.initial().to(device, self.dtype)
        self._randomness = randomness
        shards = [federation.shards[i] for i in self.ids]
        self.sizes = [len(s.y) for s in shards]
        self._offsets = np.concatenate([[0], np.cumsum(self.sizes)])
        self._x = torch.as_tensor(np.concatenate([s.x for s in shards])).to(device, self.dtype)
        self._y = torch.as_tensor(np.concatenate([s.y for s in shards])).to(device)
        self._tests = [
            (torch.as_tensor(s.x_test).to(device, self.dtype), torch.as_tensor(s.y_test).to(device)) if len(s.y_test) else None
            for s in shards
        ]

    def train(self, start: Rows, who: Sequence[int], plan: LocalTraining, step: int) -> torch.Tensor:
        """Updates SGD_n(θ_i, D_i) − θ_i of the clients `who`, (len(who), d) (Sattler et al. 2019, eq. 1).

        All steps of a chunk of clients run before the next chunk starts, so that its weights stay in cache.

        Args:
            start: the model each of `who` starts from.
            who: positions in this cohort.
            step: names the draw of the batches, with the client and the epoch.
        """
        chunk = max(1, (1 << 22) // self.model.dimension)
        parts = []
        for first in range(0, len(who), chunk):
            part = range(first, min(first + chunk, len(who)))
            parts.append(self._train(start.select(part).values, [who[k] for k in part], plan, step))
        return torch.cat(parts)

    def _train(self, theta: torch.Tensor, who: list[int], plan: LocalTraining, step: int) -> torch.Tensor:
        batches = [list(self._batches(i, plan, step)) for i in who]
        order = sorted(range(len(who)), key=lambda k: -len(batches[k]))
        schedule = self._schedule([batches[k] for k in order])
        place = torch.as_tensor(order, device=self.device)
        weights = theta[place].clone()
        optimizer = Sgd(weights, plan) if plan.optimizer == "sgd" else Adam(weights, plan)
        for index, weight, k in zip(schedule.index, schedule.weight, schedule.active, strict=True):
            optimizer.step(self._gradient(weights[:k], index[:k], weight[:k]), k)
        return torch.empty_like(weights).index_copy_(0, place, weights) - theta

    def _gradient(self, weights: torch.Tensor, index: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """Each client's own mean-loss gradient, (k, d): one backward of the summed losses, since no parameter is shared."""
        leaf = weights.detach().requires_grad_()
        flat = index.flatten()
        x = self._x[flat].view(*index.shape, *self._x.shape[1:])
        logits = self.model.stacked(leaf, x)
        losses = torch.nn.functional.cross_entropy(logits.flatten(0, 1), self._y[flat], reduction="none").view(index.shape)
        (gradient,) = torch.autograd.grad((losses * weight).sum(), leaf)
        return gradient

    def _batches(self, who: int, plan: LocalTraining, step: int) -> Iterator[NDArray[np.int64]]:
        """Client `who`'s mini-batches in order: a fresh permutation an epoch, the last batch of an epoch may be smaller."""
        size, done, epoch = self.sizes[who], 0, 0
        while done < plan.steps if plan.steps is not None else epoch < plan.epochs:
            order = self._randomness.generator("client", self.ids[who], "batches", step, epoch).permutation(size) + self._offsets[who]
            for first in range(0, size, plan.batch_size):
                if plan.steps is not None and done == plan.steps:
                    return
                yield order[first : first + plan.batch_size]
                done += 1
            epoch += 1

    def _schedule(self, batches: list[list[NDArray[np.int64]]]) -> _Plan:
        steps, width = len(batches[0]), max((len(b) for own in batches for b in own), default=0)
        index = np.zeros((steps, len(batches), width), dtype=np.int64)
        weight = np.zeros((steps, len(batches), width))
        for k, own in enumerate(batches):
            for s, batch in enumerate(own):
                index[s, k, : len(batch)] = batch
                weight[s, k, : len(batch)] = 1 / len(batch)
        active = [sum(len(own) > s for own in batches) for s in range(steps)]
        return _Plan(torch.as_tensor(index).to(self.device), torch.as_tensor(weight).to(self.device, self.dtype), active)

    def accuracy(self, models: Rows) -> NDArray[np.float64]:
        """Each client's accuracy on its own test data under its model, (m,); NaN for a client without test data."""
        found = np.full(len(self.ids), np.nan)
        index = models.index if models.index is not None else tuple(range(len(models)))
        for row, flat in enumerate(models.table):
            mine = [(k, t) for k, t in enumerate(self._tests) if index[k] == row and t is not None]
            if not mine:
                continue
            with torch.no_grad():
                logits = self.model.call(self.model.views(flat), torch.cat([t[0] for _, t in mine]))
            hit = (logits.argmax(-1) == torch.cat([t[1] for _, t in mine])).cpu().numpy()
            for (k, _), own in zip(mine, np.split(hit, np.cumsum([len(t[1]) for _, t in mine])[:-1]), strict=True):
                found[k] = own.mean()
        return found


class Sgd:
    """SGD with momentum on stacked rows, as `torch.optim.SGD`: v ← μv + g, θ ← θ − lr·v; the first k rows take part in a step."""

    def __init__(self, weights: torch.Tensor, plan: LocalTraining) -> None:
        self._weights, self._plan = weights, plan
        self._velocity = torch.zeros_like(weights) if plan.momentum else None

    def step(self, gradient: torch.Tensor, k: int) -> None:
        """One step of the first k rows."""
        if self._velocity is not None:
            gradient = self._velocity[:k].mul_(self._plan.momentum).add_(gradient)
        self._weights[:k].sub_(gradient, alpha=self._plan.lr)


class Adam:
    """Adam on stacked rows, as `torch.optim.Adam` with its default betas and epsilon."""

    def __init__(self, weights: torch.Tensor, plan: LocalTraining) -> None:
        self._weights, self._lr, self._t = weights, plan.lr, 0
        self._mean, self._square = torch.zeros_like(weights), torch.zeros_like(weights)

    def step(self, gradient: torch.Tensor, k: int) -> None:
        """One step of the first k rows; all of them have taken part in every step so far."""
        self._t += 1
        mean = self._mean[:k].mul_(0.9).add_(gradient, alpha=0.1)
        square = self._square[:k].mul_(0.999).addcmul_(gradient, gradient, value=0.001)
        scale = (square / (1 - 0.999**self._t)).sqrt_().add_(1e-8)
        self._weights[:k].addcdiv_(mean, scale, value=-self._lr / (1 - 0.9**self._t))


def check_training(plan: LocalTraining) -> None:
    """Raise UsageError for hyper-parameters that cannot train."""
    if plan.optimizer not in OPTIMIZERS:
        raise UsageError(f"unknown optimizer {plan.optimizer!r}: choose one of {', '.join(OPTIMIZERS)}")
    checks = {"lr": plan.lr > 0, "epochs": plan.epochs >= 1, "batch_size": plan.batch_size >= 1, "momentum": 0 <= plan.momentum < 1}
    checks["steps"] = plan.steps is None or plan.steps >= 1
    for name, good in checks.items():
        if not good:
            raise UsageError(
                f"{name} = {getattr(plan, name)} cannot train: lr, epochs, steps and batch size are positive, momentum is in [0, 1)"
            )
    if plan.optimizer == "adam" and plan.momentum:
        raise UsageError("Adam has its own momentum: leave momentum at 0, or use the optimizer sgd")


@contextmanager
def cpu_threads(number: int) -> Iterator[None]:
    """Let torch use `number` threads for a while (0: as many as it uses now); sums round differently with another number."""
    before = torch.get_num_threads()
    torch.set_num_threads(number or before)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def choose_device(name: str) -> torch.device:
    """`auto` is the GPU where there is one."""
    if name not in ("auto", "cpu", "cuda"):
        raise UsageError(f"unknown device {name!r}: choose one of auto, cpu, cuda")
    if name == "cuda" and not torch.cuda.is_available():
        raise UsageError("no CUDA device is available here: use --device cpu, or auto")
    return torch.device("cuda" if name != "cpu" and torch.cuda.is_available() else "cpu")
