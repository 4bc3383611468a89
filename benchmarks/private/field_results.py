"""Measure the built-in methods of `securecluster field` anew, and store their rows in the package.

python -m benchmarks.private.field_results [options of `securecluster field`, such as --quick]

It goes on in a folder (--out) that a field of the same options has left. Rows of other settings, ε,
methods and seeds stay in the table as they are; of those that are measured the new ones are kept,
without their seconds, and with the commit in `version`.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import securecluster
from securecluster.cli.main import main as command
from securecluster.studies import field_stored, sweep_tables

TABLE = "securecluster/studies/field_results.csv"
KEY = ("hash", "target_epsilon", "variant", "seed")


def store(measured: Path, stored: Path = field_stored.STORED) -> Path:
    """Put the rows of a field into the stored table, and return its path.

    Args:
        measured: `runs.csv` of the field.
        stored: the table.
    """
    rows: dict[tuple[Any, ...], dict[str, Any]] = {}
    version = f"{securecluster.__version__}+{commit()}"
    new = [{**row, "version": version, "seconds": None} for row in field_stored.read(measured)]
    for row in [*field_stored.read(stored), *new]:
        rows[tuple(row[name] for name in KEY)] = row
    sweep_tables.write(stored, [rows[key] for key in sorted(rows)])
    return stored


def commit() -> str:
    """Return the commit, with ".dirty" where files beside the table differ from it."""
    known = _git("rev-parse", "--short=8", "HEAD")
    changed = _git("status", "--porcelain", "--", ":/", f":(exclude,top){TABLE}")
    return f"{known}.dirty" if changed else known


def _git(*words: str) -> str:
    """Return what git says of the repository."""
    call = ["git", *words]
    return subprocess.run(call, capture_output=True, text=True, check=True).stdout.strip()


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
