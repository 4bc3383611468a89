"""What newcomers receive, and checks of what they reply, for `assign_newcomers` of a method."""

from __future__ import annotations

from collections.abc import Sequence

from securecluster.core.lazy_torch import torch
from securecluster.errors import FrameError, UpdateError
from securecluster.messaging.messages import Picks, Rows
from securecluster.protocols.common.messages import AverageDeltas, ModelDelta


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


def joint_model_message(joint: ModelDelta, newcomers: int) -> AverageDeltas:
    """Return a message that brings the joint model as the first average of each newcomer.

    Args:
        joint: the model of the clustering round.
        newcomers: number of recipients.
    """
    picks = ((0,),) * newcomers  # each frame has the only row of the tables
    means = joint.displacement[None]
    steps = torch.tensor([joint.step])
    counts = torch.ones(newcomers, dtype=torch.int64)
    return AverageDeltas(
        Picks(means, picks), Picks(steps, picks), absolute=True, count=Rows(counts)
    )
