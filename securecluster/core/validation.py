"""Checks of hyper-parameters, with one sentence for each kind of mistake."""

from __future__ import annotations

import math
from collections.abc import Iterable
from numbers import Integral, Real
from typing import Any

from securecluster.errors import UsageError, unknown

# Bounds of noise multipliers: beyond them, squares of the values that they multiply leave the
# range of single precision.
SMALLEST = 1e-9
GREATEST = 1e6


def check_choice(options: Any, /, **choices: Iterable[str]) -> None:
    """Raise UsageError if an attribute of `options` is not one of its valid names.

    Args:
        options: the object whose attributes are checked.
        choices: the valid names of each attribute.
    """
    for attribute, names in choices.items():
        value = getattr(options, attribute)
        if value not in names:
            raise unknown(attribute, value, names)


def check_whole(options: Any, /, **minimums: int) -> None:
    """Raise UsageError if an attribute of `options` is not a whole number from its minimum on.

    Args:
        options: the object whose attributes are checked.
        minimums: the smallest valid value of each attribute.
    """
    for name, minimum in minimums.items():
        value = getattr(options, name)
        # bool is an Integral, and True is no number of rounds
        is_integer = isinstance(value, Integral) and not isinstance(value, bool)
        if not (is_integer and int(value) >= minimum):
            raise UsageError(
                f"{name} = {value!r} is not possible: it is a whole number from {minimum}"
            )


def check_noise(options: Any, name: str) -> None:
    """Raise UsageError if an attribute of `options` is not a noise multiplier.

    A noise multiplier is 0, or a number from `SMALLEST` to `GREATEST`, for which the privacy cost
    is a finite number.

    Args:
        options: the object whose attribute is checked.
        name: of the attribute.
    """
    value = getattr(options, name)
    multiplier = _float(value)
    if multiplier == 0 or SMALLEST <= multiplier <= GREATEST:
        return
    raise UsageError(
        f"{name} = {value!r} is not possible: it is 0, for none, or a number from {SMALLEST:g} "
        f"to {GREATEST:g}"
    )


def check_number(
    options: Any,
    name: str,
    low: float,
    high: float = math.inf,
    low_in: bool = True,
    high_in: bool = False,
) -> None:
    """Raise UsageError if an attribute of `options` is not a finite number in an interval.

    Args:
        options: the object whose attribute is checked.
        name: of the attribute.
        low: lower end of the interval.
        high: upper end of the interval.
        low_in: whether `low` belongs to the interval.
        high_in: whether `high` belongs to the interval.
    """
    value = getattr(options, name)
    number = _float(value)
    above_low = low < number or (low_in and low == number)
    below_high = number < high or (high_in and number == high)
    if math.isfinite(number) and above_low and below_high:
        return
    lower_end = f"above {low:g}"
    if low_in:
        lower_end = f"from {low:g}"
    if math.isinf(high):
        upper_end = "finite"
    elif high_in:
        upper_end = f"at most {high:g}"
    else:
        upper_end = f"below {high:g}"
    raise UsageError(f"{name} = {value!r} is not possible: it is a number {lower_end}, {upper_end}")


def _float(value: object) -> float:
    """Return NaN for a value that is not a number, and infinity for one beyond a float's range."""
    if isinstance(value, bool) or not isinstance(value, Real):
        return math.nan
    try:
        return float(value)
    except OverflowError:
        return math.inf
