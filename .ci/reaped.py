"""Run a command, and end every process that it leaves: `python .ci/reaped.py COMMAND ARGUMENT...`.

On Linux orphans of the command become children of this process, also those in sessions of their
own such as the local SuperLink of `flwr run`. So each is known, and ended by its number.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

PR_SET_CHILD_SUBREAPER = 36
SECONDS_TO_END = 10.0  # after SIGTERM, before SIGKILL


def children() -> list[int]:
    """Return the numbers of this process's children that have not ended."""
    while True:  # those that have ended are no more when they are waited for
        try:
            ended, _ = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return []
        if not ended:
            break
    text = Path(f"/proc/self/task/{os.getpid()}/children").read_text()
    return [int(number) for number in text.split()]


def end_children() -> None:
    """End all children, and theirs, which become children as they are orphaned."""
    due = time.monotonic() + SECONDS_TO_END
    while left := children():
        number = signal.SIGTERM if time.monotonic() < due else signal.SIGKILL
        for child in left:
            os.kill(child, number)  # a child that is not waited for keeps its number
        time.sleep(0.1)


def main(command: list[str]) -> int:
    """Run a command, and return its exit code when nothing of it is left."""
    prctl = ctypes.CDLL(None, use_errno=True).prctl
    if prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0):
        raise OSError(ctypes.get_errno(), "this process cannot adopt orphans")
    try:
        return subprocess.run(command, check=False).returncode
    finally:
        end_children()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
