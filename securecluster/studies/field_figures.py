"""Figures of a field, one a setting: ARI and accuracy of each method, sized for a paper's column.

A row is a method, and each ε has a mark of its own form and grey, so that the figure needs no
colour. Methods of the user's own stand on top in bold.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from securecluster.commands.failures import Row
from securecluster.figures.figure import figure
from securecluster.figures.looks import name_of
from securecluster.studies import sweep_figures
from securecluster.studies.field_plan import METRIC, Plan

WIDTH = 3.4  # inches of a column
LINE = 0.24  # inches of a method
MARKS = "osD^vP"
LIGHTEST = 0.62  # grey of the smallest ε; that of the largest is black
SPREAD = 0.5  # of a method's row, over which its ε are set apart
SMALL = 6.5  # points


def draw(folder: Path, plan: Plan, lines: Sequence[Row]) -> list[bytes]:
    """Write a figure for each setting as PNG, PDF and SVG, and return the PNG files.

    That of a setting without scores is empty.

    Args:
        folder: of the field.
        plan: of the field.
        lines: means of each setting, ε and method.
    """
    pictures = []
    for number, setting in enumerate(plan.settings, 1):
        of_setting = [line for line in lines if line["setting"] == setting.name]
        scores = [s for s in ("ari", METRIC) if any(line[s] is not None for line in of_setting)]
        if not scores:
            pictures.append(b"")
            continue
        labels = [variant.label for variant in plan.variants]
        height = LINE * len(labels) + 0.75
        picture, axes = figure(WIDTH, height, columns=len(scores), share=False)
        for panel, score in zip([axes] if len(scores) == 1 else axes, scores, strict=True):
            _draw_panel(panel, plan, of_setting, score)
        panels = [axes] if len(scores) == 1 else list(axes)
        _name_methods(panels, labels, len(plan.own))
        handles, texts = panels[0].get_legend_handles_labels()
        picture.legend(
            handles, texts, loc="outside lower center", ncols=len(texts), fontsize=SMALL,
            frameon=False, handletextpad=0.2,
        )  # fmt: skip
        paths = sweep_figures.save(folder, f"field-{number}", picture)
        pictures.append(paths[0].read_bytes())
    return pictures


def _draw_panel(panel: Any, plan: Plan, lines: Sequence[Row], score: str) -> None:
    """Draw the means of one score with their intervals.

    Args:
        panel: matplotlib axes.
        plan: of the field.
        lines: of the setting.
        score: "ari" or the metric.
    """
    labels = [variant.label for variant in plan.variants]
    last = max(1, len(plan.epsilons) - 1)
    for number, epsilon in enumerate(plan.epsilons):
        grey = str(LIGHTEST * (1 - number / last)) if len(plan.epsilons) > 1 else "0"
        shift = SPREAD * (number / last - 0.5) if len(plan.epsilons) > 1 else 0.0
        look = {"color": grey, "marker": MARKS[number % len(MARKS)]}
        panel.plot([], [], linestyle="none", markersize=3.5, label=f"ε = {epsilon:g}", **look)
        for line in lines:
            if line["target_epsilon"] != epsilon or line[score] is None:
                continue
            place = labels.index(line["variant"]) + shift
            if line[f"{score}_low"] is not None:
                ends = [line[f"{score}_low"], line[f"{score}_high"]]
                panel.plot(ends, [place, place], color=grey, linewidth=0.9)
            panel.plot([line[score]], [place], markersize=3.5, **look)
    panel.set_xlabel("ARI" if score == "ari" else score, fontsize=SMALL + 0.5)
    panel.set_xlim(-0.2 if score == "ari" else 0, 1.04)
    panel.tick_params(labelsize=SMALL, length=2)
    panel.grid(axis="x", alpha=0.3, linewidth=0.5)


def _name_methods(panels: Sequence[Any], labels: Sequence[str], own: int) -> None:
    """Name the rows at the first panel, and separate them.

    Args:
        panels: matplotlib axes.
        labels: of the methods.
        own: number of the user's methods, which come first.
    """
    for position, panel in enumerate(panels):
        panel.set_ylim(len(labels) - 0.5, -0.5)
        names = [name_of(label) for label in labels] if not position else [""] * len(labels)
        panel.set_yticks(range(len(labels)), names)
        panel.tick_params(axis="y", length=0)
        for row in range(1, len(labels)):
            panel.axhline(row - 0.5, color="0.9", linewidth=0.5, zorder=0)
        if own:
            panel.axhline(own - 0.5, color="0.3", linewidth=0.7, zorder=0)
    for text in panels[0].get_yticklabels()[:own]:
        text.set_fontweight("bold")
