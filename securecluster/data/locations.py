"""Locations of data sets: a folder that the environment names, else the Hugging Face hub."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from securecluster.data.pools import column, need
from securecluster.errors import UsageError, unknown

FOLDER = "SECURECLUSTER_DATA"


def folder() -> Path | None:
    """Return the folder of data sets, where the environment names one."""
    named = os.environ.get(FOLDER)
    return Path(named) if named else None


def parquet_files(where: Path, name: str, hub: str, split: str) -> tuple[Path, ...]:
    """Return a set's files of one split, `split.parquet` or `split-….parquet`.

    Raises:
        UsageError: there is none.
    """
    home = where / name
    files = sorted([*home.rglob(f"{split}.parquet"), *home.rglob(f"{split}-*.parquet")])
    if not files:
        raise UsageError(
            f"{FOLDER} is {where}, where no {name}/{split}-*.parquet lies: put {hub} there, or "
            f"unset {FOLDER} to load it from the hub"
        )
    return tuple(files)


def the_file(where: Path, inside: str, hub: str | None = None) -> Path:
    """Return a file of a set, by its place in the folder.

    Raises:
        UsageError: it is not there.
    """
    path = where / inside
    if not path.is_file():
        cure = "put it there"
        if hub:
            cure += f", or unset {FOLDER} to load {hub} from the hub"
        raise UsageError(f"{FOLDER} is {where}, where no {inside} lies: {cure}")
    return path


def hub_rows(
    name: str, hub: str, split: str, columns: Sequence[str], files: str | None = None
) -> Any:
    """Return a split of a set on the hub, as a `datasets.Dataset` that has these columns.

    Args:
        name: of the set here.
        hub: its name on the hub.
        split: "train" or "test".
        columns: that it must have.
        files: what to put under the folder instead, for the error.

    Raises:
        UsageError: the package or the connection is missing, or the set has other columns.
    """
    datasets = need("datasets")
    try:
        rows = datasets.load_dataset(hub, split=split)
    # a registry's, a server's and a file system's errors have no common base
    except Exception as error:
        raise UsageError(
            f"{name} could not be loaded from the hub as {hub!r} ({type(error).__name__}): "
            f"check the connection, or set {FOLDER} to a folder that holds "
            f"{files or f'{name}/{split}-*.parquet'}"
        ) from error
    for wanted in columns:
        if wanted not in rows.column_names:
            raise unknown(f"column of {hub}", wanted, rows.column_names)
    return rows


def hub_texts(rows: Any, name: str) -> list[str]:
    """Return a text column of a set on the hub, empty cells as empty text."""
    return [cell or "" for cell in rows.with_format("arrow")[:].column(name).to_pylist()]


def texts(path: Path, name: str) -> list[str]:
    """Return a column of text.

    Raises:
        UsageError: the file or the column is missing or broken, or holds something else.
    """
    cells = column(path, name)
    types = need("pyarrow").types
    if not (types.is_string(cells.type) or types.is_large_string(cells.type)):
        raise UsageError(
            f"column {name!r} of {path} holds {cells.type}, not text: download or write the file "
            "again"
        )
    return list(cells.to_pylist())


def numbers(path: Path, name: str) -> NDArray[Any]:
    """Return a column of finite numbers (n,).

    Raises:
        UsageError: the file or the column is missing or broken, or holds something else.
    """
    cells = column(path, name)
    types = need("pyarrow").types
    if not (types.is_integer(cells.type) or types.is_floating(cells.type)):
        raise UsageError(
            f"column {name!r} of {path} holds {cells.type}, not numbers: download or write the "
            "file again"
        )
    values = np.asarray(cells.to_numpy())
    if not np.isfinite(values).all():
        raise UsageError(
            f"column {name!r} of {path} has a value that is NaN or infinite: download or write the "
            "file again"
        )
    return values


__all__ = [
    "FOLDER",
    "folder",
    "hub_rows",
    "hub_texts",
    "numbers",
    "parquet_files",
    "texts",
    "the_file",
]
