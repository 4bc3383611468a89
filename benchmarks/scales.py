"""Accuracy of FedAvg at several scales of the features: where the warnings on users' own data
begin.

python -m securecluster.benchmarks.scales [--rounds 20] [--seeds 3]

Six clients share scikit-learn's digits, wine or breast cancer data. Either all values are
multiplied to a root mean square of `scale`, standardised or as they come, or one column of noise
with that root mean square is added to the standardised ones. The network and its learning rate are
the defaults for tables.
"""

from __future__ import annotations

import argparse
import warnings
from typing import Any

import numpy as np
from numpy.typing import NDArray
from sklearn.datasets import load_breast_cancer, load_digits, load_wine

from securecluster import Federation
from securecluster.benchmarks.table import write
from securecluster.errors import SecureClusterWarning, UpdateError
from securecluster.protocols import FedAvg

DATA = {"digits": load_digits, "wine": load_wine, "cancer": load_breast_cancer}
WHOLE = (0.01, 0.02, 0.05, 0.1, 0.3, 1.0, 2.0, 2.9, 3.9, 6.0, 8.0)
COLUMN = (1.0, 5.0, 10.0, 15.0, 20.0, 30.0)
CLIENTS = 6


def standardised(x: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return samples (n, k) with mean 0 and variance 1 in each column."""
    centred: NDArray[np.float64] = x - x.mean(axis=0)
    centred /= np.maximum(x.std(axis=0), 1e-9)
    return centred


def federation(x: NDArray[np.float64], y: NDArray[np.int64], seed: int) -> Federation:
    """Return clients with equal shares of the samples, drawn at random."""
    order = np.random.default_rng(seed).permutation(len(y))
    parts = np.array_split(order, CLIENTS)
    clients = {f"c{k}": (x[part], y[part]) for k, part in enumerate(parts)}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SecureClusterWarning)  # they are what is measured
        return Federation.from_arrays(clients, classes=1 + int(y.max()), seed=seed)


def accuracy(x: NDArray[np.float64], y: NDArray[np.int64], rounds: int, seed: int) -> float:
    """Return FedAvg's mean test accuracy; NaN where training diverged."""
    try:
        fitted = FedAvg(rounds=rounds).fit(federation(x, y, seed))
    except UpdateError:
        return float("nan")
    return float(np.mean(fitted.scores_))


def row(name: str, what: str, scale: float, rounds: int, seed: int) -> dict[str, Any]:
    """Return one measurement."""
    x, y = DATA[name](return_X_y=True)
    if what != "all values, as they come":
        x = standardised(x)
    if what.startswith("all values"):
        x = x * scale / np.sqrt(np.square(x).mean())
    else:
        noise = np.random.default_rng(seed).standard_normal((len(x), 1))
        x = np.hstack([x, scale * noise])
    norms = np.sqrt(np.square(x).sum(axis=1).mean())
    return {
        "data": name,
        "what": what,
        "scale": scale,
        "norm": round(float(norms), 3),
        "seed": seed,
        "accuracy": round(accuracy(x, y, rounds, seed), 3),
    }


def main() -> None:
    """Print and write a row per data set, scale and seed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--seeds", type=int, default=3)
    options = parser.parse_args()
    rows: list[dict[str, Any]] = []
    for name in DATA:
        for what, scales in (
            ("all values", WHOLE),
            ("all values, as they come", WHOLE),
            ("one column", COLUMN),
        ):
            for scale in scales:
                for seed in range(options.seeds):
                    rows.append(row(name, what, scale, options.rounds, seed))
                    print(rows[-1], flush=True)
    print(write("scales", rows))


if __name__ == "__main__":
    main()
