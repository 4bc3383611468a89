"""The command line as a user meets it."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from safetensors.torch import load_file

from securecluster.cli.main import main
from securecluster.protocols.registry import PROTOCOLS

SMALL = ["--clients", "6", "--clusters", "2", "--samples", "40", "--rounds", "3"]


@pytest.mark.always
@pytest.mark.usefixtures("pictures")
def test_the_run_folder_holds_what_the_contract_says(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "deep" / "run"
    assert main(["run", "cfl", *SMALL, "--pictures", "--out", str(out)]) == 0
    printed = capsys.readouterr().out
    assert len(re.findall(r"^round +\d+/3", printed, re.M)) == 3
    for part in ("accuracy before", "train", "did not see", "infinite", str(out)):
        assert part in printed
    result = json.loads((out / "result.json").read_text())
    assert set(result) >= {
        "schema", "protocol", "data", "scenario", "model", "seed", "device", "version", "clients",
        "clusters", "labels", "truth", "dropped", "metrics", "observer", "bytes", "privacy",
        "seconds",
    }  # fmt: skip
    assert set(result["metrics"]) == {"ari", "nmi", "purity", "exact", "accuracy", "at_target"}
    assert set(result["metrics"]["accuracy"]) == {
        "before", "after", "per_cluster", "baseline", "baseline_per_cluster", "below_baseline",
    }  # fmt: skip
    assert set(result["bytes"]) == {"up", "down", "servers", "by_message"}
    privacy = result["privacy"]
    priced = {
        "epsilon", "epsilon_rdp", "epsilon_replace", "delta", "accountant", "unit", "neighbouring",
        "placement", "clip", "noise",
    }  # fmt: skip
    shown = {"masks", "server_view", "unseen", "unprotected", "fields", "free", "query_view"}
    said = {"reproducible_keys", "releases", "exact", "assumed", "not_covered", "uncovered_files"}
    assert set(privacy) == shown | said | priced
    assert privacy["epsilon"] is None
    assert privacy["reproducible_keys"] is True
    assert (
        result["schema"],
        result["protocol"],
        result["clients"],
        len(result["labels"]),
        result["observer"],
    ) == (3, "cfl", 6, 6, True)
    assert len((out / "history.jsonl").read_text().splitlines()) == 3
    assert set(load_file(out / "models.safetensors")) == {
        f"cluster0.{n}" for n in ("1.weight", "1.bias", "3.weight", "3.bias")
    }
    for picture in ("similarity.png", "accuracy.png", "separation.png"):
        assert (out / picture).read_bytes().startswith(b"\x89PNG")
    assert not list(out.rglob("*.tmp"))


@pytest.mark.skipif(os.name != "posix", reason="permissions are those of POSIX")
def test_what_its_owner_alone_may_read_is_said_to_be_uncovered(tmp_path: Path) -> None:
    options = ["--clip", "1", "--noise", "1", "--transcript", "full"]
    assert main(["run", "fedavg", *SMALL, *options, "--out", str(tmp_path / "run")]) == 0
    files = [path for path in (tmp_path / "run").rglob("*") if path.is_file()]
    private = {path for path in files if not path.stat().st_mode & 0o077 and path.stat().st_size}
    tops = {path.relative_to(tmp_path / "run").parts[0] for path in private}
    assert "clients.safetensors" in tops
    result = json.loads((tmp_path / "run" / "result.json").read_text())
    said = " ".join(result["privacy"]["uncovered_files"])
    assert {top for top in tops if top not in said} == set()


@pytest.mark.always
# which needs positions: see tests/cli/test_nsim_run.py
@pytest.mark.usefixtures("pictures")
@pytest.mark.few(1)
@pytest.mark.parametrize("protocol", sorted(set(PROTOCOLS) - {"nsim"}))
def test_every_protocol_runs_and_reports_its_truth(protocol: str, tmp_path: Path) -> None:
    longer = [*SMALL, "--rounds", "12", "--epochs", "1"]  # some methods cluster after ten rounds
    if protocol == "ifca":
        longer += ["--starts", "2"]
    if protocol == "hidden":
        longer += ["--k", "2"]  # six clients fill no more clusters
    assert (
        main(["run", protocol, *longer, "--pictures", "--quiet", "--out", str(tmp_path / "r")]) == 0
    )
    result = json.loads((tmp_path / "r" / "result.json").read_text())
    first = json.loads((tmp_path / "r" / "history.jsonl").read_text().splitlines()[0])
    assert (result["metrics"]["accuracy"]["before"] is None) == (first["clusters"] > 1)
    assert (
        result["clusters"]
        == len(set(result["labels"]))
        == len(result["metrics"]["accuracy"]["per_cluster"])
    )
    assert result["privacy"]["epsilon"] == (0.0 if protocol == "local" else None)
    assert (result["clusters"] == 6) if protocol == "local" else (result["clusters"] < 6)
    assert (tmp_path / "r" / "tree.png").exists() == (protocol == "cfl")
    assert (tmp_path / "r" / "dendrogram.png").exists() == (protocol in ("flhc", "oneshot"))
    assert (tmp_path / "r" / "relevance.png").exists() == (protocol == "oneshot")
    assert (tmp_path / "r" / "graph.png").exists() == (protocol == "srfca")


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["run", "cfll"], "did you mean 'cfl'"),
        (["runn"], "did you mean 'run'"),
        (["run", "cfl", "--data", "digit"], "did you mean 'digits'"),
        (["run", "cfl", "--scenario", "labelswap"], "did you mean 'label-swap'"),
        (["run", "cfl", "--mask", "permutatoin"], "did you mean 'permutation'"),
        (["run", "cfl", "--model", "mpl"], "did you mean 'mlp'"),
        (["run", "cfl", "--device", "gpu"], "unknown --device"),
        (["run", "cfl", "--transcript", "all"], "unknown --transcript"),
        (["run", "cfl", "--engine", "ray"], "--engine has left securecluster: runs took about"),
        (["run", "cfl", "--workers=2"], "train in several --threads; sweep and compare carry"),
        (["run", "cfl", "--dtype", "float16"], "--dtype is set in Python, by Settings(dtype=...)"),
        (["run", "cfl", "--clients", "1"], "at least two clients"),
        (["run", "cfl", "--clients", "0"], "at least two clients"),
        (["run", "cfl", "--clients", "5000"], "use fewer clients"),
        (["run", "cfl", "--clients", "3"], "4 clusters among 3 clients"),
        (["run", "cfl", "--clusters", "6"], "at most 5 clusters"),
        (["run", "cfl", "--clusters", "0"], "at least one"),
        (["run", "cfl", "--scenario", "iid", "--clusters", "3"], "one cluster"),
        (["run", "cfl", "--samples", "500"], "at most 71"),
        (["run", "cfl", "--samples", "0"], "at most"),
        (["run", "cfl", "--rounds", "0"], "a whole number from 1"),
        (["run", "cfl", "--dropout", "1"], "dropout"),
        (["resume", "nowhere"], "not a run folder"),
        (["replay", "nowhere"], "not a run folder"),
    ],
)
def test_mistakes_get_one_sentence_and_leave_nothing(
    arguments: list[str], sentence: str, refused_by: Callable[..., None]
) -> None:
    refused_by(sentence, *arguments)


def test_updates_that_are_not_finite_stop_the_run_by_name(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "run"
    assert main(["run", "cfl", *SMALL, "--lr", "1e30", "--quiet", "--out", str(out)]) == 2
    said = capsys.readouterr().err
    assert re.fullmatch(
        r"securecluster: round \d+: delta of client\(s\) .* is not finite: lower the learning rate "
        r"\(--lr\)\n",
        said,
    )
    assert not (out / "result.json").exists()
    assert json.loads((out / "config.json").read_text())["protocol"]["lr"] == 1e30


def test_a_complete_run_resumes_to_itself(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "run"
    assert main(["run", "cfl", *SMALL, "--quiet", "--out", str(out)]) == 0
    before = {p.name: p.read_bytes() for p in out.iterdir() if p.is_file()}
    assert main(["resume", str(out)]) == 0
    assert "is complete" in capsys.readouterr().out
    assert {p.name: p.read_bytes() for p in out.iterdir() if p.is_file()} == before
