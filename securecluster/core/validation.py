"""Ranges of values, with one sentence for each kind of mistake.

A range stands on the field, once: on a hyper-parameter as `Annotated[float, Number(0, 1)]`, which
`check_ranges` checks with all fields of an object, and on a message's field as
`Annotated[int, Between(maximum="clients")]`, whose ends may be names of sizes that a run's
configuration fixes (`messaging.bounds`). None is in every range of a field that may be None.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from numbers import Integral, Real
from types import MappingProxyType
from typing import Annotated, Any, Self, TypeGuard, get_args, get_origin, get_type_hints

from securecluster.errors import UsageError, quoted, unknown

# Bounds of noise multipliers: beyond them, squares of the values that they multiply leave the
# range of single precision.
SMALLEST = 1e-9
GREATEST = 1e6
# rounds, clients and whatever else is counted: more of them come to no end
MOST = 10**9
Size = int | str  # a number, or the name of one that a run's configuration fixes


@dataclass(frozen=True)
class PythonOnly:
    """Mark of an option that is set in Python, and not on the command line.

    Args:
        example: how it is set, where that is not by its own class.
    """

    example: str = ""


IN_PYTHON = PythonOnly()


class Options:
    """Base of a dataclass of options of which earlier versions had more.

    What has left is refused with what to do instead, and is dropped from what was written with it.
    """

    # without an annotation, since it is no option
    LEFT = MappingProxyType[str, str]({})
    """What to do instead, by the name of the option"""

    def __new__(cls, *values: Any, **named: Any) -> Self:
        """Return a new object.

        Raises:
            UsageError: an option that has left.
        """
        cls.refuse_left(named)
        return super().__new__(cls)

    @classmethod
    def refuse_left(cls, names: Iterable[str]) -> None:
        """Raise UsageError for an option that has left.

        Args:
            names: of options.
        """
        for name in names:
            if name in cls.LEFT:
                flag = f"--{name.replace('_', '-')}"
                raise UsageError(f"{flag} has left securecluster: {cls.LEFT[name]}")

    @classmethod
    def without_left(cls, values: Mapping[str, Any]) -> dict[str, Any]:
        """Return options as they were written, without those that have left.

        Args:
            values: by name.
        """
        return {name: value for name, value in values.items() if name not in cls.LEFT}


class Range:
    """Values that a field can have."""

    def holds(self, value: object) -> bool:
        """Return whether a value is in this range."""
        raise NotImplementedError

    def described(self, value: object) -> str:
        """Return what is in this range, in words.

        Args:
            value: one that is not.
        """
        raise NotImplementedError

    def violation(self, name: str, value: object) -> str:
        """Return the sentence for a value that is not in this range.

        Args:
            name: of the option or field.
            value: of it.
        """
        return f"{name} = {quoted(value)} is not possible: it is {self.described(value)}"

    def check(self, options: Any, name: str) -> None:
        """Raise UsageError if an attribute of `options` is not in this range.

        Args:
            options: the object whose attribute is checked.
            name: of the attribute.
        """
        value = getattr(options, name)
        if not self.holds(value):
            raise UsageError(self.violation(name, value))


class KeyOf(Range):
    """Names of a registry, as it is when they are checked.

    Args:
        registry: by name.
        left: names that earlier versions had, with what to do instead.
    """

    def __init__(self, registry: Collection[str], left: Mapping[str, str] | None = None) -> None:
        self.names = registry
        self.left = left or {}

    def holds(self, value: object) -> bool:
        """Return whether a value is one of the names."""
        return value in self.names

    def check(self, options: Any, name: str) -> None:
        """Raise UsageError, with the closest name, if an attribute is none of the names."""
        value = getattr(options, name)
        if isinstance(value, str) and value in self.left:
            raise UsageError(f"{name} {value} has left securecluster: {self.left[value]}")
        if not self.holds(value):
            raise unknown(name, value, self.names)


class OneOf(KeyOf):
    """Names of choices.

    Args:
        names: the valid ones.
    """

    def __init__(self, *names: str) -> None:
        super().__init__(names)


@dataclass(frozen=True)
class Between(Range):
    """Whole numbers in an interval.

    Args:
        low: the smallest one.
        maximum: the largest one, or None.
        below: number that all are below, or None; takes precedence over `maximum`.
    """

    low: int = 0
    maximum: Size | None = None
    below: Size | None = None

    def within(self, sizes: Mapping[str, int]) -> Between:
        """Return this range with numbers in place of names; an unknown name is no end.

        Args:
            sizes: sizes by name.
        """
        below = sizes.get(self.below) if isinstance(self.below, str) else self.below
        if below is not None:
            return Between(self.low, below - 1)
        if isinstance(self.maximum, str):
            return Between(self.low, sizes.get(self.maximum))
        return Between(self.low, self.maximum)

    def holds(self, value: object) -> bool:
        """Return whether a value is a whole number between the ends; names are no ends."""
        if not _is_whole(value) or value < self.low:
            return False
        last = self.within({}).maximum
        return not isinstance(last, int) or value <= last

    def described(self, value: object) -> str:
        """Return both ends; that of what is merely counted only where it is exceeded."""
        last = self.within({}).maximum
        exceeded = _is_whole(value) and value >= self.low
        if not isinstance(last, int) or (last == MOST and not exceeded):
            return f"a whole number from {self.low}"
        if last == self.low:
            return f"{self.low}"
        return f"a whole number from {self.low} to {last:,}"


class AtLeast(Between):
    """Whole numbers from a minimum on, up to the most that anything is counted.

    Args:
        minimum: the smallest one.
    """

    def __init__(self, minimum: int) -> None:
        super().__init__(minimum, MOST)


@dataclass(frozen=True)
class Number(Range):
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

    def beyond(self, numbers: Any) -> Any:
        """Return whether a number is beyond an end; of a tensor, whether each one is.

        Args:
            numbers: a float or a tensor.
        """
        below = numbers < self.low if self.low_in else numbers <= self.low
        above = numbers > self.high if self.high_in else numbers >= self.high
        return below | above

    def holds(self, value: object) -> bool:
        """Return whether a value is a finite number between the ends."""
        number = _float(value)
        return math.isfinite(number) and not self.beyond(number)

    def described(self, value: object) -> str:
        """Return both ends."""
        lower_end = f"from {self.low:g}" if self.low_in else f"above {self.low:g}"
        if math.isinf(self.high):
            upper_end = "finite"
        elif self.high_in:
            upper_end = f"at most {self.high:g}"
        else:
            upper_end = f"below {self.high:g}"
        return f"a number {lower_end}, {upper_end}"


class NoiseMultiplier(Range):
    """Noise multipliers: 0, or numbers for which the privacy cost is a finite number."""

    def holds(self, value: object) -> bool:
        """Return whether a value is 0, or a number from `SMALLEST` to `GREATEST`."""
        multiplier = _float(value)
        return multiplier == 0 or SMALLEST <= multiplier <= GREATEST

    def described(self, value: object) -> str:
        """Return the values."""
        return f"0, for none, or a number from {SMALLEST:g} to {GREATEST:g}"


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
                valid = tuple(entry for entry in field_ranges if isinstance(entry, Range))
                ranges[name] = (valid, type(None) in get_args(accepted))
    return ranges


def python_only(hint: Any) -> PythonOnly | None:
    """Return the mark of an option that is set in Python only; None for any other.

    Args:
        hint: annotation of the option, with its extras.
    """
    for entry in getattr(hint, "__metadata__", ()):
        if isinstance(entry, PythonOnly):
            return entry
    return None


@cache
def python_only_fields(declaring: Any) -> dict[str, PythonOnly]:
    """Return the marks of options that are set in Python only, by name.

    Args:
        declaring: a dataclass.
    """
    marks = {}
    for name, hint in get_type_hints(declaring, include_extras=True).items():
        mark = python_only(hint)
        if mark:
            marks[name] = mark
    return marks


def check_choice(options: Any, /, **choices: Iterable[str]) -> None:
    """Raise UsageError if an attribute of `options` is not one of its valid names.

    Args:
        options: the object whose attributes are checked.
        choices: the valid names of each attribute.
    """
    for name, names in choices.items():
        OneOf(*names).check(options, name)


def check_whole(options: Any, /, **minimums: int) -> None:
    """Raise UsageError if an attribute of `options` is not a whole number from its minimum on.

    Args:
        options: the object whose attributes are checked.
        minimums: the smallest valid value of each attribute.
    """
    for name, minimum in minimums.items():
        AtLeast(minimum).check(options, name)


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
    Number(low, high, low_in, high_in).check(options, name)


def check_seed(seed: object) -> None:
    """Raise UsageError for a seed that is no whole number from 0.

    Args:
        seed: of a run's public draws.
    """
    valid = Between()
    if not valid.holds(seed):
        raise UsageError(valid.violation("seed", seed))


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
