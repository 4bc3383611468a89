"""Composition of sampled Gaussian steps: an upper bound of ε at any δ, by FFT of privacy losses.

A step's outcomes have a privacy loss log P/Q, where P and Q dominate all pairs of neighbouring
data; losses of steps add up (`LossPair`). A sum's distribution is the product of Fourier transforms
on a grid.

- **Never below.** Losses are put on the grid by connected dots (Doroshenko et al. 2022): a loss
  between two points is shared among them so that P and Q keep their masses. This dominates, and so
  does any composition of it (Zhu, Dong & Wang 2022, theorem 10). Tails count as infinite losses.
- **At any δ.** A transform's rounding is as large everywhere as where the distribution is largest,
  so δ of that size has no digits. The losses are therefore tilted by e^(λt) first, with the λ
  that moves the sum's mean to where δ is decided: there the error is relative to δ.
- **Monotone.** Points are multiples of a power of two, which never falls as a history becomes
  dearer or δ smaller, and a coarser grid dominates a finer one. So a dearer history has no lower
  figure, but for rounding, which is absorbed in the seventh digit.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from securecluster.privacy.dp.renyi import Step

Array = NDArray[np.float64]
Direction = Literal["removed", "added", "replaced"]

# points of the grid for each unit of the scale
FINENESS = 1 << 16
# Noise multipliers of sampled steps below have too many outcomes to integrate over.
LEAST_NOISE = 0.02
# Of δ, for the scale: ε may be 0 at δ itself.
SCALE_SHARE = 1e-9
# Losses of a step are cut at so many scales, beyond which no sum that decides δ has its terms.
CUT_BELOW = 4
CUT_ABOVE = 16
# λ among which the scale is found, and from which the search for the best one starts
TILTS = [math.exp(k / 2) for k in range(-24, 61)]
# outcomes of each step that λ is chosen by
OUTCOMES = 4001
# largest λ, in units of the grid's spacing, where losses are bounded and all λ are as good
MOST_TILT = 50.0
# smallest spacing, whose multiples and squares are no zeros
LEAST_SPACING = 1e-140
# largest numbers of points of one step's losses, and of the sum's
MOST_POINTS = 1 << 22
# share of δ for what the losses leave out at both ends
TAIL = 1e-12
# share of the tilted sum that may lie outside the transform's window, as a logarithm
OUTSIDE = math.log(1e-14)
# of δ, for rounding: of the whole, for each step, and of a transform at each point
ROUNDING = 1e-9
ROUNDING_OF_STEP = 1e-14
ROUNDING_OF_POINT = 1e-15
# digits that figures are rounded up to
DIGITS = 7
# width of intervals that are integrated over, of the Gaussian's and of the mixture's width
WIDTH = 1 / 16
# width below which two nodes are as exact as five
NARROW = 1e-3
# transforms of a smaller power than e^-80 of their largest value are zero
NOTHING = 80.0


@dataclass(frozen=True)
class LossPair:
    """Dominating pair of one step, in units of its noise: the Gaussians' distance is 1/z.

    A unit that is blanked is in P, N(0) mixed with N(1/z), and not in Q, N(0) ("removed"), or the
    other way round ("added"). A unit that is replaced by another one has rows of opposite
    directions in both, at the same time: they are the worst ones (docs/privacy.md has the proof).
    Outcomes are ordered by their losses.

    Args:
        z: noise multiplier, positive.
        q: sampling rate, in (0, 1].
        direction: which of these pairs it is.
    """

    z: float
    q: float
    direction: Direction

    def loss(self, u: Array) -> Array:
        """Return log P/Q.

        Args:
            u: outcomes.
        """
        if self.direction == "removed":
            return self._mixed(u)
        if self.direction == "added":
            return -self._mixed(-u)
        return self._mixed(u) - self._mixed(-u)

    def log_density(self, u: Array) -> Array:
        """Return the logarithm of P's density.

        Args:
            u: outcomes.
        """
        normal = -u * u / 2 - math.log(2 * math.pi) / 2
        if self.direction == "added":
            return normal
        return normal + self._mixed(u)

    def outcome(self, loss: Array) -> Array:
        """Return the outcomes of some losses; NaN for losses that no outcome has.

        Args:
            loss: log P/Q.
        """
        if self.direction == "removed":
            return self._unmixed(loss)
        if self.direction == "added":
            return -self._unmixed(-loss)
        # P/Q = e^t is quadratic in exp(u/z): its root is t/2 + asinh((1 − q)/(qk) sinh(t/2))
        half = np.abs(loss) / 2
        ratio = math.log1p(-self.q) - math.log(self.q) + 1 / (2 * self.z * self.z)
        with np.errstate(divide="ignore"):
            log_sinh = half + np.log(-np.expm1(-2 * half)) - math.log(2)
        y = ratio + log_sinh
        root = np.where(y > 20, y + math.log(2), np.arcsinh(np.exp(np.minimum(y, 20.0))))
        outcome: Array = self.z * np.sign(loss) * (half + root)
        return outcome

    def ends(self, log_tail: float) -> tuple[float, float]:
        """Return outcomes beyond which P has at most a probability, at each end.

        Args:
            log_tail: logarithm of the probability.
        """
        from scipy.special import ndtri_exp

        reach = -float(ndtri_exp(log_tail))
        shift = 0.0 if self.direction == "added" else 1 / self.z
        low = shift - reach if self.q == 1 else -reach
        return low, shift + reach

    def below(self, u: float) -> float:
        """Return the probability under P that the outcome is smaller.

        Args:
            u: outcome.
        """
        from scipy.special import ndtr

        if self.direction == "added":
            return float(ndtr(u))
        return float((1 - self.q) * ndtr(u) + self.q * ndtr(u - 1 / self.z))

    def above(self, u: float) -> float:
        """Return the probability under P that the outcome is larger.

        Args:
            u: outcome.
        """
        from scipy.special import ndtr

        if self.direction == "added":
            return float(ndtr(-u))
        return float((1 - self.q) * ndtr(-u) + self.q * ndtr(1 / self.z - u))

    def _mixed(self, u: Array) -> Array:
        """Return log((1 − q)N(0) + qN(1/z)) − log N(0) at u."""
        exponent = u / self.z - 1 / (2 * self.z * self.z)
        if self.q == 1:
            return exponent
        small = np.log1p(self.q * np.expm1(np.minimum(exponent, 1.0)))
        large = np.logaddexp(math.log1p(-self.q), math.log(self.q) + exponent)
        mixed: Array = np.where(exponent < 1, small, large)
        return mixed

    def _unmixed(self, loss: Array) -> Array:
        """Return u at which `_mixed` is a loss."""
        exponent = loss
        if self.q < 1:
            with np.errstate(invalid="ignore", over="ignore", divide="ignore"):
                exponent = loss + np.log1p(-(1 - self.q) / self.q * np.expm1(-loss))
        return self.z * exponent + 1 / (2 * self.z)


def composed_epsilon(history: Sequence[Step], delta: float, replaced: bool = False) -> float | None:
    """Return an upper bound of ε at δ.

    Args:
        history: steps (z, q, count), z positive.
        delta: δ, in (0, 1).
        replaced: whether a unit is replaced, and not blanked.

    Returns:
        None if it would take too much memory.
    """
    if any(q < 1 and z < LEAST_NOISE for z, q, _ in history):
        return None
    largest = 0.0
    directions: tuple[Direction, ...] = ("replaced",) if replaced else ("removed", "added")
    for direction in directions:
        pairs = []
        for z, q, count in history:
            # a Gaussian's losses are those of its mirror image
            pairs.append((LossPair(z, q, direction if q < 1 else "removed"), count))
        epsilon = _epsilon(pairs, delta)
        if epsilon is None:
            return None
        largest = max(largest, epsilon)
    return rounded_up(largest)


def rounded_up(number: float) -> float:
    """Return a positive number rounded up to `DIGITS` digits, and 0 for 0.

    Args:
        number: to round.
    """
    if number == 0:
        return 0.0
    digits = DIGITS - 1 - math.floor(math.log10(number))
    if digits > 300:
        return number
    scale = 10.0 ** abs(digits)
    scaled = math.ceil(number * scale) / scale if digits >= 0 else math.ceil(number / scale) * scale
    return max(scaled, number)


def _epsilon(pairs: Sequence[tuple[LossPair, int]], delta: float) -> float | None:
    """Return the bound of ε in one direction; None if it would take too much memory.

    Args:
        pairs: pairs, and how often each is composed.
        delta: δ, in (0, 1).
    """
    steps = sum(count for _, count in pairs)
    log_delta = math.log(delta)
    log_tail = log_delta + math.log(TAIL / (2 * steps))
    moments = _Moments(pairs, log_tail)
    # ε at a smaller δ: it never falls as δ does or as steps are added, and is not close to 0.
    scale = min(moments.bound(tilt, log_delta + math.log(SCALE_SHARE)) for tilt in TILTS)
    if scale <= 0:
        return 0.0
    rounded_scale = math.ldexp(1.0, math.floor(math.log2(scale)))
    spacing = rounded_scale / FINENESS
    if not spacing > LEAST_SPACING:
        return None
    tilt = min(moments.best_tilt(log_delta), MOST_TILT / spacing)
    while True:
        laws = [(_tilted(pair, spacing, tilt, log_tail), count) for pair, count in pairs]
        low, high = _window(laws, tilt * spacing)
        if high - low > MOST_POINTS:
            return None
        bound = moments.bound(tilt, log_delta)
        anchor = max(0, math.floor(bound / spacing))
        epsilon = _read(laws, low, high, anchor, delta, tilt, spacing)
        # Where all of the window is above ε, the sum was tilted too far.
        if epsilon is None or low <= 0 or epsilon > low * spacing or tilt < TILTS[0]:
            return epsilon
        tilt /= 2


class _Moments:
    """Moments of a sum of losses, E e^(λt), from a few thousand outcomes of each step.

    They choose the grid and λ. No figure is less than it must be if they are not exact.

    Args:
        pairs: pairs, and how often each is composed.
        log_tail: logarithm of the probability that the losses leave out at each end.
    """

    def __init__(self, pairs: Sequence[tuple[LossPair, int]], log_tail: float) -> None:
        self._samples = []
        for pair, count in pairs:
            u = np.linspace(*pair.ends(log_tail), OUTCOMES)
            log_mass = pair.log_density(u) + math.log(u[1] - u[0])
            self._samples.append((log_mass, pair.loss(u), count))

    def bound(self, tilt: float, log_delta: float) -> float:
        """Return the bound of ε by the Rényi divergence of order 1 + λ.

        Args:
            tilt: λ, positive.
            log_delta: log δ.
        """
        from scipy.special import logsumexp

        moment = 0.0
        for log_mass, loss, count in self._samples:
            moment += count * float(logsumexp(log_mass + tilt * loss))
        conversion = tilt * math.log(tilt) - (1 + tilt) * math.log1p(tilt)
        return (moment - log_delta + conversion) / tilt

    def best_tilt(self, log_delta: float) -> float:
        """Return about the λ of the smallest bound; any is right, and it has the smallest error.

        Args:
            log_delta: log δ.
        """
        best, smallest = TILTS[0], math.inf
        for tilt in TILTS:
            bound = self.bound(tilt, log_delta)
            # The first minimum: farther ones come of the tail that is left out.
            if not bound < smallest:
                break
            best, smallest = tilt, bound
        for width in (0.3, 0.08):
            nearby = [best * math.exp(width * k) for k in range(-4, 5)]
            best = min(nearby, key=lambda tilt: self.bound(tilt, log_delta))
        return best


@dataclass(frozen=True)
class _Law:
    """Distribution of one step's losses on the grid, tilted by e^(λt).

    Args:
        first: multiple of the spacing that the first weight belongs to.
        weights: of the grid's points, which sum to 1.
        log_moment: log E e^(λt) before they were scaled to 1.
        beyond: probability of a loss above all points, which counts as infinite.
    """

    first: int
    weights: Array
    log_moment: float
    beyond: float

    def mean(self) -> float:
        """Return the mean, in points."""
        return self.first + float(self.weights @ np.arange(len(self.weights)))

    def variance(self) -> float:
        """Return the variance, in squared points."""
        distances = np.arange(len(self.weights)) - (self.mean() - self.first)
        return float(self.weights @ (distances * distances))

    def log_moment_about(self, s: float, center: float) -> float:
        """Return log E e^(s(k − center)) of the point's number k.

        Args:
            s: exponent.
            center: of the numbers.
        """
        exponents = s * (self.first - center + np.arange(len(self.weights)))
        with np.errstate(divide="ignore"):
            exponents += np.log(self.weights)
        peak = float(exponents.max())
        return peak + math.log(float(np.exp(exponents - peak).sum()))


def _tilted(pair: LossPair, spacing: float, tilt: float, log_tail: float) -> _Law:
    """Return the tilted distribution of a pair's losses.

    Args:
        pair: the pair.
        spacing: of the grid.
        tilt: λ.
        log_tail: logarithm of the probability that it may leave out at each end.
    """
    minimum, maximum = -CUT_BELOW * FINENESS, CUT_ABOVE * FINENESS
    low, high = pair.ends(log_tail)
    smallest, largest = pair.loss(np.array([low, high])) / spacing
    lower_cut, upper_cut = pair.outcome(spacing * np.array([minimum, maximum]))
    low = float(lower_cut) if smallest < minimum else low
    high = float(upper_cut) if largest > maximum else high
    first = math.floor(max(smallest, minimum))
    last = math.floor(min(largest, maximum))
    dots = pair.outcome(spacing * np.arange(first, last + 2))
    # Densities are smooth on this length, between points of the grid.
    smooth = WIDTH if pair.q == 1 else WIDTH * min(1.0, pair.z)
    even = np.linspace(low, high, 2 + math.ceil((high - low) / smooth))
    edges = np.unique(np.concatenate([even, dots[(dots > low) & (dots < high)]]))
    widths = np.diff(edges)
    narrow = widths < NARROW * smooth / WIDTH
    lower, upper, masses = [], [], []
    for chosen, order in ((narrow, 2), (~narrow, 5)):
        nodes, shares = np.polynomial.legendre.leggauss(order)
        half = widths[chosen, None] / 2
        u = edges[:-1][chosen, None] + half * (1 + nodes)
        loss = pair.loss(u)
        point = np.floor(loss / spacing)
        upward = np.clip(np.expm1(point * spacing - loss) / math.expm1(-spacing), 0.0, 1.0)
        with np.errstate(divide="ignore"):
            mass = pair.log_density(u) + np.log(half * shares) + tilt * spacing * point
        masses.append(mass.ravel())
        upper.append(upward.ravel())
        lower.append(point.ravel().astype(np.int64) - first)
    # Smaller losses count as the second point, which is no smaller.
    with np.errstate(divide="ignore"):
        masses.append(np.log([pair.below(low)]) + tilt * spacing * (first + 1))
    lower.append(np.array([1]))
    upper.append(np.array([0.0]))
    mass, point, upward = (np.concatenate(arrays) for arrays in (masses, lower, upper))
    point = np.maximum(point, 0)
    peak = float(mass.max())
    weight = np.exp(mass - peak)
    count = int(point.max()) + 2
    weights = np.bincount(point, weight * (1 - upward), count)
    weights += np.bincount(point + 1, weight * upward * math.exp(tilt * spacing), count)
    weight_sum = float(weights.sum())
    return _Law(first, weights / weight_sum, peak + math.log(weight_sum), pair.above(high))


def _window(laws: Sequence[tuple[_Law, int]], tilt: float) -> tuple[int, int]:
    """Return points between which the sum of tilted losses lies, but for e^`OUTSIDE` of it.

    Args:
        laws: tilted distributions, and how often each is composed.
        tilt: λ for each point.
    """
    center = sum(count * law.mean() for law, count in laws)
    deviation = math.sqrt(sum(count * law.variance() for law, count in laws)) + 1
    # of its width, and, where a rare loss is far away, of the tilt that makes it rare
    exponents = [share / deviation for share in (0.5, 1.0, 2.0, 4.0, 8.0)]
    exponents += [share * tilt for share in (0.25, 0.5, 0.9)]
    ends = []
    for sign in (-1, 1):
        distances = []
        for s in exponents:
            moment = sum(count * law.log_moment_about(sign * s, law.mean()) for law, count in laws)
            # Chernoff's bound of the tail
            distances.append((moment - OUTSIDE) / s)
        ends.append(center + sign * min(distances))
    return math.floor(ends[0]), math.ceil(ends[1])


def _read(
    laws: Sequence[tuple[_Law, int]],
    low: int,
    high: int,
    anchor: int,
    delta: float,
    tilt: float,
    spacing: float,
) -> float | None:
    """Return ε of a sum of losses; None if infinite losses alone are as likely as δ.

    Args:
        laws: tilted distributions, and how often each is composed.
        low: first point of the window that holds the sum.
        high: its last point.
        anchor: a point near ε, a little above.
        delta: δ, in (0, 1).
        tilt: λ.
        spacing: of the grid.
    """
    steps = sum(count for _, count in laws)
    room = ROUNDING + steps * ROUNDING_OF_STEP
    finite = delta * (1 - room) - sum(count * law.beyond for law, count in laws)
    if not finite > 0:
        return None
    sums = _convolved(laws, low, high)
    # The weights without the tilt, in units of that of the point near ε.
    log_unit = sum(count * law.log_moment for law, count in laws) - tilt * spacing * anchor
    allowed = math.exp(min(math.log(finite) - log_unit, 700.0))
    # far below, the weights overflow and δ is far larger than allowed
    start = max(low, 0, anchor - math.floor(500 / (tilt * spacing)))
    points = np.arange(start, high + 1)
    weights = (np.maximum(sums[start - low :], 0.0) + ROUNDING_OF_POINT) * np.exp(
        -tilt * spacing * (points - anchor)
    )

    shares = -np.expm1(-spacing * np.arange(1, len(points)))
    outside = math.exp(OUTSIDE - tilt * spacing * (high - anchor))

    def excess(point: int) -> float:
        """Return δ(ε) where ε is a point of the grid."""
        above = weights[point + 1 - start :]
        return outside + float(above @ shares[: len(above)])

    if high <= start or excess(start) <= allowed:
        return start * spacing
    below, above = start, high
    while above - below > 1:
        between = (below + above) // 2
        if excess(between) > allowed:
            below = between
        else:
            above = between
    # between points δ(ε) is linear in e^ε
    larger, smaller = excess(below), excess(above)
    share = (larger - allowed) / (larger - smaller)
    return below * spacing + math.log1p(share * math.expm1(spacing))


def _convolved(laws: Sequence[tuple[_Law, int]], low: int, high: int) -> Array:
    """Return the distribution of the sum on the points from `low` to `high`.

    Args:
        laws: tilted distributions, and how often each is composed.
        low: first point.
        high: last point.
    """
    from scipy.fft import irfft, next_fast_len, rfft

    size = int(next_fast_len(high - low + 1, real=True))
    product: NDArray[np.complex128] | None = None
    first = 0
    for law, count in laws:
        first += count * law.first
        folded = np.bincount(np.arange(len(law.weights)) % size, law.weights, size)
        transform = rfft(folded)
        large = np.abs(transform) > math.exp(-NOTHING / count)
        power = np.zeros_like(transform)
        power[large] = transform[large] ** count
        product = power if product is None else product * power
    # the sum's first point is at 0, and the window's at low − first, round the circle
    sums: Array = np.roll(irfft(product, size), -((low - first) % size))
    return sums[: high - low + 1]
