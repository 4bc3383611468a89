"""What is understood of a table before a run: clients, classes, columns, and where they lie."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from securecluster.core.optional_packages import need
from securecluster.data.feature_columns import listed
from securecluster.data.tables import cells
from securecluster.data.tables.parts import ColumnError, Table

if TYPE_CHECKING:
    from securecluster.data.federation import Federation

SHOWN = 20  # clients, files or columns that are listed


def lines(
    table: Table, client: str | None, label: str | None, missing: Sequence[str] | None
) -> Iterator[str]:
    """Yield what is understood of a table, line by line.

    Args:
        table: of all clients.
        client: column of clients, or None.
        label: column of labels, or None.
        missing: texts that stand for a missing value; None is `cells.MISSING`.
    """
    yield f"{table.title}: {table.rows} rows, {len(table.names)} columns"
    if len(table.parts) > 1:
        yield f"files ({len(table.parts)}):"
        for part in table.parts[:SHOWN]:
            yield f"  {Path(part.title).name}: {part.rows} rows"
        yield from _more(len(table.parts), "files")
    if table.left_out:
        yield f"not read: {listed([path.name for path in table.left_out], SHOWN)}"
    headless = [Path(part.title).name for part in table.parts if part.headless]
    if headless:
        yield f"no names of columns, which are called f0, f1, …: {listed(headless)}"
    if client is not None:
        yield from _clients(table, client, label, missing)
    names = [name for name in table.names if name not in (client, label)]
    yield f"columns ({len(names)}):"
    for name in names:
        yield f"  {name}: {_column(table, name, missing)}"


def _more(count: int, what: str) -> Iterator[str]:
    """Yield a line on what is not listed, if there is such."""
    if count > SHOWN:
        yield f"  and {count - SHOWN} more {what}"


def _clients(
    table: Table, client: str, label: str | None, missing: Sequence[str] | None
) -> Iterator[str]:
    """Yield each client with its rows and, where labels are known, its classes."""
    try:
        names, client_of_row = cells.encoded(client, cells.role(table, client, missing))
        labels, label_of_row = np.array(["rows"]), np.zeros(table.rows, np.int64)
        if label is not None:
            labels, label_of_row = cells.encoded(label, cells.role(table, label, missing))
    except ColumnError:
        return  # which what would be refused says
    counts = np.zeros((len(names), len(labels)), np.int64)
    np.add.at(counts, (client_of_row, label_of_row), 1)
    if label is not None:
        totals = _counted(labels, counts.sum(axis=0))
        yield f"classes ({len(labels)}, of {label}): {listed(totals, SHOWN)}"
    yield f"clients ({len(names)}, by {client}):"
    for name, row in list(zip(names, counts, strict=True))[:SHOWN]:
        of_classes = "" if label is None else f", {listed(_counted(labels, row), SHOWN)}"
        yield f"  {name}: {row.sum()} rows{of_classes}"
    yield from _more(len(names), "clients")


def _counted(labels: NDArray[Any], counts: NDArray[np.int64]) -> list[str]:
    """Return labels with how often they occur, those that do not left out."""
    pairs = zip(labels, counts, strict=True)
    return [f"{label!s} {count}" for label, count in pairs if count]


def sides(federation: Federation) -> Iterator[str]:
    """Yield how many rows of each class each client trains on, and how many are held out.

    Args:
        federation: made of the table.
    """
    # a network of two classes may have one output
    labels = np.asarray(federation.class_names or range(max(2, federation.classes)))
    has_classes = federation.objective.one_label
    clients = list(zip(federation.names, federation.shards, strict=True))
    for name, shard in clients[:SHOWN]:
        of_sides = []
        for rows, side in ((shard.y, "trained on"), (shard.y_test, "held out")):
            classes = ""
            if has_classes and len(rows):
                counts = np.bincount(rows.reshape(-1).astype(np.int64), minlength=len(labels))
                classes = f" ({listed(_counted(labels, counts), SHOWN)})"
            of_sides.append(f"{len(rows)} {side}{classes}")
        yield f"  {name}: {', '.join(of_sides)}"
    yield from _more(len(clients), "clients")


def _column(table: Table, name: str, missing: Sequence[str] | None) -> str:
    """Return the kind, the gaps and the range of a column in words."""
    compute = need("pyarrow.compute")
    try:
        values, _ = cells.numbers(table, name, missing)
    except ColumnError as fault:
        return _other(table, name, fault)
    known = values[~np.isnan(values)]
    gaps = "" if len(known) == len(values) else f", {len(values) - len(known)} missing"
    if not len(known):
        return f"nothing{gaps}"
    kind = "whole numbers" if (known % 1 == 0).all() else "numbers"
    distinct = compute.count_distinct(known).as_py()
    return f"{kind}, {known.min():g} to {known.max():g}, {distinct} different{gaps}"


def _other(table: Table, name: str, fault: ColumnError) -> str:
    """Return what a column holds that is none of numbers.

    Args:
        table: of the column.
        name: of the column.
        fault: why it is none.
    """
    compute = need("pyarrow.compute")
    try:
        column = table.column(name)
        kind = cells.content(column.type)
        distinct = compute.count_distinct(column).as_py()
    except (ColumnError, need("pyarrow").ArrowNotImplementedError):
        return fault.text
    gaps = f", {column.null_count} missing" if column.null_count else ""
    return f"{kind}, {distinct} different{gaps} ({fault.text})"
