"""Fixed-point numbers, compared with exact fractions."""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from securecluster.errors import FrameError, UpdateError, UsageError
from securecluster.privacy import fixed_point
from securecluster.privacy.fixed_point import FixedPoint

BOUNDS = st.floats(1e-30, 1e30)
MEMBERS = st.integers(1, 5000)
BITS = st.sampled_from([32, 64])
FLOATS = [torch.float16, torch.bfloat16, torch.float32, torch.float64]


def exact(rows: torch.Tensor, exponent: int) -> list[int]:
    """Return round(x · 2^e) of each number in exact arithmetic."""
    return [round(Fraction(x) * Fraction(2) ** exponent) for x in rows.double().flatten().tolist()]


@given(bound=BOUNDS, members=MEMBERS, bits=BITS)
def test_the_scale_is_the_largest_under_which_no_sum_wraps(
    bound: float, members: int, bits: int
) -> None:
    point = FixedPoint(bound, members, bits)
    limit = 2 ** (bits - 1) - 1
    [fits] = exact(torch.tensor([bound], dtype=torch.float64), point.exponent)
    [wraps] = exact(torch.tensor([bound], dtype=torch.float64), point.exponent + 1)
    assert point.largest == fits
    assert members * fits <= limit < members * wraps


@given(data=st.data(), bound=BOUNDS, members=MEMBERS, bits=BITS)
def test_numbers_are_rounded_to_the_nearest_integer(
    data: Any, bound: float, members: int, bits: int
) -> None:
    point = FixedPoint(bound, members, bits)
    numbers = data.draw(st.lists(st.floats(-bound, bound), min_size=1, max_size=20))
    wide = torch.tensor([*numbers, bound, -bound], dtype=torch.float64)
    assert point.encode(wide).tolist() == exact(wide, point.exponent)
    # a number of float32 may lie above the bound that it is nearest to
    narrow = wide.float()[wide.float().double().abs() <= bound]
    assert point.encode(narrow).tolist() == exact(narrow, point.exponent)


@pytest.mark.parametrize("dtype", FLOATS)
def test_every_type_of_numbers_is_encoded_exactly(dtype: torch.dtype) -> None:
    rows = (torch.rand(3, 7, generator=torch.Generator().manual_seed(0)) * 6 - 3).to(dtype)
    point = FixedPoint(4.0, 10)
    assert point.encode(rows).flatten().tolist() == exact(rows, point.exponent)
    assert point.encode(rows, saturate=True).flatten().tolist() == exact(rows, point.exponent)


@given(seed=st.integers(0, 2**32), members=st.integers(1, 200), bits=BITS)
def test_sums_are_right_within_the_stated_error(seed: int, members: int, bits: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    rows = (torch.rand(members, 5, generator=generator, dtype=torch.float64) * 2 - 1) * 3.7
    point = FixedPoint(3.7, members, bits)
    total = point.encode(rows).sum(0, dtype=point.dtype)
    decoded = point.decode(total, members, torch.float64)
    for column in range(5):
        true = sum(map(Fraction, rows[:, column].tolist()), Fraction(0))
        error = abs(Fraction(decoded[column].item()) - true)
        cast = abs(true) * Fraction(2) ** -53
        assert error <= Fraction(point.error_bound(members)) + cast


@given(bound=st.floats(1e-6, 1e6), bits=st.integers(8, 24), members=st.integers(1, 200))
def test_integers_may_be_asked_to_be_smaller_than_fits(
    bound: float, bits: int, members: int
) -> None:
    most = 2**bits
    point = FixedPoint(bound, members, most=most)
    free = FixedPoint(bound, members)
    assert point.largest <= most and point.exponent <= free.exponent
    # one exponent more is too fine, for the one or the other
    finer = round(Fraction(bound) * Fraction(2) ** (point.exponent + 1))
    assert finer > most or point.exponent == free.exponent


def test_the_extremes_of_all_members_do_not_wrap_and_one_more_would() -> None:
    point = FixedPoint(1.0, 100)
    row = point.encode(torch.tensor([1.0, -1.0]))
    total = 100 * row.long()
    assert total.abs().max() < 2**31
    assert point.decode(total.int(), 100).tolist() == [100.0, -100.0]
    # the next power of two would wrap
    assert 2 * int(total[0]) >= 2**31


@pytest.mark.parametrize("bits", [32, 64])
def test_a_sum_that_no_clients_can_have_is_refused(bits: int) -> None:
    point = FixedPoint(2.0, 10, bits, field="delta")
    limit = 5 * point.largest
    good = torch.tensor([limit, -limit, 0], dtype=point.dtype)
    assert point.in_range(good, 5)
    assert point.decode(good, 5).tolist() == [10.0, -10.0, 0.0]
    for forged in (limit + 1, -limit - 1, -(2 ** (bits - 1))):
        bad = torch.tensor([0, forged], dtype=point.dtype)
        assert not point.in_range(bad, 5)
        with pytest.raises(FrameError, match=r"delta: the sum is beyond what 5 clients"):
            point.decode(bad, 5)


def test_a_sum_over_unplanned_counts_or_of_another_type_is_refused() -> None:
    point = FixedPoint(2.0, 10)
    zeros = torch.zeros(3, dtype=torch.int32)
    for count in (0, 11):
        with pytest.raises(FrameError, match=f"over {count} clients"):
            point.decode(zeros, count)
    with pytest.raises(FrameError, match="int64"):
        point.decode(zeros.long(), 1)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, 4.5, -4.5])
def test_what_is_beyond_the_bound_is_refused_by_name(dtype: torch.dtype, bad: float) -> None:
    point = FixedPoint(4.0, 10, field="size", option="--most-samples")
    rows = torch.zeros(2, 3, dtype=dtype)
    rows[1, 2] = bad
    option = "most_samples" if math.isfinite(bad) else "lr"
    with pytest.raises(UpdateError, match=f"size: .*{option}"):
        point.encode(rows)


@pytest.mark.parametrize("dtype", FLOATS)
def test_saturated_rows_are_clamped_and_rows_that_are_not_finite_are_zeros(
    dtype: torch.dtype,
) -> None:
    point = FixedPoint(4.0, 10)
    rows = torch.tensor([[1.0, 9.0, -9.0], [1.0, math.nan, 2.0], [math.inf, 1.0, 2.0]], dtype=dtype)
    decoded = point.decode(point.encode(rows, saturate=True), 1)
    assert decoded.tolist() == [[1.0, 4.0, -4.0], [0.0, 0.0, 0.0], [0.0, 0.0, 0.0]]


@given(bound=st.floats(1e-6, 1e6), members=st.integers(1, 3))
def test_saturated_numbers_never_exceed_the_largest(bound: float, members: int) -> None:
    # the number of float32 that is nearest to the bound may lie above it
    point = FixedPoint(bound, members)
    encoded = point.encode(torch.tensor([[1e30, -1e30]]), saturate=True)
    assert encoded.abs().max() <= point.largest


@pytest.mark.parametrize("place", [0, 5, 9])
def test_a_row_that_is_not_finite_is_zeros_in_every_block(
    place: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fixed_point, "BLOCK", 4)
    rows = torch.ones(3, 10)
    rows[1, place] = math.nan
    point = FixedPoint(2.0, 3)
    encoded = point.encode(rows, saturate=True)
    assert encoded[1].eq(0).all()
    assert encoded[[0, 2]].eq(1 << point.exponent).all()


def test_blocks_do_not_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = torch.rand(3, 5, 7, generator=torch.Generator().manual_seed(0))
    point = FixedPoint(1.0, 3)
    whole = point.encode(rows)
    monkeypatch.setattr(fixed_point, "BLOCK", 4)
    assert torch.equal(point.encode(rows), whole)
    assert torch.equal(point.encode(rows, saturate=True), whole)
    assert torch.equal(point.decode(whole, 1), (whole.double() * 2.0**-point.exponent).float())
    # views that are not contiguous, and rows without numbers
    assert torch.equal(point.encode(rows.transpose(0, 2)), whole.transpose(0, 2))
    assert point.encode(rows[:0]).shape == (0, 5, 7)
    assert point.decode(whole[:, :0], 1).shape == (3, 0, 7)


@pytest.mark.parametrize("bound", [0.0, -1.0, math.nan, math.inf, 1e200, 1e-200])
def test_bounds_that_are_none_are_refused(bound: float) -> None:
    with pytest.raises(UsageError, match=r"loss: the bound .* change loss_clip"):
        FixedPoint(bound, 10, field="loss", option="--loss-clip")


def test_rings_and_members_that_do_not_fit_are_refused() -> None:
    with pytest.raises(UsageError, match="16"):
        FixedPoint(1.0, 10, bits=16)
    for members in (0, 2**31):
        with pytest.raises(UsageError, match="clients does not fit"):
            FixedPoint(1.0, members)
    with pytest.raises(UsageError, match="int64"):
        FixedPoint(1.0, 10).encode(torch.zeros(3, dtype=torch.int64))
