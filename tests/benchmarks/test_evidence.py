"""Evidence pages: their tables are those of the measurements."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
from scipy.stats import binomtest, bootstrap

from benchmarks import evidence
from benchmarks.evidence import EvidenceError, filled, main

ROOT = Path(__file__).parents[2]
PAGES = ROOT / "docs" / "evidence"
RESULTS = ROOT / "benchmarks" / "results"
MOST_PAGES = 25  # and the list of them
LONGEST_ANSWER = 90  # words
MOST_TABLES = 2  # of a page; the rest is in its files
# below benchmarks/results, or results that come with the package, by their path from there
FILE = re.compile(
    r"\]\((?:\.\./\.\./benchmarks/results/|(?=\.\./\.\./securecluster/))([\w/.]+\.csv)\)\s+(\(?\S+)"
)
QUESTIONS = {
    path.name: path.read_text(encoding="utf-8")
    for path in sorted(PAGES.glob("*.md"))
    if path.name != "README.md"
}
CSV = """# a machine
protocol,scenario,seed,ari,exact,bytes,status
cfl,swap,0,1.0,True,2000000,done
cfl,swap,1,0.5,False,4000000,done
cfl,iid,0,-0.001,True,1000000,done
cfl,iid,1,,,,not run
fedavg,swap,0,0,False,500000,done
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "runs.csv").write_text(CSV)
    return tmp_path


def page(**settings: str) -> str:
    lines = [f"{name}: {value}" for name, value in settings.items()]
    return "before\n<!-- table\n" + "\n".join(lines) + "\n-->\nold\n<!-- end of table -->\nafter\n"


def table(text: str) -> list[list[str]]:
    """Return the cells of the only table of a page."""
    rows = [line for line in text.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in row.strip("|").split("|")] for row in rows]


@pytest.mark.always
def test_no_table_of_a_page_is_out_of_date() -> None:
    for path in [ROOT / "README.md", *sorted(PAGES.glob("*.md"))]:
        text = path.read_text(encoding="utf-8")
        assert filled(text, RESULTS) == text, f"{path.name}: run benchmarks.evidence"


def title(text: str) -> str:
    """Return the heading of a page."""
    return text.splitlines()[0].removeprefix("# ")


def sections(text: str) -> list[str]:
    """Return the part of a page before its first heading of the second level, and those after."""
    return re.split(r"^## ", text, flags=re.MULTILINE)


def scripts(text: str) -> list[str]:
    """Return the benchmarks that the commands of a part of a page run."""
    return re.findall(r"python -m benchmarks\.([\w.]+)", text)


def test_every_page_is_listed_by_its_question() -> None:
    index = (PAGES / "README.md").read_text(encoding="utf-8")
    assert 0 < len(QUESTIONS) <= MOST_PAGES
    assert dict(re.findall(r"^- \[(.+)\]\((\w+\.md)\)$", index, re.MULTILINE)) == {
        title(text): name for name, text in QUESTIONS.items()
    }


def test_every_page_has_what_it_links_to() -> None:
    for path in PAGES.glob("*.md"):
        for link in re.findall(r"\]\((?!http)([^)#]+)\)", path.read_text(encoding="utf-8")):
            assert (PAGES / link).exists(), f"{path.name} links to {link}"


@pytest.mark.parametrize("name", QUESTIONS)
def test_a_page_begins_with_its_question_and_the_answer_in_three_sentences(name: str) -> None:
    question, answer, *_ = QUESTIONS[name].split("\n\n")
    assert re.fullmatch(r"# .+\?", question)
    assert re.match(r"[A-Z\d].*\.$", answer, re.DOTALL) and len(answer.split()) <= LONGEST_ANSWER
    assert len(re.findall(r"[.!?](?=\s|$)", answer)) <= 3


@pytest.mark.parametrize("name", QUESTIONS)
def test_a_page_has_two_tables_at_most_and_says_what_was_measured(name: str) -> None:
    first, *others = sections(QUESTIONS[name])
    assert QUESTIONS[name].count(evidence.BEGIN) <= MOST_TABLES
    for part in [first, *others]:
        assert evidence.BEGIN not in part or "**Measured.**" in first + part, part[:40]


@pytest.mark.parametrize("name", QUESTIONS)
def test_a_page_ends_with_its_files_their_commits_and_the_commands(name: str) -> None:
    *_, files = sections(QUESTIONS[name])
    assert files.startswith("Files\n") and all(scripts(item) for item in files.split("\n- ")[1:])
    listed = dict(FILE.findall(files))
    assert listed and all(re.match(r"\([\da-f]{8}\)", commit) for commit in listed.values())
    tables = re.findall(r"^source: (.+)$", QUESTIONS[name], re.MULTILINE)
    assert {*tables, *(path for path, _ in FILE.findall(QUESTIONS[name]))} == set(listed)


def test_no_measurement_lies_there_that_no_page_shows() -> None:
    there = {str(path.relative_to(RESULTS)) for path in RESULTS.rglob("*.csv")}
    shown = {path for text in QUESTIONS.values() for path, _ in FILE.findall(text)}
    assert there - shown == {"golden.csv"}
    pages = "".join([*QUESTIONS.values(), (ROOT / "README.md").read_text(encoding="utf-8")])
    assert [path.name for path in RESULTS.rglob("*.png") if path.name not in pages] == []


@pytest.mark.parametrize("name", QUESTIONS)
def test_the_commands_of_a_page_run_benchmarks(name: str) -> None:
    found = scripts(QUESTIONS[name])
    assert found
    for script in found:
        module = ROOT / "benchmarks" / script.replace(".", "/")
        assert module.with_suffix(".py").exists() or module.is_dir(), script


def test_a_cell_is_one_statistic_of_the_runs_on_its_line(folder: Path) -> None:
    text = page(
        source="runs.csv",
        rows="protocol",
        where="scenario=swap",
        columns="runs, mean ari:.2f as ARI, max bytes/1e6:.1f as MB, count exact:.0f as exact",
    )
    made = filled(text, folder)
    assert made.startswith("before\n") and made.endswith("after\n") and "old" not in made
    assert table(made) == [
        ["protocol", "runs", "ARI", "MB", "exact"],
        ["---"] * 5,
        ["cfl", "2", "0.75", "4.0", "1"],
        ["fedavg", "1", "0.00", "0.5", "0"],
    ]
    assert filled(made, folder) == made


def test_exact_runs_are_those_whose_number_is_1(folder: Path) -> None:
    settings = {"source": "runs.csv", "where": "status=done", "rows": "protocol"}
    text = filled(page(**settings, columns="exact ari, runs"), folder)
    assert table(text)[2:] == [["cfl", "1", "3"], ["fedavg", "0", "1"]]


def test_intervals_of_a_mean_are_the_bootstraps() -> None:
    values = [0.2, 0.9, 1.0, 1.0, 0.7, 0.95, 1.0, 0.4]
    found = evidence.interval(values)
    expected = bootstrap((values,), np.mean, method="percentile", rng=np.random.default_rng(1))
    assert found == pytest.approx(tuple(expected.confidence_interval), abs=0.02)
    assert evidence.interval([0.5] * 3) == (0.5, 0.5)


@pytest.mark.parametrize(("successes", "runs"), [(0, 3), (3, 3), (19, 20), (7, 12)])
def test_the_least_share_is_clopper_and_pearsons(successes: int, runs: int) -> None:
    exact = binomtest(successes, runs).proportion_ci(method="exact")
    assert evidence.least_share(successes, runs) == pytest.approx(exact.low, abs=1e-9)


def test_a_span_is_the_mean_with_both_ends_where_runs_differ(folder: Path) -> None:
    columns = "span ari:.2f as ARI, span bytes/1e6:.0f as MB"
    text = filled(page(source="runs.csv", rows="protocol, scenario", columns=columns), folder)
    assert table(text)[2:] == [
        ["cfl", "swap", "0.75 (0.50 to 1.00)", "3 (2 to 4)"],
        ["cfl", "iid", "0.00", "1"],
        ["fedavg", "swap", "0.00", "0"],
    ]


def test_a_column_for_each_value_of_another(folder: Path) -> None:
    text = page(source="runs.csv", rows="protocol", by="scenario", columns="mean ari:.2f")
    assert table(filled(text, folder)) == [
        ["protocol", "swap", "iid"],
        ["---"] * 3,
        ["cfl", "0.75", "0.00"],
        ["fedavg", "0.00", "–"],
    ]


def test_columns_by_numbers_are_in_ascending_order(tmp_path: Path) -> None:
    runs = "method,target,ari\ncfl,2.0,0.5\ncfl,10,1.0\ncfl,0.7,0.0\n"
    (tmp_path / "runs.csv").write_text(runs)
    text = page(source="runs.csv", rows="method", by="target", columns="mean ari:.1f")
    assert table(filled(text, tmp_path))[0] == ["method", "0.7", "2.0", "10"]


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"source": "no.csv", "rows": "seed", "columns": "runs"}, "no measurements in .*no.csv"),
        ({"source": "runs.csv", "rows": "seeds", "columns": "runs"}, "no column 'seeds'"),
        ({"source": "runs.csv", "rows": "seed", "columns": "mean arr"}, "no column 'arr'"),
        ({"source": "runs.csv", "rows": "seed", "columns": "mode ari"}, "'mode ari' is no column"),
        ({"source": "runs.csv", "rows": "seed"}, "missing settings of a table: columns"),
        (
            {"source": "runs.csv", "rows": "seed", "columns": "runs", "order": "seed"},
            "unknown or missing settings of a table: order",
        ),
        (
            {"source": "runs.csv", "rows": "seed", "columns": "runs", "where": "seed"},
            "'seed' is no condition",
        ),
        (
            {"source": "runs.csv", "rows": "seed", "columns": "runs", "where": "seed=9"},
            "no run in runs.csv fits",
        ),
    ],
)
def test_a_table_that_cannot_be_made_is_refused(
    settings: dict[str, str], sentence: str, folder: Path
) -> None:
    with pytest.raises(EvidenceError, match=sentence):
        filled(page(**settings), folder)


def test_a_table_without_an_end_is_refused(folder: Path) -> None:
    text = page(source="runs.csv", rows="seed", columns="runs").replace(evidence.END, "")
    with pytest.raises(EvidenceError, match="close it with"):
        filled(text, folder)


def test_check_writes_nothing_and_says_which_page_is_out_of_date(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = folder / "a.md"
    path.write_text(page(source="runs.csv", rows="seed", columns="runs"))
    old = path.read_text()
    given = ["--pages", str(folder), "--results", str(folder)]
    assert main([*given, "--check"]) == 1 and path.read_text() == old
    assert "a.md: out of date" in capsys.readouterr().out
    assert main(given) == 0 and path.read_text() != old
    assert main([*given, "--check"]) == 0
    path.write_text(page(source="no.csv", rows="seed", columns="runs"))
    with pytest.raises(SystemExit, match=r"a\.md: there are no measurements"):
        main(given)
