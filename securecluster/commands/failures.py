"""Errors that nobody foresaw, in a run among others: a line for tables, and a file of tracebacks.

Such a run is recorded as failed, and the others go on.

What failed stays so until `--retry`, so that one bad run cannot hold up a sweep for ever.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from securecluster.commands.options import as_typed
from securecluster.core import atomic_files
from securecluster.core.number_format import printable
from securecluster.errors import SecureClusterError

Row = dict[str, Any]  # of a run among others, by column
LONGEST_REASON = 500  # characters
LONGEST_TRACEBACK = 20_000


def reason(error: BaseException) -> str:
    """Return why a run failed, as one printable line.

    Args:
        error: of this package, whose sentence it is; of another error the last line of its
            traceback.
    """
    text = traceback.format_exception_only(error)[-1]
    if isinstance(error, SecureClusterError):
        text = as_typed(str(error))
    line = printable(" ".join(text.split()))
    if len(line) > LONGEST_REASON:
        line = line[:LONGEST_REASON] + "…"
    return line or type(error).__name__


def traceback_of(error: BaseException) -> str:
    """Return the traceback of an error, of a very long one the end.

    Args:
        error: that was caught.
    """
    lines = "".join(traceback.format_exception(error))[-LONGEST_TRACEBACK:].splitlines()
    return "\n".join(printable(line) for line in lines)


def write(path: Path, rows: Iterable[Row], titled: Callable[[Row], str]) -> None:
    """Write the tracebacks of runs to a file, which is removed if there are none.

    Args:
        path: of the file.
        rows: of all runs, in their order.
        titled: returns what a traceback stands below, such as the name of its run.

    Raises:
        RunFolderError: the file cannot be written.
    """
    texts = []
    for row in rows:
        if row["traceback"] is not None:
            texts.append(f"{titled(row)}\n{row['traceback']}\n")
    if texts:
        atomic_files.write_atomic(path, "\n".join(texts).encode())
    else:
        from securecluster.folders import run_folder

        atomic_files.remove(path.parent, path.name, run_folder.OWN)
