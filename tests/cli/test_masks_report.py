"""Masks on the command line: padding is in the result and in print, and a mask that cannot work
leaves nothing behind.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from securecluster.cli.main import main

SMALL = ["--rounds", "1", "--clients", "6", "--clusters", "2", "--samples", "40"]


@pytest.mark.parametrize(("mask", "padding"), [("rotation", 4 * 54), ("signed-permutation", 0)])
def test_padding_is_reported_in_bytes(
    mask: str, padding: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["run", "cfl", *SMALL, "--mask", mask, "--out", str(tmp_path / "r")]) == 0
    (told,) = json.loads((tmp_path / "r" / "result.json").read_text())["privacy"]["masks"]
    assert told == {
        "kind": mask,
        "fresh": "each call",
        "is": "obfuscation",
        "padding_bytes": padding,
    }
    assert ("216 bytes" in capsys.readouterr().out) == bool(padding)
    assert main(["replay", str(tmp_path / "r")]) == 0
