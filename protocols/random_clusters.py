"""Random clusters: FedAvg within k clusters of equal size that the server draws.

Ali and Arafa, "Data Similarity-Based One-Shot Clustering for Multi-Task Hierarchical Federated
Learning", 2024, use this baseline. It shows what smaller clusters alone achieve.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from securecluster.clustering.labels import check_clusters
from securecluster.protocols import authoring as fl


@fl.protocol
class RandomClusters(fl.ClusteringProtocol):
    """One model for each of k random clusters, averaged by |D_i|."""

    k: int = 4
    """number of clusters"""

    name: ClassVar[str] = "random"
    client: ClassVar[type[fl.TrainingClient]] = fl.SumClient

    def run_server(self, net: fl.ServerChannel, run: fl.Run) -> fl.AveragingState:
        """Draw the clusters, then run FedAvg in each of them."""
        m = len(net.clients)
        generator = net.randomness.generator("server", "clusters")
        # A permutation modulo k gives clusters whose sizes differ by one at most.
        labels = generator.permutation(m) % self.k
        outbox = fl.PendingUpdates.start(m, fresh=self.mask != "none")
        state = fl.AveragingState(labels.tolist(), outbox)
        for t in run.rounds("train", state, self.rounds):
            fl.average_clusters(net, state, self.participation, t)
        fl.flush(net, run, state)
        return state

    def assign_newcomers(self, net: fl.ServerChannel, state: Any, to: Sequence[int]) -> list[int]:
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
        check_clusters(self.k, clients)

    def dry_runs(self) -> Sequence[Mapping[str, Any]]:
        """Return a run of one cluster, since who is alone in one contributes to no sum."""
        return ({"k": 1},)

    def disclosures(self) -> fl.Disclosures:
        """Return what the weights of the average show."""
        return fl.Disclosures(server=fl.visible_sample_counts(weighted=not self.privacy.per_client))
