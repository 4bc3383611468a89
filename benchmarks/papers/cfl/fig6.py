"""Measure the separation gap over communication rounds (Sattler et al. 2019, Fig. 6).

python -m benchmarks.papers.cfl.fig6 [--seeds 3] [--full] [--minutes 10]

The gap g is computed from updates and from full gradients.

The paper: the setting of Fig. 5 with 100 points per client on MNIST and 1500 on CIFAR-10, and g in
each of the rounds 1 to 50. With updates it is positive by about round 10 on both.

`--full` has these numbers, with cnn-briggs and cnn-cifar. The scale for a CPU has cnn-ali for both
and, on CIFAR-10, 500 points and 25 rounds. Images are read from SECURECLUSTER_DATA or the hub.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from typing import Any

from benchmarks.grid import Grid, with_seeds
from benchmarks.papers.cfl.runs import watched
from benchmarks.sheet import Cell, Row, distinct, figure, numbers

# learning rate and batch sizes are not in the paper
COMMON = {"clients": 20, "clusters": 4, "epochs": 3, "lr": 0.1}  # m, k and epochs of VI-A
SCALES: dict[str, list[dict[str, Any]]] = {
    "cpu": [
        {"data": "mnist", "model": "cnn-ali", "batch_size": 10, "rounds": 50, "points": 100},
        {"data": "cifar10", "model": "cnn-ali", "batch_size": 20, "rounds": 25, "points": 500},
    ],
    "full": [
        {"data": "mnist", "model": "cnn-briggs", "batch_size": 10, "rounds": 50, "points": 100},
        {"data": "cifar10", "model": "cnn-cifar", "batch_size": 20, "rounds": 50, "points": 1500},
    ],
}
SUMMARISED = ("positive_from", "correct_from", "last")
CURVES = {"updates": "gap", "gradients": "gap_gradients"}


def cells(scale: str, seeds: int) -> list[Cell]:
    """Return the cells of both data sets."""
    paper = "updates positive by about round 10"
    fixed = {"scale": scale, **COMMON}
    settings = [{**fixed, **setting, "paper": paper} for setting in SCALES[scale]]
    return with_seeds(settings, range(seeds))


def measure(cell: Cell) -> dict[str, Any]:
    """Return both gaps over rounds, and their milestones.

    These are for each gap the first round with g > 0, that with a correct bipartition, and g in the
    last round.

    Args:
        cell: the setting of one run.
    """
    # the figure has both gaps in every round
    history = watched(cell, since=1)
    last = history[-1]
    results: dict[str, Any] = {}
    for name, gap in CURVES.items():
        curve = [line[gap] for line in history]
        correct = [line[f"correct_{name}"] for line in history]
        positive = [value > 0 for value in curve]
        # g > 0 is sufficient for a correct bipartition (Corollary 1), not necessary: both are kept
        results[f"{name}_positive_from"] = _first_round(positive)
        results[f"{name}_correct_from"] = _first_round(correct)
        results[f"{name}_last"] = last[gap]
        results[name] = curve
    results["accuracy"] = last["accuracy"]
    return results


def _first_round(conditions: Sequence[bool]) -> int | None:
    """Return the first round, counted from one, in which a condition holds."""
    for number, condition in enumerate(conditions, start=1):
        if condition:
            return number
    return None


def draw(rows: Sequence[Row]) -> Any:
    """Draw both gaps over rounds, with a thin line for each seed."""
    labels = {"updates": "weight-updates", "gradients": "full gradients"}
    sets = distinct(rows, "data")
    columns = len(sets)
    picture, axes = figure(4.8 * columns, 3.8, columns=columns)
    for axis, data in zip(axes.flat, sets, strict=True):
        selected = [row for row in rows if row["data"] == data]
        for k, (name, label) in enumerate(labels.items()):
            _lines(axis, selected, name, f"C{k}", label)
        axis.axhline(0, color="grey", linewidth=0.8)
        # Fig. 6's caption: correct after around 10 rounds on both data sets, with weight-updates
        axis.axvline(10, color="grey", linestyle=":", label="paper: updates positive by about here")
        axis.set(title=data, xlabel="round", ylabel="separation gap g")
        axis.legend(fontsize=8)
    return picture


def _lines(axis: Any, rows: Sequence[Row], name: str, color: str, label: str) -> None:
    """Draw one gap over rounds, with a line for each seed.

    Args:
        axis: the panel.
        rows: the rows of one data set.
        name: the column of the gap.
        color: the lines' color.
        label: the legend's text.
    """
    legend: str | None = label
    for row in rows:
        curve = numbers(row.get(name, ""))
        if not curve:
            continue
        rounds = range(1, len(curve) + 1)
        axis.plot(rounds, curve, color=color, linewidth=1, alpha=0.8, label=legend)
        # one entry of the legend for all seeds
        legend = None


GRID = Grid(
    __doc__,
    "cfl_fig6",
    cells,
    measure,
    by=["data", "points"],
    values=["_".join(pair) for pair in product(CURVES, SUMMARISED)],
    full="last",
    draw=draw,
)

if __name__ == "__main__":
    print(GRID.main())
