"""The scripts for the tables of Briggs et al. 2020: their cells, and a table at the smallest scale,
read back and gone on with.
"""

from __future__ import annotations

import csv
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from benchmarks.papers import flhc_iid, flhc_runs, flhc_tables
from benchmarks.sheet import numbers
from securecluster import Federation, LabelSwap
from securecluster.protocols import FLHC, FedAvg, Settings

GRIDS = [flhc_tables.TABLES[number] for number in (1, 2, 3)]
PAIRS = [flhc_tables.TABLES[number] for number in (4, 5, 6)]
SMALL = {"clients": 8, "samples": 40, "model": "mlp-32", "lr": 0.2, "rounds": 5, "target": 0.6}
OPTIONS = SimpleNamespace(seeds=1, scale="cpu", minutes=10.0)


def on_disk(name: str) -> list[dict[str, str]]:
    lines = Path(f"benchmarks/results/papers/{name}.csv").read_text().splitlines()
    return list(csv.DictReader(lines[1:]))


@pytest.fixture(autouse=True)
def small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(flhc_runs.SCALES, ("digits", "cpu"), SMALL)
    monkeypatch.setitem(flhc_runs.SCALES, ("digits", "full"), {**SMALL, "rounds": 500})
    monkeypatch.setattr(flhc_runs, "SHARES", (0.5, 1.0))
    monkeypatch.setattr(flhc_runs, "BEFORE", (1, 3))
    monkeypatch.setattr(flhc_runs, "PAIRS_BEFORE", 3)


def test_the_cells_of_every_table(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    for scale in ("cpu", "full"):
        for wanted in GRIDS:
            assert len(wanted.cells(scale, 3)) == 3 * (4 + 16)
        for wanted in PAIRS:
            assert len(wanted.cells(scale, 3)) == 3 * (1 + 10)
        iid = flhc_iid.cells(scale, 1)
        assert len(iid) == 4 + 16 + 10
        for cells in (iid, *(wanted.cells(scale, 1) for wanted in (*GRIDS, *PAIRS))):
            assert cells[0]["method"] == "fl" and all(
                cell["paper"] for cell in cells if cell["method"] == "flhc"
            )


@pytest.mark.exhaustive
def test_a_table_over_cf_and_n(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def cells(scale: str, seeds: int) -> list[Any]:
        return flhc_runs.grid(
            "digits",
            "label-swap",
            scale,
            seeds,
            2.0,
            dict.fromkeys(((c, n) for c in (0.5, 1.0) for n in (1, 3)), "p"),
        )

    flhc_runs.table("t", cells, ("cf", "n"), OPTIONS)
    rows = on_disk("t")
    done = [row for row in rows if row["status"] == "done"]
    assert [row["method"] for row in done] == ["fl", "flhc", "flhc"] * 2
    assert [row["scale"] for row in rows if row["status"] != "done"] == ["full"] * 6
    federation = Federation.simulate("digits", scenario=LabelSwap(), clients=8, samples=40, seed=0)
    training: dict[str, Any] = {
        "rounds": 5, "model": "mlp-32", "lr": 0.2, "batch_size": 10, "participation": 0.5,
    }  # fmt: skip
    fl = FedAvg(**training).fit(federation, Settings(target=0.6)).history_
    own = (
        FLHC(**training, pre_rounds=3, threshold=2.0).fit(federation, Settings(target=0.6)).history_
    )
    row = next(row for row in done if (row["cf"], row["n"]) == ("0.5", "3"))
    figures = (own[3]["accuracy"], own[4]["accuracy"], own[3]["at_target"], own[4]["at_target"])
    assert [float(row[name]) for name in flhc_runs.FOUR] == pytest.approx(figures, abs=1e-5)
    assert float(row["fl_last_accuracy"]) == pytest.approx(fl[4]["accuracy"], abs=1e-5)
    assert row["last_accuracy_x"] == f"{own[4]['accuracy'] / fl[4]['accuracy']:.2f}"
    assert int(row["clusters"]) == own[3]["clusters"] and float(row["ari"]) == pytest.approx(
        own[3]["ari"], abs=1e-5
    )
    zero = [row for row in done if row["method"] == "flhc" and float(row["fl_post_share"]) == 0]
    assert zero and all(row["post_share_x"] == "–" for row in zero)
    assert "\n1 3" in capsys.readouterr().out
    monkeypatch.setattr(flhc_runs, "_run", lambda *_: pytest.fail("measured again"))
    flhc_runs.table("t", cells, ("cf", "n"), OPTIONS)
    assert on_disk("t") == rows


def test_the_best_threshold_stands_beside_the_default_rules(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    runs: list[dict[str, Any]] = []
    run = flhc_runs._run

    def watched(cell: Any, at: Any) -> dict[str, Any]:
        runs.append(run(cell, at))
        return runs[-1]

    monkeypatch.setattr(flhc_runs, "_run", watched)
    monkeypatch.setattr(flhc_runs, "QUANTILES", (0.3, 0.6, 0.8))
    cell = {
        **flhc_runs.plain("digits", "label-swap", "cpu", 0, 1.0),
        **flhc_runs.clustering(3, "l2", "average", "best"),
    }
    found = flhc_runs._best(cell)
    assert found["last_accuracy"] == max(one["last_accuracy"] for one in runs)
    assert (
        found["rule_last_accuracy"] == runs[0]["last_accuracy"]
        and found["rule_clusters"] == runs[0]["clusters"]
    )
    counts = [one["clusters"] for one in runs]
    assert len(set(counts)) == len(counts) > 2
    for one in runs[1:]:
        assert np.isclose(runs[0]["heights"], one["cut_at"]).any()


def test_numbers_of_the_paper_are_four_each() -> None:
    for wanted in (*GRIDS, *PAIRS):
        for text in wanted.paper.values():
            figures = [word for word in text.split() if not word.startswith("(")]
            assert text == "not completed" or (
                all(0 <= value <= 100 for value in numbers(" ".join(figures))) and len(figures) == 4
            )
