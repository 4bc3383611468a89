"""The integers of `grid_noise` in one pass over the cipher's words, compiled by numba.

numpy takes some thirty passes for a Gaussian, and numba makes one of them: cosine and sine are the
polynomials of `grid_noise`, and the logarithm is that of fdlibm (`e_log.c`, Sun Microsystems 1993),
which errs by less than a unit in the last place. What is drawn is the same to the bit, since a draw
that float64 may round to a wrong integer is named, and made again without error. numba is an extra
(`pip install 'securecluster[fast]'`); without it numpy draws. It takes seconds to load and compile,
once for a machine, so numpy draws the first `WORTH` numbers of a process.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import math
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

# numbers of a process from which loading and compiling pays
WORTH = 1 << 27
# pairs of words at a time, whose temporaries stay in the innermost cache
CHUNK = 1024
EXPONENT_OF_ONE = 0x3FF0000000000000
ROOT_OF_HALF = 0x3FE6A09E667F3BCD
MANTISSA = 0x000FFFFFFFFFFFFF
UNIT = 2.0**-63  # of words, in units of which u and 1 − u are
LOG_OF_TWO = math.log(2.0)
# of 2 s (f / (2 + f))² in fdlibm's logarithm, the lowest power first
LOGARITHM = (
    6.666666666666735130e-01,
    3.999999999940941908e-01,
    2.857142874366239149e-01,
    2.222219843214978396e-01,
    1.818357216161805012e-01,
    1.531383769920937332e-01,
    1.479819860511658591e-01,
)

# (words (2, half) of one row, −scale²/2, least remainder that is unsure, spacing of the grid, the
# row's numbers that get cosines, and those that get sines, marks (half,) of unsure pairs, whose
# numbers stay as they are) -> number of unsure pairs
Kernel = Callable[
    [NDArray[np.int64], float, float, float, NDArray[Any], NDArray[Any], NDArray[np.bool_]], int
]


class Usage:
    """Numbers that numpy has drawn in this process, which tell whether compiling pays.

    Args:
        numbers: drawn before.
    """

    def __init__(self, numbers: int = 0) -> None:
        self._numbers = numbers

    def pays(self, numbers: int) -> bool:
        """Return whether numbers are drawn by the compiled function; else count them.

        Args:
            numbers: to be drawn.
        """
        if self._numbers < WORTH:
            self._numbers += numbers
            return False
        return is_installed()


@functools.cache
def is_installed() -> bool:
    """Return whether numba is installed."""
    return importlib.util.find_spec("numba") is not None


usage = Usage()


@functools.cache
def kernel(of_cosine: tuple[float, ...], of_sine: tuple[float, ...], tail: float) -> Kernel:
    """Return the compiled function.

    Args:
        of_cosine: coefficients of 2 cos x in powers of w², the highest one first.
        of_sine: coefficients of 2 sin x / w.
        tail: u and 1 − u below which a pair is unsure.
    """
    numba = importlib.import_module("numba")
    # no sum is reordered; there is no NaN, since rows are finite and no logarithm is of zero
    compiled = numba.njit(fastmath={"contract", "nnan", "nsz"}, error_model="numpy", nogil=True)
    uniform, logarithm, add = compiled(_uniform), compiled(_logarithm), compiled(_add)
    turn, mark, nearest = compiled(_turn), compiled(_mark), compiled(_round)

    def draw(
        words: NDArray[np.int64],
        scale: float,
        unsure: float,
        grid: float,
        cosines: NDArray[Any],
        sines: NDArray[Any],
        marks: NDArray[np.bool_],
    ) -> int:
        u, angle = np.empty(CHUNK), np.empty(CHUNK)
        radius, worst = np.empty(CHUNK), np.empty(CHUNK)
        found = 0
        half = words.shape[1]
        for start in range(0, half, CHUNK):
            n = min(CHUNK, half - start)
            uniform(words[:, start : start + n], u, angle, worst, tail)
            logarithm(u, u.view(np.int64), radius, n, scale)
            turn(angle, radius, u, n, of_cosine, of_sine)
            nearest(u, worst, n)
            nearest(angle, worst, n)
            found += mark(worst, unsure, marks[start : start + n])
            add(cosines[start : start + n], u, worst, radius, unsure, grid)
            add(sines[start : start + n], angle, worst, radius, unsure, grid)
        return found

    made: Kernel = compiled(draw)
    return made


# Loops that read what is handed in, or write it, only copy: then the others run on several numbers
# at once.


def _uniform(words: NDArray[np.int64], u: Any, angle: Any, worst: Any, tail: float) -> None:
    """Write u in (0, 1) and the angle, and 1 in `worst` where the radius is less accurate."""
    n = words.shape[1]
    for i in range(n):
        u[i] = float(words[0, i])
    for i in range(n):
        angle[i] = float(words[1, i])
    for i in range(n):
        u[i] = abs(u[i] + 0.5) * UNIT
        worst[i] = 1.0 if u[i] < tail or u[i] > 1.0 - tail else 0.0


def _logarithm(u: Any, bits: Any, radius: Any, n: int, scale: float) -> None:
    """Write √(scale · log u) to `radius`, where `bits` are those of u, and are overwritten."""
    g0, g1, g2, g3, g4, g5, g6 = LOGARITHM
    # u = 2^k (1 + f), where √½ ≤ 1 + f < √2
    for i in range(n):
        shifted = bits[i] + (EXPONENT_OF_ONE - ROOT_OF_HALF)
        radius[i] = float(np.int32((shifted >> np.int64(52)) - 1023))
        bits[i] = (shifted & MANTISSA) + ROOT_OF_HALF
    for i in range(n):
        f = u[i] - 1.0
        s = f / (2.0 + f)
        z = s * s
        r = z * (g0 + z * (g1 + z * (g2 + z * (g3 + z * (g4 + z * (g5 + z * g6))))))
        h = 0.5 * f * f
        radius[i] = math.sqrt((radius[i] * LOG_OF_TWO - ((h - s * (h + r)) - f)) * scale)


def _turn(angle: Any, radius: Any, u: Any, n: int, of_cosine: Any, of_sine: Any) -> None:
    """Write the cosine to `u` and the sine to `angle`, times the radius, as `grid_noise` does."""
    c0, c1, c2, c3, c4, c5 = of_cosine
    s0, s1, s2, s3, s4 = of_sine
    for i in range(n):
        w = angle[i]
        q = w * w
        c = ((((c0 * q + c1) * q + c2) * q + c3) * q + c4) * q + c5
        s = ((((s0 * q + s1) * q + s2) * q + s3) * q + s4) * w
        s *= c
        c = c * c - 2.0
        s *= c
        c = c * c - 2.0
        s *= c
        c = c * c - 2.0
        u[i] = c * radius[i]
        angle[i] = s * radius[i]


def _round(numbers: Any, worst: Any, n: int) -> None:
    """Round numbers, and write the largest remainder of each position to `worst`."""
    for i in range(n):
        whole = np.rint(numbers[i])
        worst[i] = max(worst[i], abs(numbers[i] - whole))
        numbers[i] = whole


def _mark(worst: Any, unsure: float, marks: NDArray[np.bool_]) -> int:
    """Mark unsure pairs and return their number; the usual case is decided from the largest."""
    most = 0.0
    for i in range(len(marks)):
        most = max(most, worst[i])
        marks[i] = False
    found = 0
    if most >= unsure:
        for i in range(len(marks)):
            marks[i] = worst[i] >= unsure
            found += worst[i] >= unsure
    return found


def _add(part: Any, drawn: Any, worst: Any, memory: Any, unsure: float, grid: float) -> None:
    """Round numbers of a row to the grid and add integers, but for unsure ones."""
    inverse = 1.0 / grid
    for i in range(len(part)):
        memory[i] = part[i]
    for i in range(len(part)):
        noised = (np.rint(memory[i] * inverse) + drawn[i]) * grid
        drawn[i] = memory[i] if worst[i] >= unsure else noised
    for i in range(len(part)):
        part[i] = drawn[i]
