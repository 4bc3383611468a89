"""FL+HC: federated learning with hierarchical clustering, Algorithm 1.

Briggs, Fan, Andras, "Federated learning with hierarchical clustering of local updates to improve
training on non-IID data", IJCNN 2020, arXiv 2004.11791.

n      rounds of FedAvg before the clustering round, in which every client trains once from the
       model of the n rounds
Δw_k   client k's masked update in the clustering round; P the hyper-parameters of the clustering:
       metric, linkage, threshold
c, K_c a cluster and its clients, which continue alone from that same model, up to the same total
       number of rounds

Newcomers, the threshold by the largest gap, the metric "chord", batches by labels in the
clustering round, and gradient signatures in place of Δw_k are not in the paper.

With gradient signatures no client trains in the clustering round: the distances of Line 10 are
those of signatures, less what their noise adds. They are means of clipped rows, so all have one
scale, and l2 and chord are the same. Without a threshold, merges of signatures with noise are cut
into as many clusters as the known size of the noise lets one count.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from numbers import Integral, Real
from typing import Annotated, Any, ClassVar

from securecluster.clustering import agglomerative
from securecluster.clustering.agglomerative import merges
from securecluster.clustering.distances import METRICS, distances
from securecluster.clustering.noise_robust import default_threshold, partition
from securecluster.core.lazy_torch import torch
from securecluster.privacy.masking.masks import ENTRYWISE
from securecluster.protocols import authoring as fl
from securecluster.protocols.common.averages.averaging import SharedModelClient
from securecluster.protocols.common.comparison import shortfalls, signature_collection
from securecluster.protocols.common.comparison.compressed_updates import CompressedUpdateClient
from securecluster.protocols.common.comparison.evidence import (
    Evidence,
    SignatureEvidence,
    UpdateEvidence,
)
from securecluster.protocols.common.comparison.gradient_signatures import SignatureSender
from securecluster.protocols.common.newcomers import joint_model_message
from securecluster.protocols.common.options import training_options
from securecluster.protocols.common.options.compression_options import CompressionOptions


@dataclass
class LinkageRecord:
    """Distances and merges of the clustering round, as the server computed them."""

    ids: list[int]  # the r clients that replied; rows and columns below are in this order
    distance: torch.Tensor  # (r, r)
    merges: torch.Tensor  # (r − 1, 4), scipy's linkage matrix
    threshold: float


@dataclass
class NewcomerReference:
    """Model that newcomers train from, and the rows that their updates are compared with."""

    joint: fl.ModelDelta  # the model of the clustering round
    step: int  # the call of the clustering round
    rows: torch.Tensor  # (r, d) the updates, or (K, d) their means where the linkage needs no more
    labels: list[int]
    sizes: list[int]  # the number of clients that each row represents
    linkage: str  # the linkage by which newcomers are assigned


@dataclass
class FLHCState(fl.AveragingState):
    """State of the server's loop, with the result of the clustering round."""

    linkage: LinkageRecord | None = None
    memory: NewcomerReference | None = None
    absent: list[int] = field(default_factory=list)  # clients without a reply in the clustering
    signatures: signature_collection.Collected | None = (
        None  # what newcomers are compared with, in place of `memory`
    )

    def doubt(self, method: fl.ClusteringProtocol) -> str | None:
        """Return a sentence where clients' shares of classes contradict the clusters."""
        return None if self.signatures is None else self.signatures.doubt(self.labels)

    def shortfall(self, method: FLHC, history: Sequence[fl.Line]) -> str | None:
        """Return how far merges that end in one cluster, or join none, are from several.

        Args:
            method: of the run.
            history: of the run, which is not read.
        """
        record = self.linkage
        if record is None or method.compression.clusterer != "paper":
            return None
        if method.threshold is not None:
            return shortfalls.of_cut(record.merges.numpy(), method.threshold, "threshold")
        if self.signatures is not None and method.privacy.noisy:
            return self.signatures.shortfall()
        gap = agglomerative.gap_of(method.metric, method.linkage)
        return shortfalls.of_gap(record.merges.numpy(), gap)


class FLHCClient(SignatureSender, SharedModelClient, CompressedUpdateClient):
    """Clients that contribute to means, and whose updates are read individually once.

    The clustering round of FL+HC needs the individual updates, or gradient signatures.
    """

    keeps: ClassVar[bool] = False
    clustering_power: float = 1.0
    """`LocalTraining.label_power` of the clustering round"""

    @property
    def read_training(self) -> fl.LocalTraining:
        """Return the hyper-parameters of the clustering round, the only one that is read."""
        return replace(self.training, label_power=self.clustering_power)


@dataclass(kw_only=True)
class FLHCAdditions(fl.Additions):
    """What makes the clustering of FL+HC cheaper, and less drawn to clients' shares of labels."""

    landmarks: Annotated[int | None, fl.IN_PYTHON] = None
    """clients whose updates are compared pair by pair; each other one joins the cluster that it
    would be merged with first, so time and memory are linear in the clients;
    None compares all pairs
    """
    clustering_batches: Annotated[
        str, fl.OneOf("auto", *training_options.BATCHES), fl.IN_PYTHON
    ] = "auto"
    """batches of the clustering round, whose updates are compared: square-root and balanced make
    clients' shares of labels count less; auto is square-root where samples have
    labels, and that of the other rounds under DP-SGD or without labels
    """

    absent: ClassVar[Mapping[str, Any]] = {"metric": "l2", "clustering_batches": "shuffled"}


@fl.protocol
class FLHC(fl.Published, fl.ClusteringProtocol):
    """FedAvg, then one clustering of all clients' updates, then FedAvg in each cluster."""

    compression: CompressionOptions = fl.group(CompressionOptions)
    signatures: fl.GradientSignatureOptions = fl.group(fl.GradientSignatureOptions)
    additions: FLHCAdditions = fl.group(FLHCAdditions)
    mask: str = "permutation"
    """map of updates that the server does not know, a fresh one each round: none, permutation,
    signed-permutation, rotation or haar
    """
    metric: Annotated[str, fl.OneOf(*METRICS)] = "chord"
    """distance of updates: l1, l2, cosine, or chord, which is l2 of updates scaled to unit norm, so
    that clients with more samples and larger updates form no cluster (not in the paper); l1 needs a
    mask that preserves it: none, permutation or signed-permutation
    """
    linkage: str = "ward"
    """distance of clusters: single, complete, average, or, with l2 and chord only, centroid or ward
    """
    threshold: float | None = None
    """merges up to this distance are made; None cuts at the largest relative gap of the merges'
    distances, if it is large or significant, or, of signatures with noise, by the noise
    """
    pre_rounds: int = 10
    """rounds of FedAvg before the clustering"""

    name: ClassVar[str] = "flhc"
    # Tables IV to VI
    _in_paper: ClassVar[Mapping[str, Any]] = {
        "rounds": 50, "participation": 0.2, "epochs": 3, "batch_size": 10, "lr": 0.1,
        "threshold": 3.0,
    }  # fmt: skip
    client: ClassVar[type[fl.TrainingClient]] = FLHCClient

    def run_server(self, net: fl.ServerChannel, run: fl.Run) -> FLHCState:
        """Run Algorithm 1, "On server": lines 3–5, 6–10 and 11–16 in one loop over rounds."""
        if not self.signatures.by_gradients:
            fl.check_compared(net, self.additions.landmarks)
        m = len(net.clients)
        outbox = fl.PendingUpdates.start(m, fresh=self.mask != "none")
        state = FLHCState([0] * m, outbox)
        for t in run.rounds("train", state, self.rounds):
            if t == self.pre_rounds + 1:  # lines 6–10
                # A checkpoint holds the clusters before any client in a cluster of one trains
                # alone, since its update could not be compared any more.
                run.commit(state, partial(self._run_clustering_round, net, run, state))
            # Lines 3–5 before the clustering, with one cluster; lines 11–16 after it.
            fl.average_clusters(net, state, self.participation, t)
        fl.flush(net, run, state)
        return state

    def _run_clustering_round(self, net: fl.ServerChannel, run: fl.Run, state: FLHCState) -> None:
        """Cluster the clients, and record the clusters in the history."""
        self._cluster(net, state)
        self._note(run, state)

    def _cluster(self, net: fl.ServerChannel, state: FLHCState) -> None:
        """Cluster all clients by their updates from the joint model (lines 6–10).

        These updates change no model. Clients that do not reply join the largest cluster.
        """
        evidence = self._collect(net, state)
        ids = evidence.ids
        state.absent = [i for i in net.clients if i not in ids]
        if len(ids) < 2:
            return
        compared = evidence.landmarks(net, self.additions.landmarks)
        labels = self._linkage_clusters(net, state, compared)
        self._remember(net, state, compared, labels)
        labels = evidence.labels(compared, labels, self.metric, self._newcomer_linkage)
        # A client without a reply most likely belongs to the largest cluster.
        default = fl.largest(labels)
        cluster_of = dict(zip(ids, labels, strict=True))
        state.labels = [cluster_of.get(i, default) for i in net.clients]

    def _collect(self, net: fl.ServerChannel, state: FLHCState) -> Evidence:
        """Ask all clients, whatever the participation, for their updates (lines 7–9)."""
        if self.signatures.by_gradients:
            return SignatureEvidence.of(
                signature_collection.collect_gradient_signatures(net, net.clients)
            )
        return UpdateEvidence.of_all_clients(net, state.outbox, self._update_method)

    @property
    def _update_method(self) -> Callable[..., Any]:
        """Return the client method of the updates that are clustered."""
        if self.compression.used:
            return FLHCClient.send_compressed_update
        return FLHCClient.train

    def _linkage_clusters(
        self, net: fl.ServerChannel, state: FLHCState, evidence: Evidence
    ) -> list[int]:
        """Return the cluster of each client, and record the paper's merges in the state (line 10).

        Args:
            evidence: of the clients.
        """
        distance = evidence.distances(self.metric)
        tree = merges(distance, self.linkage)
        seed = net.randomness.integer("server", "clusterer")
        count = None
        threshold = self.threshold
        if threshold is None:
            count = evidence.count()
        if count is not None:
            threshold = agglomerative.between(tree, count)
        elif threshold is None:
            gap = agglomerative.gap_of(self.metric, self.linkage)
            threshold = default_threshold(tree, gap, evidence.similarities(), self.linkage, seed)
        # What the merges were cut at, also where another clusterer replaces them.
        state.linkage = LinkageRecord(
            evidence.ids, torch.from_numpy(distance), torch.from_numpy(tree), float(threshold)
        )
        if self.compression.clusterer != "paper":
            similarity = evidence.similarities(self.metric)
            return partition(similarity, self.compression.clusterer, count, seed)
        if count is not None:
            return agglomerative.cut_into(tree, count)
        return agglomerative.cut(tree, threshold)

    @property
    def _newcomer_linkage(self) -> str:
        """Return the linkage by which clients are assigned to clusters that exist."""
        return self.linkage if self.compression.clusterer == "paper" else "average"

    def _remember(
        self, net: fl.ServerChannel, state: FLHCState, evidence: Evidence, labels: list[int]
    ) -> None:
        """Store what newcomers are compared with; nothing where no client posts the joint model.

        Args:
            evidence: of the r clients that were clustered, all of which hold the joint model.
            labels: (r,) their clusters.
        """
        if isinstance(evidence, SignatureEvidence):
            state.signatures = evidence.signatures
            return
        rows = evidence.updates
        width = rows.shape[1]
        if self.compression.used:  # compressed updates are shorter than the model
            width = int(net.agreed["dimension"])
        joint = fl.request_model(net, state.outbox, evidence.ids, width)
        if not len(joint.displacement):
            return
        linkage = self._newcomer_linkage
        references, clusters, sizes = agglomerative.representatives(rows, labels, linkage)
        state.memory = NewcomerReference(
            joint, evidence.step, references.cpu(), clusters, sizes, linkage
        )

    def assign_newcomers(
        self, net: fl.ServerChannel, state: FLHCState, to: Sequence[int]
    ) -> list[int]:
        """Return the cluster at the smallest linkage distance of each newcomer (not in the paper).

        A newcomer trains from the clustering round's model, and its update has that round's mask.
        With gradient signatures it sends one, and joins the cluster that is nearest on average.

        Args:
            net: a channel to the newcomers.
            state: the final state of the run.
            to: the newcomers' numbers.

        Raises:
            UsageError: no client posted the model of the clustering round.
            UpdateError: a newcomer does not reply.
        """
        if state.signatures is not None:
            return signature_collection.assign_by_signatures(
                net, state.labels, state.signatures, to
            )
        reference = state.memory
        if reference is None:
            raise fl.UsageError(
                "nobody replied in the clustering round, so there is nothing to compare newcomers "
                "with: run it anew"
            )
        query = joint_model_message(reference.joint, len(to))
        replies: fl.Replies[Any] = net.gather(
            self._update_method, query, to=to, step=reference.step
        )
        fl.check_newcomers(to, replies.ids)
        newcomers = UpdateEvidence.of(net, replies)
        # A mean of n updates has 1/n of the noise variance of one update.
        single = [1] * len(replies.ids)
        sizes = torch.tensor([*reference.sizes, *single])
        noise = newcomers.noise / sizes
        references = reference.rows.to(newcomers.updates)
        rows = torch.cat([references, newcomers.updates])
        distance = distances(rows, self.metric, noise).cpu().numpy()
        r = len(references)
        clusters = fl.nearest(
            distance[r:, :r], reference.labels, reference.linkage, reference.sizes
        )
        cluster_of = dict(zip(replies.ids, clusters, strict=True))
        return [cluster_of[i] for i in to]

    def _note(self, run: fl.Run, state: FLHCState) -> None:
        """Write the result of the clustering round into the history."""
        linkage = state.linkage
        line: dict[str, Any] = {"clustered": fl.members(state.labels), "absent": list(state.absent)}
        # Other clusterers ignore the threshold and the merges.
        if linkage is not None and self.compression.clusterer == "paper":
            line["threshold"] = linkage.threshold
            line["merges"] = linkage.merges.tolist()
        run.note(**line)

    def shared_facts(self, facts: fl.Facts) -> dict[str, Any]:
        """Return the mini-batches of the clustering round, which depend on the data by default.

        Args:
            facts: of the clients and their data.

        Raises:
            UsageError: batches are to be sampled by labels, and samples have none.
        """
        batches = self.additions.clustering_batches
        if batches == "auto":
            batches = self.training.batches
            if (
                batches == "shuffled"
                and training_options.has_labels(facts)
                and not self.privacy.per_example
            ):
                batches = "square-root"
        elif batches != "shuffled":
            training_options.check_labels(facts, "clustering_batches")
        return {**super().shared_facts(facts), "clustering_batches": batches}

    def make_client(
        self, cohort: fl.LocalTrainer, pipeline: fl.Pipeline, config: Mapping[str, Any]
    ) -> fl.TrainingClient:
        """Return the clients, with the mini-batches of their clustering round.

        Args:
            cohort: the clients' data and local training.
            pipeline: stages between an update and the wire.
            config: what clients and server agreed on.
        """
        client = FLHCClient(cohort, self.training.usual(self, config), pipeline, self.weighted)
        client.clustering_power = training_options.BATCHES[config["clustering_batches"]]
        return client

    def check(self, clients: int) -> None:
        """Check the options of the clustering, too."""
        super().check(clients)
        agglomerative.check_linkage(self.metric, self.linkage)
        if self.metric == "l1" and self.mask not in ENTRYWISE:
            raise fl.UsageError(
                f"the mask {self.mask!r} mixes coordinates, which changes l1 distances: use a "
                "permutation, or metric chord"
            )
        fl.check_landmarks(self.additions.landmarks)
        by_labels = self.additions.clustering_batches in ("square-root", "balanced")
        if by_labels and self.privacy.per_example:
            raise fl.UsageError(
                "batches that are sampled by labels depend on a client's label counts, which the "
                "price of DP-SGD does not cover: leave clustering_batches out where examples are "
                "protected"
            )
        self._check_pre_rounds()
        self._check_threshold()
        if self.signatures.by_gradients and self.metric not in agglomerative.POINTS:
            raise fl.UsageError(
                f"gradient signatures are compared by l2, and the metric is {self.metric}: take "
                "metric chord or l2, or signature update"
            )

    def _check_pre_rounds(self) -> None:
        """Raise UsageError unless a round follows the clustering."""
        whole_number = isinstance(self.pre_rounds, Integral)
        if not (whole_number and 0 <= self.pre_rounds < self.rounds):
            raise fl.UsageError(
                f"pre_rounds = {self.pre_rounds!r} of {self.rounds} rounds: the clustering comes "
                "after pre_rounds, a whole number from 0 to rounds - 1; lower pre_rounds or ask "
                "for more rounds"
            )

    def _check_threshold(self) -> None:
        """Raise UsageError for a threshold that is no distance, or that is not applied."""
        threshold = self.threshold
        if threshold is None:
            return
        is_number = isinstance(threshold, Real)
        if not (is_number and 0 <= float(threshold) < math.inf):
            raise fl.UsageError(
                f"threshold = {threshold!r} is no distance: give a finite number from 0, or "
                "leave it out for the largest gap"
            )
        clusterer = self.compression.clusterer
        if clusterer != "paper":
            raise fl.UsageError(
                f"a threshold cuts the paper's merges, and the clusterer {clusterer!r} has "
                "none: leave one of them out"
            )

    def dry_runs(self) -> Sequence[Mapping[str, Any]]:
        """Return a run in which all clients are one cluster, so that each goes on in sums."""
        return ({"threshold": 1e30, "clusterer": "paper"},)

    def disclosures(self) -> fl.Disclosures:
        """Return what stays visible under every mask."""
        views = [
            "pairwise distances, norms and inner products of all clients' updates of the "
            "clustering round",
            "how far the model of the clustering round has moved from the first one",
        ]
        if self.signatures.by_gradients:
            views = self.signatures.views
        views += [
            "the clusters, and each client's cluster",
            *fl.visible_sample_counts(weighted=not self.privacy.per_client),
        ]
        return fl.Disclosures(server=views, not_covered=self.signatures.assumptions(self.privacy))
