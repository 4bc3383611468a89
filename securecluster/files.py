"""Files that are either whole or absent, with a clear sentence when the disk says no."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from securecluster.errors import RunFolderError

if TYPE_CHECKING:
    from io import BufferedReader


@contextmanager
def _said(path: Path, what: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        mend = (
            "free some space, then resume the run" if error.errno in (errno.ENOSPC, errno.EDQUOT) else "check the path and its permissions"
        )
        raise RunFolderError(f"cannot {what} {path} ({os.strerror(error.errno or 0)}): {mend}") from error


def write_atomic(path: Path, data: bytes, mode: int = 0o644) -> None:
    """Write a file that appears whole or not at all, also when killed half-way."""
    temporary = path.with_name(f".{path.name}.tmp")
    with _said(path, "write"):
        try:
            descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, mode)
            with os.fdopen(descriptor, "wb") as stream:
                stream.write(data)
            os.replace(temporary, path)
        except OSError:
            temporary.unlink(missing_ok=True)
            raise


def append_line(path: Path, line: str) -> None:
    """Append one line in a single write; it ends alike on every system."""
    with _said(path, "write"), path.open("ab") as stream:
        stream.write((line + "\n").encode())


def move(source: Path, target: Path) -> None:
    """Rename a file or folder, in one step."""
    with _said(target, "write"):
        os.replace(source, target)


def remove(path: Path) -> None:
    """Delete a file, if it is there."""
    with _said(path, "remove"):
        path.unlink(missing_ok=True)


@contextmanager
def opened(path: Path) -> Iterator[BufferedReader]:
    """Open a file to be read in parts."""
    with _said(path, "read"), path.open("rb") as stream:
        yield stream


def read(path: Path) -> bytes:
    """A file's bytes."""
    with _said(path, "read"):
        return path.read_bytes()


def make_folder(path: Path) -> None:
    """Make a folder and its parents."""
    with _said(path, "make"):
        path.mkdir(parents=True, exist_ok=True)
