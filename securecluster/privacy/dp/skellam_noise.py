"""Skellam noise: whole numbers that are drawn by inversion of a table.

Skellam noise of variance μ is the difference of two Poisson numbers of mean μ/2. Its probabilities
are P(X = k) = e^(-μ) I_|k|(μ), where I are the modified Bessel functions. Sums of independent
Skellam numbers are Skellam, and their variances add up.

A table holds P(|X| <= k), rounded down to `BITS` bits. A number is drawn from a word of 64 bits:
one bit is the sign, and 63 choose |X|. Where these do not decide, 64 more do. So the distance of a
number from its law is the table's error, below 2^-100 in total variation. Neither an error nor the
time depends on the numbers that noise is added to. The assumption is that the words are random.
"""

from __future__ import annotations

import hashlib
import itertools
import math
from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np
import numpy.typing as npt

# bits of the table's probabilities, and those that a first word decides by
BITS = 127
HALF = 63
# bits of the recurrence beyond those of the table
GUARD = 160
# largest variance of one table, of about half a million entries
LARGEST_VARIANCE = 1 << 31
# numbers that are drawn together, so that temporaries stay in cache
BLOCK = 1 << 16
# steps from where the guide points, before the table is searched
STEPS = 3

Words = npt.NDArray[np.uint64]
Integers = npt.NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Table:
    """Distribution function of |X|.

    Args:
        high: first 63 bits of P(|X| <= k) for k = 0, 1, … (n,), the last one 2^63.
        low: the 64 bits that follow (n,).
    """

    high: Words
    low: Words

    @cached_property
    def guide(self) -> Integers:
        """Return where to search, by the first bits of a uniform number.

        It has about two entries for each one of the table.
        """
        bits = len(self.high).bit_length() + 1
        starts = np.arange(1 << bits, dtype=np.uint64) << np.uint64(HALF - bits)
        guide: Integers = np.searchsorted(self.high, starts, side="right")
        return guide

    def above(self, uniform: Words) -> Integers:
        """Return the number of entries whose first bits are not above those of a uniform number.

        Args:
            uniform: uniform numbers of 63 bits (n,).
        """
        bits = len(self.high).bit_length() + 1
        indices: Integers = self.guide[uniform >> np.uint64(HALF - bits)]
        for _ in range(STEPS):
            indices += self.high[indices] <= uniform
        # Numbers in the tail have many entries with the same first bits.
        unresolved = np.nonzero(self.high[indices] <= uniform)[0]
        indices[unresolved] = np.searchsorted(self.high, uniform[unresolved], side="right")
        return indices


@lru_cache(maxsize=64)
def table(variance: int) -> Table:
    """Return the table of a variance.

    The recurrence I_(k-1) = I_(k+1) + (2k/μ) I_k is stable downwards (Miller's algorithm: Olver et
    al. 2010, section 3.6): any start beyond the tail gives the probabilities, up to a factor, which
    their sum determines. It is computed with whole numbers of `BITS` + `GUARD` bits and more.

    Args:
        variance: μ, a positive whole number of at most `LARGEST_VARIANCE`.

    Raises:
        ValueError: the variance is out of range.
    """
    if not 1 <= variance <= LARGEST_VARIANCE:
        raise ValueError(f"a table has a variance of 1 to 2^31, not {variance}")
    weights = _weights(variance)
    normalizer = 2 * sum(weights) - weights[0]
    cumulated = 0
    high = []
    low = []
    for k, weight in enumerate(weights):
        cumulated += weight if k == 0 else 2 * weight
        probability = (cumulated << BITS) // normalizer
        high.append(probability >> 64)
        low.append(probability & (2**64 - 1))
        # What is left has a probability below 2^-BITS.
        if probability >= (1 << BITS) - 1:
            break
    high[-1] = 1 << HALF
    low[-1] = 0
    return Table(np.array(high, dtype=np.uint64), np.array(low, dtype=np.uint64))


def _weights(variance: int) -> list[int]:
    """Return whole numbers in proportion to P(X = k), for k = 0, 1, …, until they vanish.

    Args:
        variance: μ.
    """
    # P(X >= k) is below exp(-k²/(2μ + k)), of which this many bits are wanted.
    nats = (BITS + GUARD) * math.log(2)
    last = math.ceil((nats + math.sqrt(nats * nats + 8 * variance * nats)) / 2)
    above = 0
    weight = 1 << 64
    weights = [weight]
    for k in range(last, 0, -1):
        below = above + 2 * k * weight // variance
        above = weight
        weight = below
        weights.append(weight)
    weights.reverse()
    return weights


def draw(words: Words, variance: int, draws: int, key: bytes) -> Integers:
    """Return Skellam numbers, each the sum of some draws of one table.

    Args:
        words: random words (draws · n,).
        variance: variance of a draw.
        draws: draws in a number.
        key: 32 secret bytes, of the further bits that rare draws need.

    Returns:
        Numbers (n,) of variance draws · variance.
    """
    law = table(variance)
    drawn = np.empty(len(words), dtype=np.int64)
    for start in range(0, len(words), BLOCK):
        block = words[start : start + BLOCK]
        drawn[start : start + BLOCK] = _inverted(block, law, start, key)
    if draws == 1:
        return drawn
    sums: Integers = drawn.reshape(draws, -1).sum(axis=0)
    return sums


def _inverted(words: Words, law: Table, start: int, key: bytes) -> Integers:
    """Return a draw for each word.

    Args:
        words: random words (n,).
        law: the table.
        start: position of the first word among all, for further bits.
        key: key of the further bits.
    """
    one = np.uint64(1)
    uniform = words >> one
    magnitudes = law.above(uniform)
    # A word that equals an entry's first bits may lie on either side of the entry.
    before = np.maximum(magnitudes - 1, 0)
    unsure = np.nonzero(law.high[before] == uniform)[0]
    for position in unsure.tolist():
        more = _more_bits(start + position, key)
        magnitudes[position] = settled(law, int(uniform[position]), more)
    negative = (words & one).astype(np.int64)
    # -x is ~x + 1
    return (magnitudes ^ -negative) + negative


def settled(law: Table, first: int, more: int) -> int:
    """Return |X| for a uniform number of 127 bits.

    Args:
        law: the table.
        first: its first 63 bits.
        more: the 64 bits that follow.
    """
    start = int(np.searchsorted(law.high, np.uint64(first), side="left"))
    for k in itertools.count(start):
        entry = (int(law.high[k]), int(law.low[k]))
        if (first, more) < entry:
            return k
    raise AssertionError("unreachable")


def _more_bits(position: int, key: bytes) -> int:
    """Return the 64 bits that follow a word's own.

    Args:
        position: position of the word.
        key: secret key.
    """
    name = f"more bits {position}".encode()
    digest = hashlib.blake2b(name, digest_size=8, key=key)
    return int.from_bytes(digest.digest(), "little")
