"""Entry points of installed packages, loaded or refused in one sentence."""

from __future__ import annotations

from importlib.metadata import EntryPoint
from typing import Any

from securecluster.errors import SecureClusterError, UsageError


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
