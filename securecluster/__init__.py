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
    from securecluster.audits.recording_audit import audit_recording
    from securecluster.audits.run_audit import audit
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
    from securecluster.parties.run_check import power_check
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
    from securecluster.recordings.recording import recorded, recorded_client
    from securecluster.recordings.training_facts import TrainingFacts
    from securecluster.reports.loading import load, open_transcript
    from securecluster.results.estimator import ClusteredClassifier
    from securecluster.studies.plan import plan
    from securecluster.studies.sweep import sweep

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
    "ClusteredClassifier": "securecluster.results.estimator",
    "ForeignModel": "securecluster.models.foreign",
    "TrainingFacts": "securecluster.recordings.training_facts",
    "at": "securecluster.core.client_names",
    "audit": "securecluster.audits.run_audit",
    "audit_recording": "securecluster.audits.recording_audit",
    "load": "securecluster.reports.loading",
    "open_transcript": "securecluster.reports.loading",
    "plan": "securecluster.studies.plan",
    "power_check": "securecluster.parties.run_check",
    "recorded": "securecluster.recordings.recording",
    "recorded_client": "securecluster.recordings.recording",
    "sweep": "securecluster.studies.sweep",
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
