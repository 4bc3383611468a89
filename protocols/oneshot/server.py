"""The server's side of one-shot clustering: relayed eigenvectors, relevance R, and tasks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from securecluster.clustering.agglomerative import between, cut, cut_into, merges, tasks_of
from securecluster.clustering.labels import check_clusters as check_count
from securecluster.clustering.noise_robust import contrasted, partition
from securecluster.core.lazy_torch import torch
from securecluster.protocols import authoring as fl
from securecluster.protocols.common.comparison import shortfalls
from securecluster.protocols.oneshot import naive_mechanism
from securecluster.protocols.oneshot.client import OtherEigenvectors
from securecluster.protocols.oneshot.hierarchical_averaging import HierarchicalState


def eigenvectors_of_others(
    ids: Sequence[int],
    vectors: torch.Tensor,
    step: int,
    to: Sequence[int],
    labels: Sequence[int] = (),
) -> OtherEigenvectors:
    """Return the message that relays to each recipient the eigenvectors of all other clients.

    Args:
        ids: (r,) the clients whose eigenvectors were received, ascending.
        vectors: (r, p, D), or (r, n) uint8 if sealed.
        step: the call in which they were received.
        to: the recipients.
        labels: (r,) the clients' clusters, for newcomers.
    """
    picks = []
    for recipient in to:
        # the relevance of a client's own data is 1
        picks.append(tuple(row for row, owner in enumerate(ids) if owner != recipient))
    rows = tuple(picks)
    # other clients of the run do not need the clusters: they send all their relevance values
    clusters = None
    if labels:
        clusters = fl.Picks(torch.as_tensor(labels), rows)
    return OtherEigenvectors(
        vectors=fl.Picks(vectors, rows),
        ids=fl.Picks(torch.as_tensor(ids), rows),
        labels=clusters,
        step=step,
    )


@dataclass
class LinkageRecord:
    """The clustering as the GPS computed it."""

    ids: list[int]  # the r clients that took part, in the order of the merges' leaves
    merges: torch.Tensor  # (r − 1, 4), scipy's linkage matrix of 1 − R
    threshold: float


@dataclass
class ClusteringResult:
    """The result of Algorithm 2."""

    labels: list[int]  # (m,)
    # (r, p, D), or (r, n) uint8, sealed: newcomers compare their data with them
    vectors: torch.Tensor
    step: int  # the call in which the eigenvectors were received
    relevance: torch.Tensor  # (r, r) R
    linkage: LinkageRecord


@dataclass
class OneShotState(HierarchicalState):
    """The state of the servers' loop, as checkpoints store it."""

    found: ClusteringResult | None = None

    def shortfall(self, method: Any, history: Any) -> str | None:
        """Return how far merges that end in one cluster, or join none, are from several.

        Args:
            method: the `OneShot` of the run.
            history: of the run, which is not read.
        """
        if self.linkage is None or method.tasks is not None:
            return None
        tree = self.linkage.merges.numpy()
        if method.height is not None:
            return shortfalls.of_cut(tree, method.height, "height")
        return shortfalls.of_angles(tree)

    @property
    def relevance(self) -> torch.Tensor | None:
        """Return R, for its plot; None where the server was told labels alone."""
        if self.found is None or not self.found.relevance.numel():
            return None
        return self.found.relevance

    @property
    def linkage(self) -> LinkageRecord | None:
        """Return the merges, for their plot; None where the server was told labels alone."""
        if self.found is None or not self.found.relevance.numel():
            return None
        return self.found.linkage


@dataclass(frozen=True)
class TaskClusters:
    """The clustering of R.

    With a key authority, which has R in the clear, only this leaves it, and `relevance` is empty.
    """

    labels: list[int]  # (r,)
    merges: torch.Tensor  # (r − 1, 4)
    height: float
    relevance: torch.Tensor  # (r, r) R, for parties that may see it


def cluster_tasks(relevance: torch.Tensor, config: Mapping[str, Any]) -> TaskClusters:
    """Cluster R with the run's hyper-parameters (Algorithm 2).

    Args:
        relevance: (r, r) R.
        config: what clients and server agreed on.
    """
    seed = fl.Randomness(config["seed"]).integer("server", "clusterer")
    return agglomerate(
        relevance,
        config["tasks"],
        config["height"],
        config["clusterer"],
        seed,
        noisy=config["gram_noise"] > 0,
    )


def tasks_of_labels(labels: list[int]) -> TaskClusters:
    """Return a clustering of which the server was told the labels alone, without merges and R.

    Args:
        labels: cluster of each client that took part, (r,).
    """
    return TaskClusters(
        labels=labels,
        merges=torch.zeros(0, 4, dtype=torch.float64),
        height=0.0,
        relevance=torch.zeros(0, 0, dtype=torch.float64),
    )


def agglomerate(
    relevance: torch.Tensor,
    tasks: int | None,
    height: float | None,
    clusterer: str = "paper",
    seed: int = 0,
    noisy: bool = False,
) -> TaskClusters:
    """Cluster R (Algorithm 2).

    It is average linkage on the dissimilarity 1 − R (both are not in the paper), until T clusters
    remain, up to a height, or up to a gap of heights.

    Args:
        relevance: (r, r) R.
        tasks: T, or None.
        height: largest 1 − R at which clusters are merged, or None.
        clusterer: other than "paper": `noise_robust.partition` divides R into as many clusters; the
            merges are then computed for the plot only.
        seed: of that clusterer.
        noisy: whether R is made of noisy Gram matrices.
    """
    clients = len(relevance)
    distance = (1 - relevance.double().cpu()).clamp_min(0).fill_diagonal_(0)
    tree = merges(distance.numpy(), "average")
    # the paper takes T as given; a height, or a gap of heights, replaces it
    if height is not None:
        cut_height = height
    elif tasks is None:
        cut_height = tasks_of(tree, noisy)
    else:
        cut_height = between(tree, min(tasks, clients))

    labels = cut(tree, cut_height)
    if tasks is not None:
        labels = cut_into(tree, min(tasks, clients))  # by count, since heights may be tied
    if clusterer != "paper":
        # under noise R is of spans, whose values are all close to 1
        if noisy and clusterer == "spectral":
            similarity = contrasted(distance.numpy())
        else:
            similarity = 1 - distance.numpy()
        labels = partition(similarity, clusterer, 1 + max(labels), seed)
    return TaskClusters(
        labels=labels,
        merges=torch.from_numpy(tree),
        height=float(cut_height),
        relevance=relevance.cpu(),
    )


def check_options(options: Any, clients: int) -> None:
    """Check the options of the clustering and of the servers.

    Args:
        options: a protocol with the options of one-shot clustering.
        clients: m.

    Raises:
        UsageError: an option is out of range, or two of them contradict each other.
    """
    if options.tasks is not None and options.height is not None:
        raise fl.UsageError("tasks and height both say where merging stops: give one of them")
    if options.tasks is not None:
        check_count(options.tasks, clients, "tasks")
    if options.height is not None and options.clusterer != "paper":
        raise fl.UsageError(
            f"a height cuts merges, and the clusterer {options.clusterer} makes none of its own: "
            "give tasks, or neither"
        )
    naive_mechanism.check(options)
