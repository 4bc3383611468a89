"""Random clusters: FedAvg within k clusters of equal size that the server draws, as Ali and Arafa
("Data Similarity-Based One-Shot Clustering for Multi-Task Hierarchical Federated Learning", 2024)
compare with. A baseline: it shows what smaller clusters alone do.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from securecluster.clustering.labels import check_number
from securecluster.protocols.common.averaging import AveragingState, SumClient, average_clusters
from securecluster.protocols.common.base import ClusteringProtocol
from securecluster.protocols.common.client import TrainingClient
from securecluster.protocols.common.pending_updates import PendingUpdates, flush
from securecluster.runtime.run import Run
from securecluster.runtime.server_channel import ServerChannel


@dataclass
class RandomClusters(ClusteringProtocol):
    """One model for each of k random clusters, averaged by |D_i|."""

    k: int = 4
    """number of clusters"""

    name: ClassVar[str] = "random"
    client: ClassVar[type[TrainingClient]] = SumClient

    def run_server(self, net: ServerChannel, run: Run) -> AveragingState:
        """FedAvg in each cluster; sizes differ by one at most."""
        m = len(net.clients)
        labels = net.randomness.generator("server", "clusters").permutation(m) % self.k
        state = AveragingState(labels.tolist(), PendingUpdates.start(m, fresh=self.mask != "none"))
        for t in run.rounds("train", state, self.rounds):
            average_clusters(net, state, self.participation, t)
        flush(net, run, state)
        return state

    def assign_newcomers(self, net: ServerChannel, state: Any, to: Sequence[int]) -> list[int]:
        """A draw of its own for each newcomer."""
        return [int(net.randomness.generator("server", "newcomer", i).integers(self.k)) for i in to]

    def check(self, clients: int) -> None:
        """Adds the number of clusters."""
        super().check(clients)
        check_number(self.k, clients)

    def server_view(self) -> list[str]:
        """What the weights show."""
        return ["each client's number of samples (the plain sum reads every reply)"] * (
            not self.per_client
        )
