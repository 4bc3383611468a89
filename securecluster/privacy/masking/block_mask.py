"""A mask in two blocks: what it does to a row's first numbers never mixes with the rest.

So servers that see masked rows only can average the first layers of models on their own (methods
that share common layers).
"""

from __future__ import annotations

import hashlib
from typing import ClassVar

from securecluster.core.lazy_torch import torch
from securecluster.privacy.masking.masks import build, width
from securecluster.privacy.pipeline import Kind


class Blocks:
    """diag(P, Q): a mask P of the first `first` numbers of a row, another Q, with a seed of its
    own, of the others.

    Args:
        mask: the name of both, not "none".
        first: numbers in the first block, at least 1.
        rest: numbers in the second, at least 1.
    """

    kind: ClassVar[Kind] = Kind.MASK

    def __init__(self, mask: str, first: int, rest: int) -> None:
        self.name, self.cut = mask, width(mask, first)
        self._first, self._sizes = first, [first, rest]
        (self._one,), (self._two,) = build(mask, first), build(mask, rest)

    def unlock(self, seed: bytes) -> None:
        """Hand in the 32-byte seed that the clients agreed on."""
        self._one.unlock(seed)  # type: ignore[attr-defined]
        self._two.unlock(hashlib.sha256(b"securecluster second block v1" + seed).digest())  # type: ignore[attr-defined]

    def width(self, d: int) -> int:
        """Numbers in a masked row."""
        return self.cut + width(self.name, d - self._first)

    def forward(self, rows: torch.Tensor, step: int) -> torch.Tensor:
        """Rows (b, d) masked, (b, n): the first `cut` numbers are the first block's."""
        one, two = torch.split(rows, self._sizes, dim=-1)
        return torch.cat(
            [self._one.forward(one.contiguous(), step), self._two.forward(two.contiguous(), step)],
            -1,
        )

    def inverse(self, rows: torch.Tensor, step: int) -> torch.Tensor:
        """Rows (b, n) back to (b, d)."""
        one, two = rows[..., : self.cut], rows[..., self.cut :]
        return torch.cat(
            [self._one.inverse(one.contiguous(), step), self._two.inverse(two.contiguous(), step)],
            -1,
        )
