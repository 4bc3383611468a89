"""Shared code of the scripts for Pacheco et al. 2021.

It trains synthetic and real users, computes their true similarity, and correlates layers of their
models with it."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from benchmarks.sheet import Cell
from securecluster import Federation
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

Array = NDArray[np.float64]
Users = list[tuple[Any, Any]]
RADIUS = 0.2  # up to which LCSS matches two positions, in units of the area; not in the paper
STRIDE = 2  # LCSS compares every other position of synthetic users
POINTS = 300  # pairs of a scatter plot
# not in the paper
TRAINED: dict[str, Any] = {"local_rounds": 4, "epochs": 5, "batch_size": 32, "lr": 0.05}
SCALES: dict[str, dict[str, Any]] = {
    # the paper: 100 synthetic users
    "cpu": {"synthetic": 1000, "clients": 400},
    "full": {"synthetic": 4000, "clients": 400},
}


def federation(cell: Cell) -> Federation:
    """Return persons in Monaco.

    Args:
        cell: the number of clients, and the seed. With all 400 the seed changes nothing but the
            draws of training.
    """
    return Federation.simulate("mobility", clients=cell["clients"], seed=cell["seed"])


@lru_cache(maxsize=4)
def real_users(clients: int, seed: int) -> tuple[Users, Array]:
    """Return real users' training samples, and the true similarity of all pairs, (m, m).

    Args:
        clients: the number of users.
        seed: the seed of the federation.
    """
    persons = federation({"clients": clients, "seed": seed})
    users = [(shard.x, shard.y) for shard in persons.shards]
    positions = [y for _, y in users]
    return users, true_similarity(positions, RADIUS)


@lru_cache(maxsize=4)
def synthetic_users(number: int, seed: int) -> tuple[Users, Array]:
    """Return synthetic users' samples, and the true similarity of all pairs, (u, u).

    Args:
        number: the number of users.
        seed: the seed of their random walks.
    """
    draws = Randomness(seed).generator("walks")
    users = generated(RandomWalk(), Format(), number, draws)
    positions = [y for _, y in users]
    return users, true_similarity(positions, RADIUS, STRIDE)


def network(cell: Cell) -> FlatModel:
    """Return the trajectory network with the θ_0 of a run.

    Args:
        cell: the seed of the run.
    """
    seed = cell["seed"]
    # two persons are enough to read the shapes of samples and predictions
    persons = federation({"clients": 2, "seed": seed})
    # Section 3.1: four LSTM cells, three layers of 20, dropout 0.2, leaky ReLU, two outputs
    return build(
        "lstm-trajectory", persons.shape, persons.classes, Randomness(seed), persons.objective
    )


def synthesis(cell: Cell, layer: str = "hidden", init: str = "common") -> SyntheticUsersConfig:
    """Return the synthetic users that a run's server would make.

    Args:
        cell: the number of users, and their rounds of training.
        layer: the layer that the pair network reads.
        init: a start of `INITIALIZATIONS`.
    """
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
    config = synthesis(cell, init=init)
    return config.trained(users, network(cell), plan, 2, "float32", seed)


_kept: dict[tuple[Any, ...], tuple[torch.Tensor, torch.Tensor]] = {}


def trained_models(cell: Cell) -> tuple[torch.Tensor, torch.Tensor]:
    """Return models of synthetic and of real users, (u, d) and (m, d).

    The last ones are cached, since several layers are compared.

    Args:
        cell: numbers of users, their start and training, and the seed.
    """
    names = (*TRAINED, "synthetic", "clients", "init", "seed")
    key = tuple(cell[name] for name in names)
    if key in _kept:
        return _kept[key]
    _kept.clear()
    seed = cell["seed"]
    init = cell["init"]
    synthetic, _ = synthetic_users(cell["synthetic"], seed)
    real, _ = real_users(cell["clients"], seed)
    # another seed than real users', so that their draws are independent
    of_synthetic = models(cell, synthetic, init, seed + 1)
    of_real = models(cell, real, init, seed)
    _kept[key] = (of_synthetic, of_real)
    return _kept[key]


def layer_correlations(cell: Cell) -> dict[str, Any]:
    """Return Pearson's correlations of NSIM and of kernels, and some pairs to draw.

    They are over unseen synthetic users and over real ones.

    Args:
        cell: the layer, numbers of users, their start and training, and the seed.
    """
    seed = cell["seed"]
    layer = find_layer(network(cell), cell["layer"])
    synthetic, real = (layer.rows(models) for models in trained_models(cell))
    _, true = synthetic_users(cell["synthetic"], seed)
    _, true_real = real_users(cell["clients"], seed)
    # the true similarity is LCSS of users' positions; the pair network reads two layers
    fitted = fit(synthetic, torch.from_numpy(true), Randomness(seed))
    # correlations over users that the fit has seen would be too high
    unseen = fitted.unseen
    predicted_real = predict(fitted.estimator, real, real)
    predicted = fitted.predicted
    weights_unseen = layer.weights(synthetic[unseen])
    true_unseen = true[np.ix_(unseen, unseen)]
    groups = {
        "": (predicted.double().numpy(), weights_unseen, true_unseen),
        "_real": (predicted_real.double().numpy(), layer.weights(real), true_real),
    }
    # unseen pairs of seen users; the paper does not say which pairs its 0.96 is of
    results: dict[str, Any] = {"pearson_pairs": fitted.pearson_pairs}
    for name, (estimate, weights, similarity) in groups.items():
        results |= correlations(estimate, weights, similarity, name)
    for name, (estimate, weights, similarity) in groups.items():
        results[f"points_true{name}"] = spaced_pairs(similarity)
        results[f"points_nsim{name}"] = spaced_pairs(estimate)
        for kernel in ("cca", "cka"):
            # kernels of the same layers, as in the paper's Figures 2 and 3
            scores = KERNELS[kernel](weights)
            results[f"points_{kernel}{name}"] = spaced_pairs(scores)
    return results


def spaced_pairs(matrix: Array) -> Array:
    """Return at most POINTS of the pairs of a matrix, evenly spread over all.

    Args:
        matrix: a value for each pair of users, (m, m).
    """
    first, second = np.triu_indices(len(matrix), 1)
    count = len(first)
    number = min(POINTS, count)
    spaced = np.linspace(0, count - 1, number)
    chosen = np.unique(spaced.astype(int))
    pairs = matrix[first[chosen], second[chosen]]
    return np.asarray(pairs, dtype=np.float64)
