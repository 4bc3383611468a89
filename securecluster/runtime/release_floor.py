"""The least noise that a client's owner allows: a reply with less does not leave."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from securecluster.errors import OwnerPolicyError
from securecluster.messaging.messages import Call
from securecluster.messaging.receipts import Receipts
from securecluster.privacy.dp.ledger import COSTLESS, Event
from securecluster.runtime.release_accounting import ReleaseAccounting
from securecluster.runtime.release_policy import ReleasePolicy


@dataclass(frozen=True)
class ReleaseFloor:
    """Least noise multiplier of each release of an endpoint's clients.

    Args:
        least: the multiplier, above 0.
        costs: accounting of the run's noise, as the server has it.
        least_survivors: returns the smallest number of survivors of a sum over some members; None
            where no noise is in shares.
    """

    least: float
    costs: ReleaseAccounting
    least_survivors: Callable[[int], int] | None = None

    def reserve(
        self, call: Call, release: ReleasePolicy, reply: Any, receipts: Sequence[Receipts]
    ) -> None:
        """Refuse a reply in which something has less noise.

        Args:
            call: the request.
            release: declaration of the called method.
            reply: after the pipeline, and before it is hidden.
            receipts: of each client.

        Raises:
            OwnerPolicyError: a release has less noise than the owner allows.
        """
        for client, members, written in zip(call.to, call.members, receipts, strict=True):
            event = Event(call.method, call.verb, (), call.round, (client,), step=call.step)
            survivors = 1
            if self.least_survivors is not None:
                survivors = self.least_survivors(members)
            for made in self.costs.events(release, event, reply, [written], members, survivors):
                if made.mechanism not in COSTLESS and multiplier_of(made) < self.least:
                    named = made.fields[0] if made.fields else "its training"
                    raise OwnerPolicyError(
                        f"{call.method} would release {named} with a noise multiplier of "
                        f"{multiplier_of(made):g}, and this client's owner allows {self.least:g} "
                        "or more"
                    )


def multiplier_of(event: Event) -> float:
    """Return the noise multiplier of a release: 0 of an exact one.

    Args:
        event: of one client.
    """
    return event.noise_multiplier or 0.0
