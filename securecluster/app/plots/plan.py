"""The picture of a plan: what ε buys."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from securecluster.runs.plots.figure import figure
from securecluster.runs.plots.looks import looks, name_of

LABELS = {"ari": "ARI", "accuracy": "accuracy"}
BAND = 0.12  # opacity of an interval


def frontier(rows: Sequence[dict[str, Any]], axes: Any = None) -> Any:
    """Return a figure of ARI and accuracy over ε, with a band for one new run.

    Args:
        rows: forecasts.
        axes: matplotlib axes for accuracy alone; None for a new figure.
    """
    scores = [name for name in LABELS if any(row[name] is not None for row in rows)]
    if axes is not None:
        scores, panels, picture = ["accuracy"], [axes], axes.figure
    else:
        picture, made = figure(4.6 * len(scores) + 0.4, 4.0, columns=len(scores))
        panels = [made] if len(scores) == 1 else list(made)
    labels = list(dict.fromkeys(row["protocol"] for row in rows))
    for panel, score in zip(panels, scores, strict=True):
        for label, look in looks(labels).items():
            own = [row for row in rows if row["protocol"] == label and row[score] is not None]
            own = [row for row in own if math.isfinite(row["epsilon"])]
            if not own:
                continue
            places = [row["epsilon"] for row in own]
            panel.plot(
                places, [row[score] for row in own], look.line, color=look.color,
                marker=look.marker, linewidth=look.width, label=name_of(label),
            )  # fmt: skip
            lows = [row[f"{score}_low"] for row in own]
            highs = [row[f"{score}_high"] for row in own]
            panel.fill_between(places, lows, highs, color=look.color, alpha=BAND, linewidth=0)
        panel.set_xscale("log", base=2)
        panel.set_xlabel("ε of the run")
        panel.set_ylabel(LABELS[score])
        if score == "accuracy":
            panel.set_ylim(0, 1.02)
        panel.legend(fontsize=8)
    return picture
