"""The separation gap over the number of points per client (Sattler et al. 2019, Fig. 5), from
updates and from full gradients.

python -m securecluster.benchmarks.papers.cfl_fig5 [--seeds 3] [--full] [--minutes 10]

The paper: label swap, 20 clients, 4 clusters, a convolutional network, 3 local epochs, g in round
    50; 10 to 200 points on MNIST, positive
from 20 with updates; 100 to 2400 on CIFAR-10, positive from about 500. `--full` has these numbers
of points, with cnn-briggs and cnn-cifar; the scale for a CPU has cnn-ali for both, fewer points
and, on CIFAR-10, 20 rounds. Images are read from SECURECLUSTER_DATA or the hub.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from securecluster.benchmarks.papers.cfl_runs import watched
from securecluster.benchmarks.papers.sheet import (
    Cell,
    Row,
    Sheet,
    figure,
    options,
    spread,
    summarise,
)

COMMON = {"clients": 20, "clusters": 4, "epochs": 3, "lr": 0.1}
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
            "points": (10, 20, 30, 50, 100, 150, 200),
        },
        {
            "data": "cifar10",
            "model": "cnn-cifar",
            "batch_size": 20,
            "rounds": 50,
            "points": (100, 200, 500, 1000, 1500, 2400),
        },
    ],
}
PAPER = {
    "mnist": (20, "positive from 20 points"),
    "cifar10": (500, "positive from about 500 points"),
}
CURVES = {"updates": "weight-updates", "gradients": "full gradients"}


def cells(scale: str, seeds: int) -> list[Cell]:
    """Return the cells of every number of points."""
    settings: list[Cell] = []
    for seed in range(seeds):
        for setting in SCALES[scale]:
            _, paper = PAPER[setting["data"]]
            fixed = {"scale": scale, **COMMON, **setting}
            for points in setting["points"]:
                settings.append({**fixed, "points": points, "seed": seed, "paper": paper})
    return settings


def measure(cell: Cell) -> dict[str, Any]:
    """Return both gaps in the last round, and the accuracy of the one model.

    Beside each gap is whether its bipartition is correct.
    """
    last = watched(cell, since=cell["rounds"])[-1]
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
    for (data, points), (_, minimum, *_) in spread(rows, ["data", "points"], value).items():
        minima.setdefault(data, {})[int(points)] = minimum
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
    sets = list(dict.fromkeys(row["data"] for row in rows))
    picture, axes = figure(4.8 * len(sets), 3.8, columns=len(sets))
    for axis, data in zip(axes.flat, sets, strict=True):
        selected = [row for row in rows if row["data"] == data]
        for k, (value, label) in enumerate(CURVES.items()):
            points = []
            for (count,), statistics in spread(selected, ["points"], value).items():
                points.append((int(count), *statistics[:3]))
            if points:
                x, mean, minimum, maximum = zip(*sorted(points), strict=True)
                axis.plot(x, mean, marker=".", color=f"C{k}", label=label)
                axis.fill_between(x, minimum, maximum, color=f"C{k}", alpha=0.2)
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


def main(argv: Sequence[str] | None = None) -> Path:
    """Measure what is missing, print, draw."""
    chosen = options(__doc__, argv)
    sheet = Sheet("cfl_fig5")
    requested = cells(chosen.scale, chosen.seeds)
    rows = sheet.fill(requested, measure, chosen.minutes)
    sheet.expect(cells("full", chosen.seeds))
    summarise(
        rows, ["data", "points"], [*CURVES, *(f"correct_{name}" for name in CURVES), "accuracy"]
    )
    for value, label in CURVES.items():
        print(f"{label}: g is positive with every seed from", positive_from(rows, value))
    return sheet.save(draw(rows), chosen.scale)


if __name__ == "__main__":
    print(main())
