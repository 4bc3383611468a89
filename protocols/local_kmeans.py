"""Local-KMeans: every client trains alone, and k-means on the weights of their models finds the
clusters. A baseline of Vardhan, Ghosh, Mazumdar, "An Improved Federated Clustering Algorithm with
Model-based Clustering", TMLR 2024; it is told the number of clusters.

θ_0    where everyone starts; θ_i client i's model after its local rounds
X      the rows P(θ_i − θ_0), all under one mask P, which keeps their distances

That a cluster goes on by FedAvg from the mean of its members' models, for the rounds that remain,
is ours.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar

from securecluster.clustering.distances import to_others
from securecluster.clustering.k_means import kmeans
from securecluster.clustering.labels import check_number
from securecluster.clustering.labels import members as clusters_of
from securecluster.clustering.similarity import gram, mean_row
from securecluster.core.lazy_torch import torch
from securecluster.core.validation import check_whole
from securecluster.errors import UsageError
from securecluster.messaging.messages import Empty
from securecluster.protocols.common.averaging import (
    AveragingState,
    LocalFirstClient,
    SumClient,
    average_clusters,
)
from securecluster.protocols.common.base import ClusteringProtocol, ReleaseCounts
from securecluster.protocols.common.client import TrainingClient
from securecluster.protocols.common.messages import Update
from securecluster.protocols.common.newcomers import check_newcomers
from securecluster.protocols.common.pending_updates import PendingUpdates, flush
from securecluster.protocols.common.sampling import TRIES
from securecluster.runtime.endpoint import GATHER, CallContext, answers
from securecluster.runtime.run import Run
from securecluster.runtime.server_channel import ServerChannel


@dataclass
class LocalKMeansState(AveragingState):
    """What the server's loop changes."""

    step: int = 0  # the call in which clients sent their models: it names the mask
    # (k, d) means of X over the clusters
    centres: torch.Tensor = field(default_factory=lambda: torch.zeros(0, 0))


class LocalKMeansClient(LocalFirstClient):
    """Clients that train alone and hand in what they learned once.

    They go on from where they are told.
    """

    @answers(GATHER, through=("delta",), fresh=True)
    def send_model(self, context: CallContext, query: Empty) -> Update:
        """Return θ_i − θ_0.

        The mean of the cluster counts from θ_0. Asked again, the client answers the same.
        """
        self.check_alone(context, "send_model")
        return self.displaced(context.positions)


@dataclass
class LocalKMeans(ClusteringProtocol):
    """k-means on the models that clients trained alone."""

    mask: str = "permutation"
    """map of updates that the server does not know, a fresh one each round: none, permutation,
    signed-permutation, rotation or haar
    """
    k: int = 4
    """number of clusters"""
    local_rounds: int = 10
    """rounds, at most all, in which clients train alone before they are clustered; no averaging is
    done where none remain
    """

    name: ClassVar[str] = "local-kmeans"
    client: ClassVar[type[TrainingClient]] = LocalKMeansClient

    def run_server(self, net: ServerChannel, run: Run) -> LocalKMeansState:
        """Everyone trains alone, then k-means, then FedAvg in each cluster."""
        m = len(net.clients)
        state = LocalKMeansState(
            list(net.clients), PendingUpdates.start(m, fresh=self.mask != "none")
        )
        for t in run.rounds("train", state, self.rounds):
            if t > self._local:
                average_clusters(net, state, self.participation, t)
                continue
            net.gather(
                SumClient.train_locally, state.outbox.message_for(net.clients), to=net.clients
            )
            if t == self._local:
                self._cluster(net, state)
        flush(net, run, state)
        return state

    @property
    def _local(self) -> int:
        return min(self.local_rounds, self.rounds)

    def _cluster(self, net: ServerChannel, state: LocalKMeansState) -> None:
        """Lloyd's algorithm on the rows of X, as points of the same distances; who hands in nothing
        goes on alone (ours).
        """
        got = net.gather(LocalKMeansClient.send_model, Empty(), to=net.clients, tries=TRIES)
        if not got.ids:  # everyone goes on alone
            return
        ids, delta, state.step = got.ids, got.rows.delta.values, got.step
        found = kmeans(
            gram(delta, noise=self._blur(net)).cpu().numpy(),
            self.k,
            net.randomness.integer("server", "k-means"),
        )
        state.centres = torch.stack([mean_row(delta, own) for own in clusters_of(found)]).cpu()
        cluster, silent = (
            dict(zip(ids, found, strict=True)),
            [i for i in net.clients if i not in ids],
        )
        number = {i: len(state.centres) + n for n, i in enumerate(silent)}
        state.labels = [(cluster | number)[i] for i in net.clients]
        state.outbox.unsubscribe(silent)
        state.outbox.post(
            state.step,
            torch.cat([state.centres, state.centres.new_zeros(len(silent), delta.shape[1])]),
            state.labels,
        )

    def _blur(self, net: ServerChannel) -> float:
        """Expected squared norm of the noise in a row of X: of the last call's, or of all trainings
        with noise that are behind it.
        """
        return net.noise("delta") * (self._local if self.per_example else 1)

    def assign_newcomers(
        self, net: ServerChannel, state: LocalKMeansState, to: Sequence[int]
    ) -> list[int]:
        """Newcomers train alone as long as the others did and join the nearest centre (ours)."""
        nothing = PendingUpdates.start(0, fresh=False)
        if not len(state.centres):
            raise UsageError(
                "no client sent its model, so there are no centres to compare newcomers with: "
                "run it anew"
            )
        for _ in range(self._local):
            net.gather(SumClient.train_locally, nothing.message_for(to), to=to)
        got = net.gather(LocalKMeansClient.send_model, Empty(), to=to, step=state.step, tries=TRIES)
        check_newcomers(to, got.ids)
        away = to_others(got.rows.delta.values.cpu(), state.centres).square()
        noise_variance = torch.tensor(
            [self._blur(net) / state.labels.count(c) for c in range(len(state.centres))],
            dtype=away.dtype,
        )
        # the noise of a mean is its members'
        found = dict(zip(got.ids, (away - noise_variance).argmin(1).tolist(), strict=True))
        return [found[i] for i in to]

    def check(self, clients: int) -> None:
        """Adds the number of clusters and the local rounds."""
        super().check(clients)
        check_number(self.k, clients)
        check_whole(self, local_rounds=1)

    def releases(self) -> ReleaseCounts:
        """What it learned alone, and an update a round after that."""
        return ReleaseCounts(updates=1 + self.rounds - self._local, trainings=self.rounds)

    def server_view(self) -> list[str]:
        """What stays visible under every mask."""
        own = "with noise, " if self.noisy else ""
        return [
            f"{own}norms and inner products of what each client learned alone",
            "each client's cluster",
            *["each client's number of samples (the plain sum reads every reply)"]
            * (not self.per_client),
        ]
