"""Federations whose clusters have a known reason that nobody simulated: hospitals, kinds of wine.

python -m benchmarks.clusters.natural [--seeds 1 2 3 4 5] [--data heart]

A client is a part of one hospital's patients (heart disease, UCI 45: 60 rows, four hospitals) or of
one kind of wine (UCI 186: 150 rows, eight parts of red and twelve of white); the seed draws which
rows. True clusters are the hospitals, and the kinds. Labels are two: disease or none, quality from
6 or below. Each client scales its own columns to mean 0 and variance 1 over its training rows and
puts 0 for what is missing; a third of its rows is held out.

Fine-tuning is the best of six forms on a seed of its own (`benchmarks.papers.rivals`). Private runs
have a target ε of 4 for an example. Models are linear, with learning rate 0.1, and other options
are defaults. The files are those of UCI, in the folder tables of SECURECLUSTER_DATA.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Iterator, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.papers.rivals import KEY, RATES, SHARES, TUNED_ON, chosen, tuned
from benchmarks.sheet import Cell
from benchmarks.table import RESULTS, UNRECORDED, Journal
from securecluster import Federation
from securecluster.clustering.metrics import mean
from securecluster.core.randomness import Randomness
from securecluster.protocols import CFL, FLHC, SRFCA, ClusteringProtocol, FedAvg, Local, Signature

COLUMNS = (*KEY, "ari", "clusters", "accuracy")
SEEDS = (1, 2, 3, 4, 5)
ROUNDS = 40
HELD_OUT = 1 / 3
# by data: the rows of a client, and by source the most clients and the file
SOURCES: dict[str, tuple[int, dict[str, tuple[int, str]]]] = {
    "heart": (
        60,
        {
            name: (5, f"heart/processed.{name}.csv")
            for name in ("cleveland", "hungarian", "switzerland", "va")
        },
    ),
    "wine": (
        150,
        {"red": (8, "wine/winequality-red.csv"), "white": (12, "wine/winequality-white.csv")},
    ),
}
POSITIVE_FROM = {"heart": 1, "wine": 6}
PRIVATE: dict[str, Any] = {"target_epsilon": 4.0, "dp_unit": "example"}
TRAINING: dict[str, Any] = {"model": "linear", "lr": 0.1}
METHODS: dict[str, Callable[[], ClusteringProtocol]] = {
    "fedavg": lambda: FedAvg(**TRAINING, rounds=ROUNDS),
    "local": lambda: Local(**TRAINING, rounds=ROUNDS),
    "cfl": lambda: CFL(**TRAINING, rounds=ROUNDS),
    "flhc": lambda: FLHC(**TRAINING, rounds=ROUNDS),
    "srfca": lambda: SRFCA(**TRAINING, rounds=ROUNDS // 2, local_rounds=ROUNDS // 2),
    "signature": lambda: Signature(**TRAINING, rounds=ROUNDS),
    "fedavg, ε 4": lambda: FedAvg(**TRAINING, rounds=ROUNDS, **PRIVATE),
    "signature, ε 4": lambda: Signature(**TRAINING, rounds=ROUNDS, **PRIVATE),
}


def federation(name: str, seed: int) -> Federation:
    """Return parts of hospitals, or of kinds of wine, as clients.

    Args:
        name: among `SOURCES`.
        seed: of the parts, the held-out rows and the run.
    """
    rows, sources = SOURCES[name]
    clients: dict[str, tuple[NDArray[np.float32], NDArray[np.int64]]] = {}
    held_out: dict[str, NDArray[np.bool_]] = {}
    truth: dict[str, int] = {}
    for cluster, (source, (most, file)) in enumerate(sources.items()):
        table = _table(file)
        order = Randomness(seed).generator("natural", source).permutation(len(table))
        # a source with few rows has smaller parts, but no fewer than one
        parts = np.array_split(order, max(1, round(len(table) / rows)))[:most]
        for number, part in enumerate(parts):
            x, y = _samples(table[part[:rows]], POSITIVE_FROM[name])
            client = f"{source}-{number}"
            clients[client] = (x, y)
            held_out[client] = np.arange(len(y)) >= round(len(y) * (1 - HELD_OUT))
            truth[client] = cluster
    return Federation.from_arrays(clients, test=held_out, truth=truth, classes=2, seed=seed)


def _table(file: str) -> NDArray[np.float64]:
    """Return a file's numbers, NaN where one is missing."""
    import pandas as pd

    path = Path(os.environ["SECURECLUSTER_DATA"]) / "tables" / file
    table: NDArray[np.float64] = pd.read_csv(path, na_values="?").to_numpy(np.float64)
    return table


def _samples(
    rows: NDArray[np.float64], positive_from: int
) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
    """Return features in a client's own units, and labels.

    Args:
        rows: (n, columns), the last one is the label.
        positive_from: the smallest value of a positive label.
    """
    training = slice(round(len(rows) * (1 - HELD_OUT)))
    features = rows[:, :-1]
    known = ~np.isnan(features)
    count = known[training].sum(0).clip(1)
    means = np.where(known, features, 0.0)[training].sum(0) / count
    centred = np.where(known, features - means, 0.0)
    deviation = np.sqrt((centred[training] ** 2).sum(0) / count)
    scaled = centred / np.where(deviation > 0, deviation, 1.0)
    return scaled.astype(np.float32), (rows[:, -1] >= positive_from).astype(np.int64)


def cells(names: Sequence[str], seeds: Sequence[int], path: Path) -> Iterator[Cell]:
    """Yield what is measured: first all forms of fine-tuning on a seed of their own.

    Args:
        names: of data.
        seeds: of the comparison.
        path: of the measurements, from which the best form is taken.
    """
    for name, share, rate in product(names, SHARES, RATES):
        yield dict(zip(KEY, (name, "finetune", share, rate, TUNED_ON), strict=True))
    for seed, name in product(seeds, names):
        best = chosen(path, name)
        values = (name, "finetune", best["share"], float(best["rate"]), seed)
        yield dict(zip(KEY, values, strict=True))
        for method in METHODS:
            yield dict(zip(KEY, (name, method, "", 1.0, seed), strict=True))


def measured(cell: Cell) -> dict[str, Any]:
    """Return a cell with its clusters and accuracy.

    Args:
        cell: one of `cells`.
    """
    clients = federation(cell["scenario"], cell["seed"])
    if cell["method"] == "finetune":
        protocol = tuned(TRAINING, ROUNDS, cell["share"], cell["rate"])
    else:
        protocol = METHODS[cell["method"]]()
    fitted = protocol.fit(clients, UNRECORDED)
    assert fitted.agreement_ is not None
    return {
        **cell,
        "ari": round(fitted.agreement_["ari"], 4),
        "clusters": len(set(fitted.labels_.tolist())),
        "accuracy": round(mean(fitted.scores_) or 0.0, 4),
    }


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure what the file does not have yet.

    Args:
        arguments: of the command line.
    """
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seeds", type=int, nargs="+", default=list(SEEDS))
    parser.add_argument("--data", nargs="+", default=list(SOURCES), choices=list(SOURCES))
    parser.add_argument("--out", type=Path, default=RESULTS / "natural.csv")
    options = parser.parse_args(arguments)
    journal = Journal(options.out, KEY, COLUMNS)
    for cell in cells(options.data, options.seeds, options.out):
        if journal.lacks(cell):
            journal.append([measured(cell)])


if __name__ == "__main__":
    main()
