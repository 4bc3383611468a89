"""Sampling of the clients that take part in a round."""

from __future__ import annotations

from collections.abc import Sequence
from numbers import Integral
from typing import TYPE_CHECKING

from securecluster.clustering.pairs import check_pairs
from securecluster.errors import UsageError
from securecluster.privacy.cohorts import Cohort

if TYPE_CHECKING:
    from securecluster.runtime.server_channel import ServerChannel

# Calls of a client that does not reply, where every reply is needed.
TRIES = 5
# two clusters of two clients
FEWEST_LANDMARKS = 4


def sample_clients(
    net: ServerChannel, members: Sequence[int], share: float, *path: int, minimum: int = 1
) -> list[int]:
    """Return a random share of some clients, in order.

    Where the run has cohorts, whole cohorts are sampled: their number is rounded at random, so that
    clients take part in the share of rounds that is asked for.

    Args:
        members: the clients to sample from, all of the run or of a cluster.
        share: the fraction that is sampled, in (0, 1].
        path: names the random draw, such as by round and cluster.
        minimum: the smallest number that is sampled, where there are as many members.
    """
    if net.cohorts is not None and share < 1:
        return _sample_cohorts(net.cohorts.of(members), net, share, *path, minimum=minimum)
    rounded = round(share * len(members))
    count = min(len(members), max(minimum, rounded))
    if count == len(members):  # no random draw is needed
        return list(members)
    generator = net.randomness.generator("server", "invite", *path)
    sampled = generator.choice(members, count, replace=False)
    return sorted(int(i) for i in sampled)


def _sample_cohorts(
    cohorts: Sequence[Cohort], net: ServerChannel, share: float, *path: int, minimum: int
) -> list[int]:
    """Return the clients of a random share of some cohorts, in order."""
    generator = net.randomness.generator("server", "invite", *path)
    count = int(share * len(cohorts) + generator.random())
    sampled: list[int] = []
    for number in generator.permutation(len(cohorts)).tolist():
        if count <= 0 and len(sampled) >= minimum:
            break
        sampled += cohorts[number]
        count -= 1
    return sorted(sampled)


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


def check_compared(net: ServerChannel, landmarks: int | None) -> None:
    """Check before a run that its clients are not too many to compare all pairs of them.

    Args:
        landmarks: the clients that are compared; None compares all.

    Raises:
        UsageError: too many clients (`check_pairs`).
    """
    clients = len(net.clients)
    compared = clients if landmarks is None else min(clients, landmarks)
    check_pairs(compared, "let a sample of them stand for all (landmarks)")


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
