"""Protocols by name: those of this project, and those that installed packages declare.

A package outside this project declares its protocols as entry points, in its pyproject.toml:

    [project.entry-points."securecluster.protocols"]
    mean-clusters = "my_package.mean_clusters:MeanClusters"

They then run, compare and resume on the command line like any other. A class of a module that no
package declares is named by its path, `mean_clusters:MeanClusters`, and later, in this process and
those that it starts, also by its own name. Other processes know it where SECURECLUSTER_PROTOCOLS
holds its path: a run's folder names no module, since whoever hands on a folder would choose what
its reader imports.
"""

from __future__ import annotations

import importlib
import warnings
from functools import cache
from importlib.metadata import EntryPoint
from typing import Any, NamedTuple

from securecluster import protocols
from securecluster.core import installed_packages
from securecluster.errors import SecureClusterWarning, UsageError, unknown

GROUP = "securecluster.protocols"
OWN = "SECURECLUSTER_PROTOCOLS"  # paths of classes that no package declares, with commas
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


PARTS = installed_packages.Parts("protocol", GROUP, PROTOCOLS, OWN)


def protocol_names() -> list[str]:
    """Return the names of all protocols, those of this project first."""
    return [*PROTOCOLS, *sorted({*PARTS.others(), *_KEPT})]


def protocol_class(name: str | None) -> Any:
    """Return the class of a protocol.

    Args:
        name: of this project's or of an installed package's protocol, or "module:Class" of any
            other; None is the base of all, which has the options that every protocol has.

    Raises:
        UsageError: an unknown name, or a declaration that does not lead to a protocol.
    """
    if name is None:
        return importlib.import_module("securecluster.protocols.common.base").ClusteringProtocol
    if ":" in name:
        name = named(name)
    # Only the protocol that runs is imported, so that the command line answers at once.
    if name in PROTOCOLS:
        _warn_of_other_declaration(name)
        return getattr(protocols, PROTOCOLS[name].class_name)
    if name in _KEPT:
        return _KEPT[name]
    others = PARTS.others()
    if name not in others:
        error = unknown("protocol", name, protocol_names())
        raise UsageError(
            f"{error}; one of your own is named by its path, as my_module:MyClass, and for a "
            f"folder that has been run in {OWN}"
        )
    return _loaded(others[name])


def class_of_folder(name: str) -> Any:
    """Return the class of a protocol that a run folder names, which imports no path.

    Args:
        name: of this project's or of an installed package's protocol, or one that was given by its
            path here.

    Raises:
        UsageError: an unknown name.
    """
    if ":" in name:
        raise UsageError(f"{name!r} is a path, and no folder chooses what is imported: give a name")
    return protocol_class(name)


def class_at(path: str) -> Any:
    """Return the class of a protocol that is given by its path, whatever its name is.

    Args:
        path: "module:Class", where the module may lie in the current folder.

    Raises:
        UsageError: it cannot be imported, or is no protocol.
    """
    return _loaded(installed_packages.of_path("protocol", path, GROUP))


def named(path: str) -> str:
    """Return the name of a class that is given by its path, which is known by it from then on.

    Args:
        path: "module:Class", where the module may lie in the current folder.

    Raises:
        UsageError: it cannot be imported, is no protocol, or has the name of another one.
    """
    return PARTS.give(path, _loaded)


def facts() -> list[tuple[str, Fact]]:
    """Return what each protocol finds, needs and reads, by name, those of this project first.

    Of other packages' protocols the package alone is known.
    """
    rows = list(PROTOCOLS.items())
    for name, point in sorted(PARTS.others().items()):
        rows.append((name, Fact("", f"see {point.value}", "")))
    return rows


@cache
def _warn_of_other_declaration(name: str) -> None:
    """Warn if an installed package declares a protocol under the name of one of this project's."""
    for point in installed_packages.points(GROUP):
        if point.name == name:
            warnings.warn(
                f"{point.value} is declared under the name {name!r} of a protocol of "
                "securecluster, which is the one that runs: give yours another name",
                SecureClusterWarning,
                stacklevel=3,
            )


def keep(protocol_type: Any) -> None:
    """Have a class known by its name, also in processes that start later where it lies in a module.

    Args:
        protocol_type: class of a protocol, which may be of a script or a notebook.

    Raises:
        UsageError: it has the name of another protocol.
    """
    name = protocol_type.name
    if name in protocol_names() and protocol_class(name) is protocol_type:
        return
    module, place = protocol_type.__module__, protocol_type.__qualname__
    if module != "__main__" and "." not in place:
        named(f"{module}:{place}")
        return
    if name in PROTOCOLS or name in PARTS.others():
        raise UsageError(f"{place} has the name {name!r} of another protocol: give it another one")
    _KEPT[name] = protocol_type


_KEPT: dict[str, Any] = {}  # classes of scripts and notebooks, which other processes do not have


def _loaded(point: EntryPoint) -> Any:
    """Return the class of an entry point.

    Raises:
        UsageError: it cannot be imported, is no protocol, or has another name.
    """
    from securecluster.protocols.common.base import ClusteringProtocol

    declaration, loaded = PARTS.loaded(point)
    if not (isinstance(loaded, type) and issubclass(loaded, ClusteringProtocol)):
        raise UsageError(f"{declaration}, is no ClusteringProtocol: name its class")
    if loaded.name != point.name:
        raise UsageError(
            f"{declaration}, is called {loaded.name!r} in its class: give both the same name"
        )
    return loaded
