"""Cells of tables as numbers and names, where nothing is lost by it; every fault has its place."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from securecluster.core.optional_packages import need
from securecluster.data.pools import Labels
from securecluster.data.tables.parts import ColumnError, Table

# what stands for a missing value in files, as pandas and pyarrow have it, and in UCI's
MISSING = (
    "?", "-", "NA", "N/A", "n/a", "#N/A", "#NA", "NaN", "nan", "-NaN", "-nan", "NULL", "null",
)  # fmt: skip
NUMBER = r"^[-+]?(\d+\.?\d*|\.\d+)([eE][-+]?\d+)?$|^[-+]?[iI]nf(inity)?$"
DECIMAL_COMMA = r"^[-+]?(\d+(,\d*)?|,\d+)([eE][-+]?\d+)?$"
# with a comma that cannot part thousands: not between one to three digits, not 0, and three others
FRACTION = r"^[-+]?(\d{4,}|0\d*)?,|,(\d{0,2}|\d{4,})([eE].*)?$"
LONG = r"^[-+]?\d{16,}$"
BOOLEAN = r"^(?i:true|false)$"
CODE = r"^0\d+$"  # such as 007, which a number would make 7
EXACT = 2**53  # up to this number float64 represents all integers
EXACT_IN_SINGLE = 2**24  # float32
POINT, COMMA = ".", ","


def is_number(text: str) -> bool:
    """Return whether a cell of a text file is a number."""
    return re.match(NUMBER, text) is not None


def role(table: Table, name: str, missing: Sequence[str] | None) -> Any:
    """Return a column of clients or labels (pyarrow), none of which is missing.

    Cells of a text file become integers or booleans only if that gives back the text of each.

    Args:
        table: with the column.
        name: of the column.
        missing: texts that stand for a missing value; None where the user named none.

    Raises:
        ColumnError: a value is missing, or may be.
    """
    arrow, compute = need("pyarrow"), need("pyarrow.compute")
    cells = table.column(name)
    if not _is_text(cells.type):
        gaps = compute.is_null(cells, nan_is_null=arrow.types.is_floating(cells.type))
        _check_gaps(table, name, cells, gaps)
        return cells
    trimmed = compute.utf8_trim_whitespace(cells)
    texts = arrow.array(["", *(missing or ())], trimmed.type)
    gaps = compute.or_kleene(compute.is_in(trimmed, texts), compute.is_null(cells))
    _check_gaps(table, name, cells, gaps)
    if not table.is_text:
        return cells
    if missing is None:
        doubtful = compute.is_in(trimmed, arrow.array(MISSING, trimmed.type))
        first = _first(doubtful)
        if first is not None:
            raise ColumnError(
                f"column {name!r}",
                f"holds {cells[first].as_py()!r} ({table.place(first)}), which may be a name or "
                "stand for a missing value",
                "say which texts stand for missing values (missing), none but empty ones by ''",
            )
    for kind in (arrow.int64(), arrow.bool_()):
        try:
            typed = cells.cast(kind)
        except arrow.ArrowInvalid:
            continue
        if typed.cast(cells.type).equals(cells):
            return typed
    return cells


def _check_gaps(
    table: Table, name: str, cells: Any, gaps: Any, advice: str = "fill or drop these rows"
) -> None:
    """Raise ColumnError if cells are missing.

    Args:
        table: of the cells.
        name: of their column.
        cells: the column (pyarrow).
        gaps: whether each cell is missing.
        advice: what to do.
    """
    first = _first(gaps)
    if first is None:
        return
    count = need("pyarrow.compute").sum(gaps).as_py()
    value = cells[first].as_py()
    cells_in_words = "empty cell" if count == 1 else "empty cells"
    shown = f" ({value!r})" if isinstance(value, str) and value else ""
    text = f"has {count} {cells_in_words}{shown}, the first in {table.place(first)}"
    raise ColumnError(f"column {name!r}", text, advice)


def _first(mask: Any) -> int | None:
    """Return the position of the first True of a column (pyarrow), or None."""
    position = int(need("pyarrow.compute").index(mask, True).as_py())
    return None if position < 0 else position


def _is_text(column_type: Any) -> bool:
    types = need("pyarrow").types
    return bool(types.is_string(column_type) or types.is_large_string(column_type))


def encoded(name: str, cells: Any) -> tuple[NDArray[Any], Labels]:
    """Return the distinct values of a column in ascending order (k,), and each row's position (n,).

    Args:
        name: of the column.
        cells: of it (pyarrow), none of which is missing.

    Raises:
        ColumnError: values without an order.
    """
    arrow = need("pyarrow")
    fault = ColumnError(
        f"column {name!r}", "holds values that cannot be put in order", "use numbers or text"
    )
    try:
        chunks = cells.dictionary_encode().unify_dictionaries().chunks
    except arrow.ArrowNotImplementedError:  # such as lists
        raise fault from None
    if not chunks:
        raise ColumnError(f"column {name!r}", "has no rows", "give a table that has some")
    values = chunks[0].dictionary.to_numpy(zero_copy_only=False)
    positions = np.concatenate([chunk.indices.to_numpy() for chunk in chunks], dtype=np.int64)
    try:
        distinct, order = np.unique(values, return_inverse=True)
    except (TypeError, ValueError):
        raise fault from None
    return distinct, order.reshape(-1).astype(np.int64)[positions]


def is_numeric(column_type: Any) -> bool:
    """Return True if a column of this type (pyarrow) holds numbers, booleans or nothing."""
    types = need("pyarrow").types
    checks = (
        types.is_integer, types.is_floating, types.is_boolean, types.is_null, types.is_decimal,
    )  # fmt: skip
    return any(check(column_type) for check in checks)


def numbers(
    table: Table, name: str, missing: Sequence[str] | None
) -> tuple[NDArray[Any], str | None]:
    """Return a column of numbers (n,), with NaN where they are missing, and their decimal mark.

    Args:
        table: with the column.
        name: of the column.
        missing: texts that stand for a missing value; None is `MISSING`.

    Returns:
        The mark is None where no cell of text has one.

    Raises:
        ColumnError: cells that are no numbers, or that numbers would make alike.
    """
    arrow, compute = need("pyarrow"), need("pyarrow.compute")
    cells = table.column(name)
    mark = None
    if _is_text(cells.type):
        cells, mark = _of_text(table, name, cells, missing)
    elif not is_numeric(cells.type):
        raise ColumnError(f"column {name!r}", f"holds {content(cells.type)}, not numbers", ADVICE)
    if arrow.types.is_integer(cells.type):
        bounds = compute.min_max(cells).as_py()
        sizes = [abs(value) for value in bounds.values() if value is not None]
        if sizes and max(sizes) > EXACT:
            raise _too_long(name, str(max(sizes)))
        if not cells.null_count and max(sizes, default=0) <= EXACT_IN_SINGLE:
            return cells.to_numpy().astype(np.float32), mark
    values = _as_floats(cells)
    if np.isinf(values).any():
        row = int(np.argmax(np.isinf(values)))
        text = f"holds {table.column(name)[row].as_py()!r} ({table.place(row)}), which is no number"
        raise ColumnError(f"column {name!r}", text, "leave the cell empty, or drop these rows")
    return values, mark


def _as_floats(cells: Any) -> NDArray[Any]:
    """Return cells of numbers (pyarrow) as floats (n,): single ones as such, others as double."""
    arrow = need("pyarrow")
    if cells.type in (arrow.float16(), arrow.float32()):
        return np.asarray(cells.to_numpy(), np.float32)
    if cells.type != arrow.float64():
        cells = cells.cast(arrow.float64(), safe=False)
    return np.asarray(cells.to_numpy(), np.float64)


def _of_text(
    table: Table, name: str, cells: Any, missing: Sequence[str] | None
) -> tuple[Any, str | None]:
    """Return cells of text as numbers or booleans (pyarrow), null for gaps, and their decimal mark.

    Args:
        table: of the cells.
        name: of their column.
        cells: as they lie there.
        missing: as for `numbers`.

    Raises:
        ColumnError: they are others.
    """
    compute = need("pyarrow.compute")
    plain = _plain(cells)
    if plain is None:
        trimmed = compute.utf8_trim_whitespace(cells)
        texts = gap_texts(missing, trimmed.type)
        cells = compute.if_else(compute.is_in(trimmed, texts), None, trimmed)
        plain = _plain(cells)
    return plain or _parsed(table, name, cells)


def gap_texts(missing: Sequence[str] | None, kind: Any = "string") -> Any:
    """Return the texts that stand for a missing value (pyarrow).

    Args:
        missing: those that the user names; None is `MISSING`.
        kind: of text.
    """
    return need("pyarrow").array(["", *(MISSING if missing is None else missing)], kind)


def _plain(cells: Any) -> tuple[Any, str | None] | None:
    """Return cells of text as numbers, and their decimal mark, where no cell is in doubt.

    Args:
        cells: null where a value is missing (pyarrow).

    Returns:
        None where `_parsed` has to look closer.
    """
    arrow, compute = need("pyarrow"), need("pyarrow.compute")
    try:
        floats = cells.cast(arrow.float64())
    except arrow.ArrowInvalid:
        return None
    values = (floats.drop_null() if floats.null_count else floats).to_numpy()
    # not of NaN, which pyarrow reads as a number
    is_exact = len(values) and values.min() >= -EXACT and values.max() <= EXACT
    if not is_exact:
        return None
    may_be_codes = (values == np.trunc(values)).any()
    if may_be_codes and _first(compute.match_substring_regex(cells, CODE)) is not None:
        return None
    # mostly told by the first cell, without a look at the others
    has_point = "." in (cells[0].as_py() or "")
    if not has_point and _first(compute.match_substring(cells, ".")) is None:
        return floats, None
    return floats, POINT


def mark_faults(marks: Mapping[str, str | None]) -> list[ColumnError]:
    """Return the fault of columns of which some have decimal points and others commas, if any.

    Args:
        marks: decimal mark of each column by its name.
    """
    names_of_marks = {mark: name for name, mark in reversed([*marks.items()])}
    if not {POINT, COMMA} <= names_of_marks.keys():
        return []
    subject = f"columns {names_of_marks[POINT]!r} and {names_of_marks[COMMA]!r}"
    return [ColumnError(subject, "have decimal points and decimal commas", "use one of them")]


ADVICE = "drop it (drop_columns), or take prepare auto, which makes numbers of it"


def content(column_type: Any) -> str:
    """Return what a column of a type (pyarrow) holds, in words."""
    types = need("pyarrow").types
    if types.is_dictionary(column_type):
        return content(column_type.value_type)
    if types.is_temporal(column_type):
        return "dates"
    return "text" if _is_text(column_type) else str(column_type)


def _parsed(table: Table, name: str, cells: Any) -> tuple[Any, str | None]:
    """Return cells of text as numbers or booleans, and their decimal mark.

    Args:
        table: of the cells.
        name: of their column.
        cells: without blanks around them, null where a value is missing (pyarrow).

    Raises:
        ColumnError: they are others.
    """
    arrow, compute = need("pyarrow"), need("pyarrow.compute")
    subject = f"column {name!r}"

    def first(pattern: str, matches: bool = True) -> int | None:
        found = compute.match_substring_regex(cells, pattern)
        return _first(compute.fill_null(compute.equal(found, matches), False))

    if cells.null_count < len(cells) and first(BOOLEAN, False) is None:
        return cells.cast(arrow.bool_()), None
    code = first(CODE)
    if code is not None:
        text = f"holds codes such as {cells[code].as_py()!r} ({table.place(code)}), whose zeros a "
        raise ColumnError(subject, f"{text}number would lose", "drop it (drop_columns)")
    mark = None if first(r"\.") is None else POINT
    if first(DECIMAL_COMMA, False) is None and first(",") is not None:
        if first(FRACTION) is None:
            row = first(",") or 0
            text = f"holds {cells[row].as_py()!r} ({table.place(row)}), whose comma may mark "
            raise ColumnError(subject, f"{text}decimals or thousands", "write 1000, or 1.000")
        mark = COMMA
        cells = compute.replace_substring(cells, ",", ".")
    bad = first(NUMBER, False)
    if bad is not None:
        text = f"holds text, not numbers, the first of it {cells[bad].as_py()!r} "
        raise ColumnError(subject, f"{text}({table.place(bad)})", ADVICE)
    floats = cells.cast(arrow.float64())
    long = compute.and_(
        compute.match_substring_regex(cells, LONG), compute.greater(compute.abs(floats), EXACT)
    )
    merged = _first(compute.fill_null(long, False))
    if merged is not None:
        raise _too_long(name, str(cells[merged].as_py()))
    return floats, mark


def _too_long(name: str, shown: str) -> ColumnError:
    """Return the fault of a column of whole numbers that floats would make alike."""
    text = f"holds whole numbers such as {shown}, of which floats would make some alike"
    return ColumnError(f"column {name!r}", text, "drop it (drop_columns), or take another unit")


def check_complete(table: Table, name: str, values: NDArray[Any]) -> None:
    """Raise ColumnError if values are missing.

    Args:
        table: of the column.
        name: of the column.
        values: of it (n,), NaN where they are missing.
    """
    gaps = np.isnan(values)
    if gaps.any():
        empty = need("pyarrow").chunked_array([gaps])
        advice = "let --prepare auto fill them, or drop these rows"
        _check_gaps(table, name, table.column(name), empty, advice)
