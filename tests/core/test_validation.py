"""Ranges stand on fields, and values outside them are refused with one sentence."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

import pytest

from securecluster.core.validation import (
    AtLeast,
    Between,
    KeyOf,
    NoiseMultiplier,
    Number,
    OneOf,
    check_ranges,
    check_whole_value,
)
from securecluster.errors import UsageError


@dataclass
class Options:
    rounds: Annotated[int, AtLeast(1)] = 3
    share: Annotated[float | None, Number(0, 1, low_in=False, high_in=True)] = None
    noise: Annotated[float, NoiseMultiplier()] = 0.0
    kind: Annotated[str, OneOf("plain", "blocks")] = "plain"
    releases: Annotated[int, AtLeast(1), Number(1, 2, high_in=True)] = 1
    free: Any = None


@dataclass
class Narrower(Options):
    rounds: Annotated[int, AtLeast(5)] = 5
    kind: str = "blocks"  # another default, in the same range


REFUSED = [
    ({"rounds": 0}, "rounds = 0 is not possible: it is a whole number from 1"),
    (
        {"rounds": 2 * 10**9},
        "rounds = 2000000000 is not possible: it is a whole number from 1 to 1",
    ),
    ({"rounds": True}, "rounds = True is not possible: it is a whole number from 1"),
    ({"rounds": 2.5}, "rounds = 2.5 is not possible: it is a whole number from 1"),
    ({"share": 0}, "share = 0 is not possible: it is a number above 0, at most 1"),
    ({"share": "all"}, "share = 'all' is not possible: it is a number above 0, at most 1"),
    ({"noise": 1e-12}, "noise = 1e-12 is not possible: it is 0, for none, or a number from 1e-09"),
    ({"noise": None}, "noise = None is not possible"),
    ({"kind": "other"}, "unknown kind 'other': choose one of blocks, plain"),
    ({"kind": None}, "unknown kind None"),
    ({"releases": 3}, "releases = 3 is not possible: it is a number from 1, at most 2"),
    ({"releases": 1.5}, "releases = 1.5 is not possible: it is a whole number from 1"),
]


@pytest.mark.parametrize(("values", "sentence"), REFUSED)
def test_a_value_outside_its_range_is_refused(values: dict[str, Any], sentence: str) -> None:
    with pytest.raises(UsageError) as refused:
        check_ranges(Options(**values))
    assert str(refused.value).startswith(sentence)


def test_values_within_their_ranges_pass_and_none_where_a_field_may_be_none() -> None:
    check_ranges(Options())
    check_ranges(Options(share=1, noise=2.0, kind="blocks", releases=2))


def test_a_subclass_narrows_a_range_and_keeps_those_that_it_does_not_name() -> None:
    with pytest.raises(UsageError, match=r"rounds = 4 .* from 5"):
        check_ranges(Narrower(rounds=4))
    with pytest.raises(UsageError, match="unknown kind"):
        check_ranges(Narrower(kind="other"))


def test_names_of_a_registry_are_those_that_it_has_when_they_are_checked() -> None:
    registry = {"a": 1}

    @dataclass
    class Options:
        kind: str = "b"

    valid = KeyOf(registry)
    with pytest.raises(UsageError, match="unknown kind 'b': choose one of a"):
        valid.check(Options(), "kind")
    registry["b"] = 2
    valid.check(Options(), "kind")


@pytest.mark.parametrize(
    ("valid", "value", "words"),
    [
        (Between(1, maximum="clients"), 6, "a whole number from 1 to 5"),
        (Between(below="clients"), 5, "a whole number from 0 to 4"),
        (Between(2, maximum=9, below="clients"), 1, "a whole number from 2 to 4"),
        (Between(maximum="alone"), 1, "0"),
        (Between(maximum="unknown"), -1, "a whole number from 0"),
    ],
)
def test_ends_may_be_names_of_agreed_sizes(valid: Between, value: int, words: str) -> None:
    agreed = valid.within({"clients": 5, "alone": 0})
    assert not agreed.holds(value)
    assert agreed.violation("k", value) == f"k = {value} is not possible: it is {words}"
    assert agreed.holds(agreed.low)
    assert agreed.maximum is None or agreed.holds(agreed.maximum)
    assert Between(maximum="unknown").within({}).holds(10**12)


@pytest.mark.parametrize("value", [True, 2.0, "2", None])
def test_what_is_no_whole_number_is_refused_by_its_name(value: object) -> None:
    check_whole_value("seeds", -2)
    sentence = f"seeds = {value!r} is not possible: it is a whole number"
    with pytest.raises(UsageError, match=f"^{sentence}$"):
        check_whole_value("seeds", value)
