"""Chunks of clients, by which a sum over clients in one process stays within memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from securecluster.core.lazy_torch import torch
from securecluster.messaging.messages import Call, Response, Rows

# bytes of replies in memory at once
CHUNK_BYTES = {
    "cpu": 1 << 25,  # memory that the allocator reuses and caches hold
    "cuda": 1 << 28,
}
# clients of the first chunk, whose replies show how many bytes one client takes
FIRST_CHUNK = 32
MAX_CHUNK = 1024


def in_chunks(
    exchange: Callable[[Call], Response], call: Call, chunk: int | None = None
) -> Iterator[tuple[Call, Response]]:
    """Send a call to one chunk of its clients after another, as the replies are taken.

    Args:
        exchange: sends a call and returns the replies that arrive.
        call: the call to all clients.
        chunk: number of clients in a chunk; None takes as many as `CHUNK_BYTES` allows.

    Yields:
        (part of the call, its response).
    """
    first = 0
    size = chunk or FIRST_CHUNK
    while first < len(call.to):
        end = min(first + size, len(call.to))
        chunk_call = call.select(range(first, end))
        response = exchange(chunk_call)
        yield chunk_call, response
        first = end
        if chunk is None and response.reply is not None:
            size = chunk_size(response.reply)  # now the bytes of a reply are known


def chunk_size(reply: Any) -> int:
    """Return the number of clients in a chunk.

    Large enough to occupy every thread, and small enough to stay within `CHUNK_BYTES`.

    Args:
        reply: a batch of replies.
    """
    fields = vars(reply).values()
    rows = [value.table[0] for value in fields if isinstance(value, Rows)]
    bytes_per_client = sum(row.numel() * row.element_size() for row in rows)
    budget = 0
    if rows:
        budget = CHUNK_BYTES[rows[0].device.type]
    affordable = budget // max(bytes_per_client, 1)
    smallest = 4 * torch.get_num_threads()  # enough to keep every thread busy
    return max(smallest, min(MAX_CHUNK, affordable))
