"""The separation gap over communication rounds (Sattler et al. 2019, Fig. 6), from updates and from
full gradients.

python -m securecluster.benchmarks.papers.cfl_fig6 [--seeds 3] [--full] [--minutes 10]

The paper: as Fig. 5, with 100 points per client on MNIST and 1500 on CIFAR-10, g in each of the
    rounds 1 to 50; with updates positive by
about round 10 on both. `--full` has these numbers, with cnn-briggs and cnn-cifar; the scale for a
CPU has cnn-ali for both and, on CIFAR-10, 500 points and 25 rounds. Images are read from
SECURECLUSTER_DATA or the hub.
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
    numbers,
    options,
    summarise,
)

COMMON = {"clients": 20, "clusters": 4, "epochs": 3, "lr": 0.1}
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
CURVES = {"updates": "gap", "gradients": "gap_gradients"}


def cells(scale: str, seeds: int) -> list[Cell]:
    """Both data sets."""
    paper = "updates positive by about round 10"
    return [
        {"scale": scale, **COMMON, **setting, "seed": seed, "paper": paper}
        for seed in range(seeds)
        for setting in SCALES[scale]
    ]


def measure(cell: Cell) -> dict[str, Any]:
    """Both gaps over rounds, and for each the first round with g > 0, that with a correct
    bipartition, and g in the last round.
    """
    history, found = watched(cell, since=1), dict[str, Any]()
    for name, gap in CURVES.items():
        found |= {
            f"{name}_positive_from": next(
                (line["round"] for line in history if line[gap] > 0), None
            ),
            f"{name}_correct_from": next(
                (line["round"] for line in history if line[f"correct_{name}"]), None
            ),
            f"{name}_last": history[-1][gap],
            name: [line[gap] for line in history],
        }
    return {**found, "accuracy": history[-1]["accuracy"]}


def draw(rows: Sequence[Row]) -> Any:
    """A thin line a seed."""
    sets = list(dict.fromkeys(row["data"] for row in rows))
    made, axes = figure(4.8 * len(sets), 3.8, columns=len(sets))
    for axis, data in zip(axes.flat, sets, strict=True):
        for k, (name, label) in enumerate(
            (("updates", "weight-updates"), ("gradients", "full gradients"))
        ):
            curves = [numbers(row.get(name, "")) for row in rows if row["data"] == data]
            for n, curve in enumerate(c for c in curves if c):
                axis.plot(
                    range(1, len(curve) + 1),
                    curve,
                    color=f"C{k}",
                    linewidth=1,
                    alpha=0.8,
                    label=None if n else label,
                )
        axis.axhline(0, color="grey", linewidth=0.8)
        axis.axvline(10, color="grey", linestyle=":", label="paper: updates positive by about here")
        axis.set(title=data, xlabel="round", ylabel="separation gap g")
        axis.legend(fontsize=8)
    return made


def main(argv: Sequence[str] | None = None) -> Path:
    """Measure what is missing, print, draw."""
    chosen = options(__doc__, argv)
    sheet = Sheet("cfl_fig6")
    rows = sheet.fill(cells(chosen.scale, chosen.seeds), measure, chosen.minutes)
    sheet.expect(cells("full", chosen.seeds))
    summarise(
        rows,
        ["data", "points"],
        [f"{name}_{what}" for name in CURVES for what in ("positive_from", "correct_from", "last")],
    )
    return sheet.save(draw(rows), chosen.scale)


if __name__ == "__main__":
    print(main())
