"""Results of verbs: what a call gave the party that reads it, besides the frames."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from securecluster.messaging.parties import Party


@dataclass(frozen=True)
class VerbOutcome:
    """Result of a verb for the party that reads it.

    Args:
        reader: the server, or a local parameter server.
        method: name of the client method.
        verb: gather, sum or pairs.
        round: the protocol's round.
        step: number of the call.
        groups: clients behind each row: one for gather, the members whose replies were summed for
            sum. For pairs it is one group, with the clients in the order of R's rows.
        content: reply message with one row for each group, decoded, unmasked if the sum was a
            secure one, and with the noise that a trusted server added. For pairs it is R, (r, r).
    """

    reader: Party
    method: str
    verb: str
    round: int
    step: int
    groups: tuple[tuple[int, ...], ...]
    content: Any
