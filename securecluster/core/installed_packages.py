"""Entry points of installed packages, and classes of the user's own modules.

Either is loaded, or refused in one sentence.
"""

from __future__ import annotations

import sys
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

from securecluster.errors import SecureClusterError, UsageError, text_of


def declaration(category: str, point: EntryPoint) -> str:
    """Return the beginning of a sentence on an entry point.

    Args:
        category: what it stands for, such as "attack".
        point: the entry point.
    """
    return f"the {category} {point.name!r}, which is declared as {point.value}"


def load(category: str, point: EntryPoint) -> Any:
    """Return what an entry point leads to.

    Args:
        category: what it stands for, such as "attack".
        point: the entry point.

    Raises:
        UsageError: it cannot be imported.
    """
    try:
        return point.load()
    except SecureClusterError:  # a mistake in the module, which the error names
        raise
    except Exception as error:  # anything that a module of somebody else's raises
        raise UsageError(
            f"{declaration(category, point)}, cannot be imported ({error}): correct the entry "
            "point, or install the package again"
        ) from None


def of_path(category: str, path: str, group: str) -> EntryPoint:
    """Return a class of a module, which may lie in the current folder, as an entry point.

    Args:
        category: what it stands for, such as "attack".
        path: "module:Class".
        group: of entry points that stand for the same.

    Returns:
        Under the name that the class has, or its path where it has none.

    Raises:
        UsageError: it cannot be imported.
    """
    folder = str(Path.cwd())
    if folder not in sys.path:
        sys.path.insert(0, folder)
    try:
        loaded = EntryPoint(path, path, group).load()
    except SecureClusterError:  # a mistake in the class, which the error names
        raise
    except Exception as error:  # anything that a module of somebody else's raises
        raise UsageError(
            f"the {category} {path} cannot be imported ({type(error).__name__}: {text_of(error)}): "
            "correct the module, or its name, as my_module:MyClass"
        ) from None
    return EntryPoint(getattr(loaded, "name", path), path, group)
