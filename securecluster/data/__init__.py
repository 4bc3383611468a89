"""Clients' data: sources, scenarios that deal them, and the federation they make."""

from securecluster.data.datasets import SOURCES, Source
from securecluster.data.federation import Federation, Shard
from securecluster.data.scenarios import (
    SCENARIOS,
    ClientDirichlet,
    Combined,
    Dirichlet,
    Iid,
    Inversion,
    LabelPermutation,
    LabelSplit,
    LabelSwap,
    Natural,
    Pathological,
    Rotation,
    Scenario,
    Tasks,
    Topics,
)

__all__ = [
    "SCENARIOS",
    "SOURCES",
    "ClientDirichlet",
    "Combined",
    "Dirichlet",
    "Federation",
    "Iid",
    "Inversion",
    "LabelPermutation",
    "LabelSplit",
    "LabelSwap",
    "Natural",
    "Pathological",
    "Rotation",
    "Scenario",
    "Shard",
    "Source",
    "Tasks",
    "Topics",
]
