"""Measure errors of models averaged in NSIM's clusters on Monaco's traces.

This is Fig. 4 of Pacheco et al. 2021.

python -m benchmarks.papers.nsim.fig4 [--seeds 2] [--full] [--minutes 20]

They are compared with FedAvg and with training alone.

The paper: "the error distribution on a validation set of the Monaco mobility trace in which each
user trains a local model and models are aggregated based on NSIM clustering results or based on
traditional FedAvg". It prints no numbers, rounds or rates.

Here an error is the mean distance, in metres, of a user's predicted next positions from the true
ones on its held-out windows, the last fifth. `once` is the paper's experiment: all users train
alone, and models are averaged once, by clusters or all together. `last` continues it (not in the
paper): FedAvg in each cluster for the rounds that remain, against FedAvg of all users for as many
rounds, and training alone. Beside them is a prediction that nothing is learned for: the last
position again, ten seconds later. Optimizer, rates and rounds are not in the paper. Traces are read
from SECURECLUSTER_DATA.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.grid import Grid, with_seeds
from benchmarks.papers.nsim.runs import federation
from benchmarks.sheet import Cell, Row, figure, pooled
from benchmarks.table import SEEDED
from securecluster import Federation
from securecluster.protocols import NSIM, FedAvg, Local
from securecluster.protocols.nsim.protocol import NSIMObserver
from securecluster.runtime.run import Line

# the paper prints no rounds, rates or optimizer
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
# once: the paper's experiment; last: its continuation, which is not in the paper
STAGES = {"once": ("nsim", "together", "local"), "last": METHODS}


class WatchingObserver(NSIMObserver):
    """NSIM's observer that also keeps each user's error at the clustering."""

    def observe(
        self, federation: Federation, client: Any, state: Any, scores: NDArray[np.float64]
    ) -> Line:
        """Add `errors`, (m,), in that round.

        Args:
            federation: the clients' data.
            client: the clients' side of the run.
            state: the server's state.
            scores: each client's error, (m,).
        """
        line = super().observe(federation, client, state, scores)
        if state.round == self.method.local_rounds:
            return line | {"errors": scores.tolist()}
        return line


@dataclass
class Watched(NSIM):
    """NSIM whose observer also keeps each user's error at the clustering."""

    @property
    def observer(self) -> WatchingObserver:
        """Return what the experimenter computes outside the protocol."""
        return WatchingObserver(self)


def cells(scale: str, seeds: int) -> list[Cell]:
    """Return every method, by seed."""
    fixed = {"scale": scale, **TRAINING, **SCALES[scale], "paper": "clustered below FedAvg"}
    return with_seeds([{**fixed, "method": method} for method in METHODS], range(seeds))


def measured(cell: Cell) -> dict[str, Any]:
    """Return errors after one average (`once`) and at the end (`last`), and numbers of clusters.

    Args:
        cell: the method, and the setting of its run.
    """
    users = federation(cell)
    names = ("rounds", "epochs", "batch_size", "lr", "optimizer")
    plan = {name: cell[name] for name in names}
    method = cell["method"]
    if method == "repeat":
        return _repeated(users)
    if method == "fedavg":
        fitted = FedAvg(**plan).fit(users, SEEDED)
        return _spread("last", fitted.scores_)
    if method == "local":
        short = plan | {"rounds": cell["local_rounds"]}
        at_clustering = Local(**short).fit(users, SEEDED)
        at_end = Local(**plan).fit(users, SEEDED)
        once = _spread("once", at_clustering.scores_)
        last = _spread("last", at_end.scores_)
        return {**once, **last}
    return _clustered(cell, users, plan)


def _clustered(cell: Cell, users: Federation, plan: Mapping[str, Any]) -> dict[str, Any]:
    """Return errors and clusters of NSIM, or of one cluster of all users.

    Args:
        cell: the method, "nsim" or "together", and its setting.
        users: the users' data.
        plan: the hyper-parameters of training.
    """
    # all users in one cluster; a small grid and few synthetic users, since nobody reads the scores
    params: dict[str, Any] = {"synthetic": 8, "grid": 1, "eps": 1.0, "min_samples": 1}
    if cell["method"] == "nsim":
        params = {"synthetic": cell["synthetic"]}
    local_rounds = cell["local_rounds"]
    protocol = Watched(**plan, local_rounds=local_rounds, mask="none", **params)
    fitted = protocol.fit(users, SEEDED)
    line = fitted.history_[local_rounds - 1]
    sizes = sorted(np.bincount(fitted.labels_), reverse=True)
    results: dict[str, Any] = {
        "clusters": sum(n > 1 for n in sizes),
        "lone": sum(n == 1 for n in sizes),  # DBSCAN's noise, which has models of its own
        "largest": sizes[0],
    }
    if cell["method"] == "nsim":
        results["pearson"] = line["pearson"]
        results["pearson_real"] = line["pearson_real"]
    results |= _spread("once", line["errors"])
    results |= _spread("last", fitted.scores_)
    return results


def _repeated(users: Federation) -> dict[str, Any]:
    """Return errors of the last position again, ten seconds later."""
    # metres in one unit of each coordinate
    metres = np.asarray(users.objective.as_json()["metres"])
    errors = []
    for shard in users.shards:
        last_positions = shard.x_test[:, -1]
        # the newest position of a window is ten seconds older than the one to predict
        differences = (last_positions - shard.y_test) * metres
        distances = np.linalg.norm(differences, axis=1)
        errors.append(distances.mean())
    return _spread("last", errors)


def _spread(stage: str, errors: Any) -> dict[str, Any]:
    """Return the mean, three quantiles and the errors themselves, in metres, of one stage.

    Args:
        stage: "once" or "last".
        errors: each user's error, (m,).
    """
    low, median, high = np.quantile(errors, (0.1, 0.5, 0.9))
    return {
        f"mean_{stage}": np.mean(errors),
        f"q10_{stage}": low,
        f"median_{stage}": median,
        f"q90_{stage}": high,
        f"errors_{stage}": np.round(errors, 1),  # metres, by user
    }


def pictures(rows: Sequence[Row]) -> Any:
    """Draw shares of users up to an error, seeds together, after one average and at the end."""
    titles = {"once": "averaged once", "last": "in the end"}
    picture, axes = figure(9.6, 4, columns=2)
    for axis, (stage, methods) in zip(axes.flat, STAGES.items(), strict=True):
        for method in methods:
            of_method = [row for row in rows if row["method"] == method]
            values = pooled(of_method, f"errors_{stage}")
            if not values:
                continue
            errors = np.sort(values)
            count = len(errors)
            shares = np.arange(1, 1 + count) / count
            # a method has one colour in both panels
            color = f"C{METHODS.index(method)}"
            axis.plot(errors, shares, color=color, label=NAMES[method])
        axis.set(title=titles[stage], xlabel="error of a user, m", ylabel="share of users")
        axis.legend(fontsize=8)
    return picture


GRID = Grid(
    __doc__,
    "nsim_fig4",
    cells,
    measured,
    by=["method"],
    values=["mean_once", "mean_last", "median_last", "q90_last", "clusters", "lone", "largest"],
    seeds=2,
    minutes=20.0,
    full="last",
    draw=pictures,
)

if __name__ == "__main__":
    print(GRID.main())
