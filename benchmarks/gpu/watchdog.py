"""Start the worker, store its results, and end it in time, even where it hangs or dies."""

from __future__ import annotations

import json
import os
import queue
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from benchmarks.gpu.report import ENDS_PIECE, Results
from securecluster.errors import UsageError

# seconds before the end at which a worker is ended, so that the files are written in time
MARGIN = 2.0
LAST = 3.0  # seconds below which no worker is started again


@dataclass
class _CurrentPiece:
    """The piece that the worker is at; without a name between two pieces.

    Args:
        name: of the piece.
        category: "check" or "timing".
        deadline: when it has taken far longer than it should, on the watchdog's clock.
    """

    name: str = ""
    category: str = ""
    deadline: float = float("inf")


def watch(
    command: Sequence[str],
    device: str,
    seconds: float,
    results: Results,
    clock: Callable[[], float] = time.monotonic,
) -> None:
    """Let workers do the pieces until all are done or the time is over.

    A piece that takes far longer than it should, or ends its process, is a failed check or a
    skipped timing, and a new worker does the remaining ones.

    Args:
        command: starts a worker.
        device: "auto", "cuda" or "cpu".
        seconds: that all of it may take.
        results: receives the events.
        clock: returns seconds.

    Raises:
        UsageError: the worker cannot use this device.
    """
    end = clock() + seconds - MARGIN
    with tempfile.TemporaryDirectory(prefix="securecluster-gpu-") as scratch:
        # run folders of a worker that is ended go with this folder
        environment = {**os.environ, "TMPDIR": scratch}
        while end - clock() > LAST:
            task = {"device": device, "seconds": end - clock(), "done": sorted(results.done)}
            before = len(results.done)
            errors = Path(scratch) / "stderr"
            try:
                finished = _one_worker(command, environment, task, errors, end, results, clock)
            finally:
                results.keep_log(errors)
            # one that dies before its first piece would do so again
            if finished or len(results.done) == before:
                break
    results.out_of_time()


def _one_worker(
    command: Sequence[str],
    environment: dict[str, str],
    task: dict[str, Any],
    errors: Path,
    end: float,
    results: Results,
    clock: Callable[[], float],
) -> bool:
    """Start one worker and take its events.

    Args:
        command: starts it.
        environment: its environment variables.
        task: its line of standard input.
        errors: the file for its standard error.
        end: when it is ended, on the clock.
        results: receives its events.
        clock: returns seconds.

    Returns:
        Whether there is nothing left to do: the worker came to its end, or the time did.
    """
    with errors.open("wb") as log:
        process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            env=environment,
        )
        try:
            assert process.stdin is not None
            assert process.stdout is not None
            with suppress(BrokenPipeError):  # it has ended already, as its status will tell
                process.stdin.write(json.dumps(task) + "\n")
                process.stdin.close()
            return _listen(process, process.stdout, end, results, clock)
        finally:
            process.kill()
            process.wait()
            if process.stdout is not None:
                process.stdout.close()


def _listen(
    process: subprocess.Popen[str],
    stream: IO[str],
    end: float,
    results: Results,
    clock: Callable[[], float],
) -> bool:
    """Take the worker's events until it ends, hangs, or the time is over.

    Args:
        process: the worker.
        stream: its standard output.
        end: when the time is over, on the clock.
        results: receives its events.
        clock: returns seconds.

    Returns:
        Whether there is nothing left to do.

    Raises:
        UsageError: the worker cannot use this device.
    """
    # a thread reads, since a read from a pipe cannot be given a deadline
    lines: queue.Queue[str | None] = queue.Queue()
    threading.Thread(target=_read, args=(stream, lines), daemon=True).start()
    current = _CurrentPiece()
    while True:
        wait = min(end, current.deadline) - clock()
        try:
            line = lines.get(timeout=max(wait, 0.01))
        except queue.Empty:
            if clock() >= end:
                return True
            if clock() >= current.deadline:
                reason = "it took far longer than it should, and was ended"
                results.lost(current.name, current.category, reason)
                return False
            continue
        if line is None:
            _note_death(process.wait(), current, results)
            return False
        event = json.loads(line)
        current = _piece_after(event, current, clock)
        results.take(event)
        if event["event"] == "end":
            return True


def _note_death(status: int, current: _CurrentPiece, results: Results) -> None:
    """Note that the worker's process ended before it said so."""
    if current.name:
        reason = f"its process ended with status {status}"
        results.lost(current.name, current.category, reason)
        return
    results.note(
        f"a worker ended with status {status} before its first piece: see {results.log_name}"
    )


def _piece_after(
    event: dict[str, Any], current: _CurrentPiece, clock: Callable[[], float]
) -> _CurrentPiece:
    """Return the piece that the worker is at after an event."""
    name = event["event"]
    if name == "usage":
        raise UsageError(event["message"])
    if name == "begin":
        deadline = clock() + event["limit"]
        return _CurrentPiece(event["piece"], event["kind"], deadline)
    if name in ENDS_PIECE:
        return _CurrentPiece()
    return current


def _read(stream: IO[str], lines: queue.Queue[str | None]) -> None:
    """Pass the worker's lines on, and a None after the last one; half a line is none."""
    with suppress(ValueError):  # the stream was closed, since nobody listens any more
        for line in stream:
            if line.endswith("\n"):
                lines.put(line)
    lines.put(None)
