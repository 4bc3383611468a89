"""The transport to clients in blocks: a call is one message to each block that it concerns."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol

from securecluster.messaging.chunks import in_chunks
from securecluster.messaging.messages import Call, Response, stack
from securecluster.runs.block import Piece
from securecluster.runtime.transport import Transport


class Blocks(Protocol):
    """Clients in blocks, each of which one process holds.

    Attributes:
        block_of: the block of each client, by its number.
    """

    block_of: dict[int, int]

    def ask(self, method: str, contents: Mapping[int, Any]) -> dict[int, Any]:
        """Send some blocks a request, and return their answers."""

    def send(self, method: str, contents: Mapping[int, Any]) -> None:
        """Send some blocks a request, whose answers `reply` returns."""

    def reply(self, b: int) -> Any:
        """Return the answer of a block to what was sent."""


class BlockTransport(Transport):
    """Transport to clients in blocks.

    Args:
        blocks: the actors.
        lost: returns the clients that do not reply to a call, as a network would lose them.
    """

    def __init__(self, blocks: Blocks, lost: Callable[[Call], set[int]]) -> None:
        self._blocks = blocks
        self._lost = lost

    def exchange(self, call: Call) -> Response:
        """Send each block its part of a call, and join the replies in the order of the call.

        Args:
            call: requests to clients.
        """
        return _Replies(self._blocks, call, self._lost(call)).part(call)

    def stream(self, call: Call, chunk: int | None = None) -> Iterator[tuple[Call, Response]]:
        """Ask all blocks at once, and yield the replies in the parts of a run in one process.

        Args:
            call: requests to clients.
            chunk: clients of a part; None takes as many as memory allows.
        """
        replies = _Replies(self._blocks, call, self._lost(call))
        yield from in_chunks(replies.part, call, chunk)

    def relay(self, call: Call, answer: Response) -> None:
        """Do nothing, since all servers are in one process."""


class _Replies:
    """Replies of all blocks to one call, taken block by block as parts of the call ask for them.

    Replies that the server only adds stay in their blocks, which send the sums of each part. A part
    with clients of several blocks comes as single replies.

    Args:
        blocks: the actors, which are asked at once.
        call: the call.
        lost: clients that do not reply.
    """

    def __init__(self, blocks: Blocks, call: Call, lost: set[int]) -> None:
        self._blocks = blocks
        self._lost = lost
        self._responses: dict[int, Response] = {}
        self._group_of = dict(zip(call.to, call.adds, strict=False))  # empty where nothing is added
        self._settled: set[int] = set()  # blocks that have answered
        positions_of: dict[int, list[int]] = {}
        for k, client in enumerate(call.to):
            if client not in lost:
                positions_of.setdefault(blocks.block_of[client], []).append(k)
        # clients of each block whose replies were not taken yet
        self._left = {b: len(positions) for b, positions in positions_of.items()}
        requests = {b: call.select(positions) for b, positions in positions_of.items()}
        blocks.send("hold" if call.adds else "answer", requests)

    def part(self, subcall: Call) -> Response:
        """Return the replies of some clients of the call, in its order.

        Args:
            subcall: the call to these clients.
        """
        reachable = [client for client in subcall.to if client not in self._lost]
        if not reachable:
            return Response((), None)
        by_block: dict[int, list[int]] = {}
        for client in reachable:
            by_block.setdefault(self._blocks.block_of[client], []).append(client)
        if self._group_of:
            pieces = self._held_pieces(by_block)
        else:
            pieces = [self._piece(b, clients) for b, clients in by_block.items()]
        return _joined(pieces, reachable)

    def _held_pieces(self, by_block: Mapping[int, Sequence[int]]) -> list[Response]:
        """Return replies that blocks hold: their sums, where one block has all of them."""
        for b in by_block:
            if b not in self._settled:
                self._blocks.reply(b)
                self._settled.add(b)
        requests = {b: Piece(clients) for b, clients in by_block.items()}
        if len(by_block) == 1:
            ((b, clients),) = by_block.items()
            requests = {b: Piece(clients, {client: self._group_of[client] for client in clients})}
        return list(self._blocks.ask("piece", requests).values())

    def _piece(self, b: int, clients: Sequence[int]) -> Response:
        """Return the replies of some clients of a block."""
        if b not in self._responses:
            self._responses[b] = self._blocks.reply(b)
        response = self._responses[b]
        self._left[b] -= len(clients)
        if not self._left[b]:  # no later part needs it
            del self._responses[b]
        return response.of(clients)


def _joined(pieces: Sequence[Response], order: Sequence[int]) -> Response:
    """Return responses as one, whose clients are in an order.

    Args:
        pieces: of blocks.
        order: all clients of the pieces.
    """
    if len(pieces) == 1:
        return pieces[0]
    ids = [client for piece in pieces for client in piece.ids]
    reply = None
    if ids:
        reply = stack([piece.reply for piece in pieces if piece.ids])
    receipts = [piece.receipts_at(k) for piece in pieces for k in range(len(piece.ids))]
    refused = {client: code for piece in pieces for client, code in piece.refused.items()}
    joined_receipts = tuple(receipts) if any(receipts) else ()
    joined = Response(tuple(ids), reply, joined_receipts, refused)
    if ids == list(order):
        return joined
    return joined.of(order)
