"""Codecs that compress what leaves a client in one round, to real bytes.

They send a few bits a number, or only the largest numbers. Every rule is deterministic, so that a
replay and a client that is asked again give the same bytes; errors are therefore biased.
"""

from __future__ import annotations

import hashlib
import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar

import numpy as np

from securecluster.core.lazy_torch import torch
from securecluster.errors import FrameError, UpdateError, UsageError, unknown
from securecluster.privacy.masking.keystream import blocks
from securecluster.privacy.masking.masks import ENTRYWISE
from securecluster.privacy.pipeline import Kind

COMPRESSIONS = ("none", "8bit", "4bit", "1bit", "topk:SHARE")
# bytes of a row's scale, a float32
SCALE = 4


class Coded(ABC):
    """Base of codecs: rows (b, d) of numbers to rows (b, n) of bytes, and back at the server.

    Args:
        dimension: d.

    Raises:
        UsageError: `dimension` is below 1.
    """

    kind: ClassVar[Kind] = Kind.QUANTISE
    name: str

    def __init__(self, dimension: int) -> None:
        if dimension < 1:
            raise UsageError(
                f"rows of {dimension} numbers cannot be compressed: a row has at least one"
            )
        self.dimension = dimension

    @property
    @abstractmethod
    def size(self) -> int:
        """Return n, the bytes of a row."""

    def forward(self, rows: torch.Tensor, step: int) -> torch.Tensor:
        """Return codes (b, n) uint8.

        Args:
            rows: rows (b, d).
            step: number of the call, not used.

        Raises:
            UpdateError: a number that is not finite, or beyond float32.
        """
        _check_width(rows.shape[-1], self.dimension, "numbers")
        shape = (*rows.shape[:-1], self.size)
        codes = torch.empty(shape, dtype=torch.uint8, device=rows.device)
        row_blocks = blocks(rows.contiguous())
        code_blocks = self._code_blocks(codes)
        for block, code_block in zip(row_blocks, code_blocks, strict=True):
            numbers = block.float()
            if not bool(numbers.isfinite().all()):
                raise UpdateError(
                    "a row to compress has a number that is not finite: lower the learning rate "
                    "(--lr)"
                )
            code_block.copy_(self._encode(numbers))
        return codes

    def decode(self, rows: torch.Tensor) -> torch.Tensor:
        """Return the numbers (b, d) float32 that codes stand for.

        Args:
            rows: codes (b, n) uint8.

        Raises:
            FrameError: rows of another type or length, or that no client can have made.
        """
        if rows.dtype != torch.uint8:
            raise _forged(f"it holds {rows.dtype}, not bytes")
        _check_width(rows.shape[-1], self.size, "bytes")
        shape = (*rows.shape[:-1], self.dimension)
        numbers = torch.empty(shape, dtype=torch.float32, device=rows.device)
        row_blocks = blocks(numbers)
        code_blocks = self._code_blocks(rows.contiguous())
        for block, code_block in zip(row_blocks, code_blocks, strict=True):
            block.copy_(self._decode(code_block))
        return numbers

    def inverse(self, rows: torch.Tensor, step: int) -> torch.Tensor:
        """Return `rows`: averages of the server are not compressed."""
        return rows

    def _code_blocks(self, codes: torch.Tensor) -> Sequence[torch.Tensor]:
        """Return codes (…, n) in the same blocks as `keystream.blocks` makes of their rows."""
        table = codes.view(-1, codes.shape[-1])
        row_count = max(1, (1 << 18) // self.dimension)
        return torch.split(table, row_count)

    @abstractmethod
    def _encode(self, rows: torch.Tensor) -> torch.Tensor:
        """Return codes (b, n) of finite float32 rows (b, d)."""

    @abstractmethod
    def _decode(self, rows: torch.Tensor) -> torch.Tensor:
        """Return float32 rows (b, d) of codes (b, n), or raise FrameError."""


class Levels(Coded):
    """Uniform quantisation: a row's largest magnitude M, and each number as a multiple of M/L.

    L is 127 or 7. The error is at most M/2L a number (1e-6 of it more).

    Args:
        dimension: d.
        bits: 8 or 4.
    """

    def __init__(self, dimension: int, bits: int) -> None:
        super().__init__(dimension)
        self._bits = bits
        self._levels = {8: 127, 4: 7}[bits]
        self.name = f"{bits}bit"

    @property
    def size(self) -> int:
        """Return the bytes of a row: a scale, and 8 or 4 bits a number."""
        code_bytes = -(-self.dimension * self._bits // 8)
        return SCALE + code_bytes

    def _encode(self, rows: torch.Tensor) -> torch.Tensor:
        largest = rows.abs().amax(1, keepdim=True)
        # no division by zero in a row of zeros
        scale = torch.where(largest > 0, largest, 1.0)
        # float64, whose rounding errors stay far below a level
        share = rows.double() / scale.double()
        codes = (share * self._levels).round() + self._levels
        packed = self._pack(codes.to(torch.uint8))
        return torch.cat([_to_bytes(largest), packed], 1)

    def _decode(self, rows: torch.Tensor) -> torch.Tensor:
        largest = _read_scales(rows)
        codes = self._unpack(rows[:, SCALE:])
        _refuse_codes(codes > 2 * self._levels)
        share = (codes.double() - self._levels) / self._levels
        return (share * largest.double()).float()

    def _pack(self, codes: torch.Tensor) -> torch.Tensor:
        """Return codes as bytes: of 4 bits two a byte, the first in the lower half."""
        if self._bits == 8:
            return codes
        padding = self.dimension % 2
        padded = torch.nn.functional.pad(codes, (0, padding))
        lower = padded[:, ::2]
        upper = padded[:, 1::2]
        return lower | (upper << 4)

    def _unpack(self, packed: torch.Tensor) -> torch.Tensor:
        """Return the codes (b, d) in bytes."""
        if self._bits == 8:
            return packed
        lower = packed & 15
        upper = packed >> 4
        codes = torch.stack([lower, upper], -1).flatten(1)
        # Padding stands for no number, so clients send zeros there.
        padding = codes[:, self.dimension :]
        _refuse_codes(padding > 0)
        return codes[:, : self.dimension]


def _refuse_codes(bad: torch.Tensor) -> None:
    """Raise FrameError if any code is bad: only a forged or damaged row has one."""
    if bool(bad.any()):
        raise _forged("a code that stands for no number")


class Signs(Coded):
    """Signs of all numbers, and a row's mean magnitude (Seide et al. 2014; Bernstein et al. 2018).

    ‖x − x'‖² = ‖x‖² − ‖x‖₁²/d.

    A zero has no sign. It gets one that a digest of the row draws (not in the papers): with one
    sign for all, or for each position, the zeros that clients have in common, of dead pixels or
    units, would look like a direction that they share.
    """

    name = "1bit"

    @property
    def size(self) -> int:
        """Return the bytes of a row: a scale, and a bit a number."""
        code_bytes = -(-self.dimension // 8)
        return SCALE + code_bytes

    def _encode(self, rows: torch.Tensor) -> torch.Tensor:
        positive = rows > 0
        for row, bits in zip(rows, positive, strict=True):
            zeros = row == 0
            if bool(zeros.any()):
                bits[zeros] = _coins(row)[zeros]
        magnitudes = rows.double().abs()
        scales = magnitudes.mean(1, keepdim=True).float()
        return torch.cat([_to_bytes(scales), self._pack(positive)], 1)

    def _pack(self, bits: torch.Tensor) -> torch.Tensor:
        """Return bits (b, d) as bytes, eight a byte, the first in the lowest bit."""
        padding = -self.dimension % 8
        padded = torch.nn.functional.pad(bits, (0, padding))
        octets = padded.view(len(bits), -1, 8)
        octets = octets.to(torch.uint8)
        powers = [1 << k for k in range(8)]
        weights = torch.tensor(powers, dtype=torch.uint8, device=bits.device)
        return (octets * weights).sum(2, dtype=torch.uint8)

    def _decode(self, rows: torch.Tensor) -> torch.Tensor:
        bits = self._unpack(rows[:, SCALE:])
        signs = torch.where(bits > 0, 1.0, -1.0)
        return signs * _read_scales(rows)

    def _unpack(self, packed: torch.Tensor) -> torch.Tensor:
        """Return the bits (b, d) in bytes."""
        shifts = torch.arange(8, dtype=torch.uint8, device=packed.device)
        shifted = packed[:, :, None] >> shifts
        bits = (shifted & 1).flatten(1)
        # Padding stands for no number, so clients send zeros there.
        padding = bits[:, self.dimension :]
        if bool(padding.any()):
            raise _forged("a bit that stands for no number")
        return bits[:, : self.dimension]


class TopK(Coded):
    """The k = ⌈SHARE·d⌉ numbers of largest magnitude, and zero elsewhere (Aji, Heafield 2017).

    Of equal magnitudes the first ones are sent. ‖x − x'‖² ≤ (1 − k/d)·‖x‖². A position takes two
    bytes where d ≤ 32,768, else four.

    Args:
        dimension: d.
        share: share of the numbers that are sent, in (0, 1].
    """

    def __init__(self, dimension: int, share: float) -> None:
        super().__init__(dimension)
        self.name = f"topk:{share:g}"
        self.k = math.ceil(share * dimension)
        self._position = torch.int16 if dimension <= 1 << 15 else torch.int32

    @property
    def size(self) -> int:
        """Return the bytes of a row: a float32 and a position for each number that is sent."""
        return self.k * (4 + self._position.itemsize)

    def _encode(self, rows: torch.Tensor) -> torch.Tensor:
        # A stable sort makes the choice among equal magnitudes the same on every machine.
        ranking = torch.sort(rows.abs(), dim=1, descending=True, stable=True)
        largest = ranking.indices[:, : self.k]
        positions = largest.sort(1).values
        values = rows.gather(1, positions)
        position_bytes = _to_bytes(positions.to(self._position))
        return torch.cat([_to_bytes(values), position_bytes], 1)

    def _decode(self, rows: torch.Tensor) -> torch.Tensor:
        split = 4 * self.k
        values = _from_bytes(rows[:, :split], torch.float32)
        positions = _from_bytes(rows[:, split:], self._position)
        positions = positions.long()
        in_range = (positions >= 0) & (positions < self.dimension)
        ascending = positions.diff(dim=1) > 0
        # Ascending positions are distinct, so that no number is written twice.
        for condition in (in_range, ascending, values.isfinite()):
            if not bool(condition.all()):
                raise _forged("places out of order, or a number that is not finite")
        numbers = values.new_zeros(len(rows), self.dimension)
        return numbers.scatter_(1, positions, values)


def build(compress: str, dimension: int) -> tuple[Coded, ...]:
    """Return the stages of a compression.

    Args:
        compress: name of the compression, one of `COMPRESSIONS`.
        dimension: numbers in a row.

    Raises:
        UsageError: an unknown name, or a share that is not in (0, 1].
    """
    name, _, share = str(compress).partition(":")
    if name == "topk":
        return (TopK(dimension, _parse_share(share)),)
    stages: dict[str, tuple[Coded, ...]] = {
        "none": (),
        "8bit": (Levels(dimension, 8),),
        "4bit": (Levels(dimension, 4),),
        "1bit": (Signs(dimension),),
    }
    if compress not in stages:
        raise unknown("compression", compress, COMPRESSIONS)
    return stages[compress]


def check(compress: str, mask: str, sketch: object = None) -> None:
    """Raise UsageError for an unknown compression, or one that does not fit the mask or sketch.

    Args:
        compress: name of the compression.
        mask: name of the mask.
        sketch: length of the sketch; None without one.
    """
    build(compress, 1)
    if not compress.startswith("topk"):
        return
    if sketch is None and mask in ENTRYWISE:
        return
    reason = f"the mask {mask!r}" if sketch is None else "a sketch"
    raise UsageError(
        f"{reason} spreads a row over all its numbers, so that the largest few say little of it: "
        "use 8bit, 4bit or 1bit instead of topk"
    )


def _forged(reason: str) -> FrameError:
    return FrameError(
        f"a compressed row does not parse ({reason}): it was damaged or forged, ask for it again"
    )


def _check_width(width: int, expected: int, unit: str) -> None:
    if width != expected:
        raise _forged(f"{width} {unit} came, {expected} were expected")


def _parse_share(text: str) -> float:
    try:
        share = float(text)
    except ValueError:
        share = math.nan
    if not 0 < share <= 1:
        raise UsageError(
            f"topk:{text} keeps no share of the numbers: write topk:SHARE with a share in (0, 1], "
            "as topk:0.01"
        )
    return share


def _to_bytes(values: torch.Tensor) -> torch.Tensor:
    """Return the bytes of numbers (b, c) as they lie in memory, (b, c·size) uint8.

    The lowest byte is the first, as in safetensors.
    """
    return values.clone(memory_format=torch.contiguous_format).view(torch.uint8)


def _from_bytes(rows: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return numbers (b, c) from their bytes.

    Args:
        rows: bytes (b, c·size) uint8.
        dtype: type of the numbers.
    """
    # a copy: the strides of a slice are no multiples of a number's size
    return rows.clone(memory_format=torch.contiguous_format).view(dtype)


def _read_scales(rows: torch.Tensor) -> torch.Tensor:
    """Return the scales of codes, (b, 1); raise FrameError for one that no client can have made."""
    scales = _from_bytes(rows[:, :SCALE], torch.float32)
    valid = scales.isfinite() & (scales >= 0)
    if not bool(valid.all()):
        raise _forged("a scale that is none")
    return scales


def _coins(row: torch.Tensor) -> torch.Tensor:
    """Return fair coins (d,) for a row, drawn from a digest of the row (d,)."""
    data = row.cpu().numpy().tobytes()
    digest = hashlib.blake2b(data, digest_size=16).digest()
    key = int.from_bytes(digest, "little")
    generator = np.random.Generator(np.random.Philox(key=key))
    # numpy's draws, which are the same for every device of the row
    coins = generator.integers(0, 2, len(row), dtype=np.uint8)
    return torch.from_numpy(coins).to(row.device) > 0
