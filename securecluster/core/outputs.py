"""Files that commands write where a user says, in place of an earlier one of their kind alone."""

from __future__ import annotations

import io
import json
import zipfile
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

from securecluster.core import atomic_files

PICTURES = (".png", ".pdf", ".svg")
MAKER = "securecluster"  # in the metadata of a picture
MADE_BY = {".png": "Software", ".pdf": "Creator", ".svg": "Creator"}  # entry of the metadata


def json_with(names: Collection[str]) -> Callable[[bytes], bool]:
    """Return the function that tells whether a file is a JSON object with some entries.

    Args:
        names: of the entries.
    """

    def is_own(data: bytes) -> bool:
        try:
            content = json.loads(data)
        except (ValueError, RecursionError):
            return False
        return isinstance(content, dict) and content.keys() >= set(names)

    return is_own


def zip_with(names: Collection[str]) -> Callable[[bytes], bool]:
    """Return the function that tells whether a file is a ZIP file with some files.

    Args:
        names: of the files.
    """

    def is_own(data: bytes) -> bool:
        try:
            with zipfile.ZipFile(io.BytesIO(data)) as archive:
                return set(archive.namelist()) >= set(names)
        except (zipfile.BadZipFile, ValueError, NotImplementedError):
            return False

    return is_own


def is_picture(data: bytes) -> bool:
    """Return whether a file is a picture that `picture` made.

    Args:
        data: content of the file.
    """
    return data.startswith((b"\x89PNG", b"%PDF", b"<?xml")) and MAKER.encode() in data


def write_json(path: Path, content: Any, is_own: Callable[[bytes], bool]) -> None:
    """Write JSON where a user says.

    Args:
        path: of the file.
        content: of the file.
        is_own: True for the content of an earlier file of the same kind.

    Raises:
        OutputError: something else is there.
        RunFolderError: the file cannot be written.
    """
    text = json.dumps(content, indent=2, ensure_ascii=False) + "\n"
    atomic_files.write_output(path, text.encode(), is_own)


def write_picture(path: Path, figure: Any) -> None:
    """Write a picture where a user says.

    Args:
        path: of the file, which ends in one of `PICTURES`.
        figure: of matplotlib.

    Raises:
        OutputError: something else is there.
        RunFolderError: the file cannot be written.
    """
    buffer = io.BytesIO()
    figure.savefig(buffer, format=path.suffix[1:], metadata={MADE_BY[path.suffix]: MAKER})
    atomic_files.write_output(path, buffer.getvalue(), is_picture)
