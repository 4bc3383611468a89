"""Replies in secure sums: the messages with masked rows, and the range of each field."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

from securecluster.errors import UsageError
from securecluster.messaging.bounds import Octets, Real, Ring, Upto, Whole, declared
from securecluster.messaging.messages import Picks, Rows, optional
from securecluster.privacy.masking.pads import KEY
from securecluster.protections.key_exchange import EXCHANGE_METHODS
from securecluster.protections.secure_sums.double_mask import TAG
from securecluster.protections.secure_sums.shamir import VALUE
from securecluster.protections.sum_ranges import summed_bits
from securecluster.runtime.services import MessageTypes

if TYPE_CHECKING:
    from securecluster.runtime.release_policy import ReleasePolicy

# bytes of a covered share
BOX = VALUE
# one box for each neighbour of the sender
BOXES = Upto("boxes", "clients", minimum=1)
# fields that a masked reply adds
ADDED = ("commitment", "boxes", "origin")
LOST = Upto("lost", "clients")


@dataclass(frozen=True, eq=False)
class LostMembers:
    """Server's request for pad keys, or for shares of the survivors' self masks."""

    purpose: str  # the client method whose replies are summed
    # (k,) int64 members whose rows are not in the sum, ascending
    lost: Annotated[Picks, Whole((LOST,), below="clients")]


@dataclass(frozen=True, eq=False)
class PadKeys:
    """Client's reply: the call's pad keys with lost neighbours, in ascending order of these."""

    keys: Annotated[Picks, Octets((Upto("pads", "clients"), KEY))]  # (k, 32) uint8


@dataclass(frozen=True, eq=False)
class SeedShares:
    """Client's reply: what opens its shares, of its own seed too, in ascending order of the owners.

    It is the cover of each neighbour's share, and the share of the own seed itself.
    """

    shares: Annotated[Picks, Octets((Upto("shares", "clients"), VALUE))]  # (k, 32) uint8


SUM_METHODS: Mapping[str, MessageTypes] = {
    **EXCHANGE_METHODS,
    "reveal_pads": (LostMembers, PadKeys),
    "reveal_shares": (LostMembers, SeedShares),
}


def bits_of(masked: type) -> dict[str, int]:
    """Return the number of bits of each summed field of a masked reply, by its name.

    Args:
        masked: class that `masked_class` returned.
    """
    bits = {}
    for name, bound in declared(masked).items():
        if isinstance(bound, Ring):
            bits[name] = bound.bits
    return bits


@lru_cache(maxsize=256)
def masked_class(reply: Any, through: tuple[str, ...]) -> type:
    """Return the class of a reply whose rows are masked, with the same fields and three more.

    Rows that pass through the pipeline, such as updates, are elements of Z_2^32; the few numbers
    beside them are elements of Z_2^64. `commitment` is that to the seed of the client's self mask,
    `boxes` are its covered shares for its neighbours, in their ascending order, and `origin` tells
    which rows follow from the same public numbers (`origin_tag`).

    Args:
        reply: class of the reply.
        through: fields that pass through the pipeline.

    Raises:
        UsageError: a field that no secure sum can hold.
    """
    bounds = declared(reply)
    members: list[tuple[str, Any]] = []
    for name, bits in summed_bits(reply, through).items():
        if name in ADDED:
            raise UsageError(f"{reply.__name__}.{name} has the name of a field of secure sums")
        bound = bounds.get(name)
        axes = bound.axes if isinstance(bound, Real) else ()
        ring = Ring(axes, bits, name in through)
        hint: Any = Rows
        if optional(reply, name):
            hint = Rows | None
        members.append((name, Annotated[hint, ring]))
    members.append(("commitment", Annotated[Rows, Octets((KEY,))]))
    members.append(("boxes", Annotated[Picks, Octets((BOXES, BOX))]))
    members.append(("origin", Annotated[Rows, Octets((TAG,))]))
    masked = dataclasses.make_dataclass(f"Masked{reply.__name__}", members, frozen=True, eq=False)
    masked.__module__ = __name__
    masked.__doc__ = f"{reply.__name__} as it leaves its client in a secure sum."
    masked.__summed__ = reply  # type: ignore[attr-defined]
    # resolved once, so that a class that cannot be sent fails here
    get_type_hints(masked)
    return masked


def summed_class(masked: type) -> type:
    """Return the class of the reply that a masked class was made from.

    Args:
        masked: class that `masked_class` returned.
    """
    summed: type = masked.__summed__  # type: ignore[attr-defined]
    return summed


class MaskedReplies:
    """Messages of secure sums."""

    methods = SUM_METHODS

    def reply_class(self, reply: type, release: ReleasePolicy) -> type:
        """Return the class of a reply with masked rows.

        Args:
            reply: class of the reply.
            release: declaration of its method.
        """
        return masked_class(reply, release.through)
