"""The server's steps of SR-FCA (Vardhan et al. 2024, Algorithms 1 to 4).

The distances that these steps compare are in `model_distance`.

By default nothing is trimmed (Algorithm 3 does): then a sum is enough, where trimming has the
server read every update. Clients count by their samples, unless updates are trimmed or clipped.
Merged models are the first post of a restart: θ_0 and one delta, whatever a client held.
"""

from __future__ import annotations

import math
import warnings
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import numpy as np
from numpy.typing import NDArray

from securecluster.core.lazy_torch import torch
from securecluster.errors import SecureClusterWarning
from securecluster.protocols import authoring as fl
from securecluster.protocols.srfca import graph
from securecluster.protocols.srfca.client import OfferedClusters, RelayedModels, SRFCAClient
from securecluster.protocols.srfca.model_distance import (
    ClusterModels,
    CrossClusterLoss,
    ModelDistance,
    WeightDistance,
    pairwise_l2,
)
from securecluster.protocols.srfca.profiles import EVIDENCE, cluster_without_threshold

Array = NDArray[np.float64]


@dataclass
class Graph:
    """The graph of one-shot models, for its plot."""

    ids: list[int]  # the r clients whose models it compares
    edges: torch.Tensor  # (r - 1,) of the minimum spanning tree, ascending
    threshold: float  # λ
    distance: torch.Tensor  # (r, r)
    labels: list[int] = field(default_factory=list)  # (r,) clusters of ONE_SHOT, or UNASSIGNED
    aside: list[int] = field(default_factory=list)  # positions of odd models

    def theory(self) -> dict[str, Any] | None:
        """Return the distances within and across the clusters of ONE_SHOT beside λ.

        A threshold graph has these clusters for every λ from the largest distance within to below
        the smallest across (Vardhan et al. 2024, 4). Odd models do not count.

        Returns:
            An entry of result.json; None where ONE_SHOT found fewer than two clusters.
        """
        labels = np.asarray(self.labels)
        counts = labels != graph.UNASSIGNED
        counts[self.aside] = False
        if len(set(labels[counts].tolist())) < 2:
            return None
        pair = np.triu(np.outer(counts, counts), 1)
        together = np.equal.outer(labels, labels)
        distance = self.distance.numpy()
        within = float(distance[pair & together].max(initial=0.0))
        across = float(distance[pair & ~together].min())
        verdict = "so that no λ alone gives these clusters"
        if within < across:
            verdict = "so that every λ between them gives these clusters"
        sentence = (
            f"models of a first cluster are at most {within:.3g} apart, and of two at least "
            f"{across:.3g}, {verdict}; λ is {self.threshold:.3g}"
        )
        odd = [self.ids[k] for k in self.aside]
        if odd:
            others = np.flatnonzero(counts)
            nearest = float(distance[self.aside][:, others].min())
            sentence += (
                f", chosen without {len(odd)} odd of {len(labels)} models, the nearest of which is "
                f"{nearest:.3g} apart from all others: client {', '.join(map(str, odd))}"
            )
        return {
            "sentence": sentence,
            "lambda": self.threshold,
            "within": within,
            "across": across,
            "aside": odd,
        }


@dataclass
class SRFCAState:
    """The state of the server's loop, as checkpoints store it."""

    clusters: list[int]  # (m,) each client's, UNASSIGNED where it has none yet
    outbox: fl.PendingUpdates
    threshold: float = 0.0  # λ
    step: int = 0  # the call in which clients sent their one-shot models: it names the mask
    ids: tuple[int, ...] = ()  # the r clients that sent them
    # those of them that have evaluated all the models, for the cross-cluster loss
    judges: tuple[int, ...] = ()
    # (r, d) the one-shot models; for L2, until the last RECLUSTER
    rows: torch.Tensor = field(default_factory=fl.empty_tensor)
    noise_variance: float = 0.0  # expected squared norm of the noise in each row
    models: ClusterModels = field(default_factory=ClusterModels)  # ω_c
    # (K,) expected squared norm of the noise in each cluster's model since w_0
    noise: list[float] = field(default_factory=list)
    graph: Graph | None = None

    @property
    def labels(self) -> list[int]:
        """Return the clusters, where each unassigned client is a cluster of its own."""
        unused = count(1 + max(self.clusters))
        labels = []
        for c in self.clusters:
            labels.append(next(unused) if c == graph.UNASSIGNED else c)
        return labels

    def shortfall(self, method: Any, history: Sequence[fl.Line]) -> str | None:
        """Return how far the graph of one-shot models is from clusters.

        Args:
            method: the `SRFCA` of the run.
            history: of the run.
        """
        if self.graph is None:
            return None
        first = next(line["clustered"] for line in history if line.get("clustered"))
        if 1 < len(first) < len(self.clusters):
            return (
                f"{len(first)} first clusters of models were merged up to λ = {self.threshold:.3g}"
            )
        if method.threshold is not None or method.quantile is not None:
            edges = self.graph.edges.tolist() or [0.0]
            return (
                f"models within λ = {self.threshold:.3g} are joined, and the edges that connect "
                f"all of them are {edges[0]:.3g} to {edges[-1]:.3g} long"
            )
        squared = method.distance == "l2"
        found = cluster_without_threshold(self.graph.distance.numpy(), method.size, squared)
        if math.isinf(found.gain):
            return "no cut of the models has sides further apart than their members are"
        return (
            "several clusters explain the distances of models by at most "
            f"{found.gain:.3g} a model better than one, and clusters need more than {EVIDENCE:g}"
        )

    def restart(self, fresh: bool) -> None:
        """Set ω_c ← w_0 in every cluster; unassigned clients receive no averages.

        Args:
            fresh: whether averages of different rounds are stored separately.
        """
        # clients compare this number with their own, and return to w_0 if it is new to them
        number = 1 + (self.outbox.restart or 0)
        self.outbox = fl.PendingUpdates.start(len(self.clusters), fresh)
        self.outbox.restart = number
        unassigned = [i for i, c in enumerate(self.clusters) if c == graph.UNASSIGNED]
        self.outbox.unsubscribe(unassigned)
        self.noise = [0.0] * len(graph.groups(self.clusters))

    def hand_out(self, fresh: bool) -> None:
        """Queue the clusters' models, if there are any, for their members.

        They are deltas since w_0, whatever model a client holds.

        Args:
            fresh: whether averages of different rounds are stored separately.
        """
        if len(self.models.table):
            self.restart(fresh)
            self.outbox.post(self.models.step, self.models.table, self.clusters)


def one_shot_distances(
    net: fl.ServerChannel,
    state: SRFCAState,
    replies: fl.Replies[fl.Update],
    distance: str,
    trained: int,
    landmarks: Sequence[int],
) -> Array:
    """Return the distances of the one-shot models.

    Args:
        net: the server's channel.
        state: takes over the replies, and the clients whose models are compared (`judges`).
        replies: the one-shot models.
        distance: "loss" or "l2".
        trained: the number of trainings with noise behind each model; 1 where noise is added on the
            way out instead.
        landmarks: the clients whose models are compared with each other.

    Returns:
        (r, r)
    """
    rows = torch.zeros(0, 0)
    if replies.ids:
        rows = replies.rows.delta.values
    state.ids = replies.ids
    state.step = replies.step
    if distance == "l2":
        # the server compares the models itself
        sampled = set(landmarks)
        positions = [k for k, i in enumerate(replies.ids) if i in sampled]
        state.judges = tuple(replies.ids[k] for k in positions)
        state.rows = rows.cpu()
        state.noise_variance = net.noise("delta") * trained
        if len(positions) < len(rows):
            rows = rows[positions]
        return pairwise_l2(rows, state.noise_variance)
    state.judges, losses = cross_losses(net, replies.ids, rows, replies.step)
    return losses


@dataclass(frozen=True)
class GraphOptions:
    """Options of ONE_SHOT(λ, t).

    Args:
        distance: loss or l2.
        size: t, the fewest clients of a cluster.
        threshold: λ, or None.
        quantile: λ as a quantile of all pairwise distances, or None.
    """

    distance: str
    size: int
    threshold: float | None = None
    quantile: float | None = None

    @property
    def given(self) -> bool:
        """Return whether the user specifies λ."""
        return self.threshold is not None or self.quantile is not None

    @property
    def option(self) -> str:
        """Return the option by which the user specifies λ, for warnings."""
        if self.quantile is None:
            return f"threshold = {self.threshold}"
        return f"quantile = {self.quantile}"


def first_clusters(state: SRFCAState, distance: Array, graphing: GraphOptions) -> Array:
    """Cluster the one-shot models by their distances; other clients stay unassigned.

    Without a component of `size` clients, all clients are one cluster (not in the paper). Where λ
    is not specified, `cluster_without_threshold` determines the clusters, and a λ for MERGE (not in
    the paper).

    Args:
        state: its `judges` are the rows of `distance`; takes over the clusters, λ and the graph.
        distance: (r, r).
        graphing: t and λ.

    Returns:
        The edges of the distances' spanning tree, (r − 1,).

    Warns:
        SecureClusterWarning: a specified λ joins no clients, or all of them.
    """
    edges: Array = graph.spanning_tree_edges(distance)
    aside: tuple[int, ...] = ()
    if graphing.given:
        state.threshold = graph.choose_threshold(distance, graphing.threshold, graphing.quantile)
        labels = graph.components(distance, state.threshold, graphing.size)
        _warn_of_one_cluster(labels, edges, state.threshold, graphing)
    else:
        squared = graphing.distance == "l2"
        partition = cluster_without_threshold(distance, graphing.size, squared=squared)
        state.threshold = partition.threshold
        labels = partition.labels
        aside = partition.aside

    clients = len(state.clusters)
    if max(labels, default=graph.UNASSIGNED) == graph.UNASSIGNED:
        state.clusters = [0] * clients
    else:
        label_of = dict(zip(state.judges, labels, strict=True))
        state.clusters = [label_of.get(i, graph.UNASSIGNED) for i in range(clients)]
    state.graph = Graph(
        ids=list(state.judges),
        edges=torch.from_numpy(edges),
        threshold=state.threshold,
        distance=torch.from_numpy(distance),
        labels=labels,
        aside=list(aside),
    )
    return edges


def _warn_of_one_cluster(
    labels: Sequence[int], edges: Array, threshold: float, graphing: GraphOptions
) -> None:
    """Warn where a specified λ separates no clusters.

    Args:
        labels: (r,) the clusters by λ, or UNASSIGNED.
        edges: (r − 1,) of the spanning tree, ascending.
        threshold: λ.
        graphing: names the option in the warning.
    """
    if not len(edges):
        return
    shortest = float(edges[0])
    longest = float(edges[-1])
    if max(labels) == graph.UNASSIGNED:
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
    net: fl.ServerChannel, state: SRFCAState, share: float, trim: float, t: int
) -> None:
    """Make one step of Algorithm 3 (TRIMMED_MEAN_GD) in every cluster.

    A share of the members, enough for a sum, send their updates: into a sum, or individually where
    they are trimmed.

    Args:
        net: the server's channel.
        state: its queue of averages takes over the new ones.
        share: of each cluster's members to ask, in (0, 1].
        trim: β, the share of updates that is left out at each end of every coordinate.
        t: the round.
    """
    clusters = graph.groups(state.clusters)
    recipients: list[int] = []
    for c, members in enumerate(clusters):
        recipients += fl.sample_clients(net, members, share, t, c, minimum=net.least_members)
    recipients.sort()
    query = state.outbox.message_for(recipients)

    # a mean without trimming needs a sum only, so the server need not read any update
    if trim:
        replies = net.gather(SRFCAClient.train, query, to=recipients)
        ids = replies.ids
        step = replies.step
        means = _trimmed_means(replies, state.clusters, len(clusters), trim)
    else:
        sums = net.sum(
            SRFCAClient.contribute,
            query,
            to=recipients,
            by=[state.clusters[i] for i in recipients],
            groups=len(clusters),
            rosters=clusters,
        )
        ids = sums.ids
        step = sums.step
        means = fl.weighted_means(sums) if ids else fl.empty_tensor()

    # their training includes all averages of the query
    state.outbox.acknowledge(ids)
    if not ids:
        return
    state.outbox.post(step, means, state.clusters)
    replied = Counter(state.clusters[i] for i in ids)
    counts = [replied[c] for c in range(len(clusters))]
    _add_noise_of_means(net, state, counts, summed=not trim)


def _trimmed_means(
    replies: fl.Replies[fl.Update], labels: Sequence[int], clusters: int, trim: float
) -> torch.Tensor:
    """Return each cluster's trimmed mean.

    Args:
        replies: updates, one row a client.
        labels: (m,) each client's cluster.
        clusters: K.
        trim: β.

    Returns:
        (K, d); zeros for clusters without a reply.
    """
    if not replies.ids:
        return fl.empty_tensor()
    rows = replies.rows.delta.values
    means = torch.zeros(clusters, rows.shape[1], dtype=rows.dtype, device=rows.device)
    for c in range(clusters):
        positions = [k for k, i in enumerate(replies.ids) if labels[i] == c]
        if positions:
            means[c] = graph.trimmed_mean(rows, trim, positions)
    return means


def _add_noise_of_means(
    net: fl.ServerChannel, state: SRFCAState, replies: Sequence[int], summed: bool
) -> None:
    """Add the expected squared norm of the noise in the new means to that of the models.

    Args:
        net: specifies the noise of one update.
        state: its `noise` is updated.
        replies: (K,) number of replies in each cluster.
        summed: whether means were computed from sums.
    """
    # to a sum, a trusted server adds noise once, whatever the number of replies
    once = summed and net.agreed.get("placement") == "central"
    noise = net.noise("delta", "refine")
    for c, members in enumerate(replies):
        # the mean divides the summed noise by the number of replies
        shares = 1 if once else members
        replies_squared = max(members, 1) ** 2
        state.noise[c] += noise * shares / replies_squared


def cross_losses(
    net: fl.ServerChannel, ids: Sequence[int], rows: torch.Tensor, step: int
) -> tuple[tuple[int, ...], Array]:
    """Return the cross-losses ½(f_j(w_i) + f_i(w_j)) of one-shot models.

    Every model is relayed to all other clients. Models that got noise on their way are relayed to
    their owners, too, so that all clients evaluate the same ones.

    Args:
        net: the server's channel.
        ids: (n,) the clients whose models were received.
        rows: (n, d) the models' deltas since w_0, or sealed rows.
        step: the call in which the models were sent.

    Returns:
        The r clients that replied, and (r, r) the losses of all pairs of them.
    """
    n = len(ids)
    if n < 2:
        return tuple(ids), np.zeros((n, n))
    per_client = net.agreed.get("dp_unit") == "client"
    noisy = per_client and net.noise("delta") > 0
    picks = []
    for k in range(n):
        rows_for_k = [row for row in range(n) if row != k or noisy]
        picks.append(tuple(rows_for_k))
    order = torch.as_tensor(ids)
    query = RelayedModels(
        models=fl.Picks(rows, tuple(picks)),
        owner=fl.Picks(order, tuple(picks)),
        order=fl.Shared(order),
        clients=len(net.clients),
        step=step,
    )
    losses: fl.Pairs[torch.Tensor] = net.pairs(SRFCAClient.losses, query, to=ids, tries=fl.TRIES)
    return losses.ids, losses.value.numpy()


def cluster_models(net: fl.ServerChannel, state: SRFCAState, step: int | None) -> ClusterModels:
    """Return ω_c of every cluster whose model is available.

    Where the server cannot add up the averages, a member applies those that it lacks and posts its
    model.

    Args:
        net: the server's channel.
        state: the clusters and their averages.
        step: the call whose mask the models are to carry; None means a fresh one.
    """
    clusters = graph.groups(state.clusters)
    outbox = state.outbox
    if not outbox.number:
        return ClusterModels()  # no client ever replied
    if not outbox.fresh:
        # without a mask the server has the model of any member
        deltas = [outbox.displacement(members[0], 0) for members in clusters]
        labels = list(range(len(clusters)))
        return ClusterModels(torch.stack(deltas), 0, labels, state.noise)

    posted: dict[int, torch.Tensor] = {}
    for attempt in range(fl.TRIES):
        missing = [members for c, members in enumerate(clusters) if c not in posted]
        if not missing:
            break
        # another member in each attempt, since the first ones may be offline
        recipients = [members[attempt % len(members)] for members in missing]
        recipients.sort()
        message = outbox.message_for(recipients)
        if step is None:
            replies = net.post(SRFCAClient.post, message, to=recipients)
        else:
            replies = net.gather(SRFCAClient.post, message, to=recipients, step=step)
        step = replies.step
        outbox.acknowledge(replies.ids)
        for k, i in enumerate(replies.ids):
            cluster = state.clusters[i]
            posted[cluster] = replies.rows.delta.row(k).cpu()
    if not posted:
        return ClusterModels()
    labels = sorted(posted)
    table = torch.stack([posted[c] for c in labels])
    noise = [state.noise[c] for c in labels]
    return ClusterModels(table, step or 0, labels, noise)


def offer_to_newcomers(models: ClusterModels, clients: int) -> OfferedClusters:
    """Return the message that offers all clusters' models to each newcomer.

    Args:
        models: ω_c of every cluster.
        clients: the number of newcomers.
    """
    k = len(models.table)
    # no other client has evaluated a newcomer's model
    unknown = torch.full((clients, k), math.nan, dtype=torch.float64)
    all_models = tuple(range(k))
    return OfferedClusters(
        models=fl.Picks(models.table, (all_models,) * clients),
        step=models.step,
        others=fl.Rows(unknown),
    )


def model_distance(
    net: fl.ServerChannel, state: SRFCAState, models: ClusterModels, distance: str, scattered: bool
) -> ModelDistance:
    """Return the distance of models by its name, before clients are reassigned.

    Args:
        net: the server's channel.
        state: the one-shot models, or their losses, and the clusters.
        models: ω_c of every cluster.
        distance: "loss" or "l2".
        scattered: whether MERGE compares clusters as two of their clients would be compared.
    """
    if distance == "l2":
        return WeightDistance(state.ids, state.rows, models, scattered, state.noise_variance)
    one_shot = None
    if scattered and state.graph is not None:
        one_shot = state.graph.distance.numpy()
    return CrossClusterLoss(net, state.ids, state.judges, models, state.clusters, one_shot)


def recluster(
    distance: ModelDistance, before: Sequence[int], clusters: int, minimum_size: int = fl.MINIMUM
) -> list[int]:
    """Assign every client to the nearest cluster (Algorithm 2).

    Not in the paper: a client whose distances are unknown stays in its cluster, or joins the
    largest one if it has none; and a cluster that too few clients choose is dropped, so that these
    take the nearest of the others.

    Args:
        distance: of one-shot models from the clusters.
        before: (m,) each client's cluster, or UNASSIGNED.
        clusters: K.
        minimum_size: the fewest clients of a cluster.

    Returns:
        (m,) numbers below K.
    """
    offered = list(range(clusters))
    nearest = distance.nearest(range(len(before)), offered)
    labels = [nearest.get(i, c) for i, c in enumerate(before)]
    # dropping a cluster may leave others with too few clients, or give them more
    while len(offered) > 1:
        sizes = Counter(labels)
        remaining = [c for c in offered if sizes[c] >= minimum_size]
        if not remaining:
            remaining = [max(offered, key=lambda c: sizes[c])]
        if remaining == offered:
            break
        homeless = []
        for i, c in enumerate(labels):
            if c not in remaining and c != graph.UNASSIGNED:
                homeless.append(i)
        offered = remaining
        nearest = distance.nearest(homeless, offered)
        for i in homeless:
            labels[i] = nearest.get(i, graph.UNASSIGNED)

    assigned = [c for c in labels if c != graph.UNASSIGNED]
    largest_cluster = fl.largest(assigned or [0])
    return [largest_cluster if c == graph.UNASSIGNED else c for c in labels]


def merge(
    distance: ModelDistance,
    labels: Sequence[int],
    models: ClusterModels,
    threshold: float,
    minimum: int,
) -> tuple[list[int], torch.Tensor]:
    """Join clusters within λ of each other into one (Algorithm 4).

    The model of a joined cluster is the unweighted mean of its clusters' models. Not in the paper:
    clients of components that are too small take the nearest of the remaining clusters; if none
    remains, all clients are one cluster.

    Args:
        distance: of clusters, and of one-shot models from them.
        labels: (m,) each client's cluster, a row of `models`.
        models: ω_c.
        threshold: λ.
        minimum: t, the fewest clients of a cluster.

    Returns:
        (m,) the clients' new clusters 0 … K' − 1, and their models (K', d).
    """
    clusters = sorted(set(labels))
    sizes = Counter(labels)
    between = distance.between(labels)[np.ix_(clusters, clusters)]
    joined = graph.components(between, threshold, minimum, [sizes[c] for c in clusters])
    if max(joined) == graph.UNASSIGNED:
        joined = [0] * len(clusters)
    component_of = dict(zip(clusters, joined, strict=True))

    # clients of components that are too small move to a cluster of another one
    large_enough = [c for c in clusters if component_of[c] != graph.UNASSIGNED]
    components_of_clients = [component_of[c] for c in labels]
    homeless = [i for i, c in enumerate(components_of_clients) if c == graph.UNASSIGNED]
    nearest = distance.nearest(homeless, large_enough)
    default = fl.largest([c for c in components_of_clients if c != graph.UNASSIGNED])
    for i in homeless:
        if i in nearest:
            components_of_clients[i] = component_of[nearest[i]]
        else:
            components_of_clients[i] = default

    means = []
    # in the order of the new labels
    for component in dict.fromkeys(components_of_clients):
        joined_rows = [c for c in large_enough if component_of[c] == component]
        means.append(models.table[joined_rows].mean(0))
    return graph.renumbered(components_of_clients), torch.stack(means)
