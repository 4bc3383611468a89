"""Compression of what leaves a client in one round: a few bits a number, or only the largest
numbers (as real bytes).

Every rule is deterministic, so that a replay and a client that is asked again give the same bytes;
errors are therefore biased.
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
SCALE = 4  # bytes of a row's scale, a float32
_FORGED = "a compressed row does not parse ({}): it was damaged or forged, ask for it again"


class Coded(ABC):
    """What the compressions share: rows (b, d) of numbers to rows (b, n) of bytes, and back at the
    server.

    Args:
        dimension: d.
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
        """n, the bytes of a row."""

    def forward(self, rows: torch.Tensor, step: int) -> torch.Tensor:
        """Bytes (b, n) of rows (b, d).

        Raises:
            UpdateError: a number that is not finite, or beyond float32.
        """
        self._check(rows.shape[-1], self.dimension, "numbers")
        out = torch.empty(*rows.shape[:-1], self.size, dtype=torch.uint8, device=rows.device)
        for block, short in zip(blocks(rows.contiguous()), self._alike(out), strict=True):
            numbers = block.float()
            if not bool(numbers.isfinite().all()):
                raise UpdateError(
                    "a row to compress has a number that is not finite: lower the learning rate "
                    "(--lr)"
                )
            short.copy_(self._encode(numbers))
        return out

    def decode(self, rows: torch.Tensor) -> torch.Tensor:
        """The rows (b, d) float32 that bytes (b, n) stand for.

        Raises:
            FrameError: rows that are not of bytes, of another length, or that no client can have
                made.
        """
        if rows.dtype != torch.uint8:
            raise FrameError(_FORGED.format(f"it holds {rows.dtype}, not bytes"))
        self._check(rows.shape[-1], self.size, "bytes")
        out = torch.empty(*rows.shape[:-1], self.dimension, dtype=torch.float32, device=rows.device)
        for short, block in zip(self._alike(rows.contiguous()), blocks(out), strict=True):
            block.copy_(self._decode(short))
        return out

    def inverse(self, rows: torch.Tensor, step: int) -> torch.Tensor:
        """What came: averages come back uncompressed."""
        return rows

    def _check(self, came: int, expected: int, what: str) -> None:
        if came != expected:
            raise FrameError(_FORGED.format(f"{came} {what} came, {expected} were expected"))

    def _alike(self, short: torch.Tensor) -> Sequence[torch.Tensor]:
        """Byte rows in the same portions as `stream.blocks` makes of rows of d."""
        return torch.split(short.view(-1, short.shape[-1]), max(1, (1 << 18) // self.dimension))

    @abstractmethod
    def _encode(self, rows: torch.Tensor) -> torch.Tensor: ...

    @abstractmethod
    def _decode(self, rows: torch.Tensor) -> torch.Tensor: ...


class Levels(Coded):
    """A row's largest magnitude M, and each number as a whole multiple of M/L, L = 127 or 7; error
    at most M/2L a number (1e-6 of it more).

    Args:
        bits: 8 or 4.
    """

    def __init__(self, dimension: int, bits: int) -> None:
        super().__init__(dimension)
        self._bits, self._levels = bits, {8: 127, 4: 7}[bits]
        self.name = f"{bits}bit"

    @property
    def size(self) -> int:
        """A scale, and 8 or 4 bits a number."""
        return SCALE + -(-self.dimension * self._bits // 8)

    def _encode(self, rows: torch.Tensor) -> torch.Tensor:
        largest = rows.abs().amax(1, keepdim=True)
        share = rows.double() / torch.where(largest > 0, largest, 1.0).double()
        codes = (share * self._levels).round() + self._levels
        return torch.cat([_bytes(largest), self._pack(codes.to(torch.uint8))], 1)

    def _decode(self, rows: torch.Tensor) -> torch.Tensor:
        largest, codes = _scale(rows), rows[:, SCALE:]
        if self._bits == 4:
            codes = torch.stack([codes & 15, codes >> 4], -1).flatten(1)
            self._refuse(codes[:, self.dimension :] > 0)
            codes = codes[:, : self.dimension]
        self._refuse(codes > 2 * self._levels)
        return ((codes.double() - self._levels) / self._levels * largest.double()).float()

    def _pack(self, codes: torch.Tensor) -> torch.Tensor:
        """Two numbers a byte where they have 4 bits, the first in the lower half."""
        if self._bits == 8:
            return codes
        even = torch.nn.functional.pad(codes, (0, self.dimension % 2))
        return even[:, ::2] | (even[:, 1::2] << 4)

    def _refuse(self, bad: torch.Tensor) -> None:
        if bool(bad.any()):
            raise FrameError(_FORGED.format("a code that stands for no number"))


class Signs(Coded):
    """A row's mean magnitude, and every number's sign (Seide et al. 2014; Bernstein et al. 2018);
    ‖x − x'‖² = ‖x‖² − ‖x‖₁²/d.

    A zero has no sign. It is given one that a digest of the row draws (ours): with one sign for
    all, or for each place, the zeros that clients have in common, of dead pixels or units, would
    look like a direction that they share.
    """

    name = "1bit"

    @property
    def size(self) -> int:
        """A scale, and a bit a number."""
        return SCALE + -(-self.dimension // 8)

    def _encode(self, rows: torch.Tensor) -> torch.Tensor:
        positive = rows > 0
        for row, bits in zip(rows, positive, strict=True):
            if bool((none := row == 0).any()):
                bits[none] = _coins(row)[none]
        places = (
            torch.nn.functional.pad(positive, (0, -self.dimension % 8))
            .view(len(rows), -1, 8)
            .to(torch.uint8)
        )
        weights = torch.tensor([1 << k for k in range(8)], dtype=torch.uint8, device=rows.device)
        return torch.cat(
            [
                _bytes(rows.double().abs().mean(1, keepdim=True).float()),
                (places * weights).sum(2, dtype=torch.uint8),
            ],
            1,
        )

    def _decode(self, rows: torch.Tensor) -> torch.Tensor:
        shifts = torch.arange(8, dtype=torch.uint8, device=rows.device)
        bits = ((rows[:, SCALE:, None] >> shifts) & 1).flatten(1)
        if bool(bits[:, self.dimension :].any()):
            raise FrameError(_FORGED.format("a bit that stands for no number"))
        return torch.where(bits[:, : self.dimension] > 0, 1.0, -1.0) * _scale(rows)


class TopK(Coded):
    """The k = ⌈SHARE·d⌉ numbers of largest magnitude, of equal ones the first, and their places;
    zero elsewhere (Aji, Heafield 2017).

    ‖x − x'‖² ≤ (1 − k/d)·‖x‖². A place takes two bytes where d ≤ 32,768, else four.

    Args:
        share: of the numbers that are kept, in (0, 1].
    """

    def __init__(self, dimension: int, share: float) -> None:
        super().__init__(dimension)
        self.name, self.k = f"topk:{share:g}", math.ceil(share * dimension)
        self._place = torch.int16 if dimension <= 1 << 15 else torch.int32

    @property
    def size(self) -> int:
        """A float32 and a place for each number that is kept."""
        return self.k * (4 + self._place.itemsize)

    def _encode(self, rows: torch.Tensor) -> torch.Tensor:
        order = torch.sort(rows.abs(), dim=1, descending=True, stable=True).indices
        places = order[:, : self.k].sort(1).values
        return torch.cat([_bytes(rows.gather(1, places)), _bytes(places.to(self._place))], 1)

    def _decode(self, rows: torch.Tensor) -> torch.Tensor:
        values = _numbers(rows[:, : 4 * self.k], torch.float32)
        places = _numbers(rows[:, 4 * self.k :], self._place).long()
        fine = bool(((places >= 0) & (places < self.dimension)).all()) and bool(
            (places.diff(dim=1) > 0).all()
        )
        if not (fine and bool(values.isfinite().all())):
            raise FrameError(_FORGED.format("places out of order, or a number that is not finite"))
        return values.new_zeros(len(rows), self.dimension).scatter_(1, places, values)


def build(compress: str, dimension: int) -> tuple[Coded, ...]:
    """The stages of a compression's name, for rows of d numbers.

    Raises:
        UsageError: an unknown name, or a share that is none.
    """
    name, _, share = str(compress).partition(":")
    if name == "topk":
        return (TopK(dimension, _share(share)),)
    known: dict[str, tuple[Coded, ...]] = (
        {"none": ()}
        | {f"{b}bit": (Levels(dimension, b),) for b in (8, 4)}
        | {"1bit": (Signs(dimension),)}
    )
    if compress not in known:
        raise unknown("compression", compress, COMPRESSIONS)
    return known[compress]


def check(compress: str, mask: str, sketch: object = None) -> None:
    """Raise UsageError for a compression that does not exist, or that makes no sense behind such a
    mask or sketch.
    """
    build(compress, 1)
    if not compress.startswith("topk"):
        return
    why = "a sketch" if sketch is not None else f"the mask {mask!r}"
    if sketch is not None or mask not in ENTRYWISE:
        raise UsageError(
            f"{why} spreads a row over all its numbers, so that the largest few say little of it: "
            "use 8bit, 4bit or 1bit instead of topk"
        )


def _share(text: str) -> float:
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


def _bytes(values: torch.Tensor) -> torch.Tensor:
    """The bytes of numbers (b, c), (b, c·size), as they lie in memory: the lowest first, as
    safetensors has them.
    """
    return values.clone(memory_format=torch.contiguous_format).view(torch.uint8)


def _numbers(rows: torch.Tensor, kind: torch.dtype) -> torch.Tensor:
    """Numbers (b, c) from their bytes."""
    # a copy: a view keeps strides that no number divides
    return rows.clone(memory_format=torch.contiguous_format).view(kind)


def _scale(rows: torch.Tensor) -> torch.Tensor:
    """The scales of byte rows, (b, 1)."""
    scale = _numbers(rows[:, :SCALE], torch.float32)
    if not bool((scale.isfinite() & (scale >= 0)).all()):
        raise FrameError(_FORGED.format("a scale that is none"))
    return scale


def _coins(row: torch.Tensor) -> torch.Tensor:
    """As many fair coins as there are numbers in a row, which it determines itself."""
    digest = hashlib.blake2b(row.cpu().numpy().tobytes(), digest_size=16).digest()
    draw = np.random.Generator(np.random.Philox(key=int.from_bytes(digest, "little")))
    return torch.from_numpy(draw.integers(0, 2, len(row), dtype=np.uint8)).to(row.device) > 0
