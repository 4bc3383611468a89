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
# the same without a transcript, for runs whose messages are many
UNRECORDED = Settings(transcript="none", keys_from_seed=True)


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


def read(path: Path) -> list[dict[str, str]]:
    """Return the rows of a table or a sheet as texts, without its comments.

    Args:
        path: of the CSV file, which another process may be writing.
    """
    with path.open(newline="") as stream:
        lines = (line for line in stream if not line.startswith("#"))
        return list(csv.DictReader(lines))


def markdown_line(cells: Iterable[str]) -> str:
    """Return a line of a Markdown table.

    Args:
        cells: their texts.
    """
    joined = " | ".join(cells)
    return f"| {joined} |"


class Journal:
    """A table that grows by whole measurements; a run that is cut off goes on with what it lacks.

    Args:
        path: of the CSV file, which need not exist.
        key: the columns that tell measurements apart.
        columns: all columns.
    """

    def __init__(self, path: Path, key: Sequence[str], columns: Sequence[str]) -> None:
        self._path = path
        self._key = key
        self._columns = columns
        self._done: set[tuple[str, ...]] = set()
        if path.exists():
            self._done = {self._key_of(row) for row in read(path)}
        if not self._done:
            path.parent.mkdir(parents=True, exist_ok=True)
            header = ",".join(columns)
            path.write_text(f"# {machine()}\n{header}\n")

    def lacks(self, cell: Mapping[str, Any]) -> bool:
        """Return whether the file has no row of a measurement.

        Args:
            cell: with the columns of the key.
        """
        return self._key_of(cell) not in self._done

    def append(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """Append all rows of a measurement, so that the file has all of them or none.

        Args:
            rows: with all columns.
        """
        measured = list(rows)
        with self._path.open("a", newline="") as stream:
            writer = csv.DictWriter(stream, self._columns, lineterminator="\n")
            writer.writerows(measured)

    def _key_of(self, row: Mapping[str, Any]) -> tuple[str, ...]:
        return tuple(str(row[name]) for name in self._key)


def tabulate(
    name: str,
    measured: Iterable[Sequence[Mapping[str, Any]]],
    by: Sequence[str] = (),
    counted: Sequence[str] = (),
) -> Path:
    """Print the rows of each measurement, and write all rows after it; then print counts.

    Args:
        name: of the table.
        measured: the rows of one measurement after the other; a run that is cut off loses one.
        by: columns that tell groups of rows apart.
        counted: columns of yes and no, whose yes are counted in each group.
    """
    table: list[Mapping[str, Any]] = []
    for rows in measured:
        for row in rows:
            texts = [f"{column} {value}" for column, value in row.items()]
            print(", ".join(texts), flush=True)
        table += rows
        path = write(name, table)
    groups: dict[str, list[Mapping[str, Any]]] = {}
    for row in table:
        values = [str(row[column]) for column in by]
        members = groups.setdefault(" ".join(values), [])
        members.append(row)
    for group, rows in groups.items():
        for column in counted:
            times = sum(bool(row[column]) for row in rows)
            print(f"{group} {column}: {times} of {len(rows)}")
    return path
