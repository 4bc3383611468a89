"""Folders with what an app of others sent and received: what is in them, and how it is kept whole.

| file | holds |
| --- | --- |
| `recording.json` | app, facts, marks of the next two files, and what is under way |
| `nodes.jsonl` | a line for each node, in the order of the clients' numbers |
| `exchanges.jsonl` | a line for each exchange, and for each gap |
| `transcript/` | the arrays of exchanges that have updates |

An exchange is written in this order: its nodes, its arrays, their entry in the transcript's index,
its line, which has the mark of that index, and `recording.json`. Each line has a digest of all
before it. So what a kill leaves is told from damage: whatever lies behind the last line is of an
exchange that was not written to its end. It is removed when the recording goes on, and a gap says
so. Anything else that differs from what was written is refused.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, NamedTuple

from securecluster.core import atomic_files, folder_lock, manifest, serialization
from securecluster.core.lazy_torch import torch
from securecluster.core.manifest import EMPTY, Mark
from securecluster.core.sealed_log import SealedLog
from securecluster.errors import RunFolderError, UsageError
from securecluster.messaging.bounds import Real
from securecluster.messaging.messages import Call, Response, Rows
from securecluster.messaging.transcript import INDEX, Entry, Transcript
from securecluster.messaging.transcript import OWN as FRAMES
from securecluster.recordings.recorded_lines import (
    ExchangeLine,
    Gap,
    Head,
    NodeLine,
    Rounds,
    updaters,
)
from securecluster.recordings.recorded_messages import TRAIN, Exchange, Layout, action_of
from securecluster.recordings.training_facts import TrainingFacts

SCHEMA = 2
FACTS = "recording.json"
NODES = "nodes.jsonl"
EXCHANGES = "exchanges.jsonl"
# what may be removed of a recording: what a kill left half-written
OWN = atomic_files.Own((FACTS,), re.compile("|".join(map(re.escape, (FACTS, NODES, EXCHANGES)))))
TRANSCRIPT = "transcript"
GATHER = "gather"
ALL = "all"  # in place of a client's number: a note about the exchange
KILLED = "its recorder ended before it was written"


class Written(NamedTuple):
    """Position of an exchange.

    Args:
        round: of the exchange.
        position: of its arrays in the transcript; None if there are none.
    """

    round: int
    position: int | None


@dataclass(frozen=True)
class SentModel:
    """Query of an app's "train".

    Args:
        model: arrays that the server sent, as one vector, (b, d).
    """

    model: Annotated[Rows, Real(("dimension",))]


@dataclass(frozen=True)
class Update:
    """Reply to an app's "train".

    Args:
        delta: arrays of the reply minus those that were sent, (b, d).
        size: numbers of samples, (b,); None where a client sends none.
    """

    delta: Annotated[Rows, Real(("dimension",))]
    size: Annotated[Rows | None, Real(low=0.0)]


def message_types(method: str) -> tuple[type, type]:
    """Return the classes of a recorded query and of its reply.

    Args:
        method: any type of message.
    """
    return SentModel, Update


@dataclass
class Recording:
    """Folder of what an app sent and received.

    Args:
        folder: of the recording.
        app: name of the app, for reports.
        facts: that were declared.
        nodes: ids of Flower's nodes in the order in which they appeared: the clients.
        exchanges: a line for each exchange, as `ExchangeLine` has it.
        gaps: exchanges that were not recorded.
        transcript: the arrays of those that could be read.
        partitions: by node, the part of a simulation's data that it has, where it is known.
        unfinished: exchanges that were under way when the folder was read, and may be lost.
        is_open: whether its recorder has not ended, or was killed.
    """

    folder: Path
    app: str
    facts: TrainingFacts
    nodes: list[int] = field(default_factory=list)
    exchanges: list[dict[str, Any]] = field(default_factory=list)
    gaps: list[Gap] = field(default_factory=list)
    transcript: Transcript = field(default_factory=lambda: Transcript("none"), repr=False)
    partitions: dict[int, int] = field(default_factory=dict)
    unfinished: list[Gap] = field(default_factory=list)
    is_open: bool = False

    def __post_init__(self) -> None:
        self._nodes = SealedLog(self.folder / NODES)
        self._lines = SealedLog(self.folder / EXCHANGES)
        self._rounds: dict[str, Rounds] = {}

    @classmethod
    def begin(cls, folder: Path, app: str, facts: TrainingFacts, anew: bool = False) -> Recording:
        """Return a new recording, or that of the folder, which goes on.

        Args:
            folder: of which this process holds the lock; empty, or of a recording of the same app
                with the same facts.
            app: name of the app.
            facts: of its training.
            anew: whether this process has written it before: what was under way then it knows.

        Raises:
            UsageError: another recording, or something else, is in the folder.
            RunFolderError: the recording is damaged, or the disk refuses.
        """
        if is_recording(folder):
            existing = cls.read(folder)
            if (existing.app, existing.facts) != (app, facts):
                raise UsageError(
                    f"{folder} is a recording of another app, or with other facts: give another "
                    "folder"
                )
            existing._go_on(anew)
            return existing
        if not _is_vacant(folder):
            raise UsageError(f"{folder} is not empty, and no recording: give another folder")
        atomic_files.remove_half_written(folder, OWN)
        recording = cls(folder, app, facts)
        recording.write_head([])
        atomic_files.make_private_folder(folder / TRANSCRIPT)
        recording.transcript = recording._transcript(durable=True)
        return recording

    @classmethod
    def read(cls, folder: Path | str) -> Recording:
        """Return the recording in a folder, also of an app that was killed.

        Args:
            folder: of a recording.

        Raises:
            RunFolderError: there is none, or it differs from what was written.
        """
        path = Path(folder)
        while True:
            if not is_recording(path):
                raise RunFolderError(f"{path} is no recording of an app: it has no {FACTS}")
            data = atomic_files.read(path / FACTS)
            try:
                return cls._read(path, _head(path / FACTS, data))
            except RunFolderError:
                # whoever records has gone on in between
                if not is_recording(path) or atomic_files.read(path / FACTS) == data:
                    raise

    @classmethod
    def _read(cls, path: Path, head: Head) -> Recording:
        """Return the recording of a folder.

        Args:
            path: of the folder.
            head: of the recording.
        """
        try:
            facts = TrainingFacts(**head["facts"])
        except (TypeError, UsageError):
            raise _damaged_head(path / FACTS) from None
        recording = cls(path, head["app"], facts)
        contents, later = recording._lines.read(Mark(**head["exchanges"]))
        # after the lines, whose nodes were written before them
        recording._read_nodes(Mark(**head["nodes"]))
        recording._take_lines(contents)
        recording._read_transcript()
        recording.is_open = head["under_way"] is not None
        behind = contents[len(contents) - later :]
        written = Counter((line["kind"], line["told"]) for line in behind if not line.get("late"))
        for gap in head["under_way"] or []:
            key = (gap["kind"], gap["told"])
            # one may have been written before the head could say so
            written[key] -= 1
            if written[key] < 0:
                recording.unfinished.append(gap)
        if recording._left_behind() and not recording.unfinished:
            recording.unfinished.append(Gap(gap=KILLED, kind=TRAIN, told="", messages=0))
        return recording

    @property
    def names(self) -> list[str]:
        """Return the names of the clients: the ids of their nodes."""
        return [str(node) for node in self.nodes]

    @property
    def layout(self) -> Layout:
        """Return name and shape of the arrays of the first exchange that has any."""
        for exchange in self.exchanges:
            if exchange["layout"]:
                return tuple((name, tuple(shape)) for name, shape in exchange["layout"])
        return ()

    def check_begun(self) -> None:
        """Raise UsageError if there is nothing in it."""
        if self.exchanges:
            return
        if self.gaps or self.unfinished:
            raise UsageError(
                f"{self.folder} is a recording of gaps alone, because its files could not be "
                "written: let the app run again"
            )
        raise UsageError(f"{self.folder} is a recording without any message: let the app run first")

    def check_arrays(self) -> None:
        """Raise RunFolderError if the arrays of an exchange differ from what was written."""
        for position, entry in enumerate(self.transcript.entries):
            path = self._frame(position)
            if Mark.of_file(path).sha256 != entry.sha256:
                raise manifest.damaged(path)

    # writing, by whoever holds the lock of the folder

    def record(self, exchange: Exchange) -> Written:
        """Write an exchange down, and return where it is.

        Args:
            exchange: with all replies that came.
        """
        self.number(exchange.sent)
        numbers = self._numbers()
        order = sorted(exchange.sent, key=numbers.__getitem__)
        layout, rows, noted = exchange.rows(order)
        notes = {str(numbers[node]): note for node, note in noted.items()}
        first_layout = self.layout
        changed = bool(layout and first_layout and layout != first_layout)
        if changed:
            notes[ALL] = "the arrays have other names or shapes than in the first exchange"
        is_training = action_of(exchange.kind) == TRAIN
        line: dict[str, Any] = {
            "kind": exchange.kind,
            "round": 0,
            "told": exchange.told,
            "late": exchange.late is not None,
            "to": [numbers[node] for node in order],
            "down": [exchange.sent[node].bytes for node in order],
            "up": [_bytes(exchange, node) for node in order],
            "layout": _as_json(layout if changed or not first_layout else ()),
            "updates": len(rows) if is_training else 0,
            "average": exchange.average,
            "metrics": {},
            "notes": notes,
        }
        for node in order:
            if node in exchange.replies:
                line["metrics"][str(numbers[node])] = dict(exchange.replies[node].metrics)
        line["round"] = exchange.late
        if exchange.late is None:
            line["round"] = self._rounds_of(line).of(*_signs(line))
        position = None
        if line["updates"]:
            position = self.transcript.count
            self._store(exchange, line["round"], layout, rows)
        line["index"] = asdict(self.transcript.snapshot().index)
        self._lines.append(line)
        self._take(line)
        return Written(line["round"], position)

    def note(self, gap: Gap) -> None:
        """Write down that an exchange was not recorded.

        Args:
            gap: what is known of it.
        """
        self._lines.append(gap)
        self.gaps.append(gap)

    def number(self, nodes: Iterable[int], partitions: Mapping[int, int] | None = None) -> None:
        """Give nodes that are new the next numbers.

        Args:
            nodes: their ids.
            partitions: by id, the part of a simulation's data that a node has.
        """
        known_nodes = set(self.nodes)
        for node in sorted(nodes):
            if node in known_nodes:
                continue
            line = NodeLine(node=node)
            if partitions and node in partitions:
                line["partition"] = self.partitions[node] = partitions[node]
            self._nodes.append(line)
            self.nodes.append(node)
            known_nodes.add(node)
        self.transcript.names = tuple(self.names)

    def write_head(self, under_way: Sequence[Gap] | None) -> None:
        """Write what tells this recording's end.

        Args:
            under_way: exchanges that are not recorded yet; None if nobody records any longer.
        """
        content = {
            "schema": SCHEMA,
            "app": self.app,
            "facts": self.facts.known,
            "nodes": asdict(self._nodes.mark),
            "exchanges": asdict(self._lines.mark),
            "under_way": None if under_way is None else list(under_way),
        }
        data = manifest.with_digest(content)
        atomic_files.write_atomic(self.folder / FACTS, data, atomic_files.OWNER, durable=True)

    @property
    def last_seal(self) -> str:
        """Return the digest of the last line of exchanges and gaps."""
        return self._lines.last_seal

    @property
    def unsure_seal(self) -> str:
        """Return the digest of a line that may be there, although writing it failed."""
        return self._lines.unsure_seal

    def _go_on(self, anew: bool) -> None:
        """Remove what a kill has left, and get ready to write.

        Args:
            anew: as in `begin`.
        """
        atomic_files.remove_half_written(self.folder, OWN)
        atomic_files.make_private_folder(self.folder / TRANSCRIPT)
        atomic_files.remove_half_written(self.folder / TRANSCRIPT, FRAMES)
        self._nodes.go_on()
        self._lines.go_on()
        index = self._extent
        self.transcript = self._transcript(durable=True)
        self.transcript.rewind(replace(self.transcript.snapshot(), index=index))
        if not anew:
            for gap in self.unfinished:
                self.note(gap)
        self.unfinished = []

    def _store(
        self, exchange: Exchange, round: int, layout: Layout, rows: Mapping[int, torch.Tensor]
    ) -> None:
        """Add an exchange of arrays to the transcript, of the clients that were sent the same.

        Args:
            exchange: whose messages tell the models.
            round: of the exchange.
            layout: of the arrays.
            rows: updates by node.
        """
        number_of = self._numbers()
        order = sorted(exchange.sent, key=number_of.__getitem__)
        recipients = [node for node in order if exchange.sent[node].vector.layout == layout]
        numbers = tuple(number_of[node] for node in recipients)
        call = Call(
            config=self.app,
            method=_method(exchange.kind),
            verb=GATHER,
            round=round,
            step=self.transcript.count + 1,
            to=numbers,
            query=SentModel(_models([exchange.sent[node].vector.values for node in recipients])),
            members=(1,) * len(recipients),
        )
        replied = [node for node in recipients if node in rows]
        sizes = [exchange.replies[node].size for node in replied]
        size = None
        if None not in sizes:
            size = Rows(torch.tensor(sizes))
        reply = Update(Rows(torch.stack([rows[node] for node in replied])), size)
        ids = tuple(number_of[node] for node in replied)
        self.transcript.record(call, Response(ids, reply))

    # reading

    def _read_nodes(self, mark: Mark) -> None:
        """Read the nodes, of which the head tells the mark."""
        contents, _ = self._nodes.read(mark)
        for content in contents:
            line = serialization.checked(self._nodes.path, content, NodeLine)
            self.nodes.append(line["node"])
            if "partition" in line:
                self.partitions[line["node"]] = line["partition"]
        if len(set(self.nodes)) < len(self.nodes):
            raise manifest.damaged(self._nodes.path)

    def _take_lines(self, contents: Sequence[dict[str, Any]]) -> None:
        """Take in the exchanges and gaps that lines tell."""
        path = self._lines.path
        for content in contents:
            if "gap" in content:
                self.gaps.append(serialization.checked(path, content, Gap))
                continue
            serialization.checked(path, content, ExchangeLine)
            if not self._is_sound(content):
                raise manifest.damaged(path)
            self._take(content)

    def _is_sound(self, line: Mapping[str, Any]) -> bool:
        """Return whether an exchange is of clients of this recording."""
        to = line["to"]
        keys = {str(number) for number in to}
        return (
            len(to) == len(line["down"]) == len(line["up"]) == len(set(to))
            and all(0 <= number < len(self.nodes) for number in to)
            and all(count >= 0 for count in (*line["down"], *line["up"], line["round"]))
            and line["metrics"].keys() <= keys
            and line["notes"].keys() <= keys | {ALL}
            and 0 <= line["updates"] <= len(to)
        )

    def _take(self, line: dict[str, Any]) -> None:
        """Add the line of an exchange to those that are known."""
        self.exchanges.append(line)
        label, average, updates = _signs(line)
        # a late reply belongs to a round that is over
        if not line["late"]:
            self._rounds_of(line).learn(line["round"], label, average, updates)

    def _rounds_of(self, line: Mapping[str, Any]) -> Rounds:
        """Return the rounds of what an exchange is about."""
        return self._rounds.setdefault(action_of(line["kind"]), Rounds())

    def _read_transcript(self) -> None:
        """Read the transcript, and compare it with the exchanges.

        Raises:
            RunFolderError: it is of other exchanges.
        """
        path = self.folder / TRANSCRIPT / INDEX
        data = b""
        if path.is_file():
            data = atomic_files.read(path)
        elif os.path.lexists(path):
            raise manifest.damaged(path)
        extent = self._extent
        if Mark.of(data[: extent.size]) != extent:
            raise manifest.damaged(path) if data else manifest.missing(path)
        self.transcript = self._transcript(durable=False)
        stored = [line for line in self.exchanges if line["updates"]]
        entries = self.transcript.entries
        if len(entries) != len(stored) or not all(map(_is_of, entries, stored)):
            raise manifest.damaged(path)
        for position in range(len(entries)):
            frame = self._frame(position)
            if not frame.is_file():
                raise manifest.missing(frame)
        # a kill leaves at most one entry more, and its arrays were there before
        later = Transcript.read("full", self.folder / TRANSCRIPT, message_types).count
        if later > len(entries) + min(1, self._left_behind()):
            raise manifest.damaged(path)

    def _transcript(self, durable: bool) -> Transcript:
        """Return the transcript of the exchanges that are known."""
        count = sum(line["updates"] > 0 for line in self.exchanges)
        folder = self.folder / TRANSCRIPT
        return Transcript.read("full", folder, message_types, self.names, durable, count)

    def _left_behind(self) -> int:
        """Return the number of files of arrays that belong to no exchange."""
        if not (self.folder / TRANSCRIPT).is_dir():
            return 0
        return len(self.transcript.surplus())

    def _frame(self, position: int) -> Path:
        """Return the file with the arrays of an entry of the transcript."""
        return self.folder / TRANSCRIPT / f"{position:06d}.safetensors"

    @property
    def _extent(self) -> Mark:
        """Return the mark of the transcript's index after the last exchange."""
        if not self.exchanges:
            return EMPTY
        return Mark(**self.exchanges[-1]["index"])

    def _numbers(self) -> dict[int, int]:
        """Return the number of each node: a search of the list costs in proportion to it."""
        return {node: number for number, node in enumerate(self.nodes)}


def is_recording(folder: Path) -> bool:
    """Return True if a folder is the recording of an app.

    Args:
        folder: any path.
    """
    with atomic_files.as_run_folder_error(folder, "read"):
        return (folder / FACTS).is_file()


def partitions_in(folder: Path) -> dict[int, int]:
    """Return by node the part of the data that it has, as recordings of clients tell.

    Args:
        folder: that `recorded_client` was given.

    Raises:
        RunFolderError: one of them is damaged.
    """
    partitions: dict[int, int] = {}
    for path in sorted(folder.glob(f"*/{FACTS}")):
        partitions |= Recording.read(path.parent).partitions
    return partitions


def _head(path: Path, data: bytes) -> Head:
    """Return the content of `recording.json`.

    Args:
        path: of the file.
        data: its bytes.

    Raises:
        RunFolderError: it differs from what was written, or is of another version.
    """
    content = serialization.parsed(path, data)
    if isinstance(content, dict) and content.get("schema") == 1 and "facts" in content:
        raise RunFolderError(
            f"{path.parent} is a recording of an earlier version, which nothing guards against "
            "damage: record the app anew, into another folder"
        )
    try:
        checked = manifest.content_with_digest(path, data)
    except RunFolderError:
        raise _damaged_head(path) from None
    if checked.get("schema") != SCHEMA:
        raise RunFolderError(f"{path.parent} is a recording of another version")
    return serialization.checked(path, checked, Head)


def _damaged_head(path: Path) -> RunFolderError:
    return RunFolderError(
        f"{path} is damaged: restore it from a copy, or record the app anew into another folder"
    )


def _is_vacant(folder: Path) -> bool:
    """Return whether a folder has nothing that anybody would miss."""
    names = {path.name for path in folder.iterdir()} - {folder_lock.NAME}
    # what a kill leaves of a recording that was about to begin
    return all(name != FACTS == atomic_files.final_name(name) for name in names)


def _signs(line: Mapping[str, Any]) -> tuple[str, str, set[tuple[str, int]]]:
    """Return what tells the round of an exchange: its name, the average, and who sent updates."""
    message_type = line["kind"]
    if action_of(message_type) == TRAIN:
        answered = updaters(line)
    else:
        answered = {number for number in line["to"] if str(number) in line["metrics"]}
    return line["told"], line["average"], {(message_type, number) for number in answered}


def _is_of(entry: Entry, line: Mapping[str, Any]) -> bool:
    """Return whether an entry of the transcript is that of an exchange."""
    return (
        (entry.method, entry.round) == (_method(line["kind"]), line["round"])
        and set(entry.to) <= set(line["to"])
        and len(entry.to) - len(entry.lost) == line["updates"]
    )


def _method(message_type: str) -> str:
    return message_type.replace(".", "_")


def _bytes(exchange: Exchange, node: int) -> int:
    """Return the bytes of a node's reply; 0 if there is none."""
    return exchange.replies[node].bytes if node in exchange.replies else 0


def _as_json(layout: Layout) -> list[Any]:
    """Return a layout as JSON has it."""
    return [[name, list(shape)] for name, shape in layout]


def _models(vectors: Sequence[Any]) -> Rows:
    """Return the models of some clients, which are kept once where they are the same."""
    if all(vector is vectors[0] for vector in vectors):
        return Rows(vectors[0].unsqueeze(0), (0,) * len(vectors))
    return Rows(torch.stack(list(vectors)))
