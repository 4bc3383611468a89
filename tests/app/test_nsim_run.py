"""A run of NSIM from the command line, on a small file of traces made by hand."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from securecluster.app.cli import main
from securecluster.data.stores import FOLDER
from securecluster.estimator import fit
from securecluster.pair_network import Plan

pa = pytest.importorskip("pyarrow")
pq = pytest.importorskip("pyarrow.parquet")


@pytest.fixture
def traces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Six persons with one leg of 60 positions each, near one of two places; and a pair network that hardly trains."""
    draw, rows = np.random.default_rng(0), []
    for person in range(6):
        path = np.array([2000 + 5000 * (person % 2), 3000]) + np.cumsum(draw.normal(size=(60, 2)), axis=0) * 40
        rows += [(f"p{person}", 10 * k, float(x), float(y), 0) for k, (x, y) in enumerate(path)]
    columns = dict(zip(("user_id", "t", "x", "y", "leg"), (list(column) for column in zip(*rows, strict=True)), strict=True))
    folder = tmp_path / "data" / "most_mobility"
    folder.mkdir(parents=True)
    pq.write_table(pa.table(columns), folder / "traces.parquet")
    pq.write_table(pa.table({"user_id": [f"p{k}" for k in range(6)], "slice": [str(k % 2) for k in range(6)]}), folder / "users.parquet")
    monkeypatch.setenv(FOLDER, str(tmp_path / "data"))
    brief = (Plan(width=32, embedding=8, steps=100),)
    monkeypatch.setattr("securecluster.synthetic.fit", lambda rows, true, draws, grid: fit(rows, true, draws, grid=brief, networks=1))


@pytest.mark.usefixtures("traces")
def test_a_run_reports_correlations_and_draws_the_pairs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "run"
    options = ["--clients", "6", "--rounds", "3", "--local-rounds", "2", "--synthetic", "16", "--positions", "30", "60"]
    assert main(["run", "nsim", "--data", "mobility", *options, "--transcript", "full", "--out", str(out)]) == 0
    lines = [json.loads(line) for line in (out / "history.jsonl").read_text().splitlines()]
    assert len(lines[1]["pairs_real"]) == 15
    assert -1 <= lines[1]["pearson_real"] <= 1
    assert (out / "similarity-pairs.png").read_bytes().startswith(b"\x89PNG")
    result = json.loads((out / "result.json").read_text())
    assert "layer after training alone, in the clear" in json.dumps(result["privacy"])
    assert main(["replay", str(out)]) == 0


def test_a_mask_on_layers_is_refused_on_the_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "nsim", "--layer-mask", "permutation"]) == 2
    assert "reads the weights themselves" in capsys.readouterr().err
