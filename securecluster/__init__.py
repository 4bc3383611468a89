"""Privacy-focused secure clustering for federated learning.

from securecluster import Federation, LabelSwap
from securecluster.protocols import CFL
"""

from __future__ import annotations

import importlib
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from securecluster.data import (
        Dirichlet,
        Federation,
        Iid,
        Inversion,
        LabelPermutation,
        LabelSplit,
        LabelSwap,
        Natural,
        Pathological,
        Rotation,
        Tasks,
    )
    from securecluster.errors import SecureClusterError

try:
    __version__ = version("securecluster")
except PackageNotFoundError:  # a checkout that was never installed
    __version__ = "0+unknown"

__all__ = [
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
    "SecureClusterError",
    "Tasks",
    "__version__",
]


def __getattr__(name: str) -> Any:
    """Import a public name when it is first used, so that the command line is there before numpy is."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    home = "securecluster.errors" if name == "SecureClusterError" else "securecluster.data"
    return getattr(importlib.import_module(home), name)


def __dir__() -> list[str]:
    return sorted(__all__)
