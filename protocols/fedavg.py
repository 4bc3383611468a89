"""FedAvg: one model for all clients, a baseline without clusters.

McMahan, Moore, Ramage, Hampson, Agüera y Arcas, "Communication-Efficient Learning of Deep Networks
from Decentralized Data", AISTATS 2017, Algorithm 1. The server needs sums of updates only.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from securecluster.core.option_groups import group
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
from securecluster.protocols.common.options.sum_options import SumOptions, SumsOverAll
from securecluster.runtime.run import Run

if TYPE_CHECKING:
    from securecluster.runtime.server_channel import ServerChannel


@protocol
class FedAvg(ClusteringProtocol):
    """One model for all clients, averaged by |D_i|."""

    sums: SumOptions = group(SumsOverAll)
    name: ClassVar[str] = "fedavg"
    client: ClassVar[type[TrainingClient]] = SumClient

    def run_server(self, net: ServerChannel, run: Run) -> AveragingState:
        """Run Algorithm 1, "Server executes", with all clients in one cluster."""
        m = len(net.clients)
        # Fresh masks of different rounds cannot be added, so the averages are queued one by one.
        outbox = PendingUpdates.start(m, fresh=self.mask != "none")
        state = AveragingState([0] * m, outbox)
        for t in run.rounds("train", state, self.rounds):
            average_clusters(net, state, self.participation, t)
        flush(net, run, state)
        return state

    def assign_newcomers(self, net: ServerChannel, state: Any, to: Sequence[int]) -> list[int]:
        """Return cluster 0 for every newcomer."""
        return [0] * len(to)

    def disclosures(self) -> Disclosures:
        """Return what the weights of the average show."""
        return Disclosures(server=visible_sample_counts(weighted=not self.privacy.per_client))
