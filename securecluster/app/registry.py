"""Protocols by name: those of this project, and those that installed packages declare.

A package outside this project declares its protocols as entry points, in its pyproject.toml:

    [project.entry-points."securecluster.protocols"]
    mean-clusters = "my_package.mean_clusters:MeanClusters"

They then run, compare and resume on the command line like any other.
"""

from __future__ import annotations

import importlib
import warnings
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from securecluster.core import installed_packages
from securecluster.errors import SecureClusterWarning, UsageError, unknown

GROUP = "securecluster.protocols"
PROTOCOLS = {  # module and class
    "cfl": "cfl:CFL",
    "flhc": "flhc:FLHC",
    "srfca": "srfca:SRFCA",
    "oneshot": "oneshot:OneShot",
    "nsim": "nsim:NSIM",
    "ifca": "ifca:IFCA",
    "signature": "signature:Signature",
    "clove": "clove:CLoVE",
    "pacfl": "pacfl:PACFL",
    "rdpcfl": "rdpcfl:RDPCFL",
    "hidden": "hidden:Hidden",
    "local-kmeans": "local_kmeans:LocalKMeans",
    "random": "random_clusters:RandomClusters",
    "fedavg": "fedavg:FedAvg",
    "finetune": "finetune:FineTune",
    "mrmtl": "mrmtl:MRMTL",
    "local": "local:Local",
}


def protocol_names() -> list[str]:
    """Return the names of all protocols, those of this project first."""
    return [*PROTOCOLS, *sorted(_declared())]


def protocol_class(name: str) -> Any:
    """Return the class of a protocol.

    Args:
        name: of this project's or of an installed package's protocol.

    Raises:
        UsageError: an unknown name, or a declaration that does not lead to a protocol.
    """
    # Only the protocol that runs is imported, so that the command line answers at once.
    if name in PROTOCOLS:
        _warn_of_other_declaration(name)
        module_name, _, class_name = PROTOCOLS[name].partition(":")
        module = importlib.import_module(f"securecluster.protocols.{module_name}")
        return getattr(module, class_name)
    declared = _declared()
    if name not in declared:
        raise unknown("protocol", name, protocol_names())
    return _loaded(declared[name])


@cache
def _warn_of_other_declaration(name: str) -> None:
    """Warn if an installed package declares a protocol under the name of one of this project's."""
    for point in entry_points(group=GROUP):
        if point.name == name:
            warnings.warn(
                f"{point.value} is declared under the name {name!r} of a protocol of "
                "securecluster, which is the one that runs: give yours another name",
                SecureClusterWarning,
                stacklevel=3,
            )


@cache
def _declared() -> dict[str, EntryPoint]:
    """Return the entry points of installed packages by name.

    Names of this project's own protocols stay theirs.
    """
    points = entry_points(group=GROUP)
    return {point.name: point for point in points if point.name not in PROTOCOLS}


def _loaded(point: EntryPoint) -> Any:
    """Return the class of an entry point.

    Raises:
        UsageError: it cannot be imported, is no protocol, or has another name.
    """
    from securecluster.protocols.common.base import ClusteringProtocol

    declaration = installed_packages.declaration("protocol", point)
    loaded = installed_packages.load("protocol", point)
    if not (isinstance(loaded, type) and issubclass(loaded, ClusteringProtocol)):
        raise UsageError(f"{declaration}, is no ClusteringProtocol: name its class")
    if loaded.name != point.name:
        raise UsageError(
            f"{declaration}, is called {loaded.name!r} in its class: give both the same name"
        )
    return loaded
