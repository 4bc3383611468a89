"""kill -9 and Ctrl-C at arbitrary moments of a real process. The long version is
benchmarks/kills.py.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from cases import SMALL_FEDERATION

from securecluster.cli.main import main

ROUNDS = 20  # of which a process makes most after it was seen to have made a few
RUN = ["run", "cfl", *SMALL_FEDERATION, "--rounds", str(ROUNDS), "--dropout", "0.05", "--quiet"]
RUN += ["--threads", "1", "--keys-from-seed"]
SAME = ("models.safetensors", "server.safetensors", "history.jsonl")


def _hear() -> None:
    """A shell's background job ignores Ctrl-C, and its children would inherit that."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def _start(out: Path) -> subprocess.Popen[bytes]:
    env = {**os.environ, "OMP_WAIT_POLICY": "PASSIVE"}
    command = [sys.executable, "-m", "securecluster", *RUN, "--out", str(out)]
    return subprocess.Popen(command, env=env, stderr=subprocess.PIPE, preexec_fn=_hear)


def _hold(out: Path, rounds: int, process: subprocess.Popen[bytes]) -> None:
    """Let a process make some rounds, and stand still wherever it is then."""
    history = out / "history.jsonl"
    while process.poll() is None and (
        not history.exists() or history.read_bytes().count(b"\n") < rounds
    ):
        time.sleep(0.002)
    process.send_signal(signal.SIGSTOP)


def _result(out: Path) -> dict[str, object]:
    found = json.loads((out / "result.json").read_text())
    del found["seconds"]
    return found  # type: ignore[no-any-return]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run that nothing stops."""
    out = tmp_path_factory.mktemp("runs") / "whole"
    assert main([*RUN, "--out", str(out)]) == 0
    return out


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("how", "rounds"),
    [
        (signal.SIGKILL, 3),
        pytest.param(signal.SIGINT, 5, marks=pytest.mark.exhaustive),
        pytest.param(signal.SIGKILL, 6, marks=pytest.mark.exhaustive),
    ],
)
def test_a_stopped_run_resumes_to_the_same_result_and_nobody_else_wrote_before(
    how: signal.Signals,
    rounds: int,
    whole: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    out = tmp_path / "stopped"
    with _start(out) as process:
        _hold(out, rounds, process)
        second = main(["resume", str(out), "--quiet"])
        process.send_signal(how)
        process.send_signal(signal.SIGCONT)
        _, said = process.communicate(timeout=60)
    assert second == 2
    assert "another process" in capsys.readouterr().err
    assert not (out / "result.json").exists(), "the run ended before it was stopped"
    if how is signal.SIGINT:
        assert process.returncode == 130
        assert said.decode() == f"securecluster: stopped; go on with: securecluster resume {out}\n"
    else:
        assert process.returncode == -signal.SIGKILL
    assert main(["resume", str(out), "--quiet"]) == 0
    assert _result(out) == _result(whole)
    for name in SAME:
        assert (out / name).read_bytes() == (whole / name).read_bytes(), name
    assert main(["replay", str(out)]) == 0
