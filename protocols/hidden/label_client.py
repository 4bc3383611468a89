"""Clients that find their cluster by the label map that they share with others (`label_search`).

A client's class means, its label map and its bucket never leave it. Every sum is over rows of norm
1 at most. Exact counts of buckets come from sums of ones, as those of cells do.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated

import numpy as np

from securecluster.clustering import label_maps
from securecluster.clustering.labels import Array
from securecluster.core.lazy_torch import torch
from securecluster.protocols import authoring as fl
from securecluster.protocols.common.averages import counted_blocks
from securecluster.protocols.hidden.class_means import ClassMeans


@dataclass(frozen=True, eq=False)
class AnchorSum:
    """Client to server, in a sum: the client's class means, in the order of anchors."""

    anchors: Annotated[fl.Rows, fl.Real(("classes", "frequencies"))]  # (b, c, g), of norm 1


@dataclass(frozen=True, eq=False)
class PublicAnchors:
    """Server to client: the means of matched class means."""

    anchors: Annotated[
        fl.Shared, fl.Real(("classes", "frequencies"), average=True, made_of=("anchors",))
    ]  # (c, g)


@dataclass(frozen=True, eq=False)
class MapSum:
    """Client to server, in a sum: a one in the bucket of the client's label map."""

    maps: Annotated[fl.Rows, fl.Real(("buckets",))]  # (b, c)


@dataclass(frozen=True, eq=False)
class PublicMaps(PublicAnchors):
    """Server to client: anchors, and the buckets of the clusters."""

    places: Annotated[
        fl.Shared, fl.Whole((fl.Upto("places", "clusters", minimum=1),), maximum="buckets")
    ]  # (k',) int64

    def digest(self) -> torch.Tensor:
        """Return the 32 bytes of a digest of all numbers, uint8."""
        numbers = [self.anchors.value.flatten().double(), self.places.value.double()]
        return counted_blocks.numbers_digest(torch.cat(numbers))


class LabelMaps:
    """What clients of `hidden` send and do where clusters are found by label maps.

    A class of clients derives from it, too.

    Attributes:
        buckets: of the histogram; 0 in runs that find clusters by points alone.
        noisy: whether every sum has noise.
    """

    cohort: fl.LocalTrainer
    least_choosers: int
    buckets: int = 0
    noisy: bool = False
    _map: ClassMeans
    _class_rows: dict[int, Array]  # by position
    _rows_of: Callable[[Array], fl.Rows]
    _refuse_unless_counted: Callable[[str, bool], None]
    counted: Callable[[fl.CallContext, torch.Tensor, torch.Tensor], fl.Rows]
    _take_cluster: Callable[[fl.CallContext, torch.Tensor, Callable[[], Array]], fl.Ack]

    @fl.answers(fl.SUM, through=("anchors",))
    def send_means(self, context: fl.CallContext, query: fl.Empty) -> AnchorSum:
        """Return each client's class means in the order of labels.

        In an exact sum a class that one client alone has would be that client's, so that without
        noise clients put them in the order of public draws that they match, which mixes classes.

        Raises:
            PolicyError: the run finds clusters by points, and has no noise for such a sum.
        """
        self._check_by_labels("send_means")
        if self.noisy:
            return AnchorSum(self._rows_of(self._unit_means(context)))
        return AnchorSum(self._rows_of(self._matched(context, self._map.first_anchors)))

    @fl.answers(fl.SUM, through=("anchors",), fixed=True)
    def send_matched(self, context: fl.CallContext, query: PublicAnchors) -> AnchorSum:
        """Return each client's class means in the order of the anchors that they match.

        Raises:
            PolicyError: as of `send_means`.
        """
        self._check_by_labels("send_matched")
        return AnchorSum(self._rows_of(self._matched(context, _array(query.anchors))))

    @fl.answers(fl.SUM, through=("maps",), fixed=True)
    def send_map(self, context: fl.CallContext, query: PublicAnchors) -> MapSum:
        """Return a one in the bucket of each client's label map.

        Raises:
            PolicyError: as of `send_means`; or counts take the place of this sum.
        """
        self._check_by_labels("send_map")
        self._refuse_unless_counted("send_map", False)
        return MapSum(self._rows_of(self._ones(context, query)))

    @fl.answers(fl.SUM, unmasked=("count",), fixed=True)
    def count_map(self, context: fl.CallContext, query: PublicAnchors) -> counted_blocks.BlockCount:
        """Return a one in the bucket of each client's label map, which is counted exactly.

        Raises:
            PolicyError: as of `send_means`; or the run is without counts.
        """
        self._check_by_labels("count_map")
        self._refuse_unless_counted("count_map", True)
        ones = torch.as_tensor(self._ones(context, query) > 0)
        about = counted_blocks.numbers_digest(query.anchors.value)
        return counted_blocks.BlockCount(self.counted(context, ones, about))

    @fl.answers(fl.GATHER, private=False)
    def assign_by_map(self, context: fl.CallContext, query: PublicMaps) -> fl.Ack:
        """Take the cluster whose bucket is that of the nearest label map, without saying which.

        Security rule: a client assigns itself once, as in `assign`.

        Raises:
            PolicyError: as of `send_means`; or the client has assigned itself by something else.
        """
        self._check_by_labels("assign_by_map")

        def nearest() -> Array:
            anchors = _array(query.anchors)
            places = query.places.value.tolist()
            means = self._unit_means(context)
            maps = label_maps.label_maps(means, anchors)
            found = []
            for own, label_map in zip(means, maps, strict=True):
                place = label_maps.nearest_place(
                    own, anchors, label_map, places, self.buckets, self._map.seed
                )
                found.append(place)
            return np.array(found)

        return self._take_cluster(context, query.digest(), nearest)

    def _matched(self, context: fl.CallContext, anchors: Array) -> Array:
        """Return the clients' class means in the order of anchors, (b, c, g)."""
        means = self._unit_means(context)
        return label_maps.in_order(means, label_maps.label_maps(means, anchors))

    def _ones(self, context: fl.CallContext, query: PublicAnchors) -> Array:
        """Return a one in the bucket of each client, (b, buckets)."""
        maps = label_maps.label_maps(self._unit_means(context), _array(query.anchors))
        ones = np.zeros((len(maps), self.buckets))
        for row, label_map in zip(ones, maps, strict=True):
            row[label_maps.bucket_of(label_map, self.buckets, self._map.seed)] = 1.0
        return ones

    def _unit_means(self, context: fl.CallContext) -> Array:
        """Return the clients' class means (b, c, g), of norm 1 in all."""
        for k in context.positions:
            if k not in self._class_rows:
                labels = self.cohort.training_samples.targets([k]).tolist()
                means, weights = self._map.class_rows(self.cohort.inputs(k), labels)
                self._class_rows[k] = label_maps.unit_means(means[None], weights[None])[0]
        return np.stack([self._class_rows[k] for k in context.positions])

    def _check_by_labels(self, name: str) -> None:
        """Raise PolicyError where clusters are found by points alone."""
        if not self.buckets:
            raise fl.PolicyError(
                f"{name} belongs to runs that find clusters by label maps, and this one finds them "
                "by points: the request is refused"
            )


def _array(shared: fl.Shared) -> Array:
    """Return a public array in float64."""
    return np.asarray(shared.value.double().cpu().numpy())
