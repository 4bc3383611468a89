"""Numbers that a function holds: of the variables around it, of its defaults, of a partial.

A function that post-processes released numbers uses these alone. A tensor or a number that it holds
beside them may be of data, also where its result does not show it with the data at hand.
"""

from __future__ import annotations

import dis
import hashlib
import sys
from collections import deque
from collections.abc import Iterator, Mapping
from functools import partial
from types import FunctionType, MethodType, ModuleType, SimpleNamespace
from typing import Any

import numpy as np

from securecluster.core.lazy_torch import torch
from securecluster.privacy.dp.noise_streams import digest
from securecluster.protocols import authoring as fl

DEEPEST = 6  # containers, objects and functions within each other
# whose objects are not looked into
FRAMEWORKS = frozenset({"securecluster", "torch", "numpy"}) | sys.stdlib_module_names
READS = ("LOAD_DEREF", "LOAD_CLASSDEREF", "LOAD_CLOSURE")
# What says nothing of a tensor's values: attributes of its form, and what takes the form of another
FORM = frozenset({"shape", "dtype", "device", "ndim", "size", "dim", "numel"})
OF_ANOTHER = frozenset(
    {"len", "to", "type_as", "view_as", "reshape_as", "expand_as"}
    | {"zeros_like", "ones_like", "empty_like"}
)
Held = Iterator[tuple[str, Any]]
NUMBERS = (np.ndarray, np.generic, int, float, complex, str, bytes)


def held_values(function: Any) -> Iterator[tuple[str, str]]:
    """Yield the name and the digest of each number or tensor that a function holds.

    Args:
        function: of released numbers.
    """
    for name, value in _of_function(function):
        for number in numbers_in(value):
            yield name, printed(number)


def printed(value: Any) -> str:
    """Return a digest of the bytes of a tensor, an array or a number, with its type and shape.

    Args:
        value: on any device.
    """
    if isinstance(value, torch.Tensor):
        return f"{value.dtype} {tuple(value.shape)} {digest(value).hex()}"
    array = np.ascontiguousarray(value)
    contents = hashlib.blake2b(array.tobytes(), digest_size=32).hexdigest()
    return f"{array.dtype} {array.shape} {contents}"


def _of_function(function: Any) -> Held:
    """Yield the name and the value of what a function, a partial or a method holds.

    The object of a method is left out: a client holds all of its data.
    """
    if isinstance(function, partial):
        yield from ((f"argument {n}", value) for n, value in enumerate(function.args))
        yield from function.keywords.items()
        yield from _of_function(function.func)
    elif isinstance(function, MethodType):
        yield from _of_function(function.__func__)
    elif isinstance(function, FunctionType):
        yield from _around(function)
        yield from _defaults(function)
    elif _is_own(function):
        yield from vars(function).items()


def _is_own(value: Any) -> bool:
    """Return whether a value is an object of an author's class, but no client."""
    value_type = type(value)
    if value_type is SimpleNamespace:
        return True
    if isinstance(value, type | ModuleType | fl.TrainingClient) or not hasattr(value, "__dict__"):
        return False
    return value_type.__module__.partition(".")[0] not in FRAMEWORKS


def _around(function: FunctionType) -> Held:
    """Yield the variables of enclosing functions whose values a function may use."""
    by_form = _used_by_form(function)
    cells = function.__closure__ or ()
    for name, cell in zip(function.__code__.co_freevars, cells, strict=True):
        try:
            value = cell.cell_contents
        except ValueError:  # not set yet
            continue
        if name not in by_form:
            yield name, value


def _defaults(function: FunctionType) -> Held:
    """Yield the parameters of a function that have a default, with it."""
    code = function.__code__
    defaults = function.__defaults__ or ()
    first = code.co_argcount - len(defaults)
    yield from zip(code.co_varnames[first : code.co_argcount], defaults, strict=True)
    yield from (function.__kwdefaults__ or {}).items()


def _used_by_form(function: FunctionType) -> frozenset[str]:
    """Return the variables of which a function reads nothing but shape, type and device."""
    uses: dict[str, set[bool]] = {}
    instructions = list(dis.get_instructions(function))
    for n, one in enumerate(instructions):
        if one.opname not in READS:
            continue
        before = str(instructions[n - 1].argval) if n else ""
        following = instructions[n + 1]
        attribute = following.opname in ("LOAD_ATTR", "LOAD_METHOD")
        by_form = attribute and str(following.argval) in FORM
        uses.setdefault(str(one.argval), set()).add(by_form or before in OF_ANOTHER)
    return frozenset(name for name, kinds in uses.items() if kinds == {True})


def numbers_in(
    value: Any, depth: int = DEEPEST, visited: dict[int, Any] | None = None
) -> Iterator[Any]:
    """Yield the tensors, arrays and numbers in a value, also those that a function in it holds.

    Args:
        value: anything; a client, and objects of a framework, are not looked into.
        depth: of containers, objects and functions within each other.
        visited: those that were looked into, each of them once, by identity.
    """
    visited = {} if visited is None else visited
    if isinstance(value, np.ndarray) and value.dtype.hasobject:
        value = value.tolist()
    if isinstance(value, (torch.Tensor, *NUMBERS)):
        yield value
        return
    if isinstance(value, fl.Rows):
        yield value.values
        return
    if id(value) in visited or not depth:
        return
    visited[id(value)] = value
    inner: list[Any] = []
    if isinstance(value, Mapping):
        inner = [*value, *value.values()]
    elif isinstance(value, list | tuple | set | frozenset | deque):
        inner = list(value)
    else:
        inner = [one for _, one in _of_function(value)]
    for one in inner:
        yield from numbers_in(one, depth - 1, visited)
