"""Shamir's secret sharing, compared with polynomials that the tests evaluate themselves."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace

import pytest

from securecluster.errors import FrameError, UsageError
from securecluster.protections.secure_sums.shamir import (
    COEFFICIENT,
    PRIME,
    Share,
    lagrange_weights,
    recover,
    share,
)

SECRETS = [bytes(32), b"\xff" * 32, bytes(range(32))]


def source(seed: int) -> Callable[[int], bytes]:
    return random.Random(seed).randbytes


def is_prime(number: int, bases: range) -> bool:
    """Miller-Rabin with the given bases."""
    odd = number - 1
    twos = (odd & -odd).bit_length() - 1
    odd >>= twos
    for base in bases:
        power = pow(base, odd, number)
        if power in (1, number - 1):
            continue
        for _ in range(twos - 1):
            power = power * power % number
            if power == number - 1:
                break
        else:
            return False
    return True


def test_the_modulus_is_the_smallest_prime_above_2_to_the_256() -> None:
    assert is_prime(PRIME, range(2, 66))
    assert not any(is_prime(number, range(2, 12)) for number in range(2**256, PRIME))
    # the test tells primes from others
    assert [n for n in range(11, 60) if is_prime(n, range(2, 5))] == [
        *(11, 13, 17, 19, 23, 29, 31, 37, 41, 43, 47, 53, 59)
    ]


def test_sympy_agrees_that_the_modulus_is_prime() -> None:
    sympy = pytest.importorskip("sympy")
    assert sympy.isprime(PRIME)


@pytest.mark.parametrize("secret", SECRETS)
@pytest.mark.parametrize(("holders", "threshold"), [(1, 1), (2, 2), (5, 3), (7, 7), (40, 21)])
def test_any_threshold_of_shares_gives_the_secret(
    secret: bytes, holders: int, threshold: int
) -> None:
    draw = random.Random(holders)
    xs = draw.sample(range(1, 2**31), holders)
    shares = share(secret, xs, threshold, source(1))
    assert [item.x for item in shares] == xs
    for _ in range(10):
        assert recover(draw.sample(shares, threshold)) == secret
    assert recover(shares) == secret


def test_shares_are_values_of_the_polynomial_of_the_random_bytes() -> None:
    secret = bytes(range(32))
    draw = source(7)
    slope = int.from_bytes(draw(COEFFICIENT), "big")
    curvature = int.from_bytes(draw(COEFFICIENT), "big")
    for item in share(secret, [1, 2, 9, PRIME - 1], 3, source(7)):
        value = int.from_bytes(secret, "big") + slope * item.x + curvature * item.x**2
        assert item.y == value % PRIME


def test_shares_of_another_implementation_are_recovered() -> None:
    draw = random.Random(3)
    for _ in range(20):
        coefficients = [draw.randrange(2**256), *(draw.randrange(PRIME) for _ in range(4))]
        xs = draw.sample(range(1, 1000), 5)
        shares = []
        for x in xs:
            y = sum(c * x**power for power, c in enumerate(coefficients)) % PRIME
            shares.append(Share(b"", 5, x, y))
        assert recover(shares) == coefficients[0].to_bytes(32, "big")


def test_fewer_shares_than_the_threshold_fit_every_secret() -> None:
    shares = share(bytes(range(32)), [1, 2, 3], 3, source(0))
    for other in SECRETS:
        # the third share that makes the first two shares of another secret
        at_zero = Share(b"", 3, 0, int.from_bytes(other, "big"))
        known = [at_zero, *shares[:2]]
        weights = lagrange_weights((0, 1, 2), 3)
        third = sum(w * item.y for w, item in zip(weights, known, strict=True)) % PRIME
        assert recover([*shares[:2], Share(b"", 3, 3, third)]) == other


def test_too_few_or_foreign_shares_are_refused() -> None:
    shares = share(bytes(32), range(1, 6), 3, source(0), b"one")
    others = share(bytes(32), range(1, 6), 3, source(0), b"other")
    with pytest.raises(FrameError, match="2 shares do not give"):
        recover(shares[:2])
    with pytest.raises(FrameError, match="there are none"):
        recover([])
    with pytest.raises(FrameError, match="different secrets"):
        recover([*shares[:2], others[2]])
    with pytest.raises(FrameError, match="different secrets"):
        recover([*shares[:2], replace(shares[2], threshold=2)])


def test_zero_and_repeated_coordinates_are_refused() -> None:
    for xs in ([0, 1, 2], [1, 2, PRIME], [1, -2, 3], [1, 1, 2]):
        with pytest.raises(UsageError, match="x-coordinate"):
            share(bytes(32), xs, 2, source(0))
    shares = share(bytes(32), [1, 2, 3], 2, source(0))
    with pytest.raises(FrameError, match="same x-coordinate"):
        recover([shares[0], shares[0]])
    with pytest.raises(FrameError, match="secret itself"):
        recover([shares[0], replace(shares[1], x=0)])


def test_altered_shares_are_found_where_there_are_more_than_needed() -> None:
    shares = share(bytes(range(32)), range(1, 6), 3, source(0))
    for place in range(4):
        altered = list(shares[:4])
        altered[place] = replace(altered[place], y=altered[place].y ^ 1)
        with pytest.raises(FrameError, match="altered"):
            recover(altered)
    with pytest.raises(FrameError, match="below the prime"):
        recover([*shares[:2], replace(shares[2], y=PRIME)])


def test_a_value_above_32_bytes_is_no_secret() -> None:
    with pytest.raises(FrameError, match="no secret of 32 bytes"):
        recover([Share(b"", 1, 1, 2**256)])


def test_secrets_and_thresholds_that_do_not_fit_are_refused() -> None:
    with pytest.raises(UsageError, match="31"):
        share(bytes(31), [1, 2], 2, source(0))
    for threshold in (0, 3):
        with pytest.raises(UsageError, match="threshold"):
            share(bytes(32), [1, 2], threshold, source(0))


def test_a_thousand_holders_recover_a_secret() -> None:
    shares = share(bytes(range(32)), range(1, 1001), 501, source(0))
    assert recover(shares[499:]) == bytes(range(32))


def test_no_share_is_printed() -> None:
    item = Share(b"label", 2, 1, 123456789)
    assert "123456789" not in repr(item)
