"""Clients that train when asked, and those whose updates the server reads one by one."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

from securecluster.core.lazy_torch import torch
from securecluster.errors import PolicyError, UpdateError
from securecluster.messaging.messages import Ack, Empty, Rows
from securecluster.privacy.masking.key_agreement import Secrets
from securecluster.privacy.pipeline import Pipeline
from securecluster.protocols.common.messages import AverageDeltas, Update
from securecluster.runtime.endpoint import GATHER, SUM, CallContext, answers
from securecluster.training.local_trainer import LocalTrainer, LocalTraining


@dataclass
class ClientState:
    """What clients keep between rounds; equal models are stored once."""

    table: torch.Tensor  # (u, d)
    index: list[int]  # (m,)
    secrets: Secrets
    # where clients hold several models: the starts they belong to
    starts: list[int] = field(default_factory=list)
    extra: dict[str, torch.Tensor] = field(default_factory=dict)  # by name: what else they remember


class TrainingClient:
    """Clients that train from their cluster's model.

    Classes that inherit from this one say how an update may leave.
    """

    clear: ClassVar[bool] = False  # whether a part of a model leaves without a mask

    def __init__(
        self,
        cohort: LocalTrainer,
        training: LocalTraining,
        pipeline: Pipeline,
        weighted: bool,
        start: torch.Tensor | None = None,
    ) -> None:
        self.cohort, self.training, self._pipeline, self._weighted = (
            cohort,
            training,
            pipeline,
            weighted,
        )
        self._start = cohort.start if start is None else start
        self.models = Rows(self._start[None].clone(), (0,) * len(cohort.ids))
        self._had = [0] * len(cohort.ids)  # how many averages each client has applied
        self._memo = _MovedModels()
        # a table of models, and the digests of its rows
        self._printed: tuple[torch.Tensor | None, list[bytes]] = (
            None,
            [],
        )

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
        """Return the reply before any mask, with each client's update times its `scale`.

        Where a `plan` is given, clients train by it and not as usual.
        """
        self.catch_up(context, query)
        room = self._pipeline.room(self.cohort.model.dimension)
        delta = self.cohort.train(
            self.models.select(context.positions),
            context.positions,
            plan or self.training,
            context.step,
            room,
            scale,
        )
        return Update(Rows(delta), self._sizes(context) if self._weighted else None)

    @answers(GATHER, private=False)
    def receive(self, context: CallContext, query: AverageDeltas) -> Ack:
        """θ_i ← θ_i + P⁻¹Δ_c(i), and no training: how the last average reaches everyone."""
        self.take(context.positions, query)
        return Ack()

    def catch_up(self, context: CallContext, query: AverageDeltas) -> None:
        """Take what the query brings, for a reply that is made of the model after it.

        Raises:
            PolicyError: a client has later averages, so that its reply would be of another model:
                the request comes too late.
        """
        self.check_not_behind(context, query)
        self.take(context.positions, query)

    def check_not_behind(self, context: CallContext, query: AverageDeltas) -> None:
        """Raise PolicyError where the query is about a model that a client has moved on from."""
        counts = query.count.values.tolist()
        ahead = [
            i
            for i, k, count in zip(context.ids, context.positions, counts, strict=True)
            if self.had(k, query) > count
        ]
        if ahead:
            raise late_request_error(ahead)

    def take(self, at: Sequence[int], query: AverageDeltas) -> None:
        """Make θ_i ← θ_i + P⁻¹Δ_c(i) for the clients at positions `at`.

        What they have already applied is not applied again.
        """
        self.models = self.advanced(at, query)
        for k, count in zip(at, query.count.values.tolist(), strict=True):
            if self.had(k, query) <= count:
                self._had[k] = count

    def had(self, k: int, query: AverageDeltas) -> int:
        """Return how many averages the client at position k has applied.

        They are among those that the query counts.
        """
        return self._had[k]

    def origin(self, at: Sequence[int], query: AverageDeltas) -> Rows:
        """All clients' models before what the query brings those at positions `at`."""
        return self.models

    def advanced(self, at: Sequence[int], query: AverageDeltas) -> Rows:
        """Return all clients' models after what the query brings those at positions `at`.

        Nothing changes here.

        Raises:
            UpdateError: the server takes a client to have averages that it has not.
        """
        models = self.origin(at, query)
        assert models.index is not None
        counts = query.count.values.tolist()
        brought = zip(at, query.means.picks, counts, strict=True)
        picks = {k: self._due(k, own, count, query) for k, own, count in brought}
        if models is self.models and not any(picks.values()):
            return models
        if self._memo.averages is not query.means.table:
            self._memo = _MovedModels(query.means.table)
        known, prints = self._printed
        if known is not models.table:
            prints = [_digest(row) for row in models.table]
        rows: dict[bytes, torch.Tensor] = {}  # who caught up shares its peers' row again
        place: list[bytes] = []
        for k, row in enumerate(models.index):
            theta, digest = self._moved(models.table[row], prints[row], picks.get(k, ()), query)
            rows.setdefault(digest, theta)
            place.append(digest)
        order = {digest: n for n, digest in enumerate(rows)}
        table = torch.stack(list(rows.values()))
        self._printed = (table, list(rows))
        return Rows(table, tuple(order[digest] for digest in place))

    def _due(
        self, k: int, picks: tuple[int, ...], count: int, query: AverageDeltas
    ) -> tuple[int, ...]:
        """Return those of the rows `picks` that the client at position k has yet to apply."""
        missing = count - self.had(k, query)
        if missing <= 0:
            return ()
        if len(picks) < (1 if query.absolute else missing):
            raise UpdateError(
                f"client {self.cohort.ids[k]} lacks averages that the server takes it to have: "
                "give it the last state that it had, or start a new run"
            )
        return picks[-1:] if query.absolute else picks[-missing:]

    def _moved(
        self, theta: torch.Tensor, digest: bytes, picks: tuple[int, ...], query: AverageDeltas
    ) -> tuple[torch.Tensor, bytes]:
        """Return a model moved by some averages, and its digest.

        What a letter has already moved is not moved again.
        """
        if not picks:
            return theta, digest
        key = (digest, picks)
        if key not in self._memo.moved:
            for p in picks:
                if p not in self._memo.undone:
                    self._memo.undone[p] = self._undone(
                        query.means.table[p], int(query.steps.table[p])
                    )
                theta = self.bounded(
                    (self._start if query.absolute else theta) + self._memo.undone[p]
                )
            self._memo.moved[key] = (theta, _digest(theta))
        return self._memo.moved[key]

    def bounded(self, theta: torch.Tensor) -> torch.Tensor:
        """Return the model (d,) after an average, where it must lie.

        It may lie everywhere, if a method does not say otherwise.
        """
        return theta

    def _undone(self, row: torch.Tensor, step: int) -> torch.Tensor:
        return self._pipeline.inverse(
            row.to(self.cohort.start.device, self.cohort.start.dtype), step
        )

    def model_at(self, displacement: torch.Tensor, step: int) -> torch.Tensor:
        """θ_0 + P⁻¹(displacement), (d,), of a displacement under the mask of call `step`."""
        return self._start + self._undone(displacement, step)

    def displaced(self, at: Sequence[int]) -> Update:
        """θ_i − θ_0 of the clients at positions `at`, before any mask."""
        d = self.cohort.model.dimension
        delta = self._start.new_zeros(len(at), self._pipeline.room(d))
        for row, k in zip(delta, at, strict=True):
            torch.sub(self.models.row(k), self._start, out=row[:d])
        return Update(Rows(delta), None)

    def _sizes(self, context: CallContext) -> Rows:
        return Rows(
            torch.as_tensor(
                [float(self.cohort.sizes[k]) for k in context.positions],
                dtype=self.models.table.dtype,
            )
        )

    def state(self, secrets: Secrets) -> ClientState:
        """For a checkpoint."""
        assert self.models.index is not None
        return ClientState(self.models.table, list(self.models.index), secrets, extra=self.memory())

    def restore(self, state: ClientState) -> None:
        """From a checkpoint."""
        self.models = Rows(state.table.to(self.cohort.start.device), tuple(state.index))
        self.recall(state.extra)

    def memory(self) -> dict[str, torch.Tensor]:
        """Return what clients remember beside their models, by name.

        This is all that a later call depends on.
        """
        return {"had": torch.as_tensor(self._had), **self.cohort.memory()}

    def recall(self, memory: Mapping[str, torch.Tensor]) -> None:
        """Take over what `memory` returned."""
        self._had = memory["had"].tolist()
        self.cohort.recall(memory)


class UpdateClient(TrainingClient):
    """Clients whose updates may be read one by one, and that post their model.

    The updates are those of Sattler et al. 2019, Algorithm 5, "Client i does".
    """

    @answers(GATHER, SUM, through=("delta",), fresh=True, trains="usual", unmasked=("size",))
    def train(self, context: CallContext, query: AverageDeltas) -> Update:
        """Train from the cluster's model, and reply with the update.

        θ_i ← θ_i + P⁻¹Δ_c(i); the reply is P(SGD_n(θ_i, D_i) − θ_i). The mask P is applied on the
        way out.
        """
        return self.trained(context, query)

    @answers(GATHER, through=("delta",), fresh=True, derived=True)
    def post(self, context: CallContext, query: Empty) -> Update:
        """Return θ_i − θ_0, masked on the way out.

        This is how a model reaches those who were not there (Sattler et al. 2019, V-C; ours).
        """
        return self.displaced(context.positions)


def late_request_error(clients: Sequence[int]) -> PolicyError:
    """Return the refusal of a request that these clients have moved on from."""
    few = ", ".join(map(str, clients[:5]))
    return PolicyError(
        f"client(s) {few} have moved on from what this request is about: it comes too late, or "
        "from a server that started over without its checkpoint"
    )


@dataclass
class _MovedModels:
    """The models that clients made of one letter's averages.

    The letter's frames reach them in several calls, as a sum streams over clients.
    """

    averages: torch.Tensor | None = None  # the table of averages itself
    undone: dict[int, torch.Tensor] = field(default_factory=dict)
    moved: dict[tuple[bytes, tuple[int, ...]], tuple[torch.Tensor, bytes]] = field(
        default_factory=dict
    )


def _digest(row: torch.Tensor) -> bytes:
    return hashlib.blake2b(row.cpu().numpy().tobytes()).digest()
