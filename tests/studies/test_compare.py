"""`securecluster compare` as a user meets it, and breaks it."""

from __future__ import annotations

import errno
import io
import json
import math
import os
import pickle
import re
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
from cases import SMALL_FEDERATION
from commands import exit_of
from rich.console import Console

from securecluster import load
from securecluster.core.serialization import fault_of
from securecluster.data.simulation import Simulation
from securecluster.errors import RunFolderError, UpdateError
from securecluster.figures import curves
from securecluster.figures.looks import looks
from securecluster.folders.run_folder import locked
from securecluster.folders.schemas import Comparison
from securecluster.privacy.dp.accounting import gaussian_epsilon
from securecluster.privacy.dp.ledger import Ledger
from securecluster.protocols import CFL, FLHC, FedAvg
from securecluster.protocols.common.averages.averaging import AveragingState
from securecluster.protocols.registry import PROTOCOLS
from securecluster.runtime.run import Run
from securecluster.studies import compare, worker_pool
from securecluster.studies import comparison_figures as comparison

SMALL = [
    "--clients", "6", "--clusters", "2", "--samples", "40", "--rounds", "5", "--dropout", "0.05",
    "--threads", "1",
]  # fmt: skip
NAMES = ["cfl", "fedavg", "local"]


def _timeless(path: Path) -> Any:
    """A JSON file without its clocks."""
    found = json.loads(path.read_text())
    for row in (found, *found.get("protocols", ())):
        row.pop("seconds", None)
    return found


@pytest.fixture(scope="module")
def whole(
    tmp_path_factory: pytest.TempPathFactory,
    with_pictures: Callable[[], AbstractContextManager[None]],
) -> Path:
    """A comparison that nobody disturbed, and its pictures."""
    out = tmp_path_factory.mktemp("whole") / "deep" / "out"
    with with_pictures():
        assert exit_of("compare", *NAMES, *SMALL, "--quiet", "--out", out) == 0
    return out


def test_each_run_is_the_one_that_run_alone_makes(whole: Path, tmp_path: Path) -> None:
    for name in NAMES:
        assert exit_of("run", name, *SMALL, "--quiet", "--out", tmp_path / name) == 0
        assert _timeless(whole / name / "result.json") == _timeless(tmp_path / name / "result.json")
        for part in (
            "config.json",
            "history.jsonl",
            "models.safetensors",
            "server.safetensors",
            "transcript/index.jsonl",
        ):
            assert (whole / name / part).read_bytes() == (tmp_path / name / part).read_bytes(), (
                name,
                part,
            )


def test_the_rows_say_what_the_runs_say(whole: Path) -> None:
    content = json.loads((whole / "compare.json").read_text())
    assert (content["data"], content["scenario"], content["clients"]) == ("digits", "label-swap", 6)
    assert (content["seed"], content["reproducible_keys"]) == (None, True)
    assert fault_of(content, Comparison) is None
    assert [row["protocol"] for row in content["protocols"]] == NAMES
    for row in content["protocols"]:
        result = json.loads((whole / row["protocol"] / "result.json").read_text())
        assert (row["clusters"], row["ari"], row["error"]) == (
            result["clusters"],
            result["metrics"]["ari"],
            None,
        )
        assert (row["up"], row["down"], row["seconds"]) == (
            result["bytes"]["up"],
            result["bytes"]["down"],
            result["seconds"],
        )
        assert row["servers"] == result["bytes"]["servers"] == 0
        assert row["accuracy"] == result["metrics"]["accuracy"]["after"]
        assert (
            row["epsilon"]
            == result["privacy"]["epsilon"]
            == (0 if row["protocol"] == "local" else None)
        )
        before = (
            None
            if row["protocol"] == "local" or result["clusters"] == 1
            else result["metrics"]["accuracy"]["before"]
        )
        assert row["accuracy_before"] == before
    for picture in ("accuracy.png", "cost.png"):
        assert (whole / picture).read_bytes().startswith(b"\x89PNG")
    assert not list(whole.rglob("*.tmp"))


def test_each_run_replays_and_resumes_by_itself(
    whole: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in NAMES:
        assert exit_of("replay", whole / name) == 0
        assert exit_of("resume", whole / name, "--quiet") == 0
    assert exit_of("replay", whole) == 2
    assert (
        f"holds a comparison: replay one of its runs, such as {whole / 'cfl'}"
        in capsys.readouterr().err
    )


@pytest.mark.always
def test_each_protocol_has_the_mean_scores_of_its_run(whole: Path) -> None:
    for row in json.loads((whole / "compare.json").read_text())["protocols"]:
        fitted = load(whole / row["protocol"])
        frame = fitted.to_frame("scores")
        for name, value in row["scores"].items():
            assert value == pytest.approx(frame[name].mean())
        assert row["accuracy_baseline"] == pytest.approx(frame["accuracy_baseline"].mean())
        assert row["below_baseline"] == (frame["accuracy"] < frame["accuracy_baseline"]).sum()


def test_a_comparison_is_a_frame(whole: Path, tmp_path: Path) -> None:
    frame = compare.to_frame(whole)
    rows = json.loads((whole / "compare.json").read_text())["protocols"]
    assert list(frame.index) == [row["protocol"] for row in rows]
    assert frame["accuracy"].tolist() == [row["accuracy"] for row in rows]
    assert frame["epsilon"].tolist() == [
        math.inf if row["epsilon"] is None else row["epsilon"] for row in rows
    ]
    with pytest.raises(RunFolderError, match="resume"):
        compare.to_frame(tmp_path)


def test_the_table_and_the_rounds_are_printed_and_quiet_prints_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert exit_of("compare fedavg local", *SMALL, "--out", tmp_path / "a") == 0
    printed = capsys.readouterr().out
    assert "seed None" not in printed  # keys follow from it
    assert len(re.findall(r"^round +\d/5 ", printed, re.M)) == 10
    assert re.search(
        r"^ *fedavg +1 +0.00 +0\.\d{3} +[01]\.\d{3} +5 +\d+\.\d+ [kM]B +∞ +\d+\.\d *$",
        printed,
        re.M,
    )
    assert re.search(
        r"^ *local +6 +0.00 +0\.\d{3} +[01]\.\d{3} +5 +\d+\.\d kB +0 +\d+\.\d *$", printed, re.M
    )
    assert "before" not in printed and str(tmp_path / "a") in printed
    assert re.search(r"means of clients' scores *\n.*\n *protocol +accuracy +baseline", printed)
    assert exit_of("compare fedavg local --quiet", *SMALL, "--out", tmp_path / "b") == 0
    assert capsys.readouterr() == ("", "")


def test_runs_side_by_side_are_those_that_run_one_after_the_other(
    whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = []

    def results(work: Any, tasks: Sequence[Any], processes: int) -> Iterator[Any]:
        asked.append(processes)
        for task in reversed(tasks):  # they end in any order
            yield work(pickle.loads(pickle.dumps(task)))

    monkeypatch.setattr(worker_pool, "results", results)
    out = tmp_path / "r"
    assert exit_of("compare", *NAMES, *SMALL, "--jobs", "2", "--out", out) == 0
    assert _timeless(out / "compare.json") == _timeless(whole / "compare.json")
    printed = capsys.readouterr().out
    assert "round" not in printed.partition("protocol")[0]
    assert re.search(r"local ended .*fedavg ended .*cfl ended ", printed, re.S)
    assert asked[0] == 2


def test_the_federation_is_dealt_once_and_lies_under_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dealt: list[int] = []
    deal = Simulation.federation
    monkeypatch.setattr(Simulation, "federation", lambda self: dealt.append(1) or deal(self))
    monkeypatch.chdir(tmp_path)
    assert exit_of("compare fedavg local --quiet", *SMALL) == 0
    assert dealt == [1]
    (folder,) = (tmp_path / "runs").iterdir()
    assert re.fullmatch(r"compare-digits-\d{8}-\d{6}-\d+", folder.name)


def test_values_go_to_every_protocol_that_has_the_option_and_defaults_stay(tmp_path: Path) -> None:
    given = ["--lr", "0.05", "--eps1", "0.3", "--min-size", "4"]
    names = ["cfl", "fedavg", "fedavg:lr=0.2,clip=1"]
    out = tmp_path / "r"
    assert exit_of("compare", *names, *SMALL, *given, "--quiet", "--out", out) == 0
    cfl, fedavg, variant = (
        json.loads((out / name / "config.json").read_text())["protocol"] for name in names
    )
    assert cfl == {"name": "cfl", **CFL(rounds=5, lr=0.05, eps1=0.3, min_size=4).get_params()}
    assert fedavg == {"name": "fedavg", **FedAvg(rounds=5, lr=0.05).get_params()}
    assert variant == {"name": "fedavg", **FedAvg(rounds=5, lr=0.2, clip=1.0).get_params()}
    rows = json.loads((out / "compare.json").read_text())["protocols"]
    assert [row["protocol"] for row in rows] == names
    assert exit_of("resume", out, "--quiet") == exit_of("replay", out / names[2]) == 0
    assert CFL().mask != FedAvg().mask, "or this test could not see each one's own default"


def test_help_says_which_protocol_has_an_option_and_each_default(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert exit_of("compare cfl fedavg --help-all") == 0
    text = " ".join(capsys.readouterr().out.split())
    assert re.search(r"cfl: clusters with fewer members are not split \(default: 3\)", text)
    assert "communication rounds in all (default: 40)" in text
    assert "(default: cfl: permutation; fedavg: none)" in text
    assert (
        "training samples per client" in text
        and "--force" in text
        and "chance that a client does not reply" in text
    )


@pytest.mark.exhaustive
def test_every_protocol_can_be_compared(tmp_path: Path) -> None:
    arguments = [*SMALL_FEDERATION, "--rounds", "3", "--epochs", "1", "--transcript", "none"]
    arguments += ["--pre-rounds", "1", "--local-rounds", "1", "--starts", "2"]
    names = [name for name in PROTOCOLS if name != "nsim"]  # which needs positions
    assert exit_of("compare", *names, *arguments, "--quiet", "--out", tmp_path / "r") == 0
    rows = json.loads((tmp_path / "r" / "compare.json").read_text())["protocols"]
    assert [row["protocol"] for row in rows] == names
    assert all(row["error"] is None and 0 <= row["accuracy"] <= 1 for row in rows)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["cfl", "cfll"], "did you mean 'cfl'"),
        (["cfl"], "two protocols or more"),
        (["cfl", "fedavg", "cfl"], "cfl is named twice"),
        (["cfl", "cfl:"], "would run the same"),
        (["cfl", "cfl:model=../x"], "none can be called so: give the option after"),
        (["cfl", "cfl:sketsh=64"], "did you mean 'sketch'"),
        (["--rounds", "3", "cfl", "fedavg"], "the protocols first"),
        (["fedavg", "local", "--eps1", "0.3"], "--eps1 is an option of cfl only"),
        (["fedavg", "local", "--min-size=4"], "--min-size is an option of cfl only"),
        (["fedavg", "cfl", "--gamma-max=0.3"], "is set in Python, by CFL(gamma_max=...)"),
        (["fedavg", "cfl", "--no-tree"], "is set in Python, by CFL(tree=...)"),
        (["cfl", "local", "--mask", "permutatoin"], "did you mean 'permutation'"),
        (["fedavg", "local", "--mask", "haar"], "fedavg: "),
        (["fedavg", "cfl", "--eps1", "-1"], "cfl: --eps1 = -1.0 is not possible"),
        (["local", "cfl", "--clusterer", "median"], "cfl: unknown --clusterer"),
        (["cfl", "fedavg", "--model", "mpl"], "did you mean 'mlp'"),
        (["cfl", "fedavg", "--data", "digit"], "did you mean 'digits'"),
        (["cfl", "fedavg", "--clients", "1"], "at least two clients"),
        (["cfl", "fedavg", "--clients", "3"], "4 clusters among 3 clients"),
        (["cfl", "fedavg", "--rounds", "0"], "cfl: --rounds"),
        (["cfl", "fedavg", "--dropout", "1"], "dropout"),
        (["cfl", "fedavg", "--transcript", "all"], "unknown --transcript"),
        (["cfl", "fedavg", "--jobs", "-1"], "jobs = -1 is not possible"),
        (["cfl", "fedavg", "--engine", "ray"], "--engine has left securecluster: "),
    ],
)
def test_mistakes_get_one_sentence_and_leave_nothing(
    arguments: list[str], sentence: str, refused_by: Callable[..., None]
) -> None:
    refused_by(sentence, "compare", *arguments)


def test_a_comparison_in_use_is_not_replaced(
    whole: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    shutil.copytree(whole, out)
    for busy in (out, out / "fedavg"):
        with locked(busy):
            assert exit_of("compare fedavg local --force", *SMALL, "--out", out) == 2
        assert f"{busy} is being written by another process" in capsys.readouterr().err
    assert (out / "cfl" / "result.json").exists()


@pytest.mark.parametrize(
    ("error", "reason", "files"),
    [
        (UpdateError("round 1: not finite"), "round 1: not finite", "compare.json"),
        (KeyError("a bug"), "KeyError: 'a bug'", "compare.json and failures.txt"),
    ],
)
def test_a_protocol_that_fails_loses_nobody_else_and_is_tried_again(
    error: Exception,
    reason: str,
    files: str,
    whole: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def diverge(*_: object) -> AveragingState:
        raise error

    with monkeypatch.context() as patched:
        patched.setattr(FedAvg, "run_server", diverge)
        assert exit_of("compare", *NAMES, *SMALL, "--out", tmp_path / "r") == 2
    said, content = capsys.readouterr(), json.loads((tmp_path / "r" / "compare.json").read_text())
    assert (
        said.err.count("\n") == 1 and f"fedavg failed: {reason}; 2 of 3 protocols ended" in said.err
    )
    assert said.err.endswith(f"{files}\n")
    tracebacks = tmp_path / "r" / "failures.txt"
    assert tracebacks.is_file() == ("failures.txt" in files)
    if tracebacks.is_file():
        assert tracebacks.read_text().startswith("fedavg\nTraceback")
    assert re.search(r"^ *fedavg +failed +– ", said.out, re.M)
    failed = {row["protocol"]: row["error"] for row in content["protocols"]}
    assert failed == {"cfl": None, "fedavg": reason, "local": None}
    assert content["protocols"][2] | {"seconds": 0} == json.loads(
        (whole / "compare.json").read_text()
    )["protocols"][2] | {"seconds": 0}
    assert exit_of("resume", tmp_path / "r", "--quiet") == 0
    assert _timeless(tmp_path / "r" / "compare.json") == _timeless(whole / "compare.json")
    assert not tracebacks.exists()


def test_when_everyone_diverges_each_row_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert exit_of("compare cfl local --lr 1e30 --quiet", *SMALL, "--out", tmp_path / "r") == 2
    assert "0 of 2 protocols ended" in capsys.readouterr().err
    rows = json.loads((tmp_path / "r" / "compare.json").read_text())["protocols"]
    assert all("lower the learning rate" in row["error"] for row in rows)
    assert [p.name for p in (tmp_path / "r").glob("*.png")] == []


def test_a_full_disk_is_one_sentence_and_the_comparison_goes_on_afterwards(
    whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out, real = tmp_path / "r", os.replace

    def full(source: Any, target: Any) -> None:
        if "fedavg" in str(target) and "checkpoint-000002" in str(target):
            raise OSError(errno.ENOSPC, "No space left on device")
        real(source, target)

    with monkeypatch.context() as patched:
        patched.setattr(os, "replace", full)
        assert exit_of("compare", *NAMES, *SMALL, "--quiet", "--out", out) == 2
    said = capsys.readouterr().err
    assert (
        said.count("\n") == 1
        and "free some space" in said
        and said.endswith(f"go on with: securecluster resume {out}\n")
    )
    assert not (out / "compare.json").exists() and (out / "cfl" / "result.json").exists()
    assert not list((out / "local").glob("checkpoint-*")), (
        "what cannot be written stops the comparison"
    )
    assert exit_of("resume", out, "--quiet") == 0
    assert _timeless(out / "compare.json") == _timeless(whole / "compare.json")


def test_other_data_and_damaged_folders_are_refused_in_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "r"
    assert exit_of("compare fedavg local --quiet", *SMALL, "--out", out) == 0
    kept = (out / "local" / "config.json").read_text()
    for name, text in (
        ("local/config.json", kept.replace('"data_digest": "', '"data_digest": "0')),
        ("local/config.json", "{"),
        ("fedavg/result.json", "{"),
        ("config.json", '{"schema": 3, "compare": []}'),
        ("config.json", "[]"),
    ):
        before = (out / name).read_text()
        (out / name).write_text(text)
        assert exit_of("resume", out) == 2
        said = capsys.readouterr().err
        assert f"{out / name} differs from what was written" in said and said.count("\n") == 1, said
        (out / name).write_text(before)
    assert exit_of("resume", out, "--quiet") == 0


def check_same_comparison(out: Path, whole: Path) -> None:
    """Resume a stopped comparison, and compare it with the one that nobody stopped."""
    assert exit_of("resume", out, "--quiet") == 0
    assert _timeless(out / "compare.json") == _timeless(whole / "compare.json")
    for name in (
        "cfl/history.jsonl",
        "fedavg/models.safetensors",
        "local/server.safetensors",
        "accuracy.png",
        "cost.png",
    ):
        assert (out / name).read_bytes() == (whole / name).read_bytes(), name


@pytest.mark.exhaustive
@pytest.mark.usefixtures("pictures")
@pytest.mark.parametrize("running", ["cfl", "fedavg"])
def test_a_stopped_comparison_resumes_to_the_same_one(
    running: str,
    whole: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    out, checkpoint = tmp_path / "stopped", Run._checkpoint

    def checkpoint_and_stop(run: Run) -> None:
        checkpoint(run)
        if list((out / running).glob("checkpoint-000002")):
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Run, "_checkpoint", checkpoint_and_stop)
        assert exit_of("compare", *NAMES, *SMALL, "--quiet", "--out", out) == 130
    advice = f"securecluster: stopped; go on with: securecluster resume {out}\n"
    assert capsys.readouterr().err == advice
    assert not (out / running / "result.json").exists()
    assert (out / "cfl" / "result.json").exists() == (running == "fedavg")
    check_same_comparison(out, whole)


def test_the_cost_of_each_protocol_is_a_point_in_its_colour(whole: Path) -> None:
    rows = json.loads((whole / "compare.json").read_text())["protocols"]
    (axes,) = comparison._cost("digits, seed 0", rows, "accuracy", "").axes
    assert axes.get_xlabel() == "MB of a run, up and down"  # no noise to be paler by
    assert axes.get_ylabel() == "test accuracy, mean over clients"
    points = {}
    for container in axes.containers:
        (x,), (y,) = container.lines[0].get_data()
        style = (container.lines[0].get_color(), container.lines[0].get_marker())
        points[style] = (round(x * 1e6), y)
    styles = [(look.color, look.marker) for look in (looks(NAMES)[name] for name in NAMES)]
    sent = [(row["up"] + row["down"], row["accuracy"]) for row in rows]
    assert points == dict(zip(styles, sent, strict=True))


@pytest.mark.exhaustive
def test_who_is_told_the_number_of_clusters_is_told_the_one_that_is_given(tmp_path: Path) -> None:
    names = ["ifca", "local-kmeans", "random", "fedavg"]
    small = [
        "--clients", "6", "--samples", "20", "--rounds", "2", "--epochs", "1",
        "--transcript", "none", "--quiet",
    ]  # fmt: skip
    for more, k in ((["--clusters", "2"], 2), (["--clusters", "2", "--k", "3"], 3), ([], 4)):
        out = tmp_path / str(k)
        assert exit_of("compare", *names, *small, *more, "--out", out) == 0
        content = json.loads((out / "compare.json").read_text())
        assert content["true_clusters"] == (4 if not more else 2)
        assert [row["given"] for row in content["protocols"]] == [{"k": k}] * 3 + [None]
        for name in names[:3]:
            assert json.loads((out / name / "config.json").read_text())["protocol"]["k"] == k
        for row in content["protocols"]:
            lines = (out / row["protocol"] / "history.jsonl").read_text().splitlines()
            assert row["rounds"] == len(lines)
        assert [row["rounds"] for row in content["protocols"]] == [2, 2, 2, 2]


def test_curves_show_the_start_that_went_on(tmp_path: Path) -> None:
    lines = [{"round": t, "start": t % 3, "accuracy": t / 10} for t in (1, 2, 3, 4, 5)]
    lines += [{"round": 6, "start": 1, "accuracy": 0.9}]
    assert [line["round"] for line in curves.kept(lines)] == [1, 4, 6]
    plain = [{"round": 1, "accuracy": 0.1}]
    assert curves.kept(plain) == plain and curves.kept([]) == []
    made = comparison._learning(
        "t", {"ifca": [(1, 0.1, False), (2, 0.4, False)]}, {"cfl": 0, "ifca": 3}, "accuracy", ""
    )
    (axes,) = made.axes
    assert [text.get_text() for text in made.legends[0].get_texts()] == [
        "IFCA (kept start; 3 rounds in others)"
    ]
    assert axes.lines[0].get_xdata().tolist() == [1, 2]


def _row(protocol: str, **more: Any) -> dict[str, Any]:
    """A row of a comparison under noise, where every column has something to say."""
    numbers = {
        "clusters": 12, "ari": -0.04, "accuracy_before": 0.703, "accuracy": 0.875, "at_target": 0.4,
        "rounds": 1057,
    }  # fmt: skip
    sent = {"up": 875_400_000, "down": 12_000_000, "servers": 80_100_000}
    priced = {
        "epsilon": 107123.4, "dp_unit": "client", "seconds": 1234.5, "error": None, "given": None,
    }  # fmt: skip
    return {"protocol": protocol, **numbers, **sent, **priced, **more}


@pytest.mark.parametrize("width", [200, 80, 60, 40])
def test_no_cell_of_the_table_is_cut(width: int) -> None:
    rows = [
        _row("local-kmeans", given={"k": 4}), _row("ifca", given={"k": 4}),
        _row("flhc", epsilon=None), _row("oneshot", given={"tasks": 3}),
    ]  # fmt: skip
    content = {
        "data": "digits", "scenario": "label-swap", "clients": 20, "true_clusters": 4, "seed": 0,
        "target": 0.99,
    }  # fmt: skip
    content |= {"metric": "accuracy", "protocols": rows}
    out = io.StringIO()
    comparison.show(content, Console(width=width, file=out))
    printed = out.getvalue()
    assert "…" not in printed and max(map(len, printed.splitlines())) <= width
    words = {word.strip() for word in re.split(r" {2,}|\n", printed)}
    cells = [comparison._cells(row, 0.99, "accuracy") for row in rows]
    for cell in cells:
        for heading, text in cell.items():
            assert heading in words and text in words, (heading, text)
    assert "4 true clusters" in re.sub(r"\s+", " ", printed)
    assert (printed.count("protocol") == 1) == (width == 200)


def test_columns_without_a_number_are_left_out(capsys: pytest.CaptureFixture[str]) -> None:
    row = {
        "protocol": "cfl", "clusters": 4, "ari": None, "accuracy_before": 0.7, "accuracy": 0.95,
        "at_target": None, "error": None,
    }  # fmt: skip
    row |= {"up": 10, "down": 20, "servers": 0, "epsilon": None, "seconds": 1.0}
    content = {
        "data": "digits", "scenario": "iid", "clients": 20, "seed": 0, "target": 0.9,
        "metric": "accuracy", "protocols": [row],
    }  # fmt: skip
    comparison.show(content)
    printed = capsys.readouterr().out
    assert "at 0.9" not in printed and "ARI" not in printed and "servers" not in printed
    comparison.show(content | {"protocols": [row | {"at_target": 0.75, "servers": 30000}, row]})
    told = capsys.readouterr().out
    assert re.search(
        r"before +accuracy +at 0.9 .* 0.700 +0.950 +0.750 .* 0.700 +0.950 +– ", told, re.S
    )
    assert re.search(r"up\+down +servers .* 0.0 kB +30.0 kB +∞ .* 0.0 kB +– +∞ ", told, re.S)
    assert "of one" not in printed
    comparison.show(
        content
        | {
            "protocols": [
                row | {"epsilon": 8.0, "dp_unit": "client"},
                row | {"epsilon": 9.0, "dp_unit": "example"},
            ]
        }
    )
    assert re.search(
        r" 8 .* 9 .*ε of one client: cfl; ε of one example: cfl", capsys.readouterr().out, re.S
    ), "units are told apart"
    totals = [
        {"unit": unit, "protocols": ["cfl"], "epsilon": 1.0, "delta": delta}
        for unit, delta in (("client", 1e-5), ("example", 1e-6))
    ]
    priced = [row | {"dp_unit": "client"}, row | {"dp_unit": "example"}]
    comparison.show(content | {"protocols": priced, "together": totals})
    assert "ε of one client, at δ = 1e-05: cfl; ε of one example, at δ = 1e-06: cfl" in " ".join(
        capsys.readouterr().out.split()
    )


PRIVATE = ["--clip", "0.5", "--model", "linear", "--epochs", "1"]


def test_what_private_runs_cost_together_is_printed_and_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    noised = ["--noise", "4", "--pre-rounds", "2"]
    assert exit_of("compare fedavg flhc", *SMALL, *PRIVATE, *noised, "--out", tmp_path / "c") == 0
    content = json.loads((tmp_path / "c" / "compare.json").read_text())
    (total,) = content["together"]
    ledgers = [
        FedAvg.load(tmp_path / "c" / "fedavg").ledger_,
        FLHC.load(tmp_path / "c" / "flhc").ledger_,
    ]
    most = max(
        sum(
            i in event.ids
            for ledger in ledgers
            for event in ledger.events
            if event.noise_multiplier
        )
        for i in range(6)
    )
    assert total["epsilon"] == pytest.approx(gaussian_epsilon(math.sqrt(most) / 4, 1e-5), rel=1e-8)
    assert total["epsilon"] == Ledger.union(*ledgers).price(1e-5).epsilon
    assert total["epsilon"] > max(row["epsilon"] for row in content["protocols"])
    assert (total["unit"], total["protocols"], total["delta"]) == (
        "client",
        ["fedavg", "flhc"],
        1e-5,
    )
    line = f"together, ε of one client: {total['epsilon']:.4g} at δ = 1e-05 (fedavg, flhc)"
    assert line in capsys.readouterr().out
    assert exit_of("resume", tmp_path / "c") == 0
    assert line in capsys.readouterr().out


def test_units_of_privacy_are_not_added_up_and_runs_without_noise_are_named() -> None:
    def row(
        name: str, unit: str | None, epsilon: float | None, error: str | None = None
    ) -> dict[str, Any]:
        return {"protocol": name, "dp_unit": unit, "epsilon": epsilon, "error": error}

    rows = [
        row("a", "client", 1.0), row("b", "example", None), row("c", None, None),
        row("d", None, 0.0), row("e", None, None, "no"),
    ]  # fmt: skip
    totals = [
        {"unit": "client", "protocols": ["a"], "epsilon": 1.0, "delta": 1e-5},
        {"unit": "example", "protocols": ["b"], "epsilon": None},
    ]
    said = comparison._together({"protocols": rows, "together": totals})
    assert said == [
        "together, ε of one client: 1 at δ = 1e-05 (a)",
        "together, ε of one example: ∞ (b)",
        "ε of a client and ε of an example do not add up: neither figure covers the runs of the "
        "other",
        "without noise, so that ε with it is infinite: c",
        "not counted, what was released before it failed: e",
    ]
    assert comparison._together({"protocols": rows}) == []  # of an older version
