"""Sketches: short rows that keep inner products, so that clusters can be told from few numbers, and
with far more noise.

A sketch is a public map, not a mask: it hides what its q numbers do not determine, and protects
    nothing by itself.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from numbers import Integral
from typing import ClassVar

from securecluster.core.lazy_torch import torch
from securecluster.core.randomness import Randomness
from securecluster.errors import UsageError
from securecluster.privacy.masking import hadamard
from securecluster.privacy.masking.keystream import blocks
from securecluster.privacy.masking.rotations import padded
from securecluster.privacy.pipeline import Kind


class Sketch:
    """y = √(n/q)·R·H·D·(x, 0): q of the n coordinates that a random rotation gives, drawn afresh
    for each call, in O(d log d).

    H is an orthonormal Hadamard matrix of order n ≥ d, D random signs, R draws q rows without
    replacement (subsampled randomized Hadamard transform: Ailon, Chazelle 2009; Tropp 2011;
    Kronecker products of small Hadamard matrices are ours). Inner products and squared norms are
    unbiased; ⟨y, y'⟩ scatters by at most about √((‖x‖²·‖x'‖² + ⟨x, x'⟩²)/q), so cosines by about
    1/√q. That holds for sparse rows too, for the signs and H spread them.

    Args:
        q: numbers in a sketch, from 1 to d − 1.
        randomness: public, from the seed that all parties know; the map follows from it and the
            call's step.

    Raises:
        UsageError: q is no whole number from 1, or (when rows come) not below d.
    """

    kind: ClassVar[Kind] = Kind.SKETCH
    name: ClassVar[str] = "sketch"
    _CACHED = 4

    def __init__(self, q: int, randomness: Randomness) -> None:
        check_size(q)
        self.q, self._randomness = q, randomness
        self._drawn: OrderedDict[tuple[int, int], tuple[torch.Tensor, torch.Tensor]] = OrderedDict()

    def width(self, d: int) -> int:
        """q.

        Raises:
            UsageError: rows of d numbers are no longer than their sketch.
        """
        if self.q >= d:
            raise UsageError(
                f"a sketch of {self.q:,} numbers is no shorter than the row of {d:,}: take a "
                "smaller sketch, or none"
            )
        return self.q

    def forward(self, rows: torch.Tensor, step: int) -> torch.Tensor:
        """Sketches (b, q) of rows (b, d) under the map of call `step`; beside them there is one
        block of rows.
        """
        d = rows.shape[-1]
        out = rows.new_empty(*rows.shape[:-1], self.width(d))
        signs, picked = (t.to(rows.device) for t in self._map(d, step))
        signs = signs.to(rows.dtype)
        parts = [
            torch.from_numpy(hadamard.matrix(k)).to(rows.device, rows.dtype)
            for k in hadamard.factors(d)
        ]
        for block, short in zip(blocks(rows.contiguous()), _alike(out, d), strict=True):
            wide = block.new_zeros(len(block), padded(d))
            torch.mul(block, signs, out=wide[:, :d])
            torch.div(
                hadamard.transform(wide, parts).index_select(1, picked),
                math.sqrt(self.q),
                out=short,
            )
        return out

    def inverse(self, rows: torch.Tensor, step: int) -> torch.Tensor:
        """What came: a sketch is not undone."""
        return rows

    def _map(self, d: int, step: int) -> tuple[torch.Tensor, torch.Tensor]:
        """D's first d signs, and the rows of H that R draws, (q,)."""
        if (d, step) not in self._drawn:
            draw = self._randomness.generator("public", "sketch", step, d)
            signs = torch.from_numpy(draw.integers(0, 2, d, dtype="int8") * 2 - 1)
            self._drawn[d, step] = (
                signs,
                torch.from_numpy(draw.choice(padded(d), self.q, replace=False)),
            )
            while len(self._drawn) > self._CACHED:
                self._drawn.popitem(last=False)
        return self._drawn[d, step]


def check_size(q: object) -> None:
    """Raise UsageError for what is no length of a sketch."""
    if not isinstance(q, Integral) or isinstance(q, bool) or q < 1:
        raise UsageError(
            f"sketch = {q!r} is no number of numbers: give a whole number from 1, as 64 or 256"
        )


def _alike(short: torch.Tensor, d: int) -> tuple[torch.Tensor, ...]:
    """The rows of `short` (…, q) in the same portions as `stream.blocks` makes of rows of d."""
    return torch.split(short.view(-1, short.shape[-1]), max(1, (1 << 18) // d))
