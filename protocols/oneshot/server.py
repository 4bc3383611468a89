"""One-shot clustering at the server: relevance, tasks, and newcomers' places in them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from securecluster.clustering.agglomerative import between, cut, into, merges, tasks_of
from securecluster.clustering.labels import check_number as check_count
from securecluster.clustering.noise_robust import CLUSTERERS, contrasted, partition
from securecluster.core.lazy_torch import torch
from securecluster.core.validation import check_choice, check_number, check_whole
from securecluster.errors import UsageError
from securecluster.messaging.messages import Picks
from securecluster.protocols.oneshot import gram_mechanism
from securecluster.protocols.oneshot.client import OtherEigenvectors
from securecluster.protocols.oneshot.hierarchical_averaging import HierarchicalState


def eigenvectors_of_others(
    ids: Sequence[int],
    vectors: torch.Tensor,
    step: int,
    to: Sequence[int],
    labels: Sequence[int] = (),
) -> OtherEigenvectors:
    """The frames that bring to each of `to` what came from the clients `ids`, ascending, except its
    own; `labels` are their clusters.
    """
    picks = tuple(tuple(k for k, j in enumerate(ids) if j != i) for i in to)
    clusters = Picks(torch.as_tensor(labels), picks) if labels else None
    return OtherEigenvectors(
        Picks(vectors, picks), Picks(torch.as_tensor(ids), picks), clusters, step
    )


@dataclass
class LinkageRecord:
    """The clustering, as the GPS saw it."""

    ids: list[int]  # the r clients that took part, and their places in what follows
    merges: torch.Tensor  # (r − 1, 4), scipy's linkage matrix of 1 − R
    threshold: float


@dataclass
class ClusteringResult:
    """What comes of Algorithm 2."""

    labels: list[int]  # (m,)
    # (r, p, D), or (r, n) uint8, sealed: newcomers compare themselves with them
    vectors: torch.Tensor
    step: int  # the call in which they came
    relevance: torch.Tensor  # (r, r) R
    linkage: LinkageRecord


@dataclass
class OneShotState(HierarchicalState):
    """What the servers' loop changes."""

    found: ClusteringResult | None = None

    @property
    def relevance(self) -> torch.Tensor | None:
        """R, for its picture."""
        return None if self.found is None else self.found.relevance

    @property
    def linkage(self) -> LinkageRecord | None:
        """The merges, for theirs."""
        return None if self.found is None else self.found.linkage


@dataclass(frozen=True)
class TaskClusters:
    """What is computed from R: under a key authority, where R is in the clear, this alone leaves
    it, `relevance` empty.
    """

    labels: list[int]  # (r,)
    merges: torch.Tensor  # (r − 1, 4)
    height: float
    relevance: torch.Tensor  # (r, r) R, for those who may look at it


def agglomerate(
    tasks: int | None,
    height: float | None,
    clusterer: str = "paper",
    seed: int = 0,
    noisy: bool = False,
) -> Callable[[torch.Tensor], TaskClusters]:
    """Average linkage on 1 − R (linkage and dissimilarity are ours) until `tasks` clusters are
    left, or up to `height`, or to a gap.

    Args:
        clusterer: others than "paper" part R as `partitions` does, into as many clusters; the
            merges are then for the picture.
        seed: of theirs.
        noisy: whether R is made of noisy Gram matrices.
    """

    def of(r: torch.Tensor) -> TaskClusters:
        apart = (1 - r.double().cpu()).clamp_min(0).fill_diagonal_(0)
        tree = merges(apart.numpy(), "average")
        at = (
            height
            if height is not None
            else tasks_of(tree, noisy)
            if tasks is None
            else between(tree, min(tasks, len(r)))
        )
        labels = cut(tree, at) if tasks is None else into(tree, min(tasks, len(r)))
        if clusterer != "paper":
            nearly_one = noisy and clusterer == "spectral"  # R of spans
            similarity = contrasted(apart.numpy()) if nearly_one else 1 - apart.numpy()
            labels = partition(similarity, clusterer, 1 + max(labels), seed)
        return TaskClusters(labels, torch.from_numpy(tree), float(at), r.cpu())

    return of


def check_options(given: Any, clients: int) -> None:
    """Raise UsageError for options of the clustering, and of the servers, that cannot be; `given`
    has them.
    """
    if given.tasks is not None and given.height is not None:
        raise UsageError("tasks and height both say where merging stops: give one of them")
    if given.tasks is not None:
        check_count(given.tasks, clients, "tasks")
    if given.height is not None:
        check_number(given, "height", 0, 1, high_in=True)
    check_choice(given, clusterer=CLUSTERERS)
    if given.height is not None and given.clusterer != "paper":
        raise UsageError(
            f"a height cuts merges, and the clusterer {given.clusterer} makes none of its own: "
            "give tasks, or neither"
        )
    check_whole(given, vectors=1, gps_every=1)
    check_number(given, "floor", 0, 1)
    gram_mechanism.check(given)
