"""The benchmark of the eigen step: what it times and compares."""

from __future__ import annotations

from itertools import count

import torch

from benchmarks.costs.eigen import differences, full, measure


def test_both_ways_take_turns_and_agree() -> None:
    x = torch.rand(50, 30, generator=torch.Generator().manual_seed(0))
    ticks = (k * k for k in count())  # each way's first turn is its shortest: 1 and 5 ticks
    found = measure(x, 3, 2, clock=lambda: float(next(ticks)))
    assert (found["seconds_truncated"], found["seconds_full"], found["ratio"]) == (
        "1.0000",
        "5.0000",
        "5.0",
    )
    assert float(found["error_values"]) < 1e-12 and float(found["error_subspace"]) < 1e-9


def test_differences_are_seen() -> None:
    x = torch.diag(torch.tensor([4.0, 3.0, 2.0, 1.0]))
    values, vectors = full(x, 2)
    turned = torch.eye(4, dtype=torch.float64)[[0, 2]]
    found = differences((values * torch.tensor([1.0, 1.5]), turned), (values, vectors))
    assert abs(found["error_values"] - 0.5) < 1e-12 and abs(found["error_subspace"] - 1) < 1e-12
