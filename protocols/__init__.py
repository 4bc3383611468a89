"""The published methods, one file or package each. They never import each other.

A class is imported at its first use, so that a command waits for the method that it runs alone.
"""

from securecluster.core.lazy_names import attach

MODULES_APART = True
"""No method's program depends on the modules of others (`securecluster.parties.program`)."""

__getattr__, _HOMES = attach(__name__, __file__)
__all__ = sorted(_HOMES)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
