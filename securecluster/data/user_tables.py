"""Users' own tables, with columns for clients, labels and features.

A table is one or several parts with the same columns: parquet or CSV files, or one in memory.
"""

from __future__ import annotations

import csv
import os
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from securecluster.core.optional_packages import need
from securecluster.data.class_names import ClassNames, in_type_of, numbers_of
from securecluster.data.pools import (
    Features,
    Labels,
    column,
    decode,
    encoded,
    floats,
    open_parquet,
    opened,
    reading,
    without_nulls,
)
from securecluster.errors import UsageError, unknown

EXACT_IN_SINGLE = 2**24  # up to this number float32 represents all integers exactly
ROWS_OF_BLOCK = 4096  # rows of a table of numbers that are put together at once
GREY_MODES = ("1", "L", "I", "I;16", "F")  # Pillow's modes of images with one channel


@dataclass(frozen=True)
class Roles:
    """Roles of the columns of a table.

    Args:
        client: column with the name of each row's client.
        label: column with the labels.
        truth: column with each client's true cluster, or None.
        features: columns that are features, in this order; None is all other columns.
        drop: columns that are no features.
    """

    client: str
    label: str
    truth: str | None = None
    features: Sequence[str] | None = None
    drop: Sequence[str] = ()


@dataclass(frozen=True)
class ClientColumns:
    """Samples of each client, read from a table.

    Args:
        clients: samples (X, y) of each client by its name, as text or a whole float.
        truth: true cluster of each client by its name, or None if it is unknown.
        columns: names of the feature columns.
        classes: the labels, in the order of the class numbers in y.
    """

    clients: dict[str | float, tuple[NDArray[Any], Labels]]
    truth: dict[str | float, int] | None
    columns: tuple[str, ...]
    classes: ClassNames


class Part(ABC):
    """Rows of a table; as text it is what errors call it."""

    @property
    @abstractmethod
    def names(self) -> list[str]:
        """Return the names of the columns."""

    @abstractmethod
    def column(self, name: str) -> Any:
        """Return a column (`pyarrow.ChunkedArray`) without empty cells.

        Args:
            name: of the column.

        Raises:
            UsageError: there is none, or it has empty cells.
        """

    @abstractmethod
    def type_of(self, name: str) -> Any:
        """Return the type (pyarrow) of the column of a name."""

    def check(self, names: Sequence[str]) -> None:
        """Raise UsageError for a name that no column has."""
        for name in names:
            if name not in self.names:
                raise unknown(f"column of {Path(str(self)).name}", name, self.names)


@dataclass(frozen=True)
class ParquetPart(Part):
    """Rows of a parquet file, of which columns are read one by one.

    Args:
        path: of the file.
    """

    path: Path

    def __str__(self) -> str:
        return str(self.path)

    @cached_property
    def _schema(self) -> Any:
        # from the metadata alone, without reading rows
        return open_parquet(self.path, ()).schema_arrow

    @property
    def names(self) -> list[str]:
        """Return the names of the columns."""
        return list(self._schema.names)

    def column(self, name: str) -> Any:
        """Return a column without empty cells."""
        return column(self.path, name)

    def type_of(self, name: str) -> Any:
        """Return the type (pyarrow) of a column."""
        return self._schema.field(name).type


class LoadedPart(Part):
    """Rows in memory.

    Args:
        title: what errors call them.
        names: of the columns, each once.
        read: returns the column of a name (`pyarrow.ChunkedArray`).
    """

    def __init__(self, title: str, names: Sequence[str], read: Callable[[str], Any]) -> None:
        self._title = title
        self._names = list(names)
        self._read = read
        self._columns: dict[str, Any] = {}
        repeated = [name for name, count in Counter(names).items() if count > 1]
        if repeated:
            raise UsageError(f"{title} has two columns {repeated[0]!r}: rename one")

    def __str__(self) -> str:
        return self._title

    @property
    def names(self) -> list[str]:
        """Return the names of the columns."""
        return self._names

    def column(self, name: str) -> Any:
        """Return a column without empty cells."""
        return without_nulls(self._cells(name), name, self)

    def type_of(self, name: str) -> Any:
        """Return the type (pyarrow) of a column."""
        return self._cells(name).type

    def _cells(self, name: str) -> Any:
        self.check([name])
        # a column is converted once, and those that nobody asks for never
        if name not in self._columns:
            self._columns[name] = self._read(name)
        return self._columns[name]


def file_parts(path: Path, file_format: str) -> list[Part]:
    """Return the parts of a file, or of a folder's files in the order of their names.

    Args:
        path: of the file or the folder.
        file_format: "parquet" or "csv".

    Raises:
        UsageError: there is no such file, or it cannot be read.
    """
    files = _files(path, file_format)
    if file_format == "csv":
        return [_csv_part(file) for file in files]
    return [ParquetPart(file) for file in files]


def kind_of_files(path: Path) -> str:
    """Return whether a path is one of CSV files or else of parquet files.

    Args:
        path: of a file or a folder.
    """
    is_csv = path.suffix.lower() == ".csv"
    if os.path.isdir(path):  # false for a path that no file can have
        is_csv = any(path.glob("*.csv")) and not any(path.glob("*.parquet"))
    return "csv" if is_csv else "parquet"


def frame_part(table: Any) -> Part:
    """Return the rows of a table in memory.

    Args:
        table: a DataFrame (pandas, polars) or a table of pyarrow.

    Raises:
        UsageError: no table, or two columns of one name.
    """
    arrow = need("pyarrow")
    if not isinstance(table, arrow.Table) and hasattr(table, "to_arrow"):
        table = table.to_arrow()  # polars
    if isinstance(table, arrow.Table):
        return LoadedPart("the table", table.column_names, table.column)
    if not (hasattr(table, "iloc") and hasattr(table, "columns")):
        raise UsageError(
            f"the table is a {type(table).__name__}: give a DataFrame of pandas or polars, or a "
            "table of pyarrow"
        )
    names = [str(label) for label in table.columns]

    def read(name: str) -> Any:
        values = table.iloc[:, names.index(name)]
        try:
            return arrow.chunked_array([arrow.Array.from_pandas(values)])
        except (arrow.ArrowException, TypeError, ValueError):
            raise UsageError(
                f"column {name!r} of the table holds values of several types, or of one that "
                "tables do not have: use numbers or text, or drop it (drop_columns)"
            ) from None

    return LoadedPart("the table", names, read)


def grouped(table: Any, client: str | None) -> tuple[Any, str]:
    """Return a table, and the column that names its rows' clients.

    Args:
        table: as `frame_part` takes it, or a pandas DataFrame that is grouped by one column.
        client: the column; None is the one that the table is grouped by.

    Raises:
        UsageError: no column, or two, or groups that are those of no column.
    """
    frame = getattr(table, "obj", None)
    if frame is None or not hasattr(table, "ngroups"):
        if client is None:
            raise UsageError(
                "client is missing: give the column that names each row's client, client=..."
            )
        return table, client
    keys = table.keys
    if isinstance(keys, list) and len(keys) == 1:
        keys = keys[0]
    if not isinstance(keys, str) or client not in (None, keys):
        raise UsageError(
            "a grouped table names clients by the one column that it is grouped by, such as "
            "frame.groupby('hospital'): group it so, or give the frame and client=..."
        )
    return frame, keys


def _csv_part(file: Path) -> Part:
    """Return the rows of a CSV file with a header, separated by commas, semicolons or tabs.

    Args:
        file: its path.
    """
    arrow = need("pyarrow")
    reader = need("pyarrow.csv")
    try:
        # with a byte order mark, as spreadsheets write it, or without
        with file.open(encoding="utf-8-sig", newline="") as lines:
            header = lines.readline()
        separator = max(",;\t", key=header.count)
        names = next(csv.reader([header], delimiter=separator), [])
        table = reader.read_csv(
            file,
            parse_options=reader.ParseOptions(delimiter=separator, newlines_in_values=True),
            # as text first, since numbers lose the zeros of names such as 001
            convert_options=reader.ConvertOptions(
                column_types=dict.fromkeys(names, arrow.string()), strings_can_be_null=True
            ),
        )
    except (OSError, UnicodeDecodeError, arrow.ArrowException) as error:
        reason = str(error).splitlines()[0]
        raise UsageError(
            f"{file} cannot be read as CSV ({reason}): it is text in UTF-8, with names of columns "
            "in the first line"
        ) from None
    return LoadedPart(str(file), table.column_names, lambda name: _parsed(table.column(name)))


def _parsed(cells: Any) -> Any:
    """Return a column of text as numbers or booleans where all its cells are some.

    Args:
        cells: of the column (pyarrow).
    """
    arrow = need("pyarrow")
    compute = need("pyarrow.compute")
    # names and codes such as 007 are no numbers, and floats would make one of long ones
    codes = compute.match_substring_regex(cells, r"^(0\d.*|-?\d{19,})$")
    if compute.any(codes).as_py():
        return cells
    for arrow_type in (arrow.int64(), arrow.float64(), arrow.bool_()):
        try:
            return cells.cast(arrow_type)
        except arrow.ArrowInvalid:
            continue
    return cells


def read_clients(
    table_parts: Sequence[Part], roles: Roles, classes: ClassNames | None
) -> ClientColumns:
    """Return the rows of a table by client.

    Args:
        table_parts: of the table.
        roles: of its columns.
        classes: the labels in the order of their class numbers; None is all that occur, in
            ascending order.

    Raises:
        UsageError: a column or value that cannot be used, or a client with a single row.
    """
    roles_of, selected, dropped = _checked(table_parts, roles)
    names, client_of_row = _values(table_parts, roles.client)
    label_values, y = _values(table_parts, roles.label)
    if classes is not None:
        classes = in_type_of(classes, label_values)
        column_title = f"column {roles.label!r} of {_whole(table_parts)}"
        y = numbers_of(classes, label_values, column_title)[y]
    elif len(label_values) < 2:
        raise UsageError(
            f"column {roles.label!r} of {_whole(table_parts)} has the same value in every row, so "
            "there is nothing to learn: choose another label"
        )
    row_counts = np.bincount(client_of_row)
    _check_row_counts(_whole(table_parts), names, row_counts)
    clusters = None
    if roles.truth is not None:
        values, cluster_of_row = _values(table_parts, roles.truth)
        clusters = _truth(names, client_of_row, values, cluster_of_row, roles.truth)
    excluded = {*roles_of, *dropped}
    x, columns = _features(table_parts, excluded, selected)
    # stable, so that a client's rows remain in the order of the files; sorting numbers of 16 bits
    # takes time in proportion to the rows
    numbers = client_of_row.astype(np.min_scalar_type(len(names)))
    by_client = np.argsort(numbers, kind="stable")
    ends = np.cumsum(row_counts)[:-1]
    samples = np.split(x[by_client], ends)
    labels = np.split(y[by_client], ends)
    clients: dict[str | float, tuple[NDArray[Any], Labels]] = {}
    for client_name, *pair in zip(names, samples, labels, strict=True):
        clients[_key(client_name)] = (pair[0], pair[1])
    return ClientColumns(clients, clusters, columns, classes or _class_names(label_values))


def _checked(
    table_parts: Sequence[Part], roles: Roles
) -> tuple[list[str], tuple[str, ...] | None, tuple[str, ...]]:
    """Return the columns that are no features by their roles, those selected, and those dropped.

    Raises:
        UsageError: roles that do not go together, or columns that a part does not have.
    """
    names_of_roles = [roles.client, roles.label]
    if roles.truth is not None:
        names_of_roles.append(roles.truth)
    if len(set(names_of_roles)) < len(names_of_roles):
        raise UsageError(
            f"client, label and truth are different columns, not {', '.join(names_of_roles)}"
        )
    selected = None
    if roles.features is not None:
        selected = _column_names("feature_columns", roles.features, names_of_roles)
    dropped = _column_names("drop_columns", roles.drop, names_of_roles)
    if selected is not None and dropped:
        raise UsageError("feature_columns and drop_columns say the same twice: give one of them")
    # all parts are checked for all columns before any of them is read
    for table_part in table_parts:
        table_part.check([*names_of_roles, *(selected or ()), *dropped])
    return names_of_roles, selected, dropped


def _class_names(values: NDArray[Any]) -> ClassNames:
    """Return the distinct values of a column of labels as JSON has them."""
    names = values.tolist()
    # dates and the like by their text
    return tuple(name if isinstance(name, str | int | float) else str(name) for name in names)


def _whole(table_parts: Sequence[Part]) -> str:
    """Return what errors call a table: its only part, or the folder of its files."""
    if len(table_parts) > 1:
        return str(Path(str(table_parts[0])).parent)
    return str(table_parts[0])


def _key(client_name: Any) -> str | float:
    """Return a client's name: its text, but whole floats as they are, which are whole numbers."""
    if isinstance(client_name, float | np.floating) and float(client_name).is_integer():
        return float(client_name)
    return str(client_name)


def _check_row_counts(table: str, names: NDArray[Any], row_counts: Labels) -> None:
    """Raise UsageError for a client with a single row, of which none could be held out.

    Args:
        table: what errors call it.
        names: of the clients (m,).
        row_counts: of the clients (m,).
    """
    single = np.flatnonzero(row_counts < 2)
    if len(single):
        name = str(names[single[0]])
        raise UsageError(
            f"client {name!r} of {table} has a single row, so none can be held out: leave it out"
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


def _files(path: Path, file_format: str) -> list[Path]:
    """Return the file at a path, or the files of a folder in the order of their names.

    Args:
        path: of the file or the folder.
        file_format: "parquet" or "csv", how files of a folder end.

    Raises:
        UsageError: there is no such file.
    """
    if os.path.isdir(path):
        files = sorted(path.glob(f"*.{file_format}"))
        if not files:
            raise UsageError(
                f"{path} holds no .{file_format} file: give a {file_format} file, or a folder of "
                "them"
            )
        return files
    if not os.path.exists(path):
        raise UsageError(f"{path} does not exist: give a {file_format} file, or a folder of them")
    return [path]


def _values(table_parts: Sequence[Part], name: str) -> tuple[NDArray[Any], Labels]:
    """Return the distinct values of a column, and the value of each row.

    Args:
        table_parts: whose rows are read.
        name: of the column.

    Returns:
        The distinct values (k,) in ascending order, and each row's position among them (n,).

    Raises:
        UsageError: there are no rows, empty cells, or values without an order.
    """
    values_of_parts = []
    positions_of_parts = []
    count = 0
    for table_part in table_parts:
        part_values, part_positions = _encoded(table_part.column(name))
        values_of_parts.append(part_values)
        positions_of_parts.append(part_positions + count)
        count += len(part_values)
    cells = np.concatenate(values_of_parts)
    if not len(cells):
        raise UsageError(f"{_whole(table_parts)} has no rows: give a table that has some")
    # NaN is not null to pyarrow, so `column` has not refused it
    if cells.dtype.kind == "f" and np.isnan(cells).any():
        raise UsageError(
            f"column {name!r} of {table_parts[0]} has empty cells (NaN): fill or drop these rows"
        )
    try:
        values, order = np.unique(cells, return_inverse=True)
    # values of mixed types have no order
    except (TypeError, ValueError):
        raise UsageError(
            f"column {name!r} of {table_parts[0]} holds values that cannot be put in order: use "
            "numbers or text"
        ) from None
    positions = np.concatenate(positions_of_parts)
    return values, order.reshape(-1).astype(np.int64)[positions]


def _encoded(cells: Any) -> tuple[NDArray[Any], Labels]:
    """Return values among which are all of a column and no others, and each row's position (n,).

    Values may be repeated, and are in no order.

    Args:
        cells: of the column (pyarrow).
    """
    arrow = need("pyarrow")
    if arrow.types.is_dictionary(cells.type):
        # its values may be more than those that occur
        cells = cells.cast(cells.type.value_type)
    try:
        chunks = cells.dictionary_encode().unify_dictionaries().chunks
    except arrow.ArrowNotImplementedError:
        chunks = []
    # values without codes, such as lists, and empty cells within a column of codes
    if not chunks or cells.null_count:
        values = cells.to_numpy(zero_copy_only=False)
        return values, np.arange(len(values))
    values = chunks[0].dictionary.to_numpy(zero_copy_only=False)
    positions = [chunk.indices.to_numpy() for chunk in chunks]
    return values, np.concatenate(positions, dtype=np.int64)


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
    # of the client's last row
    clusters = np.zeros(len(names), np.int64)
    clusters[client_of_row] = cluster_of_row
    ambiguous = client_of_row[clusters[client_of_row] != cluster_of_row]
    if len(ambiguous):
        client_name = str(names[ambiguous.min()])
        raise UsageError(
            f"client {client_name!r} has several values in column {column_name!r}: a true cluster "
            "is one value per client"
        )
    clusters_by_name = zip(names, clusters.tolist(), strict=True)
    return {_key(name): cluster for name, cluster in clusters_by_name}


def _features(
    table_parts: Sequence[Part], excluded: set[str], selected: Sequence[str] | None
) -> tuple[NDArray[Any], tuple[str, ...]]:
    """Return samples (n, …) of all rows, and the columns that they are made of.

    Samples are images, or else lists, or else rows of numbers.

    Args:
        table_parts: whose rows are read.
        excluded: columns that are no features.
        selected: columns that are features; None is all other columns.

    Raises:
        UsageError: no feature column, or columns that do not go together.
    """
    names = list(selected or _shared_names(table_parts, excluded))
    types = {name: table_parts[0].type_of(name) for name in names}
    image_columns = [name for name in types if _holds_images(types[name])]
    list_columns = [name for name in types if _holds_lists(types[name])]
    if image_columns:
        name = _only_feature(table_parts[0], "images", image_columns, selected)
        return _images(table_parts, name), (name,)
    if list_columns:
        name = _only_feature(table_parts[0], "lists", list_columns, selected)
        lists = [_lists(table_part, name) for table_part in table_parts]
        for table_part, rows in zip(table_parts, lists, strict=True):
            if rows.shape[1:] != lists[0].shape[1:]:
                raise UsageError(
                    f"column {name!r} of {table_part} has lists of other lengths than that of "
                    f"{table_parts[0]}: make them equally long"
                )
        return np.concatenate(lists), (name,)
    if selected is None:
        # pandas writes its row numbers under this name
        names = [name for name in names if not name.startswith("__index_level_")]
    if not names:
        others = ", ".join(sorted(excluded))
        raise UsageError(f"{table_parts[0]} has no feature column besides {others}: add some")
    for table_part in table_parts:
        _check_numbers(table_part, names)
    tables = [_table(table_part, names) for table_part in table_parts]
    return np.concatenate(tables), tuple(names)


def _shared_names(table_parts: Sequence[Part], excluded: set[str]) -> list[str]:
    """Return the names of the columns that are not left out.

    Args:
        table_parts: that must have the same columns in the same order.
        excluded: columns to leave out.

    Raises:
        UsageError: a part has other columns than the first one.
    """
    names_of_parts = []
    for table_part in table_parts:
        names_of_parts.append([name for name in table_part.names if name not in excluded])
    # types may differ, such as integers of different widths
    for table_part, names in zip(table_parts, names_of_parts, strict=True):
        if names != names_of_parts[0]:
            raise UsageError(
                f"{table_part} has other columns than {table_parts[0]}: files of one folder have "
                "the same ones"
            )
    return names_of_parts[0]


def _check_numbers(table_part: Part, names: Sequence[str]) -> None:
    """Raise UsageError unless columns hold numbers or booleans.

    Args:
        table_part: with the columns.
        names: of the columns.
    """
    others: dict[str, str] = {}
    for name in names:
        column_type = table_part.type_of(name)
        if not _is_number(column_type):
            others[name] = _content(column_type)
    if not others:
        return
    quoted = ", ".join(repr(name) for name in others)
    contents = ", ".join(dict.fromkeys(others.values()))
    if len(others) == 1:
        raise UsageError(
            f"column {quoted} of {table_part} holds {contents}, not numbers: drop it "
            "(drop_columns), or encode it as numbers"
        )
    raise UsageError(
        f"columns {quoted} of {table_part} hold {contents}, not numbers: drop them (drop_columns), "
        "or encode them as numbers"
    )


def _is_number(column_type: Any) -> bool:
    """Return True if a column of this type (pyarrow) holds numbers, booleans or nothing."""
    types = need("pyarrow").types
    checks = (types.is_integer, types.is_floating, types.is_boolean, types.is_null)
    return any(check(column_type) for check in checks)


def _content(column_type: Any) -> str:
    """Return what a column of a type (pyarrow) holds, in words."""
    types = need("pyarrow").types
    if types.is_dictionary(column_type):
        return _content(column_type.value_type)
    if types.is_temporal(column_type):
        return "dates"
    if types.is_string(column_type) or types.is_large_string(column_type):
        return "text"
    return str(column_type)


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
    table_part: Part, content: str, names: Sequence[str], selected: Sequence[str] | None
) -> str:
    """Return the one column of images or lists, which cannot be combined with other features.

    Args:
        table_part: for errors.
        content: "images" or "lists", for errors.
        names: columns with this content.
        selected: columns that the user names as features, or None.

    Raises:
        UsageError: several such columns, or other columns that the user names.
    """
    if len(names) > 1:
        raise UsageError(
            f"{table_part} has several columns of {content} ({', '.join(names)}): leave one, drop "
            "the others"
        )
    # columns that the user selected are never left out silently
    if selected is not None and len(selected) > 1:
        raise UsageError(
            f"column {names[0]!r} of {table_part} holds {content}, which are the only feature "
            "then: name it alone"
        )
    return names[0]


def _images(table_parts: Sequence[Part], name: str) -> Features:
    """Return a column of encoded images (n, channels, height, width).

    The first image determines the size and the number of channels of all of them.

    Args:
        table_parts: whose rows are read.
        name: of the column.
    """
    blobs = []
    for table_part in table_parts:
        cells = table_part.column(name)
        for number, blob in enumerate(encoded(cells, table_part)):
            location = f"image {number} of {table_part}"
            blobs.append((location, blob))
    first = opened(*blobs[0])
    channels = 3
    if first.mode in GREY_MODES:
        channels = 1
    shape = (channels, first.height, first.width)
    pixels = decode(blobs, len(blobs), shape)
    return floats(pixels, np.arange(len(blobs)))


def _table(table_part: Part, names: Sequence[str]) -> NDArray[Any]:
    """Return columns of numbers as a table (n, k)."""
    columns = [_numbers(table_part, name) for name in names]
    table = np.empty((len(columns[0]), len(columns)), np.result_type(*columns))
    # a block of all columns at a time, which a processor's cache holds
    for start in range(0, len(table), ROWS_OF_BLOCK):
        block = slice(start, start + ROWS_OF_BLOCK)
        np.stack([values[block] for values in columns], axis=1, out=table[block])
    return table


def _lists(table_part: Part, name: str) -> Features:
    """Return a column of equally long, possibly nested lists of numbers (n, …).

    Args:
        table_part: whose rows are read.
        name: of the column.

    Raises:
        UsageError: lists of different lengths, or of values that are no numbers.
    """
    cells = table_part.column(name)
    try:
        with reading(table_part):
            arrays = [_rectangular(chunk) for chunk in cells.chunks if len(chunk)]
        rows = np.concatenate(arrays)
    except ValueError:
        raise UsageError(
            f"column {name!r} of {table_part} has lists of different lengths: make them equally "
            "long"
        ) from None
    if rows.dtype.kind not in "biuf":
        raise UsageError(
            f"column {name!r} of {table_part} has lists with empty cells or of other things than "
            "numbers: use numbers"
        )
    return _single(rows)


def _rectangular(cells: Any) -> NDArray[Any]:
    """Return lists, possibly nested, as an array (n, …).

    Args:
        cells: of a column (`pyarrow.Array`). The array is one of objects where cells within lists
            are empty or no numbers.

    Raises:
        ValueError: lists of different lengths.
    """
    compute = need("pyarrow.compute")
    shape = [len(cells)]
    while _holds_lists(cells.type):
        lengths = compute.list_value_length(cells).unique().to_pylist() or [0]
        if len(lengths) > 1:
            raise ValueError("lists of different lengths are no array")
        if lengths == [None]:
            return np.empty(shape, object)
        shape += lengths
        cells = cells.flatten()
    if cells.null_count or not _is_number(cells.type):
        return np.empty(shape, object)
    return np.asarray(cells.to_numpy(zero_copy_only=False)).reshape(shape)


def _numbers(table_part: Part, name: str) -> NDArray[Any]:
    """Return a column of numbers (n,), in single precision if that represents them.

    Args:
        table_part: whose rows are read.
        name: of the column.
    """
    cells = table_part.column(name)
    values = np.asarray(cells.to_numpy(zero_copy_only=False))
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
