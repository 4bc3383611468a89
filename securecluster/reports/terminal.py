"""The console that everything is printed on, which no text can take over.

Texts come from files, and names from whoever made the data. A control character, such as the one
that begins an escape sequence, is shown as such: it reaches no terminal.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import rich.console
from rich.box import SIMPLE_HEAD
from rich.cells import cell_len
from rich.table import Table
from rich.text import Text

from securecluster.core.number_format import printable

COLUMN_GAP = 2  # cells between two columns of a table


class Console(rich.console.Console):
    """Console on standard output that shows characters that are not printable as escapes.

    Args:
        options: of rich's console.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(highlight=False, emoji=False, **options)

    def render_str(self, text: str, **options: Any) -> Text:
        """Return a text of one line as rich prints it: every text and cell comes by here.

        Args:
            text: to be printed.
            options: of rich's method.
        """
        return super().render_str(printable(text), **options)


def table(
    headings: Sequence[str],
    rows: Iterable[Sequence[str | Text]],
    title: str = "",
    numbers: bool = False,
    light: bool = False,
) -> Table:
    """Return a table, in which no cell is cut.

    Args:
        headings: of the columns.
        rows: cells of each row.
        title: above it; empty for none.
        numbers: all columns but the first hold numbers.
        light: without lines between columns.
    """
    look: dict[str, Any] = {}
    if light:
        look = {"box": SIMPLE_HEAD, "pad_edge": False, "collapse_padding": True}
    made = Table(title=title or None, **look)
    for position, heading in enumerate(headings):
        right = numbers and position > 0
        made.add_column(heading, justify="right" if right else "left", overflow="fold")
    for row in rows:
        made.add_row(*row)
    return made


def fitting(
    headings: Sequence[str], rows: Sequence[Sequence[str]], title: str, width: int
) -> Iterator[Table]:
    """Yield tables of numbers that have all columns together, the first in each table.

    Args:
        headings: of the columns.
        rows: cells of each row.
        title: above the first table.
        width: the largest width of a table, in cells of a terminal.
    """
    # not the number of characters: some take two cells, some none
    widths = [
        max(map(cell_len, column)) + COLUMN_GAP for column in zip(headings, *rows, strict=True)
    ]
    groups: list[list[int]] = [[]]
    for column in range(1, len(headings)):
        widened = sum(widths[position] for position in (0, *groups[-1], column))
        # a column that is too wide by itself gets a table of its own, and is folded there
        if groups[-1] and widened > width:
            groups.append([])
        groups[-1].append(column)
    for group in groups:
        columns = [0, *group]
        cells = [[row[position] for position in columns] for row in rows]
        chosen = [headings[position] for position in columns]
        yield table(chosen, cells, title, numbers=True, light=True)
        title = ""


def lines(*texts: str) -> Text:
    """Return the lines of a table's cell, in which texts have no control characters.

    Args:
        texts: one for each line.
    """
    return Text("\n".join(map(printable, texts)))
