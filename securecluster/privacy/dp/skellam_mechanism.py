"""Skellam mechanism in secure sums (Agarwal, Kairouz and Liu 2021): every client adds a share.

A client rounds its clipped and masked row to a grid, adds Skellam noise of 1/n of the variance, and
both stay whole numbers of the ring Z_2^32, in which secure sums are formed. Skellam noise is closed
under sums, so a sum of n rows or more has at least the planned noise. The server sees the sum only;
a row by itself is not private. n is the smallest number of survivors of which a sum is unmasked.
The shares of all survivors count, so all of them are taken as honest.

The rounded row's norm is checked with whole numbers, after everything that may round. So the
sensitivity holds whatever float arithmetic did before, and a row beyond it counts as zeros.

Clients and server hold to the planned number of survivors; the ledger prices what survived, up to
the planned shares. Methods that also send clipped rows by themselves are refused, by what their
client classes declare.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from securecluster.core.lazy_torch import torch
from securecluster.errors import FrameError, UsageError
from securecluster.privacy.dp.renyi import SkellamRelease
from securecluster.privacy.dp.skellam_noise import LARGEST_VARIANCE, Integers

if TYPE_CHECKING:
    from securecluster.privacy.dp.noise_streams import NoiseStreams

# Steps of the grid in the clip norm, over √d: rounding adds at most √d/2 steps to a row's norm,
# which is 1/128 of it.
STEPS = 64
# room for the rounding of clips and masks: a share of the clip norm
ROOM = 2.0**-10
# standard deviations of a sum's noise that the ring leaves room for
DEVIATIONS = 12
LIMIT = (1 << 31) - 1


@dataclass(frozen=True)
class SumPlan:
    """Grid and noise of the sums over some clients.

    Args:
        exponent: e; a step of the grid is 2^-e.
        numbers: d, numbers in a row.
        members: clients that are asked for a row.
        shares: n, the smallest number of survivors.
        squared_norm: Δ2², the largest squared L2 norm of a rounded row, in steps.
        draws: draws of one table in a client's share.
        draw_variance: variance of a draw, in squared steps.
    """

    exponent: int
    numbers: int
    members: int
    shares: int
    squared_norm: int
    draws: int
    draw_variance: int

    @property
    def share_variance(self) -> int:
        """Return the variance of one client's noise, in squared steps."""
        return self.draws * self.draw_variance

    @property
    def limit(self) -> int:
        """Return the largest magnitude of a number of a sum; more has noise beyond `DEVIATIONS`."""
        deviation = math.sqrt(self.members * self.share_variance)
        largest = math.isqrt(self.squared_norm)
        return self.members * largest + math.ceil(DEVIATIONS * deviation)

    def release(self, survivors: int) -> SkellamRelease:
        """Return what one client releases in a sum, for its price.

        Survivors beyond the planned ones do not make it cheaper, since a server may choose how many
        it waits for.

        Args:
            survivors: number of clients in the sum.
        """
        norm = math.sqrt(self.squared_norm)
        # Whole numbers are no larger than their squares.
        sum_of_magnitudes = min(math.sqrt(self.numbers) * norm, float(self.squared_norm))
        counted = min(survivors, self.shares)
        return SkellamRelease(norm, sum_of_magnitudes, float(counted * self.share_variance))


class SkellamMechanism:
    """Noise of a sum with standard deviation z·S or slightly more, in shares of the clients.

    Args:
        norm: S, to which rows are clipped.
        multiplier: z, positive.
        shares: function to the smallest number of survivors of which a sum over some members is
            unmasked: that of the protection of sums.
        draws: streams of clients that add noise; None at a server.
    """

    def __init__(
        self,
        norm: float,
        multiplier: float,
        shares: Callable[[int], int],
        draws: NoiseStreams | None = None,
    ) -> None:
        self.norm = float(norm)
        self.multiplier = float(multiplier)
        self._shares_of = shares
        self._draws = draws

    def shares(self, members: int) -> int:
        """Return the smallest number of survivors of which a sum is unmasked.

        Args:
            members: clients that are asked for a row.
        """
        return self._shares_of(members)

    def plan(self, d: int, members: int) -> SumPlan:
        """Return the grid and the noise of a sum.

        Args:
            d: numbers in a row.
            members: clients that are asked for a row.

        Raises:
            UsageError: the sum does not fit the ring.
        """
        return _plan(self.norm, self.multiplier, d, members, self.shares(members))

    def encode(
        self, row: torch.Tensor, plan: SumPlan, client: int, purpose: str, step: int
    ) -> torch.Tensor:
        """Return a row on the grid, with a client's share of the noise, modulo 2^32.

        A row that is not finite, or beyond the planned norm, counts as zeros: an error would be a
        release. What leaves the ring's range wraps, which changes no privacy.

        Args:
            row: clipped numbers, of any shape.
            plan: grid and noise of the sum.
            client: the client.
            purpose: name of the draw, together with `step`.
            step: number of the call.

        Returns:
            int32 of the row's shape.

        Raises:
            UsageError: no source of noise was given.
        """
        if self._draws is None:
            raise UsageError("this side of a sum has no keys to draw noise from: give it streams")
        steps = rounded(row, plan)
        noise = self._draws.skellam(
            client, purpose, step, steps, plan.exponent, plan.draw_variance, plan.draws
        )
        wrapped = (steps + noise).astype(np.int32)  # modulo 2^32
        return torch.from_numpy(wrapped).view(row.shape)

    def decode(
        self, row_sum: torch.Tensor, plan: SumPlan, dtype: torch.dtype | None = None
    ) -> torch.Tensor:
        """Return the numbers that a sum stands for.

        Args:
            row_sum: sum of encoded rows, int32.
            plan: grid and noise of the sum.
            dtype: type of the numbers; float32 by default.

        Raises:
            FrameError: a sum that no clients can have: forged, or still masked.
        """
        if row_sum.numel():
            low, high = map(int, torch.aminmax(row_sum))
            if row_sum.dtype != torch.int32 or not -plan.limit <= low <= high <= plan.limit:
                raise FrameError(
                    "a noised sum is beyond what its clients can have: a row was forged, or a mask "
                    "was not removed; ask for the sum again"
                )
        numbers = row_sum.double().mul_(math.ldexp(1.0, -plan.exponent))
        return numbers.to(dtype or torch.float32)


def rounded(row: torch.Tensor, plan: SumPlan) -> Integers:
    """Return a row in steps of the grid, (d,), with a squared norm of at most the plan's.

    Args:
        row: numbers of any shape.
        plan: grid of the sum.
    """
    scaled: npt.NDArray[np.float64] = row.detach().cpu().reshape(-1).to(torch.float64).numpy()
    steps = np.rint(np.ldexp(scaled, plan.exponent))
    # Whole numbers below 2^53 and their squares' sum have no error: more is refused all the same.
    with np.errstate(over="ignore", invalid="ignore"):
        squared_norm = float(np.dot(steps, steps))
    # False for NaN, too
    if not squared_norm <= plan.squared_norm:
        steps = np.zeros_like(steps)
    integers: Integers = steps.astype(np.int64)
    return integers


def least_release(multiplier: float) -> SkellamRelease:
    """Return the dearest release of a noise multiplier, whatever the model and the clients.

    Its grid is that of a row of one number. All others are at least as fine, and with finer steps
    Skellam noise of the same multiplier costs less.

    Args:
        multiplier: z.
    """
    return SkellamRelease(STEPS, STEPS, (multiplier * STEPS) ** 2)


@lru_cache(maxsize=1024)
def _plan(norm: float, multiplier: float, d: int, members: int, shares: int) -> SumPlan:
    """Return the plan of a sum; the arguments are those of `SkellamMechanism`."""
    width = max(d, 1)
    # the smallest power of two that is not below
    mantissa, exponent = math.frexp(STEPS * math.sqrt(width) / norm)
    if mantissa == 0.5:
        exponent -= 1
    largest = math.ldexp(norm * (1 + ROOM), exponent) + math.sqrt(width) / 2
    squared_norm = math.floor(largest * largest)
    share = multiplier**2 * squared_norm / shares
    draws = max(1, math.ceil(share / LARGEST_VARIANCE))
    plan = SumPlan(
        exponent=exponent,
        numbers=width,
        members=members,
        shares=shares,
        squared_norm=squared_norm,
        draws=draws,
        draw_variance=max(1, math.ceil(share / draws)),
    )
    if plan.limit > LIMIT:
        raise UsageError(
            f"a noised sum of {width} numbers over {members} clients does not fit 32 bits with "
            f"noise {multiplier:g}: lower the noise, sum over fewer clients, or take placement "
            "local"
        )
    return plan
