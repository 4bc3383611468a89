"""A sheet goes on where it was left, keeps to its budget, and survives being killed."""

from __future__ import annotations

import csv
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.sheet import Cell, Sheet, figure, numbers, spread, summarise
from securecluster.errors import UsageError

CELLS = [
    {"scale": "cpu", "points": p, "lr": 0.1, "seed": s, "paper": f"paper on {p}"}
    for p in (10, 20)
    for s in (0, 1)
]


def on_disk(path: Path) -> list[dict[str, str]]:
    lines = path.read_text().splitlines()
    assert lines[0].startswith("# ") and "torch" in lines[0]
    return list(csv.DictReader(lines[1:]))


class Measure:
    """Counts its calls; stops like a Ctrl-C at call number `stop`."""

    def __init__(self, stop: int | None = None) -> None:
        self.calls: list[Mapping[str, Any]] = []
        self.stop = stop

    def __call__(self, cell: Mapping[str, Any]) -> dict[str, Any]:
        if len(self.calls) == self.stop:
            raise KeyboardInterrupt
        self.calls.append(cell)
        return {
            "gap": cell["points"] / 8 + cell["seed"],
            "correct": cell["seed"] == 0,
            "curve": [0.5, None, 2],
            "note": None,
        }


def test_rows_hold_parameters_results_and_the_papers_word(tmp_path: Path) -> None:
    rows = Sheet("s", tmp_path).fill(CELLS, Measure())
    assert rows == on_disk(tmp_path / "s.csv")
    assert list(on_disk(tmp_path / "s.csv")[0]) == [
        "scale", "points", "lr", "seed", "gap", "correct", "curve", "note", "paper", "status",
        "seconds",
    ]  # fmt: skip
    assert [(r["points"], r["seed"], r["gap"], r["paper"]) for r in rows] == [
        ("10", "0", "1.25", "paper on 10"), ("10", "1", "2.25", "paper on 10"),
        ("20", "0", "2.5", "paper on 20"), ("20", "1", "3.5", "paper on 20"),
    ]  # fmt: skip
    assert (
        rows[0]["curve"] == "0.5 nan 2" and rows[0]["note"] == "" and rows[1]["correct"] == "False"
    )


def test_a_stopped_sheet_goes_on_with_what_is_missing(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        Sheet("s", tmp_path).fill(CELLS, Measure(stop=3))
    assert [row["status"] for row in on_disk(tmp_path / "s.csv")] == [
        "done",
        "done",
        "done",
        "not run",
    ]
    rest = Measure()
    rows = Sheet("s", tmp_path).fill(CELLS, rest)
    assert rest.calls == [CELLS[3]]
    assert [row["status"] for row in rows] == ["done"] * 4 and len(on_disk(tmp_path / "s.csv")) == 4
    again = Measure()
    assert Sheet("s", tmp_path).fill(CELLS, again) == rows and not again.calls


@pytest.mark.exhaustive
def test_a_killed_sheet_is_whole(tmp_path: Path) -> None:
    code = f"""
import os, pathlib
from benchmarks.sheet import Sheet
def measure(cell):
    if cell["seed"] == 2: os._exit(7)
    return {{"gap": cell["seed"]}}
cells = [{{"scale": "cpu", "seed": s}} for s in range(4)]
Sheet("s", pathlib.Path({str(tmp_path)!r})).fill(cells, measure)
"""
    assert (
        subprocess.run([sys.executable, "-c", code], check=False, capture_output=True).returncode
        == 7
    )
    assert [(row["gap"], row["status"]) for row in on_disk(tmp_path / "s.csv")] == [
        ("0", "done"), ("1", "done"), ("", "not run"), ("", "not run"),
    ]  # fmt: skip


def test_no_cell_starts_once_the_budget_is_spent(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def seconds() -> Iterator[float]:
        # the budget's start; two cells of 50 and 60 s; then two looks past 120 s
        yield from (0, 0, 50, 50, 110, 130, 130)

    ticks, first = seconds(), Measure()
    Sheet("s", tmp_path).fill(CELLS, first, minutes=2, clock=lambda: next(ticks))
    assert len(first.calls) == 2
    left = [line for line in capsys.readouterr().out.splitlines() if line.startswith("not run: ")]
    assert left == [
        "not run: scale cpu, points 20, lr 0.1, seed 0",
        "not run: scale cpu, points 20, lr 0.1, seed 1",
    ]
    assert [row["seconds"] for row in on_disk(tmp_path / "s.csv")] == ["50.0", "60.0", "", ""]
    later = Measure()
    Sheet("s", tmp_path).fill(CELLS, later)
    assert later.calls == CELLS[2:]


def test_scales_and_changed_parameters_have_rows_of_their_own(tmp_path: Path) -> None:
    sheet = Sheet("s", tmp_path)
    sheet.fill(CELLS[:1], Measure())
    full = {**CELLS[0], "scale": "full"}
    assert sheet.expect([full])[0]["status"] == "not run"
    other, reworded = Measure(), Measure()
    sheet.fill([full, {**CELLS[0], "lr": 0.2}, {**CELLS[0], "rounds": 5}], other)
    assert len(other.calls) == 3 and len(on_disk(tmp_path / "s.csv")) == 4
    assert (
        sheet.fill([{**CELLS[0], "paper": "another word"}], reworded)[0]["paper"] == "another word"
        and not reworded.calls
    )


def test_two_machines_are_both_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for k, name in enumerate(["one torch", "two torch", "two torch"]):
        monkeypatch.setattr("benchmarks.sheet.machine", lambda name=name: name)
        Sheet("s", tmp_path).fill(CELLS[: k + 1], Measure())
    assert (tmp_path / "s.csv").read_text().startswith("# one torch | two torch\n")


def test_the_spread_is_over_seeds_and_leaves_out_what_was_not_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Sheet("s", tmp_path).fill(CELLS[:3], Measure())
    rows = Sheet("s", tmp_path).expect(CELLS)
    assert spread(rows, ["points"], "gap") == {
        ("10",): (1.75, 1.25, 2.25, 2),
        ("20",): (2.5, 2.5, 2.5, 1),
    }
    assert spread(rows, ["points"], "correct")[("10",)] == (0.5, 0.0, 1.0, 2)
    summarise(rows, ["points"], ["gap"])
    assert "points 10: gap 1.75 (1.25 – 2.25; 2); paper: paper on 10" in capsys.readouterr().out
    assert (
        np.array_equal(numbers("0.5 nan 2"), [0.5, np.nan, 2.0], equal_nan=True)
        and numbers("") == []
    )


def test_each_scale_has_its_picture(tmp_path: Path) -> None:
    made, axes = figure(2, 1, rows=2, columns=3)
    assert axes.shape == (2, 3)
    paths = [Sheet("s", tmp_path).save(made, scale) for scale in ("cpu", "full")]
    assert [path.name for path in paths] == ["s.png", "s_full.png"]
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in paths)


def test_missing_data_are_one_sentence_and_what_was_measured_is_kept(tmp_path: Path) -> None:
    def measure(cell: Cell) -> dict[str, int]:
        if cell == CELLS[1]:
            raise UsageError("no data: put them there")
        return {"value": 1}

    with pytest.raises(SystemExit) as stop:
        Sheet("s", tmp_path).fill(CELLS, measure)
    assert stop.value.code == "s: no data: put them there"
    assert [row["status"] for row in Sheet("s", tmp_path).expect(CELLS[:2])] == ["done", "not run"]
