"""Locks of folders that one process may write at a time."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from securecluster.core import atomic_files
from securecluster.errors import RunFolderError

if TYPE_CHECKING:
    from filelock import BaseFileLock

NAME = ".lock"


def acquire(folder: Path, seconds: float = 0.0) -> BaseFileLock:
    """Return the lock of a folder, which is held until it is released or no longer referred to.

    Args:
        folder: that exists.
        seconds: to wait for another process or another lock of this one.

    Raises:
        RunFolderError: another process holds it, or the folder cannot be locked.
    """
    from filelock import FileLock, Timeout

    path = folder / NAME
    atomic_files.check_lock(path)
    # any thread may release it, also the one that collects garbage
    lock = FileLock(path, thread_local=False)
    try:
        lock.acquire(timeout=seconds)
    except Timeout:
        raise RunFolderError(
            f"{folder} is being written by another process: wait for it, or stop it first"
        ) from None
    except OSError as error:
        raise RunFolderError(
            f"cannot lock {folder} ({error.strerror}): check its permissions"
        ) from error
    return lock
