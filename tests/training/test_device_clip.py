"""Factors of clipping on a device: the kernel, compiled for the CPU, against torch's operations."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import compiled_kernels
import pytest
import torch
from pretended import PRETENDED, counted, pretending

from securecluster.models.per_example_gradients import clip_factors
from securecluster.training import device_clip

LAUNCHERS = """
extern "C" void launch_clip_factors(int grid, int block, const double *a, const double *b,
    const void *c, void *d, bool *e, int f, int g, int h, int i, double j, double k) {
    LAUNCH(clip_factors(a, b, c, d, e, f, g, h, i, j, k))
}
"""
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def kernel(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., None]:
    folder = tmp_path_factory.mktemp("clip")
    return compiled_kernels.compiled(folder, device_clip.KERNEL, LAUNCHERS)("clip_factors")


@pytest.mark.parametrize("sides", [0, 1, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_kernel_computes_what_the_operations_do(
    kernel: Callable[..., None], dtype: torch.dtype, sides: int
) -> None:
    generator = torch.Generator().manual_seed(0)
    norms = torch.rand(2, 3, 70, dtype=torch.float64, generator=generator)
    others = torch.rand(sides, 3, 70, dtype=torch.float64, generator=generator)
    norms[0, 0, :4] = torch.tensor([math.nan, math.inf, 1e200, 0.0])
    norms[1, 0, 3] = 0.0
    if sides:
        others[0, 1, :3] = torch.tensor([math.nan, math.inf, 50.0])
    weight = torch.rand(3, 70, dtype=dtype, generator=generator)
    found, wrong = device_clip.launched(kernel, norms, others, weight, 0.6, 40.0)
    factors, as_wrong = clip_factors(norms, others, weight, 0.6, 40.0)
    assert torch.equal(wrong, as_wrong)
    assert int(wrong.sum()) == 3 + (3 if sides else 0)
    torch.testing.assert_close(
        found, factors, rtol=1e-6 if dtype == torch.float32 else 1e-14, atol=0
    )
    assert found.dtype == dtype and found[0, 3] == weight[0, 3]
    assert device_clip.right(kernel, CPU)


@pytest.mark.parametrize("number", [3, 4])
def test_a_wrong_kernel_is_not_used(kernel: Callable[..., None], number: int) -> None:
    def wrong(grid: Any, block: Any, arguments: list[Any]) -> None:
        kernel(grid, block, arguments)
        changed = arguments[number].view(-1)  # factors, or which are wrong
        changed[5] = ~changed[5] if number == 4 else changed[5] * 1.001

    assert not device_clip.right(wrong, CPU)


def test_on_a_device_it_is_one_operation() -> None:
    norms, weight = torch.rand(2, 3, 4, dtype=torch.float64), torch.rand(3, 4)
    expected = clip_factors(norms, norms[:0], weight, 0.3, 9.0)
    with pretending(), counted() as costs:
        there = norms.to(PRETENDED)
        found = device_clip.factors_there(there, there[:0], weight.to(PRETENDED), 0.3, 9.0)
        assert dict(costs.launches) == {"clip_factors": 1}
        assert all(torch.equal(a.cpu(), b) for a, b in zip(found, expected, strict=True))
