"""Configuration that the clients and the server of a run agree on, as JSON values."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from securecluster.data import Federation
from securecluster.errors import UsageError


def known(federation: Federation) -> dict[str, Any]:
    """Return the facts about the data that are public in a run.

    These are shapes, classes, objective, number of clients, seed, and names of features if any.

    Args:
        federation: the clients and their data.
    """
    facts: dict[str, Any] = {
        "shape": list(federation.shape),
        "classes": federation.classes,
        "objective": federation.objective.as_json(),
    }
    if federation.feature_names is not None:
        facts["feature_names"] = list(federation.feature_names)
    facts["clients"] = len(federation)
    facts["seed"] = federation.seed
    return facts


def numbers(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return a configuration with NumPy scalars replaced by Python's, which JSON can store."""
    converted = {}
    for name, value in values.items():
        converted[name] = value.item() if isinstance(value, np.generic) else value
    return converted


def check_kind(federation: Any) -> None:
    """Raise UsageError for an object that is not a federation."""
    if not isinstance(federation, Federation):
        raise UsageError(
            f"clients and their data are a Federation, not {type(federation).__name__}: make one "
            "with Federation.from_arrays"
        )
