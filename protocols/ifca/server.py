"""IFCA's server: restarts, the models that they offer, and the choices among them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from securecluster.core.lazy_torch import torch
from securecluster.messaging.messages import Picks, Rows
from securecluster.messaging.replies import Replies, Sums
from securecluster.protocols.common.messages import ModelChoice
from securecluster.protocols.common.pending_updates import PendingUpdates
from securecluster.protocols.ifca.client import IFCAClient, LowestLoss, ModelAverages, ModelRequest
from securecluster.runtime.server_channel import ServerChannel


@dataclass
class Restart:
    """What the server knows of one start of the k models."""

    number: int
    pending: list[PendingUpdates]  # of each model
    choice: list[int]  # (m,) the model that each client took last
    loss: float = math.inf  # mean over samples of their client's least loss, at the end

    @classmethod
    def begin(cls, number: int, k: int, clients: int, fresh: bool) -> Restart:
        """Nothing sent yet."""
        return cls(number, [PendingUpdates.start(clients, fresh) for _ in range(k)], [0] * clients)

    def message_for(self, to: Sequence[int], best: Restart | None = None) -> ModelAverages:
        """Return the averages of all k models that each of `to` lacks.

        Args:
            best: another start whose models clients are to keep; None: no other.
        """
        messages = [box.message_for(to) for box in self.pending]
        picks = _stacked_picks([message.means for message in messages])
        tables = [message.means.table for message in messages if len(message.means.table)]
        means = torch.cat(tables) if tables else torch.zeros(0, 0)
        steps = torch.cat([message.steps.table for message in messages])
        models: list[int] = []
        for j, message in enumerate(messages):
            models += [j] * len(message.steps.table)
        counts = torch.stack([message.count.table for message in messages], 1)
        return ModelAverages(
            means=Picks(means, picks),
            steps=Picks(steps, picks),
            models=Picks(torch.as_tensor(models, dtype=torch.int64), picks),
            k=len(self.pending),
            start=self.number,
            best=self.number if best is None else best.number,
            absolute=any(message.absolute for message in messages),
            count=Rows(counts),
        )

    def acknowledge(self, ids: Sequence[int]) -> None:
        """These clients replied, so they have all of it."""
        for box in self.pending:
            box.acknowledge(ids)

    def taken(self, replies: Replies[ModelChoice]) -> None:
        """These clients have all of it, and took these models."""
        self.acknowledge(replies.ids)
        if replies.ids:
            for i, j in zip(replies.ids, replies.rows.model.values.tolist(), strict=True):
                self.choice[i] = j

    def judged(self, sums: Sums[LowestLoss]) -> float | None:
        """The mean of the least losses, over samples where clients tell how many; None where nobody
        replied.
        """
        self.acknowledge(sums.ids)
        if not sums.ids:
            return None
        loss, size = sums.rows.loss.table, sums.rows.size
        weight = sums.counts[0] if size is None else size.table
        self.loss = float(loss / weight)
        return self.loss

    def post(self, step: int, sums: torch.Tensor, sizes: torch.Tensor) -> None:
        """Add a round's averages (K, d), given as sums and weights; a model nobody took stays where
        it is.
        """
        for box, total, size in zip(self.pending, sums, sizes.tolist(), strict=True):
            if size:
                box.post(step, (total / size)[None], [0] * len(self.choice))


@dataclass
class OfferedModels:
    """The models in use, as newcomers can be sent them: `table[c]` is the displacement of
    `models[c]` since its start began.
    """

    models: list[int]
    steps: list[int]  # (k',) the call whose mask each row carries
    table: torch.Tensor  # (k', d)

    def message_for(self, start: Restart, clients: int) -> ModelAverages:
        """All of them, to each newcomer."""
        picks = (tuple(range(len(self.models))),) * clients
        models = torch.as_tensor(self.models)
        k = len(start.pending)
        counts = torch.zeros(clients, k, dtype=torch.int64)
        counts[:, models] = 1
        return ModelAverages(
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
    net: ServerChannel, start: Restart, masked: bool, tries: int = 5
) -> OfferedModels:
    """The models in use. Under a mask the server cannot add up their averages, so a client that
    lacks none of them shows one.
    """
    collected = _request_models(net, start, tries) if masked else _known_models(start)
    models = sorted(collected)
    steps = [collected[j][0] for j in models]
    rows = [collected[j][1] for j in models]
    return OfferedModels(models, steps, torch.stack(rows) if rows else torch.zeros(0, 0))


def _known_models(start: Restart) -> dict[int, tuple[int, torch.Tensor]]:
    """Return step and displacement of each model in use, as a server without a mask has them.

    There are none before the first average, which tells how many numbers a model has.
    """
    used = sorted(set(start.choice))
    moved = {j: start.pending[j].posts[-1].table[0] for j in used if start.pending[j].posts}
    if not moved:
        return {}
    unmoved = torch.zeros_like(next(iter(moved.values())))
    return {j: (0, moved.get(j, unmoved)) for j in used}


def _request_models(
    net: ServerChannel, start: Restart, tries: int
) -> dict[int, tuple[int, torch.Tensor]]:
    """Return step and displacement of each model in use, as one of the clients that took it posts.

    In each try another of these clients is asked.
    """
    holders = _holders(start)
    collected: dict[int, tuple[int, torch.Tensor]] = {}
    for attempt in range(tries):
        asked: dict[int, int] = {}  # client -> model
        for j, clients in holders.items():
            if clients and j not in collected:
                asked[clients[attempt % len(clients)]] = j
        if not asked:
            break
        request = ModelRequest(Rows(torch.as_tensor(list(asked.values()))), start.number)
        replies = net.post(IFCAClient.send_model, request, to=list(asked))
        for k, i in enumerate(replies.ids):
            collected[asked[i]] = (replies.step, replies.rows.delta.row(k).cpu())
    return collected


def _holders(start: Restart) -> dict[int, list[int]]:
    """Return the clients that can post each model in use: they took it and lack no average."""
    lagging: set[int] = set()
    for box in start.pending:
        lagging.update(box.lagging_clients())
    holders: dict[int, list[int]] = {j: [] for j in sorted(set(start.choice))}
    for i, j in enumerate(start.choice):
        if i not in lagging:
            holders[j].append(i)
    return holders


def _stacked_picks(tables: Sequence[Picks]) -> tuple[tuple[int, ...], ...]:
    """Return each recipient's rows of several tables, as rows of the tables stacked."""
    recipients: list[list[int]] = [[] for _ in tables[0].picks]
    offset = 0
    for table in tables:
        for rows, picks in zip(recipients, table.picks, strict=True):
            rows.extend(offset + row for row in picks)
        offset += len(table.table)
    return tuple(tuple(rows) for rows in recipients)
