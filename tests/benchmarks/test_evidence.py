"""Evidence pages: their tables are those of the measurements."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from benchmarks import evidence
from benchmarks.evidence import EvidenceError, filled, main

ROOT = Path(__file__).parents[2]
PAGES = ROOT / "docs" / "evidence"
RESULTS = ROOT / "benchmarks" / "results"
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


def test_no_table_of_a_page_is_out_of_date() -> None:
    for path in [ROOT / "README.md", *sorted(PAGES.glob("*.md"))]:
        text = path.read_text(encoding="utf-8")
        assert filled(text, RESULTS) == text, f"{path.name}: run benchmarks.evidence"


def test_every_page_is_listed_and_has_what_it_links_to() -> None:
    index = (PAGES / "README.md").read_text(encoding="utf-8")
    names = {path.name for path in PAGES.glob("*.md")} - {"README.md"}
    assert set(re.findall(r"\]\((\w+\.md)\)", index)) == names
    for path in PAGES.glob("*.md"):
        for link in re.findall(r"\]\((?!http)([^)#]+)\)", path.read_text(encoding="utf-8")):
            assert (PAGES / link).exists(), f"{path.name} links to {link}"


def test_every_page_has_a_claim_or_a_description_and_a_command() -> None:
    for path in PAGES.glob("*.md"):
        if path.name == "README.md":
            continue
        text = path.read_text(encoding="utf-8")
        assert text.startswith("# ") and "**Here.**" in text, path.name
        command = text.partition("**Command.**")[2]
        scripts = re.findall(r"python -m benchmarks\.([\w.]+)", command)
        assert scripts, path.name
        for script in scripts:
            module = ROOT / "benchmarks" / script.replace(".", "/")
            assert module.with_suffix(".py").exists() or module.is_dir(), f"{path.name}: {script}"


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
