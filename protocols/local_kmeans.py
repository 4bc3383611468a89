"""Local-KMeans: clients train alone, and k-means on their models' weights finds the clusters.

A baseline of Vardhan, Ghosh, Mazumdar, "An Improved Federated Clustering Algorithm with Model-based
Clustering", TMLR 2024. The number of clusters is given.

θ_0    the model all clients start from; θ_i client i's model after its local rounds
X      the rows P(θ_i − θ_0), all under one mask P, which preserves their distances

For the rounds that remain, each cluster continues with FedAvg from the mean of its members' models
(not in the paper).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar

from securecluster.clustering.distances import to_others
from securecluster.clustering.labels import check_clusters
from securecluster.clustering.similarity import gram, mean_row
from securecluster.core.lazy_torch import torch
from securecluster.protocols import authoring as fl


@dataclass
class LocalKMeansState(fl.AveragingState):
    """State of the server's loop, with what newcomers are compared with."""

    step: int = 0  # the call in which clients sent their models: it identifies the mask
    # (k, d) means of X over the clusters
    centres: torch.Tensor = field(default_factory=lambda: torch.zeros(0, 0))


class LocalKMeansClient(fl.LocalFirstClient):
    """Clients that train alone, send their model once, and then continue with FedAvg."""

    @fl.answers(fl.GATHER, through=("delta",), fresh=True)
    def send_model(self, context: fl.CallContext, query: fl.Empty) -> fl.Update:
        """Return θ_i − θ_0, the same rows however often they are requested.

        The difference is to θ_0, since the mean of a cluster is applied to θ_0.

        Raises:
            PolicyError: a client has applied an average since it trained alone.
        """
        self.check_alone(context, "send_model")
        return self.displaced(context.positions)


@fl.protocol
class LocalKMeans(fl.ClusteringProtocol):
    """k-means on the models that clients trained alone."""

    mask: str = "permutation"
    """map of updates that the server does not know, a fresh one each round: none, permutation,
    signed-permutation, rotation or haar
    """
    k: int = 4
    """number of clusters"""
    local_rounds: Annotated[int, fl.AtLeast(1)] = 10
    """rounds, at most all, in which clients train alone before they are clustered; no averaging is
    done where none remain
    """

    name: ClassVar[str] = "local-kmeans"
    client: ClassVar[type[fl.TrainingClient]] = LocalKMeansClient

    def run_server(self, net: fl.ServerChannel, run: fl.Run) -> LocalKMeansState:
        """Run local training, then k-means, then FedAvg in each cluster."""
        m = len(net.clients)
        outbox = fl.PendingUpdates.start(m, fresh=self.mask != "none")
        state = LocalKMeansState(list(net.clients), outbox)
        for t in run.rounds("train", state, self.rounds):
            if t > self._local:
                fl.average_clusters(net, state, self.participation, t)
                continue
            # Nothing leaves the clients in these rounds; each one sends its model once, at the end.
            query = state.outbox.message_for(net.clients)
            net.gather(fl.SumClient.train_locally, query, to=net.clients)
            if t == self._local:
                self._cluster(net, state)
        fl.flush(net, run, state)
        return state

    def _unlike_longer(self, longer: Any) -> None:
        """Refuse a run that clustered its clients before their rounds alone were over."""
        fl.check_phase_over(self, "local_rounds")

    @property
    def _local(self) -> int:
        """Return the number of rounds of local training."""
        return min(self.local_rounds, self.rounds)

    def _cluster(self, net: fl.ServerChannel, state: LocalKMeansState) -> None:
        """Cluster the rows of X by Lloyd's algorithm, and queue each cluster's mean model.

        Clients that send no model become clusters of one (not in the paper).
        """
        replies = net.gather(
            LocalKMeansClient.send_model, fl.Empty(), to=net.clients, tries=fl.TRIES
        )
        if not replies.ids:  # every client stays a cluster of one
            return
        delta = replies.rows.delta.values
        # Lloyd's algorithm needs inner products only, from which the known noise is subtracted.
        noise = self._noise_norm(net)
        inner = gram(delta, noise=noise)
        seed = net.randomness.integer("server", "k-means")
        labels = fl.kmeans(inner.cpu().numpy(), self.k, seed)
        means = []
        for positions in fl.members(labels):
            means.append(mean_row(delta, positions))
        state.step = replies.step
        state.centres = torch.stack(means).cpu()

        cluster_of = dict(zip(replies.ids, labels, strict=True))
        silent = [i for i in net.clients if i not in cluster_of]
        for n, i in enumerate(silent):
            cluster_of[i] = len(means) + n
        state.labels = [cluster_of[i] for i in net.clients]
        # A mean would undo what a silent client learned alone, so it receives no averages.
        state.outbox.unsubscribe(silent)
        no_means = state.centres.new_zeros(len(silent), delta.shape[1])
        means_of_clusters = torch.cat([state.centres, no_means])
        state.outbox.post(state.step, means_of_clusters, state.labels)

    def _noise_norm(self, net: fl.ServerChannel) -> float:
        """Return the expected squared norm of the noise in a row of X.

        With noise per client it is that of the last call. With DP-SGD the model contains the noise
        of every local training before it.
        """
        noise = net.noise("delta")
        if self.privacy.per_example:
            return noise * self._local
        return noise

    def assign_newcomers(
        self, net: fl.ServerChannel, state: LocalKMeansState, to: Sequence[int]
    ) -> list[int]:
        """Return the nearest centre of each newcomer after local training (not in the paper).

        Newcomers train alone for as many rounds as the clients of the run did.

        Args:
            net: a channel to the newcomers.
            state: the final state of the run.
            to: the newcomers' numbers.

        Raises:
            UsageError: no client of the run sent its model, so there are no centres.
            UpdateError: a newcomer does not reply.
        """
        if not len(state.centres):
            raise fl.UsageError(
                "no client sent its model, so there are no centres to compare newcomers with: "
                "run it anew"
            )
        outbox = fl.PendingUpdates.start(0, fresh=False)
        for _ in range(self._local):
            net.gather(fl.SumClient.train_locally, outbox.message_for(to), to=to)
        # Newcomers reply under the mask of the centres.
        replies = net.gather(
            LocalKMeansClient.send_model, fl.Empty(), to=to, step=state.step, tries=fl.TRIES
        )
        fl.check_newcomers(to, replies.ids)
        rows = replies.rows.delta.values.cpu()
        squared_distances = to_others(rows, state.centres).square()
        # The noise of a mean of n rows has 1/n of a row's variance; that of the newcomer's own row
        # is the same for all centres, so it does not change the nearest one.
        noise = self._noise_norm(net)
        noise_of_centres = []
        for c in range(len(state.centres)):
            members = state.labels.count(c)
            noise_of_centres.append(noise / members)
        correction = torch.tensor(noise_of_centres, dtype=squared_distances.dtype)
        nearest = (squared_distances - correction).argmin(1).tolist()
        cluster_of = dict(zip(replies.ids, nearest, strict=True))
        return [cluster_of[i] for i in to]

    def check(self, clients: int) -> None:
        """Check the number of clusters and the local rounds, too."""
        super().check(clients)
        check_clusters(self.k, clients)

    def disclosures(self) -> fl.Disclosures:
        """Return what stays visible under every mask."""
        models = "norms and inner products of what each client learned alone"
        if self.privacy.noisy:
            models = f"with noise, {models}"
        views = [
            models,
            "each client's cluster",
            *fl.visible_sample_counts(weighted=not self.privacy.per_client),
        ]
        return fl.Disclosures(server=views)
