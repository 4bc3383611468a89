"""CSV files of results, with the machine they come from.

A table is of one machine and one run, and is written anew; a sheet (`benchmarks.sheet`) goes on
with what is missing.
"""

from __future__ import annotations

import csv
import io
import os
import platform
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks import timed_code
from securecluster.core import atomic_files
from securecluster.runtime.settings import Settings

RESULTS = Path("benchmarks/results")
PAPERS = RESULTS / "papers"
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
    stream = io.StringIO()
    # times of two machines do not compare; `benchmarks.evidence` skips this line
    stream.write(f"# {machine()}\n")
    writer = csv.DictWriter(stream, list(table[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(table)
    atomic_files.make_folder(RESULTS)
    path = RESULTS / f"{name}.csv"
    atomic_files.write_atomic(path, stream.getvalue().encode())
    timed_code.record(name, RESULTS)
    return path


def tabulate(name: str, measured: Iterable[Sequence[Mapping[str, Any]]]) -> Path:
    """Print the rows of each measurement, and write all rows after it.

    Args:
        name: of the table.
        measured: the rows of one measurement after the other; a run that is cut off loses one.
    """
    table: list[Mapping[str, Any]] = []
    for rows in measured:
        for row in rows:
            texts = [f"{column} {value}" for column, value in row.items()]
            print(", ".join(texts), flush=True)
        table += rows
        path = write(name, table)
    return path
