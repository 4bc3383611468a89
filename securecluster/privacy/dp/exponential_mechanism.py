"""The exponential mechanism on counts: a choice of the largest one, with a price as Gaussian noise.

A client chooses j with probability proportional to exp(η·c_j), where c_j counts its samples with a
property (McSherry & Talwar 2007). Blanking a sample, adding or removing one changes every count by
0 or 1, in one direction, so the logarithms of the probabilities change by values within a range of
length η: the mechanism is η-bounded-range (Durfee & Rogers 2019). Replacing a sample changes counts
by −1, 0 or 1, and the range is 2η. Its price is at most that of twice the mean, since it is to
blank one sample and to fill in another one (Dong, Roth & Su 2022, theorem 2.14).

Its price is that of a Gaussian mechanism which is at most as private. Two distributions whose
log-likelihood ratios lie in [t − η, t] follow, by post-processing, from two distributions on two
points with the ratios t and t − η (Kairouz, Oh & Viswanath 2015, for t = η/2). Their trade-off
function has one vertex, and it lies above the Gaussian one, which is convex, if the vertex does.
The Gaussian of the largest mean over all t is therefore a bound, which composes as every Gaussian
does (Dong, Roth & Su 2022, theorem 4; the bound itself is not in a paper).

A choice is drawn from a ChaCha20 stream by 128 bits: no probability is off by more than 2^-100,
far below any δ.
"""

from __future__ import annotations

import hashlib
import math
from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from securecluster.errors import UsageError

if TYPE_CHECKING:
    from securecluster.privacy.dp.noise_streams import NoiseStreams

Array = NDArray[np.float64]
POINTS = 4001  # values of t, whose maximum is flat
ROUNDED_UP = 1 + 1e-6  # of the largest value on the grid of t, for what lies between its points
SMALLEST = 1e-9  # ranges and multipliers that are searched for
LARGEST = 500.0
BITS = 128  # of a draw
UNIT_BITS = 1000  # probabilities below 2^-1000 are zero


@lru_cache(256)
def noise_multiplier(bounded_range: float) -> float:
    """Return z of Gaussian noise that is at most as private as the mechanism.

    Args:
        bounded_range: η, positive.
    """
    from scipy.stats import norm

    t = np.linspace(0, bounded_range, POINTS)[1:-1]
    # probabilities of the point of the larger ratio: q, and p = e^t q
    q = -np.expm1(t - bounded_range) / (np.exp(t) - np.exp(t - bounded_range))
    p = np.exp(t) * q
    # of 1 − p and 1 − q where these are small: p near 1 has no digits left
    upper_q = np.expm1(t) / (np.exp(t) - np.exp(t - bounded_range))
    upper_p = np.exp(t - bounded_range) * upper_q
    quantile_p = np.where(p < 0.5, norm.ppf(p), norm.isf(upper_p))
    quantile_q = np.where(q < 0.5, norm.ppf(q), norm.isf(upper_q))
    mean = float(np.max(quantile_p - quantile_q)) * ROUNDED_UP
    return 1 / mean


def bounded_range(multiplier: float) -> float:
    """Return the largest η whose price is at most that of Gaussian noise.

    Args:
        multiplier: z of the Gaussian noise, positive.
    """
    low, high = SMALLEST, LARGEST
    if noise_multiplier(high) > multiplier:
        return high
    if noise_multiplier(low) < multiplier:
        # so small ranges have prices in proportion to them
        return low * noise_multiplier(low) / multiplier
    for _ in range(100):
        middle = math.sqrt(low * high)
        if noise_multiplier(middle) >= multiplier:
            low = middle
        else:
            high = middle
    return low


def probabilities(counts: Array, bounded_range: float) -> Array:
    """Return the probability of each choice, (k,).

    Args:
        counts: (k,) numbers of samples.
        bounded_range: η.

    Raises:
        UsageError: there is nothing to choose from, or a count is infinite or no number.
    """
    if not len(counts) or not np.all(np.isfinite(counts)) or not 0 <= bounded_range < math.inf:
        raise UsageError(
            f"a noisy choice of {len(counts)} counts with a range of {bounded_range:g} has no "
            "probabilities: give one or more finite counts, and a finite range from 0"
        )
    exponents = bounded_range * (counts - counts.max())
    weights = np.exp(exponents)
    shares: Array = weights / weights.sum()
    return shares


def choice(
    counts: Array, bounded_range: float, draws: NoiseStreams, client: int, purpose: str, step: int
) -> int:
    """Return a client's choice, the same whenever it is asked the same.

    Args:
        counts: (k,) numbers of samples, or other numbers that neighbouring data change by at most
            1, all in one direction.
        bounded_range: η.
        draws: the clients' secret draws.
        client: the client's number.
        purpose: names the draw.
        step: number of the call.

    Raises:
        UsageError: there is nothing to choose from, or a count is infinite or no number.
    """
    shares = probabilities(counts, bounded_range)
    # other counts have draws of their own: two answers by one draw would show which count changed
    about = hashlib.blake2b(np.ascontiguousarray(counts, dtype=np.float64).tobytes()).digest()
    draw = int.from_bytes(draws.stream(client, purpose, step, about, BITS // 8), "little")
    return drawn(shares, draw)


def drawn(shares: Array, draw: int) -> int:
    """Return the choice that a draw falls on, without rounding.

    Args:
        shares: (k,) probabilities of the choices.
        draw: whole number from 0, uniform below 2^`BITS`.
    """
    # floats are whole numbers of a small unit
    weights = [int(math.ldexp(float(share), UNIT_BITS)) for share in shares]
    aim = draw * sum(weights)
    above = 0
    for number, weight in enumerate(weights):
        above += weight << BITS
        if aim < above:
            return number
    raise ValueError(f"a draw of {draw} is not below 2^{BITS}")
