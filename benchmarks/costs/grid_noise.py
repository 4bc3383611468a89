"""Measure what noise on a grid costs beside floating-point noise, and how float32 sums of gradients
are rounded.

python -m benchmarks.costs.grid_noise [--rounds 7]

There are three measurements. Each runs on one thread and times its variants in turn, in processor
time.

- noise: nanoseconds a number of x + σn, in float32 with torch's generator, and on a grid with
  ChaCha20.
- round: milliseconds of a local epoch of DP-SGD without noise, with floating-point noise, and with
  noise on a grid.
- gap: the one step of DP-SGD that noise on a grid leaves to floating point. A sum of clipped
  gradients is rounded while it is formed, so two sums that differ by one example may differ by a
  little more than its clipped gradient. `apart` is the largest such excess over all examples, in
  units of the clip norm.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any
from unittest import mock

import numpy as np
import torch

from benchmarks.grid import counts
from benchmarks.table import tabulate
from securecluster import Federation
from securecluster.core.devices import cpu_threads
from securecluster.core.randomness import Randomness
from securecluster.messaging.messages import Rows
from securecluster.models.per_example_gradients import Outer, clipped
from securecluster.models.validation import build
from securecluster.privacy.dp.grid_noise import GridNoise, deviation, spacing
from securecluster.privacy.dp.noise_streams import NoiseStreams
from securecluster.training import dp_sgd
from securecluster.training.local_trainer import LocalTrainer, LocalTraining

WIDTHS = (2_000, 50_000, 1_000_000)
NETWORKS = {"mlp": (1, 8, 8), "mlp-200": (1, 28, 28), "cnn-briggs": (1, 28, 28)}
BATCHES = (20, 200, 2000, 60_000)
CLIENTS = 4
INPUTS = 784
OUTPUTS = 64


class FloatNoise:
    """Noise as a sum of floating-point numbers, with the interface of `GridNoise`.

    Args:
        seeds: 32 bytes for each row; only the first seed is used.
    """

    def __init__(self, seeds: Sequence[bytes]) -> None:
        seed = int.from_bytes(seeds[0][:4], "little")
        self._draw = torch.Generator().manual_seed(seed)

    def add_to(self, rows: torch.Tensor, grid: Sequence[float], sigma: Sequence[float]) -> None:
        """Add noise to rows in place.

        Args:
            rows: (k, d).
            grid: unused, since the noise lies on no grid.
            sigma: each row's standard deviation, (k,).
        """
        # x + σn in floating point, whose lowest bits reveal x (Mironov 2012)
        drawn = torch.randn(rows.shape, generator=self._draw, dtype=rows.dtype)
        deviations = rows.new_tensor(list(sigma))
        rows += drawn.mul_(deviations[:, None])


def fastest(tasks: Mapping[str, Callable[[], Any]], rounds: int) -> dict[str, float]:
    """Return the shortest time of each task in processor seconds.

    Args:
        tasks: functions by name, which take turns.
        rounds: how often each is run.
    """
    shortest = dict.fromkeys(tasks, float("inf"))
    for _ in range(rounds):
        for name, task in tasks.items():
            start = time.process_time()
            task()
            elapsed = time.process_time() - start
            # other load of the machine only adds to a time
            shortest[name] = min(shortest[name], elapsed)
    return shortest


def noise(rounds: int) -> Iterator[dict[str, Any]]:
    """Yield lines of the table with nanoseconds a number.

    Args:
        rounds: how often each kind of noise is timed.
    """
    for d in WIDTHS:
        count = 8
        if d >= 10**6:
            count = 2
        rows = torch.randn(count, d)
        # noise multiplier z = 1 and sensitivity Δ = 1: σ = z (Δ + g√d) for the grid's spacing g
        grid = [spacing(1.0, 1.0, d)] * count
        sigma = [deviation(1.0, 1.0, d)] * count
        seeds = [bytes([k] * 32) for k in range(count)]
        tasks = {
            "float": partial(noised, FloatNoise(seeds), rows, grid, sigma),
            "grid": partial(noised, GridNoise(seeds), rows, grid, sigma),
        }
        nanoseconds = {}
        for name, shortest in fastest(tasks, rounds).items():
            nanoseconds[name] = shortest / rows.numel() * 1e9
        yield from rows_of("noise", f"d = {d}", nanoseconds, "ns a number")


def noised(
    source: FloatNoise | GridNoise,
    rows: torch.Tensor,
    grid: Sequence[float],
    sigma: Sequence[float],
) -> None:
    """Add noise to a copy of rows.

    Args:
        source: of the noise.
        rows: (k, d).
        grid: each row's distance between neighbouring multiples, (k,).
        sigma: each row's standard deviation, (k,).
    """
    source.add_to(rows.clone(), grid, sigma)


def local_epochs(rounds: int) -> Iterator[dict[str, Any]]:
    """Yield lines of the table with milliseconds of four clients' epochs.

    Args:
        rounds: how often each kind of noise is timed.
    """
    draw = np.random.default_rng(0)
    for name, shape in NETWORKS.items():
        clients = {}
        test = {}
        for k in range(CLIENTS):
            images = draw.normal(size=(100, *shape))
            labels = draw.integers(0, 10, 100)
            clients[f"c{k}"] = (images, labels)
            # nothing is evaluated here, so one test sample is enough
            test[f"c{k}"] = (images[:1], labels[:1])
        federation = Federation.from_arrays(clients, test=test, classes=10, seed=0)
        flat = build(name, federation.shape, 10, Randomness(0))
        # any key will do, since nothing is released
        secret = NoiseStreams(lambda client: bytes(32), "benchmark")
        cohort = LocalTrainer(
            federation, flat, Randomness(0), torch.device("cpu"), torch.float32, secret=secret
        )
        tasks = {}
        for variant in ("none", "float", "grid"):
            tasks[variant] = partial(epoch, cohort, variant)
        milliseconds = {}
        for variant, shortest in fastest(tasks, rounds).items():
            milliseconds[variant] = shortest * 1e3
        case = f"{name}, d = {flat.dimension}"
        yield from rows_of("round", case, milliseconds, "ms")


def epoch(cohort: LocalTrainer, variant: str) -> None:
    """Train for an epoch of DP-SGD at batch 20.

    Args:
        cohort: the clients.
        variant: the kind of noise, "none", "float" or "grid".
    """
    multiplier = 1.0
    if variant == "none":
        multiplier = 0.0
    source: type[FloatNoise | GridNoise] = GridNoise
    if variant == "float":
        source = FloatNoise
    plan = LocalTraining(0.1, 1, 20, clip=1.0, noise=multiplier)
    clients = range(len(cohort.ids))
    # all clients start from row 0 of a table with one model
    models = Rows(cohort.start[None], (0,) * len(clients))
    with mock.patch.object(dp_sgd, "GridNoise", source):
        cohort.train(models, clients, plan, 1)


def gap() -> Iterator[dict[str, Any]]:
    """Yield lines of the table with the excess of neighbouring float32 sums over the clip norm."""
    draw = torch.Generator().manual_seed(0)
    for batch in BATCHES:
        outputs = torch.randn(1, batch, OUTPUTS, generator=draw)
        inputs = torch.randn(1, batch, INPUTS, generator=draw)
        varied = Outer(outputs, inputs)
        # equal gradients add up to the longest sum, whose last bit is the coarsest
        same_outputs = outputs[:, :1] * torch.ones_like(outputs)
        same_inputs = inputs[:, :1] * torch.ones_like(inputs)
        equal = Outer(same_outputs, same_inputs)
        cases = {"gradients of any direction": varied, "equal gradients": equal}
        for name, gradient in cases.items():
            excess = largest_excess({"w": gradient}, batch)
            case = f"batch {batch}, {name}"
            yield from rows_of("gap", case, {"apart": excess}, "of the clip norm")


def largest_excess(gradients: dict[str, Outer], batch: int) -> float:
    """Return how much further than the clip norm 1 two neighbouring sums differ, at most.

    Args:
        gradients: of a batch, by the parameter's name.
        batch: how many; the first 20 examples are left out in turn.
    """
    all_examples = clipped_sum(gradients, torch.ones(1, batch)).double()
    # a distance is at least 0, so no excess is below -1
    excess = -1.0
    for j in range(20):
        weight = torch.ones(1, batch)
        weight[0, j] = 0
        without = clipped_sum(gradients, weight).double()
        # float64 here, so that the comparison rounds nothing
        distance = (all_examples - without).norm()
        # in exact arithmetic the distance is the norm of one clipped gradient, at most 1
        excess = max(excess, float(distance) - 1)
    return excess


def clipped_sum(gradients: dict[str, Outer], weight: torch.Tensor) -> torch.Tensor:
    """Return the sum (1, OUTPUTS, INPUTS) of gradients that are each clipped to norm 1.

    Args:
        gradients: of a batch, by the parameter's name.
        weight: 1 for examples of the sum and 0 for others, (1, batch).
    """
    products, factors = clipped(gradients, weight, 1.0)
    summed = torch.zeros(1, OUTPUTS, INPUTS)
    for product in products.values():
        product.add_to(summed, factors)
    return summed


def rows_of(what: str, case: str, values: dict[str, float], unit: str) -> Iterator[dict[str, Any]]:
    """Yield a line for each value, with its ratio to floating-point noise.

    Args:
        what: the measurement.
        case: its size.
        values: by the kind of noise.
        unit: of the values.
    """
    for name, value in values.items():
        # the measurement `gap` has no floating-point noise to compare with
        ratio = float("nan")
        if "float" in values:
            ratio = value / values["float"]
        yield {
            "what": what,
            "case": case,
            "noise": name,
            "value": f"{value:.3g}",
            "unit": unit,
            "to float": f"{ratio:.2f}",
        }


def measure(rounds: int) -> Iterator[dict[str, Any]]:
    """Yield the lines of all three measurements.

    Args:
        rounds: how often each variant is timed.
    """
    yield from noise(rounds)
    yield from local_epochs(rounds)
    yield from gap()


def main() -> None:
    """Measure, print and write benchmarks/results/grid_noise.csv."""
    options = counts(__doc__, rounds=7)
    with cpu_threads(1):
        tabulate("grid_noise", ([row] for row in measure(options.rounds)))


if __name__ == "__main__":
    main()
