"""Noise on a grid: against mpmath on the cipher's own words, by its statistics, and by what a
reader of exact bits learns.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable

import mpmath
import numpy as np
import pytest
import torch
from cryptography.hazmat.primitives.ciphers import Cipher
from cryptography.hazmat.primitives.ciphers.algorithms import ChaCha20
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from scipy import stats

from securecluster.privacy.dp import fused_noise, grid_noise
from securecluster.privacy.dp.gaussian_mechanism import Clip, Noise
from securecluster.privacy.dp.grid_noise import (
    ERROR,
    FINE,
    FINEST,
    SHIFT,
    TAIL,
    GridNoise,
    deviation,
    rounded,
    spacing,
)
from securecluster.privacy.dp.noise_streams import NoiseStreams
from securecluster.privacy.pipeline import Pipeline

SEEDS = [hashlib.sha256(bytes([k])).digest() for k in range(5)]


def definition(seed: bytes, widths: list[int], scale: float) -> list[list[int]]:
    """Return the integers of one stream by their definition, with 1,000 bits for every Gaussian."""
    stream = Cipher(ChaCha20(seed, bytes(16)), mode=None).encryptor()
    found = []
    for call, d in enumerate(widths):
        half = (d + 1) // 2
        words = np.frombuffer(stream.update(bytes(16 * half)), dtype="<i8").tolist()
        pairs = []
        for k in range(half):
            u, turn, bits = max(words[k], -1 - words[k]), words[half + k], 63
            about = f"more bits {call} {k}".encode()
            key = hashlib.blake2b(about, digest_size=32, key=seed).digest()
            for more in range(15):
                number = more.to_bytes(8, "little")
                extra = hashlib.blake2b(number, digest_size=16, key=key).digest()
                u = u * 2**64 + int.from_bytes(extra[:8], "little")
                turn = turn * 2**64 + int.from_bytes(extra[8:], "little")
                bits += 64
            with mpmath.workprec(1100):
                radius = scale * mpmath.sqrt(-2 * mpmath.log(mpmath.ldexp(u, -bits)))
                angle = mpmath.pi * mpmath.ldexp(turn, -bits)
                pair = (radius * mpmath.cos(angle), radius * mpmath.sin(angle))
                pairs.append(tuple(mpmath.nint(value) for value in pair))
        found.append([int(one) for one, _ in pairs] + [int(other) for _, other in pairs])
        found[-1] = found[-1][:d]
    return found


@pytest.fixture(params=["numpy", "numba"])
def either(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Draw by one of the two."""
    if request.param == "numba":
        pytest.importorskip("numba")
        monkeypatch.setattr(fused_noise, "usage", fused_noise.Usage(fused_noise.WORTH))


@pytest.mark.few(1)
@pytest.mark.parametrize("scale", [1.5, 1000.0, 2.0**30 + 0.1])
def test_integers_are_those_of_the_definition(
    scale: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    settled = []

    def counted(*arguments: object) -> float:
        settled.append(arguments)
        return rounded(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(grid_noise, "rounded", counted)
    widths = [5, 301, 1, 402]
    drawn, wanted = GridNoise(SEEDS), [definition(seed, widths, scale) for seed in SEEDS]
    for call, d in enumerate(widths):
        rows = torch.zeros(5, d, dtype=torch.float64)
        drawn.add_to(rows, [1.0] * 5, [scale] * 5)
        assert rows.tolist() == [own[call] for own in wanted]
    assert (len(settled) > 0) == (scale > 2**29)


def test_numbers_that_float64_may_round_to_a_wrong_integer_are_drawn_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """So many as lie within the error of float64 of a half: one in 512 of these steps."""
    settled = []
    drawn, steps, count = GridNoise(SEEDS), 2.0**30, 4000
    monkeypatch.setattr(drawn, "_settled", lambda *_: float(settled.append(1) or 0))
    drawn.add_to(torch.zeros(5, count, dtype=torch.float64), [1.0] * 5, [steps] * 5)
    mean = 5 * count * 2 * steps * ERROR
    assert stats.poisson.cdf(len(settled), mean) > 1e-5
    assert stats.poisson.sf(len(settled) - 1, mean) > 1e-5


def test_a_stream_goes_on_where_it_was_and_blocks_change_nothing_between_streams(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    one, two = GridNoise(SEEDS), GridNoise(SEEDS)
    all_rows, some = torch.zeros(5, 9), torch.zeros(2, 9)
    one.add_to(all_rows, [0.25] * 5, [3.0] * 5)
    two.add_to(some, [0.25] * 2, [3.0] * 2)
    assert torch.equal(all_rows[:2], some)
    monkeypatch.setattr(grid_noise, "BLOCK", 18)
    three, others = GridNoise(SEEDS), torch.zeros(5, 9)
    three.add_to(others, [0.25] * 5, [3.0] * 5)
    assert torch.equal(all_rows, others)


def exact(radius_word: int, angle_word: int) -> tuple[mpmath.mpf, mpmath.mpf]:
    """Return the pair of Gaussians at the middle of the words' cell."""
    radius = mpmath.sqrt(-2 * mpmath.log((mpmath.mpf(radius_word) + 0.5) / 2**63))
    angle = mpmath.pi * (mpmath.mpf(angle_word) + 0.5) / 2**63
    return radius * mpmath.cos(angle), radius * mpmath.sin(angle)


@pytest.mark.parametrize("compiled", [False, True])
def test_float64_errs_less_than_what_is_allowed_for(
    compiled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The whole cell of a pair of words, at random radii, at the two ends of those that float64 is
    trusted with, and on both sides of where the logarithm takes another exponent.
    """
    draw = np.random.default_rng(0)
    ends = [int(TAIL * 2**63) + 1, int((1 - TAIL) * 2**63) - 1]
    roots = [
        int(math.sqrt(0.5) * 2.0 ** (63 - k)) + j for k in range(22) for j in (-(2**40), 2**40)
    ]
    some = [*roots, *np.repeat(ends, 478).tolist()]
    radius = np.concatenate([draw.integers(ends[0], ends[1], 4000), some])
    angle = np.concatenate([draw.integers(-(2**63), 2**63 - 1, 4996), [-(2**63), 2**63 - 1, 0, -1]])
    words = np.stack([radius, angle])[None]
    grid = 2.0**-48  # so fine that rounding to it adds nothing
    found = np.zeros(10_000)
    if compiled:
        pytest.importorskip("numba")
        from securecluster.privacy.dp import noise_kernel

        shift, polynomials, _, tail = grid_noise._constants()
        # with less than no error none is unsure
        constants = (shift, polynomials, -ERROR, tail)
        unsure = np.empty((5000, 2), dtype=np.int64)
        args = (np.array([grid]), np.ones(1), constants, unsure)
        assert not noise_kernel.draw(words, found[None], *args)
    else:
        drawn = GridNoise([bytes(32)])
        monkeypatch.setattr(drawn, "_next", lambda *_: words)
        monkeypatch.setattr(grid_noise, "_unsure", lambda *_: None)
        shifted = drawn._shifted(0, (1, 10_000), [grid], [1.0])
        found = shifted.reshape(-1) - SHIFT * grid
    with mpmath.workprec(200):
        wanted = [exact(r, a) for r, a in zip(radius.tolist(), angle.tolist(), strict=True)]
        wrong = [abs(found[k] - w[0]) for k, w in enumerate(wanted)] + [
            abs(found[5000 + k] - w[1]) for k, w in enumerate(wanted)
        ]
        corners = zip(ends * 50, angle[:100].tolist(), strict=True)
        cell = max(abs(exact(r, a)[0] - exact(r + 1, a)[0]) for r, a in corners)
        assert max(wrong) + cell < ERROR / 2


def test_polynomials_are_cosine_and_sine_all_around_the_circle() -> None:
    draw = np.random.default_rng(0)
    ends = np.linspace(-(2.0**63), 2.0**63, 4097)[:-1]
    words = np.concatenate([ends, draw.uniform(-(2.0**63), 2.0**63, 4000)])[None]
    points, square = np.empty((2, *words.shape)), np.empty(words.shape)
    grid_noise._turn(words, points, square)
    with mpmath.workprec(120):
        for k, word in enumerate(words[0].tolist()):
            angle = mpmath.pi * mpmath.ldexp(word, -63)
            assert abs(points[0, 0, k] / 2 - mpmath.cos(angle)) < 2.0**-46
            assert abs(points[1, 0, k] / 2 - mpmath.sin(angle)) < 2.0**-46


def test_rows_with_grids_and_deviations_of_their_own_get_what_each_gets_alone() -> None:
    grid, sigma = [0.25, 1.0, 0.25, 2.0**-20, 4.0], [3.0, 3.0, 70.0, 1.0, 1e4]
    together = torch.linspace(-40, 40, 5 * 11, dtype=torch.float64).view(5, 11)
    rows = together.clone()
    GridNoise(SEEDS).add_to(together, grid, sigma)
    for k, seed in enumerate(SEEDS):
        alone = rows[k : k + 1].clone()
        GridNoise([seed]).add_to(alone, grid[k : k + 1], sigma[k : k + 1])
        assert torch.equal(together[k : k + 1], alone)


def test_long_numbers_leave_on_the_grid_and_zeros_have_no_sign(either: None) -> None:
    edge = 2.0**51
    long = [edge + 0.5, -edge + 0.5, 2.4 * edge + 0.25, edge + 1.5, edge / 3, 2.0**60]
    row, noise = torch.tensor([[*long] * 20], dtype=torch.float64), torch.zeros(1, 120)
    GridNoise(SEEDS).add_to(noise, [1.0], [1000.0])
    expected = [round(x) + int(n) for x, n in zip(row[0].tolist(), noise[0].tolist(), strict=True)]
    GridNoise(SEEDS).add_to(row, [1.0], [1000.0])
    assert row[0].tolist() == [float(x) for x in expected]
    # A zero with a sign would come of one of these rows, and never of the other.
    for number in (-0.3, 0.3):
        small = torch.full((1, 3000), number)
        GridNoise(SEEDS).add_to(small, [1.0], [1.5])
        zeros = small[small == 0]
        assert len(zeros) > 600 and not zeros.signbit().any()


@pytest.mark.parametrize("word", [0, 1, 2**63 - 1])
def test_the_ends_of_the_stream_are_drawn_with_more_bits(word: int) -> None:
    found = {rounded(word, 0, 1.0, False, bytes([k]) * 32) for k in range(40)}
    assert all(math.isfinite(n) for n in found)
    assert found == {0.0} if word > 1 else min(found) >= 9


def test_they_have_the_probabilities_of_a_rounded_gaussian() -> None:
    rows = torch.zeros(4, 1 << 18)
    GridNoise(SEEDS).add_to(rows, [1.0] * 4, [1.5] * 4)
    flat = rows.flatten().numpy().astype(int)
    bins = np.arange(-6, 7)
    edges = np.concatenate([[-np.inf], (bins[:-1] + 0.5) / 1.5, [np.inf]])
    counts = np.bincount(np.clip(flat, -6, 6) + 6, minlength=13)
    assert stats.chisquare(counts, np.diff(stats.norm.cdf(edges)) * len(flat)).pvalue > 1e-4
    fine = torch.zeros(4, 1 << 18, dtype=torch.float64)
    GridNoise(SEEDS).add_to(fine, [2.0**-20] * 4, [1.0] * 4)
    assert stats.kstest(fine.flatten().numpy(), "norm").pvalue > 1e-4
    for beyond in (3, 4, 4.5):
        mean = fine.numel() * 2 * stats.norm.sf(beyond)
        seen = int((fine.abs() > beyond).sum())
        assert stats.poisson.cdf(seen, mean) > 1e-5
        assert stats.poisson.sf(seen - 1, mean) > 1e-5
    half = fine.shape[1] // 2
    across = np.corrcoef(np.concatenate([fine[:, :half].numpy(), fine[:, half:].numpy()]))
    assert np.abs(across - np.eye(8)).max() < 6 / np.sqrt(half)


@given(st.floats(1e-6, 1e4), st.floats(1e-12, 1e9), st.integers(1, 10**7))
def test_the_grid_is_fine_and_its_rounding_is_paid_for(z: float, reach: float, d: int) -> None:
    grid, sigma = spacing(z, reach, d), deviation(z, reach, d)
    assert math.frexp(grid)[0] == 0.5
    assert 2.0**FINE <= sigma / grid <= 2.0 ** (FINEST + 2)
    assert sigma == pytest.approx(z * (reach + grid * math.sqrt(d)), rel=1e-12)
    assert sigma <= z * reach * (1 + 2.0**-FINE) or sigma / grid >= 2.0**FINEST


@given(st.integers(0, 2**32 - 1), st.integers(1, 200), st.floats(-3, 3))
def test_rounding_moves_two_rows_apart_by_no_more_than_what_is_paid_for(
    seed: int, d: int, size: float
) -> None:
    draw = np.random.default_rng(seed)
    one = draw.normal(size=d) * 10**size
    step = draw.normal(size=d)
    other = one + step / np.linalg.norm(step)
    grid = spacing(1.0, 1.0, d)
    apart = grid * np.linalg.norm(np.rint(one / grid) - np.rint(other / grid))
    assert apart <= (1 + grid * math.sqrt(d)) * (1 + 1e-12)


def test_seeds_are_not_shown() -> None:
    assert "hidden" in repr(GridNoise(SEEDS)) and SEEDS[0].hex() not in repr(GridNoise(SEEDS))


# A reader who knows two candidate rows and asks which of them an answer was made of.

Row = NDArray[np.float32]
Release = Callable[[Row, float, int], Row]


def float_noise(row: Row, sigma: float, seed: int) -> Row:
    """What such noise usually is: a sum of two floating-point numbers."""
    drawn = np.random.default_rng(seed).standard_normal(row.size).astype(np.float32)
    return row + np.float32(sigma) * drawn


def own_noise(row: Row, sigma: float, seed: int) -> Row:
    """This project's mechanism, with clip norm 1."""
    pipeline = Pipeline([Clip(1.0), Noise(1.0, sigma)])
    pipeline.arm(NoiseStreams(lambda client: seed.to_bytes(32, "little"), "run"))
    return pipeline.forward(torch.from_numpy(row)[None].clone(), 1, False, (0,), "delta")[0].numpy()


def reachable(found: Row, row: Row, sigma: float) -> float:
    """Return the share of numbers that some float32 noise makes of the row."""
    noise = ((found.astype(np.float64) - row) / sigma).astype(np.float32)
    good = np.zeros(row.size, bool)
    for towards in (np.inf, -np.inf):
        tried = noise.copy()
        for _ in range(4):
            good |= row + np.float32(sigma) * tried == found
            tried = np.nextafter(tried, np.float32(towards))
    return float(good.mean())


def fits(found: Row, row: Row, sigma: float) -> float:
    """Return the log-likelihood of a row, but for a constant."""
    return -float(np.square((found.astype(np.float64) - row) / sigma).sum())


def right(
    release: Release,
    reader: Callable[[Row, Row, float], float],
    tries: int,
    sigma: float = 200.0,
    d: int = 1000,
) -> int:
    """Return how often the reader finds the row; at chance half of the tries."""
    found = 0
    for t in range(tries):
        draw = np.random.default_rng(t)
        rows = draw.normal(size=(2, d))
        rows = (0.9 * rows / np.linalg.norm(rows, axis=1, keepdims=True)).astype(np.float32)
        truth = t % 2
        sent = release(rows[truth], sigma, t)
        scores = [reader(sent, row, sigma) for row in rows]
        tie = scores[0] == scores[1]
        found += draw.integers(2) == truth if tie else int(scores[1] > scores[0]) == truth
    return found


@pytest.mark.always
@pytest.mark.parametrize("reader", [reachable, fits])
def test_a_reader_of_exact_bits_is_at_chance(reader: Callable[[Row, Row, float], float]) -> None:
    """ε is 0.0125: even the best reader is right in half of all tries, up to less than one in a
    hundred.
    """
    assert stats.binomtest(right(own_noise, reader, 200), 200, 0.5).pvalue > 1e-3


def test_the_same_reader_is_always_right_about_floating_point_noise() -> None:
    assert right(float_noise, reachable, 40) == 40


def test_what_leaves_is_on_a_grid_that_does_not_depend_on_the_row() -> None:
    grid = spacing(3.0, 1.0, 1000)
    for seed in range(5):
        row = np.random.default_rng(seed).normal(size=1000).astype(np.float32) / 50
        pipeline = Pipeline([Clip(1.0), Noise(1.0, 3.0)])
        pipeline.arm(NoiseStreams(lambda client: bytes(32), "run"))
        sent = pipeline.forward(torch.from_numpy(row)[None].double(), 1, False, (0,), "delta")[
            0
        ].numpy()
        assert np.array_equal(sent / grid, np.rint(sent / grid))
