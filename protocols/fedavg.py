"""FedAvg: McMahan, Moore, Ramage, Hampson, Agüera y Arcas, "Communication-Efficient Learning of Deep Networks from Decentralized
Data", AISTATS 2017, Algorithm 1: one model for everyone. A baseline; its server needs sums only.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from securecluster.protocols.base import Protocol

from securecluster.displacements import Means, Outbox, Trainee, Update, deliver, invite
from securecluster.endpoint import SUM, Turn, answers
from securecluster.network import Network
from securecluster.run import Run


@dataclass
class State:
    """What the server's loop changes."""

    labels: list[int]
    outbox: Outbox


class Client(Trainee):
    """Clients that weigh their own updates, so that the server needs only sums."""

    @answers(SUM, through=("delta",), fresh=True)
    def train(self, turn: Turn, query: Means) -> Update:
        """n_i·Δ_i and n_i."""
        return self.trained(turn, query, [self.cohort.sizes[k] for k in turn.at])


@dataclass
class FedAvg(Protocol):
    """One model for all clients, averaged by |D_i|."""

    name: ClassVar[str] = "fedavg"
    client: ClassVar[type[Trainee]] = Client

    def serve(self, net: Network, run: Run) -> State:
        """Algorithm 1, "Server executes"."""
        state = State([0] * len(net.clients), Outbox.start(len(net.clients), fresh=self.mask != "none"))
        for t in run.rounds("train", state, self.rounds):
            asked = invite(net, net.clients, self.participation, t)
            total = net.sum(Client.train, state.outbox.letter(asked), to=asked)
            state.outbox.delivered(total.ids)
            if total.ids:
                assert total.rows.size is not None
                size = total.rows.size.table.to(total.rows.delta.table.device)
                state.outbox.post(total.step, total.rows.delta.table / size[:, None], state.labels)
        deliver(net, run, state)
        return state

    @property
    def weighted(self) -> bool:
        """Always: FedAvg weighs by n_k."""
        return True

    def sees(self) -> list[str]:
        """What the weights show."""
        return ["each client's number of samples (the plain sum reads every reply)"]
