"""Shamir secret sharing of sixteen numbers at a time, modulo the largest prime below 2^16.

A secret is sixteen numbers (Shamir 1979, of each by itself), that is 255.99 bits. Each is a
polynomial's value at 0, and a share has the values of all of them at the holder's x-coordinate. Any
`threshold` shares give the secret, and fewer are independent of it. The field is small so that the
shares of many secrets are one product of matrices: all its sums are exact in float64.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from securecluster.core.lazy_torch import torch
from securecluster.errors import UsageError

PRIME = 65_521
# numbers of a secret, and of a share
NUMBERS = 16
# bytes of a share's value, in little-endian order
VALUE = 2 * NUMBERS
# Of the numbers below 2^16, one in 4,369 is not below the prime: more are never missing in practice
SPARE = 32
# secrets that are shared at a time: their numbers stay in a core's cache
TOGETHER = 32

Numbers = NDArray[np.uint16]


def polynomials(threshold: int, sources: Sequence[Callable[[int], bytes]]) -> Numbers:
    """Return the uniform coefficients (secrets, threshold, 16) of secrets' polynomials.

    The first ones are the secret itself; the others are those of x, x², …

    Args:
        threshold: number of shares that give a secret, at least 1.
        sources: of each secret, a function that returns the first bytes of a uniform stream, as
            many as it is asked for; the only randomness.
    """
    count = threshold * NUMBERS
    drawn = count + count // 256 + SPARE
    data = b"".join([source(2 * drawn) for source in sources])
    numbers = np.frombuffer(data, dtype="<u2").reshape(len(sources), drawn)
    coefficients = numbers[:, :count].astype(np.uint16)
    # Rejected, and not reduced: the kept ones are exactly uniform.
    for k in np.flatnonzero((coefficients >= PRIME).any(axis=1)).tolist():
        kept = numbers[k][numbers[k] < PRIME]
        while len(kept) < count:
            drawn *= 2
            more = np.frombuffer(sources[k](2 * drawn), dtype="<u2")
            kept = more[more < PRIME]
        coefficients[k] = kept[:count]
    return coefficients.reshape(len(sources), threshold, NUMBERS)


def share(coefficients: Numbers, holders: int) -> Numbers:
    """Return the shares (secrets, holders, 16) at the x-coordinates 1 … holders.

    Args:
        coefficients: (secrets, threshold, 16) as `polynomials` returned them.
        holders: number of holders, at least the threshold.

    Raises:
        UsageError: fewer holders than the threshold, or more than the field has coordinates.
    """
    threshold = coefficients.shape[1]
    if not threshold <= holders < PRIME:
        raise UsageError(
            f"a threshold of {threshold} has as many holders of shares or more, up to "
            f"{PRIME - 1}: {holders} are not"
        )
    # By torch, whose threads are those that the run was given.
    powers = torch.from_numpy(_powers(holders, threshold))
    shares = np.empty((len(coefficients), holders, NUMBERS), dtype=np.uint16)
    for start in range(0, len(coefficients), TOGETHER):
        part = coefficients[start : start + TOGETHER]
        # columns of some secrets side by side: one product
        columns = part.transpose(1, 0, 2).reshape(threshold, -1).astype(np.float64)
        values = (powers @ torch.from_numpy(columns)).numpy().astype(np.uint64)
        # numpy divides by a constant faster than it takes remainders
        values -= values // np.uint64(PRIME) * np.uint64(PRIME)
        table = values.astype(np.uint16).reshape(holders, -1, NUMBERS)
        shares[start : start + TOGETHER] = table.transpose(1, 0, 2)
    return shares


def recover(coordinates: tuple[int, ...], shares: Numbers) -> Numbers:
    """Return the secrets (secrets, 16) that shares are of.

    Exactly `threshold` shares fit some polynomial always, so an altered share gives another secret:
    compare the result with a commitment.

    Args:
        coordinates: x-coordinates (threshold,) of the holders, distinct and from 1.
        shares: shares (secrets, threshold, 16).
    """
    weights = np.array(lagrange_weights(coordinates), dtype=np.int64)
    secrets = np.tensordot(shares.astype(np.int64), weights, axes=(1, 0)) % PRIME
    return secrets.astype(np.uint16)


@lru_cache(maxsize=64)
def _powers(holders: int, threshold: int) -> NDArray[np.float64]:
    """Return x^k modulo PRIME for x = 1 … holders and k = 0 … threshold - 1."""
    coordinates = np.arange(1, holders + 1, dtype=np.int64)
    powers = np.ones((holders, threshold), dtype=np.int64)
    for exponent in range(1, threshold):
        powers[:, exponent] = powers[:, exponent - 1] * coordinates % PRIME
    return powers.astype(np.float64)


@lru_cache(maxsize=1 << 12)
def lagrange_weights(coordinates: tuple[int, ...]) -> tuple[int, ...]:
    """Return the weights (t,) that give a polynomial's value at 0 from its values.

    The weight of x_i is the product over j ≠ i of x_j / (x_j - x_i), modulo PRIME. They are kept,
    since most secrets of a sum are recovered from shares of the same coordinates.

    Args:
        coordinates: distinct x-coordinates (t,), from 1.

    Raises:
        UsageError: an x-coordinate that is zero, out of range or not unique.
    """
    if len(set(coordinates)) < len(coordinates) or not all(0 < x < PRIME for x in coordinates):
        raise UsageError("x-coordinates of shares are distinct and lie between 1 and the prime")
    weights = []
    for x in coordinates:
        numerator = denominator = 1
        for other in coordinates:
            if other != x:
                numerator = numerator * other % PRIME
                denominator = denominator * (other - x) % PRIME
        weights.append(numerator * pow(denominator, -1, PRIME) % PRIME)
    return tuple(weights)
