"""Users' own parquet files, whose columns name each row's client and label; others are features."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from securecluster.data.pools import (
    Features,
    Labels,
    column,
    decode,
    encoded,
    floats,
    need,
    open_parquet,
    opened,
    reading,
)
from securecluster.errors import UsageError

EXACT_IN_SINGLE = 2**24  # up to which float32 tells whole numbers apart
GREY_MODES = ("1", "L", "I", "I;16", "F")  # of Pillow's images with one channel


@dataclass(frozen=True)
class ClientColumns:
    """Samples by client.

    Args:
        clients: X and y of each client by its name.
        truth: each client's true cluster, where it is known.
        columns: the columns that are features.
    """

    clients: dict[str, tuple[NDArray[Any], Labels]]
    truth: dict[str, int] | None
    columns: tuple[str, ...]


def read_clients(
    path: Path,
    client: str,
    label: str,
    truth: str | None,
    features: Sequence[str] | None = None,
    drop: Sequence[str] = (),
) -> ClientColumns:
    """Return the rows of a file, or of a folder's files, by client.

    Args:
        path: of the file or the folder.
        client: the column that names each row's client.
        label: the column to learn.
        truth: the column with each client's true cluster, where it is known.
        features: the columns that are features, in this order; None is all that are left.
        drop: columns that are no features.

    Raises:
        UsageError: a file, column or value that cannot be used, or a client with a single row.
    """
    files = _files(path)
    named = [name for name in (client, label, truth) if name is not None]
    if len(set(named)) < len(named):
        raise UsageError(f"client, label and truth are different columns, not {', '.join(named)}")
    wanted = None if features is None else _several("feature_columns", features, named)
    left_out = _several("drop_columns", drop, named)
    if wanted is not None and left_out:
        raise UsageError("feature_columns and drop_columns say the same twice: give one of them")
    for file in files:
        open_parquet(file, [*named, *(wanted or ()), *left_out])
    names, owner = _values(files, client)
    classes, y = _values(files, label)
    if len(classes) < 2:
        raise UsageError(
            f"column {label!r} of {path} has the same value in every row, so there is nothing to "
            "learn: choose another label"
        )
    single = np.flatnonzero(np.bincount(owner) < 2)
    if len(single):
        raise UsageError(
            f"client {str(names[single[0]])!r} of {path} has a single row, so none can be held "
            "out: leave it out"
        )
    clusters = None
    if truth is not None:
        values, number = _values(files, truth)
        clusters = _truth(names, owner, values, number, truth)
    x, columns = _features(files, {*named, *left_out}, wanted)
    ends = np.cumsum(np.bincount(owner))[:-1]
    rows_of = np.split(np.argsort(owner, kind="stable"), ends)
    clients = {}
    for name, rows in zip(names, rows_of, strict=True):
        clients[str(name)] = x[rows], y[rows]
    return ClientColumns(clients, clusters, columns)


def _several(option: str, given: Sequence[str], named: Sequence[str]) -> tuple[str, ...]:
    """Return columns that a user names; a text is one column."""
    columns = (given,) if isinstance(given, str) else tuple(given)
    all_text = all(isinstance(name, str) for name in columns)
    if not all_text or len(set(columns)) < len(columns):
        raise UsageError(f"{option} = {columns!r} are names of columns, each once")
    taken = [name for name in columns if name in named]
    if taken:
        raise UsageError(
            f"column {taken[0]!r} names the client, the label or the true cluster: leave it out of "
            f"{option}"
        )
    if not columns and option == "feature_columns":
        raise UsageError(
            "feature_columns names no column: name one, or leave it out for all that are left"
        )
    return columns


def _files(path: Path) -> list[Path]:
    """Return a file, or the parquet files of a folder in the order of their names."""
    if path.is_dir():
        files = sorted(path.glob("*.parquet"))
        if not files:
            raise UsageError(
                f"{path} holds no .parquet file: give a parquet file, or a folder of them"
            )
        return files
    if not path.exists():
        raise UsageError(f"{path} does not exist: give a parquet file, or a folder of them")
    return [path]


def _values(files: Sequence[Path], name: str) -> tuple[NDArray[Any], Labels]:
    """Return a column's values as numbers.

    Returns:
        The distinct values (k,) in ascending order, and each row's number among them (n,).
    """
    cells = np.concatenate([column(file, name).to_numpy(zero_copy_only=False) for file in files])
    if not len(cells):
        path = files[0].parent if len(files) > 1 else files[0]
        raise UsageError(f"{path} has no rows: give a file that has some")
    if cells.dtype.kind == "f" and np.isnan(cells).any():
        raise UsageError(
            f"column {name!r} of {files[0]} has empty cells (NaN): fill or drop these rows"
        )
    try:
        values, number = np.unique(cells, return_inverse=True)
    except (TypeError, ValueError):
        raise UsageError(
            f"column {name!r} of {files[0]} holds values that cannot be put in order: use numbers "
            "or text"
        ) from None
    return values, number.reshape(-1).astype(np.int64)


def _truth(
    names: NDArray[Any], owner: Labels, values: NDArray[Any], number: Labels, column: str
) -> dict[str, int]:
    """Return each client's cluster, which all its rows must name.

    Args:
        names: of the clients.
        owner: each row's client (n,).
        values: of the column.
        number: each row's value (n,).
        column: for the error.
    """
    pairs = np.unique(np.stack([owner, number], axis=1), axis=0)
    several = np.flatnonzero(np.bincount(pairs[:, 0]) > 1)
    if len(several):
        client = str(names[several[0]])
        raise UsageError(
            f"client {client!r} has several values in column {column!r}: a true "
            "cluster is one value per client"
        )
    return {str(names[client]): int(cluster) for client, cluster in pairs}


def _features(
    files: Sequence[Path], named: set[str], wanted: Sequence[str] | None
) -> tuple[NDArray[Any], tuple[str, ...]]:
    """Return samples (n, …) of all rows, and the columns they come from.

    Samples are images, else lists, else rows of numbers.

    Args:
        files: whose rows these are.
        named: the columns that are no features.
        wanted: the columns that are features; None is all that are left.
    """
    types = _column_types(files, named)
    if wanted is not None:
        types = {name: types[name] for name in wanted}
    images = [name for name, kind in types.items() if _holds_images(kind)]
    lists = [name for name, kind in types.items() if _holds_lists(kind)]
    if images:
        name = _only_feature(files[0], "images", images, wanted)
        return _images(files, name), (name,)
    if lists:
        name = _only_feature(files[0], "lists", lists, wanted)
        return np.concatenate([_lists(file, name) for file in files]), (name,)
    names = list(types)
    if wanted is None:
        # pandas writes its row numbers under this name
        names = [name for name in names if not name.startswith("__index_level_")]
    if not names:
        raise UsageError(
            f"{files[0]} has no feature column besides {', '.join(sorted(named))}: add some"
        )
    return np.concatenate([_table(file, names) for file in files]), tuple(names)


def _column_types(files: Sequence[Path], named: set[str]) -> dict[str, Any]:
    """Return the types (pyarrow) of the columns that are not `named`, by their names.

    Raises:
        UsageError: a file has other columns than the first one.
    """
    schemas = []
    for file in files:
        schema = open_parquet(file, ()).schema_arrow
        schemas.append({each.name: each.type for each in schema if each.name not in named})
    for file, types in zip(files, schemas, strict=True):
        if list(types) != list(schemas[0]):
            raise UsageError(
                f"{file} has other columns than {files[0]}: files of one folder have the same ones"
            )
    return schemas[0]


def _holds_images(kind: Any) -> bool:
    """Return whether a column of this type (pyarrow) has encoded images."""
    types = need("pyarrow").types
    return bool(types.is_struct(kind) or types.is_binary(kind) or types.is_large_binary(kind))


def _holds_lists(kind: Any) -> bool:
    """Return whether a column of this type (pyarrow) has lists."""
    types = need("pyarrow").types
    return bool(types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind))


def _only_feature(
    file: Path, content: str, names: Sequence[str], wanted: Sequence[str] | None
) -> str:
    """Return the one column of images or lists, which are no feature beside others.

    Raises:
        UsageError: there are several such columns, or the user names others besides.
    """
    if len(names) > 1:
        raise UsageError(
            f"{file} has several columns of {content} ({', '.join(names)}): leave one, drop the "
            "others"
        )
    if wanted is not None and len(wanted) > 1:
        raise UsageError(
            f"column {names[0]!r} of {file} holds {content}, which are the only feature then: "
            "name it alone"
        )
    return names[0]


def _images(files: Sequence[Path], name: str) -> Features:
    """Return a column of encoded images, all of the first one's size and number of channels."""
    blobs = []
    for file in files:
        for number, blob in enumerate(encoded(column(file, name), file)):
            blobs.append((f"image {number} of {file}", blob))
    first = opened(*blobs[0])
    channels = 1 if first.mode in GREY_MODES else 3
    shape = channels, first.height, first.width
    return floats(decode(blobs, len(blobs), shape), np.arange(len(blobs)))


def _table(file: Path, names: Sequence[str]) -> NDArray[Any]:
    """Return columns of numbers side by side, (n, k)."""
    return np.stack([_numbers(file, name) for name in names], axis=1)


def _lists(file: Path, name: str) -> Features:
    """Return a column of equally long (possibly nested) lists of numbers."""
    cells = column(file, name)
    with reading(file):
        values = cells.to_pylist()
    try:
        rows = np.asarray(values)
    except ValueError:
        raise UsageError(
            f"column {name!r} of {file} has lists of different lengths: make them equally long"
        ) from None
    if rows.dtype.kind not in "biuf":
        raise UsageError(
            f"column {name!r} of {file} has lists with empty cells or of other things than "
            "numbers: use numbers"
        )
    return _single(rows)


def _numbers(file: Path, name: str) -> NDArray[Any]:
    """Return a column of numbers.

    It is in double precision where single precision would make large whole numbers equal.
    """
    values = np.asarray(column(file, name).to_numpy(zero_copy_only=False))
    if values.dtype.kind not in "biuf":
        raise UsageError(
            f"column {name!r} of {file} holds {_type_of(file, name)}, not numbers: drop it, or "
            "encode it as numbers"
        )
    if values.dtype.kind in "iu":
        double = values.astype(np.float64)
        if np.abs(double).max(initial=0) >= EXACT_IN_SINGLE:
            return double
    return _single(values)


def _single(values: NDArray[Any]) -> Features:
    """Return values as float32.

    What is too large becomes infinite and is refused with its client's name later.
    """
    with np.errstate(over="ignore"):
        return values.astype(np.float32)


def _type_of(file: Path, name: str) -> str:
    """Return the type of a column in words."""
    return str(open_parquet(file, (name,)).schema_arrow.field(name).type)
