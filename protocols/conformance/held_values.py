"""Numbers that a function holds: of the variables around it, of its defaults, of a partial.

A function that post-processes released numbers uses these alone. A tensor or a number that it holds
beside them may be of data, also where its result does not show it.
"""

from __future__ import annotations

import dis
import hashlib
from collections.abc import Iterator, Mapping
from functools import partial
from types import FunctionType, MethodType
from typing import Any

import numpy as np

from securecluster.core.lazy_torch import torch
from securecluster.privacy.dp.noise_streams import digest

DEEPEST = 6  # containers and functions within each other
# of a tensor or an array, what says nothing of its values
FORM = frozenset({"shape", "dtype", "device", "ndim", "size", "dim", "numel"})


def held_values(function: Any) -> Iterator[tuple[str, str]]:
    """Yield the name and the digest of each number or tensor that a function holds.

    Args:
        function: of released numbers.
    """
    yield from _of_function(function, DEEPEST)


def printed(tensor: torch.Tensor) -> str:
    """Return a digest of a tensor's bytes, with its type and shape.

    Args:
        tensor: on any device.
    """
    return f"{tensor.dtype} {tuple(tensor.shape)} {digest(tensor).hex()}"


def _of_function(function: Any, depth: int) -> Iterator[tuple[str, str]]:
    """Yield what a function, a partial, a method or an object that is called holds."""
    if depth == 0:
        return
    if isinstance(function, partial):
        for n, value in enumerate(function.args):
            yield from _of_value(f"argument {n}", value, depth - 1)
        for name, value in function.keywords.items():
            yield from _of_value(name, value, depth - 1)
        yield from _of_function(function.func, depth - 1)
    elif isinstance(function, MethodType):
        yield from _of_function(function.__func__, depth - 1)
    elif isinstance(function, FunctionType):
        code = function.__code__
        for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
            if name not in _used_by_form(function):
                yield from _of_value(name, _content(cell), depth - 1)
        defaults = function.__defaults__ or ()
        names = code.co_varnames[: code.co_argcount][-len(defaults) :] if defaults else ()
        keywords = function.__kwdefaults__ or {}
        for name, value in (*zip(names, defaults, strict=True), *keywords.items()):
            yield from _of_value(name, value, depth - 1)


def _of_value(name: str, value: Any, depth: int) -> Iterator[tuple[str, str]]:
    """Yield the digests of the numbers in a value."""
    if depth == 0:
        return
    if isinstance(value, torch.Tensor):
        yield name, printed(value)
    elif isinstance(value, np.ndarray | np.generic | int | float | complex | str | bytes):
        array = np.ascontiguousarray(value)
        contents = hashlib.blake2b(array.tobytes(), digest_size=32).hexdigest()
        yield name, f"{array.dtype} {array.shape} {contents}"
    elif isinstance(value, Mapping):
        for key, one in value.items():
            yield from _of_value(name, key, depth - 1)
            yield from _of_value(name, one, depth - 1)
    elif isinstance(value, list | tuple | set | frozenset):
        for one in value:
            yield from _of_value(name, one, depth - 1)
    elif isinstance(value, FunctionType | MethodType | partial):
        yield from _of_function(value, depth - 1)


def _content(cell: Any) -> Any:
    """Return what a variable of an enclosing function holds; None where it is not set yet."""
    try:
        return cell.cell_contents
    except ValueError:
        return None


def _used_by_form(function: FunctionType) -> frozenset[str]:
    """Return the variables of which a function reads nothing but shape, type and device."""
    uses: dict[str, set[bool]] = {}
    instructions = list(dis.get_instructions(function))
    for one, following in zip(instructions, [*instructions[1:], None], strict=True):
        if one.opname in ("LOAD_DEREF", "LOAD_CLOSURE", "LOAD_CLASSDEREF"):
            by_form = (
                following is not None
                and following.opname in ("LOAD_ATTR", "LOAD_METHOD")
                and str(following.argval) in FORM
            )
            uses.setdefault(str(one.argval), set()).add(by_form)
    return frozenset(name for name, kinds in uses.items() if kinds == {True})
