"""Life of a run: phases, rounds, checkpoints, history and observation.

No other code writes files while a protocol runs.

A checkpoint is a folder that appears by one rename, so a run killed at any moment resumes from a
complete one. Lists that only grow (the history, the ledger's events) are appended to files of lines
instead; the checkpoint stores their length and digest, so that its cost is what a round added and
not what all rounds did. A resumed run truncates the history that it writes again. The
ledger is never truncated: what was released stays released.

What is sent is in a checkpoint first. A resumed server repeats its round, so no client may have
applied results of it: `Run.commit` ends the first part of a round where the second sends its
averages or lets clients train alone. The checkpoint of the last round is kept beside those of what
follows it, and when the run has ended (`LAST`), so that a longer run can go on from there.
`result.json` is written last, and means that the run is complete.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

from securecluster.core import atomic_files, manifest
from securecluster.core.manifest import EMPTY, Log, Mark
from securecluster.core.serialization import pack, unpack
from securecluster.errors import RunFolderError

A = TypeVar("A")
Line = dict[str, Any]

DRAFT = ".checkpoint.tmp"  # folder of a checkpoint that is still being written
LAST = "last-round"  # checkpoint of the last round of a run that has ended
FILES = re.compile(
    r"manifest\.json|clock|origin|clients|network|transcript|occupancy|authority"
    r"|(phase|loop)-[\w-]+"
)  # in a checkpoint's folder
OWN = atomic_files.Own(
    (atomic_files.MARKER,),
    re.compile(rf"({re.escape(DRAFT)}|{LAST}|checkpoint-[0-9]{{6,}})(/({FILES.pattern}))?"),
)
# permissions of a checkpoint's files: those of clients hold keys and models, and that of a key
# authority its secret keys
OWNERS = ("clients", "authority")
PRIVATE_FILE = 0o600
PUBLIC_FILE = 0o644


@dataclass(frozen=True)
class CheckpointPart:
    """State of another component that belongs in a checkpoint.

    Args:
        state_class: class of the state.
        read: returns the state.
        restore: sets the state.
    """

    state_class: type
    read: Callable[[], Any]
    restore: Callable[[Any], None]


@dataclass(frozen=True)
class Appended:
    """List that only grows, stored as lines of JSON in a file of its own.

    Args:
        read: returns the list as it is now; earlier items never change.
        restore: sets the list to what it was at the checkpoint.
        encode: converts an item to a JSON value.
        decode: inverse of `encode`.
        recall: receives the items appended after the checkpoint, which then stay in the file; None
            cuts them off.
    """

    read: Callable[[], Sequence[Any]]
    restore: Callable[[list[Any]], None]
    encode: Callable[[Any], Any]
    decode: Callable[[Any], Any]
    recall: Callable[[list[Any]], None] | None = None


@dataclass(frozen=True)
class Stop:
    """Why a run ended before its last round.

    Args:
        loop: part of the protocol that counts the rounds.
        round: after which it was stopped. A stage that has begun goes to its end.
        reason: who stopped it, and why.
    """

    loop: str
    round: int
    reason: str


@dataclass
class _Clock:
    """Progress of a run, and the extent of each log that belongs to it.

    Attributes:
        number: number of checkpoints so far.
        rounds: completed rounds, by name of the loop.
        seconds: wall time.
        logs: length and digest of each log.
        halfway: True if `commit` has completed the first half of the current round.
        notes: values noted in the current round.
        stop: why it ends early; None if it does not.
    """

    number: int = 0
    rounds: dict[str, int] = field(default_factory=dict)
    seconds: float = 0.0
    logs: dict[str, Mark] = field(default_factory=dict)
    halfway: bool = False
    notes: Line = field(default_factory=dict)
    stop: Stop | None = None


@dataclass(frozen=True)
class Stage:
    """Some consecutive rounds of a loop.

    Args:
        number: of the stage, from 0.
        fresh: whether none of its rounds has begun.
        rounds: numbers of its rounds that remain.
    """

    number: int
    fresh: bool
    rounds: Iterator[int]


class Run:
    """State of a run that a protocol's `run_server` works with.

    Args:
        folder: where to write checkpoints; None stores everything in memory. A folder with a
            checkpoint is resumed.
        components: state of other components that belongs in a checkpoint, by name; files whose
            names start with "clients" or "authority" are readable by their owner only.
        observe: measures a loop's state after each round, outside the protocol; its numbers go
            into the history.
        report: receives each history line; returns a reason to stop after it, or None.
        begin: receives each round's number before the round starts.
        appended: lists that only grow, by name; `NAME.jsonl` in the folder stores them.
        dry: whether stand-ins take the clients' place, to find out what a run releases: work of the
            server alone can be left out then, if no release depends on it.
    """

    def __init__(
        self,
        folder: Path | None = None,
        components: dict[str, CheckpointPart] | None = None,
        observe: Callable[[Any], Line] = lambda state: {},
        report: Callable[[Line], str | None] = lambda line: None,
        begin: Callable[[int], None] = lambda number: None,
        appended: dict[str, Appended] | None = None,
        dry: bool = False,
    ) -> None:
        self.dry = dry
        self.history: list[Line] = []
        self._folder = folder
        self._components = components or {}
        self._observe = observe
        self._report = report
        self._begin = begin
        history = Appended(
            read=lambda: self.history,
            restore=self._restore_history,
            encode=lambda line: line,
            decode=dict,
        )
        self._appended = {"history": history, **(appended or {})}
        self._logs: dict[str, Log] = {}
        self._logged = dict.fromkeys(self._appended, 0)  # lines written so far
        self._parts: dict[str, bytes] = {}  # packed phases and loops, by name
        self._clock = _Clock()
        self._loop = ""  # part of the current loop
        self._round_end = 0  # number of the checkpoint after the last round
        self._since = time.monotonic()
        self.resumed = False
        if folder is not None:
            self._load(folder)

    @property
    def seconds(self) -> float:
        """Wall time spent on this run, over all its resumptions."""
        return self._clock.seconds + time.monotonic() - self._since

    @property
    def stopped(self) -> Stop | None:
        """Return why the run ends before its last round; None if it does not.

        It may be set before the first round, to repeat a run.
        """
        return self._clock.stop

    @stopped.setter
    def stopped(self, stop: Stop | None) -> None:
        self._clock.stop = stop

    def stop(self, reason: str) -> None:
        """End the run after the round that has just ended, and write that to a checkpoint.

        Args:
            reason: who stops it, and why.
        """
        line = self.history[-1]
        self.stopped = Stop(line["loop"], line["round"], reason)
        self._checkpoint()

    def length(self, planned: int) -> int:
        """Return how many rounds were planned, or those of a run that was stopped."""
        return planned if self.stopped is None else min(planned, len(self.history))

    def _over(self) -> bool:
        """Return whether the run has come to where it was stopped."""
        stop = self.stopped
        return stop is not None and self._clock.rounds.get(stop.loop, 0) >= stop.round

    def note(self, **values: Any) -> None:
        """Add values that the server has computed to this round's history line."""
        self._clock.notes |= values

    def once(self, name: str, make: Callable[[], A], result_class: type[A]) -> A:
        """Return the result of a phase, which is computed once and stored in later checkpoints.

        Args:
            name: name of the phase.
            make: computes the result.
            result_class: class of the result, a dataclass tree.
        """
        key = f"phase-{name}"
        if key not in self._parts:
            self._parts[key] = pack(make())
            self._checkpoint()
        return unpack(self._parts[key], result_class)

    def rounds(self, name: str, state: Any, total_rounds: int) -> Iterator[int]:
        """Yield the numbers of the remaining rounds of a loop, from 1 to `total_rounds`.

        After each round come the observer, the history and a checkpoint. Code after the loop
        belongs to the round after the last one. A run that is stopped ends its loops early.

        Args:
            name: name of the loop.
            state: the loop's state, a dataclass that is changed in place; a resumed run restores
                it when it comes to the loop.
            total_rounds: number of the last round.
        """
        self._enter(name, state)
        first = self._clock.rounds.get(name, 0) + 1
        for number in range(first, int(total_rounds) + 1):
            if self._over():
                break
            self._begin(number)
            yield number
            self._end_round(name, number, state)
        # for the phases that follow, also if the run resumes in the middle of them
        self._begin(self._clock.rounds.get(name, 0) + 1)

    def stages(
        self, name: str, state: Any, count: int, length: int, after: int = 0
    ) -> Iterator[Stage]:
        """Yield the stages of a loop that are not over, each of which has as many rounds.

        What a protocol does between the rounds of a stage and the next stage belongs to the last of
        these rounds. A checkpoint is written before it, as by `commit`.

        Args:
            name: name of the loop.
            state: the loop's state, as in `rounds`.
            count: number of stages.
            length: rounds of each, at least 1.
            after: rounds of the loop before the first stage.
        """
        self._enter(name, state)
        for number in range(count):
            completed = self._clock.rounds.get(name, 0)
            last = after + (number + 1) * length
            fresh = completed <= last - length and not self._clock.halfway
            if completed >= last or (fresh and self._over()):
                continue
            yield Stage(number, fresh, self._rounds_of_stage(name, state, completed + 1, last))
            self._end_round(name, last, state)
        self._begin(self._clock.rounds.get(name, 0) + 1)

    def _rounds_of_stage(self, name: str, state: Any, first: int, last: int) -> Iterator[int]:
        """Yield the remaining rounds of a stage, of which the last one is left half done."""
        for number in range(first, last):
            self._begin(number)
            yield number
            self._end_round(name, number, state)
        self._begin(last)
        if not self._clock.halfway:
            yield last
            self._store_half(state)

    def _enter(self, name: str, state: Any) -> None:
        """Restore a loop's state, where a resumed run comes to the loop for the first time."""
        loop_key = f"loop-{name}"
        if self._loop == loop_key:
            return
        self._loop = loop_key
        if loop_key in self._parts:
            restored = unpack(self._parts[loop_key], type(state))
            # in place, since the protocol holds a reference to the state
            vars(state).update(vars(restored))

    def _end_round(self, name: str, number: int, state: Any) -> None:
        """Observe a round, append its history line, write a checkpoint and report the line."""
        observed = self._observe(state)
        line = {"loop": name, "round": number, **self._clock.notes, **observed}
        self._clock.notes = {}
        self._clock.halfway = False
        self._clock.rounds[name] = number
        if self._folder is not None:
            self._parts[self._loop] = pack(state)
        self.history.append(line)
        self._round_end = self._clock.number + 1
        self._checkpoint()
        reason = self._report(line)  # only of rounds that a resumed run does not repeat
        if reason and self.stopped is None:
            self.stop(reason)

    def _restore_history(self, lines: list[Line]) -> None:
        self.history = lines

    def commit(self, state: Any, work: Callable[[], None]) -> None:
        """Do the first half of a round, and write a checkpoint before the second half.

        The second half sends clients what the first half has computed. A client applies an average
        once: were the first half repeated after a kill, with other replies, its new result would
        differ from what clients have.

        Args:
            state: the loop's state, which `work` changes.
            work: the first half; skipped if a checkpoint contains its result.
        """
        if self._clock.halfway:
            return
        work()
        self._store_half(state)

    def _store_half(self, state: Any) -> None:
        """Write a checkpoint in the middle of a round."""
        self._clock.halfway = True
        if self._folder is not None:
            self._parts[self._loop] = pack(state)
        self._checkpoint()

    def _checkpoint(self) -> None:
        """Append to the logs, and then write a checkpoint that refers to them."""
        self._clock.number += 1
        if self._folder is None:
            return
        for name in self._appended:
            self.append(name)
        # after the logs, which then contain all that the marks refer to
        logs = {name: log.mark for name, log in self._logs.items()}
        clock = replace(self._clock, seconds=self.seconds, logs=logs)
        contents = {"clock": pack(clock), **self._parts}
        for name, component in self._components.items():
            contents[name] = pack(component.read())
        self._write(contents)

    def append(self, name: str) -> None:
        """Append the new items of a list to its log, in one write.

        Args:
            name: name of the list.
        """
        if self._folder is None:
            return
        appended = self._appended[name]
        items = appended.read()
        new_items = items[self._logged[name] :]
        encoded = [appended.encode(item) for item in new_items]
        lines = [json.dumps(value) for value in encoded]
        self._logs[name].append(lines)
        self._logged[name] = len(items)

    def _write(self, contents: dict[str, bytes]) -> None:
        """Write a checkpoint beside the last one, and then remove the last one.

        Args:
            contents: contents of the files, by name.
        """
        assert self._folder is not None
        final = self._folder / f"checkpoint-{self._clock.number:06d}"
        draft = self._folder / DRAFT
        atomic_files.make_new_folder(self._folder, DRAFT, OWN)
        # digests by which a resumed run detects a file that has been changed
        marks = {name: Mark.of(data) for name, data in contents.items()}
        files = {**contents, manifest.NAME: manifest.encode(marks)}
        for name, data in files.items():
            permissions = PUBLIC_FILE
            if name.startswith(OWNERS):
                permissions = PRIVATE_FILE
            atomic_files.write_atomic(draft / name, data, permissions)
        atomic_files.move(draft, final)  # one rename, so a checkpoint is complete or absent
        for checkpoint in checkpoints(self._folder):
            if _checkpoint_number(checkpoint) not in (self._clock.number, self._round_end):
                _remove(checkpoint)

    def _load(self, folder: Path) -> None:
        """Resume from the last checkpoint, every part of which must match its digest."""
        for name, appended in self._appended.items():
            # lines that survive a kill must survive a power cut, too
            durable = appended.recall is not None
            path = folder / f"{name}.jsonl"
            self._logs[name] = Log(path, durable=durable)
        existing = checkpoints(folder)
        self.resumed = bool(existing)
        if existing:
            self._round_end = _checkpoint_number(existing[0])
            self._restore(existing[-1])
        for name, appended in self._appended.items():
            self._restore_log(name, appended)

    def _restore_log(self, name: str, appended: Appended) -> None:
        """Restore a list from its log, up to the checkpoint.

        Items appended later go to `Appended.recall`; without it they are cut off.
        """
        log = self._logs[name]
        mark = self._clock.logs.get(name, EMPTY)

        def decode(line: str) -> Any:
            return appended.decode(json.loads(line))

        if appended.recall is None:
            items = log.restore(mark, decode)
            self._logged[name] = len(items)
            appended.restore(items)
            return
        items, later_items = log.recall(mark, decode)
        self._logged[name] = len(items) + len(later_items)
        appended.restore(items)
        appended.recall(later_items)

    def _restore(self, checkpoint: Path) -> None:
        """Restore the clock, the other components, and the packed phases and loops."""
        marks = manifest.read(checkpoint)
        for name in ("clock", *self._components):
            if name not in marks:
                raise RunFolderError(f"{checkpoint} lacks its {name}: start the run anew")
        contents = {name: manifest.checked(checkpoint, name, marks) for name in marks}
        self._clock = unpack(contents.pop("clock"), _Clock)
        for name, component in self._components.items():
            state: Any = unpack(contents.pop(name), component.state_class)
            component.restore(state)
        self._parts = contents


def checkpoints(folder: Path) -> list[Path]:
    """Return the checkpoints in a run folder, oldest first.

    Args:
        folder: the run folder.
    """
    paths = []
    for path in folder.glob("checkpoint-*"):
        if re.fullmatch(r"checkpoint-[0-9]{6,}", path.name):
            paths.append(path)
    return sorted(paths, key=_checkpoint_number)


def _checkpoint_number(path: Path) -> int:
    _, _, number = path.name.partition("-")
    return int(number)


def keep_last_round(folder: Path) -> None:
    """Keep the checkpoint of the last round of a run that has ended, and remove the others.

    Args:
        folder: the run folder.
    """
    existing = checkpoints(folder)
    # a link, or a folder with files of somebody else alone, is no checkpoint
    whole = [p for p in existing if not p.is_symlink() and (p / manifest.NAME).is_file()]
    if whole and not (folder / LAST).exists():
        with suppress(OSError, RunFolderError):
            atomic_files.move(whole[0], folder / LAST)
    for path in (*existing, folder / DRAFT):
        _remove(path)


def reopen(folder: Path) -> None:
    """Let a run go on from the end of its last round, also one that has ended.

    Args:
        folder: the run folder.

    Raises:
        RunFolderError: a run that has ended without a checkpoint of its last round, or with a
            damaged one.
    """
    if (folder / LAST).is_dir():
        clock = _clock_of(folder / LAST)
        atomic_files.move(folder / LAST, folder / f"checkpoint-{clock.number:06d}")
    existing = checkpoints(folder)
    if not existing:
        raise RunFolderError(
            f"{folder} holds no state of its last round, which earlier versions did not keep: "
            "start another run from it (start=...)"
        )
    clock = _clock_of(existing[-1])
    # what followed the last round is the end of the shorter run alone
    if len(existing) > 1 and clock.rounds and not clock.halfway:
        _remove(existing[-1])


def _clock_of(checkpoint: Path) -> _Clock:
    marks = manifest.read(checkpoint)
    if "clock" not in marks:
        raise RunFolderError(f"{checkpoint} lacks its clock: start the run anew")
    return unpack(manifest.checked(checkpoint, "clock", marks), _Clock)


def _remove(checkpoint: Path) -> None:
    """Remove a checkpoint, as far as possible; what somebody else has put there stays."""
    with suppress(OSError):
        atomic_files.remove_folder(checkpoint.parent, checkpoint.name, OWN)
