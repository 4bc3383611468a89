"""What the author of a protocol imports, in one place.

    from securecluster.protocols import authoring as fl

    @fl.protocol
    class MyMethod(fl.ClusteringProtocol): ...

A protocol is a class with `@protocol`, its hyper-parameters as fields, `client` (what clients
answer), `run_server` (the server's loop) and `assign_newcomers`; `ClusterOnce` has the loop of
methods that cluster before any training, `AssignEachRound` that of methods that assign each client
one of k models in every round, and `ModelSetProtocol` what methods share that average k models.
docs/add-a-protocol.md has the steps.

`authoring.pyi` lists the names with the modules that they are from. Each is loaded when it is asked
for, so that a small protocol loads what it uses.
"""

from __future__ import annotations

import ast
import importlib
from pathlib import Path
from typing import Any


def _homes() -> dict[str, tuple[str, str]]:
    """Return the module of each name, and the name that it has there."""
    stub = Path(__file__).with_suffix(".pyi").read_text(encoding="utf-8")
    homes: dict[str, tuple[str, str]] = {}
    for node in ast.parse(stub).body:
        if isinstance(node, ast.ImportFrom):
            for alias in node.names:
                homes[alias.asname or alias.name] = (str(node.module), alias.name)
    return homes


_HOMES = _homes()
__all__ = sorted(_HOMES)


def __getattr__(name: str) -> Any:
    """Return a name of the list."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module, own_name = _HOMES[name]
    found = getattr(importlib.import_module(module), own_name)
    globals()[name] = found
    return found
