"""A run's life: phases, rounds, checkpoints, history and the observer. The only code that writes while a protocol runs.

A checkpoint is a folder that appears by one rename, so that a run killed at any moment resumes from a whole one.
"""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

from securecluster import files
from securecluster.errors import RunFolderError
from securecluster.state import pack, unpack

A = TypeVar("A")
Line = dict[str, Any]


@dataclass(frozen=True)
class Kept:
    """A part of the run's state that lives elsewhere: its class, how to read it and how to put it back."""

    kind: type
    read: Callable[[], Any]
    restore: Callable[[Any], None]


@dataclass
class _Clock:
    """How far a run is."""

    number: int = 0
    rounds: dict[str, int] = field(default_factory=dict)
    lines: int = 0
    seconds: float = 0.0
    halfway: bool = False  # whether `commit` has ended the first part of the round that goes on
    notes: Line = field(default_factory=dict)  # of that round


class Run:
    """What a protocol's `serve` sees of its run.

    Args:
        folder: where to checkpoint; None keeps everything in memory. A folder with a checkpoint is resumed.
        kept: what else belongs into a checkpoint, by name; names that start with "clients" are written for the owner's eyes only.
        observe: the researcher's look at a loop's state after each round, outside the network; its numbers go into the history.
        report: called with each history line.
    """

    def __init__(
        self,
        folder: Path | None = None,
        kept: dict[str, Kept] | None = None,
        observe: Callable[[Any], Line] = lambda state: {},
        report: Callable[[Line], None] = lambda line: None,
        begin: Callable[[int], None] = lambda number: None,
    ) -> None:
        self.history: list[Line] = []
        self._folder, self._kept = folder, kept or {}
        self._observe, self._report, self._begin = observe, report, begin
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
        """Rounds 1 … `total` of a loop over `state` (a dataclass, changed in place); after each: observer, history, checkpoint.

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
            self._write(line)
            self._checkpoint()
            self._report(line)
        self._begin(int(total) + 1)  # of the phases that follow, also where the run goes on in the midst of them

    def commit(self, state: Any, work: Callable[[], None]) -> None:
        """Do the first part of a round, and checkpoint before the second one sends clients what the first has made.

        A client applies an average once. Were the round repeated after a kill, with other replies, its second version would
        not be what clients have.

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

    def _write(self, line: Line) -> None:
        self.history.append(line)
        if self._folder is not None:
            files.append_line(self._folder / "history.jsonl", json.dumps(line))

    def _checkpoint(self) -> None:
        self._clock.number += 1
        self._clock.lines = len(self.history)
        if self._folder is None:
            return
        clock = replace(self._clock, seconds=self.seconds)
        parts = {"clock": pack(clock), **self._parts, **{name: pack(k.read()) for name, k in self._kept.items()}}
        final, draft = self._at(self._clock.number), self._folder / ".checkpoint.tmp"
        shutil.rmtree(draft, ignore_errors=True)
        files.make_folder(draft)
        for name, data in parts.items():
            files.write_atomic(draft / name, data, 0o600 if name.startswith("clients") else 0o644)
        files.move(draft, final)
        for old in self._folder.glob("checkpoint-*"):
            if old != final:
                shutil.rmtree(old, ignore_errors=True)

    def _at(self, number: int) -> Path:
        assert self._folder is not None
        return self._folder / f"checkpoint-{number:06d}"

    def _load(self, folder: Path) -> None:
        history = folder / "history.jsonl"
        found = sorted(folder.glob("checkpoint-*"))
        self.resumed = bool(found)
        if found:
            parts = {p.name: files.read(p) for p in found[-1].iterdir()}
            self._clock = unpack(parts.pop("clock"), _Clock)
            for name, kept in self._kept.items():
                if name not in parts:
                    raise RunFolderError(f"{found[-1]} lacks its {name}: start the run anew")
                kept.restore(unpack(parts.pop(name), kept.kind))
            self._parts = parts
        lines = files.read(history).decode().splitlines() if history.exists() else []
        self.history = [json.loads(line) for line in lines[: self._clock.lines]]
        files.write_atomic(history, "".join(json.dumps(line) + "\n" for line in self.history).encode())
