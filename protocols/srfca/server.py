"""The server's side of refining a clustering of models (Vardhan et al. 2024, Algorithms 1 to 4).

`model_distance` says what is near.
"""

from __future__ import annotations

import math
import warnings
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from securecluster.clustering.labels import largest
from securecluster.core.lazy_torch import torch
from securecluster.errors import SecureClusterWarning
from securecluster.messaging.messages import Picks, Rows, Shared
from securecluster.messaging.replies import Pairs, Replies
from securecluster.protocols.common.averaging import weighted_means
from securecluster.protocols.common.messages import Update, empty_tensor
from securecluster.protocols.common.pending_updates import PendingUpdates
from securecluster.protocols.common.sampling import TRIES, sample_clients
from securecluster.protocols.srfca.client import OfferedClusters, RelayedModels, SRFCAClient
from securecluster.protocols.srfca.graph import (
    UNASSIGNED,
    choose_threshold,
    components,
    groups,
    renumbered,
    spanning_tree_edges,
    trimmed_mean,
)
from securecluster.protocols.srfca.model_distance import (
    ClusterModels,
    CrossClusterLoss,
    ModelDistance,
    WeightDistance,
    pairwise_l2,
)
from securecluster.protocols.srfca.profiles import cluster_without_threshold
from securecluster.runtime.endpoint import MINIMUM
from securecluster.runtime.server_channel import ServerChannel

Array = NDArray[np.float64]


@dataclass
class Graph:
    """The graph of one-shot models, for its picture."""

    ids: list[int]  # the r clients it is about
    edges: torch.Tensor  # (r - 1,) of the minimum spanning tree, ascending
    threshold: float  # λ
    distance: torch.Tensor  # (r, r)


@dataclass
class SRFCAState:
    """What the server's loop changes."""

    clusters: list[int]  # (m,) each client's, OUTSIDE where it has none yet
    outbox: PendingUpdates
    reach: float = 0.0  # λ
    step: int = 0  # the call in which clients handed in their models: it names the mask
    ids: tuple[int, ...] = ()  # who did
    judges: tuple[int, ...] = ()  # and, for the cross-cluster loss, judged them all
    # (m, d) what they handed in; for L2, until the last RECLUSTER
    rows: torch.Tensor = field(default_factory=empty_tensor)
    blur: float = 0.0  # expected squared norm of the noise in each of them
    models: ClusterModels = field(default_factory=ClusterModels)  # ω_c
    # expected squared norm of the noise in each, since w_0
    noise: list[float] = field(default_factory=list)
    graph: Graph | None = None

    @property
    def labels(self) -> list[int]:
        """The same, with clusters of their own for those that have none yet."""
        own = iter(range(1 + max(self.clusters), 1 + max(self.clusters) + len(self.clusters)))
        return [next(own) if c == UNASSIGNED else c for c in self.clusters]

    def restart(self, fresh: bool) -> None:
        """ω_c ← w_0 in every cluster; nothing is meant for those outside."""
        number = 1 + (self.outbox.restart or 0)
        self.outbox = PendingUpdates.start(len(self.clusters), fresh)
        self.outbox.restart = number
        self.outbox.unsubscribe([i for i, c in enumerate(self.clusters) if c == UNASSIGNED])
        self.noise = [0.0] * len(groups(self.clusters))

    def hand_out(self, fresh: bool) -> None:
        """Post the clusters' models, as far as there are some.

        They count from w_0, whatever a client held.
        """
        if len(self.models.table):
            self.restart(fresh)
            self.outbox.post(self.models.step, self.models.table, self.clusters)


def one_shot_distances(
    net: ServerChannel, state: SRFCAState, got: Replies[Update], distance: str, trained: int
) -> Array:
    """Distances of the one-shot models that came, (r, r), of those of the `judges`.

    Args:
        trained: rounds with noise that each model has behind it; where noise is added on the way
            out, 1.
    """
    rows = got.rows.delta.values if got.ids else torch.zeros(0, 0)
    state.ids, state.step = got.ids, got.step
    if distance == "l2":
        state.judges, state.rows, state.blur = got.ids, rows.cpu(), net.noise("delta") * trained
        return pairwise_l2(rows, state.blur)
    state.judges, found = cross_losses(net, got.ids, rows, got.step)
    return found


@dataclass(frozen=True)
class GraphOptions:
    """How one-shot models are clustered.

    Args:
        distance: loss or l2.
        size: t, the fewest clients of a cluster.
        threshold: λ; None where it is not given.
        quantile: λ as a quantile of all pairwise distances; None where it is not given.
    """

    distance: str
    size: int
    threshold: float | None = None
    quantile: float | None = None

    @property
    def given(self) -> bool:
        """Whether the user gives λ."""
        return self.threshold is not None or self.quantile is not None

    @property
    def option(self) -> str:
        """How the user gives λ."""
        given = f"threshold = {self.threshold}"
        return given if self.quantile is None else f"quantile = {self.quantile}"


def first_clusters(state: SRFCAState, distance: Array, graphing: GraphOptions) -> Array:
    """Cluster the `judges` by their distances (r, r); the rest has no cluster yet.

    Ours: without a component of `size` clients everyone is one cluster, and where λ is not given,
        `cluster_without_threshold` finds
    the clusters, and a λ for MERGE.

    Returns:
        The edges of the distances' spanning tree, (r − 1,).

    Warns:
        SecureClusterWarning: a λ that is given joins nobody, or everybody.
    """
    edges: Array = spanning_tree_edges(distance)
    if graphing.given:
        state.reach = choose_threshold(distance, graphing.threshold, graphing.quantile)
        labels = components(distance, state.reach, graphing.size)
        _warn_of_one_cluster(labels, edges, state.reach, graphing)
    else:
        partition = cluster_without_threshold(
            distance, graphing.size, squared=graphing.distance == "l2"
        )
        state.reach, labels = partition.threshold, partition.labels
    found = dict(zip(state.judges, labels, strict=True))
    none = max(found.values(), default=UNASSIGNED) == UNASSIGNED
    state.clusters = [0 if none else found.get(i, UNASSIGNED) for i in range(len(state.clusters))]
    state.graph = Graph(
        list(state.judges), torch.from_numpy(edges), state.reach, torch.from_numpy(distance)
    )
    return edges


def _warn_of_one_cluster(
    labels: Sequence[int], edges: Array, reach: float, graphing: GraphOptions
) -> None:
    """Warn where a λ that is given tells nothing apart."""
    if not len(edges):
        return
    shortest, longest = float(edges[0]), float(edges[-1])
    if max(labels) == UNASSIGNED:
        problem = (
            f"joins no {graphing.size} of the {len(labels)} clients' models (the two nearest are "
            f"{shortest:.4g} apart)"
        )
    elif reach >= longest:
        problem = (
            f"joins all {len(labels)} clients' models (their spanning tree's longest edge is "
            f"{longest:.4g})"
        )
    else:
        return
    warnings.warn(
        f"{graphing.option}, a λ of {reach:.4g}, {problem}, so everyone starts in one cluster:"
        f" try a threshold between {shortest:.4g} and {longest:.4g}, or give none",
        SecureClusterWarning,
        stacklevel=2,
    )


def average_trimmed(
    net: ServerChannel, state: SRFCAState, share: float, trim: float, t: int
) -> None:
    """Make one step of Algorithm 3 in every cluster.

    A share of its members, two or more, send their updates: into a sum, or, where these are
    trimmed, one by one.

    Args:
        share: of each cluster's members that are asked.
        trim: β, the share of updates that is left out at each end of every coordinate.
        t: the round.
    """
    clusters = groups(state.clusters)
    asked: list[int] = []
    for c, members in enumerate(clusters):
        asked += sample_clients(net, members, share, t, c, least=MINIMUM)
    asked.sort()
    query = state.outbox.message_for(asked)
    if trim:
        got = net.gather(SRFCAClient.train, query, to=asked)
        ids, step = got.ids, got.step
        means = _trimmed_means(got, state.clusters, len(clusters), trim)
    else:
        groups_of_asked = [state.clusters[i] for i in asked]
        total = net.sum(
            SRFCAClient.contribute, query, to=asked, by=groups_of_asked, groups=len(clusters)
        )
        ids, step = total.ids, total.step
        means = weighted_means(total) if ids else empty_tensor()
    state.outbox.acknowledge(ids)
    if ids:
        state.outbox.post(step, means, state.clusters)
        replies = [sum(state.clusters[i] == c for i in ids) for c in range(len(clusters))]
        _add_noise_of_means(net, state, replies, summed=not trim)


def _trimmed_means(
    got: Replies[Update], labels: Sequence[int], clusters: int, trim: float
) -> torch.Tensor:
    """Return each cluster's trimmed mean, (K, d); zeros where nobody replied."""
    if not got.ids:
        return empty_tensor()
    rows = got.rows.delta.values
    means = torch.zeros(clusters, rows.shape[1], dtype=rows.dtype, device=rows.device)
    for c in range(clusters):
        members = [k for k, i in enumerate(got.ids) if labels[i] == c]
        if members:
            means[c] = trimmed_mean(rows, trim, members)
    return means


def _add_noise_of_means(
    net: ServerChannel, state: SRFCAState, replies: Sequence[int], summed: bool
) -> None:
    """Add the expected squared norm of the noise in each cluster's new mean to that of its model.

    Args:
        replies: of each cluster.
        summed: whether the mean comes of a sum, to which a trusted server adds noise once.
    """
    once = summed and net.agreed.get("placement") == "central"
    noise = net.noise("delta", "refine")
    for c, count in enumerate(replies):
        shares = 1 if once else count
        state.noise[c] += noise * shares / max(count, 1) ** 2


def cross_losses(
    net: ServerChannel, ids: Sequence[int], rows: torch.Tensor, step: int
) -> tuple[tuple[int, ...], Array]:
    """Return which clients reply, and ½(f_j(w_i) + f_i(w_j)) of all pairs of them, (n, n).

    Every model is relayed to everyone else. Models that got noise on their way are relayed to their
    owners, too: everyone judges the same ones.
    """
    if len(ids) < 2:
        return tuple(ids), np.zeros((len(ids), len(ids)))
    everyone, changed = (
        range(len(ids)),
        net.noise("delta") > 0 and net.agreed.get("dp_unit") == "client",
    )
    picks = tuple(tuple(n for n in everyone if n != k or changed) for k in everyone)
    order = torch.as_tensor(ids)
    query = RelayedModels(
        Picks(rows, picks), Picks(order, picks), Shared(order), len(net.clients), step
    )
    found: Pairs[torch.Tensor] = net.pairs(SRFCAClient.losses, query, to=ids, tries=TRIES)
    return found.ids, found.value.numpy()


def cluster_models(net: ServerChannel, state: SRFCAState, step: int | None) -> ClusterModels:
    """Return ω_c of every cluster.

    Where the server cannot add up the averages, a member that gets what it lacks posts it.

    Args:
        step: the call whose mask they are to carry; None: a fresh one.
    """
    clusters, outbox = groups(state.clusters), state.outbox
    if not outbox.number:
        return ClusterModels()  # nobody ever replied
    if not outbox.fresh:
        return ClusterModels(
            torch.stack([outbox.displacement(own[0], 0) for own in clusters]),
            0,
            list(range(len(clusters))),
            state.noise,
        )
    found: dict[int, torch.Tensor] = {}
    for n in range(TRIES):
        asked = sorted(own[n % len(own)] for c, own in enumerate(clusters) if c not in found)
        if asked:
            letter = outbox.message_for(asked)
            got = (
                net.post(SRFCAClient.post, letter, to=asked)
                if step is None
                else net.gather(SRFCAClient.post, letter, to=asked, step=step)
            )
            step = got.step
            outbox.acknowledge(got.ids)
            found |= {state.clusters[i]: got.rows.delta.row(k).cpu() for k, i in enumerate(got.ids)}
    kept = sorted(found)
    noise = [state.noise[c] for c in kept]
    return (
        ClusterModels(torch.stack([found[c] for c in kept]), step or 0, kept, noise)
        if kept
        else ClusterModels()
    )


def offer_to_newcomers(models: ClusterModels, clients: int) -> OfferedClusters:
    """All of them to each newcomer, of whose own model nobody else knows anything."""
    k = len(models.table)
    unknown = torch.full((clients, k), math.nan, dtype=torch.float64)
    return OfferedClusters(
        Picks(models.table, (tuple(range(k)),) * clients), models.step, Rows(unknown)
    )


def model_distance(
    net: ServerChannel, state: SRFCAState, models: ClusterModels, distance: str, scattered: bool
) -> ModelDistance:
    """The `distance` by its name, before clients go elsewhere."""
    if distance == "l2":
        return WeightDistance(state.ids, state.rows, models, scattered, state.blur)
    alone = state.graph.distance.numpy() if scattered and state.graph is not None else None
    return CrossClusterLoss(net, state.ids, state.judges, models, state.clusters, alone)


def recluster(near: ModelDistance, before: Sequence[int], clusters: int) -> list[int]:
    """Algorithm 2: every client to the nearest cluster, (m,) numbers below `clusters`.

    Ours: a client that cannot be told stays where it was (`before`; OUTSIDE joins the largest
        cluster); a cluster that one client alone
    takes is given up, and that client takes the nearest of the others.
    """
    among, labels = list(range(clusters)), list(before)
    moved = near.nearest(range(len(labels)), among)
    labels = [moved.get(i, c) for i, c in enumerate(labels)]
    while len(among) > 1:
        takers = Counter(labels)
        left = [c for c in among if takers[c] >= MINIMUM] or [max(among, key=lambda c: takers[c])]
        if left == among:
            break
        among, homeless = (
            left,
            [i for i, c in enumerate(labels) if c not in left and c != UNASSIGNED],
        )
        moved = near.nearest(homeless, among)
        labels = [moved.get(i, UNASSIGNED) if i in homeless else c for i, c in enumerate(labels)]
    known = [c for c in labels if c != UNASSIGNED] or [0]
    return [largest(known) if c == UNASSIGNED else c for c in labels]


def merge(
    near: ModelDistance, labels: Sequence[int], models: ClusterModels, reach: float, least: int
) -> tuple[list[int], torch.Tensor]:
    """Join clusters within `reach` of each other into one (Algorithm 4).

    The model of the joined cluster is the unweighted mean of theirs, (K', d). Ours: clients of
    components with fewer than `least` clients take the nearest of the clusters that are left; where
    none is left, everyone is one cluster.
    """
    used = sorted(set(labels))
    distance = near.between(labels)[np.ix_(used, used)]
    joined = components(distance, reach, least, [list(labels).count(c) for c in used])
    if max(joined) == UNASSIGNED:
        joined = [0] * len(used)
    into = dict(zip(used, joined, strict=True))
    among, homeless = (
        [c for c in used if into[c] != UNASSIGNED],
        [i for i, c in enumerate(labels) if into[c] == UNASSIGNED],
    )
    moved = near.nearest(homeless, among)
    rest = largest([into[c] for c in labels if into[c] != UNASSIGNED])
    found = [
        into[moved[i]] if i in moved else rest if into[c] == UNASSIGNED else into[c]
        for i, c in enumerate(labels)
    ]
    final = renumbered(found)
    parts = [[c for c in among if into[c] == found[final.index(k)]] for k in range(1 + max(final))]
    return final, torch.stack([models.table[own].mean(0) for own in parts])
