"""What the scripts for Pacheco et al. 2021 share: synthetic and real users' models and true
similarity, and what the layers tell of it.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import lru_cache
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from securecluster import Federation
from securecluster.benchmarks.papers.sheet import Cell
from securecluster.core.randomness import Randomness
from securecluster.models.validation import FlatModel, build
from securecluster.protocols.nsim.client import find_layer
from securecluster.protocols.nsim.random_walks import Format, RandomWalk, generated
from securecluster.protocols.nsim.similarity_model import GRID, fit, predict
from securecluster.protocols.nsim.synthetic_users import (
    KERNELS,
    SyntheticUsersConfig,
    correlations,
    true_similarity,
)
from securecluster.training.local_trainer import LocalTraining

T = TypeVar("T")
Array = NDArray[np.float64]
Users = list[tuple[Any, Any]]
RADIUS = 0.2
STRIDE = 2  # of synthetic users' LCSS
POINTS = 300  # pairs of a scatter plot
TRAINED: dict[str, Any] = {"local_rounds": 4, "epochs": 5, "batch_size": 32, "lr": 0.05}
SCALES: dict[str, dict[str, Any]] = {
    "cpu": {"synthetic": 1000, "clients": 400},
    "full": {"synthetic": 4000, "clients": 400},
}


def federation(cell: Cell) -> Federation:
    """Return persons in Monaco.

    With all 400 the seed changes nothing but the draws of training.
    """
    return Federation.simulate("mobility", clients=cell["clients"], seed=cell["seed"])


@lru_cache(maxsize=4)
def real_users(clients: int, seed: int) -> tuple[Users, Array]:
    """Return real users' training samples, and the true similarity of all pairs, (m, m)."""
    users = [(s.x, s.y) for s in federation({"clients": clients, "seed": seed}).shards]
    return users, true_similarity([y for _, y in users], RADIUS)


@lru_cache(maxsize=4)
def synthetic_users(number: int, seed: int) -> tuple[Users, Array]:
    """Return synthetic users' samples, and the true similarity of all pairs, (u, u)."""
    users = generated(RandomWalk(), Format(), number, Randomness(seed).generator("walks"))
    return users, true_similarity([y for _, y in users], RADIUS, STRIDE)


def network(cell: Cell) -> FlatModel:
    """Return the trajectory network with the θ_0 of a run."""
    persons = federation({"clients": 2, "seed": cell["seed"]})
    return build(
        "lstm-trajectory",
        persons.shape,
        persons.classes,
        Randomness(cell["seed"]),
        persons.objective,
    )


def synthesis(cell: Cell, layer: str = "hidden", init: str = "common") -> SyntheticUsersConfig:
    """Return the synthetic users that a run's server would make."""
    return SyntheticUsersConfig(
        cell["synthetic"],
        RandomWalk(),
        Format(),
        RADIUS,
        layer,
        init,
        cell["local_rounds"],
        STRIDE,
        len(GRID),
    )


def models(cell: Cell, users: Users, init: str, seed: int) -> torch.Tensor:
    """Train each user alone, as a run's clients and synthetic users do.

    Args:
        cell: the cell, with the hyper-parameters of training.
        users: the users' samples.
        init: a start of `INITIALIZATIONS`.
        seed: the seed of the training.

    Returns:
        The models, (u, d).
    """
    plan = LocalTraining(cell["lr"], cell["epochs"], cell["batch_size"])
    return synthesis(cell, init=init).trained(users, network(cell), plan, 2, "float32", seed)


_kept: dict[tuple[Any, ...], tuple[torch.Tensor, torch.Tensor]] = {}


def both(cell: Cell) -> tuple[torch.Tensor, torch.Tensor]:
    """Return models of synthetic and of real users, (u, d) and (m, d).

    The last ones are cached, since several layers are compared.
    """
    names = (*TRAINED, "synthetic", "clients", "init", "seed")
    key = tuple(cell[name] for name in names)
    if key not in _kept:
        _kept.clear()
        seed = cell["seed"]
        synthetic, _ = synthetic_users(cell["synthetic"], seed)
        real, _ = real_users(cell["clients"], seed)
        _kept[key] = (
            models(cell, synthetic, cell["init"], seed + 1),
            models(cell, real, cell["init"], seed),
        )
    return _kept[key]


def told(cell: Cell) -> dict[str, Any]:
    """Return Pearson's correlations of NSIM and of kernels, and some pairs to draw.

    They are over unseen synthetic users and over real ones.
    """
    layer = find_layer(network(cell), cell["layer"])
    synthetic, real = (layer.rows(rows) for rows in both(cell))
    _, true = synthetic_users(cell["synthetic"], cell["seed"])
    _, true_real = real_users(cell["clients"], cell["seed"])
    fitted = fit(synthetic, torch.from_numpy(true), Randomness(cell["seed"]))
    unseen = fitted.unseen
    predicted_real = predict(fitted.estimator, real, real)
    groups = {
        "": (
            fitted.predicted.double().numpy(),
            layer.weights(synthetic[unseen]),
            true[np.ix_(unseen, unseen)],
        ),
        "_real": (predicted_real.double().numpy(), layer.weights(real), true_real),
    }
    results: dict[str, Any] = {"pearson_pairs": fitted.pearson_pairs}
    for name, (predicted, weights, similarity) in groups.items():
        results |= correlations(predicted, weights, similarity, name)
    for name, (predicted, weights, similarity) in groups.items():
        results[f"points_true{name}"] = some(similarity)
        results[f"points_nsim{name}"] = some(predicted)
        for kernel in ("cca", "cka"):
            results[f"points_{kernel}{name}"] = some(KERNELS[kernel](weights))
    return results


def some(matrix: Array) -> Array:
    """Return some of the pairs of a matrix (m, m), evenly spread over all."""
    first, second = np.triu_indices(len(matrix), 1)
    count = len(first)
    spaced = np.linspace(0, count - 1, min(POINTS, count))
    chosen = np.unique(spaced.astype(int))
    pairs = matrix[first[chosen], second[chosen]]
    return np.asarray(pairs, dtype=np.float64)


def timed(work: Callable[[], T]) -> tuple[T, float]:
    """Do a piece of work, and measure the processor seconds it takes.

    On a shared machine wall time would depend on its other users.

    Args:
        work: the piece of work.

    Returns:
        Its result, and the seconds.
    """
    began = time.process_time()
    return work(), time.process_time() - began
