"""A sheet: the measurements of one figure or table, kept in a CSV file that is whole at every
moment.

A cell is one measurement: its parameters by name, which shape it completely (put all of them in,
    the seed too), so that they identify its
row. The key `scale` ("cpu" or "full") tells reduced cells from the paper's own; the key `paper`,
what the paper says of this cell, is written beside ours and identifies nothing. A sheet that is
filled again goes on with the cells that are missing. One script at a time.
"""

from __future__ import annotations

import argparse
import csv
import io
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from securecluster.benchmarks.table import RESULTS, machine
from securecluster.core import atomic_files
from securecluster.errors import SecureClusterError

Cell = Mapping[str, Any]
Row = dict[str, str]  # as in the file; "" where there is no value
NOT_RUN, DONE = "not run", "done"
_LAST = ("paper", "status", "seconds")


class Sheet:
    """The rows of `benchmarks/results/papers/NAME.csv`; the first line of the file names the
    machines that measured them.
    """

    def __init__(self, name: str, folder: Path = RESULTS / "papers") -> None:
        self.path = folder / f"{name}.csv"
        self._machines: list[str] = []
        self._rows: list[Row] = []
        if self.path.exists():
            first, _, rest = atomic_files.read(self.path).decode().partition("\n")
            self._machines = first.removeprefix("# ").split(" | ")
            self._rows = list(csv.DictReader(io.StringIO(rest)))

    def expect(self, cells: Sequence[Cell]) -> list[Row]:
        """The rows of these cells; one that is not there yet is added with status "not run"."""
        found = [self._row(cell) for cell in cells]
        self._write()
        return found

    def fill(
        self,
        cells: Sequence[Cell],
        measure: Callable[[Cell], Mapping[str, Any]],
        minutes: float = 10.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> list[Row]:
        """Measure the cells that are missing; returns the rows of all of them, also of those that
        were not run.

        Args:
            measure: a cell's results by name: numbers, texts, None, or sequences of numbers (read
                them again with `numbers`).
            minutes: no cell is started once these are over.

        Raises:
            SystemExit: with one sentence, where a cell cannot be measured (its data are missing,
                say); what was measured is kept.
        """
        rows, end = self.expect(cells), clock() + 60 * minutes
        for cell, row in zip(cells, rows, strict=True):
            if row["status"] == DONE or (began := clock()) >= end:
                continue
            try:
                found = measure(cell)
            except SecureClusterError as error:
                raise SystemExit(f"{self.path.stem}: {error}") from None
            row |= {name: _text(value) for name, value in found.items()}
            row |= {"status": DONE, "seconds": f"{clock() - began:.1f}"}
            self._machines += [here for here in [machine()] if here not in self._machines]
            self._write()
            print(
                ", ".join(f"{name} {value[:60]}" for name, value in row.items() if value),
                flush=True,
            )
        for row in rows:
            if row["status"] == NOT_RUN:
                known = {name: value for name, value in row.items() if value and name not in _LAST}
                print("not run: " + ", ".join(f"{name} {value}" for name, value in known.items()))
        return rows

    def save(self, figure: Any, scale: str) -> Path:
        """Write a picture beside the CSV file.

        It is NAME.png for the scale "cpu", else NAME_SCALE.png.
        """
        buffer, path = (
            io.BytesIO(),
            self.path.with_name(self.path.stem + ("" if scale == "cpu" else f"_{scale}") + ".png"),
        )
        figure.savefig(buffer, format="png", dpi=120)
        atomic_files.write_atomic(path, buffer.getvalue())
        return path

    def _row(self, cell: Cell) -> Row:
        key = {name: _text(value) for name, value in cell.items() if name != "paper"}
        for row in self._rows:
            if all(row.get(name) == value for name, value in key.items()):
                row["paper"] = _text(cell.get("paper"))
                return row
        self._rows.append(
            {**key, "paper": _text(cell.get("paper")), "status": NOT_RUN, "seconds": ""}
        )
        return self._rows[-1]

    def _write(self) -> None:
        names = [
            *dict.fromkeys(name for row in self._rows for name in row if name not in _LAST),
            *_LAST,
        ]
        stream = io.StringIO()
        stream.write(f"# {' | '.join(self._machines) or machine()}\n")
        writer = csv.DictWriter(stream, names, restval="", lineterminator="\n")
        writer.writeheader()
        writer.writerows(self._rows)
        atomic_files.make_folder(self.path.parent)
        atomic_files.write_atomic(self.path, stream.getvalue().encode())


def numbers(text: str) -> list[float]:
    """The numbers of one value of a row: several where a sequence was measured, 1 and 0 for yes and
    no, none for an empty value.
    """
    return [float({"True": 1, "False": 0}.get(word, word)) for word in text.split()]


def spread(
    rows: Sequence[Row], by: Sequence[str], value: str
) -> dict[tuple[str, ...], tuple[float, float, float, int]]:
    """Mean, least, most and count of a measured number over the rows that agree in `by` (so over
    seeds); not-run rows do not count.
    """
    groups: dict[tuple[str, ...], list[float]] = {}
    for row in rows:
        groups.setdefault(tuple(row[name] for name in by), []).extend(numbers(row.get(value, "")))
    return {key: (float(np.mean(v)), min(v), max(v), len(v)) for key, v in groups.items() if v}


def summarise(rows: Sequence[Row], by: Sequence[str], values: Sequence[str]) -> None:
    """Print mean and spread (least – most) over seeds, with the paper's word beside it."""
    paper = {tuple(row[name] for name in by): row["paper"] for row in rows}
    for value in values:
        for key, (mean, least, most, count) in spread(rows, by, value).items():
            place = ", ".join(f"{name} {part}" for name, part in zip(by, key, strict=True))
            print(
                f"{place}: {value} {mean:.4g} ({least:.4g} – {most:.4g}; {count})"
                + (f"; paper: {paper[key]}" if paper[key] else "")
            )


def parser_of(
    description: str | None, seeds: int = 3, minutes: float = 10.0
) -> argparse.ArgumentParser:
    """Return the parser of a script of this folder, which has `--seeds`, `--full`, `--minutes`.

    Args:
        description: the script's docstring.
        seeds: the default of `--seeds`.
        minutes: the default of `--minutes`.
    """
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, default=seeds)
    parser.add_argument(
        "--full", action="store_true", help="the paper's own scale, meant for a GPU"
    )
    parser.add_argument(
        "--minutes",
        type=float,
        default=minutes,
        help=f"no cell is started once these are over ({minutes:g})",
    )
    return parser


def read_options(
    parser: argparse.ArgumentParser, argv: Sequence[str] | None = None
) -> argparse.Namespace:
    """Return a script's options, and `scale`, which is "full" or "cpu"."""
    options = parser.parse_args(argv)
    if options.seeds < 1 or not options.minutes >= 0:
        parser.error("--seeds is at least 1, and --minutes at least 0")
    options.scale = "full" if options.full else "cpu"
    return options


def options(
    description: str | None,
    argv: Sequence[str] | None = None,
    seeds: int = 3,
    minutes: float = 10.0,
) -> argparse.Namespace:
    """Return the options of a script that has none of its own."""
    return read_options(parser_of(description, seeds, minutes), argv)


def figure(width: float, height: float, rows: int = 1, columns: int = 1) -> tuple[Any, Any]:
    """A matplotlib figure (inches) that no global state knows of, and its axes (rows, columns)."""
    from matplotlib.figure import Figure

    made = Figure(figsize=(width, height), layout="constrained")
    return made, made.subplots(rows, columns, squeeze=False)


def _text(value: Any) -> str:
    if isinstance(value, list | tuple | np.ndarray):
        return " ".join(_text(float("nan") if v is None else v) for v in value)
    if isinstance(value, float | np.floating):
        return f"{value:.6g}"
    return "" if value is None else str(value)
