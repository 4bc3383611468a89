"""Tables: rows of one or several parts with the same columns, read column by column."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from securecluster.core.optional_packages import need
from securecluster.data.pools import cells_of, open_parquet
from securecluster.errors import UsageError, unknown

FILE, FOLDER = "@file", "@folder"  # columns that each part fills with where it lies
SHOWN = 10  # faults in one message


@dataclass(frozen=True)
class Part:
    """Rows of a file, or of a table in memory.

    Args:
        title: what errors call it.
        names: of the columns, each once.
        rows: how many there are.
        read: returns the column of a name (`pyarrow.ChunkedArray`).
        is_text: whether the cells are text as it lies in the file, which has no types.
        first: number of the first row in the file.
        unit: what such a number counts.
        headless: whether no line of the file names the columns.
        lies_in: what `@file` and `@folder` stand for.
        types: of the columns by their names, where they are known before any is read.
    """

    title: str
    names: tuple[str, ...]
    rows: int
    read: Callable[[str], Any]
    is_text: bool = False
    first: int = 1
    unit: str = "row"
    headless: bool = False
    lies_in: tuple[str, str] = ("", "")
    types: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        repeated = [name for name, count in Counter(self.names).items() if count > 1]
        if repeated:
            raise UsageError(f"{self.title} has two columns {repeated[0]!r}: rename one")

    def place(self, row: int) -> str:
        """Return where a row lies, such as "line 5".

        Args:
            row: counted from 0.
        """
        number = self.first + row
        if self.unit == "line":
            count = need("pyarrow.compute").count_substring
            for name in self.names:  # lines that end within cells before it
                ends = count(self.read(name).slice(0, row), "\n")
                number += sum(ends.to_pylist())
        return f"{self.unit} {number}"


class ColumnError(Exception):
    """What is wrong with one column of a table.

    Args:
        subject: such as "column 'age'".
        text: what it has or holds.
        advice: what to do.
    """

    def __init__(self, subject: str, text: str, advice: str) -> None:
        super().__init__(f"{subject} {text}: {advice}")
        self.subject, self.text, self.advice = subject, text, advice


class Table:
    """Rows of several parts, one after the other.

    Args:
        title: what errors call it.
        parts: with the same columns, in any order.
        left_out: files of its folder that are no part.
    """

    def __init__(self, title: str, parts: Sequence[Part], left_out: Sequence[Path] = ()) -> None:
        self.title = title
        self.parts = tuple(parts)
        self.left_out = tuple(left_out)
        self.rows = sum(part.rows for part in parts)
        self.is_text = any(part.is_text for part in parts)
        self.names = self.parts[0].names

    def check(self, names: Sequence[str]) -> None:
        """Raise UsageError for names that no column has, with all of them in one sentence."""
        sentences = []
        for part in self.parts:
            kind = f"column of {Path(part.title).name}"
            missing = [name for name in names if name not in (*part.names, FILE, FOLDER)]
            sentences += [str(unknown(kind, name, part.names)) for name in missing]
            if missing and part.headless:
                sentences[-1] += " (its first line looks like data, so it names no columns)"
        if sentences:
            raise UsageError("; ".join(sentences[:SHOWN]))

    def column(self, name: str) -> Any:
        """Return a column (`pyarrow.ChunkedArray`), by its values where it has codes for them.

        Args:
            name: of the column; `@file` or `@folder` is where each row lies.

        Raises:
            ColumnError: its values are of different kinds in the files.
        """
        arrow = need("pyarrow")
        cells = [_plain(self._read(part, name)) for part in self.parts]
        if len(cells) == 1:
            return cells[0]
        try:
            return _joined(name, cells)
        except arrow.ArrowException:
            pass
        try:  # text in some files, and numbers in others
            return _joined(name, [values.cast(arrow.string()) for values in cells])
        except arrow.ArrowException:
            types = {str(values.type): part for values, part in zip(cells, self.parts, strict=True)}
            held = [f"{kind} in {Path(part.title).name}" for kind, part in types.items()]
            text = f"holds {' and '.join(held)}"
            raise ColumnError(f"column {name!r}", text, "write one kind in all files") from None

    def type_of(self, name: str) -> Any:
        """Return the type (pyarrow) of a column in the first part.

        Args:
            name: of the column.
        """
        first = self.parts[0]
        return first.types.get(name) or first.read(name).type

    @staticmethod
    def _read(part: Part, name: str) -> Any:
        if name in part.names:
            return part.read(name)
        if name not in (FILE, FOLDER):
            where = Path(part.title).name
            raise ColumnError(f"column {name!r}", f"is not in {where}", "drop it, or add it there")
        value = part.lies_in[name == FOLDER]
        return need("pyarrow").chunked_array([[value] * part.rows], "string")

    def place(self, row: int) -> str:
        """Return where a row lies, such as "line 5 of b.csv".

        Args:
            row: counted from 0 over all parts.
        """
        for part in self.parts:
            if row < part.rows:
                place = part.place(row)
                return place if len(self.parts) == 1 else f"{place} of {Path(part.title).name}"
            row -= part.rows
        raise IndexError(f"the table has {self.rows} rows")

    def refused(self, faults: Sequence[ColumnError]) -> UsageError:
        """Return the error for all faults of a table.

        Args:
            faults: at least one.
        """
        if len(faults) == 1:
            (fault,) = faults
            text = f"{fault.subject} of {self.title} {fault.text}: {fault.advice}"
            return UsageError(text)
        texts = [f"{fault.subject} {fault.text}" for fault in faults[:SHOWN]]
        if len(faults) > SHOWN:
            texts.append(f"and {len(faults) - SHOWN} more")
        advice = "; ".join(dict.fromkeys(fault.advice for fault in faults[:SHOWN]))
        return UsageError(f"{self.title} has {len(faults)} faults, {'; '.join(texts)}: {advice}")


def followed_by(first: Table, second: Table) -> tuple[Table, NDArray[np.bool_]]:
    """Return the rows of two tables, and which are of the second, (n,)."""
    left_out = [*first.left_out, *second.left_out]
    table = Table(first.title, [*first.parts, *second.parts], left_out)
    return table, np.arange(table.rows) >= first.rows


def _joined(name: str, cells: Sequence[Any]) -> Any:
    """Return the columns (pyarrow) of several files as one, with integers among floats as such."""
    arrow = need("pyarrow")
    tables = [arrow.table({name: values}) for values in cells]
    return arrow.concat_tables(tables, promote_options="permissive").column(0)


def _plain(cells: Any) -> Any:
    """Return a column (pyarrow) by its values, where it has codes for them, or views of texts."""
    types = need("pyarrow").types
    if types.is_dictionary(cells.type):
        cells = cells.cast(cells.type.value_type)
    if str(cells.type) == "string_view":  # of which pyarrow computes little
        cells = cells.cast("string")
    return cells


def parquet_part(path: Path, lies_in: tuple[str, str]) -> Part:
    """Return the rows of a parquet file, of which columns are read one by one.

    Args:
        path: of the file.
        lies_in: as in `Part`.

    Raises:
        UsageError: the file cannot be read.
    """
    file = open_parquet(path, ())  # the metadata alone, without reading rows
    schema = file.schema_arrow
    types = dict(zip(schema.names, schema.types, strict=True))
    rows = file.metadata.num_rows
    read = partial(cells_of, path)
    return Part(str(path), tuple(schema.names), rows, read, lies_in=lies_in, types=types)


def frame_table(frame: Any) -> Table:
    """Return a table in memory.

    Args:
        frame: a DataFrame (pandas, polars) or a table of pyarrow.

    Raises:
        UsageError: no table, or two columns of one name.
    """
    arrow = need("pyarrow")
    title = "the table"
    if not isinstance(frame, arrow.Table) and hasattr(frame, "to_arrow"):
        frame = frame.to_arrow()  # polars
    if isinstance(frame, arrow.Table):
        names = tuple(frame.column_names)
        return Table(title, [Part(title, names, frame.num_rows, frame.column)])
    if not (hasattr(frame, "iloc") and hasattr(frame, "columns")):
        raise UsageError(
            f"the table is a {type(frame).__name__}: give a DataFrame of pandas or polars, or a "
            "table of pyarrow; from_csv reads files"
        )
    names = tuple(str(label) for label in frame.columns)

    @cache  # a column is converted once, and those that nobody asks for never
    def read(name: str) -> Any:
        values = frame.iloc[:, names.index(name)]
        try:
            return arrow.chunked_array([arrow.Array.from_pandas(values)])
        except (arrow.ArrowException, TypeError, ValueError):
            raise ColumnError(
                f"column {name!r}",
                "holds values of several types, or of one that tables do not have",
                "use numbers or text, or drop it (drop_columns)",
            ) from None

    return Table(title, [Part(title, names, len(frame), read)])


def grouped(table: Any, client: str | None) -> tuple[Any, str]:
    """Return a table, and the column that names its rows' clients.

    Args:
        table: as `frame_table` takes it, or a pandas DataFrame that is grouped by one column.
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
