"""Skellam noise: against its exact probabilities, and by what its draws have in common."""

from __future__ import annotations

import itertools

import mpmath
import numpy as np
import pytest
from numpy.typing import NDArray
from scipy import stats

from securecluster.core.randomness import Randomness
from securecluster.privacy.dp import skellam_noise
from securecluster.privacy.dp.noise_streams import NoiseStreams
from securecluster.privacy.dp.skellam_noise import BITS, Table, draw, settled, table

KEY = bytes(range(32))


def words(count: int, seed: int = 0) -> NDArray[np.uint64]:
    return np.random.default_rng(seed).integers(0, 2**64, count, dtype=np.uint64)


def numbers(count: int, variance: int, seed: int = 0, draws: int = 1) -> NDArray[np.int64]:
    return draw(words(draws * count, seed), variance, draws, KEY)


def p_value(drawn: NDArray[np.int64], variance: float) -> float:
    """Return the p-value of a chi-squared test against scipy's probabilities."""
    law = stats.skellam(variance / 2, variance / 2)
    largest = int(3 * variance**0.5) + 1
    values = np.arange(-largest, largest + 1)
    expected = law.pmf(values) * len(drawn)
    observed = np.array([(drawn == value).sum() for value in values], dtype=float)
    kept = expected >= 10
    rest = len(drawn) - expected[kept].sum()
    counts = [*observed[kept], len(drawn) - observed[kept].sum()]
    return float(stats.chisquare(counts, [*expected[kept], rest]).pvalue)


@pytest.mark.parametrize("variance", [1, 7, 1000, 12_345])
def test_tables_have_the_exact_probabilities(variance: int) -> None:
    found = table(variance)
    last = len(found.high) - 1
    with mpmath.workprec(320):
        cumulated = mpmath.mpf(0)
        for k in range(min(last, 40)):
            weight = mpmath.exp(-variance) * mpmath.besseli(k, variance)
            cumulated += weight if k == 0 else 2 * weight
            entry = (int(found.high[k]) << 64) + int(found.low[k])
            # rounded down, to 2^-127
            assert 0 <= mpmath.ldexp(cumulated, BITS) - entry < 1
        # Nothing is cut off before the last entry could be told from 1.
        left_out = mpmath.exp(-variance) * mpmath.besseli(last + 1, variance)
        assert left_out < mpmath.ldexp(1, -BITS)


@pytest.mark.parametrize(("variance", "seed"), [(1, 0), (5, 1), (300, 2)])
def test_draws_have_the_law_of_skellam_numbers(variance: int, seed: int) -> None:
    drawn = numbers(200_000, variance, seed)
    assert 1e-3 < p_value(drawn, variance) < 1 - 1e-4
    assert p_value(drawn + 1, variance) < 1e-9  # the test can fail
    assert p_value(drawn, 1.05 * variance) < 1e-3


@pytest.mark.parametrize("variance", [1, 50, 1_000_003])
def test_the_guide_changes_no_search(variance: int) -> None:
    law = table(variance)
    edges = np.array([0, 2**63 - 1], dtype=np.uint64)
    tail = np.uint64(2**63 - 1) - (words(1000) >> np.uint64(40))
    uniform = np.concatenate([words(20_000) >> np.uint64(1), law.high[:-1], edges, tail])
    expected = np.searchsorted(law.high, uniform, side="right")
    assert (law.above(uniform) == expected).all()


def test_a_sum_of_shares_has_the_law_of_the_whole() -> None:
    shares = [numbers(100_000, 12, seed) for seed in range(8)]
    total = np.sum(shares, axis=0)
    assert p_value(total, 96) > 1e-3
    assert p_value(total - shares[0], 96) < 1e-9
    assert p_value(numbers(100_000, 12, 9, draws=8), 96) > 1e-3
    assert abs(total.mean()) < 5 * (96 / 1e5) ** 0.5
    assert total.var() == pytest.approx(96, rel=0.03)


def test_large_variances_have_their_moments() -> None:
    variance = 10_000_000
    drawn = numbers(50_000, variance)
    assert abs(drawn.mean()) < 5 * (variance / len(drawn)) ** 0.5
    assert drawn.var() == pytest.approx(variance, rel=0.03)
    assert stats.kstest(drawn / variance**0.5, "norm").pvalue > 1e-3


def test_words_that_equal_an_entry_are_settled_by_further_bits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In a table whose first bits are few, nearly every word needs more of them."""
    exact = table(3)
    coarse = Table(exact.high.copy(), exact.low.copy())
    coarse.high[:4] = coarse.high[0]
    for k, more in itertools.product(range(4), (0, 2**63, 2**64 - 1)):
        coarse.low[:4] = np.array([2**61, 2**62, 2**63, 3 * 2**62], dtype=np.uint64)
        first = int(coarse.high[k])
        entries = [(int(h) << 64) + int(w) for h, w in zip(coarse.high, coarse.low, strict=True)]
        expected = sum(entry <= (first << 64) + more for entry in entries)
        assert settled(coarse, first, more) == expected
        monkeypatch.setattr(skellam_noise, "_more_bits", lambda position, key, more=more: more)
        monkeypatch.setattr(skellam_noise, "table", lambda variance: coarse)
        word = np.array([2 * first, 2 * first + 1], dtype=np.uint64)
        assert list(draw(word, 3, 1, KEY)) == [expected, -expected]


def test_further_bits_are_64_and_of_their_key_and_position() -> None:
    drawn = [skellam_noise._more_bits(k, KEY) for k in range(1000)]
    others = [skellam_noise._more_bits(k, KEY[::-1]) for k in range(1000)]
    assert len({*drawn, *others}) == 2000
    assert drawn == [skellam_noise._more_bits(k, KEY) for k in range(1000)]
    # each bit is a coin: 500 of 1000, within six standard deviations
    for bit in range(64):
        assert abs(sum(bits >> bit & 1 for bits in drawn) - 500) < 95
    assert max(drawn) < 2**64


def test_a_draw_is_that_of_its_call_and_of_nothing_else() -> None:
    row = np.arange(50)
    streams = NoiseStreams.derived(Randomness(0), "run")

    def noise(source: NoiseStreams = streams, **changes: object) -> tuple[int, ...]:
        usual = {"client": 1, "purpose": "delta", "step": 2, "row": row}
        usual |= {"exponent": 10, "variance": 1000, "draws": 1}
        return tuple(source.skellam(**{**usual, **changes}).tolist())  # type: ignore[arg-type]

    assert noise() == noise() == noise(row=row.copy())
    others = [
        noise(client=2), noise(purpose="size"), noise(step=3), noise(row=row + 1),
        noise(exponent=11), noise(variance=1001), noise(draws=2),
        noise(NoiseStreams.derived(Randomness(1), "run")),
        noise(NoiseStreams.derived(Randomness(0), "another")),
    ]  # fmt: skip
    found = [noise(), *others]
    for one, other in itertools.combinations(found, 2):
        assert abs(np.corrcoef(one, other)[0, 1]) < 0.6
        assert one != other


@pytest.mark.parametrize("variance", [0, -1, 2**31 + 1])
def test_a_variance_beyond_a_table_is_refused(variance: int) -> None:
    with pytest.raises(ValueError, match="variance of 1 to"):
        table(variance)
