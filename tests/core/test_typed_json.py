"""Contents of JSON files: every entry that has another type is named, and nothing else."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NotRequired, TypedDict

import pytest

from securecluster.core.serialization import checked, fault_of
from securecluster.errors import RunFolderError


@dataclass
class Point:
    x: float
    y: float = 0.0


class Content(TypedDict):
    kind: Literal["real", "masked"]
    names: list[str]
    pair: tuple[int, str]
    points: dict[str, Point]
    limit: float | None
    note: NotRequired[str]


RIGHT: dict[str, Any] = {
    "kind": "masked",
    "names": ["a", "b"],
    "pair": [1, "x"],
    "points": {"first": {"x": 1.5, "y": 2.0}},
    "limit": None,
}


@pytest.mark.parametrize(
    ("entry", "value", "fault"),
    [
        ("kind", "plain", "kind is none of real, masked"),
        ("kind", ["real"], "kind is none of real, masked"),
        ("names", "ab", "names is not a list"),
        ("names", ["a", 1], "names[1] is not a text"),
        ("pair", [1], "pair is not a list of 2 items"),
        ("pair", [1, "x", 2], "pair is not a list of 2 items"),
        ("pair", ["x", 1], "pair[0] is not a whole number"),
        ("pair", [True, "x"], "pair[0] is not a whole number"),
        ("points", [], "points is not an object"),
        ("points", {"first": 1}, "points.first is not an object"),
        ("points", {"first": {"x": "1"}}, "points.first.x is not a number"),
        ("limit", "none", "limit is "),
        ("note", 1, "note is not a text"),
        ("points", {"first": {"x": 1, "y": 1, "z": 1}}, "points.first.z is unknown"),
    ],
)
def test_an_entry_of_another_type_is_named(entry: str, value: Any, fault: str) -> None:
    found = fault_of({**RIGHT, entry: value}, Content)
    assert found is not None and found.startswith(fault)
    with pytest.raises(RunFolderError, match=r"result\.json"):
        checked(Path("result.json"), {**RIGHT, entry: value}, Content)


@pytest.mark.parametrize("missing", RIGHT)
def test_a_missing_entry_is_named(missing: str) -> None:
    rest = {name: value for name, value in RIGHT.items() if name != missing}
    assert fault_of(rest, Content) == f"{missing} is missing"


def test_what_has_its_types_comes_back() -> None:
    other = {**RIGHT, "note": "x", "limit": 1, "names": [], "points": {}, "newer": 1}
    for content in (RIGHT, other):
        assert fault_of(content, Content) is None
        assert checked(Path("result.json"), content, Content) == content
