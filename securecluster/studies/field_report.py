"""What a field leaves: its rows, means, paired differences, a page, a LaTeX table and figures.

Every sentence follows from the rows: ε is that of the ledgers, rounds are those that were run, and
where the seeds are too few for any test to tell a difference, no test says that there is none.
"""

from __future__ import annotations

import math
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import securecluster
from securecluster.commands import failures
from securecluster.commands.failures import Row
from securecluster.core import atomic_files
from securecluster.core.number_format import NONE, fixed, printable
from securecluster.errors import RunFolderError
from securecluster.figures.looks import name_of
from securecluster.folders import run_folder
from securecluster.reports import html_page, terminal
from securecluster.studies import (
    field_figures,
    field_stored,
    sweep_latex,
    sweep_pairs,
    sweep_tables,
)
from securecluster.studies.field_plan import DELTA, METRIC, TUNING_SEED, Cell, Plan, Setting
from securecluster.studies.field_stored import COLUMNS
from securecluster.studies.sweep_runner import DONE
from securecluster.studies.sweep_tables import FEWEST

SIGNIFICANT = 0.05
UNSPENT = 0.9  # share of the target below which a row says what it spent
BY = ("setting", "target_epsilon")
REFERENCE = "finetune"  # what is compared where the user has no method of their own
PAGE = "field.html"
LATEX = "field.tex"


class Level(NamedTuple):
    """Means of one method in one setting at one ε.

    Attributes:
        line: of the summary.
        rows: its runs.
        stored: whether they come with the package.
    """

    line: Row
    rows: list[Row]
    stored: bool


def measured(plan: Plan, cells: Sequence[Cell], rows: Sequence[Row]) -> list[Row]:
    """Return the rows of runs as `runs.csv` has them, in the order of the runs.

    Args:
        plan: of the field.
        cells: the runs.
        rows: of these runs, as they were recorded.
    """
    digests = dict(zip((setting.name for setting in plan.settings), plan.digests, strict=True))
    lines = []
    for row in sorted(rows, key=lambda row: int(row["run"])):
        cell = cells[row["run"]]
        setting = plan.setting(cell.setting)
        budget = setting.budget(cell.variant.protocol, plan.dp_unit)
        options = {n: v for n, v in cell.variant.options.items() if budget.get(n) != v}
        known = {
            **row,
            "setting": setting.name,
            "hash": setting.hash(plan.dp_unit),
            "data_digest": digests[setting.name],
            "chosen": ", ".join(f"{name}={value}" for name, value in options.items()),
            "tuned_alone": options.get("tune_rounds", 0),
            "program": dict(plan.programs)[cell.variant.protocol],
            "version": securecluster.__version__,
        }
        target = f"; by the target: {row['chosen']}" if row.get("chosen") else ""
        known["chosen"] += target
        lines.append({name: known.get(name) for name in COLUMNS})
    return lines


def write(folder: Path, plan: Plan, lines: Sequence[Row], rows: Sequence[Row]) -> str | None:
    """Write tables, tracebacks, figures and the page.

    Args:
        folder: of the field.
        plan: of the field.
        lines: a row per run, also of those that are stored.
        rows: of the runs that were carried out here.

    Returns:
        Why there are no pictures, where these cannot be drawn; None if they are there.
    """
    levels = levels_of(plan, lines)
    pairs = pairs_of(plan, lines)
    ordered = sorted(rows, key=lambda row: int(row["run"]))
    failures.write(folder / run_folder.FAILURES, ordered, lambda row: f"run {row['run']}")
    sweep_tables.write(folder / "runs.csv", lines)
    sweep_tables.write(folder / "summary.csv", [level.line for level in levels])
    if pairs:
        sweep_tables.write(folder / sweep_pairs.NAME, pairs)
    atomic_files.write_atomic(folder / LATEX, latex(plan, levels).encode())
    undrawn = None
    pictures: list[bytes] = []
    try:
        pictures = field_figures.draw(folder, plan, [level.line for level in levels])
    except RunFolderError:
        raise
    # whatever it is, the tables are there, and pictures can be drawn later
    except Exception as error:
        undrawn = f"the pictures cannot be drawn ({failures.reason(error)}): resume tries again"
    text = page(plan, levels, pairs, pictures)
    atomic_files.write_atomic(folder / PAGE, text.encode())
    return undrawn


def levels_of(plan: Plan, lines: Sequence[Row]) -> list[Level]:
    """Return the means of each setting, ε and method, in the order of the plan.

    Args:
        plan: of the field.
        lines: a row per run.
    """
    order = [variant.label for variant in plan.variants]
    names = [setting.name for setting in plan.settings]
    groups = sweep_tables.groups(lines, (*BY, "variant"))
    levels = []
    for rows in groups:
        done = [row for row in rows if row["status"] == DONE]
        some = (done or rows)[0]
        kept = ("setting", "hash", "target_epsilon", "variant", "protocol", "chosen", "dp_unit")
        line: Row = {name: some[name] for name in kept}
        line |= {"delta": some["delta"], "seeds": len(done), "not_done": len(rows) - len(done)}
        for name in ("ari", METRIC, f"worst_{METRIC}", "epsilon", "bytes", "rounds", "noise"):
            values = [value for row in done if (value := _value(row, name)) is not None]
            mean, low, high = sweep_tables.mean_interval(values)
            line |= {name: mean, f"{name}_low": low, f"{name}_high": high}
        reasons = [row["reason"] for row in rows if row["status"] != DONE]
        line["reason"] = reasons[0] if reasons else None
        key = (some["setting"], some["variant"], some["target_epsilon"])
        levels.append(Level(line, rows, key in plan.stored))
    levels.sort(
        key=lambda level: (
            names.index(level.line["setting"]),
            level.line["target_epsilon"],
            order.index(level.line["variant"]),
        )
    )
    return levels


def _value(row: Row, name: str) -> float | None:
    """Return a number of a run: bytes up and down of a client, and rounds with those alone."""
    if name == "bytes":
        return float(row["up"] + row["down"]) / float(row["clients"])
    if name == "rounds":
        return float(row["rounds"] + (row["tuned_alone"] or 0))
    return None if row[name] is None else float(row[name])


def pairs_of(plan: Plan, lines: Sequence[Row]) -> list[Row]:
    """Return paired differences of the user's methods, or of fine-tuning, from all others.

    Args:
        plan: of the field.
        lines: a row per run.
    """
    firsts = [variant.label for variant in plan.own] or [REFERENCE]
    return sweep_pairs.paired(lines, METRIC, firsts, BY)


def verdict(line: Row) -> str:
    """Return in words what a paired test tells.

    Args:
        line: of `pairs_of`.
    """
    if line["p_holm"] is None:
        return "could not tell: too few common seeds"
    if line["p_holm"] >= SIGNIFICANT:
        return "could not tell"
    return "better" if line["difference"] > 0 else "worse"


def reach(pairs: Sequence[Row], score: str) -> str:
    """Return in words whether the tests of one score could tell any difference at all.

    The smallest p of Wilcoxon's test over n seeds is 2^(1 − n), which Holm's method multiplies by
    the number of tests for the first of them.

    Args:
        pairs: of `pairs_of`.
        score: "ari" or the metric.
    """
    tested = [line for line in pairs if line["score"] == score and line["p"] is not None]
    name = "ARI" if score == "ari" else score
    if not tested:
        return f"{name}: no test, which takes {FEWEST} common seeds"
    seeds = max(line["seeds"] for line in tested)
    smallest = min(1.0, len(tested) * 2.0 ** (1 - seeds))
    text = f"{name}: {len(tested)} tests over up to {seeds} common seeds"
    if smallest < SIGNIFICANT:
        return text
    needed = 1 + math.floor(math.log2(len(tested) / SIGNIFICANT)) + 1
    return (
        f"{text}, which cannot tell any difference: the smallest adjusted p is {smallest:.2g} "
        f"(from {needed} seeds on it can be below {SIGNIFICANT:g})"
    )


def remarks(plan: Plan, level: Level) -> list[str]:
    """Return in words where a line departs from its setting: failed, another ε, other rounds.

    Args:
        plan: of the field.
        level: of one method.
    """
    line = level.line
    texts = []
    if line["not_done"]:
        texts.append(f"{line['not_done']} of {len(level.rows)} runs not done: {line['reason']}")
    if not line["seeds"]:
        return texts
    rounds = plan.setting(line["setting"]).rounds
    if line["rounds"] != rounds:
        texts.append(f"{line['rounds']:g} rounds, not {rounds}")
    if not line["epsilon"]:
        texts.append("released nothing (ε 0)")
    elif line["epsilon"] < UNSPENT * line["target_epsilon"]:
        texts.append(f"spent ε {line['epsilon']:.3g}")
    alone = level.rows[0]["tuned_alone"]
    if alone:
        texts.append(f"its last {alone} rounds are alone and without noise, and shown to nobody")
    return texts


def of_version(levels: Sequence[Level]) -> list[str]:
    """Return in words which version stored results are of, and whether it is another one.

    Args:
        levels: of the field.
    """
    stored = [row["version"] or "" for level in levels if level.stored for row in level.rows]
    lines = []
    for version in dict.fromkeys(stored):
        text = f"stored results are of version {version}"
        if field_stored.public(version) != field_stored.public(securecluster.__version__):
            text += f", and this is {securecluster.__version__}: --fresh runs them again"
        lines.append(text)
    return lines


def notes(plan: Plan, levels: Sequence[Level]) -> list[str]:
    """Return in words how the rows came about.

    Args:
        plan: of the field.
        levels: of the field.
    """
    stored = sum(level.stored for level in levels)
    lines = [
        f"ε is of one {plan.dp_unit}, at δ = {DELTA:g}, of clustering and training together, as "
        "the ledger of each run prices it; no ε covers the scores, nor the choice by them",
        "every method has the same rounds, steps and clip norm, is told the number of clusters if "
        f"it asks for it, and has the learning rate that was the best on seed {TUNING_SEED}; it "
        f"runs on {len(plan.seeds)} seeds, from {plan.seeds[0]} on",
        f"intervals are 95 % bootstrap intervals over the seeds, from {FEWEST} on",
        f"{stored} of {len(levels)} lines come with the package, and were not run here",
    ]
    ends = sum(_at_an_end(plan, level.line) for level in levels)
    if ends:
        lines.append(
            f"the learning rate of {ends} lines is the least or the largest that was tried, beyond "
            "which another may be better"
        )
    return [*lines, *of_version(levels)]


def _at_an_end(plan: Plan, line: Row) -> bool:
    """Return whether the learning rate of a line is at an end of those that were tried."""
    rates = plan.setting(line["setting"]).rates
    options = (line["chosen"] or "").replace(";", ",").split(", ")
    return any(f"lr={rate}" in options for rate in (min(rates), max(rates)))


def page(
    plan: Plan, levels: Sequence[Level], pairs: Sequence[Row], pictures: Sequence[bytes]
) -> str:
    """Return the page.

    Args:
        plan: of the field.
        levels: of the field.
        pairs: paired differences.
        pictures: PNG files, one a setting.
    """
    sections = [html_page.section("How it was measured", html_page.items(notes(plan, levels)))]
    for number, setting in enumerate(plan.settings):
        of_setting = [level for level in levels if level.line["setting"] == setting.name]
        caption = f"{setting.name}: means over the seeds with 95 % intervals"
        shown = [picture for picture in pictures[number : number + 1] if picture]
        drawn = [html_page.picture(picture, caption) for picture in shown]
        table = html_page.table(HEADINGS, [_cells(plan, level) for level in of_setting])
        text = html_page.paragraph(described(setting, plan.dp_unit))
        sections.append(html_page.section(setting.name, text, table, *drawn))
    tests = [reach(pairs, score) for score in ("ari", METRIC)]
    table = html_page.table(PAIR_HEADINGS, [_pair_cells(line) for line in pairs])
    method = (
        "Differences of runs with the same clients; p of Wilcoxon's signed-rank test, adjusted by "
        "Holm's method over all tests of a score."
    )
    sections.append(
        html_page.section(
            "Paired differences", html_page.paragraph(method), html_page.items(tests), table
        )
    )
    sections.append(html_page.section("Again", html_page.code(command_of(plan))))
    return html_page.document("The field at equal ε and equal budget", sections)


def described(setting: Setting, dp_unit: str) -> str:
    """Return a setting in words, with its hash.

    Args:
        setting: how clients differ.
        dp_unit: "client" or "example".
    """
    clients = setting.simulation
    groups = f" in {clients.clusters} clusters" if clients.clusters else ""
    return (
        f"{clients.data}, {clients.scenario}: {clients.clients} clients{groups}, {clients.samples} "
        f"samples each; {setting.rounds} rounds of one step over all samples, model {setting.model}"
        f", clip norm {setting.clip:g}; settings {setting.hash(dp_unit)}"
    )


def command_of(plan: Plan) -> str:
    """Return the command that measures a field again.

    Args:
        plan: of the field.
    """
    quick = plan.settings[0].simulation.data == "digits"
    words = ["securecluster", "field", *(variant.label for variant in plan.own), "--epsilon"]
    words += [f"{epsilon:g}" for epsilon in plan.epsilons]
    words += ["--settings", *(setting.name for setting in plan.settings)]
    words += ["--beside", *plan.beside] if plan.beside else []
    words += ["--dp-unit", plan.dp_unit, "--seeds", str(len(plan.seeds))]
    return shlex.join([*words, *(["--quick"] if quick else [])])


HEADINGS = ("method", "ε of", "ε", "ARI", METRIC, "kB a client", "rounds", "seeds", "remarks")
PAIR_HEADINGS = (
    "setting", "ε", "score", "method", "beside", "difference", "seeds", "p", "p (Holm)", "so it is",
)  # fmt: skip


def _cells(plan: Plan, level: Level) -> list[str]:
    """Return the cells of a line of the page."""
    line = level.line
    sent = None if line["bytes"] is None else line["bytes"] / 1000
    source = ["stored"] if level.stored else []
    return [
        name_of(line["variant"]),
        f"{line['target_epsilon']:g}",
        fixed(line["epsilon"], 2),
        with_interval(line, "ari"),
        with_interval(line, METRIC),
        fixed(sent, 1),
        fixed(line["rounds"], 0),
        str(line["seeds"]),
        "; ".join([*remarks(plan, level), *source, line["chosen"] or ""]).strip("; "),
    ]


def _pair_cells(line: Row) -> list[str]:
    """Return the cells of a paired difference."""
    return [
        line["setting"],
        f"{line['target_epsilon']:g}",
        "ARI" if line["score"] == "ari" else line["score"],
        name_of(line["first"]),
        name_of(line["second"]),
        with_interval(line, "difference", "low", "high"),
        str(line["seeds"]),
        NONE if line["p"] is None else f"{line['p']:.2g}",
        NONE if line["p_holm"] is None else f"{line['p_holm']:.2g}",
        verdict(line),
    ]


def with_interval(line: Row, name: str, low: str = "", high: str = "") -> str:
    """Return a mean with its interval, if there is one.

    Args:
        line: of means.
        name: column of the mean.
        low: column of the lower end.
        high: column of the upper end.
    """
    lower, upper = line[low or f"{name}_low"], line[high or f"{name}_high"]
    text = fixed(line[name], 3)
    return text if lower is None else f"{text} ({fixed(lower, 3)} to {fixed(upper, 3)})"


def latex(plan: Plan, levels: Sequence[Level]) -> str:
    """Return a LaTeX table a setting, with ε in columns and the best means in bold.

    Args:
        plan: of the field.
        levels: of the field.
    """
    lines = [r"% \usepackage{booktabs}"]
    for setting in plan.settings:
        of_setting = [level.line for level in levels if level.line["setting"] == setting.name]
        lines += _latex_table(plan, setting, of_setting)
    return "\n".join([*lines, ""])


def _latex_table(plan: Plan, setting: Setting, rows: Sequence[Row]) -> list[str]:
    """Return the lines of one setting's table."""
    scores = [name for name in ("ari", METRIC) if any(row[name] is not None for row in rows)]
    columns = [(epsilon, score) for epsilon in plan.epsilons for score in scores]
    best = {}
    for epsilon, score in columns:
        values = [row[score] for row in rows if row["target_epsilon"] == epsilon]
        best[epsilon, score] = max((v for v in values if v is not None), default=None)
    escaped = sweep_latex.escaped
    heads = [
        rf"{'ARI' if score == 'ari' else score}, $\varepsilon={epsilon:g}$"
        for epsilon, score in columns
    ]
    caption = escaped(f"{described(setting, plan.dp_unit)}; ε of one {plan.dp_unit}, δ = {DELTA:g}")
    lines = [
        r"\begin{table}", r"  \centering", rf"  \caption{{{caption}}}",
        rf"  \begin{{tabular}}{{l{'r' * len(columns)}}}", r"    \toprule",
        f"    {' & '.join(['method', *heads])}" + r" \\", r"    \midrule",
    ]  # fmt: skip
    for variant in plan.variants:
        by_level = {row["target_epsilon"]: row for row in rows if row["variant"] == variant.label}
        cells = [escaped(name_of(variant.label))]
        for epsilon, score in columns:
            row = by_level.get(epsilon)
            cells.append(_latex_cell(row, score, best[epsilon, score]))
        lines.append(f"    {' & '.join(cells)}" + r" \\")
    return [*lines, r"    \bottomrule", r"  \end{tabular}", r"\end{table}"]


def _latex_cell(row: Row | None, score: str, best: float | None) -> str:
    """Return a mean with its interval, in bold where no other is larger."""
    if row is None or row[score] is None:
        return sweep_latex.DASH
    text = f"{row[score]:.3f}"
    if row[score] == best:
        text = rf"\textbf{{{text}}}"
    low, high = row[f"{score}_low"], row[f"{score}_high"]
    return text if low is None else rf"{text} {{\scriptsize [{low:.3f}, {high:.3f}]}}"


def show(folder: Path, plan: Plan, lines: Sequence[Row]) -> None:
    """Print the means of each setting, ε and method, and how they came about.

    Args:
        folder: of the field.
        plan: of the field.
        lines: a row per run.
    """
    levels = levels_of(plan, lines)
    console = terminal.Console(markup=False)
    for setting in plan.settings:
        of_setting = [level for level in levels if level.line["setting"] == setting.name]
        rows = [
            [printable(cell.partition(" (")[0]) for cell in _cells(plan, level)[:-1]]
            for level in of_setting
        ]
        title = f"{setting.name} (settings {setting.hash(plan.dp_unit)})"
        console.print(terminal.table(HEADINGS[:-1], rows, title, numbers=True, light=True))
        for level in of_setting:
            for remark in remarks(plan, level):
                line = level.line
                console.print(
                    printable(f"{line['variant']}, ε {line['target_epsilon']:g}: {remark}")
                )
    pairs = pairs_of(plan, lines)
    for text in [*notes(plan, levels), *(reach(pairs, score) for score in ("ari", METRIC))]:
        console.print(text)
    files = f"{PAGE}, runs.csv, summary.csv, paired.csv, {LATEX}, pictures"
    console.print(f"everything is in {folder}: {files}")
