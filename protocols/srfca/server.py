"""The server's side of refining a clustering of models (Vardhan et al. 2024, Algorithms 1 to 4).

`model_distance` says what is near.
"""

from __future__ import annotations

import math
import warnings
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import count

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
    threshold: float = 0.0  # λ
    step: int = 0  # the call in which clients sent their models: it names the mask
    ids: tuple[int, ...] = ()  # who did
    judges: tuple[int, ...] = ()  # and, for the cross-cluster loss, judged them all
    # (m, d) what they sent; for L2, until the last RECLUSTER
    rows: torch.Tensor = field(default_factory=empty_tensor)
    noise_variance: float = 0.0  # expected squared norm of the noise in each of them
    models: ClusterModels = field(default_factory=ClusterModels)  # ω_c
    # expected squared norm of the noise in each, since w_0
    noise: list[float] = field(default_factory=list)
    graph: Graph | None = None

    @property
    def labels(self) -> list[int]:
        """The same, with clusters of their own for those that have none yet."""
        unused = count(1 + max(self.clusters))
        return [next(unused) if c == UNASSIGNED else c for c in self.clusters]

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
    net: ServerChannel, state: SRFCAState, replies: Replies[Update], distance: str, trained: int
) -> Array:
    """Distances of the one-shot models that came, (r, r), of those of the `judges`.

    Args:
        trained: rounds with noise that each model has behind it; where noise is added on the way
            out, 1.
    """
    rows = replies.rows.delta.values if replies.ids else torch.zeros(0, 0)
    state.ids = replies.ids
    state.step = replies.step
    if distance == "l2":
        state.judges = replies.ids
        state.rows = rows.cpu()
        state.noise_variance = net.noise("delta") * trained
        return pairwise_l2(rows, state.noise_variance)
    state.judges, losses = cross_losses(net, replies.ids, rows, replies.step)
    return losses


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
        state.threshold = choose_threshold(distance, graphing.threshold, graphing.quantile)
        labels = components(distance, state.threshold, graphing.size)
        _warn_of_one_cluster(labels, edges, state.threshold, graphing)
    else:
        partition = cluster_without_threshold(
            distance, graphing.size, squared=graphing.distance == "l2"
        )
        state.threshold, labels = partition.threshold, partition.labels
    label_of = dict(zip(state.judges, labels, strict=True))
    everyone = range(len(state.clusters))
    if max(labels, default=UNASSIGNED) == UNASSIGNED:
        state.clusters = [0 for _ in everyone]
    else:
        state.clusters = [label_of.get(i, UNASSIGNED) for i in everyone]
    state.graph = Graph(
        list(state.judges), torch.from_numpy(edges), state.threshold, torch.from_numpy(distance)
    )
    return edges


def _warn_of_one_cluster(
    labels: Sequence[int], edges: Array, threshold: float, graphing: GraphOptions
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
    elif threshold >= longest:
        problem = (
            f"joins all {len(labels)} clients' models (their spanning tree's longest edge is "
            f"{longest:.4g})"
        )
    else:
        return
    warnings.warn(
        f"{graphing.option}, a λ of {threshold:.4g}, {problem}, so everyone starts in one cluster:"
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
        asked += sample_clients(net, members, share, t, c, minimum=MINIMUM)
    asked.sort()
    query = state.outbox.message_for(asked)
    if trim:
        replies = net.gather(SRFCAClient.train, query, to=asked)
        ids, step = replies.ids, replies.step
        means = _trimmed_means(replies, state.clusters, len(clusters), trim)
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
        replied = Counter(state.clusters[i] for i in ids)
        counts = [replied[c] for c in range(len(clusters))]
        _add_noise_of_means(net, state, counts, summed=not trim)


def _trimmed_means(
    replies: Replies[Update], labels: Sequence[int], clusters: int, trim: float
) -> torch.Tensor:
    """Return each cluster's trimmed mean, (K, d); zeros where nobody replied."""
    if not replies.ids:
        return empty_tensor()
    rows = replies.rows.delta.values
    means = torch.zeros(clusters, rows.shape[1], dtype=rows.dtype, device=rows.device)
    for c in range(clusters):
        members = [k for k, i in enumerate(replies.ids) if labels[i] == c]
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
    for c, members in enumerate(replies):
        shares = 1 if once else members
        state.noise[c] += noise * shares / max(members, 1) ** 2


def cross_losses(
    net: ServerChannel, ids: Sequence[int], rows: torch.Tensor, step: int
) -> tuple[tuple[int, ...], Array]:
    """Return which clients reply, and ½(f_j(w_i) + f_i(w_j)) of all pairs of them, (n, n).

    Every model is relayed to everyone else. Models that got noise on their way are relayed to their
    owners, too: everyone judges the same ones.
    """
    if len(ids) < 2:
        return tuple(ids), np.zeros((len(ids), len(ids)))
    noisy = net.noise("delta") > 0 and net.agreed.get("dp_unit") == "client"
    everyone = range(len(ids))
    relayed = []
    for k in everyone:
        relayed.append(tuple(n for n in everyone if n != k or noisy))
    picks = tuple(relayed)
    order = torch.as_tensor(ids)
    query = RelayedModels(
        Picks(rows, picks), Picks(order, picks), Shared(order), len(net.clients), step
    )
    losses: Pairs[torch.Tensor] = net.pairs(SRFCAClient.losses, query, to=ids, tries=TRIES)
    return losses.ids, losses.value.numpy()


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
        # without a mask the server knows the model of any member
        table = torch.stack([outbox.displacement(members[0], 0) for members in clusters])
        return ClusterModels(table, 0, list(range(len(clusters))), state.noise)
    posted: dict[int, torch.Tensor] = {}
    for attempt in range(TRIES):
        missing = [members for c, members in enumerate(clusters) if c not in posted]
        if not missing:
            break
        asked = sorted(members[attempt % len(members)] for members in missing)
        message = outbox.message_for(asked)
        if step is None:
            replies = net.post(SRFCAClient.post, message, to=asked)
        else:
            replies = net.gather(SRFCAClient.post, message, to=asked, step=step)
        step = replies.step
        outbox.acknowledge(replies.ids)
        for k, i in enumerate(replies.ids):
            posted[state.clusters[i]] = replies.rows.delta.row(k).cpu()
    if not posted:
        return ClusterModels()
    labels = sorted(posted)
    table = torch.stack([posted[c] for c in labels])
    return ClusterModels(table, step or 0, labels, [state.noise[c] for c in labels])


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
        return WeightDistance(state.ids, state.rows, models, scattered, state.noise_variance)
    one_shot = None
    if scattered and state.graph is not None:
        one_shot = state.graph.distance.numpy()
    return CrossClusterLoss(net, state.ids, state.judges, models, state.clusters, one_shot)


def recluster(near: ModelDistance, before: Sequence[int], clusters: int) -> list[int]:
    """Algorithm 2: every client to the nearest cluster, (m,) numbers below `clusters`.

    Ours: a client that cannot be told stays where it was (`before`; OUTSIDE joins the largest
        cluster); a cluster that one client alone
    takes is given up, and that client takes the nearest of the others.
    """
    offered = list(range(clusters))
    nearest = near.nearest(range(len(before)), offered)
    labels = [nearest.get(i, c) for i, c in enumerate(before)]
    while len(offered) > 1:
        sizes = Counter(labels)
        remaining = [c for c in offered if sizes[c] >= MINIMUM]
        if not remaining:
            remaining = [max(offered, key=lambda c: sizes[c])]
        if remaining == offered:
            break
        homeless = [i for i, c in enumerate(labels) if c not in remaining and c != UNASSIGNED]
        offered = remaining
        nearest = near.nearest(homeless, offered)
        for i in homeless:
            labels[i] = nearest.get(i, UNASSIGNED)
    assigned = [c for c in labels if c != UNASSIGNED]
    largest_cluster = largest(assigned or [0])
    return [largest_cluster if c == UNASSIGNED else c for c in labels]


def merge(
    near: ModelDistance, labels: Sequence[int], models: ClusterModels, threshold: float, least: int
) -> tuple[list[int], torch.Tensor]:
    """Join clusters within `threshold` of each other into one (Algorithm 4).

    The model of the joined cluster is the unweighted mean of theirs, (K', d). Ours: clients of
    components with fewer than `least` clients take the nearest of the clusters that are left; where
    none is left, everyone is one cluster.
    """
    clusters = sorted(set(labels))
    sizes = Counter(labels)
    distance = near.between(labels)[np.ix_(clusters, clusters)]
    joined = components(distance, threshold, least, [sizes[c] for c in clusters])
    if max(joined) == UNASSIGNED:
        joined = [0] * len(clusters)
    component_of = dict(zip(clusters, joined, strict=True))

    # clients of components that are too small move to a cluster of another one
    large_enough = [c for c in clusters if component_of[c] != UNASSIGNED]
    components_of_clients = [component_of[c] for c in labels]
    homeless = [i for i, c in enumerate(components_of_clients) if c == UNASSIGNED]
    nearest = near.nearest(homeless, large_enough)
    default = largest([c for c in components_of_clients if c != UNASSIGNED])
    for i in homeless:
        components_of_clients[i] = component_of[nearest[i]] if i in nearest else default

    means = []
    for component in dict.fromkeys(components_of_clients):  # in the order of the new labels
        parts = [c for c in large_enough if component_of[c] == component]
        means.append(models.table[parts].mean(0))
    return renumbered(components_of_clients), torch.stack(means)
