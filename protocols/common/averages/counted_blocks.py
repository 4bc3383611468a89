"""Sums of rows of blocks, of which clients fill one and tell nobody which: counts come first.

In a sum of such rows a block that one client fills is that client's own, for whoever reads it: the
server, and with the averages every client. So a sum of ones counts how many clients fill each
block, and clients whose block has fewer than `least_choosers` send zeros in the sum of blocks.

Members may lie: t of them that claim a block and send zeros leave one honest client in it, unless
`least_choosers` is t + 2. That is for members that claim one block each. A secure sum proves
nothing of its rows: a changed client that adds several ones to a block, and takes as many from
blocks of others, claims for several. The server gives up counts that no such clients can have.

Clients are told whether each block is filled: of all blocks, since the server does not know which
one is a client's own, and never how many fill it. A client that reads where another is alone knows
what to claim.

Security rules of a client:

- A sum of blocks is over exactly those that were counted, and nothing of it is revealed unless all
  of their rows are in it. A server that could lose clients in between would choose who is left in
  a block; they have masked their rows before they learn who survives.
- It follows the client's last count, of the same blocks. Of one count there is one sum of blocks.
- What it is told has no more filled blocks than the counted clients can fill.

A client cannot check who else fills its block: of a server that tells false counts, only that it
contradicts itself is seen.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

from securecluster.core.lazy_torch import torch
from securecluster.errors import PolicyError
from securecluster.messaging.bounds import Real, Upto, Whole
from securecluster.messaging.messages import Rows, Shared, format_ids
from securecluster.messaging.replies import Sums
from securecluster.privacy.dp.noise_streams import digest
from securecluster.protections.sum_calls import FollowingSum
from securecluster.protocols.common.client_tensors import ClientTensor
from securecluster.runtime.call_context import CallContext

if TYPE_CHECKING:
    from securecluster.training.local_trainer import LocalTrainer

DIGEST = 32  # bytes of a digest


@dataclass(frozen=True, eq=False)
class BlockCount:
    """Client to server, in a secure sum: a one at each block that the client fills."""

    # (b, c)
    count: Annotated[Rows, Real((Upto("counted", "blocks", minimum=1),), low=0, maximum=1)]


@dataclass(frozen=True, eq=False)
class FilledBlocks(FollowingSum):
    """Server to client: which blocks enough of the counted clients fill."""

    # (c,) int64, 1 where a block is filled
    filled: Annotated[Shared, Whole((Upto("told", "blocks", minimum=1),), maximum=1)]


class CountedBlocks:
    """Memory of clients between a count and the sum of blocks that follows it.

    A class of clients derives from it, too.

    Attributes:
        least_choosers: least number of clients that fill a block of a sum; 0 without counts.
    """

    cohort: LocalTrainer
    least_choosers: int = 0

    # call of each client's last count, and a digest of what the blocks were; zeros before
    _counted_in = ClientTensor(dtype="int64")
    _counted_of = ClientTensor(DIGEST, dtype="uint8")
    # call of the count that a sum of blocks followed last, call of that sum, and what was told
    _followed = ClientTensor(2, dtype="int64")
    _told = ClientTensor(DIGEST, dtype="uint8")

    def counted(self, context: CallContext, filled: torch.Tensor, about: torch.Tensor) -> Rows:
        """Return rows of ones, and remember what was counted.

        Args:
            context: the clients (b,).
            filled: (b, c) True where a client fills a block.
            about: digest of the public numbers from which the blocks follow, (32,) uint8.
        """
        for k in context.positions:
            # a late request does not replace a later count
            if context.step >= int(self._counted_in[k]):
                self._counted_in[k] = context.step
                self._counted_of[k] = about
        return Rows(filled.to(self.cohort.start))

    def filled(
        self,
        context: CallContext,
        query: FilledBlocks,
        blocks: int,
        about: torch.Tensor,
        most: int = 1,
    ) -> list[bool]:
        """Return which blocks are filled, once the request is checked against the last count.

        Args:
            context: the clients.
            query: what they are told.
            blocks: c.
            about: as it was counted.
            most: blocks that one client fills at most.

        Raises:
            PolicyError: a request that a client refuses.
        """
        flags = query.filled.value
        if len(flags) != blocks:
            raise PolicyError(
                f"a client of {blocks} blocks is told of {len(flags)}: the request is refused"
            )
        if query.least != query.counted:
            raise PolicyError(
                f"a client is asked for a sum that {query.least} of {query.counted} counted "
                "clients may survive: then a block of it could be over a single client"
            )
        if int(flags.sum()) * self.least_choosers > query.counted * most:
            raise PolicyError(
                f"a client is told of {int(flags.sum())} filled blocks, and {query.counted} "
                f"clients cannot fill as many by {self.least_choosers} each: the request is refused"
            )
        new = numbers_digest(flags)
        call = torch.tensor([query.earlier, context.step])
        for i, k in zip(context.ids, context.positions, strict=True):
            of_last = torch.equal(self._counted_of[k], about)
            if int(self._counted_in[k]) != query.earlier or not of_last:
                raise PolicyError(
                    f"client {i} was counted last in another call, or about other blocks: the "
                    "request is refused"
                )
            before = self._followed[k]
            same = torch.equal(before, call) and torch.equal(self._told[k], new)
            if int(before[0]) == query.earlier and not same:
                raise PolicyError(
                    f"client {i} was told something else of the same count, or has sent its blocks"
                )
        for k in context.positions:
            self._followed[k] = call
            self._told[k] = new
        return [bool(block) for block in flags.tolist()]


class OwnModels:
    """Models that clients trained alone, each until an average replaces it, by a key of integers.

    Args:
        width: integers of a key, of which the first is the client's position.
    """

    def __init__(self, width: int) -> None:
        self._width = width
        self._rows: dict[tuple[int, ...], torch.Tensor] = {}

    def __contains__(self, key: tuple[int, ...]) -> bool:
        return key in self._rows

    @property
    def keys(self) -> list[tuple[int, ...]]:
        """Return the keys of all models."""
        return list(self._rows)

    def get(self, *key: int) -> torch.Tensor | None:
        """Return a model (d,); None where an average has replaced it, or there never was one."""
        return self._rows.get(key)

    def keep(self, row: torch.Tensor, *key: int) -> None:
        """Store a model.

        Args:
            row: (d,)
            key: the client's position, and what else tells its models apart.
        """
        self._rows[key] = row

    def drop(self, *key: int) -> None:
        """Forget a model, if there is one."""
        self._rows.pop(key, None)

    def memory(self) -> dict[str, torch.Tensor]:
        """Return all models and their keys, for a checkpoint."""
        rows = torch.zeros(0, 0)
        if self._rows:
            rows = torch.stack(list(self._rows.values()))
        return {"own": rows, "own_keys": table(self.keys, self._width)}

    def recall(self, memory: Any, device: torch.device) -> None:
        """Restore what `memory` returned.

        Args:
            memory: of a checkpoint.
            device: where models are.
        """
        keys = memory["own_keys"].tolist()
        rows = memory["own"].to(device)
        self._rows = {tuple(key): row for key, row in zip(keys, rows, strict=True)}


def numbers_digest(numbers: torch.Tensor) -> torch.Tensor:
    """Return the digest of public numbers, (32,) uint8.

    Args:
        numbers: of any shape.
    """
    return torch.tensor(list(digest(numbers)), dtype=torch.uint8)


def table(rows: Sequence[Sequence[int]], width: int) -> torch.Tensor:
    """Return rows of integers as a tensor (r, width)."""
    if not rows:
        return torch.zeros(0, width, dtype=torch.int64)
    return torch.tensor([list(row) for row in rows], dtype=torch.int64)


def counts_of(counted: Sums[BlockCount], blocks_per_client: int = 1) -> list[int] | None:
    """Return how many clients fill each block, (c,); None where clients cannot have sent that.

    Args:
        counted: the sum of their ones.
        blocks_per_client: blocks that one client fills at most. Where it is 1, it is what each
            fills.
    """
    # fixed-point numbers
    counts = [round(count) for count in counted.rows.count.table[0].tolist()]
    members = len(counted.ids)
    if min(counts) < 0 or max(counts) > members:
        return None
    if blocks_per_client == 1 and sum(counts) != members:
        return None
    return counts


def filled_blocks(
    counted: Sums[BlockCount], counts: Sequence[int], least_choosers: int
) -> dict[str, Any]:
    """Return the fields of `FilledBlocks` for the clients that were counted.

    Args:
        counted: the sum of their ones.
        counts: (c,) as `counts_of` returned them.
        least_choosers: least number of clients that fill a block.
    """
    flags = [int(count >= least_choosers) for count in counts]
    return {
        "earlier": counted.step,
        "among": format_ids(counted.ids),
        "counted": len(counted.ids),
        # no client is lost between the count and the blocks
        "least": len(counted.ids),
        "filled": Shared(torch.tensor(flags)),
    }
