"""Federated averaging within clusters, by sums.

FedAvg does this with one cluster, and every method does it once it knows its clusters.

The client weighs what it sends, so that the server needs sums only. A cluster of one has nobody to
average with: its client trains alone, and nothing leaves it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from securecluster.clustering.labels import members as clusters_of
from securecluster.core.lazy_torch import torch
from securecluster.errors import PolicyError, UpdateError
from securecluster.messaging.messages import Ack, Rows, select
from securecluster.messaging.replies import Sums
from securecluster.privacy.pipeline import Pipeline
from securecluster.protocols.common.client import TrainingClient
from securecluster.protocols.common.messages import AverageDeltas, Update
from securecluster.protocols.common.pending_updates import PendingUpdates
from securecluster.protocols.common.sampling import sample_clients
from securecluster.runtime.endpoint import GATHER, MINIMUM, SUM, CallContext, answers
from securecluster.runtime.server_channel import ServerChannel
from securecluster.training.local_trainer import LocalTrainer, LocalTraining


class SumClient(TrainingClient):
    """Clients that contribute to a weighted mean, or train alone."""

    def __init__(
        self,
        cohort: LocalTrainer,
        training: LocalTraining,
        pipeline: Pipeline,
        weighted: bool,
        start: torch.Tensor | None = None,
    ) -> None:
        super().__init__(cohort, training, pipeline, weighted, start)
        self.training_alone = training
        self._trained = [0] * len(cohort.ids)  # the last call in which each client trained alone
        # positions of clients whose model holds what they learned alone
        self._unshared: set[int] = set()

    @answers(SUM, through=("delta",), fresh=True, trains="usual", unmasked=("size",))
    def contribute(self, context: CallContext, query: AverageDeltas) -> Update:
        """Train from the cluster's model, and reply with the weighted update and n_i.

        θ_i ← θ_i + P⁻¹Δ_c(i); the reply is n_i·P(SGD_n(θ_i, D_i) − θ_i) and n_i (McMahan et al.
        2017, Algorithm 1). Where updates are clipped they count the same, and n_i stays here.
        """
        if self._pipeline.clips:
            return Update(self.trained(context, query).delta, None)
        found = self.trained(context, query, [self.cohort.sizes[k] for k in context.positions])
        return Update(found.delta, self._sizes(context))

    @answers(GATHER, private=False, trains="usual")
    def train_locally(self, context: CallContext, query: AverageDeltas) -> Ack:
        """Make θ_i ← SGD_n(θ_i + P⁻¹Δ_c(i), D_i), which stays here.

        Asked again, or for an earlier call, a client does not train again.
        """
        new = [n for n, k in enumerate(context.positions) if self._trained[k] < context.step]
        if new:
            ids, at = tuple(context.ids[n] for n in new), tuple(context.positions[n] for n in new)
            self._train_alone(CallContext(ids, at, context.round, context.step), select(query, new))
            self._unshared |= set(at)
        return Ack()

    def _train_alone(self, context: CallContext, query: AverageDeltas) -> None:
        self.catch_up(context, query)
        self.models = self._apart(context.positions)
        updates = self.cohort.train(
            self._rows(context.positions), context.positions, self.training_alone, context.step
        )
        bad = [
            i
            for i, update in zip(context.ids, updates, strict=True)
            if not bool(update.isfinite().all())
        ]
        if bad and not self._pipeline.private:  # no update is sent, so no server can tell
            few = ", ".join(map(str, bad[:5]))
            raise UpdateError(
                f"round {context.round}: the model of client(s) {few} is not finite: lower the "
                "learning rate (--lr)"
            )
        for i, k, update in zip(context.ids, context.positions, updates, strict=True):
            # under noise such an update counts as zeros, since an error would be a release without
            # noise
            if i not in bad:
                self.models.row(k).add_(update)
            self._trained[k] = context.step
        self._printed = (None, [])  # of rows that have changed in place

    @property
    def unshared(self) -> frozenset[int]:
        """Return the positions of clients whose model was trained alone.

        Clients whose model has since been replaced by averages are not among them.
        """
        return frozenset(self._unshared)

    def origin(self, at: Sequence[int], query: AverageDeltas) -> Rows:
        """Return all models, with θ_0 for the clients that start over."""
        return self._anew(self.starting_over(at, query))

    def starting_over(self, at: Sequence[int], query: AverageDeltas) -> set[int]:
        """Return the positions of the clients whose averages count from θ_0.

        These averages count from there whatever the clients hold. Here there are no such clients.
        """
        return set()

    def take(self, at: Sequence[int], query: AverageDeltas) -> None:
        """Apply averages as every trainee does.

        Note whose model is now made of averages alone.
        """
        shared = self.starting_over(at, query)
        if query.absolute:  # one displacement since θ_0 replaces the model
            counts = query.count.values.tolist()
            brought = zip(at, query.means.picks, counts, strict=True)
            shared |= {k for k, picks, count in brought if self._due(k, picks, count, query)}
        super().take(at, query)
        self._unshared -= shared

    def memory(self) -> dict[str, torch.Tensor]:
        """Add the calls in which they trained alone, and who holds a model of its own."""
        unshared = torch.tensor(sorted(self._unshared), dtype=torch.int64)
        return {**super().memory(), "trained": torch.as_tensor(self._trained), "unshared": unshared}

    def recall(self, memory: Mapping[str, torch.Tensor]) -> None:
        """Take over what `memory` returned."""
        super().recall(memory)
        self._trained = memory["trained"].tolist()
        self._unshared = set(memory["unshared"].tolist())

    def _rows(self, at: Sequence[int]) -> Rows:
        """The models at these positions, without a copy."""
        assert self.models.index is not None
        return Rows(self.models.table, tuple(self.models.index[k] for k in at))

    def _apart(self, at: Sequence[int]) -> Rows:
        """All models, with rows of their own for the clients at these positions."""
        assert self.models.index is not None
        index, users = list(self.models.index), Counter(self.models.index)
        copies: list[int] = []
        for k in at:
            if users[index[k]] > 1:
                users[index[k]] -= 1
                copies.append(index[k])
                index[k] = len(self.models.table) + len(copies) - 1
        table = (
            torch.cat([self.models.table, self.models.table[torch.as_tensor(copies)]])
            if copies
            else self.models.table
        )
        return Rows(table, tuple(index))

    def _anew(self, at: set[int]) -> Rows:
        """All models, with θ_0 for the clients at these positions."""
        if not at:
            return self.models
        assert self.models.index is not None
        kept = sorted({row for k, row in enumerate(self.models.index) if k not in at})
        place = {row: n for n, row in enumerate(kept)}
        table = torch.stack([*(self.models.table[row] for row in kept), self._start])
        return Rows(
            table,
            tuple(len(kept) if k in at else place[row] for k, row in enumerate(self.models.index)),
        )


class LocalFirstClient(SumClient):
    """Clients that train alone first, and then contribute to means that count from θ_0.

    Before they contribute they tell something of what they learned alone.
    """

    def starting_over(self, at: Sequence[int], query: AverageDeltas) -> set[int]:
        """Return the positions of the clients whose first average this is."""
        counts = zip(at, query.count.values.tolist(), strict=True)
        return {k for k, count in counts if self._had[k] == 0 and count > 0}

    def check_alone(self, context: CallContext, name: str) -> None:
        """Raise PolicyError for clients that no longer hold the model that they trained alone."""
        if any(self._had[k] for k in context.positions):
            raise PolicyError(
                f"{name} comes before the first average: it is about what a client learned alone"
            )


@dataclass
class AveragingState:
    """What the server's loop changes."""

    labels: list[int]
    outbox: PendingUpdates


def average_clusters(net: ServerChannel, state: AveragingState, share: float, t: int) -> None:
    """Make round t of FedAvg in each cluster, averaged by n_i.

    A share of its members takes part, two or more (ours: a sum over one hides nothing).
    """
    total = cluster_sums(net, state, share, t)
    if total is not None:
        state.outbox.post(total.step, weighted_means(total), state.labels)


def cluster_sums(
    net: ServerChannel, state: AveragingState, share: float, t: int
) -> Sums[Update] | None:
    """Return what the clusters' members contribute in round t, by cluster.

    Return None where nobody contributes. Lone clients train alone.
    """
    clusters = clusters_of(state.labels)
    lone = sorted(own[0] for own in clusters if len(own) == 1)
    if lone:
        # whether they reply or not: what is averaged from now on would undo what they learn alone
        state.outbox.unsubscribe(lone)
        state.outbox.acknowledge(
            net.gather(SumClient.train_locally, state.outbox.message_for(lone), to=lone).ids
        )
    asked = sorted(
        i
        for c, own in enumerate(clusters)
        if len(own) > 1
        for i in sample_clients(net, own, share, t, c, minimum=MINIMUM)
    )
    if asked:
        by = [state.labels[i] for i in asked]
        total = net.sum(
            SumClient.contribute,
            state.outbox.message_for(asked),
            to=asked,
            by=by,
            groups=len(clusters),
        )
        state.outbox.acknowledge(total.ids)
        return total if total.ids else None
    return None


def weighted_means(total: Sums[Update]) -> torch.Tensor:
    """Σ n_i·Δ_i / Σ n_i per group, (K, d); zero for a group nobody replied from."""
    delta = total.rows.delta.table
    size = total_weights(total).to(delta)
    return delta / torch.where(size > 0, size, torch.ones_like(size))[:, None]


def total_weights(total: Sums[Update]) -> torch.Tensor:
    """Return what each group's sum is to be divided by, (K,).

    It is the number of its clients' samples, or, where these are not told, the number of its
    clients.
    """
    if total.rows.size is None:
        return torch.as_tensor(total.counts, dtype=total.rows.delta.table.dtype)
    return total.rows.size.table
