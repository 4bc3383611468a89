"""Queues of averages of k models, as the servers of IFCA, CLoVE and R-DPCFL have them.

Also the models that a finished run offers to newcomers.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from securecluster.core.lazy_torch import torch
from securecluster.messaging.messages import Picks, Rows
from securecluster.messaging.replies import Replies, Sums
from securecluster.protocols.common.averages import model_sets
from securecluster.protocols.common.averages.pending_updates import PendingUpdates
from securecluster.protocols.common.messages import ModelChoice

if TYPE_CHECKING:
    from securecluster.runtime.server_channel import ServerChannel


@dataclass
class Restart:
    """The server's state of one start of the k models."""

    number: int
    pending: list[PendingUpdates]  # (k,) one queue a model
    choice: list[int]  # (m,) the model that each client chose last
    # mean over samples of their client's lowest loss, in nats, at the end of the start
    loss: float = math.inf

    @classmethod
    def begin(cls, number: int, k: int, clients: int, fresh: bool) -> Restart:
        """Return a start before its first round.

        Args:
            number: of the start.
            k: number of models.
            clients: m.
            fresh: whether averages of different rounds are stored separately.
        """
        queues = [PendingUpdates.start(clients, fresh) for _ in range(k)]
        return cls(number, queues, choice=[0] * clients)

    def message_for(
        self, to: Sequence[int], best: Restart | None = None
    ) -> model_sets.ModelAverages:
        """Return the averages of all k models that each recipient lacks.

        Args:
            to: the recipients.
            best: another start whose models clients are to keep; None means no other.
        """
        # One frame for all k queues: rows are stacked, and `models` has the model of each row.
        messages = [queue.message_for(to) for queue in self.pending]
        picks = _stacked_picks([message.means for message in messages])
        tables = [message.means.table for message in messages if len(message.means.table)]
        means = torch.cat(tables) if tables else torch.zeros(0, 0)
        steps = torch.cat([message.steps.table for message in messages])
        models: list[int] = []
        for j, message in enumerate(messages):
            models += [j] * len(message.steps.table)
        counts = torch.stack([message.count.table for message in messages], 1)
        kept_start = best or self
        return model_sets.ModelAverages(
            means=Picks(means, picks),
            steps=Picks(steps, picks),
            models=Picks(torch.as_tensor(models, dtype=torch.int64), picks),
            k=len(self.pending),
            start=self.number,
            best=kept_start.number,
            absolute=any(message.absolute for message in messages),
            count=Rows(counts),
        )

    def acknowledge(self, ids: Sequence[int]) -> None:
        """Note that these clients replied, so that they have all averages posted so far."""
        for queue in self.pending:
            queue.acknowledge(ids)

    def taken(self, replies: Replies[ModelChoice]) -> None:
        """Store the clients' choices; clients that replied have all averages posted so far."""
        self.acknowledge(replies.ids)
        if not replies.ids:
            return
        choices = replies.rows.model.values.tolist()
        for i, model in zip(replies.ids, choices, strict=True):
            self.choice[i] = model

    def judged(self, sums: Sums[model_sets.LowestLoss]) -> float | None:
        """Store and return the mean of the clients' lowest losses.

        The mean is over samples where clients send their number, otherwise over clients. None where
        no client replied.
        """
        self.acknowledge(sums.ids)
        if not sums.ids:
            return None
        loss = sums.rows.loss.table
        size = sums.rows.size
        weight: Any = sums.counts[0]
        if size is not None:
            weight = size.table
        self.loss = float(loss / weight)
        return self.loss

    def post(self, step: int, sums: torch.Tensor, sizes: torch.Tensor) -> None:
        """Queue a round's averages; a model that no client chose is unchanged.

        Args:
            step: the call whose mask the sums carry.
            sums: (k, d) weighted sums of updates.
            sizes: (k,) their weights.
        """
        one_cluster = [0] * len(self.choice)  # every client gets the averages of all models
        weights = sizes.tolist()
        for queue, weighted_sum, size in zip(self.pending, sums, weights, strict=True):
            if size:
                mean = weighted_sum / size
                queue.post(step, mean[None], one_cluster)


@dataclass
class OfferedModels:
    """The models in use, as they are sent to newcomers.

    Row c of the table is the delta of `models[c]` since its start began.
    """

    models: list[int]
    steps: list[int]  # (k',) the call whose mask each row carries
    table: torch.Tensor  # (k', d)

    def message_for(self, start: Restart, clients: int) -> model_sets.ModelAverages:
        """Return a message with all models to each newcomer.

        Args:
            start: the start that the models belong to.
            clients: the number of newcomers.
        """
        picks = (tuple(range(len(self.models))),) * clients
        models = torch.as_tensor(self.models)
        k = len(start.pending)
        # one average a model, its delta since the start
        counts = torch.zeros(clients, k, dtype=torch.int64)
        counts[:, models] = 1
        return model_sets.ModelAverages(
            means=Picks(self.table, picks),
            steps=Picks(torch.as_tensor(self.steps), picks),
            models=Picks(models, picks),
            k=k,
            start=start.number,
            best=start.number,
            absolute=True,
            count=Rows(counts),
        )


def collect_models(
    net: ServerChannel,
    start: Restart,
    masked: bool,
    models_in_use: Sequence[int],
    hidden: bool = False,
    tries: int = 5,
) -> OfferedModels:
    """Return the models in use.

    Args:
        net: the server's channel.
        start: the start that is finished.
        masked: whether updates are masked: the server then cannot add up a model's averages, so a
            client that has all of them posts the model.
        models_in_use: the numbers of the models in use.
        hidden: whether the server does not know which clients chose them.
        tries: how many clients are asked for a model, one after the other.
    """
    if masked:
        holders = _holders(start, models_in_use)
        if hidden:
            holders = _holders_of_any(start, models_in_use)
        collected = _request_models(net, start, holders, tries)
    else:
        collected = _known_models(start, models_in_use)
    models = sorted(collected)
    steps = [collected[j][0] for j in models]
    rows = [collected[j][1] for j in models]
    table = torch.stack(rows) if rows else torch.zeros(0, 0)
    return OfferedModels(models, steps, table)


def _known_models(
    start: Restart, models_in_use: Sequence[int]
) -> dict[int, tuple[int, torch.Tensor]]:
    """Return step and delta of each model in use, which a server without a mask has.

    There are none before the first average, which determines the number of parameters.
    """
    deltas = {}
    # of all models: those in use at the end may be others than were trained
    for j, pending in enumerate(start.pending):
        if pending.posts:
            # the last row replaces the earlier ones: it is the delta since the start
            deltas[j] = pending.posts[-1].table[0]
    if not deltas:
        return {}
    unmoved = torch.zeros_like(next(iter(deltas.values())))
    return {j: (0, deltas.get(j, unmoved)) for j in models_in_use}


def _request_models(
    net: ServerChannel, start: Restart, holders: dict[int, list[int]], tries: int
) -> dict[int, tuple[int, torch.Tensor]]:
    """Return step and delta of each model in use, posted by one of the clients that can.

    Another of these clients is asked in each try.
    """
    collected: dict[int, tuple[int, torch.Tensor]] = {}
    for attempt in range(tries):
        model_of: dict[int, int] = {}  # by client
        for j, clients in holders.items():
            if clients and j not in collected:
                client = clients[attempt % len(clients)]
                model_of[client] = j
        if not model_of:
            break
        models = torch.as_tensor(list(model_of.values()))
        request = model_sets.ModelRequest(Rows(models), start.number)
        replies = net.post(model_sets.ModelSetClient.send_model, request, to=list(model_of))
        for k, i in enumerate(replies.ids):
            delta = replies.rows.delta.row(k).cpu()
            collected[model_of[i]] = (replies.step, delta)
    return collected


def _holders(start: Restart, models_in_use: Sequence[int]) -> dict[int, list[int]]:
    """Return the clients that can post each model in use: they chose it and lack no average."""
    lagging = lagging_clients_of(start)
    holders: dict[int, list[int]] = {j: [] for j in models_in_use}
    for i, j in enumerate(start.choice):
        if i not in lagging and j in holders:
            holders[j].append(i)
    return holders


def _holders_of_any(start: Restart, models_in_use: Sequence[int]) -> dict[int, list[int]]:
    """Return the clients that lack no average, for each model: every client holds all models."""
    lagging = lagging_clients_of(start)
    current = [i for i in range(len(start.choice)) if i not in lagging]
    holders = {}
    for n, j in enumerate(models_in_use):
        holders[j] = current[n:] + current[:n]  # a client posts one model in a call
    return holders


def lagging_clients_of(start: Restart) -> set[int]:
    """Return the clients that lack an average of any model."""
    lagging: set[int] = set()
    for queue in start.pending:
        lagging.update(queue.lagging_clients())
    return lagging


def _stacked_picks(tables: Sequence[Picks]) -> tuple[tuple[int, ...], ...]:
    """Return each recipient's rows of several tables, as rows of the stacked tables."""
    recipients: list[list[int]] = [[] for _ in tables[0].picks]
    offset = 0
    for table in tables:
        for rows, picks in zip(recipients, table.picks, strict=True):
            rows.extend(offset + row for row in picks)
        offset += len(table.table)
    return tuple(tuple(rows) for rows in recipients)
