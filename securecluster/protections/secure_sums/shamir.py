"""Shamir secret sharing of 32-byte secrets, modulo a prime above 2^256 (Shamir 1979).

A secret is a polynomial's value at 0, and a share its value at the holder's x-coordinate. Any
`threshold` shares give the secret, and fewer are independent of it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache

from securecluster.errors import FrameError, UsageError

# smallest prime above 2^256, so that every secret of 32 bytes is below it
PRIME = (1 << 256) + 297
SECRET = 32
# bytes of a share's value
VALUE = 33
# Random bytes of a coefficient: 16 more than the prime has, so that it is uniform modulo the prime
# up to 2^-128.
COEFFICIENT = 49

ByteSource = Callable[[int], bytes]


@dataclass(frozen=True)
class Share:
    """One share of a secret.

    Args:
        secret: identifies the secret, such as by its owner and call; it is public.
        threshold: number of shares that give the secret.
        x: x-coordinate of the holder, from 1.
        y: value of the polynomial at x, secret.
    """

    secret: bytes
    threshold: int
    x: int
    y: int

    def __repr__(self) -> str:
        return f"Share(secret={self.secret.hex()[:16]}…, x={self.x}, y hidden)"


def share(
    secret: bytes, holders: Sequence[int], threshold: int, source: ByteSource, label: bytes = b""
) -> list[Share]:
    """Return one share of a secret for each holder (n,), in their order.

    Args:
        secret: 32 secret bytes.
        holders: x-coordinates (n,), distinct and between 1 and PRIME - 1.
        threshold: number of shares that give the secret, 1 to n.
        source: returns as many random bytes as it is asked for; the only randomness.
        label: identifies the secret in its shares.

    Raises:
        UsageError: a secret of another length, a threshold that is not between 1 and n, or an
            x-coordinate that is zero or not unique.
    """
    if not 1 <= threshold <= len(holders):
        raise UsageError(
            f"a threshold lies between 1 and the number of holders, {len(holders)}: {threshold} "
            "does not"
        )
    _check_coordinates(holders, UsageError)
    coefficients = polynomial(secret, threshold, source)
    return [Share(label, threshold, x, evaluate(coefficients, x)) for x in holders]


def polynomial(secret: bytes, threshold: int, source: ByteSource) -> list[int]:
    """Return the coefficients (threshold,) of a secret's polynomial, the highest power's first.

    Args:
        secret: 32 secret bytes.
        threshold: number of shares that give the secret, at least 1.
        source: returns as many random bytes as it is asked for; the only randomness.

    Raises:
        UsageError: a secret of another length.
    """
    if len(secret) != SECRET:
        raise UsageError(f"a secret to share has {SECRET} bytes, not {len(secret)}")
    coefficients = [int.from_bytes(secret, "big")]
    for _ in range(threshold - 1):
        random = int.from_bytes(source(COEFFICIENT), "big")
        coefficients.append(random % PRIME)
    coefficients.reverse()
    return coefficients


def evaluate(coefficients: Sequence[int], x: int) -> int:
    """Return a polynomial's value modulo PRIME by Horner's rule.

    Args:
        coefficients: coefficients, the highest power's first.
        x: where to evaluate it.
    """
    value = 0
    for coefficient in coefficients:
        value = (value * x + coefficient) % PRIME
    return value


def recover(shares: Sequence[Share]) -> bytes:
    """Return the secret that shares are of, 32 bytes.

    Shares beyond the threshold are compared with the polynomial of the first ones. Exactly
    `threshold` shares fit some polynomial always, so an altered share among them gives another
    secret: compare the result with a commitment.

    Args:
        shares: shares of one secret, at least its threshold.

    Raises:
        FrameError: shares of different secrets or thresholds, fewer than the threshold, a zero or
            repeated x-coordinate, a share that does not fit the others, or a secret of more than
            32 bytes.
    """
    _check_shares(shares)
    threshold = shares[0].threshold
    first = shares[:threshold]
    xs = tuple(item.x for item in first)
    for extra in shares[threshold:]:
        if _interpolate(first, lagrange_weights(xs, extra.x)) != extra.y:
            raise FrameError(
                f"the share of x-coordinate {extra.x} does not fit the others: a share was altered"
            )
    number = _interpolate(first, lagrange_weights(xs, 0))
    if number >> (8 * SECRET):
        raise FrameError("the shares give no secret of 32 bytes: a share was altered")
    return number.to_bytes(SECRET, "big")


def _check_shares(shares: Sequence[Share]) -> None:
    """Raise FrameError for shares that give no secret.

    Args:
        shares: shares to check.
    """
    if not shares:
        raise FrameError("a secret needs shares: there are none")
    first = shares[0]
    for item in shares:
        if item.secret != first.secret or item.threshold != first.threshold:
            raise FrameError("the shares belong to different secrets: ask for them again")
        if not 0 <= item.y < PRIME:
            raise FrameError(
                f"the share of x-coordinate {item.x} is not a number below the prime: it was "
                "altered"
            )
    if len(shares) < first.threshold:
        raise FrameError(
            f"{len(shares)} shares do not give a secret that needs {first.threshold}: too few "
            "clients replied"
        )
    _check_coordinates([item.x for item in shares], FrameError)


def _check_coordinates(
    coordinates: Sequence[int], error: type[UsageError] | type[FrameError]
) -> None:
    """Raise an error for x-coordinates that are zero, out of range or not unique.

    Args:
        coordinates: x-coordinates.
        error: class of the error.
    """
    if not all(0 < x < PRIME for x in coordinates):
        raise error(
            "an x-coordinate of a share lies between 1 and the prime: the value at 0 is the "
            "secret itself"
        )
    if len(set(coordinates)) < len(coordinates):
        raise error("two shares of a secret have the same x-coordinate: each holder has one")


def _interpolate(shares: Sequence[Share], weights: Sequence[int]) -> int:
    """Return the weighted sum of shares modulo PRIME.

    Args:
        shares: shares (t,).
        weights: Lagrange weights (t,) of their x-coordinates.
    """
    value = 0
    for item, weight in zip(shares, weights, strict=True):
        value += item.y * weight
    return value % PRIME


@lru_cache(maxsize=512)
def lagrange_weights(xs: tuple[int, ...], point: int) -> tuple[int, ...]:
    """Return the weights (t,) that give a polynomial's value from its values at `xs`.

    The weight of x_i is the product over j ≠ i of (point - x_j) / (x_i - x_j), modulo PRIME. They
    are kept, since the secrets of one sum are recovered from the same holders.

    Args:
        xs: distinct x-coordinates (t,).
        point: where the value is wanted; if it is one of `xs`, that one has weight 1.
    """
    numerators = _products_of_others([(point - x) % PRIME for x in xs])
    denominators = []
    for x in xs:
        product = 1
        for other in xs:
            if other != x:
                product = product * (x - other) % PRIME
        denominators.append(product)
    inverses = _inverses(denominators)
    weights = []
    for numerator, inverse in zip(numerators, inverses, strict=True):
        weights.append(numerator * inverse % PRIME)
    return tuple(weights)


def _products_of_others(factors: Sequence[int]) -> list[int]:
    """Return for each factor the product of all other ones modulo PRIME (t,).

    Args:
        factors: factors (t,), of which any may be zero.
    """
    count = len(factors)
    products = [1] * count
    before = 1
    for k in range(count):
        products[k] = before
        before = before * factors[k] % PRIME
    after = 1
    for k in reversed(range(count)):
        products[k] = products[k] * after % PRIME
        after = after * factors[k] % PRIME
    return products


def _inverses(numbers: Sequence[int]) -> list[int]:
    """Return the inverses modulo PRIME by one inversion (Montgomery 1987, section 10.3.1).

    Args:
        numbers: numbers (t,), none of them zero modulo PRIME.
    """
    others = _products_of_others(numbers)
    product = others[0] * numbers[0] % PRIME
    inverse = pow(product, -1, PRIME)
    inverses = []
    for other in others:
        inverses.append(other * inverse % PRIME)
    return inverses
