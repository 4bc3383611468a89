"""Both ends of federated averaging by displacements, so that the server never needs a model.

The client's end is `TrainingClient`, which holds θ, applies the averaged updates it is sent, trains
and replies with its own. The server's end is `PendingUpdates`, which keeps every average until each
client it is meant for has it; a client that missed rounds is sent what it lacks, and that counts as
bytes.

Averages are numbered. A reply may be lost after its request was carried out, a frame may come twice
or late, and a server that was killed goes on from its checkpoint and asks again: a client counts
what it has applied, so that no average moves its model twice.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from securecluster.core.lazy_torch import torch
from securecluster.messaging.messages import Empty, Picks, Rows
from securecluster.protocols.common.client import TrainingClient, UpdateClient
from securecluster.protocols.common.messages import NO_END, AverageDeltas, ModelDelta
from securecluster.runtime.run import Run
from securecluster.runtime.server_channel import ServerChannel


@dataclass
class RoundAverages:
    """One round's averages: `table[row_of[i]]` is client i's, -1 where it has none."""

    step: int
    table: torch.Tensor  # (K, d)
    row_of: list[int]  # (m,)


@dataclass
class PendingUpdates:
    """Averages that some client still lacks.

    Under fresh masks every round's average is kept apart, since the server cannot add averages of
    different rounds; without a mask one row per cluster, its displacement since θ_0, replaces them
    all.
    """

    fresh: bool
    lacks: list[int]  # (m,) the number of the first post each client lacks
    # (m,) the number of the first post that is not meant for it; NEVER where all are
    ends: list[int]
    posts: list[RoundAverages] = field(default_factory=list)
    first: int = 0  # the number of posts[0]
    restart: int | None = None  # of the models from θ_0, where a method restarts them

    @classmethod
    def start(cls, clients: int, fresh: bool) -> PendingUpdates:
        """An empty outbox."""
        return cls(fresh, [0] * clients, [NO_END] * clients)

    @property
    def number(self) -> int:
        """Averages posted so far."""
        return self.first + len(self.posts)

    def post(self, step: int, means: torch.Tensor, labels: Sequence[int]) -> None:
        """Add a round's averages (K, d), kept in main memory; `labels[i]` is client i's row."""
        means = means.cpu()
        if not self.fresh and self.posts:
            before = self.posts[-1]
            source = [before.row_of[list(labels).index(c)] for c in range(len(means))]
            means = before.table[torch.as_tensor(source)] + means
            self.first += 1
            self.posts = []
        self.posts.append(RoundAverages(step, means, list(labels)))

    def displacement(self, client: int, width: int) -> torch.Tensor:
        """Return all averages so far for a client as one row, where there is no mask.

        Before the first average it is zero, of `width` numbers.
        """
        if not self.posts:
            return torch.zeros(width)
        last = self.posts[-1]
        return last.table[last.row_of[client]]

    def message_for(self, to: Sequence[int]) -> AverageDeltas:
        """Return the averages that each of `to` lacks."""
        counts = Rows(torch.as_tensor([self.count(i) for i in to], dtype=torch.int64))
        if not self.posts:
            no_picks = ((),) * len(to)
            no_means = Picks(torch.zeros(0, 0), no_picks)
            no_steps = Picks(torch.zeros(0, dtype=torch.int64), no_picks)
            return AverageDeltas(no_means, no_steps, False, counts, self.restart)
        means = torch.cat([post.table for post in self.posts])
        steps: list[int] = []
        for post in self.posts:
            steps += [post.step] * len(post.table)
        picks = tuple(self._missing_rows(i) for i in to)
        return AverageDeltas(
            Picks(means, picks),
            Picks(torch.as_tensor(steps), picks),
            not self.fresh,
            counts,
            self.restart,
        )

    def count(self, client: int) -> int:
        """Return how many averages have been posted that are meant for a client.

        For a newcomer, whom none is meant for, it is 0.
        """
        return min(self.number, self.ends[client]) if client < len(self.ends) else 0

    def _missing_rows(self, client: int) -> tuple[int, ...]:
        """Return the rows of the stacked averages that a client lacks, oldest first."""
        latest = self.count(client) - 1
        rows = []
        offset = 0
        for n, post in enumerate(self.posts):
            # A displacement since θ_0 replaces earlier ones: of a client that has left, its
            # cluster's has not changed since.
            number = self.first + n if self.fresh else latest
            if self.lacks[client] <= number < self.ends[client]:
                rows.append(offset + post.row_of[client])
            offset += len(post.table)
        return tuple(rows)

    def acknowledge(self, ids: Sequence[int]) -> None:
        """Note that these clients replied, so that they have everything posted so far.

        What nobody lacks is dropped.
        """
        for i in ids:
            self.lacks[i] = max(self.lacks[i], self.count(i))
        if not self.fresh:
            return
        first_missing = [n for n, end in zip(self.lacks, self.ends, strict=True) if n < end]
        oldest = min(first_missing, default=NO_END)
        while self.posts and oldest > self.first:
            self.posts.pop(0)
            self.first += 1

    def unsubscribe(self, ids: Sequence[int]) -> None:
        """These clients go on alone: nothing posted later is meant for them."""
        for i in ids:
            self.ends[i] = min(self.ends[i], self.number)

    def lagging_clients(self) -> list[int]:
        """The clients that lack some average."""
        return [i for i, lacked in enumerate(self.lacks) if lacked < self.count(i)]


def flush(net: ServerChannel, run: Run, state: Any, tries: int = 5) -> None:
    """Bring the last averages to everyone.

    Whoever does not reply is asked again, a few times, and then stays behind by name.
    """

    def send() -> PendingUpdates:
        outbox: PendingUpdates = state.outbox
        for _ in range(tries):
            lagging = outbox.lagging_clients()
            if not lagging:
                break
            replies = net.gather(TrainingClient.receive, outbox.message_for(lagging), to=lagging)
            outbox.acknowledge(replies.ids)
        return outbox

    state.outbox = run.once("deliver", send, PendingUpdates)


def request_model(
    net: ServerChannel, outbox: PendingUpdates, members: Sequence[int], width: int
) -> ModelDelta:
    """A cluster's model; where no member that has it replies, none.

    Without a mask the server knows its displacement (zero of `width` numbers before the first
    average); under fresh masks, whose averages it cannot add, a member posts it: one that lacks no
    average.
    """
    if not outbox.fresh:
        return ModelDelta(outbox.displacement(members[0], width))
    lagging = set(outbox.lagging_clients())
    for i in members:
        if i in lagging:
            continue
        replies = net.post(UpdateClient.post, Empty(), to=[i])
        if replies.ids:
            return ModelDelta(replies.rows.delta.values[0].cpu(), replies.step)
    return ModelDelta()
