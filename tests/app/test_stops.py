"""Processes that are stopped, and outputs that cannot be written: a sentence, an exit code, and a
run to go on with.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from cases import SMALL_FEDERATION

from securecluster.app.cli import main
from securecluster.app.stops import READABLE

SMALL = [*SMALL_FEDERATION, "--threads", "1"]
RUN = ["run", "fedavg", *SMALL, "--rounds", "3"]
LONG = ["run", "fedavg", *SMALL, "--rounds", "100000", "--transcript", "none", "--quiet"]
ENV = {**os.environ, "OMP_WAIT_POLICY": "PASSIVE"}


def _restore_signals() -> None:
    """Undo what a shell's background job inherits."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)


def start(*arguments: str, **more: object) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "securecluster", *arguments]
    settings = {"env": ENV, "stderr": subprocess.PIPE, "preexec_fn": _restore_signals} | more
    return subprocess.Popen(command, **settings)  # type: ignore[call-overload, no-any-return]


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_signal_says_how_to_go_on(number: signal.Signals, code: int, tmp_path: Path) -> None:
    out = tmp_path / "a run"
    with start(*LONG, "--out", str(out)) as process:
        while process.poll() is None and not list(out.glob("checkpoint-*")):
            time.sleep(0.01)
        process.send_signal(number)
        _, said = process.communicate(timeout=60)
    assert process.returncode == code
    assert said.decode() == f"securecluster: stopped; go on with: securecluster resume '{out}'\n"
    assert list(out.glob("checkpoint-*"))


@pytest.mark.parametrize("delay", [0.08, 0.15, 0.3, 0.6])
def test_a_signal_while_the_program_is_loaded_is_a_word(delay: float, tmp_path: Path) -> None:
    with start(*LONG, "--out", str(tmp_path / "r")) as process:
        time.sleep(delay)
        process.send_signal(signal.SIGINT)
        _, said = process.communicate(timeout=60)
    stopped = (130, -signal.SIGINT)  # which a shell calls 130, too
    # Python itself was still starting, which ends with 1 while it imports site
    if b"Traceback" in said:
        assert process.returncode in (1, *stopped)
        assert b"/securecluster/" not in said, said
    else:
        assert process.returncode in stopped
        assert said.startswith(b"securecluster: stopped"), said


def test_help_may_be_cut_off_by_its_reader() -> None:
    with start("run", "cfl", "--help", stdout=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stderr is not None
        process.stdout.close()
        said = process.stderr.read()
    assert process.returncode == 141
    assert said == b""


def test_a_run_whose_reader_leaves_can_be_gone_on_with(tmp_path: Path) -> None:
    out = tmp_path / "r"
    with start(*RUN, "--out", str(out), stdout=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stderr is not None
        process.stdout.close()
        said = process.stderr.read().decode()
    assert process.returncode == 141
    assert said == f"securecluster: stopped; go on with: securecluster resume {out}\n"
    assert main(["resume", str(out), "--quiet"]) == 0


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="this system has no /dev/full")
def test_an_output_that_is_full_is_a_sentence(tmp_path: Path) -> None:
    out = tmp_path / "r"
    for arguments in (["list"], ["--help"], ["run", "cfl", "--help"], [*RUN, "--out", str(out)]):
        with open("/dev/full", "w") as full, start(*arguments, stdout=full) as process:
            assert process.stderr is not None
            said = process.stderr.read().decode()
        assert process.returncode == 2, (arguments, said)
        assert said.startswith("securecluster: cannot print (No space left on device)"), said
        assert said.count("\n") == 1, said
    assert said.endswith(f"go on with: securecluster resume {out}\n")
    assert main(["resume", str(out), "--quiet"]) == 0


def test_an_output_that_is_closed_is_none(tmp_path: Path) -> None:
    out = tmp_path / "r"
    for arguments in ("list", " ".join([*RUN, "--out", str(out)])):
        done = subprocess.run(
            ["sh", "-c", f"{sys.executable} -m securecluster {arguments} >&-"],
            capture_output=True,
            env=ENV,
            check=False,
        )
        assert (done.returncode, done.stderr) == (0, b"")
    assert (out / "result.json").is_file()


@pytest.mark.parametrize("encoding", ["ascii", "cp1252", "utf-8"])
def test_every_encoding_prints_every_line(encoding: str, tmp_path: Path) -> None:
    env = {**ENV, "PYTHONIOENCODING": encoding}
    commands = [
        ["run", "cfl", "--help"],
        ["run", "cfl", *SMALL, "--rounds", "3", "--out", str(tmp_path / "r")],
    ]
    for command in commands:
        done = subprocess.run(
            [sys.executable, "-m", "securecluster", *command],
            capture_output=True,
            env=env,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        assert done.stderr == b""
        text = done.stdout.decode(encoding)
    line = next(line for line in text.splitlines() if line.startswith("round   1"))
    assert ("‖mean‖/max" if encoding == "utf-8" else "||mean||/max") in line
    assert (tmp_path / "r" / "result.json").is_file()


def test_readable_words_are_ascii() -> None:
    assert all(
        word.isascii() and not sign.isascii() and len(sign) == 1 for sign, word in READABLE.items()
    )


@pytest.mark.parametrize("threads", ["100000", "257", "-1"])
def test_a_number_of_threads_that_torch_dies_of_is_refused(
    threads: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    limit = max(256, os.cpu_count() or 1)
    if int(threads) == 257 and limit > 256:
        pytest.skip("this machine has more than 256 processors")
    assert main([*RUN, "--threads", threads, "--out", str(tmp_path / "r")]) == 2
    assert f"threads is a whole number from 0 to {limit}" in capsys.readouterr().err
    assert not (tmp_path / "r").exists()


def test_names_of_clients_are_no_markup(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    draw = np.random.default_rng(0)
    names = ["[/]", "[red]x[/red]", "\x1b[2J", "plain"]
    rows = [
        (name, int(k % 2), float(draw.random()), float(draw.random()))
        for name in names
        for k in range(10)
    ]
    columns = dict(
        zip(("site", "label", "a", "b"), map(list, zip(*rows, strict=True)), strict=True)
    )
    pq.write_table(pa.table(columns), tmp_path / "own.parquet")
    own = [
        "--data",
        str(tmp_path / "own.parquet"),
        "--client-column",
        "site",
        "--label-column",
        "label",
    ]
    for command in (["run", "fedavg"], ["compare", "fedavg", "local"]):
        out = tmp_path / command[0]
        assert (
            main(
                [
                    *command,
                    *own,
                    "--rounds",
                    "1",
                    "--model",
                    "linear",
                    "--dropout",
                    "0.5",
                    "--out",
                    str(out),
                ]
            )
            == 0
        )
        printed = capsys.readouterr().out
        assert "\x1b[2J" not in printed
        if command[0] == "run":
            assert "[/]" in printed and "[red]x[/red]" in printed and r"\x1b[2J" in printed
    assert json.loads((tmp_path / "run" / "result.json").read_text())["names"] == sorted(names)


def test_too_little_memory_is_a_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from securecluster.app import execution

    for error in (
        MemoryError(),
        RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory"),
        RuntimeError("CUDA out of memory."),
    ):

        def fail(*_: object, error: Exception = error) -> None:
            raise error

        monkeypatch.setattr(execution, "carry_out", fail)
        assert main([*RUN, "--out", str(tmp_path / "r"), "--force"]) == 2
        assert capsys.readouterr().err == (
            "securecluster: there is not enough memory: use fewer clients, fewer samples or a "
            "smaller model\n"
        )
    monkeypatch.setattr(execution, "carry_out", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        main([*RUN, "--out", str(tmp_path / "r"), "--force"])
