"""Sampling of the clients that take part in a round."""

from __future__ import annotations

from collections.abc import Sequence

from securecluster.runtime.server_channel import ServerChannel

# Calls of a client that does not reply, where every reply is needed.
TRIES = 5


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
