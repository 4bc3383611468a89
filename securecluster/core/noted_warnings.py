"""Warnings of this package, sent to a callback."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from securecluster.errors import SecureClusterWarning


@contextmanager
def noted(note: Callable[[str], None]) -> Iterator[None]:
    """Send the warnings of this package within the context to a callback, at its end.

    Args:
        note: called with the sentence of each warning. Other warnings stay warnings.
    """
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", SecureClusterWarning)
        yield
    for warning in caught:
        if issubclass(warning.category, SecureClusterWarning):
            note(str(warning.message))
        else:
            warnings.warn_explicit(
                warning.message, warning.category, warning.filename, warning.lineno
            )
