"""Names win, a number that could be a name is refused, and `at` is always a position."""

from __future__ import annotations

import datetime
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from securecluster.core.client_names import At, ClientNames, at, name_of, names_of, with_names
from securecluster.errors import UsageError

HOSPITALS = [str(number) for number in range(1, 13)]
PADDED = [f"{number:03}" for number in range(1, 13)]
SITES = ["north", "south", "east"]


@pytest.mark.parametrize(
    ("names", "given", "position"),
    [
        # a name wins over a position
        (HOSPITALS, 3, 2), (HOSPITALS, "3", 2), (HOSPITALS, np.int64(3), 2),
        (HOSPITALS, np.uint8(12), 11), (HOSPITALS, 3.0, 2), (HOSPITALS, np.float32(3), 2),
        (HOSPITALS, " 3 ", 2), (HOSPITALS, at(3), 3), (HOSPITALS, at(np.int64(0)), 0),
        (["2", "north"], 2, 0), (["-1", "0"], -1, 0), (["1.5", "2"], 1.5, 0),
        (["1e3", "1000"], 1000, 1),
        # nobody is called by a number
        (SITES, 2, 2), (SITES, "2", 2), (SITES, np.int32(0), 0), (SITES, at(1), 1),
        (SITES, "south", 1),
        # names that print alike are alike
        (["new  york", "Z\u00fcrich"], "new york", 0),
        (["new york", "Z\u00fcrich"], "Zu\u0308rich", 1),
        (["new york", "Z\u00fcrich"], "new\u00a0york", 0),
        # names with an own meaning elsewhere
        (["at(1)", "#0"], "#0", 1), (["True", "None"], "True", 0),
    ],
    ids=repr,
)  # fmt: skip
def test_a_client_is_found(names: Sequence[str], given: Any, position: int) -> None:
    assert ClientNames(names).position(given) == position


@pytest.mark.parametrize(
    ("names", "given"),
    [
        # a number among numbers is a name that nobody has
        (HOSPITALS, 0), (HOSPITALS, "0"), (HOSPITALS, 13), (PADDED, 3), (PADDED, "3"),
        (["1.5", "north"], 1), (["7", "north", "south"], 1), (HOSPITALS, at(12)), (SITES, 3),
        (SITES, -1), (SITES, "02"), (SITES, "٢"),  # a two, in Arabic
        (SITES, 2.5), (SITES, math.nan), (SITES, True), (SITES, np.True_), (["1", "0"], True),
        (SITES, None), (SITES, ""), (SITES, ["north"]), (SITES, b"north"),
        (SITES, "#0"),  # only on the command line
        ([], 0),
    ],
    ids=repr,
)  # fmt: skip
def test_nobody_is_found_by_what_names_nobody(names: Sequence[str], given: Any) -> None:
    with pytest.raises(UsageError, match=r"^there is no client ") as caught:
        ClientNames(names).position(given)
    assert "\n" not in str(caught.value)


def test_a_number_that_could_be_a_name_is_refused_with_both_readings() -> None:
    with pytest.raises(
        UsageError,
        match=r"^there is no client 3: clients are called by numbers here, so a number is a name, "
        r"and at\(3\) is the client at this position, '004'; clients go by name \('001', '002', "
        r"'003' …\) or position \(at\(0\) to at\(11\)\)$",
    ):
        ClientNames(PADDED).position(3)


def test_the_nearest_name_is_asked_for() -> None:
    with pytest.raises(UsageError, match="did you mean 'north'"):
        ClientNames(SITES).position("Nort")


def test_a_name_of_several_clients_is_refused() -> None:
    with pytest.raises(UsageError, match=r"'a' is the name of several clients: give at\(0\) or at"):
        ClientNames(["a", "b", "a"]).position("a")
    assert ClientNames(["a", "b", "a"]).position(at(2)) == 2


@pytest.mark.parametrize(
    ("text", "added"),
    [
        ("client 2 refuses", " (client 2 is '3')"),
        ("client(s) 2, 0 are far", " (client 2 is '3', client 0 is '1')"),
        ("newcomer(s) 11 do not reply", " (client 11 is '12')"),
        ("client 2 and client 2's row", " (client 2 is '3')"),
        ("client 12 of 12 clients in round 3", ""),  # no such position
        ("a sum over 2 client(s)", ""),
    ],
)
def test_errors_say_who_stands_at_a_position(text: str, added: str) -> None:
    assert with_names(text, HOSPITALS) == text + added
    assert with_names(text, [str(k) for k in range(12)]) == text, "names are positions"


def test_without_names_clients_go_by_position() -> None:
    nameless = ClientNames((), count=3)
    assert [nameless.position(client) for client in (0, "1", at(2))] == [0, 1, 2]
    with pytest.raises(UsageError, match=r"clients go by position \(at\(0\) to at\(2\)\)$"):
        nameless.position(3)


@pytest.mark.parametrize(
    ("names", "text", "position"),
    [
        (HOSPITALS, "3", 2), (HOSPITALS, "#3", 3), (HOSPITALS, "#0", 0), (SITES, "2", 2),
        (SITES, "#2", 2), (SITES, " south ", 1),
        # where clients are called like this, it is their name
        (["#1", "#2"], "#1", 0),
    ],
)  # fmt: skip
def test_the_command_line_has_a_spelling_of_positions(
    names: Sequence[str], text: str, position: int
) -> None:
    assert ClientNames(names).parsed(text) == position


@pytest.mark.parametrize(
    ("names", "text"),
    [
        (HOSPITALS, "0"), (PADDED, "3"), (SITES, "#3"), (["#1", "#2"], "#0"), (SITES, "#"),
        (SITES, ""),
    ],
)  # fmt: skip
def test_the_command_line_refuses_what_is_nobody(names: Sequence[str], text: str) -> None:
    with pytest.raises(UsageError, match=r"no client .*client:#0"):
        ClientNames(names, position_text="client:#{}").parsed(text)


@pytest.mark.parametrize(
    ("key", "name"),
    [
        ("north", "north"), (3, "3"), (np.int64(3), "3"), (3.0, "3"), (0.5, "0.5"), (-0.0, "0"),
        ("  two  words\n", "two words"), (("A", 1), "('A', 1)"),
        (datetime.date(2024, 5, 1), "2024-05-01"), (np.str_("north"), "north"),
    ],
    ids=repr,
)  # fmt: skip
def test_a_name_is_the_text_of_a_key(key: Any, name: str) -> None:
    assert name_of(key) == name


@pytest.mark.parametrize("key", [True, np.False_, None, math.nan, "", " \t", at(0)], ids=repr)
def test_a_key_that_names_nobody_is_refused(key: Any) -> None:
    with pytest.raises(UsageError, match=r"no client's name: give text or a whole number$"):
        name_of(key)


@pytest.mark.parametrize(
    ("keys", "name"),
    [
        ([3, "3"], "3"), ([1, 1.0], "1"), ([np.int8(1), np.int64(1)], "1"),
        (["1", np.float64(1)], "1"), (["A ", "A"], "A"), (["a b", "a\u00a0 b"], "a b"),
        (["Z\u00fcrich", "Zu\u0308rich"], "Z\u00fcrich"),
    ],
    ids=repr,
)  # fmt: skip
def test_names_that_differ_in_type_or_blanks_alone_are_refused(keys: list[Any], name: str) -> None:
    with pytest.raises(UsageError, match=f"would both be the client {name!r}: give them different"):
        names_of(keys)


def test_names_that_print_otherwise_are_different_clients() -> None:
    assert names_of(["a", "A", "1", "01", "1.0"]) == ("a", "A", "1", "01", "1.0")


@pytest.mark.parametrize("position", [-1, True, 1.0, "1", None])
def test_a_position_is_a_whole_number_from_0(position: Any) -> None:
    with pytest.raises(UsageError, match="a position is a whole number from 0"):
        at(position)


def test_a_position_shows_how_it_is_made() -> None:
    assert repr(at(2)) == "at(2)" and at(2) == At(2) != at(3)
