"""Privacy accountant: ε of Gaussian releases and of trainings with DP-SGD, composed.

A history lists what one client released as steps (z, q, count): noise multiplier z = σ over
sensitivity, sampling rate q, number of times. Sampling is Poisson sampling. The neighbouring
relation is to blank what z refers to: it keeps its place and contributes zeros ("zero-out", Kairouz
et al. 2021, definition 1.1), so that sampling rates and numbers of steps stay. With `replaced` it
is to replace it: in steps without sampling z is then σ over that sensitivity, and sampled steps,
whose z stays, are priced for the relation.

- Gaussians without sampling (q = 1) compose into one with 1/z² = Σ count/z² (Dong, Roth & Su 2022,
  corollary 3.3), whose ε is the root of δ = Φ(μ/2 − ε/μ) − e^ε Φ(−μ/2 − ε/μ), μ = 1/z (Balle & Wang
  2018, theorem 8).
- Histories with sampled steps go to the PRV accountant, which composes privacy loss random
  variables (`loss_composition`). Where that would take too much memory, they go to Rényi
  divergences (`renyi`), or are priced as if batches were known, and the result says so.
- Skellam noise has a bound of Rényi divergences of whole orders. A history with such releases is
  composed by these, whatever its other releases are.
- A unit that is in some batch with a probability of at most δ costs nothing.
- Every figure is an upper bound, and the smallest of several. None is lowered by another release,
  a larger q, a smaller z or a smaller δ. Noise is Gaussian also in its lowest bits: it is drawn on
  a grid (`grid_noise`).
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from numbers import Real
from typing import NamedTuple

from securecluster.errors import UsageError
from securecluster.privacy.dp import renyi
from securecluster.privacy.dp.loss_composition import composed_epsilon
from securecluster.privacy.dp.renyi import SkellamRelease, Step

# what `merged` returns
History = tuple[Step, ...]

# relative tolerance of a noise multiplier that is searched for
TOLERANCE = 1e-3
# largest noise multiplier that is searched for
LARGEST = 1e6
# multipliers whose squares, and the squares' reciprocals, are numbers
LEAST_MULTIPLIER, MOST_MULTIPLIER = 1e-100, 1e100
# most times of one release, which floats still count
MOST_TIMES = 1 << 53
# relative rounding of 1 − (1 − q)^n in floating point, as it is compared with δ
CHANCE_ROUNDING = 1e-9
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


def epsilon(history: Iterable[Step], delta: float, replaced: bool = False) -> Cost:
    """Return an upper bound of ε at δ for a whole history.

    Args:
        history: steps (z, q, count).
        delta: δ, in (0, 1).
        replaced: whether a unit is replaced, and not blanked, in sampled steps.

    Raises:
        UsageError: δ is not between 0 and 1, or a step is none (`merged`).
    """
    _check_delta(delta)
    return _epsilon(merged(history), delta, replaced)


def skellam_epsilon(
    history: Iterable[Step],
    releases: Iterable[tuple[SkellamRelease, int]],
    delta: float,
    replaced: bool = False,
) -> Cost:
    """Return an upper bound of ε for a history with Skellam noise, by Rényi divergences.

    Args:
        history: steps (z, q, count) of the other releases.
        releases: releases with Skellam noise, and how often each was made; for a replaced unit
            their sensitivities are those of replacing it.
        delta: δ, in (0, 1).
        replaced: whether a unit is replaced, and not blanked, in sampled steps.

    Raises:
        UsageError: δ is not between 0 and 1, or there is no such step or release.
    """
    _check_delta(delta)
    made = []
    for release, count in releases:
        _check_sum(release)
        _check_count(count)
        if count:
            made.append((release, int(count)))
    if not made:
        return epsilon(history, delta, replaced)
    return _skellam_epsilon(merged(history), tuple(sorted(made)), delta, replaced)


@lru_cache(1024)
def _skellam_epsilon(
    history: History,
    releases: tuple[tuple[SkellamRelease, int], ...],
    delta: float,
    replaced: bool = False,
) -> Cost:
    """Return the cost of a merged history together with Skellam noise."""
    if _has_exact_step(history):
        return Cost(math.inf, math.inf, "exact release")
    bounds = []
    for steps in {history, _known(history, replaced)}:
        orders = renyi.SKELLAM_ORDERS
        if any(q < 1 for _, q, _ in steps):
            # The series of sampled steps are as long as their order.
            orders = [order for order in orders if order <= max(renyi.ORDERS)]
        divergences = []
        for order in orders:
            divergence = sum(count * renyi.skellam_divergence(r, order) for r, count in releases)
            divergences.append(divergence + renyi.together(steps, order, replaced))
        bounds.append(renyi.converted(orders, divergences, delta))
    bound = min(bounds)
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


def merged(history: Iterable[Step]) -> History:
    """Return an equivalent history without steps that cost nothing.

    Args:
        history: steps (z, q, count).

    Returns:
        One step for everything without sampling, then one for each pair (z, q), sorted.

    Raises:
        UsageError: z is negative or no number, q is not between 0 and 1, or a count is not whole.
    """
    # Σ count/z² over steps without sampling
    precision = 0.0
    sampled: Counter[tuple[float, float]] = Counter()
    for z, q, count in history:
        _check_step(z, q)
        _check_count(count)
        if count == 0 or q == 0 or math.isinf(z):
            continue
        if q < 1:
            # less is no noise, and more costs no less in this arithmetic
            multiplier = min(float(z), MOST_MULTIPLIER) if z >= LEAST_MULTIPLIER else 0.0
            sampled[multiplier, float(q)] += int(count)
        else:
            square = z * z
            precision += count / square if square else math.inf
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


def costliest(
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
        quick_bound = _bound(history, delta, renyi.FEW, replaced)
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
        return _bound(released, delta, renyi.WHOLE) <= target or _bound(released, delta) <= target

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
        largest = costliest([steps for steps in released if steps], delta)
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
    square_sum = 0.0
    for z, q, count in history:
        square = z**-2
        if q < 1 and square < MOST_SQUARE:
            square = min(square, q * q * math.expm1(square))
        square_sum += count * square
    return math.sqrt(square_sum)


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


def _check_step(z: float, q: float) -> None:
    if not isinstance(z, Real) or not z >= 0:
        raise UsageError(
            f"a noise multiplier of {z} has no price: give the standard deviation of the noise "
            "over the sensitivity, 0 or more"
        )
    if not isinstance(q, Real) or not 0 <= q <= 1:
        raise UsageError(f"a sampling rate of {q} has no price: give a probability, from 0 to 1")


def _check_count(count: int) -> None:
    if not isinstance(count, Real) or not 0 <= count <= MOST_TIMES or count != int(count):
        raise UsageError(
            f"a release cannot be made {count} times: give a whole number from 0 to {MOST_TIMES:g}"
        )


def _check_sum(release: SkellamRelease) -> None:
    norm, magnitudes, variance = release
    for number in release:
        if not isinstance(number, Real) or not 0 <= number < math.inf:
            raise UsageError(
                f"Skellam noise of variance {variance} for sensitivities {norm} and {magnitudes} "
                "has no price: give three numbers from 0"
            )
    if not variance >= LEAST_MULTIPLIER:
        raise UsageError(
            f"Skellam noise of variance {variance:g} is none: give a variance above 0, or record "
            "an exact release"
        )


@lru_cache(4096)
def _epsilon(history: History, delta: float, replaced: bool = False) -> Cost:
    """Return the cost of a merged history."""
    if not history:
        return Cost(0.0, 0.0, "nothing released")
    if _has_exact_step(history):
        return Cost(math.inf, math.inf, "exact release")
    with_known_batches = _known(history, replaced)
    as_known = gaussian_epsilon(1 / with_known_batches[0][0], delta)
    if with_known_batches == history:
        return Cost(as_known, max(renyi.bound(history, delta), as_known), "exact Gaussian")
    rdp_sampled = renyi.bound(history, delta, replaced=replaced)
    rdp = min(rdp_sampled, renyi.bound(with_known_batches, delta))
    if _chance_of_batches(history) <= delta * (1 + CHANCE_ROUNDING):
        return Cost(0.0, rdp, "rare batches")
    bounds = [(rdp, "RDP"), (as_known, "known batches")]
    composed = composed_epsilon(history, delta, replaced)
    if composed is not None:
        bounds.append((composed, "PRV"))
    smallest, accountant = min(bounds)
    # the part without sampling, which is the first step: ε cannot be smaller
    z, q, _ = history[0]
    if q == 1:
        smallest = max(smallest, gaussian_epsilon(1 / z, delta))
    return Cost(smallest, rdp, accountant)


def _known(history: History, replaced: bool) -> History:
    """Return a history as if batches were known, which costs no less.

    Args:
        history: merged history without exact steps.
        replaced: whether a unit is replaced, and not blanked, in sampled steps.
    """
    steps = []
    for z, q, count in history:
        # twice the sensitivity
        steps.append((z / 2 if replaced and q < 1 else z, 1.0, count))
    return history if all(q == 1 for _, q, _ in history) else merged(steps)


def _chance_of_batches(history: History) -> float:
    """Return the probability that a unit is in some step, 1 − Π(1 − q)^count."""
    absence = 0.0
    for _, q, count in history:
        absence += count * math.log1p(-q) if q < 1 else -math.inf
    return -math.expm1(absence)


def _has_exact_step(history: Sequence[Step]) -> bool:
    """Return True if some step has no noise (z = 0): any exact release makes ε infinite."""
    return any(z == 0 for z, _, _ in history)


def _bound(
    history: History, delta: float, orders: Sequence[float] = renyi.ORDERS, replaced: bool = False
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
    return renyi.bound(history, delta, orders, replaced)


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
