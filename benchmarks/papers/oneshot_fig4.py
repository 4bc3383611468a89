"""Relevance over the number of shared eigenvectors (Ali & Arafa 2024, Fig. 4): Fashion-MNIST, three
tasks, pixels as features.

python -m securecluster.benchmarks.papers.oneshot_fig4 [--seeds 6] [--full] [--minutes 10]

The paper: ten users, five with clothes, three with shoes, two with bags, and a minority of the
    other tasks' labels; relevance of users 0
and 3 (clothes), 6 (shoes) and 9 (bag) to one another for 1 to 50 eigenvectors, where five are
enough to tell tasks apart. The picture shows user 0 against the others, and on its right R over all
pairs within and across tasks. Up to 1200 samples a user (`--full` all that the tasks allow), 10 %
of them of other tasks: ours. Images are read from SECURECLUSTER_DATA or the hub.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from securecluster import Federation
from securecluster.benchmarks.papers.oneshot_runs import matrices, parts
from securecluster.benchmarks.papers.sheet import (
    Cell,
    Row,
    Sheet,
    figure,
    numbers,
    options,
    summarise,
)
from securecluster.data.scenarios import Tasks

SAMPLES = {"cpu": 1200, "full": None}
VECTORS = range(1, 51)
SHOWN = {"3": "user 3: clothes", "6": "user 6: shoes", "9": "user 9: bag"}
BOUNDS = ("within_min", "across_max")


def cells(scale: str, seeds: int) -> list[Cell]:
    """Return one federation a seed."""
    fixed = {
        "scale": scale,
        "data": "fashion_mnist",
        "clients": 10,
        "samples": SAMPLES[scale],
        "minority": 0.1,
    }
    return [
        {**fixed, "seed": seed, "paper": "five eigenvectors are enough"} for seed in range(seeds)
    ]


def measure(cell: Cell) -> dict[str, Any]:
    """Return R of user 0 with users 3, 6 and 9 for each p, and its extremes over all pairs.

    `apart_from` is the first p with which every pair within a task is above all pairs across tasks.
    """
    federation = Federation.simulate(
        cell["data"],
        scenario=Tasks(minority=cell["minority"]),
        clients=cell["clients"],
        samples=cell["samples"],
        seed=cell["seed"],
    )
    assert federation.truth is not None
    order = sorted(range(len(federation)), key=federation.truth.__getitem__)
    features = [torch.from_numpy(federation.shards[i].x).flatten(1) for i in order]
    r = matrices(features, VECTORS)
    within, across = parts(r, [federation.truth[i] for i in order])
    curves = {
        "within": within.mean(1),
        "within_min": within.min(1),
        "across": across.mean(1),
        "across_max": across.max(1),
    }
    gap = curves["within_min"] - curves["across_max"]
    results: dict[str, Any] = {
        "apart_from": next((p for p, value in zip(VECTORS, gap, strict=True) if value > 0), None),
        "gap_largest_at": VECTORS[int(gap.argmax())],
    }
    for p in (1, 5, 10, 50):
        for name, curve in curves.items():
            results[f"{name}_{p}"] = curve[p - 1]
    results |= curves
    for j in SHOWN:
        results[f"R0{j}"] = r[:, 0, int(j)]
    return results


def draw(rows: Sequence[Row]) -> Any:
    """Draw user 0 against three others, as in the paper, and on the right all pairs.

    Lines are means over seeds, with their range.
    """
    picture, axes = figure(10, 3.8, columns=2)
    one_user, all_pairs = axes.flat
    for n, (j, label) in enumerate(SHOWN.items()):
        band(one_user, _curves(rows, f"R0{j}"), f"C{n}", label)
    for n, name in enumerate(("within", "across")):
        label = f"{name} tasks, mean of pairs"
        band(all_pairs, _curves(rows, name), f"C{n}", label)
        extreme = ("least", "most")[n]
        band(all_pairs, _curves(rows, BOUNDS[n]), f"C{n}", f"{extreme} {name} tasks", ":")
    one_user.set(title="user 0 (clothes) with")
    all_pairs.set(title="all pairs of ten users")
    for axis in (one_user, all_pairs):
        axis.set(xlabel="eigenvectors shared, p", ylabel="R", ylim=(0, 1))
        axis.axvline(5, color="grey", linestyle="--", linewidth=0.8)
        axis.legend(fontsize=8)
    return picture


def _curves(rows: Sequence[Row], name: str) -> list[list[float]]:
    """Return one measured curve of each row, which is empty where it was not run."""
    return [numbers(row.get(name, "")) for row in rows]


def band(
    axis: Any, curves: Sequence[Sequence[float]], color: str, label: str, style: str = "-"
) -> None:
    """Draw a curve's mean over seeds, and its range.

    Args:
        axis: the panel.
        curves: the curve of each seed, which may be empty.
        color: the curve's color.
        label: the legend's text.
        style: the mean's style.
    """
    measured = np.array([curve for curve in curves if curve])
    if measured.size:
        lowest = measured.min(0)
        highest = measured.max(0)
        axis.plot(VECTORS, measured.mean(0), style, color=color, label=label)
        axis.fill_between(VECTORS, lowest, highest, color=color, alpha=0.15, linewidth=0)


def main(argv: Sequence[str] | None = None) -> Path:
    """Measure what is missing, print, draw."""
    chosen = options(__doc__, argv, seeds=6)
    sheet = Sheet("oneshot_fig4")
    requested = cells(chosen.scale, chosen.seeds)
    rows = sheet.fill(requested, measure, chosen.minutes)
    sheet.expect(cells("full", chosen.seeds))
    summarise(
        rows,
        ("data",),
        (
            "apart_from",
            "gap_largest_at",
            *(f"{name}_{p}" for p in (1, 5, 10, 50) for name in ("within", "across")),
        ),
    )
    return sheet.save(draw(rows), chosen.scale)


if __name__ == "__main__":
    print(main())
