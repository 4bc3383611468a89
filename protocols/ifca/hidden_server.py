"""IFCA's server where sums are secure: it reads sums of choices and of blocks alone.

Its state has no labels; those of the results come from the clients (`known_labels`). The models'
blocks are divided by the counts of choices; a block that too few clients fill moves no model.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from securecluster.core.lazy_torch import torch
from securecluster.protocols import authoring as fl
from securecluster.protocols.common.averages import counted_blocks
from securecluster.protocols.ifca.hidden_client import HiddenChoiceClient


@dataclass
class FinalCounts:
    """Numbers of clients that chose each model at the end of a run."""

    counts: list[int] = field(default_factory=list)  # (k,); empty where no sum succeeded
    least: int = fl.MINIMUM  # clients whose updates are averaged

    @property
    def shared(self) -> list[int]:
        """Return the models of as many clients as are averaged, ascending."""
        return [j for j, count in enumerate(self.counts) if count >= self.least]


def average_unseen(
    net: fl.ServerChannel,
    running: fl.Restart,
    best: fl.Restart | None,
    to: Sequence[int],
    minimum: int,
) -> None:
    """Make a round of averaging by two secure sums: of choices, and of blocks.

    A sum of blocks needs all counted clients. Choices are not counted again where it fails: two
    counts of the same choices would tell by their difference what a client chose that is missing in
    one of them. The models then stay as they are.

    Args:
        net: the server's channel.
        running: the start whose models are averaged.
        best: another start whose models clients are to keep; None means no other.
        to: the clients of this round.
        minimum: number of clients whose updates are averaged.
    """
    counted = _count(net, running, best, to)
    counts = counted_blocks.counts_of(counted) if counted.ids else None
    if counts is None:
        return
    flags = counted_blocks.filled_blocks(counted, counts, minimum)
    query = counted_blocks.FilledBlocks(**flags)
    # Where no block is averaged, this is how clients learn that they train alone.
    sums = net.sum(HiddenChoiceClient.contribute_blocks, query, to=counted.ids)
    if not sums.ids:
        return
    if sums.rows.weight is not None:
        weights = sums.rows.weight.table[0]
    else:
        averaged = [float(count) if count >= minimum else 0.0 for count in counts]
        weights = torch.tensor(averaged, dtype=torch.float64)
    running.post(sums.step, sums.rows.blocks.table[0], weights)


def deliver_unseen(
    net: fl.ServerChannel, running: fl.Restart, best: fl.Restart | None, tries: int = 5
) -> fl.Restart:
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


def count_at_end(
    net: fl.ServerChannel, running: fl.Restart, best: fl.Restart | None, minimum: int
) -> FinalCounts:
    """Return how many clients chose each model last.

    Args:
        net: the server's channel.
        running: the start that is finished.
        best: another start whose models clients are to keep; None means no other.
        minimum: number of clients whose updates are averaged.
    """
    counted = _count(net, running, best, net.clients)
    counts = counted_blocks.counts_of(counted) if counted.ids else None
    return FinalCounts(counts or [], minimum)


def _count(
    net: fl.ServerChannel, running: fl.Restart, best: fl.Restart | None, to: Sequence[int]
) -> fl.Sums[counted_blocks.BlockCount]:
    """Send clients the averages that they lack, and return the sum of their choices.

    A sum that too few clients survive releases nothing, and is asked for again.
    """
    for _ in range(fl.TRIES):
        query = running.message_for(to, best)
        counted = net.sum(HiddenChoiceClient.count_choice, query, to=to)
        running.acknowledge(counted.ids)
        if counted.ids:
            break
    return counted
