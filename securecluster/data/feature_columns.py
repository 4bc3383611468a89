"""Names of columns: their order, and refusals of tables that lack one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from securecluster.errors import UsageError

Names = tuple[str, ...]
SHOWN = 5


def names_of(given: Any) -> Names | None:
    """Return the column names of a table, or None for an array.

    A table is whatever has `columns` (pandas, polars) or `column_names` (pyarrow). The numbers 0,
    1, … that pandas gives to columns without names are no names.
    """
    labels = getattr(given, "column_names", None)
    if labels is None:
        labels = getattr(given, "columns", None)
    if labels is None or callable(labels):
        return None
    labels = list(labels)
    if labels == list(range(len(labels))):
        return None
    return tuple(str(label) for label in labels)


def listed(names: Sequence[str], most: int = SHOWN) -> str:
    """Return names for a sentence, the first few of many."""
    shown = ", ".join(names[:most])
    if len(names) <= most:
        return shown
    return f"{shown} and {len(names) - most} more"


class Columns:
    """The columns that all clients' samples have; the order of the first client rules.

    Attributes:
        names: the column names, or None where samples are arrays without names.
    """

    def __init__(self) -> None:
        self.names: Names | None = None
        self._first: str | None = None

    def arranged(self, client: str, given: Any, x: NDArray[Any]) -> NDArray[Any]:
        """Return the samples `x` (n, …) of a table or array with columns in the shared order.

        Raises:
            UsageError: a column is missing, is one too many or occurs twice, or only some have
                names.
        """
        own = names_of(given)
        if not x.size:
            return x
        if own is not None:
            _check_once(client, own)
        if self._first is None:
            self._first = client
            self.names = own
        if (own is None) != (self.names is None):
            named, plain = self._first, client
            if own:
                named, plain = client, self._first
            raise UsageError(
                f"the columns of client {named!r} have names and those of {plain!r} have none:"
                " give tables for all clients, training and test alike, or arrays for all"
            )
        if own is None or self.names is None or own == self.names:
            return x
        differ = f"the columns of client {client!r} differ from those of {self._first!r}"
        return x[:, order(own, self.names, differ)]


def order(own: Sequence[str], wanted: Sequence[str], differ: str) -> list[int]:
    """Return the positions in `own` of the `wanted` columns.

    Args:
        differ: how the refusal begins.

    Raises:
        UsageError: a column is missing, or one too many.
    """
    missing = [name for name in wanted if name not in own]
    extra = [name for name in own if name not in wanted]
    faults = []
    if missing:
        faults.append(f"lacks {listed(missing)}")
    if extra:
        faults.append(f"has {listed(extra)} besides")
    if faults:
        raise UsageError(f"{differ}: it {' and '.join(faults)}")
    position = {name: k for k, name in enumerate(own)}
    return [position[name] for name in wanted]


def _check_once(client: str, names: Sequence[str]) -> None:
    """Raise UsageError for two columns of one name."""
    twice = [name for name, count in Counter(names).items() if count > 1]
    if twice:
        raise UsageError(f"client {client!r} has two columns {twice[0]!r}: rename one")


def reordered(x: NDArray[Any], places: Sequence[int]) -> NDArray[Any]:
    """Return samples (n, k) with their columns at other places."""
    if not x.size:
        return x
    return np.ascontiguousarray(x[:, list(places)])
