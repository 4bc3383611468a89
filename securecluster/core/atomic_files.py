"""Files that are either whole or absent, with a clear sentence when the disk says no.

Nothing is written through a link that somebody else has put in the place of one of our files.
"""

from __future__ import annotations

import errno
import os
import re
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from securecluster.errors import RunFolderError

if TYPE_CHECKING:
    from io import BufferedReader


OWNER, EVERYONE = 0o600, 0o644  # modes of files
NO_LINK: int = getattr(os, "O_NOFOLLOW", 0)  # Windows has no such flag
HALF_WRITTEN = re.compile(r"\.(?P<name>.+)\.[0-9a-f]{16}\.tmp")


@contextmanager
def _said(path: Path, what: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            mend = "free some space, then resume the run"
        elif error.errno == errno.ELOOP:
            mend = "remove the link that is in its place"
        else:
            mend = "check the path and its permissions"
        raise RunFolderError(
            f"cannot {what} {path} ({os.strerror(error.errno or 0)}): {mend}"
        ) from error


def write_atomic(path: Path, data: bytes, mode: int = EVERYONE, durable: bool = False) -> None:
    """Write a file that appears whole or not at all, also when killed half-way.

    The bytes go to a new file of an unpredictable name first, so that none that was put there
    before is used.

    Args:
        path: of the file; a link there is replaced, and not followed.
        data: its content.
        mode: its permissions, which it has from the start.
        durable: wait until it is on the disk, so that it also survives a power cut.

    Raises:
        RunFolderError: the disk says no.
    """
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}.tmp")
    with _said(path, "write"):
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | NO_LINK, mode)
        try:
            with os.fdopen(descriptor, "wb") as stream:
                stream.write(data)
                if durable:
                    stream.flush()
                    os.fsync(stream.fileno())
            os.replace(temporary, path)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
        if durable:
            _sync_folder(path.parent)


def _sync_folder(folder: Path) -> None:
    """Wait until the names in a folder are on the disk, where the system can tell."""
    flag: int = getattr(os, "O_DIRECTORY", 0)  # Windows has no such flag, and opens no folders
    if not flag:
        return
    descriptor = os.open(folder, os.O_RDONLY | flag)
    try:
        os.fsync(descriptor)
    except OSError as error:
        # some file systems do not sync folders
        if error.errno not in (
            errno.EINVAL,
            errno.ENOTSUP,
        ):
            raise
    finally:
        os.close(descriptor)


def final_name(name: str) -> str:
    """Return the name that a file was to have, where a kill left it half-written, else its own."""
    found = HALF_WRITTEN.fullmatch(name)
    return found["name"] if found else name


def remove_half_written(folder: Path) -> None:
    """Delete what kills left half-written in a folder; the caller is the only one that writes
    there.
    """
    if not folder.is_dir() or folder.is_symlink():
        return
    for path in folder.iterdir():
        if final_name(path.name) != path.name and not path.is_dir():
            remove(path)


def append_line(path: Path, line: str, mode: int = EVERYONE, durable: bool = False) -> None:
    """Append one line in a single write; it ends alike on every system.

    Args:
        path: of the file, which may be no link.
        line: without its end.
        mode: the file's permissions, where it is new.
        durable: wait until the line is on the disk, so that it also survives a power cut.

    Raises:
        RunFolderError: the disk says no, or a link is in the file's place.
    """
    with _said(path, "write"):
        descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | NO_LINK, mode)
        with os.fdopen(descriptor, "ab") as stream:
            first = os.fstat(stream.fileno()).st_size == 0
            stream.write((line + "\n").encode())
            if durable:
                stream.flush()
                os.fsync(stream.fileno())
        if durable and first:
            _sync_folder(path.parent)


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


def make_private_folder(path: Path) -> None:
    """Make a folder that its owner alone can look into; its parent is there.

    Raises:
        RunFolderError: the disk says no, or a link is in the folder's place.
    """
    with _said(path, "make"):
        if path.is_symlink():
            raise OSError(errno.ELOOP, os.strerror(errno.ELOOP))
        path.mkdir(mode=0o700, exist_ok=True)
        path.chmod(0o700)


def make_new_folder(path: Path) -> None:
    """Make an empty folder, in place of whatever is there; a link is removed, and what it leads to
    is not touched.

    Raises:
        RunFolderError: the disk says no.
    """
    with _said(path, "make"):
        if path.is_symlink():
            path.unlink()
        elif path.exists():
            shutil.rmtree(path)
        path.mkdir()
