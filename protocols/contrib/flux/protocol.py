"""FLUX: clusters by descriptors of clients' distributions, then FedAvg in each cluster.

Fenoglio, Li, Barbiero, Lane, Langheinrich, Gjoreski, "FLUX: Efficient Descriptor-Driven Clustered
Federated Learning under Arbitrary Distribution Shifts", NeurIPS 2025 (arXiv 2511.22305). The
paper's text was not at hand: this file follows its abstract, notes on it, and the authors' program
(repository dariofenoglio98/FLUX), in words of its own.

d_i    client i's descriptor: moments of its latent vectors under the joint model (`descriptors`)
d′_i   the moments over all samples, for which no label is read
γ_c    the mean of the scaled d′_i of a cluster's clients

The clients train one model by FedAvg, then send d_i once. The server scales each group of moments
to [0, 1] and clusters the d_i by DBSCAN, whose radius is the elbow of the distances to the nearest
client (`density`). FedAvg goes on in each cluster from the joint model. A newcomer without labels
joins the cluster whose γ_c is nearest to its d′. With `k`, clusters are those of k-means
(Flux-prior).

What differs from the program: it clusters once the accuracy on validation samples, which clients
tell, grows by less than 0.06 in a round, at the earliest after three rounds; here after an agreed
number of rounds, three by default. It tells the largest latent number of any client, which sets the
scale of the random points, and the offset that it subtracts; here nobody tells it, and there is no
offset. Its Laplace noise has for its scale the range of the client's own numbers over its number of
samples, in each coordinate and each moment: this bounds no sensitivity. Here noise is Gaussian, on
sums of clipped rows, and priced as one release. Not in the paper: this noise, networks without
convolutions, means alone (`moments`), and newcomers that are assigned by their labels, too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from numbers import Integral
from typing import Annotated, Any, ClassVar

import numpy as np

from securecluster.protocols import authoring as fl
from securecluster.protocols.contrib.flux.client import DescriptorClient, LatentVectors
from securecluster.protocols.contrib.flux.density import Scaling, centroids, density_clusters
from securecluster.protocols.contrib.flux.descriptors import POINTS, DescriptorMap, latent_layer

torch = fl.torch

FEATURES = "features"
LABELS = "labels"


@dataclass
class NewcomerReference:
    """Model by which newcomers describe their samples, and centroids for their descriptors."""

    joint: fl.ModelDelta  # the model of the clustering round
    scaling: Scaling
    centroids: torch.Tensor  # (K, blocks · l) the means of clusters' scaled descriptors


@dataclass
class FLUXState(fl.AveragingState):
    """State of the server's loop, with the result of the clustering round."""

    radius: float = 0.0  # of DBSCAN; 0 where k is given
    absent: list[int] = field(default_factory=list)  # clients without a reply in the clustering
    memory: NewcomerReference | None = None


@fl.protocol
class FLUX(fl.ClusteringProtocol):
    """FedAvg, then one clustering of all clients' descriptors, then FedAvg in each cluster."""

    mask: str = "permutation"
    """map of updates that the server does not know, a fresh one each round: none, permutation,
    signed-permutation, rotation or haar; it does not cover descriptors
    """
    dp_unit: str = "example"
    """unit of privacy: client (all data of one client) or example (one sample of one client: DP-SGD
    in local training); ε bounds what blanking one tells: it keeps its place and contributes zeros,
    while numbers of samples and who takes part are public
    """
    pre_rounds: int = 3
    """rounds of FedAvg before the clustering"""
    k: int | None = None
    """number of clusters, by k-means; None finds it by DBSCAN"""
    radius_scale: Annotated[float, fl.Number(0, low_in=False)] = 1.0
    """factor of DBSCAN's radius; the radius is found from the distances of descriptors"""
    components: Annotated[int | None, fl.AtLeast(1)] = None
    """l, numbers that a latent vector is reduced to; None is the number of classes"""
    moments: Annotated[int, fl.AtLeast(1), fl.Number(1, 2, high_in=True)] = 2
    """moments in a descriptor: 2 are means and standard deviations, 1 is means alone"""
    newcomers_by: Annotated[str, fl.OneOf(FEATURES, LABELS)] = FEATURES
    """what newcomers are assigned by: features (descriptors for which no label is read) or labels
    (descriptors with moments by class; not in the paper)
    """
    descriptor_noise: Annotated[float, fl.Number(fl.SMALLEST_RATIO, 1e6, high_in=True)] = 1.0
    """noise multiplier of a descriptor over that of training; below 1, clustering gets a larger
    share of ε (not in the paper)
    """
    descriptor_clip: Annotated[float, fl.Number(*fl.CLIP_BOUNDS, high_in=True)] = 1.0
    """norm to which a sample's reduced latent vector, which is scaled to about 1, is clipped in
    runs with noise (not in the paper)
    """

    name: ClassVar[str] = "flux"
    client: ClassVar[type[fl.TrainingClient]] = DescriptorClient

    def run_server(self, net: fl.ServerChannel, run: fl.Run) -> FLUXState:
        """Run FedAvg, cluster the clients in round `pre_rounds` + 1, and go on in each cluster."""
        m = len(net.clients)
        # Under fresh masks the server cannot add the averages that a silent client missed.
        outbox = fl.PendingUpdates.start(m, fresh=self.mask != "none")
        state = FLUXState([0] * m, outbox)
        for t in run.rounds("train", state, self.rounds):
            if t == self.pre_rounds + 1:
                # A checkpoint holds the clusters before any client in a cluster of one trains
                # alone, whose model is no joint one any more.
                run.commit(state, partial(self._run_clustering_round, net, run, state))
            fl.average_clusters(net, state, self.participation, t)
        fl.flush(net, run, state)
        return state

    def _run_clustering_round(self, net: fl.ServerChannel, run: fl.Run, state: FLUXState) -> None:
        """Cluster the clients, and record the clusters in the history."""
        self._cluster(net, state)
        run.note(clustered=fl.members(state.labels), absent=list(state.absent), radius=state.radius)

    def _cluster(self, net: fl.ServerChannel, state: FLUXState) -> None:
        """Cluster all clients, whatever the participation, by their descriptors.

        Clients that do not reply join the largest cluster (not in the paper).
        """
        clients = net.clients
        query = state.outbox.message_for(clients)
        replies = net.gather(DescriptorClient.describe, query, to=clients, tries=fl.TRIES)
        ids = list(replies.ids)
        state.outbox.acknowledge(ids)
        state.absent = [i for i in clients if i not in ids]
        if len(ids) < 2:
            return
        descriptors = replies.rows.moments.values.cpu().double().numpy()
        scaling = Scaling.of(descriptors)
        rows = scaling.scaled(descriptors)
        if self.k is None:
            labels, state.radius = density_clusters(rows, self.radius_scale)
        else:
            seed = net.randomness.integer("server", "clusterer")
            labels = fl.kmeans_of_points(rows, self.k, seed)
        width = int(net.agreed["dimension"])
        joint = fl.request_model(net, state.outbox, ids, width)
        if len(joint.displacement):
            means = torch.from_numpy(centroids(rows, labels))
            state.memory = NewcomerReference(joint, scaling, means)
        # A client without a reply most likely belongs to the largest cluster.
        default = fl.largest(labels)
        cluster_of = dict(zip(ids, labels, strict=True))
        state.labels = [cluster_of.get(i, default) for i in clients]

    def assign_newcomers(
        self, net: fl.ServerChannel, state: FLUXState, to: Sequence[int]
    ) -> list[int]:
        """Return the cluster with the nearest centroid γ_c of each newcomer.

        Args:
            net: a channel to the newcomers.
            state: the final state of the run.
            to: the newcomers' numbers.

        Raises:
            UpdateError: nobody described its samples under the joint model, or a newcomer does not
                reply.
        """
        reference = state.memory
        if reference is None:
            raise fl.UpdateError(
                "nobody replied in the clustering round, so there is nothing to compare newcomers "
                "with: run it anew"
            )
        query = fl.joint_model_message(reference.joint, len(to))
        method: Any = DescriptorClient.describe_features
        if self.newcomers_by == LABELS:
            method = DescriptorClient.describe
        replies = net.gather(method, query, to=to)
        fl.check_newcomers(to, replies.ids)
        descriptors = replies.rows.moments.values.cpu().double().numpy()
        rows = reference.scaling.scaled(descriptors)
        centroid_rows = reference.centroids.numpy()[:, : rows.shape[1]]
        distances = np.linalg.norm(rows[:, None] - centroid_rows[None], axis=2)
        nearest = distances.argmin(1).tolist()
        cluster_of = dict(zip(replies.ids, nearest, strict=True))
        return [cluster_of[i] for i in to]

    def shared_facts(self, facts: fl.Facts) -> dict[str, Any]:
        """Return D, the length of latent vectors.

        Args:
            facts: of the clients and their data.

        Raises:
            UsageError: samples have no classes, or the network no dense layer.
        """
        facts.check_classes("FLUX describes samples by class", "choose another protocol, cfl say")
        model = fl.initial_model(self, facts)
        if latent_layer(model.module) is None:
            raise fl.UsageError(
                "FLUX reads what the network's dense layer gets, and this one has no nn.Linear: "
                "end it in one, or choose another protocol, cfl say"
            )
        sample = torch.zeros(1, *facts.shape).to(model.initial())
        latents = LatentVectors(model).of(model.initial(), sample).shape[1]
        return {**super().shared_facts(facts), "latents": latents}

    def frame_sizes(self, config: Mapping[str, Any]) -> dict[str, int]:
        """Add the sizes of a descriptor.

        Args:
            config: what clients and server agreed on.
        """
        plan = self._descriptors(config)
        sizes = {
            "moment_groups": plan.blocks,
            "moment_kinds": plan.kinds,
            "components": plan.components,
        }
        return {**super().frame_sizes(config), **sizes}

    def make_client(
        self, cohort: fl.LocalTrainer, pipeline: fl.Pipeline, config: Mapping[str, Any]
    ) -> fl.TrainingClient:
        """Return the clients, with what was agreed on about descriptors.

        Args:
            cohort: the clients' data and local training.
            pipeline: the stages between a client's reply and the wire.
            config: what clients and server agreed on.
        """
        training = self.training.usual(self, config)
        client = DescriptorClient(cohort, training, pipeline, self.weighted)
        client.descriptors = self._descriptors(config)
        client.noise_ratio = float(config["descriptor_noise"])
        return client

    def _descriptors(self, config: Mapping[str, Any]) -> DescriptorMap:
        """Return the map from latent vectors to descriptors.

        Args:
            config: what clients and server agreed on.
        """
        latents = int(config["latents"])
        classes = int(config["classes"])
        # Centred points span one direction less than there are points.
        components = min(self.components or classes, latents, POINTS - 1)
        return DescriptorMap(
            latents,
            components,
            classes,
            int(config["seed"]),
            second=self.moments > 1,
            clip=float(self.descriptor_clip),
        )

    def dry_runs(self) -> Sequence[Mapping[str, Any]]:
        """Return a run of one cluster, since who is alone in one contributes to no sum."""
        return ({"k": 1},)

    def disclosures(self) -> fl.Disclosures:
        """Return what stays visible to the server under every mask."""
        noise = "with noise, " if self.privacy.noisy else ""
        moments = "means and standard deviations" if self.moments > 1 else "means"
        return fl.Disclosures(
            server=[
                f"{noise}each client's descriptor: {moments} of its samples' latent vectors, of "
                "all and by class, which show which classes it has",
                "the clusters, and each client's cluster",
                "how far the model of the clustering round has moved from the first one",
                *fl.visible_sample_counts(weighted=not self.privacy.per_client),
            ]
        )

    def check(self, clients: int) -> None:
        """Check the options of the clustering, too.

        Args:
            clients: m.

        Raises:
            UsageError: an option is out of range, or has no effect.
        """
        super().check(clients)
        if self.k is not None:
            fl.check_clusters(self.k, clients)
            if self.radius_scale != 1:
                raise fl.UsageError(
                    "radius_scale is of DBSCAN, and with k clusters are those of k-means: leave "
                    "one of them out"
                )
        whole_number = isinstance(self.pre_rounds, Integral)
        if not (whole_number and 0 <= self.pre_rounds < self.rounds):
            raise fl.UsageError(
                f"pre_rounds = {self.pre_rounds!r} of {self.rounds} rounds: the clustering comes "
                "after pre_rounds, a whole number from 0 to rounds - 1; lower pre_rounds or ask "
                "for more rounds"
            )
