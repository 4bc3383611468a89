"""Configuration that the clients and the server of a run agree on, as JSON values."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from securecluster.errors import UsageError
from securecluster.models.objectives import Binary

if TYPE_CHECKING:
    from securecluster.data.facts import Facts


def known(facts: Facts) -> dict[str, Any]:
    """Return the facts about the data that are public in every run.

    These are shapes, classes, objective, number of clients, seed, and names of features and
    classes and a scaling if there are any.

    Args:
        facts: of the clients and their data.
    """
    public: dict[str, Any] = {
        "shape": list(facts.shape),
        "classes": facts.classes,
        "objective": facts.objective.as_json(),
    }
    if facts.feature_names is not None:
        public["feature_names"] = list(facts.feature_names)
    if facts.class_names is not None:
        public["class_names"] = list(facts.class_names)
    if facts.scaling is not None:
        public["scaling"] = dict(facts.scaling)
    public["clients"] = facts.clients
    public["seed"] = facts.seed
    return public


def classes_of(config: Mapping[str, Any]) -> NDArray[Any]:
    """Return the labels in the order of the network's outputs, (classes,).

    Args:
        config: what clients and server agreed on.

    Returns:
        The classes' names, or the numbers from 0 where they have none; two of a binary task, which
        has one output for them. Of other targets these are their columns' names, or numbers.
    """
    names = config.get("class_names")
    if names is None:
        return np.arange(config["classes"] + (config["objective"]["kind"] == Binary.kind))
    return np.asarray(names)


def numbers(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return a configuration with NumPy scalars replaced by Python's, which JSON can store."""
    converted = {}
    for name, value in values.items():
        converted[name] = value.item() if isinstance(value, np.generic) else value
    return converted


def check_kind(federation: Any) -> None:
    """Raise UsageError for an object that is not a federation."""
    from securecluster.data.federation import Federation

    if not isinstance(federation, Federation):
        raise UsageError(
            f"clients and their data are a Federation, not {type(federation).__name__}: make one "
            "with Federation.from_frame, from_csv or from_arrays, or say whose each sample is, "
            "fit(X, y, groups=...)"
        )
