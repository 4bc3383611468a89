"""A node's own process behind a Unix socket, for programs that carry its messages.

Such a program, a ClientApp that somebody else's server ships for instance, hands bytes in and takes
bytes out. It runs in a process of its own, and reads neither data nor keys nor state.

A message is a kind (`facts`, `introduce`, `agree`, `hello`, `frame` or `score`) and its data, each
with its length in eight bytes before it. The answer is a status (`ok`, or the code of a refusal)
and data, in the same form. No message is longer than what the node has agreed to lets it be, and
few are read at a time: whoever connects and says nothing gives way to whoever comes next.
"""

from __future__ import annotations

import errno
import json
import os
import socket
import stat
import struct
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from threading import Event, Lock, Thread

from securecluster.core import atomic_files
from securecluster.errors import FrameError, SecureClusterError, UsageError
from securecluster.messaging import refusals
from securecluster.nodes.events import OK as OK
from securecluster.nodes.events import Answered, Listener
from securecluster.nodes.node import Node
from securecluster.nodes.party import Party
from securecluster.parties.frame_bounds import largest_authority_request, largest_request

FACTS, INTRODUCE, AGREE, HELLO = "facts", "introduce", "agree", "hello"
FRAME, SCORE = "frame", "score"
KINDS = (FACTS, INTRODUCE, AGREE, HELLO, FRAME, SCORE)
MOST_BYTES = 1 << 32  # of an answer: beyond the largest frame
SHORT = 1 << 20  # bytes of a message that is no frame
MOST_WAITING = 8  # connections whose message has not come as a whole
MOST_ANSWERED = 16  # connections whose message is being answered, or waits for the one before it
# no descriptors or no memory are left: a listener waits until some are
EXHAUSTED = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})
LONGEST_PATH = 100  # bytes that every system takes as the path of a socket
SECONDS_FOR_MESSAGE = 60.0  # until a message has come as a whole
SECONDS_FOR_CONNECTION = 5.0  # of an agent that serves the same path
SECONDS_BETWEEN_LOOKS = 0.2  # at whether to stop


class Agent:
    """Server of one node on a Unix socket.

    Args:
        node: answers, a client's or that of a key authority.
        path: of the socket, which only its owner can open.
        told: called with the event of each answer.

    Raises:
        UsageError: a path that is too long for a socket, where none can be made, that another
            agent serves, or where something else is.
    """

    def __init__(self, node: Party, path: Path | str, told: Listener = lambda event: None) -> None:
        self.node = node
        self._told = told
        self.path = Path(path)
        self._stop = Event()
        self._lock = Lock()  # of the three below
        self._waiting: dict[socket.socket, None] = {}  # the oldest first
        self._answered = 0
        self._longest: dict[str, int] = {}  # request of each run
        if len(os.fsencode(self.path)) > LONGEST_PATH:
            raise UsageError(
                f"{self.path} is too long for a socket: give a path of at most {LONGEST_PATH} bytes"
            )
        try:
            _remove_unused(self.path)
            self._listener = _listener(self.path)
            self._inode = self.path.lstat().st_ino
        except OSError as error:
            raise UsageError(
                f"no socket can be made at {self.path} ({error.strerror}): give another path"
            ) from None

    def serve(self) -> None:
        """Answer until `stop` is called, each connection in a thread of its own."""
        try:
            while not self._stop.is_set():
                self._accept()
        finally:
            self._listener.close()
            with suppress(OSError):
                if self.path.lstat().st_ino == self._inode:  # and nobody's who came later
                    atomic_files.remove_socket(self.path)

    def stop(self) -> None:
        """End `serve`, after at most a fraction of a second."""
        self._stop.set()

    def _accept(self) -> None:
        """Take the next connection, if there is one before it is time to look whether to stop."""
        try:
            end, _ = self._listener.accept()
        except TimeoutError:
            return
        except ConnectionError:  # who asked is gone
            return
        except OSError as error:
            if error.errno not in EXHAUSTED:
                raise
            self._drop_oldest()
            self._stop.wait(SECONDS_BETWEEN_LOOKS)
            return
        with self._lock:
            is_full = len(self._waiting) >= MOST_WAITING
        if is_full:
            self._drop_oldest()
        with self._lock:
            self._waiting[end] = None
        try:
            Thread(target=self._one, args=(end,), daemon=True).start()
        except RuntimeError:  # no more threads
            self._forget(end)
            end.close()

    def _drop_oldest(self) -> None:
        """End the connection that has waited longest for its message."""
        with self._lock:
            oldest = next(iter(self._waiting), None)
            if oldest is not None:
                del self._waiting[oldest]
                with suppress(OSError):
                    oldest.shutdown(socket.SHUT_RDWR)

    def _forget(self, end: socket.socket) -> None:
        """Take a connection from those that wait for their message."""
        with self._lock:
            self._waiting.pop(end, None)

    def _one(self, end: socket.socket) -> None:
        """Answer the one message of a connection."""
        with end:
            end.settimeout(SECONDS_FOR_MESSAGE)
            try:
                message_type = receive(end, 16).decode("ascii", "replace")
                limit: int | Callable[[int], int] = SHORT
                if message_type == FRAME:
                    limit = self._longest_frame
                data = receive(end, limit)
                self._answer(end, message_type, data)
            except (OSError, EOFError):
                # who asked is gone, and asks again if it still wants to know
                return
            finally:
                self._forget(end)

    def _answer(self, end: socket.socket, message_type: str, data: bytes) -> None:
        """Answer a message, unless too many wait to be answered."""
        with self._lock:
            self._waiting.pop(end, None)
            if self._answered >= MOST_ANSWERED:
                return
            self._answered += 1
        try:
            end.settimeout(None)
            begun = time.monotonic()
            status, reply = answer(lambda: self.node, message_type, data)
            seconds = time.monotonic() - begun
            kind = message_type if message_type in KINDS else "unknown"
            self._told(Answered.of(kind, status, len(data), reply, seconds))
            send(end, status.encode())
            send(end, reply)
        finally:
            with self._lock:
                self._answered -= 1

    def _longest_frame(self, announced: int) -> int:
        """Return the length of the longest frame of all runs that the node has agreed to.

        Args:
            announced: length of a frame that is about to be read.
        """
        if announced <= SHORT:
            return SHORT
        largest = largest_request if isinstance(self.node, Node) else largest_authority_request
        for run, config in self.node.agreed():
            if run not in self._longest:
                self._longest[run] = largest(self.node.method, config)
        return max(self._longest.values(), default=SHORT)


def answer(node_of: Callable[[], Party], message_type: str, data: bytes) -> tuple[str, bytes]:
    """Return the status and the data of a node's answer; no text of an error leaves.

    Args:
        node_of: returns the node.
        message_type: of the message.
        data: of the message.
    """
    try:
        node = node_of()
        answers: dict[str, Callable[[bytes], bytes]] = {
            INTRODUCE: lambda data: node.introduce(_short(data)),
            HELLO: lambda data: node.hello(_short(data)),
            AGREE: lambda data: node.agree(_short(data)).encode(),
            FRAME: node.answer,
        }
        if isinstance(node, Node):  # which has data
            answers[FACTS] = lambda data: json.dumps(node.facts().as_json()).encode()
            answers[SCORE] = lambda data: node.score(_short(data))
        if message_type not in answers:
            raise UsageError(f"a node answers {', '.join(answers)}, and not {message_type[:20]!r}")
        return OK, answers[message_type](data)
    except SecureClusterError as error:
        refusals.log(error)
        return refusals.code_of(error), b""
    except Exception as error:  # a message of somebody else must not stop a node
        refusals.log(error)
        return refusals.FAILED, b""


def _short(data: bytes) -> bytes:
    """Return a message that is no frame, or raise FrameError where it is too long for one."""
    if len(data) > SHORT:
        raise FrameError(f"a message of {len(data):,} bytes is refused: it may have {SHORT:,}")
    return data


def ask(
    path: Path | str, message_type: str, data: bytes = b"", seconds: float | None = None
) -> bytes:
    """Return what an agent answers.

    Args:
        path: of its socket.
        message_type: of the message.
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
            send(end, message_type.encode())
            send(end, data)
            status = receive(end, 16).decode("ascii", "replace")
            reply = receive(end, MOST_BYTES)
    except (OSError, EOFError) as error:
        raise ConnectionError(f"no agent answers at {path} ({type(error).__name__})") from error
    if status != OK:
        raise refusals.refusal(message_type, status)
    return reply


def send(end: socket.socket, data: bytes) -> None:
    """Send some bytes after their length.

    Args:
        end: of a connection.
        data: to send.
    """
    end.sendall(struct.pack("<Q", len(data)) + data)


def receive(end: socket.socket, limit: int | Callable[[int], int]) -> bytes:
    """Return the bytes that `send` sent.

    Args:
        end: of a connection.
        limit: length that is taken, or a function from the announced length to it.

    Raises:
        EOFError: the connection ended, or more bytes were announced.
    """
    (length,) = struct.unpack("<Q", _exactly(end, 8))
    if callable(limit):
        limit = limit(length)
    if length > limit:
        raise EOFError(f"{length} bytes")
    return _exactly(end, length)


def _exactly(end: socket.socket, count: int) -> bytes:
    """Return as many bytes from a connection.

    Raises:
        EOFError: it ended before.
    """
    chunks: list[bytes] = []
    missing = count
    while missing:
        chunk = end.recv(min(missing, 1 << 20))
        if not chunk:
            raise EOFError
        chunks.append(chunk)
        missing -= len(chunk)
    return b"".join(chunks)


def _listener(path: Path) -> socket.socket:
    """Return a new socket that listens, and that only its owner can open."""
    listener = socket.socket(socket.AF_UNIX)
    before = os.umask(0o177)
    try:
        listener.bind(os.fspath(path))
        listener.listen()
    except BaseException:
        listener.close()
        raise
    finally:
        os.umask(before)
    listener.settimeout(SECONDS_BETWEEN_LOOKS)
    return listener


def _remove_unused(path: Path) -> None:
    """Remove the socket of an agent that was killed, if there is one.

    Raises:
        UsageError: another agent serves it, or something else is there.
    """
    try:
        mode = path.lstat().st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(mode):
        raise UsageError(f"{path} exists, and is no socket: give another path")
    if is_served(path):
        raise UsageError(f"another agent serves {path}: stop it, or give another path")
    atomic_files.remove_socket(path)


def is_served(path: Path) -> bool:
    """Return whether somebody listens on a socket, or may do so.

    Args:
        path: of the socket.
    """
    with socket.socket(socket.AF_UNIX) as end:
        end.settimeout(SECONDS_FOR_CONNECTION)
        try:
            end.connect(os.fspath(path))
        except (ConnectionRefusedError, FileNotFoundError):
            return False
        except OSError:  # it is another user's, or has no time
            return True
    return True
