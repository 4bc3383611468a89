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
from typing import Any, NamedTuple

from securecluster import protocols
from securecluster.core import installed_packages
from securecluster.errors import SecureClusterWarning, UsageError, unknown

GROUP = "securecluster.protocols"
# those of `securecluster.models.architectures`, whose import loads torch
MODELS = (
    "mlp", "mlp-32", "mlp-200", "linear", "cnn-briggs", "cnn-ali", "cnn-cifar", "resnet9",
    "lstm-trajectory", "lstm-words", "lstm-chars", "lstm-chars-256",
)  # fmt: skip


ALL_TASKS = "classification, binary, multilabel, regression"


class Fact(NamedTuple):
    """Line of `securecluster list` about a protocol, without importing it.

    Args:
        k: whether the number of clusters must be given: "yes", "no", or "may".
        finds: what the protocol finds.
        reads: what the server reads of clients, with the protocol's defaults.
        foreign: what it needs of a `ForeignModel`, with its defaults: "train*" follows call.lr and
            call.batches(), and a drawn start is a function.
        tasks: what its clients may learn, with its defaults: the tasks of `ALL_TASKS`, or what a
            part of it alone is for.
        class_name: its class, whose module the stub of `securecluster.protocols` names.
    """

    k: str
    finds: str
    reads: str
    foreign: str = ""
    class_name: str = ""
    tasks: str = ALL_TASKS


PROTOCOLS = {
    "cfl": Fact("no", "groups, by splitting in two", "masked updates, every round", "train", "CFL"),
    "flhc": Fact(
        "no", "groups, by linkage of updates", "masked updates, one round", "train", "FLHC"
    ),
    "srfca": Fact(
        "no",
        "groups, by a graph of models",
        "masked models once, losses",
        "train, outputs",
        "SRFCA",
    ),
    "oneshot": Fact(
        "may", "groups of similar features", "relevance of clients' data", "train", "OneShot"
    ),
    "nsim": Fact(
        "no",
        "groups of users who move alike",
        "one layer of each model",
        "cannot train one",
        "NSIM",
        "positions",
    ),
    "ifca": Fact(
        "yes",
        "groups, by the best of k models",
        "choices of models",
        "train, outputs, drawn start",
        "IFCA",
    ),
    "signature": Fact(
        "may",
        "groups, by gradients",
        "a kilobyte of gradients",
        "train",
        "Signature",
        "classification",
    ),
    "clove": Fact(
        "yes",
        "groups, by losses of k models",
        "losses under k models",
        "train, outputs, drawn start",
        "CLoVE",
    ),
    "cflgp": Fact(
        "yes",
        "groups, by gradients over rounds",
        "masked gradients",
        "train*, drawn start",
        "CFLGP",
    ),
    "pacfl": Fact(
        "may",
        "groups, by subspaces of samples",
        "singular vectors, once",
        "train",
        "PACFL",
        "classification",
    ),
    "rdpcfl": Fact(
        "may",
        "groups, by private gradients",
        "noisy gradients, choices",
        "train*, outputs",
        "RDPCFL",
    ),
    "flux": Fact(
        "may",
        "groups, by moments of samples",
        "moments of latent vectors",
        "cannot train one",
        "FLUX",
        "classification",
    ),
    "hidden": Fact(
        "yes",
        "groups that only clients know",
        "sums over clients",
        "train",
        "Hidden",
        "classification",
    ),
    "local-kmeans": Fact(
        "yes", "groups, by models trained alone", "masked models, once", "train", "LocalKMeans"
    ),
    "random": Fact("yes", "none: random groups", "weighted updates", "train", "RandomClusters"),
    "fedavg": Fact("no", "none: one model for all", "weighted updates", "train", "FedAvg"),
    "finetune": Fact("no", "none: one model, then tuned", "weighted updates", "train", "FineTune"),
    "mrmtl": Fact("no", "none: models near their mean", "updates", "cannot train one", "MRMTL"),
    "local": Fact("no", "none: models trained alone", "nothing", "train", "Local"),
}


def protocol_names() -> list[str]:
    """Return the names of all protocols, those of this project first."""
    return [*PROTOCOLS, *sorted(_declared())]


def protocol_class(name: str | None) -> Any:
    """Return the class of a protocol.

    Args:
        name: of this project's or of an installed package's protocol; None is the base of all,
            which has the options that every protocol has.

    Raises:
        UsageError: an unknown name, or a declaration that does not lead to a protocol.
    """
    if name is None:
        return importlib.import_module("securecluster.protocols.common.base").ClusteringProtocol
    # Only the protocol that runs is imported, so that the command line answers at once.
    if name in PROTOCOLS:
        _warn_of_other_declaration(name)
        return getattr(protocols, PROTOCOLS[name].class_name)
    declared = _declared()
    if name not in declared:
        raise unknown("protocol", name, protocol_names())
    return _loaded(declared[name])


def facts() -> list[tuple[str, Fact]]:
    """Return what each protocol finds, needs and reads, by name, those of this project first.

    Of other packages' protocols the package alone is known.
    """
    rows = list(PROTOCOLS.items())
    for name, point in sorted(_declared().items()):
        rows.append((name, Fact("", f"see {point.value}", "")))
    return rows


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
