"""Small federations and networks for checks."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import torch

from benchmarks.costs.recurrent import no_tests
from securecluster import Federation, LabelSwap
from securecluster.core.randomness import Randomness
from securecluster.models.architectures import NETWORKS
from securecluster.models.objectives import OBJECTIVES
from securecluster.models.validation import FlatModel, build
from securecluster.privacy.dp.noise_streams import NoiseStreams
from securecluster.training.local_trainer import LocalTrainer

CPU = torch.device("cpu")
# of a sample, and classes, by kind of objective
SHAPES: dict[str, tuple[tuple[int, ...], int]] = {
    "classification": ((1, 16, 16), 4),
    "trajectory": ((5, 2), 2),  # five positions; coordinates of the next one
    "language": ((6,), 12),  # tokens of a text, and of the vocabulary
}
SMALLER = {"resnet9": (1, 8, 8)}  # the most expensive network
SIZES = (3, 5)  # samples by client, so that clients take different numbers of steps
# fixed, since noise is compared between devices
SECRET = NoiseStreams(lambda client: bytes([client] * 32), "run")


def kind_of(network: str) -> str:
    """Return the objective that a network is first listed under.

    Args:
        network: name of an architecture.
    """
    return next(objective for objective, names in NETWORKS.items() if network in names)


def cohort(network: str, device: torch.device, dtype: torch.dtype) -> LocalTrainer:
    """Return clients with random samples for a network, the same on every device.

    Args:
        network: name of an architecture.
        device: of the training.
        dtype: of the training.
    """
    task = kind_of(network)
    shape, classes = SHAPES[task]
    shape = SMALLER.get(network, shape)
    objective = OBJECTIVES[task]()
    draw = np.random.default_rng(0)

    def samples(count: int) -> tuple[Any, Any]:
        if task == "language":
            length = shape[0]
            # a target is the token after its input, so a text is one token longer than x
            text = draw.integers(classes, size=(count, length + 1))
            x = text[:, :-1]
            y = text[:, 1:]
            return x, y
        images = draw.random((count, *shape))
        if task == "trajectory":
            return images, draw.random((count, classes))
        return images, draw.integers(classes, size=count)

    arrays = {f"c{k}": samples(count) for k, count in enumerate(SIZES)}
    federation = Federation.from_arrays(
        arrays, test=no_tests(arrays), objective=objective, classes=classes, seed=0
    )
    flat = model(network)
    return LocalTrainer(federation, flat, Randomness(0), device, dtype, secret=SECRET)


@cache
def model(network: str) -> FlatModel:
    """Return a network with its initial weights; a cohort makes a copy of its own.

    Args:
        network: name of an architecture.
    """
    task = kind_of(network)
    shape, classes = SHAPES[task]
    shape = SMALLER.get(network, shape)
    objective = OBJECTIVES[task]()
    return build(network, shape, classes, Randomness(0), objective)


@cache
def digits() -> Federation:
    """Return six clients in two clusters, 40 training samples each."""
    scenario = LabelSwap(clusters=2)
    return Federation.simulate("digits", scenario=scenario, clients=6, samples=40, seed=0)


def apart(result: torch.Tensor, expected: torch.Tensor) -> float:
    """Return the largest difference over the largest magnitude of `expected`.

    Args:
        result: of any shape, on any device.
        expected: the reference, on any device.

    Returns:
        The relative error, or NaN where the shapes differ: NaN is within no bound.
    """
    if result.shape != expected.shape:
        return float("nan")
    if not expected.numel():
        return 0.0
    # in float64, so that the comparison adds no error to that of float32 results
    result = result.detach().cpu().double()
    expected = expected.detach().cpu().double()
    magnitude = float(expected.abs().max())
    error = float((result - expected).abs().max())
    # the absolute error where the reference is zero
    return error / (magnitude or 1.0)


def differing(result: torch.Tensor, expected: torch.Tensor) -> float:
    """Return how many numbers differ by a bit or more.

    Args:
        result: of any shape, on any device.
        expected: the reference, on any device.

    Returns:
        The count, where two NaN are equal, or NaN where the shapes differ.
    """
    if result.shape != expected.shape:
        return float("nan")
    result = result.detach().cpu()
    expected = expected.detach().cpu()
    both_nan = result.isnan() & expected.isnan()
    same = (result == expected) | both_nan
    return float((~same).sum())
