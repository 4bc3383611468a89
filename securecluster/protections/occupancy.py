"""How many members of a hidden sum move each of its coordinates and blocks.

A sum over n clients is a sum over one wherever the others add nothing: the column of a category
that one client has, the row of a word that one client uses, the block of a cluster with one member
(Suimon et al. 2025, Per-element Secure Aggregation, arXiv 2508.04285). No list of members tells of
this, so a simulation counts it: a tap sees the integers that clients encode, before they are
masked or encrypted. On many machines nobody sees these.

A client moves a coordinate if its integer is none that everybody can know: zero, and where numbers
are clamped to a bound, that bound. Counts stop at three, which is all that reports tell apart, so
that one bit a coordinate and client is held, until it is known who is in the sum.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from securecluster.messaging.messages import Call

FEW = 3  # of two members either reads the other's numbers, of three nobody does
BYTES = 1 << 16  # of packed coordinates that are counted at once

Bits = NDArray[np.uint8]


@dataclass
class FieldOccupancy:
    """Counts of members that moved coordinates and blocks of one field, over all of its sums.

    Attributes:
        method: the client method.
        field: of its reply.
        sums: that were formed.
        coordinates: of all sums together.
        of_one: coordinates that exactly one member moved.
        of_few: coordinates that one or two members moved.
        blocks: that a member filled, where the field has blocks; else rows that a member filled.
        blocks_of_one: blocks that exactly one member filled.
        least_members: members of the block that fewest filled; 0 where no block was filled.
    """

    method: str
    field: str
    sums: int = 0
    coordinates: int = 0
    of_one: int = 0
    of_few: int = 0
    blocks: int = 0
    blocks_of_one: int = 0
    least_members: int = 0

    def add(self, moves: Moved) -> None:
        """Count one more sum.

        Args:
            moves: by its members.
        """
        self.sums += 1
        self.coordinates += moves.coordinates
        for one, two, three in moves.at_least():
            self.of_one += _count(one & ~two)
            self.of_few += _count(one & ~three)
        members = moves.members_of_blocks()
        filled = members[members > 0]
        self.blocks += len(filled)
        self.blocks_of_one += int((filled == 1).sum())
        if len(filled):
            smallest = int(filled.min())
            self.least_members = min(self.least_members or smallest, smallest)


@dataclass
class Occupancy:
    """Counts of members that moved coordinates, by field, as far as they were counted."""

    fields: list[FieldOccupancy] = field(default_factory=list)

    def of(self, method: str, name: str) -> FieldOccupancy | None:
        """Return the figures of a field; None where nobody counted.

        Args:
            method: the client method.
            name: of the field.
        """
        for figures in self.fields:
            if (figures.method, figures.field) == (method, name):
                return figures
        return None


@dataclass(frozen=True, eq=False)
class Moved:
    """Coordinates that some clients moved, a bit each.

    Args:
        bits: for each number that everybody can know, a one where a client's number is another,
            (clients, blocks, bytes).
        coordinates: of a row.
    """

    bits: tuple[Bits, ...]
    coordinates: int

    @classmethod
    def by(cls, integers: NDArray[np.signedinteger], largest: Sequence[int] | None) -> Moved:
        """Return what clients move.

        Args:
            integers: encoded rows, (clients, …); of three dimensions or more the second is blocks.
            largest: by client, the magnitude that larger numbers are clamped to; None where they
                are not.
        """
        clients = len(integers)
        blocks = integers.shape[1] if integers.ndim > 2 else 1
        rows = integers.reshape(clients, blocks, -1)
        bits = [np.packbits(rows != 0, axis=-1)]
        if largest is not None:
            bound = np.asarray(largest, dtype=rows.dtype).reshape(clients, 1, 1)
            bits += [np.packbits(rows != bound, axis=-1), np.packbits(rows != -bound, axis=-1)]
        return cls(tuple(bits), blocks * rows.shape[-1])

    def chosen(self, clients: Sequence[int]) -> Moved:
        """Return what some of the clients move.

        Args:
            clients: their positions.
        """
        rows = list(clients)
        return Moved(tuple(bits[rows] for bits in self.bits), self.coordinates)

    @classmethod
    def together(cls, batches: Sequence[Moved]) -> Moved:
        """Return what the clients of several batches move.

        Args:
            batches: one or more.
        """
        if len(batches) == 1:
            return batches[0]
        columns = zip(*(batch.bits for batch in batches), strict=True)
        bits = tuple(np.concatenate(column) for column in columns)
        return cls(bits, batches[0].coordinates)

    def at_least(self) -> Iterator[tuple[Bits, Bits, Bits]]:
        """Yield the coordinates that at least one, two and three clients move, part by part."""
        flat = [bits.reshape(len(bits), -1) for bits in self.bits]
        for first in range(0, flat[0].shape[1], BYTES):
            levels = [_at_least(bits[:, first : first + BYTES]) for bits in flat]
            # a number that everybody can know is whichever most members have
            one, two, three = (np.bitwise_and.reduce(level) for level in zip(*levels, strict=True))
            yield one, two, three

    def members_of_blocks(self) -> NDArray[np.int64]:
        """Return how many clients fill each block, (blocks,)."""
        filled = self.bits[0].any(-1)
        return np.asarray(filled.sum(0, dtype=np.int64))


class SumTap:
    """Counts, in a simulation, what the members of hidden sums move.

    Clients' halves call `add` before a reply is hidden, and the channel calls `settle` when it is
    known who is in the sum.

    Attributes:
        occupancy: what was counted so far.
    """

    def __init__(self) -> None:
        self.occupancy = Occupancy()
        self._call: tuple[str, int] = ("", 0)
        # by field: positions of clients in the parts, and the parts
        self._clients: dict[str, list[int]] = {}
        self._parts: dict[str, list[Moved]] = {}

    def restore(self, occupancy: Occupancy) -> None:
        """Go on from what was counted before.

        Args:
            occupancy: of a checkpoint.
        """
        self.occupancy = occupancy

    def add(
        self,
        call: Call,
        name: str,
        integers: NDArray[np.signedinteger],
        largest: Sequence[int] | None,
    ) -> None:
        """Note what the clients of a call, or of a part of it, move.

        Args:
            call: the request.
            name: of the field.
            integers: one encoded row per recipient.
            largest: by recipient, as for `Moved.by`.
        """
        if self._call != (call.method, call.step):
            self._forget(call.method, call.step)
        self._clients.setdefault(name, []).extend(call.to)
        self._parts.setdefault(name, []).append(Moved.by(integers, largest))

    def settle(self, method: str, step: int, groups: Iterable[Sequence[int]]) -> None:
        """Count the sums of a call.

        Args:
            method: the client method.
            step: number of the call.
            groups: the clients whose rows are in each sum.
        """
        if self._call != (method, step):
            return
        sums = [members for members in groups if len(members)]
        for name, batches in self._parts.items():
            figures = self.occupancy.of(method, name)
            if figures is None:
                figures = FieldOccupancy(method, name)
                self.occupancy.fields.append(figures)
            moves = Moved.together(batches)
            # of a client that was asked again, the last row
            position_of = {client: row for row, client in enumerate(self._clients[name])}
            for members in sums:
                figures.add(moves.chosen([position_of[client] for client in members]))
        self._forget("", 0)

    def _forget(self, method: str, step: int) -> None:
        """Drop what was noted of the last call, and begin with another one."""
        self._call = (method, step)
        self._clients.clear()
        self._parts.clear()


def _at_least(bits: Bits) -> tuple[Bits, Bits, Bits]:
    """Return the bits that are set in at least one, two and three rows.

    Halves of the rows are added, with sums that stop at three.

    Args:
        bits: (rows, bytes), one row or more.
    """
    one = bits
    two = np.zeros_like(bits)
    three = two
    while len(one) > 1:
        half = len(one) // 2
        a, b, remainder = slice(0, half), slice(half, 2 * half), slice(2 * half, None)
        threes = three[a] | three[b] | two[a] & one[b] | one[a] & two[b]
        twos = two[a] | two[b] | one[a] & one[b]
        ones = one[a] | one[b]
        one = np.concatenate([ones, one[remainder]])
        two = np.concatenate([twos, two[remainder]])
        three = np.concatenate([threes, three[remainder]])
    return one[0], two[0], three[0]


def _count(bits: Bits) -> int:
    """Return how many bits are set."""
    return int(np.unpackbits(bits).sum(dtype=np.int64))
