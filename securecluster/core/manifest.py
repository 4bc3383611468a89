"""Digests of a folder's files, so that damage to any file that is read back is noticed and named.

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
    """The first `size` bytes of a file, and their SHA-256 in hex."""

    size: int
    sha256: str

    @classmethod
    def of(cls, data: bytes) -> Mark:
        """Return the mark of some bytes."""
        return cls(len(data), digest(data))

    @classmethod
    def of_file(cls, path: Path) -> Mark:
        """Return the mark of a file, without holding all of it in memory."""
        with atomic_files.opened(path) as stream:
            sha256 = hashlib.file_digest(stream, "sha256").hexdigest()
            return cls(stream.tell(), sha256)


EMPTY = Mark(0, hashlib.sha256().hexdigest())


def digest(data: bytes) -> str:
    """Return the SHA-256 of some bytes, in hex."""
    return hashlib.sha256(data).hexdigest()


def damaged(path: Path) -> RunFolderError:
    """Return the error for a file that differs from what was written."""
    return RunFolderError(
        f"{path} differs from what was written there: restore it from a copy, or run anew into "
        "another folder"
    )


def missing(path: Path) -> RunFolderError:
    """Return the error for a file that is not there any more."""
    return RunFolderError(
        f"{path} is missing: restore it from a copy, or run anew into another folder"
    )


def write(folder: Path, names: Iterable[str]) -> None:
    """Write the manifest of some files of a folder.

    Args:
        names: paths relative to the folder.
    """
    marks = {name: Mark.of_file(folder / name) for name in names}
    atomic_files.write_atomic(folder / NAME, encode(marks))


def encode(marks: Mapping[str, Mark]) -> bytes:
    """Return a manifest's text, which ends with a digest of itself."""
    listed = {name: asdict(mark) for name, mark in sorted(marks.items())}
    content = {"schema": SCHEMA, "files": listed}
    return (json.dumps({**content, "sha256": _own_digest(content)}, indent=1) + "\n").encode()


def read(folder: Path, called: str = NAME) -> dict[str, Mark]:
    """Return the marks in a folder's manifest, by name.

    Args:
        called: the manifest's own name.

    Raises:
        RunFolderError: no manifest, or one that differs from what was written.
    """
    path = folder / called
    if not path.is_file():
        raise missing(path)
    try:
        content = json.loads(atomic_files.read(path))
        own = content.pop("sha256")
        marks = {name: Mark(**mark) for name, mark in content["files"].items()}
    except (ValueError, KeyError, TypeError, AttributeError):
        raise damaged(path) from None
    if own != _own_digest(content):
        raise damaged(path)
    return marks


def _own_digest(content: Mapping[str, Any]) -> str:
    return digest(json.dumps(content, sort_keys=True).encode())


def checked(folder: Path, name: str, marks: Mapping[str, Mark]) -> bytes:
    """Return the bytes of a file that a manifest lists.

    Raises:
        RunFolderError: it is missing, not listed, or differs from what was written.
    """
    path = folder / name
    if not path.is_file():
        raise missing(path)
    data = atomic_files.read(path)
    if marks.get(name) != Mark.of(data):
        raise damaged(path)
    return data


def check(folder: Path, marks: Mapping[str, Mark], names: Iterable[str] | None = None) -> None:
    """Raise RunFolderError for the first file that is missing or damaged.

    Args:
        names: the files to check; None is all that are listed.
    """
    for name in marks if names is None else names:
        path = folder / name
        if not path.is_file():
            raise missing(path)
        if marks.get(name) != Mark.of_file(path):
            raise damaged(path)


class Log:
    """An append-only file of lines, with a running digest of all of it.

    Args:
        path: the file, which appears with its first line.
        mode: its permissions.
        durable: whether each append waits until the lines are on the disk.
    """

    def __init__(
        self, path: Path, mode: int = atomic_files.EVERYONE, durable: bool = False
    ) -> None:
        self.path, self._mode, self._durable = path, mode, durable
        self._size = 0
        self._hash = hashlib.sha256()

    @property
    def mark(self) -> Mark:
        """The size and digest of everything appended so far."""
        return Mark(self._size, self._hash.hexdigest())

    def append(self, lines: Sequence[str]) -> None:
        """Append lines in a single write."""
        if not lines:
            return
        text = "\n".join(lines)
        atomic_files.append_line(self.path, text, self._mode, self._durable)
        self._count((text + "\n").encode())

    def restore(self, mark: Mark, decode: Callable[[str], T]) -> list[T]:
        """Go back to an earlier mark: cut off what was appended later, and return the lines before
        it.

        Args:
            decode: makes an item of a line.

        Raises:
            RunFolderError: what stood there at the mark is missing or damaged.
        """
        return self._read(mark, decode, lasting=False)[0]

    def recall(self, mark: Mark, decode: Callable[[str], T]) -> tuple[list[T], list[T]]:
        """Return the lines before an earlier mark, and those after it, which stay; a torn last line
        is cut off.

        Args:
            decode: makes an item of a line.

        Raises:
            RunFolderError: what stood there at the mark is missing or damaged, or what follows does
                not parse.
        """
        return self._read(mark, decode, lasting=True)

    def _read(
        self, mark: Mark, decode: Callable[[str], T], lasting: bool
    ) -> tuple[list[T], list[T]]:
        if mark.size and not self.path.is_file():
            raise missing(self.path)
        data = atomic_files.read(self.path) if self.path.is_file() else b""
        before = data[: mark.size]
        if Mark.of(before) != mark:
            raise damaged(self.path)
        end = data.rfind(b"\n") + 1 if lasting else mark.size
        kept = data[: max(end, mark.size)]
        items = read_lines(self.path, before, decode)
        later = read_lines(self.path, kept[mark.size :], decode)
        if not kept:
            atomic_files.remove(self.path)  # so that it is made anew, with its own permissions
        elif len(data) > len(kept):
            atomic_files.write_atomic(self.path, kept, self._mode, self._durable)
        self._size = 0
        self._hash = hashlib.sha256()
        self._count(kept)
        return items, later

    def _count(self, data: bytes) -> None:
        self._size += len(data)
        self._hash.update(data)


def read_lines(path: Path, data: bytes, decode: Callable[[str], T]) -> list[T]:
    """Return an item for each whole line of a log; a last line without its end is left out.

    Args:
        path: for the sentence of an error.

    Raises:
        RunFolderError: a line that does not decode.
    """
    try:
        lines = data.decode().splitlines(keepends=True)
        return [decode(line) for line in lines if line.endswith("\n")]
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        kind = type(error).__name__
        raise RunFolderError(
            f"{path} does not parse ({kind}): restore it from a copy, or start the run anew"
        ) from None
