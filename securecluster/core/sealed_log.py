"""Logs whose lines each have a digest of themselves and of all lines before them.

A line that was changed, removed, repeated or moved is found by the digest of the next one, and a
log that was cut by the mark of its end, which another file has.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from securecluster.core import atomic_files, manifest
from securecluster.core.manifest import EMPTY, Log, Mark
from securecluster.errors import RunFolderError

SEAL = "sha256"


class SealedLog:
    """An append-only file of JSON objects that its owner alone may read.

    Args:
        path: of the file, which is made when the first line is appended.
    """

    def __init__(self, path: Path) -> None:
        self._log = Log(path, atomic_files.OWNER, durable=True)
        self.last_seal = ""  # of the last line
        self.unsure_seal = ""  # of a line that may be there, although appending it failed

    @property
    def path(self) -> Path:
        """Return the path of the file."""
        return self._log.path

    @property
    def mark(self) -> Mark:
        """Return the size and digest of all lines appended so far."""
        return self._log.mark

    def append(self, content: Mapping[str, Any]) -> None:
        """Append a line, which is on the disk when this returns.

        Args:
            content: with at least one entry.

        Raises:
            RunFolderError: it cannot be written, or somebody else has written the file meanwhile.
        """
        size = self.path.stat().st_size if self.path.exists() else 0
        if size != self.mark.size:
            raise RunFolderError(f"{self.path} was changed while this process was writing it")
        # without the brace, which comes after the digest
        text = json.dumps(content, allow_nan=False)[:-1]
        self.unsure_seal = _seal(self.mark.sha256, text.encode())
        self._log.append([f'{text}, "{SEAL}": "{self.unsure_seal}"}}'])
        self.last_seal = self.unsure_seal
        self.unsure_seal = ""

    def read(self, mark: Mark) -> tuple[list[dict[str, Any]], int]:
        """Return the content of all whole lines, of which some may lie behind a mark.

        Args:
            mark: at which the log ended when it was last told to another file.

        Returns:
            The contents, and how many of them lie behind the mark.

        Raises:
            RunFolderError: a line is missing, or differs from what was written.
        """
        complete_lines, contents = self._checked(mark)
        later = complete_lines[mark.size :].count(b"\n")
        return contents, later

    def go_on(self) -> None:
        """Get ready to append: a last line that a kill has cut short is removed.

        Raises:
            RunFolderError: as for `read`, or the file cannot be written.
        """
        complete_lines, _ = self._checked(EMPTY)
        self._log.restore(Mark.of(complete_lines), str)

    def _checked(self, mark: Mark) -> tuple[bytes, list[dict[str, Any]]]:
        """Return the bytes of all whole lines, and their contents."""
        data = b""
        if self.path.is_file():
            data = atomic_files.read(self.path)
        elif self.path.exists():
            raise manifest.damaged(self.path)
        elif mark.size:
            raise manifest.missing(self.path)
        if Mark.of(data[: mark.size]) != mark:
            raise manifest.damaged(self.path)
        complete_lines = data[: data.rfind(b"\n") + 1]
        contents = []
        before = hashlib.sha256()
        self.last_seal = ""
        for line in complete_lines.splitlines(keepends=True):
            contents.append(self._content(line, before.hexdigest()))
            before.update(line)
        return complete_lines, contents

    def _content(self, line: bytes, before: str) -> dict[str, Any]:
        """Return the content of a line.

        Args:
            line: with its end.
            before: digest of all lines before it.
        """
        text, _, seal = line.rpartition(f', "{SEAL}": "'.encode())
        expected = _seal(before, text)
        if seal != f'{expected}"}}\n'.encode():
            raise manifest.damaged(self.path)
        self.last_seal = expected
        try:
            content: dict[str, Any] = json.loads(text + b"}")
        except (ValueError, RecursionError):
            raise manifest.damaged(self.path) from None
        return content


def _seal(before: str, text: bytes) -> str:
    """Return the digest of a line.

    Args:
        before: digest of all lines before it.
        text: of the line, without its own digest.
    """
    return manifest.digest(before.encode() + text)
