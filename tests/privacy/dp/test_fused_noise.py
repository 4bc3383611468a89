"""One compiled pass draws the same bits as numpy does, whose integers are tested with mpmath."""

from __future__ import annotations

import hashlib
import math
import subprocess
import sys

import mpmath
import numpy as np
import pytest
import torch

from securecluster.privacy.dp import fused_noise, grid_noise
from securecluster.privacy.dp.grid_noise import GridNoise

SEEDS = [hashlib.sha256(bytes([k])).digest() for k in range(3)]


def noised(widths: list[int], grid: list[float], sigma: list[float]) -> list[torch.Tensor]:
    noise = GridNoise(SEEDS)
    draw = torch.Generator().manual_seed(0)
    rows = [torch.randn(3, d, generator=draw) for d in widths]
    for each in rows:
        noise.add_to(each, grid, sigma)
    return rows


def test_both_draw_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("numba")
    settled = []
    rounded = grid_noise.rounded

    def counted(*arguments: object) -> float:
        settled.append(arguments)
        return rounded(*arguments)  # type: ignore[arg-type]

    # chunks of the kernel, blocks of rows, odd widths, and a pair of which one number is drawn
    monkeypatch.setattr(grid_noise, "BLOCK", 3000)
    grid = [2.0**-20, 2.0**-29, 0.5]
    sigma = [0.1, 1.9, 700.3]
    widths = [7001, 1, 2, 2999]
    plain = noised(widths, grid, sigma)
    monkeypatch.setattr(grid_noise, "rounded", counted)
    monkeypatch.setattr(fused_noise, "usage", fused_noise.Usage(fused_noise.WORTH))
    fused = noised(widths, grid, sigma)
    for one, other in zip(plain, fused, strict=True):
        assert torch.equal(one, other)
    assert settled


def test_numpy_draws_until_loading_pays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fused_noise, "WORTH", 100)
    monkeypatch.setattr(fused_noise, "kernel", lambda: int)
    usage = fused_noise.Usage()
    assert [usage.pays(60) for _ in range(3)] == [False, False, True]
    monkeypatch.setattr(fused_noise, "kernel", lambda: None)
    assert not usage.pays(60)


def test_numpy_draws_where_numba_does_not_load(monkeypatch: pytest.MonkeyPatch) -> None:
    fused_noise.kernel.cache_clear()
    monkeypatch.setitem(sys.modules, "numba", None)
    monkeypatch.delitem(sys.modules, "securecluster.privacy.dp.noise_kernel", raising=False)
    assert fused_noise.kernel() is None
    fused_noise.kernel.cache_clear()


def test_the_logarithm_is_a_polynomial() -> None:
    pytest.importorskip("numba")
    from securecluster.privacy.dp.noise_kernel import LOGARITHM

    largest = (math.sqrt(2) - 1) / (math.sqrt(2) + 1)
    with mpmath.workprec(120):
        for x in map(mpmath.mpf, np.linspace(1e-9, largest, 2001).tolist()):
            found = mpmath.polyval(LOGARITHM[::-1], x**2) * x
            assert abs(found / mpmath.log((1 + x) / (1 - x)) - 1) < 2.0**-45


def test_compiled_code_is_kept_for_other_processes() -> None:
    pytest.importorskip("numba")
    code = """
import torch
from securecluster.privacy.dp import fused_noise, grid_noise
fused_noise.usage = fused_noise.Usage(fused_noise.WORTH)
grid_noise.GridNoise([bytes(32)]).add_to(torch.zeros(1, 5), [1.0], [2.0])
print(sum(fused_noise.kernel().stats.cache_hits.values()))
"""
    hits = [
        subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
        for _ in range(2)
    ]
    assert hits[1].stdout == "1\n"


def test_it_is_compiled_even_where_it_cannot_be_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    numba = pytest.importorskip("numba")
    from securecluster.privacy.dp.noise_kernel import _compiled

    def refuse(*_: object) -> None:
        raise RuntimeError("no locator available")

    monkeypatch.setattr(numba.core.caching.FunctionCache, "__init__", refuse)
    assert _compiled(opposite)(-2) == 2


def opposite(number: int) -> int:
    return -number
