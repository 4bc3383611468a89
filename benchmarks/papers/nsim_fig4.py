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
        """Add `errors`, (m,), in that round."""
        line = super().observe(federation, client, state, scores)
        if state.round == self.local_rounds:
            return line | {"errors": scores.tolist()}
        return line


def cells(scale: str, seeds: int) -> list[Cell]:
    """Return every method, by seed."""
    fixed = {"scale": scale, **TRAINING, **SCALES[scale], "paper": "clustered below FedAvg"}
    settings: list[Cell] = []
    for seed in range(seeds):
        settings += [{**fixed, "method": method, "seed": seed} for method in METHODS]
    return settings


def measured(cell: Cell) -> dict[str, Any]:
    """Return errors after one average (`once`) and at the end (`last`), and numbers of clusters."""
    users = federation(cell)
    names = ("rounds", "epochs", "batch_size", "lr", "optimizer")
    plan = {name: cell[name] for name in names}
    method = cell["method"]
    if method == "repeat":
        return _repeated(users)
    if method == "fedavg":
        return _spread("last", FedAvg(**plan).fit(users).scores_)
    if method == "local":
        short = plan | {"rounds": cell["local_rounds"]}
        once = _spread("once", Local(**short).fit(users).scores_)
        last = _spread("last", Local(**plan).fit(users).scores_)
        return {**once, **last}
    # all users in one cluster; a small grid and few synthetic users, since nobody reads the scores
    params: dict[str, Any] = {"synthetic": 8, "grid": 1, "eps": 1.0, "min_samples": 1}
    if method == "nsim":
        params = {"synthetic": cell["synthetic"]}
    protocol = Watched(**plan, local_rounds=cell["local_rounds"], mask="none", **params)
    fitted = protocol.fit(users)
    line = fitted.history_[cell["local_rounds"] - 1]
    sizes = sorted(np.bincount(fitted.labels_), reverse=True)
    results: dict[str, Any] = {
        "clusters": sum(n > 1 for n in sizes),
        "lone": sum(n == 1 for n in sizes),
        "largest": sizes[0],
    }
    if method == "nsim":
        results["pearson"] = line["pearson"]
        results["pearson_real"] = line["pearson_real"]
    results |= _spread("once", line["errors"])
    results |= _spread("last", fitted.scores_)
    return results


def _repeated(users: Federation) -> dict[str, Any]:
    """Return errors of the last position again, ten seconds later."""
    metres = np.asarray(users.objective.as_json()["metres"])
    errors = []
    for shard in users.shards:
        differences = (shard.x_test[:, -1] - shard.y_test) * metres
        errors.append(np.linalg.norm(differences, axis=1).mean())
    return _spread("last", errors)


def _spread(stage: str, errors: Any) -> dict[str, Any]:
    """Return the mean, three quantiles and the errors themselves, in metres, of one stage."""
    low, median, high = np.quantile(errors, (0.1, 0.5, 0.9))
    return {
        f"mean_{stage}": np.mean(errors),
        f"q10_{stage}": low,
        f"median_{stage}": median,
        f"q90_{stage}": high,
        f"errors_{stage}": np.round(errors, 1),
    }


def pictures(rows: Sequence[Row]) -> Any:
    """Draw shares of users up to an error, seeds together, after one average and at the end."""
    titles = {"once": "averaged once", "last": "in the end"}
    picture, axes = figure(9.6, 4, columns=2)
    for axis, (stage, methods) in zip(axes.flat, STAGES.items(), strict=True):
        for n, method in enumerate(METHODS):
            values: list[float] = []
            for row in rows:
                if row["method"] == method:
                    values += numbers(row.get(f"errors_{stage}", ""))
            errors = np.sort(values)
            if len(errors) and method in methods:
                shares = np.arange(1, 1 + len(errors)) / len(errors)
                axis.plot(errors, shares, color=f"C{n}", label=NAMES[method])
        axis.set(title=titles[stage], xlabel="error of a user, m", ylabel="share of users")
        axis.legend(fontsize=8)
    return picture


def main(argv: Sequence[str] | None = None) -> Path:
    """Measure what is missing, print, draw."""
    chosen = options(__doc__, argv, seeds=2, minutes=20)
    sheet = Sheet("nsim_fig4")
    requested = cells(chosen.scale, chosen.seeds)
    rows = sheet.fill(requested, measured, chosen.minutes)
    sheet.expect(cells("full", chosen.seeds))
    summarise(
        rows,
        ("method",),
        ("mean_once", "mean_last", "median_last", "q90_last", "clusters", "lone", "largest"),
    )
    return sheet.save(pictures(rows), chosen.scale)


if __name__ == "__main__":
    print(main())
