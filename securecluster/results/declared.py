"""Scores and report fields that installed packages declare.

    [project.entry-points."securecluster.scores"]
    top_2 = "my_package:top_2"

    [project.entry-points."securecluster.fields"]
    rounds_to_90 = "my_package:rounds_to_90"

A score is a function of one client's targets (n, …) and what its model predicts for them, the
probabilities of classes (n, classes) or values; it returns a number, or NaN where it has none. It
stands beside this project's scores, with that of the client's baseline. A report field is a
function of a `FittedRun`, whose value JSON can hold: it stands in result.json under `fields`, and
numbers are columns of studies, too. Both are the observer's, and no ε covers them.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

from securecluster.core.installed_packages import Parts
from securecluster.errors import SecureClusterError, UsageError, text_of

# names of their own are columns, so that none may hide one of a study
TAKEN = frozenset({"ari", "bytes", "client", "clusters", "cluster", "samples", "seed", "status"})
SCORES = Parts("score", "securecluster.scores", TAKEN)
FIELDS = Parts("report field", "securecluster.fields", TAKEN)


def check_declared() -> None:
    """Load all scores and report fields, so that a run does not end with a broken one.

    Raises:
        UsageError: one cannot be imported, is no function, or has no name for a column.
    """
    for parts in (SCORES, FIELDS):
        for name in parts.declared():
            _function(parts, name)


def own_scores(y: Any, predicted: Any) -> dict[str, float]:
    """Return the scores of packages of one client, by name.

    Args:
        y: targets, (n, …).
        predicted: probabilities, or values.

    Raises:
        UsageError: a score fails, or is no number.
    """
    return {name: float(_value(SCORES, name, float, y, predicted)) for name in SCORES.declared()}


def own_fields(fitted: Any) -> dict[str, Any]:
    """Return the report fields of packages, by name.

    Args:
        fitted: a `FittedRun`.

    Raises:
        UsageError: a field fails, or has a value that JSON cannot hold.
    """
    return {name: _value(FIELDS, name, json.dumps, fitted) for name in FIELDS.declared()}


def numbers_of(fields: Mapping[str, Any]) -> dict[str, float]:
    """Return the report fields that are numbers, as columns of studies.

    Args:
        fields: as `own_fields` returns them.
    """
    return {n: float(v) for n, v in fields.items() if isinstance(v, int | float)}


def _value(parts: Parts, name: str, check: Callable[[Any], Any], *arguments: Any) -> Any:
    """Return what a function of a package returns.

    Args:
        parts: scores, or fields.
        name: of the function.
        check: fails for what it must not return.
        arguments: of the function.
    """
    declaration, function = _function(parts, name)
    try:
        value = function(*arguments)
        check(value)
    except SecureClusterError:
        raise
    except Exception as error:  # anything that a function of somebody else's raises
        raise UsageError(
            f"{declaration}, fails ({type(error).__name__}: {text_of(error)}): correct it, or "
            "uninstall its package"
        ) from None
    return value


def _function(parts: Parts, name: str) -> tuple[str, Any]:
    """Return the beginning of a sentence on a function, and the function.

    Raises:
        UsageError: it cannot be imported, is no function, or has no name for a column.
    """
    declaration, function = parts.loaded(parts.point(name))
    if not callable(function):
        raise UsageError(f"{declaration}, is no function: name one")
    if not name.isidentifier():
        raise UsageError(f"{declaration}, heads a column: take letters, digits and _ for its name")
    return declaration, function
