"""Both ends of federated averaging by model deltas, so that the server never needs a model.

The client's end is `TrainingClient`, which holds θ, applies the averaged updates that it receives,
trains, and sends its own update. The server's end is `PendingUpdates`, which stores every average
until each client it is meant for has received it. A client that missed rounds receives all averages
that it lacks, and these count as bytes.

Averages are numbered. A reply may be lost after its request was carried out, a frame may arrive
twice or late, and a server that was killed resumes from its checkpoint and calls again. Clients
count the averages that they have applied, so that no average changes a model twice.

So a client that missed rounds ends bit-identical to its peers (under the rotations: where their
machines round alike). Without a mask one delta since θ_0, which follows from the public
configuration and is never sent, replaces the list. A client that has applied fewer averages than
the server believes has lost its state, and says so.

Security rules: a request about an earlier model than the client's is refused, since its reply would
be made of another model, and under noise be a release that nobody accounts for. A client that
trains alone does so once for each call and never for an earlier one; averages queued after that are
not for it, whether its reply came or not.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from securecluster.core.lazy_torch import torch
from securecluster.messaging.messages import Empty, Picks, Rows
from securecluster.protocols.common.client import TrainingClient, UpdateClient
from securecluster.protocols.common.messages import NO_END, AverageDeltas, ModelDelta
from securecluster.runtime.run import Run

if TYPE_CHECKING:
    from securecluster.runtime.server_channel import ServerChannel


@dataclass
class RoundAverages:
    """Averages of one round; `table[row_of[i]]` is client i's, and -1 means that it has none."""

    step: int
    table: torch.Tensor  # (K, d)
    row_of: list[int]  # (m,)


@dataclass
class PendingUpdates:
    """Queue of averages that some client still lacks.

    Under fresh masks every round's average is stored separately, since the server cannot add
    averages of different rounds. Without a mask, one row per cluster replaces them all: its
    displacement since θ_0.
    """

    fresh: bool
    lacks: list[int]  # (m,) the number of the first post each client lacks
    # (m,) the number of the first post that is not meant for a client; NO_END where all are
    ends: list[int]
    posts: list[RoundAverages] = field(default_factory=list)
    first: int = 0  # the number of posts[0]
    restart: int | None = None  # of the models from θ_0, where a method restarts them

    @classmethod
    def start(cls, clients: int, fresh: bool) -> PendingUpdates:
        """Return an empty queue.

        Args:
            clients: m.
            fresh: updates have a fresh mask in each round.
        """
        return cls(fresh, [0] * clients, [NO_END] * clients)

    @property
    def number(self) -> int:
        """Return the number of averages posted so far."""
        return self.first + len(self.posts)

    def post(self, step: int, means: torch.Tensor, labels: Sequence[int]) -> None:
        """Add a round's averages, which are stored in main memory.

        Args:
            step: the call whose mask the averages carry.
            means: (K, d).
            labels: (m,) each client's row of the means.
        """
        means = means.cpu()
        if not self.fresh and self.posts:
            previous = self.posts[-1]
            # Clusters may have split since: each one continues the displacement of its members.
            member_of: dict[int, int] = {}
            for member, c in enumerate(labels):
                member_of.setdefault(c, member)
            source = [previous.row_of[member_of[c]] for c in range(len(means))]
            means = previous.table[torch.as_tensor(source)] + means
            self.first += 1
            self.posts = []
        self.posts.append(RoundAverages(step, means, list(labels)))

    def displacement(self, client: int, width: int) -> torch.Tensor:
        """Return all averages so far for a client as one row, (d,), where there is no mask.

        Args:
            client: its number.
            width: d, for the zeros that are returned before the first average.
        """
        if not self.posts:
            return torch.zeros(width)
        latest = self.posts[-1]
        return latest.table[latest.row_of[client]]

    def message_for(self, to: Sequence[int]) -> AverageDeltas:
        """Return a message with the averages that each recipient lacks.

        Args:
            to: numbers of the recipients.
        """
        counts = Rows(torch.as_tensor(self.counts(to), dtype=torch.int64))
        if not self.posts:
            no_picks = ((),) * len(to)
            no_means = Picks(torch.zeros(0, 0), no_picks)
            no_steps = Picks(torch.zeros(0, dtype=torch.int64), no_picks)
            return AverageDeltas(no_means, no_steps, False, counts, self.restart)
        means = torch.cat([post.table for post in self.posts])
        steps: list[int] = []
        for post in self.posts:
            steps += [post.step] * len(post.table)
        picks = self._missing_rows(to)
        return AverageDeltas(
            Picks(means, picks),
            Picks(torch.as_tensor(steps), picks),
            not self.fresh,
            counts,
            self.restart,
        )

    def counts(self, clients: Sequence[int]) -> list[int]:
        """Return how many averages have been posted that are meant for each client.

        It is 0 for a newcomer, for which no average is meant.

        Args:
            clients: their numbers.
        """
        number = self.number
        client_count = len(self.ends)
        return [min(number, self.ends[i]) if i < client_count else 0 for i in clients]

    def _missing_rows(self, clients: Sequence[int]) -> tuple[tuple[int, ...], ...]:
        """Return the rows of the stacked averages that each client lacks, oldest first."""
        latest = [count - 1 for count in self.counts(clients)]
        rows: list[tuple[int, ...]] = [()] * len(latest)
        offset = 0
        for n, post in enumerate(self.posts):
            # A displacement since θ_0 replaces earlier ones. For a client that no longer receives
            # averages, that of its cluster has not changed since.
            numbers = latest
            if self.fresh:
                numbers = [self.first + n] * len(latest)
            row_of = post.row_of
            for k, (client, number) in enumerate(zip(clients, numbers, strict=True)):
                if self.lacks[client] <= number < self.ends[client]:
                    rows[k] += (offset + row_of[client],)
            offset += len(post.table)
        return tuple(rows)

    def acknowledge(self, ids: Sequence[int]) -> None:
        """Mark all queued averages as received by these clients.

        Averages that every client has received are dropped.

        Args:
            ids: numbers of the clients that replied.
        """
        for i, received in zip(ids, self.counts(ids), strict=True):
            self.lacks[i] = max(self.lacks[i], received)
        if not self.fresh:
            return
        # Clients that received all averages meant for them need no older ones.
        first_missing = []
        for lacked, end in zip(self.lacks, self.ends, strict=True):
            if lacked < end:
                first_missing.append(lacked)
        oldest = min(first_missing, default=NO_END)
        while self.posts and oldest > self.first:
            self.posts.pop(0)
            self.first += 1

    def unsubscribe(self, ids: Sequence[int]) -> None:
        """Remove clients from the recipients of all later averages.

        Args:
            ids: numbers of the clients.
        """
        for i in ids:
            self.ends[i] = min(self.ends[i], self.number)

    def lagging_clients(self) -> list[int]:
        """Return the clients that lack some average."""
        meant = self.counts(range(len(self.lacks)))
        return [i for i, lacked in enumerate(self.lacks) if lacked < meant[i]]


def flush(net: ServerChannel, run: Run, state: Any, tries: int = 5) -> None:
    """Send the last averages to all clients.

    Clients that do not reply are called again, and in the end remain in `lagging_clients`.

    Args:
        state: of the server's loop, with the queue as its `outbox`.
        tries: number of calls.
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
    """Return a cluster's model as the displacement from θ_0.

    Without a mask the server knows it. Fresh masks hide it, since the server cannot add averages of
    different rounds: then a member that lacks no average uploads it.

    Args:
        members: the cluster's clients, which are called one by one until one replies.
        width: d, for the zeros that are returned before the first average.

    Returns:
        An empty displacement where no member with the current model replies.
    """
    if not outbox.fresh:
        return ModelDelta(outbox.displacement(members[0], width))
    (model,) = request_models(net, outbox, [members], width)
    return model


def request_models(
    net: ServerChannel, outbox: PendingUpdates, clusters: Sequence[Sequence[int]], width: int
) -> list[ModelDelta]:
    """Return the models of several clusters, as `request_model` does, each under a mask of its own.

    One member of each cluster is called at a time, all of these together.

    Args:
        clusters: members of each.
        width: d, for the zeros that are returned before the first average.
    """
    if not outbox.fresh:
        return [ModelDelta(outbox.displacement(members[0], width)) for members in clusters]
    lagging = set(outbox.lagging_clients())
    current = [[i for i in members if i not in lagging] for members in clusters]
    models = [ModelDelta() for _ in clusters]
    posted_clusters: set[int] = set()
    for attempt in range(max(map(len, current), default=0)):
        # by member, the cluster whose model it uploads
        cluster_of: dict[int, int] = {}
        for cluster, members in enumerate(current):
            if cluster not in posted_clusters and attempt < len(members):
                cluster_of[members[attempt]] = cluster
        if not cluster_of:
            break
        posted = net.post_each(UpdateClient.post, Empty(), to=list(cluster_of))
        for cluster, replies in zip(cluster_of.values(), posted, strict=True):
            if replies.ids:
                displacement = replies.rows.delta.values[0].cpu()
                models[cluster] = ModelDelta(displacement, replies.step)
                posted_clusters.add(cluster)
    return models
