"""The scores of a finished run by client and by cluster, each beside that of the baseline."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from securecluster.core.number_format import NONE, printable, shown
from securecluster.models.objectives import MultiLabel, Regression, objective
from securecluster.reports import terminal
from securecluster.reports.finished_run import FinishedRun
from securecluster.results.scores import BASELINE, has_scores, means, names_of, score_rows

MOST_SHOWN = 12  # clients and clusters in a terminal
TITLE = "scores on clients' own test samples (in parentheses: of the baseline)"
NOTE = (
    "Each score stands before that of the baseline, which knows its client's training targets "
    "alone: shares of labels, of which it predicts the most frequent, or mean and median of "
    "values. Rows of clusters are means over their clients; a dash is a score that test samples "
    "of one class do not have. The observer computed all of them of clients' data: no ε covers "
    "them."
)
Rows = list[list[str]]


def show(run: FinishedRun) -> None:
    """Print the scores; nothing where nobody measured any.

    Args:
        run: the run.
    """
    # names of clients may contain what looks like markup
    console = terminal.Console(markup=False)
    headings, rows = table_of(run, MOST_SHOWN)
    if rows:
        for table in terminal.fitting(headings, rows, TITLE, console.width):
            console.print(table)


OUTPUTS = {Regression.metric: "targets", MultiLabel.metric: "labels"}


def outputs_of(metric: str) -> str:
    """Return what a run's named outputs are, in a word.

    Args:
        metric: of the run.
    """
    return OUTPUTS.get(metric, "classes")


def table_of(run: FinishedRun, most: int) -> tuple[list[str], Rows]:
    """Return headings and rows of the scores: of clients, then of clusters and of all.

    Args:
        run: the run.
        most: clients that have a row.

    Returns:
        Nothing where nobody measured any.
    """
    if not has_scores(run.kept):
        return [], []
    by_client = score_rows(run.kept, objective(run.kept.learned.config["objective"]))
    names = names_of(by_client)
    metric = run.result["metric"]
    rows = []
    for row in by_client[:most]:
        cells = [printable(row["client"]), str(row["cluster"]), str(row["samples"])]
        rows.append(cells + _cells(row, names, metric))
    groups: dict[str, list[dict[str, Any]]] = {}
    if run.result["clusters"] > 1:
        for row in sorted(by_client, key=lambda row: int(row["cluster"])):
            groups.setdefault(str(row["cluster"]), []).append(row)
    for label, group in [*list(groups.items())[:most], ("all", by_client)]:
        subject = "all clients" if label == "all" else f"cluster {label}"
        counts = [f"mean, {subject}", label, str(sum(row["samples"] for row in group))]
        rows.append(counts + _cells(means(group), names, metric))
    headings = [name.replace("_", " ") for name in ("client", "cluster", "samples", *names)]
    return headings, rows


def _cells(row: Mapping[str, Any], names: Sequence[str], metric: str) -> list[str]:
    """Return each score as text, with that of the baseline in parentheses.

    Args:
        row: values by name.
        names: of the scores.
        metric: of the run, which has its own number of digits.
    """
    cells = []
    for name in names:
        style = metric if name == metric else ""
        score, baseline = (_text(row[column], style) for column in (name, f"{name}_{BASELINE}"))
        cells.append(f"{score} ({baseline})")
    return cells


def _text(value: float | None, metric: str) -> str:
    """Return a score as text, a dash for none."""
    if value is None or math.isnan(value):
        return NONE
    return shown(value, metric or "accuracy")
