"""Which of a client's rows are held out: by its own rows alone, whoever else takes part."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from numbers import Real
from typing import Any

import numpy as np
from numpy.random import Generator
from numpy.typing import NDArray

from securecluster.errors import UsageError

Rows = NDArray[np.int64]
VALUES = ("rows", "groups", "time")  # fields that have a value for each row
# words of a column that says which rows are held out
WORDS = {
    **dict.fromkeys(("true", "1", "1.0", "yes", "test"), True),
    **dict.fromkeys(("false", "0", "0.0", "no", "train"), False),
}


@dataclass(frozen=True)
class Split:
    """Which rows of each client are held out.

    By default they are drawn at random, stratified by label as scikit-learn's
    `StratifiedShuffleSplit` does; a class with one row at a client stays in training, unless all
    classes have one.
    Sequences are held out from the end. Of `rows`, `groups` and `time` one may be given: a column
    of the table, which is no feature then; of arrays a mapping with each client's values (n,).

    Args:
        share: of the rows, or of the groups, that are held out, in [0, 1).
        rows: True where a row is held out. A column may say true and false, 1 and 0, yes and no,
            or test and train.
        groups: rows of one group, such as a patient, are never on both sides (scikit-learn's
            `GroupShuffleSplit`); of two groups or more at least one is held out.
        time: numbers or dates, of which the last are held out.
        stratify: False draws rows without regard to their labels, so that which rows are held out
            depends on their number alone.
    """

    share: float = 0.2
    rows: Any = None
    groups: Any = None
    time: Any = None
    stratify: bool = True

    def __post_init__(self) -> None:
        if not isinstance(self.share, Real) or not 0 <= self.share < 1:
            raise UsageError(
                f"the share of rows that are held out is {self.share!r}: give a number from 0 to "
                "less than 1"
            )
        if len(self.given) > 1:
            raise UsageError(
                f"{' and '.join(self.given)} both say which rows are held out: give one of them"
            )

    @classmethod
    def chosen(cls, test: Any) -> Split:
        """Return the split of a user's choice.

        Args:
            test: a split, a share, or a column or arrays of booleans; None for the default.
        """
        if isinstance(test, Split):
            return test
        if test is None:
            return cls()
        if isinstance(test, Real) and not isinstance(test, bool):
            return cls(share=float(test))
        return cls(rows=test)

    @property
    def given(self) -> list[str]:
        """Return which of the fields that have a value for each row are given; one at most."""
        return [name for name in VALUES if getattr(self, name) is not None]

    @property
    def column(self) -> str | None:
        """Return the column that the split follows from; None for values, or for none."""
        names = [getattr(self, name) for name in self.given]
        return names[0] if names and isinstance(names[0], str) else None

    def with_values(self, values: Any) -> Split:
        """Return the split with other values in place of those given.

        Args:
            values: of rows: a mapping by client, or those (n,) of one client.
        """
        return replace(self, **dict.fromkeys(self.given, values))

    def values_of(self, name: str, size: int) -> NDArray[Any]:
        """Return the values that are given as an array (n,).

        Args:
            name: of the client or the table, for errors.
            size: how many rows it has.

        Raises:
            UsageError: another number of values.
        """
        values = np.asarray(getattr(self, self.given[0]))
        if values.shape != (size,):
            raise UsageError(
                f"{self.given[0]} of the test rows has the shape {values.shape}, and {name} "
                f"{size} rows: give a value for each"
            )
        return values

    def sides(self, name: str, labels: NDArray[Any] | None, draw: Generator) -> tuple[Rows, Rows]:
        """Return the rows of one client to train on, and those held out.

        Args:
            name: of the client, for errors.
            labels: (n,) classes of its rows, or (n, …) targets of another kind.
            draw: the client's own random stream.

        Raises:
            UsageError: values that say nothing of some rows.
        """
        assert labels is not None
        size = len(labels)
        if self.rows is not None:
            return _parted(_held(name, self.values_of(name, size)))
        if self.groups is not None:
            return _parted(self._of_groups(name, size, draw))
        if self.time is not None:
            return _parted(self._last(name, size))
        return self._drawn(labels, draw)

    def _count(self, size: int) -> int:
        """Return how many of some rows are held out, without the rounding of their product."""
        return math.floor(self.share * size + 1e-9)

    def _drawn(self, labels: NDArray[Any], draw: Generator) -> tuple[Rows, Rows]:
        size = len(labels)
        order = draw.permutation(size)
        count = self._count(size)
        if not self.stratify or not size:
            return order[: size - count], order[size - count :]
        # the rows of each class one after another, in the order drawn
        drawn = labels[order].reshape(size)
        by_class = np.argsort(drawn, kind="stable")
        in_classes = drawn[by_class]
        changes = np.flatnonzero(in_classes[1:] != in_classes[:-1]) + 1
        starts, ends = np.append(0, changes), np.append(changes, size)
        if len(starts) == size:
            return order[: size - count], order[size - count :]
        # classes in the order of their first rows, which breaks ties without regard to their names
        classes = np.argsort(by_class[starts])
        held = np.zeros(size, bool)
        of_classes = class_counts((ends - starts)[classes], count)
        for end, of_class in zip(ends[classes].tolist(), of_classes.tolist(), strict=True):
            held[by_class[end - of_class : end]] = True
        return order[~held], order[held]

    def _of_groups(self, name: str, size: int, draw: Generator) -> NDArray[np.bool_]:
        values = self.values_of(name, size)
        try:
            distinct, positions = np.unique(values, return_inverse=True)
        except TypeError:
            raise UsageError(
                f"{name}: groups of its test rows hold values of several types, or empty "
                "ones: give text or whole numbers"
            ) from None
        count = min(math.ceil(self.share * len(distinct) - 1e-9), len(distinct) - 1)
        chosen = draw.permutation(len(distinct))[:count]
        held: NDArray[np.bool_] = np.isin(positions.reshape(-1), chosen)
        return held

    def _last(self, name: str, size: int) -> NDArray[np.bool_]:
        values = self.values_of(name, size)
        if values.dtype.kind not in "biufM" or (values != values).any():  # NaN and NaT differ
            raise UsageError(
                f"{name}: time of its test rows holds something else than numbers and "
                "dates, or empty cells: give one for each row"
            )
        held = np.zeros(size, bool)
        held[np.argsort(values, kind="stable")[size - self._count(size) :]] = True
        return held


FIFTH = Split()  # of each client's rows, stratified


def class_counts(counts: NDArray[Any], size: int) -> NDArray[np.int64]:
    """Return how many rows of each class are held out, (k,), by the largest remainders.

    Args:
        counts: (k,) rows of each class, ties in favour of the first.
        size: rows that are held out in all, at most: one of each class is trained on.
    """
    shared = np.where(counts > 1, counts, 0)
    total = max(1, int(shared.sum()))
    size = min(size, int(shared.sum()))
    held = shared * size // total
    by_remainder = np.argsort(-(shared * size % total), kind="stable")
    held[by_remainder[: size - held.sum()]] += 1
    least: NDArray[np.int64] = np.minimum(held, np.maximum(counts - 1, 0))
    return least


def _held(name: str, values: NDArray[Any]) -> NDArray[np.bool_]:
    """Return whether each row is held out, by a column's words."""
    if values.dtype == bool:
        return values
    distinct, positions = np.unique(values.astype(str), return_inverse=True)
    sides = [WORDS.get(word.strip().lower()) for word in distinct]
    if None in sides:
        raise UsageError(
            f"{name}: {str(distinct[sides.index(None)])!r} does not say whether a row is "
            "held out: write true and false, 1 and 0, yes and no, or test and train"
        )
    held: NDArray[np.bool_] = np.array(sides, bool)[positions.reshape(-1)]
    return held


def _parted(held: NDArray[np.bool_]) -> tuple[Rows, Rows]:
    """Return the positions of rows that are not held out, and of those that are."""
    return np.flatnonzero(~held), np.flatnonzero(held)
