"""Serialization of dataclass trees, the content of checkpoints and run folders.

A tree consists of dataclasses, tensors, numbers, strings, lists and dicts. A digest finds damage,
but a file that came from elsewhere may have any content and a digest that fits, so the types of its
entries are checked once, when it is read: by the same converter, whose errors become one sentence
that names the entry.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import is_dataclass
from functools import cache, partial
from pathlib import Path
from types import UnionType
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

from securecluster.core.lazy_torch import torch
from securecluster.core.validation import Options
from securecluster.errors import RunFolderError

S = TypeVar("S")
Fault = str  # an entry, and what is wrong with it
WORDS: Mapping[Any, str] = {
    int: "a whole number",
    float: "a number",
    str: "a text",
    bool: "true or false",
}
LARGEST = 2**128  # of whole numbers: seeds may have 128 bits, and it fits into a float


def pack(tree: Any) -> bytes:
    """Return a dataclass tree as one safetensors file.

    The file holds the tensors, and the JSON text of everything else in its metadata.

    Args:
        tree: an instance of a dataclass.
    """
    from safetensors.torch import save

    tensors: dict[str, torch.Tensor] = {}

    def replace_tensor(tensor: torch.Tensor) -> dict[str, str]:
        name = f"t{len(tensors)}"
        # a clone, since safetensors refuses tensors that share memory
        tensors[name] = tensor.detach().cpu().contiguous().clone()
        return {"tensor": name}

    plain_tree = _converter().unstructure(tree)
    text = json.dumps(plain_tree, separators=(",", ":"), default=replace_tensor)
    return bytes(save(tensors, {"state": text}))


def unpack(data: bytes, tree_type: type[S]) -> S:
    """Return the dataclass tree that `pack` was called with.

    Args:
        data: the result of `pack`.
        tree_type: class of the tree.

    Raises:
        RunFolderError: damaged data, or fields that the class lacks or that are missing.
    """
    import cattrs
    from safetensors import SafetensorError
    from safetensors.torch import load

    try:
        tensors = load(data)
        plain_tree = _restore_tensors(_metadata(data), tensors)
        tree: S = _converter().structure(plain_tree, tree_type)
        return tree
    except (
        SafetensorError,
        ValueError,
        LookupError,
        TypeError,
        AttributeError,
        RuntimeError,
        cattrs.BaseValidationError,
    ) as error:
        raise _damaged(tree_type, error) from None


def _metadata(data: bytes) -> str:
    """Return the text that `pack` stored in the header of a safetensors file."""
    # 8 bytes with the header's length come first, then the header in JSON
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    text: str = header["__metadata__"]["state"]
    return text


def _restore_tensors(text: str, tensors: dict[str, torch.Tensor]) -> Any:
    """Return a parsed tree in which each {"tensor": name} is replaced by the tensor.

    Args:
        text: the tree in JSON.
        tensors: all tensors of the tree by name.
    """

    def restore_tensor(node: dict[str, Any]) -> Any:
        if set(node) == {"tensor"}:
            return tensors[node["tensor"]]
        return node

    return json.loads(text, object_hook=restore_tensor)


def plain(tree: Any) -> Any:
    """Return a dataclass tree without tensors as a value that JSON can represent."""
    return _converter().unstructure(tree)


def structured(data: Any, tree_type: type[S]) -> S:
    """Return the dataclass tree that `plain` was called with.

    Args:
        data: the result of `plain`.
        tree_type: class of the tree.

    Raises:
        ValueError: the data do not fit the class.
    """
    import cattrs

    try:
        tree: S = _converter().structure(data, tree_type)
    except cattrs.BaseValidationError as error:
        raise ValueError(str(error)) from None
    return tree


def restored(data: Any, tree_type: type[S]) -> S:
    """Return a part of a packed tree whose class only its user knows.

    Args:
        data: as `unpack` left it, in a field of type Any.
        tree_type: class of the part.

    Raises:
        RunFolderError: the data do not fit the class.
    """
    try:
        return structured(data, tree_type)
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise _damaged(tree_type, error) from None


def _damaged(tree_type: type, error: Exception) -> RunFolderError:
    """Return the error for a tree that cannot be read."""
    return RunFolderError(
        f"a saved {tree_type.__name__} does not parse ({type(error).__name__}): start the run anew"
    )


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


def typed(content: Any, tree_type: type[S]) -> S:
    """Return a dataclass, or a list, of JSON values whose types are already those of its fields.

    Args:
        content: as JSON was read; fields that it lacks have their defaults.
        tree_type: the class.

    Raises:
        ValueError: a value of another type, or an unknown field.
    """
    fault = fault_of(content, tree_type)
    if fault is not None:
        raise ValueError(fault)
    return structured(content, tree_type)


def checked(path: Path, content: Any, expected: type[S]) -> S:
    """Return the content of a JSON file after a check that every entry has its type.

    Args:
        path: of the file, for the message of an error.
        content: as it was parsed.
        expected: a TypedDict, whose further entries may be anything.

    Raises:
        RunFolderError: an entry is missing or has another type; the message names file and entry.
    """
    refuse(path, fault_of(content, expected))
    unchanged: S = content
    return unchanged


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


def fault_of(value: Any, expected: Any, entry: str = "") -> Fault | None:
    """Return what is wrong with the first JSON value that has not its type; None where all have.

    Args:
        value: as it was parsed.
        expected: its type, made of those of JSON, literals, TypedDicts and dataclasses.
        entry: path of the value in the file, such as "privacy.fields[2]".
    """
    import cattrs

    try:
        _reader().structure(value, expected)
    except (
        cattrs.BaseValidationError,
        cattrs.ForbiddenExtraKeysError,
        ValueError,
        KeyError,
    ) as error:
        return _first_fault(error, entry)
    return None


def _first_fault(error: BaseException, entry: str) -> Fault:
    """Return the first fault of a converter's error, with the path of its entry.

    Args:
        error: of the converter, which notes the name or place of each entry.
        entry: path of the value that it is about.
    """
    import cattrs
    from cattrs.errors import AttributeValidationNote, IterableValidationNote

    # that of the innermost entry comes first
    for note in reversed(getattr(error, "__notes__", [])):
        if isinstance(note, AttributeValidationNote):
            entry = f"{entry}.{note.name}".lstrip(".")
        elif isinstance(note, IterableValidationNote):
            # places in lists are numbers, and those in objects names
            place = note.index
            entry += f"[{place}]" if isinstance(place, int) else f".{place}"
    if isinstance(error, cattrs.BaseValidationError):
        return _first_fault(error.exceptions[0], entry)
    if isinstance(error, cattrs.ForbiddenExtraKeysError):
        return f"{entry}.{min(error.extra_fields)} is unknown".lstrip(".")
    if isinstance(error, KeyError):
        return f"{entry} is missing"
    return f"{entry or 'its content'} {error.args[0]}"


@cache
def _reader() -> Any:
    """Return the converter that takes JSON values of exactly the types that are asked for."""
    import cattrs
    from cattrs.gen import make_dict_structure_fn

    converter = cattrs.Converter()
    for scalar in WORDS:
        converter.register_structure_hook(scalar, _scalar)

    def register(holds: Callable[[Any], bool], shape: type, make: Callable[..., Any]) -> None:
        word = "a list" if shape is list else "an object"

        def hook_of(expected: Any) -> Callable[[Any, Any], Any]:
            read = make(expected, converter)

            def structure(value: Any, _: Any) -> Any:
                if not isinstance(value, shape):
                    raise ValueError(f"is not {word}")
                return read(value, expected)

            return structure

        converter.register_structure_hook_factory(holds, hook_of)

    # no unknown entries of dataclasses, which are options
    strict = partial(make_dict_structure_fn, _cattrs_forbid_extra_keys=True)
    register(is_dataclass, dict, strict)
    register(is_typeddict, dict, _typed_dict_hook)
    register(lambda of: _origin(of) is dict, dict, _items_hook)
    # JSON has lists in place of tuples
    register(lambda of: _origin(of) in (list, tuple), list, _items_hook)
    converter.register_structure_hook_factory(
        lambda of: _origin(of) in (Union, UnionType), lambda of: partial(_one_of, converter)
    )
    converter.register_structure_hook_func(lambda of: _origin(of) is Literal, _choice)
    return converter


def _origin(expected: Any) -> Any:
    return get_origin(expected)


def _typed_dict_hook(expected: Any, converter: Any) -> Callable[[Any, Any], Any]:
    """Return the function that reads objects with named entries, and lets others pass.

    cattrs' own takes annotations in quotes for required ones.
    """
    from cattrs.errors import AttributeValidationNote

    kinds = get_type_hints(expected)
    optional = set()
    for name, hint in get_type_hints(expected, include_extras=True).items():
        if get_origin(hint) is NotRequired:
            optional.add(name)

    def structure(value: dict[str, Any], _: Any) -> Any:
        for name in [name for name in kinds if name in value or name not in optional]:
            try:
                converter.structure(value[name], kinds[name])
            except Exception as error:
                error.add_note(AttributeValidationNote("entry", name, kinds[name]))
                raise
        return value

    return structure


def _items_hook(expected: Any, converter: Any) -> Callable[[Any, Any], Any]:
    """Return the function that reads the items of lists, of tuples, and of objects by name."""
    from cattrs.errors import IterableValidationNote

    kinds = get_args(expected)
    of_each = _origin(expected) is tuple and kinds[1:] != (...,)

    def structure(value: Any, _: Any) -> Any:
        if of_each and len(value) != len(kinds):
            raise ValueError(f"is not a list of {len(kinds)} items")
        for place, item in value.items() if isinstance(value, dict) else enumerate(value):
            kind = kinds[place] if of_each else kinds[isinstance(value, dict)]
            try:
                converter.structure(item, kind)
            except Exception as error:
                error.add_note(IterableValidationNote("item", place, kind))
                raise
        return value

    return structure


def _one_of(converter: Any, value: Any, expected: Any) -> Any:
    """Return a value that has one of several types, or raise what the last of them lacks."""
    options = get_args(expected)
    if value is None and type(None) in options:
        return None
    kinds = [option for option in options if option is not type(None)]
    for kind in kinds[:-1]:
        if fault_of(value, kind) is None:
            return converter.structure(value, kind)
    return converter.structure(value, kinds[-1])


def _choice(value: Any, expected: Any) -> Any:
    """Return a text that is one of some."""
    names = get_args(expected)
    if not isinstance(value, str) or value not in names:
        raise ValueError(f"is none of {', '.join(names)}")
    return value


def _scalar(value: Any, expected: Any) -> Any:
    """Return a value of a scalar type; a whole number is a number, NaN is none."""
    if type(value) is int and expected in (int, float):
        valid = abs(value) < LARGEST
    elif expected is float:
        valid = type(value) is float and not math.isnan(value)
    else:
        valid = type(value) is expected
    if not valid:
        raise ValueError(f"is not {WORDS[expected]}")
    return value


@cache
def _converter() -> Any:
    """Return the converter between dataclass trees and plain ones; tensors pass unchanged."""
    import cattrs
    from cattrs.gen import make_dict_structure_fn

    # a checkpoint of another version has other fields, and must not be read in part
    converter = cattrs.Converter(forbid_extra_keys=True)
    converter.register_unstructure_hook(torch.Tensor, lambda tensor: tensor)
    converter.register_unstructure_hook(bytes, bytes.hex)
    converter.register_structure_hook(torch.Tensor, _check_tensor)
    converter.register_structure_hook(bytes, lambda text, _: bytes.fromhex(text))

    def options_hook(expected: Any) -> Callable[[Any, Any], Any]:
        read = make_dict_structure_fn(expected, converter, _cattrs_forbid_extra_keys=True)
        return lambda value, _: read(expected.without_left(value), expected)

    # which earlier versions wrote with options that have left
    converter.register_structure_hook_factory(
        lambda of: isinstance(of, type) and issubclass(of, Options), options_hook
    )
    return converter


def _check_tensor(value: Any, _: Any) -> torch.Tensor:
    if not isinstance(value, torch.Tensor):
        raise TypeError("a tensor is missing")
    return value
