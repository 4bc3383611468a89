"""Gaussian noise on a grid: every released number is a whole multiple of a power of two.

A floating-point sum x + σn reveals x by its lowest bits (Mironov 2012). Here a row x is rounded to
the grid first, and an integer that is drawn without error is added to it:

    x ↦ g (⌊x/g⌉ + ⌊σn/g⌉),   n standard Gaussian.

⌊x/g⌉ is an integer, so this is g ⌊⌊x/g⌉ + σn/g⌉: the Gaussian mechanism applied to a rounded row,
and rounded afterwards, which is post-processing. Two rows that differ by Δ differ by at most
Δ + g√d once they are rounded, so σ = z (Δ + g√d) has the privacy of noise multiplier z exactly,
whatever the accountant (Balle and Wang 2018, theorem 8, and Poisson batches alike).

n comes from 63 bits for a radius and 64 for an angle (Box and Muller 1958). In float64 its error is
at most `ERROR`. The integer is the right one unless σn/g lies that close to where rounding changes,
or the radius is one of the few that are less accurate. Such a draw, about one in a hundred
thousand, is made again with as many more bits of the cipher as it takes (mpmath). So no part of the
Gaussian is cut off, and δ needs no addition. The assumptions are that the cipher's words are random
and that float64 functions err by less than a hundred units in the last place. The integers do not
depend on how the functions are computed: numpy does here, which has less to do a call than torch,
and cosine and sine are polynomials, of which it takes sums and products of whole blocks. On a GPU
the same integers are computed by `device_noise`, and with numba, in long runs, by `fused_noise`.

One gap remains: float32 sums of DP-SGD's gradients are rounded while they are formed.
`benchmarks.costs.grid_noise` measures this, and the margin of the clip is larger.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from securecluster.core.lazy_torch import torch
from securecluster.privacy.dp import fused_noise

if TYPE_CHECKING:
    import mpmath

Numbers = NDArray[np.float64]

# numbers that are drawn together, so that temporaries stay in cache (not in the papers)
BLOCK = 1 << 16
# A grid has at least 2^FINE steps in a standard deviation, and its rounding moves a row by
# Δ/2^FINE at most.
FINE = 10
# It has at most 2^(FINEST + 1) steps, beyond which too many draws would need more bits (not in the
# papers).
FINEST = 30
# error of a Gaussian in float64, where u and 1 − u are at least TAIL
ERROR = 2.0**-40
TAIL = 2.0**-23
# bits of a word that are used for the radius
HALF = 63
# Coefficients of 2 cos x and 2 sin x / x in powers of x², the highest one first, for an eighth of
# an angle, which is then doubled this often: they interpolate at Chebyshev's points up to π/8, and
# the coordinates err by less than 2^-46 (not in the papers).
DOUBLINGS = 3
COSINE = (
    -5.492177754152349e-07,
    4.9602840182414876e-05,
    -0.0027777777510432414,
    0.08333333333236717,
    -0.9999999999999872,
    2.0,
)
SINE = (
    5.492178094266644e-06,
    -0.0003968227958158085,
    0.016666666523446564,
    -0.3333333333305728,
    1.9999999999999916,
)


def spacing(multiplier: float, sensitivity: float, d: int) -> float:
    """Return the spacing g of a grid, a power of two.

    Args:
        multiplier: noise multiplier z.
        sensitivity: Δ, largest L2 distance of rows of neighbouring data.
        d: numbers in a row.
    """
    sigma = multiplier * sensitivity
    finest = sigma * 2.0**-FINEST
    smallest_scale = min(sigma, sensitivity / math.sqrt(d))
    fine = smallest_scale * 2.0**-FINE
    # the largest power of two that is not above
    _, exponent = math.frexp(max(fine, finest))
    return math.ldexp(1.0, exponent - 1)


def deviation(multiplier: float, sensitivity: float, d: int) -> float:
    """Return σ = z (Δ + g√d), the standard deviation that gives rounded rows noise multiplier z.

    Args:
        multiplier: noise multiplier z.
        sensitivity: Δ, largest L2 distance of rows of neighbouring data.
        d: numbers in a row.
    """
    grid = spacing(multiplier, sensitivity, d)
    return multiplier * (sensitivity + grid * math.sqrt(d))


class GridNoise:
    """Noise of many parties at once, each from a ChaCha20 stream under its own seed (RFC 8439).

    Args:
        seeds: 32 secret bytes for each stream. Draws cannot be predicted without the seed.
    """

    def __init__(self, seeds: Sequence[bytes]) -> None:
        from cryptography.hazmat.primitives.ciphers import Cipher
        from cryptography.hazmat.primitives.ciphers.algorithms import ChaCha20

        self._seeds = list(seeds)
        # Each stream has a seed of its own, so its counter and nonce are zero.
        nonce = bytes(16)
        ciphers = [Cipher(ChaCha20(seed, nonce), mode=None) for seed in seeds]
        self._streams = [cipher.encryptor() for cipher in ciphers]
        # calls by stream: they number the further bits that rare draws need
        self._drawn = [0] * len(self._seeds)
        self._zeros = b""
        self._words = bytearray()
        self._buffers: dict[str, Numbers] = {}

    def __repr__(self) -> str:
        return f"GridNoise({len(self._streams)} streams, seeds hidden)"

    def add_to(self, rows: torch.Tensor, grid: Sequence[float], sigma: Sequence[float]) -> None:
        """Round rows to their grids and add noise, in place.

        The noise is the next d integers of each of the first k streams.

        Args:
            rows: finite numbers (k, d).
            grid: spacing g of each row (k,), powers of two.
            sigma: standard deviation of the noise for each row (k,).
        """
        deviations = [s / g for s, g in zip(sigma, grid, strict=True)]
        held = rows.cpu()  # on a CPU the rows themselves
        numbers = held.numpy()
        fused = fused_noise.usage.pays(numbers.size)
        width = rows.shape[1]
        count = max(1, BLOCK // width)
        for first in range(0, len(rows), count):
            selected = slice(first, first + count)
            spacings = _column(grid[selected])
            inverse = 1 / spacings  # exact, of powers of two
            steps = deviations[selected]
            for start in range(0, width, BLOCK):
                block = numbers[selected, start : start + BLOCK]
                if fused:
                    self._add_fused(first, block, grid[selected], steps)
                    continue
                cosines, sines = self._integers(first, block.shape, steps)
                # the memory of numbers that are needed no more
                released = self._buffer("exact", block.shape)
                # whole numbers below 2^53: no error
                np.multiply(block, inverse, out=released)
                np.rint(released, out=released)
                half = cosines.shape[1]
                released[:, :half] += cosines
                # An odd width leaves one Gaussian of the last pair unused.
                released[:, half:] += sines[:, : block.shape[1] - half]
                np.multiply(released, spacings, out=block)
        if held is not rows:
            rows.copy_(held)

    def _add_fused(
        self, first: int, block: NDArray[Any], grid: Sequence[float], steps: Sequence[float]
    ) -> None:
        """Do for a block what `add_to` does, by `fused_noise`.

        Args:
            first: first stream to draw from.
            block: numbers (c, w), changed in place.
            grid: spacing of each row (c,).
            steps: standard deviation for each row (c,), in steps of its grid.
        """
        half = -(-block.shape[1] // 2)
        words = self._next(first, len(block), half)
        of_cosine, of_sine = (tuple(map(float, each)) for each in _polynomials())
        draw = fused_noise.kernel(of_cosine, of_sine, TAIL)
        marks = np.empty(half, dtype=np.bool_)
        for k, row in enumerate(block):
            scale = steps[k]
            unsure = 0.5 - scale * ERROR
            halves = row[:half], row[half:]
            if draw(words[k], -0.5 * scale * scale, unsure, grid[k], *halves, marks):
                for pair in np.flatnonzero(marks).tolist():
                    radius_word, angle_word = int(words[k, 0, pair]), int(words[k, 1, pair])
                    key = self._more_bits(first + k, pair)
                    for part, is_sine in zip(halves, (False, True), strict=True):
                        if pair < len(part):
                            drawn = rounded(radius_word, angle_word, scale, is_sine, key)
                            part[pair] = (np.rint(float(part[pair]) / grid[k]) + drawn) * grid[k]
            self._drawn[first + k] += 1

    def _integers(self, first: int, shape: Sequence[int], steps: Sequence[float]) -> Numbers:
        """Return rounded Gaussians for the first and the second half of some rows.

        Args:
            first: first stream to draw from.
            shape: that of the rows, (c, w).
            steps: standard deviation for each row (c,), in steps of its grid.

        Returns:
            Whole numbers (2, c, ⌈w/2⌉).
        """
        count, width = shape
        # A pair of words gives two Gaussians: the cosine and the sine of one angle.
        half = -(-width // 2)
        words = self._next(first, count, half)
        exact = self._buffer("exact", (2, count, half))
        integers = self._buffer("integers", (2, count, half))
        angle = self._buffer("one", (count, half))
        angle[...] = words[:, 1]
        _turn(angle, exact, integers[0])
        # uniform numbers u in (0, 1), which become the radius in place
        radius = self._buffer("one", (count, half))
        radius[...] = words[:, 0]
        radius += 0.5
        np.abs(radius, out=radius)
        radius *= 2.0**-HALF
        inaccurate = _tails(radius)
        # scale · √(−2 log u), for points at length 2
        scale = _column(steps)
        np.log(radius, out=radius)
        radius *= scale * scale * -0.5
        np.sqrt(radius, out=radius)
        exact *= radius
        np.rint(exact, out=integers)
        exact -= integers
        unsure = _unsure(exact, scale, inaccurate)
        if unsure is not None:
            self._settle(first, words, np.argwhere(unsure).tolist(), steps, integers)
        for stream in range(first, first + count):
            self._drawn[stream] += 1
        return integers

    def _buffer(self, name: str, shape: Sequence[int]) -> Numbers:
        """Return uninitialised memory that is used again.

        Fresh pages would cost as much time as the numbers.

        Args:
            name: purpose of the memory; what it contained before is overwritten.
            shape: shape of the numbers.
        """
        size = math.prod(shape)
        memory = self._buffers.get(name)
        if memory is None or len(memory) < size:
            memory = self._buffers[name] = np.empty(size)
        return memory[:size].reshape(*shape)

    def _settle(
        self,
        first: int,
        words: NDArray[np.int64],
        positions: Sequence[Sequence[int]],
        steps: Sequence[float],
        integers: Numbers,
    ) -> None:
        """Write the right integers where float64 may have rounded to a wrong one.

        Args:
            first: stream of the first row.
            words: words (c, 2, half) of the draws.
            positions: 1 for a sine, row and pair of each integer to compute again.
            steps: standard deviation for each row (c,), in steps of its grid.
            integers: rounded Gaussians (2, c, half), corrected in place.
        """
        for sine, row, pair in positions:
            radius_word = int(words[row, 0, pair])
            angle_word = int(words[row, 1, pair])
            key = self._more_bits(first + row, pair)
            integer = rounded(radius_word, angle_word, steps[row], bool(sine), key)
            integers[sine, row, pair] = integer

    def _next(self, first: int, count: int, half: int) -> NDArray[np.int64]:
        """Return the next words of some streams, (count, 2, half) int64.

        Args:
            first: first stream.
            count: number of streams.
            half: pairs of words from each stream.
        """
        length = 16 * half
        # Encrypted zeros are the stream itself.
        if len(self._zeros) < length:
            self._zeros = bytes(length)
        zeros = memoryview(self._zeros)[:length]
        if len(self._words) < length * count:
            self._words = bytearray(length * count)
        memory = memoryview(self._words)
        for k in range(count):
            start = k * length
            row = memory[start : start + length]
            stream = self._streams[first + k]
            stream.update_into(zeros, row)
        size = 2 * half * count
        words = np.frombuffer(self._words, dtype=np.int64, count=size)
        return words.reshape(count, 2, half)

    def _more_bits(self, stream: int, pair: int) -> bytes:
        """Return the key of further bits of one pair of draws.

        Args:
            stream: number of the stream.
            pair: position of the pair in the current call.
        """
        call = self._drawn[stream]
        name = f"more bits {call} {pair}".encode()
        digest = hashlib.blake2b(name, digest_size=32, key=self._seeds[stream])
        return digest.digest()


def _column(values: Sequence[float]) -> Numbers:
    """Return numbers as a column.

    Args:
        values: numbers (k,).

    Returns:
        (k, 1), or (1, 1) where all are the same: then blocks of short rows are read as one.
    """
    numbers = list(values)
    if len(set(numbers)) == 1:
        numbers = numbers[:1]
    return np.array(numbers, dtype=np.float64)[:, None]


def _turn(angle: Numbers, points: Numbers, square: Numbers) -> None:
    """Write the coordinates of points at length 2, by polynomials and doublings of the angle.

    numpy's cosine and sine of float64 go number by number, and take several times as long.

    Args:
        angle: angles (c, half) in units of π/2^63, in [−2^63, 2^63).
        points: memory (2, c, half) for the first and the second coordinates.
        square: further memory (c, half).
    """
    cosine, sine = points
    of_cosine, of_sine = _polynomials()
    np.multiply(angle, angle, out=square)
    _polynomial(square, of_cosine, cosine)
    _polynomial(square, of_sine, sine)
    sine *= angle
    for _ in range(DOUBLINGS):
        # C = 2 cos x and S = 2 sin x: of the doubled angle these are C² − 2 and S C
        sine *= cosine
        cosine *= cosine
        cosine -= 2.0


@functools.cache
def _polynomials() -> tuple[list[Any], list[Any]]:
    """Return `COSINE` and `SINE` for words in place of angles, so that no word is scaled.

    Returns:
        Coefficients of 2 cos x and 2 sin x / w in powers of w², where x = w π/2^(63 + `DOUBLINGS`):
        arrays without dimensions, of which numpy takes less time than of numbers.
    """
    unit = math.pi * 2.0 ** (-63 - DOUBLINGS)

    def scaled(coefficients: Sequence[float], power: int) -> list[Any]:
        powers = range(2 * len(coefficients) - 2 + power, -1, -2)
        return [np.array(c * unit**k) for c, k in zip(coefficients, powers, strict=True)]

    return scaled(COSINE, 0), scaled(SINE, 1)


def _polynomial(x: Numbers, coefficients: Sequence[Any], out: Numbers) -> None:
    """Write the values of a polynomial.

    Args:
        x: numbers of any shape.
        coefficients: at least two, the highest one first.
        out: memory in the shape of x.
    """
    highest, *others, lowest = coefficients
    np.multiply(x, highest, out=out)
    for coefficient in others:
        out += coefficient
        out *= x
    out += lowest


def _tails(u: Numbers) -> NDArray[np.bool_] | None:
    """Return the mask of u or 1 − u below `TAIL`; None if there is none.

    There the error of a Gaussian in float64 may exceed `ERROR`.

    Args:
        u: uniform numbers (c, half).
    """
    if float(u.min()) < TAIL or float(u.max()) > 1 - TAIL:
        return (u < TAIL) | (u > 1 - TAIL)
    return None


def _unsure(
    remainders: Numbers, scale: Numbers, inaccurate: NDArray[np.bool_] | None
) -> NDArray[np.bool_] | None:
    """Return the mask (2, c, half) of numbers that float64 may have rounded to a wrong integer.

    Args:
        remainders: Gaussians minus their integers (2, c, half).
        scale: standard deviation for each row (c, 1), or (1, 1).
        inaccurate: mask (c, half) of pairs whose error may exceed `ERROR`, or None.

    Returns:
        None if there is no such number.
    """
    bound = 0.5 - scale * ERROR
    if inaccurate is None:
        # The usual case is decided without a mask, from the extremes.
        smallest = float(bound.min())
        if -smallest < float(remainders.min()) and float(remainders.max()) < smallest:
            return None
    unsure: NDArray[np.bool_] = abs(remainders) >= bound
    if inaccurate is not None:
        unsure |= inaccurate
    return unsure


def rounded(radius_word: int, angle_word: int, scale: float, sine: bool, key: bytes) -> float:
    """Return ⌊scale · n⌉ for one of the two Gaussians of a pair of words, without error.

    Args:
        radius_word: signed word. The 63 bits beside its sign, inverted where that is set, are the
            first bits of u in [0, 1).
        angle_word: signed word, the first 64 bits of the angle in [−π, π).
        scale: standard deviation.
        sine: True for the second Gaussian of the pair.
        key: key of the further bits of both, 64 of each at a time.
    """
    u = max(radius_word, ~radius_word)
    turn = angle_word
    bits = HALF
    for counter in itertools.count():
        # u = 0 has no logarithm: it needs more bits
        if u:
            low, high = _integer_range(u, turn, bits, scale, sine)
            if low == high:
                return float(low)
        position = counter.to_bytes(8, "little")
        extra = hashlib.blake2b(position, digest_size=16, key=key).digest()
        u_bits = int.from_bytes(extra[:8], "little")
        turn_bits = int.from_bytes(extra[8:], "little")
        u = (u << 64) | u_bits
        turn = (turn << 64) | turn_bits
        bits += 64
    raise AssertionError("unreachable")


def _integer_range(u: int, turn: int, bits: int, scale: float, sine: bool) -> tuple[int, int]:
    """Return the smallest and largest integer that scale · n may round to.

    Args:
        u: first `bits` bits of the uniform number, positive.
        turn: first `bits` + 1 bits of the angle, signed.
        bits: number of bits.
        scale: standard deviation.
        sine: True for the second Gaussian of the pair.
    """
    import mpmath

    with mpmath.workprec(bits + 128):
        # The bits that follow move u by less than `unit`, and the angle by less than π · unit.
        unit = mpmath.ldexp(1, -bits)
        largest_radius = _radius(u * unit)
        smallest_radius = _radius((u + 1) * unit)
        angle = mpmath.pi * turn * unit
        wave = mpmath.sin(angle) if sine else mpmath.cos(angle)
        centre = scale * largest_radius * wave
        radius_error = largest_radius - smallest_radius
        angle_error = largest_radius * mpmath.pi * unit
        rounding_error = mpmath.ldexp(1, -bits - 64)
        error = scale * (radius_error + angle_error + rounding_error)
        low = mpmath.floor(centre - error + 0.5)
        high = mpmath.floor(centre + error + 0.5)
    return int(low), int(high)


def _radius(u: mpmath.mpf) -> mpmath.mpf:
    """Return √(−2 log u), the radius of Box and Muller."""
    import mpmath

    return mpmath.sqrt(-2 * mpmath.log(u))
