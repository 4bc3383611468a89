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
and that float64 functions err by less than a hundred units in the last place.

One gap remains: float32 sums of DP-SGD's gradients are rounded while they are formed.
`benchmarks.grid_noise` measures this, and the margin of the clip is larger.
"""

from __future__ import annotations

import hashlib
import itertools
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from securecluster.core.lazy_torch import torch

if TYPE_CHECKING:
    import mpmath

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
TAIL = 2.0**-20
# bits of a word that are used for the radius
HALF = 63


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
        self._buffers: dict[str, torch.Tensor] = {}

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
        count = max(1, BLOCK // rows.shape[1])
        for first in range(0, len(rows), count):
            selected = slice(first, first + count)
            spacings = _column(grid[selected], rows)
            inverse = 1 / spacings  # exact, of powers of two
            for block in torch.split(rows[selected], BLOCK, dim=1):
                noise = self._integers(first, block, deviations[selected])
                released = self._buffer("released", block.shape, block.device)
                # whole numbers below 2^53: no error
                released.copy_(block)
                released.mul_(inverse).round_().add_(noise)
                released.mul_(spacings)
                block.copy_(released)

    def _integers(self, first: int, rows: torch.Tensor, steps: Sequence[float]) -> torch.Tensor:
        """Return rounded Gaussians in the shape of `rows`, float64.

        Args:
            first: first stream to draw from.
            rows: rows (c, w), of which the shape and the device are used.
            steps: standard deviation for each row (c,), in steps of its grid.
        """
        count, width = rows.shape
        # A pair of words gives two Gaussians: the cosine and the sine of one angle.
        half = -(-width // 2)
        words = self._next(first, count, half)
        words = words.to(rows.device)
        scale = _column(steps, rows)
        # uniform numbers u in (0, 1), which become the radius in place
        radius = self._buffer("radius", (count, half), rows.device)
        radius.copy_(words[:, :half])
        radius.add_(0.5).abs_().mul_(2.0**-HALF)
        inaccurate = _tails(radius)
        # scale · √(−2 log u)
        variance = scale.square()
        radius.log_().mul_(-2 * variance).sqrt_()
        angle = self._buffer("angle", (count, half), rows.device)
        angle.copy_(words[:, half:])
        angle.mul_(math.pi * 2.0**-63)
        exact = self._buffer("exact", (count, 2 * half), rows.device)
        torch.cos(angle, out=exact[:, :half])
        torch.sin(angle, out=exact[:, half:])
        pairs = exact.view(count, 2, half)
        pairs.mul_(radius[:, None])
        integers = self._buffer("integers", exact.shape, rows.device)
        torch.round(exact, out=integers)
        unsure = _unsure(exact.sub_(integers), scale, inaccurate)
        if unsure is not None:
            # An odd width leaves one Gaussian of the last pair unused.
            unsure = unsure[:, :width]
            self._settle(first, words, unsure, steps, integers)
        for stream in range(first, first + count):
            self._drawn[stream] += 1
        return integers[:, :width]

    def _buffer(self, name: str, shape: Sequence[int], device: torch.device) -> torch.Tensor:
        """Return uninitialised float64 memory that is used again.

        Fresh pages would cost as much time as the numbers.

        Args:
            name: purpose of the memory; what it contained before is overwritten.
            shape: shape of the numbers.
            device: device of the memory when it is allocated.
        """
        size = math.prod(shape)
        memory = self._buffers.get(name)
        if memory is None or len(memory) < size:
            memory = torch.empty(size, dtype=torch.float64, device=device)
            self._buffers[name] = memory
        return memory[:size].view(*shape)

    def _settle(
        self,
        first: int,
        words: torch.Tensor,
        unsure: torch.Tensor,
        steps: Sequence[float],
        integers: torch.Tensor,
    ) -> None:
        """Write the right integers where float64 may have rounded to a wrong one.

        Args:
            first: stream of the first row.
            words: words (c, 2·half) of the draws.
            unsure: mask (c, w) of the integers to compute again.
            steps: standard deviation for each row (c,), in steps of its grid.
            integers: rounded Gaussians (c, 2·half), corrected in place.
        """
        half = words.shape[1] // 2
        for row, column in unsure.nonzero().tolist():
            pair = column % half
            radius_word = int(words[row, pair])
            angle_word = int(words[row, half + pair])
            sine = column >= half
            key = self._more_bits(first + row, pair)
            integer = rounded(radius_word, angle_word, steps[row], sine, key)
            integers[row, column] = integer

    def _next(self, first: int, count: int, half: int) -> torch.Tensor:
        """Return the next words of some streams, (count, 2·half) int64.

        Args:
            first: first stream.
            count: number of streams.
            half: pairs of words from each stream.
        """
        length = 16 * half
        # Encrypted zeros are the stream itself.
        if len(self._zeros) != length:
            self._zeros = bytes(length)
        if len(self._words) < length * count:
            self._words = bytearray(length * count)
        memory = memoryview(self._words)
        for k in range(count):
            start = k * length
            row = memory[start : start + length]
            stream = self._streams[first + k]
            stream.update_into(self._zeros, row)
        size = 2 * half * count
        words: torch.Tensor = torch.frombuffer(self._words, dtype=torch.int64, count=size)
        return words.view(count, 2 * half)

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


def _column(values: Sequence[float], rows: torch.Tensor) -> torch.Tensor:
    """Return numbers as a column (k, 1), float64, on the device of `rows`."""
    numbers = list(values)
    column: torch.Tensor = torch.tensor(numbers, dtype=torch.float64, device=rows.device)
    return column[:, None]


def _tails(u: torch.Tensor) -> torch.Tensor | None:
    """Return the mask of u or 1 − u below `TAIL`; None if there is none.

    There the error of a Gaussian in float64 may exceed `ERROR`.

    Args:
        u: uniform numbers (c, half).
    """
    smallest, largest = map(float, torch.aminmax(u))
    if smallest < TAIL or largest > 1 - TAIL:
        return (u < TAIL) | (u > 1 - TAIL)
    return None


def _unsure(
    remainders: torch.Tensor, scale: torch.Tensor, inaccurate: torch.Tensor | None
) -> torch.Tensor | None:
    """Return the mask (c, 2·half) of numbers that float64 may have rounded to a wrong integer.

    Args:
        remainders: Gaussians minus their integers (c, 2·half).
        scale: standard deviation for each row (c, 1).
        inaccurate: mask (c, half) of pairs whose error may exceed `ERROR`.

    Returns:
        None if there is no such number.
    """
    bound = 0.5 - scale * ERROR
    if inaccurate is None:
        # The usual case is decided without a mask, from the extremes of each row.
        low, high = torch.aminmax(remainders, dim=1, keepdim=True)
        largest = torch.maximum(high, -low)
        if not bool((largest >= bound).any()):
            return None
    unsure: torch.Tensor = remainders.abs() >= bound
    if inaccurate is not None:
        unsure |= inaccurate.repeat(1, 2)
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
