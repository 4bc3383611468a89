"""Fixed-point numbers, so that sums in Z_2^32 or Z_2^64 are exact.

A number x becomes the integer round(x · 2^e) in two's complement. The exponent e follows from the
largest magnitude of one client's number and from the largest number of clients in a sum, so a sum
of honest clients never wraps.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from fractions import Fraction

from securecluster.core.lazy_torch import torch
from securecluster.errors import FrameError, UpdateError, UsageError

# numbers that are converted at once: their copies stay in a core's cache
BLOCK = 1 << 16
# bounds whose scales are normal numbers of float64
SMALLEST_BOUND = 1e-100
LARGEST_BOUND = 1e100
# exponents of two whose powers are normal numbers of float32
FLOAT32_EXPONENTS = range(-126, 128)


class FixedPoint:
    """Fixed-point encoding of one field of a reply.

    The scale is the largest power of two for which `members` numbers of magnitude `bound`, rounded,
    have a sum within the ring's signed range.

    Args:
        bound: largest magnitude of one client's number.
        members: largest number of clients in a sum.
        bits: 32 or 64, for sums in Z_2^32 or Z_2^64.
        field: name of the field, for messages.
        option: name of the option that sets the bound, for messages.
        most: largest magnitude that an encoded number may have, where that is less than what fits
            the ring; None where it is not.

    Attributes:
        exponent: e, the scale's exponent of two.
        largest: largest magnitude of an encoded number.
        dtype: type of encoded rows, torch.int32 or torch.int64.

    Raises:
        UsageError: a bound that is not between 1e-100 and 1e100, no members, more members than the
            ring has positive numbers, or another number of bits.
    """

    def __init__(
        self,
        bound: float,
        members: int,
        bits: int = 32,
        field: str = "values",
        option: str = "bound",
        most: int | None = None,
    ) -> None:
        if bits not in (32, 64):
            raise UsageError(f"{field}: a secure sum has 32 or 64 bits, not {bits}")
        if not SMALLEST_BOUND <= bound <= LARGEST_BOUND:
            raise UsageError(
                f"{field}: the bound of a secure sum lies between {SMALLEST_BOUND:g} and "
                f"{LARGEST_BOUND:g}, so {bound!r} is none: change {option}"
            )
        # The largest positive number of the ring; each client needs one of them at least.
        limit = (1 << (bits - 1)) - 1
        if not 1 <= members <= limit:
            raise UsageError(
                f"{field}: a secure sum over {members} clients does not fit {bits} bits: it has "
                f"1 to {limit}"
            )
        self.bound = float(bound)
        self.members = members
        self.bits = bits
        self.field = field
        self.option = option
        # Bound and members alone decide, so all clients scale alike without a message.
        share = limit // members
        if most is not None:
            share = min(share, most)
        self.exponent = _exponent(self.bound, share)
        self.largest = _rounded(self.bound, self.exponent)

    def __repr__(self) -> str:
        return (
            f"FixedPoint(bound={self.bound:g}, members={self.members}, bits={self.bits}, "
            f"field={self.field!r})"
        )

    @property
    def dtype(self) -> torch.dtype:
        """Return the type of encoded rows."""
        if self.bits == 32:
            return torch.int32
        return torch.int64

    def error_bound(self, count: int) -> float:
        """Return the worst-case rounding error of a decoded sum, before it is cast to its type.

        Each encoded number is off by at most half a unit, 2^-(e+1), and their sum is exact.

        Args:
            count: number of clients in the sum.
        """
        return math.ldexp(count, -self.exponent - 1)

    def encode(self, rows: torch.Tensor, saturate: bool = False) -> torch.Tensor:
        """Return rows as integers, rounded to the nearest one, ties to even.

        Args:
            rows: floating-point rows (b, …) on the CPU, one per client.
            saturate: True to accept every row, for runs with noise, where an error would be a
                release: numbers beyond the bound are clamped to it, and a row with a number that is
                not finite counts as zeros.

        Returns:
            Rows (b, …) of `dtype`, with magnitudes of at most `largest`.

        Raises:
            UsageError: rows that are not floating-point numbers on the CPU.
            UpdateError: without `saturate`, a number beyond the bound, or one that is not finite.
        """
        if not rows.is_floating_point() or rows.device.type != "cpu":
            raise UsageError(
                f"{self.field}: a secure sum encodes floating-point rows on the CPU, not "
                f"{rows.dtype} on {rows.device}"
            )
        # Block by block, so that no copy of all rows in float64 is needed.
        encoded = torch.empty(rows.shape, dtype=self.dtype)
        if saturate:
            self._saturate_rows(rows, encoded)
        else:
            scratch = self._scratch(rows)
            for numbers, integers in _blocks(rows, encoded):
                block = scratch[: numbers.numel()].copy_(numbers)
                self._check(block)
                self._write(block, integers)
        return encoded

    def decode(
        self, row_sum: torch.Tensor, count: int, dtype: torch.dtype | None = None
    ) -> torch.Tensor:
        """Return the numbers that a sum of encoded rows stands for.

        Args:
            row_sum: sum (…) of `dtype` integers.
            count: number of clients in the sum.
            dtype: type of the numbers; float32 by default.

        Returns:
            Numbers (…). Their error is at most `error_bound(count)`, and that of the cast.

        Raises:
            FrameError: a sum that no `count` clients can have: forged, or still masked.
        """
        # Before scaling: a remaining mask would look like any other number afterwards.
        self.check(row_sum, count)
        target = dtype or torch.float32
        numbers = torch.empty(row_sum.shape, dtype=target)
        unit = math.ldexp(1.0, -self.exponent)
        scratch = torch.empty(min(BLOCK, row_sum.numel()), dtype=torch.float64)
        for integers, decoded in _blocks(row_sum, numbers):
            block = scratch[: integers.numel()].copy_(integers)
            decoded.copy_(block.mul_(unit))
        return numbers

    def check(self, row_sum: torch.Tensor, count: int) -> None:
        """Raise FrameError for a sum that no `count` clients can have.

        Args:
            row_sum: sum (…) of `dtype` integers.
            count: number of clients in the sum.

        Raises:
            FrameError: another type, no clients, more than `members`, or an integer of a magnitude
                above `count · largest`.
        """
        if row_sum.dtype != self.dtype:
            raise FrameError(f"{self.field}: a secure sum holds {self.dtype}, not {row_sum.dtype}")
        if not 1 <= count <= self.members:
            raise FrameError(
                f"{self.field}: a secure sum over {count} clients was planned for 1 to "
                f"{self.members}"
            )
        if not self.in_range(row_sum, count):
            raise FrameError(
                f"{self.field}: the sum is beyond what {count} clients within the bound "
                f"{self.bound:g} can have: a row was forged, or a mask was not removed; ask for "
                "the sum again"
            )

    def in_range(self, row_sum: torch.Tensor, count: int) -> bool:
        """Return whether `count` encoded rows can have a sum.

        A sum of `count` rows that stays within the signed range and is outside of this one has a
        row beyond the bound. A remaining mask is uniform, so it is found unless every number falls
        into the range by chance.

        Args:
            row_sum: sum (…) of `dtype` integers.
            count: number of clients in the sum.
        """
        limit = count * self.largest
        if row_sum.numel() == 0:
            return True
        # One pass, and no copy, over what may be the largest array of the server.
        low, high = torch.aminmax(row_sum)
        return -limit <= int(low) and int(high) <= limit

    def _check(self, numbers: torch.Tensor) -> None:
        """Raise UpdateError for a number beyond the bound, or one that is not finite.

        Args:
            numbers: block of numbers (n,).
        """
        low, high = torch.aminmax(numbers)
        # Comparisons with NaN are False, so NaN is refused, too.
        if -self.bound <= float(low) and float(high) <= self.bound:
            return
        if not bool(numbers.isfinite().all()):
            raise UpdateError(
                f"{self.field}: a row of a secure sum has a number that is not finite: lower the "
                "learning rate (--lr)"
            )
        magnitude = float(numbers.abs().max())
        raise UpdateError(
            f"{self.field}: a row of a secure sum has a number of magnitude {magnitude:g} beyond "
            f"its bound {self.bound:g}: raise {self.option}"
        )

    def _saturate_rows(self, rows: torch.Tensor, encoded: torch.Tensor) -> None:
        """Encode rows, with clamped numbers, and zeros for rows that are not finite.

        Args:
            rows: rows (b, …).
            encoded: integers (b, …), overwritten.
        """
        scratch = self._scratch(rows)
        limit = _at_most(self.bound, scratch.dtype)
        for row, integers in zip(rows, encoded, strict=True):
            finite = True
            for numbers, written in _blocks(row, integers):
                block = scratch[: numbers.numel()].copy_(numbers)
                # NaN is the least and the greatest number of its block
                low, high = torch.aminmax(block)
                finite = finite and math.isfinite(float(low)) and math.isfinite(float(high))
                # Clamped even if the row is dropped below: integers of NaN are undefined.
                block.nan_to_num_(nan=0.0).clamp_(-limit, limit)
                self._write(block, written)
            if not finite:
                integers.zero_()

    def _write(self, block: torch.Tensor, integers: torch.Tensor) -> None:
        """Write round(x · 2^e) of numbers within the bound.

        A power of two changes no digit, and every rounded number is an integer of its type already
        when it is cast, so the only error is that of rounding.

        Args:
            block: numbers (n,), overwritten.
            integers: integers (n,), overwritten.
        """
        block.mul_(math.ldexp(1.0, self.exponent)).round_()
        integers.copy_(block)

    def _scratch(self, rows: torch.Tensor) -> torch.Tensor:
        """Return memory for a block of rows, of a type in which they are scaled without an error.

        Args:
            rows: rows (b, …).
        """
        dtype = torch.float64
        if rows.dtype != torch.float64 and self.exponent in FLOAT32_EXPONENTS:
            dtype = torch.float32
        return torch.empty(min(BLOCK, rows.numel()), dtype=dtype)


def _exponent(bound: float, limit: int) -> int:
    """Return the largest e with round(bound · 2^e) <= limit.

    Args:
        bound: largest magnitude of one number.
        limit: largest integer of one number.
    """
    _, binary_exponent = math.frexp(bound)
    # 1/2 <= bound · 2^(-binary_exponent) < 1, so this is right or one above.
    exponent = limit.bit_length() - binary_exponent
    if _rounded(bound, exponent) > limit:
        exponent -= 1
    return exponent


def _rounded(number: float, exponent: int) -> int:
    """Return round(number · 2^exponent), exactly, ties to even.

    Args:
        number: any finite number.
        exponent: exponent of two.
    """
    return round(Fraction(number) * Fraction(2) ** exponent)


def _at_most(bound: float, dtype: torch.dtype) -> float:
    """Return the largest number of a type that is not above a bound.

    Args:
        bound: a positive number.
        dtype: a floating-point type.
    """
    nearest = torch.tensor(bound, dtype=torch.float64).to(dtype)
    if float(nearest) > bound:
        below = torch.zeros((), dtype=dtype)
        nearest = torch.nextafter(nearest, below)
    return float(nearest)


def _blocks(
    source: torch.Tensor, target: torch.Tensor
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield the same blocks of two tensors of one shape, as views of at most BLOCK numbers.

    Args:
        source: tensor that is read.
        target: contiguous tensor that is written.
    """
    numbers = source.reshape(-1)
    written = target.view(-1)
    for start in range(0, numbers.numel(), BLOCK):
        end = start + BLOCK
        yield numbers[start:end], written[start:end]
