"""Column names of clients' tables, and the order that all clients' columns are put in."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from securecluster.errors import UsageError

Names = tuple[str, ...]
SHOWN = 5  # names in an error message


def names_of(table: Any) -> Names | None:
    """Return the column names of a table, or None for an array.

    Args:
        table: an array, or any object with `columns` (pandas, polars) or `column_names` (pyarrow).
    """
    labels = getattr(table, "column_names", None)
    if labels is None:
        labels = getattr(table, "columns", None)
    if labels is None or callable(labels):
        return None
    labels = list(labels)
    # pandas numbers columns without names
    if labels == list(range(len(labels))):
        return None
    return tuple(str(label) for label in labels)


def listed(names: Sequence[str], limit: int = SHOWN) -> str:
    """Return names joined for a sentence.

    Args:
        names: to join.
        limit: number of names after which the others are only counted.
    """
    shown = ", ".join(names[:limit])
    if len(names) <= limit:
        return shown
    return f"{shown} and {len(names) - limit} more"


class Columns:
    """Columns that all clients' samples have, in the order of the first client's.

    Attributes:
        names: of the columns, or None if samples are arrays without names.
    """

    def __init__(self) -> None:
        self.names: Names | None = None
        self._first: str | None = None

    def arranged(self, client: str, table: Any, x: NDArray[Any]) -> NDArray[Any]:
        """Return a client's samples (n, …) with columns in the shared order.

        The first client with samples determines the order.

        Args:
            client: its name.
            table: the samples as the user has them, a table or an array.
            x: the same samples as an array (n, …).

        Raises:
            UsageError: a missing, additional or repeated column, or names of only some clients'
                columns.
        """
        client_names = names_of(table)
        if not x.size:
            return x
        if client_names is not None:
            _check_once(client, client_names)
        if self._first is None:
            self._first = client
            self.names = client_names
        if client_names is None and self.names is None:
            return x
        if client_names is None:
            raise _names_of_some(self._first, client)
        if self.names is None:
            raise _names_of_some(client, self._first)
        if client_names == self.names:
            return x
        refusal = f"the columns of client {client!r} differ from those of {self._first!r}"
        return x[:, order(client_names, self.names, refusal)]


def _names_of_some(named_client: str, unnamed_client: str) -> UsageError:
    """Return the error for two clients of which one has names of columns."""
    return UsageError(
        f"the columns of client {named_client!r} have names and those of {unnamed_client!r} have "
        "none: give tables for all clients, training and test alike, or arrays for all"
    )


def order(current: Sequence[str], target: Sequence[str], refusal: str) -> list[int]:
    """Return the positions of columns that puts them in another order.

    Args:
        current: names in the present order.
        target: names in the new order.
        refusal: beginning of the error message.

    Returns:
        The position in `current` of each name in `target`.

    Raises:
        UsageError: a missing or an additional column.
    """
    missing = [name for name in target if name not in current]
    extra = [name for name in current if name not in target]
    faults = []
    if missing:
        faults.append(f"lacks {listed(missing)}")
    if extra:
        faults.append(f"has {listed(extra)} besides")
    if faults:
        raise UsageError(f"{refusal}: it {' and '.join(faults)}")
    position = {name: k for k, name in enumerate(current)}
    return [position[name] for name in target]


def _check_once(client: str, names: Sequence[str]) -> None:
    """Raise UsageError for two columns of one name."""
    repeated = [name for name, count in Counter(names).items() if count > 1]
    if repeated:
        raise UsageError(f"client {client!r} has two columns {repeated[0]!r}: rename one")


def reordered(x: NDArray[Any], positions: Sequence[int]) -> NDArray[Any]:
    """Return samples with their columns in another order.

    Args:
        x: samples (n, k).
        positions: of the columns in `x`, in the new order.
    """
    # empty arrays may lack the second dimension
    if not x.size:
        return x
    return np.ascontiguousarray(x[:, list(positions)])
