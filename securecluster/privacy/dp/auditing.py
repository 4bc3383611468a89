"""The two-world audit: how private a release is at most, judged by what it does with and without a
canary, not by what it says.

A canary is the contribution that shows most: far longer than the clip norm, in a direction in which
nothing else lies. In one world it is there, in the other its client contributes zero (add or remove
one unit); the statistic is what was released along its direction. With Gaussian noise of multiplier
z it is N(1/z, 1) against N(0, 1), in the noise's own unit: no test tells the two apart better than
μ = 1/z allows (Dong, Roth & Su 2022: μ-GDP). A lower confidence bound of μ above the claim refutes
the claim; one below proves nothing.

- By rates: one half of the statistics chooses a threshold, the other half gives its hits and false
  alarms, and Clopper & Pearson's exact bounds of both give μ ≥ Φ⁻¹(hits) − Φ⁻¹(false alarms). It
  assumes that runs are independent, and nothing of how the release is made.
- By moments: where both worlds are Gaussian with one unknown variance, Student's t of their means
  has a non-central distribution of parameter μ√(ab/(a + b)) for a and b runs, and its quantile is
  an exact bound of μ. It is sharper by far at large μ.
- Of ε at δ, without either Gaussian: ε ≥ log((hits − δ)/false alarms), as in Nasr et al. (2021),
  and the same with the worlds exchanged.
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
FEWEST = 20  # runs in each world
# a canary's norm over the bound that it is to be held to: what does not clip is caught too
LONG = 10.0


@dataclass(frozen=True)
class Audit:
    """Statistics of a release with and without a canary, each from a run of its own.

    Args:
        present: (a,), larger where the canary shows. absent: (b,).
        confidence: of each bound, that it is a true one.
    """

    present: Array
    absent: Array
    confidence: float

    @property
    def mu(self) -> float:
        """A lower bound of μ: the better one of the two, each at half the error."""
        level = (1 - self.confidence) / 2
        return max(self.by_rates(level), self.by_moments(level))

    def by_rates(self, level: float) -> float:
        """A lower bound of μ that errs with probability `level`, whatever the release is."""
        from scipy.special import ndtri

        hits, alarms = self._judged(level, lambda hits, alarms: ndtri(hits) - ndtri(alarms))
        return max(0.0, float(ndtri(hits) - ndtri(alarms)))

    def by_moments(self, level: float) -> float:
        """A lower bound of μ that errs with probability `level`, where both worlds are Gaussian
        with one variance.
        """
        from scipy import optimize, stats

        a, b = len(self.present), len(self.absent)
        freedom, scale = a + b - 2, math.sqrt(a * b / (a + b))
        spread = math.sqrt((self.present.var() * a + self.absent.var() * b) / freedom)
        if spread == 0:
            return math.inf if self.present.mean() > self.absent.mean() else 0.0
        t = scale * float(self.present.mean() - self.absent.mean()) / spread
        if stats.t.sf(t, freedom) >= level:
            return 0.0
        return (
            float(optimize.brentq(lambda center: stats.nct.sf(t, freedom, center) - level, 0.0, t))
            / scale
        )

    def epsilon(self, delta: float) -> float:
        """A lower bound of ε at δ, whatever the release is."""
        level = 1 - self.confidence
        swapped = Audit(-self.absent, -self.present, self.confidence)
        return max(one._log_ratio(level / 2, delta) for one in (self, swapped))

    def _log_ratio(self, level: float, delta: float) -> float:
        def gain(hits: Array, alarms: Array) -> Array:
            return np.asarray(np.log(np.maximum(hits - delta, 1e-300) / alarms))

        return max(0.0, float(gain(*self._judged(level, gain))))

    def _judged(self, level: float, gain: Callable[[Array, Array], Array]) -> tuple[Array, Array]:
        """Bounds of hits, from below, and of false alarms, from above, at the threshold that gains
        most in the other half.
        """
        thresholds = np.unique(np.concatenate([self.present[::2], self.absent[::2]]))
        tried = gain(*_rates(self.present[::2], self.absent[::2], thresholds, level))
        return _rates(
            self.present[1::2], self.absent[1::2], thresholds[int(np.argmax(tried))], level
        )


def _rates(present: Array, absent: Array, thresholds: Array, level: float) -> tuple[Array, Array]:
    """Of calling what is above a threshold present: a lower bound of hits and an upper one of false
    alarms, together at `level`.
    """
    from scipy.special import betaincinv

    above = [
        len(one) - np.searchsorted(np.sort(one), thresholds, side="right")
        for one in (present, absent)
    ]
    hits = betaincinv(np.maximum(above[0], 1), len(present) - above[0] + 1, level / 2)
    alarms = betaincinv(above[1] + 1, np.maximum(len(absent) - above[1], 1), 1 - level / 2)
    return np.where(above[0] > 0, hits, 0.0), np.where(above[1] < len(absent), alarms, 1.0)


def lower_bound(
    present: Sequence[float] | Array, absent: Sequence[float] | Array, confidence: float = 0.99
) -> Audit:
    """The audit of a release by its statistics with and without the canary.

    Raises:
        UsageError: there are fewer than 20 of either, one is not finite, or the confidence is not
            between 0 and 1.
    """
    worlds = [np.asarray(one, dtype=np.float64) for one in (present, absent)]
    if not 0 < confidence < 1:
        raise UsageError(
            f"a confidence of {confidence:g} is none: give a probability, 0.99 for instance"
        )
    if any(one.ndim != 1 or len(one) < FEWEST or not np.isfinite(one).all() for one in worlds):
        raise UsageError(
            f"an audit needs at least {FEWEST} finite statistics of each world: repeat the release "
            "more often"
        )
    return Audit(worlds[0], worlds[1], confidence)


def directions(count: int, d: int, seed: int) -> torch.Tensor:
    """Orthogonal unit vectors (count, d), count ≤ d, dense: none hides in one coordinate. From a QR
    factorisation of Gaussians.
    """
    if count > d:
        raise UsageError(f"{count} canaries cannot be orthogonal in {d} dimensions: take fewer")
    drawn = np.random.Generator(np.random.Philox(seed)).standard_normal((d, count))
    return torch.from_numpy(np.linalg.qr(drawn)[0].T.copy())


def updates(
    release: Callable[[torch.Tensor, Sequence[int]], torch.Tensor],
    canaries: torch.Tensor,
    norm: float,
) -> tuple[Array, Array]:
    """Statistics of rows that leave their clients one by one.

    Args:
        release: rows (c, d) of as many clients, and their numbers, to what arrives, (c, d). No
            client is asked twice.
        canaries: unit directions (c, d), one a client.
        norm: what a row's norm is to be held to.

    Returns:
        Statistics (c,) with the canaries and (c,) without.
    """
    c = len(canaries)
    there = release((LONG * norm) * canaries, range(c))
    gone = release(torch.zeros_like(canaries), range(c, 2 * c))
    return _along(there, canaries), _along(gone, canaries)


def summed(
    release: Callable[[torch.Tensor, Sequence[int]], torch.Tensor],
    canaries: torch.Tensor,
    norm: float,
) -> tuple[Array, Array]:
    """Statistics of one sum over clients, every other one of which contributes its canary and the
    rest zero.

    Args:
        release: rows (c, d) of as many clients, and their numbers, to the sum that arrives, (d,).
        canaries: orthogonal unit directions (c, d): each client's canary shows along its own.

    Returns:
        Statistics (⌈c/2⌉,) of the clients that are there and (⌊c/2⌋,) of those that are not.
    """
    rows = (LONG * norm) * canaries
    rows[1::2] = 0
    total = release(rows, range(len(rows)))
    along = (canaries.double() @ total.double()).numpy()
    return along[::2], along[1::2]


def grams(
    matrix: Callable[[torch.Tensor, int], torch.Tensor], canaries: torch.Tensor, rows: torch.Tensor
) -> tuple[Array, Array]:
    """Statistics uᵀÃu of clients' noisy Gram matrices Ã with and without a sample in direction u.

    Args:
        matrix: samples (n, D) of a client, and its number, to what it makes everything of, (D, D).
        canaries: unit directions (c, D); two clients for each.
        rows: the other samples of each, (n, D), all with the same, of norm 1 at most; what they add
            along u is taken off.
    """
    found: tuple[list[float], list[float]] = ([], [])
    for k, u in enumerate(canaries):
        bare = float((rows.double() @ u.double()).square().sum())
        for world, samples in enumerate((torch.cat([rows, LONG * u[None].to(rows.dtype)]), rows)):
            found[world].append(
                float(u.double() @ matrix(samples, 2 * k + world).double() @ u.double()) - bare
            )
    return np.array(found[0]), np.array(found[1])


def _along(rows: torch.Tensor, canaries: torch.Tensor) -> Array:
    return np.asarray((rows.double() * canaries.double()).sum(1).numpy())
