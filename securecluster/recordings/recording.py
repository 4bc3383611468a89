"""Recordings of apps of others: what a server of Flower sent and received, in a folder.

`recorded(grid, folder)` wraps a grid. The app is as it was, and everything that goes through the
grid is written down: arrays that can be read as a transcript, and the metrics, the bytes and what
could not be read as a line for each exchange, which is what the server pushes at once and the
replies to it. A message that cannot be read ends no app, and neither does a disk that is full or a
fault of the recorder: a gap in the recording says that something is missing.

An app has one method for each type of its messages. The reply to "train" is an update: the arrays
of the reply minus those that were sent. What a client's mod has taken out of a message, such as
arrays that secure aggregation masks, is recorded as hidden.

What attacks need to know of the training is in no message. `TrainingFacts` declares it. How the
folder is kept whole says `recording_folder`.
"""

from __future__ import annotations

import gc
import os
import sys
import threading
import warnings
import weakref
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from securecluster.core import atomic_files, folder_lock
from securecluster.errors import RunFolderError, SecureClusterError, SecureClusterWarning
from securecluster.recordings.recorded_lines import Gap
from securecluster.recordings.recorded_messages import (
    ERROR,
    HIDDEN,
    MOST_BYTES,
    NOTHING_SENT,
    STEP,
    Exchange,
    Reply,
    Sent,
    Vector,
    bytes_of,
    exchanges_of,
)
from securecluster.recordings.recording_folder import (
    EXCHANGES,
    FACTS,
    KILLED,
    NODES,
    TRANSCRIPT,
    Recording,
    Written,
    is_recording,
    partitions_in,
)
from securecluster.recordings.training_facts import TrainingFacts

if TYPE_CHECKING:
    from filelock import BaseFileLock

__all__ = [
    "EXCHANGES",
    "FACTS",
    "HIDDEN",
    "NODES",
    "NOTHING_SENT",
    "PARTITION",
    "STEP",
    "TRANSCRIPT",
    "RecordedGrid",
    "Recording",
    "TrainingFacts",
    "bytes_of",
    "is_recording",
    "partitions_in",
    "recorded",
    "recorded_client",
]
PARTITION = "partition-id"
SECONDS_FOR_LOCK = 60.0  # that messages of one client wait for each other
KEPT_BYTES = 2**24  # of the vectors of unanswered exchanges, beside those of the last one
UNKNOWN = "a reply to a message that was not recorded"
NOT_KEPT = "late: the model that it was sent is not kept"
Placed = list[tuple[Exchange, int]]  # of each message of a push: its exchange and node


@dataclass
class Missed:
    """Exchanges that a process could not write, which it writes down as soon as it can.

    Args:
        gaps: exchanges that are missing.
        seal: digest of the line in which the first gap may be on the disk all the same.
        knows_rest: whether this process knows of all that the folder tells to be under way.
        warned: whether the user was warned.
    """

    gaps: list[Gap] = field(default_factory=list)
    seal: str = ""
    knows_rest: bool = False
    warned: bool = False


class Recorder:
    """Writes a recording, and lets no fault of doing so end the app.

    Args:
        folder: of the recording.
        app: name of the app.
        facts: of the training.
        seconds: to wait for the folder's lock.
        missed: what this process could not write before.
    """

    def __init__(
        self,
        folder: Path,
        app: str,
        facts: TrainingFacts,
        seconds: float = 0.0,
        missed: Missed | None = None,
    ) -> None:
        self.folder = folder
        self._app = app
        self._facts = facts
        self._seconds = seconds
        self._missed = missed or Missed()
        self._lock: BaseFileLock | None = None
        self._recording: Recording | None = None

    def begin(self) -> None:
        """Lock the folder, and begin the recording or go on with it.

        Raises:
            UsageError: something else is in the folder.
            RunFolderError: another process records there, or the recording is damaged.
        """
        try:
            self.ready()
        except (SecureClusterError, OSError) as error:
            # only a disk that refuses now may be another one later
            if not isinstance(error, OSError) and not isinstance(error.__cause__, OSError):
                self.release()
                raise
            self._fault(error)

    def ready(self) -> Recording:
        """Return the recording, to which what was missed before has been added."""
        missed = self._missed
        if self._lock is None:
            atomic_files.make_folder(self.folder)
            self._lock = self._acquired()
        if self._recording is None:
            recording = Recording.begin(self.folder, self._app, self._facts, missed.knows_rest)
            missed.knows_rest = True
            if missed.gaps and missed.seal and missed.seal == recording.last_seal:
                del missed.gaps[0]
            missed.seal = ""
            self._recording = recording
        while missed.gaps:
            self._recording.note(missed.gaps[0])
            del missed.gaps[0]
        return self._recording

    def _acquired(self) -> BaseFileLock:
        """Return the lock of the folder."""
        try:
            return folder_lock.acquire(self.folder, self._seconds)
        except RunFolderError:
            # an app that has ended in this process may hold it, until its grid is collected
            gc.collect()
            return folder_lock.acquire(self.folder)

    def write(self, exchange: Exchange, under_way: Sequence[Exchange] | None) -> Written | None:
        """Write an exchange, and return where it is; None if it is a gap.

        Args:
            exchange: with all replies that came.
            under_way: other exchanges that are not written yet; None if there is none to come.
        """
        written = None
        with self.guarded(gap_of(exchange)):
            written = self.ready().record(exchange)
        with self.guarded():
            self.announce(under_way)
        return written

    def announce(self, under_way: Sequence[Exchange] | None) -> None:
        """Write down what is under way, so that it is known if this process is killed.

        Args:
            under_way: exchanges that are not written yet; None if nobody records any longer.
        """
        gaps = None if under_way is None else [gap_of(exchange) for exchange in under_way]
        self.ready().write_head(gaps)

    @contextmanager
    def guarded(self, *missing: Gap) -> Iterator[None]:
        """Let no error of the recorder leave the context.

        Args:
            missing: what is missing from the recording after an error.
        """
        try:
            yield
        # the app was not made for the recorder's faults, whatever they are
        except BaseException as error:
            self._fault(error, *missing)
            if not isinstance(error, Exception):
                raise  # the app is being stopped

    def _fault(self, error: BaseException, *missing: Gap) -> None:
        """Remember what could not be written, and warn the first time.

        Args:
            error: of the recorder.
            missing: what is missing now.
        """
        reason = str(error) if isinstance(error, SecureClusterError) else type(error).__name__
        missed = self._missed
        if self._recording is not None:
            missed.seal = self._recording.unsure_seal
        for gap in missing:
            missed.gaps.append(Gap(**{**gap, "gap": reason}))
        # what the error has left behind is removed before anything else is written
        self._recording = None
        if not missed.warned and isinstance(error, Exception):
            missed.warned = True
            _warn(
                f"{self.folder} may lack messages of this app ({reason}): the app goes on, and "
                "exchanges that are missing are counted as gaps of the recording"
            )

    def release(self) -> None:
        """Let others write the folder."""
        if self._lock is not None:
            self._lock.release()
        self._lock = None
        self._recording = None


def gap_of(exchange: Exchange) -> Gap:
    """Return the gap that an exchange leaves if it is never written.

    Args:
        exchange: of any number of messages.
    """
    messages = len(exchange.sent)
    return Gap(gap=KILLED, kind=exchange.kind, told=exchange.told, messages=messages)


@dataclass(frozen=True)
class _Silent:
    """Trace of a message whose exchange was written without its reply.

    Args:
        sent: the message, without its values.
        node: that it was sent to.
        written: where its exchange is; None if it is a gap.
    """

    sent: Sent
    node: int
    written: Written | None

    @classmethod
    def of(cls, sent: Sent, node: int, written: Written | None) -> _Silent:
        """Return what is kept of a message.

        Args:
            sent: the message.
            node: that it was sent to.
            written: where its exchange is; None if it is a gap.
        """
        vector = sent.vector
        if vector.values is not None:
            vector = Vector(layout=vector.layout, reason=NOT_KEPT)
        # its bytes are counted in the line of its exchange
        return cls(replace(sent, vector=vector, bytes=0), node, written)


class _Exchanges:
    """Requests of a server, and the answers to them so far.

    Args:
        recorder: that writes it down.
        most_bytes: of the arrays of a message that is stored.
    """

    def __init__(self, recorder: Recorder, most_bytes: int) -> None:
        self.recorder = recorder
        self._most_bytes = most_bytes
        self._open: list[Exchange] = []
        self._asked: dict[str, tuple[Exchange, int]] = {}  # by number of the message
        self._silent: dict[str, _Silent] = {}
        # numbers of messages that were answered, or of which nothing could be read
        self._done: set[str] = set()
        self._process = os.getpid()
        self._alone = threading.RLock()

    def push(self, messages: Sequence[Any]) -> Placed:
        """Return exchange and node of each message, which the grid is about to send.

        Args:
            messages: of the app.

        Returns:
            Nothing if they cannot be recorded.
        """
        message_type = str(messages[0].metadata.message_type) if messages else ""
        unread = Gap(gap="", kind=message_type, told="", messages=len(messages))
        with self._alone, self.recorder.guarded(unread):
            sent = []
            for message in messages:
                node = int(message.metadata.dst_node_id)
                sent.append((node, Sent.of(message, self._most_bytes)))
            placed = exchanges_of(sent)
            begun = list(dict.fromkeys(placed))
            self._close_older(begun)
            self._open += begun
            with self.recorder.guarded():
                self.recorder.announce(self._open)
            return [(exchange, node) for exchange, (node, _) in zip(placed, sent, strict=True)]
        return []

    def pushed(self, messages: Sequence[Any], numbers: Sequence[Any], placed: Placed) -> None:
        """Take in what the grid has sent.

        Args:
            messages: of the app.
            numbers: that the grid has given them; None or too few where it did not send some.
            placed: what `push` returned.
        """
        with self._alone, self.recorder.guarded():
            sent_ids = list(numbers)
            if len(sent_ids) != len(messages):
                # Flower's grids write the numbers into the messages
                message_ids = [message.metadata.message_id for message in messages]
                sent_ids = [number if number in numbers else None for number in message_ids]
            if not placed:
                self._done.update(number for number in sent_ids if number is not None)
            for number, (exchange, node) in zip(sent_ids, placed, strict=False):
                if number is None:
                    exchange.unsent.add(node)
                else:
                    self._asked[number] = (exchange, node)
            self._close(exchange for exchange, _ in placed if not exchange.waits_for)

    def pulled(self, replies: Sequence[Any]) -> None:
        """Take replies in.

        Args:
            replies: to messages of any push.
        """
        with self._alone:
            for reply in replies:
                message_type = str(reply.metadata.message_type)
                unknown = Gap(gap="", kind=message_type, told="", messages=1)
                with self.recorder.guarded(unknown):
                    self._pulled(reply, reply.metadata.reply_to_message_id)

    def _pulled(self, reply: Any, number: str) -> None:
        """Take the reply to a message in."""
        if number in self._done:
            return
        if number in self._asked:
            self._done.add(number)
            exchange, node = self._asked.pop(number)
            exchange.replies[node] = Reply.of(reply, self._most_bytes)
            if not exchange.waits_for:
                self._close([exchange])
        elif number in self._silent:
            self._done.add(number)
            silent = self._silent.pop(number)
            # the gap of its exchange stands for the reply, too
            if silent.written is not None:
                sent = {silent.node: self._as_it_was_sent(silent)}
                replies = {silent.node: Reply.of(reply, self._most_bytes)}
                message_type, label = silent.sent.kind, silent.sent.told
                late = Exchange(message_type, label, sent, replies, late=silent.written.round)
                self.recorder.write(late, self._open)
        else:
            raise SecureClusterError(UNKNOWN)

    def exchanged(self, messages: Sequence[Any], replies: Sequence[Any], placed: Placed) -> None:
        """Take in the replies to messages, of which no more will come.

        Args:
            messages: of the app.
            replies: to some of them.
            placed: what `push` returned for them.
        """
        with self._alone, self.recorder.guarded():
            message_ids = [message.metadata.message_id for message in messages]
            pending = dict(enumerate(placed))
            for reply in replies if placed else ():
                number = reply.metadata.reply_to_message_id
                node = reply.metadata.src_node_id
                fits = [k for k in pending if number and message_ids[k] == number]
                # a grid that numbers no messages has one for each node
                fits += [k for k, (_, recipient) in pending.items() if recipient == node]
                if fits:
                    exchange, recipient = pending.pop(fits[0])
                    exchange.replies[recipient] = Reply.of(reply, self._most_bytes)
            self._close(exchange for exchange, _ in placed)

    def end(self) -> None:
        """Write down what was never answered, and let others write the folder."""
        # a fork has this object, too, and is not the one that records
        if os.getpid() != self._process:
            return
        with self._alone:
            self._close(self._open)
            with self.recorder.guarded():
                self.recorder.announce(None)
            self.recorder.release()

    def _close_older(self, begun: Sequence[Exchange]) -> None:
        """Write exchanges of which a client is asked the same again, or that take too many bytes.

        Args:
            begun: exchanges that begin now.
        """
        again = {(exchange.kind, node) for exchange in begun for node in exchange.sent}
        older = []
        for exchange in self._open:
            waits_for = {(exchange.kind, node) for node in exchange.waits_for}
            if waits_for & again:
                older.append(exchange)
        self._close(older)
        while sum(exchange.kept_bytes for exchange in self._open[:-1]) > KEPT_BYTES:
            self._close(self._open[:1])

    def _close(self, exchanges: Iterable[Exchange]) -> None:
        """Write exchanges, and keep no vector of them.

        Args:
            exchanges: of which those that are under way are written.
        """
        for exchange in dict.fromkeys(exchanges):
            if exchange not in self._open:
                continue
            self._open.remove(exchange)
            written = self.recorder.write(exchange, self._open)
            for number, (open_exchange, node) in list(self._asked.items()):
                if open_exchange is exchange:
                    del self._asked[number]
                    self._silent[number] = _Silent.of(exchange.sent[node], node, written)

    def _as_it_was_sent(self, silent: _Silent) -> Sent:
        """Return a message whose vector is not kept, with the vector as the transcript has it."""
        recording = self.recorder.ready()
        assert silent.written is not None
        position = silent.written.position
        if position is None or silent.sent.vector.reason != NOT_KEPT:
            return silent.sent
        number = recording.nodes.index(silent.node)
        to = recording.transcript.entries[position].to
        if number not in to:
            return silent.sent
        call, _ = recording.transcript.content(position)
        vector = Vector(call.query.model.row(to.index(number)), silent.sent.vector.layout)
        return replace(silent.sent, vector=vector)


class RecordedGrid:
    """A grid of Flower that writes each exchange down and passes everything on.

    The folder is locked until `close`, which happens by itself when nothing refers to the grid.

    Args:
        grid: of Flower.
        recorder: that has begun.
        most_bytes: of the arrays of a message that is stored.
    """

    def __init__(self, grid: Any, recorder: Recorder, most_bytes: int) -> None:
        self._grid = grid
        self._recorder = recorder
        self._exchanges = _Exchanges(recorder, most_bytes)
        self._end = weakref.finalize(self, self._exchanges.end)

    def __getattr__(self, name: str) -> Any:
        """Return whatever else the grid has."""
        return getattr(self._grid, name)

    @property
    def recording(self) -> Recording:
        """Return what is recorded so far."""
        return self._recorder.ready()

    def send_and_receive(self, messages: Iterable[Any], *, timeout: float | None = None) -> Any:
        """Return the replies to messages, which are on the disk by then.

        Args:
            messages: of the app.
            timeout: seconds, as Flower has it.
        """
        listed = list(messages)
        placed = self._exchanges.push(listed)
        replies: list[Any] = []
        try:
            replies = list(self._grid.send_and_receive(listed, timeout=timeout))
        finally:
            self._exchanges.exchanged(listed, replies, placed)
        return replies

    def push_messages(self, messages: Iterable[Any]) -> Any:
        """Return the numbers of messages that are sent.

        Args:
            messages: of the app.
        """
        listed = list(messages)
        placed = self._exchanges.push(listed)
        try:
            numbers = list(self._grid.push_messages(listed))
        except BaseException:
            self._exchanges.exchanged(listed, [], placed)
            raise
        self._exchanges.pushed(listed, numbers, placed)
        return numbers

    def pull_messages(self, message_ids: Iterable[str]) -> Any:
        """Return the replies that are there.

        They are on the disk once all of their push are there, or a client is asked the same again.

        Args:
            message_ids: numbers of the messages that they answer.
        """
        replies = list(self._grid.pull_messages(message_ids))
        self._exchanges.pulled(replies)
        return replies

    def close(self) -> None:
        """End the recording, and close the grid if it can be closed."""
        self._end()
        close = getattr(self._grid, "close", None)
        if close is not None:
            close()


def recorded(
    grid: Any,
    folder: Path | str,
    facts: TrainingFacts | None = None,
    app: str = "",
    most_bytes: int = MOST_BYTES,
) -> Any:
    """Return a grid of Flower that records everything an app sends and receives to a folder.

    Args:
        grid: that Flower gives a ServerApp's main function.
        folder: new or empty; or the recording of the same app, which then goes on.
        facts: of the clients' training; None declares nothing.
        app: name of the app in reports; the folder's where none is given.
        most_bytes: that the arrays of a message may have to be stored.

    Raises:
        UsageError: something else is in the folder.
        RunFolderError: another server records there, or the recording is damaged.
    """
    path = Path(folder)
    recorder = Recorder(path, app or path.resolve().name, facts or TrainingFacts())
    recorder.begin()
    return RecordedGrid(grid, recorder, most_bytes)


def recorded_client(folder: Path | str, facts: TrainingFacts | None = None, app: str = "") -> Any:
    """Return a mod of Flower that records what a client receives and sends, in a folder of its own.

    The folder of a client is named after its node, so those of a simulation may lie side by side.
    As the first mod of an app it sees what leaves the client; as the last, what the app computed.

    Args:
        folder: in which the client's folder is made.
        facts: of the training.
        app: name of the app in reports; the folder's where none is given.
    """
    parent = Path(folder)
    name = app or parent.resolve().name
    missed: dict[int, Missed] = {}

    def mod(message: Any, context: Any, call_next: Any) -> Any:
        node = int(context.node_id)
        node_missed = missed.setdefault(node, Missed())
        node_missed.warned = any(one.warned for one in missed.values())
        # messages of one node may run at once: each has a recorder, which waits for the others'
        recorder = Recorder(
            parent / str(node), name, facts or TrainingFacts(), SECONDS_FOR_LOCK, node_missed
        )
        message_type = str(message.metadata.message_type)
        exchange = Exchange(message_type, "", {})
        with recorder.guarded(Gap(gap="", kind=message_type, told="", messages=1)):
            sent = Sent.of(message, MOST_BYTES)
            exchange = Exchange(message_type, sent.told, {node: sent})
        exchange.replies[node] = Reply(Vector(reason=f"{ERROR} of the app"))
        try:
            reply = call_next(message, context)
            exchange.replies[node] = Reply.of(reply, MOST_BYTES)
        finally:
            _write_alone(recorder, exchange, context.node_config)
        return reply

    return mod


def _write_alone(recorder: Recorder, exchange: Exchange, config: Any) -> None:
    """Write the exchange of a client, while no other message of it is written.

    Args:
        recorder: of the client.
        exchange: of one message; of none if it could not be read.
        config: of the client's node.
    """
    with recorder.guarded():
        partition = config.get(PARTITION)
        if isinstance(partition, int):
            recorder.ready().number(exchange.sent, dict.fromkeys(exchange.sent, partition))
    if exchange.sent:
        recorder.write(exchange, None)
    else:
        with recorder.guarded():
            recorder.announce(None)
    recorder.release()


def _warn(text: str) -> None:
    """Warn the user, also where warnings are errors, which would end the app."""
    try:
        warnings.warn(text, SecureClusterWarning, stacklevel=2)
    except SecureClusterWarning:
        print(text, file=sys.stderr)
