"""Shared code of the scripts for Vardhan et al. 2024: SR-FCA and its baselines on the same clients.

Every method trains with the same network and optimizer, and every model it ends with has had T
rounds of one local epoch each, as the paper gives all methods one number of iterations: global,
finetune (of which the last few are local), local, IFCA (its best start) and CFL T in all;
Local-KMeans T alone, and its models are the means of its clusters; SR-FCA T alone and T in each
REFINE, which starts anew, so its runs are three times as long (MERGE's averages are not trained
further).

IFCA and Local-KMeans receive the number of clusters, SR-FCA and CFL do not. λ is the library's
default, in the middle of a gap between edges of the spanning tree (`joined` and `apart` are the
edges on both sides of it). Updates are not masked, which changes no result. The excerpt of the
paper that was at hand prints no accuracies, so its column has the claims.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import product
from typing import Any

import numpy as np

from benchmarks.grid import Grid, federation_of
from benchmarks.sheet import Cell, Row, distinct, draw_seeds, figure, pooled, spread
from benchmarks.table import UNRECORDED
from securecluster.clustering.metrics import mean
from securecluster.data.scenarios import scenario
from securecluster.protocols import (
    CFL,
    IFCA,
    SRFCA,
    ClusteringProtocol,
    FedAvg,
    FineTune,
    Local,
    LocalKMeans,
)

START_ROUNDS = 5  # of each start of IFCA
TRAINING = ("model", "optimizer", "lr", "batch_size", "epochs", "participation")
# beside the settings of all methods
OWN: dict[str, dict[str, Any]] = {
    "ifca": {"starts": 10},  # of which the best is taken
    "srfca": {
        "distance": "loss",  # the cross-cluster loss, as in the paper's experiments
        "trim": 0.15,  # β of the authors' code
        "size": 2,  # t
        "refine": 2,  # R, at most; 1 on real data
    },
}


def _local(cell: Cell, params: dict[str, Any]) -> Local:
    # clients that train alone do so every round
    return Local(**{**params, "participation": 1.0}, rounds=cell["rounds"])


def _ifca(cell: Cell, params: dict[str, Any]) -> IFCA:
    # T rounds of the best start, and the short ones of the others
    rounds = cell["rounds"] + (cell["starts"] - 1) * START_ROUNDS
    starts = {"starts": cell["starts"], "start_rounds": START_ROUNDS}
    return IFCA(**params, rounds=rounds, k=cell["clusters"], **starts)


def _local_kmeans(cell: Cell, params: dict[str, Any]) -> LocalKMeans:
    rounds = cell["rounds"]
    return LocalKMeans(**params, rounds=rounds, local_rounds=rounds, k=cell["clusters"])


def _srfca(cell: Cell, params: dict[str, Any]) -> SRFCA:
    rounds = cell["rounds"]
    srfca_options = {name: cell[name] for name in OWN["srfca"]}
    # T in ONE_SHOT, and T in each REFINE, which restarts from w_0 (Algorithms 1 and 3)
    return SRFCA(**params, rounds=rounds, local_rounds=rounds, **srfca_options)


MADE: dict[str, Callable[[Cell, dict[str, Any]], ClusteringProtocol]] = {
    "global": lambda cell, params: FedAvg(**params, rounds=cell["rounds"]),
    "finetune": lambda cell, params: FineTune(**params, rounds=cell["rounds"]),
    "local": _local,
    "ifca": _ifca,
    # no newcomer needs the parameter tree
    "cfl": lambda cell, params: CFL(**params, rounds=cell["rounds"], tree=False),
    "local-kmeans": _local_kmeans,
    "srfca": _srfca,
}
FIGURES = ("exact", "ari", "found", "accuracy", "bytes", "relayed", "lambda", "joined", "apart")
COLOURS = {"srfca": "C3"}  # the others are grey


def cells(
    settings: Mapping[str, Mapping[str, Any]],
    methods: Sequence[str],
    scale: str,
    seeds: int,
    paper: Mapping[str, str],
) -> list[Cell]:
    """Return methods by scenario by seed.

    Args:
        settings: by scenario, what shapes its runs.
        methods: names of `MADE`.
        scale: "cpu" or "full".
        seeds: the number of seeds.
        paper: the paper's statement, by method.
    """
    all_cells: list[Cell] = []
    for seed, (name, setting) in product(range(seeds), settings.items()):
        common = {"scale": scale, "scenario": name, **setting, "epochs": 1, "seed": seed}
        for method in methods:
            method_options = OWN.get(method, {})
            statement = paper.get(method)
            all_cells.append({**common, "method": method, **method_options, "paper": statement})
    return all_cells


def measure(cell: Cell) -> dict[str, Any]:
    """Return the results of one run.

    Args:
        cell: where true clusters are not known (scenario natural) there is no agreement, and the
            cell's clusters are only what IFCA and Local-KMeans receive.

    Returns:
        Agreement, number of clusters, mean test accuracy over clients, bytes; of SR-FCA those of
        relayed models, λ and its gap.
    """
    declared = cell["clusters"]
    if cell["scenario"] == "natural":
        declared = None
    overlap = cell["overlap"] or None
    data_scenario = scenario(cell["scenario"], declared, overlap=overlap)
    federation = federation_of(cell, data_scenario)
    params = {name: cell[name] for name in TRAINING}
    # masks change no result
    params["mask"] = "none"
    # a method's name may have its number of clusters behind it
    name, _, _ = cell["method"].partition(" ")
    protocol = MADE[name](cell, params)
    fitted = protocol.fit(federation, UNRECORDED)
    agreement = fitted.agreement_ or {}
    labels = set(fitted.labels_.tolist())
    results = {
        "exact": agreement.get("exact"),
        "ari": agreement.get("ari"),
        "found": len(labels),
        "accuracy": mean(fitted.scores_),
        "least": float(np.nanmin(fitted.scores_)),
        "bytes": fitted.bytes_["up"] + fitted.bytes_["down"],
    }
    if cell["method"] == "srfca":
        results |= graph(fitted)
    return results


def graph(fitted: ClusteringProtocol) -> dict[str, Any]:
    """Return bytes of the relayed one-shot models, λ, and the edges on both sides of it.

    These are the longest edge of the spanning tree that λ joins, and the shortest that it does not.

    Args:
        fitted: a run of SR-FCA.
    """
    lines = [line for line in fitted.history_ if "lambda" in line]
    limit = lines[0]["lambda"]
    edges = lines[0]["edges"]
    joined = [edge for edge in edges if edge <= limit]
    separate = [edge for edge in edges if not edge <= limit]
    by_message = fitted.bytes_["by_message"]
    return {
        # the loss distance needs f_j(w_i), so one-shot models go down to the other clients
        "relayed": by_message["losses"]["down"],
        "lambda": limit,
        "joined": max(joined, default=None),
        "apart": min(separate, default=None),
    }


def grid(
    description: str | None, name: str, cells_of: Callable[[str, int], Sequence[Cell]]
) -> Grid:
    """Return the grid of a script.

    Args:
        description: the script's docstring.
        name: the sheet's name.
        cells_of: the cells of a scale and a number of seeds.
    """
    return Grid(
        description,
        name,
        cells_of,
        measure,
        by=["scenario", "method"],
        values=FIGURES,
        minutes=20.0,
        full="first",
        draw=draw,
    )


def draw(rows: Sequence[Row]) -> Any:
    """Draw accuracy by method, with a panel for each scenario.

    A bar goes from the lowest to the highest seed, a dot stands for each, a line for their mean.
    """
    names = distinct(rows, "scenario")
    methods = distinct(rows, "method")
    panel = max(4.4, 0.55 * len(methods))  # inches, so that the names of many methods fit
    width = panel * len(names)
    picture, axes = figure(width, 3.6, columns=len(names))
    for axis, name in zip(axes[0], names, strict=True):
        selected = [row for row in rows if row["scenario"] == name]
        _panel(axis, name, selected)
    axes[0, 0].set_ylabel("mean test accuracy over clients")
    return picture


def _panel(axis: Any, name: str, rows: Sequence[Row]) -> None:
    """Draw the methods of one scenario.

    Args:
        axis: the panel.
        name: the scenario.
        rows: its rows.
    """
    methods = distinct(rows, "method")
    statistics = spread(rows, ["method"], "accuracy")
    for (method,), (middle, minimum, maximum, _) in statistics.items():
        x = methods.index(method)
        colour = COLOURS.get(method, "0.4")
        axis.plot(
            [x, x], [minimum, maximum], color=colour, linewidth=5, alpha=0.3, solid_capstyle="butt"
        )
        of_method = [row for row in rows if row["method"] == method]
        draw_seeds(axis, x, middle, pooled(of_method, "accuracy"), colour, 3.5)
    axis.set_xticks(range(len(methods)), methods, rotation=20, ha="right", rotation_mode="anchor")
    data = rows[0]["data"]
    clusters = rows[0]["clusters"]
    title = f"{data}, {name}"
    # a federation whose true clusters are not known has no number of them
    if clusters:
        title += f" ({clusters} clusters)"
    axis.set(title=title, xlim=(-0.6, len(methods) - 0.4))
    axis.grid(axis="y", alpha=0.25)
