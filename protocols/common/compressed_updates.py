"""Compressed updates for clustering (not in the papers).

A client replies with a sketch of its update, a quantised update, or a quantised sketch: (sketch) →
clip → noise → (mask) → quantise. The server clusters by these, and then asks for the updates
themselves in one sum per cluster, so that it never reads a whole update of one client.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

from securecluster.clustering.noise_robust import CLUSTERERS
from securecluster.core.lazy_torch import torch
from securecluster.core.randomness import Randomness
from securecluster.errors import UpdateError, UsageError, unknown
from securecluster.messaging.bounds import Real
from securecluster.messaging.messages import Empty, Rows
from securecluster.messaging.replies import Replies
from securecluster.privacy.compression import codecs
from securecluster.privacy.compression.sketches import Sketch, check_size
from securecluster.privacy.masking import masks
from securecluster.privacy.pipeline import Pipeline, Stage
from securecluster.protocols.common.client import UpdateClient
from securecluster.protocols.common.messages import AverageDeltas, Update
from securecluster.protocols.common.pending_updates import PendingUpdates
from securecluster.protocols.common.sampling import TRIES
from securecluster.runtime.endpoint import GATHER, SUM, CallContext, answers
from securecluster.runtime.server_channel import ServerChannel
from securecluster.training.local_trainer import LocalTrainer, LocalTraining


@dataclass(frozen=True, eq=False)
class CompressedUpdate:
    """Client to server."""

    # (b, q) the sketch of SGD_n(θ_i, D_i) − θ_i, or (b, n) its bytes
    compressed: Annotated[Rows, Real(("dimension",), squared=True)]


class CompressedUpdateClient(UpdateClient):
    """Clients that send a compressed update and contribute the whole one to the next sum."""

    keeps: ClassVar[bool] = True  # whether anyone asks for the update later
    # where each client's row is, and the rows (b, d), before any mask
    _kept: tuple[dict[int, int], torch.Tensor] | None = None

    def __init__(
        self,
        cohort: LocalTrainer,
        training: LocalTraining,
        pipeline: Pipeline,
        weighted: bool,
        start: torch.Tensor | None = None,
    ) -> None:
        super().__init__(cohort, training, pipeline, weighted, start)
        # the call in which each client last sent a compressed update, and its averages by then
        self._sent_in = [(0, 0)] * len(cohort.ids)

    @answers(GATHER, through=("compressed",), trains="usual")
    def send_compressed_update(
        self, context: CallContext, query: AverageDeltas
    ) -> CompressedUpdate:
        """Train from the cluster's model, keep the update, and reply with it compressed.

        Training begins with θ_i ← θ_i + P⁻¹Δ_c(i). Sketch, clip, noise and mask are applied on the
        way out.
        """
        self._kept = None  # before there is another (m, d)
        self.catch_up(context, query)
        delta = self.cohort.train(
            self.models.select(context.positions), context.positions, self.training, context.step
        )
        last = [k for k in context.positions if self._sent_in[k][0] <= context.step]
        # not for a request that comes after a later one's: nobody asks for that update any more
        for k in last:
            self._sent_in[k] = (context.step, self._had[k])
        if self.keeps and len(last) == len(context.positions):
            self._kept = ({k: n for n, k in enumerate(context.positions)}, delta)
        return CompressedUpdate(Rows(delta))

    @answers(SUM, through=("delta",), fresh=True, unmasked=("size",))
    def contribute_kept_update(self, context: CallContext, query: Empty) -> Update:
        """Return the update that was last sent compressed.

        It leaves in sums only, times |D_i| where the average is weighted. A process that was
        restarted since has forgotten the update, and trains again: every draw follows from the call
        in which the compressed update was sent.
        """
        without = [
            i
            for i, k in zip(context.ids, context.positions, strict=True)
            if not self._holds_update(k)
        ]
        if without:
            few = ", ".join(map(str, without[:5]))
            raise UpdateError(
                f"round {context.round}: client(s) {few} have no update to contribute: ask for a "
                "compressed update first"
            )
        delta = self._updates(context.positions)
        if not self._weighted:
            return Update(Rows(delta), None)
        size = self._sizes(context)
        delta *= size.table.to(delta)[:, None]
        return Update(Rows(delta), size)

    def _holds_update(self, k: int) -> bool:
        """Return whether the client at position k still holds the model it trained from."""
        step, had = self._sent_in[k]
        return self.keeps and step > 0 and had == self._had[k]

    def _updates(self, at: Sequence[int]) -> torch.Tensor:
        """Return the updates that clients sent compressed, (len(at), room).

        They come from memory, or from the same training again.
        """
        d = self.cohort.model.dimension
        place, kept = self._kept or ({}, None)
        delta = self._start.new_zeros(len(at), self._pipeline.room(d))
        known = [n for n, k in enumerate(at) if k in place]
        if kept is not None and known:
            delta[known, :d] = kept[[place[at[n]] for n in known]]
        for step in sorted({self._sent_in[k][0] for k in at if k not in place}):
            again = [n for n, k in enumerate(at) if k not in place and self._sent_in[k][0] == step]
            who = [at[n] for n in again]
            delta[again, :d] = self.cohort.train(self.models.select(who), who, self.training, step)
        return delta

    def memory(self) -> dict[str, torch.Tensor]:
        """Add the calls in which compressed updates were sent.

        The updates themselves would be as large as the models.
        """
        return {**super().memory(), "sent_in": torch.tensor(self._sent_in, dtype=torch.int64)}

    def recall(self, memory: Mapping[str, torch.Tensor]) -> None:
        """Take over what `memory` returned."""
        super().recall(memory)
        self._sent_in, self._kept = [(step, had) for step, had in memory["sent_in"].tolist()], None


def updates_of(got: Replies[Any]) -> torch.Tensor:
    """Return the rows that some clients replied with, (r, n): updates, whole or compressed."""
    rows: torch.Tensor = (
        got.rows.compressed if isinstance(got.rows, CompressedUpdate) else got.rows.delta
    ).values
    return rows


def gather_until_complete(
    net: ServerChannel, outbox: PendingUpdates, ask: Callable[..., Any]
) -> tuple[list[int], torch.Tensor, int]:
    """Return the clients that replied, their updates, and the number of the call.

    The clients are in order, and their updates, whole or compressed, are (r, n). Clients that do
    not reply are asked again under the same call number, so that all replies carry one mask.
    """
    ids: list[int] = []
    parts: list[torch.Tensor] = []
    step: int | None = None
    for _ in range(TRIES):
        left = [i for i in net.clients if i not in ids]
        if left:
            got: Replies[Any] = net.gather(ask, outbox.message_for(left), to=left, step=step)
            step = got.step
            outbox.acknowledge(got.ids)
            ids += got.ids
            parts += [updates_of(got)] if got.ids else []
    assert step is not None
    if len(parts) < 2:
        return ids, parts[0] if parts else torch.zeros(0, 0), step
    order = sorted(range(len(ids)), key=ids.__getitem__)
    return [ids[k] for k in order], torch.cat(parts)[torch.as_tensor(order)], step


def uses_compression(config: Mapping[str, Any]) -> bool:
    """Return whether clients send compressed updates for clustering."""
    return config["sketch"] is not None or config["compress"] != "none"


def with_compression(
    pipeline: Pipeline, private: Sequence[Stage], config: Mapping[str, Any]
) -> Pipeline:
    """Return a pipeline, and with it that of the field `compressed` where clients compress.

    Args:
        private: the stages that clip and add noise.

    Raises:
        UsageError: a sketch that is no shorter than the model.
    """
    if not uses_compression(config):
        return pipeline
    q, sketch = int(config["dimension"]), tuple[Stage, ...]()
    if config["sketch"] is not None:
        short = Sketch(config["sketch"], Randomness(config["seed"]))
        q, sketch = short.width(q), (short,)
    mask = masks.build(config["mask"], q)
    coded = codecs.build(config["compress"], Pipeline(mask).width(q))
    found = Pipeline(
        pipeline.stages,
        pipeline.seal,
        {**pipeline.fields, "compressed": Pipeline([*sketch, *private, *mask, *coded])},
    )
    found.common = pipeline.common
    return found


def check_compression(given: Any) -> None:
    """Raise UsageError for a sketch, compression or clusterer that cannot work.

    Each has to work with a method's other options.
    """
    if given.sketch is not None:
        check_size(given.sketch)
    codecs.check(given.compress, given.mask, given.sketch)
    if given.clusterer not in CLUSTERERS:
        raise unknown("clusterer", given.clusterer, CLUSTERERS)
    if getattr(given, "similarity", "update") == "gradient" and uses_compression(vars(given)):
        raise UsageError(
            "sketches and compression are of updates, and similarity='gradient' compares full "
            "gradients: choose one of them"
        )
    if getattr(given, "metric", "l2") == "l1" and given.sketch is not None:
        raise UsageError(
            "a sketch keeps inner products, hence l2 and cosine, and not l1: use one of these "
            "metrics, or no sketch"
        )
