"""Clients' data on one device, and their local training as one batch over stacked models.

A client is a batch of one: every operation here has a leading client axis, and client i's numbers
    do not depend on who else is in
the batch (to float tolerance).
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from securecluster.core.lazy_torch import torch
from securecluster.core.randomness import Part, Randomness
from securecluster.data import Federation
from securecluster.errors import UsageError
from securecluster.messaging.messages import Rows
from securecluster.models.optimizers import Momenta, Optimizer
from securecluster.models.optimizers import build as build_optimizer
from securecluster.training.batches import Chunk, Minibatches, packed
from securecluster.training.config import LocalTraining, Secret, check_training
from securecluster.training.evaluation import Samples

if TYPE_CHECKING:
    from securecluster.models.validation import FlatModel
    from securecluster.training.dp_sgd import DPSGDState

__all__ = ["CPU_CHUNK", "GPU_CHUNK", "LocalTrainer", "LocalTraining", "check_training"]

CPU_CHUNK, GPU_CHUNK = 1 << 22, 1 << 28  # parameters of the clients that train together


@dataclass
class _Worker:
    """A thread's own model, since torch swaps parameters in place, and the memory of its chunk's
    weights, kept from call to call.
    """

    model: FlatModel
    room: torch.Tensor  # (b, d), b grows as needed


@dataclass(frozen=True)
class _Task:
    """What one call of `train` is about."""

    start: Rows
    who: Sequence[int]
    plan: LocalTraining
    step: int
    scale: Sequence[float] | None
    out: torch.Tensor  # (len(who), d)
    largest: int  # clients of a chunk
    # chunks, then a None for each worker: so it is empty only when all are to stop
    jobs: deque[list[int] | None]


class LocalTrainer:
    """The data of some clients, (N, …) concatenated, and batched training on it.

    Args:
        clients: which clients of the federation live here (all by default; a deployed node holds
            one).
        numbers: of the federation's clients; None counts from 0.
        aside: share of each client's training samples that is kept out of training, to judge models
            by, in [0, 1).
        secret: what clients draw their noise from; needed where they train with noise.
    """

    def __init__(  # noqa: PLR0913 (data, model and device, and what few callers need by name)
        self,
        federation: Federation,
        model: FlatModel,
        randomness: Randomness,
        device: torch.device,
        dtype: torch.dtype | None = None,
        clients: Sequence[int] | None = None,
        numbers: Sequence[int] | None = None,
        validation_share: float = 0.0,
        secret: Secret | None = None,
    ) -> None:
        here = tuple(range(len(federation)) if clients is None else clients)
        self.ids = here if numbers is None else tuple(numbers[k] for k in here)
        self.device, self.dtype = device, dtype or torch.float32
        self.model = model.to(device, self.dtype)
        self._workers: list[_Worker] = []
        self.start, self.classes = self.model.initial(), federation.classes
        self._momenta: Momenta | None = None  # made by the first training that keeps its momentum
        self._randomness, self.secret = randomness, secret
        shards = [federation.shards[k] for k in here]
        trained: list[tuple[Any, Any]] = []
        validated: list[tuple[Any, Any]] = []
        for client, shard in zip(self.ids, shards, strict=True):
            kept = self._kept(client, len(shard.y), validation_share)
            whole = bool(kept.all())  # no copy of whole shards
            trained.append((shard.x, shard.y) if whole else (shard.x[kept], shard.y[kept]))
            validated.append((shard.x[~kept], shard.y[~kept]))
        self.sizes = [len(y) for _, y in trained]
        self.validation_sizes = [len(y) for _, y in validated]
        self._train_on = self._samples(trained)
        self._aside_on = self._samples(validated)
        self._test_on = self._samples([(shard.x_test, shard.y_test) for shard in shards])
        self._x, self._y = self._train_on.x, self._train_on.y
        self._offsets = self._train_on.offsets

    def _samples(self, parts: Sequence[tuple[Any, Any]]) -> Samples:
        """Return every client's samples (x, y) on the trainer's device."""
        return Samples.of([x for x, _ in parts], [y for _, y in parts], self.device, self.dtype)

    def train(
        self,
        start: Rows,
        who: Sequence[int],
        plan: LocalTraining,
        step: int,
        room: int = 0,
        scale: Sequence[float] | None = None,
    ) -> torch.Tensor:
        """Updates SGD_n(θ_i, D_i) − θ_i of the clients `who`, (len(who), d) (Sattler et al. 2019,
        eq. 1).

        All steps of a chunk of clients run before the next chunk starts, so that its weights stay
        in cache. On a CPU each of torch's threads takes whole chunks: the products are too small to
        share.

        Args:
            start: the model each of `who` starts from.
            who: positions in this cohort.
            step: names the draw of the batches, with the client and the epoch.
            room: numbers in a row of the result, d or more; those after the first d are 0.
            scale: what each update is multiplied by (1 without it): a client weighs what it sends
                to a sum.

        Raises:
            UsageError: DP-SGD without secret draws.
            PolicyError: clients that keep their momentum have trained in a later call.
        """
        if plan.private and self.secret is None:
            raise UsageError(
                "DP-SGD draws its noise and its batches from each client's own key: this cohort "
                "was given none (secret=…)"
            )
        if plan.keep_momentum:
            self._momenta = self._momenta or Momenta(len(self.ids), self.start)
            self._momenta.begin(who, step)
        order = sorted(range(len(who)), key=lambda k: -plan.number(self.sizes[who[k]]))
        threads = torch.get_num_threads() if self.device.type == "cpu" else 1
        parts = _split(order, self._chunk_size(), threads)
        d = self.model.dimension
        out = torch.empty(len(who), max(room, d), dtype=self.dtype, device=self.device)
        out[:, d:] = 0
        workers = self._for_threads(max(1, min(threads, len(parts))))
        jobs: deque[list[int] | None] = deque([*parts, *[None] * len(workers)])
        task = _Task(
            start, who, plan, step, scale, out[:, :d], max(map(len, parts), default=0), jobs
        )
        if len(workers) == 1:
            self._work(workers[0], task)
        else:
            _each_in_a_thread(lambda worker: self._work(worker, task), workers, jobs)
        return out

    def _for_threads(self, number: int) -> list[_Worker]:
        """What as many threads may work with at once, made when first needed."""
        none = self.start.new_empty(0, self.model.dimension)
        self._workers += [
            _Worker(self.model.copy(), none) for _ in range(number - len(self._workers))
        ]
        return self._workers[:number]

    def _work(self, worker: _Worker, task: _Task) -> None:
        """Train chunk after chunk, in the same memory, until a None."""
        if len(worker.room) < task.largest:
            worker.room = worker.room.new_empty(task.largest, self.model.dimension)
        for part in iter(task.jobs.popleft, None):
            origin = part if task.start.index is None else [task.start.index[k] for k in part]
            weights = worker.room[: len(part)]
            torch.index_select(
                task.start.table, 0, torch.as_tensor(origin, device=self.device), out=weights
            )
            self._train(worker.model, weights, [task.who[k] for k in part], task)
            for row, k, o in zip(weights, part, origin, strict=True):
                update = torch.sub(row, task.start.table[o], out=task.out[k])
                if task.scale is not None:
                    update *= task.scale[k]

    def _train(
        self, model: FlatModel, weights: torch.Tensor, who: Sequence[int], task: _Task
    ) -> None:
        """All steps of a chunk, weights (b, d) in place."""
        private = self._private(who, task, weights)
        chunk, params = self._schedule(who, task.plan, task.step, private), model.views(weights)
        momenta = self._momenta if task.plan.keep_momentum else None
        buffers = None if momenta is None else momenta.start(who)
        velocity = None if buffers is None else model.views(buffers)
        plan = task.plan
        optimizer = build_optimizer(plan.optimizer, params, plan.lr, plan.momentum, velocity)
        for s, k in enumerate(chunk.active):
            if not task.jobs:  # cleared after an error in another thread
                return
            index = chunk.index[s, :k, : chunk.width[s]]
            x = self._x.index_select(0, index.flatten()).view(*index.shape, *self._x.shape[1:])
            y = self._y.index_select(0, index.flatten()).view(*index.shape, *self._y.shape[1:])
            own = params if k == len(who) else {name: p[:k] for name, p in params.items()}
            weight = chunk.weight[s, :k, : chunk.width[s]]
            keys = None if chunk.keys is None else chunk.keys[s, :k]
            batch = Minibatches(x, y, weight, keys)
            if private is None:
                self._step(model, own, batch, optimizer)
            else:
                private.step(model, own, batch, index - chunk.first[:k], optimizer)
        if momenta is not None and buffers is not None:
            momenta.end(who, buffers)

    def _step(
        self,
        model: FlatModel,
        params: dict[str, torch.Tensor],
        batch: Minibatches,
        optimizer: Optimizer,
    ) -> None:
        """Make one step of each client, by hand where the model is a stack."""
        if model.stack is not None and (len(batch.x) == 1 or not model.stack.convolves):
            with torch.no_grad():
                model.stack.step(params, batch.x, batch.y, batch.weight, optimizer)
            return
        gradients = model.gradients(params, batch.x, batch.y, batch.weight, batch.keys)
        optimizer.begin()
        for name, gradient in gradients.items():
            optimizer.value(name, gradient)

    def _private(self, who: Sequence[int], task: _Task, weights: torch.Tensor) -> DPSGDState | None:
        """What DP-SGD from these weights (b, d) draws and remembers; None for plain training."""
        if not task.plan.private or self.secret is None:
            return None
        from securecluster.training.dp_sgd import DPSGDState

        ids, sizes = [self.ids[i] for i in who], [self.sizes[i] for i in who]
        block, data = (
            self._fitting() if self.model.together else 1,
            [self._train_on.digest(k) for k in who],
        )
        return DPSGDState(self.secret, ids, sizes, weights, task.plan, task.step, block, data)

    def _chunk_size(self) -> int:
        """Clients trained together: on a CPU as many as keep their weights in cache, and one where
        it convolves or says so.
        """
        on_cpu = self.device.type == "cpu"
        alone = self.model.convolves or getattr(self.model.module, "alone_on_cpu", False)
        return 1 if not self.model.together or (on_cpu and alone) else self._fitting()

    def _fitting(self) -> int:
        """Models that fit into a chunk."""
        return max(
            1, (CPU_CHUNK if self.device.type == "cpu" else GPU_CHUNK) // self.model.dimension
        )

    def _batches(self, who: int, plan: LocalTraining, step: int) -> Iterator[NDArray[np.int64]]:
        """Client `who`'s mini-batches in order: a fresh permutation an epoch, the last batch of an
        epoch may be smaller.
        """
        size, left, epoch = self.sizes[who], plan.number(self.sizes[who]), 0
        while left > 0:
            order = (
                self._randomness.generator(
                    "client", self.ids[who], "batches", step, epoch
                ).permutation(size)
                + self._offsets[who]
            )
            for first in range(0, min(size, left * plan.batch_size), plan.batch_size):
                yield order[first : first + plan.batch_size]
                left -= 1
            epoch += 1

    def _schedule(
        self, who: Sequence[int], plan: LocalTraining, step: int, private: DPSGDState | None
    ) -> Chunk:
        if private is None:
            batches = [list(self._batches(i, plan, step)) for i in who]
        else:
            batches = [
                [batch + self._offsets[i] for batch in private.batches(k)]
                for k, i in enumerate(who)
            ]
        divisors = None if private is None else [min(plan.batch_size, self.sizes[i]) for i in who]
        chunk = packed(batches, self._offsets[list(who)], divisors, self.device, self.dtype)
        if not (self.model.dropouts and plan.dropout):
            return chunk
        steps = len(chunk.active)
        drawn = [
            self._randomness.generator("client", self.ids[i], "dropout", step).integers(
                1 << 62, size=steps
            )
            for i in who
        ]
        return replace(chunk, keys=torch.as_tensor(np.stack(drawn, 1)).to(self.device))

    @property
    def training_samples(self) -> Samples:
        """What clients train on."""
        return self._train_on

    @property
    def test_samples(self) -> Samples:
        """What clients hold out."""
        return self._test_on

    def memory(self) -> dict[str, torch.Tensor]:
        """Return what clients remember of their trainings, by name: momentum that is kept."""
        return {} if self._momenta is None else self._momenta.memory()

    def recall(self, memory: Mapping[str, torch.Tensor]) -> None:
        """Take over what `memory` returned, among other things that a client remembers."""
        self._momenta = None
        if "momentum" in memory:
            self._momenta = Momenta(len(self.ids), self.start)
            self._momenta.recall(memory)

    def drawn(self, *path: Part) -> torch.Tensor:
        """Other initial weights than θ_0, (d,): every client of a run draws the same ones for
        `path`.
        """
        return self.model.redrawn(self._randomness, *path)

    def inputs(self, k: int) -> torch.Tensor:
        """The samples that the client at position k trains on, (n_k, …), as the model takes them;
        no copy.
        """
        return self._x[self._offsets[k] : self._offsets[k + 1]]

    def scores(self, models: Rows) -> NDArray[np.float64]:
        """The objective's metric on each client's own test data under its model, (m,); NaN for a
        client without test data.
        """
        judge = self.model.objective
        return judge.judged(
            self._test_on.mean(judge.scores, self.model, models, range(len(self.ids)))
        )

    def _kept(self, client: int, size: int, validation_share: float) -> NDArray[np.bool_]:
        """Which of a client's samples are trained on."""
        order = self._randomness.generator("client", client, "aside").permutation(size)
        return order >= math.floor(validation_share * size)  # of one sample none is kept aside

    def validation_loss(
        self, models: Rows, who: Sequence[int], bound: float | None = None
    ) -> NDArray[np.float64]:
        """As `loss`, of the samples kept aside; NaN where there are none."""
        return self._aside_on.mean(self.model.objective.losses, self.model, models, who, bound)

    def loss(
        self, models: Rows, who: Sequence[int], bound: float | None = None
    ) -> NDArray[np.float64]:
        """The mean loss (of labels and tokens in nats) on each of `who`'s training samples under
        its own row of `models`, (len(who),).

        Args:
            bound: B, where each sample's loss is clipped to [0, B]; one that is no number counts as
                B.
        """
        return self._train_on.mean(self.model.objective.losses, self.model, models, who, bound)

    def losses(
        self, models: torch.Tensor, who: Sequence[int], bound: float | None = None
    ) -> NDArray[np.float64]:
        """As `loss`, of several models (r, d) on the samples of each of `who`: (len(who), r).

        Each model sees the samples of all of `who` in one go: products of many samples with one
        model's weights are what a processor does best, and memory does not grow with r.
        """
        columns = [self.loss(Rows(model[None], (0,) * len(who)), who, bound) for model in models]
        return np.stack(columns, 1) if columns else np.zeros((len(who), 0))


def _split(order: list[int], size: int, threads: int) -> list[list[int]]:
    """Chunks of at most `size`, all about equal, and a multiple of `threads` where there are enough
    clients.
    """
    number = -(-len(order) // size)
    number = min(len(order), -(-number // threads) * threads)
    return [[int(k) for k in part] for part in np.array_split(order, number)] if order else []


def _each_in_a_thread(
    work: Callable[[_Worker], None], workers: list[_Worker], jobs: deque[Any]
) -> None:
    """Let each worker work in a thread of its own, in which torch uses one thread."""
    threads = torch.get_num_threads()
    pool = ThreadPoolExecutor(len(workers), initializer=lambda: torch.set_num_threads(1))
    try:
        for done in as_completed([pool.submit(work, worker) for worker in workers]):
            done.result()
    finally:
        jobs.clear()  # after an error or an interrupt the others end with the step they are at
        pool.shutdown()
        # the number is the process's, not the thread's, for threads that start later
        torch.set_num_threads(threads)
