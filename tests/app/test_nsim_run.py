"""A run of NSIM from the command line, on a small file of traces made by hand."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from securecluster.app.cli import main
from securecluster.protocols.nsim import synthetic_users


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
        "--clients",
        "6",
        "--rounds",
        "3",
        "--local-rounds",
        "2",
        "--synthetic",
        "16",
        "--positions",
        "30",
        "60",
    ]
    assert (
        main(
            [
                "run",
                "nsim",
                "--data",
                "mobility",
                *options,
                "--transcript",
                "full",
                "--out",
                str(out),
            ]
        )
        == 0
    )
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
    assert main(["replay", str(out)]) == 0


def test_a_mask_on_layers_is_refused_on_the_command_line(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["run", "nsim", "--layer-mask", "permutation"]) == 2
    assert "reads the weights themselves" in capsys.readouterr().err
