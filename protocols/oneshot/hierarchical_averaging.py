"""Hierarchical federated averaging: local parameter servers (LPS), one a cluster, and a global one
(GPS) for the layers they share.

Each LPS averages its members' updates (`averaging`); now and then it sends the GPS how its first,
common layers have moved, and gets the weighted average of all LPSs back. The rest of each model
stays with its LPS (Ali & Arafa 2024, Algorithm 1, lines 5–7).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from securecluster.clustering.labels import members as clusters_of
from securecluster.core.lazy_torch import torch
from securecluster.errors import UsageError
from securecluster.messaging.messages import RELAY, Rows
from securecluster.protocols.common.averaging import (
    AveragingState,
    cluster_sums,
    total_weights,
    weighted_means,
)
from securecluster.runtime.endpoint import MINIMUM, answers
from securecluster.runtime.server_channel import ServerChannel

if TYPE_CHECKING:
    from securecluster.models.validation import FlatModel


@dataclass(frozen=True, eq=False)
class CommonDeltas:
    """LPS to GPS: how its common layers moved in each FedAvg round since the last time. And back:
    how they are to have moved.
    """

    # (K, L, n) of L rounds, masked where updates are; rounds have masks of their own, so they are
    # not added up
    deltas: Rows
    size: Rows | None  # (K, L) samples behind each move; not on the way back


class GPS:
    """The global parameter server, as far as it trains."""

    @answers(RELAY, private=False)
    def mix(self, query: CommonDeltas) -> CommonDeltas:
        """Σ_c n_c·w_c / Σ_c n_c (the paper says "weighted average"; the weights, sample counts, are
        ours).
        """
        assert query.size is not None
        size, moves = query.size.table, query.deltas.table
        total = size.sum(0)
        share = size / torch.where(total > 0, total, torch.ones_like(total))
        mean = (share[..., None].to(moves) * moves).sum(0)
        return CommonDeltas(Rows(mean[None], (0,) * len(moves)), None)


@dataclass
class ClusterDelta:
    """One FedAvg round of all LPSs; row c is the c-th one's own."""

    step: int  # the call whose mask the moves carry
    deltas: torch.Tensor  # (K, n) of the common layers
    # (K,) samples behind them, 0 where fewer than two members replied: what one of them sent is not
    # for the GPS
    size: torch.Tensor
    width: int  # numbers of a whole average


@dataclass
class HierarchicalState(AveragingState):
    """What the servers' loop changes."""

    # since the LPSs last sent their common layers
    pending: list[ClusterDelta] = field(default_factory=list)


def average_in_layers(
    net: ServerChannel, state: HierarchicalState, gps: GPS, share: float, t: int, mix: bool
) -> None:
    """Round t of FedAvg at each LPS; where `mix` says so their common layers then become the GPS's
    average.

    A cluster of one has no LPS to speak of: its client trains alone, and no layer of it leaves
        (ours).
    """
    total = cluster_sums(net, state, share, t)
    means = None if total is None else weighted_means(total)
    if total is not None and means is not None:
        size = total_weights(total).cpu() * (torch.as_tensor(total.counts) >= MINIMUM)
        state.pending.append(
            ClusterDelta(total.step, means[:, : net.common].cpu(), size, means.shape[1])
        )
    if mix:
        _mix(net, state, gps, None if total is None else total.step, means)
    if total is not None and means is not None:
        state.outbox.post(total.step, means, state.labels)


def _mix(
    net: ServerChannel,
    state: HierarchicalState,
    gps: GPS,
    now: int | None,
    means: torch.Tensor | None,
) -> None:
    """Send the pending moves, and put right what the members have been told of them, or, for this
    round's, are about to be told.
    """
    clusters = [c for c, members in enumerate(clusters_of(state.labels)) if len(members) > 1]
    pending = state.pending
    state.pending = []
    if not (net.common and pending and len(clusters) > 1):
        return
    size = torch.stack([move.size for move in pending], 1)[clusters]
    moves = torch.stack([move.deltas for move in pending], 1)[clusters]
    deltas = CommonDeltas(Rows(moves * (size > 0)[..., None]), Rows(size))
    mixed = net.relay(gps.mix, deltas, to=clusters).deltas.values
    for n, move in enumerate(pending):
        if move.step == now and means is not None:
            means[clusters, : net.common] = mixed[:, n].to(means)
        else:
            correction = torch.zeros(1 + max(state.labels), move.width, dtype=mixed.dtype)
            correction[clusters, : net.common] = mixed[:, n] - move.deltas[clusters]
            state.outbox.post(move.step, correction, state.labels)


def common_layers(model: FlatModel, names: str) -> int:
    """How many of the model's parameters, the first ones, all clusters share.

    Args:
        names: of the layers, the first of the model, joined by commas; "none"; or "auto", what the
            model names: everything up to its last convolution, without convolutions its first
            layer, and nothing where that would be all it has.

    Raises:
        UsageError: an unknown layer, or layers that are not the first ones.
    """
    if not isinstance(names, str):
        raise UsageError(
            f"common = {names!r} is no text: give auto, none, or names of layers joined by commas"
        )
    parameters = list(model.shapes)
    layers = list(dict.fromkeys(_layer_of(name) for name in parameters))
    if names == "none":
        return 0
    if names == "auto":
        shared = _automatic(model, layers)
    else:
        shared = [name.strip() for name in names.split(",")]

    # a name may be a block's, which stands for all layers in it
    unknown = []
    matched: set[str] = set()
    for name in shared:
        named = [layer for layer in layers if layer == name or layer.startswith(f"{name}.")]
        matched.update(named)
        if not named:
            unknown.append(name)
    first_layers = set(layers[: len(matched)])
    if unknown or matched != first_layers:
        if all(layers):
            known = f"they are {', '.join(layers)}"
        else:
            known = "some have none, so give auto or none"
        raise UsageError(
            f"common = {names!r} must name the first layers of the model, in its own words: {known}"
        )
    count = sum(
        model.shapes[name].numel() for name in parameters if _layer_of(name) in first_layers
    )
    whole_model = count == model.dimension
    return 0 if names == "auto" and whole_model else count


def _layer_of(parameter: str) -> str:
    return parameter.rpartition(".")[0]


def _automatic(model: FlatModel, layers: Sequence[str]) -> list[str]:
    convolutions = [
        name
        for name, part in model.module.named_modules()
        if isinstance(part, torch.nn.modules.conv._ConvNd)
    ]
    positions = [n for n, layer in enumerate(layers) if layer in convolutions]
    last = max(positions, default=0)
    return list(layers[: last + 1])
