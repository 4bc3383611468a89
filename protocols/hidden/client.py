"""Clients that assign themselves to clusters, and whose replies leave in sums alone.

A client's point, its nearest centre, and the model that its update belongs to never leave the
client. It computes every row from the public summary that the server sends, so that it stores
nothing but its cluster.

A client refuses other centres later: by its updates, they would tell which is nearest to it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, ClassVar

import numpy as np

from securecluster.clustering import noisy_centres
from securecluster.clustering.labels import Array
from securecluster.core.floating_point import margin
from securecluster.core.lazy_torch import torch
from securecluster.errors import PolicyError
from securecluster.messaging.bounds import Real, Upto, Whole
from securecluster.messaging.messages import Ack, Empty, Picks, Rows, Shared
from securecluster.messaging.octets import as_rows
from securecluster.privacy.dp.noise_streams import digest
from securecluster.privacy.pipeline import Pipeline
from securecluster.protocols.common.client import TrainingClient
from securecluster.protocols.common.client_tensors import ClientTensor
from securecluster.protocols.common.messages import AVERAGES, MOST_SAMPLES, AverageDeltas
from securecluster.protocols.hidden.class_means import ClassMeans
from securecluster.runtime.call_context import CallContext
from securecluster.runtime.endpoint import GATHER, SUM, answers
from securecluster.training.local_trainer import LocalTrainer, LocalTraining

UNASSIGNED = -1


@dataclass(frozen=True, eq=False)
class PointSum:
    """Client to server, in a sum: the client's point, of norm 1."""

    point: Annotated[Rows, Real(("signature",))]  # (b, q)


@dataclass(frozen=True, eq=False)
class PartSum:
    """Client to server, in a sum: what each class adds to the point, and its weight in it."""

    parts: Annotated[Rows, Real(("classes", "part"))]  # (b, c, 1 + q), of norm 1


@dataclass(frozen=True, eq=False)
class PublicParts:
    """Server to client: what classes add to points on average, which clients subtract."""

    parts: Annotated[Shared, Real(("classes", "signature"))]  # (c, q)


@dataclass(frozen=True, eq=False)
class PublicMean:
    """Server to client: the mean of all points."""

    mean: Annotated[Shared, Real(("signature",), average=True, made_of=("point",))]  # (q,)
    # (c, q) as in `PublicParts`; None where nothing is subtracted
    parts: Annotated[Shared | None, Real(("classes", "signature"))] = None


@dataclass(frozen=True, eq=False)
class MomentSum:
    """Client to server, in a sum: v vᵀ of the direction of the point from the mean, packed."""

    moments: Annotated[Rows, Real(("moments",))]  # (b, q(q + 1)/2), of norm 1


@dataclass(frozen=True, eq=False)
class PublicCentres:
    """Server to client: centres in the leading directions of all clients' points."""

    mean: Annotated[Shared, Real(("signature",), average=True, made_of=("point",))]  # (q,)
    basis: Annotated[Shared, Real(("signature", "subspace"))]  # (q, r)
    centres: Annotated[Shared, Real((Upto("centres", "cells", minimum=1), "subspace"))]  # (c, r)
    # (c, q) as in `PublicParts`; None where nothing is subtracted
    parts: Annotated[Shared | None, Real(("classes", "signature"))] = None

    def digest(self) -> torch.Tensor:
        """Return the 32 bytes of a digest of all numbers, uint8."""
        fields = (self.mean, self.basis, self.centres, self.parts)
        numbers = [field.value.flatten() for field in fields if field is not None]
        return torch.tensor(list(digest(torch.cat(numbers))), dtype=torch.uint8)


@dataclass(frozen=True, eq=False)
class CellSum:
    """Client to server, in a sum: a one and a displacement in the block of the nearest cell."""

    cells: Annotated[Rows, Real(("cells", "displacement"))]  # (b, c, 1 + r), of norm 1 at most


@dataclass(frozen=True, eq=False)
class StepSum:
    """Client to server, in a sum: a one and a displacement in the block of the nearest centre."""

    steps: Annotated[Rows, Real(("clusters", "displacement"))]  # (b, k, 1 + r), of norm 1 at most


@dataclass(frozen=True, eq=False)
class BlockAverages:
    """Server to client: the averages of all k models that the client lacks, oldest first."""

    # (r, k, d) as the blocks were summed, hence masked where updates are
    means: Annotated[Picks, Real((AVERAGES, "clusters", "dimension"), sent="blocks", average=True)]
    # (r,) int64, the call of the averaged updates, which identifies the mask
    steps: Annotated[Picks, Whole((AVERAGES,), maximum="steps")]
    absolute: bool  # one row, the displacements since θ_0, instead of one per missed round
    # (b,) int64, the number of averages that a client has had once it has applied these
    count: Annotated[Rows, Whole(maximum="averages")]

    @classmethod
    def of(cls, averages: AverageDeltas) -> BlockAverages:
        """Return the message of averages whose rows are (k, d)."""
        means = averages.means
        if not len(means.table):
            means = Picks(torch.zeros(0, 0, 0), means.picks)
        return cls(means, averages.steps, averages.absolute, averages.count)


@dataclass(frozen=True, eq=False)
class ClusterBlocks:
    """Client to server, in a sum: an update in the block of the client's cluster."""

    blocks: Annotated[Rows, Real(("clusters", "dimension"))]  # (b, k, d) weighted
    # (b, k) |D_i| at the client's cluster; None where clients count the same
    weight: Annotated[Rows | None, Real(("clusters",), low=0, maximum=MOST_SAMPLES)]


class HiddenClient(TrainingClient):
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

    by_client: ClassVar[tuple[str, ...]] = ("labels",)

    _labels = ClientTensor(start=UNASSIGNED, dtype="int64")
    # digests of the centres to which clients have assigned themselves; zeros before
    _assigned_to = ClientTensor(32, dtype="uint8")

    def __init__(
        self,
        cohort: LocalTrainer,
        training: LocalTraining,
        pipeline: Pipeline,
        point: ClassMeans,
        clusters: int,
        weights: bool,
        residuals: bool = False,
    ) -> None:
        super().__init__(cohort, training, pipeline, weighted=False)
        self._map = point
        self._clusters = clusters
        self._weights = weights
        self._residuals = residuals
        self._points: dict[int, Array] = {}  # by position
        self._parts: dict[int, tuple[Array, Array]] = {}  # of points, by position
        # the last message of averages, and the same by blocks: chunks of a sum share it
        self._split: tuple[torch.Tensor | None, torch.Tensor] = (None, torch.zeros(0, 0))

    @property
    def labels(self) -> list[int]:
        """Return each client's cluster, (m,), or `UNASSIGNED`."""
        labels: list[int] = self._labels.values.tolist()
        return labels

    @answers(SUM, through=("point",))
    def send_point(self, context: CallContext, query: Empty) -> PointSum:
        """Return each client's point, scaled to norm 1."""
        return PointSum(self._rows_of(self._unit_points(context)))

    @answers(SUM, through=("parts",))
    def send_parts(self, context: CallContext, query: Empty) -> PartSum:
        """Return what each class adds to each client's point, and its weight, of norm 1.

        Raises:
            PolicyError: the run is without residuals, and has no noise for such a sum.
        """
        if not self._residuals:
            raise PolicyError(
                "parts of points are summed in runs with residuals only: the request is refused"
            )
        return PartSum(self._rows_of(self._part_rows(context)))

    @answers(SUM, through=("point",), fixed=True)
    def send_residual(self, context: CallContext, query: PublicParts) -> PointSum:
        """Return each client's point without the mean parts of its classes, of norm 1."""
        return PointSum(self._rows_of(self._unit_points(context, query.parts)))

    @answers(SUM, through=("moments",), fixed=True)
    def send_moments(self, context: CallContext, query: PublicMean) -> MomentSum:
        """Return v vᵀ of the direction v of each client's point from the mean."""
        directions = self._directions(context, query)
        return MomentSum(self._rows_of(noisy_centres.second_moments(directions)))

    @answers(SUM, through=("cells",), fixed=True)
    def send_cell(self, context: CallContext, query: PublicCentres) -> CellSum:
        """Return which cell of the code book each client is in, and where in the cell."""
        rows = self._displacements(context, query, noisy_centres.CELL_REACH)
        return CellSum(self._rows_of(rows))

    @answers(SUM, through=("steps",), fixed=True)
    def send_step(self, context: CallContext, query: PublicCentres) -> StepSum:
        """Return which centre is nearest to each client, and the displacement from it."""
        rows = self._displacements(context, query, noisy_centres.STEP_REACH)
        return StepSum(self._rows_of(rows))

    @answers(GATHER, private=False)
    def assign(self, context: CallContext, query: PublicCentres) -> Ack:
        """Take the nearest centre's cluster, without saying which.

        Security rule: a client assigns itself once. By its updates under other centres, or by
        whether it accepts them, a server could find out what the client is near to.

        Raises:
            PolicyError: more centres than clusters, or other centres than before.
        """
        if len(query.centres.value) > self._clusters:
            raise PolicyError(
                f"{len(query.centres.value)} centres are not those of {self._clusters} clusters: "
                "the request is refused"
            )
        current = query.digest()
        for i, before in zip(context.ids, self._assigned_to[context.positions], strict=True):
            # Whatever its cluster would be: a refusal must not tell of the data.
            if bool(before.any()) and not torch.equal(before, current):
                raise PolicyError(
                    f"client {i} has assigned itself before, and other centres could tell to what: "
                    "the request is refused"
                )
        nearest = noisy_centres.nearest_centres(
            self._coordinates(context, query), query.centres.value.double().cpu().numpy()
        )
        self._assigned_to[context.positions] = current
        self._labels[context.positions] = nearest
        return Ack()

    @answers(SUM, through=("blocks",), fresh=True, trains="usual", unmasked=("weight",))
    def contribute_block(self, context: CallContext, query: BlockAverages) -> ClusterBlocks:
        """Train, and return the update in the block of the client's cluster.

        The other blocks are zeros. Clients count the same, unless the run weights them by |D_i|.

        Raises:
            PolicyError: a client has not assigned itself yet, or the request is late.
        """
        self._check_assigned(context)
        # other centres could leave a client alone in its block
        context.bind(as_rows(self._assigned_to[context.positions]))
        scale = None
        if self._weights:
            scale = [float(self.cohort.sizes[k]) for k in context.positions]
        d = self.cohort.model.dimension
        delta = self.trained(context, self.own_averages(query, context.positions), scale).delta
        updates = delta.values[:, :d]
        # Every client sends k blocks of one size, so that no frame tells its cluster.
        blocks = updates.new_zeros(len(updates), self._clusters, d)
        labels = self._labels[context.positions]
        rows = torch.arange(len(updates))
        blocks[rows, labels] = updates
        if scale is None:
            return ClusterBlocks(Rows(blocks), None)
        weights = updates.new_zeros(len(updates), self._clusters)
        weights[rows, labels] = torch.as_tensor(scale, dtype=weights.dtype, device=weights.device)
        return ClusterBlocks(Rows(blocks), Rows(weights))

    @answers(GATHER, private=False)
    def receive_blocks(self, context: CallContext, query: BlockAverages) -> Ack:
        """Apply the averages of each client's cluster without training.

        Raises:
            PolicyError: a client has not assigned itself yet.
        """
        self._check_assigned(context)
        self.take(context.positions, self.own_averages(query, context.positions))
        return Ack()

    def sent_with(self, row: int) -> slice:
        """Return the rows of all clusters, so that no digest of them tells a client's cluster."""
        first = row - row % self._clusters
        return slice(first, first + self._clusters)

    def own_averages(self, query: BlockAverages, positions: Sequence[int]) -> AverageDeltas:
        """Return the averages of each client's own cluster.

        Args:
            query: the averages of all clusters.
            positions: of the clients that the query addresses.
        """
        table = query.means.table
        known, split = self._split
        if known is not table:
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
        return AverageDeltas(
            Picks(split, chosen), Picks(steps, chosen), query.absolute, query.count
        )

    def _check_assigned(self, context: CallContext) -> None:
        """Raise PolicyError for clients that have no cluster yet."""
        for i, label in zip(context.ids, self._labels[context.positions].tolist(), strict=True):
            if label == UNASSIGNED:
                raise PolicyError(f"client {i} has not assigned itself yet: assign comes first")

    def _part_rows(self, context: CallContext) -> Array:
        """Return the parts of the clients' points (b, c, 1 + q), of norm 1."""
        for k in context.positions:
            if k not in self._parts:
                labels = self.cohort.training_samples.targets([k]).tolist()
                self._parts[k] = self._map.parts(self.cohort.inputs(k), labels)
        parts, weights = zip(*(self._parts[k] for k in context.positions), strict=True)
        return noisy_centres.part_rows(np.stack(parts), np.stack(weights))

    def _unit_points(self, context: CallContext, parts: Shared | None = None) -> Array:
        """Return the clients' points (b, q) of norm 1.

        They follow from their data alone, but for public mean parts that are subtracted.
        """
        if parts is not None:
            means = parts.value.double().cpu().numpy()
            return noisy_centres.residuals(self._part_rows(context), means)
        for k in context.positions:
            if k not in self._points:
                labels = self.cohort.training_samples.targets([k]).tolist()
                self._points[k] = self._map.point(self.cohort.inputs(k), labels)
        points = np.stack([self._points[k] for k in context.positions])
        # norm 1 is the sensitivity of the sum, whatever the number of a client's samples
        return noisy_centres.unit(points)

    def _directions(self, context: CallContext, query: PublicMean | PublicCentres) -> Array:
        """Return the directions (b, q) of the clients' points from a public mean."""
        centre = query.mean.value.double().cpu().numpy()
        points = self._unit_points(context, query.parts)
        return noisy_centres.directions_from(points, centre)

    def _coordinates(self, context: CallContext, query: PublicCentres) -> Array:
        """Return the clients' coordinates (b, r) in the public directions."""
        basis = query.basis.value.double().cpu().numpy()
        return noisy_centres.projections(self._directions(context, query), basis)

    def _displacements(self, context: CallContext, query: PublicCentres, reach: float) -> Array:
        """Return the clients' rows about public centres, (b, c, 1 + r)."""
        centres = query.centres.value.double().cpu().numpy()
        points = self._coordinates(context, query)
        return noisy_centres.displacement_rows(points, centres, reach)

    def _rows_of(self, rows: Array) -> Rows:
        """Return rows in the type of the models, slightly shorter than 1.

        The clip leaves them as they are then: by which factor it rounds longer ones depends on the
        number of clients in a batch, and noise follows the bits of a row. Sums of rows depend on
        their order in memory, too.
        """
        start = self.cohort.start
        scale = 1 - 2 * margin(start.dtype)
        contiguous = np.ascontiguousarray(rows * scale)
        return Rows(torch.as_tensor(contiguous).to(start.device, start.dtype))
