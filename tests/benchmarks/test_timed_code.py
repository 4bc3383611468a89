"""Tables of timings: which code they measure, and whether it has changed since."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from benchmarks import timed_code
from benchmarks.evidence import BLOCK, Table, filled
from benchmarks.timed_code import TIMED, changed, code_digest, record

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results"
TIMES = re.compile(r"second|minutes|_ms|_ns|median$|cpu_")
# times of single frames
NOT_OF_CODE = ("fuzz",)
CODE = '''
def total(numbers):
    """Return a sum."""
    result = 0
    for number in numbers:
        result += number  # one by one
    return result
'''


@pytest.mark.parametrize(
    "same",
    [
        CODE.replace('"""Return a sum."""', '"""Add numbers."""'),
        CODE.replace("  # one by one", ""),
        CODE.replace("result", "subtotal"),
        CODE.replace("(numbers)", "(numbers: list[int])"),
        CODE.replace("result = 0", "result = (\n        0\n    )"),
    ],
)
def test_code_that_only_reads_otherwise_has_the_same_digest(same: str) -> None:
    assert same != CODE
    assert code_digest(same) == code_digest(CODE)


@pytest.mark.parametrize(
    "other",
    [
        CODE.replace("+=", "-="),
        CODE.replace("= 0", "= 1"),
        CODE.replace("result += number", "result += abs(number)"),
        CODE.replace("numbers", "values"),  # a parameter, which callers may name
        CODE.replace("result = 0", "global result\n    result = 0"),
        CODE.replace("return result", "return number"),
    ],
)
def test_code_that_computes_something_else_has_another_digest(other: str) -> None:
    assert other != CODE
    assert code_digest(other) != code_digest(CODE)


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a repository whose table "sums" times one file."""
    monkeypatch.setattr(timed_code, "TIMED", {"sums": ("total.py",)})
    (tmp_path / "pyproject.toml").touch()
    (tmp_path / "total.py").write_text(CODE)
    results = tmp_path / "benchmarks" / "results"
    results.mkdir(parents=True)
    (results / "sums.csv").write_text("# a machine\ncase,seconds\nlong,1.5\n")
    return tmp_path


PAGE = """<!-- table
source: sums.csv
rows: case
columns: mean seconds:.1f
-->
<!-- end of table -->
"""


def test_a_page_says_that_its_times_are_older_than_their_code(repository: Path) -> None:
    results = repository / "benchmarks" / "results"
    record("sums", results)
    assert changed("sums", results) == []
    assert "older" not in filled(PAGE, results)
    (repository / "total.py").write_text(CODE.replace("+=", "-="))
    assert changed("sums", results) == ["total.py"]
    said = "*Times of older code: of 1 timed files 1 changed since.*"
    assert said in filled(PAGE, results)
    # measured again
    record("sums", results)
    assert "older" not in filled(PAGE, results)


def test_a_file_that_joined_later_counts_as_changed(
    repository: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    results = repository / "benchmarks" / "results"
    record("sums", results)
    (repository / "more.py").write_text(CODE)
    monkeypatch.setattr(timed_code, "TIMED", {"sums": ("total.py", "more.py")})
    assert changed("sums", results) == ["more.py"]


def test_nothing_is_noted_of_other_tables_or_in_other_folders(tmp_path: Path) -> None:
    results = tmp_path / "benchmarks" / "results"
    results.mkdir(parents=True)
    record("masks", results)
    (tmp_path / "pyproject.toml").touch()
    record("a table without times", results)
    assert list(results.iterdir()) == []


def test_every_table_of_times_on_a_page_names_its_code() -> None:
    for page in (ROOT / "docs" / "evidence").glob("*.md"):
        for match in BLOCK.finditer(page.read_text(encoding="utf-8")):
            table = Table.parse(match["settings"])
            names = [column.name for column in table.columns]
            if any(TIMES.search(name) for name in names):
                name = table.source.removesuffix(".csv")
                assert name in {*TIMED, *NOT_OF_CODE}, f"{page.name}: name the code of {name}"


def test_what_is_said_to_be_timed_exists() -> None:
    recorded = json.loads((RESULTS / timed_code.NAME).read_text(encoding="utf-8"))
    assert recorded.keys() == TIMED.keys()
    for table, files in TIMED.items():
        assert (RESULTS / f"{table}.csv").is_file(), table
        assert recorded[table].keys() == set(files)
        for path in files:
            assert (ROOT / path).is_file(), path
