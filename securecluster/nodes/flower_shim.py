"""What Flower ships to a node that has an agent: it hands bytes to the agent's socket and back.

It imports neither torch nor securecluster, and sees neither data nor keys: whoever may start a run
chooses this code, and the agent is the owner's. `node_config` has the agent's `socket`.
"""

from __future__ import annotations

import socket
import struct
from collections.abc import Callable

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp

KINDS = ("introduce", "agree", "hello", "frame", "score")


def receive(end: socket.socket) -> bytes:
    """Return bytes that were sent after their length.

    Args:
        end: of a connection to the agent.

    Raises:
        ConnectionError: the agent ended before it answered.
    """

    def exactly(count: int) -> bytes:
        data = b""
        while len(data) < count:
            chunk = end.recv(count - len(data))
            if not chunk:
                raise ConnectionError("the agent ended before it answered")
            data += chunk
        return data

    (length,) = struct.unpack("<Q", exactly(8))
    return exactly(length)


def forward(path: str, message_type: str, data: bytes) -> tuple[bytes, bytes]:
    """Return the status and the data of the agent's answer.

    Args:
        path: of its socket.
        message_type: of the message.
        data: of the message.
    """
    with socket.socket(socket.AF_UNIX) as end:
        end.connect(path)
        for payload in (message_type.encode(), data):
            end.sendall(struct.pack("<Q", len(payload)) + payload)
        return receive(end), receive(end)


def handler(message_type: str) -> Callable[[Message, Context], Message]:
    """Return the function that hands messages of a kind to the agent."""

    def handle(message: Message, context: Context) -> Message:
        path = str(context.node_config["socket"])
        data = message.content["data"]["data"].numpy().tobytes()
        status, reply = forward(path, message_type, data)
        array = Array(np.frombuffer(reply, np.uint8))
        content = RecordDict(
            {"data": ArrayRecord({"data": array}), "code": ConfigRecord({"code": status.decode()})}
        )
        return Message(content, reply_to=message)

    return handle


client_app = ClientApp()
for _kind in KINDS:
    client_app.query(_kind)(handler(_kind))
