"""Streams of Gaussians: against a plain Box-Muller in numpy on the cipher's own words, and by their statistics."""

from __future__ import annotations

import hashlib

import numpy as np
import pytest
import torch
from cryptography.hazmat.primitives.ciphers import Cipher
from cryptography.hazmat.primitives.ciphers.algorithms import ChaCha20
from numpy.typing import NDArray
from scipy import stats

from securecluster import normals
from securecluster.normals import Normals

SEEDS = [hashlib.sha256(bytes([k])).digest() for k in range(5)]


def expected(seed: bytes, widths: list[int]) -> list[NDArray[np.float64]]:
    """By the definition, one draw after the other from one stream."""
    stream, found = Cipher(ChaCha20(seed, bytes(16)), mode=None).encryptor(), []
    for d in widths:
        half = (d + 1) // 2
        high, low, angle = np.frombuffer(stream.update(bytes(12 * half)), dtype="<i4").astype(np.int64).reshape(3, half)
        u = ((high & 0x7FFFFFFF) + ((low & 0x7FFFFFFF) + 0.5) / 2**31) / 2**31
        radius, turned = np.sqrt(-2 * np.log(u)), angle / 2**31 * np.pi
        found.append(np.concatenate([radius * np.cos(turned), radius * np.sin(turned)])[:d])
    return found


@pytest.mark.parametrize("block", [1, 7, 1 << 17])
@pytest.mark.parametrize(("dtype", "error"), [(torch.float64, 1e-12), (torch.float32, 2e-6)])
def test_draws_are_those_of_the_definition(block: int, dtype: torch.dtype, error: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(normals, "BLOCK", block)
    drawn, widths, scale = Normals(SEEDS), [5, 8, 1, 5], torch.tensor([1.0, 2.0, 0.5, 3.0, 1.0], dtype=dtype)
    wanted = [expected(seed, widths) for seed in SEEDS]
    for number, d in enumerate(widths):
        rows = torch.full((5, d), torch.nan, dtype=dtype)
        drawn.fill(rows, scale)
        for k in range(5):
            np.testing.assert_allclose(rows[k].numpy(), float(scale[k]) * wanted[k][number], rtol=0, atol=error * 10)


def test_the_first_rows_alone_draw_the_same() -> None:
    one, two = Normals(SEEDS), Normals(SEEDS)
    all_rows, some = torch.empty(5, 9), torch.empty(2, 9)
    one.fill(all_rows, torch.ones(5))
    two.fill(some, torch.ones(2))
    assert torch.equal(all_rows[:2], some)


def test_they_are_gaussian_to_the_tail() -> None:
    rows = torch.empty(4, 1 << 18)
    Normals(SEEDS).fill(rows, torch.ones(4))
    flat = rows.double().flatten().numpy()
    assert stats.kstest(flat, "norm").pvalue > 1e-4
    for beyond in (3, 4, 4.5):
        mean = len(flat) * 2 * stats.norm.sf(beyond)
        assert stats.poisson.cdf(np.sum(np.abs(flat) > beyond), mean) > 1e-5
        assert stats.poisson.sf(np.sum(np.abs(flat) > beyond) - 1, mean) > 1e-5
    half = rows.shape[1] // 2
    assert np.abs(np.corrcoef(np.concatenate([rows[:, :half].numpy(), rows[:, half:].numpy()])) - np.eye(8)).max() < 6 / np.sqrt(half)


@pytest.mark.parametrize(("word", "radius"), [(0, 9.3), (-1, 0.0)])
def test_no_word_makes_anything_but_a_finite_number(word: int, radius: float) -> None:
    """A stream of zeros is the largest number that there is, one of ones the smallest."""
    rows = torch.empty(1, 2)
    normals._box_muller(torch.tensor([[word, word, 0]], dtype=torch.int32), torch.ones(1, 1), rows)
    assert float(rows[0, 0]) == pytest.approx(radius, abs=0.05)
    assert bool(rows.isfinite().all())


def test_seeds_are_not_shown() -> None:
    assert "hidden" in repr(Normals(SEEDS)) and SEEDS[0].hex() not in repr(Normals(SEEDS))
