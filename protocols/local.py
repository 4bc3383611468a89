"""Local training: every client trains alone, a baseline that releases nothing.

Clients draw the batches that they would draw in a federation.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from securecluster.protocols import authoring as fl


@dataclass
class LocalState:
    """State of the server's loop: one cluster per client."""

    labels: list[int] = field(default_factory=list)


class LocalObserver(fl.Observer):
    """The experimenter's measurements where each client trains alone."""

    def models_after_round(self, client: Any, state: Any) -> fl.Rows:
        """Return each client's own model."""
        models: fl.Rows = client.models
        return models


@fl.protocol
class Local(fl.ClusteringProtocol):
    """One model per client, never shared."""

    name: ClassVar[str] = "local"
    client: ClassVar[type[fl.TrainingClient]] = fl.SumClient

    def run_server(self, net: fl.ServerChannel, run: fl.Run) -> LocalState:
        """Ask the sampled clients to train in every round."""
        state = LocalState(list(net.clients))
        # The queue stays empty: no average is ever posted.
        outbox = fl.PendingUpdates.start(len(net.clients), fresh=False)
        for t in run.rounds("train", state, self.rounds):
            sampled = fl.sample_clients(net, net.clients, self.participation, t)
            query = outbox.message_for(sampled)
            net.gather(fl.SumClient.train_locally, query, to=sampled, keys=False)
        return state

    def assign_newcomers(self, net: fl.ServerChannel, state: Any, to: Sequence[int]) -> list[int]:
        """Return a new cluster for each newcomer, which has no model yet."""
        return list(to)

    @property
    def vectors_per_round(self) -> int:
        """Return 0: no model or update is exchanged."""
        return 0

    @property
    def observer(self) -> LocalObserver:
        """Return what the experimenter computes outside the protocol."""
        return LocalObserver(self)
