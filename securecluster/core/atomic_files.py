"""Files that are either complete or absent, with one sentence as error when the disk refuses.

No file is written through a link that somebody else has put in its place.

A file is written under an unpredictable name, which has to be new, and renamed. Logs, transcripts
and drafts of checkpoints are not written through links either.

Nothing else in the library removes, renames or overwrites a file (`tests/test_architecture.py`).
What is removed has a name of a known form, and lies in a folder with a file that marks it as ours
(`Own`); what is written where a user says replaces only what the same command wrote before
(`write_output`).
"""

from __future__ import annotations

import errno
import os
import re
import secrets
import shutil
import stat
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import TYPE_CHECKING

from securecluster.errors import OutputError, RunFolderError

if TYPE_CHECKING:
    from io import BufferedReader


# file modes: readable by the owner, or by all users
OWNER = 0o600
EVERYONE = 0o644
NO_LINK: int = getattr(os, "O_NOFOLLOW", 0)  # Windows has no such flag
HALF_WRITTEN = re.compile(r"\.(?P<name>.+)\.[0-9a-f]{16}\.tmp")
MARKER = ".securecluster"  # marks folders of runs, and those that `save` wrote


@dataclass(frozen=True)
class Own:
    """Files and folders of ours in folders of one kind, which may be removed there.

    Args:
        markers: names of files, one of which lies in each of these folders.
        names: of our files and folders, as paths relative to the folder.
    """

    markers: tuple[str, ...]
    names: re.Pattern[str]

    def has(self, path: PurePath) -> bool:
        """Return whether a path is one of ours, also of a file that is half-written.

        Args:
            path: relative to the folder.
        """
        final_path = path.with_name(final_name(path.name))
        return any(self.names.fullmatch(candidate.as_posix()) for candidate in (path, final_path))


@contextmanager
def as_run_folder_error(path: Path, action: str) -> Iterator[None]:
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
    with staged(path.parent, {path.name: data}, mode, durable) as move_in:
        move_in()


@contextmanager
def staged(
    folder: Path, contents: Mapping[str, bytes], mode: int = EVERYONE, durable: bool = False
) -> Iterator[Callable[[], None]]:
    """Write files under temporary names, so that all are complete before the first one appears.

    Args:
        folder: of the files.
        contents: of the files by name.
        mode: permissions, which the files have from the start.
        durable: wait until the data are on the disk.

    Yields:
        A function that moves the files in, in their order; links in their places are replaced, and
        not followed. Without a call nothing has changed after the context.

    Raises:
        RunFolderError: a file cannot be written.
    """
    temporaries: dict[str, Path] = {}

    def move_in() -> None:
        for name in list(temporaries):
            with as_run_folder_error(folder / name, "write"):
                # in one step, and without following a link
                os.replace(temporaries[name], folder / name)
            del temporaries[name]
        if durable:
            with as_run_folder_error(folder, "write"):
                _sync_folder(folder)

    try:
        for name, data in contents.items():
            with as_run_folder_error(folder / name, "write"):
                if not name:  # of a path such as "."
                    raise OSError(errno.EISDIR, os.strerror(errno.EISDIR))
                temporary = temporary_path(folder / name)
                # O_EXCL: fail rather than open a file that exists
                flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | NO_LINK
                descriptor = os.open(temporary, flags, mode)
                temporaries[name] = temporary
                with os.fdopen(descriptor, "wb") as stream:
                    stream.write(data)
                    if durable:
                        stream.flush()
                        os.fsync(stream.fileno())
        yield move_in
    finally:
        for temporary in temporaries.values():
            with suppress(OSError):
                temporary.unlink(missing_ok=True)


def copy_atomic(source: Path, target: Path) -> None:
    """Give a file another name, in place of what has it, or copy it where that cannot be done.

    Args:
        source: of the file, which stays.
        target: its further path; a link there is replaced, and not followed.

    Raises:
        RunFolderError: it cannot be copied.
    """
    temporary = temporary_path(target)
    with as_run_folder_error(target, "write"):
        try:
            try:
                os.link(source, temporary)
            except OSError:  # some file systems have no hard links
                shutil.copyfile(source, temporary)
            os.replace(temporary, target)
        finally:
            with suppress(OSError):
                temporary.unlink(missing_ok=True)


def temporary_path(path: Path) -> Path:
    """Return a new path beside a file or folder that is still being written.

    Args:
        path: of the file or folder.
    """
    return path.with_name(f".{path.name}.{secrets.token_hex(8)}.tmp")


def write_output(
    path: Path, data: bytes, is_own: Callable[[bytes], bool], mode: int = EVERYONE
) -> None:
    """Write a file where a user says, unless something else is there that would be lost.

    Args:
        path: of the file.
        data: content of the file.
        is_own: True for the content of an earlier file of the same kind, which is replaced.
        mode: permissions.

    Raises:
        OutputError: another file, or no file, is there.
        RunFolderError: the file cannot be written.
    """
    check_output(path, is_own)
    write_atomic(path, data, mode)


def check_output(path: Path, is_own: Callable[[bytes], bool]) -> None:
    """Raise OutputError where `write_output` would: at the beginning of minutes of work.

    Args:
        path: of the file.
        is_own: True for the content of an earlier file of the same kind.
    """
    with as_run_folder_error(path, "write"):
        try:
            status = path.lstat()
        except FileNotFoundError:
            return
        if stat.S_ISREG(status.st_mode) and (not status.st_size or is_own(path.read_bytes())):
            return
    raise OutputError(
        f"{path} exists, and was not written by this command: give another path, or move it"
    )


def write_new(path: Path, data: bytes, mode: int = EVERYONE) -> None:
    """Write a file where there is none, so that it is on the disk when this returns.

    A kill may leave a part of it: what tells that it is whole is to be written after it.

    Args:
        path: of the file.
        data: content of the file.
        mode: permissions, which the file has from the start.

    Raises:
        RunFolderError: there is a file already, or it cannot be written.
    """
    with as_run_folder_error(path, "write"):
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | NO_LINK, mode)
        try:
            with os.fdopen(descriptor, "wb") as stream:
                stream.write(data)
                stream.flush()
                os.fsync(stream.fileno())
        except BaseException:
            path.unlink(missing_ok=True)
            raise
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


def remove_half_written(folder: Path, owned: Own) -> None:
    """Delete the temporary files that killed processes left in a folder.

    Args:
        folder: in which the caller is the only process that writes.
        owned: names of the files that were to appear.
    """
    # a link may lead to a folder that others write to
    if not folder.is_dir() or folder.is_symlink():
        return
    for path in folder.iterdir():
        if final_name(path.name) != path.name and owned.has(PurePath(path.name)):
            remove(folder, path.name, owned)


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
    with as_run_folder_error(path, "write"):
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


def check_lock(path: Path) -> None:
    """Raise RunFolderError for something in the place of a lock, which would be emptied.

    Args:
        path: of the lock.
    """
    with as_run_folder_error(path, "lock"):
        try:
            status = path.lstat()
        except FileNotFoundError:
            return
    if stat.S_ISLNK(status.st_mode) or status.st_nlink > 1:
        raise RunFolderError(f"{path} is a link to another file: remove the link")
    if not stat.S_ISREG(status.st_mode) or status.st_size:
        raise RunFolderError(f"{path} is in the place of a lock, which is an empty file: move it")


def move(source: Path, target: Path) -> None:
    """Rename a file or folder in one step.

    Args:
        source: its present path.
        target: its new path; a file there is replaced.
    """
    with as_run_folder_error(target, "write"):
        os.replace(source, target)


def remove(folder: Path, name: str, owned: Own) -> None:
    """Delete a file of ours if it exists.

    Args:
        folder: of the file.
        name: of the file.
        owned: what is ours in such a folder.

    Raises:
        RunFolderError: it cannot be deleted, or is none of ours.
    """
    with as_run_folder_error(folder / name, "remove"), suppress(FileNotFoundError):
        remove_below(folder, PurePath(name), owned)


def remove_below(folder: Path, path: PurePath, owned: Own) -> None:
    """Delete a file or an empty folder of ours below a folder, however the path may change.

    No link between the two is followed, also where one takes a folder's place meanwhile, and of a
    link only the link is deleted. What is empty, and what is half-written, whose name is drawn,
    needs no marker.

    Args:
        folder: which itself may be a link.
        path: relative to the folder.
        owned: what is ours in such a folder.

    Raises:
        OSError: it cannot be deleted, does not lie below the folder, or is none of ours.
    """
    if path.is_absolute() or ".." in path.parts or not path.parts:
        raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
    if not owned.has(path):
        raise OSError(errno.EPERM, os.strerror(errno.EPERM))
    if os.unlink not in os.supports_dir_fd:  # Windows
        _remove_within(folder.resolve(), path, owned)
        return
    directory: int = getattr(os, "O_DIRECTORY", 0)
    descriptor = os.open(folder, os.O_RDONLY | directory)
    try:
        marked = any(_is_file(marker, descriptor) for marker in owned.markers)
        for name in path.parent.parts:
            inner = os.open(name, os.O_RDONLY | directory | NO_LINK, dir_fd=descriptor)
            os.close(descriptor)
            descriptor = inner
        status = os.stat(path.name, dir_fd=descriptor, follow_symlinks=False)
        if stat.S_ISDIR(status.st_mode):
            os.rmdir(path.name, dir_fd=descriptor)
        else:
            _check_removable(path, status, marked)
            os.unlink(path.name, dir_fd=descriptor)
    finally:
        os.close(descriptor)


def _check_removable(path: PurePath, status: os.stat_result, marked: bool) -> None:
    """Raise OSError for a file with a content in a folder that is not marked as ours."""
    is_empty = stat.S_ISREG(status.st_mode) and not status.st_size
    is_half_written = any(final_name(component) != component for component in path.parts)
    if not (marked or is_empty or is_half_written):
        raise OSError(errno.EPERM, os.strerror(errno.EPERM))


def _is_file(name: str, folder: int) -> bool:
    """Return whether a folder has a regular file of a name, and no link.

    Args:
        name: of the file.
        folder: a descriptor of the folder.
    """
    try:
        status = os.stat(name, dir_fd=folder, follow_symlinks=False)
    except FileNotFoundError:
        return False
    return stat.S_ISREG(status.st_mode)


def _remove_within(folder: Path, path: PurePath, owned: Own) -> None:
    """Delete a file or an empty folder, where the system opens no folders.

    Args:
        folder: an absolute path without links.
        path: relative to the folder.
        owned: what is ours in the folder.
    """
    target = folder / path
    if target.parent.resolve() != target.parent:
        raise OSError(errno.ELOOP, os.strerror(errno.ELOOP))
    if target.is_dir() and not target.is_symlink():
        target.rmdir()
        return
    markers = [folder / marker for marker in owned.markers]
    marked = any(marker.is_file() and not marker.is_symlink() for marker in markers)
    _check_removable(path, target.lstat(), marked)
    target.unlink()


def remove_folder(folder: Path, name: str, owned: Own) -> None:
    """Delete a folder of ours with the files of ours in it, if it exists.

    Args:
        folder: that contains it.
        name: of the folder that is deleted.
        owned: what is ours in `folder`.

    Raises:
        OSError: it cannot be deleted, is a link, or something else is in it, which stays.
    """
    if not os.path.lexists(folder / name):
        return
    if (folder / name).is_symlink():
        raise OSError(errno.ELOOP, os.strerror(errno.ELOOP))
    for path in sorted((folder / name).iterdir()):
        inner = PurePath(name, path.name)
        if owned.has(inner):
            remove_below(folder, inner, owned)
    remove_below(folder, PurePath(name), owned)


def remove_empty_folder(folder: Path) -> None:
    """Delete a folder that has nothing in it.

    Args:
        folder: which may be no link.

    Raises:
        OSError: it cannot be deleted, or something is in it.
    """
    folder.rmdir()


def remove_socket(path: Path) -> None:
    """Delete a socket of this user's on which nobody listens.

    Args:
        path: of the socket.

    Raises:
        OSError: it cannot be deleted, or is something else.
    """
    status = path.lstat()
    if not stat.S_ISSOCK(status.st_mode) or status.st_uid != os.geteuid():
        raise OSError(errno.EPERM, os.strerror(errno.EPERM))
    path.unlink()


@contextmanager
def opened(path: Path) -> Iterator[BufferedReader]:
    """Open a file for reading within the context, for files too large to be read at once."""
    with as_run_folder_error(path, "read"), path.open("rb") as stream:
        yield stream


def read(path: Path) -> bytes:
    """Return the content of a file."""
    with as_run_folder_error(path, "read"):
        return path.read_bytes()


def make_folder(path: Path) -> None:
    """Make a folder and its parents, if they do not exist."""
    with as_run_folder_error(path, "make"):
        path.mkdir(parents=True, exist_ok=True)


def make_private_folder(path: Path) -> None:
    """Make a folder that only its owner can access.

    Args:
        path: of the folder, whose parent exists.

    Raises:
        RunFolderError: the folder cannot be made, or a link is in its place.
    """
    with as_run_folder_error(path, "make"):
        if path.is_symlink():
            raise OSError(errno.ELOOP, os.strerror(errno.ELOOP))
        path.mkdir(mode=0o700, exist_ok=True)
        # a folder that existed may have other permissions
        path.chmod(0o700)


def make_new_folder(folder: Path, name: str, owned: Own) -> None:
    """Make an empty folder in place of an earlier one of ours.

    Args:
        folder: in which it is made.
        name: of the new folder; a link there is removed, and its target is left as it is.
        owned: what is ours in `folder`.

    Raises:
        RunFolderError: the folder cannot be made, or something else is in the one that is there.
    """
    path = folder / name
    with as_run_folder_error(path, "make"):
        if path.is_symlink():
            path.unlink()
        else:
            remove_folder(folder, name, owned)
        path.mkdir()
