"""Grids of measurements: a script states its cells, how one is measured and what is shown.

    GRID = Grid(__doc__, "starts", cells, measure, by=["starts"], values=["exact"], seeds=20)

The engine reads the arguments, measures the cells that the sheet lacks, prints means over seeds,
and draws the picture.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.sheet import Cell, Row, Sheet, summarise
from benchmarks.table import PAPERS
from securecluster import Federation
from securecluster.data import Scenario
from securecluster.parties.derived import CHOSEN


def product(**axes: Iterable[Any]) -> list[Cell]:
    """Return a cell for each combination of values, the last axis varying fastest.

    Args:
        axes: the values of each parameter, by its name.
    """
    combinations = itertools.product(*axes.values())
    return [dict(zip(axes, values, strict=True)) for values in combinations]


def with_seeds(settings: Sequence[Cell], seeds: Iterable[int]) -> list[Cell]:
    """Return all settings with the first seed, then all with the next: a run that is cut off has
    whole seeds.

    Args:
        settings: cells without a seed.
        seeds: which.
    """
    return [{**setting, "seed": seed} for seed in seeds for setting in settings]


def federation_of(cell: Cell, scenario: Scenario) -> Federation:
    """Return the clients of a cell.

    Args:
        cell: its data set, clients, samples and seed.
        scenario: how clusters differ.
    """
    return Federation.simulate(
        cell["data"],
        scenario=scenario,
        clients=cell["clients"],
        samples=cell["samples"],
        seed=cell["seed"],
    )


@dataclass(frozen=True)
class Grid:
    """A sheet's cells, how one is measured, and what is shown of them.

    Args:
        description: the script's docstring, which `--help` prints.
        name: of the sheet.
        cells: the cells of a scale, "cpu" or "full", and of a number of seeds.
        measure: the results of a cell, as `Sheet.fill` takes them.
        by: the columns that tell groups of seeds apart where means are printed.
        values: the columns whose means are printed.
        seeds: the default of `--seeds`.
        minutes: the default of `--minutes`.
        folder: of the sheet.
        full: where the cells of the full scale stand in a new sheet, as not run: "first", "last" or
            "nowhere".
        measurable: the cells that can be measured here; others stay not run.
        report: prints more about the rows.
        draw: the picture of the rows, which is saved beside the sheet.
    """

    description: str | None
    name: str
    cells: Callable[[str, int], Sequence[Cell]]
    measure: Callable[[Cell], Mapping[str, Any]]
    by: Sequence[str] = ()
    values: Sequence[str] = ()
    seeds: int = 3
    minutes: float = 10.0
    folder: Path = PAPERS
    full: str = "nowhere"
    measurable: Callable[[Sequence[Cell]], Sequence[Cell]] = list
    report: Callable[[Sequence[Row]], None] | None = None
    draw: Callable[[Sequence[Row]], Any] | None = None

    def main(self, argv: Sequence[str] | None = None) -> Path:
        """Measure what is missing, print, draw.

        Args:
            argv: the arguments; those of the command line by default.

        Returns:
            The path of the picture, or of the sheet if there is none.
        """
        parser = parser_of(self.description, self.seeds, self.minutes)
        return self.run(read_options(parser, argv))

    def run(self, options: argparse.Namespace) -> Path:
        """Do what `main` does.

        Args:
            options: `scale`, `seeds` and `minutes`.

        Returns:
            The path of the picture, or of the sheet if there is none.
        """
        sheet = Sheet(self.name, self.folder)
        if self.full == "first":
            sheet.expect(self.cells("full", options.seeds))
        requested = self.cells(options.scale, options.seeds)
        rows = sheet.expect(requested)
        sheet.fill(self.measurable(requested), self.measure, options.minutes)
        if self.full == "last":
            sheet.expect(self.cells("full", options.seeds))
        summarise(rows, self.by, self.values)
        if self.report:
            self.report(rows)
        if self.draw is None:
            return sheet.path
        return sheet.save(self.draw(rows), options.scale)


def as_told(protocol_class: Any, options: Mapping[str, Any]) -> Any:
    """Return a protocol whose other options have their defaults, also under a target ε.

    A target chooses options that nobody gave; a grid compares those that it names.

    Args:
        protocol_class: the protocol's class.
        options: of the grid.
    """
    made = protocol_class(**{**protocol_class().get_params(), **options})
    vars(made)[CHOSEN] = {}  # so that nothing is looked for, either
    return made


def script_parser(description: str | None) -> argparse.ArgumentParser:
    """Return a parser that prints a script's docstring as it is.

    Args:
        description: the docstring.
    """
    return argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )


def parser_of(
    description: str | None, seeds: int = 3, minutes: float = 10.0
) -> argparse.ArgumentParser:
    """Return the parser of a script that fills a sheet: `--seeds`, `--full`, `--minutes`.

    Args:
        description: the script's docstring.
        seeds: the default of `--seeds`.
        minutes: the default of `--minutes`.
    """
    parser = script_parser(description)
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
    """Return a script's options, and `scale`, which is "full" or "cpu".

    Args:
        parser: made by `parser_of`, perhaps with more options.
        argv: the arguments; those of the command line by default.
    """
    options = parser.parse_args(argv)
    # written so that NaN minutes are refused too
    if options.seeds < 1 or not options.minutes >= 0:
        parser.error("--seeds is at least 1, and --minutes at least 0")
    options.scale = "cpu"
    if options.full:
        options.scale = "full"
    return options


def counts(
    description: str | None, argv: Sequence[str] | None = None, **defaults: int
) -> argparse.Namespace:
    """Return the options of a script that writes a table, each a number of at least one.

    Args:
        description: the script's docstring.
        argv: the arguments; those of the command line by default.
        defaults: the options by name, with their defaults.
    """
    parser = script_parser(description)
    for name, default in defaults.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    options = parser.parse_args(argv)
    for name in defaults:
        if getattr(options, name) < 1:
            parser.error(f"--{name} is at least 1")
    return options
