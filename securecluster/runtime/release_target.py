"""The target ε of a run at its clients: what a reply costs, checked before it leaves."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from securecluster.messaging.messages import Call
from securecluster.messaging.receipts import Receipts
from securecluster.privacy.dp.ledger import Event, PaidOnce
from securecluster.privacy.dp.target import Target
from securecluster.runtime.release_accounting import ReleaseAccounting, without_digests
from securecluster.runtime.release_policy import ReleasePolicy


@dataclass
class ReleaseTarget:
    """Target ε of an endpoint's clients in a run.

    A request that is repeated, since its reply was lost or a secure sum begins anew, is one
    release, as it is in the ledger.

    Args:
        target: of the run.
        costs: accounting of the run's noise, as the server has it.
        least_survivors: returns the smallest number of survivors of a sum over some members; None
            where no noise is in shares.
    """

    target: Target
    costs: ReleaseAccounting
    least_survivors: Callable[[int], int] | None = None
    # by method and verb: the number of each client's last call
    _last: dict[tuple[str, str], dict[int, int]] = field(default_factory=dict)
    # of a run that was resumed: (method, verb, step, client) of what its ledger has already
    _recorded: set[tuple[str, str, int, int]] = field(default_factory=set)
    _paid: PaidOnce = field(default_factory=PaidOnce)

    def learn(self, events: Iterable[Event]) -> None:
        """Count the releases of a run that is resumed.

        Args:
            events: of its ledger.
        """
        recorded = list(events)
        self.target.learn(recorded)
        self._paid.learn(recorded)
        for event in recorded:
            for client in event.ids:
                self._recorded.add((event.method, event.verb, event.step, client))

    def reserve(
        self, call: Call, release: ReleasePolicy, reply: Any, receipts: Sequence[Receipts]
    ) -> None:
        """Count what a reply releases, or refuse.

        Args:
            call: the request.
            release: declaration of the called method.
            reply: after the pipeline, and before it is hidden.
            receipts: of each client.

        Raises:
            TargetError: a client's releases would cost more than the target.
        """
        due: dict[int, Receipts] = {}
        clients_of: dict[tuple[int, Receipts], list[int]] = {}
        for client, members, written in zip(call.to, call.members, receipts, strict=True):
            if not self._repeated(call, client):
                due[client] = self._paid.due(client, written, call.method, call.step)
                alike = (members, without_digests(due[client]))
                clients_of.setdefault(alike, []).append(client)
        events: list[Event] = []
        for (members, _), clients in clients_of.items():
            client_receipts = [due[client] for client in clients]
            event = Event(
                method=call.method,
                verb=call.verb,
                fields=(),  # set by `events`, field by field
                round=call.round,
                ids=tuple(clients),
                step=call.step,
            )
            survivors = 1
            if self.least_survivors is not None:
                # Who survives is known later: the least noise that a client accepts counts.
                survivors = self.least_survivors(members)
            events += self.costs.events(release, event, reply, client_receipts, members, survivors)
        self.target.admit(events)
        self._paid.learn(events)
        self._last.setdefault((call.method, call.verb), {}).update(
            dict.fromkeys(call.to, call.step)
        )

    def _repeated(self, call: Call, client: int) -> bool:
        """Return whether a request to a client repeats one that was counted."""
        last = self._last.get((call.method, call.verb), {}).get(client)
        recorded = (call.method, call.verb, call.step, client) in self._recorded
        return recorded or last == call.step
