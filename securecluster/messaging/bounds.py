"""Bounds on the fields of messages, by the configuration that client and server share.

A message class declares beside each field what it may hold, in terms of named sizes:

    models: Annotated[Picks, Real((Upto("owners", "clients"), "dimension"), sent="delta")]
    k: Annotated[int, Exactly("models")]

`check` holds a message to that before anyone computes with it, so a number that somebody else chose
never sizes an allocation or a loop unless the configuration allows it.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any, cast, get_args, get_origin, get_type_hints

from securecluster.core.lazy_torch import torch
from securecluster.errors import FrameError
from securecluster.messaging.messages import Picks, Rows, Shared

REAL, WHOLE, OCTETS = "floating-point numbers", "int64 numbers", "bytes"
# rows of float32 and of float64: sums of squares of thousands of these are finite
LONGEST = (
    1e17,
    1e150,
)
Size = int | str  # a number, or the name of one in `Limits.sizes`


@dataclass(frozen=True)
class Upto:
    """An axis whose length the sender chooses; fields that name the same axis have the same length.

    Args:
        name: of the axis. Where the configuration has a size of this name, the length is that size.
        maximum: the largest length.
        minimum: the smallest length.
    """

    name: str
    maximum: Size
    minimum: int = 0


Axis = Size | Upto


@dataclass(frozen=True)
class Real:
    """A tensor of finite floating-point numbers.

    Args:
        axes: of one frame's tensor; of `Picks` the first one counts the rows.
        sent: the field of replies whose pipeline and seal laid out the last axes, for what is
            relayed.
        sealed: whether what is relayed was sealed, in runs that seal.
        low: the least number, or None.
        maximum: the largest number, or None.
        finite: whether NaN and infinity are refused.
        squared: whether the recipient squares the numbers, whose sum must then be finite.
    """

    axes: tuple[Axis, ...] = ()
    sent: str = ""
    sealed: bool = False
    low: float | None = None
    maximum: float | None = None
    finite: bool = True
    squared: bool = False


@dataclass(frozen=True)
class Whole:
    """A tensor of int64 numbers.

    Args:
        axes: as of `Real`.
        below: what every number is below; `maximum`: the largest number. One of the two.
    """

    axes: tuple[Axis, ...] = ()
    below: Size | None = None
    maximum: Size | None = None


@dataclass(frozen=True)
class Octets:
    """A tensor of bytes (uint8), none above `maximum`."""

    axes: tuple[Axis, ...] = ()
    maximum: int = 255


@dataclass(frozen=True)
class Between:
    """A whole number from `low` up to `maximum`, or below `below`."""

    low: int = 0
    maximum: Size | None = None
    below: Size | None = None


@dataclass(frozen=True)
class Exactly:
    """A whole number that the configuration fixes."""

    size: Size


Bound = Real | Whole | Octets | Between | Exactly
BOUNDS = (Real, Whole, Octets, Between, Exactly)


@dataclass(frozen=True)
class Form:
    """What a row looks like on the wire: the kind of its numbers and its shape."""

    kind: str
    shape: tuple[int, ...]


Layout = Callable[[str, Sequence[int], bool], Form]


def _as_it_is(name: str, shape: Sequence[int], sealed: bool) -> Form:
    return Form(REAL, tuple(shape))


@dataclass(frozen=True)
class Limits:
    """The sizes that a run's configuration fixes.

    Args:
        sizes: by name. A bound that names none of them does not hold anybody to anything.
        layout: (field of replies, shape, whether it is sealed) -> its form after the pipeline.
    """

    sizes: Mapping[str, int] = field(default_factory=dict)
    layout: Layout = _as_it_is

    def size(self, named: Size | None) -> int | None:
        """Return a size by its name; None where the configuration has none of this name."""
        return self.sizes.get(named) if isinstance(named, str) else named

    def beside(self, query: Any) -> Limits:
        """Return these limits and, as further sizes, the lengths that a query gives to its free
        axes: its reply has the same.
        """
        lengths = {name: set(found) for name, found in axes_of(query).items()}
        own = {name: found.pop() for name, found in lengths.items() if len(found) == 1}
        return replace(self, sizes={**own, **self.sizes})


@cache
def declared(message: Any) -> dict[str, Bound]:
    """Return the bounds of a message class, by field."""
    found: dict[str, Bound] = {}
    for name, hint in get_type_hints(message, include_extras=True).items():
        for extra in getattr(hint, "__metadata__", ()):
            if isinstance(extra, BOUNDS):
                found[name] = extra
    return found


def squared(message: Any) -> list[str]:
    """Return the fields of a message class whose numbers its recipient squares."""
    bounds = declared(cast(Hashable, message))
    return [name for name, bound in bounds.items() if isinstance(bound, Real) and bound.squared]


def undeclared(message: type) -> list[str]:
    """Return the fields of a message class that need a bound and declare none: all but texts,
    shares and flags.
    """
    bounds = declared(cast(Hashable, message))
    return [
        name
        for name, hint in get_type_hints(message).items()
        if name not in bounds and not _free(hint)
    ]


def _free(hint: Any) -> bool:
    kinds = get_args(hint) if get_origin(hint) is not None or get_args(hint) else (hint,)
    return all(kind in (str, float, bool, type(None)) for kind in kinds)


# the length of each free axis: one for all frames, or one per frame
Bindings = dict[str, tuple[int, ...]]
Tensors = Shared | Rows | Picks
Tensorial = Real | Whole | Octets


def axes_of(message: Any) -> Bindings:
    """Return the lengths of the free axes of a message that is known to be well formed."""
    found: Bindings = {}
    for name, bound in declared(cast(Hashable, type(message))).items():
        value = getattr(message, name)
        if isinstance(value, Tensors) and isinstance(bound, Tensorial):
            for axis, length in _lengths(bound, value):
                if isinstance(axis, Upto):
                    found.setdefault(axis.name, length)
    return found


def check(
    message: Any,
    limits: Limits,
    through: Mapping[str, bool] | None = None,
    finite: bool = True,
) -> None:
    """Raise FrameError unless every field of a message is as its class declares it.

    Args:
        message: a batch of frames.
        limits: the sizes of the run's configuration.
        through: the fields that went through the clients' pipeline, and whether each is sealed.
        finite: whether finiteness is checked, too.
    """
    bindings: Bindings = {}
    for name, bound in declared(cast(Hashable, type(message))).items():
        value = getattr(message, name)
        where = f"{type(message).__name__}.{name}"
        if value is None:
            continue
        if isinstance(bound, Tensorial):
            row = _row(name, bound, value, limits, through or {})
            _check_shape(where, bound, value, row, limits, bindings)
            _check_values(where, bound, value, limits, finite)
        else:
            _check_number(where, bound, value, limits)


def _check_number(where: str, bound: Between | Exactly, value: int, limits: Limits) -> None:
    if isinstance(bound, Exactly):
        size = limits.size(bound.size)
        if size is not None and value != size:
            raise FrameError(
                f"{where} is {value}, and this run's configuration has {size}: the frame is refused"
            )
        return
    most = _most(bound, limits)
    if value < bound.low or (most is not None and value > most):
        raise out_of_range(where, value, bound.low, most)


def out_of_range(where: str, value: int, low: int, most: int | None) -> FrameError:
    """Return the refusal of a number that the configuration does not allow."""
    allowed = f"from {low}" if most is None else f"from {low} to {most}"
    return FrameError(
        f"{where} is {value}, and this run's configuration allows {allowed}: the frame is refused"
    )


def _most(bound: Between | Whole | Octets, limits: Limits) -> int | None:
    below = None if isinstance(bound, Octets) else limits.size(bound.below)
    return limits.size(bound.maximum) if below is None else below - 1


def _row(
    name: str, bound: Tensorial, value: Tensors, limits: Limits, through: Mapping[str, bool]
) -> tuple[str, Sequence[Axis]] | None:
    """Return the kind and the axes of one row; None where a pipeline laid it out whose sizes are
    unknown.
    """
    axes = bound.axes[1:] if isinstance(value, Picks) else bound.axes
    if not isinstance(bound, Real):
        return WHOLE if isinstance(bound, Whole) else OCTETS, axes
    if not bound.sent and name not in through:
        return REAL, axes
    sizes = [limits.size(axis) for axis in axes if not isinstance(axis, Upto)]
    shape = [size for size in sizes if size is not None]
    if len(shape) < len(axes):
        return None
    sealed = bound.sealed if bound.sent else through[name]
    form = limits.layout(bound.sent or name, shape, sealed)
    return form.kind, form.shape


def _lengths(bound: Tensorial, value: Tensors) -> Iterator[tuple[Axis, tuple[int, ...]]]:
    """Yield the axes that a bound names and their lengths: one number, or of the rows of `Picks`
    one per frame.
    """
    axes: Sequence[Axis] = bound.axes
    if isinstance(value, Picks):
        yield axes[0], tuple(len(own) for own in value.picks)
        axes = axes[1:]
    for axis, length in zip(axes, _row_shape(value), strict=False):
        yield axis, (length,)


def _row_shape(value: Tensors) -> tuple[int, ...]:
    return tuple(value.value.shape if isinstance(value, Shared) else value.table.shape[1:])


def _check_shape(
    where: str,
    bound: Tensorial,
    value: Tensors,
    row: tuple[str, Sequence[Axis]] | None,
    limits: Limits,
    bindings: Bindings,
) -> None:
    """Raise FrameError for a tensor of another type or shape."""
    if isinstance(value, Picks):
        lengths = tuple(len(own) for own in value.picks)
        _check_axis(where, bound.axes[0], lengths, limits, bindings)
    nothing = isinstance(value, Picks) and not len(value.table) and isinstance(bound, Real)
    if row is None or nothing:
        return
    kind, axes = row
    dtype = value.value.dtype if isinstance(value, Shared) else value.table.dtype
    if dtype not in _dtypes(kind):
        raise FrameError(f"{where} holds {dtype}, and {kind} were expected: the frame is refused")
    shape = _row_shape(value)
    if len(shape) != len(axes):
        raise FrameError(
            f"{where} has rows of {len(shape)} axes, and {len(axes)} were expected: the frame is "
            "refused"
        )
    for axis, length in zip(axes, shape, strict=True):
        _check_axis(where, axis, (length,), limits, bindings)


def _dtypes(kind: str) -> tuple[torch.dtype, ...]:
    if kind == REAL:
        return (torch.float32, torch.float64)
    return (torch.int64,) if kind == WHOLE else (torch.uint8,)


def _check_axis(
    where: str, axis: Axis, lengths: tuple[int, ...], limits: Limits, bindings: Bindings
) -> None:
    """Raise FrameError for an axis of another length: one for all frames, or one per frame."""
    fixed = limits.size(axis.name if isinstance(axis, Upto) else axis)
    if fixed is not None:
        wrong = [length for length in lengths if length != fixed]
        if wrong:
            raise FrameError(
                f"{where} has {wrong[0]} numbers or rows where {fixed} were expected: the frame is "
                "refused"
            )
    elif isinstance(axis, Upto):
        most = limits.size(axis.maximum)
        wrong = [n for n in lengths if n < axis.minimum or (most is not None and n > most)]
        if wrong:
            raise out_of_range(
                f"the number of {axis.name} in {where}", wrong[0], axis.minimum, most
            )
        if bindings.setdefault(axis.name, lengths) != lengths:
            raise FrameError(
                f"{where} has another number of {axis.name} than the fields beside it: the frame "
                "is refused"
            )


def _check_values(
    where: str, bound: Tensorial, value: Tensors, limits: Limits, finite: bool
) -> None:
    """Raise FrameError for a number that is out of range, or not finite."""
    table = value.value if isinstance(value, Shared) else value.table
    if not table.numel():
        return
    if isinstance(bound, Real):
        if table.is_floating_point():
            _check_reals(where, bound, table, finite)
        return
    most = _most(bound, limits)
    least, largest = int(table.min()), int(table.max())
    if least < 0 or (most is not None and largest > most):
        raise out_of_range(where, least if least < 0 else largest, 0, most)


def _check_reals(where: str, bound: Real, table: torch.Tensor, finite: bool) -> None:
    if finite and bound.finite and not _finite(table):
        raise FrameError(f"{where} holds a number that is not finite: the frame is refused")
    if bound.low is None or bound.maximum is None:
        return
    outside = (table < bound.low) | (table > bound.maximum)
    if bool(outside.any()):
        raise FrameError(
            f"{where} holds a number outside of [{bound.low:g}, {bound.maximum:g}]: the frame is "
            "refused"
        )


def too_long(table: torch.Tensor) -> list[int]:
    """Return the rows of a table of finite numbers that are longer than `LONGEST` allows."""
    norms = torch.linalg.vector_norm(table.flatten(1), dim=1, dtype=torch.float64)
    return [
        int(row)
        for row in (norms > LONGEST[table.dtype == torch.float64]).nonzero().flatten().tolist()
    ]


def _finite(table: torch.Tensor) -> bool:
    """Return whether all numbers are finite; a sum that overflows is looked at number by number."""
    return bool(torch.isfinite(table.sum())) or bool(torch.isfinite(table).all())
