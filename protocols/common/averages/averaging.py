"""Federated averaging within clusters, by sums.

FedAvg is the case of one cluster, and every method averages like this once it has its clusters.

Clients weight what they send, so that the server needs sums only. The clients of a cluster that is
too small for a sum train alone, and send nothing.

Security rule: sums of weighted updates leave in groups of two or more only, or of more where the
run has another least number (`least_members`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from securecluster.clustering.labels import members as clusters_of
from securecluster.core.lazy_torch import torch
from securecluster.errors import PolicyError, StaleError, UpdateError
from securecluster.messaging.messages import Ack, Empty, Rows, select
from securecluster.messaging.replies import Replies, Sums
from securecluster.privacy.pipeline import Pipeline
from securecluster.protocols.common.averages.pending_updates import PendingUpdates
from securecluster.protocols.common.averages.sampling import sample_clients
from securecluster.protocols.common.client import TrainingClient
from securecluster.protocols.common.client_tensors import ClientTensor
from securecluster.protocols.common.disclosures import OfPlainSums
from securecluster.protocols.common.messages import AverageDeltas, Update
from securecluster.runtime.call_context import CallContext
from securecluster.runtime.endpoint import GATHER, SUM, answers
from securecluster.training.local_trainer import LocalTrainer, LocalTraining

if TYPE_CHECKING:
    from securecluster.runtime.server_channel import ServerChannel


class SumClient(TrainingClient):
    """Clients that contribute to a weighted mean, or train alone."""

    _trained = ClientTensor(dtype="int64")  # the last call in which each client trained alone
    # whether each client's model contains what it learned alone
    _unshared = ClientTensor(dtype="bool")

    def __init__(
        self,
        cohort: LocalTrainer,
        training: LocalTraining,
        pipeline: Pipeline,
        weighted: bool,
        start: torch.Tensor | None = None,
    ) -> None:
        super().__init__(cohort, training, pipeline, weighted, start)
        # A subclass may train alone without the noise of what leaves.
        self.training_alone = training

    @answers(SUM, through=("delta",), fresh=True, trains="usual", unmasked=("size",))
    def contribute(self, context: CallContext, query: AverageDeltas) -> Update:
        """Train from the cluster's model, and return the weighted update.

        θ_i ← θ_i + P⁻¹Δ_c(i); the reply is n_i·P(SGD_n(θ_i, D_i) − θ_i) and n_i (McMahan et al.
        2017, Algorithm 1). Clipped updates have equal weights, and n_i is not sent.

        Args:
            query: the averages Δ_c(i) that each client lacks.
        """
        # A weight n_i would multiply the sensitivity that clipping bounds.
        if self._pipeline.clips:
            return Update(self.trained(context, query).delta, None)
        weights = [self.cohort.sizes[k] for k in context.positions]
        update = self.trained(context, query, weights)
        sizes = self._sizes(context)
        return Update(update.delta, sizes)

    @answers(GATHER, private=False, trains="usual")
    def train_locally(self, context: CallContext, query: AverageDeltas) -> Ack:
        """Train from the cluster's model without sending an update.

        θ_i ← SGD_n(θ_i + P⁻¹Δ_c(i), D_i). A repeated or earlier call trains no client again.

        Args:
            query: the averages Δ_c(i) that each client lacks.
        """
        untrained = []
        for n, last in enumerate(self._trained[context.positions].tolist()):
            if last < context.step:
                untrained.append(n)
        if untrained:
            new_context = context.select(untrained)
            self._train_alone(new_context, select(query, untrained))
            self._unshared[new_context.positions] = True
        return Ack()

    def _train_alone(self, context: CallContext, query: AverageDeltas) -> None:
        """Apply the query's averages, then train each client's model in place.

        Raises:
            UpdateError: a model is not finite, in a run without noise.
        """
        self.catch_up(context, query)
        self.models = self._with_own_rows(context.positions)
        updates = self.cohort.train(
            self._rows(context.positions),
            context.positions,
            self.training_alone,
            context.step,
            regularizer=self.loss_term(context),
            apart=True,
        )
        diverged = []
        for i, update in zip(context.ids, updates, strict=True):
            if not bool(update.isfinite().all()):
                diverged.append(i)
        # The server receives no update here, so the client has to report this itself. Under noise
        # an error would be a release without noise: such an update counts as zeros instead.
        if diverged and not self._pipeline.private:
            few = ", ".join(map(str, diverged[:5]))
            raise UpdateError(
                f"round {context.round}: the model of client(s) {few} is not finite: lower the "
                "learning rate (--lr)"
            )
        for i, k, update in zip(context.ids, context.positions, updates, strict=True):
            if i not in diverged:
                self.models.row(k).add_(update)
        self._trained[context.positions] = context.step
        # Digests are cached by table, and rows of this one have changed in place.
        self._printed = (None, [])

    @property
    def unshared(self) -> frozenset[int]:
        """Return the positions of clients whose model was trained alone.

        Clients whose model has since been replaced by averages are not among them.
        """
        return frozenset(self._unshared.values.nonzero()[:, 0].tolist())

    def origin(self, positions: Sequence[int], query: AverageDeltas) -> Rows:
        """Return all models, with θ_0 for the clients that start over."""
        return self._reset(self.starting_over(positions, query))

    def take(self, positions: Sequence[int], query: AverageDeltas) -> None:
        """Apply the query's averages, and record whose model is now made of averages alone."""
        shared = self.starting_over(positions, query)
        if query.absolute:  # one displacement since θ_0 replaces the model
            shared |= {k for k, rows in self._due(positions, query).items() if rows}
        super().take(positions, query)
        self._unshared[list(shared)] = False

    def _rows(self, positions: Sequence[int]) -> Rows:
        """Return the models at these positions, without a copy."""
        assert self.models.index is not None
        index = tuple(self.models.index[k] for k in positions)
        return Rows(self.models.table, index)

    def _with_own_rows(self, positions: Sequence[int]) -> Rows:
        """Return all models, where the clients at these positions share their row with no other.

        Equal models are stored once, so a row must be copied before one client's model changes.

        Args:
            positions: of the clients whose models will change.
        """
        assert self.models.index is not None
        index = list(self.models.index)
        users = Counter(index)
        copied: list[int] = []
        for k in positions:
            row = index[k]
            if users[row] > 1:
                users[row] -= 1
                index[k] = len(self.models.table) + len(copied)
                copied.append(row)
        if not copied:
            return Rows(self.models.table, tuple(index))
        copies = self.models.table[torch.as_tensor(copied)]
        table = torch.cat([self.models.table, copies])
        return Rows(table, tuple(index))

    def _reset(self, positions: set[int]) -> Rows:
        """Return all models, with θ_0 for the clients at these positions."""
        if not positions:
            return self.models
        assert self.models.index is not None
        # Rows that only clients at these positions had are dropped.
        remaining = set()
        for k, row in enumerate(self.models.index):
            if k not in positions:
                remaining.add(row)
        rows = sorted(remaining)
        new_row = {row: n for n, row in enumerate(rows)}
        start_row = len(rows)
        index = []
        for k, row in enumerate(self.models.index):
            if k in positions:
                index.append(start_row)
            else:
                index.append(new_row[row])
        models = [self.models.table[row] for row in rows]
        table = torch.stack([*models, self._start])
        return Rows(table, tuple(index))


class SharedModelClient(SumClient):
    """Clients of sums that give newcomers a model, which is one of averages alone."""

    @answers(GATHER, through=("delta",), fresh=True, derived=True)
    def post(self, context: CallContext, query: Empty) -> Update:
        """Return θ_i − θ_0 of a model made of averages alone, for newcomers.

        Raises:
            PolicyError: a client has trained its model alone, which would leave without noise.
        """
        if self._unshared[context.positions].any():
            raise PolicyError(
                "post shows the model of averages: who has trained alone holds one of its own"
            )
        return self.displaced(context.positions)


class LocalFirstClient(SumClient):
    """Clients that train alone first, and then contribute to means that are applied to θ_0.

    Before they contribute they release something of what they learned alone.
    """

    def starting_over(self, positions: Sequence[int], query: AverageDeltas) -> set[int]:
        """Return the positions of the clients that receive their first average."""
        counts = query.count.values.tolist()
        first_time = set()
        applied = self._had[positions].tolist()
        for k, had, count in zip(positions, applied, counts, strict=True):
            if had == 0 and count > 0:
                first_time.add(k)
        return first_time

    def check_alone(self, context: CallContext, name: str) -> None:
        """Raise StaleError for clients that no longer hold the model that they trained alone.

        Args:
            context: the call to refuse.
            name: the client method that was called, for the message.
        """
        if self._had[context.positions].any():
            raise StaleError(
                f"{name} comes before the first average: it is about what a client learned alone"
            )


@dataclass
class AveragingState:
    """State of the server's loop: clusters, and averages that clients still lack."""

    labels: list[int]
    outbox: PendingUpdates


def average_clusters(net: ServerChannel, state: AveragingState, share: float, t: int) -> None:
    """Run one round of FedAvg in each cluster, and queue the averages for their members.

    Args:
        share: of each cluster's members that train, in (0, 1].
        t: the round's number.
    """
    sums = cluster_sums(net, state, share, t)
    if sums is not None:
        state.outbox.post(sums.step, weighted_means(sums), state.labels)


def cluster_sums(
    net: ServerChannel, state: AveragingState, share: float, t: int
) -> Sums[Update] | None:
    """Return the sum of the weighted updates of each cluster in round t.

    Clients in clusters with too few members for a sum, of one by default, train alone instead. In
    every other cluster at least as many are sampled: a sum over one client hides nothing (not in
    the papers).

    Args:
        share: of each cluster's members that train, in (0, 1].
        t: the round's number.

    Returns:
        None where no client contributes.
    """
    clusters = clusters_of(state.labels)
    lone: list[int] = []
    sampled: list[int] = []
    for c, members in enumerate(clusters):
        if len(members) < net.least_members:
            lone += members
        else:
            sampled += sample_clients(net, members, share, t, c, minimum=net.least_members)
    lone.sort()
    sampled.sort()
    # the two wait for nothing of each other
    finish = _begin_lone_training(net, state, lone) if lone else None
    sums: Sums[Update] | None = None
    if sampled:
        sums = net.sum(
            SumClient.contribute,
            state.outbox.message_for(sampled),
            to=sampled,
            by=[state.labels[i] for i in sampled],
            groups=len(clusters),
            rosters=clusters,
        )
        state.outbox.acknowledge(sums.ids)
    if finish is not None:
        state.outbox.acknowledge(finish().ids)
    if sums is None or not sums.ids:
        return None
    return sums


def _begin_lone_training(
    net: ServerChannel, state: AveragingState, lone: Sequence[int]
) -> Callable[[], Replies[Ack]]:
    """Ask the clients of small clusters to train alone; return what collects their replies."""
    # Later averages would undo what a lone client learns, whether it replies in this round or not.
    state.outbox.unsubscribe(lone)
    return net.begin(SumClient.train_locally, state.outbox.message_for(lone), lone)


def weighted_means(sums: Sums[Update]) -> torch.Tensor:
    """Return Σ n_i·Δ_i / Σ n_i for each group, (K, d), with zeros for a group without replies.

    Args:
        sums: of n_i·Δ_i and n_i, by group.
    """
    # Masked where updates are: the mask is linear, so clients unmask the mean.
    delta = sums.rows.delta.table
    size = total_weights(sums).to(delta)
    # A group without replies has a sum of zeros, and no weight to divide by.
    divisor = torch.where(size > 0, size, torch.ones_like(size))
    return delta / divisor[:, None]


def total_weights(sums: Sums[Update]) -> torch.Tensor:
    """Return the total weight of each group, (K,), by which its sum is divided.

    It is the number of samples, or the number of clients where sample counts are not sent.

    Args:
        sums: of weighted updates, by group.
    """
    if sums.rows.size is None:
        return torch.as_tensor(sums.counts, dtype=sums.rows.delta.table.dtype)
    return sums.rows.size.table


def visible_sample_counts(weighted: bool) -> list[str]:
    """Return what a plain sum of weighted updates shows the server beside the updates.

    Args:
        weighted: whether clients send n_i, which no mask covers.
    """
    if not weighted:
        return []
    return [OfPlainSums("each client's number of samples (the plain sum reads every reply)")]
