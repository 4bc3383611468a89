"""FedAvg: one model for all clients, a baseline without clusters.

McMahan, Moore, Ramage, Hampson, Agüera y Arcas, "Communication-Efficient Learning of Deep Networks
from Decentralized Data", AISTATS 2017, Algorithm 1. The server needs sums of updates only.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

from securecluster.protocols import authoring as fl


@fl.protocol
class FedAvg(fl.ClusteringProtocol):
    """One model for all clients, averaged by |D_i|."""

    sums: fl.SumOptions = fl.group(fl.SumsOverAll)
    name: ClassVar[str] = "fedavg"
    client: ClassVar[type[fl.TrainingClient]] = fl.SumClient

    def run_server(self, net: fl.ServerChannel, run: fl.Run) -> fl.AveragingState:
        """Run Algorithm 1, "Server executes", with all clients in one cluster."""
        m = len(net.clients)
        # Fresh masks of different rounds cannot be added, so the averages are queued one by one.
        outbox = fl.PendingUpdates.start(m, fresh=self.mask != "none")
        state = fl.AveragingState([0] * m, outbox)
        for t in run.rounds("train", state, self.rounds):
            fl.average_clusters(net, state, self.participation, t)
        fl.flush(net, run, state)
        return state

    def assign_newcomers(self, net: fl.ServerChannel, state: Any, to: Sequence[int]) -> list[int]:
        """Return cluster 0 for every newcomer."""
        return [0] * len(to)

    def disclosures(self) -> fl.Disclosures:
        """Return what the weights of the average show."""
        return fl.Disclosures(server=fl.visible_sample_counts(weighted=not self.privacy.per_client))
