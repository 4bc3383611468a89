"""What hyper-parameters are refused with: one sentence for each kind of mistake."""

from __future__ import annotations

import math
from collections.abc import Iterable
from numbers import Integral, Real
from typing import Any

from securecluster.errors import UsageError, unknown


def check_choice(given: Any, **known: Iterable[str]) -> None:
    """Raise UsageError where an attribute of `given` is none of its known names."""
    for name, names in known.items():
        if getattr(given, name) not in names:
            raise unknown(name, getattr(given, name), names)


def check_whole(given: Any, **least: int) -> None:
    """Raise UsageError where an attribute of `given` is no whole number from its least on."""
    for name, low in least.items():
        value = getattr(given, name)
        if isinstance(value, bool) or not (isinstance(value, Integral) and int(value) >= low):
            raise UsageError(f"{name} = {value!r} is not possible: it is a whole number from {low}")


# of noise multipliers: beyond, squares of what they multiply leave the range of single precision
SMALLEST, GREATEST = (
    1e-9,
    1e6,
)


def check_noise(given: Any, name: str) -> None:
    """Raise UsageError where an attribute of `given` is no noise multiplier: 0, or a number whose
    price is a number.
    """
    value = getattr(given, name)
    if not (_float(value) == 0 or SMALLEST <= _float(value) <= GREATEST):
        raise UsageError(
            f"{name} = {value!r} is not possible: it is 0, for none, or a number from {SMALLEST:g} "
            f"to {GREATEST:g}"
        )


def check_number(
    given: Any,
    name: str,
    low: float,
    high: float = math.inf,
    low_in: bool = True,
    high_in: bool = False,
) -> None:
    """Raise UsageError where an attribute of `given` is no finite number in the interval from `low`
    to `high`.
    """
    value = getattr(given, name)
    x = _float(value)
    if not (
        math.isfinite(x)
        and (low < x or (low_in and low == x))
        and (x < high or (high_in and x == high))
    ):
        top = "finite" if math.isinf(high) else f"{'at most' if high_in else 'below'} {high:g}"
        raise UsageError(
            f"{name} = {value!r} is not possible: it is a number {'from' if low_in else 'above'} "
            f"{low:g}, {top}"
        )


def _float(value: object) -> float:
    """NaN for what is no number, infinite for what is too large for a float."""
    try:
        return float(value) if isinstance(value, Real) and not isinstance(value, bool) else math.nan
    except OverflowError:
        return math.inf
