"""Sketches: short rows that keep inner products.

Clusters can be recognised from few numbers, and with far more noise. A sketch is a public map, not
a mask: it hides what its q numbers do not determine, and protects nothing by itself.

It is fresh for each call, by the public seed and the call's number. Its gain is that noise of the
same σ falls on q numbers in place of d.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from numbers import Integral
from typing import ClassVar, TypeAlias

from securecluster.core.lazy_torch import torch
from securecluster.core.randomness import Randomness
from securecluster.errors import UsageError
from securecluster.privacy.masking import hadamard
from securecluster.privacy.masking.keystream import blocks
from securecluster.privacy.masking.rotations import padded
from securecluster.privacy.pipeline import Kind

# signs of D, and selected rows of H
PublicMap: TypeAlias = "tuple[torch.Tensor, torch.Tensor]"


class Sketch:
    """Sketch y = √(n/q)·R·H·D·(x, 0) of rows x, drawn anew for each call, in O(d log d).

    H is an orthonormal Hadamard matrix of order n ≥ d, D random signs, R draws q rows without
    replacement (subsampled randomized Hadamard transform: Ailon, Chazelle 2009; Tropp 2011).
    Kronecker products of small Hadamard matrices are not in the papers. Inner products and squared
    norms are unbiased; ⟨y, y'⟩ has a standard deviation of at most about
    √((‖x‖²·‖x'‖² + ⟨x, x'⟩²)/q), so cosines one of about 1/√q. That holds for sparse rows too,
    since the signs and H spread them.

    Args:
        q: numbers in a sketch, from 1 to d − 1.
        randomness: public randomness, from the seed that all parties know. The map follows from it
            and the number of the call.

    Raises:
        UsageError: q is not a whole number from 1.
    """

    kind: ClassVar[Kind] = Kind.SKETCH
    name: ClassVar[str] = "sketch"
    _CACHED = 4

    def __init__(self, q: int, randomness: Randomness) -> None:
        check_size(q)
        self.q = q
        self._randomness = randomness
        # (d, step) -> map
        self._drawn: OrderedDict[tuple[int, int], PublicMap] = OrderedDict()

    def width(self, d: int) -> int:
        """Return the numbers in a sketch: q.

        Args:
            d: numbers in a row.

        Raises:
            UsageError: rows are no longer than their sketch.
        """
        if self.q >= d:
            raise UsageError(
                f"a sketch of {self.q:,} numbers is no shorter than the row of {d:,}: take a "
                "smaller sketch, or none"
            )
        return self.q

    def forward(self, rows: torch.Tensor, step: int) -> torch.Tensor:
        """Return sketches (b, q); the only other new memory is one block of rows.

        Args:
            rows: rows (b, d).
            step: number of the call.

        Raises:
            UsageError: rows are no longer than their sketch.
        """
        d = rows.shape[-1]
        q = self.width(d)
        sketches = rows.new_empty((*rows.shape[:-1], q))
        signs, selected = self._map(d, step)
        signs = signs.to(rows.device, rows.dtype)
        selected = selected.to(rows.device)
        factors = hadamard.factor_matrices(d, rows)
        row_blocks = blocks(rows.contiguous())
        sketch_blocks = _blocks_like(sketches, d)
        for block, short in zip(row_blocks, sketch_blocks, strict=True):
            mixed = block.new_zeros(len(block), padded(d))
            torch.mul(block, signs, out=mixed[:, :d])
            mixed = hadamard.transform(mixed, factors)
            coordinates = mixed.index_select(1, selected)
            # √(n/q), and the 1/√n of an orthonormal H
            torch.div(coordinates, math.sqrt(q), out=short)
        return sketches

    def inverse(self, rows: torch.Tensor, step: int) -> torch.Tensor:
        """Return `rows`: a sketch is not undone."""
        return rows

    def _map(self, d: int, step: int) -> PublicMap:
        """Return the first d signs of D, and the rows of H that R draws, (q,).

        Args:
            d: numbers in a row.
            step: number of the call.
        """
        if (d, step) not in self._drawn:
            generator = self._randomness.generator("public", "sketch", step, d)
            bits = generator.integers(0, 2, d, dtype="int8")
            signs = torch.from_numpy(bits * 2 - 1)
            coordinates = generator.choice(padded(d), self.q, replace=False)
            self._drawn[d, step] = (signs, torch.from_numpy(coordinates))
            while len(self._drawn) > self._CACHED:
                self._drawn.popitem(last=False)
        return self._drawn[d, step]


def check_size(q: object) -> None:
    """Raise UsageError unless q is a length of a sketch.

    Args:
        q: a value given by the user.
    """
    # bool is an Integral, too
    if not isinstance(q, Integral) or isinstance(q, bool) or q < 1:
        raise UsageError(
            f"sketch = {q!r} is no number of numbers: give a whole number from 1, as 64 or 256"
        )


def _blocks_like(sketches: torch.Tensor, d: int) -> tuple[torch.Tensor, ...]:
    """Return sketches (…, q) in the same blocks as `keystream.blocks` makes of their rows.

    Args:
        sketches: sketches (…, q).
        d: numbers in a row.
    """
    table = sketches.view(-1, sketches.shape[-1])
    row_count = max(1, (1 << 18) // d)
    return torch.split(table, row_count)
