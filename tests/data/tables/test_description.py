"""What `securecluster describe` says of a table."""

from __future__ import annotations

from pathlib import Path

import pytest

from securecluster.cli.main import main

pytest.importorskip("pyarrow")


def described(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    assert main(["describe", *map(str, arguments)]) == 0
    return capsys.readouterr().out


def test_a_folder_is_described(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a.csv").write_text("age,city,y\n30,Ulm,ill\n?,Bonn,ill\n40,Ulm,well\n")
    (tmp_path / "b.csv").write_text("age,city,y\n31.5,Ulm,ill\n32,Ulm,well\n")
    (tmp_path / "notes.md").write_text("x")
    roles = ["--client-column", "@file", "--label-column", "y"]
    text = described(capsys, tmp_path, *roles)
    for line in (
        "5 rows, 3 columns",
        "  b.csv: 2 rows",
        "not read: notes.md",
        "classes (2, of y): ill 3, well 2",
        "  a: 3 rows, ill 2, well 1",
        "  age: numbers, 30 to 40, 4 different, 1 missing",
        "  city: text, 2 different",
        "a run would refuse this: ",
        "'age' has 1 empty cell ('?'), the first in line 3 of a.csv",
        "drop it (--drop-columns)",
    ):
        assert line in text, line
    text = described(capsys, tmp_path / "b.csv", *roles, "--drop-columns", "city")
    assert "a run would train on 1 client" in text
    assert "a run would train on 2 clients" in described(
        capsys, tmp_path, *roles, "--prepare", "auto"
    )
    assert "for clients and classes give --client-column" in described(capsys, tmp_path)


def test_columns_that_a_file_lacks_are_described(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "a.csv").write_text("age,y\n30,ill\n40,well\n")
    (tmp_path / "b.csv").write_text("Age,y\n31,ill\n")
    (tmp_path / "c.csv").write_text("age,y\n")
    text = described(capsys, tmp_path, "--client-column", "@file", "--label-column", "y")
    assert "  age: is not in b.csv" in text and "it lacks age and has Age besides" in text
    (tmp_path / "b.csv").write_text("age,y\n31,ill\n")
    text = described(capsys, tmp_path, "--client-column", "@file", "--label-column", "y")
    assert "note: " in text and "has files that have no rows: c.csv" in text


def test_a_file_without_names_is_described(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "x.data").write_text("63,1,a\n64,1,b\n65,1,a\n66,2,b\n")
    text = described(capsys, tmp_path / "x.data")
    assert "called f0, f1, …: x.data" in text and "f0: whole numbers, 63 to 66" in text
    assert main(["describe", str(tmp_path / "x.data"), "--label-column", "y"]) == 2
    assert "its first line looks like data" in capsys.readouterr().err
    assert main(["describe"]) == 2 and main(["describe", str(tmp_path / "none")]) == 2
    assert main(["describe", "--help"]) == 0
