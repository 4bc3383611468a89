"""Models of an earlier run, from which the clients of another one start, and what they cost."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict

from securecluster.core import atomic_files
from securecluster.core.lazy_torch import torch
from securecluster.core.serialization import fault_of, pack, refuse, unpack
from securecluster.errors import RunFolderError, UsageError
from securecluster.privacy.dp.ledger import NOISY, Ledger, Price

if TYPE_CHECKING:
    from securecluster.models.flat_model import FlatModel
    from securecluster.parties.method import Method

EARLIER = "earlier.safetensors"  # models of another run that a run started from, and its ledger


class Description(TypedDict):
    """What clients and server agree on of the models that they start from."""

    earlier: str
    models: int
    weights: str
    ledger: str


@dataclass(repr=False)
class StartModels:
    """Models of the clusters of an earlier run, as all parties of that run may know them.

    Args:
        protocol: of the earlier run.
        mask: of the earlier run.
        models: the tensors of each cluster's model by name.
        ledger: of the earlier run, and of those that it started from.
    """

    protocol: str
    mask: str
    models: list[dict[str, torch.Tensor]]
    ledger: Ledger = field(default_factory=Ledger)

    def __repr__(self) -> str:
        return f"<{len(self.models)} models of {self.protocol}>"

    @classmethod
    def read(cls, folder: Path, description: Description) -> StartModels:
        """Return the models that a run in a folder started from.

        Args:
            folder: of the run.
            description: as its configuration has them.

        Raises:
            RunFolderError: the file is missing, or another one than the run began with.
        """
        path = folder / EARLIER
        if not path.is_file():
            raise RunFolderError(f"{path} is missing: restore it, or start the run anew")
        start: StartModels = unpack(atomic_files.read(path), cls)
        if start.as_json() != description:
            raise RunFolderError(f"{path} is not what the run started from: restore it")
        return start

    def write(self, folder: Path) -> None:
        """Write the models beside a run that starts from them.

        Args:
            folder: of the run.
        """
        atomic_files.write_atomic(folder / EARLIER, pack(self))

    def as_json(self) -> Description:
        """Return what clients and server agree on: digests of the models and of the ledger."""
        weights, events = hashlib.sha256(), hashlib.sha256(pack(self.ledger))
        for model in self.models:
            for name, tensor in sorted(model.items()):
                weights.update(name.encode() + tensor.contiguous().numpy().tobytes())
        return {
            "earlier": self.protocol,
            "models": len(self.models),
            "weights": weights.hexdigest(),
            "ledger": events.hexdigest(),
        }

    def check(self, method: Method) -> None:
        """Check that a method can start from these models.

        Raises:
            UsageError: several models for a method that starts from one, or another number of them
                than it has; or noise for another unit of privacy than in the earlier run.
        """
        count = len(self.models)
        has = int(getattr(method, "model_count", 1))
        if getattr(method.client, "one_start", True):
            has = 1
        if count not in (1, has):
            raise UsageError(
                f"the earlier run ended with {count} models, and {method.name} starts from {has}: "
                "give the one of a cluster, start=(run, 0)" + (f", or k={count}" if has > 1 else "")
            )
        noisy = any(event.mechanism in NOISY for event in self.ledger.events)
        unit = method.privacy.dp_unit
        if noisy and method.privacy.noisy and self.ledger.unit != unit:
            raise UsageError(
                f"the earlier run protects the unit {self.ledger.unit}, and this one the unit "
                f"{unit}, which cannot be priced together: give dp_unit {self.ledger.unit}"
            )

    def applied(self, flat: FlatModel) -> FlatModel:
        """Return a network that begins with these models.

        Args:
            flat: of the run, with initial weights of its own.

        Raises:
            UsageError: the models are of another network.
        """
        shapes = {name: tuple(shape) for name, shape in flat.shapes.items()}
        vectors = []
        for model in self.models:
            given = {name: tuple(model[name].shape) for name in shapes if name in model}
            if given != shapes:
                raise UsageError(
                    "the models of the earlier run are of another network than this run's: give "
                    "the network and the features that they had"
                )
            vectors.append(torch.cat([model[name].flatten() for name in shapes]))
        return flat.beginning(vectors)

    def together(self, ledger: Ledger, delta: float) -> tuple[Price, int]:
        """Return what the earlier run and this one cost together, and how many clients are in both.

        Args:
            ledger: of this run.
            delta: δ.
        """
        price = Ledger.union(self.ledger, ledger).price(delta)
        both = {*self.ledger.names.values()} & {*ledger.names.values()}
        return price, len(both)


def with_start(path: Path, params: Mapping[str, Any]) -> dict[str, Any]:
    """Return a run's hyper-parameters with the models that it started from.

    Args:
        path: of a file of the run, such as config.json.
        params: as the file has them.

    Raises:
        RunFolderError: the file does not describe such models, or they are missing or others.
    """
    description = params.get("start")
    if description is None:
        return dict(params)
    refuse(path, fault_of(description, Description, "protocol.start"))
    return {**params, "start": StartModels.read(path.parent, description)}
