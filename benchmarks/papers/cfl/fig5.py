"""Measure the separation gap over the number of points per client (Sattler et al. 2019, Fig. 5).

python -m benchmarks.papers.cfl.fig5 [--seeds 3] [--full] [--minutes 10]

The gap g is computed from updates and from full gradients.

The paper: label swap, 20 clients in 4 clusters, a convolutional network, 3 local epochs, and g in
round 50. MNIST has 10 to 200 points a client, and g from updates is positive from 20 on; CIFAR-10
has 100 to 2400, and g is positive from about 500 on.

`--full` has these numbers of points, with cnn-briggs and cnn-cifar. The scale for a CPU has cnn-ali
for both, fewer points and, on CIFAR-10, 20 rounds. Images are read from SECURECLUSTER_DATA or the
hub.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from benchmarks.grid import Grid, with_seeds
from benchmarks.papers.cfl.runs import watched
from benchmarks.sheet import Cell, Row, distinct, figure, spread

# learning rate and batch sizes are not in the paper
COMMON = {"clients": 20, "clusters": 4, "epochs": 3, "lr": 0.1}  # m, k and epochs of VI-A
SCALES: dict[str, list[dict[str, Any]]] = {
    "cpu": [
        {
            "data": "mnist",
            "model": "cnn-ali",
            "batch_size": 10,
            "rounds": 50,
            "points": (10, 20, 50, 100),
        },
        {
            "data": "cifar10",
            "model": "cnn-ali",
            "batch_size": 20,
            "rounds": 20,
            "points": (100, 250, 500),
        },
    ],
    "full": [
        {
            "data": "mnist",
            "model": "cnn-briggs",
            "batch_size": 10,
            "rounds": 50,
            "points": (10, 20, 30, 50, 100, 150, 200),  # VI-A prints 10 and 200
        },
        {
            "data": "cifar10",
            "model": "cnn-cifar",
            "batch_size": 20,
            "rounds": 50,
            "points": (100, 200, 500, 1000, 1500, 2400),  # VI-A prints 100 and 2400
        },
    ],
}
# points from which g > 0 (VI-A), for MNIST with updates (caption of Fig. 5), and the claim
PAPER = {
    "mnist": (20, "positive from 20 points"),
    "cifar10": (500, "positive from about 500 points"),
}
CURVES = {"updates": "weight-updates", "gradients": "full gradients"}


def cells(scale: str, seeds: int) -> list[Cell]:
    """Return the cells of every number of points."""
    settings: list[Cell] = []
    for setting in SCALES[scale]:
        _, paper = PAPER[setting["data"]]
        fixed = {"scale": scale, **COMMON, **setting, "paper": paper}
        settings += [{**fixed, "points": points} for points in setting["points"]]
    return with_seeds(settings, range(seeds))


def measure(cell: Cell) -> dict[str, Any]:
    """Return both gaps in the last round, and the accuracy of the one model.

    Beside each gap is whether its bipartition is correct.

    Args:
        cell: the setting of one run.
    """
    # the figure needs the gap of full gradients in the last round alone
    history = watched(cell, since=cell["rounds"])
    last = history[-1]
    results = {
        "updates": last["gap"],
        "gradients": last["gap_gradients"],
        "accuracy": last["accuracy"],
    }
    for name in CURVES:
        results[f"correct_{name}"] = last[f"correct_{name}"]
    return results


def positive_from(rows: Sequence[Row], value: str) -> dict[str, int | None]:
    """Return the number of points from which on the gap is positive with every seed.

    Args:
        rows: the rows.
        value: the column of the gap.

    Returns:
        A number for each data set; None where the gap is not positive at the most points.
    """
    minima: dict[str, dict[int, float]] = {}
    statistics = spread(rows, ["data", "points"], value)
    for (data, points), (_, minimum, *_) in statistics.items():
        by_points = minima.setdefault(data, {})
        by_points[int(points)] = minimum
    first: dict[str, int | None] = {}
    for data, by_points in minima.items():
        first[data] = None
        for number in sorted(by_points, reverse=True):
            if by_points[number] <= 0:
                break
            first[data] = number
    return first


def draw(rows: Sequence[Row]) -> Any:
    """Draw means over seeds with their range, and where the paper's gap becomes positive."""
    sets = distinct(rows, "data")
    columns = len(sets)
    picture, axes = figure(4.8 * columns, 3.8, columns=columns)
    for axis, data in zip(axes.flat, sets, strict=True):
        selected = [row for row in rows if row["data"] == data]
        for k, (value, label) in enumerate(CURVES.items()):
            _band(axis, selected, value, f"C{k}", label)
        axis.axhline(0, color="grey", linewidth=0.8)
        if data in PAPER:
            limit, text = PAPER[data]
            axis.axvline(limit, color="grey", linestyle=":", label=f"paper: {text}")
        axis.set(title=data, xlabel="points per client", ylabel="separation gap g", xscale="log")
        ticks = sorted({int(row["points"]) for row in selected})
        axis.set_xticks(ticks, [str(tick) for tick in ticks])
        axis.minorticks_off()
        axis.legend(fontsize=8)
    return picture


def _band(axis: Any, rows: Sequence[Row], value: str, color: str, label: str) -> None:
    """Draw a gap's mean and range over the number of points.

    Args:
        axis: the panel.
        rows: the rows of one data set.
        value: the column of the gap.
        color: the curve's color.
        label: the legend's text.
    """
    points = []
    statistics = spread(rows, ["points"], value)
    for (count,), (mean, minimum, maximum, _) in statistics.items():
        points.append((int(count), mean, minimum, maximum))
    if not points:
        return
    points.sort()
    counts, means, minima, maxima = zip(*points, strict=True)
    axis.plot(counts, means, marker=".", color=color, label=label)
    axis.fill_between(counts, minima, maxima, color=color, alpha=0.2)


def report(rows: Sequence[Row]) -> None:
    """Print the numbers of points from which g is positive.

    Args:
        rows: of the sheet.
    """
    for value, label in CURVES.items():
        print(f"{label}: g is positive with every seed from", positive_from(rows, value))


GRID = Grid(
    __doc__,
    "cfl_fig5",
    cells,
    measure,
    by=["data", "points"],
    values=[*CURVES, *(f"correct_{name}" for name in CURVES), "accuracy"],
    full="last",
    report=report,
    draw=draw,
)

if __name__ == "__main__":
    print(GRID.main())
