"""Shared by the tests of scripts: the rows of a sheet that is filled twice."""

from __future__ import annotations

import csv
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks.grid import Grid
from benchmarks.sheet import Row


@pytest.fixture
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A working folder without any results."""
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def filled(elsewhere: None) -> Callable[[Grid, Sequence[dict[str, Any]]], list[Row]]:
    """A function that measures some cells of a grid, one cell being listed at the full scale, too.

    Its picture is drawn, and when it is filled again, nothing is measured. It returns the rows that
    were measured, read back.
    """

    def fill(grid: Grid, cells: Sequence[dict[str, Any]]) -> list[Row]:
        full = [{**cells[0], "scale": "full"}]
        own = replace(grid, cells=lambda scale, seeds: full if scale == "full" else cells)
        path = own.main(["--seeds", "1"])
        if grid.draw is not None:
            picture = path.read_bytes()
            assert picture.startswith(b"\x89PNG") and len(picture) > 5000
        table = path.with_suffix(".csv")
        text = table.read_text()
        replace(own, measure=lambda cell: pytest.fail("measured again")).main(["--seeds", "1"])
        assert table.read_text() == text
        rows = list(csv.DictReader(text.splitlines()[1:]))
        done = [row for row in rows if row["scale"] != "full"]
        listed = [] if grid.full == "nowhere" else ["not run"]
        assert [row["status"] for row in done] == ["done"] * len(cells)
        assert [row["status"] for row in rows if row["scale"] == "full"] == listed
        return done

    return fill
