"""Measure over which clients SR-FCA's mean is taken, and how many train in a round, on real data.

python -m benchmarks.papers.srfca_coverage [--seeds 0 1 2 3 4] [--data femnist]

The authors' program (github.com/harshv834/sr-fca) differs from a comparison at equal cost in two
rules. With one REFINE, as on their real data, it averages over the clients that ONE_SHOT put into a
cluster of three or more, and leaves the others out; and ten clients of every cluster train in a
round, so that k clusters train k times as many as FedAvg does.

Clients, network and training are those of `srfca_femnist` and `shakespeare` at the scale for a CPU.
λ is the 25 % quantile of all distances, where the authors' is tuned. `covered` is the number of
clients in a first cluster, `on_covered` the mean test score over them, and `fedavg_there` that of
FedAvg over the same clients; `on_all` is over everybody. `random` has four random clusters,
all of whose clients train in every round, and `fedavg, 1/4` as many as one of them. Scores are
accuracies, and perplexities of Shakespeare. Rows are written as they are measured.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.grid import federation_of
from benchmarks.papers import shakespeare, srfca_femnist
from benchmarks.papers.srfca_runs import OWN
from benchmarks.table import RESULTS, UNRECORDED, Journal
from securecluster.data import Natural
from securecluster.protocols import SRFCA, ClusteringProtocol, FedAvg, RandomClusters

SETTINGS: dict[str, dict[str, Any]] = {
    "femnist": {**srfca_femnist.COMMON, **srfca_femnist.SCALES["cpu"]},
    "shakespeare": {**shakespeare.COMMON, **shakespeare.SCALES["cpu"]},
}
TRAINING = ("model", "optimizer", "lr", "batch_size", "epochs", "rounds")
QUANTILE = 0.25
FEWEST = 3  # clients of a cluster in the authors' configuration
RANDOM = 4  # random clusters
SEEDS = (0, 1, 2, 3, 4)
KEY = ("data", "seed", "method")
COLUMNS = (*KEY, "clusters", "covered", "on_covered", "fedavg_there", "on_all", "fedavg_on_all")


def measured(data: str, seed: int) -> Iterator[dict[str, Any]]:
    """Yield the rows of a seed.

    Args:
        data: among `SETTINGS`.
        seed: of clients and runs.
    """
    setting = SETTINGS[data]
    federation = federation_of({**setting, "seed": seed}, Natural())
    # masks change no result
    params = {name: setting[name] for name in TRAINING} | {"mask": "none"}
    rounds = setting["rounds"]
    own = {**OWN["srfca"], "refine": 1, "size": FEWEST}
    methods: dict[str, ClusteringProtocol] = {
        "fedavg": FedAvg(**params),
        f"fedavg, 1/{RANDOM}": FedAvg(**params, participation=1 / RANDOM),
        "random": RandomClusters(**params, k=RANDOM),
        "srfca": SRFCA(**params, local_rounds=rounds, **own, quantile=QUANTILE),
    }
    of_fedavg: NDArray[np.float64] | None = None
    for name, method in methods.items():
        fitted = method.fit(federation, UNRECORDED)
        scores = np.asarray(fitted.scores_)
        if of_fedavg is None:
            of_fedavg = scores
        yield {
            "data": data,
            "seed": seed,
            "method": name,
            "clusters": len(set(fitted.labels_.tolist())),
            **_means(scores, of_fedavg, _covered(fitted)),
        }


def _covered(fitted: ClusteringProtocol) -> list[int]:
    """Return the clients that ONE_SHOT put into a cluster; all of them without ONE_SHOT."""
    for line in fitted.history_:
        if "lambda" in line:
            return [client for cluster in line["clustered"] for client in cluster]
    return list(range(len(fitted.labels_)))


def _means(
    scores: NDArray[np.float64], of_fedavg: NDArray[np.float64], covered: Sequence[int]
) -> dict[str, Any]:
    """Return the number of covered clients, and mean scores over them and over all."""
    there = list(covered)
    return {
        "covered": len(there),
        "on_covered": round(float(np.nanmean(scores[there])), 4),
        "fedavg_there": round(float(np.nanmean(of_fedavg[there])), 4),
        "on_all": round(float(np.nanmean(scores)), 4),
        "fedavg_on_all": round(float(np.nanmean(of_fedavg)), 4),
    }


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure the seeds that the file does not have yet.

    Args:
        arguments: of the command line.
    """
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seeds", type=int, nargs="+", default=list(SEEDS))
    parser.add_argument("--data", nargs="+", default=list(SETTINGS), choices=list(SETTINGS))
    parser.add_argument("--out", type=Path, default=RESULTS / "papers" / "srfca_coverage.csv")
    options = parser.parse_args(arguments)
    journal = Journal(options.out, KEY, COLUMNS)
    for data in options.data:
        for seed in options.seeds:
            if journal.lacks({"data": data, "seed": seed, "method": "fedavg"}):
                journal.append(measured(data, seed))


if __name__ == "__main__":
    main()
