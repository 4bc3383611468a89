"""Gaussian noise on a grid: what leaves is a whole multiple of a power of two, whichever numbers it
was made of.

A floating-point sum x + σn tells by its lowest bits which x it was made of (Mironov 2012). Here a
row x is rounded to the grid first, and an integer that is drawn without error is added to it:

    x ↦ g (⌊x/g⌉ + ⌊σn/g⌉),   n standard Gaussian.

⌊x/g⌉ is an integer, so this is g ⌊⌊x/g⌉ + σn/g⌉: the Gaussian mechanism applied to a rounded row,
and rounded afterwards, which costs nothing. Two rows that differ by Δ differ by at most Δ + g√d
once they are rounded, so σ = z (Δ + g√d) has the privacy of noise multiplier z exactly, whatever
the accountant (Balle and Wang 2018, theorem 8, and Poisson batches alike).

n comes from 63 bits for a radius and 64 for an angle (Box and Muller 1958). In float64 its error is
at most `ERROR`; the integer is the right one unless σn/g lies that close to where rounding changes,
or the radius is one of the few that are known less well. Such a draw, about one in a hundred
thousand, is made again with as many more bits of the cipher as it takes (mpmath). So nothing of a
Gaussian is missing, and nothing has to be added to δ; what is assumed is that the cipher's words
are random and that float64 functions err by less than a hundred units in the last place.
"""

from __future__ import annotations

import hashlib
import itertools
import math
from collections.abc import Sequence

from securecluster.core.lazy_torch import torch

BLOCK = 1 << 16  # numbers that are made together: their temporaries stay in cache (ours)
# a grid has at least 2^FINE steps in a standard deviation, and its rounding moves a row by Δ/2^FINE
# at most
FINE = 10
# and at most 2^(FINEST + 1) steps, beyond which too many draws would need more bits (ours)
FINEST = 30
ERROR = 2.0**-40  # of a Gaussian in float64, where u and 1 − u are at least TAIL
TAIL = 2.0**-20
HALF = 63  # bits of a word that are used for the radius


def spacing(multiplier: float, sensitivity: float, d: int) -> float:
    """Return g, a power of two, for rows of d numbers that differ by at most `sensitivity` in the
    L2 norm.
    """
    sigma = multiplier * sensitivity
    fine = min(sigma, sensitivity / math.sqrt(d)) * 2.0**-FINE
    _, exponent = math.frexp(max(fine, sigma * 2.0**-FINEST))
    return math.ldexp(1.0, exponent - 1)


def deviation(multiplier: float, sensitivity: float, d: int) -> float:
    """Return σ = z (Δ + g√d): the standard deviation that gives rounded rows noise multiplier z."""
    return multiplier * (sensitivity + spacing(multiplier, sensitivity, d) * math.sqrt(d))


class GridNoise:
    """Noise of many parties at once, each from a ChaCha20 stream under its own seed (RFC 8439).

    Args:
        seeds: 32 bytes each. Whoever lacks a seed cannot tell what is drawn under it.
    """

    def __init__(self, seeds: Sequence[bytes]) -> None:
        from cryptography.hazmat.primitives.ciphers import Cipher
        from cryptography.hazmat.primitives.ciphers.algorithms import ChaCha20

        self._seeds = list(seeds)
        self._streams = [Cipher(ChaCha20(seed, bytes(16)), mode=None).encryptor() for seed in seeds]
        # calls, by stream: they number the bits that rare draws need
        self._drawn = [0] * len(self._seeds)
        self._zeros = b""
        self._words = bytearray()
        self._buffers: dict[int, torch.Tensor] = {}

    def __repr__(self) -> str:
        return f"GridNoise({len(self._streams)} streams, seeds hidden)"

    def add_to(self, rows: torch.Tensor, grid: Sequence[float], sigma: Sequence[float]) -> None:
        """Round rows to their grids and add the next d integers of each of the first k streams, in
        place.

        Args:
            rows: (k, d) finite numbers.
            grid: g of each row, a power of two.
            sigma: the noise's standard deviation of each row.
        """
        steps = [s / g for s, g in zip(sigma, grid, strict=True)]
        count = max(1, BLOCK // rows.shape[1])
        for first in range(0, len(rows), count):
            some = slice(first, first + count)
            spacings = _column(grid[some], rows)
            inverse = 1 / spacings  # exact, of powers of two
            for part in torch.split(rows[some], BLOCK, dim=1):
                drawn = self._integers(first, part, steps[some])
                total = self._buffer(3, part.shape, part.device)
                # whole numbers below 2^53: no error
                total.copy_(part).mul_(inverse).round_().add_(drawn)
                part.copy_(total.mul_(spacings))

    def _integers(self, first: int, rows: torch.Tensor, steps: Sequence[float]) -> torch.Tensor:
        """Return rounded Gaussians of standard deviations `steps`.

        They are float64 and of the shape of `rows`.
        """
        count, width = rows.shape
        half = -(-width // 2)
        words = self._next(first, count, half).to(rows.device)
        scale = _column(steps, rows)
        u = (
            self._buffer(0, (count, half), rows.device)
            .copy_(words[:, :half])
            .add_(0.5)
            .abs_()
            .mul_(2.0**-HALF)
        )
        least, most = map(float, torch.aminmax(u))
        ends = (u < TAIL) | (u > 1 - TAIL) if least < TAIL or most > 1 - TAIL else None
        radius = u.log_().mul_(-2 * scale.square()).sqrt_()
        angle = (
            self._buffer(1, (count, half), rows.device)
            .copy_(words[:, half:])
            .mul_(math.pi * 2.0**-63)
        )
        exact = self._buffer(2, (count, 2 * half), rows.device)
        torch.cos(angle, out=exact[:, :half])
        torch.sin(angle, out=exact[:, half:])
        exact.view(count, 2, half).mul_(radius[:, None])
        found = torch.round(exact, out=self._buffer(4, exact.shape, rows.device))
        beside = exact.sub_(found)
        low, high = torch.aminmax(beside, dim=1, keepdim=True)
        bound = 0.5 - scale * ERROR
        if ends is not None or bool((torch.maximum(high, -low) >= bound).any()):
            unsure = beside.abs() >= bound
            if ends is not None:
                unsure |= ends.repeat(1, 2)
            self._settle(first, words, unsure[:, :width], steps, found)
        for k in range(first, first + count):
            self._drawn[k] += 1
        return found[:, :width]

    def _buffer(self, number: int, shape: Sequence[int], device: torch.device) -> torch.Tensor:
        """Return memory for float64 numbers that is used again: fresh pages would cost as much as
        the numbers.
        """
        size = math.prod(shape)
        if number not in self._buffers or len(self._buffers[number]) < size:
            self._buffers[number] = torch.empty(size, dtype=torch.float64, device=device)
        return self._buffers[number][:size].view(*shape)

    def _settle(
        self,
        first: int,
        words: torch.Tensor,
        unsure: torch.Tensor,
        steps: Sequence[float],
        found: torch.Tensor,
    ) -> None:
        """Write the right integers where float64 may have rounded to a wrong one."""
        half = words.shape[1] // 2
        for row, column in unsure.nonzero().tolist():
            pair = column % half
            radius_word, angle_word = int(words[row, pair]), int(words[row, half + pair])
            key = self._more_bits(first + row, pair)
            found[row, column] = rounded(radius_word, angle_word, steps[row], column >= half, key)

    def _next(self, first: int, count: int, half: int) -> torch.Tensor:
        """Return the next 2·half words of some streams, (count, 2·half) int64."""
        length = 16 * half
        if len(self._zeros) != length:
            self._zeros = bytes(length)
        if len(self._words) < length * count:
            self._words = bytearray(length * count)
        room = memoryview(self._words)
        for k in range(count):
            self._streams[first + k].update_into(self._zeros, room[k * length : (k + 1) * length])
        found: torch.Tensor = torch.frombuffer(
            self._words, dtype=torch.int64, count=2 * half * count
        )
        return found.view(count, 2 * half)

    def _more_bits(self, stream: int, pair: int) -> bytes:
        """Return the key of further bits of one pair of draws."""
        place = f"more bits {self._drawn[stream]} {pair}".encode()
        return hashlib.blake2b(place, digest_size=32, key=self._seeds[stream]).digest()


def _column(values: Sequence[float], like: torch.Tensor) -> torch.Tensor:
    """Return a column of numbers, float64, where other numbers are."""
    found: torch.Tensor = torch.tensor(list(values), dtype=torch.float64, device=like.device)
    return found[:, None]


def rounded(radius_word: int, angle_word: int, scale: float, sine: bool, key: bytes) -> float:
    """Return ⌊scale · n⌉ of one of the two Gaussians of a pair of words, without error.

    Args:
        radius_word: signed; the 63 bits beside its sign, turned where that is set, are the first
            ones of u in [0, 1).
        angle_word: signed; its 64 bits are the first ones of the angle in [−π, π).
        sine: the second Gaussian of the pair.
        key: of the bits that follow, 64 of each at a time.
    """
    import mpmath

    u, turn, bits = max(radius_word, ~radius_word), angle_word, HALF
    for more in itertools.count():
        if u:
            with mpmath.workprec(bits + 128):
                unit = mpmath.ldexp(1, -bits)
                most = mpmath.sqrt(-2 * mpmath.log(u * unit))
                least = mpmath.sqrt(-2 * mpmath.log((u + 1) * unit))
                angle = mpmath.pi * turn * unit
                centre = scale * most * (mpmath.sin(angle) if sine else mpmath.cos(angle))
                reach = scale * (
                    most - least + most * mpmath.pi * unit + mpmath.ldexp(1, -bits - 64)
                )
                low, high = (int(mpmath.floor(x + 0.5)) for x in (centre - reach, centre + reach))
            if low == high:
                return float(low)
        extra = hashlib.blake2b(more.to_bytes(8, "little"), digest_size=16, key=key).digest()
        u = (u << 64) | int.from_bytes(extra[:8], "little")
        turn = (turn << 64) | int.from_bytes(extra[8:], "little")
        bits += 64
    raise AssertionError("unreachable")
