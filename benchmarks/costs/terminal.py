"""Measure how long the terminal lets its users wait, and how much it prints.

python -m benchmarks.costs.terminal [--repeats 7]

Each command runs in a process of its own, all of them once in each repetition, so that other work
of the machine meets them alike. Processor and wall-clock seconds are medians; `import torch` and
`python` alone are what no command can be faster than if it trains, and if it does not. Modules are
compiled, as after an installation: a first repetition, which does that, is not counted.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.grid import script_parser
from benchmarks.table import write

COMMAND = (sys.executable, "-m", "securecluster")
SMALL = ("--rounds", "1", "--clients", "4", "--quiet")
MISTAKE = "a mistake (run cfll)"
MISTAKEN = 2  # exit status of a command with a user's mistake
CASES: Mapping[str, tuple[str, ...]] = {
    "python": (sys.executable, "-c", "pass"),
    "import torch": (sys.executable, "-c", "import torch"),
    "--help": (*COMMAND, "--help"),
    "list": (*COMMAND, "list"),
    "run cfl --help": (*COMMAND, "run", "cfl", "--help"),
    "run cfl --help-all": (*COMMAND, "run", "cfl", "--help-all"),
    MISTAKE: (*COMMAND, "run", "cfll"),
    "run cfl, one round": (*COMMAND, "run", "cfl", *SMALL, "--out", "run"),
    "run cfl": (*COMMAND, "run", "cfl", "--quiet", "--out", "whole"),
    "report": (*COMMAND, "report", "run"),
}
BASE = "--help"
TORCH = "import torch"
ENVIRONMENT = {name: os.environ[name] for name in os.environ if name != "PYTHONDONTWRITEBYTECODE"}


def once(command: Sequence[str], folder: Path, status: int = 0) -> tuple[float, float, int]:
    """Return processor seconds, wall-clock seconds and printed lines of a command.

    Args:
        command: with its arguments.
        folder: in which it runs.
        status: with which it must end.

    Raises:
        subprocess.CalledProcessError: it ended with another status.
    """
    began = time.monotonic()
    with subprocess.Popen(
        command, cwd=folder, env=ENVIRONMENT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    ) as process:
        assert process.stdout is not None
        printed = process.stdout.read()
        _, ended, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(ended)  # it has been waited for
    if process.returncode != status:
        raise subprocess.CalledProcessError(process.returncode, command, printed)
    lines = len(printed.splitlines())
    return usage.ru_utime + usage.ru_stime, time.monotonic() - began, lines


def measured(repeats: int) -> list[dict[str, Any]]:
    """Return a row for each command.

    Args:
        repeats: runs of each of them.
    """
    runs: dict[str, list[tuple[float, float, int]]] = {name: [] for name in CASES}
    for repetition in range(repeats + 1):
        with tempfile.TemporaryDirectory() as folder:
            for name, command in CASES.items():
                status = MISTAKEN if name == MISTAKE else 0
                run = once(command, Path(folder), status)
                if repetition:
                    runs[name].append(run)
    base = median(seconds for seconds, _, _ in runs[BASE])
    torch = median(seconds for seconds, _, _ in runs[TORCH])
    rows = []
    for name, values in runs.items():
        seconds = median(value[0] for value in values)
        row = {
            "command": name,
            "cpu_seconds": round(seconds, 3),
            "seconds": round(median(value[1] for value in values), 3),
            "over_help": round(seconds / base, 2),
            "over_torch": round(seconds / torch, 2),
            "lines": values[0][2],
        }
        rows.append(row)
    return rows


def main(argv: Sequence[str] | None = None) -> Path:
    """Measure, print and write the table."""
    parser = script_parser(__doc__)
    parser.add_argument("--repeats", type=int, default=7, help="runs of each command")
    rows = measured(parser.parse_args(argv).repeats)
    for row in rows:
        print(row)
    return write("terminal", rows)


if __name__ == "__main__":
    print(main())
