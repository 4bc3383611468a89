"""Locations of data sets: a folder named by an environment variable, or the Hugging Face hub."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from securecluster.core.optional_packages import need
from securecluster.data.pools import column
from securecluster.errors import UsageError, unknown

FOLDER = "SECURECLUSTER_DATA"


def folder() -> Path | None:
    """Return the folder of data sets, or None if the environment names none."""
    path = os.environ.get(FOLDER)
    # an empty variable counts as unset
    if not path:
        return None
    return Path(path)


def parquet_files(data_folder: Path, name: str, hub: str, split: str) -> tuple[Path, ...]:
    """Return a set's files of one split, `split.parquet` or `split-….parquet`, in order.

    Args:
        data_folder: of all data sets.
        name: of the set.
        hub: name of the set on the hub, for the error.
        split: "train" or "test".

    Raises:
        UsageError: there is no such file.
    """
    set_folder = data_folder / name
    # at any depth, since snapshots of the hub have subfolders
    single = set_folder.rglob(f"{split}.parquet")
    numbered = set_folder.rglob(f"{split}-*.parquet")
    files = sorted([*single, *numbered])
    if not files:
        raise UsageError(
            f"{FOLDER} is {data_folder}, where no {name}/{split}-*.parquet lies: put {hub} there, "
            f"or unset {FOLDER} to load it from the hub"
        )
    return tuple(files)


def the_file(data_folder: Path, inside: str, hub: str | None = None) -> Path:
    """Return the path of a set's file.

    Args:
        data_folder: of all data sets.
        inside: path of the file relative to the folder.
        hub: name of the set on the hub, if it is there, for the error.

    Raises:
        UsageError: the file does not exist.
    """
    path = data_folder / inside
    if not path.is_file():
        remedy = "put it there"
        if hub:
            remedy += f", or unset {FOLDER} to load {hub} from the hub"
        raise UsageError(f"{FOLDER} is {data_folder}, where no {inside} lies: {remedy}")
    return path


def hub_rows(
    name: str, hub: str, split: str, columns: Sequence[str], files: str | None = None
) -> Any:
    """Return one split of a set on the hub as a `datasets.Dataset`.

    Args:
        name: of the set in this package.
        hub: name of the set on the hub.
        split: "train" or "test".
        columns: names of columns that the set must have.
        files: paths that may be put in the folder of data sets instead, for the error.

    Raises:
        UsageError: the package or the connection is missing, or the set has other columns.
    """
    datasets = need("datasets")
    try:
        rows = datasets.load_dataset(hub, split=split)
    # a registry's, a server's and a file system's errors have no common base class
    except Exception as error:
        if files is None:
            files = f"{name}/{split}-*.parquet"
        raise UsageError(
            f"{name} could not be loaded from the hub as {hub!r} ({type(error).__name__}): "
            f"check the connection, or set {FOLDER} to a folder that holds {files}"
        ) from error
    for column_name in columns:
        if column_name not in rows.column_names:
            raise unknown(f"column of {hub}", column_name, rows.column_names)
    return rows


def hub_texts(rows: Any, name: str) -> list[str]:
    """Return a text column of a set on the hub, with empty strings for empty cells.

    Args:
        rows: result of `hub_rows`.
        name: of the column.
    """
    table = rows.with_format("arrow")[:]
    return [cell or "" for cell in table.column(name).to_pylist()]


def texts(path: Path, name: str) -> list[str]:
    """Return a column of text.

    Args:
        path: of a parquet file.
        name: of the column.

    Raises:
        UsageError: the file or the column is missing or damaged, or has values of another type.
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

    Args:
        path: of a parquet file.
        name: of the column.

    Raises:
        UsageError: the file or the column is missing or damaged, or has other values.
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
