"""Fill the tables of the evidence pages from the measurements, so that none can drift from them.

python -m securecluster.benchmarks.evidence            writes the tables of all pages
python -m securecluster.benchmarks.evidence --check    writes nothing; 1 where a table is out of date

A page under docs/evidence is Markdown. Each of its tables stands between two comments; the first
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

`source` is a CSV file under benchmarks/results. `where` keeps the rows that have these values;
NAME=A|B keeps either, NAME!=A the others. A table has a line for each combination of the columns
that `rows` names, in the order of the file. A column is a statistic of the runs that fall on that
line: mean, min, max, median or sum of a column's numbers, `share` or `count` of its "True", `runs`
for how many runs there are, `first` for a text. `/1e6` divides, `:.3f` formats, `as TEXT` is the
heading. `by` makes one set of columns for each value of another column. Every cell has one number.
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

from securecluster.benchmarks.table import RESULTS
from securecluster.core import atomic_files
from securecluster.errors import SecureClusterError

Row = Mapping[str, str]
PAGES = Path("docs/evidence")
NOT_RUN = "not run"
BEGIN, END = "<!-- table", "<!-- end of table -->"
BLOCK = re.compile(rf"{BEGIN}\n(?P<settings>.*?)-->\n(?P<lines>.*?){END}", re.DOTALL)
COLUMN = re.compile(
    r"(?P<statistic>\w+)(?: (?!as )(?P<name>[^:/]+?))?"
    r"(?:/(?P<divisor>[\d.e+-]+))?(?::(?P<form>\.\d+[fg%]))?(?: as (?P<heading>.+))?"
)
NUMBERS: dict[str, Callable[[Sequence[float]], float]] = {
    "mean": statistics.fmean,
    "min": min,
    "max": max,
    "median": statistics.median,
    "sum": sum,
}
TRUTHS: dict[str, Callable[[Sequence[bool]], float]] = {
    "count": sum,
    "share": lambda values: sum(values) / len(values),
}
ABSENT = "–"


class EvidenceError(SecureClusterError):
    """A page's table that cannot be made."""


@dataclass(frozen=True)
class Column:
    """One statistic of the runs on a line."""

    statistic: str
    name: str
    divisor: float
    form: str
    heading: str

    @classmethod
    def parse(cls, text: str) -> Column:
        """Return the column that a page describes.

        Raises:
            EvidenceError: the text does not describe one.
        """
        match = COLUMN.fullmatch(text.strip())
        known = {*NUMBERS, *TRUTHS, "runs", "first"}
        if match is None or match["statistic"] not in known:
            raise EvidenceError(
                f"{text.strip()!r} is no column: write a statistic ({', '.join(sorted(known))}) "
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
        """Return the statistic of some runs, or a dash where none of them has a value."""
        if not runs:
            return ABSENT
        if self.statistic == "runs":
            return str(len(runs))
        if any(self.name not in run for run in runs):
            raise EvidenceError(f"the file has no column {self.name!r}")
        values = [run[self.name] for run in runs if run[self.name] not in ("", ABSENT)]
        if not values:
            return ABSENT
        if self.statistic == "first":
            return values[0]
        if self.statistic in TRUTHS:
            truths = [value == "True" for value in values]
            return f"{TRUTHS[self.statistic](truths):{self.form}}"
        numbers = [float(value) for value in values]
        return _plain(NUMBERS[self.statistic](numbers) / self.divisor, self.form)


def _plain(number: float, form: str) -> str:
    """Return a number's text, with separators from 10,000 on and without a negative zero."""
    if number == float("inf"):
        return "∞"
    if form.endswith("g") and abs(number) >= 1000:
        return f"{number:,.0f}"
    text = f"{number:{form}}"
    if float(text.rstrip("%")) == 0:
        return text.lstrip("-")
    return text.replace("-", "−")


@dataclass(frozen=True)
class Table:
    """What a page says that a table holds."""

    source: str
    where: tuple[tuple[str, bool, frozenset[str]], ...]
    rows: tuple[str, ...]
    by: str
    columns: tuple[Column, ...]

    @classmethod
    def parse(cls, text: str) -> Table:
        """Return the table that a page's comment describes.

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
        return cls(
            source=settings["source"],
            where=tuple(_conditions(settings.get("where", ""))),
            rows=tuple(_listed(settings["rows"])),
            by=settings.get("by", ""),
            columns=tuple(Column.parse(text) for text in _listed(settings["columns"])),
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
        values = _grouped(runs, (self.by,), self.source) if self.by else {("",): []}
        headings = list(self.rows)
        for (value,) in values:
            headings += self._headings(value)
        table = [_line(headings), _line(["---"] * len(headings))]
        for key, members in groups.items():
            cells = list(key)
            for (value,) in values:
                chosen = [run for run in members if not self.by or run[self.by] == value]
                cells += [column.cell(chosen) for column in self.columns]
            table.append(_line(cells))
        return table

    def _headings(self, value: str) -> list[str]:
        """Return the headings of one set of columns: its value alone where there is one column."""
        if self.by and len(self.columns) == 1:
            return [value]
        return [f"{value} {column.heading}".strip() for column in self.columns]

    def _fits(self, run: Row) -> bool:
        if run.get("status") == NOT_RUN:
            return False
        for name, wanted, values in self.where:
            if name not in run:
                raise EvidenceError(f"{self.source} has no column {name!r}")
            if (run[name] in values) != wanted:
                return False
        return True


def _listed(text: str) -> list[str]:
    return [part.strip() for part in text.split(",") if part.strip()]


def _conditions(text: str) -> Iterator[tuple[str, bool, frozenset[str]]]:
    """Yield a column, whether its value must be among some, and these."""
    for part in _listed(text):
        name, separator, values = part.partition("=")
        if not separator:
            raise EvidenceError(f"{part!r} is no condition: write NAME=VALUE or NAME!=VALUE")
        yield name.rstrip("! "), not name.endswith("!"), frozenset(values.split("|"))


def _grouped(
    runs: Sequence[Row], names: Sequence[str], source: str
) -> dict[tuple[str, ...], list[Row]]:
    """Return the runs by the values of some columns, in the order of the file."""
    groups: dict[tuple[str, ...], list[Row]] = {}
    for run in runs:
        absent = [name for name in names if name not in run]
        if absent:
            raise EvidenceError(f"{source} has no column {absent[0]!r}")
        groups.setdefault(tuple(run[name] for name in names), []).append(run)
    return groups


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def read(path: Path) -> list[Row]:
    """Return the rows of a CSV file of measurements, whose first lines may be comments.

    Raises:
        EvidenceError: no such file.
    """
    if not path.is_file():
        raise EvidenceError(f"there are no measurements in {path}: run the benchmark first")
    text = atomic_files.read(path).decode()
    data = [line for line in text.splitlines(keepends=True) if not line.startswith("#")]
    return list(csv.DictReader(io.StringIO("".join(data))))


def filled(page: str, folder: Path) -> str:
    """Return a page with its tables made from the measurements.

    Args:
        page: its Markdown.
        folder: where the measurements are.

    Raises:
        EvidenceError: a table cannot be made.
    """
    if page.count(BEGIN) != len(BLOCK.findall(page)):
        raise EvidenceError(f"a table has no end: close it with {END}")

    def block(match: re.Match[str]) -> str:
        table = Table.parse(match["settings"])
        lines = "\n".join(table.lines(folder))
        return f"{BEGIN}\n{match['settings']}-->\n\n{lines}\n\n{END}"

    return BLOCK.sub(block, page)


def main(argv: Sequence[str] | None = None) -> int:
    """Fill or check all pages; returns 1 where a page is out of date."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--check", action="store_true", help="write nothing")
    parser.add_argument("--pages", type=Path, default=PAGES)
    parser.add_argument("--results", type=Path, default=RESULTS)
    options = parser.parse_args(argv)
    stale = []
    for path in sorted(options.pages.glob("*.md")):
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
    word = "out of date" if options.check else "written"
    for path in stale:
        print(f"{path}: {word}")
    return int(options.check and bool(stale))


if __name__ == "__main__":
    raise SystemExit(main())
