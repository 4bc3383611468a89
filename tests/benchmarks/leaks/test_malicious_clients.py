"""The table of malicious clients: its grid has controls, and a run that is stopped is a row."""

from __future__ import annotations

import csv
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from benchmarks.leaks import malicious_clients
from benchmarks.leaks.malicious_clients import NONE, PROTOCOLS, cells, draw, measure
from benchmarks.sheet import Sheet
from securecluster.errors import UpdateError

RESULTS = Path("benchmarks/results/malicious_clients.csv")
CELL = {
    "data": "digits", "scenario": "label-permutation", "protocol": "fedavg", "behaviour": "scaled",
    "share": 0.2, "seed": 0,
}  # fmt: skip


def test_every_protocol_has_a_control_for_each_seed() -> None:
    grid = cells("digits", 2)
    controls = Counter(cell["protocol"] for cell in grid if cell["behaviour"] == NONE)
    assert controls == dict.fromkeys(PROTOCOLS, 2)
    shares = {cell["share"] for cell in grid if cell["behaviour"] == "random"}
    assert shares == {0.05, 0.1, 0.2, 0.3, 0.4}
    assert {cell["scenario"] for cell in grid if cell["protocol"] == "oneshot"} == {"tasks"}
    assert {cell["seed"] for cell in cells("mnist", 3)} == {0}


def test_malicious_clients_harm_an_average_and_the_control_has_none() -> None:
    control = measure({**CELL, "behaviour": NONE, "share": 0.0})
    attacked = measure(CELL)
    assert control["isolated"] is None and control["exposed"] == 0
    assert attacked["isolated"] == 0 and attacked["exposed"] == 1
    assert attacked["accuracy"] < control["accuracy"]


def test_a_run_that_is_stopped_is_a_row_with_its_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def stopped(*_: object) -> None:
        raise UpdateError("too large")

    monkeypatch.setattr(malicious_clients, "run_with", stopped)
    assert measure(CELL) == {"stopped": "too large"}


@pytest.mark.exhaustive
def test_the_figure_is_drawn(tmp_path: Path) -> None:
    sheet = Sheet("malicious_clients", tmp_path)

    def made_up(cell: object) -> dict[str, float]:
        return {"ari": 1.0, "accuracy": 0.5, "isolated": 0.0}

    rows = sheet.fill(cells("digits", 1)[:40], made_up)
    assert sheet.save(draw(rows), "cpu").stat().st_size > 10_000


def measured(protocol: str, behaviour: str, share: str, value: str) -> float:
    """Return the mean of a column over the seeds of digits."""
    lines = RESULTS.read_text().splitlines()[1:]
    cell = {"data": "digits", "protocol": protocol, "behaviour": behaviour, "share": share}
    numbers = []
    for row in csv.DictReader(lines):
        if all(row[name] == text for name, text in cell.items()) and row[value]:
            numbers.append(float(row[value]))
    return float(np.mean(numbers))
