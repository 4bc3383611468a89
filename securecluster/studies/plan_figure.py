"""The picture of a plan: what ε buys."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from securecluster.figures.figure import in_column, titled
from securecluster.figures.looks import Look, looks, name_of
from securecluster.studies.sweep_figures import (
    APART,
    axis_label,
    panels_of,
    shifts_of,
    units,
    with_legend,
)
from securecluster.studies.sweep_tables import WIDE

LABELS = {"ari": "ARI", "accuracy": "accuracy"}
LOWEST = -0.15  # of both axes; an ARI at chance may be a little below 0
BANDS = "bands: from the least simulation to the most; hollow: they could not tell"
BAND = 0.12  # opacity of a band
Row = dict[str, Any]


def frontier(rows: Sequence[Row], title: str = "", axes: Any = None) -> Any:
    """Return a figure of ARI and accuracy over ε, with bands from the least simulation to the most.

    ε of a client and ε of an example have panels of their own.

    Args:
        rows: forecasts.
        title: of a new figure.
        axes: matplotlib axes for accuracy alone, and for ε of a single unit; None for a new figure.
    """
    priced = [row for row in rows if math.isfinite(row["epsilon"])]
    groups = [[row for row in priced if row["dp_unit"] == unit] for unit in units(priced)]
    groups = groups or [[]]
    scores = [name for name in LABELS if any(row[name] is not None for row in rows)]
    styles = looks(list(dict.fromkeys(row["protocol"] for row in rows)))
    if axes is not None:
        _draw(axes, groups[0], "accuracy", styles)
        axes.legend(fontsize=8)
        return axes.figure
    with in_column():
        picture, panels = panels_of(len(groups), len(scores))
        for group, line in zip(groups, panels, strict=True):
            for panel, score in zip(line, scores, strict=True):
                _draw(panel, group, score, styles)
        titled(picture, f"{title}\n{BANDS}".strip())
        return with_legend(picture, [panel for line in panels for panel in line])


def _draw(panel: Any, rows: Sequence[Row], score: str, styles: dict[str, Look]) -> None:
    """Draw a score of each protocol over ε.

    Args:
        panel: matplotlib axes.
        rows: forecasts with noise, of one unit.
        score: "ari" or "accuracy".
        styles: how each protocol is drawn.
    """
    drawn = [row for row in rows if row[score] is not None]
    if not drawn:
        # such as ARI of baselines alone
        panel.set_axis_off()
        return
    shifts = shifts_of([{**row, "variant": row["protocol"]} for row in drawn], "epsilon", score)
    for label, look in styles.items():
        variant_rows = [row for row in drawn if row["protocol"] == label]
        if not variant_rows:
            continue
        places = [row["epsilon"] * APART ** shifts[label] for row in variant_rows]
        means = [row[score] for row in variant_rows]
        panel.plot(
            places, means, linestyle=look.line, color=look.color, marker=look.marker,
            linewidth=look.width, label=name_of(label),
        )  # fmt: skip
        lows = [row[f"{score}_least"] for row in variant_rows]
        highs = [row[f"{score}_most"] for row in variant_rows]
        panel.fill_between(places, lows, highs, color=look.color, alpha=BAND, linewidth=0)
        # the report says "could not tell" of these
        unsure = [k for k in range(len(lows)) if highs[k] - lows[k] > WIDE]
        if unsure:
            panel.plot(
                [places[k] for k in unsure], [means[k] for k in unsure], look.marker,
                color=look.color, markerfacecolor="white", zorder=3,
            )  # fmt: skip
    # the levels themselves, without powers of two
    levels = sorted({row["epsilon"] for row in drawn})
    panel.set_xscale("log", base=2)
    panel.set_xticks(levels, [f"{level:g}" for level in levels])
    panel.set_xlabel(axis_label(drawn, "epsilon"))
    panel.set_ylabel(LABELS[score])
    # the same range beside each other: scores are compared
    panel.set_ylim(LOWEST, 1.02)
