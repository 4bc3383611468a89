"""Local training: every client alone, with the batches it would draw in a federation. A baseline that releases nothing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from securecluster.messaging.messages import Rows
from securecluster.protocols.common.averaging import Contributor
from securecluster.protocols.common.base import Protocol
from securecluster.protocols.common.client import Trainee
from securecluster.protocols.common.pending_updates import Outbox
from securecluster.protocols.common.sampling import invite
from securecluster.runtime.run import Run
from securecluster.runtime.server_channel import Network


@dataclass
class State:
    """Everyone is a cluster of one."""

    labels: list[int] = field(default_factory=list)


@dataclass
class Local(Protocol):
    """One model per client, never shared."""

    name: ClassVar[str] = "local"
    client: ClassVar[type[Trainee]] = Contributor

    def serve(self, net: Network, run: Run) -> State:
        """Tell the clients to train."""
        state, nothing = State(list(net.clients)), Outbox.start(len(net.clients), fresh=False)
        for t in run.rounds("train", state, self.rounds):
            asked = invite(net, net.clients, self.participation, t)
            net.gather(Contributor.alone, nothing.letter(asked), to=asked)
        return state

    def place(self, net: Network, state: Any, to: Sequence[int]) -> list[int]:
        """Each newcomer is a cluster of its own, which has no model yet: it trains alone."""
        return list(to)

    @property
    def rows_a_round(self) -> int:
        """None."""
        return 0

    def served(self, client: Any, state: Any) -> Rows:
        """Each client's own model."""
        models: Rows = client.models
        return models
