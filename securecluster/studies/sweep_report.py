"""What a sweep writes and prints: its tables, its pictures, and a line per run."""

from __future__ import annotations

import math
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from securecluster.commands import failures
from securecluster.commands.failures import Row
from securecluster.core import atomic_files
from securecluster.core.number_format import NONE, enumerated, fixed, printable, shown
from securecluster.core.progress import duration
from securecluster.errors import RunFolderError
from securecluster.folders import run_folder
from securecluster.reports import terminal
from securecluster.studies import sweep_costs, sweep_latex, sweep_pairs, sweep_tables
from securecluster.studies import sweep_figures as plots

if TYPE_CHECKING:
    from securecluster.data.federation import Federation


def write(folder: Path, rows: Sequence[Row], federation: Federation) -> str | None:
    """Write the tables, the tracebacks of runs that failed, and then the pictures.

    Parquet files are left out where pyarrow is not installed.

    Args:
        folder: of the sweep.
        rows: of all runs.
        federation: the clients of the first seed.

    Returns:
        Why there are no pictures, where these cannot be drawn; None if they are there.
    """
    metric = federation.objective.metric
    runs = sweep_tables.tidy(rows, metric)
    means = sweep_tables.summary(runs, metric, federation.objective.higher)
    failures.write(folder / run_folder.FAILURES, _ordered(rows), _name)
    sweep_tables.write(folder / "runs.csv", runs)
    sweep_tables.write(folder / "summary.csv", means)
    sweep_tables.write(folder / "thresholds.csv", sweep_tables.thresholds(runs))
    pairs = sweep_pairs.paired(runs, metric)
    if pairs:
        sweep_tables.write(folder / sweep_pairs.NAME, pairs)
    title = _title(federation, runs, "means over the seeds")
    latex = sweep_latex.table(means, metric, title, federation.objective.higher)
    atomic_files.write_atomic(folder / sweep_latex.NAME, latex.encode())
    text = "\n".join([*sweep_costs.sentences(_ordered(rows), metric), ""])
    atomic_files.write_atomic(folder / "privacy.txt", text.encode())
    if find_spec("pyarrow") is not None:
        sweep_tables.write_parquet(folder / "runs.parquet", runs)
        sweep_tables.write_parquet(folder / "summary.parquet", means)
    try:
        unit = federation.objective.unit
        plots.draw(folder, means, _title(federation, runs), metric, unit, runs)
    except RunFolderError:
        raise
    # whatever it is, the tables are there, and pictures can be drawn later
    except Exception as error:
        return (
            f"the pictures cannot be drawn ({failures.reason(error)}), and everything else is in "
            f"{folder}: resume draws them again"
        )
    return None


def _ordered(rows: Sequence[Row]) -> list[Row]:
    """Return the rows in the order of the runs."""
    return sorted(rows, key=lambda row: int(row["run"]))


def _name(row: Row) -> str:
    """Return what a run is called above its traceback."""
    return f"run {row['run']}: {printable(row['variant'])}, {_level(row)}, seed {row['seed']}"


def _level(row: Row) -> str:
    """Return the level of a run in words.

    Args:
        row: of the run.
    """
    if row["target_epsilon"] is None:
        return f"noise {row['noise']:g}"
    return f"target ε {row['target_epsilon']:g}"


def _title(
    federation: Federation, rows: Sequence[Row], few: str = "means, and a dot for each seed"
) -> str:
    """Return the title of the pictures.

    Args:
        federation: the clients of the first seed.
        rows: of all runs.
        few: what is shown where there are too few seeds for intervals.
    """
    seeds = len({row["seed"] for row in rows})
    dealt = f"{federation.data} ({federation.scenario}), {len(federation)} clients"
    title = f"{dealt}, {seeds} seeds: means with 95 % intervals"
    if seeds < 2:
        title = f"{dealt}, seed {rows[0]['seed']}"
    elif seeds < sweep_tables.FEWEST:
        title = f"{dealt}, {seeds} seeds: {few}"
    failed = sum(row["status"] == "failed" for row in rows)
    if failed:
        title += f" ({failed} of {len(rows)} runs failed)"
    return title


def line_text(row: Row, count: int, run_count: int, remaining: float | None) -> str:
    """Return one finished run as one printed line.

    Args:
        row: of the run.
        count: of the runs that have ended.
        run_count: number of runs.
        remaining: seconds that are left; None where nobody knows.
    """
    width = len(str(run_count))
    phrases = [f"run {count:>{width}}/{run_count}", printable(row["variant"]), _level(row)]
    phrases.append(f"seed {row['seed']}")
    if row["status"] != "done":
        phrases.append(f"{row['status']}: {printable(row['reason'])}")
    else:
        if row["ari"] is not None:
            phrases.append(f"ARI {row['ari']:.2f}")
        phrases.append(f"ε {_text(row['epsilon'])}")
        phrases.append(f"{row['seconds']:.1f} s")
    if remaining is not None and count < run_count:
        phrases.append(f"{duration(remaining)} left")
    return "  ".join(phrases)


def _text(value: float | None) -> str:
    """Return a number with three significant digits, ∞, or a dash for None."""
    if value is None:
        return NONE
    if math.isinf(value):
        return "∞"
    return f"{value:.3g}"


def show(folder: Path, rows: Sequence[Row], federation: Federation) -> None:
    """Print a line per variant and level, σ* and ε*, what all runs cost together, and what was
    refused or failed.

    Args:
        folder: of the sweep.
        rows: of all runs.
        federation: the clients of the first seed.
    """
    console = terminal.Console(markup=False)
    metric = federation.objective.metric
    runs = sweep_tables.tidy(rows, metric)
    means = sweep_tables.summary(runs, metric, federation.objective.higher)
    console.print(_means_table(means, metric, _title(federation, runs, "means")))
    for line in [*units_in_words(means), *rounds_in_words(means)]:
        console.print(line)
    console.print(_thresholds_table(sweep_tables.thresholds(runs)))
    scores = ("ari", metric) if federation.objective.higher else ("ari",)
    worse = sweep_pairs.losses_with_less_noise(runs, scores)
    for line in [*worse, *sweep_costs.sentences(_ordered(rows), metric), *_not_done(runs)]:
        console.print(line)
    if find_spec("pyarrow") is None:
        console.print("no Parquet without pyarrow: pip install pyarrow")
    console.print(
        f"everything is in {folder}: runs.csv, summary.csv, thresholds.csv, paired.csv, "
        "privacy.txt, pictures"
    )


def units_in_words(means: Sequence[Row]) -> list[str]:
    """Return whose ε a table has, and at which δ, a line for each unit.

    Args:
        means: a line for each variant and level.
    """
    lines = []
    for unit in plots.units(means):
        rows = [row for row in means if row["dp_unit"] == unit and row["epsilon"]]
        deltas = sorted({float(row["delta"]) for row in rows if row["delta"]})
        names = ", ".join(dict.fromkeys(printable(row["variant"]) for row in rows))
        delta_text = ", ".join(f"{delta:g}" for delta in deltas)
        lines.append(f"ε of one {unit}, at δ = {delta_text}: {names}")
    return lines


def rounds_in_words(means: Sequence[Row]) -> list[str]:
    """Return a line with the rounds that each method ran, where they are not equal.

    Args:
        means: a line for each variant and level.
    """
    by_method: dict[str, set[float]] = {}
    for row in means:
        if row["rounds"] is not None:
            by_method.setdefault(row["variant"], set()).add(row["rounds"])
    if len(set().union(*by_method.values())) < 2:
        return []
    texts = []
    for name, rounds in by_method.items():
        few, many = min(rounds), max(rounds)
        span = f"{few:g}" if few == many else f"{few:g} to {many:g}"
        texts.append(f"{printable(name)} {span}")
    return [f"not at equal rounds: {', '.join(texts)}"]


def _means_table(means: Sequence[Row], metric: str, title: str) -> Any:
    """Return rich's table of the summary.

    Args:
        means: the summary.
        metric: the clients' score.
        title: of the table.
    """
    headings = ["variant", "noise", "ε", "runs", "failed", "ARI", "±", metric, "±", "MB"]
    rows = []
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
            label,
            _text(row["noise"]),
            _text(row["epsilon"]),
            str(row["runs"]),
            str(row["failed"]),
            fixed(row["ari"], 2),
            _half(row, "ari", 2),
            shown(row[metric], metric),
            _half(row, metric, 3),
            fixed(sent, 2),
        ]
        rows.append(cells)
    # without intervals there are no widths of them
    shown_columns = []
    for position, heading in enumerate(headings):
        if heading != "±" or any(row[position] != NONE for row in rows):
            shown_columns.append(position)
    headings = [headings[position] for position in shown_columns]
    rows = [[row[position] for position in shown_columns] for row in rows]
    return terminal.table(headings, rows, printable(title), numbers=True, light=True)


def _thresholds_table(lines: Sequence[Row]) -> Any:
    """Return rich's table of σ* and ε*.

    Args:
        lines: of the variants.
    """
    headings = ("variant", "σ*", "of σ*", "ε*", "of ε*")
    title = f"levels at which the mean ARI falls below {sweep_tables.HOLDS:g}"
    rows = []
    for row in lines:
        cells = [printable(row["variant"])]
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
        rows.append(cells)
    return terminal.table(headings, rows, title, numbers=True, light=True)


def _half(row: Row, name: str, digits: int) -> str:
    """Return half the width of a mean's interval, or a dash where there is none."""
    low, high = row[f"{name}_low"], row[f"{name}_high"]
    if low is None or high is None:
        return NONE
    return fixed((high - low) / 2, digits)


def _not_done(rows: Sequence[Row]) -> list[str]:
    """Return for each variant which of its runs were refused or failed, why, and how they count.

    Args:
        rows: of all runs.
    """
    # runs of one variant that count alike, in one line
    groups: dict[tuple[str, str, bool], list[Row]] = {}
    for row in rows:
        if row["status"] != "done":
            key = (row["variant"], row["status"], bool(row["fault"]))
            groups.setdefault(key, []).append(row)
    lines = []
    for (label, status, fault), some in groups.items():
        line = f"{printable(label)}: {len(some)} runs {status}"
        if len(some) == 1:
            line = f"{printable(label)}: 1 run {status}"
        if status == "failed":
            numbers = enumerated("run", [row["run"] for row in some])
            effect = "σ* and ε* leave out their levels" if fault else "with ARI 0 in σ* and ε*"
            line += f" ({numbers}; in no mean, and {effect})"
        lines.append(f"{line}: {printable(some[0]['reason'])}")
    return lines
