"""Optimizers over a client axis against torch.optim, row by row."""

from __future__ import annotations

import pytest
import torch

from securecluster.errors import UsageError
from securecluster.models.optimizers import build

SETTINGS = {"sgd": ("sgd", 0.0), "momentum": ("sgd", 0.9), "adam": ("adam", 0.0)}
ACTIVE = (3, 3, 2, 2, 1)  # rows that take part in a step


def normal(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def theirs(name: str, momentum: float, row: torch.Tensor) -> torch.optim.Optimizer:
    return (
        torch.optim.SGD([row], 0.1, momentum=momentum)
        if name == "sgd"
        else torch.optim.Adam([row], 0.1)
    )


@pytest.mark.parametrize("product", [False, True], ids=["values", "product"])
@pytest.mark.parametrize(("name", "momentum"), SETTINGS.values(), ids=SETTINGS)
def test_each_row_goes_where_torch_takes_it(name: str, momentum: float, product: bool) -> None:
    start = normal(0, 3, 4, 5)
    ours = {"w": start.clone()}
    optimizer = build(name, ours, 0.1, momentum)
    rows = [start[k].clone().requires_grad_() for k in range(3)]
    others = [theirs(name, momentum, row) for row in rows]
    for s, k in enumerate(ACTIVE):
        left, right = normal(2 * s + 1, k, 4, 6), normal(2 * s + 2, k, 6, 5)
        optimizer.begin()
        if product:
            optimizer.product("w", left, right)
        else:
            optimizer.value("w", left @ right)
        for row, other, gradient in zip(rows, others, left @ right, strict=False):
            row.grad = gradient
            other.step()
    torch.testing.assert_close(ours["w"], torch.stack(rows).detach(), rtol=1e-12, atol=1e-12)
    assert not torch.allclose(ours["w"], start)


def test_parameters_do_not_mix() -> None:
    ours = {"a": torch.zeros(2, 3), "b": torch.zeros(2, 3)}
    optimizer = build("adam", ours, 0.1)
    optimizer.begin()
    optimizer.value("a", torch.ones(2, 3))
    assert bool((ours["a"] < 0).all()) and not ours["b"].any()


def test_unknown_optimizers_are_refused_by_name() -> None:
    with pytest.raises(UsageError, match=r"'adagrad'.*sgd, adam"):
        build("adagrad", {}, 0.1)
