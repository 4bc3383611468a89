"""Clients of several runs as one stack of models, which trains as one batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from securecluster.core.lazy_torch import torch
from securecluster.models.optimizers import build as build_optimizer
from securecluster.training.batches import Chunk, Drawn, packed
from securecluster.training.joint_training import Request

if TYPE_CHECKING:
    from securecluster.training.local_trainer import LocalTrainer


@dataclass(frozen=True)
class _Tables:
    """Training samples of several runs, one run after the other.

    Attributes:
        trainers: of the runs.
        x: samples of all of them.
        y: their targets.
        first: row of each run's first sample.
    """

    trainers: list[LocalTrainer]
    x: torch.Tensor
    y: torch.Tensor
    first: list[int]

    @classmethod
    def of(cls, trainers: Sequence[LocalTrainer]) -> _Tables:
        """Return the samples of some runs, copied into one table."""
        samples = [trainer.training_samples for trainer in trainers]
        x = torch.cat([one.x for one in samples])
        y = torch.cat([one.y for one in samples])
        sizes = [len(one.x) for one in samples]
        first = np.concatenate([[0], np.cumsum(sizes)[:-1]])
        return cls(list(trainers), x, y, [int(row) for row in first])

    def holds(self, trainer: LocalTrainer) -> bool:
        """Return whether a run's samples are here."""
        return any(trainer is one for one in self.trainers)

    def first_row(self, trainer: LocalTrainer) -> int:
        """Return the row of a run's first sample."""
        for row, one in zip(self.first, self.trainers, strict=True):
            if one is trainer:
                return row
        raise KeyError("the samples of this run are not in the table")


class StackedRuns:
    """Joint training of runs whose models have the same shape.

    The samples of all runs are copied into one table, so that a step is one selection of rows and
    one product for all clients.
    """

    def __init__(self) -> None:
        self._tables: dict[Any, _Tables] = {}

    def train(self, requests: Sequence[Request]) -> None:
        """Train the clients of several runs, in place.

        Those of runs with the same network and the same hyper-parameters train as one batch, all
        others run by run.

        Args:
            requests: a chunk of each run, in the order of the runs.
        """
        groups: dict[Any, list[Request]] = {}
        for request in requests:
            groups.setdefault(_shape(request), []).append(request)
        for shape, group in groups.items():
            for batch in _batches(group):
                if len(batch) == 1:
                    trainer = batch[0].trainer
                    # no other thread uses it: its own waits
                    trainer.train_chunk(batch[0], trainer.model)
                else:
                    self._train_as_one(batch, self._table(shape, batch))

    def _table(self, shape: Any, group: Sequence[Request]) -> _Tables:
        """Return a table with the samples of a group, and of the runs that it had before."""
        trainers = [request.trainer for request in group]
        table = self._tables.get(shape)
        if table is not None and all(map(table.holds, trainers)):
            return table
        before = [] if table is None else table.trainers
        new = [one for one in trainers if not any(one is old for old in before)]
        self._tables[shape] = _Tables.of([*before, *new])
        return self._tables[shape]

    def _train_as_one(self, group: Sequence[Request], table: _Tables) -> None:
        """Make all steps of the clients of a group.

        Args:
            group: requests for the same network and the same hyper-parameters.
            table: the samples of their runs.
        """
        from securecluster.training.local_trainer import first_clients, selected, sgd_step

        trainer = group[0].trainer
        plan = group[0].task.plan
        chunk, order = _schedule(group, table)
        rows = torch.as_tensor(order, device=trainer.device)
        stacked = torch.cat([request.weights for request in group])
        # Clients with most steps come first, so the active ones of each step are a prefix.
        weights = stacked[rows]
        params = trainer.model.views(weights)
        optimizer = build_optimizer(plan.optimizer, params, plan.lr, plan.momentum, None)
        for step, active in enumerate(chunk.active):
            batch, _ = selected(table.x, table.y, chunk, step, active)
            sgd_step(trainer.model, first_clients(params, active), batch, optimizer)
        stacked[rows] = weights
        sizes = [len(request.weights) for request in group]
        for request, trained in zip(group, torch.split(stacked, sizes), strict=True):
            request.weights.copy_(trained)


def _shape(request: Request) -> Any:
    """Return what two requests must have in common to train as one batch."""
    trainer: LocalTrainer = request.trainer
    model = trainer.model
    # fixed tensors belong to one run's network, and the stack has one copy of them
    alone = not model.together or model.has_fixed_tensors
    run = request.run if alone else None
    samples = tuple(trainer.training_samples.x.shape[1:])
    return (run, repr(model.module), repr(model.objective), samples, request.task.plan)


def _batches(group: Sequence[Request]) -> list[list[Request]]:
    """Return a group in parts that fit into the caches of a CPU, or the memory of a GPU."""
    largest = group[0].trainer.models_in_chunk()
    batches: list[list[Request]] = [[]]
    clients = 0
    for request in group:
        if batches[-1] and clients + len(request.clients) > largest:
            batches.append([])
            clients = 0
        batches[-1].append(request)
        clients += len(request.clients)
    return batches


def _schedule(group: Sequence[Request], table: _Tables) -> tuple[Chunk, list[int]]:
    """Return the mini-batches of all clients of a group, and which client is in which place.

    Args:
        group: the requests.
        table: the samples of their runs.

    Returns:
        The mini-batches, of clients with most steps first, and for each place the position of its
        client among those of all requests.
    """
    batches = []
    first = []
    keys = []
    for request in group:
        trainer: LocalTrainer = request.trainer
        plan = request.task.plan
        offset = table.first_row(trainer)
        steps = []
        for client in request.clients:
            rows = [batch + offset for batch in trainer.batches(client, plan, request.task.step)]
            batches.append(rows)
            first.append(offset + trainer.first_row(client))
            steps.append(len(rows))
        if trainer.model.dropouts and plan.dropout:
            drawn = trainer.dropout_keys(request.clients, request.task.step, max(steps, default=0))
            keys.append(drawn)
    # sorted is stable: clients with equally many steps stay in the order of the runs
    order = sorted(range(len(batches)), key=lambda position: -len(batches[position]))
    trainer = group[0].trainer
    in_order = [batches[position] for position in order]
    first_rows = np.array([first[position] for position in order])
    chunk = packed(Drawn.of(in_order), first_rows, None, trainer.device, trainer.dtype)
    if not keys:
        return chunk, order
    steps_of_all = len(chunk.active)
    padded = [torch.nn.functional.pad(k, (0, 0, 0, steps_of_all - len(k))) for k in keys]
    return replace(chunk, keys=torch.cat(padded, 1)[:, order]), order
