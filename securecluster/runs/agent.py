"""A node's own process behind a Unix socket, for programs that carry its messages.

Such a program, a ClientApp that somebody else's server ships for instance, hands bytes in and takes
bytes out. It runs in a process of its own, and reads neither data nor keys nor state.

A message is a kind (`facts`, `hello`, `agree`, `frame` or `score`) and its data, each with its
length in eight bytes before it. The answer is a status (`ok`, or the code of a refusal) and data,
in the same form.
"""

from __future__ import annotations

import json
import os
import socket
import struct
from collections.abc import Callable
from pathlib import Path
from threading import Event, Thread

from securecluster.errors import SecureClusterError, UsageError
from securecluster.messaging import refusals
from securecluster.runs.node import Node
from securecluster.runs.party import Party

FACTS, HELLO, AGREE, FRAME, SCORE = "facts", "hello", "agree", "frame", "score"
OK = "ok"
MOST_BYTES = 1 << 32  # of a message: beyond the largest frame
LONGEST_PATH = 100  # bytes that every system takes as the path of a socket
SECONDS_FOR_MESSAGE = 60.0  # until a message has come as a whole
SECONDS_BETWEEN_LOOKS = 0.2  # at whether to stop


class Agent:
    """Server of one node on a Unix socket.

    Args:
        node: answers, a client's or that of a key authority.
        path: of the socket, which only its owner can open.

    Raises:
        UsageError: a path that is too long for a socket, or that another agent serves.
    """

    def __init__(self, node: Party, path: Path | str) -> None:
        self.node = node
        self.path = Path(path)
        self._stop = Event()
        if len(os.fsencode(self.path)) > LONGEST_PATH:
            raise UsageError(
                f"{self.path} is too long for a socket: give a path of at most {LONGEST_PATH} bytes"
            )
        if self.path.exists():
            if _answers(self.path):
                raise UsageError(f"another agent serves {self.path}: stop it, or give another path")
            self.path.unlink()  # of an agent that was killed
        self._listener = socket.socket(socket.AF_UNIX)
        before = os.umask(0o177)
        try:
            self._listener.bind(os.fspath(self.path))
        finally:
            os.umask(before)
        self._listener.listen()
        self._listener.settimeout(SECONDS_BETWEEN_LOOKS)

    def serve(self) -> None:
        """Answer until `stop` is called, each connection in a thread of its own."""
        try:
            while not self._stop.is_set():
                try:
                    end, _ = self._listener.accept()
                except TimeoutError:
                    continue
                Thread(target=self._one, args=(end,), daemon=True).start()
        finally:
            self._listener.close()
            self.path.unlink(missing_ok=True)

    def stop(self) -> None:
        """End `serve`, after at most a fraction of a second."""
        self._stop.set()

    def _one(self, end: socket.socket) -> None:
        """Answer the one message of a connection."""
        with end:
            end.settimeout(SECONDS_FOR_MESSAGE)
            try:
                kind = receive(end, 16).decode("ascii", "replace")
                data = receive(end, MOST_BYTES)
                end.settimeout(None)
                status, reply = answer(lambda: self.node, kind, data)
                send(end, status.encode())
                send(end, reply)
            except (OSError, EOFError):
                # who asked is gone, and asks again if it still wants to know
                return


def answer(node_of: Callable[[], Party], kind: str, data: bytes) -> tuple[str, bytes]:
    """Return the status and the data of a node's answer; no text of an error leaves.

    Args:
        node_of: returns the node.
        kind: of the message.
        data: of the message.
    """
    try:
        node = node_of()
        answers: dict[str, Callable[[bytes], bytes]] = {
            HELLO: node.hello,
            AGREE: lambda data: node.agree(data).encode(),
            FRAME: node.answer,
        }
        if isinstance(node, Node):  # which has data
            answers[FACTS] = lambda data: json.dumps(node.facts().as_json()).encode()
            answers[SCORE] = node.score
        if kind not in answers:
            raise UsageError(f"a node answers {', '.join(answers)}, and not {kind[:20]!r}")
        return OK, answers[kind](data)
    except SecureClusterError as error:
        refusals.log(error)
        return refusals.code_of(error), b""
    except Exception as error:  # a message of somebody else must not stop a node
        refusals.log(error)
        return refusals.FAILED, b""


def ask(path: Path | str, kind: str, data: bytes = b"", seconds: float | None = None) -> bytes:
    """Return what an agent answers.

    Args:
        path: of its socket.
        kind: of the message.
        data: of the message.
        seconds: to wait for the answer; None waits as long as it takes.

    Raises:
        ConnectionError: no agent, or one that ended before it answered.
        RefusedError: it refuses.
    """
    try:
        with socket.socket(socket.AF_UNIX) as end:
            end.settimeout(seconds)
            end.connect(os.fspath(path))
            send(end, kind.encode())
            send(end, data)
            status = receive(end, 16).decode("ascii", "replace")
            reply = receive(end, MOST_BYTES)
    except (OSError, EOFError) as error:
        raise ConnectionError(f"no agent answers at {path} ({type(error).__name__})") from error
    if status != OK:
        raise refusals.refusal(kind, status)
    return reply


def send(end: socket.socket, data: bytes) -> None:
    """Send some bytes after their length.

    Args:
        end: of a connection.
        data: to send.
    """
    end.sendall(struct.pack("<Q", len(data)) + data)


def receive(end: socket.socket, most: int) -> bytes:
    """Return the bytes that `send` sent.

    Args:
        end: of a connection.
        most: length that is taken.

    Raises:
        EOFError: the connection ended, or more bytes were announced.
    """
    (length,) = struct.unpack("<Q", _exactly(end, 8))
    if length > most:
        raise EOFError(f"{length} bytes")
    return _exactly(end, length)


def _exactly(end: socket.socket, count: int) -> bytes:
    """Return as many bytes from a connection.

    Raises:
        EOFError: it ended before.
    """
    parts: list[bytes] = []
    missing = count
    while missing:
        part = end.recv(min(missing, 1 << 20))
        if not part:
            raise EOFError
        parts.append(part)
        missing -= len(part)
    return b"".join(parts)


def _answers(path: Path) -> bool:
    """Return whether somebody listens on a socket."""
    with socket.socket(socket.AF_UNIX) as end:
        try:
            end.connect(os.fspath(path))
        except OSError:
            return False
    return True
