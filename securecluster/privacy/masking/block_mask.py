"""Mask in two blocks: the first numbers of a row never mix with the others.

So servers that receive masked rows only can average the first layers of models on their own
(methods that share common layers).

Masks are fresh each round, so each of several rounds between two averages of common layers travels
on its own, and members get a correction for each.
"""

from __future__ import annotations

import hashlib
from typing import ClassVar

from securecluster.core.lazy_torch import torch
from securecluster.privacy.masking.masks import build, width
from securecluster.privacy.pipeline import Kind


class Blocks:
    """Mask diag(P, Q): P for the first numbers of a row, Q with another seed for the others.

    Args:
        mask: name of both masks, not "none".
        first: numbers in the first block, at least 1.
        second: numbers in the second block, at least 1.
    """

    kind: ClassVar[Kind] = Kind.MASK

    def __init__(self, mask: str, first: int, second: int) -> None:
        self.name = mask
        self.cut = width(mask, first)
        self._sizes = [first, second]
        (self._first,) = build(mask, first)
        (self._second,) = build(mask, second)

    def unlock(self, seed: bytes) -> None:
        """Set the seed that the clients agreed on.

        Args:
            seed: 32 secret bytes.
        """
        # Equal seeds would give blocks of equal size the same map.
        second_seed = hashlib.sha256(b"securecluster second block v1" + seed).digest()
        self._first.unlock(seed)  # type: ignore[attr-defined]
        self._second.unlock(second_seed)  # type: ignore[attr-defined]

    def width(self, d: int) -> int:
        """Return the numbers in a masked row.

        Args:
            d: numbers in a row.
        """
        first, _ = self._sizes
        return self.cut + width(self.name, d - first)

    def forward(self, rows: torch.Tensor, step: int) -> torch.Tensor:
        """Return masked rows (b, n), of which the first `cut` numbers are the first block's.

        Args:
            rows: rows (b, d).
            step: number of the call.
        """
        first, second = torch.split(rows, self._sizes, dim=-1)
        masked_first = self._first.forward(first.contiguous(), step)
        masked_second = self._second.forward(second.contiguous(), step)
        return torch.cat([masked_first, masked_second], -1)

    def inverse(self, rows: torch.Tensor, step: int) -> torch.Tensor:
        """Return rows (b, d) with the mask undone.

        Args:
            rows: masked rows (b, n).
            step: number of the call that they were masked in.
        """
        masked_first = rows[..., : self.cut].contiguous()
        masked_second = rows[..., self.cut :].contiguous()
        first = self._first.inverse(masked_first, step)
        second = self._second.inverse(masked_second, step)
        return torch.cat([first, second], -1)
