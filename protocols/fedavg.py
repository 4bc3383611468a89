"""FedAvg: McMahan, Moore, Ramage, Hampson, Agüera y Arcas, "Communication-Efficient Learning of
Deep Networks from Decentralized Data", AISTATS 2017, Algorithm 1: one model for everyone. A
baseline; its server needs sums only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from securecluster.protocols.common.averaging import AveragingState, SumClient, average_clusters
from securecluster.protocols.common.base import ClusteringProtocol
from securecluster.protocols.common.client import TrainingClient
from securecluster.protocols.common.pending_updates import PendingUpdates, flush
from securecluster.runtime.run import Run
from securecluster.runtime.server_channel import ServerChannel


@dataclass
class FedAvg(ClusteringProtocol):
    """One model for all clients, averaged by |D_i|."""

    name: ClassVar[str] = "fedavg"
    client: ClassVar[type[TrainingClient]] = SumClient

    def run_server(self, net: ServerChannel, run: Run) -> AveragingState:
        """Algorithm 1, "Server executes": everyone is in one cluster."""
        m = len(net.clients)
        state = AveragingState([0] * m, PendingUpdates.start(m, fresh=self.mask != "none"))
        for t in run.rounds("train", state, self.rounds):
            average_clusters(net, state, self.participation, t)
        flush(net, run, state)
        return state

    def assign_newcomers(self, net: ServerChannel, state: Any, to: Sequence[int]) -> list[int]:
        """There is one cluster."""
        return [0] * len(to)

    def server_view(self) -> list[str]:
        """What the weights show."""
        return ["each client's number of samples (the plain sum reads every reply)"] * (
            not self.per_client
        )
