"""Processes that are stopped, and outputs that cannot be written: a sentence, an exit code, and a
run to go on with.
"""

from __future__ import annotations

import gc
import io
import json
import os
import signal
import subprocess
import sys
import time
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Protocol, TextIO

import numpy as np
import pytest
from cases import SMALL_FEDERATION, exhaustive
from commands import exit_of

from securecluster.__main__ import entry
from securecluster.cli.main import main
from securecluster.core import stops
from securecluster.core.lazy_torch import ENVIRONMENT
from securecluster.core.stops import READABLE
from securecluster.runtime.run import Run

SMALL = [*SMALL_FEDERATION, "--threads", "1"]
RUN = ["run", "fedavg", *SMALL, "--rounds", "3"]
LONG = ["run", "fedavg", *SMALL, "--rounds", "100000", "--transcript", "none", "--quiet"]
ENV = {**os.environ, "OMP_WAIT_POLICY": "PASSIVE"}
FULL = "securecluster: cannot print (No space left on device): send the output elsewhere"


class Enter(Protocol):
    """The program's entry point, given arguments and where standard output goes, or None if it is
    closed; it returns the exit code and what was said on standard error.
    """

    def __call__(self, *arguments: str, stdout: TextIO | None) -> tuple[int, str]: ...


def _restore_signals() -> None:
    """Undo what a shell's background job inherits."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)


def start(*arguments: str, **more: object) -> subprocess.Popen[bytes]:
    """Start the program in a process of its own, which loads everything for seconds."""
    command = [sys.executable, "-m", "securecluster", *arguments]
    settings = {"env": ENV, "stderr": subprocess.PIPE, "preexec_fn": _restore_signals} | more
    return subprocess.Popen(command, **settings)  # type: ignore[call-overload, no-any-return]


def in_a_process(*arguments: str, stdout: TextIO | None) -> tuple[int, str]:
    def prepare() -> None:
        _restore_signals()
        if stdout is None:
            os.close(1)

    env = ENV if stdout is None else {**ENV, "PYTHONIOENCODING": stdout.encoding}
    with start(*arguments, env=env, stdout=stdout, preexec_fn=prepare) as process:
        _, said = process.communicate()
    return process.returncode, said.decode()


@pytest.fixture
def in_this_process(monkeypatch: pytest.MonkeyPatch) -> Iterator[Enter]:
    terminate = signal.getsignal(signal.SIGTERM)
    interrupt = signal.signal(signal.SIGINT, signal.default_int_handler)
    thresholds = gc.get_threshold()
    for name, value in ENVIRONMENT.items():
        monkeypatch.setenv(name, os.environ.get(name, value))

    def entered(*arguments: str, stdout: TextIO | None) -> tuple[int, str]:
        said = io.TextIOWrapper(io.BytesIO(), encoding="utf-8")
        with monkeypatch.context() as patch, pytest.raises(SystemExit) as stop:
            patch.setattr(sys, "argv", ["securecluster", *arguments])
            patch.setattr(sys, "stdout", stdout)
            patch.setattr(sys, "stderr", said)
            entry()
        assert isinstance(stop.value.code, int)
        said.seek(0)
        return stop.value.code, said.read()

    yield entered
    signal.signal(signal.SIGTERM, terminate)
    signal.signal(signal.SIGINT, interrupt)
    gc.set_threshold(*thresholds)


@pytest.fixture(params=["this process", exhaustive("a process of its own")])
def enter(request: pytest.FixtureRequest) -> Enter:
    if request.param == "this process":
        found: Enter = request.getfixturevalue("in_this_process")
        return found
    return in_a_process


@pytest.fixture
def without_reader() -> Iterator[TextIO]:
    """A pipe that nobody reads."""
    reading, writing = os.pipe()
    os.close(reading)
    with open(writing, "w") as stream:
        yield stream


@pytest.fixture
def full() -> Iterator[TextIO]:
    """A file on a disk that is full."""
    if not Path("/dev/full").exists():
        pytest.skip("this system has no /dev/full")
    with open("/dev/full", "w") as stream:
        yield stream


SIGNALS = [(signal.SIGTERM, 143), (signal.SIGINT, 130)]


@pytest.mark.parametrize(("number", "code"), SIGNALS)
def test_a_signal_says_how_to_go_on(
    number: signal.Signals,
    code: int,
    in_this_process: Enter,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    out, checkpoint = tmp_path / "a run", Run._checkpoint

    def checkpoint_and_stop(run: Run) -> None:
        checkpoint(run)
        signal.raise_signal(number)

    monkeypatch.setattr(Run, "_checkpoint", checkpoint_and_stop)
    assert in_this_process(*LONG, "--out", str(out), stdout=None) == (
        code,
        f"securecluster: stopped; go on with: securecluster resume '{out}'\n",
    )
    assert list(out.glob("checkpoint-*"))


@pytest.mark.parametrize(
    ("number", "code"), [exhaustive(signal.SIGTERM, 143), (signal.SIGINT, 130)]
)
def test_a_process_says_how_to_go_on(number: signal.Signals, code: int, tmp_path: Path) -> None:
    out = tmp_path / "a run"
    with start(*LONG, "--out", str(out)) as process:
        while process.poll() is None and not list(out.glob("checkpoint-*")):
            time.sleep(0.01)
        process.send_signal(number)
        _, said = process.communicate(timeout=60)
    assert process.returncode == code
    assert said.decode() == f"securecluster: stopped; go on with: securecluster resume '{out}'\n"
    assert list(out.glob("checkpoint-*"))


@pytest.mark.few(1)
@pytest.mark.parametrize("delay", [0.08, 0.15, 0.3, 0.6])
def test_a_signal_while_the_program_is_loaded_is_a_word(delay: float, tmp_path: Path) -> None:
    with start(*LONG, "--out", str(tmp_path / "r")) as process:
        time.sleep(delay)
        process.send_signal(signal.SIGINT)
        try:
            _, said = process.communicate(timeout=30)
        except subprocess.TimeoutExpired:
            process.kill()
            _, said = process.communicate()
            # Python lost it while it cleaned up after an import of its own, before the program
            assert b"Exception ignored in: <function _get_module_lock" in said
            assert delay < 0.1
            return
    stopped = (130, -signal.SIGINT)  # which a shell calls 130, too
    # Python itself was still starting, which ends with 1 while it imports site
    if b"Traceback" in said:
        assert process.returncode in (1, *stopped)
        assert b"/securecluster/" not in said, said
    elif not said:  # Python did not listen to signals yet
        assert process.returncode == -signal.SIGINT
    else:
        assert process.returncode in stopped
        assert said.startswith(b"securecluster: stopped"), said


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_signal_that_python_dropped_stops_the_program_once_it_is_loaded() -> None:
    class Cleaned:
        def __del__(self) -> None:
            signal.raise_signal(signal.SIGTERM)  # what a handler raises here is dropped

    handler = signal.getsignal(signal.SIGTERM)
    went_on = False
    with pytest.raises(stops.Stopped) as stopped, stops.lost_by_nobody():
        cleaned = Cleaned()
        del cleaned
        went_on = True
    assert went_on and stopped.value.code == 143
    assert signal.getsignal(signal.SIGTERM) is handler


def test_help_may_be_cut_off_by_its_reader(without_reader: TextIO) -> None:
    assert in_a_process("run", "cfl", "--help", stdout=without_reader) == (141, "")


def test_a_run_whose_reader_leaves_can_be_gone_on_with(
    enter: Enter, without_reader: TextIO, tmp_path: Path
) -> None:
    out = tmp_path / "r"
    assert enter(*RUN, "--out", str(out), stdout=without_reader) == (
        141,
        f"securecluster: stopped; go on with: securecluster resume {out}\n",
    )
    assert exit_of("resume", out, "--quiet") == 0


def test_a_process_whose_output_is_full_says_so_in_a_sentence(full: TextIO) -> None:
    assert in_a_process("--help", stdout=full) == (2, FULL + "\n")


@pytest.mark.parametrize("arguments", [["list"], ["--help"], ["run", "cfl", "--help"]])
def test_an_output_that_is_full_is_a_sentence(
    arguments: list[str], enter: Enter, full: TextIO
) -> None:
    assert enter(*arguments, stdout=full) == (2, FULL + "\n")


def test_a_run_whose_output_is_full_can_be_gone_on_with(
    enter: Enter, full: TextIO, tmp_path: Path
) -> None:
    out = tmp_path / "r"
    said = f"{FULL}; go on with: securecluster resume {out}\n"
    assert enter(*RUN, "--out", str(out), stdout=full) == (2, said)
    assert exit_of("resume", out, "--quiet") == 0


def test_a_process_whose_output_is_closed_prints_nothing() -> None:
    assert in_a_process("--help", stdout=None) == (0, "")


def test_an_output_that_is_closed_is_none(enter: Enter, tmp_path: Path) -> None:
    out = tmp_path / "r"
    assert enter("list", stdout=None) == (0, "")
    assert enter(*RUN, "--out", str(out), stdout=None) == (0, "")
    assert (out / "result.json").is_file()


@pytest.mark.exhaustive
def test_a_process_prints_its_help_in_an_old_encoding(tmp_path: Path) -> None:
    with (tmp_path / "printed").open("w", encoding="ascii") as stream:
        assert in_a_process("run", "cfl", "--help", stdout=stream) == (0, "")
    assert "--eps1" in (tmp_path / "printed").read_text(encoding="ascii")


@pytest.mark.few(1)
@pytest.mark.parametrize("encoding", ["ascii", "cp1252", "utf-8"])
def test_every_encoding_prints_every_line(encoding: str, enter: Enter, tmp_path: Path) -> None:
    printed = tmp_path / "printed"
    commands = [
        ["run", "cfl", "--help"],
        ["run", "cfl", *SMALL, "--rounds", "3", "--out", str(tmp_path / "r")],
    ]
    for command in commands:
        with printed.open("w", encoding=encoding) as stream:
            code, said = enter(*command, stdout=stream)
            assert code == 0 and (not said or said.startswith("securecluster: note: one cluster"))
    text = printed.read_text(encoding=encoding)
    assert "round   1" in text and "mean/longest update" in text
    assert ("ε" in text) == (encoding == "utf-8")
    assert "ε" in text or "epsilon  " in text
    assert (tmp_path / "r" / "result.json").is_file()


def test_objects_that_nobody_reaches_are_still_collected(in_this_process: Enter) -> None:
    class Cycle:
        def __init__(self) -> None:
            self.itself = self

    in_this_process("--version", stdout=io.StringIO())
    first = weakref.ref(Cycle())
    kept = [Cycle() for _ in range(2 * stops.COLLECTED_AFTER)]
    assert first() is None
    assert len(kept) > gc.get_threshold()[0] > 700


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
        "--data", str(tmp_path / "own.parquet"), "--client-column", "site",
        "--label-column", "label",
    ]  # fmt: skip
    for command in (["run", "fedavg"], ["compare", "fedavg", "local"]):
        out = tmp_path / command[0]
        assert (
            main(
                [
                    *command, *own, "--rounds", "1", "--model", "linear", "--dropout", "0.5",
                    "--out", str(out),
                ]
            )
            == 0
        )  # fmt: skip
        printed = capsys.readouterr().out
        assert "\x1b[2J" not in printed
        if command[0] == "run":
            assert "[/]" in printed and "[red]x[/red]" in printed and r"\x1b[2J" in printed
    assert json.loads((tmp_path / "run" / "result.json").read_text())["names"] == sorted(names)


def test_too_little_memory_is_a_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from securecluster.commands import execution

    for error in (
        MemoryError(),
        RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory"),
        RuntimeError("CUDA out of memory."),
    ):

        def fail(*_: object, error: Exception = error) -> None:
            raise error

        monkeypatch.setattr(execution, "watched_run", fail)
        assert main([*RUN, "--out", str(tmp_path / "r"), "--force"]) == 2
        assert capsys.readouterr().err == (
            "securecluster: there is not enough memory: use fewer clients, fewer samples or a "
            "smaller model\n"
        )
    monkeypatch.setattr(execution, "watched_run", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        main([*RUN, "--out", str(tmp_path / "r"), "--force"])
