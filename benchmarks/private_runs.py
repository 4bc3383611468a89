"""What noise does to each protocol: ε, ARI, accuracy and bytes without noise and at two levels and
more, for clients and for examples.

python -m securecluster.benchmarks.private_runs [--seeds 3] [--minutes 20]

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
from pathlib import Path
from typing import Any

import numpy as np

from securecluster import Federation
from securecluster.benchmarks.papers.sheet import (
    Cell,
    Row,
    Sheet,
    figure,
    numbers,
    options,
    summarise,
)
from securecluster.benchmarks.table import RESULTS
from securecluster.data.scenarios import Tasks
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
CLIP = {"srfca": 10.0, "local-kmeans": 3.0, "nsim": 0.3}
OWN: dict[str, dict[str, Any]] = {
    "oneshot": {"tasks": 2},
    "nsim": {"rounds": 10, "local_rounds": 5, "synthetic": 40, "grid": 1},
    "srfca": {"local_rounds": 10, "rounds": 10},
    "local-kmeans": {"local_rounds": 10},
}
ROUNDS, DELTA = 20, 1e-5
VALUES = ("epsilon", "ari", "score", "clusters", "up", "down")


def cells(scale: str, seeds: int) -> list[Cell]:
    """Protocol by unit and noise by seed."""
    ways = [(p, unit, z) for p in PROTOCOLS for unit, z in WAYS]
    return [
        {"protocol": p, "unit": unit, "noise": z, "seed": seed, "scale": scale}
        for seed in range(seeds)
        for p, unit, z in ways
    ]


def federation(protocol: str, seed: int) -> Federation:
    """The clients that a protocol is measured on."""
    if protocol == "oneshot":
        return Federation.simulate("digits", scenario=Tasks(minority=0.1), clients=10, seed=seed)
    return Federation.simulate(
        "mobility" if protocol == "nsim" else "digits", clients=20, seed=seed
    )


def measure(cell: Cell) -> dict[str, Any]:
    """One whole run."""
    name, unit, z = cell["protocol"], cell["unit"], cell["noise"]
    rounds = {} if cell["scale"] == "full" else {"rounds": ROUNDS}
    own = {**rounds, **OWN.get(name, {})}
    if z:
        own |= {
            "clip": CLIP.get(name, 1.0) if unit == "client" else 1.0,
            "noise": z,
            "dp_unit": unit,
        }
        own |= {"gram_noise": z} if name == "oneshot" else {}
    fitted = PROTOCOLS[name](**own).fit(federation(name, cell["seed"]))
    price = fitted.ledger_.price(DELTA)
    assert fitted.agreement_ is not None
    return {
        "clip": own.get("clip"),
        "epsilon": price.epsilon,
        "accountant": price.accountant,
        "ari": fitted.agreement_["ari"],
        "metric": fitted.metric_,
        "score": float(np.nanmean(fitted.scores_)),
        "clusters": len(set(fitted.labels_)),
        **{way: fitted.bytes_[way] for way in ("up", "down")},
    }


def draw(sheet: Sheet, rows: Sequence[Row], scale: str) -> Path:
    """ARI (above) and accuracy (below) over the noise, for clients (left) and examples (right)."""
    made, axes = figure(10, 7.5, 2, 2)
    for column, unit in enumerate(("client", "example")):
        levels = [0.0, *(z for own, z in WAYS if own == unit and z)]
        for row, value in enumerate(("ari", "score")):
            ax = axes[row, column]
            for k, name in enumerate(PROTOCOLS):
                at = [
                    [x for r in rows if _is(r, name, unit, z) for x in numbers(r.get(value, ""))]
                    for z in levels
                ]
                if all(at) and (value == "ari" or name != "nsim"):  # whose metric is metres
                    beside = [n + (k - 4) * 0.02 for n in range(len(levels))]  # lines that coincide
                    ax.plot(
                        beside,
                        [np.mean(v) for v in at],
                        color=f"C{k}",
                        marker="osv^D*Phx+"[k],
                        label=name,
                        alpha=0.8,
                    )
            ax.set_xticks(
                range(len(levels)),
                ["none", *(f"z = {z:g}\nε from {_epsilon(rows, unit, z)}" for z in levels[1:])],
                fontsize=8,
            )
            ax.set_ylim(-0.05, 1.05)
            ax.set_ylabel("ARI" if value == "ari" else "accuracy")
            ax.set_title(f"unit of privacy: one {unit}" if not row else "")
            ax.grid(alpha=0.3)
    made.legend(
        *axes[0, 0].get_legend_handles_labels(),
        loc="outside lower center",
        ncols=len(PROTOCOLS),
        fontsize=8,
    )
    return sheet.save(made, scale)


def _is(row: Row, name: str, unit: str, z: float) -> bool:
    same = row["protocol"] == name and float(row["noise"]) == z
    return same and (z == 0 or row["unit"] == unit)


def _epsilon(rows: Sequence[Row], unit: str, z: float) -> str:
    """The range over protocols."""
    found = [
        x
        for r in rows
        if r["unit"] == unit and float(r["noise"]) == z
        for x in numbers(r.get("epsilon", ""))
        if math.isfinite(x)
    ]
    least, most = (
        (f"{float(f'{x:.2g}'):,.0f}" for x in (min(found), max(found))) if found else ("?", "?")
    )
    return f"{least}\nto {most}"


def main(argv: Sequence[str] | None = None) -> Path:
    """Measure what is missing, print, draw."""
    chosen = options(__doc__, argv, seeds=3, minutes=20)
    sheet = Sheet("private_runs", RESULTS)
    rows = sheet.fill(cells(chosen.scale, chosen.seeds), measure, chosen.minutes)
    summarise(rows, ("protocol", "unit", "noise"), VALUES)
    path = draw(sheet, rows, chosen.scale)
    print(path)
    return path


if __name__ == "__main__":
    main()
