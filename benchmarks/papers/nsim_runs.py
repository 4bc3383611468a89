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
    """Persons in Monaco; with all 400 the seed changes nothing but the draws of training."""
    return Federation.simulate("mobility", clients=cell["clients"], seed=cell["seed"])


@lru_cache(maxsize=4)
def real_users(clients: int, seed: int) -> tuple[Users, Array]:
    """Real users' training samples, and the true similarity of all pairs."""
    users = [(s.x, s.y) for s in federation({"clients": clients, "seed": seed}).shards]
    return users, true_similarity([y for _, y in users], RADIUS)


@lru_cache(maxsize=4)
def synthetic_users(number: int, seed: int) -> tuple[Users, Array]:
    """Synthetic users' samples, and the true similarity of all pairs."""
    users = generated(RandomWalk(), Format(), number, Randomness(seed).generator("walks"))
    return users, true_similarity([y for _, y in users], RADIUS, STRIDE)


def network(cell: Cell) -> FlatModel:
    """The trajectory network with the θ_0 of a run."""
    persons = federation({"clients": 2, "seed": cell["seed"]})
    return build(
        "lstm-trajectory",
        persons.shape,
        persons.classes,
        Randomness(cell["seed"]),
        persons.objective,
    )


def synthesis(cell: Cell, layer: str = "hidden", init: str = "common") -> SyntheticUsersConfig:
    """What a run's server would make."""
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
    """Models that users trained alone, as a run's clients and synthetic users do, (u, d)."""
    plan = LocalTraining(cell["lr"], cell["epochs"], cell["batch_size"])
    return synthesis(cell, init=init).trained(users, network(cell), plan, 2, "float32", seed)


_kept: dict[tuple[Any, ...], tuple[torch.Tensor, torch.Tensor]] = {}


def both(cell: Cell) -> tuple[torch.Tensor, torch.Tensor]:
    """Models of synthetic and of real users; the last ones are kept, since several layers are
    compared.
    """
    key = tuple(cell[name] for name in (*TRAINED, "synthetic", "clients", "init", "seed"))
    if key not in _kept:
        _kept.clear()
        made, real = (
            synthetic_users(cell["synthetic"], cell["seed"])[0],
            real_users(cell["clients"], cell["seed"])[0],
        )
        _kept[key] = (
            models(cell, made, cell["init"], cell["seed"] + 1),
            models(cell, real, cell["init"], cell["seed"]),
        )
    return _kept[key]


def told(cell: Cell) -> dict[str, Any]:
    """Pearson's correlations of what NSIM and kernels tell of unseen synthetic and of real users,
    and some pairs to draw.
    """
    layer = find_layer(network(cell), cell["layer"])
    made, real = (layer.rows(own) for own in both(cell))
    (_, true), (_, true_real) = (
        synthetic_users(cell["synthetic"], cell["seed"]),
        real_users(cell["clients"], cell["seed"]),
    )
    fitted = fit(made, torch.from_numpy(true), Randomness(cell["seed"]))
    unseen = fitted.unseen
    groups = {
        "": (fitted.predicted.double().numpy(), made[unseen], true[np.ix_(unseen, unseen)]),
        "_real": (predict(fitted.estimator, real, real).double().numpy(), real, true_real),
    }
    found: dict[str, Any] = {"pearson_pairs": fitted.pearson_pairs}
    for name, (predicted, rows, known) in groups.items():
        found |= correlations(predicted, layer.weights(rows), known, name)
    for name, (predicted, rows, known) in groups.items():
        shown = {
            "true": known,
            "nsim": predicted,
            **{kernel: KERNELS[kernel](layer.weights(rows)) for kernel in ("cca", "cka")},
        }
        found |= {f"points_{kind}{name}": some(matrix) for kind, matrix in shown.items()}
    return found


def some(matrix: Array) -> Array:
    """Some of the pairs of a matrix (m, m), evenly spread over all."""
    first, second = np.triu_indices(len(matrix), 1)
    chosen = np.unique(np.linspace(0, len(first) - 1, min(POINTS, len(first))).astype(int))
    return np.asarray(matrix[first[chosen], second[chosen]], dtype=np.float64)


def timed(work: Callable[[], T]) -> tuple[T, float]:
    """What a piece of work gives, and the processor seconds it takes: on a shared machine wall time
    would tell of its other users.
    """
    began = time.process_time()
    return work(), time.process_time() - began
