"""Variables of an author's modules and classes, which belong to a process and to no client.

What a client keeps there is in no checkpoint, is shared by all clients of a process, and reaches a
later reply or the server without a release.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Iterator, Mapping, Sequence
from types import FunctionType, ModuleType
from typing import Any

from securecluster.protocols.conformance.held_values import numbers_in, printed
from securecluster.protocols.conformance.report import author_files


def author_modules(made: Any) -> list[str]:
    """Return the names of the modules of a protocol's classes that the framework lacks.

    Args:
        made: the protocol.
    """
    files = {str(path) for path in author_files(made)}
    modules = {name: getattr(module, "__file__", None) for name, module in sys.modules.items()}
    return sorted(name for name, file in modules.items() if file in files)


def variables(modules: Sequence[str]) -> dict[str, str]:
    """Return a digest of the numbers in each variable of some modules and of their classes.

    Args:
        modules: their names.
    """
    digests = {}
    for name, value in _named(modules):
        numbers = sorted(printed(number) for number in _numbers(value))
        if numbers:
            digests[name] = hashlib.blake2b("\n".join(numbers).encode()).hexdigest()
    return digests


def changed(imported: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    """Return the names of the variables that are not as they were imported.

    Args:
        imported: digests in a process that has imported the modules, and no more.
        now: digests in a process that has run them.
    """
    return sorted(name for name in {*imported, *now} if imported.get(name) != now.get(name))


def clear_caches(modules: Sequence[str]) -> None:
    """Empty what functions of some modules remember of their calls (`functools.cache`).

    Args:
        modules: their names.
    """
    for _, value in _named(modules):
        clear = getattr(value, "cache_clear", None)
        if callable(clear):
            clear()


def _named(modules: Sequence[str]) -> Iterator[tuple[str, Any]]:
    """Yield the variables of some modules, and of the classes that they define, by their names."""
    for name in modules:
        module = sys.modules[name]
        for key, value in list(vars(module).items()):
            if key.startswith("__") or isinstance(value, ModuleType):
                continue
            if not isinstance(value, type):
                yield f"{name}.{key}", value
            elif value.__module__ == name:
                members = list(vars(value).items())
                yield from (
                    (f"{name}.{key}.{member}", one)
                    for member, one in members
                    if not member.startswith(("__", "_abc"))
                )


def _numbers(value: Any) -> Iterator[Any]:
    """Yield the numbers in a variable, also those in a function's own attributes."""
    value = getattr(value, "__func__", value)  # of a static or a class method
    yield from numbers_in(value)
    if isinstance(value, FunctionType):
        yield from numbers_in(vars(value))
