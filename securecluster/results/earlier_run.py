"""The run from whose models another one starts, as a user names it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from securecluster.core import atomic_files
from securecluster.core.lazy_torch import torch
from securecluster.errors import UsageError
from securecluster.parties.newcomers import NewcomerRecord
from securecluster.privacy.dp.ledger import Ledger
from securecluster.results import saving
from securecluster.results.start_models import StartModels

if TYPE_CHECKING:
    from securecluster.results.fitted_state import FittedSummary


def models_of(start: Any) -> StartModels | None:
    """Return the models of the clusters of a run that a user chooses.

    Args:
        start: a fitted protocol, its result, or the folder of either; a pair of these and a
            cluster's label for its model alone; None for no earlier run.

    Raises:
        UsageError: none of these, no such cluster, or a model that its clients trained alone.
    """
    if start is None or isinstance(start, StartModels):
        return start
    label = None
    if isinstance(start, tuple) and len(start) == 2:
        start, label = start
    result = start
    if isinstance(start, str | Path):
        result = _Stored(Path(start))
    learned = getattr(getattr(result, "kept_", None), "learned", None)
    if learned is None:
        raise UsageError(
            f"start is {type(start).__name__}: give a fitted protocol or the folder of a "
            "finished run, or a pair of that and a cluster's label"
        )
    labels = range(len(result.models_)) if label is None else [label]
    models = [_shared(result.models_, learned, chosen) for chosen in labels]
    ledger = result.ledger_
    earlier = result.earlier
    if earlier is not None:
        ledger = Ledger.union(earlier.ledger, ledger)
    return StartModels(learned.protocol, learned.params["mask"], models, ledger)


class _Stored:
    """The shared part of a result in a folder, whatever its protocol is."""

    def __init__(self, folder: Path) -> None:
        from safetensors.torch import load

        self.kept_ = saving.read_kept(folder)
        learned = self.kept_.learned
        stored = load(atomic_files.read(folder / saving.MODELS))
        self.models_: list[dict[str, torch.Tensor] | None] = []
        for label in range(max(learned.labels) + 1):
            prefix = f"cluster{label}."
            names = [name for name in stored if name.startswith(prefix)]
            self.models_.append({name.removeprefix(prefix): stored[name] for name in names})
        self.ledger_ = learned.network.ledger
        NewcomerRecord(folder, int(learned.config["clients"])).update(self.ledger_)
        description = learned.params.get("start")
        self.earlier = None
        if description is not None:
            self.earlier = StartModels.read(folder, description)


def _shared(
    models: Sequence[Mapping[str, Any] | None], learned: FittedSummary, label: Any
) -> dict[str, torch.Tensor]:
    """Return the tensors of a cluster's model.

    Raises:
        UsageError: no such cluster, or a model that its clients trained alone.
    """
    if label not in range(len(models)):
        raise UsageError(
            f"there is no cluster {label!r}: the earlier run has 0 to {len(models) - 1}"
        )
    members = {k for k, own in enumerate(learned.labels) if own == label}
    model = models[label]
    if not model or members <= set(learned.local):
        raise UsageError(
            f"clients of cluster {label} of the earlier run trained alone, and nobody has seen "
            "their models, which a run that starts from them would tell: choose another cluster"
        )
    tensors = {k: v for k, v in model.items() if isinstance(v, torch.Tensor)}
    return {name: tensor.detach().cpu().clone() for name, tensor in tensors.items()}
