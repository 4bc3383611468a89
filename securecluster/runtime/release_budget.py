"""The budget of the client behind an endpoint: what a reply costs, reserved before it leaves."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from securecluster.messaging.digests import reply_digests, tells_noise
from securecluster.messaging.messages import Call
from securecluster.messaging.receipts import Receipts
from securecluster.privacy.dp.budget import Budget
from securecluster.privacy.dp.ledger import CHOICE, Event
from securecluster.privacy.dp.target import Target
from securecluster.runtime.release_accounting import ReleaseAccounting
from securecluster.runtime.release_policy import ReleasePolicy


@dataclass
class ReleaseBudget:
    """Budget of the one client of an endpoint in a run.

    Args:
        budget: of the client, over all runs.
        run: hash of the run's configuration.
        noise_key: returns the client's key of noise. Under another key the same numbers are
            another release.
        costs: accounting of the run's noise, as the server has it.
        samples: that the client trains on; None where the price does not depend on it.
        least_survivors: returns the smallest number of survivors of a sum over some members; None
            where no noise is in shares.
        target: of the client in this run, which counts what the budget's file has of it, whichever
            process or call of `join` has released it; None for none.
    """

    budget: Budget
    run: str
    noise_key: Callable[[], bytes]
    costs: ReleaseAccounting
    samples: int | None = None
    least_survivors: Callable[[int], int] | None = None
    target: Target | None = None
    _counted: int = 0  # events of the file that the target knows

    def reserve(
        self, call: Call, release: ReleasePolicy, reply: Any, receipts: Sequence[Receipts]
    ) -> None:
        """Write what a reply releases to the budget, or refuse.

        Args:
            call: the request, to one client.
            release: declaration of the called method.
            reply: after the pipeline, and before it is hidden.
            receipts: of the client.

        Raises:
            BudgetError: it would cost more than is left.
            TargetError: it would cost more than the run's target.
        """
        run = self._name
        written = self.budget.due(run, receipts[0], call.method, call.step)
        digests: tuple[str, ...] = ()
        # A trusted server's noise is new in each sum, for all that its client knows.
        own_noise = not self.costs.per_group(release)
        if own_noise and self.costs.repeatable(release, reply, written):
            # Equal choices may come of different noise, so each one counts.
            digests = reply_digests(reply, 1) if tells_noise(reply) else (CHOICE,)
        event = Event(
            method=call.method,
            verb=call.verb,
            fields=(),  # set by `events`, field by field
            round=call.round,
            ids=call.to,
            step=call.step,
            digests=digests,
        )
        survivors = 1
        if self.least_survivors is not None:
            # The client learns later who survives, so it counts the least noise that it accepts.
            survivors = self.least_survivors(call.members[0])
        events = list(
            self.costs.events(release, event, reply, [written], call.members[0], survivors)
        )
        if events:
            (client,) = call.to
            admit = partial(self._admit, client)
            self._learn(client)
            self.budget.reserve(run, events, self.samples, admit)

    def record(self, event: Event) -> None:
        """Write to the budget what leaves beside the run's calls, whatever its target.

        Args:
            event: of the client.

        Raises:
            BudgetError: it would cost more than is left.
        """
        self.budget.reserve(self._name, [event], self.samples)

    def _learn(self, client: int) -> None:
        """Count towards the target what the file has of this run."""
        if self.target is None:
            return
        recorded = self.budget.events(self._name)
        new = recorded[self._counted :]
        self.target.learn([replace(event, ids=(client,)) for event in new])
        self._counted = len(recorded)

    def _admit(self, client: int, events: Sequence[Event]) -> None:
        """Count what is new towards the target, or raise TargetError."""
        if self.target is None:
            return
        self.target.admit([replace(event, ids=(client,)) for event in events])
        self._counted += len(events)

    @property
    def _name(self) -> str:
        """Return the name of the run in the budget.

        A node that keeps no keys draws new noise in an equal run, which costs again.
        """
        key = hashlib.blake2b(
            self.noise_key(), digest_size=16, person=b"securecluster bd"
        ).hexdigest()
        return f"{self.run} {key}"
