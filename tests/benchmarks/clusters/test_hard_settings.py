"""The settings that earlier defaults failed on: their clients, a tiny run, and the report with an
earlier version's figures.
"""

from __future__ import annotations

import csv
from pathlib import Path

import pytest

from benchmarks.clusters import hard_settings
from benchmarks.clusters.hard_settings import SETTINGS, Hard
from benchmarks.clusters.robust import Setting
from securecluster import LabelSwap
from securecluster.protocols.registry import protocol_class

TINY = Hard(
    Setting("", "", "digits", LabelSwap(2), (2, 2), (20,), 20),
    ("cfl",),
    {"rounds": 2, "momentum": 0.9},
)


def test_every_cell_is_told_apart_and_begins_with_fedavg() -> None:
    cells = hard_settings.cells(2)
    assert len({str(cell) for cell in cells}) == len(cells)
    for name, hard in SETTINGS.items():
        own = [c["protocol"] for c in cells if c["setting"] == name and c["seed"] == 1]
        assert own == ["fedavg", *hard.protocols]


@pytest.mark.parametrize("name", SETTINGS)
def test_a_training_holds_hyper_parameters_of_every_protocol_that_gets_it(name: str) -> None:
    for protocol in ("fedavg", *SETTINGS[name].protocols):
        assert set(SETTINGS[name].training) <= set(protocol_class(protocol)().get_params())


def test_a_tiny_setting_is_measured_and_reported_beside_an_earlier_version(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(SETTINGS, "tiny", TINY)
    options = ["--settings", "tiny", "--seeds", "1", "--name"]
    before = hard_settings.main([*options, "t_before"])
    before.write_text(before.read_text().replace(",ok,0,1,", ",ok,0.25,1,"))
    path = hard_settings.main([*options, "t"])
    rows = list(csv.DictReader(path.read_text().splitlines()[1:]))
    assert [row["protocol"] for row in rows] == ["fedavg", "cfl"]
    assert [row["outcome"] for row in rows] == ["ok", "ok"]
    printed = capsys.readouterr().out.splitlines()
    line = next(text for text in printed if "fedavg" in text and "before" in text)
    assert "ARI  0.00 (0.00–0.00)" in line and "before: ARI  0.25" in line and "(1 seeds)" in line


def test_a_run_that_fails_has_its_error_as_outcome(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(SETTINGS, "tiny", Hard(TINY.clients, ("cfl",), {"rounds": -1}))
    found = hard_settings.measure({"setting": "tiny", "protocol": "cfl", "seed": 0})
    assert list(found) == ["outcome"] and "rounds" in found["outcome"]
