"""Hierarchical federated averaging with local parameter servers (LPS) and a global one (GPS).

There is one LPS for each cluster. It averages its members' updates (`averaging`). Periodically it
sends the GPS the deltas of its first, common layers, and receives the weighted average of all LPSs.
The other layers of each model stay at its LPS (Ali & Arafa 2024, Algorithm 1, lines 5 to 7).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from securecluster.core.lazy_torch import torch
from securecluster.messaging.messages import RELAY
from securecluster.protocols import authoring as fl
from securecluster.protocols.common.averages.averaging import cluster_sums, total_weights

if TYPE_CHECKING:
    from securecluster.models.validation import FlatModel


@dataclass(frozen=True, eq=False)
class CommonDeltas:
    """Deltas of the common layers, between the LPSs and the GPS.

    An LPS sends those of each FedAvg round since the last time. The GPS replies with those that all
    LPSs are to apply instead.
    """

    # (K, L, n) of L rounds, masked where updates are; the masks of rounds differ, so that deltas of
    # different rounds are not added up
    deltas: fl.Rows
    size: fl.Rows | None  # (K, L) samples behind each delta; not in the reply


class GPS:
    """The global parameter server's part in the training."""

    @fl.answers(RELAY, private=False)
    def mix(self, query: CommonDeltas) -> CommonDeltas:
        """Return Σ_c n_c·w_c / Σ_c n_c to all LPSs.

        The paper writes "weighted average" only; the weights n_c, sample counts, are not in the
        paper.

        Args:
            query: deltas (K, L, n) and sizes (K, L).
        """
        assert query.size is not None
        size = query.size.table
        deltas = query.deltas.table
        samples = size.sum(0)
        # a round without any reply has no samples, and zero deltas
        share = size / torch.where(samples > 0, samples, torch.ones_like(samples))
        weighted = share[..., None].to(deltas) * deltas
        mean = weighted.sum(0)
        same_for_all = (0,) * len(deltas)
        return CommonDeltas(fl.Rows(mean[None], same_for_all), None)


@dataclass
class ClusterDelta:
    """One FedAvg round of all LPSs; row c belongs to the LPS of cluster c."""

    step: int  # the call whose mask the deltas carry
    deltas: torch.Tensor  # (K, n) of the common layers
    # (K,) samples behind them; 0 where too few members for a sum replied, since the update of a
    # single client must not reach the GPS
    size: torch.Tensor
    width: int  # numbers of an average of all layers


@dataclass
class HierarchicalState(fl.AveragingState):
    """The state of the servers' loop, as checkpoints store it."""

    # since the LPSs last sent their common layers
    pending: list[ClusterDelta] = field(default_factory=list)


def average_in_layers(
    net: fl.ServerChannel, state: HierarchicalState, gps: GPS, share: float, t: int, mix: bool
) -> None:
    """Make round t of FedAvg at each LPS, and average the common layers at the GPS if asked to.

    A cluster that is too small for a sum has no LPS: its clients train alone, and none of their
    layers leaves them (not in the paper).

    Args:
        net: the servers' channel.
        state: the clusters, their queue of averages, and the deltas that the GPS has not received.
        gps: the global parameter server.
        share: of each cluster's members to ask, in (0, 1].
        t: the round.
        mix: whether the GPS averages the common layers after this round.
    """
    sums = cluster_sums(net, state, share, t)
    if sums is None:
        if mix:
            _mix(net, state, gps)
        return
    means = fl.weighted_means(sums)
    large_enough = torch.as_tensor(sums.counts) >= net.least_members
    size = total_weights(sums).cpu() * large_enough
    common = means[:, : net.common].cpu()
    state.pending.append(ClusterDelta(sums.step, common, size, means.shape[1]))
    if mix:
        _mix(net, state, gps, sums.step, means)
    state.outbox.post(sums.step, means, state.labels)


def _mix(
    net: fl.ServerChannel,
    state: HierarchicalState,
    gps: GPS,
    step: int | None = None,
    means: torch.Tensor | None = None,
) -> None:
    """Send the pending deltas to the GPS, and apply its averages.

    Averages of this round are replaced before members receive them; for those of earlier rounds,
    which members have received, a correction is queued.

    Args:
        net: the servers' channel.
        state: its pending deltas are sent, and corrections are queued.
        gps: the global parameter server.
        step: the call of this round, or None.
        means: (K, d) averages of this round, whose common layers are replaced in place.
    """
    clusters = []
    for c, members in enumerate(fl.members(state.labels)):
        if len(members) >= net.least_members:
            clusters.append(c)
    pending = state.pending
    state.pending = []
    if not (net.common and pending and len(clusters) > 1):
        return
    size = torch.stack([cluster_delta.size for cluster_delta in pending], 1)[clusters]
    deltas = torch.stack([cluster_delta.deltas for cluster_delta in pending], 1)[clusters]
    deltas = deltas * (size > 0)[..., None]
    query = CommonDeltas(fl.Rows(deltas), fl.Rows(size))
    mixed = net.relay(gps.mix, query, to=clusters).deltas.values
    for n, cluster_delta in enumerate(pending):
        if cluster_delta.step == step and means is not None:
            means[clusters, : net.common] = mixed[:, n].to(means)
        else:
            # masks are fresh each round, so each round's correction carries the mask of its step
            shape = (1 + max(state.labels), cluster_delta.width)
            correction = torch.zeros(shape, dtype=mixed.dtype)
            difference = mixed[:, n] - cluster_delta.deltas[clusters]
            correction[clusters, : net.common] = difference
            state.outbox.post(cluster_delta.step, correction, state.labels)


def common_layers(model: FlatModel, names: str) -> int:
    """Return how many parameters, the first of the model, all clusters share.

    Args:
        model: the network.
        names: of the layers, the first of the model, joined by commas; or "none"; or "auto", all
            layers up to the last convolution. Without convolutions "auto" is the first layer, and
            nothing where that would be the whole model.

    Raises:
        UsageError: an unknown layer, or layers that are not the first ones.
    """
    if not isinstance(names, str):
        raise fl.UsageError(
            f"common = {names!r} is no text: give auto, none, or names of layers joined by commas"
        )
    if names == "none":
        return 0
    parameters = list(model.shapes)
    layers = list(dict.fromkeys(_layer_of(name) for name in parameters))
    if names == "auto":
        shared = _automatic(model, layers)
    else:
        shared = [name.strip() for name in names.split(",")]

    first_layers = _first_layers(layers, shared, names)
    count = 0
    for name in parameters:
        if _layer_of(name) in first_layers:
            count += model.shapes[name].numel()
    if names == "auto" and count == model.dimension:
        return 0
    return count


def _first_layers(layers: Sequence[str], shared: Sequence[str], names: str) -> set[str]:
    """Return the layers that are shared, if they are the model's first ones.

    Args:
        layers: of the model, in order.
        shared: names of layers, or of blocks, which include all layers in them.
        names: the option, for the error.

    Raises:
        UsageError: an unknown layer, or layers that are not the first ones.
    """
    all_known = True
    matched: set[str] = set()
    for name in shared:
        named = [layer for layer in layers if layer == name or layer.startswith(f"{name}.")]
        matched.update(named)
        all_known = all_known and bool(named)
    first_layers = set(layers[: len(matched)])
    if all_known and matched == first_layers:
        return first_layers
    # parameters of the module itself belong to a layer without a name
    hint = "some have none, so give auto or none"
    if all(layers):
        hint = f"they are {', '.join(layers)}"
    raise fl.UsageError(
        f"common = {names!r} must name the first layers of the model, in its own words: {hint}"
    )


def _layer_of(parameter: str) -> str:
    """Return the name of a parameter's layer."""
    return parameter.rpartition(".")[0]


def _automatic(model: FlatModel, layers: Sequence[str]) -> list[str]:
    """Return all layers up to the last convolution, or the first layer without convolutions."""
    convolutions = set()
    for name, module in model.module.named_modules():
        if isinstance(module, torch.nn.modules.conv._ConvNd):
            convolutions.add(name)
    positions = [n for n, layer in enumerate(layers) if layer in convolutions]
    last = max(positions, default=0)
    return list(layers[: last + 1])
