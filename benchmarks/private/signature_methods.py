"""Compare FL+HC and CFL by gradient signatures with themselves by full updates, at equal ε.

python -m benchmarks.private.signature_methods [--seeds 20 21 22]

Whole runs: 21 clients of 300 MNIST images in four clusters with swapped labels, of which one has 3
clients; softmax regression, 20 rounds of DP-SGD, and ε of everything that a client releases, for
single examples at δ = 1e-5. Nothing is known of the number of clusters. An infinite ε is a run
without noise. Rows are written as they are measured, and a run that was cut off goes on.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.grid import as_told, product
from benchmarks.private.signatures import CLASSES, DELTA, EPSILONS, dealt, swapped_labels, truth_of
from benchmarks.table import RESULTS, SEEDED, Journal
from securecluster import Federation
from securecluster.protocols import CFL, FLHC

DATA = "mnist"
CLUSTERS = 4
SAMPLES = 300
METHODS: dict[str, tuple[Any, dict[str, Any]]] = {
    "flhc": (FLHC, {"pre_rounds": 5}),
    "cfl": (CFL, {}),
}
TRAINING: dict[str, Any] = {"rounds": 20, "epochs": 1, "batch_size": 30, "model": "linear"}
# what clients are clustered by, and how: full updates also by the clusterer that bears more noise
CLUSTERINGS = (("gradient", "paper"), ("update", "paper"), ("update", "average"))
KEY = ("method", "signature", "clusterer", "epsilon", "seed")
COLUMNS = (*KEY, "found", "ari", "accuracy", "spent")


def swapped(seed: int, samples: int = SAMPLES) -> Federation:
    """Return clients in four clusters, each of which swaps another pair of labels.

    Args:
        seed: of the federation, and of the pairs.
        samples: training samples of each client.
    """
    federation = dealt(DATA, seed)
    truth = truth_of(CLUSTERS).tolist()
    generator = np.random.default_rng(seed)
    pairs = generator.permutation(CLASSES[DATA])
    shards = []
    for cluster, shard in zip(truth, federation.shards, strict=True):
        # clusters swap disjoint pairs, so each has a labelling of its own
        new_label = swapped_labels(pairs, cluster)
        x = shard.x[:samples]
        y = new_label[shard.y[:samples]]
        y_test = new_label[shard.y_test]
        shards.append(replace(shard, x=x, y=y, y_test=y_test))
    return replace(federation, shards=tuple(shards), truth=tuple(truth))


def cells(seeds: list[int]) -> Iterator[dict[str, Any]]:
    """Yield what is measured.

    Args:
        seeds: of the federations.
    """
    order = product(
        seed=seeds, epsilon=(*EPSILONS, math.inf), method=METHODS, clustering=CLUSTERINGS
    )
    for cell in order:
        signature, clusterer = cell["clustering"]
        values = (cell["method"], signature, clusterer, cell["epsilon"], cell["seed"])
        yield dict(zip(KEY, values, strict=True))


def measured(cell: dict[str, Any], federation: Federation) -> dict[str, Any]:
    """Return a cell with its clusters, the mean accuracy of clients and the ε that was spent.

    Args:
        cell: one of `cells`.
        federation: the clients.
    """
    protocol_class, method_params = METHODS[cell["method"]]
    privacy: dict[str, Any] = {"dp_unit": "example", "delta": DELTA}
    if math.isfinite(cell["epsilon"]):
        privacy |= {"clip": 1.0, "target_epsilon": cell["epsilon"]}
    params = {**TRAINING, **method_params, **privacy}
    compared = {"signature": cell["signature"], "clusterer": cell["clusterer"]}
    protocol = as_told(protocol_class, {**params, **compared})
    fitted = protocol.fit(federation, SEEDED)
    accuracy = float(np.nanmean(fitted.scores_))
    return {
        **cell,
        "found": len(set(fitted.labels_.tolist())),
        "ari": round(fitted.agreement_["ari"], 4),
        "accuracy": round(accuracy, 4),
        "spent": round(fitted.ledger_.epsilon, 4),
    }


def main(arguments: list[str] | None = None) -> None:
    """Measure what the file does not have yet.

    Args:
        arguments: of the command line.
    """
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seeds", type=int, nargs="+", default=[20, 21, 22])
    parser.add_argument("--out", type=Path, default=RESULTS / "signature_methods.csv")
    options = parser.parse_args(arguments)
    journal = Journal(options.out, KEY, COLUMNS)
    for cell in cells(options.seeds):
        if journal.lacks(cell):
            federation = swapped(cell["seed"])
            journal.append([measured(cell, federation)])


if __name__ == "__main__":
    main()
