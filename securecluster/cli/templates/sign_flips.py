"""A mask that changes the sign of each coordinate at random."""

from __future__ import annotations

import numpy as np
import torch

from securecluster.privacy.masking import masks
from securecluster.privacy.masking.keystream import SIGNS, Keyed, signs


class SignFlips(Keyed[torch.Tensor]):
    """Secret sign of each coordinate, drawn anew for each call."""

    name = "sign-flips"

    def forward(self, rows: torch.Tensor, step: int) -> torch.Tensor:
        """Return rows (b, d) with signs changed."""
        d = rows.shape[-1]
        return rows * self._of(d, step).to(rows.device, rows.dtype)

    def inverse(self, rows: torch.Tensor, step: int) -> torch.Tensor:
        """Return rows (b, d) with the signs of that call changed back."""
        return self.forward(rows, step)

    def _draw(self, seed: bytes, d: int, step: int) -> torch.Tensor:
        return torch.from_numpy(np.asarray(signs(seed, step, d, SIGNS)))


masks.register(
    "sign-flips",
    lambda dimension: SignFlips(),
    masks.MaskInfo(
        shows="the magnitude of each coordinate, its norm and inner products with the others",
        not_covered="the signs are obfuscation: one client that tells the server the shared seed "
        "undoes them",
        hides="the signs of coordinates",
    ),
    entrywise=True,
)
