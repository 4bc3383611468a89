"""Lines about work within a round."""

from __future__ import annotations

import logging
import sys
from types import ModuleType
from typing import Any

import pytest

from securecluster.core import progress


def test_only_work_that_takes_long_is_told_and_not_at_every_step(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    seconds = 100.0
    monkeypatch.setattr(progress.time, "monotonic", lambda: seconds)
    watch = progress.progress_logger("test: draw")
    with caplog.at_level(logging.INFO, progress.logger.name):
        for step in range(1, 9):
            seconds += 1.0
            watch(step, 8)
    assert caplog.messages == ["test: draw 3 of 8", "test: draw 6 of 8"]


@pytest.mark.parametrize(
    ("seconds", "words"), [(0.4, "0 s"), (59, "59 s"), (300, "5 min"), (7500, "2 h 05 min")]
)
def test_durations_are_words(seconds: float, words: str) -> None:
    assert progress.duration(seconds) == words


def test_the_time_left_follows_from_the_steps_so_far(monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = 10.0
    monkeypatch.setattr(progress.time, "monotonic", lambda: seconds)
    resumed = progress.TimeLeft()
    seconds = 12.0
    assert resumed.after(31, 40) == 18.0  # a round took two seconds
    seconds = 14.0
    assert resumed.after(32, 40) == 16.0
    assert resumed.after(40, 40) == 0.0


def shown_steps(shown: bool | None) -> None:
    """Do three steps of some work."""
    with progress.bar("training", 3, shown) as advance:
        for step in range(1, 4):
            advance(step)


def test_scripts_and_pipes_print_nothing_by_default(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    shown_steps(None)
    monkeypatch.setattr(sys, "ps1", ">>> ", raising=False)
    shown_steps(None)  # a prompt whose output is no terminal
    shown_steps(False)
    assert capsys.readouterr() == ("", "")


def test_a_prompt_in_a_terminal_and_who_asks_for_it_gets_a_bar(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    shown_steps(True)
    captured = capsys.readouterr()
    assert "training" in captured.err and "3/3" in captured.err and captured.out == ""
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    shown_steps(None)  # a script in a terminal
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(sys, "ps1", ">>> ", raising=False)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    shown_steps(None)
    assert "3/3" in capsys.readouterr().err


def test_steps_of_work_with_a_bar_have_none_of_their_own(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "ps1", ">>> ", raising=False)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    # a terminal refuses a second bar at once
    with progress.bar("sweep", 1, None) as advance:
        shown_steps(None)
        advance(1)
    shown = capsys.readouterr().err
    assert "sweep" in shown and "training" not in shown
    with progress.bar("sweep", 1, False):
        monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
        shown_steps(None)
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    shown_steps(None)
    assert "training" in capsys.readouterr().err


def test_a_notebook_gets_one_output_that_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    outputs: list[dict[str, str]] = []

    class Handle:
        def update(self, data: dict[str, str], raw: bool) -> None:
            outputs[-1] = data

    def display(data: dict[str, str], raw: bool, display_id: bool) -> Any:
        assert raw and display_id
        outputs.append(data)
        return Handle()

    module: Any = ModuleType("IPython.display")
    module.display = display
    monkeypatch.setitem(sys.modules, "IPython", ModuleType("IPython"))
    monkeypatch.setitem(sys.modules, "IPython.display", module)
    monkeypatch.setitem(sys.modules, "ipykernel", ModuleType("ipykernel"))
    shown_steps(None)  # a script that a kernel's library is loaded in
    assert outputs == []
    monkeypatch.setattr(sys, "ps1", "In: ", raising=False)
    shown_steps(None)
    (output,) = outputs
    assert output["text/plain"] == "training 3/3 "
    assert '<progress value="3" max="3">' in output["text/html"]
