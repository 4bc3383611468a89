"""Measure perplexity of the next character with Shakespeare's roles as clients.

python -m benchmarks.papers.shakespeare [--seeds 3] [--full] [--minutes 25]

The methods are CFL, FL+HC and SR-FCA, one shared model, and local ones.

Vardhan et al. 2024 train a two-layer LSTM on Shakespeare (Caldas et al. 2018, LEAF) for 2400
iterations with one REFINE step and t = 2. The excerpt of the paper that was at hand prints no
accuracies, and says that SR-FCA outperforms all its baselines on real data. CFL and FL+HC were not
tried on it by their authors.

`--full` has 100 roles with all their text, 256 cells and 2400 iterations of a role of middle
length, and needs a GPU. The scale for a CPU has 20 roles with at most 100 windows of 80 characters,
96 cells and 25 rounds of one epoch.

Not in the paper: roles, batches of 10, learning rates and optimizer, the rounds before FL+HC's
clustering (a third), and λ by default. Every final model of a method has had as many rounds; SR-FCA
trains alone that long, and then as long in its REFINE. True clusters are not known. A client is
tested on the end of its role. Text is read from SECURECLUSTER_DATA or the hub.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from benchmarks.grid import Grid, federation_of
from benchmarks.sheet import Cell, Row, distinct, draw_seeds, figure, numbers, pooled, spread
from benchmarks.table import UNRECORDED
from securecluster.data import Natural
from securecluster.protocols import CFL, FLHC, SRFCA, ClusteringProtocol, FedAvg, Local

TRAINING = ("model", "optimizer", "lr", "batch_size", "epochs", "rounds")
COMMON = {"data": "shakespeare", "epochs": 1, "batch_size": 10}
SCALES: dict[str, dict[str, Any]] = {
    "cpu": {
        "clients": 20,
        "samples": 100,  # windows of 80 characters, at most
        "model": "lstm-chars",
        "optimizer": "adam",  # optimizer and rates are not in the paper
        "lr": 0.01,
        "rounds": 25,
    },
    "full": {
        "clients": 100,
        "samples": None,
        "model": "lstm-chars-256",
        "optimizer": "adam",
        "lr": 0.003,
        "rounds": 600,  # 2400 iterations of a role of middle length
    },
}
MADE: dict[str, Callable[[dict[str, Any]], ClusteringProtocol]] = {
    "global": lambda params: FedAvg(**params),
    "local": lambda params: Local(**params),
    # no newcomer needs the parameter tree
    "cfl": lambda params: CFL(**params, tree=False),
    # the round of the clustering is not in the paper
    "flhc": lambda params: FLHC(**params, pre_rounds=params["rounds"] // 3),
    # one REFINE step on real data, as in the paper
    "srfca": lambda params: SRFCA(**params, local_rounds=params["rounds"], refine=1),
}
PAPER = {"srfca": "outperforms all baselines"}
STYLES = ("-", "-", "--", ":", "-.")
FIGURES = ("perplexity", "worst", "found", "bytes")


def cells(scale: str, seeds: int) -> list[Cell]:
    """Return methods by seed.

    Args:
        scale: "cpu" or "full".
        seeds: the number of seeds.
    """
    common = {"scale": scale, **COMMON, **SCALES[scale]}
    settings: list[Cell] = []
    for seed in range(seeds):
        for method in MADE:
            paper = PAPER.get(method)
            settings.append({**common, "seed": seed, "method": method, "paper": paper})
    return settings


def measure(cell: Cell) -> dict[str, Any]:
    """Return mean and largest test perplexity over clients, number of clusters, and bytes.

    `curve` is the mean perplexity after each round.

    Args:
        cell: the method, and the setting of its run.
    """
    federation = federation_of(cell, Natural())
    params = {name: cell[name] for name in TRAINING}
    # masks change no result
    params["mask"] = "none"
    protocol = MADE[cell["method"]](params)
    fitted = protocol.fit(federation, UNRECORDED)
    labels = set(fitted.labels_.tolist())
    return {
        "perplexity": float(np.nanmean(fitted.scores_)),
        "worst": float(np.nanmax(fitted.scores_)),
        "found": len(labels),
        "bytes": fitted.bytes_["up"] + fitted.bytes_["down"],
        "curve": [line.get("perplexity") for line in fitted.history_],
    }


def draw(rows: Sequence[Row]) -> Any:
    """Draw perplexity by method, and after each round of the first seed.

    On the left a dot stands for each seed and a line for their mean.
    """
    picture, ((final, over_rounds),) = figure(9.0, 3.8, columns=2)
    methods = distinct(rows, "method")
    _final(final, rows, methods)
    for row in rows:
        curve = numbers(row.get("curve", ""))
        if row["seed"] == "0" and curve:
            x = methods.index(row["method"])
            rounds = range(1, len(curve) + 1)
            over_rounds.plot(
                rounds,
                curve,
                f"C{x}{STYLES[x]}",
                linewidth=2.4 - 0.3 * x,  # curves of equal models lie on each other
                label=row["method"],
            )
    over_rounds.set(xlabel="round", title="seed 0")
    over_rounds.legend(fontsize=7)
    return picture


def _final(axis: Any, rows: Sequence[Row], methods: Sequence[str]) -> None:
    """Draw perplexity at the end.

    Args:
        axis: the panel.
        rows: the rows.
        methods: the methods, from left to right.
    """
    statistics = spread(rows, ["method"], "perplexity")
    for (method,), (mean, *_) in statistics.items():
        x = methods.index(method)
        colour = f"C{x}"
        of_method = [row for row in rows if row["method"] == method]
        draw_seeds(axis, x, mean, pooled(of_method, "perplexity"), colour, 4)
    axis.set_xticks(range(len(methods)), methods)
    axis.set(ylabel="mean test perplexity over clients", title="at the end, all seeds")
    axis.grid(axis="y", alpha=0.25)


GRID = Grid(
    __doc__,
    "shakespeare",
    cells,
    measure,
    by=["data", "method"],
    values=FIGURES,
    minutes=25.0,
    full="first",
    draw=draw,
)

if __name__ == "__main__":
    print(GRID.main())
