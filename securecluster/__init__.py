"""Privacy-focused secure clustering for federated learning.

from securecluster import CFL, Federation, LabelSwap

federation = Federation.simulate("digits", scenario=LabelSwap(), clients=20)
labels = CFL(rounds=20).fit(federation).labels_
"""

from __future__ import annotations

import importlib

TYPE_CHECKING = False  # as in typing, which takes a while to load
if TYPE_CHECKING:
    from typing import Any

    from securecluster import plot
    from securecluster.app.audit import audit
    from securecluster.app.loading import load, open_transcript
    from securecluster.app.plan import plan
    from securecluster.app.recording_audit import audit_recording
    from securecluster.app.sweep import sweep
    from securecluster.core.client_names import at
    from securecluster.data import (
        ClientDirichlet,
        Dirichlet,
        Federation,
        Iid,
        Inversion,
        LabelPermutation,
        LabelSplit,
        LabelSwap,
        Natural,
        Pathological,
        Rotation,
        Tasks,
    )
    from securecluster.errors import SecureClusterError, SecureClusterWarning
    from securecluster.models.foreign import ForeignModel
    from securecluster.protocols import (
        CFL,
        CFLGP,
        FLHC,
        FLUX,
        IFCA,
        MRMTL,
        NSIM,
        PACFL,
        RDPCFL,
        SRFCA,
        CLoVE,
        ClusteringProtocol,
        FedAvg,
        FineTune,
        Hidden,
        Local,
        LocalKMeans,
        OneShot,
        RandomClusters,
        Settings,
        Signature,
    )
    from securecluster.runs.estimator import ClusteredClassifier
    from securecluster.runs.power_check import power_check
    from securecluster.runs.recording import recorded, recorded_client
    from securecluster.runs.training_facts import TrainingFacts

    __version__: str

_PROTOCOLS = (
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
)
_MODULES = {
    "ClusteredClassifier": "securecluster.runs.estimator",
    "ForeignModel": "securecluster.models.foreign",
    "TrainingFacts": "securecluster.runs.training_facts",
    "at": "securecluster.core.client_names",
    "audit": "securecluster.app.audit",
    "audit_recording": "securecluster.app.recording_audit",
    "load": "securecluster.app.loading",
    "open_transcript": "securecluster.app.loading",
    "plan": "securecluster.app.plan",
    "power_check": "securecluster.runs.power_check",
    "recorded": "securecluster.runs.recording",
    "recorded_client": "securecluster.runs.recording",
    "sweep": "securecluster.app.sweep",
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
    "ClientDirichlet",
    "ClusteredClassifier",
    "ClusteringProtocol",
    "Dirichlet",
    "FedAvg",
    "Federation",
    "FineTune",
    "ForeignModel",
    "Hidden",
    "Iid",
    "Inversion",
    "LabelPermutation",
    "LabelSplit",
    "LabelSwap",
    "Local",
    "LocalKMeans",
    "Natural",
    "OneShot",
    "Pathological",
    "RandomClusters",
    "Rotation",
    "SecureClusterError",
    "SecureClusterWarning",
    "Settings",
    "Signature",
    "Tasks",
    "TrainingFacts",
    "__version__",
    "at",
    "audit",
    "audit_recording",
    "load",
    "open_transcript",
    "plan",
    "plot",
    "power_check",
    "recorded",
    "recorded_client",
    "sweep",
]


def __getattr__(name: str) -> Any:
    """Import a public name on first access.

    Importing the package loads no numpy, so the command line starts without waiting for it.
    """
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if name == "__version__":
        return _version()
    if name == "plot":
        return importlib.import_module("securecluster.plot")
    module = _MODULES.get(name, "securecluster.data")
    if name.startswith("SecureCluster"):
        module = "securecluster.errors"
    elif name in _PROTOCOLS:
        module = "securecluster.protocols"
    return getattr(importlib.import_module(module), name)


def __dir__() -> list[str]:
    return sorted(__all__)


def _version() -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("securecluster")
    except PackageNotFoundError:  # a checkout that was never installed
        return "0+unknown"
