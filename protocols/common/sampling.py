"""Sampling of the clients that are asked in a round."""

from __future__ import annotations

from collections.abc import Sequence

from securecluster.runtime.server_channel import ServerChannel

TRIES = 5  # calls of clients that do not reply, where every reply is needed


def sample_clients(
    net: ServerChannel, members: Sequence[int], share: float, *path: int, minimum: int = 1
) -> list[int]:
    """A random share of some clients, `minimum` or more where there are as many, in order."""
    count = min(len(members), max(minimum, round(share * len(members))))
    if count == len(members):
        return list(members)
    return sorted(
        int(i)
        for i in net.randomness.generator("server", "invite", *path).choice(
            members, count, replace=False
        )
    )
