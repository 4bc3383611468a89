"""The preparation of samples in a finished run, which is a part of its models.

Public bounds are in the configuration, and what all clients share is in the state of the server's
channel. A client's own mean and standard deviation, and the range of
what it trained on, are of its data: they are beside its model, in `clients.safetensors`, and those
of newcomers in `newcomers.json`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from securecluster.core import atomic_files, manifest
from securecluster.core.lazy_torch import torch
from securecluster.core.serialization import plain, typed
from securecluster.data.scaling import LAST, POOLED, Scale, Scaling
from securecluster.errors import UsageError
from securecluster.models.objectives import Regression, objective
from securecluster.results.fitted_state import FittedState

if TYPE_CHECKING:
    from securecluster.data.federation import Federation

# in the clients' extra state
SCALES = "scales"  # centres and widths of the features (m, 2, k)
FILLS = "fills"  # what stands in for gaps (m, k)
TARGETS = "targets"  # centres and widths of the targets (m, 2, 1)
RANGES = "ranges"  # the smallest and the largest values that were trained on (m, 2, k)
Numbers: TypeAlias = "Mapping[str, torch.Tensor]"


@dataclass(frozen=True)
class Guest:
    """Newcomer of a finished run: its cluster, and what it keeps of its own data."""

    cluster: int
    own: dict[str, list[Any]]

    @property
    def numbers(self) -> dict[str, torch.Tensor]:
        """Return what it keeps, as a client's row of the extra state."""
        return {name: torch.tensor(rows, dtype=torch.float64) for name, rows in self.own.items()}


def kept_numbers(federation: Federation) -> dict[str, torch.Tensor]:
    """Return what clients keep of their own data, by the name in their extra state.

    Args:
        federation: the clients; those of known data sets keep nothing.
    """
    kept: dict[str, torch.Tensor] = {}
    shards = federation.shards
    if federation.scaling is not None and federation.scaling.of_rows:
        rows = [(shard.scale.centre, shard.scale.width) for shard in shards if shard.scale]
        kept[SCALES] = torch.tensor(rows, dtype=torch.float64)
        if federation.scaling.categories:
            fills = [shard.scale.fill for shard in shards if shard.scale]
            kept[FILLS] = torch.tensor(fills, dtype=torch.float64)
    own = [(shard.target.centre, shard.target.width) for shard in shards if shard.target]
    if len(own) == len(shards):
        kept[TARGETS] = torch.tensor(own, dtype=torch.float64)
    ranges = [shard.seen for shard in shards if shard.seen is not None]
    if len(ranges) == len(shards):
        kept[RANGES] = torch.as_tensor(np.stack(ranges))
    return kept


def own_numbers(kept: FittedState, client: int | None) -> dict[str, torch.Tensor]:
    """Return what a client of the run keeps of its own data, and what all share.

    Args:
        kept: state of the run.
        client: its position; None for what all share.
    """
    found = kept.learned.network.scale
    numbers = {POOLED: torch.tensor(found, dtype=torch.float64)} if found else {}
    if client is not None:
        extra = kept.clients.extra
        kinds = (SCALES, FILLS, TARGETS, RANGES)
        numbers |= {name: extra[name][client] for name in kinds if name in extra}
    return numbers


def of_rows(config: Mapping[str, Any]) -> bool:
    """Return whether each client prepares samples or targets by numbers of its own.

    Args:
        config: of the run.
    """
    scaling = Scaling.read(config.get("scaling"))
    standardised = bool(config["objective"].get("standardised"))
    return standardised or (scaling is not None and scaling.of_rows)


def preparation(config: Mapping[str, Any], own: Numbers) -> dict[str, torch.Tensor] | None:
    """Return the numbers by which a model's samples are prepared, as `Prepared` takes them.

    Those of targets give what the model predicts in their own numbers.

    Args:
        config: of the run.
        own: as `own_numbers` returns it.

    Returns:
        None where samples are taken as they come, and outputs are as targets came.

    Raises:
        UsageError: nobody's samples, where each client has numbers of its own.
    """
    if of_rows(config) and not own.keys() & {SCALES, TARGETS}:
        raise UsageError(
            "each client of this run scaled its features by its own mean and deviation, so "
            "samples are some client's: say whose"
        )
    numbers = {**_of_samples(config, own), **_of_targets(config, own)}
    tensors = {name: torch.tensor(values, dtype=torch.float64) for name, values in numbers.items()}
    return tensors | seen_by(own or {}) if tensors else None


def _of_targets(config: Mapping[str, Any], own: Numbers) -> dict[str, Any]:
    """Return the scale of targets; nothing where they are trained on as they came."""
    trained = objective(config["objective"])
    if not isinstance(trained, Regression):
        return {}
    if trained.standardised and TARGETS in own:
        centre, width = own[TARGETS].tolist()
        return {"target_centre": centre, "target_width": width}
    low, high = np.asarray(trained.bounds).reshape(-1, 2).T
    if not len(low):
        return {}
    return {"target_centre": (low + high) / 2, "target_width": (high - low) / 2}


def _of_samples(config: Mapping[str, Any], own: Numbers) -> dict[str, Any]:
    """Return the numbers of the samples' preparation; nothing where they are taken as they come."""
    scaling = Scaling.read(config.get("scaling"))
    if scaling is None:
        return {}
    scale = scaling.pooled(own[POOLED].tolist()) if scaling.shared else scaling.public
    if scale is None:
        centre, width = own[SCALES].tolist()
        fill = own[FILLS].tolist() if FILLS in own else ()
        scale = Scale(tuple(centre), tuple(width), tuple(fill))
    numbers: dict[str, Any] = {"centre": scale.centre, "width": scale.width}
    if scaling.categories:
        numbers |= {"fill": scale.fill, "source": scaling.sources, "mark": scaling.marks}
    if scaling.channels == LAST:
        numbers["last"] = 1
    if scaling.low:
        numbers |= {"low": scaling.low, "high": scaling.high}
    return numbers


def seen_by(own: Numbers) -> dict[str, torch.Tensor]:
    """Return the smallest and the largest values that a client trained on, as `Prepared` has them.

    Args:
        own: what the client keeps of its own data.
    """
    return {"seen": own[RANGES]} if RANGES in own else {}


def read_guests(folder: Path) -> dict[str, Guest]:
    """Return the newcomers of a folder by their names.

    Raises:
        RunFolderError: the file differs from what was written.
    """
    from securecluster.parties.newcomers import KEPT

    path = folder / KEPT
    if not path.is_file():
        return {}
    content = manifest.content_with_digest(path, atomic_files.read(path))
    try:
        return typed(content["newcomers"], dict[str, Guest])
    except (ValueError, KeyError):
        raise manifest.damaged(path) from None


def write_guests(folder: Path, guests: Mapping[str, Guest]) -> None:
    """Write newcomers beside those that the folder has already, readable by its owner alone."""
    from securecluster.parties.newcomers import KEPT

    data = manifest.with_digest({"newcomers": plain({**read_guests(folder), **guests})})
    atomic_files.write_atomic(folder / KEPT, data, atomic_files.OWNER, durable=True)


def guests_of(joined: Federation, labels: Sequence[int]) -> dict[str, Guest]:
    """Return newcomers by their names.

    Args:
        joined: the newcomers and their data, features in the order of the run.
        labels: their clusters.
    """
    own = kept_numbers(joined)
    guests = {}
    for k, (name, label) in enumerate(zip(joined.names, labels, strict=True)):
        guests[name] = Guest(int(label), {key: rows[k].tolist() for key, rows in own.items()})
    return guests
