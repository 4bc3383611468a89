"""Columns of a table as numbers for a preparation: gaps as NaN, dates as days, texts as codes."""

from __future__ import annotations

import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from securecluster.core.optional_packages import need
from securecluster.data.class_names import alike
from securecluster.data.feature_columns import listed
from securecluster.data.scaling import Categories, codes_of
from securecluster.data.tables.cells import ADVICE as AS_FEATURE
from securecluster.data.tables.cells import (
    check_complete,
    gap_texts,
    is_number,
    mark_faults,
    numbers,
)
from securecluster.data.tables.parts import ColumnError, Table

MOST = 100  # categories of a column; more are names or sentences
MOST_FIGURES = 10  # categories that begin as numbers do; more are numbers
FIGURES = r"[-+\u2212<>~\u2264\u2265]?\s?[.,]?\d"  # how such texts begin
# numbers, dates and times that are written otherwise: 1.234,5, 1'000, 5 %, 31.1.2024, 10:30
OTHERWISE = r"[-+\u2212]?[.,]?\d[\d.,'\u2019\s]*%?$|\d{1,4}([-./]\d{1,2}[-./]\d|:\d{2})"
MICROSECONDS = 86_400 * 10**6  # of a day
ADVICE = (
    "write numbers as 1000.5 and dates as 2024-01-31, say which texts stand for missing values "
    "(missing), or name the categories (prepare)"
)

Array = NDArray[Any]


@dataclass(frozen=True)
class Coded:
    """A column as numbers.

    Args:
        values: (n,), NaN for gaps; of a category its code (`codes_of`), and -1 of a text that is
            none of those given.
        categories: of the column; None for numbers, and for dates, which are days since 1970.
        mark: of decimals in text, if there are some.
        doubt: what may be a mistake, as a sentence.
    """

    values: Array
    categories: Categories = None
    mark: str | None = None
    doubt: str | None = None


def coded(
    table: Table, name: str, missing: Sequence[str] | None, given: Categories, find: bool
) -> Coded:
    """Return a column as numbers.

    Args:
        table: with the column.
        name: of the column.
        missing: texts that stand for a missing value; None is `cells.MISSING`.
        given: categories of the column; None for numbers and dates.
        find: whether texts are categories where none are given.

    Raises:
        ColumnError: texts where numbers should be, or ones that are no categories.
    """
    is_text = given is not None and isinstance(given[0], str)
    if not is_text:
        try:
            values, mark = numbers(table, name, missing)
            return Coded(values, given, mark, _strangers(name, values, given))
        except ColumnError:
            days = _days(table.column(name), missing)
            if days is not None:
                return Coded(days)
            cells = [text for text in _texts(table.column(name), missing).to_pylist() if text]
            if not find or (all(map(is_number, cells)) and not all(map(str.isdecimal, cells))):
                raise
    texts: list[str | None] = _texts(table.column(name), missing).to_pylist()
    found = tuple(sorted({text for text in texts if text is not None}))
    doubt = None if given else _check_found(table, name, texts, found)
    names = given or found
    code_of = dict(zip(names, codes_of(names), strict=True))
    codes = np.array([np.nan if text is None else code_of.get(text, -1.0) for text in texts])
    return Coded(codes, names, None, doubt or _strangers(name, codes, given))


def _strangers(name: str, values: Array, given: Categories) -> str | None:
    """Return a doubt about cells that are none of the categories that were given, if some are."""
    if given is None:
        return None
    strange = int((~np.isin(values, codes_of(given)) & ~np.isnan(values)).sum())
    names = listed([repr(category) for category in given])
    text = f"column {name!r} has {strange} cells that are none of its categories {names}"
    return f"{text}: they count as none of them" if strange else None


def _check_found(
    table: Table, name: str, texts: Sequence[str | None], found: Sequence[str]
) -> str | None:
    """Return a doubt about texts that would be categories, if there is one.

    Args:
        table: of the column.
        name: of the column.
        texts: its cells, None for gaps.
        found: the different ones.

    Raises:
        ColumnError: there are too many, two that read as one, or numbers and dates among them.
    """
    subject = f"column {name!r}"

    def shown(text: str) -> str:
        return f"{text!r} ({table.place(texts.index(text))})"

    figures = [text for text in found if re.match(FIGURES, text)]
    if all(map(str.isdecimal, figures)) and len(figures) == len(found):
        figures = []  # codes, such as 007
    otherwise = [text for text in figures if not text.isdecimal() and re.match(OTHERWISE, text)]
    if otherwise or len(figures) > MOST_FIGURES:
        odd = [text for text in found if not (is_number(text) or _is_date(text))]
        text = f"holds {shown(odd[0] if odd else found[0])} beside numbers or dates, or in place"
        raise ColumnError(subject, f"{text} of one", ADVICE)
    if len(found) > MOST or not found:
        text = f"holds {len(found)} different texts, such as {listed([repr(t) for t in found], 2)}"
        raise ColumnError(subject, text, "drop it, or name its categories (prepare)")
    pair = alike(found, None)
    if pair is not None:
        text = f"holds {shown(pair[0])} and {shown(pair[1])}, which read as one category"
        raise ColumnError(subject, text, "spell them alike, or name both (prepare)")
    if not figures:
        return None
    return (
        f"{subject} holds texts that begin as numbers do, such as {figures[0]!r}: each of its "
        f"{len(found)} texts is a category"
    )


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
    columns: dict[str, Coded] = {}
    faults = []
    for k, name in enumerate(names):
        try:
            kinds = categories[k] if categories else None
            columns[name] = coded(table, name, missing, kinds, find=False)
            if not categories:
                check_complete(table, name, columns[name].values)
        except ColumnError as fault:
            if fault.advice == AS_FEATURE:
                fault.advice = "the run's features are numbers: give the same columns as it had"
            faults.append(fault)
    faults += mark_faults({name: column.mark for name, column in columns.items()})
    if faults:
        raise table.refused(faults)
    return np.stack([column.values for column in columns.values()], axis=1)


def _texts(cells: Any, missing: Sequence[str] | None) -> Any:
    """Return the texts of a column (pyarrow) without blanks around them, null for gaps."""
    compute = need("pyarrow.compute")
    trimmed = compute.utf8_trim_whitespace(cells.cast("string"))
    return compute.if_else(compute.is_in(trimmed, gap_texts(missing)), None, trimmed)


def _is_date(text: str) -> bool:
    return _stamps(need("pyarrow").chunked_array([[text]], "string")) is not None


def _stamps(texts: Any) -> Any:
    """Return texts of dates (ISO 8601) as such, with or without a time and a zone; else None."""
    arrow = need("pyarrow")
    for zone in (None, "UTC"):
        with suppress(arrow.ArrowInvalid):
            return texts.cast(arrow.timestamp("us", zone))
    return None


def _days(cells: Any, missing: Sequence[str] | None) -> Array | None:
    """Return dates, or spans of time, as days (n,), NaN for gaps; None for a column of others.

    Args:
        cells: of a column (pyarrow).
        missing: as for `coded`.
    """
    arrow = need("pyarrow")
    types, kind = arrow.types, arrow.timestamp("us")
    if not types.is_temporal(cells.type):
        cells = _stamps(_texts(cells, missing))
    elif types.is_duration(cells.type) or types.is_time(cells.type):
        kind = arrow.duration("us") if types.is_duration(cells.type) else arrow.time64("us")
    if cells is None:
        return None
    ticks = cells.cast(kind, safe=False).cast(arrow.int64())
    return np.asarray(ticks.cast(arrow.float64(), safe=False).to_numpy()) / MICROSECONDS
