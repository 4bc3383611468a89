"""Standard Gaussians of many parties at once, each from a ChaCha20 stream under its own seed (RFC 8439).

A cipher's words cost less than a ziggurat's comparisons, and nobody without the seed can tell what they are. They become Gaussians by
Box and Muller 1958, √(−2 ln u) (cos φ, sin φ), with elementwise operations where the numbers are needed.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from securecluster.backend import torch

BLOCK = 1 << 17  # numbers that are made together: their temporaries stay in cache (ours)


class Normals:
    """Streams of Gaussians, one for each seed of 32 bytes.

    u has 62 bits, so no number is beyond 9.4 standard deviations; they are floating-point numbers, not hardened against attacks on their
    lowest bits (Mironov 2012). Draws are rounded as the machine rounds a logarithm and a cosine.
    """

    def __init__(self, seeds: Sequence[bytes]) -> None:
        from cryptography.hazmat.primitives.ciphers import Cipher
        from cryptography.hazmat.primitives.ciphers.algorithms import ChaCha20

        self._streams = [Cipher(ChaCha20(seed, bytes(16)), mode=None).encryptor() for seed in seeds]
        self._zeros, self._words = b"", bytearray()

    def __repr__(self) -> str:
        return f"Normals({len(self._streams)} streams, seeds hidden)"

    def fill(self, rows: torch.Tensor, scale: torch.Tensor) -> None:
        """The next d numbers of each of the first k streams, of standard deviations `scale` (k,), into rows (k, d)."""
        count = max(1, BLOCK // rows.shape[1])
        for first in range(0, len(rows), count):
            part = rows[first : first + count]
            _box_muller(self._drawn(first, part), scale[first : first + count, None], part)

    def _drawn(self, first: int, rows: torch.Tensor) -> torch.Tensor:
        """Words (k, 3 ⌈d/2⌉) for as many rows, from the streams from `first` on."""
        length = 12 * -(-rows.shape[1] // 2)
        if len(self._zeros) != length:
            self._zeros = bytes(length)
        if len(self._words) < length * len(rows):
            self._words = bytearray(length * len(rows))
        room = memoryview(self._words)
        for k in range(len(rows)):
            self._streams[first + k].update_into(self._zeros, room[k * length : (k + 1) * length])
        return torch.frombuffer(self._words, dtype=torch.int32, count=length // 4 * len(rows)).view(len(rows), -1).to(rows.device)


def _box_muller(words: torch.Tensor, scale: torch.Tensor, rows: torch.Tensor) -> None:
    """Pairs of Gaussians from three words each: two for the radius, so that its tail is fine, one for the angle."""
    half = words.shape[1] // 3
    high, low, angle = torch.split(words, half, dim=1)
    words[:, : 2 * half].bitwise_and_(0x7FFFFFFF)
    u = high.to(rows.dtype).mul_(2.0**-31)  # in (0, 1]
    u.add_(low.to(rows.dtype).add_(0.5), alpha=2.0**-62)
    radius = u.log_().mul_(-2).sqrt_().mul_(scale)
    turned = angle.to(rows.dtype).mul_(math.pi * 2.0**-31)
    torch.mul(radius, turned.cos(), out=rows[:, :half])
    rest = rows.shape[1] - half
    torch.mul(radius[:, :rest], turned[:, :rest].sin(), out=rows[:, half:])
