"""IFCA's server: restarts, the models that they offer, and the choices among them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

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
    boxes: list[PendingUpdates]  # of each model
    choice: list[int]  # (m,) the model that each client took last
    loss: float = math.inf  # mean over samples of their client's least loss, at the end

    @classmethod
    def begin(cls, number: int, k: int, clients: int, fresh: bool) -> Restart:
        """Nothing sent yet."""
        return cls(number, [PendingUpdates.start(clients, fresh) for _ in range(k)], [0] * clients)

    def message_for(self, to: Sequence[int], best: Restart | None = None) -> ModelAverages:
        """What each of `to` lacks."""
        letters = [box.message_for(to) for box in self.boxes]
        places = np.cumsum([0, *(len(letter.means.table) for letter in letters)]).tolist()
        own = [
            [tuple(p + first for p in picks) for picks in letter.means.picks]
            for first, letter in zip(places, letters, strict=False)
        ]
        picks = tuple(sum(each, ()) for each in zip(*own, strict=True))
        means = torch.cat(
            [letter.means.table for letter in letters if len(letter.means.table)]
            or [torch.zeros(0, 0)]
        )
        steps = torch.cat([letter.steps.table for letter in letters])
        models = torch.as_tensor(
            [j for j, letter in enumerate(letters) for _ in letter.steps.table], dtype=torch.int64
        )
        kept, absolute = (
            self.number if best is None else best.number,
            any(letter.absolute for letter in letters),
        )
        k, counts = len(self.boxes), torch.stack([letter.count.table for letter in letters], 1)
        return ModelAverages(
            Picks(means, picks),
            Picks(steps, picks),
            Picks(models, picks),
            k,
            self.number,
            kept,
            absolute,
            Rows(counts),
        )

    def acknowledge(self, ids: Sequence[int]) -> None:
        """These clients replied, so they have all of it."""
        for box in self.boxes:
            box.acknowledge(ids)

    def taken(self, got: Replies[ModelChoice]) -> None:
        """These clients have all of it, and took these models."""
        self.acknowledge(got.ids)
        if got.ids:
            for i, j in zip(got.ids, got.rows.model.values.tolist(), strict=True):
                self.choice[i] = j

    def judged(self, got: Sums[LowestLoss]) -> float | None:
        """The mean of the least losses, over samples where clients tell how many; None where nobody
        replied.
        """
        self.acknowledge(got.ids)
        if not got.ids:
            return None
        self.loss = float(
            got.rows.loss.table / (got.counts[0] if got.rows.size is None else got.rows.size.table)
        )
        return self.loss

    def post(self, step: int, sums: torch.Tensor, sizes: torch.Tensor) -> None:
        """Add a round's averages (K, d), given as sums and weights; a model nobody took stays where
        it is.
        """
        for box, total, size in zip(self.boxes, sums, sizes.tolist(), strict=True):
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
        steps, models = torch.as_tensor(self.steps), torch.as_tensor(self.models)
        k, number = len(start.boxes), start.number
        counts = torch.zeros(clients, k, dtype=torch.int64)
        counts[:, models] = 1
        return ModelAverages(
            Picks(self.table, picks),
            Picks(steps, picks),
            Picks(models, picks),
            k,
            number,
            number,
            True,
            Rows(counts),
        )


def collect_models(
    net: ServerChannel, start: Restart, masked: bool, tries: int = 5
) -> OfferedModels:
    """The models in use. Under a mask the server cannot add up their averages, so a client that
    lacks none of them shows one.
    """
    found: dict[int, tuple[int, torch.Tensor]] = {}
    late = {i for box in start.boxes for i in box.lagging_clients()}
    used = {
        j: [i for i, own in enumerate(start.choice) if own == j] for j in sorted(set(start.choice))
    }
    if not masked:
        moved = {j: start.boxes[j].posts[-1].table[0] for j in used if start.boxes[j].posts}
        found = {
            j: (0, moved.get(j, torch.zeros_like(row)))
            for row in list(moved.values())[:1]
            for j in used
        }
    for n in range(tries if masked else 0):
        able = {j: [i for i in own if i not in late] for j, own in used.items() if j not in found}
        asked = {own[n % len(own)]: j for j, own in able.items() if own}
        if asked:
            got = net.post(
                IFCAClient.show,
                ModelRequest(Rows(torch.as_tensor(list(asked.values()))), start.number),
                to=list(asked),
            )
            found |= {
                asked[i]: (got.step, got.rows.delta.row(k).cpu()) for k, i in enumerate(got.ids)
            }
    models = sorted(found)
    table = torch.stack([found[j][1] for j in models]) if found else torch.zeros(0, 0)
    return OfferedModels(models, [found[j][0] for j in models], table)
