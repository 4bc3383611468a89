"""Privacy accountant: ε of Gaussian releases and of trainings with DP-SGD, composed.

A history lists what one client released as steps (z, q, count): noise multiplier z = σ over
sensitivity, sampling rate q, number of times. Sampling is Poisson sampling. The neighbouring
relation is to blank what z refers to: it keeps its place and contributes zeros ("zero-out", Kairouz
et al. 2021, definition 1.1), so that sampling rates and numbers of steps stay. With `replaced` it
is to replace it: in steps without sampling z is then σ over that sensitivity, and sampled steps,
whose z stays, are priced by `replaced_divergence` and `ReplacedLoss`.

- Gaussians without sampling (q = 1) compose into one with 1/z² = Σ count/z² (Dong, Roth & Su 2022,
  corollary 3.3), whose ε is the root of δ = Φ(μ/2 − ε/μ) − e^ε Φ(−μ/2 − ε/μ), μ = 1/z (Balle & Wang
  2018, theorem 8). The PRV accountant of opacus gives up to 0.01 more.
- Histories with sampled steps go to the PRV accountant (Gopi, Lee & Wutschitz 2021), which reports
  an upper bound. Where its grid would take too much memory, or it fails, they go to Rényi
  divergences (Mironov, Talwar & Zhang 2019), and the result says so. For a replaced unit both
  have the two mixtures of Gaussians that `ReplacedLoss` explains.
- Skellam noise of secure sums has a bound of its Rényi divergences of whole orders (Agarwal,
  Kairouz & Liu 2021, section 3). A history with such releases is composed by Rényi divergences
  of whole orders, whatever its other releases are.
- Every figure is an upper bound. Noise is Gaussian also in its lowest bits: it is drawn on a grid
  (`grid_noise`).
"""

from __future__ import annotations

import itertools
import math
import warnings
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

from securecluster.errors import UsageError

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


# what `merged` returns
History = tuple[Step, ...]

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
# largest grid of the PRV accountant, in points: about 0.2 GB
GRID = 1 << 20
# Orders of Skellam noise, whose bound holds for whole ones.
SKELLAM_ORDERS = [*range(2, 257), *(1 << k for k in range(9, 21))]
# Noise multipliers above are accounted for as if nothing was sampled: an upper bound, where the
# series of opacus would take long.
UNSAMPLED = 1e4
# Noise multipliers below are accounted for as if batches were known where a unit is replaced: an
# upper bound, where the divergences' integrals would need very many points.
HARDLY_ANY = 0.15
# relative tolerance of a noise multiplier that is searched for
TOLERANCE = 1e-3
# largest noise multiplier that is searched for
LARGEST = 1e6
# 1/z² from which on batches are taken for all samples in an estimate, since its formula is no use
MOST_SQUARE = 100.0


class Cost(NamedTuple):
    """Privacy cost of a history.

    Args:
        epsilon: ε.
        rdp: bound of ε by Rényi divergences.
        accountant: name of the accountant that gave `epsilon`.
    """

    epsilon: float
    rdp: float
    accountant: str


class ReplacedLoss:
    """Privacy loss of a sampled Gaussian step in which a unit is replaced by another one.

    Either unit is in the batch with probability q, at the same time, and is a row of norm 1 at
    most. Rows of opposite directions are the worst pair: P = (1 − q)N(0, z²) + qN(1, z²) and Q =
    (1 − q)N(0, z²) + qN(−1, z²) dominate every other one (docs/privacy.md has the proof), and
    dominating pairs compose (Zhu, Dong & Wang 2022, theorem 10). The loss is log P/Q of x ~ P,
    which grows with x; that of the exchanged pair is the same.

    It has what opacus' accountant asks of a privacy loss.

    Args:
        q: sampling rate, in (0, 1).
        z: noise multiplier.
    """

    def __init__(self, q: float, z: float) -> None:
        self.q = q
        self.z = z

    def cdf(self, t: Any) -> Any:
        """Return the probability that the loss is at most t.

        P/Q = e^t is quadratic in y = exp(x/z²), with k = exp(−1/(2z²)), and its root is
        log y = t/2 + asinh((1 − q)/(qk)·sinh(t/2)).

        Args:
            t: losses, of any shape.
        """
        import numpy as np
        from scipy.special import ndtr

        q, z = self.q, self.z
        ratio = (1 - q) / q * math.exp(1 / (2 * z * z))
        half = np.asarray(t) / 2
        x = z * (half + np.arcsinh(ratio * np.sinh(half)))  # in units of z
        return (1 - q) * ndtr(x) + q * ndtr(x - 1 / z)


def replaced_divergence(z: float, q: float, order: float) -> float:
    """Return the Rényi divergence of the pair that `ReplacedLoss` explains.

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


def epsilon(history: Iterable[Step], delta: float, replaced: bool = False) -> Cost:
    """Return an upper bound of ε at δ for a whole history.

    Args:
        history: steps (z, q, count).
        delta: δ, in (0, 1).
        replaced: whether a unit is replaced, and not blanked, in sampled steps.

    Raises:
        UsageError: δ is not between 0 and 1.
    """
    _check_delta(delta)
    return _epsilon(merged(history, replaced), delta, replaced)


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


def skellam_epsilon(
    history: Iterable[Step], releases: Iterable[tuple[SkellamRelease, int]], delta: float
) -> Cost:
    """Return an upper bound of ε for a history with Skellam noise, by Rényi divergences.

    Args:
        history: steps (z, q, count) of the other releases.
        releases: releases with Skellam noise, and how often each was made.
        delta: δ, in (0, 1).

    Raises:
        UsageError: δ is not between 0 and 1.
    """
    _check_delta(delta)
    ordered = tuple(sorted((release, count) for release, count in releases if count > 0))
    if not ordered:
        return epsilon(history, delta)
    return _skellam_epsilon(merged(history), ordered, delta)


@lru_cache(1024)
def _skellam_epsilon(
    history: History, releases: tuple[tuple[SkellamRelease, int], ...], delta: float
) -> Cost:
    """Return the cost of a merged history together with Skellam noise."""
    if _has_exact_step(history):
        return Cost(math.inf, math.inf, "exact release")
    orders = SKELLAM_ORDERS
    if any(q < 1 for _, q, _ in history):
        # The series of sampled steps are as long as their order.
        orders = [order for order in orders if order <= max(ORDERS)]
    divergences = []
    for order in orders:
        divergence = sum(count * skellam_divergence(r, order) for r, count in releases)
        divergence += sum(count * _divergence(z, q, order) for z, q, count in history)
        divergences.append(divergence)
    bound = _converted(orders, divergences, delta)
    return Cost(bound, bound, "RDP")


def find_skellam_noise(cost: Callable[[float], float], target: float, delta: float) -> float:
    """Return the smallest z that costs at most a target ε, to a relative 1e-3 and rounded up.

    Args:
        cost: noise multiplier z -> ε, by Rényi divergences.
        target: ε, positive.
        delta: δ, in (0, 1).

    Raises:
        UsageError: δ or the target is out of range, or no z up to 1e6 is enough.
    """
    _check_delta(delta)
    _check_target(target)
    return _narrow(cost, target, _bracket(lambda z: cost(z) <= target, target))


def merged(history: Iterable[Step], replaced: bool = False) -> History:
    """Return an equivalent history without steps that cost nothing.

    Args:
        history: steps (z, q, count).
        replaced: whether a unit is replaced, and not blanked, in sampled steps.

    Returns:
        One step for everything without sampling, then one for each pair (z, q), sorted.
    """
    # Σ count/z² over steps without sampling
    precision = 0.0
    sampled: Counter[tuple[float, float]] = Counter()
    for z, q, count in history:
        if count <= 0 or q == 0 or math.isinf(z):
            continue
        if q < 1 and z <= UNSAMPLED:
            sampled[z, q] += count
        elif z == 0:
            precision = math.inf
        else:
            # the square of the sensitivity
            square = 4 if replaced and q < 1 else 1
            precision += square * count / z**2
    steps: list[Step] = []
    if precision == math.inf:
        steps.append((0.0, 1.0, 1))
    elif precision:
        steps.append((precision**-0.5, 1.0, 1))
    for (z, q), count in sorted(sampled.items()):
        steps.append((z, q, count))
    return tuple(steps)


def sampling(n: int, batch: int | None, epochs: int) -> tuple[float, int]:
    """Return (q, steps) of a training in Poisson batches, with q = min(1, batch/n).

    Args:
        n: number of samples.
        batch: expected samples in a batch; None for all.
        epochs: number of epochs, of ceil(n / batch) steps each.
    """
    if n == 0:
        return 0.0, 0
    if batch is None or batch >= n:
        return 1.0, epochs
    steps = epochs * math.ceil(n / batch)
    return batch / n, steps


def gaussian_delta(epsilon: float, mu: float) -> float:
    """Return log δ of one Gaussian release (Balle & Wang 2018, theorem 8).

    Args:
        epsilon: ε.
        mu: μ, sensitivity over σ.
    """
    from scipy.special import log_ndtr

    ratio = epsilon / mu
    first = float(log_ndtr(mu / 2 - ratio))
    second = epsilon + float(log_ndtr(-mu / 2 - ratio))
    if second < first:
        # log(e^first − e^second), without leaving log space
        difference = -math.expm1(second - first)
        return first + math.log(difference)
    return -math.inf


def gaussian_epsilon(mu: float, delta: float) -> float:
    """Return the smallest ε of one Gaussian release, to a relative 1e-9 and rounded up.

    Args:
        mu: μ, sensitivity over σ.
        delta: δ, in (0, 1).
    """
    log_delta = math.log(delta)
    if mu == 0 or gaussian_delta(0.0, mu) <= log_delta:
        return 0.0
    # tail bound of the privacy loss N(μ²/2, μ²)
    low = 0.0
    mean = mu * mu / 2
    log_tail = math.log(1 / delta)
    high = mean + mu * math.sqrt(2 * log_tail)
    if not mu < 1e9:
        return high
    while high - low > 1e-10 * high:
        middle = (low + high) / 2
        if gaussian_delta(middle, mu) <= log_delta:
            high = middle
        else:
            low = middle
    return high * (1 + 1e-9)


def dearest(
    histories: Sequence[History], delta: float, replaced: bool = False
) -> tuple[History, Cost] | None:
    """Return the history with the largest ε, and its cost.

    Args:
        histories: merged histories.
        delta: δ, in (0, 1).
        replaced: whether a unit is replaced, and not blanked, in sampled steps.

    Returns:
        None if there is no history.
    """
    _check_delta(delta)
    # Dominated histories cannot cost more.
    candidates = []
    for history in _undominated(histories):
        quick_bound = _bound(history, delta, FEW, replaced)
        candidates.append((quick_bound, history))
    largest: tuple[History, Cost] | None = None
    largest_epsilon = -math.inf
    # Costs take long to compute. In the order of their bounds, few histories need one: none costs
    # more than its bound by Rényi divergences.
    for quick_bound, history in sorted(candidates, reverse=True):
        if quick_bound <= largest_epsilon:
            continue
        if _bound(history, delta, replaced=replaced) <= largest_epsilon:
            continue
        cost = _epsilon(history, delta, replaced)
        if cost.epsilon > largest_epsilon:
            largest = (history, cost)
            largest_epsilon = cost.epsilon
    return largest


def find_noise(history: Callable[[float], Iterable[Step]], target: float, delta: float) -> float:
    """Return the smallest z that costs at most a target ε, to a relative 1e-3 and rounded up.

    Args:
        history: noise multiplier z -> what is released with it; larger z must cost less.
        target: ε, positive.
        delta: δ, in (0, 1).

    Raises:
        UsageError: δ or the target is out of range, or no z up to 1e6 is enough.
    """
    _check_delta(delta)
    _check_target(target)

    def fits(z: float) -> bool:
        released = merged(history(z))
        # A minimum over some of the orders is no smaller than that over all.
        return _bound(released, delta, WHOLE) <= target or _bound(released, delta) <= target

    def cost(z: float) -> float:
        return epsilon(history(z), delta).epsilon

    return _narrow(cost, target, _bracket(fits, target))


def find_noise_for_all(
    histories: Sequence[Callable[[float], Iterable[Step]]], target: float, delta: float
) -> float:
    """Return the smallest z at which each of several histories costs at most a target ε.

    Args:
        histories: functions as `find_noise` takes them.
        target: ε, positive.
        delta: δ, in (0, 1).

    Returns:
        z; 0 if no history costs anything.
    """
    # Searching for every history would take long. The search is for one, and again for whichever
    # costs most there, until none costs too much.
    rough_costs = [_rough_cost(history) for history in histories]
    worst = max(range(len(histories)), key=rough_costs.__getitem__, default=None)
    if worst is None or not merged(histories[worst](1.0)):
        return 0.0
    z = 0.0
    while True:
        # z must grow: the errors of accountants are not monotone in z.
        larger_z = z * (1 + TOLERANCE)
        z = max(larger_z, find_noise(histories[worst], target, delta))
        released = [merged(history(z)) for history in histories]
        largest = dearest([steps for steps in released if steps], delta)
        if largest is None or largest[1].epsilon <= target:
            return z
        worst = released.index(largest[0])


def estimated_noise(
    histories: Sequence[Callable[[float], Iterable[Step]]], target: float, delta: float
) -> float:
    """Return about the z at which each of several histories costs a target ε, in milliseconds.

    By the central limit theorem many releases are about as private as one Gaussian release (Dong et
    al. 2022), also where they are of random batches (Bu et al. 2020, theorem 5). No price: what is
    released costs what `epsilon` says.

    Args:
        histories: as `find_noise_for_all` takes them.
        target: ε, positive.
        delta: δ, in (0, 1).

    Returns:
        z; 0 if no history costs anything.
    """
    allowed = _bisected(lambda mu: gaussian_epsilon(mu, delta) <= target, 1 / LARGEST, LARGEST)

    def fits(inverse: float) -> bool:
        return all(_distance(history(1 / inverse)) <= allowed for history in histories)

    if not any(merged(history(1.0)) for history in histories):
        return 0.0
    return 1 / _bisected(fits, 1 / LARGEST, LARGEST)


def _bisected(fits: Callable[[float], bool], low: float, high: float) -> float:
    """Return the largest number that fits, to a relative `TOLERANCE`.

    Args:
        fits: whether a number does; larger ones must fit no better.
        low: taken to fit.
        high: taken not to.
    """
    while high / low > 1 + TOLERANCE:
        middle = math.sqrt(low * high)
        if fits(middle):
            low = middle
        else:
            high = middle
    return low


def _distance(history: Iterable[Step]) -> float:
    """Return about the μ of the one Gaussian release that is as private as a history."""
    total = 0.0
    for z, q, count in history:
        square = z**-2
        if q < 1 and square < MOST_SQUARE:
            square = min(square, q * q * math.expm1(square))
        total += count * square
    return math.sqrt(total)


def _rough_cost(history: Callable[[float], Iterable[Step]]) -> float:
    """Return Σ count·(q/z)² of a history at z = 1."""
    steps = merged(history(1.0))
    costs = [count * (q / z) ** 2 for z, q, count in steps]
    return sum(costs)


def _bracket(fits: Callable[[float], bool], target: float) -> float:
    """Return a power of two z whose bound is at most the target, unlike that of z/2.

    The search downwards ends at 1e-4.

    Args:
        fits: z -> True if its bound of ε is at most the target; larger z must fit better.
        target: ε, positive.

    Raises:
        UsageError: z would be above `LARGEST`.
    """
    z = 1.0
    while not fits(z):
        z *= 2
        if z > LARGEST:
            raise UsageError(
                f"a target epsilon of {target:g} cannot be met by noise up to {LARGEST:g}: release "
                "less, or raise the target"
            )
    while z > 1e-4 and fits(z / 2):
        z /= 2
    return z


def _narrow(cost: Callable[[float], float], target: float, high: float) -> float:
    """Return the smallest z that costs at most the target, to a relative `TOLERANCE`.

    log ε is nearly linear in log z between two z, so most steps are secants.

    Args:
        cost: z -> ε, decreasing.
        target: ε, positive.
        high: a z that costs at most the target.
    """
    cost_high = cost(high)
    low = high / 2
    cost_low = cost(low)
    while cost_low <= target and low > 1e-5:
        high = low
        cost_high = cost_low
        low = low / 2
        cost_low = cost(low)
    turn = 0
    while high / low > 1 + TOLERANCE:
        middle = math.sqrt(low * high)
        # Every third step is a bisection, in case that log ε is far from linear.
        if 0 < cost_high < cost_low < math.inf and turn % 3 < 2:
            log_z_range = math.log(high / low)
            slope = log_z_range / math.log(cost_high / cost_low)
            log_ratio = math.log(target / cost_low)
            crossing = low * math.exp(slope * log_ratio)
            # just above the crossing, then just below it: two calls may be enough
            side = (0.4, -0.4)[turn % 3]
            aim = crossing * (1 + TOLERANCE * side)
            if low < aim < high:
                middle = aim
        cost_middle = cost(middle)
        if cost_middle <= target:
            high = middle
            cost_high = cost_middle
        else:
            low = middle
            cost_low = cost_middle
        turn += 1
    return high


def _check_delta(delta: float) -> None:
    if not 0 < delta < 1:
        raise UsageError(
            f"delta is a probability, not {delta:g}: choose one below 1/(number of clients), 1e-5 "
            "for instance"
        )


def _check_target(target: float) -> None:
    if not 0 < target < math.inf:
        raise UsageError(f"a target epsilon of {target:g} cannot be met: choose a number above 0")


@lru_cache(4096)
def _epsilon(history: History, delta: float, replaced: bool = False) -> Cost:
    """Return the cost of a merged history."""
    if not history:
        return Cost(0.0, 0.0, "nothing released")
    if _has_exact_step(history):
        return Cost(math.inf, math.inf, "exact release")
    rdp = _rdp(history, delta, replaced=replaced)
    # the part without sampling, which is the first step: ε cannot be smaller
    minimum = 0.0
    z, q, _ = history[0]
    if q == 1:
        minimum = gaussian_epsilon(1 / z, delta)
        if len(history) == 1:
            return Cost(minimum, max(rdp, minimum), "exact Gaussian")
    prv = _prv(history, delta, rdp, replaced)
    if prv is not None and minimum <= prv <= rdp:
        return Cost(prv, rdp, "PRV")
    return Cost(rdp, rdp, "RDP")


def _has_exact_step(history: Sequence[Step]) -> bool:
    """Return True if some step has no noise (z = 0): any exact release makes ε infinite."""
    return any(z == 0 for z, _, _ in history)


def _bound(
    history: History, delta: float, orders: Sequence[float] = ORDERS, replaced: bool = False
) -> float:
    """Return an upper bound of ε that takes little time.

    Args:
        history: merged history.
        delta: δ, in (0, 1).
        orders: orders of the Rényi divergences.
        replaced: whether a unit is replaced, and not blanked, in sampled steps.
    """
    if all(q == 1 for _, q, _ in history):
        return _epsilon(history, delta).epsilon
    return _rdp(history, delta, orders, replaced)


def _rdp(
    history: Sequence[Step], delta: float, orders: Sequence[float] = ORDERS, replaced: bool = False
) -> float:
    """Return the bound of ε by Rényi divergences.

    Args:
        history: steps (z, q, count), one or more.
        delta: δ, in (0, 1).
        orders: orders of the Rényi divergences.
        replaced: whether a unit is replaced, and not blanked, in sampled steps.
    """
    if _has_exact_step(history):
        return math.inf
    integer_orders = [order for order in orders if float(order).is_integer()]
    if len(integer_orders) > 2:
        orders = _orders_that_may_be_best(history, delta, orders, integer_orders, replaced)
    divergences = [_divergences(history, order, replaced) for order in orders]
    return _converted(orders, divergences, delta)


def _converted(orders: Sequence[float], divergences: Sequence[float], delta: float) -> float:
    """Return the bound of ε by Rényi divergences of some orders.

    Args:
        orders: the orders.
        divergences: the divergence of each order.
        delta: δ, in (0, 1).
    """
    import numpy as np
    from opacus.accountants.analysis.rdp import get_privacy_spent

    # opacus warns where the best order is the first or the last: the bound is loose there but holds
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        bound, _ = get_privacy_spent(orders=list(orders), rdp=np.asarray(divergences), delta=delta)
    return max(0.0, float(bound))


def _orders_that_may_be_best(
    history: Sequence[Step],
    delta: float,
    orders: Sequence[float],
    whole: Sequence[float],
    replaced: bool,
) -> list[float]:
    """Return the orders without fractional ones that give a larger bound than a whole one does.

    (α - 1) times the Rényi divergence of order α is convex in α (van Erven & Harremoës 2014,
    corollary 2), so lines through whole orders bound it below between them.

    Args:
        history: steps (z, q, count), one or more.
        delta: δ, in (0, 1).
        orders: orders, ascending.
        whole: those that are whole numbers, of which there are three or more.
        replaced: whether a unit is replaced, and not blanked, in sampled steps.
    """
    points = [(1.0, 0.0)]
    for order in whole:
        points.append((float(order), (order - 1) * _divergences(history, order, replaced)))
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


def _divergences(history: Sequence[Step], order: float, replaced: bool = False) -> float:
    """Return the Rényi divergence of a whole history at one order."""
    divergence = 0.0
    for z, q, count in history:
        divergence += count * _divergence(z, q, order, replaced)
    return divergence


@lru_cache(1 << 16)
def _divergence(z: float, q: float, order: float, replaced: bool = False) -> float:
    """Return the Rényi divergence of one step at one order."""
    if replaced and q < 1:
        return replaced_divergence(z, q, order)
    from opacus.accountants.analysis.rdp import compute_rdp

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        # compute_rdp takes a single order as a float only.
        return float(compute_rdp(q=q, noise_multiplier=z, steps=1, orders=float(order)))


def _prv(history: Sequence[Step], delta: float, rdp: float, replaced: bool = False) -> float | None:
    """Return the upper bound of ε by the PRV accountant of opacus.

    This is opacus' `PRVAccountant.get_epsilon` to the last bit, from the parts that it is made of.
    The accountant itself computes all divergences anew for the grid's width, which takes most of
    its time.

    Args:
        history: merged history.
        delta: δ, in (0, 1).
        rdp: bound of ε by Rényi divergences.
        replaced: whether a unit is replaced, and not blanked, in sampled steps.

    Returns:
        None if the accountant's grid is too large, or it fails.
    """
    import numpy as np
    from opacus.accountants import RDPAccountant
    from opacus.accountants.analysis import prv

    error = _grid_error(history, delta, rdp, replaced)
    if error is None:
        return None
    tail = delta / 1000
    counts = [count for _, _, count in history]
    with warnings.catch_warnings(), np.errstate(all="ignore"):
        warnings.simplefilter("ignore")
        try:
            width = _grid_width(history, tail, error, RDPAccountant.DEFAULT_ALPHAS, replaced)
            mesh = error / np.sqrt(sum(counts) * np.log(12 / tail) / 2)
            grid = prv.Domain.create_aligned(-width, width, mesh)
            losses = []
            for z, q, _ in history:
                loss: Any = prv.PoissonSubsampledGaussianPRV(q, z)
                if replaced and q < 1:
                    loss = ReplacedLoss(q, z)
                truncated = prv.TruncatedPrivacyRandomVariable(loss, grid.t_min, grid.t_max)
                losses.append(prv.discretize(truncated, grid))
            composed = prv.compose_heterogeneous(losses, counts)
            _, _, upper = composed.compute_epsilon(delta, tail, error)
        except (RuntimeError, ValueError):
            return None
    bound = float(upper)
    if not math.isfinite(bound):
        return None
    return bound


def _grid_error(
    history: Sequence[Step], delta: float, rdp: float, replaced: bool = False
) -> float | None:
    """Return the smallest error of ε whose grid has at most `GRID` points; None if there is none.

    Args:
        history: merged history.
        delta: δ, in (0, 1).
        rdp: bound of ε by Rényi divergences.
        replaced: whether a unit is replaced, and not blanked, in sampled steps.
    """
    finest = min(0.1, max(0.01, rdp / 1000))
    for error in (finest, 0.1):
        if _points(history, delta, error, replaced) <= GRID:
            return error
    return None


def _points(history: Sequence[Step], delta: float, error: float, replaced: bool = False) -> float:
    """Return the number of points of the PRV accountant's grid.

    Args:
        history: merged history.
        delta: δ, in (0, 1).
        error: error of ε that the grid is made for.
        replaced: whether a unit is replaced, and not blanked, in sampled steps.
    """
    tail = delta / 1000
    steps = sum(count for _, _, count in history)
    width = _grid_width(history, tail, error, ORDERS, replaced)
    # e^709 overflows
    if not width < 600:
        return math.inf
    log_tail = math.log(12 / tail)
    return 2 * width * math.sqrt(steps * log_tail / 2) / error


def _grid_width(
    history: Sequence[Step],
    tail: float,
    error: float,
    orders: Sequence[float],
    replaced: bool = False,
) -> float:
    """Return half the width of the PRV accountant's grid (Gopi, Lee & Wutschitz 2021, remark 5.6).

    Args:
        history: merged history.
        tail: probability that the grid may leave out.
        error: error of ε that the grid is made for.
        orders: orders of the Rényi divergences.
        replaced: whether a unit is replaced, and not blanked, in sampled steps.
    """
    steps = sum(count for _, _, count in history)
    # tails of the composition, and of each step
    width = max(error, _rdp(history, tail / 4, orders, replaced))
    for z, q, _ in history:
        step_tail = tail / (8 * steps)
        step_width = _rdp([(z, q, 1)], step_tail, orders, replaced)
        width = max(width, step_width)
    return width + 3


def _undominated(histories: Iterable[History]) -> list[History]:
    """Return histories without those that another one costs at least as much as.

    Histories compare where they have the same noise multipliers. Clients of one run often do: their
    histories differ in their numbers of samples only.

    Args:
        histories: merged histories.
    """
    groups: dict[tuple[float, ...], list[History]] = {}
    for history in sorted(histories, key=_most_sampled_first):
        multipliers = tuple(z for z, _, _ in history)
        group = groups.setdefault(multipliers, [])
        if not any(_dominates(other, history) for other in group):
            group.append(history)
    return list(itertools.chain.from_iterable(groups.values()))


def _most_sampled_first(history: History) -> list[tuple[float, int]]:
    """Return the key of an order in which no history is dominated by a later, different one."""
    return [(-q, -count) for _, q, count in history]


def _dominates(history: History, other: History) -> bool:
    """Return True if a history samples and steps at least as much as another, step by step.

    Args:
        history: merged history.
        other: merged history of the same noise multipliers.
    """
    for step, other_step in zip(history, other, strict=True):
        _, q, count = step
        _, other_q, other_count = other_step
        if q < other_q or count < other_count:
            return False
    return True
