"""Measure the accuracy of FedAvg at several scales of the features.

python -m benchmarks.clusters.scales [--rounds 20] [--seeds 3]

The scales from which users are warned about their own data were set from this table. Six clients
share scikit-learn's digits, wine or breast cancer data. In "all values" the standardised features
are multiplied to a root mean square of `scale`, in "all values, as they come" the raw ones are. In
"one column" a column of noise with that root mean square is added to the standardised features.
Network and learning rate are the defaults for tables.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray
from sklearn.datasets import load_breast_cancer, load_digits, load_wine

from benchmarks.grid import counts
from benchmarks.table import SEEDED, tabulate
from securecluster import Federation
from securecluster.errors import SecureClusterWarning, UpdateError
from securecluster.protocols import FedAvg

DATA = {"digits": load_digits, "wine": load_wine, "cancer": load_breast_cancer}
# root mean squares; 2.9 and 3.9 lie on both sides of the warning's limit of 3.8
WHOLE = (0.01, 0.02, 0.05, 0.1, 0.3, 1.0, 2.0, 2.9, 3.9, 6.0, 8.0)
# one column does no harm up to the limit of 10, and breaks training on two sets at 20
COLUMN = (1.0, 5.0, 10.0, 15.0, 20.0, 30.0)
SCALES = {"all values": WHOLE, "all values, as they come": WHOLE, "one column": COLUMN}
CLIENTS = 6


def standardised(x: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return samples (n, k) with mean 0 and variance 1 in each column.

    Args:
        x: samples (n, k).
    """
    centred: NDArray[np.float64] = x - x.mean(axis=0)
    # a constant column stays zero, and is not divided by zero
    centred /= np.maximum(x.std(axis=0), 1e-9)
    return centred


def federation(x: NDArray[np.float64], y: NDArray[np.int64], seed: int) -> Federation:
    """Return clients with equal shares of the samples, drawn at random.

    Args:
        x: samples (n, k).
        y: labels (n,).
        seed: of the draw.
    """
    order = np.random.default_rng(seed).permutation(len(y))
    shares = np.array_split(order, CLIENTS)
    clients = {}
    for k, share in enumerate(shares):
        clients[f"c{k}"] = (x[share], y[share])
    classes = 1 + int(y.max())
    with warnings.catch_warnings():
        # the scales that the warnings are about are what is measured
        warnings.simplefilter("ignore", SecureClusterWarning)
        return Federation.from_arrays(clients, classes=classes, seed=seed)


def accuracy(x: NDArray[np.float64], y: NDArray[np.int64], rounds: int, seed: int) -> float:
    """Return FedAvg's mean test accuracy; NaN where training diverged.

    Args:
        x: samples (n, k).
        y: labels (n,).
        rounds: of FedAvg.
        seed: of the federation and the run.
    """
    clients = federation(x, y, seed)
    try:
        fitted = FedAvg(rounds=rounds).fit(clients, SEEDED)
    except UpdateError:
        # diverged: the protocol refuses updates that are not finite
        return float("nan")
    return float(np.mean(fitted.scores_))


def row(name: str, what: str, scale: float, rounds: int, seed: int) -> dict[str, Any]:
    """Return one measurement.

    Args:
        name: a key of `DATA`.
        what: a key of `SCALES`.
        scale: the root mean square of all values, or of the added column.
        rounds: of FedAvg.
        seed: of noise, federation and run.
    """
    x, y = DATA[name](return_X_y=True)
    if what != "all values, as they come":
        x = standardised(x)
    if what.startswith("all values"):
        root_mean_square = np.sqrt(np.square(x).mean())
        x = x * scale / root_mean_square
    else:
        generator = np.random.default_rng(seed)
        noise = generator.standard_normal((len(x), 1))
        x = np.hstack([x, scale * noise])
    # the limit for tiny features, 0.2, is on the root mean square of samples' norms
    squared_norms = np.square(x).sum(axis=1)
    norm = np.sqrt(squared_norms.mean())
    return {
        "data": name,
        "what": what,
        "scale": scale,
        "norm": round(float(norm), 3),
        "seed": seed,
        "accuracy": round(accuracy(x, y, rounds, seed), 3),
    }


def cases() -> Iterator[tuple[str, str, float]]:
    """Yield data set, what is scaled, and scale, in the order of the table."""
    for name in DATA:
        for what, scales in SCALES.items():
            for scale in scales:
                yield name, what, scale


def main() -> None:
    """Print and write a row per data set, scale and seed."""
    options = counts(__doc__, rounds=20, seeds=3)
    measured = (
        [row(name, what, scale, options.rounds, seed)]
        for name, what, scale in cases()
        for seed in range(options.seeds)
    )
    print(tabulate("scales", measured))


if __name__ == "__main__":
    main()
