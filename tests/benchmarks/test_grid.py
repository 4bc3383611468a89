"""The engine of all sheets and tables, and that the cells of every script are told apart."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks import table
from benchmarks.grid import Grid, counts, parser_of, product, read_options, with_seeds
from benchmarks.papers import flhc_iid, flhc_tables
from benchmarks.papers.oneshot import accuracy as oneshot_accuracy
from benchmarks.sheet import Row, figure
from benchmarks.table import Journal, tabulate

FOLDER = Path(__file__).parents[2] / "benchmarks"
SCRIPTS = [
    path.relative_to(FOLDER.parent).with_suffix("")
    for path in sorted([*FOLDER.glob("*.py"), *FOLDER.glob("papers/*.py")])
    if "\nGRID = Grid(" in path.read_text() or "\nGRID = grid(" in path.read_text()
]


def told_apart(cells: Any) -> None:
    """Check the cells of one script.

    Args:
        cells: by scale and number of seeds.
    """
    for scale in ("cpu", "full"):
        found = []
        for cell in cells(scale, 2):
            found.append(str({name: value for name, value in cell.items() if name != "paper"}))
        assert len(found) == len(set(found))
        first = cells(scale, 1)
        assert len({cell["seed"] for cell in first}) == 1
        assert len(found) == 2 * len(first)
        assert {cell.get("scale", scale) for cell in first} == {scale}


@pytest.mark.parametrize("script", SCRIPTS, ids=str)
def test_cells_are_told_apart_and_more_seeds_add_some(script: Path) -> None:
    told_apart(importlib.import_module(".".join(script.parts)).GRID.cells)


def test_cells_of_scripts_with_several_sheets_are_told_apart() -> None:
    told_apart(flhc_iid.cells)
    for several in (flhc_tables.TABLES, oneshot_accuracy.FIGURES):
        for of_sheet in several.values():
            told_apart(of_sheet.cells)


def test_every_combination_comes_once_and_whole_seeds_after_each_other() -> None:
    settings = product(data=["a", "b"], k=(2, 3))
    assert [tuple(cell.values()) for cell in settings] == [("a", 2), ("a", 3), ("b", 2), ("b", 3)]
    cells = with_seeds(settings, (5, 6))
    assert [cell["seed"] for cell in cells] == [5] * 4 + [6] * 4
    assert list(cells[0]) == ["data", "k", "seed"]


def grid(**others: Any) -> Grid:
    def cells(scale: str, seeds: int) -> list[dict[str, Any]]:
        return with_seeds(product(scale=[scale], k=(1, 2)), range(seeds))

    return Grid("", "g", cells, lambda cell: {"twice": 2 * cell["k"]}, **others)


@pytest.mark.parametrize("full", ["first", "last", "nowhere"])
@pytest.mark.usefixtures("elsewhere")
def test_a_grid_measures_reports_and_draws(full: str, capsys: pytest.CaptureFixture[str]) -> None:
    seen: list[list[Row]] = []

    def draw(rows: Any) -> Any:
        seen.append(list(rows))
        return figure(2, 2)[0]

    def report(rows: Any) -> None:
        print(f"{len(rows)} rows")

    made = grid(by=["k"], values=["twice"], full=full, report=report, draw=draw)
    path = made.main(["--seeds", "2"])
    assert path == Path("benchmarks/results/papers/g.png") and path.is_file()
    ((*rows,),) = seen
    assert [row["twice"] for row in rows] == ["2", "4", "2", "4"]
    printed = capsys.readouterr().out
    assert "k 2: twice 4 (4 – 4; 2)" in printed and "4 rows" in printed
    lines = path.with_suffix(".csv").read_text().splitlines()[2:]
    scales = {"first": ["full"] * 4 + ["cpu"] * 4, "last": ["cpu"] * 4 + ["full"] * 4}
    assert [line.split(",")[0] for line in lines] == scales.get(full, ["cpu"] * 4)


def test_what_cannot_be_measured_stays_in_the_sheet(tmp_path: Path) -> None:
    path = grid(folder=tmp_path, measurable=lambda cells: cells[1:]).main(["--seeds", "1"])
    lines = path.read_text().splitlines()[2:]
    assert ["not run" in line for line in lines] == [True, False]


def test_options() -> None:
    parser = parser_of("")
    assert vars(read_options(parser, [])) == {
        "seeds": 3, "full": False, "minutes": 10.0, "scale": "cpu",
    }  # fmt: skip
    given = read_options(parser, ["--seeds", "1", "--full", "--minutes", "5"])
    assert vars(given) == {"seeds": 1, "full": True, "minutes": 5.0, "scale": "full"}
    assert vars(counts("", ["--rounds", "4"], seeds=10, rounds=2)) == {"seeds": 10, "rounds": 4}


@pytest.mark.parametrize(
    "wrong", [["--seeds", "0"], ["--seeds", "-1"], ["--minutes", "-1"], ["--minutes", "nan"]]
)
def test_options_that_measure_nothing_are_refused(
    wrong: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stop:
        grid().main(wrong)
    assert stop.value.code == 2
    assert "at least" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        counts("", ["--seeds", "0"], seeds=3)
    assert "--seeds is at least 1" in capsys.readouterr().err


def test_a_table_is_whole_after_each_measurement_and_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(table, "RESULTS", tmp_path)
    lengths = []

    def measured() -> Iterator[list[dict[str, Any]]]:
        for k in range(3):
            yield [{"data": "a", "right": k > 0}, {"data": "b", "right": False}]
            lengths.append(len((tmp_path / "t.csv").read_text().splitlines()))

    path = tabulate("t", measured(), by=["data"], counted=["right"])
    assert lengths == [4, 6, 8] and path == tmp_path / "t.csv"
    assert capsys.readouterr().out.splitlines()[-2:] == ["a right: 2 of 3", "b right: 0 of 3"]


def test_a_journal_goes_on_with_what_it_lacks(tmp_path: Path) -> None:
    path = tmp_path / "j.csv"
    cells = product(data=["a", "b"], seed=[0, 1])
    for cell in cells[:3]:
        Journal(path, ("data", "seed"), ("data", "seed", "found")).append([{**cell, "found": 1}])
    journal = Journal(path, ("data", "seed"), ("data", "seed", "found"))
    assert [cell for cell in cells if journal.lacks(cell)] == cells[3:]
    assert path.read_text().splitlines()[1:] == ["data,seed,found", "a,0,1", "a,1,1", "b,0,1"]
