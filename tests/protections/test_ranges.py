"""What a reply must be for its rows to be hidden: declared ranges, and fields that can be added."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import pytest

from securecluster.core.validation import Between
from securecluster.errors import UsageError
from securecluster.messaging.bounds import Octets, Real
from securecluster.messaging.messages import Picks, Rows
from securecluster.protections.encryption.messages import encrypted_pairs_reply
from securecluster.protections.pads.client import padded_class
from securecluster.protections.pair_rows import PairRange, range_of
from securecluster.protections.secure_sums.messages import masked_class
from securecluster.protections.sum_ranges import SumRanges


@dataclass(frozen=True, eq=False)
class Listed:
    rows: Annotated[Picks, Real(("width",))]


@dataclass(frozen=True, eq=False)
class Coded:
    rows: Annotated[Rows, Octets((4,))]


@dataclass(frozen=True, eq=False)
class Counted:
    count: Annotated[int, Between(maximum="clients")]


@dataclass(frozen=True, eq=False)
class Sealed:
    boxes: Annotated[Rows, Real(("width",))]


@dataclass(frozen=True, eq=False)
class Two:
    one: Annotated[Rows, Real(("width",))]
    two: Annotated[Rows, Real(("width",))]


@pytest.mark.parametrize("reply", [Listed, Coded, Counted])
def test_only_rows_of_numbers_enter_sums(reply: type) -> None:
    with pytest.raises(UsageError, match=f"{reply.__name__}.* cannot enter a secure sum"):
        masked_class(reply, ())


def test_no_field_has_the_name_of_one_of_the_sum() -> None:
    with pytest.raises(UsageError, match=r"Sealed\.boxes has the name of a field of secure sums"):
        masked_class(Sealed, ())


@pytest.mark.parametrize("reply", [Listed, Coded, Counted, Two])
def test_only_one_row_of_numbers_is_of_pairs(reply: type) -> None:
    ranges = dict.fromkeys(("rows", "count", "one"), PairRange(-1.0, 1.0, 32, 0.0))
    with pytest.raises(UsageError, match=f"{reply.__name__} cannot be padded"):
        padded_class(reply, 32)
    with pytest.raises(UsageError, match=f"{reply.__name__} cannot be padded"):
        encrypted_pairs_reply(reply, ranges)


def test_fields_without_a_range_are_named_with_those_that_have_one() -> None:
    with pytest.raises(UsageError, match=r"loss has no range.* \(declared: delta, size\)"):
        SumRanges({"delta": 1.0, "size": 2.0}).fixed_point("loss", 32, 5)
    with pytest.raises(UsageError, match=r"Sealed\.boxes has no range.* \(declared: none\)"):
        range_of(Sealed, {})
    assert range_of(Sealed, {"boxes": PairRange(-1.0, 3.0, 32, 0.0)}).bound == 3.0
