"""CSV files of results, with the machine they come from."""

from __future__ import annotations

import csv
import os
import platform
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

RESULTS = Path("benchmarks/results")


def machine() -> str:
    """The processor, its cores and the torch build, in one line."""
    import torch

    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    model = next(
        (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")),
        platform.processor(),
    )
    versions = f"torch {torch.__version__}; Python {platform.python_version()}"
    return f"{model}, {os.cpu_count()} cores; {versions}"


def write(name: str, rows: Iterable[Mapping[str, Any]]) -> Path:
    """Write rows to `results/NAME.csv`, the machine in a comment on the first line."""
    table = list(rows)
    RESULTS.mkdir(parents=True, exist_ok=True)
    path = RESULTS / f"{name}.csv"
    with path.open("w", newline="") as stream:
        stream.write(f"# {machine()}\n")
        writer = csv.DictWriter(stream, list(table[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(table)
    return path
