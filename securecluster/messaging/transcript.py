"""Transcripts: which frames were sent between which parties, their bytes and, if stored, contents.

Byte counts, audits and replay are computed from them.
"""

from __future__ import annotations

import json
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path, PurePath
from typing import Any, TypeVar

import numpy as np

from securecluster.core import atomic_files, manifest, summaries
from securecluster.core.client_names import Client
from securecluster.core.lazy_torch import torch
from securecluster.core.manifest import EMPTY, Log, Mark
from securecluster.core.serialization import pack, unpack
from securecluster.errors import RunFolderError, UsageError
from securecluster.messaging import wire
from securecluster.messaging.messages import (
    AUTHORITY_CALL,
    RELAY,
    Call,
    Picks,
    Response,
    Rows,
    Shared,
    kinds,
    placed,
    reply_header,
    select,
)
from securecluster.messaging.parties import AUTHORITY, SERVER, WIRE, Party, Present, client, lps
from securecluster.messaging.receipts import receipts_as_json, receipts_from_json

B = TypeVar("B", Call, Response)
Contents = tuple[Call, Response]
MessageTypes = Callable[[str], tuple[type, type]]  # method name -> (query class, reply class)
MODES = ("none", "sizes", "full")
INDEX = "index.jsonl"
OWN = atomic_files.Own((INDEX,), re.compile(rf"{re.escape(INDEX)}|[0-9]+\.safetensors"))
Parties = Party | Client | Iterable[Party | Client]
# Methods of the key agreement and of protections, whose messages name clients; a protection that is
# registered adds its own. A transcript is read without the code of the run, so they stand here.
NAMING_METHODS = {
    "key_offer", "key_seal", "key_open",
    "sum_offer", "sum_keys", "reveal_pads", "reveal_shares", "pair_attempt",
    "encryption_key",
}  # fmt: skip


@dataclass(frozen=True)
class Entry:
    """Index entry of one call.

    In a relay the recipients are local parameter servers, `up` are their frames to the server and
    `down` its replies.

    Args:
        method: name of the client method.
        verb: verb that the method was called through.
        round: the protocol's round.
        step: number of the call.
        to: recipients.
        lost: recipients that did not reply.
        down: bytes of the frame to each recipient.
        up: bytes of the frame from each recipient; 0 if it did not reply.
        asker: local parameter server that called each recipient; empty if the server did.
        refused: of recipients that did not reply, (id, code) of those that refused.
        without_release: of recipients that did not reply, those that have released nothing.
        sha256: digest of the file with the contents; empty if there is none.
    """

    method: str
    verb: str
    round: int
    step: int
    to: tuple[int, ...]
    lost: tuple[int, ...]
    down: tuple[int, ...]
    up: tuple[int, ...]
    asker: tuple[int, ...] = ()
    refused: tuple[tuple[int, str], ...] = ()
    without_release: tuple[int, ...] = ()
    # entries are compared with those made from the contents, which have no file
    sha256: str = field(default="", compare=False)

    def ends(self, k: int) -> tuple[Party, Party]:
        """Return the party that called the k-th recipient, and the recipient.

        Args:
            k: position of the recipient.
        """
        if self.verb == RELAY:
            return SERVER, lps(self.to[k])
        if self.verb == AUTHORITY_CALL:
            return SERVER, AUTHORITY
        recipient = client(self.to[k])
        if self.asker:
            return lps(self.asker[k]), recipient
        return SERVER, recipient


@dataclass(frozen=True)
class ObservedMessage:
    """Frame as some parties observe it.

    Args:
        sender: party that sent the frame.
        receiver: party that received it.
        method: name of the client method.
        verb: verb that the method was called through.
        round: the protocol's round.
        step: number of the call.
        bytes: length of the frame.
        content: the message (a batch of one); None for parties that observe the length only.
    """

    sender: Party
    receiver: Party
    method: str
    verb: str
    round: int
    step: int
    bytes: int
    content: Any


@dataclass
class Recording:
    """Extent of a transcript, stored in checkpoints.

    Attributes:
        count: number of calls.
        totals: bytes by method and direction.
        index: extent of the index file.
    """

    count: int = 0
    totals: dict[str, dict[str, int]] = field(default_factory=dict)
    index: Mark = EMPTY


@dataclass
class _Batch:
    """Contents of a call and its response, as one file stores them."""

    call: dict[str, Any]
    query: dict[str, Any]
    ids: list[int]
    reply: dict[str, Any] | None
    # of each client, as its frame has them; empty where nobody has any
    receipts: list[list[Any]] = field(default_factory=list)


class Transcript:
    """Frames of a run in the order in which they were sent.

    Args:
        mode: `sizes` stores lengths, `full` also contents, `none` only running totals.
        folder: where to write the index and one file per call; None stores them in memory.
        messages: method name -> (query class, reply class), to read contents back.
        names: names of the clients in the order of their positions, for `seen_by`; empty if they
            are unknown.
        durable: whether each call is on the disk before `record` returns, in a file that is new.
    """

    def __init__(
        self,
        mode: str,
        folder: Path | None = None,
        messages: MessageTypes | None = None,
        names: Sequence[str] = (),
        durable: bool = False,
    ) -> None:
        self.mode = mode
        self.names = tuple(names)
        self.entries: list[Entry] = []
        self.count = 0
        self._folder = folder
        self._index: Log | None = None
        if folder and mode != "none":
            self._index = Log(folder / INDEX, atomic_files.OWNER, durable)
        self._durable = durable
        self._messages = messages
        self._contents: list[Contents] = []  # only without a folder
        self._totals: dict[str, Counter[str]] = defaultdict(Counter)

    def __repr__(self) -> str:
        """Return a summary in one line, without contents."""
        return summaries.line("Transcript", self._summary())

    def _repr_html_(self) -> str:
        """Return a summary for notebooks, without contents."""
        return summaries.table("Transcript", self._summary())

    def _summary(self) -> dict[str, str]:
        """Return what was recorded, in words."""
        totals = self.totals()
        descriptions = {
            "none": "totals only",
            "sizes": "sizes of frames",
            "full": "contents of frames",
        }
        return {
            "kept": descriptions[self.mode],
            "calls": f"{self.count} calls",
            "up": f"{totals['up']:,} bytes up",
            "down": f"{totals['down']:,} bytes down",
        }

    @classmethod
    def read(
        cls,
        mode: str,
        folder: Path,
        messages: MessageTypes,
        names: Sequence[str] = (),
        durable: bool = False,
        count: int | None = None,
    ) -> Transcript:
        """Return the transcript in a folder, whose arguments `open_transcript` finds out.

        Args:
            mode: mode of the run's transcript.
            folder: the folder `transcript` of a run folder.
            messages: method name -> (query class, reply class).
            names: names of the clients, in their order.
            durable: whether further calls are on the disk before `record` returns.
            count: number of calls; later ones are left out. None reads all.

        Raises:
            RunFolderError: its index does not parse.
        """
        transcript = cls(mode, folder, messages, names, durable)
        for entry in load_entries(folder)[:count]:
            transcript._count(entry)
        return transcript

    def record(self, call: Call, answer: Response) -> None:
        """Append one call.

        Args:
            call: the requests.
            answer: the replies that arrived.
        """
        entry = entry_of(call, answer)
        if self.mode == "full":
            entry = replace(entry, sha256=self._store(call, answer))
        if self._index:
            self._index.append([json.dumps(_as_json(entry))])
        self._count(entry)

    def _count(self, entry: Entry) -> None:
        """Add an entry to the totals and, unless only these are stored, to the entries."""
        up = sum(entry.up)
        down = sum(entry.down)
        totals = self._totals[entry.method]
        if entry.verb in (RELAY, AUTHORITY_CALL):
            totals["servers"] += up + down
        else:
            totals["up"] += up
            totals["down"] += down
        if self.mode != "none":
            self.entries.append(entry)
        self.count += 1

    def _store(self, call: Call, response: Response) -> str:
        """Store the contents of a call, and return the digest of their file, if there is one."""
        if self._folder is None:
            # A device does not have memory for all messages of a run.
            contents = (_in_main_memory(call, "query"), _in_main_memory(response, "reply"))
            self._contents.append(contents)
            return ""
        data = _packed(call, response)
        assert self._index is not None
        self._index.begin()  # before the first frame, which it marks as ours
        # the digest in the index detects a file that has been changed
        path = self._file(self.count)
        if self._durable:
            atomic_files.write_new(path, data, atomic_files.OWNER)
        else:
            atomic_files.write_atomic(path, data, atomic_files.OWNER)
        return manifest.digest(data)

    def _file(self, position: int) -> Path:
        assert self._folder is not None
        return self._folder / f"{position:06d}.safetensors"

    def totals(self) -> dict[str, Any]:
        """Return the bytes sent so far.

        Returns:
            `up`, `down`, `servers` (between server-side parties) and `by_message`, which has the
            same by method; there `servers` is left out if it is zero.
        """
        by_message = {}
        for name, counts in sorted(self._totals.items()):
            by_message[name] = {"up": counts["up"], "down": counts["down"]}
            if counts["servers"]:  # few methods have frames between servers
                by_message[name]["servers"] = counts["servers"]
        sums: Counter[str] = Counter()
        for counts in self._totals.values():
            sums.update(counts)
        return {
            "up": sums["up"],
            "down": sums["down"],
            "servers": sums["servers"],
            "by_message": by_message,
        }

    def content(self, position: int) -> Contents:
        """Return the call and the response of one entry, from memory or disk.

        Args:
            position: number of the entry.

        Raises:
            UsageError: contents were not stored.
            RunFolderError: the entry's file is missing or differs from what was written, or a
                message has other fields than this version's.
        """
        if self.mode != "full":
            raise UsageError(
                f"this transcript holds {self.mode} only, so nothing can be read in it: run again "
                'with --transcript full, in Python with Settings(transcript="full")'
            )
        if self._folder is None:
            return self._contents[position]
        batch = unpack(self._checked_file(position), _Batch)
        assert self._messages is not None
        query_type, reply_type = self._messages(batch.call["method"])
        fields = _with_tuples(batch.call)
        call = Call(**fields, query=_rebuilt(query_type, batch.query))
        reply = None
        if batch.reply is not None:
            reply = _rebuilt(reply_type, batch.reply)
        receipts = tuple(receipts_from_json(values) if values else () for values in batch.receipts)
        entry = self.entries[position]
        ids, refused = tuple(batch.ids), dict(entry.refused)
        spared = entry.without_release
        return call, Response(ids, reply, receipts, refused, without_release=spared)

    def check(self) -> None:
        """Check that all contents on the disk are what was written.

        Raises:
            RunFolderError: an entry's file is missing or differs.
        """
        if self.mode == "full" and self._folder is not None:
            for position in range(len(self.entries)):
                self._checked_file(position)

    def _checked_file(self, position: int) -> bytes:
        """Return the contents of an entry's file, which must match the digest in the index."""
        path = self._file(position)
        if not path.is_file():
            raise manifest.missing(path)
        data = atomic_files.read(path)
        if manifest.digest(data) != self.entries[position].sha256:
            raise manifest.damaged(path)
        return data

    def same_as(self, other: Transcript) -> bool:
        """Return whether the calls on the disk are those of a transcript in memory, bit for bit.

        Args:
            other: of another run, in mode `full` as this one.
        """
        if self.entries != other.entries:
            return False
        digests = [manifest.digest(_packed(*contents)) for contents in other._contents]
        return digests == [entry.sha256 for entry in self.entries]

    def seen_by(
        self, parties: Parties, anonymous: bool = False, seed: int = 0
    ) -> Iterator[ObservedMessage]:
        """Return the frames that a set of colluding parties observed, in order.

        `WIRE` observes lengths and timing, never contents. A party that exists and took part in no
        call observed nothing.

        Args:
            parties: one party or several: SERVER, AUTHORITY, WIRE, `lps(k)`, "server", "authority",
                "wire", or a client by its name or by `at` its position. A number is a name; only
                where no client is called by a number, it is a position.
            anonymous: replace other clients than the observers by labels that are new for every
                call, as parties of kind "anonymous", and order a call's frames by them. Attacks
                that are to link calls would else read the answer. Frames of the key agreement and
                of secure sums' phases, which name clients, are left out.
            seed: of the labels; `identities` says who has which.

        Raises:
            UsageError: no party is specified, or one that does not exist in this run, or no entries
                were stored.
        """
        if self.mode == "none":
            raise UsageError(
                "this transcript holds none only, so it does not know who saw what: run again with "
                '--transcript sizes or full, in Python with Settings(transcript="full")'
            )
        observers = self._present().resolve(parties)
        if not anonymous:
            return self._observed(observers)
        return self._anonymous(observers, seed)

    def resolved(self, parties: Parties) -> frozenset[Party]:
        """Return the parties of this transcript that a user specifies.

        Args:
            parties: as for `seen_by`.

        Raises:
            UsageError: no party is specified, or one that does not exist in this run.
        """
        return self._present().resolve(parties)

    def identities(self, seed: int = 0) -> dict[int, int]:
        """Return the number of the client behind each label of `seen_by(..., anonymous=True)`.

        Args:
            seed: of the labels.
        """
        client_of: dict[int, int] = {}
        for entry, labels in zip(self.entries, self._labels(seed), strict=True):
            if entry.verb != RELAY:
                client_of.update(zip(labels, entry.to, strict=True))
        return client_of

    def _labels(self, seed: int) -> list[list[int]]:
        """Return for each call a label for each of its recipients, which no other call has.

        Args:
            seed: of the labels.
        """
        all_labels = []
        first = 0
        for position, entry in enumerate(self.entries):
            count = len(entry.to)
            order = np.random.default_rng([seed, position]).permutation(count)
            all_labels.append([first + int(k) for k in order])
            first += count
        return all_labels

    def _present(self) -> Present:
        """Return the parties: clients and local parameter servers in a call, and named clients."""
        clients = len(self.names)
        servers = 0
        authority = False
        for entry in self.entries:
            if entry.verb == AUTHORITY_CALL:
                authority = True
                continue
            recipients = max(entry.to, default=-1) + 1
            if entry.verb == RELAY:
                servers = max(servers, recipients)
            else:
                callers = max(entry.asker, default=-1) + 1  # 0 if the server itself calls
                clients = max(clients, recipients)
                servers = max(servers, callers)
        return Present(clients, servers, self.names, authority)

    def _observed(self, observers: frozenset[Party]) -> Iterator[ObservedMessage]:
        """Yield what some parties observed, call by call."""
        for position in range(len(self.entries)):
            yield from self._frames_of_call(position, observers)

    def _frames_of_call(
        self, position: int, observers: frozenset[Party]
    ) -> Iterator[ObservedMessage]:
        """Yield what some parties observed of one call."""
        entry = self.entries[position]
        readable = []
        for k in range(len(entry.to)):
            # both ends of a frame can read it
            readable.append(not observers.isdisjoint(entry.ends(k)))
        content = None
        if any(readable):  # else contents need not be read from disk
            content = self.content(position)
        position_of: dict[int, int] = {}
        if content is not None:
            _, response = content
            position_of = {number: n for n, number in enumerate(response.ids)}
        for k, number in enumerate(entry.to):
            if readable[k]:
                yield from self._frames(entry, k, content, position_of.get(number))
            elif WIRE in observers:
                yield from self._frames(entry, k, None, None)

    def _anonymous(self, observers: frozenset[Party], seed: int) -> Iterator[ObservedMessage]:
        """Yield what some parties observed, call by call, with labels in place of clients."""
        all_labels = self._labels(seed)
        for position, entry in enumerate(self.entries):
            # A key authority is told the members of sums.
            if entry.method in NAMING_METHODS or entry.verb == AUTHORITY_CALL:
                continue
            frames = self._frames_of_call(position, observers)
            if entry.verb == RELAY:
                yield from frames
                continue
            label_of = {}
            for number, label in zip(entry.to, all_labels[position], strict=True):
                label_of[client(number)] = Party("anonymous", label)
            renamed = [_renamed(frame, label_of, observers) for frame in frames]
            # stable, so that a request stays before its reply
            yield from sorted(renamed, key=partial(_label_in, label_of))

    def _frames(
        self, entry: Entry, k: int, content: Contents | None, answer: int | None
    ) -> Iterator[ObservedMessage]:
        """Yield the two frames between a call's k-th recipient and the party that called it.

        Args:
            entry: the call.
            k: position of the recipient.
            content: contents of the call; None if the observers see lengths only.
            answer: position of the recipient's reply in the contents; None if there is none.
        """
        caller, recipient = entry.ends(k)
        number = entry.to[k]
        lost = number in entry.lost
        query = None
        reply = None
        if content is not None:
            call, response = content
            query = select(call.query, [k])
            if not lost:
                assert answer is not None
                reply = select(response.reply, [answer])
        down = ObservedMessage(
            sender=caller,
            receiver=recipient,
            method=entry.method,
            verb=entry.verb,
            round=entry.round,
            step=entry.step,
            bytes=entry.down[k],
            content=query,
        )
        up = ObservedMessage(
            sender=recipient,
            receiver=caller,
            method=entry.method,
            verb=entry.verb,
            round=entry.round,
            step=entry.step,
            bytes=entry.up[k],
            content=reply,
        )
        if entry.verb == RELAY:
            # the local parameter server sends the query, and receives the reply
            yield replace(up, content=query)
            yield replace(down, content=reply)
            return
        yield down
        if not lost:
            yield up

    def surplus(self) -> list[Path]:
        """Return the files of contents in the folder that belong to no call."""
        assert self._folder is not None
        existing = set(_content_files(self._folder))
        if self.mode == "full":
            recorded = {self._file(position) for position in range(self.count)}
            existing -= recorded
        return sorted(existing)

    def snapshot(self) -> Recording:
        """Return the extent of the transcript, for a checkpoint."""
        totals = {name: dict(counts) for name, counts in self._totals.items()}
        mark = EMPTY
        if self._index:
            mark = self._index.mark
        return Recording(self.count, totals, mark)

    def rewind(self, to: Recording) -> None:
        """Return to a checkpoint: later calls are removed, since the resumed run repeats them.

        Args:
            to: extent at the checkpoint.

        Raises:
            RunFolderError: the index differs from what it was then.
        """
        self.count = to.count
        self._totals = defaultdict(Counter)
        for name, counts in to.totals.items():
            self._totals[name] = Counter(counts)
        self.entries = self.entries[: to.count]
        self._contents = self._contents[: to.count]
        if self._index is None or self._folder is None:
            return
        self.entries = self._index.restore(to.index, _entry)
        self._index.begin()
        # the resumed run writes these files again
        for path in _content_files(self._folder):
            if int(path.stem) >= to.count:
                atomic_files.remove(self._folder, path.name, OWN)


def _packed(call: Call, response: Response) -> bytes:
    """Return the contents of a call as its file has them."""
    fields = dict(vars(call))
    del fields["query"], fields["deadline"], fields["origins"]
    reply = None
    if response.reply is not None:
        reply = _fields_of(response.reply)
    query = _fields_of(call.query)
    receipts = [receipts_as_json(written) for written in response.receipts]
    batch = _Batch(fields, query, list(response.ids), reply, receipts)
    return pack(batch)


def entry_of(call: Call, answer: Response) -> Entry:
    """Return the index entry of a call, with the length of each frame in bytes.

    Args:
        call: the requests.
        answer: the replies that arrived.
    """
    recipients = range(len(call.to))
    forms = call.forms()
    request_sizes = wire.sizes(call.header, forms, call.query, recipients)
    # positions of recipients that replied, and of their replies in the batch of them
    replied: Sequence[int] = recipients
    positions: Sequence[int] = recipients
    if answer.ids != call.to:
        position_of = {client: position for position, client in enumerate(answer.ids)}
        replied = [k for k, client in enumerate(call.to) if client in position_of]
        positions = [position_of[call.to[k]] for k in replied]
    replies = [0] * len(call.to)
    if replied:  # without replies there is no message
        receipts = [answer.receipts_at(position) for position in positions]
        reply_sizes = wire.sizes(
            lambda n: reply_header(call.header(replied[n])),
            [forms[k] for k in replied],
            answer.reply,
            positions,
            receipts,
        )
        for k, size in zip(replied, reply_sizes, strict=True):
            replies[k] = size
    lost: tuple[int, ...] = ()
    if len(replied) < len(call.to):
        arrived = set(replied)
        lost = tuple(client for k, client in enumerate(call.to) if k not in arrived)
    down = tuple(request_sizes)
    up = tuple(replies)
    if call.verb == RELAY:
        # the local parameter server sends the query, up to the server
        down = tuple(replies)
        up = tuple(request_sizes)
    return Entry(
        method=call.method,
        verb=call.verb,
        round=call.round,
        step=call.step,
        to=call.to,
        lost=lost,
        down=down,
        up=up,
        asker=call.asker,
        refused=tuple(sorted(answer.refused.items())),
        without_release=answer.without_release,
    )


def load_entries(folder: Path) -> list[Entry]:
    """Return the entries written in a folder.

    A last line that a kill has cut short is left out.

    Args:
        folder: the folder `transcript` of a run folder.
    """
    path = folder / INDEX
    data = b""
    if path.is_file():
        data = atomic_files.read(path)
    return manifest.read_lines(path, data, _entry)


def _as_json(entry: Entry) -> dict[str, Any]:
    """Return an entry as a line of the index has it."""
    content = dict(vars(entry))
    for name in ("refused", "without_release"):  # of few runs
        if not content[name]:
            del content[name]
    return content


def _entry(line: str) -> Entry:
    """Return the entry of a line of the index."""
    return Entry(**_with_tuples(json.loads(line)))


def _renamed(
    frame: ObservedMessage, label_of: Mapping[Party, Party], observers: Collection[Party]
) -> ObservedMessage:
    """Return a frame with a label in place of its client, unless the client observes itself.

    Args:
        frame: of a call.
        label_of: label of each recipient of the call.
        observers: the parties that observe.
    """
    changes = {}
    for name in ("sender", "receiver"):
        party = getattr(frame, name)
        if party not in observers:
            changes[name] = label_of.get(party, party)
    return replace(frame, **changes)


def _label_in(label_of: Mapping[Party, Party], frame: ObservedMessage) -> int:
    """Return the number of the label of the client that sent or received a frame."""
    for party in (frame.sender, frame.receiver):
        label = label_of.get(party, party)
        if label.kind == "anonymous":
            assert label.index is not None
            return label.index
    raise AssertionError("a frame without a client")


def _content_files(folder: Path) -> list[Path]:
    """Return the files of contents in a folder; files of other names are not the transcript's."""
    return [path for path in folder.glob("*.safetensors") if OWN.has(PurePath(path.name))]


def _fields_of(message: Any) -> dict[str, Any]:
    """Return a message's fields as a tree that `pack` accepts."""
    fields = {}
    for name, value in vars(message).items():
        if isinstance(value, Shared | Rows | Picks):
            fields[name] = vars(value)
        else:
            fields[name] = value
    return fields


def _in_main_memory(batch: B, field: str) -> B:
    """Return a call or a response with its message in main memory.

    Args:
        batch: the call or response.
        field: name of the field with the message.
    """
    message = getattr(batch, field)
    if message is None:
        return batch
    in_memory = placed(message, (), torch.device("cpu"))
    if in_memory is message:
        return batch
    return replace(batch, **{field: in_memory})


def _rebuilt(message: type, fields: dict[str, Any]) -> Any:
    """Return a message from its fields; inverse of `_fields_of`.

    Args:
        message: class of the message.
        fields: its fields by name.

    Raises:
        RunFolderError: a field is missing, as another version's messages have others.
    """
    values: dict[str, Any] = {}
    for name, field_kind in kinds(message).items():
        if name not in fields:
            raise RunFolderError(
                f"a {message.__name__} of this transcript has no {name}: use the version of "
                "securecluster that wrote it"
            )
        value = fields[name]
        if isinstance(value, dict):  # the attributes of Shared, Rows or Picks
            value = field_kind(**_with_tuples(value))
        values[name] = value
    return message(**values)


def _with_tuples(fields: dict[str, Any]) -> dict[str, Any]:
    """Return fields with tuples in place of lists, which JSON has instead of tuples."""
    return {name: _tuples(value) for name, value in fields.items()}


def _tuples(value: Any) -> Any:
    if isinstance(value, list):
        return tuple(_tuples(item) for item in value)
    return value
