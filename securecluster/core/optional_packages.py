"""Packages that only some uses need, each of which pip installs by its own name."""

from __future__ import annotations

import importlib
import sys
from typing import Any

from securecluster.errors import UsageError

# package to install for each module
_PACKAGES = {
    "pandas": "pandas",
    "pyarrow": "pyarrow",
    "pyarrow.compute": "pyarrow",
    "pyarrow.csv": "pyarrow",
    "pyarrow.parquet": "pyarrow",
    "PIL.Image": "Pillow",
    "datasets": "datasets",
    "openpyxl": "openpyxl",
    "prometheus_client": "prometheus_client",
    "prometheus_client.core": "prometheus_client",
}


def need(module: str) -> Any:
    """Return a module of an optional package.

    Args:
        module: its name, one of `_PACKAGES`.

    Raises:
        UsageError: the package is not installed.
    """
    loaded = sys.modules.get(module)
    if loaded is not None:  # readers of tables ask for each column
        return loaded
    try:
        return importlib.import_module(module)
    except ImportError:
        package = _PACKAGES[module]
        raise UsageError(f"this needs {package}: pip install {package}") from None
