"""What client and server of a run agree on, as JSON has it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from securecluster.data import Federation
from securecluster.errors import UsageError


def known(federation: Federation) -> dict[str, Any]:
    """What everyone knows of the data."""
    shape = {
        "shape": list(federation.shape),
        "classes": federation.classes,
        "objective": federation.objective.as_json(),
    }
    named = (
        {}
        if federation.feature_names is None
        else {"feature_names": list(federation.feature_names)}
    )
    return {**shape, **named, "clients": len(federation), "seed": federation.seed}


def numbers(values: Mapping[str, Any]) -> dict[str, Any]:
    """A configuration's values as JSON has them."""
    return {
        name: value.item() if isinstance(value, np.generic) else value
        for name, value in values.items()
    }


def check_kind(given: Any) -> None:
    """Raise UsageError for what is no federation."""
    if not isinstance(given, Federation):
        raise UsageError(
            f"clients and their data are a Federation, not {type(given).__name__}: make one with "
            "Federation.from_arrays"
        )
