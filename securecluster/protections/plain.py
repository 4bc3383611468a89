"""No protection: the server reads every reply."""

from __future__ import annotations

from securecluster.protections.protection import (
    PairFacts,
    PairProtection,
    Protection,
    ServerKeys,
    SumProtection,
)
from securecluster.runtime.pair_aggregators import PlainPairs


class _Plain(Protection):
    """Common base of the protections of sums and of pairs that hide nothing."""

    name = "plain"
    hides = False

    def unseen(self, field: str, released: str) -> str:
        """Return who reads a field that the server does not.

        Args:
            field: its name.
            released: nothing but single replies.
        """
        return f"{field}, which only the client's local parameter server reads"


class PlainSumProtection(_Plain, SumProtection):
    """Sums of replies that the server reads, by the channel's own aggregator."""

    def read(self, reply: str, released: str) -> str:
        """Return that the server reads the summands as well.

        Args:
            reply: the field, with what else is to be said of it.
            released: nothing but single replies.
        """
        return f"{reply} (the plain sum reads every reply)"


class PlainPairProtection(_Plain, PairProtection):
    """Rows of pairs that the server reads."""

    def server_half(self, facts: PairFacts, keys: ServerKeys) -> PlainPairs:
        """Return the aggregator that reads every row.

        Args:
            facts: of the run.
            keys: the server's keys.
        """
        return PlainPairs(facts.functions)

    def read(self, reply: str, released: str) -> str:
        """Return that the server reads the rows as well.

        Args:
            reply: the field, with what else is to be said of it.
            released: nothing but single replies.
        """
        return f"{reply} (the plain pairs read the rows)"
