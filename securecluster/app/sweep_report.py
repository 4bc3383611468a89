"""What a sweep writes and prints: its tables, its pictures, and a line per run."""

from __future__ import annotations

import math
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from securecluster.app import sweep_tables
from securecluster.app.number_format import printable, shown
from securecluster.app.plots import sweep as plots
from securecluster.data import Federation

Row = dict[str, Any]
NONE = "–"


def write(folder: Path, rows: Sequence[Row], federation: Federation) -> None:
    """Write the tables and pictures.

    Parquet files are left out where pyarrow is not installed.

    Args:
        folder: of the sweep.
        rows: of all runs.
        federation: the clients of the first seed.
    """
    metric = federation.objective.metric
    runs = sweep_tables.tidy(rows, metric)
    means = sweep_tables.summary(runs, metric, federation.objective.higher)
    sweep_tables.write(folder / "runs.csv", runs)
    sweep_tables.write(folder / "summary.csv", means)
    sweep_tables.write(folder / "thresholds.csv", sweep_tables.thresholds(runs))
    if find_spec("pyarrow") is not None:
        sweep_tables.write_parquet(folder / "runs.parquet", runs)
        sweep_tables.write_parquet(folder / "summary.parquet", means)
    plots.draw(folder, means, _title(federation, runs), metric, federation.objective.unit)


def _title(federation: Federation, rows: Sequence[Row]) -> str:
    """Return the title of the pictures.

    Args:
        federation: the clients of the first seed.
        rows: of all runs.
    """
    seeds = len({row["seed"] for row in rows})
    dealt = f"{federation.data} ({federation.scenario}), {len(federation)} clients"
    interval = "means with 95 % intervals"
    if seeds < 2:
        return f"{dealt}, seed {rows[0]['seed']}"
    return f"{dealt}, {seeds} seeds: {interval}"


def line_text(row: Row, count: int, total: int, left: float | None) -> str:
    """Return one finished run as one printed line.

    Args:
        row: of the run.
        count: of the runs that have ended.
        total: number of runs.
        left: seconds that are left; None where nobody knows.
    """
    width = len(str(total))
    phrases = [f"run {count:>{width}}/{total}", printable(row["variant"])]
    if row["target_epsilon"] is None:
        phrases.append(f"noise {row['noise']:g}")
    else:
        phrases.append(f"target ε {row['target_epsilon']:g}")
    phrases.append(f"seed {row['seed']}")
    if row["status"] != "done":
        phrases.append(f"{row['status']}: {row['reason']}")
    else:
        if row["ari"] is not None:
            phrases.append(f"ARI {row['ari']:.2f}")
        phrases.append(f"ε {_text(row['epsilon'])}")
        phrases.append(f"{row['seconds']:.1f} s")
    if left is not None and count < total:
        phrases.append(f"{duration(left)} left")
    return "  ".join(phrases)


def duration(seconds: float) -> str:
    """Return a time in words: "40 s", "5 min", "2 h 05 min"."""
    if seconds < 60:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    if minutes < 60:
        return f"{minutes} min"
    return f"{minutes // 60} h {minutes % 60:02} min"


def _text(value: float | None) -> str:
    """Return a number with three significant digits, ∞, or a dash for None."""
    if value is None:
        return NONE
    if math.isinf(value):
        return "∞"
    return f"{value:.3g}"


def show(folder: Path, rows: Sequence[Row], federation: Federation) -> None:
    """Print a line per variant and level, then σ* and ε*, and what was refused.

    Args:
        folder: of the sweep.
        rows: of all runs.
        federation: the clients of the first seed.
    """
    from rich.console import Console

    console = Console(markup=False, highlight=False)
    metric = federation.objective.metric
    runs = sweep_tables.tidy(rows, metric)
    means = sweep_tables.summary(runs, metric, federation.objective.higher)
    console.print(_means_table(means, metric, _title(federation, runs)))
    console.print(_thresholds_table(sweep_tables.thresholds(runs)))
    for line in _refusals(runs):
        console.print(line)
    if find_spec("pyarrow") is None:
        console.print("no Parquet without pyarrow: pip install 'securecluster[sweep]'")
    console.print(f"everything is in {folder}: runs.csv, summary.csv, thresholds.csv, pictures")


def _means_table(means: Sequence[Row], metric: str, title: str) -> Any:
    """Return rich's table of the summary.

    Args:
        means: the summary.
        metric: the clients' score.
        title: of the table.
    """
    headings = ("noise", "ε", "runs", "ARI", "±", metric, "±", "MB")
    table = _table("variant", headings)
    table.title = printable(title)
    labels = [printable(row["variant"]) for row in means]
    for position, row in enumerate(means):
        label = labels[position]
        # once for all levels
        if position and labels[position - 1] == label:
            label = ""
        sent = None
        if row["up"] is not None:
            sent = (row["up"] + row["down"]) / 1e6
        cells = [
            _text(row["noise"]),
            _text(row["epsilon"]),
            str(row["runs"]),
            _fixed(row["ari"], 2),
            _half(row, "ari", 2),
            shown(row[metric], metric),
            _half(row, metric, 3),
            _fixed(sent, 2),
        ]
        table.add_row(label, *cells)
    return table


def _thresholds_table(lines: Sequence[Row]) -> Any:
    """Return rich's table of σ* and ε*.

    Args:
        lines: of the variants.
    """
    table = _table("variant", ("σ*", "of σ*", "ε*", "of ε*"))
    table.title = f"levels at which the mean ARI falls below {sweep_tables.HOLDS:g}"
    for row in lines:
        cells = []
        for name, sign in (("sigma_star", "≥"), ("epsilon_star", "≤")):
            value = _text(row[name])
            if row[f"{name}_kind"] == "beyond":
                value = f"{sign} {value}"
            cells.append(value)
            low = row[f"{name}_low"]
            if low is None:
                cells.append(NONE)
            else:
                cells.append(f"{_text(low)} … {_text(row[f'{name}_high'])}")
        table.add_row(printable(row["variant"]), *cells)
    return table


def _table(first: str, headings: Sequence[str]) -> Any:
    """Return rich's table with a column of names and columns of numbers."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    table = Table(box=SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    table.add_column(first, justify="left", overflow="fold")
    for heading in headings:
        table.add_column(heading, justify="right")
    return table


def _fixed(value: float | None, digits: int) -> str:
    """Return a number with some decimals, or a dash for None."""
    if value is None:
        return NONE
    return f"{value:.{digits}f}"


def _half(row: Row, name: str, digits: int) -> str:
    """Return half the width of a mean's interval, or a dash where there is none."""
    high = row[f"{name}_high"]
    if high is None:
        return NONE
    return _fixed(high - row[name], digits)


def _refusals(rows: Sequence[Row]) -> list[str]:
    """Return for each variant how many of its runs were refused, and why the first was."""
    reasons: dict[str, list[str]] = {}
    for row in rows:
        if row["status"] == "refused":
            reasons.setdefault(row["variant"], []).append(row["reason"])
    lines = []
    for label, some in reasons.items():
        lines.append(f"{printable(label)}: {len(some)} runs refused: {some[0]}")
    return lines
