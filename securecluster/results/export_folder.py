"""Folders of exports, in which a new export takes the place of an earlier one at once.

A folder that was exported is made to be handed on, so what its `clusters.json` says may come from
anybody: a file is replaced or removed only if its name is one that an export gives, and lies in the
folder itself.

The new export is complete, in a folder within the folder, before anything of the earlier one
changes. Then `load.py` leads there, and `clusters.json` names the files there, each by one rename;
the files are copied to their places, and both say so. Whoever reads in between, or after a kill,
finds either export whole.
"""

from __future__ import annotations

import json
import re
import stat
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path, PurePath
from typing import Any, NotRequired, TypedDict

from securecluster.core import atomic_files, serialization
from securecluster.core.number_format import printable
from securecluster.errors import RunFolderError, UsageError

CONTENT = "clusters.json"
LOADER = "load.py"
FROZEN = "frozen.safetensors"
CACHE = "__pycache__"  # of Python, where the loader was imported
MODEL = r"(cluster|client)[0-9]+\.(safetensors|onnx(\.data)?)"
NEW = r"\.export\.[0-9a-f]{16}\.tmp"  # folder of an export that is still being written
FILE = re.compile(rf"({NEW}/)?({MODEL}|{re.escape(FROZEN)})")  # in clusters.json
OWN = atomic_files.Own(
    (CONTENT,),
    re.compile(rf"{NEW}|({NEW}/)?({MODEL}|{'|'.join(map(re.escape, (CONTENT, LOADER, FROZEN)))})"),
)
# lines of the loader: its first, and the one that says where its files are
FIRST = '"""Loader of exported models'
PLACE = "FOLDER = Path(__file__).parent\n"


class Content(TypedDict):
    """Entries of `clusters.json` that name files."""

    clusters: dict[str, str]
    """model of each cluster"""
    own: dict[str, str]
    """model of each client that was named"""
    frozen: str | None
    """tensors that all models share"""
    earlier: NotRequired[list[str]]
    """while an export is being replaced: the files in their places"""


def publish(folder: Path, content: dict[str, Any], write: Callable[[Path], None]) -> None:
    """Write an export to a folder, in place of an earlier one.

    Args:
        folder: new or empty, or of an earlier export.
        content: of `clusters.json`, complete after `write`.
        write: writes all other files to an empty folder.

    Raises:
        UsageError: a folder of something else.
        RunFolderError: a file cannot be written.
    """
    earlier = _earlier(folder)
    atomic_files.make_folder(folder)
    left = [path.name for path in folder.iterdir() if re.fullmatch(NEW, path.name)]
    new = atomic_files.temporary_path(folder / "export")
    atomic_files.make_private_folder(new)
    try:
        write(new)
        files = sorted(path.name for path in new.iterdir() if path.name not in (CONTENT, LOADER))
        _write_content(new, content)
        has_loader = (new / LOADER).is_file()
        if has_loader:
            _write_loader(folder, new, f'{PLACE.rstrip()} / "{new.name}"\n')
    except BaseException:
        _remove_folder(folder, new.name)
        raise
    # from here on the new one is what the folder has
    others = sorted(earlier - {*files, CONTENT, LOADER})
    _write_content(folder, {**_in_folder(content, new.name), "earlier": [*files, *others]})
    for name in files:
        atomic_files.copy_atomic(new / name, folder / name)
    for name in others:
        atomic_files.remove(folder, name, OWN)
    _write_content(folder, content)
    if has_loader:
        _write_loader(folder, new, PLACE)
    else:
        atomic_files.remove(folder, LOADER, OWN)
    for name in (*left, new.name):
        _remove_folder(folder, name)


def _write_content(folder: Path, content: dict[str, Any]) -> None:
    """Write `clusters.json`."""
    text = json.dumps(content, indent=2, ensure_ascii=False) + "\n"
    atomic_files.write_atomic(folder / CONTENT, text.encode())


def _write_loader(folder: Path, new: Path, place: str) -> None:
    """Write the loader of the new export, with the line that says where its files are."""
    text = atomic_files.read(new / LOADER).decode()
    assert text.count(PLACE) == 1 and text.startswith(FIRST)
    atomic_files.write_atomic(folder / LOADER, text.replace(PLACE, place).encode())


def _in_folder(content: dict[str, Any], name: str) -> dict[str, Any]:
    """Return the content of `clusters.json` with its files in a folder within the folder."""
    moved = dict(content)
    for entry in ("clusters", "own"):
        moved[entry] = {key: f"{name}/{file}" for key, file in content[entry].items()}
    if content["frozen"] is not None:
        moved["frozen"] = f"{name}/{content['frozen']}"
    return moved


def _remove_folder(folder: Path, name: str) -> None:
    """Remove a folder that is no longer needed, as far as possible."""
    with suppress(OSError):
        atomic_files.remove_folder(folder, name, OWN)


def _earlier(folder: Path) -> set[str]:
    """Return the files of the export in a folder.

    Raises:
        UsageError: a folder of something else, or an export with names that none gives.
        RunFolderError: the folder cannot be read.
    """
    kinds = _kinds(folder)
    files: set[str] = set()
    folders = {name for name in kinds if re.fullmatch(NEW, name)}
    if stat.S_ISREG(kinds.get(CONTENT, 0)):
        files = {CONTENT, *_named(folder / CONTENT)}
        folders.add(CACHE)
    # an export that was killed may have left the loader alone
    if folders and stat.S_ISREG(kinds.get(LOADER, 0)) and _is_loader(folder / LOADER):
        files.add(LOADER)
    # and files under temporary names
    half_written = set()
    for name in kinds.keys() - folders:
        if atomic_files.final_name(name) != name and OWN.has(PurePath(name)):
            half_written.add(name)
    for name, mode in sorted(kinds.items()):
        is_file = stat.S_ISREG(mode) and name in files | half_written
        is_folder = stat.S_ISDIR(mode) and name in folders
        if not (is_file or is_folder):
            raise UsageError(
                f"{folder} holds {printable(name)}, which is of no export: give a new folder"
            )
    for name in half_written:
        atomic_files.remove(folder, name, OWN)
    return files & kinds.keys()


def _is_loader(path: Path) -> bool:
    """Return whether a file is a loader that an export wrote."""
    return atomic_files.read(path).startswith(FIRST.encode())


def _kinds(folder: Path) -> dict[str, int]:
    """Return the mode of everything in a folder by name, of links their own."""
    try:
        return {path.name: path.lstat().st_mode for path in folder.iterdir()}
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise RunFolderError(
            f"cannot read {folder} ({error.strerror}): give another folder"
        ) from error


def _named(path: Path) -> set[str]:
    """Return the files that `clusters.json` names, which all lie in its folder.

    Raises:
        UsageError: it names something else, or is not what an export writes.
        RunFolderError: it cannot be read.
    """
    data = atomic_files.read(path)
    try:
        content = serialization.checked(path, serialization.parsed(path, data), Content)
    except RunFolderError:
        raise UsageError(f"{path} is not what an export writes: give a new folder") from None
    named = [*content["clusters"].values(), *content["own"].values(), *content.get("earlier", [])]
    if content["frozen"] is not None:
        named.append(content["frozen"])
    for name in named:
        if FILE.fullmatch(name) is None:
            raise UsageError(
                f"{path} names {printable(name)!r:.100}, which no export writes: give a new folder"
            )
    files = {PurePath(name).name for name in named}
    # a large graph has its tensors in a file of their own
    return files | {f"{name}.data" for name in files if name.endswith(".onnx")}
