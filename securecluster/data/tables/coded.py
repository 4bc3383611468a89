"""Columns of a table as numbers for a preparation: gaps as NaN, dates as days, texts as codes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from securecluster.core.optional_packages import need
from securecluster.data.feature_columns import listed
from securecluster.data.scaling import Categories, codes_of
from securecluster.data.tables.cells import MISSING, check_complete, numbers
from securecluster.data.tables.parts import ColumnError, Table

MOST = 100  # categories of a column; more are names or sentences
DAY = r"^\d{4}-\d{2}-\d{2}([ T]\d{2}:\d{2}(:\d{2}(\.\d+)?)?)?$"
MICROSECONDS = 86_400 * 10**6  # of a day

Array = NDArray[Any]


def coded(
    table: Table, name: str, missing: Sequence[str] | None, given: Categories, find: bool
) -> tuple[Array, Categories]:
    """Return a column as numbers (n,), with NaN for gaps, and its categories.

    Args:
        table: with the column.
        name: of the column.
        missing: texts that stand for a missing value; None is `MISSING`.
        given: categories of the column; None for numbers and dates, which become days since 1970.
        find: whether texts are categories where none are given.

    Returns:
        Of a category its code (`codes_of`), and -1 for a text that is none of those given.

    Raises:
        ColumnError: texts where numbers should be, or more of them than there are categories.
    """
    is_text = given is not None and isinstance(given[0], str)
    if not is_text:
        try:
            return numbers(table, name, missing)[0], given
        except ColumnError:
            days = _days(table.column(name))
            if days is not None:
                return days, None
            if not find:
                raise
    texts = _texts(table.column(name), missing)
    found = tuple(sorted({text for text in texts if text is not None}))
    if given is None and (len(found) > MOST or not found):
        text = f"holds {len(found)} different texts, such as {listed([repr(t) for t in found], 2)}"
        raise ColumnError(f"column {name!r}", text, "drop it, or name its categories (prepare)")
    names = given or found
    code_of = dict(zip(names, codes_of(names), strict=True))
    codes = [np.nan if text is None else code_of.get(text, -1.0) for text in texts]
    return np.array(codes, np.float64), names


def rows(
    table: Table,
    names: Sequence[str],
    missing: Sequence[str] | None = None,
    categories: Sequence[Categories] = (),
) -> Array:
    """Return the rows of a table as a finished run takes them, (n, k).

    Args:
        table: with columns of these names, in any order.
        names: of the run's features.
        missing: as for `coded`.
        categories: of each feature; none where the run fills no gaps.

    Raises:
        UsageError: columns that there are not, or cells that are no numbers; all in one sentence.
    """
    table.check(names)
    columns, faults = [], []
    for k, name in enumerate(names):
        try:
            values, _ = coded(table, name, missing, categories[k] if categories else None, False)
            columns.append(values)
            if not categories:
                check_complete(table, name, values)
        except ColumnError as fault:
            faults.append(fault)
    if faults:
        raise table.refused(faults)
    return np.stack(columns, axis=1)


def _texts(cells: Any, missing: Sequence[str] | None) -> list[str | None]:
    """Return the texts of a column (pyarrow) without blanks around them, None for gaps."""
    arrow, compute = need("pyarrow"), need("pyarrow.compute")
    trimmed = compute.utf8_trim_whitespace(cells.cast(arrow.string()))
    gaps = arrow.array(["", *(MISSING if missing is None else missing)], arrow.string())
    texts: list[str | None] = compute.if_else(
        compute.is_in(trimmed, gaps), None, trimmed
    ).to_pylist()
    return texts


def _days(cells: Any) -> Array | None:
    """Return dates as days since 1970 (n,), NaN for gaps; None for a column of something else."""
    arrow, compute = need("pyarrow"), need("pyarrow.compute")
    try:
        if not arrow.types.is_temporal(cells.type):
            texts = _texts(cells, None)
            given = [text for text in texts if text is not None]
            match = compute.match_substring_regex(arrow.array(given, arrow.string()), DAY)
            if not given or not compute.all(match).as_py():
                return None
            stamps = [None if text is None else np.datetime64(text, "us") for text in texts]
            cells = arrow.chunked_array([arrow.array(stamps, arrow.timestamp("us"))])
        ticks = cells.cast(arrow.timestamp("us"), safe=False).cast(arrow.int64())
    except (arrow.ArrowException, ValueError):
        return None
    return np.asarray(ticks.cast(arrow.float64(), safe=False).to_numpy()) / MICROSECONDS
