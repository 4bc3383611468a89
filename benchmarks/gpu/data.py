"""Small federations and networks for checks."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import torch

from securecluster import Federation, LabelSwap
from securecluster.core.randomness import Randomness
from securecluster.models.architectures import NETWORKS
from securecluster.models.objectives import OBJECTIVES
from securecluster.models.validation import FlatModel, build
from securecluster.privacy.dp.noise_streams import NoiseStreams
from securecluster.training.local_trainer import LocalTrainer

CPU = torch.device("cpu")
SHAPES: dict[str, tuple[tuple[int, ...], int]] = {  # of a sample, and classes, by kind of objective
    "classification": ((1, 16, 16), 4),
    "trajectory": ((5, 2), 2),
    "language": ((6,), 12),
}
SMALLER = {"resnet9": (1, 8, 8)}
SIZES = (3, 5)  # samples of the clients, so that they take different numbers of steps
SECRET = NoiseStreams(lambda client: bytes([client] * 32), "run")


def kind_of(network: str) -> str:
    """Return the objective that a network is first listed under."""
    return next(kind for kind, names in NETWORKS.items() if network in names)


def cohort(network: str, device: torch.device, dtype: torch.dtype) -> LocalTrainer:
    """Return clients with random samples for a network, the same on every device."""
    kind = kind_of(network)
    shape, classes = SHAPES[kind]
    shape = SMALLER.get(network, shape)
    objective, draw = OBJECTIVES[kind](), np.random.default_rng(0)

    def samples(count: int) -> tuple[Any, Any]:
        if kind == "language":
            text = draw.integers(classes, size=(count, shape[0] + 1))
            return text[:, :-1], text[:, 1:]
        x = draw.random((count, *shape))
        if kind == "trajectory":
            return x, draw.random((count, classes))
        return x, draw.integers(classes, size=count)

    arrays = {f"c{k}": samples(count) for k, count in enumerate(SIZES)}
    none: dict[str, Any] = {name: ([], []) for name in arrays}
    federation = Federation.from_arrays(
        arrays,
        test=none,
        objective=objective,
        classes=classes,
        seed=0,
    )
    flat = model(network)
    return LocalTrainer(federation, flat, Randomness(0), device, dtype, secret=SECRET)


@cache
def model(network: str) -> FlatModel:
    """Return a network with its initial weights; a cohort makes a copy of its own."""
    shape, classes = SHAPES[kind_of(network)]
    objective = OBJECTIVES[kind_of(network)]()
    return build(network, SMALLER.get(network, shape), classes, Randomness(0), objective)


@cache
def digits() -> Federation:
    """Return six clients in two clusters, 40 training samples each."""
    scenario = LabelSwap(clusters=2)
    return Federation.simulate("digits", scenario=scenario, clients=6, samples=40, seed=0)


def apart(found: torch.Tensor, wanted: torch.Tensor) -> float:
    """Return the largest difference over the largest magnitude of `wanted`.

    It is NaN where the shapes differ.
    """
    if found.shape != wanted.shape:
        return float("nan")
    if not wanted.numel():
        return 0.0
    found, wanted = found.detach().cpu().double(), wanted.detach().cpu().double()
    largest = float(wanted.abs().max())
    return float((found - wanted).abs().max()) / (largest or 1.0)


def differing(found: torch.Tensor, wanted: torch.Tensor) -> float:
    """Return how many numbers differ by a bit or more; NaN for other shapes."""
    if found.shape != wanted.shape:
        return float("nan")
    found, wanted = found.detach().cpu(), wanted.detach().cpu()
    same = (found == wanted) | (found.isnan() & wanted.isnan())
    return float((~same).sum())
