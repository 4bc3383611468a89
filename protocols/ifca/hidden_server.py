"""IFCA's server where sums are secure: it reads sums of choices and of blocks alone.

Its state has no labels; those of the results come from the clients (`known_labels`). The models'
blocks are divided by the counts of choices.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from securecluster.core.lazy_torch import torch
from securecluster.messaging.messages import Shared, format_ids
from securecluster.messaging.replies import Sums
from securecluster.protocols.common.restarts import Restart
from securecluster.protocols.common.sampling import TRIES
from securecluster.protocols.ifca.hidden_client import (
    ChoiceCount,
    HiddenChoiceClient,
    ModelBlocks,
    ModelCounts,
    least_survivors,
)
from securecluster.runtime.endpoint import MINIMUM
from securecluster.runtime.server_channel import ServerChannel


@dataclass
class FinalCounts:
    """How many clients chose each model at the end of a run."""

    counts: list[int] = field(default_factory=list)  # (k,); empty where no sum succeeded

    @property
    def shared(self) -> list[int]:
        """Return the models of two clients or more, ascending."""
        return [j for j, count in enumerate(self.counts) if count >= MINIMUM]


def average_unseen(
    net: ServerChannel, running: Restart, best: Restart | None, to: Sequence[int]
) -> None:
    """Make a round of averaging by two secure sums: of choices, and of blocks.

    A sum of blocks needs all counted clients but those that the smallest block can spare. Choices
    are not counted again where it fails: two counts of the same choices would tell by their
    difference what a client chose that is missing in one of them. The models then stay as they are.

    Args:
        net: the server's channel.
        running: the start whose models are averaged.
        best: another start whose models clients are to keep; None means no other.
        to: the clients of this round.
    """
    counted = _count(net, running, best, to)
    if not counted.ids:
        return
    counts = _counts(counted)
    query = ModelCounts(
        earlier=counted.step,
        among=format_ids(counted.ids),
        counted=len(counted.ids),
        least=least_survivors(counts),
        counts=Shared(torch.tensor(counts)),
    )
    # Where no block is averaged, this is how clients learn that they train alone.
    sums = net.sum(HiddenChoiceClient.contribute_blocks, query, to=counted.ids)
    if sums.ids:
        running.post(sums.step, sums.rows.blocks.table[0], _block_weights(sums, counts))


def _block_weights(sums: Sums[ModelBlocks], counts: Sequence[int]) -> torch.Tensor:
    """Return what each block of a sum is divided by, (k,); 0 for a model that is not averaged.

    Where clients count the same, nobody tells how many are in a block again: these are the counts
    of choices, less the share of the counted clients that the sum lost.

    Args:
        sums: of the blocks.
        counts: (k,) clients that chose each model.
    """
    if sums.rows.weight is not None:
        return sums.rows.weight.table[0]
    survived = sums.counts[0] / sum(counts)
    averaged = [count * survived if count >= MINIMUM else 0.0 for count in counts]
    return torch.tensor(averaged, dtype=torch.float64)


def deliver_unseen(
    net: ServerChannel, running: Restart, best: Restart | None, tries: int = 5
) -> Restart:
    """Send the last averages to all clients, which choose once more without saying what.

    Args:
        net: the server's channel.
        running: the start that is finished.
        best: another start whose models clients are to keep; None means no other.
        tries: calls of a client that does not reply.
    """
    silent = tuple(net.clients)
    for _ in range(tries):
        if not silent:
            break
        query = running.message_for(silent, best)
        replies = net.gather(HiddenChoiceClient.receive_models, query, to=silent)
        running.acknowledge(replies.ids)
        silent = replies.lost
    return running


def count_at_end(net: ServerChannel, running: Restart, best: Restart | None) -> FinalCounts:
    """Return how many clients chose each model last.

    Args:
        net: the server's channel.
        running: the start that is finished.
        best: another start whose models clients are to keep; None means no other.
    """
    counted = _count(net, running, best, net.clients)
    if counted.ids:
        return FinalCounts(_counts(counted))
    return FinalCounts()


def _count(
    net: ServerChannel, running: Restart, best: Restart | None, to: Sequence[int]
) -> Sums[ChoiceCount]:
    """Send clients the averages that they lack, and return the sum of their choices.

    A sum that too few clients survive releases nothing, and is asked for again.
    """
    for _ in range(TRIES):
        query = running.message_for(to, best)
        counted = net.sum(HiddenChoiceClient.count_choice, query, to=to)
        running.acknowledge(counted.ids)
        if counted.ids:
            break
    return counted


def _counts(counted: Sums[ChoiceCount]) -> list[int]:
    """Return the counts of a sum, (k,), which are whole numbers in its fixed-point encoding."""
    return [round(count) for count in counted.rows.count.table[0].tolist()]
