"""One compiled pass draws the same bits as numpy does, whose integers are tested with mpmath."""

from __future__ import annotations

import hashlib

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


def test_numpy_draws_until_compiling_pays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fused_noise, "WORTH", 100)
    monkeypatch.setattr(fused_noise, "is_installed", lambda: True)
    usage = fused_noise.Usage()
    assert [usage.pays(60) for _ in range(3)] == [False, False, True]
    monkeypatch.setattr(fused_noise, "is_installed", lambda: False)
    assert not usage.pays(60)
