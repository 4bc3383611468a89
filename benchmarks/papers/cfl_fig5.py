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
    """Every number of points."""
    return [
        {
            "scale": scale,
            **COMMON,
            **setting,
            "points": points,
            "seed": seed,
            "paper": PAPER[setting["data"]][1],
        }
        for seed in range(seeds)
        for setting in SCALES[scale]
        for points in setting["points"]
    ]


def measure(cell: Cell) -> dict[str, Any]:
    """Both gaps in the last round, whether the bipartitions are correct, and the accuracy of the
    one model.
    """
    last = watched(cell, since=cell["rounds"])[-1]
    names = {"updates": "gap", "gradients": "gap_gradients", "accuracy": "accuracy"}
    return {
        **{ours: last[theirs] for ours, theirs in names.items()},
        **{f"correct_{name}": last[f"correct_{name}"] for name in CURVES},
    }


def positive_from(rows: Sequence[Row], value: str) -> dict[str, int | None]:
    """For each data set the number of points from which on the gap is positive with every seed;
    None where it is not at the most points.
    """
    least = {
        (data, int(points)): low
        for (data, points), (_, low, *_) in spread(rows, ["data", "points"], value).items()
    }
    found: dict[str, int | None] = {}
    for data in dict.fromkeys(data for data, _ in least):
        falling = sorted((points for other, points in least if other == data), reverse=True)
        positive: list[int] = []
        for points in falling:
            if least[data, points] <= 0:
                break
            positive.append(points)
        found[data] = positive[-1] if positive else None
    return found


def draw(rows: Sequence[Row]) -> Any:
    """Means over seeds with the range between the extremes, and where the paper's gap becomes
    positive.
    """
    sets = list(dict.fromkeys(row["data"] for row in rows))
    made, axes = figure(4.8 * len(sets), 3.8, columns=len(sets))
    for place, data in zip(axes.flat, sets, strict=True):
        for k, (value, label) in enumerate(CURVES.items()):
            found = spread([row for row in rows if row["data"] == data], ["points"], value)
            points = sorted((int(p), *numbers[:3]) for (p,), numbers in found.items())
            if points:
                at, mean, least, most = zip(*points, strict=True)
                place.plot(at, mean, marker=".", color=f"C{k}", label=label)
                place.fill_between(at, least, most, color=f"C{k}", alpha=0.2)
        place.axhline(0, color="grey", linewidth=0.8)
        if data in PAPER:
            place.axvline(
                PAPER[data][0], color="grey", linestyle=":", label=f"paper: {PAPER[data][1]}"
            )
        place.set(title=data, xlabel="points per client", ylabel="separation gap g", xscale="log")
        ticks = sorted({int(row["points"]) for row in rows if row["data"] == data})
        place.set_xticks(ticks, [str(points) for points in ticks])
        place.minorticks_off()
        place.legend(fontsize=8)
    return made


def main(argv: Sequence[str] | None = None) -> Path:
    """Measure what is missing, print, draw."""
    chosen = options(__doc__, argv)
    sheet = Sheet("cfl_fig5")
    rows = sheet.fill(cells(chosen.scale, chosen.seeds), measure, chosen.minutes)
    sheet.expect(cells("full", chosen.seeds))
    summarise(
        rows, ["data", "points"], [*CURVES, *(f"correct_{name}" for name in CURVES), "accuracy"]
    )
    for value, label in CURVES.items():
        print(f"{label}: g is positive with every seed from", positive_from(rows, value))
    return sheet.save(draw(rows), chosen.scale)


if __name__ == "__main__":
    print(main())
