"""Checks of what newcomers reply, for `assign_newcomers` of a method."""

from __future__ import annotations

from collections.abc import Sequence

from securecluster.errors import FrameError, UpdateError


def check_newcomers(to: Sequence[int], ids: Sequence[int]) -> None:
    """Raise UpdateError for newcomers that did not reply, which cannot be assigned to a cluster.

    Args:
        to: numbers of all newcomers.
        ids: numbers of those that replied.
    """
    replied = set(ids)
    silent = [i for i in to if i not in replied]
    if silent:
        few = ", ".join(map(str, silent[:5]))
        raise UpdateError(f"newcomer(s) {few} do not reply: ask them again later")


def check_offered(
    ids: Sequence[int], choices: Sequence[int], offered: Sequence[int]
) -> dict[int, int]:
    """Return each client's choice, by its number.

    Args:
        ids: numbers of the clients that replied.
        choices: their replies.
        offered: the valid choices.

    Raises:
        FrameError: a client's choice was not offered.
    """
    choice_of = dict(zip(ids, choices, strict=True))
    for i, choice in choice_of.items():
        if choice not in offered:
            raise FrameError(
                f"client {i} chose {choice}, which it was not offered: its reply is refused"
            )
    return choice_of
