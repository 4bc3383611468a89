"""The eigen step of the one-shot clustering: p leading eigenvectors by scipy's ARPACK against a
full decomposition of the Gram matrix.

python -m securecluster.benchmarks.eigen [--repeats 3]

Features are the pixels of Fashion-MNIST (D = 784) and CIFAR-10 (D = 3,072). Both ways start from Φ
(n, D) float32, so the full one forms the Gram matrix too; they take turns in one run and the least
time of each counts. Images are read from SECURECLUSTER_DATA or the hub.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from securecluster.benchmarks.table import write
from securecluster.clustering.eigenvectors import top
from securecluster.data.datasets import source

SIZES = {"fashion_mnist": (300, 1200, 6000), "cifar10": (300, 1000, 5000)}
P = 5
Pairs = tuple[torch.Tensor, torch.Tensor]


def full(features: torch.Tensor, p: int) -> Pairs:
    """The p largest eigenvalues and vectors (p, D) of ΦᵀΦ/n, by decomposing all of it."""
    wide = features.double()
    values, vectors = torch.linalg.eigh(wide.T @ wide / len(wide))
    return values[-p:].flip(0), vectors[:, -p:].flip(1).T


def measure(
    features: torch.Tensor, p: int, repeats: int, clock: Callable[[], float] = time.perf_counter
) -> dict[str, Any]:
    """Least seconds of both ways, their ratio, and how far their results differ."""
    seconds: dict[str, list[float]] = {"truncated": [], "full": []}
    results: dict[str, Pairs] = {}
    for _ in range(repeats):
        for name, way in (("truncated", top), ("full", full)):
            began = clock()
            results[name] = way(features, p)
            seconds[name].append(clock() - began)
    least = {name: min(taken) for name, taken in seconds.items()}
    return {
        **{f"seconds_{name}": f"{value:.4f}" for name, value in least.items()},
        "ratio": f"{least['full'] / least['truncated']:.1f}",
        **{
            name: f"{value:.1e}"
            for name, value in differences(results["truncated"], results["full"]).items()
        },
    }


def differences(found: Pairs, known: Pairs) -> dict[str, float]:
    """Largest relative difference of eigenvalues, and the sine of the largest angle between the
    subspaces.
    """
    outside = found[1] - found[1] @ known[1].T @ known[1]
    return {
        "error_values": float(((found[0] - known[0]).abs() / known[0]).max()),
        "error_subspace": float(torch.linalg.matrix_norm(outside, 2)),
    }


def main() -> None:
    """Run, write after each size, print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    if options.repeats < 1:
        parser.error("--repeats is at least 1")
    table: list[dict[str, Any]] = []
    for name, sizes in SIZES.items():
        pool = source(name).train
        for n in sizes:
            features = torch.from_numpy(pool.read(np.arange(n))).flatten(1)
            table.append(
                {
                    "data": name,
                    "D": features.shape[1],
                    "n": n,
                    "p": P,
                    **measure(features, P, options.repeats),
                }
            )
            write("eigen", table)
            print(", ".join(f"{key} {value}" for key, value in table[-1].items()), flush=True)


if __name__ == "__main__":
    main()
