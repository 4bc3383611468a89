"""Rényi divergences of releases, and the bound of ε that they give.

Divergences of one order add up over releases (Mironov 2017), and each order gives a bound of ε
(Balle et al. 2020, theorem 21). Sampled Gaussian steps have those of Mironov, Talwar & Zhang
(2019), which are opacus', where a unit is blanked, and an integral where it is replaced. Skellam
noise has a bound of its divergences of whole orders (Agarwal, Kairouz & Liu 2021, section 3).
"""

from __future__ import annotations

import importlib.util
import math
import warnings
from bisect import bisect_left
from collections.abc import Sequence
from functools import cache, lru_cache
from pathlib import Path
from typing import Any, NamedTuple

# (noise multiplier z, sampling rate q, count)
Step = tuple[float, float, int]


class SkellamRelease(NamedTuple):
    """Sum with Skellam noise in every coordinate, in steps of its grid.

    Args:
        norm: Δ2, the L2 sensitivity.
        magnitudes: Δ1, the L1 sensitivity.
        variance: μ, the variance of a coordinate's noise.
    """

    norm: float
    magnitudes: float
    variance: float

    def scaled(self, ratio: float) -> SkellamRelease:
        """Return the release with larger sensitivities.

        Args:
            ratio: factor of both.
        """
        return SkellamRelease(ratio * self.norm, ratio * self.magnitudes, self.variance)


# orders 1.1 … 63 of opacus, and orders that fit very large and very small ε
ORDERS = [
    1.001,
    1.003,
    1.01,
    1.03,
    1.06,
    *(1 + k / 10 for k in range(1, 100)),
    *range(12, 64),
    80,
    96,
    128,
    192,
    256,
    512,
    1024,
]
# orders for a quick bound: a minimum over fewer orders is a bound as well
FEW = [1.06, 1.12, 1.25, 1.5, 2, 3, 5, 9, 17, 33, 63]
# Orders whose divergences take hardly any time: those of fractional orders are long series.
WHOLE = [order for order in ORDERS if float(order).is_integer()]
# Orders of Skellam noise, whose bound holds for whole ones.
SKELLAM_ORDERS = [*range(2, 257), *(1 << k for k in range(9, 21))]
# Noise multipliers of sampled steps above are taken for this one: an upper bound, where the series
# of opacus would take long.
MOST_NOISE = 1e4
# Noise multipliers below are accounted for as if batches were known where a unit is replaced: an
# upper bound, where the divergences' integrals would need very many points.
HARDLY_ANY = 0.15


def replaced_divergence(z: float, q: float, order: float) -> float:
    """Return the Rényi divergence of a step in which a unit is replaced (`loss_composition`).

    It has no closed form. The integral is a sum at equal distances, whose error vanishes
    exponentially with the distance for such a function (Trefethen & Weideman 2014).

    Args:
        z: noise multiplier.
        q: sampling rate, in (0, 1).
        order: α, above 1.
    """
    import numpy as np
    from scipy.special import logsumexp

    if z < HARDLY_ANY:
        return 2 * order / (z * z)
    # of the Gaussians' widths, and of the distance πz² of the mixtures' complex roots
    distance = min(z, z * z) / 8
    # the integrand's peaks are between those of P and α, where N(1)^α N(0)^(1 − α) has its own
    x = np.arange(-1 - 12 * z, order + 12 * z, distance)
    present, other = (
        np.logaddexp(math.log1p(-q) - x * x / (2 * z * z), math.log(q) - (x - c) ** 2 / (2 * z * z))
        for c in (1.0, -1.0)
    )
    log_integral = logsumexp(order * present - (order - 1) * other)
    log_integral += math.log(distance / (z * math.sqrt(2 * math.pi)))
    return max(0.0, float(log_integral)) / (order - 1)


def skellam_divergence(release: SkellamRelease, order: int) -> float:
    """Return a bound of the Rényi divergence of Skellam noise.

    ε(α) <= αΔ2²/(2μ) + min(((2α - 1)Δ2² + 6Δ1)/(4μ²), 3Δ1/(2μ)) (Agarwal, Kairouz & Liu 2021,
    section 3). The first part is that of a Gaussian of the same variance.

    Args:
        release: the release.
        order: α, a whole number above 1.
    """
    norm, magnitudes, variance = release
    squared = norm * norm
    gaussian = order * squared / (2 * variance)
    fine = ((2 * order - 1) * squared + 6 * magnitudes) / (4 * variance * variance)
    coarse = 3 * magnitudes / (2 * variance)
    return gaussian + min(fine, coarse)


def bound(
    history: Sequence[Step], delta: float, orders: Sequence[float] = ORDERS, replaced: bool = False
) -> float:
    """Return the bound of ε by Rényi divergences.

    Args:
        history: steps (z, q, count), one or more.
        delta: δ, in (0, 1).
        orders: orders of the Rényi divergences.
        replaced: whether a unit is replaced, and not blanked, in sampled steps.
    """
    if any(z == 0 for z, _, _ in history):
        return math.inf
    integer_orders = [order for order in orders if float(order).is_integer()]
    if len(integer_orders) > 2:
        orders = _orders_that_may_be_best(history, delta, orders, integer_orders, replaced)
    divergences = [together(history, order, replaced) for order in orders]
    return converted(orders, divergences, delta)


@cache
def _of_opacus() -> Any:
    """Return opacus' module of Rényi divergences, which numpy and scipy suffice for.

    Its file is loaded by itself: the rest of opacus takes a second, more than many runs.
    """
    package = importlib.util.find_spec("opacus")
    assert package is not None and package.origin is not None  # it is a dependency
    path = Path(package.origin).parent / "accountants" / "analysis" / "rdp.py"
    spec = importlib.util.spec_from_file_location("opacus_rdp", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def converted(orders: Sequence[float], divergences: Sequence[float], delta: float) -> float:
    """Return the bound of ε by Rényi divergences of some orders.

    Args:
        orders: the orders.
        divergences: the divergence of each order.
        delta: δ, in (0, 1).
    """
    import numpy as np

    # opacus warns where the best order is the first or the last: the bound is loose there but holds
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        bound, _ = _of_opacus().get_privacy_spent(
            orders=list(orders), rdp=np.asarray(divergences), delta=delta
        )
    return max(0.0, float(bound))


def _orders_that_may_be_best(
    history: Sequence[Step],
    delta: float,
    orders: Sequence[float],
    integer_orders: Sequence[float],
    replaced: bool,
) -> list[float]:
    """Return the orders without fractional ones that give a larger bound than a whole one does.

    (α - 1) times the Rényi divergence of order α is convex in α (van Erven & Harremoës 2014,
    corollary 2), so lines through whole orders bound it below between them.

    Args:
        history: steps (z, q, count), one or more.
        delta: δ, in (0, 1).
        orders: orders, ascending.
        integer_orders: those that are whole numbers, of which there are three or more.
        replaced: whether a unit is replaced, and not blanked, in sampled steps.
    """
    points = [(1.0, 0.0)]
    for order in integer_orders:
        points.append((float(order), (order - 1) * together(history, order, replaced)))
    bounds = [_epsilon_at(order, moment / (order - 1), delta) for order, moment in points[1:]]
    best = min(bounds)
    # room for the rounding of divergences
    limit = best + 1e-6 * (1 + abs(best))
    candidates = []
    for order in orders:
        is_whole = float(order).is_integer()
        if is_whole or not _epsilon_at(order, _smallest_divergence(order, points), delta) > limit:
            candidates.append(order)
    return candidates


def _smallest_divergence(order: float, points: Sequence[tuple[float, float]]) -> float:
    """Return a lower bound of a divergence.

    Args:
        order: α, not an order of `points`.
        points: some (order, (order - 1) · divergence), ascending, from order 1.
    """
    right = bisect_left(points, (order, 0.0))
    smallest = 0.0
    # lines through two points on one side, extended to α
    for first in (right - 2, right):
        if first < 0 or first + 1 >= len(points):
            continue
        (low, at_low), (high, at_high) = points[first : first + 2]
        slope = (at_high - at_low) / (high - low)
        line = at_low + slope * (order - low)
        if math.isfinite(line):
            smallest = max(smallest, line)
    return smallest / (order - 1)


def _epsilon_at(order: float, divergence: float, delta: float) -> float:
    """Return ε at δ from one Rényi divergence (Balle et al. 2020, theorem 21)."""
    logarithms = math.log(delta) + math.log(order)
    return divergence - logarithms / (order - 1) + math.log((order - 1) / order)


def together(history: Sequence[Step], order: float, replaced: bool = False) -> float:
    """Return the Rényi divergence of a whole history at one order.

    Args:
        history: steps (z, q, count), z positive.
        order: α, above 1.
        replaced: whether a unit is replaced, and not blanked, in sampled steps.
    """
    divergence_sum = 0.0
    for z, q, count in history:
        divergence_sum += count * divergence(z, q, order, replaced)
    return divergence_sum


@lru_cache(1 << 16)
def divergence(z: float, q: float, order: float, replaced: bool = False) -> float:
    """Return the Rényi divergence of one step at one order; infinite where it is not known.

    Args:
        z: noise multiplier, positive.
        q: sampling rate, in (0, 1].
        order: α, above 1.
        replaced: whether a unit is replaced, and not blanked, in a sampled step.
    """
    if q == 1:
        return order / (2 * z**2)
    z = min(z, MOST_NOISE)
    if replaced:
        return replaced_divergence(z, q, order)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            # compute_rdp takes a single order as a float only.
            found = _of_opacus().compute_rdp(q=q, noise_multiplier=z, steps=1, orders=float(order))
            rdp = float(found)
        except (ArithmeticError, ValueError):
            return math.inf
    return math.inf if math.isnan(rdp) else rdp
