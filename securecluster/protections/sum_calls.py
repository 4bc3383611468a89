"""What calls for hidden sums have in common: who is in a sum, and what clients refuse."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

from securecluster.core.validation import Between
from securecluster.errors import FrameError, PolicyError
from securecluster.messaging.messages import Call, parse_ids
from securecluster.privacy.cohorts import Cohort, whole_cohorts
from securecluster.runtime.services import SUM

if TYPE_CHECKING:
    from securecluster.runtime.release_policy import ReleasePolicy


@dataclass(frozen=True, eq=False)
class FollowingSum:
    """Request for rows that only hide a client if nearly all clients of an earlier sum send theirs.

    A message of this class, or of a subclass, is the query of a second sum. Clients send their rows
    to a sum over clients of the earlier one, and reveal nothing of them unless enough survive.
    """

    earlier: Annotated[int, Between(maximum="steps")]  # call of the earlier sum
    among: str  # clients whose rows are in the earlier sum, as text
    counted: Annotated[int, Between(maximum="clients")]  # their number
    least: Annotated[int, Between(maximum="clients")]  # smallest number of survivors of this sum


def members_of(call: Call) -> Iterator[tuple[int, tuple[int, ...]]]:
    """Yield each recipient of a call, and the members of its sum.

    Args:
        call: requests to clients.

    Raises:
        FrameError: a frame does not name the members of its sum.
    """
    if not call.group:
        raise FrameError(
            f"{call.method} is asked for a sum without members, and this run's sums are secure: "
            "start both sides from the same configuration"
        )
    parsed: dict[str, tuple[int, ...]] = {}
    for client, text, count in zip(call.to, call.group, call.members, strict=True):
        if text not in parsed:
            parsed[text] = parse_ids(text, count)
        if len(parsed[text]) != count:
            raise FrameError("a frame names another number of members than it counts")
        yield client, parsed[text]


def check_cohorts(client: int, members: Collection[int], cohorts: Sequence[Cohort]) -> None:
    """Raise PolicyError for a list of a sum's clients that has a part of a cohort.

    Security rule: sums over whole cohorts alone cannot be solved for one of their clients, however
    many there are. Each client derives the cohorts from the configuration, so this binds a server
    that breaks the protocol as well, and needs no memory of earlier sums.

    Args:
        client: id of the client that refuses.
        members: the clients in the sum.
        cohorts: of all clients of the run; empty checks nothing.
    """
    if not cohorts:
        return
    partial = set(members) - whole_cohorts(members, cohorts)
    if partial:
        raise PolicyError(
            f"client {client} refuses a secure sum over part of a cohort (client {min(partial)} is "
            "in it without others of its cohort): sums over ever other clients can be solved for "
            "each of them"
        )


def check_sums_alone(call: Call, release: ReleasePolicy) -> None:
    """Raise PolicyError for a method whose replies may leave in other ways than sums.

    Security rule: under secure sums no reply leaves in a plain sum.

    Args:
        call: requests for rows of a sum.
        release: declaration of the called method.
    """
    if release.via != (SUM,):
        raise PolicyError(
            f"{call.method} may also leave in other ways than sums, so a secure sum would hide "
            "nothing: the request is refused"
        )
