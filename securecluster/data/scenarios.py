"""Scenarios by name: ways in which clients come to hold data from different distributions."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any

from securecluster.data.datasets import Source
from securecluster.data.label_skew import Dirichlet, LabelSplit, Pathological, Tasks
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
    part.name: part
    for part in (
        Iid,
        LabelSwap,
        LabelPermutation,
        Rotation,
        Inversion,
        Pathological,
        Dirichlet,
        LabelSplit,
        Tasks,
        Natural,
        Topics,
    )
}
_WORDS = {
    "alpha": "alpha",
    "labels": "labels per client",
    "minority": "minority",
    "sizes": "task sizes",
    "overlap": "overlap",
}


def scenario(text: str, clusters: int | None = None, **given: Any) -> Scenario:
    """Return the named scenario, or the combination of names joined by "+".

    Args:
        text: the name, or names.
        clusters: true clusters, of the transform where there is one; None is the scenario's own
            default.
        given: the scenario's own fields (alpha, labels, minority, sizes, overlap); those that are
            None are left at their defaults.

    Raises:
        UsageError: an unknown name, or a field that the scenario does not have.
    """
    names = [name.strip() for name in text.split("+")]
    for name in names:
        if name not in SCENARIOS:
            raise unknown("scenario", name, SCENARIOS)
    kinds = [SCENARIOS[name] for name in names]
    fields = {name: value for name, value in given.items() if value is not None}
    if "overlap" in fields and not any(issubclass(kind, Partitioner) for kind in kinds):
        kinds.append(Iid)  # a transform alone deals in this way
    values: list[dict[str, Any]] = [{} for _ in kinds]
    if clusters is not None:
        values[_counted(text, kinds)]["clusters"] = clusters
    for name, value in fields.items():
        values[_holder(text, kinds, name)][name] = value
    parts = tuple(kind(**value) for kind, value in zip(kinds, values, strict=True))
    return parts[0] if len(parts) == 1 else Combined(parts)


def has_options(name: str, options: Iterable[str]) -> bool:
    """Return whether a scenario takes all these fields; overlap suits each."""
    return all(option == "overlap" or _has(SCENARIOS[name], option) for option in options)


def _has(kind: type[Part], name: str) -> bool:
    return name in {field.name for field in dataclasses.fields(kind)}  # type: ignore[arg-type]


def _holder(text: str, kinds: list[type[Part]], name: str) -> int:
    """Return the number of the part that has this field."""
    for k, kind in enumerate(kinds):
        if _has(kind, name):
            return k
    owners = ", ".join(other for other, kind in SCENARIOS.items() if _has(kind, name))
    raise UsageError(
        f"scenario {text!r} has no {_WORDS.get(name, name)}: leave it out, or use {owners}"
    )


def _counted(text: str, kinds: list[type[Part]]) -> int:
    """Return the number of the part whose clusters are counted.

    It is the transform, else the partitioner.
    """
    changes = [k for k, kind in enumerate(kinds) if issubclass(kind, Transform)]
    if len(changes) > 1:
        raise UsageError(
            f"scenario {text!r} has several numbers of clusters: leave --clusters out, or combine "
            "the scenarios in Python"
        )
    if changes:
        return changes[0]
    if not _has(kinds[0], "clusters"):
        raise UsageError(
            f"scenario {text!r} takes its clusters from the data set: leave the number of clusters "
            "out"
        )
    return 0


__all__ = [
    "SCENARIOS", "Combined", "Dirichlet", "Iid", "Inversion", "LabelPermutation", "LabelSplit",
    "LabelSwap", "Natural", "Part", "Partition", "Partitioner", "Pathological", "Rotation",
    "Scenario", "Source", "Tasks", "Topics", "Transform", "arrange", "has_options", "scenario",
]  # fmt: skip
