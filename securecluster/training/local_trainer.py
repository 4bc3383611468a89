"""Clients' data on one device, and their local training as one batch over stacked models.

A client is a batch of one: every operation here has a leading client axis, and client i's numbers
do not depend on the other clients in the batch (to float tolerance).

At batch size 10 products are too small to share between threads, and memory traffic bounds dense
layers. So each CPU thread trains whole chunks of clients, whose weights stay in cache for all their
steps or wait for a window of steps, and has a copy of the module, since `functional_call` swaps
parameters in place. Results do not depend on which thread takes which chunk.
"""

from __future__ import annotations

import hashlib
import math
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from securecluster.core.client_names import stream_of
from securecluster.core.devices import to_device
from securecluster.core.lazy_torch import torch
from securecluster.core.randomness import Part, Randomness
from securecluster.data.scaling import POOLED
from securecluster.errors import PolicyError, UsageError
from securecluster.messaging.messages import Rows
from securecluster.models.optimizers import (
    Corrected,
    LastingRows,
    MeanRegularized,
    Momenta,
    Optimizer,
)
from securecluster.models.optimizers import build as build_optimizer
from securecluster.training import joint_training
from securecluster.training.batches import (
    Chunk,
    Drawn,
    Minibatches,
    of_classes,
    packed,
    resampled,
    sizes_of_epochs,
)
from securecluster.training.config import LocalTraining, Secret, check_training
from securecluster.training.data_access import DataAccess
from securecluster.training.evaluation import Samples
from securecluster.training.joint_training import Request

if TYPE_CHECKING:
    from securecluster.data.federation import Federation
    from securecluster.models.flat_model import Params
    from securecluster.models.validation import FlatModel
    from securecluster.training.best_models import BestModels
    from securecluster.training.dp_sgd import DPSGDState
    from securecluster.training.shared_scale import WaitingSamples

__all__ = ["CPU_CHUNK", "GPU_CHUNK", "LocalTrainer", "LocalTraining", "check_training"]

# parameters of the clients that train together: what a CPU's caches hold, and what fills a GPU,
# whose free memory may hold fewer
CPU_CHUNK = 1 << 22
GPU_CHUNK = 1 << 28
# numbers in a GPU's memory for each parameter: weights, gradients, two of Adam, and as many again
# for activations
NUMBERS_OF_PARAMETER = 8
# so many times more train together where steps wait for each other: these read no weights
WINDOWS = 4
# clients on a CPU whose convolutions go one by one, and whose dense layers go together
CONVOLUTION_CHUNK = 8
KEY_RANGE = 1 << 62  # keys of dropout
# numbers of updates that a CPU writes at a time
WRITTEN = 1 << 16

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.int64]
BoolArray = NDArray[np.bool_]


@dataclass
class _Worker:
    """Model and memory of one thread, reused in later calls.

    Attributes:
        model: the thread's own copy, since torch swaps parameters in place.
        buffer: weights of its chunk, (b, d); b grows as needed.
    """

    model: FlatModel
    buffer: torch.Tensor


@dataclass(frozen=True)
class MeanRegularizer:
    """The term λ/2 ‖θ_i − θ̄_i‖² of clients' losses.

    Attributes:
        means: θ̄_i of each client of a call.
        strength: λ.
    """

    means: Rows
    strength: float

    def rows(self, entries: Sequence[int]) -> torch.Tensor:
        """Return θ̄ of some clients, (b, d).

        Args:
            entries: positions of the clients in the call.
        """
        return self.means.select(entries).values

    @property
    def kind(self) -> str:
        """Return what tells the term from others with the same rows."""
        return repr(float(self.strength))


@dataclass(frozen=True)
class LinearTerm:
    """The term ⟨g_i, θ_i⟩ of clients' losses: g_i is added to every gradient.

    It corrects clients' drift, as c − c_i does in SCAFFOLD (Karimireddy et al. 2020, eq. 3).

    Attributes:
        gradients: g_i of each client of a call.
    """

    gradients: Rows

    def rows(self, entries: Sequence[int]) -> torch.Tensor:
        """Return g of some clients, (b, d).

        Args:
            entries: positions of the clients in the call.
        """
        return self.gradients.select(entries).values

    @property
    def kind(self) -> str:
        """Return what tells the term from others with the same rows."""
        return "linear"


LossTerm = MeanRegularizer | LinearTerm


@dataclass(frozen=True)
class _Task:
    """Arguments and result of one call of `LocalTrainer.train`.

    Attributes:
        start: initial model of each client.
        clients: positions of the clients.
        plan: hyper-parameters.
        step: number of the call.
        scale: factor of each update, or None.
        out: updates to write, (len(clients), d).
        largest: clients of the largest chunk.
        jobs: chunks, as entries of `clients`, and then a None for each worker: it is therefore
            empty only if all workers are to stop.
        regularizer: a term that is added to the loss, or None.
    """

    start: Rows
    clients: Sequence[int]
    plan: LocalTraining
    step: int
    scale: Sequence[float] | None
    out: torch.Tensor
    largest: int
    jobs: deque[list[int] | None]
    regularizer: LossTerm | None = None


class LocalTrainer:
    """Data of some clients, concatenated to (N, …), and batched training on it.

    Args:
        federation: the clients' data.
        model: the network, whose parameters are one vector of d numbers.
        randomness: the run's random streams, for batches, dropout and validation samples.
        device: where data and models are.
        dtype: type of real numbers; float32 by default.
        clients: indices in the federation of the clients that are here; all by default. A deployed
            node has one.
        numbers: ids of all clients of the federation; by default they count from 0. Public draws
            follow from the clients' names, and secret ones from these numbers.
        validation_share: share of each client's training samples that are kept out of training for
            the evaluation of models, in [0, 1).
        secret: source of the clients' secret draws; needed for training with noise.
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
        if clients is None:
            clients = range(len(federation))
        self.ids = tuple(clients)
        if numbers is not None:
            self.ids = tuple(numbers[k] for k in clients)
        self.device = device
        self.dtype = dtype or torch.float32
        self.model = model.to(device, self.dtype)
        self.start = self.model.initial()
        self.classes = federation.classes
        # what one unit of a client's score is in its own numbers, where these are standardised
        self.units = np.array([federation.shards[k].unit for k in clients])
        self.secret = secret
        # whether the run has noise, under which what is not finite leaves as zeros without an error
        self.tells_of_zeros = False
        self.access = DataAccess()
        self._randomness = randomness
        self._workers: list[_Worker] = []
        self._joint = joint_training.current()
        self._momenta: Momenta | None = None  # made by the first training that keeps momentum
        self._whole_start = self.model.whole_initial()
        self._local: LastingRows | None = None  # each client's own layers
        if self.model.local:
            _, first = self.model.parts(self._whole_start)
            self._local = LastingRows(len(self.ids), first, "local_layers", "local layers")
        self._best: BestModels | None = None  # made by the first training that keeps the best
        shards = [federation.shards[k] for k in clients]
        trained: list[tuple[Any, Any]] = []
        given: list[Any] = []  # weights of the samples in training
        validated: list[tuple[Any, Any]] = []
        self.names = tuple(federation.names[k] for k in clients)
        # what a client draws depends on its name alone, and not on the clients beside it
        self._streams = [stream_of(name) for name in self.names]
        for stream, shard in zip(self._streams, shards, strict=True):
            size = len(shard.y)
            in_training = self._training_mask(stream, size, validation_share)
            held_out = ~in_training
            x, y = shard.samples, shard.y
            validated.append((x[held_out], y[held_out]))
            if not bool(in_training.all()):  # complete shards are not copied
                x = x[in_training]
                y = y[in_training]
            trained.append((x, y))
            given.append(None if shard.weights is None else shard.weights[in_training])
        self._sizes = [len(y) for _, y in trained]
        self._validation_sizes = [len(y) for _, y in validated]
        self._weights = self._given_weights(given)
        self._importance: dict[Any, torch.Tensor | None] = {}  # by `class_weight`
        tested = [(shard.test_samples, shard.y_test) for shard in shards]
        self._waiting: WaitingSamples | None = None
        if federation.scaling is not None and federation.scaling.shared:
            from securecluster.training.shared_scale import STATISTICS, WaitingSamples

            numbers = federation.scaling.numbers
            statistics = STATISTICS[federation.scaling.kind]
            self._waiting = WaitingSamples(numbers, [trained, validated, tested], statistics)
            trained, validated, tested = self._waiting.scaled()
        self._hold(trained, validated, tested)

    def _hold(
        self,
        trained: Sequence[tuple[Any, Any]],
        validated: Sequence[tuple[Any, Any]],
        tested: Sequence[tuple[Any, Any]],
    ) -> None:
        """Put each client's samples (x, y) on the device, and watch that no call changes them."""
        self._train_on = replace(self._samples(trained), weights=self._weights)
        self._aside_on = self._samples(validated)
        self._test_on = self._samples(tested)
        # tables and offsets of the training samples, which every step of training reads
        self._x = self._train_on.x
        self._y = self._train_on.y
        self._offsets = self._train_on.offsets
        sample_sets = (self._train_on, self._aside_on, self._test_on)
        tables = []
        for samples in sample_sets:
            tables += [samples.x, samples.y]
        self.access.watch(tables)

    def column_sums(
        self, clients: Sequence[int], means: bool, norm: float | None = None
    ) -> FloatArray:
        """Return what a shared scale follows from, of each client's f features, (b, sf).

        Args:
            clients: positions of the clients.
            means: divide by the client's number of samples.
            norm: to which these are scaled, where they are the largest of one sample; None leaves
                them as they are.

        Raises:
            PolicyError: the run finds no scale that clients share.
        """
        self.access.read("column_sums", clients)
        if self._waiting is None:
            raise PolicyError("this run finds no scale that its clients share: nothing is told")
        return self._waiting.sums(clients, means, norm)

    def released_column_sums(self, context: Any, norm: float, noise: float) -> torch.Tensor:
        """Return the sums of `column_sums` with noise, and never without it where the run has some.

        Args:
            context: of the call (`CallContext`), with its clients.
            norm: of what one sample contributes, at most 1.
            noise: multiplier of the noise.
        """
        clients = context.positions
        if self._waiting is None:
            raise PolicyError("this run finds no scale that its clients share: nothing is told")
        sums = torch.from_numpy(self._waiting.sums(clients, False, norm))
        released: torch.Tensor = context.release(sums, sensitivity=1.0, noise=noise)
        self.access.read("column_sums", clients, bool(context.releases.of([released])))
        return released

    def rescale(self, clients: Sequence[int], scale: torch.Tensor) -> None:
        """Bring the samples of some clients to the scale that the run found.

        Args:
            clients: positions of the clients.
            scale: (2, f) centre and width of each feature on its public bounds.

        Raises:
            PolicyError: the run finds no scale that clients share.
        """
        if self._waiting is None:
            raise PolicyError("this run finds no scale that its clients share: it is refused")
        self._waiting.scales[list(clients)] = scale.double().cpu().numpy()
        self._hold(*self._waiting.scaled())

    @property
    def sizes(self) -> list[int]:
        """Return the number of samples that each client trains on."""
        self.access.read_counts("sizes")
        return self._sizes

    @property
    def validation_sizes(self) -> list[int]:
        """Return the number of samples that each client keeps out of training."""
        self.access.read_counts("validation_sizes")
        return self._validation_sizes

    def _training_mask(self, stream: Part, size: int, validation_share: float) -> BoolArray:
        """Return which of a client's samples are trained on, (size,).

        Args:
            stream: stands for the client in the paths of its draws.
            size: number of its samples.
            validation_share: share of the samples that are kept out of training; of a single sample
                none is.
        """
        held_out = math.floor(validation_share * size)
        if not held_out:
            return np.ones(size, dtype=bool)
        generator = self._randomness.generator("client", stream, "aside")
        return generator.permutation(size) >= held_out

    def _samples(self, arrays: Sequence[tuple[Any, Any]]) -> Samples:
        """Return every client's samples (x, y) on the trainer's device."""
        inputs = [x for x, _ in arrays]
        targets = [y for _, y in arrays]
        return Samples.of(inputs, targets, self.device, self.dtype)

    def _given_weights(self, given: Sequence[Any]) -> torch.Tensor | None:
        """Return the weights of all clients' samples, (N,), or None where no client has any."""
        if all(weights is None for weights in given):
            return None
        pairs = zip(given, self._sizes, strict=True)
        all_weights = [np.ones(size) if weights is None else weights for weights, size in pairs]
        return to_device(np.concatenate(all_weights), self.device, self.dtype)

    def importance(self, plan: LocalTraining) -> torch.Tensor | None:
        """Return the factor of each training sample's loss, (N,), or None where all are 1.

        Args:
            plan: hyper-parameters, with weights of classes or without.
        """
        if plan.class_weight is None:
            return self._train_on.weights
        if plan.class_weight not in self._importance:
            factors = []
            for k in range(len(self.ids)):
                labels = self._y[self._offsets[k] : self._offsets[k + 1]].cpu().numpy()
                factors.append(of_classes(labels, plan.class_weight))
            table = to_device(np.concatenate(factors), self.device, self.dtype)
            if self._train_on.weights is not None:
                table = table * self._train_on.weights
            self._importance[plan.class_weight] = table
        return self._importance[plan.class_weight]

    def train(  # noqa: PLR0913 (a call, and what few callers need by name)
        self,
        start: Rows,
        clients: Sequence[int],
        plan: LocalTraining,
        step: int,
        row_width: int = 0,
        scale: Sequence[float] | None = None,
        regularizer: LossTerm | None = None,
        apart: bool = False,
    ) -> torch.Tensor:
        """Return the updates SGD_n(θ_i, D_i) − θ_i of some clients (Sattler et al. 2019, eq. 1).

        All steps of a chunk of clients run before the next chunk starts, so that its weights stay
        in cache. On a CPU each of torch's threads takes complete chunks: the products are too small
        to share.

        Args:
            start: model that each client starts from.
            clients: positions of the clients in this cohort.
            plan: hyper-parameters.
            step: number of the call. With the client and the epoch it determines the batches.
            row_width: numbers in a row of the result, if more than d; those after the first d are
                0. Masks that lengthen a row then work in place.
            scale: factor of each update; 1 by default. Clients weight what they send to a sum.
            regularizer: a term that is added to each client's loss. DP-SGD adds its gradient after
                clipping and noise, since it does not depend on samples.
            apart: train each client by itself, so that its update does not depend on the others in
                the last bit either: batched products round by their size. On a GPU, and in a run
                that trains together with others, updates are equal up to rounding.

        Returns:
            Updates, (len(clients), max(row_width, d)).

        Raises:
            UsageError: DP-SGD without a source of secret draws.
            PolicyError: clients that keep their momentum have trained in a later call.
        """
        plan = plan.at(self.access.round)
        with self.permitted(plan, clients, step):
            if plan.keep_best:
                self._note_best(start, clients)
            threads = self._threads()
            if apart and self.device.type == "cpu" and self._joint is None:
                chunks = _split(self._by_steps(clients, plan), 1, threads)
            else:
                chunks = self._chunks(start, clients, plan, threads, regularizer)
            d = start.table.shape[1]
            # one (m, width) matrix for training and masks, since a copy may not fit into memory
            width = max(row_width, d)
            out = torch.empty(len(clients), width, dtype=self.dtype, device=self.device)
            out[:, d:] = 0
            number = min(threads, len(chunks))
            workers = self._for_threads(max(1, number))
            end = [None] * len(workers)  # stops each worker when no chunk is left
            task = _Task(
                start=start,
                clients=clients,
                plan=plan,
                step=step,
                scale=scale,
                out=out[:, :d],
                largest=max(map(len, chunks), default=0),
                jobs=deque([*chunks, *end]),
                regularizer=regularizer,
            )
            if len(workers) == 1:
                self._work(workers[0], task)
            else:
                _each_in_a_thread(lambda worker: self._work(worker, task), workers, task.jobs)
        return out

    @contextmanager
    def permitted(self, plan: LocalTraining, clients: Sequence[int], step: int) -> Iterator[None]:
        """Check that clients may train in a call, and note that they do.

        Args:
            plan: hyper-parameters.
            clients: positions of the clients in this cohort.
            step: number of the call.

        Raises:
            UsageError: DP-SGD without a source of secret draws.
            PolicyError: clients that keep their momentum have trained in a later call, or a
                training that the called method does not declare.
        """
        if plan.private and self.secret is None:
            raise UsageError(
                "DP-SGD draws its noise and its batches from each client's own key: this cohort "
                "was given none (secret=…)"
            )
        if plan.keep_momentum:
            check_training(plan)  # a call may have hyper-parameters of its own
            if self._momenta is None:
                self._momenta = Momenta(len(self.ids), self._whole_start)
            self._momenta.begin(clients, step)
        if plan.keep_local and self._local is not None:
            self._local.begin(clients, step)
        with self.access.train(plan, clients, step):
            yield

    def _threads(self) -> int:
        """Return the number of threads that train chunks; a GPU, and a run
        that trains together with others, take one chunk after the other."""
        if self.device.type == "cpu" and self._joint is None:
            return torch.get_num_threads()
        return 1

    def _by_steps(self, clients: Sequence[int], plan: LocalTraining) -> list[int]:
        """Return the entries of `clients` by number of steps, most first.

        Those that still train are then the first ones of a chunk, in every step.
        """
        sizes = [self._sizes[client] for client in clients]
        steps = [plan.number(size) for size in sizes]
        entries = range(len(clients))
        return sorted(entries, key=lambda entry: -steps[entry])

    def _for_threads(self, number: int) -> list[_Worker]:
        """Return the workers of some threads, which are made on first use."""
        empty = self.start.new_empty(0, self.model.whole_dimension)
        while len(self._workers) < number:
            self._workers.append(_Worker(self.model.copy(), empty))
        return self._workers[:number]

    def _work(self, worker: _Worker, task: _Task) -> None:
        """Train chunk after chunk, in the same memory, until a None.

        Args:
            worker: model and memory of this thread.
            task: the call.
        """
        if len(worker.buffer) < task.largest:
            worker.buffer = worker.buffer.new_empty(task.largest, self.model.whole_dimension)
        for entries in iter(task.jobs.popleft, None):
            start_rows = entries
            if task.start.index is not None:
                start_rows = [task.start.index[entry] for entry in entries]
            weights = worker.buffer[: len(entries)]  # (b, d)
            index = to_device(start_rows, self.device)
            chunk = self._begun(weights, entries, index, task)
            equal = len(set(start_rows)) == 1
            # local layers are each client's own
            apart = task.start.table.shape[1] < weights.shape[1]
            chunk.equal = equal and not apart
            joint = self._joint_for(task)
            if joint is not None:
                joint.train(chunk)
            else:
                self.train_chunk(chunk, worker.model)
            if apart:
                weights = self._without_local(weights, chunk.clients, task.plan)
            block = len(entries)
            if self.device.type == "cpu":  # without a second matrix of the chunk's size
                block = max(1, WRITTEN // weights.shape[1])
            for first in range(0, len(entries), block):
                rows = slice(first, first + block)
                self._write_updates(weights[rows], entries[rows], index[rows], equal, task)

    def _begun(
        self, weights: torch.Tensor, entries: Sequence[int], index: torch.Tensor, task: _Task
    ) -> Request:
        """Return a chunk whose weights are those that its clients begin with.

        Args:
            weights: (b, d), overwritten; where clients have local layers, whole vectors.
            entries: the clients, as entries of the call.
            index: row of the start model of each, on the device.
            task: the call.
        """
        models = task.start.table
        clients = [task.clients[entry] for entry in entries]
        means = None
        if task.regularizer is not None:
            means = task.regularizer.rows(entries)
        if models.shape[1] == weights.shape[1]:
            torch.index_select(models, 0, index, out=weights)
            return Request(0, self, weights, clients, task, means)
        local = self._local_rows(clients, task.plan)
        weights.copy_(self.model.joined(models.index_select(0, index), local))
        if means is not None:
            # no term draws local layers anywhere but to where they are, or along a gradient
            linear = isinstance(task.regularizer, LinearTerm)
            means = self.model.joined(means, torch.zeros_like(local) if linear else local)
        return Request(0, self, weights, clients, task, means)

    def _local_rows(self, clients: Sequence[int], plan: LocalTraining) -> torch.Tensor:
        """Return the local layers that a training of some clients begins with, (b, n)."""
        assert self._local is not None
        return self._local.start(clients) if plan.keep_local else self._local.latest(clients)

    def _without_local(
        self, weights: torch.Tensor, clients: Sequence[int], plan: LocalTraining
    ) -> torch.Tensor:
        """Return what of trained models may leave, and keep the rest where the plan says so.

        Args:
            weights: whole vectors, (b, whole dimension).
            clients: positions of the clients.
            plan: hyper-parameters.
        """
        shared, local = self.model.parts(weights)
        if plan.keep_local and self._local is not None:
            self._local.end(clients, local)
        return shared

    def whole(self, models: Rows, clients: Sequence[int]) -> Rows:
        """Return clients' models with each one's local layers, (b, whole dimension).

        Args:
            models: one for each of the clients; whole ones, or any without local layers, are
                returned as they are.
            clients: positions of the b clients.
        """
        if self._local is None or models.table.shape[1] == self.model.whole_dimension:
            return models
        own_rows = tuple(range(len(clients)))
        shared = models.values
        return Rows(self.model.joined(shared, self._local.latest(clients)), own_rows)

    def _note_best(self, start: Rows, clients: Sequence[int]) -> None:
        """Keep the models that clients begin with where none before had less validation loss."""
        if self._best is None:
            self._best = self._no_models_yet()
        models = self.whole(start, clients)
        self._best.note(models, clients, self.validation_loss(models, clients))

    def best(self, models: Rows) -> Rows:
        """Return all clients' models, each in the version with the least validation loss so far.

        Args:
            models: of all clients at the end of a run, whole ones, (m, d).
        """
        if self._best is None:
            return models
        clients = range(len(self.ids))
        losses = self.validation_loss(models, clients)
        return Rows(self._best.chosen(models, clients, losses), tuple(clients))

    def _write_updates(
        self,
        weights: torch.Tensor,
        entries: Sequence[int],
        start_rows: torch.Tensor,
        equal: bool,
        task: _Task,
    ) -> None:
        """Write the updates of some clients with a number of operations that they do not change.

        Args:
            weights: weights of the clients, (b, d), overwritten.
            entries: the clients, as entries of the call.
            start_rows: row of the start model of each, on the device.
            equal: whether these are all the same.
            task: the call.
        """
        # one row serves all clients without a copy for each
        needed = start_rows[:1] if equal else start_rows
        weights.sub_(task.start.table.index_select(0, needed))
        if task.scale is not None:
            scales = [task.scale[entry] for entry in entries]
            factors = to_device(scales, self.device, self.dtype)
            weights.mul_(factors[:, None])
        task.out.index_copy_(0, to_device(entries, self.device), weights)

    def _joint_for(self, task: _Task) -> joint_training.Member | None:
        """Return the training that other runs share with this one, or None.

        With DP-SGD, with momentum or layers that are kept, with weights of samples and with terms
        of the loss, clients train with those of their own run.
        """
        plan = task.plan
        if plan.private or plan.keep_momentum or task.regularizer is not None or plan.has_terms:
            return None
        if self.importance(plan) is not None or self._local is not None or plan.parts > 1:
            return None
        return self._joint

    def train_chunk(self, request: Request, model: FlatModel) -> None:
        """Make all steps of a chunk, in place.

        Args:
            request: the clients and their initial weights.
            model: the thread's model.
        """
        weights = request.weights
        clients = request.clients
        task = request.task
        plan = task.plan
        private = self._private(request)
        chunk = self._schedule(clients, plan, task.step, private)
        params = model.views(weights)
        momenta = None
        buffers = None
        velocity = None
        if plan.keep_momentum and self._momenta is not None:
            momenta = self._momenta
            buffers = momenta.start(clients)
            velocity = model.views(buffers)
        steps_of = _of_training(private)
        optimizer = build_optimizer(
            plan.optimizer, steps_of(weights, params), plan.lr, plan.momentum, velocity
        )
        if request.means is not None or plan.has_terms:
            optimizer = _with_terms(optimizer, request, model, steps_of)
        span = self._window(model, params, task.plan, task.regularizer)
        if span:
            self._train_in_windows(model, params, chunk, request, optimizer, span)
            return
        for step, active in enumerate(chunk.active):
            if not task.jobs:  # cleared after an error in another thread
                return
            batch, index = selected(self._x, self._y, chunk, step, active)
            active_params = first_clients(params, active)
            if private is None:
                sgd_step(model, active_params, batch, optimizer, plan.parts)
            else:
                private.step(model, active_params, batch, index, chunk.first[:active], optimizer)
        if momenta is not None and buffers is not None:
            momenta.end(clients, buffers)

    def _window(
        self, model: FlatModel, params: Params, plan: LocalTraining, regularizer: LossTerm | None
    ) -> int:
        """Return the steps in which changes of the first dense layer wait for each other, or 0.

        Only plain SGD on a CPU, without a regularizer and other terms, has such windows.

        Args:
            model: the thread's model.
            params: parameters of clients, by name.
            plan: hyper-parameters.
            regularizer: of the call, or None.
        """
        terms = regularizer is not None or plan.has_terms or plan.parts > 1
        if terms or plan.private or plan.momentum or plan.optimizer != "sgd":
            return 0
        if model.stack is None or self.device.type != "cpu":
            return 0
        from securecluster.models.deferred_steps import window

        return window(model.stack, params, plan.batch_size)

    def _train_in_windows(
        self,
        model: FlatModel,
        params: Params,
        chunk: Chunk,
        request: Request,
        optimizer: Optimizer,
        span: int,
    ) -> None:
        """Make all steps of a chunk, with windows of steps in the first layer.

        Args:
            model: the thread's model.
            params: parameters of the clients, by name, changed in place.
            chunk: mini-batches of all steps.
            request: the clients.
            optimizer: plain SGD on the parameters.
            span: steps in a window.
        """
        from securecluster.models.deferred_steps import DeferredSteps

        assert model.stack is not None
        task = request.task
        steps = len(chunk.active)
        width = chunk.index.shape[2]
        for first in range(0, steps, span):
            end = min(first + span, steps)
            active = chunk.active[first]
            # (active, steps of the window × width)
            index = chunk.index[first:end, :active].transpose(0, 1).flatten(1)
            with torch.no_grad():
                deferred = DeferredSteps(
                    stack=model.stack,
                    params=first_clients(params, active),
                    x=_rows(self._x, index),
                    lr=task.plan.lr,
                    # they differ after the first window
                    equal=request.equal and first == 0,
                )
                for step in range(first, end):
                    if not task.jobs:  # cleared after an error in another thread
                        return
                    active = chunk.active[step]
                    start = (step - first) * width
                    y = _rows(self._y, chunk.index[step, :active])
                    weight = chunk.weight[step, :active]
                    deferred.step(slice(start, start + width), y, weight, optimizer)
                deferred.finish()

    def _private(self, request: Request) -> DPSGDState | None:
        """Return the state of DP-SGD of a chunk's clients; None for plain training."""
        clients = request.clients
        task = request.task
        means = request.means
        if not task.plan.private or self.secret is None:
            return None
        from securecluster.training.dp_sgd import DPSGDState

        ids = [self.ids[client] for client in clients]
        sizes = [self._sizes[client] for client in clients]
        digests = [self._train_on.digest(client) for client in clients]
        if means is not None and task.regularizer is not None:
            # A request with another term makes other draws.
            digests = _with_term(digests, means, task.regularizer.kind)
        block = 1  # a module that vmap refuses takes one example at a time
        if self.model.together:
            block = self.models_in_chunk()
        return DPSGDState(
            secret=self.secret,
            ids=ids,
            sizes=sizes,
            weights=request.weights,
            plan=task.plan,
            step=task.step,
            block=block,
            data=digests,
            equal=request.equal,
        )

    def _chunks(
        self,
        start: Rows,
        clients: Sequence[int],
        plan: LocalTraining,
        threads: int,
        regularizer: LossTerm | None,
    ) -> list[list[int]]:
        """Return the clients that train together, as entries of `clients`.

        On a CPU they are as many as keep their weights in cache, and one if the model has
        convolutions or requests it: vmap makes grouped convolutions of several clients' ones, which
        are slow on CPUs. Steps of a dense layer that wait for each other change this: then one
        product serves clients that start from one model, and convolutions take them one by one.

        Args:
            start: model that each client starts from.
            clients: positions of the clients in this cohort.
            plan: hyper-parameters.
            threads: that train chunks.
            regularizer: of the call, or None.
        """
        order = self._by_steps(clients, plan)
        if not self.model.together:
            return _split(order, 1, threads)
        on_cpu = self.device.type == "cpu"
        requests_it = getattr(self.model.module, "alone_on_cpu", False)
        params = self.model.views(self._whole_start[None])
        window = self._window(self.model, params, plan, regularizer)
        if not on_cpu or not (self.model.convolves or requests_it):
            size = self.models_in_chunk()
            if window:
                size *= WINDOWS
            return _split(order, size, threads)
        if not window:
            return _split(order, 1, threads)
        by_start: dict[int, list[int]] = {}
        for entry in order:
            row = entry if start.index is None else start.index[entry]
            by_start.setdefault(row, []).append(entry)
        chunks = []
        for group in by_start.values():
            chunks += _split(group, CONVOLUTION_CHUNK, threads)
        return chunks

    def models_in_chunk(self) -> int:
        """Return the number of models that fit into a chunk, one or more.

        Frozen parameters count: clients share them, and each has activations of all layers.
        """
        of_module = sum(parameter.numel() for parameter in self.model.module.parameters())
        return max(1, self._largest_chunk // of_module)

    @cached_property
    def _largest_chunk(self) -> int:
        """Return the number of parameters that train together.

        A GPU's is found once: a run's products then round alike in all rounds. Free memory is
        rounded down to a power of two, so that a resumed run mostly finds the same.
        """
        if self.device.type == "cpu":
            return CPU_CHUNK
        if self.device.type != "cuda":
            return GPU_CHUNK
        free, _ = torch.cuda.mem_get_info(self.device)
        # what torch holds for this process, but does not use
        kept = torch.cuda.memory_reserved(self.device) - torch.cuda.memory_allocated(self.device)
        affordable = (free + kept) // (NUMBERS_OF_PARAMETER * self.start.element_size())
        return min(GPU_CHUNK, 1 << max(0, affordable.bit_length() - 1))

    def batches(self, client: int, plan: LocalTraining, step: int) -> Iterator[IntArray]:
        """Yield the rows of a client's mini-batches in order.

        Each epoch is a new permutation, or a new draw by labels; its last batch may be smaller.

        Args:
            client: position of the client.
            plan: hyper-parameters.
            step: number of the call.
        """
        drawn = self._drawn([client], plan, step)
        ends = np.cumsum(drawn.sizes[0])
        yield from np.split(drawn.rows, ends)[: len(ends)]

    def _drawn(self, clients: Sequence[int], plan: LocalTraining, step: int) -> Drawn:
        """Return the mini-batches of some clients; those of one do not depend on the others.

        Args:
            clients: positions of the clients.
            plan: hyper-parameters.
            step: number of the call.
        """
        samples = np.array([self._sizes[client] for client in clients])
        steps = np.array([plan.number(self._sizes[client]) for client in clients])
        sizes = sizes_of_epochs(samples, plan.batch_size, steps)
        drawn = sizes.sum(1)  # samples of all batches of a client
        orders: list[list[IntArray]] = [[] for _ in clients]
        epoch = 0
        while training := np.flatnonzero(drawn > epoch * samples).tolist():
            names = [self._streams[clients[k]] for k in training]
            streams = self._randomness.generators(("client",), names, ("batches", step, epoch))
            for k, generator in zip(training, streams, strict=True):
                orders[k].append(self._order(clients[k], plan, generator))
            epoch += 1
        rows: list[IntArray] = [np.zeros(0, dtype=np.int64)]
        for end, order in zip(drawn.tolist(), orders, strict=True):
            # with `steps`, the last epoch may be incomplete
            rows += order if len(order) == 1 and len(order[0]) == end else [_joined(order)[:end]]
        offsets = np.repeat(self._offsets[list(clients)], drawn)
        return Drawn(np.concatenate(rows) + offsets, sizes, steps)

    def _order(self, client: int, plan: LocalTraining, generator: np.random.Generator) -> IntArray:
        """Return the samples of an epoch, as positions among the client's own, (n_k,)."""
        if plan.label_power == 1:
            return generator.permutation(self._sizes[client])
        labels = self.labels(client).cpu().numpy()
        return resampled(labels, plan.label_power, generator)

    def _schedule(
        self, clients: Sequence[int], plan: LocalTraining, step: int, private: DPSGDState | None
    ) -> Chunk:
        """Return the mini-batches of all steps of a chunk, with dropout keys.

        Args:
            clients: positions of the clients, most steps first.
            plan: hyper-parameters.
            step: number of the call.
            private: state of DP-SGD, which draws the batches in secret; None for plain training.
        """
        first = self._offsets[list(clients)]  # (b,)
        divisors = None
        if private is None:
            drawn = self._drawn(clients, plan, step)
        else:
            batches = []
            for k, offset in enumerate(first):
                batches.append([positions + offset for positions in private.batches(k)])
            drawn = Drawn.of(batches)
            # DP-SGD divides by the expected size of a batch: the real one is secret
            sizes = np.array([self._sizes[client] for client in clients])
            divisors = np.minimum(plan.batch_size, sizes)
        chunk = packed(drawn, first, divisors, self.device, self.dtype)
        importance = self.importance(plan)
        if importance is not None:
            of_samples = importance[chunk.index]
            if private is None:
                chunk.weight.mul_(of_samples)
            else:
                chunk = replace(chunk, importance=of_samples)
        if not (self.model.dropouts and plan.dropout):
            return chunk
        keys = self.dropout_keys(clients, step, len(chunk.active))
        return replace(chunk, keys=keys)

    def dropout_keys(self, clients: Sequence[int], step: int, steps: int) -> torch.Tensor:
        """Return a key of dropout for each step of each client, (steps, b).

        They are drawn from (client, call), so a client's masks do not depend on the other clients.
        """
        names = [self._streams[client] for client in clients]
        streams = self._randomness.generators(("client",), names, ("dropout", step))
        table = np.stack([generator.integers(KEY_RANGE, size=steps) for generator in streams], 1)
        return to_device(table, self.device)

    @property
    def training_samples(self) -> Samples:
        """Samples that clients train on."""
        self.access.read("training_samples")
        return self._train_on

    @property
    def test_samples(self) -> Samples:
        """Samples that clients hold out for testing."""
        self.access.read("test_samples")
        return self._test_on

    def _no_models_yet(self) -> BestModels:
        """Return the best models of clients that have had none."""
        from securecluster.training.best_models import BestModels

        return BestModels(len(self.ids), self._whole_start)

    def memory(self) -> dict[str, torch.Tensor]:
        """Return the clients' state between trainings, by name.

        This is momentum, local layers, best models, and a shared scale.
        """
        lasting = (self._momenta, self._local, self._best)
        kept = [rows.memory() for rows in lasting if rows is not None]
        if self._waiting is not None:
            kept.append({POOLED: torch.from_numpy(self._waiting.scales.copy())})
        return {name: tensor for memory in kept for name, tensor in memory.items()}

    def recall(self, memory: Mapping[str, torch.Tensor]) -> None:
        """Restore the clients' state between trainings.

        Args:
            memory: result of `memory`, among other entries.
        """
        self._momenta = None
        if "momentum" in memory:
            self._momenta = Momenta(len(self.ids), self._whole_start)
            self._momenta.recall(memory)
        if self._local is not None and "local_layers" in memory:
            self._local.recall(memory)
        self._best = None
        if "best_models" in memory:
            self._best = self._no_models_yet()
            self._best.recall(memory)
        if self._waiting is not None and POOLED in memory:
            self._waiting.scales[:] = memory[POOLED].numpy()
            self._hold(*self._waiting.scaled())

    @property
    def measures(self) -> bool:
        """Return whether models can be scored on samples."""
        return True

    def drawn(self, *path: Part) -> torch.Tensor:
        """Return other initial weights than θ_0, (d,).

        Args:
            *path: names the draw; every client of a run draws the same weights for it.
        """
        return self.model.redrawn(self._randomness, *path)

    def own_start(self, k: int) -> torch.Tensor:
        """Return initial weights of a client's own, (d,).

        Args:
            k: position of the client.
        """
        return self.drawn("client", self._streams[k], "start")

    def first_row(self, k: int) -> int:
        """Return the row of a client's first training sample.

        Args:
            k: position of the client.
        """
        return int(self._offsets[k])

    def inputs(self, k: int) -> torch.Tensor:
        """Return the samples that a client trains on, (n_k, …), without a copy.

        Args:
            k: position of the client.
        """
        self.access.read("inputs", [k])
        first = self._offsets[k]
        end = self._offsets[k + 1]
        return self._x[first:end]

    def labels(self, k: int) -> torch.Tensor:
        """Return what a client's training samples are to be predicted as, without a copy.

        Args:
            k: position of the client.
        """
        self.access.read("labels", [k])
        first = self._offsets[k]
        end = self._offsets[k + 1]
        return self._y[first:end]

    def scores(self, models: Rows) -> FloatArray:
        """Return the objective's metric on each client's test data under its model, (m,).

        Args:
            models: one model per client.

        Returns:
            The metric; NaN for a client without test data.
        """
        self.access.read("scores")
        objective = self.model.objective
        all_clients = range(len(self.ids))
        models = self.whole(models, all_clients)
        means = self._test_on.mean(objective.scores, self.model, models, all_clients)
        return objective.judged(means * self.units)

    def validation_loss(
        self, models: Rows, clients: Sequence[int], bound: float | None = None
    ) -> FloatArray:
        """Return the mean loss on each client's validation samples under its model.

        Args:
            models: one model for each of `clients`.
            clients: positions of the clients.
            bound: as in `loss`.

        Returns:
            Mean losses, (len(clients),); NaN for a client without validation samples.
        """
        self.access.read("validation_loss", clients)
        losses = self.model.objective.losses
        models = self.whole(models, clients)
        return self._aside_on.mean(losses, self.model, models, clients, bound)

    def loss(self, models: Rows, clients: Sequence[int], bound: float | None = None) -> FloatArray:
        """Return the mean loss on each client's training samples under its model.

        Args:
            models: one model for each of `clients`.
            clients: positions of the clients.
            bound: B, if each sample's loss is clipped to [0, B]; a loss that is not a number
                counts as B.

        Returns:
            Mean losses, (len(clients),); of labels and tokens in nats.
        """
        self.access.read("loss", clients)
        losses = self.model.objective.losses
        models = self.whole(models, clients)
        return self._train_on.mean(losses, self.model, models, clients, bound)

    def losses(
        self, models: torch.Tensor, clients: Sequence[int], bound: float | None = None
    ) -> FloatArray:
        """Return the mean losses on each client's training samples under each of several models.

        Each model evaluates the samples of all clients at once: a processor is most efficient at
        products of many samples with one model's weights, and memory does not grow with r.

        Args:
            models: the models, (r, d).
            clients: positions of the clients.
            bound: as in `loss`.

        Returns:
            Mean losses, (len(clients), r).
        """
        columns = []
        for model in models:
            one_row_for_all = (0,) * len(clients)
            shared_model = Rows(model[None], one_row_for_all)
            columns.append(self.loss(shared_model, clients, bound))
        if not columns:
            return np.zeros((len(clients), 0))
        return np.stack(columns, 1)


def _of_training(private: DPSGDState | None) -> Callable[[torch.Tensor, Params], Params]:
    """Return a function of flat parameters and their views: those that the optimizer steps.

    Args:
        private: state of DP-SGD, which steps all parameters of a GPU at once; None for plain SGD.
    """
    if private is None:
        return lambda flat, views: views
    from securecluster.training.dp_sgd import stepped

    return stepped


def _with_terms(
    optimizer: Optimizer,
    request: Request,
    model: FlatModel,
    steps_of: Callable[[torch.Tensor, Params], Params],
) -> Optimizer:
    """Return an optimizer of the loss with terms that depend on no sample.

    Args:
        optimizer: of the loss alone.
        request: the clients, with their initial weights, before any step.
        model: the thread's model.
        steps_of: returns what the optimizer steps, of flat parameters and their views.
    """
    plan = request.task.plan
    terms: list[tuple[torch.Tensor | None, float]] = []
    linear = isinstance(request.task.regularizer, LinearTerm)
    if request.means is not None and not linear:
        terms.append((request.means, request.task.regularizer.strength))
    if plan.proximal:
        terms.append((request.weights.clone(), plan.proximal))
    if plan.weight_decay:
        terms.append((None, plan.weight_decay))
    params = steps_of(request.weights, model.views(request.weights))
    for centre, strength in terms:
        near = None if centre is None else steps_of(centre, model.views(centre))
        optimizer = MeanRegularized(optimizer, params, near, strength)
    if request.means is not None and linear:
        optimizer = Corrected(optimizer, steps_of(request.means, model.views(request.means)))
    return optimizer


def _with_term(digests: Sequence[bytes], rows: torch.Tensor, kind: str) -> list[bytes]:
    """Return the clients' digests, extended by the term that their loss has.

    Args:
        digests: of each client's examples.
        rows: θ̄ or g of the clients, (b, d).
        kind: of the term.
    """
    extended = []
    for digest, row in zip(digests, rows.cpu(), strict=True):
        contents = row.numpy().tobytes() + kind.encode()
        extended.append(digest + hashlib.blake2b(contents, digest_size=32).digest())
    return extended


def sgd_step(
    model: FlatModel, params: Params, batch: Minibatches, optimizer: Optimizer, parts: int = 1
) -> None:
    """Make one step of each client, with the backward pass by hand if the model has one.

    Args:
        model: the network; this thread's own, since torch swaps parameters in place.
        params: parameters of the clients, by name, changed in place.
        batch: mini-batch of each client.
        optimizer: updates the parameters.
        parts: in which the mini-batches go through the network, whose gradients are added up.
    """
    x = batch.x
    y = batch.y
    weight = batch.weight
    stack = model.stack
    # the backward pass of convolutions by hand is that of one client
    if parts == 1 and stack is not None and (len(x) == 1 or not stack.convolves):
        with torch.no_grad():
            stack.step(params, x, y, weight, optimizer)
        return
    width = max(1, -(-x.shape[1] // parts))
    gradients: Params = {}
    for number, first in enumerate(range(0, max(1, x.shape[1]), width)):
        rows = slice(first, first + width)
        # the masks of dropout are new ones in each part
        keys = None if batch.keys is None else batch.keys + number
        of_part = model.gradients(params, x[:, rows], y[:, rows], weight[:, rows], keys)
        for name, gradient in of_part.items():
            gradients[name] = gradients[name] + gradient if number else gradient
    optimizer.begin()
    for name, gradient in gradients.items():
        optimizer.value(name, gradient)


def first_clients(params: Params, number: int) -> Params:
    """Return the parameters of the first clients, without a copy."""
    if all(len(value) == number for value in params.values()):
        return params
    return {name: value[:number] for name, value in params.items()}


def selected(
    x: torch.Tensor, y: torch.Tensor, chunk: Chunk, step: int, active: int
) -> tuple[Minibatches, torch.Tensor]:
    """Return the mini-batches of the clients that still train, and their rows (k, n).

    Args:
        x: samples of all clients.
        y: their targets.
        chunk: mini-batches of all steps.
        step: the step.
        active: number of clients that still train.
    """
    width = chunk.width[step]
    # clients are sorted by their number of steps, so those that still train are a prefix
    index = chunk.index[step, :active, :width]  # (k, n)
    weight = chunk.weight[step, :active, :width]
    keys = None
    if chunk.keys is not None:
        keys = chunk.keys[step, :active]
    importance = None
    if chunk.importance is not None:
        importance = chunk.importance[step, :active, :width]
    flat = index.flatten()  # a copy where batches are narrower than the table
    of_x = x.index_select(0, flat).view(*index.shape, *x.shape[1:])
    of_y = y.index_select(0, flat).view(*index.shape, *y.shape[1:])
    return Minibatches(of_x, of_y, weight, keys, importance), index


def _rows(table: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """Return the rows (k, n, …) of a table (N, …) at an index (k, n)."""
    rows = table.index_select(0, index.flatten())  # (k n, …)
    shape = (*index.shape, *table.shape[1:])
    return rows.view(shape)


def _joined(orders: Sequence[IntArray]) -> IntArray:
    """Return the samples of several epochs one after the other, of which there may be none."""
    return np.concatenate([np.zeros(0, dtype=np.int64), *orders])


def _split(order: list[int], size: int, threads: int) -> list[list[int]]:
    """Return chunks of about equal size, each of consecutive entries.

    Args:
        order: the entries.
        size: largest size of a chunk.
        threads: the number of chunks is a multiple of it if there are enough entries, so that no
            thread waits for the others.
    """
    if not order:
        return []
    number = math.ceil(len(order) / size)
    number_for_all_threads = math.ceil(number / threads) * threads
    number = min(len(order), number_for_all_threads)
    chunks = []
    for chunk in np.array_split(order, number):
        chunks.append(chunk.tolist())
    return chunks


def _each_in_a_thread(
    work: Callable[[_Worker], None], workers: list[_Worker], jobs: deque[Any]
) -> None:
    """Run each worker in its own thread, in which torch uses one thread.

    Args:
        work: function to run.
        workers: its argument in each thread.
        jobs: queue of the workers, cleared if one of them fails.
    """
    threads = torch.get_num_threads()
    pool = ThreadPoolExecutor(len(workers), initializer=lambda: torch.set_num_threads(1))
    try:
        futures = [pool.submit(work, worker) for worker in workers]
        for future in as_completed(futures):
            future.result()
    finally:
        jobs.clear()  # after an error or an interrupt the other workers stop at their next step
        pool.shutdown()
        # the number is the process's, not the thread's, for threads that start later
        torch.set_num_threads(threads)
