"""Guests are as easy to take away as to add: without one all others work, and nobody knows it."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from securecluster.protocols import contrib
from securecluster.protocols.registry import PROTOCOLS, protocol_class

ROOT = Path(__file__).resolve().parents[3]
GUESTS = [name for name in PROTOCOLS if ".contrib." in protocol_class(name).__module__]
SMALL = ["--clients", "4", "--clusters", "2", "--samples", "20", "--rounds", "1", "--epochs", "1"]


def without(guest: str, tree: Path) -> None:
    """Copy the library without a guest: its module, its row and its line of the stub."""
    for folder in ("securecluster", "protocols", "attacks"):
        left_out = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / folder, tree / folder, ignore=left_out)
    for folder in ("protocols", "attacks"):
        (tree / "securecluster" / folder).symlink_to(tree / folder, target_is_directory=True)
    fact = PROTOCOLS[guest]
    module = protocol_class(guest).__module__.split(".")[3]
    place = tree / "protocols" / "contrib" / module
    if place.is_dir():
        shutil.rmtree(place)
    else:
        place.with_suffix(".py").unlink()
    for name, row in (
        ("registry.py", rf'^    "{guest}": Fact\((?:[^()]|\n)*?\),\n'),
        ("__init__.pyi", rf"^from .* import {fact.class_name} as {fact.class_name}\n"),
    ):
        path = tree / "protocols" / name
        text, count = re.subn(row, "", path.read_text(), flags=re.MULTILINE)
        assert count == 1
        path.write_text(text)


def test_methods_of_other_authors_are_guests() -> None:
    assert set(GUESTS) == {"pacfl", "clove", "rdpcfl", "cflgp", "flux", "mrmtl"}
    files = {path.stem for path in Path(contrib.__file__).parent.iterdir()} - {"__init__"}
    assert files - {"__pycache__"} == set(GUESTS)


@pytest.mark.few(1)
@pytest.mark.parametrize("guest", GUESTS)
def test_a_guest_is_taken_away_by_its_file_its_row_and_its_line(guest: str, tmp_path: Path) -> None:
    without(guest, tmp_path)

    def told(*command: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "securecluster", *command],
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": str(tmp_path)},
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )

    listed = told("list")
    names = [line.split()[0] for line in listed.stdout.splitlines()[1 : len(PROTOCOLS)]]
    assert names == [name for name in PROTOCOLS if name != guest], listed.stderr
    other = next(name for name in ("clove", "ifca") if name != guest)
    run = told("run", other, *SMALL, "--k", "2", "--quiet", "--out", "run")
    assert run.returncode == 0, run.stderr
    refused = told("run", guest)
    assert refused.returncode == 2 and f"unknown protocol '{guest}'" in refused.stderr
