"""What the scripts for SR-FCA's evidence (Vardhan et al. 2024) share: SR-FCA and its baselines on
the same clients and seeds.

Every method trains with the same network and optimizer, and every model it ends with has had T
rounds of one local epoch each, as the paper gives all methods one number of iterations: global,
finetune (of which the last few are local), local, IFCA (its best start) and CFL T in all;
Local-KMeans T alone, and its models are the means of its clusters; SR-FCA T alone and T in each
REFINE, which starts anew, so its runs are three times as long (MERGE's averages are not trained
further). IFCA and Local-KMeans are told the number of clusters, SR-FCA and CFL are not: λ is our
default, in the middle of a gap between edges of the spanning tree (`joined` and `apart` are the
edges on both sides of it). Updates are not masked, which changes no result. The part of the paper
that was at hand prints no accuracies, so its column has the claims.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from securecluster import Federation
from securecluster.benchmarks.papers.sheet import (
    Cell,
    Row,
    Sheet,
    figure,
    numbers,
    spread,
    summarise,
)
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
    Settings,
)

TRAINING = ("model", "optimizer", "lr", "batch_size", "epochs", "participation")
OWN: dict[str, dict[str, Any]] = {  # beside what all have
    "ifca": {"starts": 10},
    "srfca": {
        "distance": "loss",
        "trim": 0.15,
        "size": 2,
        "refine": 2,
    },  # the trimming is the authors' code's
}
MADE: dict[str, Callable[[Cell, dict[str, Any]], ClusteringProtocol]] = {
    "global": lambda cell, given: FedAvg(**given, rounds=cell["rounds"]),
    "finetune": lambda cell, given: FineTune(**given, rounds=cell["rounds"]),
    "local": lambda cell, given: Local(**{**given, "participation": 1.0}, rounds=cell["rounds"]),
    "ifca": lambda cell, given: IFCA(
        **given, rounds=cell["rounds"], k=cell["clusters"], starts=cell["starts"]
    ),
    "cfl": lambda cell, given: CFL(**given, rounds=cell["rounds"], tree=False),
    "local-kmeans": lambda cell, given: LocalKMeans(
        **given, rounds=cell["rounds"], local_rounds=cell["rounds"], k=cell["clusters"]
    ),
    "srfca": lambda cell, given: SRFCA(
        **given,
        rounds=cell["rounds"],
        local_rounds=cell["rounds"],
        **{n: cell[n] for n in OWN["srfca"]},
    ),
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
    """Methods by scenario by seed; `settings` holds what shapes a scenario's runs, by its name."""
    found: list[Cell] = []
    for seed in range(seeds):
        for name, setting in settings.items():
            common = {"scale": scale, "scenario": name, **setting, "epochs": 1, "seed": seed}
            found += [
                {**common, "method": m, **OWN.get(m, {}), "paper": paper.get(m)} for m in methods
            ]
    return found


def measure(cell: Cell) -> dict[str, Any]:
    """One run: agreement, clusters found, mean test accuracy over clients, bytes; of SR-FCA those
    of relayed models, λ and its gap.

    Of clients whose true clusters are not known (scenario natural) there is no agreement, and the
    cell's clusters are only what IFCA and Local-KMeans are told.
    """
    declared = None if cell["scenario"] == "natural" else cell["clusters"]
    kind = scenario(cell["scenario"], declared, overlap=cell["overlap"] or None)
    federation = Federation.simulate(
        cell["data"],
        scenario=kind,
        clients=cell["clients"],
        samples=cell["samples"],
        seed=cell["seed"],
    )
    given = {name: cell[name] for name in TRAINING} | {"mask": "none"}
    made = MADE[cell["method"].partition(" ")[0]]
    fitted = made(cell, given).fit(federation, Settings(transcript="none"))
    agreement = fitted.agreement_ or {}
    found = {
        "exact": agreement.get("exact"),
        "ari": agreement.get("ari"),
        "found": len(set(fitted.labels_.tolist())),
        "accuracy": mean(fitted.scores_),
        "least": float(np.nanmin(fitted.scores_)),
        "bytes": fitted.bytes_["up"] + fitted.bytes_["down"],
    }
    return found | (graph(fitted) if cell["method"] == "srfca" else {})


def graph(fitted: ClusteringProtocol) -> dict[str, Any]:
    """Bytes of the relayed one-shot models, λ, the longest edge of the spanning tree that it joins
    and the shortest that it does not.
    """
    line = next(line for line in fitted.history_ if "lambda" in line)
    joined, apart = (
        [edge for edge in line["edges"] if (edge <= line["lambda"]) == near]
        for near in (True, False)
    )
    return {
        "relayed": fitted.bytes_["by_message"]["losses"]["down"],
        "lambda": line["lambda"],
        "joined": max(joined, default=None),
        "apart": min(apart, default=None),
    }


def table(name: str, of: Callable[[str, int], Sequence[Cell]], options: Any) -> Sheet:
    """Fill and report a sheet at the scale that was asked for, with its picture; the paper's own
    scale is listed in it either way.
    """
    sheet = Sheet(name)
    sheet.expect(of("full", options.seeds))
    rows = sheet.fill(of(options.scale, options.seeds), measure, options.minutes)
    summarise(rows, ["scenario", "method"], FIGURES)
    print(sheet.save(draw(rows), options.scale))
    return sheet


def draw(rows: Sequence[Row]) -> Any:
    """Accuracy by method: a bar from the lowest to the highest seed, a dot for each, their mean as
    a line; a panel a scenario.
    """
    names = list(dict.fromkeys(row["scenario"] for row in rows))
    methods_shown = len({row["method"] for row in rows})
    panel = max(4.4, 0.55 * methods_shown)  # inches, so that the names of many methods fit
    made, axes = figure(panel * len(names), 3.6, columns=len(names))
    for place, name in zip(axes[0], names, strict=True):
        own = [row for row in rows if row["scenario"] == name]
        methods = list(dict.fromkeys(row["method"] for row in own))
        for (method,), (middle, least, most, _) in spread(own, ["method"], "accuracy").items():
            x, colour = methods.index(method), COLOURS.get(method, "0.4")
            place.plot(
                [x, x], [least, most], color=colour, linewidth=5, alpha=0.3, solid_capstyle="butt"
            )
            place.plot([x - 0.3, x + 0.3], [middle, middle], color=colour, linewidth=1.6)
            points = [
                value
                for row in own
                if row["method"] == method
                for value in numbers(row.get("accuracy", ""))
            ]
            place.plot(
                [x] * len(points),
                points,
                color=colour,
                linestyle="none",
                marker="o",
                markersize=3.5,
            )
        place.set_xticks(
            range(len(methods)), methods, rotation=20, ha="right", rotation_mode="anchor"
        )
        truth = f" ({own[0]['clusters']} clusters)" if own[0]["clusters"] else ""
        title = f"{own[0]['data']}, {name}{truth}"
        place.set(title=title, xlim=(-0.6, len(methods) - 0.4))
        place.grid(axis="y", alpha=0.25)
    axes[0, 0].set_ylabel("mean test accuracy over clients")
    return made
