"""What was sent: who, to whom, how many bytes and, where it is kept, what. The raw material of byte
counts, audits and replay.
"""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

from securecluster.core import atomic_files, manifest
from securecluster.core.lazy_torch import torch
from securecluster.core.manifest import EMPTY, Log, Mark
from securecluster.core.serialization import pack, unpack
from securecluster.errors import UsageError
from securecluster.messaging import wire
from securecluster.messaging.messages import (
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
from securecluster.messaging.parties import SERVER, WIRE, Party, Present, client, lps

B = TypeVar("B", Call, Response)
MODES = ("none", "sizes", "full")
INDEX = "index.jsonl"


@dataclass(frozen=True)
class Entry:
    """One call: `down[k]` and `up[k]` are the bytes of the frames to `to[k]` and back (0: no reply
    came).

    Of a relay `to` are local parameter servers, `up` their frames to the server and `down` its
    replies.
    """

    method: str
    verb: str
    round: int
    step: int
    to: tuple[int, ...]
    lost: tuple[int, ...]
    down: tuple[int, ...]
    up: tuple[int, ...]
    # the local parameter server that asked each of `to`; empty: the server did
    asker: tuple[int, ...] = ()
    # of the file with the contents, where they are kept in one
    sha256: str = field(default="", compare=False)

    def ends(self, k: int) -> tuple[Party, Party]:
        """Who asked `to[k]`, and who that is."""
        if self.verb == RELAY:
            return SERVER, lps(self.to[k])
        return lps(self.asker[k]) if self.asker else SERVER, client(self.to[k])


@dataclass(frozen=True)
class ObservedMessage:
    """One frame as a party saw it: `content` is its message (a batch of one), or None to a party
    that sees only its length.
    """

    sender: Party
    receiver: Party
    method: str
    round: int
    step: int
    bytes: int
    content: Any


@dataclass
class Recording:
    """Position in a transcript, which a checkpoint keeps."""

    count: int = 0  # calls
    totals: dict[str, dict[str, int]] = field(default_factory=dict)  # bytes by method and direction
    index: Mark = EMPTY  # of index.jsonl


@dataclass
class _Batch:
    """A call and its answer, flattened for one file."""

    call: dict[str, Any]
    query: dict[str, Any]
    ids: list[int]
    reply: dict[str, Any] | None


class Transcript:
    """Frames of a run in the order they were sent.

    Args:
        mode: `sizes` keeps lengths, `full` keeps contents too, `none` keeps running totals only.
        folder: where the entries are written, one file a call; None keeps them in memory.
        messages: method name -> (query class, reply class), to read contents back.
        names: the clients' names in the order of their numbers, for `seen_by`; empty where they are
            not known.
    """

    def __init__(
        self,
        mode: str,
        folder: Path | None = None,
        messages: Callable[[str], tuple[type, type]] | None = None,
        names: Sequence[str] = (),
    ) -> None:
        self.mode = mode
        self.names = tuple(names)
        self.entries: list[Entry] = []
        self.count = 0
        self._folder = folder
        self._index = Log(folder / INDEX, atomic_files.OWNER) if folder and mode != "none" else None
        self._messages = messages
        self._kept: list[tuple[Call, Response]] = []
        self._totals: dict[str, Counter[str]] = defaultdict(Counter)

    @classmethod
    def open(
        cls,
        mode: str,
        folder: Path,
        messages: Callable[[str], tuple[type, type]],
        names: Sequence[str] = (),
    ) -> Transcript:
        """Return the transcript that a finished run left in a folder, to be read.

        Args:
            mode: that of the run.
            folder: the folder `transcript` of a run folder.
            messages: method name -> (query class, reply class).
            names: of the clients, in their order.

        Raises:
            RunFolderError: its index does not parse.
        """
        found = cls(mode, folder, messages, names)
        for entry in load_entries(folder):
            found._count(entry)
        return found

    def record(self, call: Call, answer: Response) -> None:
        """Append one call."""
        entry = entry_of(call, answer)
        if self.mode == "full":
            entry = replace(entry, sha256=self._keep(call, answer))
        if self._index:
            self._index.append([json.dumps(asdict(entry))])
        self._count(entry)

    def _count(self, entry: Entry) -> None:
        up, down = sum(entry.up), sum(entry.down)
        sent = {"servers": up + down} if entry.verb == RELAY else {"up": up, "down": down}
        self._totals[entry.method].update(sent)
        if self.mode != "none":
            self.entries.append(entry)
        self.count += 1

    def _keep(self, call: Call, answer: Response) -> str:
        """Keep the contents of a call; return the digest of the file they are in, if any."""
        if self._folder is None:
            self._kept.append((_at_rest(call, "query"), _at_rest(answer, "reply")))
            return ""
        head = {k: v for k, v in vars(call).items() if k != "query"}
        reply = None if answer.reply is None else _plain(answer.reply)
        data = pack(_Batch(head, _plain(call.query), list(answer.ids), reply))
        atomic_files.write_atomic(self._file(self.count), data, atomic_files.OWNER)
        return manifest.digest(data)

    def _file(self, position: int) -> Path:
        assert self._folder is not None
        return self._folder / f"{position:06d}.safetensors"

    def totals(self) -> dict[str, Any]:
        """Bytes sent so far: `up`, `down`, `servers` (between server-side parties) and
        `by_message`.
        """
        both = ("up", "down")
        by = {
            name: {k: c[k] for k in (*both, "servers") if k in both or c[k]}
            for name, c in sorted(self._totals.items())
        }
        return {
            **{k: sum(c[k] for c in self._totals.values()) for k in (*both, "servers")},
            "by_message": by,
        }

    def content(self, position: int) -> tuple[Call, Response]:
        """The call and answer of one entry, from memory or disk."""
        if self.mode != "full":
            raise UsageError(
                f"this transcript holds {self.mode} only: run with --transcript full to read its "
                "contents"
            )
        if self._folder is None:
            return self._kept[position]
        assert self._messages is not None
        path, entry = self._file(position), self.entries[position]
        if not path.is_file():
            raise manifest.missing(path)
        data = atomic_files.read(path)
        if manifest.digest(data) != entry.sha256:
            raise manifest.damaged(path)
        batch = unpack(data, _Batch)
        query, reply = self._messages(batch.call["method"])
        head: dict[str, Any] = {k: _tuples(v) for k, v in batch.call.items()}
        answered = None if batch.reply is None else _rebuild(reply, batch.reply)
        return Call(**head, query=_rebuild(query, batch.query)), Response(
            tuple(batch.ids), answered
        )

    def seen_by(
        self, parties: Party | int | str | Iterable[Party | int | str]
    ) -> Iterator[ObservedMessage]:
        """Return the frames that a set of colluding parties saw, in order.

        `WIRE` sees lengths and timing, never contents. A party that exists and took part in no call
        saw nothing.

        Args:
            parties: one party or several: SERVER, WIRE, `lps(k)`, a client's number or name,
                "server" or "wire".

        Raises:
            UsageError: nobody is named, or somebody who does not exist in this run, or no entries
                were kept.
        """
        if self.mode == "none":
            raise UsageError(
                "this transcript holds none only: run with --transcript sizes or full to see who "
                "saw what"
            )
        return self._seen(self._present().resolve(parties))

    def _present(self) -> Present:
        """Return who exists: clients with a name or in a call, and local parameter servers in a
        call.
        """
        relays = [entry for entry in self.entries if entry.verb == RELAY]
        asked = [entry for entry in self.entries if entry.verb != RELAY]
        clients = max((max(entry.to, default=-1) for entry in asked), default=-1) + 1
        relayed = max((max(entry.to, default=-1) for entry in relays), default=-1) + 1
        askers = max((max(entry.asker, default=-1) for entry in asked), default=-1) + 1
        return Present(max(clients, len(self.names)), max(relayed, askers), self.names)

    def _seen(self, observers: frozenset[Party]) -> Iterator[ObservedMessage]:
        """Yield what some parties saw, call by call."""
        for position, entry in enumerate(self.entries):
            ends = [entry.ends(k) for k in range(len(entry.to))]
            readable = [bool(observers & set(both)) for both in ends]
            content = self.content(position) if any(readable) else None
            for k in range(len(entry.to)):
                if readable[k]:
                    yield from self._exchanged(entry, k, content)
                elif WIRE in observers:
                    yield from self._exchanged(entry, k, None)

    def _exchanged(
        self, entry: Entry, k: int, content: tuple[Call, Response] | None
    ) -> Iterator[ObservedMessage]:
        """Yield the two frames between a call's k-th recipient and the party that asked it.

        Args:
            content: of the call; None where the observers see lengths alone.
        """
        asker, asked = entry.ends(k)
        recipient = entry.to[k]
        lost = recipient in entry.lost
        query = reply = None
        if content is not None:
            call, answer = content
            query = select(call.query, [k])
            if not lost:
                reply = select(answer.reply, [answer.ids.index(recipient)])
        about = (entry.method, entry.round, entry.step)
        down = ObservedMessage(asker, asked, *about, entry.down[k], query)
        up = ObservedMessage(asked, asker, *about, entry.up[k], reply)
        if entry.verb == RELAY:  # the local parameter server begins
            yield replace(up, content=query)
            yield replace(down, content=reply)
        else:
            yield down
            if not lost:
                yield up

    def surplus(self) -> list[Path]:
        """Return the files of contents in the folder that belong to no call."""
        assert self._folder is not None
        own = (
            {self._file(position) for position in range(self.count)}
            if self.mode == "full"
            else set()
        )
        return sorted(set(_contents(self._folder)) - own)

    def snapshot(self) -> Recording:
        """Return how far the transcript is, for a checkpoint."""
        totals = {name: dict(count) for name, count in self._totals.items()}
        return Recording(self.count, totals, self._index.mark if self._index else EMPTY)

    def rewind(self, to: Recording) -> None:
        """Go back to a checkpoint: calls recorded after it are forgotten (the resumed run makes
        them again).

        Raises:
            RunFolderError: the index differs from what it was then.
        """
        self.count = to.count
        self._totals = defaultdict(Counter, {name: Counter(c) for name, c in to.totals.items()})
        self.entries, self._kept = self.entries[: to.count], self._kept[: to.count]
        if self._index is None or self._folder is None:
            return
        self.entries = self._index.restore(to.index, _entry)
        for path in _contents(self._folder):
            if int(path.stem) >= to.count:
                path.unlink()


def entry_of(call: Call, answer: Response) -> Entry:
    """Return the index entry of a call and its answer, with the length of each frame in bytes."""
    place = {i: k for k, i in enumerate(answer.ids)}
    headers = [call.header(k) for k in range(len(call.to))]
    down = tuple(wire.sizes(headers, call.query, range(len(call.to))))
    back = [reply_header(header) for header, i in zip(headers, call.to, strict=True) if i in place]
    came = iter(
        wire.sizes(back, answer.reply, [place[i] for i in call.to if i in place]) if back else ()
    )
    up = tuple(next(came) if i in place else 0 for i in call.to)
    lost = tuple(i for i in call.to if i not in place)
    if call.verb == RELAY:  # the local parameter server asks, and the server answers
        down, up = up, down
    return Entry(call.method, call.verb, call.round, call.step, call.to, lost, down, up, call.asker)


def load_entries(folder: Path) -> list[Entry]:
    """The entries written in a folder; a last line cut short by a kill is left out."""
    path = folder / INDEX
    data = atomic_files.read(path) if path.is_file() else b""
    return manifest.read_lines(path, data, _entry)


def _entry(line: str) -> Entry:
    return Entry(**_fields(json.loads(line)))


def _contents(folder: Path) -> list[Path]:
    """Return the files of contents in a folder; files of other names are not ours."""
    return [path for path in folder.glob("*.safetensors") if path.stem.isdigit()]


def _plain(message: Any) -> dict[str, Any]:
    """A message's fields as a tree that `pack` takes."""
    return {
        k: vars(v) if isinstance(v, Shared | Rows | Picks) else v for k, v in vars(message).items()
    }


def _at_rest(batch: B, field: str) -> B:
    """Return a call or an answer whose message lies in main memory: a device has no room for all
    messages of a run.
    """
    message = getattr(batch, field)
    if message is None:
        return batch
    moved = placed(message, (), torch.device("cpu"))
    return batch if moved is message else replace(batch, **{field: moved})


def _rebuild(message: type, fields: dict[str, Any]) -> Any:
    values: dict[str, Any] = {}
    for name, kind in kinds(message).items():
        value = fields[name]
        if isinstance(value, dict):
            value = kind(**{k: _tuples(v) for k, v in value.items()})
        values[name] = value
    return message(**values)


def _fields(entry: dict[str, Any]) -> dict[str, Any]:
    return {k: _tuples(v) for k, v in entry.items()}


def _tuples(value: Any) -> Any:
    return tuple(_tuples(v) for v in value) if isinstance(value, list) else value
