"""The command that checks a device and times it: its budget, its watchdog, its files, and a few of
its checks.
"""

from __future__ import annotations

import csv
import io
import json
import subprocess
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.gpu import checks, runs, timings, worker
from benchmarks.gpu.__main__ import main
from benchmarks.gpu.data import apart, differing
from benchmarks.gpu.pieces import Budget, Check, Piece, Skipped, Timing
from benchmarks.gpu.report import Results
from benchmarks.gpu.watchdog import watch
from benchmarks.gpu.worker import work
from securecluster.models.architectures import names
from securecluster.privacy.masking.masks import MASKS

CPU = torch.device("cpu")
COMMAND = [sys.executable, "-m", "benchmarks.gpu"]


class Clock:
    """A clock that tests set."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def __call__(self) -> float:
        return self.seconds


def check(name: str, error: Any = lambda device: 0.0, cost: float = 1.0) -> Check:
    return Check(name, 0.5, "for a test", error, cost)


def told(pieces: list[Piece], budget: Budget) -> list[dict[str, Any]]:
    events: list[dict[str, Any]] = []
    work(pieces, CPU, budget, events.append)
    return events


def rows(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as stream:
        return list(csv.DictReader(stream))


@pytest.mark.parametrize(("waits", "beyond"), [(0, 0), (7, 0), (9, 2)])
def test_waits_for_cuda_are_counted(
    waits: int, beyond: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a stub in the place of CUDA, which warns as torch does."""
    modes: list[str] = []

    class Trainer:
        start = torch.zeros(3)

        def train(self, starts: Any, clients: Any, plan: Any, step: int) -> None:
            for _ in range(waits if modes == ["warn"] else 1):
                warnings.warn("called a synchronizing CUDA operation", stacklevel=1)

    monkeypatch.setattr(checks, "cohort", lambda *of: Trainer())
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", modes.append)
    with pytest.warns(UserWarning, match="synchronizing"):  # outside what is counted
        assert checks.waited(checks.PLAN, 7, torch.device("cuda", 0)) == beyond
    assert modes == ["warn", "default"]


def test_what_does_not_fit_is_skipped_and_said_and_what_is_cheaper_goes_on() -> None:
    clock = Clock()

    def taking(seconds: float) -> Any:
        def error(device: torch.device) -> float:
            clock.seconds += seconds
            return 0.0

        return error

    pieces: list[Piece] = [
        check("short", taking(4), 4),
        check("long", taking(7), 7),
        check("last", taking(1), 1),
    ]
    events = told(pieces, Budget(10, clock))
    assert [(e["event"], e["piece"]) for e in events] == [
        ("begin", "short"),
        ("check", "short"),
        ("skipped", "long"),
        ("begin", "last"),
        ("check", "last"),
    ]
    assert events[2]["reason"] == "needs about 7 s, and 6 s were left"


def test_the_pace_of_checks_tells_what_later_pieces_take() -> None:
    clock = Clock()
    budget = Budget(100, clock)

    def slow(device: torch.device) -> float:
        clock.seconds += 30
        return 0.0

    events = told([check("first", slow, cost=3), check("second", slow, cost=8)], budget)
    assert events[-1] == {
        "event": "skipped",
        "piece": "second",
        "kind": "check",
        "reason": "needs about 80 s, and 70 s were left",
    }


def test_an_error_in_one_piece_is_recorded_and_the_rest_goes_on() -> None:
    def broken(device: torch.device) -> float:
        raise torch.OutOfMemoryError("CUDA out of memory")

    def missing(device: torch.device) -> float:
        import no_such_package  # type: ignore[import-not-found]  # noqa: F401

        return 0.0

    def unwilling(device: torch.device, budget: Budget) -> list[dict[str, Any]]:
        raise Skipped("it takes too long")

    pieces: list[Piece] = [
        check("broken", broken),
        check("missing", missing),
        check("wrong", lambda device: 0.6),
        check("nan", lambda device: float("nan")),
        Timing("unwilling", unwilling, 1.0),
        check("good"),
    ]
    ended = {e["piece"]: e for e in told(pieces, Budget(1e6, Clock())) if e["event"] != "begin"}
    assert ended["broken"]["rows"][0]["result"] == "failed"
    assert "CUDA out of memory" in ended["broken"]["rows"][0]["message"]
    assert ended["missing"]["event"] == "skipped"
    assert "no_such_package" in ended["missing"]["reason"]
    assert [ended[name]["rows"][0]["result"] for name in ("wrong", "nan", "good")] == [
        "failed",
        "failed",
        "passed",
    ]
    assert ended["unwilling"] == {
        "event": "skipped",
        "piece": "unwilling",
        "kind": "timing",
        "reason": "it takes too long",
    }


WORKER = """
import json, os, sys, time
from benchmarks.gpu.pieces import Check
task = json.loads(sys.stdin.readline())
def tell(**event): print(json.dumps(event), flush=True)
def result(name, result):
    row = Check(name, 0.5, "why", None).row(result, "0.1")
    tell(event="check", piece=name, rows=[row])
names = ["good", "bad", "hangs", "dies", "after"]
pieces = [[n, "check"] for n in names] + [["late", "timing"]]
tell(event="machine", machine={"device": "none"}, pieces=pieces, notes=[])
for name in names:
    if name in task["done"]: continue
    tell(event="begin", piece=name, kind="check", limit=0.5)
    if name == "hangs": time.sleep(60)
    if name == "dies": os.kill(os.getpid(), 9)
    result(name, "failed" if name == "bad" else "passed")
tell(event="begin", piece="late", kind="timing", limit=1000)
time.sleep(60)
"""


@pytest.mark.exhaustive
def test_a_worker_that_hangs_or_dies_loses_one_piece_and_the_end_comes_in_time(
    tmp_path: Path,
) -> None:
    results = Results(tmp_path / "out", lambda line: None)
    began = time.monotonic()
    watch([sys.executable, "-c", WORKER], "cpu", 12, results)
    assert time.monotonic() - began < 12
    found = {row["check"]: row for row in rows(tmp_path / "out" / "checks.csv")}
    assert {name: row["result"] for name, row in found.items()} == {
        "good": "passed", "bad": "failed", "hangs": "failed", "dies": "failed", "after": "passed",
    }  # fmt: skip
    assert "longer" in found["hangs"]["message"]
    assert "-9" in found["dies"]["message"]
    assert rows(tmp_path / "out" / "skipped.csv") == [
        {"piece": "late", "kind": "timing", "reason": "the time was over"}
    ]
    assert results.failed == ["bad", "hangs", "dies"]
    assert (
        "2 checks passed, 3 failed, 1 pieces were skipped"
        in (tmp_path / "out" / "summary.md").read_text()
    )


def test_a_worker_that_cannot_start_is_not_started_for_ever(tmp_path: Path) -> None:
    results = Results(tmp_path, lambda line: None)
    watch([sys.executable, "-c", "import sys; sys.exit('no such thing')"], "cpu", 60, results)
    assert "status 1" in results.notes[0]
    assert "no such thing" in (tmp_path / "worker.log").read_text()


def test_a_failed_check_makes_the_exit_code_1(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = (
        WORKER.replace('"hangs", "dies", ', "").replace("sleep(60)", "sleep(0)")
        + "\ntell(event='end')"
    )
    monkeypatch.setattr("benchmarks.gpu.__main__.WORKER", [sys.executable, "-c", worker])
    assert main(["--minutes", "0.1", "--out", str(tmp_path / "out")]) == 1
    monkeypatch.setattr(
        "benchmarks.gpu.__main__.WORKER", [sys.executable, "-c", worker.replace('"bad", ', "")]
    )
    assert main(["--minutes", "0.1", "--out", str(tmp_path / "other")]) == 0


@pytest.mark.exhaustive
def test_mistakes_are_one_sentence_and_leave_no_folder(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    full = tmp_path / "full"
    full.mkdir()
    (full / "notes").write_text("mine")
    for arguments in (["--minutes", "0", "--out", str(tmp_path / "a")], ["--out", str(full)]):
        assert main(arguments) == 2
        assert capsys.readouterr().err.count("\n") == 1
    if not torch.cuda.is_available():
        assert main(["--device", "cuda", "--out", str(tmp_path / "b")]) == 2
        assert "no CUDA device" in capsys.readouterr().err
    assert sorted(p.name for p in tmp_path.iterdir()) == ["full"]


@pytest.mark.exhaustive
def test_the_worker_tells_of_every_piece_once_and_does_what_it_has_time_for(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    every = [piece.name for piece in worker.every_piece()]
    task = {"device": "cpu", "seconds": 2, "done": every[:1]}
    monkeypatch.setattr("sys.stdin", io.StringIO(json.dumps(task)))
    stdout = sys.stdout
    try:
        worker.main()
    finally:
        sys.stdout = stdout
    machine, *events = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [name for name, _ in machine["pieces"]] == every
    assert machine["machine"]["device"] == "cpu"
    assert events.pop() == {"event": "end"}
    ended = [event for event in events if event["event"] != "begin"]
    assert [event["piece"] for event in ended] == every[1:]
    skipped = [event for event in ended if event["event"] == "skipped"]
    assert 0 < len(skipped) < len(ended)
    assert all(event["reason"] for event in skipped)
    for event in ended:
        for row in event.get("rows", []):
            assert row["result"] == "passed" and row["why"] and row["bound"], row


@pytest.mark.exhaustive  # it uses its quarter of a minute up
def test_the_command_ends_in_time_and_leaves_whole_files(tmp_path: Path) -> None:
    began = time.monotonic()
    command = [*COMMAND, "--device", "cpu", "--minutes", "0.25", "--out", str(tmp_path / "out")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert time.monotonic() - began < 20
    assert done.returncode == 0, done.stdout + done.stderr
    passed, left = rows(tmp_path / "out" / "checks.csv"), rows(tmp_path / "out" / "skipped.csv")
    assert all(row["result"] == "passed" and row["why"] and row["bound"] for row in passed)
    names = {row["check"] for row in passed} | {row["piece"] for row in left}
    assert names == {piece.name for piece in worker.every_piece()}
    assert all(row["reason"] for row in left)
    assert "device: cpu" in (tmp_path / "out" / "summary.md").read_text()


def test_every_network_mask_and_protocol_has_checks() -> None:
    known = [piece.name for piece in checks.every_check()]
    assert len(set(known)) == len(known)
    for name in names():
        assert sum(own.startswith(f"{name}: ") for own in known) >= 7
    for mask in MASKS[1:]:
        assert sum(own.startswith(f"mask {mask},") for own in known) == 6
    from securecluster.protocols.registry import PROTOCOLS

    assert set(runs.PROTOCOLS) == set(PROTOCOLS)


def test_errors_are_measured_in_the_size_of_what_is_wanted() -> None:
    one = torch.tensor([1.0, -4.0])
    assert apart(one, one) == differing(one, one) == 0
    assert apart(one + 1, one) == 0.25
    assert differing(one + torch.tensor([0.0, 1e-6]), one) == 1
    nan = torch.tensor([float("nan"), 1.0])
    assert not apart(nan, one) <= 1
    assert not apart(one[:1], one) <= 1
    assert not differing(one[:1], one) <= 1


QUICK = [
    piece
    for piece in checks.every_check()
    if piece.name.startswith(("mask", "noise", "mlp-32", "compression"))
]


@pytest.mark.parametrize("piece", QUICK, ids=lambda piece: piece.name)
def test_quick_checks_pass_on_the_cpu(piece: Check) -> None:
    (row,) = piece.run(CPU, Budget(60))
    assert row["result"] == "passed", row


@pytest.mark.parametrize("name", runs.CASES)
def test_each_case_has_a_first_round(name: str) -> None:
    assert runs.first_round(name, CPU) == 0


def test_a_check_of_training_can_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    right = checks.updates
    monkeypatch.setattr(checks, "updates", lambda of, plan: right(of, plan) * (1 + 1e-6))
    assert not checks.trained("mlp-32", checks.PLAN, torch.float64, CPU) <= 1e-9


@pytest.mark.exhaustive
def test_timings_stand_beside_a_plain_loop_and_one_model(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timings, "PROBED", 2)
    found = timings.measure("lstm-trajectory", 4, CPU, Budget(600))
    assert [row["way"] for row in found] == ["batched", "one centralised model", "plain loop"]
    assert found[0]["times_batched"] == "1.00"
    assert all(
        float(row["min_seconds"]) <= float(row["median_seconds"]) <= float(row["max_seconds"])
        for row in found
    )
    with pytest.raises(Skipped, match="left"):
        timings.measure("lstm-trajectory", 4, CPU, Budget(0))
