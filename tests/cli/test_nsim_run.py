"""A run of NSIM from the command line, on a small file of traces made by hand."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from commands import exit_of

from securecluster import NSIM, Federation
from securecluster.cli.main import main
from securecluster.protocols import Settings
from securecluster.protocols.nsim import synthetic_users
from securecluster.studies import sweep_figures as plots


@pytest.mark.usefixtures("pictures")
@pytest.mark.usefixtures("traces")
def test_a_run_reports_correlations_and_draws_the_pairs(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    brief_fit: Callable[..., Any],
) -> None:
    monkeypatch.setattr(synthetic_users, "fit", brief_fit)
    out = tmp_path / "run"
    options = [
        "--clients", "6", "--rounds", "3", "--local-rounds", "2", "--synthetic", "16",
        "--positions", "30", "60", "--pictures",
    ]  # fmt: skip
    assert exit_of("run nsim --data mobility --transcript full", *options, "--out", out) == 0
    lines = [json.loads(line) for line in (out / "history.jsonl").read_text().splitlines()]
    assert len(lines[1]["pairs_real"]) == 15
    assert -1 <= lines[1]["pearson_real"] <= 1
    assert (out / "similarity-pairs.png").read_bytes().startswith(b"\x89PNG")
    result = json.loads((out / "result.json").read_text())
    assert "layer after training alone, in the clear" in json.dumps(result["privacy"])
    told = capsys.readouterr().out
    assert "did not see" in told and "any model" not in told, (
        "a layer in the clear is part of one, and tells of the rest"
    )
    assert exit_of("replay", out) == 0


@pytest.mark.usefixtures("traces")
def test_a_sweep_has_the_correlation_of_predicted_similarities(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, brief_fit: Callable[..., Any]
) -> None:
    monkeypatch.setattr(synthetic_users, "fit", brief_fit)
    monkeypatch.setattr(plots, "draw", lambda *_: [])
    options = ["--data", "mobility", "--clients", "6", "--rounds", "3", "--clip", "0.3"]
    users = ["--local-rounds", "2", "--synthetic", "16", "--positions", "30", "60"]
    command = ["sweep", "nsim", "local", *options, *users, "--noise", "0", "--seeds", "1"]
    out = tmp_path / "sweep"
    assert main([*command, "--jobs", "1", "--quiet", "--out", str(out)]) == 0
    with (out / "runs.csv").open(newline="") as stream:
        nsim, local = csv.DictReader(stream)
    made = NSIM(rounds=3, local_rounds=2, synthetic=16, positions=(30, 60), clip=0.3)
    federation = Federation.simulate("mobility", clients=6, seed=0)
    fitted = made.fit(federation, Settings(transcript="none", threads=1))
    true, predicted = np.array(fitted.history_[1]["pairs_real"]).T
    # pairs of the history have four digits
    assert float(nsim["pearson"]) == pytest.approx(np.corrcoef(true, predicted)[0, 1], abs=1e-3)
    assert local["pearson"] == ""
