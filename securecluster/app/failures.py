"""Errors that nobody foresaw, in a run among others: a line for tables, and a file of tracebacks.

Such a run is recorded as failed, and the others go on.
"""

from __future__ import annotations

import traceback
from collections.abc import Mapping
from pathlib import Path

from securecluster.app.options import as_typed
from securecluster.core import atomic_files
from securecluster.errors import SecureClusterError
from securecluster.runs.number_format import printable

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


def write(path: Path, tracebacks: Mapping[str, str]) -> None:
    """Write tracebacks to a file, which is removed if there are none.

    Args:
        path: of the file.
        tracebacks: by the name of the run.

    Raises:
        RunFolderError: the file cannot be written.
    """
    if not tracebacks:
        atomic_files.remove(path)
        return
    texts = [f"{name}\n{text}\n" for name, text in tracebacks.items()]
    atomic_files.write_atomic(path, "\n".join(texts).encode())
