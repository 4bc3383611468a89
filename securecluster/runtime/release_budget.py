"""The budget of the client behind an endpoint: what a reply costs, reserved before it leaves."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from securecluster.messaging.digests import reply_digests, tells_noise
from securecluster.messaging.messages import Call
from securecluster.messaging.receipts import Receipts
from securecluster.privacy.dp.budget import Budget
from securecluster.privacy.dp.ledger import CHOICE, Event
from securecluster.runtime.endpoint import ReleasePolicy
from securecluster.runtime.release_accounting import ReleaseAccounting


@dataclass(frozen=True)
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
    """

    budget: Budget
    run: str
    noise_key: Callable[[], bytes]
    costs: ReleaseAccounting
    samples: int | None = None
    least_survivors: Callable[[int], int] | None = None

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
            self.budget.reserve(run, events, self.samples)

    def recorded(self) -> list[Event]:
        """Return what the client has released in this run, by the budget's file."""
        return self.budget.events(self._name)

    @property
    def _name(self) -> str:
        """Return the name of the run in the budget.

        A node that keeps no keys draws new noise in an equal run, which costs again.
        """
        key = hashlib.blake2b(
            self.noise_key(), digest_size=16, person=b"securecluster bd"
        ).hexdigest()
        return f"{self.run} {key}"
