"""Packages that `securecluster new` writes: they run as they stand."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from securecluster.attacks import registry
from securecluster.cli import new_command
from securecluster.cli.main import main
from securecluster.core import installed_packages
from securecluster.privacy.masking import masks

NAMES = {
    "protocol": "angle-clusters",
    "attack": "partners-of",
    "mask": "flip-all",
    "data": "wine-casks",
}
SMALL = ["--clients", "6", "--samples", "20", "--rounds", "1", "--epochs", "1", "--quiet"]


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The current folder, whose packages are forgotten at the end."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(masks, "MASKS", list(masks.MASKS))
    monkeypatch.setattr(masks, "ENTRYWISE", set(masks.ENTRYWISE))
    for name in ("INFO", "_MAKERS"):
        monkeypatch.setattr(masks, name, dict(getattr(masks, name)))
    monkeypatch.setattr(registry, "PARTS", replace(registry.PARTS, kept={}))
    yield tmp_path
    installed_packages.points.cache_clear()
    for name in NAMES.values():
        sys.modules.pop(name.replace("-", "_"), None)


def written(kind: str, folder: Path) -> Path:
    """Write a package, and install it as far as its entry point goes."""
    project = folder / NAMES[kind]
    assert main(["new", kind, str(project)]) == 0
    described = tomllib.loads((project / "pyproject.toml").read_text())["project"]
    info = project / f"{described['name']}-0.1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {described['name']}\n")
    ((group, points),) = described["entry-points"].items()
    lines = [f"[{group}]", *(f"{name} = {target}" for name, target in points.items())]
    (info / "entry_points.txt").write_text("\n".join(lines))
    sys.path.insert(0, str(project))
    installed_packages.points.cache_clear()
    return project


@pytest.mark.parametrize("kind", NAMES)
def test_its_own_tests_pass(kind: str, here: Path) -> None:
    project = written(kind, here)
    (path,) = (project / "tests").glob("*.py")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    tests: Any = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tests)
    own = [test for name, test in vars(tests).items() if name.startswith("test_")]
    assert own
    for test in own:
        test()
    assert "templates" not in path.read_text()


def test_every_part_is_swept_or_audited_at_once(here: Path) -> None:
    for kind in NAMES:
        written(kind, here)
    method, data, mask = (NAMES[kind] for kind in ("protocol", "data", "mask"))
    methods = [method, f"fedavg:mask={mask}"]
    levels = ["--clip", "1", "--noise", "0", "--seeds", "1", "--model", "linear"]
    chosen = ["--data", data, "--scenario", "iid", *levels]
    assert main(["sweep", *methods, *chosen, *SMALL, "--out", "swept"]) == 0
    table = pd.read_csv(here / "swept/runs.csv")
    assert table["variant"].tolist() == methods and (table["status"] == "done").all()
    settings = ["--transcript", "full", "--model", "linear", "--mask", mask]
    assert main(["run", "fedavg", *SMALL, *settings, "--out", "run"]) == 0
    assert main(["audit", "run", "--attack", NAMES["attack"], "--quiet"]) == 0


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["protocol"], "new takes a kind and a folder"),
        (["protocols", "mine"], "did you mean 'protocol'"),
        (["protocol", "cfl"], "there is a protocol 'cfl' already"),
        (["data", "digits"], "there is a data 'digits' already"),
        (["mask", "json"], "there is a Python module 'json' already"),
        (["protocol", "mean-client"], "there is a protocol 'mean-client' already"),
        (["attack", "3rd"], "3rd is no name of a Python module"),
        (["mask", "."], "exists and is not empty"),
    ],
)
def test_a_mistake_is_one_sentence(
    arguments: list[str], sentence: str, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (here / "notes").write_text("")
    assert main(["new", *arguments]) == 2
    told = capsys.readouterr().err
    assert sentence in told and told.count("\n") == 1


@pytest.mark.exhaustive
def test_it_installs(here: Path) -> None:
    pytest.importorskip("setuptools")
    folders = [str(here / name) for name in NAMES.values()]
    for kind, folder in zip(NAMES, folders, strict=True):
        assert main(["new", kind, folder]) == 0
    pip = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--no-build-isolation"]
    subprocess.run([*pip, "--target", str(here / "site"), *folders], check=True)
    for kind, name in NAMES.items():
        (points,) = (here / "site").glob(f"{name.replace('-', '_')}-*/entry_points.txt")
        assert f"[securecluster.{new_command.KINDS[kind].group}]" in points.read_text()
        assert (here / "site" / f"{name.replace('-', '_')}.py").is_file()
