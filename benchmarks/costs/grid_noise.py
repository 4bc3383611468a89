"""How float32 sums of gradients are rounded, which is the one step of DP-SGD that noise on a grid
leaves to floating point.

python -m benchmarks.costs.grid_noise

A sum of clipped gradients is rounded while it is formed, so two sums that differ by one example may
differ by a little more than its clipped gradient. `apart` is the largest such excess over all
examples, in units of the clip norm.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from benchmarks.table import tabulate
from securecluster.core.devices import cpu_threads
from securecluster.models.per_example_gradients import Outer, clipped

BATCHES = (20, 200, 2000, 60_000)
INPUTS = 784
OUTPUTS = 64


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
        cases = {"of any direction": varied, "equal": equal}
        for name, gradient in cases.items():
            excess = largest_excess({"w": gradient}, batch)
            yield {"batch": batch, "gradients": name, "apart": f"{excess:.3g}"}


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


if __name__ == "__main__":
    with cpu_threads(1):
        print(tabulate("grid_noise", ([row] for row in gap())))
