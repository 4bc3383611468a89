"""Clients that assign themselves to clusters, and whose replies leave in sums alone.

A client's point, its nearest centre, and the model that its update belongs to never leave the
client. It computes every row from the public summary that the server sends, so that it stores
nothing but its cluster.

A client refuses other centres later: by its updates, they would tell which is nearest to it.

In secure sums without noise, counts come first (`common.counted_blocks`): a client whose block has
too few others in a sum sends zeros. It then trains alone, from its cluster's model, and keeps what
it trained until that model is averaged again. Noise covers single rows, so that with noise there
are no counts, which would be further releases; nor with plain sums, whose server reads every reply.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated

import numpy as np

from securecluster.clustering import noisy_centres
from securecluster.clustering.labels import Array
from securecluster.core.floating_point import margin
from securecluster.core.lazy_torch import torch
from securecluster.messaging.octets import as_rows
from securecluster.protocols import authoring as fl
from securecluster.protocols.common.averages import counted_blocks
from securecluster.protocols.common.averages.model_sets import selected_rows
from securecluster.protocols.common.messages import AVERAGES
from securecluster.protocols.hidden.class_means import ClassMeans
from securecluster.protocols.hidden.label_client import LabelMaps

UNASSIGNED = -1


@dataclass(frozen=True, eq=False)
class PointSum:
    """Client to server, in a sum: the client's point, of norm 1."""

    point: Annotated[fl.Rows, fl.Real(("signature",))]  # (b, q)


@dataclass(frozen=True, eq=False)
class PartSum:
    """Client to server, in a sum: what each class adds to the point, and its weight in it."""

    parts: Annotated[fl.Rows, fl.Real(("classes", "part"))]  # (b, c, 1 + q), of norm 1


@dataclass(frozen=True, eq=False)
class PublicParts:
    """Server to client: what classes add to points on average, which clients subtract."""

    parts: Annotated[fl.Shared, fl.Real(("classes", "signature"))]  # (c, q)


@dataclass(frozen=True, eq=False)
class PublicMean:
    """Server to client: the mean of all points."""

    mean: Annotated[fl.Shared, fl.Real(("signature",), average=True, made_of=("point",))]  # (q,)
    # (c, q) as in `PublicParts`; None where nothing is subtracted
    parts: Annotated[fl.Shared | None, fl.Real(("classes", "signature"))] = None


@dataclass(frozen=True, eq=False)
class MomentSum:
    """Client to server, in a sum: v vᵀ of the direction of the point from the mean, packed."""

    moments: Annotated[fl.Rows, fl.Real(("moments",))]  # (b, q(q + 1)/2), of norm 1


@dataclass(frozen=True, eq=False)
class PublicCentres:
    """Server to client: centres in the leading directions of all clients' points."""

    mean: Annotated[fl.Shared, fl.Real(("signature",), average=True, made_of=("point",))]  # (q,)
    basis: Annotated[fl.Shared, fl.Real(("signature", "subspace"))]  # (q, r)
    centres: Annotated[
        fl.Shared, fl.Real((fl.Upto("centres", "cells", minimum=1), "subspace"))
    ]  # (c, r)
    # (c, q) as in `PublicParts`; None where nothing is subtracted
    parts: Annotated[fl.Shared | None, fl.Real(("classes", "signature"))] = None

    def digest(self) -> torch.Tensor:
        """Return the 32 bytes of a digest of all numbers, uint8."""
        fields = (self.mean, self.basis, self.centres, self.parts)
        numbers = [field.value.flatten() for field in fields if field is not None]
        return counted_blocks.numbers_digest(torch.cat(numbers))


@dataclass(frozen=True, eq=False)
class CellSum:
    """Client to server, in a sum: a one and a displacement in the block of the nearest cell."""

    cells: Annotated[
        fl.Rows, fl.Real(("cells", "displacement"))
    ]  # (b, c, 1 + r), of norm 1 at most


@dataclass(frozen=True, eq=False)
class StepSum:
    """Client to server, in a sum: a one and a displacement in the block of the nearest centre."""

    steps: Annotated[
        fl.Rows, fl.Real(("clusters", "displacement"))
    ]  # (b, k, 1 + r), of norm 1 at most


@dataclass(frozen=True, eq=False)
class FilledCentres(PublicCentres, counted_blocks.FilledBlocks):
    """Server to client: centres, and which of them are the nearest to enough clients."""


@dataclass(frozen=True, eq=False)
class BlockAverages:
    """Server to client: the averages of all k models that the client lacks, oldest first."""

    # (r, k, d) as the blocks were summed, hence masked where updates are
    means: Annotated[
        fl.Picks, fl.Real((AVERAGES, "clusters", "dimension"), sent="blocks", average=True)
    ]
    # (r,) int64, the call of the averaged updates, which identifies the mask
    steps: Annotated[fl.Picks, fl.Whole((AVERAGES,), maximum="steps")]
    absolute: bool  # one row, the displacements since θ_0, instead of one per missed round
    # (b,) int64, the number of averages that a client has had once it has applied these
    count: Annotated[fl.Rows, fl.Whole(maximum="averages")]

    @classmethod
    def of(cls, averages: fl.AverageDeltas) -> BlockAverages:
        """Return the message of averages whose rows are (k, d)."""
        means = averages.means
        if not len(means.table):
            means = fl.Picks(torch.zeros(0, 0, 0), means.picks)
        return cls(means, averages.steps, averages.absolute, averages.count)


@dataclass(frozen=True, eq=False)
class ClusterBlocks:
    """Client to server, in a sum: an update in the block of the client's cluster."""

    blocks: Annotated[fl.Rows, fl.Real(("clusters", "dimension"))]  # (b, k, d) weighted
    # (b, k) |D_i| at the client's cluster; None where clients count the same
    weight: Annotated[fl.Rows | None, fl.Real(("clusters",), low=0, maximum=fl.MOST_SAMPLES)]


class HiddenClient(LabelMaps, counted_blocks.CountedBlocks, fl.TrainingClient):
    """Clients that tell nobody which cluster they are in.

    Args:
        cohort: the clients' data and local training.
        training: local training between two averages.
        pipeline: the stages between a client's row and the wire.
        point: the public map from samples to a point.
        clusters: k, the number of blocks.
        weights: True to weight updates by |D_i|, and to send it to the sum of a cluster's.
        residuals: True to subtract the mean parts of classes from points.
    """

    _labels = fl.ClientTensor(start=UNASSIGNED, dtype="int64")
    # digests of the centres to which clients have assigned themselves; zeros before
    _assigned_to = fl.ClientTensor(counted_blocks.DIGEST, dtype="uint8")
    _trained_in = fl.ClientTensor(start=-1, dtype="int64")  # the last round of training alone

    def __init__(
        self,
        cohort: fl.LocalTrainer,
        training: fl.LocalTraining,
        pipeline: fl.Pipeline,
        point: ClassMeans,
        clusters: int,
        weights: bool,
        residuals: bool = False,
    ) -> None:
        super().__init__(cohort, training, pipeline, weighted=False)
        # of clients that trained alone since the last average
        self._own = counted_blocks.OwnModels(1)
        self._map = point
        self._clusters = clusters
        self._weights = weights
        self._residuals = residuals
        self._points: dict[int, Array] = {}  # by position
        self._parts: dict[int, tuple[Array, Array]] = {}  # of points, by position
        self._class_rows = {}
        # the last message of averages, and the same by blocks: chunks of a sum share it
        self._split: tuple[torch.Tensor | None, torch.Tensor] = (None, torch.zeros(0, 0))

    @property
    def labels(self) -> list[int]:
        """Return each client's cluster, (m,), or `UNASSIGNED`."""
        labels: list[int] = self._labels.values.tolist()
        return labels

    @fl.answers(fl.SUM, through=("point",))
    def send_point(self, context: fl.CallContext, query: fl.Empty) -> PointSum:
        """Return each client's point, scaled to norm 1."""
        return PointSum(self._rows_of(self._unit_points(context)))

    @fl.answers(fl.SUM, through=("parts",))
    def send_parts(self, context: fl.CallContext, query: fl.Empty) -> PartSum:
        """Return what each class adds to each client's point, and its weight, of norm 1.

        Raises:
            PolicyError: the run is without residuals, and has no noise for such a sum; or counts
                come first.
        """
        self._refuse_unless_counted("send_parts", False)
        self._check_residuals()
        return PartSum(self._rows_of(self._part_rows(context)))

    @fl.answers(fl.SUM, unmasked=("count",), fixed=True)
    def count_parts(self, context: fl.CallContext, query: fl.Empty) -> counted_blocks.BlockCount:
        """Return a one at each class that a client has samples of.

        Raises:
            PolicyError: the run is without residuals, or without counts.
        """
        self._refuse_unless_counted("count_parts", True)
        self._check_residuals()
        weights = self._part_rows(context)[:, :, 0]
        return counted_blocks.BlockCount(
            self.counted(context, torch.as_tensor(weights > 0), self._of_classes)
        )

    @fl.answers(fl.SUM, through=("parts",), fixed=True)
    def send_counted_parts(
        self, context: fl.CallContext, query: counted_blocks.FilledBlocks
    ) -> PartSum:
        """Return what each class of enough clients adds to each point, and its weight.

        Raises:
            PolicyError: as of `count_parts`; or the request contradicts what was counted.
        """
        self._refuse_unless_counted("send_counted_parts", True)
        self._check_residuals()
        rows = self._part_rows(context)
        classes = rows.shape[1]
        filled = self.filled(context, query, classes, self._of_classes, most=classes)
        return PartSum(self._rows_of(rows * np.array(filled)[None, :, None]))

    @fl.answers(fl.SUM, through=("point",), fixed=True)
    def send_residual(self, context: fl.CallContext, query: PublicParts) -> PointSum:
        """Return each client's point without the mean parts of its classes, of norm 1."""
        return PointSum(self._rows_of(self._unit_points(context, query.parts)))

    @fl.answers(fl.SUM, through=("moments",), fixed=True)
    def send_moments(self, context: fl.CallContext, query: PublicMean) -> MomentSum:
        """Return v vᵀ of the direction v of each client's point from the mean."""
        directions = self._directions(context, query)
        return MomentSum(self._rows_of(noisy_centres.second_moments(directions)))

    @fl.answers(fl.SUM, through=("cells",), fixed=True)
    def send_cell(self, context: fl.CallContext, query: PublicCentres) -> CellSum:
        """Return which cell of the code book each client is in, and where in the cell.

        Raises:
            PolicyError: counts come first, and take the place of this sum.
        """
        self._refuse_unless_counted("send_cell", False)
        rows = self._displacements(context, query, noisy_centres.CELL_REACH)
        return CellSum(self._rows_of(rows))

    @fl.answers(fl.SUM, through=("steps",), fixed=True)
    def send_step(self, context: fl.CallContext, query: PublicCentres) -> StepSum:
        """Return which centre is nearest to each client, and the displacement from it.

        Raises:
            PolicyError: counts come first.
        """
        self._refuse_unless_counted("send_step", False)
        rows = self._displacements(context, query, noisy_centres.STEP_REACH)
        return StepSum(self._rows_of(rows))

    @fl.answers(fl.SUM, unmasked=("count",), fixed=True)
    def count_cell(
        self, context: fl.CallContext, query: PublicCentres
    ) -> counted_blocks.BlockCount:
        """Return a one at the cell of the code book that each client is in.

        Raises:
            PolicyError: the run is without counts.
        """
        return self._count_nearest("count_cell", context, query)

    @fl.answers(fl.SUM, unmasked=("count",), fixed=True)
    def count_step(
        self, context: fl.CallContext, query: PublicCentres
    ) -> counted_blocks.BlockCount:
        """Return a one at the centre that is nearest to each client, before a step.

        Raises:
            PolicyError: the run is without counts.
        """
        return self._count_nearest("count_step", context, query)

    @fl.answers(fl.SUM, unmasked=("count",), fixed=True)
    def count_cluster(
        self, context: fl.CallContext, query: PublicCentres
    ) -> counted_blocks.BlockCount:
        """Return a one at the centre that is nearest to each client, after the step.

        Raises:
            PolicyError: the run is without counts.
        """
        return self._count_nearest("count_cluster", context, query)

    @fl.answers(fl.SUM, through=("steps",), fixed=True)
    def send_counted_step(self, context: fl.CallContext, query: FilledCentres) -> StepSum:
        """Return the displacement of each client from its centre, if enough others are there.

        Raises:
            PolicyError: the run is without counts; or the request contradicts what was counted.
        """
        self._refuse_unless_counted("send_counted_step", True)
        filled = self.filled(context, query, len(query.centres.value), query.digest())
        rows = self._displacements(context, query, noisy_centres.STEP_REACH)
        return StepSum(self._rows_of(rows * np.array(filled)[None, :, None]))

    @fl.answers(fl.GATHER, private=False)
    def assign(self, context: fl.CallContext, query: PublicCentres) -> fl.Ack:
        """Take the nearest centre's cluster, without saying which.

        Security rule: a client assigns itself once. By its updates under other centres, or by
        whether it accepts them, a server could find out what the client is near to.

        Raises:
            PolicyError: more centres than clusters, or other centres than before.
        """
        if len(query.centres.value) > self._clusters:
            raise fl.PolicyError(
                f"{len(query.centres.value)} centres are not those of {self._clusters} clusters: "
                "the request is refused"
            )

        def nearest() -> Array:
            centres = query.centres.value.double().cpu().numpy()
            return noisy_centres.nearest_centres(self._coordinates(context, query), centres)

        return self._take_cluster(context, query.digest(), nearest)

    def _take_cluster(
        self, context: fl.CallContext, current: torch.Tensor, nearest: Callable[[], Array]
    ) -> fl.Ack:
        """Assign clients to clusters, unless they have assigned themselves to others.

        Args:
            context: the clients (b,).
            current: digest of what the clusters are, (32,) uint8.
            nearest: returns each client's cluster, (b,).

        Raises:
            PolicyError: a client has assigned itself before, to other centres.
        """
        for i, before in zip(context.ids, self._assigned_to[context.positions], strict=True):
            # Whatever its cluster would be: a refusal must not tell of the data.
            if bool(before.any()) and not torch.equal(before, current):
                raise fl.PolicyError(
                    f"client {i} has assigned itself before, and other centres could tell to what: "
                    "the request is refused"
                )
        labels = nearest()
        self._assigned_to[context.positions] = current
        self._labels[context.positions] = labels
        return fl.Ack()

    @fl.answers(fl.SUM, through=("blocks",), fresh=True, trains="usual", unmasked=("weight",))
    def contribute_block(self, context: fl.CallContext, query: BlockAverages) -> ClusterBlocks:
        """Train, and return the update in the block of the client's cluster.

        The other blocks are zeros. Clients count the same, unless the run weights them by |D_i|.

        Raises:
            PolicyError: a client has not assigned itself yet, the request is late, or counts come
                first.
        """
        self._refuse_unless_counted("contribute_block", False)
        self._check_assigned(context)
        self._bind_centres(context)
        self.catch_up(context, self.own_averages(query, context.positions))
        return self._blocks(context, range(len(context.positions)))

    @fl.answers(fl.SUM, unmasked=("count",), fixed=False)
    def count_block(
        self, context: fl.CallContext, query: BlockAverages
    ) -> counted_blocks.BlockCount:
        """Apply the averages of each client's cluster, and return a one in its place.

        Raises:
            PolicyError: a client has not assigned itself yet, the request is late, or the run is
                without counts.
        """
        self._refuse_unless_counted("count_block", True)
        self._check_assigned(context)
        self._bind_centres(context)
        self.catch_up(context, self.own_averages(query, context.positions))
        labels = self._labels[context.positions]
        ones = torch.nn.functional.one_hot(labels, self._clusters) > 0
        return counted_blocks.BlockCount(self.counted(context, ones, self._of_clusters))

    @fl.answers(fl.SUM, through=("blocks",), fresh=True, trains="usual", unmasked=("weight",))
    def contribute_counted(
        self, context: fl.CallContext, query: counted_blocks.FilledBlocks
    ) -> ClusterBlocks:
        """Train, and return the update in the block of the client's cluster if it is filled.

        Clients of other clusters train alone, once a round, and send zeros.

        Raises:
            PolicyError: a client has not assigned itself yet, the run is without counts, or the
                request contradicts what was counted.
            UpdateError: a model that was trained alone is not finite.
        """
        self._refuse_unless_counted("contribute_counted", True)
        self._check_assigned(context)
        self._bind_centres(context)
        context.bind(self.lineage(context.positions))
        filled = self.filled(context, query, self._clusters, self._of_clusters)
        shared: list[int] = []
        alone: list[int] = []
        labels = self._labels[context.positions].tolist()
        trained_in = self._trained_in[context.positions].tolist()
        for n, label in enumerate(labels):
            if filled[label]:
                shared.append(n)
            elif trained_in[n] < context.round:
                alone.append(n)
        self._train_alone(context.select(alone))
        return self._blocks(context, shared)

    @fl.answers(fl.GATHER, private=False)
    def receive_blocks(self, context: fl.CallContext, query: BlockAverages) -> fl.Ack:
        """Apply the averages of each client's cluster without training.

        Raises:
            PolicyError: a client has not assigned itself yet.
        """
        self._check_assigned(context)
        self.take(context.positions, self.own_averages(query, context.positions))
        return fl.Ack()

    def sent_with(self, row: int) -> slice:
        """Return the rows of all clusters, so that no digest of them tells a client's cluster."""
        first = row - row % self._clusters
        return slice(first, first + self._clusters)

    def own_averages(self, query: BlockAverages, positions: Sequence[int]) -> fl.AverageDeltas:
        """Return the averages of each client's own cluster.

        Args:
            query: the averages of all clusters.
            positions: of the clients that the query addresses.
        """
        table = query.means.table
        cached_table, split = self._split
        if cached_table is not table:
            # the form of an empty table is not checked, and there is nothing to split
            split = table.new_zeros(0, 0)
            if len(table):
                split = table.flatten(0, 1)
            self._split = (table, split)
        k = self._clusters
        picks = []
        labels = self._labels[positions].clamp(min=0).tolist()
        for label, rows in zip(labels, query.means.picks, strict=True):
            # the split table has k rows for each average, one a cluster
            picks.append(tuple(row * k + label for row in rows))
        steps = query.steps.table.repeat_interleave(k)
        chosen = tuple(picks)
        return fl.AverageDeltas(
            fl.Picks(split, chosen), fl.Picks(steps, chosen), query.absolute, query.count
        )

    def take(self, positions: Sequence[int], query: fl.AverageDeltas) -> None:
        """Apply averages, which replace what clients trained alone where they move the model."""
        before = {k: self.models.row(k) for k in positions if (k,) in self._own}
        super().take(positions, query)
        for k, model in before.items():
            if not torch.equal(self.models.row(k), model):
                self._own.drop(k)

    def held(self, models: fl.Rows) -> fl.Rows:
        """Return the models that clients hold, (m, d), of which some trained alone.

        Args:
            models: (m, d) of averages alone, after those that clients are to receive.
        """
        if not self._own.keys:
            return models
        picks = []
        for k in range(len(self.cohort.ids)):
            own_model = self._own.get(k)
            if own_model is not None and torch.equal(models.row(k), self.models.row(k)):
                picks.append((fl.Rows(own_model[None]), 0))
            else:
                picks.append((models, k))
        return selected_rows(picks)

    @property
    def unshared(self) -> frozenset[int]:
        """Return the positions of clients that hold a model which they trained alone."""
        return frozenset(k for (k,) in self._own.keys)

    def memory(self) -> dict[str, torch.Tensor]:
        """Add the models that clients trained alone."""
        memory = super().memory()
        if not self.least_choosers:
            return memory
        return {**memory, **self._own.memory()}

    def recall(self, memory: Mapping[str, torch.Tensor]) -> None:
        """Restore what `memory` returned."""
        super().recall(memory)
        if self.least_choosers:
            self._own.recall(memory, self.cohort.start.device)

    def _blocks(self, context: fl.CallContext, frames: Sequence[int]) -> ClusterBlocks:
        """Return the updates of some frames' clients in their blocks, and zeros of the others.

        Every client sends k blocks of one size, so that no frame tells its cluster.
        """
        count = len(context.positions)
        d = self.cohort.model.dimension
        blocks = self.cohort.start.new_zeros(count, self._clusters, d)
        weights = blocks.new_zeros(count, self._clusters)
        if frames:
            positions = [context.positions[n] for n in frames]
            scale = [float(self.cohort.sizes[k]) for k in positions] if self._weights else None
            updates = self.cohort.train(
                self.models.select(positions),
                positions,
                self.training,
                context.step,
                self._pipeline.buffer_width(d),
                scale,
            )
            rows = torch.as_tensor(frames)
            labels = self._labels[positions]
            blocks[rows, labels] = updates[:, :d]
            if scale is not None:
                weights[rows, labels] = torch.as_tensor(scale).to(weights)
        weight_rows = fl.Rows(weights) if self._weights else None
        return ClusterBlocks(fl.Rows(blocks), weight_rows)

    def _train_alone(self, context: fl.CallContext) -> None:
        """Move the models of clients that send no update.

        Raises:
            UpdateError: a model is not finite.
        """
        positions = context.positions
        if not positions:
            return
        picks = []
        for k in positions:
            own_model = self._own.get(k)
            if own_model is None:
                picks.append((self.models, k))
            else:
                picks.append((fl.Rows(own_model[None]), 0))
        models = selected_rows(picks)
        updates = self.cohort.train(models, positions, self.training, context.step)
        for n, (i, k) in enumerate(zip(context.ids, positions, strict=True)):
            if not bool(updates[n].isfinite().all()):
                raise fl.UpdateError(
                    f"round {context.round}: the model of client {i} is not finite: lower the "
                    "learning rate (--lr)"
                )
            self._own.keep(models.row(n) + updates[n], k)
            self._trained_in[k] = context.round

    def _count_nearest(
        self, name: str, context: fl.CallContext, query: PublicCentres
    ) -> counted_blocks.BlockCount:
        """Return a one at the nearest centre of each client."""
        self._refuse_unless_counted(name, True)
        centres = query.centres.value.double().cpu().numpy()
        nearest = noisy_centres.nearest_centres(self._coordinates(context, query), centres)
        # as wide where clusters are dissolved
        width = max(len(centres), self._clusters)
        ones = torch.nn.functional.one_hot(torch.as_tensor(nearest), width) > 0
        return counted_blocks.BlockCount(self.counted(context, ones, query.digest()))

    @property
    def _of_classes(self) -> torch.Tensor:
        """Return the digest of what parts of points are counted by, (32,) uint8."""
        return counted_blocks.numbers_digest(torch.arange(-self._map.classes, 0))

    @property
    def _of_clusters(self) -> torch.Tensor:
        """Return the digest of what updates are counted by, (32,) uint8."""
        return counted_blocks.numbers_digest(torch.arange(self._clusters))

    def _refuse_unless_counted(self, name: str, counted: bool) -> None:
        """Raise PolicyError for a sum with counts in a run without, or the other way round.

        Args:
            name: the client method that was called.
            counted: True for one that belongs to counts.
        """
        if counted and not self.least_choosers:
            raise fl.PolicyError(
                f"{name} belongs to secure sums without noise, and this run has others: the "
                "request is refused"
            )
        if self.least_choosers and not counted:
            raise fl.PolicyError(
                f"{name} would sum blocks of single clients, which this run counts first: the "
                "request is refused"
            )

    def _check_residuals(self) -> None:
        """Raise PolicyError where points are summed as they are."""
        if not self._residuals:
            raise fl.PolicyError(
                "parts of points are summed in runs with residuals only: the request is refused"
            )

    def _bind_centres(self, context: fl.CallContext) -> None:
        """Bind replies to the centres of the clusters: others could leave a client alone in one."""
        context.bind(as_rows(self._assigned_to[context.positions]))

    def _check_assigned(self, context: fl.CallContext) -> None:
        """Raise PolicyError for clients that have no cluster yet."""
        for i, label in zip(context.ids, self._labels[context.positions].tolist(), strict=True):
            if label == UNASSIGNED:
                raise fl.PolicyError(f"client {i} has not assigned itself yet: assign comes first")

    def _part_rows(self, context: fl.CallContext) -> Array:
        """Return the parts of the clients' points (b, c, 1 + q), of norm 1."""
        for k in context.positions:
            if k not in self._parts:
                labels = self.cohort.training_samples.targets([k]).tolist()
                self._parts[k] = self._map.parts(self.cohort.inputs(k), labels)
        contributions, weights = zip(*(self._parts[k] for k in context.positions), strict=True)
        return noisy_centres.part_rows(np.stack(contributions), np.stack(weights))

    def _unit_points(self, context: fl.CallContext, mean_parts: fl.Shared | None = None) -> Array:
        """Return the clients' points (b, q) of norm 1.

        They follow from their data alone, but for public mean parts that are subtracted.
        """
        if mean_parts is not None:
            means = mean_parts.value.double().cpu().numpy()
            return noisy_centres.residuals(self._part_rows(context), means)
        for k in context.positions:
            if k not in self._points:
                labels = self.cohort.training_samples.targets([k]).tolist()
                self._points[k] = self._map.point(self.cohort.inputs(k), labels)
        points = np.stack([self._points[k] for k in context.positions])
        # norm 1 is the sensitivity of the sum, whatever the number of a client's samples
        return noisy_centres.unit(points)

    def _directions(self, context: fl.CallContext, query: PublicMean | PublicCentres) -> Array:
        """Return the directions (b, q) of the clients' points from a public mean."""
        centre = query.mean.value.double().cpu().numpy()
        points = self._unit_points(context, query.parts)
        return noisy_centres.directions_from(points, centre)

    def _coordinates(self, context: fl.CallContext, query: PublicCentres) -> Array:
        """Return the clients' coordinates (b, r) in the public directions."""
        basis = query.basis.value.double().cpu().numpy()
        return noisy_centres.projections(self._directions(context, query), basis)

    def _displacements(self, context: fl.CallContext, query: PublicCentres, reach: float) -> Array:
        """Return the clients' rows about public centres, (b, c, 1 + r)."""
        centres = query.centres.value.double().cpu().numpy()
        points = self._coordinates(context, query)
        return noisy_centres.displacement_rows(points, centres, reach)

    def _rows_of(self, rows: Array) -> fl.Rows:
        """Return rows in the type of the models, slightly shorter than 1.

        The clip leaves them as they are then: by which factor it rounds longer ones depends on the
        number of clients in a batch, and noise follows the bits of a row. Sums of rows depend on
        their order in memory, too.
        """
        start = self.cohort.start
        scale = 1 - 2 * margin(start.dtype)
        contiguous = np.ascontiguousarray(rows * scale)
        return fl.Rows(torch.as_tensor(contiguous).to(start.device, start.dtype))
