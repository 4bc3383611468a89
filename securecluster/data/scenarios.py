"""Registry of scenarios, which describe how the distributions of clients' data differ."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any

from securecluster.data.datasets import Source
from securecluster.data.label_skew import (
    ClientDirichlet,
    Dirichlet,
    LabelSplit,
    Pathological,
    Tasks,
)
from securecluster.data.partitioners import Iid, Natural
from securecluster.data.scenario_base import (
    Combined,
    Part,
    Partition,
    Partitioner,
    Scenario,
    Transform,
    arrange,
)
from securecluster.data.topics import Topics
from securecluster.data.transforms import Inversion, LabelPermutation, LabelSwap, Rotation
from securecluster.errors import UsageError, unknown

SCENARIOS: dict[str, type[Part]] = {
    scenario_type.name: scenario_type
    for scenario_type in (
        Iid,
        LabelSwap,
        LabelPermutation,
        Rotation,
        Inversion,
        Pathological,
        Dirichlet,
        ClientDirichlet,
        LabelSplit,
        Tasks,
        Natural,
        Topics,
    )
}
# names of scenarios' fields in error messages
_WORDS = {
    "alpha": "alpha",
    "labels": "labels per client",
    "minority": "minority",
    "sizes": "task sizes",
    "overlap": "overlap",
}


def scenario(text: str, clusters: int | None = None, **options: Any) -> Scenario:
    """Return the named scenario, or the combination of names joined by "+".

    Args:
        text: the name, or names.
        clusters: number of true clusters of the transform, or of the partitioner if there is no
            transform; None is the default of the scenario.
        options: fields of the scenario (alpha, labels, minority, sizes, overlap); those that are
            None keep their defaults.

    Raises:
        UsageError: an unknown name, or a field that the scenario does not have.
    """
    names = [name.strip() for name in text.split("+")]
    for name in names:
        if name not in SCENARIOS:
            raise unknown("scenario", name, SCENARIOS)
    types = [SCENARIOS[name] for name in names]
    fields = {name: value for name, value in options.items() if value is not None}
    has_partitioner = any(issubclass(item, Partitioner) for item in types)
    if "overlap" in fields and not has_partitioner:
        types.append(Iid)  # the default partitioner of transforms, which then has the overlap
    arguments: list[dict[str, Any]] = [{} for _ in types]
    if clusters is not None:
        arguments[_position_with_clusters(text, types)]["clusters"] = clusters
    for name, value in fields.items():
        arguments[_position_with_field(text, types, name)][name] = value
    members = []
    for scenario_type, keywords in zip(types, arguments, strict=True):
        members.append(scenario_type(**keywords))
    if len(members) == 1:
        return members[0]
    return Combined(tuple(members))


def has_options(name: str, options: Iterable[str]) -> bool:
    """Return True if a scenario has all of some fields.

    Args:
        name: of the scenario.
        options: names of the fields.
    """
    for option in options:
        # every scenario can be combined with a partitioner that has an overlap
        if option != "overlap" and not _has_field(SCENARIOS[name], option):
            return False
    return True


def _has_field(scenario_type: type[Part], name: str) -> bool:
    fields = dataclasses.fields(scenario_type)  # type: ignore[arg-type]
    return name in {field.name for field in fields}


def _position_with_field(text: str, types: list[type[Part]], name: str) -> int:
    """Return the position of the first scenario that has a field.

    Args:
        text: the user's text, for errors.
        types: of the combined scenarios.
        name: of the field.
    """
    for position, scenario_type in enumerate(types):
        if _has_field(scenario_type, name):
            return position
    alternatives = [other for other in SCENARIOS if _has_field(SCENARIOS[other], name)]
    names = ", ".join(alternatives)
    word = _WORDS.get(name, name)
    raise UsageError(f"scenario {text!r} has no {word}: leave it out, or use {names}")


def _position_with_clusters(text: str, types: list[type[Part]]) -> int:
    """Return the position of the scenario that a number of clusters is for.

    It is the transform, or the partitioner if there is no transform.

    Args:
        text: the user's text, for errors.
        types: of the combined scenarios.
    """
    transforms = [k for k, item in enumerate(types) if issubclass(item, Transform)]
    if len(transforms) > 1:
        raise UsageError(
            f"scenario {text!r} has several numbers of clusters: leave --clusters out, or combine "
            "the scenarios in Python"
        )
    if transforms:
        return transforms[0]
    if not _has_field(types[0], "clusters"):
        raise UsageError(
            f"scenario {text!r} takes its clusters from the data set: leave the number of clusters "
            "out"
        )
    return 0


__all__ = [
    "SCENARIOS", "ClientDirichlet", "Combined", "Dirichlet", "Iid", "Inversion",
    "LabelPermutation", "LabelSplit", "LabelSwap", "Natural", "Part", "Partition", "Partitioner",
    "Pathological", "Rotation", "Scenario", "Source", "Tasks", "Topics", "Transform", "arrange",
    "has_options", "scenario",
]  # fmt: skip
