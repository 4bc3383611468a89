"""Messages of Flower that carry bytes, and how a server sends them and waits for the answers.

Needs the extra `flower`.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping
from itertools import islice
from typing import TypeVar

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, RecordDict
from flwr.serverapp import Grid

from securecluster.errors import FrameError
from securecluster.messaging import refusals
from securecluster.messaging.chunks import FIRST_CHUNK
from securecluster.nodes.agent import OK

# seconds between two looks for replies, which grow while none arrives; Flower's own loop takes 3
SHORTEST_PAUSE = 0.05
LONGEST_PAUSE = 2.0
PAUSE_PER_LOOK = 4.0  # of the time that the last look took
CODE, DATA = "code", "data"
R = TypeVar("R")


def record_of(data: bytes, code: str = OK) -> RecordDict:
    """Return bytes as Flower carries them.

    Args:
        data: of a message.
        code: of an answer: OK, or of a refusal.
    """
    array = Array(np.frombuffer(data, np.uint8))
    return RecordDict({DATA: ArrayRecord({DATA: array}), CODE: ConfigRecord({CODE: code})})


def bytes_of(content: RecordDict) -> bytes:
    """Return the bytes that `record_of` made a record of.

    Args:
        content: of a message, whose sender may send anything.

    Raises:
        FrameError: no such record.
    """
    try:
        return bytes(content[DATA][DATA].numpy().tobytes())
    except (KeyError, TypeError, AttributeError, ValueError):
        raise FrameError("a message of Flower has no bytes") from None


def asked(
    grid: Grid, message_type: str, sent: Mapping[int, RecordDict], seconds: float | None
) -> dict[int, tuple[str, bytes]]:
    """Return the (code, data) that each of Flower's nodes answered, of those that did.

    Args:
        grid: of the ServerApp.
        message_type: of the messages.
        sent: content by node.
        seconds: to wait; None waits for all.
    """
    messages = ((node, node, content) for node, content in sent.items())
    answers = pulled(grid, pushed(grid, message_type, messages), seconds)
    return {node: (code, data) for node, code, data in answers if code is not None}


def pushed(
    grid: Grid, message_type: str, sent: Iterable[tuple[R, int, RecordDict]]
) -> dict[str, R]:
    """Send messages, and return the request of each by the number of its message.

    Args:
        grid: of the ServerApp.
        message_type: of the messages.
        sent: (request, node, content), made as they are taken; requests are of the caller's choice.
    """
    waiting: dict[str, R] = {}
    contents = iter(sent)
    # Pushed in parts, so that not all requests are in memory at once.
    while chunk := list(islice(contents, FIRST_CHUNK)):
        messages = [
            Message(content, dst_node_id=node, message_type=f"query.{message_type}")
            for _, node, content in chunk
        ]
        numbers = grid.push_messages(messages)
        for (request, _, _), number in zip(chunk, numbers, strict=False):
            if number:  # Flower has none for a message that it could not take
                waiting[number] = request
    return waiting


def pulled(
    grid: Grid, sent: Mapping[str, R], seconds: float | None
) -> Iterator[tuple[R, str | None, bytes]]:
    """Yield (request, code, data) of each answer as it arrives.

    The code of an app that ended is None.

    Args:
        grid: of the ServerApp.
        sent: requests by the numbers of their messages.
        seconds: to wait; None waits for all.
    """
    waiting = dict(sent)
    due = time.monotonic() + (float("inf") if seconds is None else seconds)
    pause = SHORTEST_PAUSE
    while waiting:
        began = time.monotonic()
        replies = list(grid.pull_messages(list(waiting)))
        ended = time.monotonic()
        for reply in replies:
            request = waiting.pop(reply.metadata.reply_to_message_id)
            yield request, *_answer_in(reply)
        remaining = due - time.monotonic()
        if not waiting or remaining <= 0:
            return
        pause = SHORTEST_PAUSE if replies else min(1.5 * pause, LONGEST_PAUSE)
        # a look at many messages takes the processor, and in a simulation a lock, from the nodes
        pause = max(pause, PAUSE_PER_LOOK * (ended - began))
        time.sleep(min(pause, remaining))


def _answer_in(reply: Message) -> tuple[str | None, bytes]:
    """Return (code, data) of a node's reply, which may be anything."""
    if reply.has_error():  # of an app that ended: its text may name paths of the node
        return None, b""
    try:
        return str(reply.content[CODE][CODE]), bytes_of(reply.content)
    except (KeyError, TypeError, FrameError):
        return refusals.FAILED, b""
