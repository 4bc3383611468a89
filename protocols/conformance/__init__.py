"""What every protocol must keep: `check` runs all checks, each with a sentence.

Single checks are functions that take a way to make a protocol, for tests of one's own; they raise
`ConformanceError`, an AssertionError, with a sentence that says what to do.
"""

from securecluster.core.lazy_names import attach

__getattr__, _HOMES = attach(__name__, __file__)
__all__ = sorted(_HOMES)
