"""Compressed updates for clustering (not in the papers).

Clients send a sketch, a quantised update or a quantised sketch individually: (sketch) → clip →
noise → (mask) → quantise. The server clusters by these, and then requests the full updates in one
sum per cluster, so that it never reads the full update of one client.

So no split leaves one client alone, whose update could not be summed with another. A client keeps
the number of the call and not the update: a process that has forgotten it trains again, to the same
bits. Newcomers answer under the sketch of the earlier call, of the split in CFL and of the
clustering round in FL+HC.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

from securecluster.core.lazy_torch import torch
from securecluster.core.randomness import Randomness
from securecluster.errors import UpdateError
from securecluster.messaging.bounds import Real
from securecluster.messaging.messages import Empty, Rows
from securecluster.messaging.replies import Replies
from securecluster.privacy.compression import codecs
from securecluster.privacy.compression.sketches import Sketch
from securecluster.privacy.masking import masks
from securecluster.privacy.pipeline import Pipeline, Stage
from securecluster.protocols.common.client import UpdateClient
from securecluster.protocols.common.client_tensors import ClientTensor
from securecluster.protocols.common.messages import AverageDeltas, Update
from securecluster.runtime.call_context import CallContext
from securecluster.runtime.endpoint import GATHER, SUM, answers


@dataclass(frozen=True, eq=False)
class CompressedUpdate:
    """Client to server: a short form of an update."""

    # (b, q) the sketch of SGD_n(θ_i, D_i) − θ_i, or (b, n) its bytes
    compressed: Annotated[Rows, Real(("dimension",), squared=True)]


@dataclass
class _StoredUpdates:
    """Full updates whose compressed form was sent."""

    row_of: dict[int, int]  # by the client's position
    rows: torch.Tensor  # (b, d), before any mask


class CompressedUpdateClient(UpdateClient):
    """Clients that send a compressed update, and contribute the full one to the next sum."""

    keeps: ClassVar[bool] = True  # False where the full update is never requested
    _stored: _StoredUpdates | None = None
    # The call in which each client last sent a compressed update, and the number of averages it
    # had applied by then.
    _sent_in = ClientTensor(2, dtype="int64")

    @answers(GATHER, through=("compressed",), trains="usual")
    def send_compressed_update(
        self, context: CallContext, query: AverageDeltas
    ) -> CompressedUpdate:
        """Train from the cluster's model, store the update, and return it for compression.

        θ_i ← θ_i + P⁻¹Δ_c(i) comes first. The endpoint applies sketch, clip, noise and mask.

        Args:
            query: the averages Δ_c(i) that each client lacks.
        """
        positions = context.positions
        # Released before training, so that two updates of all clients never exist at once.
        self._stored = None
        self.catch_up(context, query)
        models = self.models.select(positions)
        delta = self.cohort.train(models, positions, self.read_training, context.step)
        # A request that arrives after a later one does not count: its full update is not requested.
        current = []
        for k, (sent_in, _) in zip(positions, self._sent_in[positions].tolist(), strict=True):
            if sent_in <= context.step:
                current.append(k)
        had = self._had[current]
        self._sent_in[current] = torch.stack([torch.full_like(had, context.step), had], 1)
        # A batch with an outdated request is not stored: its clients train again if necessary.
        if self.keeps and len(current) == len(positions):
            row_of = {k: row for row, k in enumerate(positions)}
            self._stored = _StoredUpdates(row_of, delta)
        return CompressedUpdate(Rows(delta))

    # not fixed: each call is for the update of its own round
    @answers(SUM, through=("delta",), fresh=True, trains="kept", unmasked=("size",), fixed=False)
    def contribute_kept_update(self, context: CallContext, query: Empty) -> Update:
        """Return the full update whose compressed form was sent last.

        It leaves in sums only, times |D_i| where the average is weighted. A process that was
        restarted since trains again: all random draws follow from the call in which the compressed
        update was sent, so the update is the same.

        Raises:
            UpdateError: a client sent no compressed update, or its model has changed since.
        """
        missing = []
        for i, holds in zip(context.ids, self._hold_updates(context.positions), strict=True):
            if not holds:
                missing.append(i)
        if missing:
            few = ", ".join(map(str, missing[:5]))
            raise UpdateError(
                f"round {context.round}: client(s) {few} have no update to contribute: ask for a "
                "compressed update first"
            )
        context.bind(self.lineage(context.positions))
        delta = self._updates(context.positions)
        if not self._weighted:
            return Update(Rows(delta), None)
        size = self._sizes(context)
        delta *= size.table.to(delta)[:, None]
        return Update(Rows(delta), size)

    def _hold_updates(self, positions: Sequence[int]) -> list[bool]:
        """Return whether each client still has the model it trained from."""
        step, had = self._sent_in[positions].T
        holds: list[bool] = ((step > 0) & (had == self._had[positions])).tolist()
        return [self.keeps and held for held in holds]

    def _updates(self, positions: Sequence[int]) -> torch.Tensor:
        """Return the full updates, (b, room), from memory or by the same training again."""
        d = self.cohort.model.dimension
        room = self._pipeline.buffer_width(d)
        delta = self._start.new_zeros(len(positions), room)
        row_of: dict[int, int] = {}
        if self._stored is not None:
            row_of = self._stored.row_of
        stored: list[int] = []
        forgotten: dict[int, list[int]] = {}  # by the call of the compressed update
        for n, k in enumerate(positions):
            if k in row_of:
                stored.append(n)
            else:
                step, _ = self._sent_in[k].tolist()
                forgotten.setdefault(step, []).append(n)
        if self._stored is not None and stored:
            source = [row_of[positions[n]] for n in stored]
            delta[stored, :d] = self._stored.rows[source]
        for step in sorted(forgotten):
            frames = forgotten[step]
            clients = [positions[n] for n in frames]
            models = self.models.select(clients)
            # The same call gives the same batches and noise.
            again = self.cohort.train(models, clients, self.read_training, step)
            delta[frames, :d] = again
        return delta

    def recall(self, memory: Mapping[str, torch.Tensor]) -> None:
        """Restore what `memory` returned; full updates would be as large as the models."""
        super().recall(memory)
        self._stored = None


def updates_of(replies: Replies[Any]) -> torch.Tensor:
    """Return the rows of replies, (r, n).

    Args:
        replies: of r clients, with full updates or compressed ones.
    """
    if isinstance(replies.rows, CompressedUpdate):
        compressed: torch.Tensor = replies.rows.compressed.values
        return compressed
    delta: torch.Tensor = replies.rows.delta.values
    return delta


def uses_compression(config: Mapping[str, Any]) -> bool:
    """Return whether clients send compressed updates for clustering.

    Args:
        config: what clients and server agreed on, or hyper-parameters by name.
    """
    return config["sketch"] is not None or config["compress"] != "none"


def with_compression(
    pipeline: Pipeline, private: Sequence[Stage], config: Mapping[str, Any]
) -> Pipeline:
    """Return a pipeline that also has stages for the field `compressed`, where clients compress.

    Args:
        pipeline: the stages of all other fields.
        private: the stages that clip and add noise.
        config: what clients and server agreed on.

    Raises:
        UsageError: a sketch that is no shorter than the model.
    """
    if not uses_compression(config):
        return pipeline
    width = int(config["dimension"])
    sketches: list[Stage] = []
    if config["sketch"] is not None:
        sketch = Sketch(config["sketch"], Randomness(config["seed"]))
        width = sketch.width(width)
        sketches = [sketch]
    mask = masks.build(config["mask"], width)
    # Quantisation comes last, since it acts on what is sent: masked rows, which may be wider.
    codec = codecs.build(config["compress"], Pipeline(mask).width(width))
    compressed = Pipeline([*sketches, *private, *mask, *codec])
    fields = {**pipeline.fields, "compressed": compressed}
    extended = Pipeline(pipeline.stages, pipeline.seal, fields)
    extended.common = pipeline.common
    return extended
