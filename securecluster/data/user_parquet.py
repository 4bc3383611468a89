"""Users' own parquet files, with columns for clients, labels and features."""

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

EXACT_IN_SINGLE = 2**24  # up to this number float32 represents all integers exactly
GREY_MODES = ("1", "L", "I", "I;16", "F")  # Pillow's modes of images with one channel


@dataclass(frozen=True)
class ClientColumns:
    """Samples of each client, read from parquet files.

    Args:
        clients: samples (X, y) of each client by its name, as text or a whole float.
        truth: true cluster of each client by its name, or None if it is unknown.
        columns: names of the feature columns.
    """

    clients: dict[str | float, tuple[NDArray[Any], Labels]]
    truth: dict[str | float, int] | None
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
        client: column with the name of each row's client.
        label: column with the labels.
        truth: column with each client's true cluster, or None.
        features: columns that are features, in this order; None is all other columns.
        drop: columns that are no features.

    Raises:
        UsageError: a file, column or value that cannot be used, or a client with a single row.
    """
    files = _files(path)
    roles = [name for name in (client, label, truth) if name is not None]
    if len(set(roles)) < len(roles):
        raise UsageError(f"client, label and truth are different columns, not {', '.join(roles)}")
    selected = None
    if features is not None:
        selected = _column_names("feature_columns", features, roles)
    dropped = _column_names("drop_columns", drop, roles)
    if selected is not None and dropped:
        raise UsageError("feature_columns and drop_columns say the same twice: give one of them")
    # all files are checked for all columns before any of them is read
    for file in files:
        open_parquet(file, [*roles, *(selected or ()), *dropped])
    names, client_of_row = _values(files, client)
    classes, y = _values(files, label)
    if len(classes) < 2:
        raise UsageError(
            f"column {label!r} of {path} has the same value in every row, so there is nothing to "
            "learn: choose another label"
        )
    row_counts = np.bincount(client_of_row)
    _check_row_counts(path, names, row_counts)
    clusters = None
    if truth is not None:
        values, cluster_of_row = _values(files, truth)
        clusters = _truth(names, client_of_row, values, cluster_of_row, truth)
    excluded = {*roles, *dropped}
    x, columns = _features(files, excluded, selected)
    # stable, so that a client's rows remain in the order of the files
    by_client = np.argsort(client_of_row, kind="stable")
    ends = np.cumsum(row_counts)
    rows_of_clients = np.split(by_client, ends[:-1])
    clients: dict[str | float, tuple[NDArray[Any], Labels]] = {}
    for client_name, rows in zip(names, rows_of_clients, strict=True):
        pair = (x[rows], y[rows])
        clients[_key(client_name)] = pair
    return ClientColumns(clients, clusters, columns)


def _key(client_name: Any) -> str | float:
    """Return a client's name: its text, but whole floats as they are, which are whole numbers."""
    if isinstance(client_name, float | np.floating) and float(client_name).is_integer():
        return float(client_name)
    return str(client_name)


def _check_row_counts(path: Path, names: NDArray[Any], row_counts: Labels) -> None:
    """Raise UsageError for a client with a single row, of which none could be held out.

    Args:
        path: of the file or the folder, for the error.
        names: of the clients (m,).
        row_counts: of the clients (m,).
    """
    single = np.flatnonzero(row_counts < 2)
    if len(single):
        name = str(names[single[0]])
        raise UsageError(
            f"client {name!r} of {path} has a single row, so none can be held out: leave it out"
        )


def _column_names(option: str, value: Sequence[str], roles: Sequence[str]) -> tuple[str, ...]:
    """Return the column names in a user's option.

    Args:
        option: name of the option, for errors.
        value: of the option; a string is one column.
        roles: columns of clients, labels and true clusters, which the option may not contain.

    Raises:
        UsageError: a value that is no name, a name twice, or a column of another role.
    """
    columns = tuple(value)
    # a string is itself a sequence, of its characters
    if isinstance(value, str):
        columns = (value,)
    all_text = all(isinstance(name, str) for name in columns)
    if not all_text or len(set(columns)) < len(columns):
        raise UsageError(f"{option} = {columns!r} are names of columns, each once")
    taken = [name for name in columns if name in roles]
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
    """Return the file at a path, or the parquet files of a folder in the order of their names.

    Raises:
        UsageError: there is no such file.
    """
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
    """Return the distinct values of a column, and the value of each row.

    Args:
        files: whose rows are read.
        name: of the column.

    Returns:
        The distinct values (k,) in ascending order, and each row's position among them (n,).

    Raises:
        UsageError: there are no rows, empty cells, or values without an order.
    """
    cells_of_files = []
    for file in files:
        cells_of_files.append(column(file, name).to_numpy(zero_copy_only=False))
    cells = np.concatenate(cells_of_files)
    if not len(cells):
        path = files[0]
        if len(files) > 1:
            path = path.parent
        raise UsageError(f"{path} has no rows: give a file that has some")
    # NaN is not null to pyarrow, so `column` has not refused it
    if cells.dtype.kind == "f" and np.isnan(cells).any():
        raise UsageError(
            f"column {name!r} of {files[0]} has empty cells (NaN): fill or drop these rows"
        )
    try:
        values, positions = np.unique(cells, return_inverse=True)
    # values of mixed types have no order
    except (TypeError, ValueError):
        raise UsageError(
            f"column {name!r} of {files[0]} holds values that cannot be put in order: use numbers "
            "or text"
        ) from None
    return values, positions.reshape(-1).astype(np.int64)


def _truth(
    names: NDArray[Any],
    client_of_row: Labels,
    values: NDArray[Any],
    cluster_of_row: Labels,
    column_name: str,
) -> dict[str | float, int]:
    """Return each client's true cluster by its name.

    Args:
        names: of the clients (m,).
        client_of_row: position of each row's client in `names` (n,).
        values: distinct values of the column (k,).
        cluster_of_row: position of each row's value in `values` (n,).
        column_name: for the error.

    Raises:
        UsageError: rows of one client have different values.
    """
    rows = np.stack([client_of_row, cluster_of_row], axis=1)
    pairs = np.unique(rows, axis=0)
    value_counts = np.bincount(pairs[:, 0])
    ambiguous = np.flatnonzero(value_counts > 1)
    if len(ambiguous):
        client_name = str(names[ambiguous[0]])
        raise UsageError(
            f"client {client_name!r} has several values in column {column_name!r}: a true cluster "
            "is one value per client"
        )
    return {_key(names[client]): int(cluster) for client, cluster in pairs}


def _features(
    files: Sequence[Path], excluded: set[str], selected: Sequence[str] | None
) -> tuple[NDArray[Any], tuple[str, ...]]:
    """Return samples (n, …) of all rows, and the columns that they are made of.

    Samples are images, or else lists, or else rows of numbers.

    Args:
        files: whose rows are read.
        excluded: columns that are no features.
        selected: columns that are features; None is all other columns.

    Raises:
        UsageError: no feature column, or columns that do not go together.
    """
    types = _column_types(files, excluded)
    if selected is not None:
        types = {name: types[name] for name in selected}
    image_columns = [name for name in types if _holds_images(types[name])]
    list_columns = [name for name in types if _holds_lists(types[name])]
    if image_columns:
        name = _only_feature(files[0], "images", image_columns, selected)
        return _images(files, name), (name,)
    if list_columns:
        name = _only_feature(files[0], "lists", list_columns, selected)
        lists = [_lists(file, name) for file in files]
        return np.concatenate(lists), (name,)
    names = list(types)
    if selected is None:
        # pandas writes its row numbers under this name
        names = [name for name in names if not name.startswith("__index_level_")]
    if not names:
        raise UsageError(
            f"{files[0]} has no feature column besides {', '.join(sorted(excluded))}: add some"
        )
    tables = [_table(file, names) for file in files]
    return np.concatenate(tables), tuple(names)


def _column_types(files: Sequence[Path], excluded: set[str]) -> dict[str, Any]:
    """Return the types (pyarrow) of columns by their names.

    Args:
        files: that must have the same columns in the same order.
        excluded: columns to leave out.

    Raises:
        UsageError: a file has other columns than the first one.
    """
    types_of_files = []
    for file in files:
        # from the metadata alone, without reading rows
        schema = open_parquet(file, ()).schema_arrow
        types = {field.name: field.type for field in schema if field.name not in excluded}
        types_of_files.append(types)
    first_types = types_of_files[0]
    for file, types in zip(files, types_of_files, strict=True):
        # types may differ, such as integers of different widths
        if list(types) != list(first_types):
            raise UsageError(
                f"{file} has other columns than {files[0]}: files of one folder have the same ones"
            )
    return first_types


def _holds_images(column_type: Any) -> bool:
    """Return True if a column of this type (pyarrow) contains encoded images."""
    types = need("pyarrow").types
    checks = (types.is_struct, types.is_binary, types.is_large_binary)
    return any(check(column_type) for check in checks)


def _holds_lists(column_type: Any) -> bool:
    """Return True if a column of this type (pyarrow) contains lists."""
    types = need("pyarrow").types
    checks = (types.is_list, types.is_large_list, types.is_fixed_size_list)
    return any(check(column_type) for check in checks)


def _only_feature(
    file: Path, content: str, names: Sequence[str], selected: Sequence[str] | None
) -> str:
    """Return the one column of images or lists, which cannot be combined with other features.

    Args:
        file: for errors.
        content: "images" or "lists", for errors.
        names: columns with this content.
        selected: columns that the user names as features, or None.

    Raises:
        UsageError: several such columns, or other columns that the user names.
    """
    if len(names) > 1:
        raise UsageError(
            f"{file} has several columns of {content} ({', '.join(names)}): leave one, drop the "
            "others"
        )
    # columns that the user selected are never left out silently
    if selected is not None and len(selected) > 1:
        raise UsageError(
            f"column {names[0]!r} of {file} holds {content}, which are the only feature then: "
            "name it alone"
        )
    return names[0]


def _images(files: Sequence[Path], name: str) -> Features:
    """Return a column of encoded images (n, channels, height, width).

    The first image determines the size and the number of channels of all of them.

    Args:
        files: whose rows are read.
        name: of the column.
    """
    blobs = []
    for file in files:
        cells = column(file, name)
        for number, blob in enumerate(encoded(cells, file)):
            location = f"image {number} of {file}"
            blobs.append((location, blob))
    first = opened(*blobs[0])
    channels = 3
    if first.mode in GREY_MODES:
        channels = 1
    shape = (channels, first.height, first.width)
    pixels = decode(blobs, len(blobs), shape)
    return floats(pixels, np.arange(len(blobs)))


def _table(file: Path, names: Sequence[str]) -> NDArray[Any]:
    """Return columns of numbers as a table (n, k)."""
    columns = [_numbers(file, name) for name in names]
    return np.stack(columns, axis=1)


def _lists(file: Path, name: str) -> Features:
    """Return a column of equally long, possibly nested lists of numbers (n, …).

    Args:
        file: whose rows are read.
        name: of the column.

    Raises:
        UsageError: lists of different lengths, or of values that are no numbers.
    """
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
    """Return a column of numbers (n,), in single precision if that represents them.

    Args:
        file: whose rows are read.
        name: of the column.

    Raises:
        UsageError: the column has other values than numbers.
    """
    cells = column(file, name)
    values = np.asarray(cells.to_numpy(zero_copy_only=False))
    if values.dtype.kind not in "biuf":
        raise UsageError(
            f"column {name!r} of {file} holds {_type_of(file, name)}, not numbers: drop it, or "
            "encode it as numbers"
        )
    if values.dtype.kind in "iu":
        # in single precision, large integers such as ids of rows would become equal
        double = values.astype(np.float64)
        if np.abs(double).max(initial=0) >= EXACT_IN_SINGLE:
            return double
    return _single(values)


def _single(values: NDArray[Any]) -> Features:
    """Return values as float32."""
    # values beyond the range become infinite, which is refused later with the client's name
    with np.errstate(over="ignore"):
        return values.astype(np.float32)


def _type_of(file: Path, name: str) -> str:
    """Return the name of a column's type (pyarrow)."""
    schema = open_parquet(file, (name,)).schema_arrow
    return str(schema.field(name).type)
