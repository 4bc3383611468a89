"""Two-world audits: lower bounds of a release's privacy loss, from samples of it alone.

A canary is the contribution that shows most: far longer than the clip norm, in a direction in which
nothing else lies. In one world it is present, in the other it is blanked: its place is kept, and
contributes zero. The statistic is the release along the canary's direction. With Gaussian noise of
multiplier z it is N(1/z, 1) against N(0, 1), in units of the noise, and no test distinguishes the
two better than μ = 1/z allows (Dong, Roth & Su 2022: μ-GDP). A lower confidence bound of μ above
the claim refutes the claim; one below proves nothing.

- By rates: one half of the statistics chooses a threshold, the other half gives its hits and false
  alarms. The exact bounds of both (Clopper & Pearson) give μ ≥ Φ⁻¹(hits) − Φ⁻¹(false alarms). This
  assumes that runs are independent, and nothing about how the release is made.
- By moments: where both worlds are Gaussian with one unknown variance, Student's t of their means
  has a non-central distribution of parameter μ√(ab/(a + b)) for a and b runs, and its quantile is
  an exact bound of μ. It is sharper by far at large μ.
- Of ε at δ, without the assumption of Gaussians: ε ≥ log((hits − δ)/false alarms), as in Nasr et
  al. (2021), and the same with the worlds exchanged.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from securecluster.core.lazy_torch import torch
from securecluster.errors import UsageError

Array = NDArray[np.float64]
# smallest number of runs in each world
FEWEST = 20
# norm of a canary over the bound that it is to be held to: a release that does not clip is caught
LONG = 10.0


@dataclass(frozen=True)
class Audit:
    """Statistics of a release with and without a canary, each from a run of its own.

    Args:
        present: statistics with the canary (a,), larger where the canary shows.
        absent: statistics without it (b,).
        confidence: probability that a bound is a true one, for each bound.
    """

    present: Array
    absent: Array
    confidence: float

    @property
    def mu(self) -> float:
        """Return a lower bound of μ: the larger one of `by_rates` and `by_moments`."""
        # each at half the error (union bound)
        level = (1 - self.confidence) / 2
        return max(self.by_rates(level), self.by_moments(level))

    def by_rates(self, level: float) -> float:
        """Return a lower bound of μ that holds for any release.

        Args:
            level: probability that the bound is false.
        """
        from scipy.special import ndtri

        def mu(hits: Array, alarms: Array) -> Array:
            return np.asarray(ndtri(hits) - ndtri(alarms))

        hits, alarms = self._best_rates(level, mu)
        return max(0.0, float(mu(hits, alarms)))

    def by_moments(self, level: float) -> float:
        """Return a lower bound of μ where both worlds are Gaussian with one variance.

        Args:
            level: probability that the bound is false.
        """
        from scipy import optimize, stats

        a = len(self.present)
        b = len(self.absent)
        # two means are estimated
        freedom = a + b - 2
        runs = a + b
        scale = math.sqrt(a * b / runs)
        squares = self.present.var() * a
        squares += self.absent.var() * b
        deviation = math.sqrt(squares / freedom)
        difference = self.present.mean() - self.absent.mean()
        if deviation == 0:
            # a release without noise: any difference distinguishes the worlds
            return math.inf if difference > 0 else 0.0
        t = scale * float(difference) / deviation
        if stats.t.sf(t, freedom) >= level:
            return 0.0

        def excess(center: float) -> float:
            return float(stats.nct.sf(t, freedom, center) - level)

        return float(optimize.brentq(excess, 0.0, t)) / scale

    def epsilon(self, delta: float) -> float:
        """Return a lower bound of ε at δ that holds for any release.

        Args:
            delta: δ, in (0, 1).
        """
        # each direction at half the error (union bound)
        level = (1 - self.confidence) / 2
        exchanged = Audit(-self.absent, -self.present, self.confidence)
        ratio = self._log_ratio(level, delta)
        return max(ratio, exchanged._log_ratio(level, delta))

    def _log_ratio(self, level: float, delta: float) -> float:
        def log_ratio(hits: Array, alarms: Array) -> Array:
            # no logarithm of zero or less, where hits do not exceed δ
            excess = np.maximum(hits - delta, 1e-300)
            return np.asarray(np.log(excess / alarms))

        hits, alarms = self._best_rates(level, log_ratio)
        return max(0.0, float(log_ratio(hits, alarms)))

    def _best_rates(
        self, level: float, gain: Callable[[Array, Array], Array]
    ) -> tuple[Array, Array]:
        """Return bounds of hits and false alarms at the best threshold.

        Args:
            level: probability that a bound is false.
            gain: bounds of hits and false alarms (t,) -> the quantity to maximise (t,).
        """
        # One half chooses the threshold and the other is tested: bounds at a threshold that was
        # chosen by the same statistics would not hold.
        present = self.present[::2]
        absent = self.absent[::2]
        thresholds = np.unique(np.concatenate([present, absent]))
        hits, alarms = _rates(present, absent, thresholds, level)
        best = np.argmax(gain(hits, alarms))
        tested_present = self.present[1::2]
        tested_absent = self.absent[1::2]
        return _rates(tested_present, tested_absent, thresholds[best], level)


def _rates(present: Array, absent: Array, thresholds: Array, level: float) -> tuple[Array, Array]:
    """Return a lower bound of hits and an upper bound of false alarms (Clopper & Pearson).

    The test calls what is above a threshold present.

    Args:
        present: statistics with the canary (a,).
        absent: statistics without it (b,).
        thresholds: thresholds (t,), or a single one.
        level: probability that either bound is false.

    Returns:
        Bounds in the shape of `thresholds`.
    """
    from scipy.special import betaincinv

    a = len(present)
    b = len(absent)
    hits = _count_above(present, thresholds)
    alarms = _count_above(absent, thresholds)
    # Beta quantiles are defined between 1 and a hits, and between 0 and b − 1 alarms; beyond them
    # the bounds are 0 and 1.
    error = level / 2
    misses = a - hits
    lower = betaincinv(np.maximum(hits, 1), misses + 1, error)
    rejections = b - alarms
    upper = betaincinv(alarms + 1, np.maximum(rejections, 1), 1 - error)
    lower = np.where(hits > 0, lower, 0.0)
    upper = np.where(rejections > 0, upper, 1.0)
    return lower, upper


def _count_above(statistics: Array, thresholds: Array) -> NDArray[np.int64]:
    """Return the number of statistics above each threshold."""
    not_above = np.searchsorted(np.sort(statistics), thresholds, side="right")
    return np.asarray(len(statistics) - not_above)


def lower_bound(
    present: Sequence[float] | Array, absent: Sequence[float] | Array, confidence: float = 0.99
) -> Audit:
    """Return the audit of a release by its statistics with and without the canary.

    Args:
        present: statistics with the canary (a,).
        absent: statistics without it (b,).
        confidence: probability that a bound is a true one, in (0, 1).

    Raises:
        UsageError: fewer than 20 statistics of either world, one that is not finite, or a
            confidence that is not between 0 and 1.
    """
    present = np.asarray(present, dtype=np.float64)
    absent = np.asarray(absent, dtype=np.float64)
    if not 0 < confidence < 1:
        raise UsageError(
            f"a confidence of {confidence:g} is none: give a probability, 0.99 for instance"
        )
    if not (_is_sample(present) and _is_sample(absent)):
        raise UsageError(
            f"an audit needs at least {FEWEST} finite statistics of each world: repeat the release "
            "more often"
        )
    return Audit(present, absent, confidence)


def _is_sample(statistics: Array) -> bool:
    if statistics.ndim != 1 or len(statistics) < FEWEST:
        return False
    return bool(np.isfinite(statistics).all())


def directions(count: int, d: int, seed: int) -> torch.Tensor:
    """Return dense orthogonal unit vectors (count, d), from a QR factorisation of Gaussians.

    Args:
        count: number of vectors, at most d.
        d: dimension.
        seed: seed of the Gaussians.

    Raises:
        UsageError: `count` is above `d`.
    """
    if count > d:
        raise UsageError(f"{count} canaries cannot be orthogonal in {d} dimensions: take fewer")
    generator = np.random.Generator(np.random.Philox(seed))
    gaussians = generator.standard_normal((d, count))
    orthonormal, _ = np.linalg.qr(gaussians)
    return torch.from_numpy(orthonormal.T.copy())


def updates(
    release: Callable[[torch.Tensor, Sequence[int]], torch.Tensor],
    canaries: torch.Tensor,
    norm: float,
) -> tuple[Array, Array]:
    """Return statistics of rows that leave their clients individually.

    Args:
        release: rows (c, d) of c clients, and the clients' numbers -> released rows (c, d). No
            client is asked twice.
        canaries: unit directions (c, d), one a client.
        norm: bound that a row's norm is to be held to.

    Returns:
        Statistics (c,) with the canaries and (c,) without.
    """
    c = len(canaries)
    contributions = (LONG * norm) * canaries
    zeros = torch.zeros_like(canaries)
    present = release(contributions, range(c))
    absent = release(zeros, range(c, 2 * c))
    return _along(present, canaries), _along(absent, canaries)


def _along(rows: torch.Tensor, canaries: torch.Tensor) -> Array:
    """Return the inner product of each row with its canary, (c,)."""
    products = rows.double() * canaries.double()
    return np.asarray(products.sum(1).numpy())
