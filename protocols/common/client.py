"""Clients that train, and clients whose updates the server reads individually.

Training writes all updates into the one (m, d) matrix that there is, wide enough for what a mask
adds, and the mask works in it (`@answers(fresh=True)`). Checks and geometry go by blocks; a sum
streams over clients.

Only an `UpdateClient` replies with its own update or model; the other clients refuse to.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from operator import methodcaller
from typing import TYPE_CHECKING, Any, ClassVar

from securecluster.core.floating_point import margin
from securecluster.core.lazy_torch import torch
from securecluster.errors import StaleError, UpdateError
from securecluster.messaging.messages import Ack, Empty, Rows
from securecluster.messaging.octets import as_rows, as_table
from securecluster.parties.client_state import ClientState
from securecluster.privacy.pipeline import Pipeline
from securecluster.protocols.common import client_tensors
from securecluster.protocols.common.messages import AverageDeltas, ColumnScale, ColumnSums, Update
from securecluster.runtime.call_context import CallContext
from securecluster.runtime.endpoint import GATHER, SUM, answers
from securecluster.runtime.origins import chained, digest
from securecluster.training.local_trainer import (
    LocalTrainer,
    LocalTraining,
    LossTerm,
    MeanRegularizer,
)

if TYPE_CHECKING:
    from securecluster.privacy.masking.key_agreement import Secrets

TUNING_STEP = 1 << 48  # beyond all calls: batches of tuning are those of none
LINEAGE = 32  # bytes of a digest of averages


class TrainingClient:
    """Clients that train from their cluster's model.

    Subclasses define how an update may leave.

    Args:
        cohort: the clients' data and local training.
        training: hyper-parameters of local training.
        pipeline: stages between an update and the wire.
        weighted: clients send |D_i|.
        start: (d,) the initial model θ_0; None is the cohort's.
    """

    one_model: ClassVar[bool] = True
    """True where a client trains one model in the whole run, so that momentum can persist."""
    scale_noise: float = 1.0  # noise multiplier of `sum_columns` over that of training
    clear: ClassVar[bool] = False  # True where a part of a model leaves without a mask
    # what the guard of their endpoint remembers of them (`release_guard`)
    guard_informed = client_tensors.ClientTensor(dtype="bool")
    guard_trained = client_tensors.ClientTensor(dtype="int64")

    # the number of averages each client has applied
    _had = client_tensors.ClientTensor(dtype="int64")
    # digests of these averages, as the server sent them; zeros at θ_0
    _lineage = client_tensors.ClientTensor(LINEAGE, dtype="uint8")

    def __init_subclass__(cls, **keywords: Any) -> None:
        """Check the names of the tensors that a class declares.

        Raises:
            UsageError: a base has something of that name.
        """
        super().__init_subclass__(**keywords)
        client_tensors.check_names(cls)

    def __init__(
        self,
        cohort: LocalTrainer,
        training: LocalTraining,
        pipeline: Pipeline,
        weighted: bool,
        start: torch.Tensor | None = None,
    ) -> None:
        self.cohort = cohort
        self.training = training
        self._pipeline = pipeline
        self._weighted = weighted
        if start is None:
            start = cohort.start
        self._start = start
        clients = len(cohort.ids)
        # All clients begin with one stored row.
        table = self._start[None].clone()
        self.models = Rows(table, (0,) * clients)
        self._memo = _MovedModels()
        # A table of models, and the digests of its rows.
        self._printed: tuple[torch.Tensor | None, list[bytes]] = (None, [])

    def release_training(self, context: CallContext, rows: torch.Tensor) -> torch.Tensor:
        """Return rows that follow from local training as they may leave, (b, d).

        Where a client is the unit of privacy, they are clipped to S, and get noise of standard
        deviation zS, as updates do. Under DP-SGD they have the noise of their training.

        Args:
            context: the clients (b,).
            rows: (b, d) what each client's training changed.
        """
        noise = context.noise
        if noise is None or noise.unit == "example":
            return rows
        return context.release(rows)

    @property
    def unshared(self) -> frozenset[int]:
        """Return the positions of clients whose model is not made of averages alone.

        Here there are no such clients.
        """
        return frozenset()

    def trained(
        self,
        context: CallContext,
        query: AverageDeltas,
        scale: Sequence[float] | None = None,
        plan: LocalTraining | None = None,
    ) -> Update:
        """Apply the query's averages, train, and return the updates before any mask.

        Args:
            scale: (b,) factors of the clients' updates; None is 1.
            plan: hyper-parameters of this training; None is the usual ones.
        """
        self.catch_up(context, query)
        models = self.models.select(context.positions)
        # The rows have room for what leaves the client, so that a mask can overwrite them.
        room = self._pipeline.buffer_width(self.cohort.model.dimension)
        plan = plan or self.training
        term = self.loss_term(context)
        delta = self.cohort.train(models, context.positions, plan, context.step, room, scale, term)
        sizes = None
        if self._weighted:
            sizes = self._sizes(context)
        return Update(Rows(delta), sizes)

    def loss_term(self, context: CallContext) -> LossTerm | None:
        """Return a term of the clients' losses that depends on no sample; by default None.

        DP-SGD adds its gradient after the clip and the noise, so it has to follow from what was
        released or is public: then it costs nothing.

        Args:
            context: the clients.
        """
        return None

    def tuned(self, models: Rows, rounds: int) -> Rows:
        """Return models after each client has trained its own alone, (m, d), with local layers.

        Each begins with the best that it has had, where the training keeps that. Nothing of it
        leaves the clients, so it is trained without noise. No state changes: the same models give
        the same result whenever and however often they are tuned. A client whose update is not
        finite keeps the model that it had.

        Args:
            models: (m, d) of all clients of the cohort, at the end of a run.
            rounds: of tuning, each as long as a round of the run.
        """
        clients = range(len(self.cohort.ids))
        models = self.cohort.best(self.cohort.whole(models, clients))
        if not rounds:
            return models
        own_row = tuple(clients)
        plan = replace(
            self.training,
            clip=0.0,
            noise=0.0,
            keep_momentum=False,
            label_power=1.0,
            keep_local=False,
            keep_best=False,
        )
        table = models.values
        near = MeanRegularizer(Rows(table, own_row), plan.ditto) if plan.ditto else None
        for number in range(rounds):
            start = Rows(table, own_row)
            step = TUNING_STEP + number
            update = self.cohort.train(start, clients, plan, step, regularizer=near)
            finite = update.isfinite().all(1, keepdim=True)
            table = torch.where(finite, table + update, table)
        return Rows(table, own_row)

    @answers(GATHER, private=False)
    def receive(self, context: CallContext, query: AverageDeltas) -> Ack:
        """Apply averages without training, θ_i ← θ_i + P⁻¹Δ_c(i).

        The last averages of a run reach all clients like this.

        Args:
            query: the averages Δ_c(i) that each client lacks.
        """
        self.take(context.positions, query)
        return Ack()

    @answers(SUM, through=("column_sums",))
    def sum_columns(self, context: CallContext, query: Empty) -> ColumnSums:
        """Return what a shared scale follows from: counts, sums and squares, or histograms.

        They are of each client's features on public bounds. Where whole clients are protected,
        these are means over the client's samples; under noise a client, or a sample, contributes a
        row of norm 1 at most.
        """
        clips = self._pipeline.of("column_sums").clips
        noise = context.noise
        norm = 1 - 2 * margin(self.cohort.dtype)  # slightly shorter, so that no clip changes it
        convert = methodcaller("to", self.cohort.start)
        if noise is not None and noise.noise > 0 and noise.unit == "example":
            multiplier = noise.noise * self.scale_noise
            released = self.cohort.released_column_sums(context, norm, multiplier)
            return ColumnSums(Rows(context.postprocess(convert, released)))
        sums = self.cohort.column_sums(context.positions, clips, norm if clips else None)
        return ColumnSums(Rows(convert(torch.from_numpy(sums))))

    @answers(GATHER, private=False)
    def receive_scale(self, context: CallContext, query: ColumnScale) -> Ack:
        """Bring samples to the scale over all clients."""
        scale = torch.stack([query.centres.value, query.widths.value])
        self.cohort.rescale(context.positions, scale)
        return Ack()

    def catch_up(self, context: CallContext, query: AverageDeltas) -> None:
        """Apply the query's averages, for a reply that depends on the resulting model.

        The reply is bound to this model: it adds up with those from the same one alone.

        Args:
            query: the averages that each client lacks.

        Raises:
            StaleError: the request comes too late. A client has applied later averages, so its
                reply would depend on another model.
        """
        self.check_not_behind(context, query)
        self.take(context.positions, query)
        context.bind(self.lineage(context.positions))

    def lineage(self, positions: Sequence[int]) -> list[bytes]:
        """Return a digest of the averages that each client's model is made of, 32 bytes each.

        It is of what the server sent, and so the same bytes on every machine, where the models are
        equal up to rounding at best: clients undo masks in floating point. What clients trained
        alone is not in it.

        Args:
            positions: of the clients.
        """
        return as_rows(self._lineage[positions])

    def check_not_behind(self, context: CallContext, query: AverageDeltas) -> None:
        """Check that a reply would depend on the model that the query is about.

        Raises:
            StaleError: a client has applied later averages than the query has.
        """
        counts = query.count.values.tolist()
        applied = self.had(context.positions, query)
        ahead = []
        for i, had, count in zip(context.ids, applied, counts, strict=True):
            if had > count:
                ahead.append(i)
        if ahead:
            raise late_request_error(ahead)

    def take(self, positions: Sequence[int], query: AverageDeltas) -> None:
        """Apply averages that were not applied before, θ_i ← θ_i + P⁻¹Δ_c(i).

        Args:
            positions: of the clients that the query addresses.
            query: averages, by client.
        """
        lineage = self._extended(positions, query)
        self.models = self.advanced(positions, query)
        self._lineage[positions] = lineage
        counts = query.count.values.tolist()
        latest = self._had[positions].tolist()
        for n, had in enumerate(self.had(positions, query)):
            if had <= counts[n]:
                latest[n] = counts[n]
        self._had[positions] = latest

    def had(self, positions: Sequence[int], query: AverageDeltas) -> list[int]:
        """Return how many of the averages that the query counts each client has applied.

        Args:
            positions: of the clients that the query addresses.
            query: averages, by client.
        """
        applied: list[int] = self._had[positions].tolist()
        return applied

    def new_averages(
        self, positions: Sequence[int], query: AverageDeltas
    ) -> dict[int, list[torch.Tensor]]:
        """Return by position the averages (d,) that `take` will apply, unmasked, oldest first.

        A displacement since θ_0 (`query.absolute`) is one row in place of all.

        Args:
            positions: of the clients that the query addresses.
            query: averages, by client.
        """
        self._memo_of(query)
        due = self._due(positions, query)
        return {k: [self._unmasked_average(row, query) for row in rows] for k, rows in due.items()}

    def starting_over(self, positions: Sequence[int], query: AverageDeltas) -> set[int]:
        """Return the positions of clients whose averages are applied to θ_0.

        Their own models are discarded. Here there are no such clients.

        Args:
            positions: of the clients that the query addresses.
            query: its averages, by client.
        """
        return set()

    def sent_with(self, row: int) -> slice:
        """Return the rows of a message's averages that whoever applies one of them is sent.

        Here it is that row alone.

        Args:
            row: of the averages.
        """
        return slice(row, row + 1)

    def _extended(self, positions: Sequence[int], query: AverageDeltas) -> torch.Tensor:
        """Return the lineage of the clients' models after the query's averages, (b, 32)."""
        anew = self.starting_over(positions, query)
        due = self._due(positions, query)
        lineages = []
        for k, earlier in zip(positions, self.lineage(positions), strict=True):
            before = b"" if k in anew else earlier
            lineages.append(self._next_lineage(before, due[k], query))
        return as_table(lineages, LINEAGE)

    def _next_lineage(self, lineage: bytes, picks: tuple[int, ...], query: AverageDeltas) -> bytes:
        """Return a lineage after some rows of the query's averages, from the cache if possible."""
        memo = self._memo_of(query)
        key = (lineage, picks)
        if key not in memo.lineages:
            after = lineage or bytes(LINEAGE)
            for row in picks:
                sent = self.sent_with(row)
                if sent.start not in memo.digests:
                    memo.digests[sent.start] = digest(query.means.table[sent])
                # a displacement since θ_0 replaces all averages before it
                before = b"" if query.absolute else after
                after = chained(before, int(query.steps.table[row]), memo.digests[sent.start])
            memo.lineages[key] = after
        return memo.lineages[key]

    def _memo_of(self, query: AverageDeltas) -> _MovedModels:
        """Return what was computed from the query's averages before."""
        if self._memo.averages is not query.means.table:
            self._memo = _MovedModels(query.means.table)
        return self._memo

    def origin(self, positions: Sequence[int], query: AverageDeltas) -> Rows:
        """Return all clients' models before the query's averages.

        Args:
            positions: of the clients that the query addresses.
            query: averages, by client.
        """
        return self.models

    def advanced(self, positions: Sequence[int], query: AverageDeltas) -> Rows:
        """Return all clients' models after the query's averages, without changing any state.

        Args:
            positions: of the clients that the query addresses.
            query: averages, by client.

        Raises:
            UpdateError: a client lacks averages that the server takes it to have.
        """
        models = self.origin(positions, query)
        assert models.index is not None
        picks = self._due(positions, query)
        # No client starts over or applies an average: the table does not need to be copied.
        if models is self.models and not any(picks.values()):
            return models
        self._memo_of(query)
        digests = list(self._row_digests(models.table))
        thetas = list(models.table)
        # A sum calls clients chunk by chunk, so the loops below are over the clients of the chunk
        # and over distinct models; what is done for all clients takes no Python loop.
        index = list(models.index)
        row_of = {digest: row for row, digest in enumerate(digests)}
        for k, missing in picks.items():
            row = index[k]
            theta, digest = self._moved(thetas[row], digests[row], missing, query)
            if digest not in row_of:
                row_of[digest] = len(thetas)
                thetas.append(theta)
                digests.append(digest)
            index[k] = row_of[digest]
        # Models are identified by their digests: clients that catch up share a row again. Rows are
        # in the order of the first clients that have them.
        unique: dict[bytes, torch.Tensor] = {}
        for row in dict.fromkeys(index):
            unique.setdefault(digests[row], thetas[row])
        table = torch.stack(list(unique.values()))
        self._printed = (table, list(unique))
        new_row = {digest: n for n, digest in enumerate(unique)}
        new_row_of = [new_row.get(digest, 0) for digest in digests]
        return Rows(table, tuple(map(new_row_of.__getitem__, index)))

    def _row_digests(self, table: torch.Tensor) -> list[bytes]:
        """Return the digests of a table's rows, from the cache where it is of this table."""
        cached_table, digests = self._printed
        if cached_table is table:
            return digests
        return [_digest(row) for row in table]

    def _due(self, positions: Sequence[int], query: AverageDeltas) -> dict[int, tuple[int, ...]]:
        """Return the rows of the query's averages that clients have yet to apply, by position.

        Args:
            positions: of the clients that the query addresses.
            query: averages, by client, oldest first.

        Raises:
            UpdateError: a client lacks more averages than the query has.
        """
        counts = query.count.values.tolist()
        applied = self.had(positions, query)
        due: dict[int, tuple[int, ...]] = {}
        for k, picks, count, had in zip(positions, query.means.picks, counts, applied, strict=True):
            missing = count - had
            if missing <= 0:
                due[k] = ()
                continue
            # A displacement since θ_0 replaces all averages before it.
            needed = 1 if query.absolute else missing
            if len(picks) < needed:
                raise UpdateError(
                    f"client {self.cohort.ids[k]} lacks averages that the server takes it to have: "
                    "give it the last state that it had, or start a new run"
                )
            due[k] = picks[-needed:]
        return due

    def _moved(
        self, theta: torch.Tensor, digest: bytes, picks: tuple[int, ...], query: AverageDeltas
    ) -> tuple[torch.Tensor, bytes]:
        """Return a model after some averages, and its digest.

        Results are cached, since clients of one cluster mostly apply the same averages to equal
        models.

        Args:
            theta: (d,) the model.
            digest: of the model.
            picks: rows of the query's averages to apply.
        """
        if not picks:
            return theta, digest
        key = (digest, picks)
        if key not in self._memo.moved:
            for row in picks:
                origin = self._start if query.absolute else theta
                theta = self.bounded(origin + self._unmasked_average(row, query))
            self._memo.moved[key] = (theta, _digest(theta))
        return self._memo.moved[key]

    def _unmasked_average(self, row: int, query: AverageDeltas) -> torch.Tensor:
        """Return P⁻¹Δ, (d,), for a row of the query's averages, from the cache if possible."""
        unmasked = self._memo.undone
        if row not in unmasked:
            average = query.means.table[row]
            step = int(query.steps.table[row])
            unmasked[row] = self._undone(average, step)
        return unmasked[row]

    def bounded(self, theta: torch.Tensor) -> torch.Tensor:
        """Return the model (d,) after an average, projected to the set of allowed models.

        By default all models are allowed.

        Args:
            theta: (d,) the model.
        """
        return theta

    def _undone(self, row: torch.Tensor, step: int) -> torch.Tensor:
        """Return P⁻¹(row), (d,), of a row under the mask of call `step`."""
        start = self.cohort.start
        return self._pipeline.inverse(row.to(start.device, start.dtype), step)

    def model_at(self, displacement: torch.Tensor, step: int) -> torch.Tensor:
        """Return the model θ_0 + P⁻¹(displacement), (d,).

        Args:
            displacement: a row as the server stores it, masked where updates are.
            step: the call that identifies the mask P.
        """
        return self._start + self._undone(displacement, step)

    def displaced(self, positions: Sequence[int]) -> Update:
        """Return θ_i − θ_0 before any mask, (b, room).

        Args:
            positions: of the clients.
        """
        d = self.cohort.model.dimension
        room = self._pipeline.buffer_width(d)
        delta = self._start.new_zeros(len(positions), room)
        for n, k in enumerate(positions):
            model = self.models.row(k)
            torch.sub(model, self._start, out=delta[n, :d])
        return Update(Rows(delta), None)

    def _sizes(self, context: CallContext) -> Rows:
        """Return |D_i|, (b,)."""
        sizes = [float(self.cohort.sizes[k]) for k in context.positions]
        return Rows(context.sample_counts(sizes, self.models.table.dtype))

    def state(self, secrets: Secrets) -> ClientState:
        """Return the state for a checkpoint.

        Args:
            secrets: of the clients' keys.
        """
        assert self.models.index is not None
        index = list(self.models.index)
        return ClientState(self.models.table, index, secrets, extra=self.checked_memory())

    def checked_memory(self) -> dict[str, torch.Tensor]:
        """Return `memory`, once it has all tensors that the class declares.

        Raises:
            UsageError: a tensor has the name of other state.
        """
        memory = self.memory()
        client_tensors.check_kept(self, memory)
        return memory

    def restore(self, state: ClientState) -> None:
        """Restore the state of a checkpoint."""
        table = state.table.to(self.cohort.start.device)
        self.models = Rows(table, tuple(state.index))
        self.recall(state.extra)

    @property
    def lasting(self) -> frozenset[str]:
        """Return what of `memory` a newcomer's node keeps when it joins a run again."""
        declared = client_tensors.declared_tensors(type(self)).values()
        return frozenset(tensor.key for tensor in declared if tensor.lasting)

    def memory(self) -> dict[str, torch.Tensor]:
        """Return by name all state beside the models that a later call depends on.

        Tensors that a class declares (`ClientTensor`) are among it; it has to add other state only.
        """
        return {**client_tensors.kept_rows(self), **self.cohort.memory()}

    def recall(self, memory: Mapping[str, torch.Tensor]) -> None:
        """Restore what `memory` returned."""
        client_tensors.restore_rows(self, memory)
        self.cohort.recall(memory)


class UpdateClient(TrainingClient):
    """Clients whose updates may be read individually, and that upload their model.

    The updates are those of Sattler et al. 2019, Algorithm 5, "Client i does".
    """

    @property
    def read_training(self) -> LocalTraining:
        """Return the hyper-parameters of the training whose update the server reads."""
        return self.training

    @answers(GATHER, SUM, through=("delta",), fresh=True, trains="usual", unmasked=("size",))
    def train(self, context: CallContext, query: AverageDeltas) -> Update:
        """Train from the cluster's model, and return the update.

        θ_i ← θ_i + P⁻¹Δ_c(i); the reply is P(SGD_n(θ_i, D_i) − θ_i). The mask P is applied by the
        endpoint.

        Args:
            query: the averages Δ_c(i) that each client lacks.
        """
        return self.trained(context, query, plan=self.read_training)

    @answers(GATHER, through=("delta",), fresh=True, derived=True)
    def post(self, context: CallContext, query: Empty) -> Update:
        """Return θ_i − θ_0, masked by the endpoint.

        Clients that did not take part in earlier rounds receive a model like this (Sattler et al.
        2019, V-C; the upload by a client is not in the paper).
        """
        return self.displaced(context.positions)


def late_request_error(clients: Sequence[int]) -> StaleError:
    """Return the error for a request about averages that these clients have moved beyond.

    Args:
        clients: their numbers.
    """
    few = ", ".join(map(str, clients[:5]))
    return StaleError(
        f"client(s) {few} have moved on from what this request is about: it comes too late, or "
        "from a server that started over without its checkpoint"
    )


# (digest of a model, rows of averages that are applied to it)
_Move = tuple[bytes, tuple[int, ...]]


@dataclass
class _MovedModels:
    """Cache of the models that follow from one message's averages.

    The frames of one message may arrive in several calls, since a sum streams over clients.
    """

    averages: torch.Tensor | None = None  # the message's table, compared by identity
    undone: dict[int, torch.Tensor] = field(default_factory=dict)  # unmasked averages by row
    # -> (new model, its digest)
    moved: dict[_Move, tuple[torch.Tensor, bytes]] = field(default_factory=dict)
    digests: dict[int, bytes] = field(default_factory=dict)  # of averages, by their first row
    lineages: dict[_Move, bytes] = field(default_factory=dict)  # after the rows of a move


def _digest(row: torch.Tensor) -> bytes:
    return hashlib.blake2b(row.cpu().numpy().tobytes()).digest()
