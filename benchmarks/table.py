"""CSV files of results, with the machine they come from."""

from __future__ import annotations

import csv
import os
import platform
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from benchmarks import timed_code
from securecluster.runtime.settings import Settings

RESULTS = Path("benchmarks/results")
# of a benchmark's runs: whoever repeats them gets their numbers again
SEEDED = Settings(keys_from_seed=True)


def machine() -> str:
    """Return the processor, its cores and the torch build, in one line."""
    # torch is imported only where it is needed, since the import takes over a second
    import torch

    versions = f"torch {torch.__version__}; Python {platform.python_version()}"
    return f"{_processor()}, {os.cpu_count()} cores; {versions}"


def _processor() -> str:
    """Return the processor's name; Linux has a better one than `platform`."""
    info = Path("/proc/cpuinfo")
    if not info.exists():
        return platform.processor()
    for line in info.read_text().splitlines():
        if line.startswith("model name"):
            _, name = line.split(":", 1)
            return name.strip()
    return platform.processor()


def write(name: str, rows: Iterable[Mapping[str, Any]]) -> Path:
    """Write rows to `results/NAME.csv`, the machine in a comment on the first line.

    Args:
        name: of the file, without ending.
        rows: with equal keys, the columns.
    """
    table = list(rows)
    RESULTS.mkdir(parents=True, exist_ok=True)
    path = RESULTS / f"{name}.csv"
    with path.open("w", newline="") as stream:
        # times of two machines do not compare; `benchmarks.evidence` skips this line
        stream.write(f"# {machine()}\n")
        writer = csv.DictWriter(stream, list(table[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(table)
    timed_code.record(name, RESULTS)
    return path
