"""Mean losses that leave a client with Gaussian noise: how much of it, and when (ours, after Dwork et al. 2006, for rows of means)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from securecluster.backend import torch

if TYPE_CHECKING:
    from securecluster.endpoint import Turn
    from securecluster.privacy.draws import Draws

Array = NDArray[np.float64]


@dataclass(frozen=True)
class LossNoise:
    """The noise on rows of k mean losses of one client's n samples, each sample's loss clipped to [0, B].

    Unit example: the divisor is n, which is taken as public, so with one sample more, one less or another one each of the k means moves by
    B/n at most: between one and none, or one and another, of the losses in [0, B] lies at most B. The row moves by B·√k/n.
    Unit client: each mean lies in [0, B], and a client that does not count has a row of zeros: the row moves by B·√k, and by no more where
    another client's data stand in its place. So for both units the sensitivity is the same for add/remove and for replacing.

    Args:
        multiplier: z, the standard deviation of the noise over this sensitivity; 0 adds none, and leaves losses unclipped.
        bound: B, in the losses' unit.
        clients: whether the unit is the client, and not the example.
        draws: where the noise comes from; needed where there is some.
    """

    multiplier: float = 0.0
    bound: float = 1.0
    clients: bool = True
    draws: Draws | None = None

    @property
    def clip(self) -> float | None:
        """B, where there is noise: what each sample's loss is clipped to."""
        return self.bound if self.multiplier > 0 else None

    @property
    def counted(self) -> bool:
        """Whether a client may tell how many samples its losses are of: for the unit client that is a release, too."""
        return not (self.clients and self.multiplier > 0)

    def sensitivity(self, k: int, n: int) -> float:
        """Of a row of k means over n samples, L2."""
        return self.bound * math.sqrt(k) / (1 if self.clients else max(n, 1))

    def added(self, purpose: str, turn: Turn, means: Array, sizes: Sequence[int], widths: Sequence[int] | None = None) -> Array:
        """Rows (b, k) of mean losses as they may leave; exact ones where there is no noise.

        Asked the same again, in the same call, a client adds the same noise (`Draws`).

        Args:
            purpose: names the draw, with the client, the call and the row.
            means: of losses that were clipped to [0, B]; one that is not finite counts as B (a client without samples).
            sizes: (b,) n of each client.
            widths: (b,) how many numbers of its row are a client's, the first ones; all of them without it.
        """
        if not self.multiplier:
            return means
        assert self.draws is not None
        found = np.nan_to_num(means, nan=self.bound, posinf=self.bound)
        for n, i in enumerate(turn.ids):
            own = found[n, : None if widths is None else widths[n]]
            row = torch.as_tensor(own)
            scale = self.multiplier * self.sensitivity(len(own), sizes[n])
            own += scale * self.draws.normal(i, purpose, turn.step, row).numpy()
        return found


EXACT = LossNoise()
"""losses as they are"""
