"""Adversaries look for neighbours that move a release by more than its noise is scaled to; they
come close and never get there.

What is differentiable they climb by its gradient, from many starts; the rest by mutation and
selection.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from torch import nn

from securecluster import Federation
from securecluster.core.randomness import Randomness
from securecluster.messaging.messages import Rows
from securecluster.models import validation
from securecluster.models.flat_model import FlatModel
from securecluster.models.per_example_gradients import Each, Outer, clipped
from securecluster.privacy.dp import gaussian_mechanism
from securecluster.privacy.dp.client_noise import ClientNoise
from securecluster.privacy.dp.gaussian_mechanism import Clip
from securecluster.privacy.dp.loss_mechanism import sensitivity
from securecluster.privacy.dp.noise_streams import NoiseStreams
from securecluster.protocols.common.comparison.gram_mechanism import REPLACE as REPLACED_GRAM
from securecluster.protocols.common.comparison.gram_mechanism import gram, packed
from securecluster.training.local_trainer import LocalTrainer, LocalTraining

# scales are extreme on purpose
pytestmark = pytest.mark.filterwarnings("ignore::securecluster.SecureClusterWarning")

Array = NDArray[np.float64]
EXACT = 1 + 1e-9  # float64


def climb(
    moved: Callable[..., torch.Tensor],
    shapes: Iterable[tuple[int, ...]],
    restarts: int = 2,
    steps: int = 120,
) -> float:
    """The largest value of `moved` along gradient ascents from starts of very different sizes."""
    generator, best = torch.Generator().manual_seed(0), 0.0
    for restart in range(restarts):
        size = 10.0 ** (2 * restart - 1)
        draw = partial(torch.randn, generator=generator, dtype=torch.float64)
        inputs = [(draw(shape) * size).requires_grad_() for shape in shapes]
        optimizer = torch.optim.Adam(inputs, lr=size / 4, maximize=True)
        for _ in range(steps):
            optimizer.zero_grad()
            value = moved(*inputs)
            best = max(best, float(value.detach()))
            value.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
    return best


def evolve(
    moved: Callable[[Array], Array], numbers: int, population: int = 60, generations: int = 40
) -> float:
    """The largest value of `moved`, which takes (population, numbers) to (population,), by mutation
    and selection.
    """
    rng, best = np.random.default_rng(0), 0.0
    kept = rng.normal(size=(population, numbers)) * 10 ** rng.uniform(-1, 2, (population, 1))
    values = moved(kept)
    for _ in range(generations):
        parents = kept[rng.integers(0, population, population)]
        changed = rng.random(parents.shape) < rng.uniform(0.1, 1, (population, 1))
        tried = parents + changed * rng.normal(size=parents.shape) * 10 ** rng.uniform(
            -3, 2, (population, 1)
        )
        found = moved(tried)
        pool, scores = np.concatenate([kept, tried]), np.concatenate([values, found])
        order = np.argsort(-scores)[:population]
        kept, values = pool[order], scores[order]
        best = max(best, float(values[0]))
    return best


def close(found: float, stated: float, slack: float = EXACT) -> bool:
    return 0.99 * stated <= found <= stated * slack


@pytest.mark.few(1)
@pytest.mark.parametrize("norm", [0.01, 3.0])
def test_a_clipped_row(norm: float) -> None:
    clip = Clip(norm)
    # a client, or zero in its place
    assert close(climb(lambda x: clip.forward(x, 0).norm(), [(1, 6)]), norm)
    apart = climb(lambda x, y: (clip.forward(x, 0) - clip.forward(y, 0)).norm(), [(1, 6), (1, 6)])
    assert close(apart, gaussian_mechanism.REPLACE * norm)


def test_a_clipped_row_in_float32() -> None:
    clip, rng = Clip(1.0), np.random.default_rng(0)
    normal = rng.normal(size=(4000, 257)).astype(np.float32)
    scales = 10 ** rng.uniform(-3, 30, (4000, 1)).astype(np.float32)
    rows = torch.from_numpy(normal * scales)
    # less than 1e-5 of any noise that protects
    assert float(clip.forward(rows, 0).double().norm(dim=1).max()) <= 1 + 1e-6


def test_a_gram_matrix_of_samples() -> None:
    added = climb(
        lambda rows, x: packed(gram(torch.cat([rows, x])) - gram(rows)).norm(), [(5, 4), (1, 4)]
    )
    assert close(added, 1)

    def exchanged(rows: torch.Tensor, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return packed(gram(torch.cat([rows, x])) - gram(torch.cat([rows, y]))).norm()

    replaced = climb(exchanged, [(5, 4), (1, 4), (1, 4)])
    assert close(replaced, REPLACED_GRAM)
    assert math.sqrt(2) == REPLACED_GRAM


def test_a_gram_matrix_of_a_whole_client() -> None:
    assert close(climb(lambda rows: packed(gram(rows, mean=True)).norm(), [(3, 4)]), 1)
    apart = climb(
        lambda one, two: packed(gram(one, mean=True) - gram(two, mean=True)).norm(),
        [(2, 4), (3, 4)],
    )
    assert close(apart, math.sqrt(2))


def cohort(x: Array, y: NDArray[np.int64], model: nn.Module, classes: int) -> LocalTrainer:
    """Clients with the samples x (clients, n, d) and labels y (clients, n)."""
    arrays = {
        f"c{k:04d}": (own[:, None, None], labels)
        for k, (own, labels) in enumerate(zip(x, y, strict=True))
    }
    federation = Federation.from_arrays(arrays, test={name: ([], []) for name in arrays}, seed=5)
    flat = validation.build(model, federation.shape, classes, Randomness(5))
    return trainer(federation, flat)


def trainer(federation: Federation, flat: FlatModel) -> LocalTrainer:
    cpu, secret = torch.device("cpu"), NoiseStreams.derived(Randomness(0), "run")
    return LocalTrainer(federation, flat, Randomness(5), cpu, torch.float64, secret=secret)


def neighbours(genes: Array, n: int, d: int) -> tuple[LocalTrainer, range]:
    """Two clients a row of genes, which differ in their first sample, of n and two classes; and
    where they are in the cohort.
    """
    p = len(genes)
    shared, one, two = np.split(genes, [(n - 1) * (d + 1), n * (d + 1)], axis=1)
    samples = np.stack(
        [np.concatenate([own, shared], axis=1).reshape(p, n, d + 1) for own in (one, two)], axis=1
    ).reshape(2 * p, n, d + 1)
    # one more client, so that both classes occur
    both = np.ones((1, 2, d + 1)) * np.array([-1, 1])[None, :, None]
    clients = [*samples, *both]
    arrays = {
        f"c{k:04d}": (own[:, None, None, :d], (own[:, d] > 0).astype(np.int64))
        for k, own in enumerate(clients)
    }
    federation = Federation.from_arrays(arrays, test={name: ([], []) for name in arrays}, seed=5)
    flat = validation.build(
        nn.Sequential(nn.Flatten(), nn.Linear(d, 2, bias=False)), federation.shape, 2, Randomness(5)
    )
    return trainer(federation, flat), range(2 * p)


def paired(rows: torch.Tensor | Array) -> Array:
    """Distances (p,) of neighbours' rows (2p, k)."""
    found = np.asarray(rows)
    return np.asarray(np.linalg.norm(found[::2] - found[1::2], axis=1))


@pytest.mark.few(1)
@pytest.mark.parametrize(("n", "k"), [(1, 1), (4, 3)])
def test_mean_losses_of_clipped_samples(n: int, k: int) -> None:
    d, bound = 2, 1.7
    numbers = (n + 1) * (d + 1)

    def moved(genes: Array) -> Array:
        clients, who = neighbours(genes[:, :numbers], n, d)
        # models to make it show, for each pair
        sent = torch.from_numpy(genes[:, numbers:].reshape(len(genes), k, 2 * d).repeat(2, axis=0))
        models = [Rows(sent[:, j].contiguous()) for j in range(k)]
        return paired(np.stack([clients.loss(own, who, bound) for own in models], axis=1))

    streams = NoiseStreams.derived(Randomness(0), "run")
    stated = sensitivity(ClientNoise("example", 1.0, 1.0, bound, streams), k, n)
    assert stated == pytest.approx(bound * math.sqrt(k) / n)
    assert close(evolve(moved, numbers + k * 2 * d, generations=30), stated)
    whole = sensitivity(ClientNoise("client", 1.0, 1.0, bound, streams), k, n)
    if n == 1:  # all that a client has
        assert close(evolve(moved, numbers + k * 2 * d, generations=30), whole)


@pytest.mark.exhaustive
@pytest.mark.parametrize("n", [1, 4])
def test_a_step_on_examples_whose_gradients_are_clipped(n: int) -> None:
    d, plan = 2, LocalTraining(0.5, 1, 1 << 62, clip=0.3)
    numbers = (n + 1) * (d + 1)

    def moved(genes: Array, alone: bool) -> Array:
        if alone:
            genes = genes.copy()
            # without biases, a sample of zeros has no gradient: it counts as nothing
            genes[:, n * (d + 1) : -1] = 0
        clients, who = neighbours(genes, n, d)
        start = Rows(torch.ones(1, 2 * d, dtype=torch.float64), (0,) * len(who))
        return paired(clients.train(start, who, plan, 1))

    stated = plan.lr * plan.clip / n
    assert close(evolve(lambda genes: moved(genes, True), numbers), stated)
    assert close(evolve(lambda genes: moved(genes, False), numbers), 2 * stated)


@given(
    st.floats(-12, 9),
    st.floats(-44, 38),
    st.floats(-44, 38),
    st.integers(0, 2**32 - 1),
    st.sampled_from([1.0, 1 / 20, 1 / 50_000]),
)
def test_no_examples_part_in_a_sum_is_longer_than_the_bound(
    clip: float, left: float, right: float, seed: int, weight: float
) -> None:
    """Of gradients as outer products and as rows, also where float32 has no normal number for a
    factor or a product.
    """
    draw, bound = np.random.default_rng(seed), 10.0**clip
    sides = []
    for size in (left, right):
        signs = draw.choice([-1, 1], (1, 1, 3))
        side = np.clip(signs * 10.0 ** (size - 5 * draw.random((1, 1, 3))), -3e38, 3e38)
        sides.append(torch.from_numpy(side.astype(np.float32)))
    one, other = sides
    for part, shape in ((Outer(one, other), (1, 3, 3)), (Each(one), (1, 3))):
        found, factors = clipped({"w": part}, torch.full((1, 1), weight), bound)
        total = torch.zeros(shape)
        found["w"].add_to(total, factors)
        assert float(total.double().norm()) <= bound * weight * (1 + 1e-12)
