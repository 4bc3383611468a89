"""The Gaussian mechanism on rows that leave a client: clip to a norm, then add noise (McMahan et
al. 2018; Dwork & Roth 2014, A).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import ClassVar

from securecluster.core.floating_point import margin
from securecluster.core.lazy_torch import torch
from securecluster.errors import PolicyError, UpdateError, UsageError
from securecluster.privacy.dp.grid_noise import deviation
from securecluster.privacy.dp.noise_streams import NoiseStreams
from securecluster.privacy.masking.keystream import blocks
from securecluster.privacy.pipeline import Kind

REPLACE = 2.0  # two rows of norm S differ by up to 2S, one and its absence (a zero) by S


class Clip:
    """x·min(1, S/‖x‖) of each row: its L2 norm is at most S, whatever rounding does.

    Args:
        norm: S, positive.
        total: whether a row that is not finite counts as zeros. Under noise it must, since a
            refusal would be a release of its own, without noise; otherwise it is refused, since its
            training has diverged.
    """

    kind: ClassVar[Kind] = Kind.CLIP
    name: ClassVar[str] = "clip"

    def __init__(self, norm: float, total: bool = False) -> None:
        self.norm = float(norm)
        self.total = total

    def width(self, d: int) -> int:
        """d."""
        return d

    def forward(self, rows: torch.Tensor, step: int) -> torch.Tensor:
        """Return the clipped rows (b, d), new ones.

        Raises:
            UpdateError: a row that is not finite, unless these count as zeros.
        """
        factors = self._factors(rows)
        return (self._finite(rows, factors).double() * factors).to(rows.dtype)

    def overwrite(self, rows: torch.Tensor, step: int) -> torch.Tensor:
        """Write the same over `rows`."""
        factors = self._factors(rows)
        for part, own in zip(blocks(rows), self._alike(factors, rows), strict=True):
            part.copy_(self._finite(part, own).double() * own)
        return rows

    def inverse(self, rows: torch.Tensor, step: int) -> torch.Tensor:
        """What was cut off is gone."""
        return rows

    def _factors(self, rows: torch.Tensor) -> torch.Tensor:
        """Return what to multiply each row by, (b, 1) in float64: in float32 a small factor would
        be rounded up.
        """
        norms = torch.linalg.vector_norm(rows, dim=-1, keepdim=True, dtype=torch.float64)
        bad = ~norms.isfinite()
        if not self.total and bool(bad.any()):
            raise UpdateError(
                "an update is not finite, so it cannot be clipped: lower the learning rate (--lr)"
            )
        limit = self.norm * (1 - margin(rows.dtype))
        factors: torch.Tensor = (limit / norms).clamp(max=1)
        return factors.masked_fill(bad, 0)

    @staticmethod
    def _finite(rows: torch.Tensor, factors: torch.Tensor) -> torch.Tensor:
        """Return rows with zeros for those whose factor is 0, of which no multiple is finite."""
        gone = factors == 0
        return rows.masked_fill(gone, 0) if bool(gone.any()) else rows

    @staticmethod
    def _alike(factors: torch.Tensor, rows: torch.Tensor) -> Sequence[torch.Tensor]:
        """Return the factors of the rows in each of their blocks."""
        return torch.split(factors, [len(part) for part in blocks(rows)])


class Noise:
    """x + N(0, (zS)²/shares) in every coordinate, on a grid (`grid_noise`), drawn by each client
    for itself.

    Args:
        norm: S, what rows are clipped to.
        multiplier: z, positive.
        shares: how many honest clients at least add their part to one sum: 1 for a row that is read
            on its own. With more, a row by itself is protected less than `multiplier` says, so it
            may only leave in sums that nobody reads the terms of. Each share is rounded by itself,
            so a sum of them is a Gaussian up to that rounding, and not exactly.
    """

    kind: ClassVar[Kind] = Kind.NOISE
    name: ClassVar[str] = "noise"

    def __init__(self, norm: float, multiplier: float, shares: int = 1) -> None:
        if shares < 1:
            raise UsageError(
                f"noise in {shares} shares is none: plan for one honest client at least"
            )
        self.norm, self.multiplier, self.shares = float(norm), float(multiplier), int(shares)
        self._own = self.multiplier / math.sqrt(shares)
        self._draws: NoiseStreams | None = None

    def arm(self, draws: NoiseStreams) -> None:
        """Hand in what the noise is drawn from."""
        self._draws = draws

    def width(self, d: int) -> int:
        """d."""
        return d

    def forward_for(
        self, rows: torch.Tensor, step: int, ids: Sequence[int], field: str
    ) -> torch.Tensor:
        """Rows (b, d) of the clients `ids`, with noise; written over them."""
        if self._draws is None:
            raise UsageError(
                "these clients have nothing to draw noise from yet: hand in their keys first"
            )
        for row, i in zip(rows, ids, strict=True):
            row.copy_(self._draws.noised(i, field, step, row, self._own, self.norm))
        return rows

    def forward(self, rows: torch.Tensor, step: int) -> torch.Tensor:
        """Noise is somebody's: `forward_for` adds it."""
        raise PolicyError("noise is added for clients by their numbers: call the pipeline with ids")

    def inverse(self, rows: torch.Tensor, step: int) -> torch.Tensor:
        """Noise stays."""
        return rows

    def squared_noise(self, d: int) -> float:
        """σ²d."""
        return deviation(self._own, self.norm, d) ** 2 * d


class TrustedCurator:
    """A trusted server's noise, which is added before its protocol sees what came: the central
    placement.

    Args:
        norm: S, what clients clip to: the sensitivity of every sum to one client's absence, and of
            each row.
        multiplier: z.
        draws: keyed by SERVER; what the sums of one run are noised with must not be known to those
            who see them.
    """

    SERVER: ClassVar[int] = -1

    def __init__(self, norm: float, multiplier: float, draws: NoiseStreams) -> None:
        self.norm, self.multiplier, self._draws = float(norm), float(multiplier), draws
        self._clip = Clip(norm, total=True)

    def squared_noise(self, d: int) -> float:
        """Return the expected squared norm of what it adds to a row of d numbers."""
        return deviation(self.multiplier, self.norm, d) ** 2 * d

    def add(
        self, rows: torch.Tensor, step: int, field: str, counts: Sequence[int] | None = None
    ) -> torch.Tensor:
        """Rows (r, n) with N(0, σ²) in every number, new ones, but for sums over nobody; what masks
        have turned is noised as well.

        Args:
            counts: of sums, how many clients each holds. Without it rows are single clients', and
                clipped once more: a row that was rounded to 4 bits may stand for one of nearly
                twice the norm.
        """
        out = rows.clone() if counts is not None else self._clip.forward(rows, step)
        for n, row in enumerate(out):
            if counts is None or counts[n]:
                row.copy_(
                    self._draws.noised(
                        self.SERVER, f"{field} {n}", step, row, self.multiplier, self.norm
                    )
                )
        return out
