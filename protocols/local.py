"""Local training: every client alone, with the batches it would draw in a federation. A baseline
that releases nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from securecluster.messaging.messages import Rows
from securecluster.protocols.common.averaging import SumClient
from securecluster.protocols.common.base import ClusteringProtocol
from securecluster.protocols.common.client import TrainingClient
from securecluster.protocols.common.pending_updates import PendingUpdates
from securecluster.protocols.common.sampling import sample_clients
from securecluster.runtime.run import Run
from securecluster.runtime.server_channel import ServerChannel


@dataclass
class LocalState:
    """Everyone is a cluster of one."""

    labels: list[int] = field(default_factory=list)


@dataclass
class Local(ClusteringProtocol):
    """One model per client, never shared."""

    name: ClassVar[str] = "local"
    client: ClassVar[type[TrainingClient]] = SumClient

    def run_server(self, net: ServerChannel, run: Run) -> LocalState:
        """Tell the clients to train."""
        state, nothing = (
            LocalState(list(net.clients)),
            PendingUpdates.start(len(net.clients), fresh=False),
        )
        for t in run.rounds("train", state, self.rounds):
            asked = sample_clients(net, net.clients, self.participation, t)
            net.gather(SumClient.train_locally, nothing.message_for(asked), to=asked)
        return state

    def assign_newcomers(self, net: ServerChannel, state: Any, to: Sequence[int]) -> list[int]:
        """Each newcomer is a cluster of its own, which has no model yet: it trains alone."""
        return list(to)

    @property
    def vectors_per_round(self) -> int:
        """None."""
        return 0

    def models_after_round(self, client: Any, state: Any) -> Rows:
        """Each client's own model."""
        models: Rows = client.models
        return models
