"""Shamir's secret sharing, compared with polynomials that the tests evaluate themselves."""

from __future__ import annotations

import hashlib
import itertools
import random
from collections.abc import Callable
from fractions import Fraction

import numpy as np
import pytest

from securecluster.errors import UsageError
from securecluster.protections.secure_sums.shamir import (
    NUMBERS,
    PRIME,
    Numbers,
    lagrange_weights,
    polynomials,
    recover,
    share,
)


def source(seed: int) -> Callable[[int], bytes]:
    return lambda size: hashlib.shake_256(b"%d" % seed).digest(size)


def shared(secrets: int, threshold: int, holders: int) -> tuple[Numbers, Numbers]:
    """Return secrets (s, 16) and their shares (s, holders, 16)."""
    coefficients = polynomials(threshold, [source(k) for k in range(secrets)])
    return coefficients[:, 0], share(coefficients, holders)


def test_the_modulus_is_the_largest_prime_below_2_to_the_16() -> None:
    def is_prime(number: int) -> bool:
        return all(number % divisor for divisor in range(2, 256))

    assert is_prime(PRIME)
    assert not any(is_prime(number) for number in range(PRIME + 1, 1 << 16))


@pytest.mark.parametrize(
    ("holders", "threshold"), [(1, 1), (2, 2), (5, 3), (7, 7), (40, 21), (1000, 501)]
)
def test_any_threshold_of_shares_gives_the_secrets(holders: int, threshold: int) -> None:
    secrets, shares = shared(3, threshold, holders)
    draw = random.Random(holders)
    for _ in range(10 if holders < 1000 else 1):
        chosen = draw.sample(range(holders), threshold)
        found = recover(tuple(rank + 1 for rank in chosen), shares[:, chosen])
        assert np.array_equal(found, secrets)


def test_shares_are_values_of_the_polynomials_by_integers_of_python() -> None:
    coefficients = polynomials(67, [source(k) for k in range(3)])
    shares = share(coefficients, 99)
    assert shares.max() < PRIME
    for secret, x, number in itertools.product(range(3), (1, 2, 50, 99), (0, 7, 15)):
        own = coefficients[secret, :, number].tolist()
        value = sum(c * x**power for power, c in enumerate(own)) % PRIME
        assert shares[secret, x - 1, number] == value


def test_the_largest_numbers_are_multiplied_exactly() -> None:
    """All coefficients are the prime less one, so that sums are as large as they can be."""
    coefficients = np.full((1, 4000, NUMBERS), PRIME - 1, dtype=np.uint16)
    shares = share(coefficients, 4001)
    x = 3999
    value = (PRIME - 1) * sum(pow(x, power, PRIME) for power in range(4000)) % PRIME
    assert shares[0, x - 1].tolist() == [value] * NUMBERS


@pytest.mark.parametrize("first", [1, 40, 2000])
def test_numbers_that_are_no_residues_are_rejected(first: int) -> None:
    """As many numbers as begin the stream are above the prime: all that are drawn at first, too."""

    def draw(size: int) -> bytes:
        numbers = np.arange(size // 2) % 60_000
        numbers[:first] = PRIME + numbers[:first] % 15
        return numbers.astype("<u2").tobytes()

    (coefficients,) = polynomials(60, [draw])
    assert coefficients.reshape(-1).tolist() == list(range(first, first + 60 * NUMBERS))


def test_coefficients_are_uniform() -> None:
    drawn = polynomials(50, [source(k) for k in range(300)])
    # a mean of 240,000 uniform numbers, whose standard error is 38.6
    assert abs(drawn.astype(float).mean() - (PRIME - 1) / 2) < 5 * 38.6
    assert drawn.max() == PRIME - 1 or drawn.max() > PRIME - 10


def test_fewer_shares_than_the_threshold_fit_every_secret() -> None:
    _, shares = shared(1, 3, 3)
    for other in (0, 1, PRIME - 1):
        # the third share that makes the first two shares of another secret
        points = [(0, other), *((x, int(shares[0, x - 1, 0])) for x in (1, 2))]
        third = Fraction(0)
        for x, y in points:
            term = Fraction(y)
            for rival, _ in points:
                if rival != x:
                    term *= Fraction(3 - rival, x - rival)
            third += term
        altered = shares.copy()
        altered[0, 2, 0] = third.numerator * pow(third.denominator, -1, PRIME) % PRIME
        assert recover((1, 2, 3), altered)[0, 0] == other


def test_coordinates_that_no_holder_has_are_refused() -> None:
    for coordinates in ((0, 1, 2), (1, 2, PRIME), (1, -2, 3), (1, 1, 2)):
        with pytest.raises(UsageError, match="x-coordinates"):
            lagrange_weights(coordinates)
    coefficients = polynomials(3, [source(0)])
    for holders in (2, PRIME):
        with pytest.raises(UsageError, match="as many holders"):
            share(coefficients, holders)
