"""Pictures: no fault of drawing costs a result, and no backend of the user's is used or changed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from securecluster.cli.main import main
from securecluster.errors import SecureClusterWarning
from securecluster.figures import curves, figure
from securecluster.studies import comparison_figures as comparison

SMALL = [
    "--threads", "1", "--samples", "12", "--model", "linear", "--clients", "4", "--epochs", "1",
    "--rounds", "2",
]  # fmt: skip


def broken(*_: Any) -> Any:
    raise ValueError("no such backend\nand a second line")


@pytest.mark.usefixtures("pictures")
def test_a_run_whose_picture_cannot_be_drawn_ends_and_draws_it_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "run"
    drawn: list[bool] = []

    def check_result_and_fail(*_: Any) -> Any:
        drawn.append((folder / "result.json").is_file())
        broken()

    with monkeypatch.context() as patch:
        patch.setattr(curves, "learning", check_result_and_fail)
        assert main(["run", "fedavg", *SMALL, "--pictures", "--out", str(folder)]) == 0
        assert drawn == [True]
        said = capsys.readouterr().err
        assert said.startswith("securecluster: note: ") and said.count("\n") == 1
        assert "accuracy.png was not drawn (ValueError: no such backend): " in said
        assert main(["report", str(folder)]) == 0
        told = capsys.readouterr()
        assert "accuracy.png was not drawn" in told.err and "clusters" in told.out
    picture = folder / "accuracy.png"
    assert not picture.exists()
    assert main(["resume", str(folder), "--quiet"]) == 0
    whole = picture.read_bytes()
    picture.unlink()
    assert main(["report", str(folder)]) == 0
    assert "pictures: accuracy.png" in capsys.readouterr().out
    assert picture.read_bytes() == whole


@pytest.mark.usefixtures("pictures")
def test_a_comparison_whose_picture_cannot_be_drawn_ends_and_draws_it_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "comparison"
    with monkeypatch.context() as patch:
        patch.setattr(comparison, "_cost", broken)
        start = ["compare", "fedavg", "local", *SMALL, "--out", str(folder), "--quiet"]
        assert main(start) == 0
        assert "note" not in capsys.readouterr().err
        assert main(["resume", str(folder)]) == 0
        assert "cost.png was not drawn" in capsys.readouterr().err
    assert (folder / "compare.json").is_file() and not (folder / "cost.png").exists()
    assert main(["resume", str(folder)]) == 0
    assert (folder / "cost.png").read_bytes().startswith(b"\x89PNG")


def test_a_picture_that_cannot_be_written_is_a_warning(tmp_path: Path) -> None:
    (tmp_path / "a.png").mkdir()
    with pytest.warns(SecureClusterWarning, match=r"a\.png was not drawn"):
        drawn = figure.save_all(tmp_path, {"a.png": lambda: figure.figure(1, 1)[0]})
    assert drawn == []


SCRIPT = """
import os
from pathlib import Path
from securecluster.figures import figure
paths = figure.save_all(Path("."), {"a.png": lambda: figure.figure(1, 1)[0]})
print([path.name for path in paths], os.environ["MPLBACKEND"])
import matplotlib
print(matplotlib.rcParams._get("backend") == os.environ["MPLBACKEND"])
"""


@pytest.mark.parametrize(
    ("backend", "kept"), [("nonsense", False), ("module://nowhere", True), ("svg", True)]
)
def test_pictures_need_no_backend_and_change_none(backend: str, kept: bool, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", SCRIPT],
        cwd=tmp_path,
        env={**os.environ, "MPLBACKEND": backend},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.splitlines() == [f"['a.png'] {backend}", str(kept)]
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
