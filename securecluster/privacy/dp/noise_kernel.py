"""What `grid_noise` does to a block of rows, compiled by numba: one loop over the cipher's words.

A loop that only does arithmetic takes as many numbers at once as the processor can, so what is
seldom needed stands outside of it: rows are copied in and out, and unsure numbers are looked for
where the largest remainder says that there are some. Cosine and sine are the polynomials of
`grid_noise`, and the logarithm is one as well.

The compiled code is kept beside this file, or in the user's cache, for later processes. It does not
notice when another file changes: numbers of other modules come as arguments.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable
from typing import Any

import numba
import numpy as np
from numpy.typing import NDArray

Words = NDArray[np.int64]

# pairs of words at a time, whose numbers stay in the innermost cache
CHUNK = 1024
EXPONENT = np.int64(-1 << 52)  # bits of the sign and the exponent
ROOT_OF_HALF = np.int64(0x3FE6A09E667F3BCD)  # bits of √½
HALF = np.int64(63 << 52)  # added to the bits of a number, multiplies it by 2^63
UNIT = 2.0**-63  # of words, in units of which u is
LOG_OF_EXPONENT = math.log(2.0) * 2.0**-52  # for an exponent that is still in its place
# Coefficients of log((1 + s)/(1 − s)) / s in powers of s², the lowest one first: they interpolate
# at Chebyshev's points up to s = (√2 − 1)/(√2 + 1), and err by less than 2^-45 of the logarithm
# (not in the papers).
LOGARITHM = (
    1.9999999999999472,
    0.6666666667957926,
    0.3999999489183238,
    0.28572166145875727,
    0.2217424991007749,
    0.19608095639753054,
)


def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the compiled function, which other processes take from a file if there may be one."""
    # no sum is reordered; there is no NaN, since rows are finite and no logarithm is of zero
    made: Any = numba.njit(fastmath={"contract", "nnan", "nsz"}, error_model="numpy", nogil=True)(
        function
    )
    with contextlib.suppress(RuntimeError):  # no folder can be written to
        made.enable_caching()
    compiled: Callable[..., Any] = made
    return compiled


@_compiled
def _copy(numbers: Any, out: Any) -> None:
    """Copy numbers to memory that may be longer."""
    for i in range(len(numbers)):
        out[i] = numbers[i]


@_compiled
def _add(
    words: tuple[Words, Words],
    numbers: tuple[Any, Any],
    remainders: NDArray[np.int64],
    sigma: float,
    shift: float,
    polynomials: tuple[tuple[float, ...], tuple[float, ...]],
) -> tuple[float, float, float]:
    """Round numbers to the grid and add rounded Gaussians; write the larger remainder of each pair.

    Returns:
        The largest remainder, and the smallest and the largest u.
    """
    radius_words, angle_words = words
    cosines, sines = numbers
    of_cosine, of_sine = polynomials
    c0, c1, c2, c3, c4, c5 = of_cosine
    s0, s1, s2, s3, s4 = of_sine
    # of σ² (−2 log u)/4, for points at length 2
    scale = -0.5 * sigma * sigma
    g0, g1, g2, g3, g4, g5 = LOGARITHM
    g0, g1, g2, g3, g4, g5 = g0 * scale, g1 * scale, g2 * scale, g3 * scale, g4 * scale, g5 * scale
    of_exponent = LOG_OF_EXPONENT * scale
    # Bits of positive numbers are ordered as they are, and maxima of integers are taken faster.
    most, least, top = np.int64(0), np.int64(2**63 - 1), np.int64(0)
    for i in range(len(radius_words)):
        # u = 2^k (1 + f), where √½ ≤ 1 + f < √2, in units of 2^-63
        bits = np.float64(abs(float(radius_words[i]) + 0.5)).view(np.int64)
        least, top = min(least, bits), max(top, bits)
        exponent = (bits - (ROOT_OF_HALF + HALF)) & EXPONENT
        f = np.int64(bits - exponent).view(np.float64) * UNIT - 1.0
        x = f / (f + 2.0)
        z = x * x
        log = x * (g0 + z * (g1 + z * (g2 + z * (g3 + z * (g4 + z * g5)))))
        radius = math.sqrt(float(exponent) * of_exponent + log)
        # as `grid_noise` turns points
        w = float(angle_words[i])
        q = w * w
        c = ((((c0 * q + c1) * q + c2) * q + c3) * q + c4) * q + c5
        s = ((((s0 * q + s1) * q + s2) * q + s3) * q + s4) * w
        s *= c
        c = c * c - 2.0
        s *= c
        c = c * c - 2.0
        s *= c
        c = c * c - 2.0
        c *= radius
        s *= radius
        # sums with the shift are whole steps of the grid
        shifted_c = c + shift
        shifted_s = s + shift
        of_c = np.float64(abs(c - (shifted_c - shift))).view(np.int64)
        of_s = np.float64(abs(s - (shifted_s - shift))).view(np.int64)
        remainder = max(of_c, of_s)
        most = max(most, remainder)
        remainders[i] = remainder
        cosines[i] = (float(cosines[i]) - shift) + shifted_c
        sines[i] = (float(sines[i]) - shift) + shifted_s
    smallest = np.int64(least).view(np.float64) * UNIT
    largest = np.int64(top).view(np.float64) * UNIT
    return np.int64(most).view(np.float64), smallest, largest


@_compiled
def draw(
    words: Words,
    block: NDArray[Any],
    grid: NDArray[np.float64],
    sigma: NDArray[np.float64],
    constants: tuple[Any, ...],
    unsure: Words,
) -> int:
    """Round a block of rows to their grids and add noise, but for pairs that are unsure.

    Args:
        words: of the cipher (c, 2, ⌈w/2⌉).
        block: numbers (c, w) in one piece of memory, changed in place.
        grid: spacing of each row (c,).
        sigma: standard deviation for each row (c,).
        constants: of `grid_noise`: `SHIFT`, the coefficients of both polynomials of words, `ERROR`
            and `TAIL`.
        unsure: memory (c · ⌈w/2⌉, 2) for the row and the position of each unsure pair.

    Returns:
        How many pairs are unsure.
    """
    shift, polynomials, error, tail = constants
    cosines, sines = np.empty(CHUNK, block.dtype), np.empty(CHUNK, block.dtype)
    remainders = np.empty(CHUNK, np.int64)
    rows, _, half = words.shape
    found = 0
    for k in range(rows):
        bound = (0.5 - sigma[k] / grid[k] * error) * grid[k]
        for start in range(0, half, CHUNK):
            stop = min(start + CHUNK, half)
            n = stop - start
            # An odd width leaves one Gaussian of the last pair unused.
            of_cosines, of_sines = block[k, start:stop], block[k, half + start : half + stop]
            _copy(of_cosines, cosines)
            _copy(of_sines, sines)
            own_words = words[k, 0, start:stop], words[k, 1, start:stop]
            memory = cosines[:n], sines[:n]
            most, least, top = _add(
                own_words, memory, remainders[:n], sigma[k], shift * grid[k], polynomials
            )
            if most < bound and least >= tail and top <= 1.0 - tail:
                _copy(cosines[: len(of_cosines)], of_cosines)
                _copy(sines[: len(of_sines)], of_sines)
                continue
            for i in range(n):
                u = abs(float(words[k, 0, start + i]) + 0.5) * UNIT
                if np.int64(remainders[i]).view(np.float64) >= bound or u < tail or u > 1.0 - tail:
                    unsure[found, 0], unsure[found, 1] = k, start + i
                    found += 1
                else:
                    of_cosines[i] = cosines[i]
                    if i < len(of_sines):
                        of_sines[i] = sines[i]
    return found
