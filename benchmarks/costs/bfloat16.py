"""Measure what bfloat16 would gain in local training of a CNN on a CPU, and what it would change.

python -m benchmarks.costs.bfloat16 [--clients 8] [--repeats 9]

Weights, updates and steps stay float32. Convolutions of `cnn-briggs`, and products of its wide
dense layer, round their inputs to bfloat16, in which a processor with AVX512-BF16 multiplies, and
their outputs to float32. Ten steps of 10 samples for every client on one thread; the variants take
turns, and seconds are the least of the processor.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch

from benchmarks.costs.dpsgd import PLAN, cohort
from benchmarks.table import write
from securecluster.core.devices import cpu_threads
from securecluster.messaging.messages import Rows
from securecluster.models import deferred_steps, products
from securecluster.models.fused_layers import Conv
from securecluster.training.config import LocalTraining

MODEL = "cnn-briggs"
LOW = torch.bfloat16
# by name: are convolutions and products in bfloat16?
VARIANTS = {
    "float32": (False, False),
    "bfloat16 convolutions": (True, False),
    "bfloat16 convolutions and products": (True, True),
}


def rounded(x: torch.Tensor) -> torch.Tensor:
    """Return numbers in bfloat16, in the same layout."""
    return x.to(LOW)


@contextmanager
def in_bfloat16(convolutions: bool, of_products: bool) -> Iterator[None]:
    """Replace operations by those in bfloat16.

    Args:
        convolutions: whether forward and backward passes of convolutions.
        of_products: whether large products.
    """
    forward = torch.conv2d
    backward = Conv._aten_backward
    exact = products.product

    def low_forward(x: torch.Tensor, kernel: torch.Tensor, bias: Any, *more: Any) -> torch.Tensor:
        if bias is not None:
            bias = rounded(bias)
        return forward(rounded(x), rounded(kernel), bias, *more).float()

    def low_backward(
        conv: Conv,
        grad_output: torch.Tensor,
        x: torch.Tensor,
        kernel: torch.Tensor,
        bias_sizes: list[int] | None,
        mask: list[bool],
    ) -> Any:
        gradients = backward(
            conv, rounded(grad_output), rounded(x), rounded(kernel), bias_sizes, mask
        )
        return [None if one is None else one.float() for one in gradients]

    def low_product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        if a.numel() * b.shape[1] < products.SMALLEST:
            return exact(a, b)
        return torch.mm(rounded(a), rounded(b)).float()

    with (
        mock.patch.object(torch, "conv2d", low_forward if convolutions else forward),
        mock.patch.object(Conv, "_aten_backward", low_backward if convolutions else backward),
        mock.patch.object(deferred_steps, "product", low_product if of_products else exact),
    ):
        yield


def measure(clients: int, repeats: int) -> list[dict[str, Any]]:
    """Return a row for each variant.

    Args:
        clients: of a round.
        repeats: of each measurement.
    """
    batched = cohort(MODEL, clients, False, torch.float32)
    plan = LocalTraining(PLAN.lr, 1, PLAN.batch_size, steps=PLAN.steps, dropout=False)
    start = Rows(batched.start[None], (0,) * clients)
    seconds: dict[str, list[float]] = {name: [] for name in VARIANTS}
    updates: dict[str, torch.Tensor] = {}
    for turn in range(repeats + 1):
        for name, low in VARIANTS.items():
            with in_bfloat16(*low):
                began = time.process_time()
                updates[name] = batched.train(start, range(clients), plan, 1)
                taken = time.process_time() - began
            if turn:  # the first one prepares kernels
                seconds[name].append(taken)
    exact = updates["float32"]
    reference = min(seconds["float32"])
    rows = []
    for name, times in seconds.items():
        deviations = (updates[name] - exact).norm(dim=1) / exact.norm(dim=1)
        row = {
            "variant": name,
            "milliseconds": f"{1e3 * min(times):.0f}",
            "times_faster": f"{reference / min(times):.2f}",
            "moved": f"{float(deviations.mean()):.3f}",
        }
        print("  ".join(row.values()), flush=True)
        rows.append(row)
    return rows


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command.

    Args:
        arguments: the command line; None takes the process's own.
    """
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=9)
    chosen = parser.parse_args(arguments)
    with cpu_threads(1):
        rows = measure(chosen.clients, chosen.repeats)
    write("bfloat16", rows)


if __name__ == "__main__":
    main()
