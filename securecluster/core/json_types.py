"""Contents of JSON files against the types that they must have.

A digest finds damage. A file that came from elsewhere may have any content and a digest that fits,
so the types of its entries are checked once, when it is read.
"""

from __future__ import annotations

import dataclasses
import json
import math
import types
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import (
    Any,
    Literal,
    NotRequired,
    TypeVar,
    Union,
    get_args,
    get_origin,
    get_type_hints,
    is_typeddict,
)

from securecluster.errors import RunFolderError

T = TypeVar("T")
WORDS = {int: "a whole number", float: "a number", str: "a text", bool: "true or false"}
LARGEST = 2**128  # of whole numbers: seeds may have 128 bits, and it fits into a float
Fault = str  # an entry, and what is wrong with it


def parsed(path: Path, text: bytes | str) -> Any:
    """Return the content of a JSON file.

    Args:
        path: of the file, for the message of an error.
        text: its content.

    Raises:
        RunFolderError: it is no JSON.
    """
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise RunFolderError(
            f"{path} does not parse ({type(error).__name__}): restore it from a copy, or run anew "
            "into another folder"
        ) from None


def typed(path: Path, content: Any, expected: type[T]) -> T:
    """Return the content of a JSON file after a check that every entry has its type.

    Args:
        path: of the file, for the message of an error.
        content: as it was parsed.
        expected: a TypedDict, whose further entries may be anything.

    Raises:
        RunFolderError: an entry is missing or has another type; the message names file and entry.
    """
    refuse(path, next(faults(content, expected), None))
    checked: T = content
    return checked


def refuse(path: Path, fault: Fault | None) -> None:
    """Raise RunFolderError for a fault in the content of a file.

    Args:
        path: of the file.
        fault: the entry and what is wrong with it; None where nothing is.
    """
    if fault is not None:
        raise RunFolderError(
            f"{path} is not what a run writes there ({fault}): restore it from a copy, or run anew "
            "into another folder"
        )


def faults(value: Any, expected: Any, entry: str = "") -> Iterator[Fault]:
    """Yield what is wrong with a JSON value, entry by entry.

    Types are those of JSON, unions and literals of them, lists, tuples, dicts with texts as keys,
    and TypedDicts. The entries of a dataclass are its fields, of which those with a default may be
    missing. Any other type accepts every value.

    Args:
        value: as it was parsed.
        expected: its type.
        entry: path of the value in the file, such as "privacy.fields[2]".
    """
    origin = get_origin(expected)
    if is_typeddict(expected) or dataclasses.is_dataclass(expected):
        yield from _faults_of_entries(value, expected, entry)
    elif origin in FAULTS_OF:
        yield from FAULTS_OF[origin](value, get_args(expected), entry)
    elif expected is type(None):
        if value is not None:
            yield _fault(entry, "is not null")
    elif expected in WORDS and not _is_a(value, expected):
        yield _fault(entry, f"is not {WORDS[expected]}")


def _fault(entry: str, text: str) -> Fault:
    return f"{entry or 'its content'} {text}"


def _is_a(value: Any, expected: type) -> bool:
    """Return whether a JSON value is of a scalar type; a whole number is a number, NaN is none."""
    if type(value) is int and expected in (int, float):
        return abs(value) < LARGEST
    if expected is not float:
        return type(value) is expected
    return type(value) is float and not math.isnan(value)


def _faults_of_entries(value: Any, expected: Any, entry: str) -> Iterator[Fault]:
    """Yield the faults of an object with named entries.

    Args:
        value: as it was parsed.
        expected: a TypedDict or a dataclass.
        entry: path of the value in the file.
    """
    if not isinstance(value, dict):
        yield _fault(entry, "is not an object")
        return
    required = _required(expected)
    entry_types = _entry_types(expected)
    for name, entry_type in entry_types.items():
        path = f"{entry}.{name}".lstrip(".")
        if name in value:
            yield from faults(value[name], entry_type, path)
        elif name in required:
            yield _fault(path, "is missing")
    if dataclasses.is_dataclass(expected):
        for name in sorted(value.keys() - entry_types.keys()):
            yield _fault(f"{entry}.{name}".lstrip("."), "is unknown")


@cache
def _entry_types(expected: Any) -> Mapping[str, Any]:
    """Return the types of a class's entries by name."""
    hints = get_type_hints(expected)
    if dataclasses.is_dataclass(expected):
        return {field.name: hints[field.name] for field in dataclasses.fields(expected)}
    return hints


@cache
def _required(expected: Any) -> frozenset[str]:
    """Return the names of the entries of a class that may not be missing."""
    # the library writes all fields: a default would silently stand for what was removed
    if dataclasses.is_dataclass(expected):
        return frozenset(field.name for field in dataclasses.fields(expected))
    required = set()
    # not __required_keys__, which takes annotations in quotes for required ones
    for name, hint in get_type_hints(expected, include_extras=True).items():
        if get_origin(hint) is not NotRequired:
            required.add(name)
    return frozenset(required)


def _faults_of_union(value: Any, options: tuple[Any, ...], entry: str) -> Iterator[Fault]:
    """Yield the faults of the closest option, unless some option has none.

    Args:
        value: as it was parsed.
        options: types of which the value has one.
        entry: path of the value in the file.
    """
    fault: Fault | None = None
    for option in options:
        option_fault = next(faults(value, option, entry), None)
        if option_fault is None:
            return
        # not what null is not, but what the other option is not
        if fault is None or option is not type(None):
            fault = option_fault
    assert fault is not None
    yield fault


def _faults_of_literal(value: Any, options: tuple[Any, ...], entry: str) -> Iterator[Fault]:
    """Yield the fault of a text that is none of some.

    Args:
        value: as it was parsed.
        options: the texts.
        entry: path of the value in the file.
    """
    if not isinstance(value, str) or value not in options:
        yield _fault(entry, f"is none of {', '.join(options)}")


def _faults_of_list(value: Any, item_types: tuple[Any, ...], entry: str) -> Iterator[Fault]:
    """Yield the faults of a list; JSON has lists in place of tuples.

    Args:
        value: as it was parsed.
        item_types: type of every item, with an ellipsis after it, or of each item of a tuple.
        entry: path of the value in the file.
    """
    if not isinstance(value, list):
        yield _fault(entry, "is not a list")
        return
    if len(item_types) == 1 or item_types[1:] == (...,):
        item_types = item_types[:1] * len(value)
    if len(item_types) != len(value):
        yield _fault(entry, f"is not a list of {len(item_types)} items")
        return
    for position, (item, item_type) in enumerate(zip(value, item_types, strict=True)):
        yield from faults(item, item_type, f"{entry}[{position}]")


def _faults_of_dict(value: Any, kinds: tuple[Any, ...], entry: str) -> Iterator[Fault]:
    """Yield the faults of an object whose entries have one type.

    Args:
        value: as it was parsed.
        kinds: type of the names, and of every entry.
        entry: path of the value in the file.
    """
    if not isinstance(value, dict):
        yield _fault(entry, "is not an object")
        return
    for name, item in value.items():
        yield from faults(item, kinds[1], f"{entry}.{name}")


FAULTS_OF: Mapping[Any, Callable[[Any, tuple[Any, ...], str], Iterator[Fault]]] = {
    Union: _faults_of_union,
    types.UnionType: _faults_of_union,
    Literal: _faults_of_literal,
    list: _faults_of_list,
    tuple: _faults_of_list,
    dict: _faults_of_dict,
}
