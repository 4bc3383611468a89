"""Combinations of protocols and protections that run, as the protocols themselves say, and few of
them that cover the rest.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import combinations
from typing import Any

import cases

from securecluster.cli.compatibility import DEFAULT, OPTIONS, Values, cells, methods, refusal
from securecluster.errors import UsageError

NAMES = list(OPTIONS)
Cell = tuple[str, Values]
Feature = tuple[object, ...]

# methods by their names in the table; their small parameters are those of `cases`
NAMED = {
    "cfl --sketch 256": "cfl sketch",
    "cfl --signature gradient": "cfl signature",
    "srfca --distance l2": "srfca l2",
}


def running() -> list[Cell]:
    """Return all cells of the table that are not refused."""
    return [(m, values) for m in methods() for values in cells() if refusal(m, values) is None]


def params_of(values: Values) -> dict[str, Any]:
    """Return the hyper-parameters of one value of each option."""
    params: dict[str, Any] = {}
    for option, value in zip(NAMES, values, strict=True):
        params.update(OPTIONS[option][value])
    return params


def variants_with_one_protection(names: Sequence[str]) -> list[Cell]:
    """Return the cells of variants in which one option at most is not the default.

    Masks stay as they are: those of the table have each under every method.

    Args:
        names: of `cases.VARIANTS`.
    """
    found = []
    for name in names:
        for values in cells():
            changed = [
                option
                for option, value, usual in zip(NAMES, values, DEFAULT, strict=True)
                if value != usual
            ]
            if len(changed) > 1 or changed == ["mask"]:
                continue
            try:
                cases.variant(name, **params_of(values)).check(6)
            except UsageError:
                continue
            found.append((name, values))
    return found


def values_of(cell: Cell) -> set[Feature]:
    """Return the values that a cell has, without its method."""
    return set(zip(NAMES, cell[1], strict=True))


def pairs_of(cell: Cell) -> set[Feature]:
    """Return the pairs of values that a cell has; the method is one of them."""
    method, values = cell
    entries = [("method", method), *zip(NAMES, values, strict=True)]
    return set(combinations(entries, 2))


def covering(found: list[Cell], features: Callable[[Cell], set[Feature]] = pairs_of) -> list[Cell]:
    """Return few cells that together have every feature of the others, found greedily.

    Args:
        found: the cells.
        features: of a cell.
    """
    missing: set[Feature] = set()
    for cell in found:
        missing |= features(cell)
    chosen: list[Cell] = []
    while missing:
        best = max(found, key=lambda cell: len(features(cell) & missing))
        chosen.append(best)
        missing -= features(best)
    return chosen


RUNNING = running()
COVERING = covering(RUNNING)
