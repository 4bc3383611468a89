"""Cases in processes of their own, since the largest resident set of a process never falls."""

from __future__ import annotations

import json
import resource
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

GIB = 1 << 30


def peak() -> float:
    """Return the largest resident set of this process up to now, in GiB."""
    # Linux counts in KiB
    kibibytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return kibibytes * 1024 / GIB


def line_of(module: str, options: Sequence[str], limit: float | None = None) -> dict[str, Any]:
    """Run a benchmark in a process of its own, and return the line of the table that it prints.

    Args:
        module: of the benchmark.
        options: of its command line.
        limit: seconds after which it is stopped, if any.

    Raises:
        subprocess.TimeoutExpired: it was stopped.
    """
    command = [sys.executable, "-m", module, *options]
    finished = subprocess.run(command, capture_output=True, text=True, check=True, timeout=limit)
    last = finished.stdout.splitlines()[-1]
    line: dict[str, Any] = json.loads(last)
    return line
