"""Numbers of runs: drawn anew, of one form, and taken from what parties agreed on."""

from __future__ import annotations

from typing import Any

import pytest

from securecluster.messaging import run_number


def test_numbers_are_drawn_anew_and_read_back() -> None:
    numbers = {run_number.drawn() for _ in range(100)}
    assert len(numbers) == 100
    assert {run_number.of({"run": number, "seed": 0}) for number in numbers} == numbers
    assert run_number.of({"seed": 0}) is None


@pytest.mark.parametrize("value", ["", "ab", "AB" * 16, "g" * 32, "a" * 33, 7, True, ["a" * 32]])
def test_anything_else_is_no_number(value: Any) -> None:
    with pytest.raises(ValueError, match="32 hexadecimal digits"):
        run_number.of({"run": value})
