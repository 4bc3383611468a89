"""Checks of hyper-parameters, with one sentence for each kind of mistake.

A range stands on the field, once, as `Annotated[float, Number(0, 1)]`; `check_ranges` checks all
fields of an object. None is in every range of a field that may be None.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from numbers import Integral, Real
from typing import Annotated, Any, Protocol, TypeGuard, get_args, get_origin

from securecluster.errors import UsageError, quoted, unknown

# Bounds of noise multipliers: beyond them, squares of the values that they multiply leave the
# range of single precision.
SMALLEST = 1e-9
GREATEST = 1e6
# rounds, clients and whatever else is counted: more of them come to no end
MOST = 10**9


class Range(Protocol):
    """Values that a field can have."""

    def check(self, options: Any, name: str) -> None:
        """Raise UsageError if an attribute of `options` is not in this range.

        Args:
            options: the object whose attribute is checked.
            name: of the attribute.
        """


class OneOf:
    """Names of choices.

    Args:
        names: the valid ones.
    """

    def __init__(self, *names: str) -> None:
        self.names = names

    def check(self, options: Any, name: str) -> None:
        """Raise UsageError if an attribute is none of the names."""
        check_choice(options, **{name: self.names})


class KeyOf:
    """Names of a registry, as it is when they are checked.

    Args:
        registry: by name.
        left: names that earlier versions had, with what to do instead.
    """

    def __init__(self, registry: Collection[str], left: Mapping[str, str] | None = None) -> None:
        self.registry = registry
        self.left = left or {}

    def check(self, options: Any, name: str) -> None:
        """Raise UsageError if an attribute is no name of the registry."""
        value = getattr(options, name)
        if isinstance(value, str) and value in self.left:
            raise UsageError(f"{name} {value} has left securecluster: {self.left[value]}")
        check_choice(options, **{name: self.registry})


@dataclass(frozen=True)
class AtLeast:
    """Whole numbers from a minimum on.

    Args:
        minimum: the smallest one.
    """

    minimum: int

    def check(self, options: Any, name: str) -> None:
        """Raise UsageError if an attribute is no such number."""
        check_whole(options, **{name: self.minimum})


@dataclass(frozen=True)
class Number:
    """Finite numbers in an interval.

    Args:
        low: its lower end.
        high: its upper end.
        low_in: whether `low` belongs to it.
        high_in: whether `high` belongs to it.
    """

    low: float
    high: float = math.inf
    low_in: bool = True
    high_in: bool = False

    def check(self, options: Any, name: str) -> None:
        """Raise UsageError if an attribute is no such number."""
        check_number(options, name, self.low, self.high, self.low_in, self.high_in)


@dataclass(frozen=True)
class NoiseMultiplier:
    """Noise multipliers: 0, or numbers from `SMALLEST` to `GREATEST`."""

    def check(self, options: Any, name: str) -> None:
        """Raise UsageError if an attribute is no noise multiplier."""
        check_noise(options, name)


def check_ranges(options: Any) -> None:
    """Raise UsageError for a field of an object that is not in its range.

    Args:
        options: an object of a class with annotated fields.
    """
    options_class: Any = type(options)
    for name, (ranges, optional) in _ranges(options_class).items():
        if optional and getattr(options, name) is None:
            continue
        for valid in ranges:
            valid.check(options, name)


@cache
def _ranges(declaring: Any) -> dict[str, tuple[tuple[Range, ...], bool]]:
    """Return the ranges of each field that has any, and whether the field may be None.

    Args:
        declaring: a class; fields of its bases count, as they were declared last.
    """
    ranges: dict[str, tuple[tuple[Range, ...], bool]] = {}
    for base in reversed(declaring.__mro__):
        for name, annotation in vars(base).get("__annotations__", {}).items():
            declared = annotation
            # a string under postponed evaluation; others may name what is not there at runtime
            if isinstance(declared, str) and declared.startswith("Annotated["):
                declared = eval(declared, vars(sys.modules[base.__module__]))
            if get_origin(declared) is Annotated:
                accepted, *field_ranges = get_args(declared)
                ranges[name] = (tuple(field_ranges), type(None) in get_args(accepted))
    return ranges


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
        if not (_is_whole(value) and minimum <= value <= MOST):
            upper_end = f" to {MOST:,}" if _is_whole(value) and value > MOST else ""
            raise UsageError(
                f"{name} = {quoted(value)} is not possible: it is a whole number from "
                f"{minimum}{upper_end}"
            )


def check_seed(seed: object) -> None:
    """Raise UsageError for a seed that is no whole number from 0.

    Args:
        seed: of a run's public draws.
    """
    if not (_is_whole(seed) and seed >= 0):
        raise UsageError(f"seed = {quoted(seed)} is not possible: it is a whole number from 0")


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
        f"{name} = {quoted(value)} is not possible: it is 0, for none, or a number from "
        f"{SMALLEST:g} to {GREATEST:g}"
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
    raise UsageError(
        f"{name} = {quoted(value)} is not possible: it is a number {lower_end}, {upper_end}"
    )


def _float(value: object) -> float:
    """Return NaN for a value that is not a number, and infinity for one beyond a float's range."""
    if isinstance(value, bool) or not isinstance(value, Real):
        return math.nan
    try:
        return float(value)
    except OverflowError:
        return math.inf


def check_whole_value(name: str, value: object) -> None:
    """Raise UsageError if a value from Python is not a whole number.

    Args:
        name: of the option, for the message.
        value: of the option.
    """
    if not _is_whole(value):
        raise UsageError(f"{name} = {quoted(value)} is not possible: it is a whole number")


def _is_whole(value: object) -> TypeGuard[int]:
    """Return whether a value is a whole number; True is none."""
    return isinstance(value, Integral) and not isinstance(value, bool)
