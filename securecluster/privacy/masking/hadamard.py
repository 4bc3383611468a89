"""Orthonormal matrices with entries ±1/√n of many sizes, applied as a few small matrix products.

A Kronecker product of Hadamard matrices is one. Those used here have orders up to 128: Sylvester's
(powers of two) and Paley's of both kinds (q + 1 for primes q ≡ 3 mod 4, 2(q + 1) for primes q ≡ 1
mod 4), and their doublings. Products of them lie so close to any d that hardly any padding is
needed, where powers of two may need d numbers more.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from functools import cache

import numpy as np
from numpy.typing import NDArray

from securecluster.core.lazy_torch import torch

LARGEST = 128  # a constant bound on the factors keeps a product O(d log d)


@cache
def factors(d: int) -> tuple[int, ...]:
    """Orders of Hadamard matrices, ascending, whose product is the smallest size ≥ d that the
    fewest factors or one more reach.

    Counted over all d: at most 4.4 % above d from d = 1,000, 2.1 % from 14,000, 0.7 % from
        1,000,000.
    """
    fewest = next(k for k in itertools.count(1) if LARGEST**k >= d)
    found = (
        choice
        for k in (fewest, fewest + 1)
        for choice in itertools.combinations_with_replacement(_orders(), k)
        if math.prod(choice) >= d
    )
    return min(found, key=lambda choice: (math.prod(choice), sum(choice), choice))


@cache
def matrix(order: int) -> NDArray[np.int8]:
    """A Hadamard matrix H (n, n) of ±1 with H·Hᵀ = n·I (Paley 1933; Sylvester 1867).

    Raises:
        ValueError: an order this module has no construction for.
    """
    if order == 1:
        return np.ones((1, 1), dtype=np.int8)
    if order & (order - 1):  # no power of two: those are Sylvester's
        if order % 4 == 0 and _is_prime(order - 1):
            return _paley(order - 1)
        if order % 4 == 0 and order % 8 and _is_prime(order // 2 - 1):
            return _paley(order // 2 - 1)
    if order % 2:
        raise ValueError(f"no Hadamard matrix of order {order} is known here")
    return np.kron(np.array([[1, 1], [1, -1]], dtype=np.int8), matrix(order // 2))


def transform(rows: torch.Tensor, parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """(A_1 ⊗ … ⊗ A_k)·x for each row x of (b, n), from the small matrices A alone; a new tensor (b,
    n).
    """
    b, n = rows.shape
    left, right = b, n
    for part in parts:
        right //= len(part)
        rows = (
            rows.reshape(-1, len(part)) @ part.T
            if right == 1
            else torch.matmul(part, rows.view(left, len(part), right))
        )
        left *= len(part)
    return rows.view(b, n)


@cache
def _orders() -> tuple[int, ...]:
    primes = [q for q in range(3, LARGEST) if _is_prime(q)]
    found = {1, 2} | {q + 1 if q % 4 == 3 else 2 * (q + 1) for q in primes}
    return tuple(sorted({n << k for n in found for k in range(8) if n << k <= LARGEST}))


def _is_prime(q: int) -> bool:
    return q > 1 and all(q % k for k in range(2, math.isqrt(q) + 1))


def _paley(q: int) -> NDArray[np.int8]:
    """Kind I, order q + 1, for q ≡ 3 mod 4; kind II, order 2(q + 1), for q ≡ 1 mod 4."""
    squares = {k * k % q for k in range(1, q)}
    character = np.array([0] + [1 if k in squares else -1 for k in range(1, q)], dtype=np.int8)
    conference = np.zeros((q + 1, q + 1), dtype=np.int8)
    conference[0, 1:] = 1
    conference[1:, 0] = 1 if q % 4 == 1 else -1
    conference[1:, 1:] = character[(np.arange(q)[:, None] - np.arange(q)) % q]
    identity = np.eye(q + 1, dtype=np.int8)
    if q % 4 == 3:
        return identity + conference
    return np.kron(conference, np.array([[1, 1], [1, -1]], dtype=np.int8)) + np.kron(
        identity, np.array([[1, -1], [-1, -1]], dtype=np.int8)
    )
