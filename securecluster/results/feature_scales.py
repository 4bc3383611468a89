"""Scales of the features in a finished run, on which its models take samples.

Public bounds are in the configuration. A client's own mean and standard deviation are of its data:
they are in `clients.safetensors`, beside its model.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from numpy.typing import NDArray

from securecluster.core.lazy_torch import torch
from securecluster.data.scaling import CLIENT, Scale, Scaling
from securecluster.errors import UsageError
from securecluster.results.fitted_state import FittedState

if TYPE_CHECKING:
    from securecluster.data.federation import Federation

SCALES = "scales"  # in the clients' extra state: centres and widths (m, 2, k)


def kept_scales(federation: Federation) -> dict[str, torch.Tensor]:
    """Return what clients keep of their own scales, by the name in their extra state.

    Args:
        federation: the clients; without scales of their own they keep nothing.
    """
    if federation.scaling is None or federation.scaling.kind != CLIENT:
        return {}
    rows = []
    for shard in federation.shards:
        assert shard.scale is not None
        rows.append((shard.scale.centre, shard.scale.width))
    return {SCALES: torch.tensor(rows, dtype=torch.float64)}


def scaled(kept: FittedState, client: int | None, samples: NDArray[Any]) -> NDArray[Any]:
    """Return samples (n, …) on the scale that a client's model takes.

    Args:
        kept: state of the run.
        client: its position; None for nobody's samples in particular.
        samples: on the scale of the user's data.

    Raises:
        UsageError: nobody's samples, where each client has a scale of its own.
    """
    scaling = Scaling.read(kept.learned.config.get("scaling"))
    if scaling is None:
        return samples
    if scaling.kind != CLIENT:
        return scaling.scale_of(samples).applied(scaling.bounded(samples))
    if client is None:
        raise UsageError(
            "each client of this run scaled its features by its own mean and deviation, so samples "
            "are some client's: say whose"
        )
    centre, width = kept.clients.extra[SCALES][client].tolist()
    return Scale(tuple(centre), tuple(width)).applied(samples)
