"""Bounds on the fields of messages, derived from the configuration that client and server share.

A message class declares beside each field what it may contain, in terms of named sizes:

    models: Annotated[Picks, Real((Upto("owners", "clients"), "dimension"), sent="delta")]
    k: Annotated[int, Exactly("models")]

Ranges of numbers are those of hyper-parameters (`core.validation`), whose ends may be names here.

`check` tests a message against its declaration before anything is computed with it, so a number
that another party has chosen never sizes an allocation or a loop unless the configuration allows
it.

`Endpoint.answer` checks requests and `ServerChannel` checks replies like this, in one process as
behind frames: shapes after the pipeline, ranges of indices, counts and steps, and where NaN is
excluded. What depends on a client's past is checked by client methods. Any other failure that a
frame causes at a node is an `UnforeseenError`, which `benchmarks.fuzz` counts.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any, cast, get_args, get_origin, get_type_hints

from securecluster.core.lazy_torch import torch
from securecluster.core.validation import Between, Number, Size
from securecluster.errors import FrameError
from securecluster.messaging.messages import Picks, Rows, Shared
from securecluster.messaging.messages import kinds as message_kinds

# kinds of tensors, as errors name them
REAL = "floating-point numbers"
WHOLE = "int64 numbers"
OCTETS = "bytes"
RING = {32: "int32 numbers of a ring", 64: "int64 numbers of a ring"}
BYTES = {REAL: 8, WHOLE: 8, OCTETS: 1, RING[32]: 4, RING[64]: 8}  # of a number, at most
# largest norms of rows of float32 and of float64: sums of squares of thousands of these are finite
LONGEST = (1e17, 1e150)
# maximum of a number of samples, by which its field declares that it is one: float64 represents all
# whole numbers up to it
MOST_SAMPLES = 2.0**53
SAMPLES = "size"  # name of a field that is a number of samples, whatever its bound


@dataclass(frozen=True)
class Upto:
    """Axis whose length the sender chooses; fields that name the same axis have the same length.

    Args:
        name: name of the axis. If the configuration has a size of this name, the length is that
            size.
        maximum: the largest length.
        minimum: the smallest length.
    """

    name: str
    maximum: Size
    minimum: int = 0

    @property
    def lengths(self) -> Between:
        """Return the lengths that the axis may have."""
        return Between(self.minimum, self.maximum)


Axis = Size | Upto


@dataclass(frozen=True)
class Real:
    """Bound of a tensor of finite floating-point numbers.

    Args:
        axes: axes of one frame's tensor; of `Picks` the first one counts the rows.
        sent: for relayed tensors, the field of replies whose pipeline and seal determined the last
            axes.
        sealed: True if relayed tensors are sealed, in runs that seal.
        low: the smallest number, or None.
        maximum: the largest number, or None.
        finite: True to refuse NaN and infinity.
        squared: True if the recipient squares the numbers; the sum of squares must then be finite.
        average: True for averages over the clients that replied to a call. Over one client it is
            its reply, which then reaches those that did not reply.
        made_of: further fields of replies that it may be made of, which reports name.
    """

    axes: tuple[Axis, ...] = ()
    sent: str = ""
    sealed: bool = False
    low: float | None = None
    maximum: float | None = None
    finite: bool = True
    squared: bool = False
    average: bool = False
    made_of: tuple[str, ...] = ()

    @property
    def values(self) -> Number | None:
        """Return the interval of the numbers; None where an end is missing."""
        if self.low is None or self.maximum is None:
            return None
        return Number(self.low, self.maximum, high_in=True)


@dataclass(frozen=True)
class Whole:
    """Bound of a tensor of int64 numbers, from 0.

    Args:
        axes: axes of one frame's tensor; of `Picks` the first one counts the rows.
        below: number that all numbers are below. Either this or `maximum`.
        maximum: the largest number.
    """

    axes: tuple[Axis, ...] = ()
    below: Size | None = None
    maximum: Size | None = None

    @property
    def values(self) -> Between:
        """Return the range of the numbers."""
        return Between(0, self.maximum, self.below)


@dataclass(frozen=True)
class Octets:
    """Bound of a tensor of bytes (uint8).

    Args:
        axes: axes of one frame's tensor; of `Picks` the first one counts the rows.
        maximum: the largest number.
    """

    axes: tuple[Axis, ...] = ()
    maximum: int = 255

    @property
    def values(self) -> Between:
        """Return the range of the numbers."""
        return Between(0, self.maximum)


@dataclass(frozen=True)
class Ring:
    """Bound of a masked tensor of a secure sum: any integers of Z_2^32 or Z_2^64.

    Args:
        axes: axes of one frame's tensor before the pipeline.
        bits: 32 or 64.
        through: True if rows have passed through the clients' pipeline, which may have changed the
            last axis.
    """

    axes: tuple[Axis, ...] = ()
    bits: int = 32
    through: bool = False


@dataclass(frozen=True)
class Exactly:
    """Bound of an integer that the configuration fixes.

    Args:
        size: the value.
    """

    size: Size


Bound = Real | Whole | Octets | Ring | Between | Exactly
BOUNDS = (Real, Whole, Octets, Ring, Between, Exactly)


@dataclass(frozen=True)
class Form:
    """Form of a row in a frame.

    Args:
        kind: REAL, WHOLE, OCTETS or one of RING.
        shape: shape of the row.
    """

    kind: str
    shape: tuple[int, ...]


Layout = Callable[[str, Sequence[int], bool], Form]


def _unchanged(name: str, shape: Sequence[int], sealed: bool) -> Form:
    """Return the form of a row that no pipeline changes."""
    return Form(REAL, tuple(shape))


@dataclass(frozen=True)
class Limits:
    """Sizes that a run's configuration fixes.

    Args:
        sizes: sizes by name. A bound in terms of another name allows any value.
        layout: function from (field of replies, shape, True if sealed) to the form of a row after
            the pipeline.
    """

    sizes: Mapping[str, int] = field(default_factory=dict)
    layout: Layout = _unchanged

    def size(self, named: Size | None) -> int | None:
        """Return the value of a size; None if the configuration does not fix it.

        Args:
            named: a number or the name of one.
        """
        if isinstance(named, str):
            return self.sizes.get(named)
        return named

    def beside(self, query: Any) -> Limits:
        """Return the limits of the reply to a query.

        The lengths that the query gives to its free axes are further sizes, since its reply must
        have the same ones.

        Args:
            query: a batch of frames that has been checked.
        """
        free_sizes = {}
        for name, lengths in axes_of(query).items():
            if len(set(lengths)) == 1:  # lengths that differ between frames are no one size
                free_sizes[name] = lengths[0]
        # a size of the configuration takes precedence over one that the query has chosen
        return replace(self, sizes={**free_sizes, **self.sizes})


@cache
def declared(message: Any) -> dict[str, Bound]:
    """Return the bounds of a message class, by field.

    Args:
        message: the class.
    """
    bounds: dict[str, Bound] = {}
    for name, hint in get_type_hints(message, include_extras=True).items():
        for annotation in getattr(hint, "__metadata__", ()):
            if isinstance(annotation, BOUNDS):
                bounds[name] = annotation
    return bounds


def squared(message: Any) -> list[str]:
    """Return the fields of a message class whose numbers its recipient squares.

    Args:
        message: the class.
    """
    names = []
    for name, bound in declared(cast(Hashable, message)).items():
        if isinstance(bound, Real) and bound.squared:
            names.append(name)
    return names


def sample_fields(message: Any) -> list[str]:
    """Return the fields of a message class that are numbers of samples.

    Args:
        message: the class.
    """
    names = []
    for name, bound in declared(cast(Hashable, message)).items():
        if name == SAMPLES or (isinstance(bound, Real) and bound.maximum == MOST_SAMPLES):
            names.append(name)
    return names


def undeclared(message: type) -> list[str]:
    """Return the fields of a message class that need a bound and declare none.

    All but texts, shares and flags need one.

    Args:
        message: the class.
    """
    bounds = declared(cast(Hashable, message))
    names = []
    for name, hint in get_type_hints(message).items():
        if name not in bounds and not _needs_no_bound(hint):
            names.append(name)
    return names


def free_axes(message: Any) -> set[str]:
    """Return the names of a message's axes whose lengths its sender chooses.

    Args:
        message: the class.
    """
    names = set()
    for bound in declared(cast(Hashable, message)).values():
        if isinstance(bound, Tensorial):
            names |= {axis.name for axis in bound.axes if isinstance(axis, Upto)}
    return names


def unknown_sizes(message: Any, known_names: Collection[str]) -> list[str]:
    """Return the names of sizes in a message's bounds that are not among the known ones.

    A bound in terms of such a name allows any value, so a misspelt name would remove the bound.

    Args:
        message: the class.
        known_names: names of sizes that the configuration fixes, and of free axes.
    """
    named: list[Size | None] = []
    for bound in declared(cast(Hashable, message)).values():
        if isinstance(bound, Exactly):
            named.append(bound.size)
        if isinstance(bound, Whole | Between):
            named += [bound.below, bound.maximum]
        if isinstance(bound, Tensorial):
            for axis in bound.axes:
                named.append(axis.maximum if isinstance(axis, Upto) else axis)
    unknown = {name for name in named if isinstance(name, str) and name not in known_names}
    return sorted(unknown)


def _needs_no_bound(hint: Any) -> bool:
    """Return True for a text, share or flag, which may be optional."""
    options = get_args(hint)
    if not options and get_origin(hint) is None:
        options = (hint,)
    return all(option in (str, float, bool, type(None)) for option in options)


def most_bytes(message: Any, limits: Limits) -> int | None:
    """Return how many bytes the tensors of one frame have at most; None where nothing bounds them.

    Args:
        message: the class.
        limits: sizes of the run's configuration.
    """
    byte_total = 0
    for name, bound in declared(cast(Hashable, message)).items():
        if not isinstance(bound, Tensorial):
            continue
        lengths = []
        for axis in bound.axes:
            fixed = _fixed_length(axis, limits)
            if fixed is None and isinstance(axis, Upto):
                fixed = limits.size(axis.maximum)
            if fixed is None:
                return None
            lengths.append(fixed)
        rows = lengths[: message_kinds(message)[name] is Picks]
        form = _largest_form(name, bound, lengths[len(rows) :], limits)
        byte_total += math.prod([*rows, *form.shape]) * BYTES[form.kind]
    return byte_total


def _largest_form(name: str, bound: Tensorial, shape: list[int], limits: Limits) -> Form:
    """Return the form of a row in a frame, from its largest shape before any pipeline."""
    if isinstance(bound, Whole):
        return Form(WHOLE, tuple(shape))
    if isinstance(bound, Octets):
        return Form(OCTETS, tuple(shape))
    if isinstance(bound, Ring):
        through = limits.layout(name, shape, False).shape if bound.through else tuple(shape)
        return Form(RING[bound.bits], through)
    if bound.sent:
        return limits.layout(bound.sent, shape, bound.sealed)
    return Form(REAL, tuple(shape))


Lengths = tuple[int, ...]  # of an axis: one for all frames, or one per frame
Bindings = dict[str, Lengths]  # lengths of each free axis, by name
Tensors = Shared | Rows | Picks
Tensorial = Real | Whole | Octets | Ring
# kind and axes of one row; None if they follow from sizes that the configuration does not fix
RowForm = tuple[str, Sequence[Axis]] | None


def axes_of(message: Any) -> Bindings:
    """Return the lengths of the free axes of a message.

    Args:
        message: a batch of frames that is well formed.
    """
    bindings: Bindings = {}
    bounds = declared(cast(Hashable, type(message)))
    for name, bound in bounds.items():
        value = getattr(message, name)
        if not isinstance(value, Tensors) or not isinstance(bound, Tensorial):
            continue
        for axis, lengths in _axis_lengths(bound, value):
            if isinstance(axis, Upto):
                bindings.setdefault(axis.name, lengths)
    return bindings


def check(
    message: Any, limits: Limits, through: Mapping[str, bool] | None = None, finite: bool = True
) -> None:
    """Raise FrameError unless every field of a message is within its class's bounds.

    Args:
        message: a batch of frames.
        limits: sizes of the run's configuration.
        through: fields that passed through the clients' pipeline, with True for sealed ones.
        finite: True to check finiteness, too.
    """
    bindings: Bindings = {}
    bounds = declared(cast(Hashable, type(message)))
    for name, bound in bounds.items():
        value = getattr(message, name)
        label = f"{type(message).__name__}.{name}"
        if value is None:  # an optional field that is absent
            continue
        if isinstance(bound, Tensorial):
            row = _row_form(name, bound, value, limits, through or {})
            # the shape first: checks of values compute with the tensor
            _check_shape(label, bound, value, row, limits, bindings)
            _check_values(label, bound, value, limits, finite)
        else:
            _check_number(label, bound, value, limits)


def _check_number(label: str, bound: Between | Exactly, value: int, limits: Limits) -> None:
    """Raise FrameError for an integer out of its bound.

    Args:
        label: class and field, for the error.
    """
    if isinstance(bound, Exactly):
        size = limits.size(bound.size)
        if size is not None and value != size:  # None: the configuration does not fix it
            raise FrameError(
                f"{label} is {value}, and this run's configuration has {size}: the frame is refused"
            )
        return
    valid = bound.within(limits.sizes)
    if not valid.holds(value):
        raise out_of_range(label, value, valid)


def out_of_range(label: str, value: float, valid: Number | Between) -> FrameError:
    """Return the error for a number that the configuration does not allow.

    Args:
        label: name of the number.
        value: the number.
        valid: the range of the allowed numbers.
    """
    return FrameError(f"{valid.violation(label, value)}, and the frame is refused")


def _row_form(
    name: str, bound: Tensorial, value: Tensors, limits: Limits, through: Mapping[str, bool]
) -> RowForm:
    """Return the kind and the axes of one row of a field.

    Args:
        name: name of the field.
        bound: its bound.
        value: its tensor.
        limits: sizes of the run's configuration.
        through: fields that passed through the clients' pipeline, with True for sealed ones.

    Returns:
        None if a pipeline has determined the form from sizes that the configuration does not fix.
    """
    axes = bound.axes
    if isinstance(value, Picks):
        axes = axes[1:]
    if isinstance(bound, Whole):
        return WHOLE, axes
    if isinstance(bound, Octets):
        return OCTETS, axes
    if isinstance(bound, Ring):
        return _ring_form(name, bound, limits)
    if not bound.sent and name not in through:
        return REAL, axes
    # rows after a pipeline: their form follows from the shape before it
    shape = _fixed_shape(axes, limits)
    if shape is None:
        return None
    if bound.sent:
        form = limits.layout(bound.sent, shape, bound.sealed)
    else:
        form = limits.layout(name, shape, through[name])
    return form.kind, form.shape


def _ring_form(name: str, bound: Ring, limits: Limits) -> RowForm:
    """Return the kind and the axes of one masked row, as `_row_form` does."""
    if not bound.through:
        return RING[bound.bits], bound.axes
    shape = _fixed_shape(bound.axes, limits)
    if shape is None:
        return None
    form = limits.layout(name, shape, False)
    return RING[bound.bits], form.shape


def _fixed_shape(axes: Sequence[Axis], limits: Limits) -> list[int] | None:
    """Return the lengths of axes, if the configuration fixes all of them."""
    shape = []
    for axis in axes:
        if isinstance(axis, Upto):
            return None
        size = limits.size(axis)
        if size is None:
            return None
        shape.append(size)
    return shape


def _axis_lengths(bound: Tensorial, value: Tensors) -> Iterator[tuple[Axis, Lengths]]:
    """Yield the axes of a bound and their lengths.

    A length is one number for all frames; for the rows of `Picks` it is one number per frame.
    """
    axes: Sequence[Axis] = bound.axes
    if isinstance(value, Picks):
        yield axes[0], _row_counts(value)
        axes = axes[1:]
    # rows after a pipeline may have other axes than were declared
    for axis, length in zip(axes, _row_shape(value), strict=False):
        yield axis, (length,)


def _row_counts(value: Picks) -> tuple[int, ...]:
    """Return the number of rows of each frame."""
    return tuple(len(rows) for rows in value.picks)


def _row_shape(value: Tensors) -> tuple[int, ...]:
    """Return the shape of one row, or of a tensor that frames share."""
    if isinstance(value, Shared):
        return tuple(value.value.shape)
    return tuple(value.table.shape[1:])


def _tensor(value: Tensors) -> torch.Tensor:
    """Return the tensor that holds a field's numbers."""
    if isinstance(value, Shared):
        return value.value
    return value.table


def _check_shape(
    label: str, bound: Tensorial, value: Tensors, row: RowForm, limits: Limits, bindings: Bindings
) -> None:
    """Raise FrameError for a tensor of another type or shape.

    Args:
        label: class and field, for the error.
        bound: bound of the field.
        value: its tensor.
        row: kind and axes of one row; None if they are unknown.
        limits: sizes of the run's configuration.
        bindings: lengths of the free axes so far, extended in place.
    """
    if isinstance(value, Picks):
        counts = _row_counts(value)
        _check_axis(label, bound.axes[0], counts, limits, bindings)
        if isinstance(bound, Real) and not len(value.table):
            # an empty table has not passed through the pipeline, so its form is not fixed
            return
    if row is None:
        return
    tensor_kind, axes = row
    dtype = _tensor(value).dtype
    if dtype not in _dtypes(tensor_kind):
        raise FrameError(
            f"{label} holds {dtype}, and {tensor_kind} were expected: the frame is refused"
        )
    shape = _row_shape(value)
    if len(shape) != len(axes):
        raise FrameError(
            f"{label} has rows of {len(shape)} axes, and {len(axes)} were expected: the frame is "
            "refused"
        )
    for axis, length in zip(axes, shape, strict=True):
        _check_axis(label, axis, (length,), limits, bindings)


def _dtypes(tensor_kind: str) -> tuple[torch.dtype, ...]:
    """Return the types that a kind of tensor may have."""
    if tensor_kind == REAL:
        return (torch.float32, torch.float64)
    if tensor_kind in (WHOLE, RING[64]):
        return (torch.int64,)
    if tensor_kind == RING[32]:
        return (torch.int32,)
    return (torch.uint8,)


def _check_axis(
    label: str, axis: Axis, lengths: Lengths, limits: Limits, bindings: Bindings
) -> None:
    """Raise FrameError for an axis of another length.

    Args:
        label: class and field, for the error.
        axis: the axis.
        lengths: its length, one for all frames or one per frame.
        limits: sizes of the run's configuration.
        bindings: lengths of the free axes so far, extended in place.
    """
    fixed = _fixed_length(axis, limits)
    if fixed is not None:
        wrong = [length for length in lengths if length != fixed]
        if wrong:
            raise FrameError(
                f"{label} has {wrong[0]} numbers or rows where {fixed} were expected: the frame is "
                "refused"
            )
    elif isinstance(axis, Upto):
        _check_free_axis(label, axis, lengths, limits, bindings)


def _fixed_length(axis: Axis, limits: Limits) -> int | None:
    """Return the length of an axis that the configuration fixes; None if the sender chooses it."""
    if isinstance(axis, Upto):
        return limits.size(axis.name)
    return limits.size(axis)


def _check_free_axis(
    label: str, axis: Upto, lengths: Lengths, limits: Limits, bindings: Bindings
) -> None:
    """Raise FrameError for a free axis out of its range, or unlike the same axis of other fields.

    Args:
        label: class and field, for the error.
        axis: the axis.
        lengths: its length, one for all frames or one per frame.
        limits: sizes of the run's configuration.
        bindings: lengths of the free axes so far, extended in place.
    """
    valid = axis.lengths.within(limits.sizes)
    for length in lengths:
        if not valid.holds(length):
            raise out_of_range(f"the number of {axis.name} in {label}", length, valid)
    # the first field of an axis sets its length, and the others must agree
    if bindings.setdefault(axis.name, lengths) != lengths:
        raise FrameError(
            f"{label} has another number of {axis.name} than the fields beside it: the frame is "
            "refused"
        )


def _check_values(
    label: str, bound: Tensorial, value: Tensors, limits: Limits, finite: bool
) -> None:
    """Raise FrameError for a number that is out of range or not finite.

    Args:
        label: class and field, for the error.
        bound: bound of the field.
        value: its tensor.
        limits: sizes of the run's configuration.
        finite: True to check finiteness.
    """
    table = _tensor(value)
    if not table.numel():
        return
    if isinstance(bound, Real):
        if table.is_floating_point():  # sealed rows are bytes
            _check_reals(label, bound, table, finite)
        return
    if isinstance(bound, Ring):  # all integers of the type are elements of the ring
        return
    valid = bound.values.within(limits.sizes)
    for number in (int(table.min()), int(table.max())):
        if not valid.holds(number):
            raise out_of_range(label, number, valid)


def _check_reals(label: str, bound: Real, table: torch.Tensor, finite: bool) -> None:
    """Raise FrameError for a floating-point number that is out of range or not finite."""
    must_be_finite = finite and bound.finite
    if must_be_finite and not _all_finite(table):
        raise FrameError(f"{label} holds a number that is not finite: the frame is refused")
    valid = bound.values
    if valid is None:
        return
    outside = valid.beyond(table)
    if bool(outside.any()):
        raise out_of_range(f"a number in {label}", float(table[outside][0]), valid)


def too_long(table: torch.Tensor) -> list[int]:
    """Return the rows whose norm exceeds `LONGEST`, so that their squares could overflow.

    Args:
        table: rows of finite numbers, (r, …).
    """
    flat = table.flatten(1)
    longest_float32, longest_float64 = LONGEST
    longest = longest_float32
    if table.dtype == torch.float64:
        longest = longest_float64
    # Norms in the rows' own type take a tenth of the time. They round by far less than a half, and
    # overflow to infinity, so that a row below a half needs no second look.
    rough = torch.linalg.vector_norm(flat, dim=1)
    doubtful = (~(rough < longest / 2)).nonzero().flatten()
    # in float64, where the squares of float32 numbers cannot overflow
    norms = torch.linalg.vector_norm(flat[doubtful], dim=1, dtype=torch.float64)
    rows: list[int] = doubtful[norms > longest].tolist()
    return rows


def _all_finite(table: torch.Tensor) -> bool:
    """Return True if all numbers are finite.

    One sum decides in most cases; numbers are checked singly only if it has overflowed.
    """
    if bool(torch.isfinite(table.sum())):
        return True
    return bool(torch.isfinite(table).all())
