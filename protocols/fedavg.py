"""FedAvg: McMahan, Moore, Ramage, Hampson, Agüera y Arcas, "Communication-Efficient Learning of Deep Networks from Decentralized
Data", AISTATS 2017, Algorithm 1: one model for everyone. A baseline; its server needs sums only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from securecluster.protocols.common.averaging import Averaged, Contributor, average
from securecluster.protocols.common.base import Protocol
from securecluster.protocols.common.client import Trainee
from securecluster.protocols.common.pending_updates import Outbox, deliver
from securecluster.runtime.run import Run
from securecluster.runtime.server_channel import Network


@dataclass
class FedAvg(Protocol):
    """One model for all clients, averaged by |D_i|."""

    name: ClassVar[str] = "fedavg"
    client: ClassVar[type[Trainee]] = Contributor

    def serve(self, net: Network, run: Run) -> Averaged:
        """Algorithm 1, "Server executes": everyone is in one cluster."""
        m = len(net.clients)
        state = Averaged([0] * m, Outbox.start(m, fresh=self.mask != "none"))
        for t in run.rounds("train", state, self.rounds):
            average(net, state, self.participation, t)
        deliver(net, run, state)
        return state

    def place(self, net: Network, state: Any, to: Sequence[int]) -> list[int]:
        """There is one cluster."""
        return [0] * len(to)

    def sees(self) -> list[str]:
        """What the weights show."""
        return ["each client's number of samples (the plain sum reads every reply)"] * (not self.per_client)
