"""Measure relevance over the number of shared eigenvectors (Ali & Arafa 2024, Fig. 4).

python -m benchmarks.papers.oneshot.fig4 [--seeds 6] [--full] [--minutes 10]

The data are Fashion-MNIST with three tasks, and pixels are the features.

The paper: ten users, five with clothes, three with shoes, two with bags, and a minority of the
other tasks' labels; relevance of users 0 and 3 (clothes), 6 (shoes) and 9 (bag) to one another for
1 to 50 eigenvectors, where five are enough to separate tasks.

The picture shows user 0 against the others, and on its right R over all pairs within and across
tasks. A user has up to 1200 samples (`--full` all that the tasks allow), 10 % of them of other
tasks; the paper prints neither number. Images are read from SECURECLUSTER_DATA or the hub.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from typing import Any

import numpy as np
import torch

from benchmarks.grid import Grid, federation_of, with_seeds
from benchmarks.papers.oneshot.runs import by_task, matrices, parts
from benchmarks.sheet import Cell, Row, figure, numbers
from securecluster.data.scenarios import Tasks

# not in the paper
SAMPLES = {"cpu": 1200, "full": None}
VECTORS = range(1, 51)  # as many as in the paper's figure
# the users of the paper's figure, beside user 0
SHOWN = {"3": "user 3: clothes", "6": "user 6: shoes", "9": "user 9: bag"}
PRINTED = (1, 5, 10, 50)  # numbers of eigenvectors


def cells(scale: str, seeds: int) -> list[Cell]:
    """Return one federation a seed.

    Args:
        scale: "cpu" or "full".
        seeds: the number of seeds.
    """
    setting = {
        "scale": scale,
        "data": "fashion_mnist",
        "clients": 10,
        "samples": SAMPLES[scale],
        "minority": 0.1,  # the paper: “a minority”
        "paper": "five eigenvectors are enough",
    }
    return with_seeds([setting], range(seeds))


def measure(cell: Cell) -> dict[str, Any]:
    """Return R of user 0 with users 3, 6 and 9 for each p, and its extremes over all pairs.

    `apart_from` is the first p with which every pair within a task is above all pairs across tasks.

    Args:
        cell: the setting of one federation.
    """
    federation = federation_of(cell, Tasks(minority=cell["minority"]))
    # users 0 to 4 have clothes, 5 to 7 shoes, 8 and 9 bags, as SHOWN requires
    shards, truth = by_task(federation)
    features = [torch.from_numpy(shard.x).flatten(1) for shard in shards]
    r = matrices(features, VECTORS)
    within, across = parts(r, truth)
    curves = {
        "within": within.mean(1),
        "within_min": within.min(1),
        "across": across.mean(1),
        "across_max": across.max(1),
    }
    gap = curves["within_min"] - curves["across_max"]
    separating = [p for p, value in zip(VECTORS, gap, strict=True) if value > 0]
    results: dict[str, Any] = {
        "apart_from": min(separating, default=None),
        "gap_largest_at": VECTORS[int(gap.argmax())],
    }
    for p in PRINTED:
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
    band(all_pairs, _curves(rows, "within"), "C0", "within tasks, mean of pairs")
    band(all_pairs, _curves(rows, "within_min"), "C0", "least within tasks", ":")
    band(all_pairs, _curves(rows, "across"), "C1", "across tasks, mean of pairs")
    band(all_pairs, _curves(rows, "across_max"), "C1", "most across tasks", ":")
    one_user.set(title="user 0 (clothes) with")
    all_pairs.set(title="all pairs of ten users")
    for axis in (one_user, all_pairs):
        axis.set(xlabel="eigenvectors shared, p", ylabel="R", ylim=(0, 1))
        # five are enough in the paper
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
    if not measured.size:
        return
    lowest = measured.min(0)
    highest = measured.max(0)
    axis.plot(VECTORS, measured.mean(0), style, color=color, label=label)
    axis.fill_between(VECTORS, lowest, highest, color=color, alpha=0.15, linewidth=0)


GRID = Grid(
    __doc__,
    "oneshot_fig4",
    cells,
    measure,
    by=["data"],
    values=[
        "apart_from",
        "gap_largest_at",
        *(f"{pairs}_{p}" for p, pairs in product(PRINTED, ("within", "across"))),
    ],
    seeds=6,
    full="last",
    draw=draw,
)

if __name__ == "__main__":
    print(GRID.main())
