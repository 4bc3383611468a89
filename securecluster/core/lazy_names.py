"""Packages that load each public name when it is asked for, as their stub lists it.

A stub beside the package (`__init__.pyi`) has lines `from module import name as name`, which type
checkers read, and `attach` as well: so there is one list.
"""

import importlib
from functools import cache

TYPE_CHECKING = False  # as in typing, which takes a while to load
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any


def attach(package: str, file: str) -> "tuple[Callable[[str], Any], dict[str, str]]":
    """Return a package's `__getattr__`, and the module of each of its names.

    Args:
        package: its `__name__`.
        file: its `__file__`, beside which the stub lies.
    """
    homes = _homes(file.removesuffix("c") + "i")

    def load(name: str) -> "Any":
        """Return a public name, whose module is loaded at its first use."""
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        module, own_name = homes[name]
        if module == package:  # a module of the package itself
            return importlib.import_module(f"{module}.{own_name}")
        return getattr(importlib.import_module(module), own_name)

    return load, {name: module for name, (module, _) in homes.items()}


@cache
def _homes(stub: str) -> "dict[str, tuple[str, str]]":
    """Return the module of each name that a stub imports, and its name there."""
    with open(stub, encoding="utf-8") as stream:
        statements = ("\n" + stream.read()).split("\nfrom ")[1:]
    homes: dict[str, tuple[str, str]] = {}
    for statement in statements:
        module, _, imported = statement.partition(" import ")
        if imported.startswith("("):
            names = imported[1:].partition(")")[0]
        else:
            names = imported.partition("\n")[0]
        for entry in names.split(","):
            own_name, _, name = entry.partition("#")[0].strip().partition(" as ")
            if own_name == "*":
                public = importlib.import_module(module).__all__
                homes.update((public_name, (module, public_name)) for public_name in public)
            elif own_name:
                homes[name or own_name] = (module, own_name)
    return homes
