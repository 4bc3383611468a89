"""Commands in processes of their own, whose processor seconds `benchmarks.ratios` compares."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

COMMAND = (sys.executable, "-m", "securecluster")
CASES: Mapping[str, tuple[str, ...]] = {
    "import torch": (sys.executable, "-c", "import torch"),
    "--help": (*COMMAND, "--help"),
    "list": (*COMMAND, "list"),
    "run cfl": (*COMMAND, "run", "cfl", "--quiet", "--out", "whole"),
    "audit": (*COMMAND, "audit", "whole", "--quiet"),  # after `run cfl` in the same folder
}
BASE = "--help"
TORCH = "import torch"
ENVIRONMENT = {name: os.environ[name] for name in os.environ if name != "PYTHONDONTWRITEBYTECODE"}


def once(command: Sequence[str], folder: Path, status: int = 0) -> float:
    """Return the processor seconds of a command.

    Args:
        command: with its arguments.
        folder: in which it runs.
        status: with which it must end.

    Raises:
        subprocess.CalledProcessError: it ended with another status.
    """
    with subprocess.Popen(
        command, cwd=folder, env=ENVIRONMENT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    ) as process:
        assert process.stdout is not None
        printed = process.stdout.read()
        _, ended, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(ended)  # it has been waited for
    if process.returncode != status:
        raise subprocess.CalledProcessError(process.returncode, command, printed)
    return usage.ru_utime + usage.ru_stime
