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
the same integers are computed by `device_noise`, and with numba, in long runs, by `noise_kernel`.

One gap remains: float32 sums of DP-SGD's gradients are rounded while they are formed.
`benchmarks.costs.grid_noise` measures this, and the margin of the clip is larger.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import math
from collections.abc import Callable, Sequence
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
# that are encrypted for the words of a block: 8 bytes a number, and an odd width has one more
ZEROS = bytes(8 * (BLOCK + 1))
# A grid has at least 2^FINE steps in a standard deviation, and its rounding moves a row by
# Δ/2^FINE at most.
FINE = 10
# It has at most 2^(FINEST + 1) steps, beyond which too many draws would need more bits (not in the
# papers).
FINEST = 30
# error of a Gaussian in float64, where u and 1 − u are at least TAIL
ERROR = 2.0**-40
TAIL = 2.0**-23
# Steps of the grid, whose sum with a number is whole: float64 rounds it, to even halves as `rint`
# does, where the number is below a third of them.
SHIFT = 1.5 * 2.0**52
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
        held = rows.cpu().contiguous()  # on a CPU usually the rows themselves
        numbers = held.numpy()
        draw = fused_noise.kernel() if fused_noise.usage.pays(numbers.size) else None
        width = rows.shape[1]
        count = max(1, BLOCK // width)
        for first in range(0, len(rows), count):
            selected = slice(first, first + count)
            spacings = _column(grid[selected])
            for start in range(0, width, BLOCK):
                block = numbers[selected, start : start + BLOCK]
                if block.dtype != np.float32:
                    # Longer numbers may have parts of a step even where they are too large for
                    # the shift to round them.
                    block[...] = np.rint(block / spacings) * spacings
                if draw is None:
                    self._add(first, block, grid[selected], sigma[selected])
                else:
                    self._add_fused(draw, first, block, grid[selected], sigma[selected])
                for stream in range(first, first + len(block)):
                    self._drawn[stream] += 1
        if held is not rows:
            rows.copy_(held)

    def _add_fused(
        self,
        draw: Callable[..., int],
        first: int,
        block: NDArray[Any],
        grid: Sequence[float],
        sigma: Sequence[float],
    ) -> None:
        """Do for a block what `_add` does.

        Args:
            draw: `noise_kernel.draw`.
            first: first stream to draw from.
            block: numbers (c, w), changed in place.
            grid: spacing of each row (c,).
            sigma: standard deviation for each row (c,).
        """
        count, width = block.shape
        half = -(-width // 2)
        words = self._next(first, count, half)
        unsure = self._buffer("unsure", (count * half, 2)).view(np.int64)
        found = draw(words, block, np.array(grid), np.array(sigma), _constants(), unsure)
        for row, pair in unsure[:found].tolist():
            for sine, position in enumerate((pair, half + pair)):
                if position < width:
                    integer = self._settled(first, words, (sine, row, pair), sigma[row] / grid[row])
                    steps = np.rint(float(block[row, position]) / grid[row])
                    block[row, position] = (steps + integer) * grid[row]

    def _add(
        self, first: int, block: NDArray[Any], grid: Sequence[float], sigma: Sequence[float]
    ) -> None:
        """Round a block to its grids and add noise.

        Args:
            first: first stream to draw from.
            block: numbers (c, w), changed in place.
            grid: spacing of each row (c,).
            sigma: standard deviation for each row (c,).
        """
        shifted = self._shifted(first, block.shape, grid, sigma)
        # the memory of numbers that are needed no more
        released = self._buffer("exact", block.shape)
        # Both sums with the shift are whole steps, and so is theirs: no error, and no zero that has
        # the sign of a number.
        np.subtract(block, SHIFT * _column(grid), out=released)
        half = shifted.shape[2]
        np.add(released[:, :half], shifted[0], out=block[:, :half])
        # An odd width leaves one Gaussian of the last pair unused.
        rest = block.shape[1] - half
        np.add(released[:, half:], shifted[1, :, :rest], out=block[:, half:])

    def _shifted(
        self, first: int, shape: Sequence[int], grid: Sequence[float], sigma: Sequence[float]
    ) -> Numbers:
        """Return rounded Gaussians plus `SHIFT` steps for both halves of some rows.

        Args:
            first: first stream to draw from.
            shape: that of the rows, (c, w).
            grid: spacing of each row (c,).
            sigma: standard deviation for each row (c,).

        Returns:
            (2, c, ⌈w/2⌉).
        """
        count, width = shape
        # A pair of words gives two Gaussians: the cosine and the sine of one angle.
        half = -(-width // 2)
        words = self._next(first, count, half)
        exact = self._buffer("exact", (2, count, half))
        shifted = self._buffer("shifted", (2, count, half))
        angle = self._buffer("one", (count, half))
        angle[...] = words[:, 1]
        _turn(angle, exact, shifted[0])
        # uniform numbers u in (0, 1), which become the radius in place
        radius = self._buffer("one", (count, half))
        radius[...] = words[:, 0]
        radius += 0.5
        np.abs(radius, out=radius)
        radius *= 2.0**-HALF
        inaccurate = _tails(radius)
        # σ √(−2 log u), for points at length 2
        deviations, spacings = _column(sigma), _column(grid)
        np.log(radius, out=radius)
        radius *= deviations * deviations * -0.5
        np.sqrt(radius, out=radius)
        exact *= radius
        shift = SHIFT * spacings
        np.add(exact, shift, out=shifted)
        for part in (0, 1):
            # the memory of the radius
            np.subtract(shifted[part], shift, out=radius)
            exact[part] -= radius
        bound = (0.5 - deviations / spacings * ERROR) * spacings
        unsure = _unsure(exact, bound, inaccurate)
        if unsure is not None:
            for sine, row, pair in np.argwhere(unsure).tolist():
                integer = self._settled(first, words, (sine, row, pair), sigma[row] / grid[row])
                shifted[sine, row, pair] = (SHIFT + integer) * grid[row]
        return shifted

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

    def _settled(
        self, first: int, words: NDArray[np.int64], place: tuple[int, int, int], steps: float
    ) -> float:
        """Return the right integer where float64 may have rounded to a wrong one.

        Args:
            first: stream of the first row.
            words: words (c, 2, half) of the draws.
            place: 1 for a sine, row and pair of the draw.
            steps: standard deviation in steps of the grid.
        """
        sine, row, pair = place
        radius_word, angle_word = words[row, :, pair].tolist()
        key = self._more_bits(first + row, pair)
        return rounded(radius_word, angle_word, steps, bool(sine), key)

    def _next(self, first: int, count: int, half: int) -> NDArray[np.int64]:
        """Return the next words of some streams, (count, 2, half) int64.

        Args:
            first: first stream.
            count: number of streams.
            half: pairs of words from each stream.
        """
        length = 16 * half
        # Encrypted zeros are the stream itself.
        zeros = memoryview(ZEROS)[:length]
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
def _constants() -> tuple[Any, ...]:
    """Return those of `noise_kernel.draw`."""
    polynomials = tuple(tuple(map(float, each)) for each in _polynomials())
    return SHIFT, polynomials, ERROR, TAIL


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
    remainders: Numbers, bound: Numbers, inaccurate: NDArray[np.bool_] | None
) -> NDArray[np.bool_] | None:
    """Return the mask (2, c, half) of numbers that float64 may have rounded to a wrong integer.

    Args:
        remainders: Gaussians less what they are rounded to (2, c, half).
        bound: least remainder that is unsure, for each row (c, 1), or (1, 1).
        inaccurate: mask (c, half) of pairs whose error may exceed `ERROR`, or None.

    Returns:
        None if there is no such number.
    """
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
