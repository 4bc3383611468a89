"""What noise does to each protocol: ε, ARI, accuracy and bytes without noise and at two levels and
more, for clients and for examples.

python -m benchmarks.private.private_runs [--seeds 3] [--minutes 20]

20 clients of digits with four swapped labels, 20 rounds (`oneshot`: 10 clients in two tasks, T
given; `nsim`: 20 persons of Monaco, 10 rounds, 40 synthetic users, no grid search). Clip norms were
chosen by trial on these data, which no ε covers: 1, and 10 for SR-FCA's models of many rounds, 3
for Local-KMeans', 0.3 for NSIM; 1 for the gradient of an example. `--full` is the same with the
defaults' rounds. δ = 1e-5; every noise is of the same multiplier, that of Gram matrices, too:
methods are set side by side at equal noise, not at equal ε, which stands beside. IFCA has its
default ten starts; it, Local-KMeans and the random clusters are told the true number of clusters.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import product
from typing import Any

import numpy as np

from benchmarks.grid import Grid, with_seeds
from benchmarks.sheet import Cell, Row, figure, pooled
from benchmarks.table import RESULTS, SEEDED
from securecluster import Federation
from securecluster.data.scenarios import Tasks
from securecluster.figures.looks import looks, name_of
from securecluster.protocols import (
    CFL,
    FLHC,
    IFCA,
    NSIM,
    SRFCA,
    ClusteringProtocol,
    FedAvg,
    FineTune,
    LocalKMeans,
    OneShot,
    RandomClusters,
)

KINDS = (CFL, FLHC, SRFCA, OneShot, NSIM, IFCA, LocalKMeans, RandomClusters, FedAvg, FineTune)
PROTOCOLS: dict[str, type[ClusteringProtocol]] = {p.name: p for p in KINDS}
WAYS = (
    ("client", 0.0),
    ("client", 0.01),
    ("client", 0.1),
    ("client", 0.5),
    ("example", 0.5),
    ("example", 1.0),
)
# L2 norms; SR-FCA and Local-KMeans release models of many rounds, which lie farther from θ_0
CLIP = {"srfca": 10.0, "local-kmeans": 3.0, "nsim": 0.3}
OWN: dict[str, dict[str, Any]] = {
    # the number of tasks T is given, as in Ali & Arafa 2024
    "oneshot": {"tasks": 2},
    "nsim": {"rounds": 10, "local_rounds": 5, "synthetic": 40, "grid": 1},
    "srfca": {"local_rounds": 10, "rounds": 10},
    "local-kmeans": {"local_rounds": 10},
}
ROUNDS = 20
DELTA = 1e-5
VALUES = ("epsilon", "ari", "score", "clusters", "up", "down")


def cells(scale: str, seeds: int) -> list[Cell]:
    """Return protocols by unit and noise by seed.

    Args:
        scale: "full", or of `ROUNDS` rounds.
        seeds: how many.
    """
    settings = []
    for protocol, (unit, z) in product(PROTOCOLS, WAYS):
        settings.append({"protocol": protocol, "unit": unit, "noise": z})
    return [{**cell, "scale": scale} for cell in with_seeds(settings, range(seeds))]


def federation(protocol: str, seed: int) -> Federation:
    """Return the clients that a protocol is measured on.

    Args:
        protocol: a name of `PROTOCOLS`.
        seed: of the federation's draws.
    """
    if protocol == "oneshot":
        # two tasks of five users each, 10 % of labels from the other one (Ali & Arafa 2024)
        return Federation.simulate("digits", scenario=Tasks(minority=0.1), clients=10, seed=seed)
    if protocol == "nsim":
        return Federation.simulate("mobility", clients=20, seed=seed)
    return Federation.simulate("digits", clients=20, seed=seed)


def measure(cell: Cell) -> dict[str, Any]:
    """Run one protocol.

    Args:
        cell: one of `cells`.

    Returns:
        clip norm, epsilon at `DELTA` and its accountant, ari, metric, score (mean over clients),
        clusters, and bytes up and down.
    """
    name = cell["protocol"]
    params = _hyper_parameters(cell)
    protocol = PROTOCOLS[name](**params)
    fitted = protocol.fit(federation(name, cell["seed"]), SEEDED)
    price = fitted.ledger_.price(DELTA)
    assert fitted.agreement_ is not None
    return {
        "clip": params.get("clip"),
        "epsilon": price.epsilon,
        "accountant": price.accountant,
        "ari": fitted.agreement_["ari"],
        "metric": fitted.metric_,
        # accuracy in [0, 1]; NSIM's is a position error in metres, where less is better
        "score": float(np.nanmean(fitted.scores_)),
        "clusters": len(set(fitted.labels_)),
        "up": fitted.bytes_["up"],
        "down": fitted.bytes_["down"],
    }


def _hyper_parameters(cell: Cell) -> dict[str, Any]:
    """Return what a cell's run sets besides the protocol's defaults."""
    name = cell["protocol"]
    z = cell["noise"]
    params: dict[str, Any] = {}
    if cell["scale"] != "full":
        params["rounds"] = ROUNDS
    params |= OWN.get(name, {})
    if not z:
        return params
    # the clip norms of `CLIP` are of updates; gradients of examples are all clipped to 1
    params["clip"] = 1.0
    if cell["unit"] == "client":
        params["clip"] = CLIP.get(name, 1.0)
    params["noise"] = z
    params["dp_unit"] = cell["unit"]
    if name == "oneshot":
        params["gram_noise"] = z
    return params


def draw(rows: Sequence[Row]) -> Any:
    """Draw ARI (above) and accuracy (below) over the noise; clients left, examples right.

    Args:
        rows: of the sheet.
    """
    canvas, axes = figure(10, 7.5, 2, 2)
    for column, unit in enumerate(("client", "example")):
        for row, value in enumerate(("ari", "score")):
            ax = axes[row, column]
            _draw_panel(ax, rows, unit, value)
            title = ""
            if row == 0:
                title = f"ε of a run for one {unit}, at δ = {DELTA:g}"
            ax.set_title(title)
    handles, labels = axes[0, 0].get_legend_handles_labels()
    canvas.legend(handles, labels, loc="outside lower center", ncols=5, fontsize=8)
    return canvas


def _draw_panel(ax: Any, rows: Sequence[Row], unit: str, value: str) -> None:
    """Draw a line of means over the noise for each protocol.

    Args:
        ax: the panel's axes.
        rows: of the sheet.
        unit: of privacy, "client" or "example".
        value: the rows' column, "ari" or "score".
    """
    levels = [0.0]
    levels += [z for level_unit, z in WAYS if level_unit == unit and z]
    styles = looks(list(PROTOCOLS))
    for k, name in enumerate(PROTOCOLS):
        values = [_values(rows, name, unit, z, value) for z in levels]
        # NSIM's metric is metres, which the axis of accuracies cannot show
        if not all(values) or (value == "score" and name == "nsim"):
            continue
        # shifted a little, since several lines coincide
        offset = (k - 4) * 0.02
        ax.plot(
            [position + offset for position in range(len(levels))],
            [np.mean(level_values) for level_values in values],
            styles[name].line,
            color=styles[name].color,
            marker=styles[name].marker,
            label=name_of(name),
            alpha=0.8,
        )
    ticks = ["none"]
    for z in levels[1:]:
        price = _epsilon(rows, unit, z)
        ticks.append(f"z = {z:g}\nε from {price}")
    ax.set_xticks(range(len(levels)), ticks, fontsize=8)
    ax.set_ylim(-0.05, 1.05)
    if value == "ari":
        ax.set_ylabel("ARI")
    else:
        ax.set_ylabel("accuracy")
    ax.grid(alpha=0.3)


def _values(rows: Sequence[Row], name: str, unit: str, z: float, value: str) -> list[float]:
    """Return a column's numbers for one protocol at one level of noise."""
    selected = [row for row in rows if _is(row, name, unit, z)]
    return pooled(selected, value)


def _is(row: Row, name: str, unit: str, z: float) -> bool:
    """Return whether a row is of a protocol at a level of noise; without noise, of any unit."""
    same = row["protocol"] == name and float(row["noise"]) == z
    return same and (z == 0 or row["unit"] == unit)


def _epsilon(rows: Sequence[Row], unit: str, z: float) -> str:
    """Return the range of ε over protocols, as text."""
    selected = [row for row in rows if row["unit"] == unit and float(row["noise"]) == z]
    # a protocol that releases something without noise has ε = ∞
    values = [epsilon for epsilon in pooled(selected, "epsilon") if math.isfinite(epsilon)]
    if not values:
        return "?\nto ?"
    minimum = _two_digits(min(values))
    maximum = _two_digits(max(values))
    return f"{minimum}\nto {maximum}"


def _two_digits(value: float) -> str:
    """Return a number rounded to two significant digits, without exponent."""
    rounded = float(f"{value:.2g}")
    return f"{rounded:,.0f}"


GRID = Grid(
    __doc__,
    "private_runs",
    cells,
    measure,
    by=["protocol", "unit", "noise"],
    values=VALUES,
    minutes=20.0,
    folder=RESULTS,
    draw=draw,
)

if __name__ == "__main__":
    print(GRID.main())
