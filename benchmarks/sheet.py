"""Sheets: the measurements of one figure or table in a CSV file that is complete at every moment.

A cell is one measurement: its parameters by name. They determine it completely (put all of them in,
the seed too), so that they identify its row. The key `scale` ("cpu" or "full") distinguishes
reduced cells from the paper's own; the key `paper`, which is the paper's statement about this cell,
is written beside the results and identifies nothing. A sheet that is filled again goes on with the
cells that are missing. Only one script may fill a sheet at a time.
"""

from __future__ import annotations

import csv
import io
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import timed_code
from benchmarks.table import PAPERS, machine
from securecluster.core import atomic_files
from securecluster.errors import SecureClusterError

Cell = Mapping[str, Any]
Row = dict[str, str]  # as in the file; "" where there is no value
Spread = tuple[float, float, float, int]  # mean, least, most and number of values
NOT_RUN = "not run"
DONE = "done"
# columns to the right of all parameters and results
_LAST = ("paper", "status", "seconds")


class Sheet:
    """The rows of `benchmarks/results/papers/NAME.csv`; the first line of the file names the
    machines that measured them.
    """

    def __init__(self, name: str, folder: Path = PAPERS) -> None:
        self.path = folder / f"{name}.csv"
        self._machines: list[str] = []
        self._rows: list[Row] = []
        if not self.path.exists():
            # A sheet that goes on keeps the older code's digests: some of its cells are as old.
            timed_code.record(f"{folder.name}/{name}", folder.parent)
            return
        text = atomic_files.read(self.path).decode()
        first, _, table = text.partition("\n")
        self._machines = first.removeprefix("# ").split(" | ")
        self._rows = list(csv.DictReader(io.StringIO(table)))

    def expect(self, cells: Sequence[Cell]) -> list[Row]:
        """Return the rows of these cells; a missing one is added with status "not run".

        Args:
            cells: the cells, each with all of its parameters.
        """
        rows = [self._row(cell) for cell in cells]
        self._write()
        return rows

    def fill(
        self,
        cells: Sequence[Cell],
        measure: Callable[[Cell], Mapping[str, Any]],
        minutes: float = 10.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> list[Row]:
        """Measure the cells that are missing.

        Args:
            cells: the cells of this run; those that are done are not measured again.
            measure: a cell's results by name: numbers, texts, None, or sequences of numbers (read
                them again with `numbers`).
            minutes: no cell is started once these are over.
            clock: the time in seconds.

        Returns:
            The rows of all cells, also of those that were not run.

        Raises:
            SystemExit: with one sentence, where a cell cannot be measured (its data are missing,
                say); what was measured is kept.
        """
        # cells that the time does not suffice for stand in the file, too
        rows = self.expect(cells)
        end = clock() + 60 * minutes
        for cell, row in zip(cells, rows, strict=True):
            if row["status"] == DONE:
                continue
            began = clock()
            if began >= end:
                continue
            try:
                results = measure(cell)
            # without a traceback, since the sentence says what is missing
            except SecureClusterError as error:
                raise SystemExit(f"{self.path.stem}: {error}") from None
            self._complete(row, results, clock() - began)
        for row in rows:
            if row["status"] == NOT_RUN:
                print("not run: " + _described(row))
        return rows

    def _complete(self, row: Row, results: Mapping[str, Any], seconds: float) -> None:
        """Enter a cell's results into its row, write the file and print the row.

        Args:
            row: the row, which changes in place.
            results: by name, as `fill` describes them.
            seconds: the time that the measurement took.
        """
        for name, value in results.items():
            row[name] = _text(value)
        row["status"] = DONE
        row["seconds"] = f"{seconds:.1f}"
        this_machine = machine()
        if this_machine not in self._machines:
            self._machines.append(this_machine)
        # after every cell, so that a run that is cut off loses one cell at most
        self._write()
        shown = [f"{name} {value[:60]}" for name, value in row.items() if value]
        print(", ".join(shown), flush=True)

    def save(self, figure: Any, scale: str) -> Path:
        """Write a picture beside the CSV file.

        Args:
            figure: a matplotlib figure.
            scale: "cpu" or "full".

        Returns:
            The path: NAME.png for the scale "cpu", else NAME_SCALE.png.
        """
        name = self.path.stem
        if scale != "cpu":
            name += f"_{scale}"
        path = self.path.with_name(name + ".png")
        buffer = io.BytesIO()
        figure.savefig(buffer, format="png", dpi=120)
        atomic_files.write_atomic(path, buffer.getvalue())
        return path

    def _row(self, cell: Cell) -> Row:
        """Return the row with this cell's parameters; a missing one is added."""
        key = {name: _text(value) for name, value in cell.items() if name != "paper"}
        paper = _text(cell.get("paper"))
        for row in self._rows:
            if all(row.get(name) == value for name, value in key.items()):
                # its wording may have changed since the row was written
                row["paper"] = paper
                return row
        row = {**key, "paper": paper, "status": NOT_RUN, "seconds": ""}
        self._rows.append(row)
        return row

    def _write(self) -> None:
        """Write the file anew, with the columns of all rows in the order of their first use."""
        columns: dict[str, Any] = {}
        for row in self._rows:
            columns |= dict.fromkeys(row)
        names = [name for name in columns if name not in _LAST]
        names += _LAST
        machines = " | ".join(self._machines) or machine()
        stream = io.StringIO()
        stream.write(f"# {machines}\n")
        writer = csv.DictWriter(stream, names, restval="", lineterminator="\n")
        writer.writeheader()
        writer.writerows(self._rows)
        atomic_files.make_folder(self.path.parent)
        atomic_files.write_atomic(self.path, stream.getvalue().encode())


def numbers(text: str) -> list[float]:
    """Return the numbers of one value of a row.

    Args:
        text: numbers, True or False, with spaces between them; "" where there is no value.

    Returns:
        Several numbers where a sequence was measured, 1 and 0 for yes and no.
    """
    truth_values = {"True": 1, "False": 0}
    return [float(truth_values.get(word, word)) for word in text.split()]


def distinct(rows: Sequence[Row], column: str) -> list[str]:
    """Return the values of a column, each once, in the order of their first rows.

    Args:
        rows: the rows.
        column: its name.
    """
    return list(dict.fromkeys(row[column] for row in rows))


def pooled(rows: Sequence[Row], value: str) -> list[float]:
    """Return the numbers that all rows measured.

    Args:
        rows: the rows; those that were not run have none.
        value: the column of the numbers.
    """
    pool: list[float] = []
    for row in rows:
        pool += numbers(row.get(value, ""))
    return pool


def spread(rows: Sequence[Row], by: Sequence[str], value: str) -> dict[tuple[str, ...], Spread]:
    """Summarise a measured number over the rows that agree in some columns (so over seeds).

    Args:
        rows: the rows; those that were not run do not count.
        by: the columns that tell groups apart.
        value: the column of the number.

    Returns:
        For each group, by its values of `by`: mean, minimum, maximum and count.
    """
    groups: dict[tuple[str, ...], list[float]] = {}
    for row in rows:
        key = tuple(row[name] for name in by)
        group = groups.setdefault(key, [])
        group += numbers(row.get(value, ""))
    statistics = {}
    for key, values in groups.items():
        if values:
            mean = float(np.mean(values))
            statistics[key] = (mean, min(values), max(values), len(values))
    return statistics


def summarise(rows: Sequence[Row], by: Sequence[str], values: Sequence[str]) -> None:
    """Print mean and range over seeds, with the paper's statement beside them.

    Args:
        rows: the rows.
        by: the columns that tell groups apart.
        values: the columns of the numbers.
    """
    paper: dict[tuple[str, ...], str] = {}
    for row in rows:
        key = tuple(row[name] for name in by)
        paper[key] = row["paper"]
    for value in values:
        for key, statistics in spread(rows, by, value).items():
            parameters = [f"{name} {text}" for name, text in zip(by, key, strict=True)]
            group = ", ".join(parameters)
            line = f"{group}: {value} {shown_spread(statistics)}"
            if paper[key]:
                line += f"; paper: {paper[key]}"
            print(line)


def shown_spread(statistics: Spread) -> str:
    """Return the text of a mean, with its range and count in parentheses.

    Args:
        statistics: as `spread` returns them.
    """
    mean, minimum, maximum, count = statistics
    return f"{mean:.4g} ({minimum:.4g} – {maximum:.4g}; {count})"


def figure(width: float, height: float, rows: int = 1, columns: int = 1) -> tuple[Any, Any]:
    """Return a new matplotlib figure and its axes.

    Args:
        width: in inches.
        height: in inches.
        rows: the number of rows of axes.
        columns: the number of columns of axes.

    Returns:
        The figure and an array of axes, (rows, columns).
    """
    from matplotlib.figure import Figure

    # not by pyplot, which would keep the figure in its global state
    picture = Figure(figsize=(width, height), layout="constrained")
    axes = picture.subplots(rows, columns, squeeze=False)
    return picture, axes


def _text(value: Any) -> str:
    """Return a value as it stands in the file; of a sequence all items, with spaces between."""
    if value is None:
        return ""
    if isinstance(value, list | tuple | np.ndarray):
        # an empty word would be lost when the text is split again
        words = [_text(np.nan if item is None else item) for item in value]
        return " ".join(words)
    if isinstance(value, float | np.floating):
        # rows are identified by these texts, so a parameter must always read the same
        return f"{value:.6g}"
    return str(value)


def _described(row: Row) -> str:
    """Return a row's parameters that have a value, as one line of text."""
    parameters = []
    for name, value in row.items():
        if value and name not in _LAST:
            parameters.append(f"{name} {value}")
    return ", ".join(parameters)


def draw_seeds(
    axis: Any, x: int, mean: float, points: Sequence[float], colour: str, size: float
) -> None:
    """Draw a dot for each seed of a method, and a line for their mean.

    Args:
        axis: the panel.
        x: place of the method.
        mean: of the points.
        points: a number for each seed.
        colour: of the line and the dots.
        size: of a dot.
    """
    axis.plot([x - 0.3, x + 0.3], [mean, mean], color=colour, linewidth=1.6)
    places = [x] * len(points)
    axis.plot(places, points, color=colour, linestyle="none", marker="o", markersize=size)
