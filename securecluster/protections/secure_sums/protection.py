"""Secure sums as a protection: what they need and say, and how their halves are made."""

from __future__ import annotations

from typing import TYPE_CHECKING

from securecluster.protections.protection import HIDDEN_SUMS, ServerKeys, SumFacts, SumProtection
from securecluster.protections.secure_sums.client import SecureSumService
from securecluster.protections.secure_sums.graph import SECURITY, Plan
from securecluster.protections.secure_sums.messages import SUM_METHODS, MaskedReplies
from securecluster.protections.secure_sums.server import SecureSums
from securecluster.runtime.endpoint import COLLUDING, LOST

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

    def least_survivors(
        self, members: int, minimum: int, lost: float = LOST, colluding: float = COLLUDING
    ) -> int:
        """Return the smallest number of survivors of which a sum is unmasked.

        Args:
            members: clients that are asked for a row.
            minimum: members of the smallest sum.
            lost: fraction of the members that may be lost.
            colluding: fraction of the members that may collude with the server.
        """
        return Plan(minimum, lost, colluding).least_survivors(members)

    def bears(self, members: int, minimum: int, lost: float, colluding: float) -> bool:
        """Return whether all pairs of the members, which bear the most, bear this.

        Args:
            members: clients that are asked for a row.
            minimum: as in `least_survivors`.
            lost: as in `least_survivors`.
            colluding: as in `least_survivors`.
        """
        return Plan(minimum, lost, colluding).bears(members)

    def is_sparse(self, members: int, minimum: int, lost: float, colluding: float) -> bool:
        """Return whether fewer than all pairs of some members share keys.

        Args:
            members: of the sum.
            minimum: as in `least_survivors`.
            lost: as in `least_survivors`.
            colluding: as in `least_survivors`.
        """
        degree, _ = Plan(minimum, lost, colluding).degree_and_threshold(members)
        return degree < members - 1

    def planned(self, members: int, minimum: int, lost: float, colluding: float) -> str:
        """Return how many neighbours share keys, and what that bears.

        Args:
            members: of the sum.
            minimum: as in `least_survivors`.
            lost: as in `least_survivors`.
            colluding: as in `least_survivors`.
        """
        degree, threshold = Plan(minimum, lost, colluding).degree_and_threshold(members)
        if degree == members - 1:
            return (
                f"in a sum of {members} all pairs share keys: it is read with {threshold} "
                f"survivors or more, where up to {colluding:.0%} collude with the server"
            )
        return (
            f"in a sum of {members} each member shares keys with {degree} others: where up to "
            f"{lost:.0%} are lost and {colluding:.0%} collude with the server, it fails or shows "
            f"more than itself with probability 2^-{SECURITY} at most"
        )

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
