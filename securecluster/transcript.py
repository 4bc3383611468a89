"""What was sent: who, to whom, how many bytes and, where it is kept, what. The raw material of byte counts, audits and replay."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from securecluster import files, wire
from securecluster.backend import torch
from securecluster.errors import RunFolderError, UsageError
from securecluster.messages import RELAY, Answer, Call, Picks, Rows, Shared, kinds, placed, reply_header, select
from securecluster.parties import SERVER, WIRE, Party, client, lps
from securecluster.state import pack, unpack

B = TypeVar("B", Call, Answer)
MODES = ("none", "sizes", "full")


@dataclass(frozen=True)
class Entry:
    """One call: `down[k]` and `up[k]` are the bytes of the frames to `to[k]` and back (0: no reply came).

    Of a relay `to` are local parameter servers, `up` their frames to the server and `down` its replies.
    """

    method: str
    verb: str
    round: int
    step: int
    to: tuple[int, ...]
    lost: tuple[int, ...]
    down: tuple[int, ...]
    up: tuple[int, ...]
    asker: tuple[int, ...] = ()  # the local parameter server that asked each of `to`; empty: the server did

    def ends(self, k: int) -> tuple[Party, Party]:
        """Who asked `to[k]`, and who that is."""
        if self.verb == RELAY:
            return SERVER, lps(self.to[k])
        return lps(self.asker[k]) if self.asker else SERVER, client(self.to[k])


@dataclass(frozen=True)
class Seen:
    """One frame as a party saw it: `content` is its message (a batch of one), or None to a party that sees only its length."""

    sender: Party
    receiver: Party
    method: str
    round: int
    step: int
    bytes: int
    content: Any


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
    """

    def __init__(self, mode: str, folder: Path | None = None, messages: Callable[[str], tuple[type, type]] | None = None) -> None:
        self.mode = mode
        self.entries: list[Entry] = []
        self.count = 0
        self._folder = folder
        self._messages = messages
        self._kept: list[tuple[Call, Answer]] = []
        self._totals: dict[str, Counter[str]] = defaultdict(Counter)

    def record(self, call: Call, answer: Answer) -> None:
        """Append one call."""
        place = {i: k for k, i in enumerate(answer.ids)}
        headers = [call.header(k) for k in range(len(call.to))]
        down = tuple(wire.sizes(headers, call.query, range(len(call.to))))
        back = [reply_header(header) for header, i in zip(headers, call.to, strict=True) if i in place]
        came = iter(wire.sizes(back, answer.reply, [place[i] for i in call.to if i in place]) if back else ())
        up = tuple(next(came) if i in place else 0 for i in call.to)
        lost = tuple(i for i in call.to if i not in place)
        relay = call.verb == RELAY
        if relay:
            down, up = up, down
        entry = Entry(call.method, call.verb, call.round, call.step, call.to, lost, down, up, call.asker)
        self._totals[call.method].update({"servers": sum(up) + sum(down)} if relay else {"up": sum(up), "down": sum(down)})
        if self.mode == "full":
            self._keep(call, answer)
        if self.mode != "none":
            self.entries.append(entry)
            if self._folder:
                files.append_line(self._folder / "index.jsonl", json.dumps(asdict(entry)))
        self.count += 1

    def _keep(self, call: Call, answer: Answer) -> None:
        if self._folder is None:
            self._kept.append((_at_rest(call, "query"), _at_rest(answer, "reply")))
            return
        head = {k: v for k, v in vars(call).items() if k != "query"}
        batch = _Batch(head, _plain(call.query), list(answer.ids), None if answer.reply is None else _plain(answer.reply))
        files.write_atomic(self._folder / f"{self.count:06d}.safetensors", pack(batch))

    def totals(self) -> dict[str, Any]:
        """Bytes sent so far: `up`, `down`, `servers` (between server-side parties) and `by_message`."""
        both = ("up", "down")
        by = {name: {k: c[k] for k in (*both, "servers") if k in both or c[k]} for name, c in sorted(self._totals.items())}
        return {**{k: sum(c[k] for c in self._totals.values()) for k in (*both, "servers")}, "by_message": by}

    def content(self, position: int) -> tuple[Call, Answer]:
        """The call and answer of one entry, from memory or disk."""
        if self.mode != "full":
            raise UsageError(f"this transcript holds {self.mode} only: run with --transcript full to read its contents")
        if self._folder is None:
            return self._kept[position]
        assert self._messages is not None
        batch = unpack(files.read(self._folder / f"{position:06d}.safetensors"), _Batch)
        query, reply = self._messages(batch.call["method"])
        head: dict[str, Any] = {k: _tuples(v) for k, v in batch.call.items()}
        answered = None if batch.reply is None else _rebuild(reply, batch.reply)
        return Call(**head, query=_rebuild(query, batch.query)), Answer(tuple(batch.ids), answered)

    def seen_by(self, parties: Iterable[Party]) -> Iterator[Seen]:
        """The frames that a set of colluding parties saw, in order; `WIRE` sees lengths and timing, never contents."""
        who = set(parties)
        for position, entry in enumerate(self.entries):
            ends = [entry.ends(k) for k in range(len(entry.to))]
            inside = any(who & set(both) for both in ends)
            call, answer = self.content(position) if inside else (None, None)
            for k, (i, (asker, asked)) in enumerate(zip(entry.to, ends, strict=True)):
                readable = bool(who & {asker, asked})
                if not readable and WIRE not in who:
                    continue
                query = select(call.query, [k]) if readable and call else None
                reply = select(answer.reply, [answer.ids.index(i)]) if readable and answer and i not in entry.lost else None
                down = Seen(asker, asked, entry.method, entry.round, entry.step, entry.down[k], query)
                up = Seen(asked, asker, entry.method, entry.round, entry.step, entry.up[k], reply)
                if entry.verb == RELAY:  # the local parameter server begins
                    yield from (replace(up, content=query), replace(down, content=reply))
                else:
                    yield from (down,) if i in entry.lost else (down, up)

    def snapshot(self) -> tuple[int, dict[str, dict[str, int]]]:
        """What a checkpoint keeps of the transcript: how many calls, and the byte totals."""
        return self.count, {name: dict(c) for name, c in self._totals.items()}

    def rewind(self, count: int, totals: dict[str, dict[str, int]]) -> None:
        """Back to a checkpoint: calls recorded after it are forgotten (the resumed run makes them again)."""
        self.count = count
        self._totals = defaultdict(Counter, {name: Counter(c) for name, c in totals.items()})
        self.entries, self._kept = self.entries[:count], self._kept[:count]
        if self.mode == "none" or self._folder is None:
            return
        self.entries = load_entries(self._folder)[:count]
        if len(self.entries) < count:
            raise RunFolderError(f"{self._folder} lost some of its {count} entries: start the run anew")
        text = "".join(json.dumps(asdict(e)) + "\n" for e in self.entries)
        files.write_atomic(self._folder / "index.jsonl", text.encode())
        for stale in self._folder.glob("*.safetensors"):
            if int(stale.stem) >= count:
                stale.unlink()


def load_entries(folder: Path) -> list[Entry]:
    """The entries written in a folder; a last line cut short by a kill is left out."""
    path = folder / "index.jsonl"
    lines = files.read(path).decode().splitlines(keepends=True) if path.exists() else []
    try:
        return [Entry(**_fields(json.loads(line))) for line in lines if line.endswith("\n")]
    except (ValueError, TypeError, AttributeError) as error:
        raise RunFolderError(f"{path} does not parse ({type(error).__name__}): start the run anew") from None


def _plain(message: Any) -> dict[str, Any]:
    """A message's fields as a tree that `pack` takes."""
    return {k: vars(v) if isinstance(v, Shared | Rows | Picks) else v for k, v in vars(message).items()}


def _at_rest(batch: B, field: str) -> B:
    """Return a call or an answer whose message lies in main memory: a device has no room for all messages of a run."""
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
