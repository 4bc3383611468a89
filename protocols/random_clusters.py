"""Random clusters: FedAvg within k clusters of equal size that the server draws.

Ali and Arafa, "Data Similarity-Based One-Shot Clustering for Multi-Task Hierarchical Federated
Learning", 2024, use this baseline. It shows what smaller clusters alone achieve.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from securecluster.clustering.labels import check_number
from securecluster.protocols.common.averages.averaging import (
    AveragingState,
    SumClient,
    average_clusters,
    visible_sample_counts,
)
from securecluster.protocols.common.averages.pending_updates import PendingUpdates, flush
from securecluster.protocols.common.base import ClusteringProtocol
from securecluster.protocols.common.client import TrainingClient
from securecluster.protocols.common.declaration import protocol
from securecluster.protocols.common.disclosures import Disclosures
from securecluster.runtime.run import Run

if TYPE_CHECKING:
    from securecluster.runtime.server_channel import ServerChannel


@protocol
class RandomClusters(ClusteringProtocol):
    """One model for each of k random clusters, averaged by |D_i|."""

    k: int = 4
    """number of clusters"""

    name: ClassVar[str] = "random"
    client: ClassVar[type[TrainingClient]] = SumClient

    def run_server(self, net: ServerChannel, run: Run) -> AveragingState:
        """Draw the clusters, then run FedAvg in each of them."""
        m = len(net.clients)
        generator = net.randomness.generator("server", "clusters")
        # A permutation modulo k gives clusters whose sizes differ by one at most.
        labels = generator.permutation(m) % self.k
        outbox = PendingUpdates.start(m, fresh=self.mask != "none")
        state = AveragingState(labels.tolist(), outbox)
        for t in run.rounds("train", state, self.rounds):
            average_clusters(net, state, self.participation, t)
        flush(net, run, state)
        return state

    def assign_newcomers(self, net: ServerChannel, state: Any, to: Sequence[int]) -> list[int]:
        """Return a cluster drawn at random for each newcomer.

        Each newcomer has a random stream of its own, so its cluster does not depend on the others.

        Args:
            net: a channel to the newcomers.
            state: the final state of the run.
            to: the newcomers' numbers.
        """
        labels = []
        for i in to:
            generator = net.randomness.generator("server", "newcomer", i)
            labels.append(int(generator.integers(self.k)))
        return labels

    def check(self, clients: int) -> None:
        """Check the number of clusters, too."""
        super().check(clients)
        check_number(self.k, clients)

    def dry_runs(self) -> Sequence[Mapping[str, Any]]:
        """Return a run of one cluster, since who is alone in one contributes to no sum."""
        return ({"k": 1},)

    def disclosures(self) -> Disclosures:
        """Return what the weights of the average show."""
        return Disclosures(server=visible_sample_counts(weighted=not self.privacy.per_client))
