"""The server's part in clustering: centres, or label maps, from sums over all clients.

With noise, or where sums are plain, there are four sums (`clustering.noisy_centres`), or five with
residuals. In secure sums without noise, a block that few clients fill would tell of these, so that
counts come first. The code book is then counted alone: a cell that one client is in says that
somebody is there, and not who, while its displacement would be that client's. One sum of
displacements is all, from centres that at least `least_choosers` clients are the nearest to: the
difference of two such sums would tell of those who are in one of them only. Centres that fewer
clients are the nearest to after the step are dissolved, the smallest first.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from securecluster.clustering import noisy_centres
from securecluster.clustering.labels import Array
from securecluster.core.lazy_torch import torch
from securecluster.protocols import authoring as fl
from securecluster.protocols.common.averages import counted_blocks
from securecluster.protocols.hidden import client, label_client, label_search


def empty() -> torch.Tensor:
    """Return an empty placeholder tensor."""
    return torch.zeros(0)


@dataclass
class Centres:
    """Public summary of the clusters, which the server sends to all clients."""

    mean: torch.Tensor = field(default_factory=empty)  # (q,)
    basis: torch.Tensor = field(default_factory=empty)  # (q, r)
    centres: torch.Tensor = field(default_factory=empty)  # (k', r)
    # (k',) about how many of all clients are in each cluster, from 1
    sizes: list[float] = field(default_factory=list)
    # how well the centres are told apart, from 0 to 1, see `noisy_centres.separation`
    separation: float = 1.0
    # the same in the direction in which they differ least, see `noisy_centres.weakest_direction`
    weakest: float = 1.0
    parts: torch.Tensor = field(default_factory=empty)  # (c, q); empty if nothing is subtracted
    # where clusters are found by label maps: (c, g), the buckets of the clusters, and what
    # `label_search.FoundMaps` says of them
    anchors: torch.Tensor = field(default_factory=empty)
    places: list[int] = field(default_factory=list)
    clear: int = 0
    mass: float = 1.0
    alike: float = 1.0

    @property
    def subtracted(self) -> fl.Shared | None:
        """Return the mean parts of classes that clients subtract, if any."""
        return fl.Shared(self.parts) if self.parts.numel() else None

    def assign(self, net: fl.ServerChannel, to: Sequence[int]) -> fl.Replies[fl.Ack]:
        """Let clients assign themselves to the clusters.

        Args:
            net: the server's channel.
            to: clients.
        """
        if self.places:
            maps = label_client.PublicMaps(
                fl.Shared(self.anchors), fl.Shared(torch.tensor(self.places))
            )
            return net.gather(client.HiddenClient.assign_by_map, maps, to=to)
        return net.gather(client.HiddenClient.assign, self.message(), to=to)

    def message(self) -> client.PublicCentres:
        """Return the message of centres to clients."""
        return client.PublicCentres(
            fl.Shared(self.mean), fl.Shared(self.basis), fl.Shared(self.centres), self.subtracted
        )


def find_clusters(method: Any, net: fl.ServerChannel) -> Centres:
    """Return what clients assign themselves by: label maps, or centres.

    Args:
        method: the `Hidden` of the run.
        net: the server's channel.

    Raises:
        UpdateError: no sum of several tries has enough clients.
    """
    if not method.by_labels:
        return find_centres(method, net)
    summed = _SumsOfLabels(net, method.sums.counts_first(method))
    if method.by_points and method.privacy.stand_ins:
        # of the ways on, the one of the most releases: the sums of points, twice
        label_search.find_anchors(summed)
        return find_centres(method, net, label_search.MOST_TIMES)
    fewest = method.minimum_size
    if summed.counts_first:
        fewest = max(fewest, method.sums.least_choosers)
    found = label_search.search(
        summed,
        lambda name, clients: method.deviation(net.agreed, name, clients),
        method.k,
        fewest,
        method.by_points,
    )
    if isinstance(found, int):
        return find_centres(method, net, found)
    return Centres(
        anchors=torch.as_tensor(found.anchors),
        places=found.places,
        sizes=found.counts,
        clear=found.clear,
        mass=found.mass,
        alike=found.alike,
    )


@dataclass(frozen=True)
class _SumsOfLabels:
    """Sums over all clients by which label maps are found."""

    net: fl.ServerChannel
    counts_first: bool

    def __call__(self, name: str, anchors: Array | None) -> tuple[Array, int]:
        """Return a sum, and the number of its clients.

        Args:
            name: of the sum.
            anchors: (c, g) that clients get; None for none.
        """
        clients = client.HiddenClient
        if anchors is None:
            sums = _summed(self.net, clients.send_means, fl.Empty())
            return _array(sums.rows.anchors), sums.counts[0]
        public = label_client.PublicAnchors(fl.Shared(torch.as_tensor(anchors)))
        if name == label_search.MATCHED:
            sums = _summed(self.net, clients.send_matched, public)
            return _array(sums.rows.anchors), sums.counts[0]
        if self.counts_first:
            counted, counts = _counted(self.net, clients.count_map, public)
            return np.array(counts, dtype=np.float64), len(counted.ids)
        sums = _summed(self.net, clients.send_map, public)
        return _array(sums.rows.maps), sums.counts[0]


def find_centres(method: Any, net: fl.ServerChannel, times: int = 1) -> Centres:
    """Return centres from sums over all clients.

    Args:
        method: the `Hidden` of the run.
        net: the server's channel.
        times: how often each sum with noise is formed; their mean is used.

    Raises:
        UpdateError: no sum of several tries has enough clients.
    """
    public = Centres()
    counts_first = method.sums.counts_first(method)
    if method.residuals:
        # Sum 0: what each class adds to points. Clients subtract its mean, so that those whose
        # labels are skewed differ in nothing else by the classes that they lack.
        if counts_first:
            class_sums = _counted_parts(method, net)
            deviation = 0.0
        else:
            sums = _summed(net, client.HiddenClient.send_parts, fl.Empty(), times)
            class_sums = sums.rows.parts
            deviation = method.deviation(net.agreed, "parts", sums.counts[0]) / math.sqrt(times)
        means = noisy_centres.mean_parts(_array(class_sums), deviation)
        public.parts = torch.as_tensor(means).to(class_sums.table.cpu())
    # Sum 1: the mean of all points. It is subtracted before directions are compared, since the
    # part that all clients have in common does not separate clusters.
    if method.residuals:
        query = client.PublicParts(fl.Shared(public.parts))
        points = _summed(net, client.HiddenClient.send_residual, query, times)
    else:
        points = _summed(net, client.HiddenClient.send_point, fl.Empty(), times)
    public.mean = points.rows.point.table[0].cpu() / points.counts[0]
    # Sum 2: second moments. k centres differ in k − 1 directions.
    centred = client.PublicMean(fl.Shared(public.mean), public.subtracted)
    moments = _summed(net, client.HiddenClient.send_moments, centred, times)
    r = method.subspace
    basis = noisy_centres.leading_directions(_array(moments.rows.moments), r)
    public.basis = torch.as_tensor(basis).to(public.mean)
    cells = noisy_centres.code_book(r, method.cells(net.agreed))
    if counts_first:
        return _counted_centres(method, net, public, cells)
    return _summed_centres(method, net, public, cells, times)


def _summed_centres(
    method: Any, net: fl.ServerChannel, public: Centres, cells: Array, times: int
) -> Centres:
    """Return centres from a sum over the cells of a code book, and one over centres."""
    # Sum 3: counts and displacements in the cells of a public code book. The server never sees
    # single points, so cells stand for them, and the noise falls on few numbers.
    public.centres = torch.as_tensor(cells).to(public.mean)
    counted = _summed(net, client.HiddenClient.send_cell, public.message(), times)
    started = noisy_centres.centres_from_cells(
        _array(counted.rows.cells),
        cells,
        method.k,
        method.deviation(net.agreed, "cells", counted.counts[0]) / math.sqrt(times),
        net.randomness.integer("server", "clusterer"),
    )

    # Sum 4: one step of Lloyd's algorithm with the points themselves.
    public.centres = torch.as_tensor(started).to(public.mean)
    stepped = _summed(net, client.HiddenClient.send_step, public.message(), times)
    steps = _array(stepped.rows.steps)
    deviation = method.deviation(net.agreed, "steps", stepped.counts[0]) / math.sqrt(times)
    started = noisy_centres.moved_centres(steps, started, deviation)
    counts = noisy_centres.counts_of(steps)
    public.separation = noisy_centres.separation(started, counts)
    public.weakest = noisy_centres.weakest_direction(started, counts)
    large = noisy_centres.large_enough(counts, deviation, method.minimum_size)
    public.centres = torch.as_tensor(started[large]).to(public.mean)
    # Clients that were lost are in some cluster as well.
    share = len(net.clients) / stepped.counts[0]
    public.sizes = (np.maximum(counts[large], method.minimum_size) * share).tolist()
    return public


def _counted_centres(method: Any, net: fl.ServerChannel, public: Centres, cells: Array) -> Centres:
    """Return centres from counts in the cells of a code book, and one sum over centres."""
    least_choosers = method.sums.least_choosers
    # Count 1: clients in each cell of a public code book, which stands for their points.
    public.centres = torch.as_tensor(cells).to(public.mean)
    _, counts = _counted(net, client.HiddenClient.count_cell, public.message())
    seed = net.randomness.integer("server", "clusterer")
    centres = noisy_centres.centres_from_counts(np.array(counts), cells, method.k, seed)

    # Count 2 and sum 3: one step of Lloyd's algorithm with the points themselves.
    public.centres = torch.as_tensor(centres).to(public.mean)
    for _ in range(fl.TRIES):
        counted, counts = _counted(net, client.HiddenClient.count_step, public.message())
        message = vars(public.message())
        flags = counted_blocks.filled_blocks(counted, counts, least_choosers)
        filled = client.FilledCentres(**message, **flags)
        stepped = net.sum(client.HiddenClient.send_counted_step, filled, to=counted.ids)
        if stepped.ids:
            break
    else:
        raise _too_few()
    centres = noisy_centres.moved_centres(_array(stepped.rows.steps), centres, 0.0)

    # Count 3: clients that will be in each cluster. Those of a cluster that is dissolved are near
    # to other centres, so that the rest is counted again.
    smallest = max(least_choosers, method.minimum_size)
    while True:
        public.centres = torch.as_tensor(centres).to(public.mean)
        counted, counts = _counted(net, client.HiddenClient.count_cluster, public.message())
        counts = counts[: len(centres)]
        if min(counts) >= smallest or len(centres) == 1:
            break
        centres = np.delete(centres, int(np.argmin(counts)), axis=0)
    public.separation = noisy_centres.separation(centres, np.array(counts))
    public.weakest = noisy_centres.weakest_direction(centres, np.array(counts))
    share = len(net.clients) / len(counted.ids)
    public.sizes = [count * share for count in counts]
    return public


def _counted_parts(method: Any, net: fl.ServerChannel) -> fl.Rows:
    """Return the sum of parts of points, of the classes that enough clients have."""
    least_choosers = method.sums.least_choosers
    classes = int(net.agreed["classes"])
    for _ in range(fl.TRIES):
        counted, counts = _counted(net, client.HiddenClient.count_parts, fl.Empty(), classes)
        flags = counted_blocks.filled_blocks(counted, counts, least_choosers)
        filled = counted_blocks.FilledBlocks(**flags)
        sums = net.sum(client.HiddenClient.send_counted_parts, filled, to=counted.ids)
        if sums.ids:
            rows: fl.Rows = sums.rows.parts
            return rows
    raise _too_few()


def _counted(
    net: fl.ServerChannel, method: Any, query: Any, blocks_per_client: int = 1
) -> tuple[fl.Sums[Any], list[int]]:
    """Return a sum of ones over all clients, and the counts."""
    for _ in range(fl.TRIES):
        counted = net.sum(method, query, to=net.clients)
        counts = counted_blocks.counts_of(counted, blocks_per_client) if counted.ids else None
        if counts is not None:
            return counted, counts
    raise _too_few()


def _summed(net: fl.ServerChannel, method: Any, query: Any, times: int = 1) -> fl.Sums[Any]:
    """Return a sum over all clients, or the mean of several of the same rows."""
    found = [_summed_once(net, method, query) for _ in range(times)]
    if times == 1:
        return found[0]
    (name,) = vars(found[0].rows)
    tables = [getattr(sums.rows, name).table for sums in found]
    mean = fl.Rows(torch.stack(tables).mean(0))
    return replace(found[0], rows=type(found[0].rows)(mean))


def _summed_once(net: fl.ServerChannel, method: Any, query: Any) -> fl.Sums[Any]:
    """Return a sum over all clients."""
    for _ in range(fl.TRIES):
        sums = net.sum(method, query, to=net.clients)
        if sums.ids:
            return sums
    raise _too_few()


def _too_few() -> fl.UpdateError:
    """Return the error of a sum that did not succeed in several tries."""
    return fl.UpdateError(
        "too few clients reply for a sum, and clusters are found by sums: run it anew, with "
        "another seed"
    )


def _array(rows: fl.Rows) -> Array:
    """Return the one row of a sum, in float64."""
    return np.asarray(rows.table[0].double().cpu().numpy())
