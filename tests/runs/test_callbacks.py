"""Callbacks: what they see, and runs that they stop."""

from __future__ import annotations

import gc
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import Any

import cases
import numpy as np
import pytest
from cases import EVERY_PROTOCOL, FULL, NOISE, build

from securecluster import FedAvg, Federation
from securecluster.attacks import experiments
from securecluster.cli.main import main
from securecluster.core import atomic_files
from securecluster.errors import ReplayError, UsageError
from securecluster.protocols import CFL, IFCA, SRFCA
from securecluster.runtime.run import Line, Run

Stop = Callable[[str], None]


class StopAfter:
    """Stop after some rounds in all; 0 is never."""

    def __init__(self, rounds: int = 0) -> None:
        self.rounds = rounds
        self.lines: list[Line] = []

    def on_round(self, line: Line, stop: Stop) -> None:
        self.lines.append(line)
        if len(self.lines) == self.rounds:
            stop(f"{len(self.lines)} rounds are enough")


class Failing:
    def on_round(self, line: Line, stop: Stop) -> None:
        if line["round"] == 2:
            raise ValueError("no server to track at")


@dataclass
class Count:
    value: int = 0


def counted(run: Run) -> list[int]:
    """A round, three stages of two rounds with something after each, and two rounds: their numbers,
    and those of what follows the loops.
    """
    state, seen = Count(), []
    for t in run.rounds("train", state, 1):
        seen.append(t)
    for stage in run.stages("train", state, 3, 2, after=1):
        seen += list(stage.rounds)
        state.value += 1
    for t in run.rounds("train", state, 9):
        seen.append(t)
    for t in run.rounds("after", state, 1):
        seen.append(100 + t)
    return [*seen, -state.value]


# by the round in which a callback says stop: the rounds, and the stages that were completed
ENDS = {1: (1, 0), 2: (3, 1), 3: (3, 1), 4: (5, 2), 5: (5, 2), 6: (7, 3), 7: (7, 3), 8: (8, 3)}


# more rounds than usual, where the usual few end with the stage of round 2
PLANS: dict[Any, dict[str, Any]] = {SRFCA: {"rounds": 2, "retrain": 2}}


@pytest.mark.parametrize(("asked", "end"), ENDS.items())
def test_a_stop_ends_all_loops_and_a_stage_that_has_begun_goes_to_its_end(
    asked: int, end: tuple[int, int], tmp_path: Path
) -> None:
    expected = [*range(1, end[0] + 1), -end[1]]

    def stop(line: Line) -> str | None:
        return "enough" if line["round"] == asked else None

    def killed(line: Line) -> None:
        if line["round"] == asked:
            raise KeyboardInterrupt

    begun: list[int] = []
    run = Run(report=stop, begin=begun.append)
    assert counted(run) == expected
    assert run.stopped is not None and run.stopped.round == asked
    again = Run()
    again.stopped = run.stopped
    assert counted(again) == expected  # as a replay does
    (tmp_path / atomic_files.MARKER).touch()
    with pytest.raises(KeyboardInterrupt):
        counted(Run(tmp_path, report=killed))
    resumed = Run(tmp_path)
    resumed.stop("enough")
    with pytest.raises(KeyboardInterrupt):  # a kill between the stop and the end
        for _ in counted(resumed)[:1]:
            raise KeyboardInterrupt
    last = Run(tmp_path)
    assert last.stopped == run.stopped
    counted(last)
    assert last.history == run.history


@pytest.mark.few(6)
@pytest.mark.parametrize("protocol", EVERY_PROTOCOL)
def test_a_stopped_run_replays_and_a_killed_one_stops_where_it_would_have(
    protocol: Any, small: Federation, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cases.stub_pair_network(monkeypatch)

    def fitted(name: str, **more: Any) -> Any:
        made = build(protocol, **{"rounds": 6, "model": "linear", **PLANS.get(protocol, {})})
        return made.fit(small, FULL, folder=tmp_path / name, **more)

    straight = fitted("straight", callbacks=[StopAfter(2)])
    with pytest.raises(KeyboardInterrupt):
        fitted("killed", callbacks=[StopAfter(2)], report=cases.interrupt_after(1))
    watching = StopAfter(2)
    resumed = fitted("killed", callbacks=[watching])
    assert watching.lines == straight.history_ == resumed.history_
    assert 2 <= len(straight.history_) < straight.total_rounds
    assert resumed.server_state_ == straight.server_state_
    assert len(resumed.labels_) == len(small)
    config = resumed.kept_.learned.config
    assert resumed.replay(resumed.transcript_, config) == straight.server_state_


def test_a_stopped_run_is_the_run_of_so_many_rounds_with_its_price(
    small: Federation, tmp_path: Path
) -> None:
    folder = tmp_path / "run"

    def both(**options: Any) -> tuple[FedAvg, FedAvg]:
        short = FedAvg(rounds=2, model="linear", **options).fit(small, FULL)
        made = FedAvg(rounds=5, model="linear", **options)
        return short, made.fit(small, FULL, folder=folder, force=True, callbacks=[StopAfter(2)])

    short, stopped = both()
    assert stopped.server_state_ == short.server_state_
    assert stopped.history_ == short.history_
    short, stopped = both(**NOISE, dp_unit="example", batch_size=5)
    events = [
        [replace(event, digests=()) for event in run.ledger_.events] for run in (short, stopped)
    ]
    assert events[0] == events[1] and stopped.ledger_.epsilon == short.ledger_.epsilon < np.inf
    result = json.loads((folder / "result.json").read_text())
    assert result["stopped"] == {"round": 2, "reason": "StopAfter: 2 rounds are enough"}
    assert result["rounds"] == 5
    said = [text for text in result["privacy"]["not_covered"] if "stopped" in text]
    assert len(said) == 1 and "observer's scores" in said[0]


def test_what_is_said_of_a_stopped_run(
    small: Federation, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "run"
    CFL(rounds=5, model="linear").fit(small, FULL, folder=folder, callbacks=[StopAfter(3)])
    again = CFL(rounds=5, model="linear").fit(small, FULL, folder=folder)  # loaded
    assert len(again.history_) == 3
    summary = again.kept_.learned
    config = summary.config
    assert again.replay(again.transcript_, config) == again.server_state_
    stop, summary.stopped = summary.stopped, None
    with pytest.raises(ReplayError):  # what stopped it is a part of the record
        again.replay(again.transcript_, config)
    summary.stopped = stop
    # as an audit repeats it, and runs its twins
    repeated, _ = experiments.tapped(CFL(rounds=5, model="linear"), small, FULL, None, stop)
    assert repeated.server_state_ == again.server_state_
    assert main(["replay", str(folder)]) == 0
    assert main(["report", str(folder), "--html"]) == 0
    text = capsys.readouterr().out
    assert "stopped after round 3 by StopAfter: 3 rounds are enough" in text
    page = (folder / "report.html").read_text()
    assert "after round 3 by StopAfter: 3 rounds are enough" in page
    result = json.loads((folder / "result.json").read_text())
    assert not [text for text in result["privacy"]["not_covered"] if "stopped" in text]  # no noise


def reachable(*objects: Any) -> Iterator[Any]:
    """Yield all objects that references lead to, but for classes, modules and what those have."""
    seen: set[int] = set()
    rest = list(objects)
    while rest:
        found = rest.pop()
        if id(found) in seen or isinstance(found, type | ModuleType):
            continue
        seen.add(id(found))
        yield found
        rest += gc.get_referents(found)


class Looking(StopAfter):
    def on_round(self, line: Line, stop: Stop) -> None:
        super().on_round(line, stop)
        found = list(reachable(line, stop))
        kinds = {type(each) for each in found}
        assert kinds <= {dict, list, tuple, str, int, float, bool, type(None), type([].append)}
        assert sum(isinstance(each, list) and each == [] for each in found) >= 1  # of reasons
        line.clear()  # a copy


def test_a_callback_sees_the_observers_line_and_can_change_nothing(
    small: Federation, tmp_path: Path
) -> None:
    plain = IFCA(rounds=2, k=2, model="linear").fit(small, FULL)
    seen = IFCA(rounds=2, k=2, model="linear").fit(
        small, FULL, callbacks=[Looking(), StopAfter()], folder=tmp_path / "run"
    )
    assert seen.history_ == plain.history_ and seen.server_state_ == plain.server_state_
    config = json.loads((tmp_path / "run" / "config.json").read_text())
    assert "Looking" not in json.dumps(config)  # they are no part of the configuration


def test_a_callback_that_fails_leaves_a_run_that_goes_on(small: Federation, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    with pytest.raises(UsageError) as caught:
        FedAvg(rounds=4, model="linear").fit(small, FULL, folder=folder, callbacks=[Failing()])
    sentence = str(caught.value)
    assert "callback Failing failed after round 2" in sentence
    assert "ValueError: no server to track at" in sentence and "\n" not in sentence
    watching = StopAfter()
    again = FedAvg(rounds=4, model="linear").fit(small, FULL, folder=folder, callbacks=[watching])
    straight = FedAvg(rounds=4, model="linear").fit(small, FULL)
    assert again.server_state_ == straight.server_state_
    assert watching.lines == straight.history_


@pytest.mark.parametrize("callbacks", [[print], StopAfter(), [StopAfter(), None]])
def test_what_is_no_callback_is_refused_before_the_run(callbacks: Any, small: Federation) -> None:
    with pytest.raises(UsageError, match="on_round"):
        FedAvg(rounds=1).fit(small, callbacks=callbacks)
