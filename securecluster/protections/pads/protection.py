"""Padded pairs as a protection: what they need and say, and how their halves are made."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from securecluster.protections.pads.client import PAD_METHODS, PaddedReplies, PadService
from securecluster.protections.pads.server import PaddedPairs
from securecluster.protections.pair_rows import PairRange
from securecluster.protections.protection import HIDDEN_PAIRS, PairFacts, PairProtection, ServerKeys

if TYPE_CHECKING:
    from securecluster.privacy.masking.key_agreement import KeyRing


class PadProtection(PairProtection):
    """Rows of pairs that clients pad, so that only sums over both clients of a pair are read."""

    name = PaddedPairs.name
    claims = frozenset({HIDDEN_PAIRS})
    methods = PAD_METHODS

    def replies(self, ranges: Mapping[str, PairRange]) -> PaddedReplies:
        """Return the messages of padded pairs.

        Args:
            ranges: range of each field of rows.
        """
        return PaddedReplies(ranges)

    def client_half(self, facts: PairFacts, keys: KeyRing) -> PadService:
        """Return the clients' service.

        Args:
            facts: of the run.
            keys: the clients' keys.
        """
        return PadService(facts.run, keys, facts.ranges, facts.saturate, facts.minimum)

    def server_half(self, facts: PairFacts, keys: ServerKeys) -> PaddedPairs:
        """Return the server's aggregator, which needs no key.

        Args:
            facts: of the run.
            keys: the server's keys.
        """
        return PaddedPairs(facts.run, facts.ranges, facts.functions)

    def read(self, reply: str, released: str) -> str:
        """Return that the server reads R of a field.

        Args:
            reply: the field, with what else is to be said of it.
            released: that it is R.
        """
        return (
            f"R of pairs of clients, from {reply}, each added to the other's: "
            "pads hide which part is whose, to within half their difference"
        )

    def unseen(self, field: str, released: str) -> str:
        """Return that the server sees no single row.

        Args:
            field: its name.
            released: that it is R.
        """
        return f"{field} of a single client, of which it read sums of pairs"
