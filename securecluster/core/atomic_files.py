"""Files that are either complete or absent, with one sentence as error when the disk refuses.

No file is written through a link that somebody else has put in its place.

A file is written under an unpredictable name, which has to be new, and renamed. Logs, transcripts
and drafts of checkpoints are not written through links either.
"""

from __future__ import annotations

import errno
import os
import re
import secrets
import shutil
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from securecluster.errors import RunFolderError

if TYPE_CHECKING:
    from io import BufferedReader


# file modes: readable by the owner, or by all users
OWNER = 0o600
EVERYONE = 0o644
NO_LINK: int = getattr(os, "O_NOFOLLOW", 0)  # Windows has no such flag
HALF_WRITTEN = re.compile(r"\.(?P<name>.+)\.[0-9a-f]{16}\.tmp")


@contextmanager
def _as_run_folder_error(path: Path, action: str) -> Iterator[None]:
    """Turn any OSError within the context into a RunFolderError.

    Args:
        path: of the file or folder that the context accesses.
        action: the verb of the message, such as "write".
    """
    try:
        _check_name(path)
        yield
    except OSError as error:
        # a full disk, or a user's quota used up
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            remedy = "free some space, then resume the run"
        elif error.errno == errno.ELOOP:  # raised by O_NOFOLLOW
            remedy = "remove the link that is in its place"
        elif error.errno == errno.EMLINK:
            remedy = "it is one file under several names, so put a copy in its place"
        else:
            remedy = "check the path and its permissions"
        reason = os.strerror(error.errno or 0)
        raise RunFolderError(f"cannot {action} {path} ({reason}): {remedy}") from error


def _check_name(path: Path) -> None:
    """Raise OSError for a path that no file can have: with a null character, or in no encoding."""
    try:
        possible = b"\0" not in os.fsencode(path)
    except UnicodeEncodeError:
        possible = False
    if not possible:
        raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))


def write_atomic(path: Path, data: bytes, mode: int = EVERYONE, durable: bool = False) -> None:
    """Write a file that appears complete or not at all, even if the process is killed.

    The bytes are first written to a new file with an unpredictable name, which is then renamed. A
    file that was put under the temporary name before is never used.

    Args:
        path: of the file; a link there is replaced, and not followed.
        data: content of the file.
        mode: permissions, which the file has from the start.
        durable: wait until the data are on the disk, so that they also survive a power cut.

    Raises:
        RunFolderError: the file cannot be written.
    """
    with _as_run_folder_error(path, "write"):
        if not path.name:  # such as "."
            raise OSError(errno.EISDIR, os.strerror(errno.EISDIR))
        temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}.tmp")
        # O_EXCL: fail rather than open a file that exists
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | NO_LINK, mode)
        try:
            with os.fdopen(descriptor, "wb") as stream:
                stream.write(data)
                if durable:
                    stream.flush()
                    os.fsync(stream.fileno())
            # in one step, and without following a link at `path`
            os.replace(temporary, path)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
        if durable:
            _sync_folder(path.parent)


def _sync_folder(folder: Path) -> None:
    """Wait until the names of a folder's files are on the disk, if the system supports it."""
    flag: int = getattr(os, "O_DIRECTORY", 0)  # Windows has no such flag, and opens no folders
    if not flag:
        return
    descriptor = os.open(folder, os.O_RDONLY | flag)
    try:
        os.fsync(descriptor)
    except OSError as error:
        # some file systems do not sync folders
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    finally:
        os.close(descriptor)


def final_name(name: str) -> str:
    """Return the name under which a half-written file was to appear.

    Args:
        name: of a file; one that is not a temporary file's is returned as it is.
    """
    match = HALF_WRITTEN.fullmatch(name)
    if match is None:
        return name
    return match["name"]


def remove_half_written(folder: Path) -> None:
    """Delete the temporary files that killed processes left in a folder.

    Args:
        folder: in which the caller is the only process that writes.
    """
    # a link may lead to a folder that others write to
    if not folder.is_dir() or folder.is_symlink():
        return
    for path in folder.iterdir():
        if final_name(path.name) != path.name and not path.is_dir():
            remove(path)


def append_line(path: Path, line: str, mode: int = EVERYONE, durable: bool = False) -> None:
    """Append one line in a single write, with the same line end on every system.

    Args:
        path: of the file, which may be no link.
        line: without its end.
        mode: permissions of a new file.
        durable: wait until the line is on the disk, so that it also survives a power cut.

    Raises:
        RunFolderError: the line cannot be written, or a link is in the file's place.
    """
    with _as_run_folder_error(path, "write"):
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | NO_LINK
        descriptor = os.open(path, flags, mode)
        with os.fdopen(descriptor, "ab") as stream:
            status = os.fstat(stream.fileno())
            # a hard link: the other name may be somebody else's file
            if status.st_nlink > 1:
                raise OSError(errno.EMLINK, os.strerror(errno.EMLINK))
            is_new = status.st_size == 0
            text = line + "\n"
            stream.write(text.encode())
            if durable:
                stream.flush()
                os.fsync(stream.fileno())
        if durable and is_new:
            _sync_folder(path.parent)


def move(source: Path, target: Path) -> None:
    """Rename a file or folder in one step.

    Args:
        source: its present path.
        target: its new path; a file there is replaced.
    """
    with _as_run_folder_error(target, "write"):
        os.replace(source, target)


def remove(path: Path) -> None:
    """Delete a file if it exists."""
    with _as_run_folder_error(path, "remove"):
        path.unlink(missing_ok=True)


def remove_below(folder: Path, path: Path) -> None:
    """Delete a file or an empty folder that lies below a folder, however the path may change.

    No link between the two is followed, also where one takes a folder's place meanwhile, and of a
    link only the link is deleted.

    Args:
        folder: which itself may be a link.
        path: relative to the folder.

    Raises:
        OSError: it cannot be deleted, or does not lie below the folder.
    """
    if path.is_absolute() or ".." in path.parts or not path.parts:
        raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
    if os.unlink not in os.supports_dir_fd:  # Windows
        _remove_within(folder.resolve(), path)
        return
    directory: int = getattr(os, "O_DIRECTORY", 0)
    descriptor = os.open(folder, os.O_RDONLY | directory)
    try:
        for name in path.parent.parts:
            inner = os.open(name, os.O_RDONLY | directory | NO_LINK, dir_fd=descriptor)
            os.close(descriptor)
            descriptor = inner
        status = os.stat(path.name, dir_fd=descriptor, follow_symlinks=False)
        if stat.S_ISDIR(status.st_mode):
            os.rmdir(path.name, dir_fd=descriptor)
        else:
            os.unlink(path.name, dir_fd=descriptor)
    finally:
        os.close(descriptor)


def _remove_within(folder: Path, path: Path) -> None:
    """Delete a file or an empty folder, where the system opens no folders.

    Args:
        folder: an absolute path without links.
        path: relative to the folder.
    """
    target = folder / path
    if target.parent.resolve() != target.parent:
        raise OSError(errno.ELOOP, os.strerror(errno.ELOOP))
    if target.is_dir() and not target.is_symlink():
        target.rmdir()
    else:
        target.unlink()


@contextmanager
def opened(path: Path) -> Iterator[BufferedReader]:
    """Open a file for reading within the context, for files too large to be read at once."""
    with _as_run_folder_error(path, "read"), path.open("rb") as stream:
        yield stream


def read(path: Path) -> bytes:
    """Return the content of a file."""
    with _as_run_folder_error(path, "read"):
        return path.read_bytes()


def make_folder(path: Path) -> None:
    """Make a folder and its parents, if they do not exist."""
    with _as_run_folder_error(path, "make"):
        path.mkdir(parents=True, exist_ok=True)


def make_private_folder(path: Path) -> None:
    """Make a folder that only its owner can access.

    Args:
        path: of the folder, whose parent exists.

    Raises:
        RunFolderError: the folder cannot be made, or a link is in its place.
    """
    with _as_run_folder_error(path, "make"):
        if path.is_symlink():
            raise OSError(errno.ELOOP, os.strerror(errno.ELOOP))
        path.mkdir(mode=0o700, exist_ok=True)
        # a folder that existed may have other permissions
        path.chmod(0o700)


def make_new_folder(path: Path) -> None:
    """Make an empty folder in place of anything that exists at the path.

    Args:
        path: of the folder; a link there is removed, and its target is left as it is.

    Raises:
        RunFolderError: the folder cannot be made.
    """
    with _as_run_folder_error(path, "make"):
        if path.is_symlink():
            path.unlink()
        elif path.exists():
            shutil.rmtree(path)
        path.mkdir()
