"""A run's life: phases, rounds, checkpoints, history and the observer. The only code that writes
while a protocol runs.

A checkpoint is a folder that appears by one rename, so that a run killed at any moment resumes from
a whole one. Lists that only grow (the history, the ledger's events) are appended to files of lines
instead; the checkpoint holds their length and digest, so that it costs what a round added and not
what all rounds did. A resumed run cuts off the history that it makes again. Of the ledger nothing
is ever cut off: what was released stays released.
"""

from __future__ import annotations

import json
import re
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

from securecluster.core import atomic_files, manifest
from securecluster.core.manifest import EMPTY, Log, Mark
from securecluster.core.serialization import pack, unpack
from securecluster.errors import RunFolderError

A = TypeVar("A")
Line = dict[str, Any]


@dataclass(frozen=True)
class CheckpointPart:
    """A part of the run's state that lives elsewhere: its class, how to read it and how to put it
    back.
    """

    kind: type
    read: Callable[[], Any]
    restore: Callable[[Any], None]


@dataclass(frozen=True)
class Appended:
    """A list that only grows, kept as lines of JSON in a file of its own.

    Args:
        read: the list as it is now; items that were there stay as they were.
        restore: puts back what was there at the checkpoint.
        encode: makes JSON of an item; decode: the inverse.
        recall: takes what was appended after the checkpoint, which then stays in the list; without
            it that is cut off.
    """

    read: Callable[[], Sequence[Any]]
    restore: Callable[[list[Any]], None]
    encode: Callable[[Any], Any]
    decode: Callable[[Any], Any]
    recall: Callable[[list[Any]], None] | None = None


@dataclass
class _Clock:
    """Progress of a run, and how much of each log belongs to it."""

    number: int = 0
    rounds: dict[str, int] = field(default_factory=dict)
    seconds: float = 0.0
    logs: dict[str, Mark] = field(default_factory=dict)
    halfway: bool = False  # whether `commit` has ended the first part of the round that goes on
    notes: Line = field(default_factory=dict)  # of that round


class Run:
    """What a protocol's `run_server` sees of its run.

    Args:
        folder: where to checkpoint; None keeps everything in memory. A folder with a checkpoint is
            resumed.
        kept: what else belongs into a checkpoint, by name; names that start with "clients" are
            written for the owner's eyes only.
        appended: lists that only grow, by name: `NAME.jsonl` in the folder holds them.
        observe: the researcher's look at a loop's state after each round, outside the network; its
            numbers go into the history.
        report: called with each history line.
    """

    def __init__(
        self,
        folder: Path | None = None,
        kept: dict[str, CheckpointPart] | None = None,
        observe: Callable[[Any], Line] = lambda state: {},
        report: Callable[[Line], None] = lambda line: None,
        begin: Callable[[int], None] = lambda number: None,
        appended: dict[str, Appended] | None = None,
    ) -> None:
        self.history: list[Line] = []
        self._folder, self._kept = folder, kept or {}
        self._observe, self._report, self._begin = observe, report, begin
        history = Appended(lambda: self.history, self._restore_history, lambda line: line, dict)
        self._appended = {"history": history, **(appended or {})}
        self._logs: dict[str, Log] = {}
        self._logged = dict.fromkeys(self._appended, 0)
        self._parts: dict[str, bytes] = {}
        self._clock = _Clock()
        self._loop = ""  # the part of the loop that goes on
        self._since = time.monotonic()
        self.resumed = False
        if folder is not None:
            self._load(folder)

    @property
    def seconds(self) -> float:
        """Wall time spent on this run, all its resumptions together."""
        return self._clock.seconds + time.monotonic() - self._since

    def note(self, **values: Any) -> None:
        """Put what the server knows into this round's history line."""
        self._clock.notes |= values

    def once(self, name: str, make: Callable[[], A], kind: type[A]) -> A:
        """A phase: made once, its result (a dataclass tree) kept in every later checkpoint."""
        part = f"phase-{name}"
        if part not in self._parts:
            self._parts[part] = pack(make())
            self._checkpoint()
        return unpack(self._parts[part], kind)

    def rounds(self, name: str, state: Any, total: int) -> Iterator[int]:
        """Rounds 1 … `total` of a loop over `state` (a dataclass, changed in place); after each:
        observer, history, checkpoint.

        What follows the loop belongs to round `total` + 1.
        """
        part = self._loop = f"loop-{name}"
        if part in self._parts:
            vars(state).update(vars(unpack(self._parts[part], type(state))))
        for number in range(self._clock.rounds.get(name, 0) + 1, total + 1):
            self._begin(number)
            yield number
            line = {"loop": name, "round": number, **self._clock.notes, **self._observe(state)}
            self._clock.notes, self._clock.halfway = {}, False
            self._clock.rounds[name] = number
            if self._folder is not None:
                self._parts[part] = pack(state)
            self.history.append(line)
            self._checkpoint()
            self._report(line)
        # of the phases that follow, also where the run goes on in the midst of them
        self._begin(int(total) + 1)

    def _restore_history(self, lines: list[Line]) -> None:
        self.history = lines

    def commit(self, state: Any, work: Callable[[], None]) -> None:
        """Do the first part of a round, and checkpoint before the second one sends clients what the
        first has made.

        A client applies an average once. Were the round repeated after a kill, with other replies,
        its second version would not be what clients have.

        Args:
            state: of the loop, which `work` changes.
        """
        if self._clock.halfway:
            return
        work()
        self._clock.halfway = True
        if self._folder is not None:
            self._parts[self._loop] = pack(state)
        self._checkpoint()

    def _checkpoint(self) -> None:
        self._clock.number += 1
        if self._folder is None:
            return
        for name in self._appended:
            self.append(name)
        logs = {name: log.mark for name, log in self._logs.items()}
        clock = replace(self._clock, seconds=self.seconds, logs=logs)
        parts = {"clock": pack(clock), **self._parts}
        for name, kept in self._kept.items():
            parts[name] = pack(kept.read())
        self._write(parts)

    def append(self, name: str) -> None:
        """Append to a log what its list has gained since the last time, in one write."""
        if self._folder is None:
            return
        appended = self._appended[name]
        items = appended.read()
        new = items[self._logged[name] :]
        self._logs[name].append([json.dumps(appended.encode(item)) for item in new])
        self._logged[name] = len(items)

    def _write(self, parts: dict[str, bytes]) -> None:
        """Write a checkpoint beside the last one, and then remove that one."""
        assert self._folder is not None
        final = self._folder / f"checkpoint-{self._clock.number:06d}"
        draft = self._folder / ".checkpoint.tmp"
        atomic_files.make_new_folder(draft)
        marks = {name: Mark.of(data) for name, data in parts.items()}
        for name, data in {**parts, manifest.NAME: manifest.encode(marks)}.items():
            atomic_files.write_atomic(
                draft / name, data, 0o600 if name.startswith("clients") else 0o644
            )
        atomic_files.move(draft, final)
        for old in checkpoints(self._folder):
            if old != final:
                shutil.rmtree(old, ignore_errors=True)

    def _load(self, folder: Path) -> None:
        """Go on from the last checkpoint, every part of which must be what was written."""
        for name, appended in self._appended.items():
            # what stays after a kill stays after a power cut, too
            lasting = appended.recall is not None
            self._logs[name] = Log(folder / f"{name}.jsonl", durable=lasting)
        found = checkpoints(folder)
        self.resumed = bool(found)
        if found:
            self._restore(found[-1])
        for name, appended in self._appended.items():
            self._restore_log(name, appended)

    def _restore_log(self, name: str, appended: Appended) -> None:
        """Put back what a log's list was at the checkpoint, and what it has gained since where that
        stays.
        """
        log, mark = self._logs[name], self._clock.logs.get(name, EMPTY)

        def decode(line: str) -> Any:
            return appended.decode(json.loads(line))

        later: list[Any] = []
        if appended.recall is None:
            items = log.restore(mark, decode)
        else:
            items, later = log.recall(mark, decode)
        self._logged[name] = len(items) + len(later)
        appended.restore(items)
        if appended.recall is not None:
            appended.recall(later)

    def _restore(self, checkpoint: Path) -> None:
        marks = manifest.read(checkpoint)
        for name in ("clock", *self._kept):
            if name not in marks:
                raise RunFolderError(f"{checkpoint} lacks its {name}: start the run anew")
        parts = {name: manifest.checked(checkpoint, name, marks) for name in marks}
        self._clock = unpack(parts.pop("clock"), _Clock)
        for name, kept in self._kept.items():
            kept.restore(unpack(parts.pop(name), kept.kind))
        self._parts = parts


def checkpoints(folder: Path) -> list[Path]:
    """Return the checkpoints in a run folder, oldest first."""
    found = [
        path
        for path in folder.glob("checkpoint-*")
        if re.fullmatch(r"checkpoint-\d{6,}", path.name)
    ]
    return sorted(found, key=lambda path: int(path.name.partition("-")[2]))


def remove_checkpoints(folder: Path) -> None:
    """Remove the checkpoints of a run that has ended."""
    for path in checkpoints(folder):
        shutil.rmtree(path, ignore_errors=True)
    shutil.rmtree(folder / ".checkpoint.tmp", ignore_errors=True)
