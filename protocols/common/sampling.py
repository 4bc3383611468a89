"""Sampling of the clients that take part in a round."""

from __future__ import annotations

from collections.abc import Sequence
from numbers import Integral

from securecluster.errors import UsageError
from securecluster.runtime.server_channel import ServerChannel

# Calls of a client that does not reply, where every reply is needed.
TRIES = 5
# two clusters of two clients
FEWEST_LANDMARKS = 4


def sample_clients(
    net: ServerChannel, members: Sequence[int], share: float, *path: int, minimum: int = 1
) -> list[int]:
    """Return a random share of some clients, in order.

    Args:
        members: the clients to sample from.
        share: the fraction that is sampled, in (0, 1].
        path: names the random draw, such as by round and cluster.
        minimum: the smallest number that is sampled, where there are as many members.
    """
    rounded = round(share * len(members))
    count = min(len(members), max(minimum, rounded))
    if count == len(members):  # no random draw is needed
        return list(members)
    generator = net.randomness.generator("server", "invite", *path)
    sampled = generator.choice(members, count, replace=False)
    return sorted(int(i) for i in sampled)


def sample_landmarks(
    net: ServerChannel, members: Sequence[int], count: int | None, *path: int
) -> list[int]:
    """Return the clients that a clustering compares with each other, in order.

    All others are compared with these alone, so that work and bytes are linear in their number.

    Args:
        members: the clients to sample from.
        count: the number of landmarks; None, or as many as there are members, takes all.
        path: names the random draw, such as by round and cluster.
    """
    if count is None or count >= len(members):
        return list(members)
    generator = net.randomness.generator("server", "landmarks", *path)
    sampled = generator.choice(members, count, replace=False)
    return sorted(int(i) for i in sampled)


def check_landmarks(landmarks: int | None) -> None:
    """Check an option `landmarks`.

    Args:
        landmarks: its value.

    Raises:
        UsageError: it is neither None nor a whole number that can form two clusters of two.
    """
    if landmarks is None:
        return
    is_integer = isinstance(landmarks, Integral) and not isinstance(landmarks, bool)
    if not (is_integer and int(landmarks) >= FEWEST_LANDMARKS):
        raise UsageError(
            f"landmarks = {landmarks!r} clients cannot stand for all: give a whole number from "
            f"{FEWEST_LANDMARKS}, or leave it out to compare all pairs"
        )
