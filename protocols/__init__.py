"""The published methods, one file or package each. They never import each other.

A class is imported at its first use, so that a command waits for the method that it runs alone.
"""

from __future__ import annotations

import importlib

TYPE_CHECKING = False  # as in typing, which takes a while to load
if TYPE_CHECKING:
    from typing import Any

    from securecluster.protocols.cfl.protocol import CFL
    from securecluster.protocols.cflgp import CFLGP
    from securecluster.protocols.clove import CLoVE
    from securecluster.protocols.common.base import ClusteringProtocol
    from securecluster.protocols.fedavg import FedAvg
    from securecluster.protocols.finetune import FineTune
    from securecluster.protocols.flhc import FLHC
    from securecluster.protocols.flux.protocol import FLUX
    from securecluster.protocols.hidden.protocol import Hidden
    from securecluster.protocols.ifca.protocol import IFCA
    from securecluster.protocols.local import Local
    from securecluster.protocols.local_kmeans import LocalKMeans
    from securecluster.protocols.mrmtl import MRMTL
    from securecluster.protocols.nsim.protocol import NSIM
    from securecluster.protocols.oneshot.protocol import OneShot
    from securecluster.protocols.pacfl import PACFL
    from securecluster.protocols.random_clusters import RandomClusters
    from securecluster.protocols.rdpcfl import RDPCFL
    from securecluster.protocols.signature import Signature
    from securecluster.protocols.srfca.protocol import SRFCA
    from securecluster.runtime.settings import Settings

MODULES_APART = True
"""No method's program depends on the modules of others (`securecluster.parties.program`)."""

_MODULES = {
    "CFL": "securecluster.protocols.cfl.protocol",
    "CFLGP": "securecluster.protocols.cflgp",
    "FLHC": "securecluster.protocols.flhc",
    "FLUX": "securecluster.protocols.flux.protocol",
    "IFCA": "securecluster.protocols.ifca.protocol",
    "MRMTL": "securecluster.protocols.mrmtl",
    "NSIM": "securecluster.protocols.nsim.protocol",
    "PACFL": "securecluster.protocols.pacfl",
    "RDPCFL": "securecluster.protocols.rdpcfl",
    "SRFCA": "securecluster.protocols.srfca.protocol",
    "CLoVE": "securecluster.protocols.clove",
    "ClusteringProtocol": "securecluster.protocols.common.base",
    "FedAvg": "securecluster.protocols.fedavg",
    "FineTune": "securecluster.protocols.finetune",
    "Hidden": "securecluster.protocols.hidden.protocol",
    "Local": "securecluster.protocols.local",
    "LocalKMeans": "securecluster.protocols.local_kmeans",
    "OneShot": "securecluster.protocols.oneshot.protocol",
    "RandomClusters": "securecluster.protocols.random_clusters",
    "Settings": "securecluster.runtime.settings",
    "Signature": "securecluster.protocols.signature",
}
__all__ = [
    "CFL",
    "CFLGP",
    "FLHC",
    "FLUX",
    "IFCA",
    "MRMTL",
    "NSIM",
    "PACFL",
    "RDPCFL",
    "SRFCA",
    "CLoVE",
    "ClusteringProtocol",
    "FedAvg",
    "FineTune",
    "Hidden",
    "Local",
    "LocalKMeans",
    "OneShot",
    "RandomClusters",
    "Settings",
    "Signature",
]


def __getattr__(name: str) -> Any:
    """Import a class on first access."""
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_MODULES[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
