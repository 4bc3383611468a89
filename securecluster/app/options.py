"""The command line's options, as the dataclasses they are built from."""

from __future__ import annotations

import importlib
from dataclasses import dataclass, field, make_dataclass
from pathlib import Path
from typing import Any

from securecluster.data import Federation
from securecluster.data.federation import scenario
from securecluster.errors import unknown
from securecluster.settings import Settings

PROTOCOLS = {"cfl": "CFL", "fedavg": "FedAvg", "local": "Local"}


def protocol_class(name: str) -> Any:
    """The class of a protocol name."""
    if name not in PROTOCOLS:
        raise unknown("protocol", name, PROTOCOLS)
    return getattr(importlib.import_module(f"securecluster.protocols.{name}"), PROTOCOLS[name])


@dataclass(frozen=True)
class Simulation:
    """The clients and their data."""

    data: str = "digits"
    """data set: digits"""
    scenario: str = "label-swap"
    """how clients differ: label-swap or iid"""
    clients: int = 20
    """number of clients"""
    clusters: int | None = None
    """true clusters; None is the scenario's own default (label-swap: 4)"""
    samples: int | None = None
    """training samples per client; None deals out the whole data set"""
    seed: int = 0
    """of every random draw, keys included"""

    def federation(self) -> Federation:
        """Deal the data."""
        return Federation.simulate(
            self.data, scenario=scenario(self.scenario, self.clusters), clients=self.clients, samples=self.samples, seed=self.seed
        )


@dataclass(frozen=True)
class Output:
    """What is written and printed."""

    out: Path | None = None
    """run folder; None is a new one under runs/"""
    force: bool = False
    """replace a run folder that exists"""
    quiet: bool = False
    """print nothing but errors"""


def _automatic() -> Settings:
    return Settings(transcript="auto")


def options_class(protocol: type) -> type:
    """One flat dataclass of all options of `run PROTOCOL`."""
    import tyro

    flat: Any = tyro.conf.OmitArgPrefixes

    parts: dict[str, tuple[Any, Any]] = {
        "protocol": (protocol, protocol),
        "simulation": (Simulation, Simulation),
        "settings": (Settings, _automatic),
        "output": (Output, Output),
    }
    return make_dataclass(
        "Options",
        [(name, flat[part], field(default_factory=make)) for name, (part, make) in parts.items()],
    )
