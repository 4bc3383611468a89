"""Rounds, phases, checkpoints and history.

A run stopped anywhere goes on from a whole checkpoint.
"""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from securecluster.core import atomic_files
from securecluster.errors import RunFolderError
from securecluster.runtime.run import CheckpointPart, Line, Run, keep_last_round


@pytest.fixture(autouse=True)
def marked(tmp_path: Path) -> None:
    """Mark the folder as one of ours, as whoever claims a run's folder does."""
    (tmp_path / atomic_files.MARKER).touch()


@dataclass
class State:
    count: int = 0
    weights: torch.Tensor = field(default_factory=lambda: torch.zeros(2, dtype=torch.float64))
    labels: list[int] = field(default_factory=list)


@dataclass
class Box:
    value: int


class StoppedError(Exception):
    pass


def keeper(box: dict[str, Any]) -> dict[str, CheckpointPart]:
    return {
        name: CheckpointPart(Box, lambda: box["value"], lambda value: box.update(value=value))
        for name in ("clients", "network")
    }


def body(
    run: Run, state: State, total: int, stop: int | None = None, box: dict[str, Any] | None = None
) -> list[int]:
    """A loop whose result depends on every round before; stops in the middle of round `stop`."""
    seen = []
    for t in run.rounds("train", state, total):
        seen.append(t)
        state.count = 2 * state.count + t
        if box:
            box["value"] = Box(box["value"].value * 3 + t)
        run.note(noted=t)
        if t == stop:
            raise StoppedError
        state.weights = state.weights / 3 + t
        state.labels.append(t)
    return seen


def snapshot(folder: Path) -> dict[str, bytes]:
    return {
        str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.glob("checkpoint-*/*"))
    }


def stopped(folder: Path, stop: int, **more: Any) -> None:
    with pytest.raises(StoppedError):
        body(Run(folder, **more), State(), 6, stop)


def look(state: State) -> Line:
    return {"count": state.count}


def test_a_run_without_a_folder_counts_its_rounds_and_keeps_its_history(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    begun: list[int] = []
    reported: list[Line] = []
    run, state = Run(observe=look, report=reported.append, begin=begun.append), State()
    assert body(run, state, 3) == [1, 2, 3]
    assert begun == [1, 2, 3, 4]  # the phases after the loop belong to the round after the last
    assert (
        run.history
        == reported
        == [
            {"loop": "train", "round": t, "noted": t, "count": c}
            for t, c in ((1, 1), (2, 4), (3, 11))
        ]
    )
    assert not run.resumed
    assert [path.name for path in tmp_path.iterdir()] == [".securecluster"]


@pytest.mark.parametrize("stop", [1, 2, 5, 6])
def test_rounds_go_on_after_the_last_checkpoint(stop: int, tmp_path: Path) -> None:
    whole = State()
    straight = Run(observe=look)
    body(straight, whole, 6)
    stopped(tmp_path, stop, observe=look)
    begun: list[int] = []
    again, state = Run(tmp_path, observe=look, begin=begun.append), State(count=99, labels=[99])
    assert again.resumed is (stop > 1)
    assert again.history == straight.history[: stop - 1]
    if stop == 1:
        state = State()
    assert body(again, state, 6) == list(range(stop, 7))
    assert begun == list(range(stop, 8))
    assert (state.count, state.labels) == (whole.count, whole.labels)
    assert torch.equal(state.weights, whole.weights)
    assert (
        again.history
        == straight.history
        == [json.loads(x) for x in (tmp_path / "history.jsonl").read_text().splitlines()]
    )
    assert body(Run(tmp_path), State(), 6) == []


def test_what_a_killed_run_left_half_written_is_dropped(tmp_path: Path) -> None:
    stopped(tmp_path, 4, observe=look)
    with (tmp_path / "history.jsonl").open("a") as stream:
        stream.write('{"loop": "train", "round": 4, "count": 26}\n{"loop": "tra')
    draft = tmp_path / ".checkpoint.tmp"
    draft.mkdir()
    (draft / "clock").write_text("half a check")
    (draft / ".network.0123456789abcdef.tmp").write_text("half a file")
    again = Run(tmp_path, observe=look)
    assert [line["round"] for line in again.history] == [1, 2, 3]
    assert len((tmp_path / "history.jsonl").read_text().splitlines()) == 3
    assert body(again, State(), 6) == [4, 5, 6]
    assert [
        json.loads(x)["round"] for x in (tmp_path / "history.jsonl").read_text().splitlines()
    ] == [1, 2, 3, 4, 5, 6]
    (last,) = tmp_path.glob("checkpoint-*")
    assert (last / "clock").read_bytes() != b"half a check" and not draft.exists()
    assert not list(last.glob(".*"))


def test_files_of_others_in_folders_of_checkpoints_stay(tmp_path: Path) -> None:
    stopped(tmp_path, 4)
    (checkpoint,) = tmp_path.glob("checkpoint-*")
    (checkpoint / "notes").write_text("mine")
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "clock").write_text("mine")
    (tmp_path / "checkpoint-000000").symlink_to(tmp_path / "elsewhere")
    body(Run(tmp_path), State(), 6)
    keep_last_round(tmp_path)
    assert [path.name for path in checkpoint.iterdir()] == ["notes"]
    assert (tmp_path / "elsewhere" / "clock").read_text() == "mine"
    (tmp_path / "checkpoint-000000").unlink()
    checkpoint.rename(tmp_path / ".checkpoint.tmp")
    (tmp_path / ".checkpoint.tmp" / "notes").write_text("mine")
    with pytest.raises(RunFolderError, match=r"cannot make .*\.checkpoint\.tmp"):
        body(Run(tmp_path), State(), 8)


def test_a_run_killed_before_its_first_checkpoint_starts_over(tmp_path: Path) -> None:
    (tmp_path / "history.jsonl").write_text('{"loop": "train", "round": 1}\n')
    (tmp_path / ".checkpoint.tmp").mkdir()
    run = Run(tmp_path)
    assert not run.resumed and run.history == []
    assert body(run, State(), 2) == [1, 2]
    assert len((tmp_path / "history.jsonl").read_text().splitlines()) == 2


def test_of_two_checkpoints_the_newer_counts(tmp_path: Path) -> None:
    stopped(tmp_path, 3)
    (second,) = tmp_path.glob("checkpoint-*")
    older = tmp_path / "checkpoint-000001"
    older.mkdir()
    (older / "clock").write_bytes(b"half removed")
    assert second.name > older.name
    assert body(Run(tmp_path), State(), 6) == [3, 4, 5, 6]
    assert len(list(tmp_path.glob("checkpoint-*"))) == 1


def test_a_phase_is_made_once_over_all_resumptions(tmp_path: Path) -> None:
    made: list[str] = []

    def make(name: str) -> Callable[[], State]:
        return lambda: made.append(name) or State(7, torch.tensor([1.5, -2.0]))  # type: ignore[func-returns-value]

    def serve(run: Run, stop: int | None) -> None:
        first = run.once("first", make("first"), State)
        assert first.count == 7 and torch.equal(first.weights, torch.tensor([1.5, -2.0]))
        assert run.once("first", make("first"), State).count == 7
        body(run, State(), 4, stop)
        run.once("last", make("last"), State)

    with pytest.raises(StoppedError):
        serve(Run(tmp_path), 1)
    assert made == ["first"]
    with pytest.raises(StoppedError):
        serve(Run(tmp_path), 3)
    assert made == ["first"]
    serve(Run(tmp_path), None)
    serve(Run(tmp_path), None)
    assert made == ["first", "last"]
    serve(Run(), None)
    assert made == ["first", "last", "first", "last"]


def test_a_phase_gives_away_copies() -> None:
    run = Run()
    run.once("p", lambda: State(labels=[1]), State).labels.append(2)
    assert run.once("p", lambda: State(), State).labels == [1]


def test_two_loops_resume_apart(tmp_path: Path) -> None:
    def serve(run: Run, stop: int | None) -> list[tuple[str, int]]:
        seen = []
        for name in ("one", "two"):
            state = State()
            for t in run.rounds(name, state, 3):
                seen.append((name, t))
                if (name, t) == ("two", stop):
                    raise StoppedError
                state.count += t
            assert state.count == 6
        return seen

    with pytest.raises(StoppedError):
        serve(Run(tmp_path), 2)
    again = Run(tmp_path)
    assert serve(again, None) == [("two", 2), ("two", 3)]
    assert [(line["loop"], line["round"]) for line in again.history] == [
        (n, t) for n in ("one", "two") for t in (1, 2, 3)
    ]


def test_what_lives_elsewhere_is_put_back_as_of_the_checkpoint(tmp_path: Path) -> None:
    box: dict[str, Any] = {"value": Box(1)}
    with pytest.raises(StoppedError):
        body(Run(tmp_path, keeper(box)), State(), 6, 3, box)
    assert box["value"] == Box(45)  # also by the round that failed: ((1·3 + 1)·3 + 2)·3 + 3
    fresh: dict[str, Any] = {"value": Box(-5)}
    Run(tmp_path, keeper(fresh))
    assert fresh["value"] == Box(14)


def test_files_of_clients_and_of_a_key_authority_are_for_the_owners_eyes_only(
    tmp_path: Path,
) -> None:
    before = os.umask(0)
    parts = keeper({"value": Box(1)})
    parts["authority"] = parts["network"]
    try:
        body(Run(tmp_path, parts), State(), 2)
    finally:
        os.umask(before)
    (checkpoint,) = tmp_path.glob("checkpoint-*")
    modes = {p.name: stat.S_IMODE(p.stat().st_mode) for p in checkpoint.iterdir()}
    assert modes == {
        "clients": 0o600, "authority": 0o600, "network": 0o644, "clock": 0o644, "loop-train": 0o644,
        "manifest.json": 0o644,
    }  # fmt: skip


def _no_disk(*_: object) -> None:
    raise RunFolderError("cannot write: free some space")


@pytest.mark.parametrize("broken", ["write_atomic", "move", "append_line", "observer", "kept"])
def test_a_failure_while_a_round_is_closed_leaves_the_checkpoint_before_it_intact(
    broken: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    armed: list[bool] = []
    box: dict[str, Any] = {"value": Box(0)}

    def observe(state: State) -> Line:
        return _no_disk() or {} if armed and broken == "observer" else {}  # type: ignore[func-returns-value]

    def read() -> Box:
        return _no_disk() or Box(0) if armed and broken == "kept" else box["value"]  # type: ignore[func-returns-value]

    kept = {"network": CheckpointPart(Box, read, lambda value: box.update(value=value))}
    run, state, before = Run(tmp_path, kept, observe), State(), {}
    with monkeypatch.context() as patch, pytest.raises(RunFolderError):
        for t in run.rounds("train", state, 5):
            before = snapshot(tmp_path)
            state.count, box["value"] = 2 * state.count + t, Box(t)
            if t == 3:
                armed.append(True)
                if hasattr(atomic_files, broken):
                    patch.setattr(atomic_files, broken, _no_disk)
    assert before and snapshot(tmp_path) == before
    armed.clear()
    again, resumed = Run(tmp_path, kept, observe), State()
    assert [line["round"] for line in again.history] == [1, 2]
    assert box["value"] == Box(2)
    for t in again.rounds("train", resumed, 5):
        resumed.count = 2 * resumed.count + t
    assert resumed.count == ((((1 * 2) + 2) * 2 + 3) * 2 + 4) * 2 + 5
    assert [
        json.loads(x)["round"] for x in (tmp_path / "history.jsonl").read_text().splitlines()
    ] == [1, 2, 3, 4, 5]


def test_the_observers_values_land_in_the_history_and_notes_in_their_own_round(
    tmp_path: Path,
) -> None:
    run, state = Run(tmp_path, observe=lambda s: {"seen": s.count, "share": s.count / 4}), State()
    for t in run.rounds("train", state, 3):
        state.count += 1
        if t == 2:
            run.note(splits=[[0, 1], [2]])
    assert [line["seen"] for line in run.history] == [1, 2, 3]
    assert [line["share"] for line in run.history] == [0.25, 0.5, 0.75]
    assert [line.get("splits") for line in run.history] == [None, [[0, 1], [2]], None]
    assert Run(tmp_path).history == run.history


def test_a_round_is_reported_only_once_its_checkpoint_is_there(tmp_path: Path) -> None:
    def report(line: Line) -> None:
        if line["round"] == 2:
            raise StoppedError

    with pytest.raises(StoppedError):
        body(Run(tmp_path, report=report), State(), 4)
    assert body(Run(tmp_path), State(), 4) == [3, 4]


def test_a_part_that_is_missing_or_damaged_is_one_sentence(tmp_path: Path) -> None:
    body(Run(tmp_path), State(), 2)
    with pytest.raises(RunFolderError, match="lacks its clients") as caught:
        Run(tmp_path, keeper({"value": Box(0)}))
    assert "\n" not in str(caught.value)
    (checkpoint,) = tmp_path.glob("checkpoint-*")
    (checkpoint / "clock").write_bytes((checkpoint / "clock").read_bytes()[:-3])
    with pytest.raises(RunFolderError) as caught:
        Run(tmp_path)
    assert "\n" not in str(caught.value)


def test_seconds_add_up_over_resumptions_and_leave_out_the_pause(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [100.0]

    def ticks(run: Run, total: int) -> Iterator[int]:
        for t in run.rounds("train", State(), total):
            now[0] += 10
            yield t

    monkeypatch.setattr("securecluster.runtime.run.time", SimpleNamespace(monotonic=lambda: now[0]))
    first = Run(tmp_path)
    assert list(ticks(first, 2)) == [1, 2]
    assert first.seconds == 20
    now[0] = 5000.0
    again = Run(tmp_path)
    assert again.seconds == 20
    assert list(ticks(again, 3)) == [3]
    assert again.seconds == 30


def staged(run: Run, state: State, length: int, stop: int = -1) -> list[str]:
    """Run a round, three stages and a round; stop at one of the moments, which are returned."""
    moments: list[str] = []

    def work(moment: str, number: int) -> None:
        moments.append(f"{moment} {number}")
        if len(moments) == stop:
            raise StoppedError
        state.count = 2 * state.count + number

    for t in run.rounds("train", state, 1):
        work("round", t)
    for stage in run.stages("train", state, 3, length, after=1):
        if stage.fresh:
            work("begin", stage.number)
        for t in stage.rounds:
            work("round", t)
            run.note(noted=t)
        work("end", stage.number)
        run.note(ended=stage.number)
        work("ended", stage.number)
    for t in run.rounds("train", state, 2 + 3 * length):
        work("round", t)
    return moments


@pytest.mark.parametrize("length", [1, 3])
def test_a_run_that_is_stopped_at_any_moment_of_its_stages_goes_on_there(
    length: int, tmp_path: Path
) -> None:
    straight, whole = Run(observe=look), State()
    moments = staged(straight, whole, length)
    ends = [(line["round"], line["noted"]) for line in straight.history if "ended" in line]
    assert ends == [(1 + length * stage, 1 + length * stage) for stage in (1, 2, 3)]
    for stop, moment in enumerate(moments, start=1):
        folder = tmp_path / str(stop)
        folder.mkdir()
        with pytest.raises(StoppedError):
            staged(Run(folder, observe=look), State(), length, stop)
        begun: list[int] = []
        again, state = Run(folder, observe=look, begin=begun.append), State()
        rest = staged(again, state, length)
        assert (state.count, again.history) == (whole.count, straight.history)
        assert begun[-1] == 3 + 3 * length
        if moment.startswith("end"):  # the rounds before it are not repeated
            assert rest[0] == f"end {moment[-1]}"
