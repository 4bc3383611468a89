"""Measure the built-in methods of `securecluster field` anew, and store their rows in the package.

python -m benchmarks.private.field_results [options of `securecluster field`, such as --quick]

It goes on in a folder (--out) that a field of the same options has left. Rows of other settings, ε,
methods and seeds stay in the table as they are; of those that are measured the new ones are kept,
without their seconds.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from securecluster.cli.main import main as command
from securecluster.studies import field_stored, sweep_tables

KEY = ("hash", "target_epsilon", "variant", "seed")


def store(measured: Path, stored: Path = field_stored.STORED) -> Path:
    """Put the rows of a field into the stored table, and return its path.

    Args:
        measured: `runs.csv` of the field.
        stored: the table.
    """
    rows: dict[tuple[Any, ...], dict[str, Any]] = {}
    for row in [*field_stored.read(stored), *field_stored.read(measured)]:
        rows[tuple(row[name] for name in KEY)] = {**row, "seconds": None}
    sweep_tables.write(stored, [rows[key] for key in sorted(rows)])
    return stored


def main(argv: Sequence[str]) -> int:
    """Run the field, and store its rows.

    Args:
        argv: options of `securecluster field`.
    """
    with TemporaryDirectory() as scratch:
        folder = Path(scratch) / "field"
        arguments = [*argv] if "--out" in argv else [*argv, "--out", str(folder)]
        code = command(["field", "--fresh", *arguments])
        if not code:
            print(store(Path(arguments[arguments.index("--out") + 1]) / "runs.csv"))
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
