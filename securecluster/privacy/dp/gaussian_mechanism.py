"""Gaussian mechanism on rows that leave a client: clip to a norm, then add noise.

See McMahan et al. 2018, and Dwork & Roth 2014, appendix A.

Security rules: no error bypasses the mechanism. Under noise, rows that are not finite count as
zeros, since an error would be a release without noise. A share of noise is released in sums over as
many clients as there are shares, and a channel whose aggregator reads replies refuses it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from securecluster.core.floating_point import margin
from securecluster.core.lazy_torch import torch
from securecluster.errors import PolicyError, UpdateError, UsageError
from securecluster.privacy.dp.grid_noise import deviation
from securecluster.privacy.masking.keystream import blocks
from securecluster.privacy.pipeline import Kind

if TYPE_CHECKING:
    from securecluster.privacy.dp.noise_streams import NoiseStreams

# Two rows of norm S differ by up to 2S, one and a blanked one (zeros) by S.
REPLACE = 2.0


@dataclass(frozen=True)
class RowNoise:
    """Clip norm and noise of a field whose rows are not updates.

    Args:
        norm: S, to which each client's row is clipped.
        multiplier: z, the standard deviation of the noise over S.
    """

    norm: float
    multiplier: float


class Clip:
    """Clipping of each row x to x·min(1, S/‖x‖): its L2 norm is at most S, whatever rounding does.

    Args:
        norm: S, positive.
        nonfinite_as_zeros: True if a row that is not finite counts as zeros. Under noise it must,
            since a refusal would be a release without noise. Otherwise it is refused, since its
            training has diverged.
    """

    kind: ClassVar[Kind] = Kind.CLIP
    name: ClassVar[str] = "clip"

    def __init__(self, norm: float, nonfinite_as_zeros: bool = False) -> None:
        self.norm = float(norm)
        self.nonfinite_as_zeros = nonfinite_as_zeros

    def width(self, d: int) -> int:
        """Return the numbers in a clipped row: d."""
        return d

    def forward(self, rows: torch.Tensor, step: int) -> torch.Tensor:
        """Return clipped rows (b, d) in new memory.

        Args:
            rows: rows (b, d).
            step: number of the call, not used.

        Raises:
            UpdateError: a row that is not finite, unless these count as zeros.
        """
        factors = self._factors(rows)
        finite = _zero_where_dropped(rows, factors)
        return (finite.double() * factors).to(rows.dtype)

    def overwrite(self, rows: torch.Tensor, step: int) -> torch.Tensor:
        """Clip `rows` (b, d) in place, like `forward`.

        Args:
            rows: rows (b, d).
            step: number of the call, not used.
        """
        factors = self._factors(rows)
        row_blocks = blocks(rows)
        lengths = [len(block) for block in row_blocks]
        factor_blocks = torch.split(factors, lengths)
        for block, block_factors in zip(row_blocks, factor_blocks, strict=True):
            finite = _zero_where_dropped(block, block_factors)
            block.copy_(finite.double() * block_factors)
        return rows

    def inverse(self, rows: torch.Tensor, step: int) -> torch.Tensor:
        """Return `rows`: clipping is not inverted."""
        return rows

    def _factors(self, rows: torch.Tensor) -> torch.Tensor:
        """Return the factor of each row, (b, 1) float64; 0 for a row that is not finite."""
        # float64, since float32 would round a small factor up
        norms = torch.linalg.vector_norm(rows, dim=-1, keepdim=True, dtype=torch.float64)
        nonfinite = ~norms.isfinite()
        if not self.nonfinite_as_zeros and bool(nonfinite.any()):
            raise UpdateError(
                "an update is not finite, so it cannot be clipped: lower the learning rate (--lr)"
            )
        # The margin is for the rounding of the clipped row.
        limit = self.norm * (1 - margin(rows.dtype))
        factors: torch.Tensor = (limit / norms).clamp(max=1)
        return factors.masked_fill(nonfinite, 0)


def _zero_where_dropped(rows: torch.Tensor, factors: torch.Tensor) -> torch.Tensor:
    """Return rows (b, d) with zeros where the factor is 0.

    A row that is not finite would stay so: 0·∞ and 0·NaN are NaN.

    Args:
        rows: rows (b, d).
        factors: factors (b, 1).
    """
    dropped = factors == 0
    # a GPU would have to be waited for
    if rows.device.type != "cpu" or bool(dropped.any()):
        return rows.masked_fill(dropped, 0)
    return rows


class Noise:
    """Gaussian noise N(0, (zS)²/shares) in every coordinate, drawn by each client on its own.

    The noise lies on a grid (`grid_noise`).

    Args:
        norm: S, to which rows are clipped.
        multiplier: z, positive.
        shares: smallest number of honest clients that add their share to one sum: 1 for a row that
            is read individually. With more, a row by itself is protected less than `multiplier`
            says, so it may leave only in sums whose terms nobody reads. Each share is rounded by
            itself, so a sum of them is Gaussian up to that rounding, and not exactly.

    Raises:
        UsageError: `shares` is below 1.
    """

    kind: ClassVar[Kind] = Kind.NOISE
    name: ClassVar[str] = "noise"

    def __init__(self, norm: float, multiplier: float, shares: int = 1) -> None:
        if shares < 1:
            raise UsageError(
                f"noise in {shares} shares is none: plan for one honest client at least"
            )
        self.norm = float(norm)
        self.multiplier = float(multiplier)
        self.shares = int(shares)
        # Variances of the shares add up to that of z.
        self._share_multiplier = self.multiplier / math.sqrt(shares)
        self._draws: NoiseStreams | None = None

    def arm(self, draws: NoiseStreams) -> None:
        """Set the source of the noise.

        Args:
            draws: streams of the clients.
        """
        self._draws = draws

    def width(self, d: int) -> int:
        """Return the numbers in a row with noise: d."""
        return d

    def forward_for(
        self, rows: torch.Tensor, step: int, ids: Sequence[int], field: str
    ) -> torch.Tensor:
        """Add noise to clients' rows in place.

        Args:
            rows: clipped rows (b, d).
            step: number of the call.
            ids: clients of the rows (b,).
            field: field of the reply that the rows are.

        Raises:
            UsageError: no source of noise was set.
        """
        if self._draws is None:
            raise UsageError(
                "these clients have no keys to draw noise from: set them first with Pipeline.arm"
            )
        if rows.device.type != "cpu":
            self._draws.noise_together(ids, field, step, rows, self._share_multiplier, self.norm)
            return rows
        for row, client in zip(rows, ids, strict=True):
            noisy = self._draws.noised(client, field, step, row, self._share_multiplier, self.norm)
            row.copy_(noisy)
        return rows

    def forward(self, rows: torch.Tensor, step: int) -> torch.Tensor:
        """Raise PolicyError: noise needs client ids, see `forward_for`."""
        raise PolicyError("noise is added for clients by their numbers: call the pipeline with ids")

    def inverse(self, rows: torch.Tensor, step: int) -> torch.Tensor:
        """Return `rows`: noise is not removed."""
        return rows

    def squared_noise(self, d: int) -> float:
        """Return the expected squared norm of the noise on a row, σ²d.

        Args:
            d: numbers in a row.
        """
        sigma = deviation(self._share_multiplier, self.norm, d)
        return sigma**2 * d


class TrustedCurator:
    """Noise of a trusted server, added before its protocol sees the replies (central placement).

    Args:
        norm: S, to which clients clip: the sensitivity of every sum to blanking one client, and of
            each row.
        multiplier: z.
        draws: streams keyed by SERVER. Readers of a run's sums must not know the noise on them.
    """

    SERVER: ClassVar[int] = -1

    def __init__(self, norm: float, multiplier: float, draws: NoiseStreams) -> None:
        self.norm = float(norm)
        self.multiplier = float(multiplier)
        self._draws = draws
        self._clip = Clip(norm, nonfinite_as_zeros=True)

    def squared_noise(self, d: int) -> float:
        """Return the expected squared norm of the noise on a row, σ²d.

        Args:
            d: numbers in a row.
        """
        sigma = deviation(self.multiplier, self.norm, d)
        return sigma**2 * d

    def add(
        self, rows: torch.Tensor, step: int, field: str, counts: Sequence[int] | None = None
    ) -> torch.Tensor:
        """Return rows (r, n) with noise N(0, σ²) in every number, in new memory.

        Masked rows get noise as well.

        Args:
            rows: rows of single clients, or sums (r, n).
            step: number of the call.
            field: field of the reply that the rows are.
            counts: number of clients in each sum (r,); sums over no client get no noise. None for
                rows of single clients.
        """
        # Single rows are clipped once more: one that was rounded to 4 bits may stand for a row of
        # nearly twice the norm.
        noisy = self._clip.forward(rows, step) if counts is None else rows.clone()
        for n, row in enumerate(noisy):
            if counts is None or counts[n]:
                released = self._draws.noised(
                    self.SERVER, f"{field} {n}", step, row, self.multiplier, self.norm
                )
                row.copy_(released)
        return noisy
