"""Measure the eigen step of one-shot clustering: p leading eigenvectors by scipy's ARPACK beside a
full decomposition of the Gram matrix.

python -m benchmarks.costs.eigen [--repeats 3]

Features are the pixels of Fashion-MNIST (D = 784) and of CIFAR-10 (D = 3,072). Both ways start from
Φ (n, D) in float32, so the full one also forms the Gram matrix. They take turns in one run, and the
shortest time of each counts. Images are read from SECURECLUSTER_DATA or the hub.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch

from benchmarks.grid import counts
from benchmarks.table import tabulate
from securecluster.clustering.eigenvectors import top
from securecluster.data.datasets import source

SIZES = {"fashion_mnist": (300, 1200, 6000), "cifar10": (300, 1000, 5000)}
# five were enough to tell tasks apart (Ali & Arafa 2024, Fig. 4)
P = 5  # eigenvectors
Pairs = tuple[torch.Tensor, torch.Tensor]  # eigenvalues (p,) and vectors (p, D)


def full(features: torch.Tensor, p: int) -> Pairs:
    """Return the p largest eigenvalues and vectors of ΦᵀΦ/n, by decomposing all of it.

    Args:
        features: Φ, (n, D).
        p: how many.
    """
    # float64, since this way is the reference for errors
    wide = features.double()
    gram = wide.T @ wide / len(wide)
    values, vectors = torch.linalg.eigh(gram)
    # eigh returns ascending eigenvalues, and vectors as columns
    largest = values[-p:].flip(0)
    leading = vectors[:, -p:].flip(1)
    return largest, leading.T


def measure(
    features: torch.Tensor, p: int, repeats: int, clock: Callable[[], float] = time.perf_counter
) -> dict[str, Any]:
    """Time both ways in turn.

    Args:
        features: Φ, (n, D).
        p: the number of eigenvectors.
        repeats: how often each way is timed.
        clock: the time in seconds.

    Returns:
        The shortest seconds of both ways, their ratio, and the differences between their results.
    """
    seconds: dict[str, list[float]] = {"truncated": [], "full": []}
    results: dict[str, Pairs] = {}
    for _ in range(repeats):
        for name, decompose in (("truncated", top), ("full", full)):
            start = clock()
            results[name] = decompose(features, p)
            seconds[name].append(clock() - start)
    truncated_seconds = min(seconds["truncated"])
    full_seconds = min(seconds["full"])
    errors = differences(results["truncated"], results["full"])
    return {
        "seconds_truncated": f"{truncated_seconds:.4f}",
        "seconds_full": f"{full_seconds:.4f}",
        "ratio": f"{full_seconds / truncated_seconds:.1f}",
        "error_values": f"{errors['error_values']:.1e}",
        "error_subspace": f"{errors['error_subspace']:.1e}",
    }


def differences(result: Pairs, reference: Pairs) -> dict[str, float]:
    """Return how much eigenvalues and eigenvectors differ from reference ones.

    Args:
        result: eigenvalues (p,) and vectors (p, D).
        reference: eigenvalues (p,) and vectors (p, D).

    Returns:
        The largest relative difference of eigenvalues, and the sine of the largest angle between
        the subspaces. Single vectors are not compared, since their signs are arbitrary.
    """
    values, vectors = result
    reference_values, reference_vectors = reference
    # rows are orthonormal, so this projects onto the reference subspace, and the spectral norm of
    # what the projection leaves is the sine of the largest principal angle
    projected = vectors @ reference_vectors.T @ reference_vectors
    relative = (values - reference_values).abs() / reference_values
    return {
        "error_values": float(relative.max()),
        "error_subspace": float(torch.linalg.matrix_norm(vectors - projected, 2)),
    }


def lines(repeats: int) -> Iterator[list[dict[str, Any]]]:
    """Yield the line of each data set and size.

    Args:
        repeats: how often each way is timed.
    """
    for name, sizes in SIZES.items():
        pool = source(name).train
        for n in sizes:
            images = torch.from_numpy(pool.read(np.arange(n)))
            features = images.flatten(1)
            fixed = {"data": name, "D": features.shape[1], "n": n, "p": P}
            measured = measure(features, P, repeats)
            yield [{**fixed, **measured}]


def main() -> None:
    """Run, write after each size, print."""
    options = counts(__doc__, repeats=3)
    print(tabulate("eigen", lines(options.repeats)))


if __name__ == "__main__":
    main()
