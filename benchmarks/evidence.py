"""Fill the tables of the evidence pages from the measurements, so that both always agree.

python -m benchmarks.evidence            write the tables of all pages
python -m benchmarks.evidence --check    return 1 where a table is out of date

Pages are README.md and those under docs/evidence. Each table stands between two comments; the first
says what the table holds:

    <!-- table
    source: papers/protocols.csv
    where: scale=cpu
    rows: protocol
    by: scenario
    columns: mean ari:.2f as ARI, mean accuracy:.3f, min accuracy:.3f as lowest
    -->
    ...
    <!-- end of table -->

`source` is a CSV file under benchmarks/results. `where` selects the rows that have these values;
NAME=A|B selects either, NAME!=A the others. A table has a line for each combination of the columns
that `rows` names, in the order of the file. A column is a statistic of the runs on that line: mean,
min, max, median or sum of a column's numbers, `low` and `high` for the ends of the 95 % interval of
the mean (the bootstrap's percentiles), `span` for the mean with the smallest and the largest in
parentheses where they differ, `exact` for the runs whose number is 1 (an ARI of 1: the clusters are
the true ones), `share` or `count` of its "True", `least` for the lower end of the 95 % interval of
that share (`least_share`), `runs` for the number of runs, `first` for a text.
`/1e6` divides, `:.3f` formats, and `as TEXT` is the heading.
`by` makes one set of columns for each value of another column, in ascending order if they are
numbers. Every cell but those of `span` has one number. Below a table of timings stands which of the
code that it times has changed since (`benchmarks.timed_code`).
"""

from __future__ import annotations

import argparse
import csv
import io
import re
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from scipy.stats import beta

from benchmarks import timed_code
from benchmarks.table import RESULTS, markdown_line
from securecluster.core import atomic_files
from securecluster.errors import SecureClusterError

Row = Mapping[str, str]
Condition = tuple[str, bool, frozenset[str]]  # a column, whether its value must be one of some
# relative to the working folder, as `RESULTS` is: run from the top of the repository
PAGES = (Path("README.md"), Path("docs/evidence"))
# status of a cell of the papers' own scale that `Sheet.expect` lists without measuring it
NOT_RUN = "not run"
BEGIN, END = "<!-- table", "<!-- end of table -->"
BLOCK = re.compile(rf"{BEGIN}\n(?P<settings>.*?)-->\n(?P<lines>.*?){END}", re.DOTALL)
# "mean fit_seconds/60:.1f as minutes": statistic, column, divisor, format and heading, of which
# only the statistic is required
COLUMN = re.compile(
    r"(?P<statistic>\w+)(?: (?!as )(?P<name>[^:/]+?))?"
    r"(?:/(?P<divisor>[\d.e+-]+))?(?::(?P<form>\.\d+[fg%]))?(?: as (?P<heading>.+))?"
)
EXACT = 0.9995  # an ARI of 1, in files that are rounded to three digits
DRAWS = 9999  # of the bootstrap


def interval(values: Sequence[float]) -> tuple[float, float]:
    """Return the 95 % interval of a mean: percentiles of the means of draws with replacement.

    The draws are the same in every call. Runs that all end alike have an interval without width,
    which says less than their number does.

    Args:
        values: independent runs.
    """
    array = np.asarray(values, dtype=np.float64)
    rows = np.random.default_rng(0).integers(len(array), size=(DRAWS, len(array)))
    low, high = np.percentile(array[rows].mean(1), [2.5, 97.5])
    return float(low), float(high)


def least_share(successes: int, runs: int) -> float:
    """Return the lower end of the 95 % interval of a share (Clopper and Pearson 1934).

    Args:
        successes: among the runs.
        runs: independent ones.
    """
    if not successes:
        return 0.0
    return float(beta.ppf(0.025, successes, runs - successes + 1))


NUMBERS: dict[str, Callable[[Sequence[float]], float]] = {
    "mean": statistics.fmean,
    "min": min,
    "max": max,
    "median": statistics.median,
    "sum": sum,
    "low": lambda values: interval(values)[0],
    "high": lambda values: interval(values)[1],
    "exact": lambda values: sum(value >= EXACT for value in values),
}
# of columns with "True" and "False", as the csv module writes bools
TRUTHS: dict[str, Callable[[Sequence[bool]], float]] = {
    "count": sum,
    "share": lambda values: sum(values) / len(values),
    "least": lambda values: least_share(sum(values), len(values)),
}
ABSENT = "–"


class EvidenceError(SecureClusterError):
    """A page's table that cannot be made."""


@dataclass(frozen=True)
class Column:
    """One statistic of the runs on a line.

    Attributes:
        statistic: one of `NUMBERS`, one of `TRUTHS`, "span", "runs" or "first".
        name: of the file's column; "" for "runs".
        divisor: of the statistic.
        form: of the text, as in a format string.
        heading: of the table's column.
    """

    statistic: str
    name: str
    divisor: float
    form: str
    heading: str

    @classmethod
    def parse(cls, text: str) -> Column:
        """Return the column that a page describes.

        Args:
            text: one item of the setting `columns`.

        Raises:
            EvidenceError: the text does not describe one.
        """
        text = text.strip()
        match = COLUMN.fullmatch(text)
        statistics = sorted([*NUMBERS, *TRUTHS, "span", "runs", "first"])
        if match is None or match["statistic"] not in statistics:
            names = ", ".join(statistics)
            raise EvidenceError(
                f"{text!r} is no column: write a statistic ({names}) "
                "and a column of the file, as in 'mean accuracy:.3f as accuracy'"
            )
        name = match["name"] or ""
        return cls(
            statistic=match["statistic"],
            name=name,
            divisor=float(match["divisor"] or 1),
            form=match["form"] or ".3g",
            heading=match["heading"] or name or match["statistic"],
        )

    def cell(self, runs: Sequence[Row]) -> str:
        """Return the statistic of some runs, or a dash where none of them has a value.

        Args:
            runs: those on one line of the table.

        Raises:
            EvidenceError: the file has no such column.
        """
        if not runs:
            return ABSENT
        if self.statistic == "runs":
            return str(len(runs))
        if any(self.name not in run for run in runs):
            raise EvidenceError(f"the file has no column {self.name!r}")
        values = [run[self.name] for run in runs]
        # runs that ended with an error have no value
        values = [value for value in values if value not in ("", ABSENT)]
        if not values:
            return ABSENT
        if self.statistic == "first":
            return values[0]
        if self.statistic in TRUTHS:
            truths = [value == "True" for value in values]
            share = TRUTHS[self.statistic](truths)
            return f"{share:{self.form}}"
        numbers = [float(value) for value in values]
        if self.statistic == "span":
            return self._span(numbers)
        return self._number(self.statistic, numbers)

    def _number(self, statistic: str, numbers: Sequence[float]) -> str:
        """Return the text of one of `NUMBERS`."""
        return _plain(NUMBERS[statistic](numbers) / self.divisor, self.form)

    def _span(self, numbers: Sequence[float]) -> str:
        """Return the mean, with the smallest and largest number where their texts differ."""
        mean, low, high = (self._number(name, numbers) for name in ("mean", "min", "max"))
        if low == high:
            return mean
        return f"{mean} ({low} to {high})"


def _plain(number: float, form: str) -> str:
    """Return a number's text, with separators in thousands and without a negative zero.

    Args:
        number: what is written.
        form: of the text, as in a format string.
    """
    if number == float("inf"):
        return "∞"
    # "g" would write large numbers with an exponent
    if form.endswith("g") and abs(number) >= 1000:
        return f"{number:,.0f}"
    text = f"{number:{form}}"
    # a small negative number may round to -0.00, which is no result
    if float(text.rstrip("%")) == 0:
        return text.lstrip("-")
    return text.replace("-", "−")


@dataclass(frozen=True)
class Table:
    """Description of a table in a page's comment.

    Attributes:
        source: a CSV file, relative to the folder of measurements.
        where: conditions on runs, all of which hold for every run of the table.
        rows: columns of the file, whose combinations are the table's lines.
        by: a column of the file, whose values are sets of the table's columns; "" for one set.
        columns: statistics of the runs on a line.
    """

    source: str
    where: tuple[Condition, ...]
    rows: tuple[str, ...]
    by: str
    columns: tuple[Column, ...]

    @classmethod
    def parse(cls, text: str) -> Table:
        """Return the table that a page's comment describes.

        Args:
            text: lines of the form "name: value".

        Raises:
            EvidenceError: a setting is missing or unknown.
        """
        settings: dict[str, str] = {}
        for line in text.strip().splitlines():
            name, separator, value = line.partition(":")
            if not separator:
                raise EvidenceError(f"{line!r} is no setting: write 'name: value'")
            settings[name.strip()] = value.strip()
        unknown = settings.keys() - {"source", "where", "rows", "by", "columns"}
        missing = {"source", "rows", "columns"} - settings.keys()
        if unknown or missing:
            names = ", ".join(sorted(unknown | missing))
            raise EvidenceError(f"unknown or missing settings of a table: {names}")
        conditions = tuple(_conditions(settings.get("where", "")))
        columns = [Column.parse(text) for text in _listed(settings["columns"])]
        return cls(
            source=settings["source"],
            where=conditions,
            rows=tuple(_listed(settings["rows"])),
            by=settings.get("by", ""),
            columns=tuple(columns),
        )

    def lines(self, folder: Path) -> list[str]:
        """Return the table's lines in Markdown.

        Args:
            folder: where the measurements are.

        Raises:
            EvidenceError: no such file, no such column, or no run that fits.
        """
        runs = [run for run in read(folder / self.source) if self._fits(run)]
        if not runs:
            raise EvidenceError(f"no run in {self.source} fits the table's conditions")
        groups = _grouped(runs, self.rows, self.source)
        values = [""]
        if self.by:
            levels = _grouped(runs, (self.by,), self.source)
            values = _ascending([value for (value,) in levels])
        headings = list(self.rows)
        for value in values:
            headings += self._headings(value)
        separators = ["---"] * len(headings)
        table = [markdown_line(headings), markdown_line(separators)]
        for key, members in groups.items():
            cells = list(key)
            for value in values:
                cells += self._cells(members, value)
            table.append(markdown_line(cells))
        return table

    def _headings(self, value: str) -> list[str]:
        """Return the headings of one set of columns: its value alone where there is one column.

        Args:
            value: of the column `by`; "" where there is none.
        """
        if self.by and len(self.columns) == 1:
            return [value]
        return [f"{value} {column.heading}".strip() for column in self.columns]

    def _cells(self, runs: Sequence[Row], value: str) -> list[str]:
        """Return the cells of one line in one set of columns.

        Args:
            runs: of the line.
            value: of the column `by`; "" where there is none.
        """
        if self.by:
            runs = [run for run in runs if run[self.by] == value]
        return [column.cell(runs) for column in self.columns]

    def _fits(self, run: Row) -> bool:
        """Return whether a run was measured and fulfils all conditions of the table."""
        # such a cell has no measurements: as a run it would count in `runs`, and fill no mean
        if run.get("status") == NOT_RUN:
            return False
        for name, included, values in self.where:
            if name not in run:
                raise EvidenceError(f"{self.source} has no column {name!r}")
            if (run[name] in values) != included:
                return False
        return True


def _listed(text: str) -> list[str]:
    """Return the items of a list that commas separate."""
    items = [item.strip() for item in text.split(",")]
    return [item for item in items if item]


def _conditions(text: str) -> Iterator[Condition]:
    """Yield the conditions of a table.

    Args:
        text: the setting `where`.

    Raises:
        EvidenceError: an item is no condition.
    """
    for item in _listed(text):
        name, separator, values = item.partition("=")
        if not separator:
            raise EvidenceError(f"{item!r} is no condition: write NAME=VALUE or NAME!=VALUE")
        included = not name.endswith("!")
        column = name.rstrip("! ")
        yield column, included, frozenset(values.split("|"))


def _ascending(values: list[str]) -> list[str]:
    """Return texts in the order of their numbers, or as they are if one of them is no number."""
    try:
        return sorted(values, key=float)
    except ValueError:
        return values


def _grouped(
    runs: Sequence[Row], names: Sequence[str], source: str
) -> dict[tuple[str, ...], list[Row]]:
    """Return the runs by the values of some columns, in the order of the file.

    Args:
        runs: rows of the file.
        names: of the columns.
        source: the file's name, for the error.

    Raises:
        EvidenceError: the file has no such column.
    """
    groups: dict[tuple[str, ...], list[Row]] = {}
    for run in runs:
        absent = [name for name in names if name not in run]
        if absent:
            raise EvidenceError(f"{source} has no column {absent[0]!r}")
        key = tuple(run[name] for name in names)
        # dicts keep the order of insertion, which is that of the file
        groups.setdefault(key, []).append(run)
    return groups


def read(path: Path) -> list[Row]:
    """Return the rows of a CSV file of measurements.

    Args:
        path: of the file, whose first lines may be comments.

    Raises:
        EvidenceError: no such file.
    """
    if not path.is_file():
        raise EvidenceError(f"there are no measurements in {path}: run the benchmark first")
    lines = atomic_files.read(path).decode().splitlines(keepends=True)
    # the first line of a file names the machine, which is no measurement
    data = [line for line in lines if not line.startswith("#")]
    stream = io.StringIO("".join(data))
    return list(csv.DictReader(stream))


def filled(page: str, folder: Path) -> str:
    """Return a page with its tables made from the measurements.

    Args:
        page: its Markdown.
        folder: where the measurements are.

    Raises:
        EvidenceError: a table cannot be made.
    """
    # a block without an end would stay as it is, out of date and unnoticed
    if page.count(BEGIN) != len(BLOCK.findall(page)):
        raise EvidenceError(f"a table has no end: close it with {END}")

    def block(match: re.Match[str]) -> str:
        settings = match["settings"]
        table = Table.parse(settings)
        lines = table.lines(folder) + _age(table.source, folder)
        text = "\n".join(lines)
        return f"{BEGIN}\n{settings}-->\n\n{text}\n\n{END}"

    return BLOCK.sub(block, page)


def _age(source: str, folder: Path) -> list[str]:
    """Return the lines that say that a table is older than the code that it times, if it is.

    Args:
        source: the table's CSV file.
        folder: where the measurements are.
    """
    table = source.removesuffix(".csv")
    changed = timed_code.changed(table, folder)
    if not changed:
        return []
    files = len(timed_code.TIMED[table])
    return ["", f"*Times of older code: of {files} timed files {len(changed)} changed since.*"]


def _files(paths: Sequence[Path]) -> list[Path]:
    """Return the pages among some paths.

    Args:
        paths: pages, and folders with pages.
    """
    files: list[Path] = []
    for path in paths:
        if path.is_dir():
            files += sorted(path.glob("*.md"))
        else:
            files.append(path)
    return files


def main(argv: Sequence[str] | None = None) -> int:
    """Fill or check all pages, and return the exit status.

    Args:
        argv: the arguments; those of the command line by default.

    Returns:
        1 if a page is out of date and only checked, else 0.
    """
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--check", action="store_true", help="write nothing")
    parser.add_argument("--pages", type=Path, nargs="+", default=PAGES, help="files or folders")
    parser.add_argument("--results", type=Path, default=RESULTS)
    options = parser.parse_args(argv)
    stale = []
    for path in _files(options.pages):
        text = path.read_text(encoding="utf-8")
        try:
            made = filled(text, options.results)
        except EvidenceError as error:
            raise SystemExit(f"{path}: {error}") from None
        if made == text:
            continue
        stale.append(path)
        if not options.check:
            atomic_files.write_atomic(path, made.encode())
    word = "written"
    if options.check:
        word = "out of date"
    for path in stale:
        print(f"{path}: {word}")
    return int(options.check and bool(stale))


if __name__ == "__main__":
    raise SystemExit(main())
