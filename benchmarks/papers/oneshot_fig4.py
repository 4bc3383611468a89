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
    """One federation a seed."""
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
    """R of user 0 with users 3, 6 and 9 for each p; over all pairs least within and most across;
    the first p that tells all apart.
    """
    scenario = Tasks(minority=cell["minority"])
    federation = Federation.simulate(
        cell["data"],
        scenario=scenario,
        clients=cell["clients"],
        samples=cell["samples"],
        seed=cell["seed"],
    )
    assert federation.truth is not None
    order = sorted(range(len(federation)), key=federation.truth.__getitem__)
    r = matrices([torch.from_numpy(federation.shards[i].x).flatten(1) for i in order], VECTORS)
    within, across = parts(r, [federation.truth[i] for i in order])
    curves = {
        "within": within.mean(1),
        "within_min": within.min(1),
        "across": across.mean(1),
        "across_max": across.max(1),
    }
    gap = curves["within_min"] - curves["across_max"]
    at = {f"{name}_{p}": curve[p - 1] for p in (1, 5, 10, 50) for name, curve in curves.items()}
    first = next((p for p, apart in zip(VECTORS, gap, strict=True) if apart > 0), None)
    shown = {f"R0{j}": r[:, 0, int(j)] for j in SHOWN}
    return {
        "apart_from": first,
        "gap_largest_at": VECTORS[int(gap.argmax())],
        **at,
        **curves,
        **shown,
    }


def draw(rows: Sequence[Row]) -> Any:
    """On the left as in the paper, on the right all pairs; means over seeds, with the least and the
    most of them.
    """
    made, axes = figure(10, 3.8, columns=2)
    left, right = axes.flat
    for n, (j, label) in enumerate(SHOWN.items()):
        band(left, [numbers(row.get(f"R0{j}", "")) for row in rows], f"C{n}", label)
    for n, name in enumerate(("within", "across")):
        band(
            right,
            [numbers(row.get(name, "")) for row in rows],
            f"C{n}",
            f"{name} tasks, mean of pairs",
        )
        bound = [numbers(row.get(BOUNDS[n], "")) for row in rows]
        band(right, bound, f"C{n}", f"{('least', 'most')[n]} {name} tasks", ":")
    left.set(
        title="user 0 (clothes) with", xlabel="eigenvectors shared, p", ylabel="R", ylim=(0, 1)
    )
    right.set(
        title="all pairs of ten users", xlabel="eigenvectors shared, p", ylabel="R", ylim=(0, 1)
    )
    for place in (left, right):
        place.axvline(5, color="grey", linestyle="--", linewidth=0.8)
        place.legend(fontsize=8)
    return made


def band(
    place: Any, found: Sequence[Sequence[float]], color: str, label: str, style: str = "-"
) -> None:
    """A curve's mean over seeds, and its range."""
    known = np.array([curve for curve in found if curve])
    if known.size:
        place.plot(VECTORS, known.mean(0), style, color=color, label=label)
        place.fill_between(
            VECTORS, known.min(0), known.max(0), color=color, alpha=0.15, linewidth=0
        )


def main(argv: Sequence[str] | None = None) -> Path:
    """Measure what is missing, print, draw."""
    chosen = options(__doc__, argv, seeds=6)
    sheet = Sheet("oneshot_fig4")
    rows = sheet.fill(cells(chosen.scale, chosen.seeds), measure, chosen.minutes)
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
