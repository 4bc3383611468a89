"""Manifests: digests of a folder's files, by which a damaged file is detected and named.

A manifest is a JSON file with the size and SHA-256 of each file beside it, and a digest of itself.
It guards against damage, not against forgery: whoever edits a file can edit the manifest too.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

from securecluster.core import atomic_files
from securecluster.errors import RunFolderError

NAME = "manifest.json"
SCHEMA = 1
T = TypeVar("T")


@dataclass(frozen=True)
class Mark:
    """Size and digest of the first bytes of a file.

    Args:
        size: number of bytes.
        sha256: of these bytes, in hex.
    """

    size: int
    sha256: str

    @classmethod
    def of(cls, data: bytes) -> Mark:
        """Return the mark of a file with this content."""
        return cls(len(data), digest(data))

    @classmethod
    def of_file(cls, path: Path) -> Mark:
        """Return the mark of a file, without holding all of it in memory."""
        with atomic_files.opened(path) as stream:
            sha256 = hashlib.file_digest(stream, "sha256").hexdigest()
            return cls(stream.tell(), sha256)


EMPTY = Mark(0, hashlib.sha256().hexdigest())


def digest(data: bytes) -> str:
    """Return the SHA-256 of `data` in hex."""
    return hashlib.sha256(data).hexdigest()


def damaged(path: Path) -> RunFolderError:
    """Return the error for a file whose content differs from its mark."""
    return RunFolderError(
        f"{path} differs from what was written there: restore it from a copy, or run anew into "
        "another folder"
    )


def missing(path: Path) -> RunFolderError:
    """Return the error for a file that no longer exists."""
    return RunFolderError(
        f"{path} is missing: restore it from a copy, or run anew into another folder"
    )


def write(folder: Path, names: Iterable[str]) -> None:
    """Write the manifest of some files of a folder.

    Args:
        folder: that contains the files and gets the manifest.
        names: paths of the files relative to the folder.
    """
    marks = {name: Mark.of_file(folder / name) for name in names}
    atomic_files.write_atomic(folder / NAME, encode(marks))


def encode(marks: Mapping[str, Mark]) -> bytes:
    """Return the text of a manifest, which ends with a digest of itself.

    Args:
        marks: of the files by name.
    """
    files = {name: asdict(mark) for name, mark in sorted(marks.items())}
    return with_digest({"schema": SCHEMA, "files": files})


def with_digest(content: Mapping[str, Any]) -> bytes:
    """Return the text of a JSON file that ends with a digest of itself.

    Args:
        content: of the file, without an entry "sha256".
    """
    text = json.dumps({**content, "sha256": _digest_of_manifest(content)}, indent=1) + "\n"
    return text.encode()


def content_with_digest(path: Path, data: bytes) -> dict[str, Any]:
    """Return the content of a JSON file that ends with a digest of itself, without that digest.

    Args:
        path: of the file, for the message of an error.
        data: of the file.

    Raises:
        RunFolderError: it differs from its digest.
    """
    try:
        content: dict[str, Any] = json.loads(data)
        recorded_digest = content.pop("sha256")
        is_whole = recorded_digest == _digest_of_manifest(content)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise damaged(path) from None
    if not is_whole:
        raise damaged(path)
    return content


def read(folder: Path, manifest_name: str = NAME) -> dict[str, Mark]:
    """Return the marks in a folder's manifest by file name.

    Args:
        folder: that contains the manifest.
        manifest_name: file name of the manifest.

    Raises:
        RunFolderError: there is no manifest, or its content differs from its digest.
    """
    path = folder / manifest_name
    if not path.is_file():
        raise missing(path)
    content = content_with_digest(path, atomic_files.read(path))
    try:
        marks = {name: Mark(**mark) for name, mark in content["files"].items()}
    except (KeyError, TypeError, AttributeError):
        raise damaged(path) from None
    if not all(_lies_within(name) for name in marks):
        raise damaged(path)
    return marks


def _lies_within(name: str) -> bool:
    """Return whether a file's name in a manifest leads to a file below the manifest's folder."""
    return not Path(name).is_absolute() and ".." not in Path(name).parts


def _digest_of_manifest(content: Mapping[str, Any]) -> str:
    """Return the digest of a manifest's content, which does not depend on the order of keys."""
    return digest(json.dumps(content, sort_keys=True).encode())


def checked(folder: Path, name: str, marks: Mapping[str, Mark]) -> bytes:
    """Return the content of a file after comparing it with its mark.

    Args:
        folder: that contains the file.
        name: path of the file relative to the folder.
        marks: of the manifest.

    Raises:
        RunFolderError: the file is missing, not listed, or differs from its mark.
    """
    path = folder / name
    if not path.is_file():
        raise missing(path)
    # read once, so that the content returned is the content checked
    data = atomic_files.read(path)
    if marks.get(name) != Mark.of(data):
        raise damaged(path)
    return data


def check(folder: Path, marks: Mapping[str, Mark], names: Iterable[str] | None = None) -> None:
    """Raise RunFolderError for the first file that is missing or differs from its mark.

    Args:
        folder: that contains the files.
        marks: of the manifest.
        names: of the files to check; None is all that are listed.
    """
    if names is None:
        names = marks
    for name in names:
        path = folder / name
        if not path.is_file():
            raise missing(path)
        if marks.get(name) != Mark.of_file(path):
            raise damaged(path)


class Log:
    """An append-only file of lines, with a running digest of its content.

    Args:
        path: of the file, which is made when the first line is appended.
        mode: permissions of the file.
        durable: whether each append waits until the lines are on the disk.
    """

    def __init__(
        self, path: Path, mode: int = atomic_files.EVERYONE, durable: bool = False
    ) -> None:
        self.path = path
        self._mode = mode
        self._durable = durable
        self._size = 0
        self._hash = hashlib.sha256()

    @property
    def mark(self) -> Mark:
        """Return the size and digest of all lines appended so far."""
        return Mark(self._size, self._hash.hexdigest())

    def begin(self) -> None:
        """Make the file, without a line, where it does not exist yet."""
        if not self._size and not self.path.exists():
            atomic_files.write_atomic(self.path, b"", self._mode, self._durable)

    def append(self, lines: Sequence[str]) -> None:
        """Append lines in a single write.

        Args:
            lines: without their ends.
        """
        if not lines:
            return
        text = "\n".join(lines)
        atomic_files.append_line(self.path, text, self._mode, self._durable)
        self._update((text + "\n").encode())

    def restore(self, mark: Mark, decode: Callable[[str], T]) -> list[T]:
        """Truncate the log to an earlier mark, and return its lines.

        Args:
            mark: at which the log ends afterwards.
            decode: returns the item of a line.

        Raises:
            RunFolderError: the content before the mark is missing or damaged.
        """
        items, _ = self._read(mark, decode, keep_later_lines=False)
        return items

    def recall(self, mark: Mark, decode: Callable[[str], T]) -> tuple[list[T], list[T]]:
        """Return the lines before and after an earlier mark.

        All lines remain in the log, except for a torn last line, which is cut off.

        Args:
            mark: that divides the lines.
            decode: returns the item of a line.

        Returns:
            The items before the mark, and the items after it.

        Raises:
            RunFolderError: the content before the mark is missing or damaged, or a later line does
                not parse.
        """
        return self._read(mark, decode, keep_later_lines=True)

    def _read(
        self, mark: Mark, decode: Callable[[str], T], keep_later_lines: bool
    ) -> tuple[list[T], list[T]]:
        """Return the items before and after a mark, and truncate the file after the last item."""
        exists = self.path.is_file()
        if mark.size and not exists:
            raise missing(self.path)
        data = b""
        if exists:
            data = atomic_files.read(self.path)
        before = data[: mark.size]
        if Mark.of(before) != mark:
            raise damaged(self.path)
        end = mark.size
        if keep_later_lines:
            # a kill may have torn the last line, which then lacks its end
            end = max(end, data.rfind(b"\n") + 1)
        content = data[:end]
        items = read_lines(self.path, before, decode)
        later_items = read_lines(self.path, content[mark.size :], decode)
        self._truncate(content, len(data))
        self._size = 0
        self._hash = hashlib.sha256()
        self._update(content)
        return items, later_items

    def _truncate(self, content: bytes, size: int) -> None:
        """Leave only `content`, the beginning of the file of `size` bytes."""
        if size > len(content):
            atomic_files.write_atomic(self.path, content, self._mode, self._durable)

    def _update(self, data: bytes) -> None:
        self._size += len(data)
        self._hash.update(data)


def read_lines(path: Path, data: bytes, decode: Callable[[str], T]) -> list[T]:
    """Return the item of each complete line of a log; a last line without its end is left out.

    Args:
        path: of the log, for the message of an error.
        data: content of the log.
        decode: returns the item of a line.

    Raises:
        RunFolderError: a line does not decode.
    """
    try:
        lines = data.decode().splitlines(keepends=True)
        return [decode(line) for line in lines if line.endswith("\n")]
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        error_type = type(error).__name__
        raise RunFolderError(
            f"{path} does not parse ({error_type}): restore it from a copy, or start the run anew"
        ) from None
