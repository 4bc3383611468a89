"""Compare whole runs of hidden assignment with DP-FedAvg, at one ε for clusters and training.

python -m benchmarks.private.hidden_runs [--seeds 3] [--minutes 12]

1000 clients with 100 MNIST images each, four clusters with swapped labels or turned images, a
linear model, 10 rounds. ε is at most 4 for the whole run and a whole client that is added or
removed, δ = 1e-5. The baselines are DP-FedAvg, and DP-FedAvg with fine-tuning, which leaves the
clients and so costs no ε. For each protocol the clip norm and the learning rate are the best of the
same grid on one other seed (`purpose` tuning), with swapped labels. A trusted server adds the noise
(`--placement central`), which simulates secure sums with noise in shares at a part of their cost.
MNIST is read from SECURECLUSTER_DATA or the hub.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.grid import parser_of, read_options
from benchmarks.sheet import Cell, Row, Sheet, summarise
from benchmarks.table import SEEDED
from securecluster import Federation, Iid, LabelSwap, Rotation
from securecluster.protocols import FedAvg, FineTune, Hidden

CLIENTS = 1000
SAMPLES = 100
DELTA = 1e-5
TUNING_SEED = 100
GRID = tuple(product((0.5, 1.0), (0.2, 0.5)))  # clip norm and learning rate
PROTOCOLS: dict[str, Any] = {"hidden": Hidden, "fedavg": FedAvg, "finetune": FineTune}
TRANSFORMS: dict[str, Any] = {"label-swap": LabelSwap(clusters=4), "rotation": Rotation(clusters=4)}
SETTINGS: dict[str, Any] = {
    "rounds": 10,
    "epochs": 1,
    "model": "linear",
    "mask": "none",
    "aggregation": "plain",
    "placement": "central",
    "target_epsilon": 4.0,
    "delta": DELTA,
}


def tuning_cells() -> list[Cell]:
    """Return the grid by protocol."""
    grid: list[Cell] = []
    for (clip, rate), name in product(GRID, PROTOCOLS):
        cell = {
            "purpose": "tuning",
            "scenario": "label-swap",
            "protocol": name,
            "seed": TUNING_SEED,
            "clip": clip,
            "lr": rate,
        }
        grid.append(cell)
    return grid


def chosen_settings(rows: Sequence[Row]) -> dict[str, tuple[float, float]]:
    """Return the clip norm and the learning rate of the highest accuracy, by protocol.

    Args:
        rows: of the tuning cells; those that were not run are left out.
    """
    best: dict[str, Row] = {}
    for row in rows:
        if not row.get("accuracy"):
            continue
        name = row["protocol"]
        best_row = best.setdefault(name, row)
        if float(row["accuracy"]) > float(best_row["accuracy"]):
            best[name] = row
    settings = {}
    for name, row in best.items():
        settings[name] = (float(row["clip"]), float(row["lr"]))
    return settings


def cells(seeds: int, settings: Mapping[str, tuple[float, float]]) -> list[Cell]:
    """Return scenario by seed by protocol.

    Args:
        seeds: how many.
        settings: clip norm and learning rate, by protocol.
    """
    grid: list[Cell] = []
    for scenario, seed, name in product(TRANSFORMS, range(seeds), settings):
        clip, rate = settings[name]
        cell = {
            "purpose": "result",
            "scenario": scenario,
            "protocol": name,
            "seed": seed,
            "clip": clip,
            "lr": rate,
        }
        grid.append(cell)
    return grid


def measure(cell: Cell) -> dict[str, Any]:
    """Run a protocol.

    Args:
        cell: one of `tuning_cells` or `cells`.

    Returns:
        Mean accuracy over clients, adjusted Rand index, and ε of the whole run.
    """
    federation = dealt(cell["scenario"], cell["seed"])
    protocol = PROTOCOLS[cell["protocol"]]
    method = protocol(**SETTINGS, clip=cell["clip"], lr=cell["lr"])
    fitted = method.fit(federation, SEEDED)
    return {
        "accuracy": float(np.nanmean(fitted.scores_)),
        "ari": fitted.agreement_["ari"],
        "epsilon": fitted.ledger_.price(DELTA).epsilon,
        "noise": fitted.kept_.learned.config["noise"],
    }


@lru_cache(maxsize=1)
def dealt(scenario: str, seed: int) -> Federation:
    """Return the clients, whose data all protocols share.

    Args:
        scenario: one of `TRANSFORMS`.
        seed: of the federation.
    """
    return Federation.simulate(
        "mnist",
        scenario=Iid(overlap=True) + TRANSFORMS[scenario],
        clients=CLIENTS,
        samples=SAMPLES,
        seed=seed,
    )


def main(argv: Sequence[str] | None = None) -> Path:
    """Measure what is missing, and print."""
    chosen = read_options(parser_of(__doc__, minutes=12.0), argv)
    minutes = chosen.minutes / 2
    sheet = Sheet("hidden_runs")
    tuning_rows = sheet.fill(tuning_cells(), measure, minutes)
    settings = chosen_settings(tuning_rows)
    rows = sheet.fill(cells(chosen.seeds, settings), measure, minutes)
    summarise(rows, ["scenario", "protocol"], ["accuracy", "ari", "epsilon"])
    return sheet.path


if __name__ == "__main__":
    print(main())
