"""Packages that only some uses need, all of which one extra installs (`data` in pyproject.toml)."""

from __future__ import annotations

import importlib
import sys
from typing import Any

from securecluster.errors import UsageError

INSTALL = "pip install 'securecluster[data]'"
EXCEL = "openpyxl"  # which an extra of its own installs

# package to install for each module
_PACKAGES = {
    "pandas": "pandas",
    "pyarrow": "pyarrow",
    "pyarrow.compute": "pyarrow",
    "pyarrow.csv": "pyarrow",
    "pyarrow.parquet": "pyarrow",
    "PIL.Image": "Pillow",
    "datasets": "datasets",
    EXCEL: EXCEL,
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
        install = INSTALL.replace("data", "excel") if module == EXCEL else INSTALL
        raise UsageError(f"this needs {_PACKAGES[module]}: {install}") from None
