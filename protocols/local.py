"""Local training: every client alone, with the batches it would draw in a federation. A baseline that releases nothing."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar

from securecluster.protocols.base import Protocol

from securecluster.displacements import Trainee, invite
from securecluster.endpoint import GATHER, Turn, answers
from securecluster.errors import UpdateError
from securecluster.messages import Rows
from securecluster.network import Network
from securecluster.privacy.keys import Done, Hello
from securecluster.run import Run


@dataclass
class State:
    """Everyone is a cluster of one."""

    labels: list[int] = field(default_factory=list)


class Client(Trainee):
    """Clients that keep what they learn."""

    @answers(GATHER, private=False)
    def alone(self, turn: Turn, query: Hello) -> Done:
        """θ_i ← SGD_n(θ_i, D_i)."""
        if len(self.models.table) < len(self.cohort.ids):  # they shared θ_0 until now
            self.models = Rows(self.models.values, tuple(range(len(self.cohort.ids))))
        updates = self.cohort.train(Rows(self.models.table, turn.at), turn.at, self.training, turn.step)
        bad = [i for i, update in zip(turn.ids, updates, strict=True) if not bool(update.isfinite().all())]
        if bad:  # no update is sent, so no server can tell
            few = ", ".join(map(str, bad[:5]))
            raise UpdateError(f"round {turn.round}: the model of client(s) {few} is not finite: lower the learning rate (--lr)")
        for k, update in zip(turn.at, updates, strict=True):
            self.models.table[k] += update
        return Done()


@dataclass
class Local(Protocol):
    """One model per client, never shared."""

    name: ClassVar[str] = "local"
    client: ClassVar[type[Trainee]] = Client

    def serve(self, net: Network, run: Run) -> State:
        """Tell the clients to train."""
        state = State(list(net.clients))
        for t in run.rounds("train", state, self.rounds):
            asked = invite(net, net.clients, self.participation, t)
            net.gather(Client.alone, Hello(), to=asked)
        return state

    def served(self, client: Any, state: Any) -> Rows:
        """Each client's own model."""
        models: Rows = client.models
        return models
