"""ε of Gaussian releases and of trainings with DP-SGD, composed: exactly where nothing was sampled,
else by opacus.

A history lists what one client released as (z, q, steps): noise multiplier z = σ over sensitivity,
sampling rate q, so many times. The neighbouring relation is to add or remove what z refers to;
sampling is Poisson's.

- Gaussians that were not sampled (q = 1) compose into one of 1/z² = Σ steps/z² (Dong, Roth & Su
  2022, corollary 3.3), whose ε is the root of δ = Φ(μ/2 − ε/μ) − e^ε Φ(−μ/2 − ε/μ), μ = 1/z (Balle
  & Wang 2018, theorem 8). opacus' PRV accountant gives up to 0.01 more.
- Histories with sampled steps go to the PRV accountant (Gopi, Lee & Wutschitz 2021), which reports
  an upper bound; where its grid would take too much memory, or it fails, to Rényi divergences
  (Mironov, Talwar & Zhang 2019), and the result says so.
- Every figure is an upper bound. Noise is the Gaussian one also in its lowest bits: it is drawn on
  a grid (`grid_noise`).
"""

from __future__ import annotations

import itertools
import math
import warnings
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

from securecluster.errors import UsageError

Step = tuple[float, float, int]

# opacus' orders 1.1 … 63, and such as fit very large and very small ε
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
# orders for a first look, which is a bound as well
FEW = [
    1.06,
    1.12,
    1.25,
    1.5,
    2,
    3,
    5,
    9,
    17,
    33,
    63,
]
GRID = 1 << 20  # most points of the PRV accountant's grid: about 0.2 GB
# noise multipliers above are priced as if nothing was sampled: more than it costs, and opacus'
# series would take long
UNSAMPLED = 1e4
TOLERANCE = 1e-3  # relative, of the noise that is looked for
LARGEST = 1e6  # noise multipliers beyond are not looked for


class Cost(NamedTuple):
    """ε, the bound by Rényi divergences beside it, and which accountant found ε."""

    epsilon: float
    rdp: float
    accountant: str


def epsilon(history: Iterable[Step], delta: float) -> Cost:
    """ε at δ of everything in a history: an upper bound.

    Raises:
        UsageError: δ is not between 0 and 1.
    """
    _check_delta(delta)
    return _epsilon(merged(history), delta)


def merged(history: Iterable[Step]) -> tuple[Step, ...]:
    """An equivalent history: one entry for all that was not sampled, then one for each pair (z, q);
    without what costs nothing.
    """
    precision, sampled = 0.0, dict[tuple[float, float], int]()
    for z, q, steps in history:
        if steps <= 0 or q == 0 or math.isinf(z):
            continue
        if q == 1 or z > UNSAMPLED:
            precision += steps / z**2 if z else math.inf
        else:
            sampled[z, q] = sampled.get((z, q), 0) + steps
    whole = [(precision**-0.5 if precision < math.inf else 0.0, 1.0, 1)] if precision else []
    return (*whole, *((z, q, steps) for (z, q), steps in sorted(sampled.items())))


def sampling(n: int, batch: int | None, epochs: int) -> tuple[float, int]:
    """(q, steps) of a training on n samples in Poisson batches of `batch` expected samples (None:
    all): q = min(1, batch/n).
    """
    if n == 0:
        return 0.0, 0
    if batch is None or batch >= n:
        return 1.0, epochs
    return batch / n, epochs * math.ceil(n / batch)


def gaussian_delta(epsilon: float, mu: float) -> float:
    """log δ of one Gaussian release with sensitivity over σ = μ, at ε (Balle & Wang 2018, theorem
    8).
    """
    from scipy.special import log_ndtr

    first, second = (
        float(log_ndtr(mu / 2 - epsilon / mu)),
        epsilon + float(log_ndtr(-mu / 2 - epsilon / mu)),
    )
    return first + math.log(-math.expm1(second - first)) if second < first else -math.inf


def gaussian_epsilon(mu: float, delta: float) -> float:
    """The least ε of one Gaussian release with sensitivity over σ = μ, to a relative 1e-9 and
    rounded up.
    """
    if mu == 0 or gaussian_delta(0.0, mu) <= math.log(delta):
        return 0.0
    # the tail bound of the privacy loss N(μ²/2, μ²)
    low, high = (
        0.0,
        mu * mu / 2 + mu * math.sqrt(2 * math.log(1 / delta)),
    )
    if not mu < 1e9:
        return high
    while high - low > 1e-10 * high:
        middle = (low + high) / 2
        low, high = (
            (low, middle) if gaussian_delta(middle, mu) <= math.log(delta) else (middle, high)
        )
    return high * (1 + 1e-9)


def dearest(
    histories: Sequence[tuple[Step, ...]], delta: float
) -> tuple[tuple[Step, ...], Cost] | None:
    """The merged history whose ε is largest, and its cost; None of none.

    Of many that differ only in how much is sampled, few are priced: one that samples no more and
    steps no more costs no more, and none costs more than its bound by Rényi divergences, so those
    below the best found need no price.
    """
    _check_delta(delta)
    best: tuple[tuple[Step, ...], Cost] | None = None
    for bound, history in sorted(
        ((_bound(history, delta, FEW), history) for history in _undominated(histories)),
        reverse=True,
    ):
        if best is None or (bound > best[1].epsilon and _bound(history, delta) > best[1].epsilon):
            cost = _epsilon(history, delta)
            best = (history, cost) if best is None or cost.epsilon > best[1].epsilon else best
    return best


def find_noise(history: Callable[[float], Iterable[Step]], target: float, delta: float) -> float:
    """The least noise multiplier z at which history(z) costs at most ε = target, to a relative 1e-3
    and rounded up.

    Args:
        history: what is released with z; more of it must cost less.

    Raises:
        UsageError: δ or the target is out of range, or no z up to 1e6 is enough.
    """
    _check_delta(delta)
    if not 0 < target < math.inf:
        raise UsageError(f"a target epsilon of {target:g} cannot be met: choose a number above 0")
    high = _bracket(lambda z: _bound(merged(history(z)), delta), target)
    return _narrowed(lambda z: epsilon(history(z), delta).epsilon, target, high)


def find_noise_for_all(
    histories: Sequence[Callable[[float], Iterable[Step]]], target: float, delta: float
) -> float:
    """The least z at which each of several histories costs at most the target, as `find_noise`
    finds it; 0 where none costs anything.

    It is found for one history, and again for whichever costs most there, until none costs too
    much.
    """
    worst = max(
        range(len(histories)),
        key=lambda k: sum(steps * (q / z) ** 2 for z, q, steps in merged(histories[k](1.0))),
        default=None,
    )
    if worst is None or not merged(histories[worst](1.0)):
        return 0.0
    z = 0.0
    while True:
        # accountants' errors are not monotone in z
        z = max(z * (1 + TOLERANCE), find_noise(histories[worst], target, delta))
        at = [merged(history(z)) for history in histories]
        found = dearest([history for history in at if history], delta)
        if found is None or found[1].epsilon <= target:
            return z
        worst = at.index(found[0])


def _bracket(bound: Callable[[float], float], target: float) -> float:
    """A z whose bound is at most the target, while that of z/2 is above it (or z is below 1e-4)."""
    z = 1.0
    while bound(z) > target:
        z *= 2
        if z > LARGEST:
            raise UsageError(
                f"a target epsilon of {target:g} cannot be met by noise up to {LARGEST:g}: release "
                "less, or raise the target"
            )
    while z > 1e-4 and bound(z / 2) <= target:
        z /= 2
    return z


def _narrowed(cost: Callable[[float], float], target: float, high: float) -> float:
    """The least z that costs at most the target, below one that is known to; log ε is nearly linear
    in log z between two z.
    """
    at_high = cost(high)
    low, at_low = high / 2, cost(high / 2)
    while at_low <= target and low > 1e-5:
        low, high, at_low, at_high = low / 2, low, cost(low / 2), at_low
    for turn in itertools.count():
        if high / low <= 1 + TOLERANCE:
            return high
        middle = math.sqrt(low * high)
        # just above the crossing, then just below it: two calls may be all
        if 0 < at_high < at_low < math.inf and turn % 3 < 2:
            slope = math.log(high / low) / math.log(at_high / at_low)
            aim = (
                low
                * math.exp(slope * math.log(target / at_low))
                * (1 + TOLERANCE * (0.4, -0.4)[turn % 3])
            )
            middle = aim if low < aim < high else middle
        found = cost(middle)
        low, high, at_low, at_high = (
            (low, middle, at_low, found) if found <= target else (middle, high, found, at_high)
        )
    raise AssertionError("unreachable")


def _check_delta(delta: float) -> None:
    if not 0 < delta < 1:
        raise UsageError(
            f"delta is a probability, not {delta:g}: choose one below 1/(number of clients), 1e-5 "
            "for instance"
        )


@lru_cache(4096)
def _epsilon(history: tuple[Step, ...], delta: float) -> Cost:
    """The cost of a merged history."""
    if not history:
        return Cost(0.0, 0.0, "nothing released")
    if any(z == 0 for z, _, _ in history):
        return Cost(math.inf, math.inf, "exact release")
    rdp = _rdp(history, delta)
    least = gaussian_epsilon(1 / history[0][0], delta) if history[0][1] == 1 else 0.0
    if len(history) == 1 and history[0][1] == 1:
        return Cost(least, max(rdp, least), "exact Gaussian")
    prv = _prv(history, delta, rdp)
    return (
        Cost(prv, rdp, "PRV") if prv is not None and least <= prv <= rdp else Cost(rdp, rdp, "RDP")
    )


def _bound(history: tuple[Step, ...], delta: float, orders: Sequence[float] = ORDERS) -> float:
    """At least what the history costs, found quickly."""
    return (
        _epsilon(history, delta).epsilon
        if all(q == 1 for _, q, _ in history)
        else _rdp(history, delta, orders)
    )


def _rdp(history: Sequence[Step], delta: float, orders: Sequence[float] = ORDERS) -> float:
    """ε by Rényi divergences; opacus warns where the best order is the first or the last, where the
    bound is loose but holds.
    """
    from opacus.accountants.analysis.rdp import get_privacy_spent

    if any(z == 0 for z, _, _ in history):
        return math.inf
    total = sum(steps * _divergences(z, q, tuple(orders)) for z, q, steps in history)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found, _ = get_privacy_spent(orders=list(orders), rdp=total, delta=delta)
    return max(0.0, float(found)) if history else 0.0


@lru_cache(4096)
def _divergences(z: float, q: float, orders: tuple[float, ...]) -> Any:
    """Of one step, at each order."""
    from opacus.accountants.analysis.rdp import compute_rdp

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return compute_rdp(q=q, noise_multiplier=z, steps=1, orders=list(orders))


def _prv(history: Sequence[Step], delta: float, rdp: float) -> float | None:
    """opacus' upper bound; None where its grid is too large, or it fails."""
    import numpy as np
    from opacus.accountants import PRVAccountant

    accountant = PRVAccountant()
    accountant.history = [*history]
    errors = (min(0.1, max(0.01, rdp / 1000)), 0.1)
    error = next((error for error in errors if _points(history, delta, error) <= GRID), None)
    if error is None:
        return None
    with warnings.catch_warnings(), np.errstate(all="ignore"):
        warnings.simplefilter("ignore")
        try:
            found = float(accountant.get_epsilon(delta, eps_error=error))
        except (RuntimeError, ValueError):
            return None
    return found if math.isfinite(found) else None


def _points(history: Sequence[Step], delta: float, error: float) -> float:
    """How many points opacus' grid would have."""
    tiny, steps = delta / 1000, sum(steps for _, _, steps in history)
    reach = (
        max(
            _rdp(history, tiny / 4),
            *(_rdp([(z, q, 1)], tiny / (8 * steps)) for z, q, _ in history),
            error,
        )
        + 3
    )
    # e^709 overflows
    return (
        2 * reach * math.sqrt(steps * math.log(12 / tiny) / 2) / error if reach < 600 else math.inf
    )


def _undominated(histories: Iterable[tuple[Step, ...]]) -> list[tuple[Step, ...]]:
    """Without those that another one costs at least as much as: of the same noise, nowhere with
    fewer steps or a smaller q.
    """
    best: dict[tuple[float, ...], list[tuple[Step, ...]]] = {}
    for history in sorted(histories, key=lambda found: [(-q, -steps) for _, q, steps in found]):
        kept = best.setdefault(tuple(z for z, _, _ in history), [])
        if not any(_at_least(other, history) for other in kept):
            kept.append(history)
    return [history for kept in best.values() for history in kept]


def _at_least(one: tuple[Step, ...], other: tuple[Step, ...]) -> bool:
    return all(
        q >= p and steps >= few for (_, q, steps), (_, p, few) in zip(one, other, strict=True)
    )
