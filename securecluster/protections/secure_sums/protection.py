"""Secure sums as a protection: what they need and say, and how their halves are made."""

from __future__ import annotations

from typing import TYPE_CHECKING

from securecluster.protections.protection import HIDDEN_SUMS, ServerKeys, SumFacts, SumProtection
from securecluster.protections.secure_sums.client import SecureSumService
from securecluster.protections.secure_sums.graph import Plan
from securecluster.protections.secure_sums.messages import SUM_METHODS, MaskedReplies
from securecluster.protections.secure_sums.server import SecureSums

if TYPE_CHECKING:
    from securecluster.privacy.masking.key_agreement import KeyRing


class SecureSumProtection(SumProtection):
    """Sums of replies that clients mask, in pairs and each with a mask of its own."""

    name = SecureSums.name
    claims = frozenset({HIDDEN_SUMS})
    methods = SUM_METHODS
    adds_noise = True
    remembers_sums = True
    advice = "secure sums (--aggregation secagg): no single update is left to be attacked"
    plan = Plan

    def replies(self) -> MaskedReplies:
        """Return the messages of secure sums."""
        return MaskedReplies()

    def client_half(self, facts: SumFacts, keys: KeyRing) -> SecureSumService:
        """Return the clients' service.

        Args:
            facts: of the run.
            keys: the clients' keys.
        """
        return SecureSumService(
            run=facts.run,
            keys=keys,
            ranges=facts.ranges,
            plan=_plan_of(facts),
            shares=facts.shares,
            fixed=facts.fixed,
            cohorts=facts.cohorts,
        )

    def server_half(self, facts: SumFacts, keys: ServerKeys) -> SecureSums:
        """Return the server's aggregator, which needs no key.

        Args:
            facts: of the run.
            keys: the server's keys.
        """
        return SecureSums(facts.run, facts.ranges, facts.dtype, _plan_of(facts), facts.fixed)

    def read(self, reply: str, released: str) -> str:
        """Return that the server reads sums of a field.

        Args:
            reply: the field, with what else is to be said of it.
            released: that it is sums.
        """
        return f"sums of {reply}: over two clients or more, in secure sums"

    def unseen(self, field: str, released: str) -> str:
        """Return what the server sees sums of alone: what these tell of it, a run counts.

        Args:
            field: its name.
            released: that it is sums.
        """
        return f"{field} of a single client"


def _plan_of(facts: SumFacts) -> Plan:
    """Return what the graphs of a run's sums have to bear."""
    return Plan(facts.minimum, facts.lost, facts.colluding)
