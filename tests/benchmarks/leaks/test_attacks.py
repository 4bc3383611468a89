"""The benchmark of attacks takes every registered one, and sets each beside the plain run."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.leaks import attacks
from benchmarks.sheet import Sheet
from securecluster.attacks.registry import attack_names


def test_every_registered_attack_is_a_cell_of_every_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attacks, "attack_names", lambda: [*attack_names(), "later"])
    found = attacks.cells(["digits"], protocols=["fedavg"])
    elsewhere = ("dp-audit", "sums-over-rounds")
    expected = {name for name in attack_names() if not name.startswith(elsewhere)}
    assert {cell["attack"] for cell in found} == {*expected, "later"}
    for protection in attacks.PROTECTIONS:
        some = [cell for cell in found if cell["protection"] == protection]
        assert bool(some) == (protection not in attacks.ONLY)
    # the unprotected score is there when a protected run needs it
    first = next(cell for cell in found if cell["attack"] == "later")
    assert first["protection"] == attacks.PLAIN


def test_signatures_are_measured_as_class_blocks_and_as_sketches() -> None:
    for name, kind in (("signature", "blocks"), ("signature-sketches", "plain")):
        scene = attacks.SCENES["rounds"]
        made = attacks.protocol_of(name, "noise", scene, (1, 8, 8))
        assert made.name == "signature" and made.signature_blocks == kind
        assert (made.dp_unit, made.target_epsilon) == ("client", 2.0)
        found = attacks.cells(["digits"], protocols=[name])
        assert "example noise" in {cell["protection"] for cell in found}


def test_a_row_has_the_scores_of_both_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(attacks.SCENES, "rounds", attacks.Scene(6, 20, 1, "linear"))
    monkeypatch.setattr(attacks, "attack_names", lambda: ["label-counts", "mean-image"])
    monkeypatch.setattr(attacks, "PROTECTIONS", {"plain": {}, "rotation": {"mask": "rotation"}})
    monkeypatch.delitem(attacks.SCENES, "one sample")
    for cached in (attacks.federation_of, attacks.run_of, attacks.runs):
        cached.cache_clear()
    sheet = Sheet("attacks", tmp_path)
    found = attacks.cells(["digits"], protocols=["fedavg"])
    plain, absent, masked, _ = sheet.fill(found, lambda cell: attacks.measure(sheet, cell))
    assert plain["verdict"] == "better than chance" and plain["beaten"] == "True"
    assert float(plain["score"]) == float(masked["unprotected"]) == 0
    assert masked["verdict"] == "at chance" and float(masked["score"]) > 0.1
    assert float(masked["chance_low"]) <= float(masked["chance"]) <= float(masked["chance_high"])
    assert absent["reason"].startswith("not applicable") and "score" not in absent
    picture = attacks.draw(sheet, [plain, absent, masked], "digits")
    assert picture == tmp_path / "attacks_digits.png" and picture.is_file()
    attacks.run_of.cache_clear()
    attacks.federation_of.cache_clear()
