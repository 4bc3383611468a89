"""Errors of models averaged in NSIM's clusters, against FedAvg and training alone, on Monaco's
traces (Pacheco et al. 2021, Fig. 4).

python -m securecluster.benchmarks.papers.nsim_fig4 [--seeds 2] [--full] [--minutes 20]

The paper: "the error distribution on a validation set of the Monaco mobility trace in which each
    user trains a local model and models are
aggregated based on NSIM clustering results or based on traditional FedAvg"; it prints no numbers,
rounds or rates. Here an error is the mean distance, in metres, of a user's predicted next positions
from the true ones on its held-out windows, the last fifth. `once` is the paper's experiment:
everyone trains alone, and models are averaged once, by clusters or all together. `last` goes on
(ours): FedAvg in each cluster for the rounds that remain, against FedAvg of everyone for as many
rounds, and training alone; beside them what is not learned at all, the last position again, ten
seconds later. Optimizer, rates and rounds are ours. Traces are read from SECURECLUSTER_DATA.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from securecluster import Federation
from securecluster.benchmarks.papers.nsim_runs import federation
from securecluster.benchmarks.papers.sheet import (
    Cell,
    Row,
    Sheet,
    figure,
    numbers,
    options,
    summarise,
)
from securecluster.protocols import NSIM, FedAvg, Local
from securecluster.runtime.run import Line

TRAINING: dict[str, Any] = {
    "local_rounds": 4,
    "rounds": 30,
    "epochs": 5,
    "batch_size": 32,
    "lr": 0.1,
    "optimizer": "sgd",
}
SCALES: dict[str, dict[str, Any]] = {
    "cpu": {"clients": 100, "synthetic": 400},
    "full": {"clients": 400, "synthetic": 1000, "rounds": 200},
}
METHODS = ("nsim", "together", "fedavg", "local", "repeat")
NAMES = {
    "nsim": "in NSIM's clusters",
    "together": "everyone, after training alone",
    "fedavg": "FedAvg from the start",
    "local": "alone",
    "repeat": "the last position again",
}
STAGES = {"once": ("nsim", "together", "local"), "last": METHODS}


@dataclass
class Watched(NSIM):
    """NSIM whose observer also keeps each user's error at the clustering."""

    def observe(
        self, federation: Federation, client: Any, state: Any, scores: NDArray[np.float64]
    ) -> Line:
        """Adds `errors`, (m,), in that round."""
        line = super().observe(federation, client, state, scores)
        return line | ({"errors": scores.tolist()} if state.round == self.local_rounds else {})


def cells(scale: str, seeds: int) -> list[Cell]:
    """Every method, by seed."""
    fixed = {"scale": scale, **TRAINING, **SCALES[scale], "paper": "clustered below FedAvg"}
    return [
        {**fixed, "method": method, "seed": seed} for seed in range(seeds) for method in METHODS
    ]


def measured(cell: Cell) -> dict[str, Any]:
    """Errors after one average (`once`) and at the end (`last`), their quantiles, and how many
    clusters there are.
    """
    users, plan = (
        federation(cell),
        {name: cell[name] for name in ("rounds", "epochs", "batch_size", "lr", "optimizer")},
    )
    method = cell["method"]
    if method == "repeat":
        metres = np.asarray(users.objective.as_json()["metres"])
        return _spread(
            "last",
            [
                np.linalg.norm((s.x_test[:, -1] - s.y_test) * metres, axis=1).mean()
                for s in users.shards
            ],
        )
    if method in ("fedavg", "local"):
        kind: Any = FedAvg if method == "fedavg" else Local
        early = (
            kind(**plan | {"rounds": cell["local_rounds"]}).fit(users).scores_
            if method == "local"
            else None
        )
        return {
            **({} if early is None else _spread("once", early)),
            **_spread("last", kind(**plan).fit(users).scores_),
        }
    alone = {"local_rounds": cell["local_rounds"], "mask": "none"}
    # of what nobody looks at, little
    whole = {
        "synthetic": 8,
        "grid": 1,
        "eps": 1.0,
        "min_samples": 1,
    }
    own = {"synthetic": cell["synthetic"]} if method == "nsim" else whole
    fitted = Watched(**plan, **alone, **own).fit(users)
    line = fitted.history_[cell["local_rounds"] - 1]
    sizes = sorted(np.bincount(fitted.labels_), reverse=True)
    shown = {
        "clusters": sum(n > 1 for n in sizes),
        "lone": sum(n == 1 for n in sizes),
        "largest": sizes[0],
    }
    scores = {name: line[name] for name in ("pearson", "pearson_real")} if method == "nsim" else {}
    return {**shown, **scores, **_spread("once", line["errors"]), **_spread("last", fitted.scores_)}


def _spread(stage: str, errors: Any) -> dict[str, Any]:
    found = dict(zip(("q10", "median", "q90"), np.quantile(errors, (0.1, 0.5, 0.9)), strict=True))
    return {
        f"mean_{stage}": np.mean(errors),
        **{f"{name}_{stage}": v for name, v in found.items()},
        f"errors_{stage}": np.round(errors, 1),
    }


def pictures(rows: Sequence[Row]) -> Any:
    """Shares of users up to an error, seeds together, after one average and at the end."""
    made, axes = figure(9.6, 4, columns=2)
    for place, (stage, methods) in zip(axes.flat, STAGES.items(), strict=True):
        for n, method in enumerate(METHODS):
            key = f"errors_{stage}"
            errors = np.sort(
                [v for row in rows if row["method"] == method for v in numbers(row.get(key, ""))]
            )
            if len(errors) and method in methods:
                place.plot(
                    errors,
                    np.arange(1, 1 + len(errors)) / len(errors),
                    color=f"C{n}",
                    label=NAMES[method],
                )
        place.set(
            title={"once": "averaged once", "last": "in the end"}[stage],
            xlabel="error of a user, m",
            ylabel="share of users",
        )
        place.legend(fontsize=8)
    return made


def main(argv: Sequence[str] | None = None) -> Path:
    """Measure what is missing, print, draw."""
    chosen = options(__doc__, argv, seeds=2, minutes=20)
    sheet = Sheet("nsim_fig4")
    rows = sheet.fill(cells(chosen.scale, chosen.seeds), measured, chosen.minutes)
    sheet.expect(cells("full", chosen.seeds))
    summarise(
        rows,
        ("method",),
        ("mean_once", "mean_last", "median_last", "q90_last", "clusters", "lone", "largest"),
    )
    return sheet.save(pictures(rows), chosen.scale)


if __name__ == "__main__":
    print(main())
