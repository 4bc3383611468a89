"""Measure what noise on a grid costs beside floating-point noise, and how float32 sums of gradients
are rounded.

python -m securecluster.benchmarks.grid_noise [--rounds 7]

Three measurements on one thread, each taking turns in one run:

- noise: nanoseconds a number of x + σn in float32 with torch's generator, and on a grid from the
  cipher.
- round: milliseconds of a local epoch with DP-SGD, without noise, with the former, and with the
  latter.
- gap: noise on a grid leaves one thing to floating point in DP-SGD. A sum of clipped gradients is
  rounded as it is made, so that two sums which differ by one example may differ by a little more
  than its clipped gradient. `apart` is that excess over the clip norm, the largest over examples.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any
from unittest import mock

import numpy as np
import torch

from securecluster import Federation
from securecluster.benchmarks.table import write
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


class FloatNoise:
    """Noise as a sum of floating-point numbers, with the interface of `GridNoise`."""

    def __init__(self, seeds: Sequence[bytes]) -> None:
        self._draw = torch.Generator().manual_seed(int.from_bytes(seeds[0][:4], "little"))

    def add_to(self, rows: torch.Tensor, grid: Sequence[float], sigma: Sequence[float]) -> None:
        """Add noise to rows (k, d) in place."""
        drawn = torch.randn(rows.shape, generator=self._draw, dtype=rows.dtype)
        rows += drawn.mul_(rows.new_tensor(list(sigma))[:, None])


def fastest(tasks: Mapping[str, Callable[[], Any]], rounds: int) -> dict[str, float]:
    """Return the least seconds of each task; they take turns."""
    found = dict.fromkeys(tasks, float("inf"))
    for _ in range(rounds):
        for name, task in tasks.items():
            began = time.perf_counter()
            task()
            found[name] = min(found[name], time.perf_counter() - began)
    return found


def noise(rounds: int) -> Iterator[dict[str, Any]]:
    """Yield nanoseconds a number."""
    for d in WIDTHS:
        rows = torch.randn(8 if d < 10**6 else 2, d)
        grid, sigma = [spacing(1.0, 1.0, d)] * len(rows), [deviation(1.0, 1.0, d)] * len(rows)
        seeds = [bytes([k] * 32) for k in range(len(rows))]
        made: dict[str, FloatNoise | GridNoise] = {
            "float": FloatNoise(seeds),
            "grid": GridNoise(seeds),
        }
        tasks = {name: partial(noised, own, rows, grid, sigma) for name, own in made.items()}
        taken = fastest(tasks, rounds)
        yield from rows_of(
            "noise",
            f"d = {d}",
            {name: s / rows.numel() * 1e9 for name, s in taken.items()},
            "ns a number",
        )


def noised(
    made: FloatNoise | GridNoise, rows: torch.Tensor, grid: Sequence[float], sigma: Sequence[float]
) -> None:
    """Add noise to a copy of rows."""
    made.add_to(rows.clone(), grid, sigma)


def local_epochs(rounds: int) -> Iterator[dict[str, Any]]:
    """Yield milliseconds of four clients' epochs."""
    draw = np.random.default_rng(0)
    for name, shape in NETWORKS.items():
        clients = {
            f"c{k}": (draw.normal(size=(100, *shape)), draw.integers(0, 10, 100)) for k in range(4)
        }
        held = {k: (x[:1], y[:1]) for k, (x, y) in clients.items()}
        federation = Federation.from_arrays(clients, test=held, classes=10, seed=0)
        flat = build(name, federation.shape, 10, Randomness(0))
        secret = NoiseStreams(lambda client: bytes(32), "benchmark")
        cohort = LocalTrainer(
            federation, flat, Randomness(0), torch.device("cpu"), torch.float32, secret=secret
        )
        taken = fastest(
            {kind: partial(epoch, cohort, kind) for kind in ("none", "float", "grid")}, rounds
        )
        yield from rows_of(
            "round", f"{name}, d = {flat.dimension}", {k: s * 1e3 for k, s in taken.items()}, "ms"
        )


def epoch(cohort: LocalTrainer, kind: str) -> None:
    """Train for an epoch of DP-SGD at batch 20."""
    plan = LocalTraining(0.1, 1, 20, clip=1.0, noise=0.0 if kind == "none" else 1.0)
    made = {"none": GridNoise, "float": FloatNoise, "grid": GridNoise}[kind]
    with mock.patch.object(dp_sgd, "GridNoise", made):
        cohort.train(
            Rows(cohort.start[None], (0,) * len(cohort.ids)), range(len(cohort.ids)), plan, 1
        )


def gap() -> Iterator[dict[str, Any]]:
    """Yield how much further apart neighbouring float32 sums are than the clip norm, over it."""
    draw = torch.Generator().manual_seed(0)
    for batch in BATCHES:
        left, right = (
            torch.randn(1, batch, 64, generator=draw),
            torch.randn(1, batch, 784, generator=draw),
        )
        one = (left[:, :1] * torch.ones_like(left), right[:, :1] * torch.ones_like(right))
        for name, sides in (
            ("gradients of any direction", (left, right)),
            ("equal gradients", one),
        ):
            gradients = {"w": Outer(*sides)}
            whole = total(gradients, torch.ones(1, batch))
            excess = -1.0
            for j in range(20):
                without = torch.ones(1, batch)
                without[0, j] = 0
                apart = (whole.double() - total(gradients, without).double()).norm()
                excess = max(excess, float(apart) - 1)
            yield from rows_of(
                "gap", f"batch {batch}, {name}", {"apart": excess}, "of the clip norm"
            )


def total(gradients: dict[str, Outer], weight: torch.Tensor) -> torch.Tensor:
    """Return the sum of gradients clipped to norm 1, of those whose weight is 1."""
    found, factors = clipped(gradients, weight, 1.0)
    summed = torch.zeros(1, 64, 784)
    for own in found.values():
        own.add_to(summed, factors)
    return summed


def rows_of(what: str, case: str, values: dict[str, float], unit: str) -> Iterator[dict[str, Any]]:
    """Yield a row for each value, with its ratio to floating-point noise."""
    for name, value in values.items():
        ratio = value / values["float"] if "float" in values else float("nan")
        yield {
            "what": what,
            "case": case,
            "noise": name,
            "value": f"{value:.3g}",
            "unit": unit,
            "to float": f"{ratio:.2f}",
        }


def main() -> None:
    """Measure, print and write benchmarks/results/grid_noise.csv."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()
    table = []
    with cpu_threads(1):
        for row in (*noise(options.rounds), *local_epochs(options.rounds), *gap()):
            print("  ".join(str(value) for value in row.values()), flush=True)
            table.append(row)
    write("grid_noise", table)


if __name__ == "__main__":
    main()
