"""What hidden rows of pairs have in common: their ranges, and what clients refuse."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from securecluster.errors import PolicyError, UsageError
from securecluster.messaging.bounds import Real, declared
from securecluster.messaging.messages import Call, Picks, Rows, Shared, kinds
from securecluster.privacy.fixed_point import FixedPoint
from securecluster.runtime.services import PAIRS

if TYPE_CHECKING:
    from securecluster.runtime.release_policy import ReleasePolicy


# clients whose rows go into one sum
PAIR = 2


# bits of the ring, by its size, that no sum of two needs: a pad that did not cancel shows in them
SPARE_BITS = {32: 0, 64: 8}


@dataclass(frozen=True)
class PairRange:
    """Range of the numbers of rows of pairs, and how they are padded.

    Args:
        low: smallest number.
        high: largest number.
        bits: 32 or 64, for pads in Z_2^32 or Z_2^64.
        itself: R_ii, which no client sends.
        clamped: True to clamp numbers beyond the range, such as losses that overflow; otherwise
            they are refused.
    """

    low: float
    high: float
    bits: int
    itself: float
    clamped: bool = False

    def fixed_point(self, name: str, largest: int | None = None) -> FixedPoint:
        """Return the encoding of the numbers.

        Args:
            name: name of the field, for messages.
            largest: largest integer, where that is less than what fits the ring.
        """
        members = PAIR << SPARE_BITS[self.bits]
        remedy = "its range in the fields of PairOptions"
        return FixedPoint(self.bound, members, self.bits, name, remedy, largest)

    @property
    def bound(self) -> float:
        """Return the largest magnitude of a number."""
        return max(abs(self.low), abs(self.high))

    def error_bound(self) -> float:
        """Return the largest error of R_ij, in float64."""
        return self.fixed_point("rows").error_bound(PAIR) / 2


def columns_of(query: Any, name: str, position: int, client: int) -> tuple[int, ...]:
    """Return the clients that one recipient's row has numbers of, itself included, in their order.

    Args:
        query: the request.
        name: field with their ids.
        position: position of the recipient.
        client: id of the recipient, which `Picks` of others lack.
    """
    value = getattr(query, name)
    if isinstance(value, Shared):
        return tuple(value.value.tolist())
    assert isinstance(value, Picks)
    others = value.table[list(value.picks[position])].tolist()
    return tuple(sorted([*others, client]))


def check_pairs_alone(call: Call, release: ReleasePolicy) -> None:
    """Raise PolicyError for a method whose rows may leave in other ways than padded pairs.

    Security rule: with padded pairs no row leaves in another way, and none whose numbers are of
    other clients than those that its pads are shared with.

    Args:
        call: requests for rows of pairs.
        release: declaration of the called method.
    """
    if release.via != (PAIRS,) or not release.columns or release.through:
        raise PolicyError(
            f"{call.method} may also leave in other ways than padded pairs, or does not say whom "
            "its rows are about: declare it with @answers(PAIRS, columns=...)"
        )


def range_of(reply: type, ranges: Mapping[str, PairRange]) -> PairRange:
    """Return the range of the rows of a reply.

    Args:
        reply: class of the reply.
        ranges: range of each field of rows.

    Raises:
        UsageError: a reply that is no row of pairs, or a field without a range.
    """
    name = next(iter(kinds(reply)))
    if name not in ranges:
        listed = ", ".join(ranges) or "none"
        raise UsageError(
            f"{reply.__name__}.{name} has no range, so it cannot be padded: declare one in "
            f"the fields of your PairOptions (declared: {listed})"
        )
    return ranges[row_field(reply)]


@lru_cache(maxsize=64)
def row_field(reply: Any) -> str:
    """Return the name of the one field of a reply that is a row of pairs.

    Args:
        reply: class of the reply.

    Raises:
        UsageError: a reply with other fields than one of rows.
    """
    bounds = declared(reply)
    fields = kinds(reply)
    names = list(fields)
    if len(names) != 1 or fields[names[0]] is not Rows or not isinstance(bounds[names[0]], Real):
        raise UsageError(
            f"{reply.__name__} cannot be padded: a row of pairs is one field of Rows of "
            "floating-point numbers"
        )
    return names[0]
