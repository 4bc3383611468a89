"""What the members of a run's smallest secure sums read of each other.

It follows from the sums that were opened, and from no option: a run that allows sums of two may
have had none.
"""

from __future__ import annotations

from collections.abc import Mapping

from securecluster.folders.schemas import SmallestSums


def smallest_sums(size_of: Mapping[int, int], clients: int) -> SmallestSums:
    """Return the size of the smallest sums, how many clients were in one, and what follows.

    Args:
        size_of: members of the smallest sum that a client was in, by its id.
        clients: of the run.
    """
    if not size_of:
        return {"sentence": "no secure sum was opened", "members": 0, "clients": 0}
    members = min(size_of.values())
    few = sum(1 for size in size_of.values() if size == members)
    sentence = (
        f"the smallest secure sum was over {members} clients, and {_were(few)} in one of so few: "
        f"{_reading(members)}; a coordinate that fewer of them fill is a sum over those"
    )
    outside = clients - len(size_of)
    if outside:
        sentence += f"; {_were(outside)} in no sum"
    return {"sentence": sentence, "members": members, "clients": few}


def _were(count: int) -> str:
    """Return so many clients with their verb."""
    return "1 client was" if count == 1 else f"{count} clients were"


def _reading(members: int) -> str:
    """Return what members of a sum read of the others, from what they receive of it."""
    if members == 2:
        return "each of the two reads the other's summand"
    return (
        f"k of its members that work together read the sum of the other {members} - k, and with "
        f"k = {members - 1} the last one's summand"
    )
