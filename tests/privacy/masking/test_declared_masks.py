"""Masks of packages outside this project, by entry points, and of users, by paths."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from securecluster.cli.main import main
from securecluster.core import installed_packages
from securecluster.errors import UsageError
from securecluster.privacy.masking import masks

MODULE = """
from securecluster.privacy.masking import masks

masks.register(
    "outside-rotation",
    lambda dimension: masks.SignedPermutation(),
    masks.MaskInfo(shows="its norm", not_covered="it is obfuscation"),
    entrywise=True,
)
"""
SMALL = ["--clients", "4", "--samples", "20", "--rounds", "2", "--epochs", "1", "--quiet"]


@pytest.fixture(autouse=True)
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """An installed package with good and bad declarations, and what is registered taken away."""
    site = tmp_path / "site"
    info = site / "outside_masks-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: outside-masks\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(
        "[securecluster.masks]\n"
        "outside-rotation = outside_masks\n"
        "gone = no_such_module\n"
        "absent = outside_masks:Absent\n"
        "elsewhere = outside_masks\n"
    )
    (site / "outside_masks.py").write_text(MODULE)
    monkeypatch.syspath_prepend(str(site))
    monkeypatch.setattr(masks, "MASKS", list(masks.MASKS))
    installed_packages.points.cache_clear()
    monkeypatch.setattr(masks, "ENTRYWISE", set(masks.ENTRYWISE))
    for name in ("INFO", "_MAKERS"):
        monkeypatch.setattr(masks, name, dict(getattr(masks, name)))
    yield
    installed_packages.points.cache_clear()
    sys.modules.pop("outside_masks", None)


def test_a_declared_mask_is_listed_and_registered_when_it_is_built() -> None:
    assert masks.mask_names()[:5] == masks.MASKS[:5]
    assert "outside-rotation" in masks.mask_names()
    assert "outside-rotation" not in masks.MASKS
    (stage,) = masks.build("outside-rotation", 8)
    assert isinstance(stage, masks.SignedPermutation)
    assert masks.mask_names().count("outside-rotation") == 1


def test_the_command_line_runs_a_declared_mask(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "run"
    assert main(["run", "fedavg", *SMALL, "--mask", "outside-rotation", "--out", str(out)]) == 0
    config = json.loads((out / "config.json").read_text())
    assert config["protocol"]["mask"] == "outside-rotation"
    assert main(["list"]) == 0
    assert "outside-rotation" in capsys.readouterr().out


OWN = """
from securecluster.privacy.masking import masks

class Flips(masks.SignedPermutation):
    name = "own-flips"

class Unregistered(Flips):
    name = "other"

if "own-flips" not in masks.MASKS:
    shown = masks.MaskInfo(shows="its norm", not_covered="it is obfuscation")
    masks.register("own-flips", lambda dimension: Flips(), shown, entrywise=True)
"""


def test_a_path_is_a_mask_where_a_user_types_it_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "own_masks.py").write_text(OWN)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setenv("SECURECLUSTER_MASKS", "")
    # a server or a folder that names a path has nothing imported
    with pytest.raises(UsageError, match="unknown mask"):
        masks.build("own_masks:Flips", 8)
    assert "own_masks" not in sys.modules
    assert main(["run", "fedavg", *SMALL, "--mask", "own_masks:Flips", "--out", "run"]) == 0
    assert json.loads(Path("run/config.json").read_text())["protocol"]["mask"] == "own-flips"
    assert main(["run", "fedavg", *SMALL, "--mask", "own_masks:Unregistered"]) == 2
    assert "is not registered there" in capsys.readouterr().err
    # in a process that starts later
    assert os.environ["SECURECLUSTER_MASKS"] == "own_masks:Flips"
    masks.MASKS.remove("own-flips")
    sys.modules.pop("own_masks")
    installed_packages._given.cache_clear()
    masks.check_known("own-flips")
    sys.modules.pop("own_masks")


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("gone", "declared as no_such_module, cannot be imported"),
        ("absent", "declared as outside_masks:Absent, cannot be imported"),
        ("elsewhere", "is not registered there: call masks.register"),
        ("permutaton", "did you mean 'permutation'"),
    ],
)
def test_a_name_that_leads_to_no_mask_is_one_sentence(name: str, sentence: str) -> None:
    with pytest.raises(UsageError, match=sentence) as caught:
        masks.build(name)
    assert "\n" not in str(caught.value)


def test_a_mask_that_is_not_imported_is_not_taken_for_a_slip() -> None:
    with pytest.raises(UsageError, match="import the module that registers") as caught:
        masks.build("block-rotation")
    assert "did you mean" not in str(caught.value)
