"""Clients' data: sources, scenarios that deal them, and the federation they make."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from securecluster.data.datasets import SOURCES, Source
    from securecluster.data.federation import Federation, Shard
    from securecluster.data.scenarios import (
        SCENARIOS,
        ClientDirichlet,
        Combined,
        Dirichlet,
        Iid,
        Inversion,
        LabelPermutation,
        LabelSplit,
        LabelSwap,
        Natural,
        Pathological,
        Rotation,
        Scenario,
        Tasks,
        Topics,
    )

__all__ = [
    "SCENARIOS",
    "SOURCES",
    "ClientDirichlet",
    "Combined",
    "Dirichlet",
    "Federation",
    "Iid",
    "Inversion",
    "LabelPermutation",
    "LabelSplit",
    "LabelSwap",
    "Natural",
    "Pathological",
    "Rotation",
    "Scenario",
    "Shard",
    "Source",
    "Tasks",
    "Topics",
]
_HOMES = {
    "SOURCES": "datasets",
    "Source": "datasets",
    "Federation": "federation",
    "Shard": "federation",
}


def __getattr__(name: str) -> Any:
    """Return a public name, whose module is loaded when it is asked for."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    home = _HOMES.get(name, "scenarios")
    return getattr(importlib.import_module(f"{__name__}.{home}"), name)
