"""The view that a server which splits clusters has of one cluster in one round.

It is that of lines 15–21 of Algorithm 5 of Sattler et al. 2019.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from securecluster.clustering.similarity import gram, gram_norms, mean_norm, mean_row
from securecluster.core.lazy_torch import torch
from securecluster.messaging.messages import Empty
from securecluster.messaging.replies import Replies, Sums
from securecluster.protocols.cfl.client import CFLClient
from securecluster.protocols.cfl.parameter_tree import ParameterTree
from securecluster.protocols.common.averaging import weighted_means
from securecluster.protocols.common.compressed_updates import CompressedUpdate
from securecluster.protocols.common.messages import ModelDelta, empty_tensor
from securecluster.protocols.common.pending_updates import PendingUpdates, request_model
from securecluster.runtime.endpoint import MINIMUM
from securecluster.runtime.run import Line
from securecluster.runtime.server_channel import ServerChannel


@dataclass
class SplitStatistics:
    """Norms, and what a split needs."""

    cluster: int
    members: list[int]
    came: list[int]  # who replied with what α compares
    mean: torch.Tensor | None = None  # Δ_c, (d,)
    mean_norm: float = 0.0  # ‖Δ_c‖
    max_norm: float = 0.0  # max ‖Δ_i‖
    # Gram matrix of what α compares; none in a round that is not tested
    inner: torch.Tensor = field(default_factory=empty_tensor)
    updates: torch.Tensor = field(default_factory=empty_tensor)  # what α compares, (·, d)
    places: list[int] = field(default_factory=list)  # rows of `updates`, of those that came
    step: int = 0  # the call they answered
    scatter: float = 0.0  # standard deviation that noise and sketch give a cosine, about
    gap: float | None = None
    evidence: float | None = None  # for the split; none in a round in which other conditions failed
    p_value: float | None = None
    halves: tuple[list[int], list[int]] | None = None
    model: ModelDelta = field(default_factory=ModelDelta)  # θ*

    @property
    def complete(self) -> bool:
        """Whether every member replied."""
        return len(self.came) == len(self.members)

    def line(self) -> Line:
        """For the history."""
        known = {
            name: getattr(self, name)
            for name in ("cluster", "mean_norm", "max_norm", "gap", "evidence", "p_value")
        }
        return {**known, "members": len(self.members), "split": self.halves is not None}


def server_view(weighted: bool, briefs: bool, tree: bool, judged: bool) -> list[str]:
    """What the server sees under every mask."""
    found = ["each client's number of samples"] * weighted
    found += [
        "norms and pairwise cosines of a round's updates (and full gradients, if asked for)",
        "the clusters, splits and members",
    ]
    found += ["the updates beside their briefs (the plain sum reads every reply)"] * briefs + [
        "how far each node's model has moved"
    ] * tree
    losses = (
        "each client's losses under the models on its path, and the number of samples kept aside "
        "(the plain sum reads both)"
    )
    return found + [losses] * judged


def collect_updates(
    net: ServerChannel,
    outbox: PendingUpdates,
    asked: Sequence[int],
    labels: Sequence[int],
    briefs: bool,
) -> tuple[Replies[Any], Sums[Any] | None]:
    """Collect the clients' updates, which α compares.

    Where they tell their updates in brief, collect these briefs, and the sums over two members or
    more of each cluster.
    """
    got: Replies[Any] = net.gather(
        CFLClient.send_compressed_update if briefs else CFLClient.train,
        outbox.message_for(asked),
        to=asked,
    )
    outbox.acknowledge(got.ids)
    if not briefs:
        return got, None
    by = [labels[i] for i in got.ids]
    company = [i for i in got.ids if by.count(labels[i]) >= MINIMUM]
    if not company:
        return got, None
    groups = 1 + max(labels)
    return got, net.sum(
        CFLClient.contribute_kept_update,
        Empty(),
        to=company,
        by=[labels[i] for i in company],
        groups=groups,
    )


def split_statistics(
    net: ServerChannel,
    got: Replies[Any],
    cluster: int,
    members: list[int],
    labels: Sequence[int],
    total: Sums[Any] | None = None,
) -> SplitStatistics:
    """Return norms of a cluster's updates, free of the noise that clients add.

    α compares the updates (eq. 51).

    Args:
        total: the sums of the updates that were told in brief: the norm of the mean comes from
            these.
    """
    if got.ids and isinstance(got.rows, CompressedUpdate):
        return _in_brief(net, got, cluster, members, labels, total)
    places = [k for k, i in enumerate(got.ids) if labels[i] == cluster]
    look = SplitStatistics(cluster, members, [got.ids[k] for k in places])
    if places:
        delta, size = (
            got.rows.delta.values,
            None if got.rows.size is None else got.rows.size.values[places],
        )
        noise = net.noise("delta")
        share = torch.ones(len(places)) / len(places) if size is None else size / size.sum()
        look.inner, look.mean = gram(delta, places, noise), mean_row(delta, places, size)
        norms = gram_norms(look.inner)
        look.mean_norm = mean_norm(
            look.mean, norms, len(members), noise * float(share.double().square().sum())
        )
        look.max_norm = _longest(norms, noise)
        look.updates, look.places, look.step = delta, places, got.step
        look.scatter = _scatter(norms, noise, delta.shape[1])
    return look


def _in_brief(
    net: ServerChannel,
    got: Replies[Any],
    cluster: int,
    members: list[int],
    labels: Sequence[int],
    total: Sums[Any] | None,
) -> SplitStatistics:
    """‖Δ_c‖ from the sum, ‖Δ_i‖ and α from briefs."""
    places = [k for k, i in enumerate(got.ids) if labels[i] == cluster]
    look = SplitStatistics(cluster, members, [got.ids[k] for k in places])
    if not places:
        return look
    rows, noise = got.rows.brief.values, net.noise("brief")
    look.inner = gram(rows, places, noise)
    norms = gram_norms(look.inner)
    look.max_norm = _longest(norms, noise)
    look.updates, look.places, look.step = rows, places, got.step
    look.scatter = _scatter(norms, noise, rows.shape[1], net.agreed["sketch"] is not None)
    look.mean_norm = math.inf  # nobody knows
    if total is not None and total.counts[cluster]:
        told = [norms[n] for n, i in enumerate(look.came) if i in set(total.ids)]
        look.mean = weighted_means(total)[cluster]
        look.mean_norm = mean_norm(
            look.mean, torch.stack(told), len(members), _noise_of_mean(net, total, cluster)
        )
    return look


def _noise_of_mean(net: ServerChannel, total: Sums[Any], cluster: int) -> float:
    """Return the expected squared norm of the noise in a cluster's mean.

    The noise is every client's, or a trusted server's in the sum.
    """
    return net.noise("delta") / float(total.counts[cluster]) ** (
        2 if net.agreed["placement"] == "central" else 1
    )


def _longest(norms: torch.Tensor, noise: float) -> float:
    """Return max ‖Δ_i‖, or under noise √(mean ‖Δ_i‖²) (ours).

    The largest of several noisy norms is the noisiest.
    """
    return float(norms.square().mean().sqrt() if noise else norms.max())


def _scatter(norms: torch.Tensor, noise: float, width: int, sketched: bool = False) -> float:
    """Return the standard deviation of a cosine of two noisy rows (ours).

    The rows have the median norm r, and each has noise of squared norm N in q numbers.
    ⟨x + n, y + n'⟩ scatters by √(N²/q + 2·N·r²/q) around ⟨x, y⟩, and a sketch by about r²/√q.
    """
    square = float(norms.quantile(0.5)) ** 2
    if not noise and not sketched:
        return 0.0
    if not square:
        return math.inf
    return math.sqrt(
        (noise**2 + 2 * noise * square) / width / square**2 + (1 / width if sketched else 0.0)
    )


def queue_averages(
    outbox: PendingUpdates, looks: Sequence[SplitStatistics], step: int, labels: Sequence[int]
) -> None:
    """Queue the clusters' means, under the mask of call `step`, for their members.

    The mean is zero for a cluster nobody replied from.
    """
    means = [look.mean for look in looks if look.mean is not None]
    if means:
        outbox.post(
            step,
            torch.stack(
                [torch.zeros_like(means[0]) if look.mean is None else look.mean for look in looks]
            ),
            labels,
        )


def compare_gradients(net: ServerChannel, outbox: PendingUpdates, look: SplitStatistics) -> None:
    """Ask those that came for their full gradients: α compares these instead (eq. 50)."""
    got = net.gather(CFLClient.gradient, outbox.message_for(look.came), to=look.came)
    look.came, look.places, look.step = list(got.ids), list(range(len(got.ids))), got.step
    if got.ids:
        look.updates, noise = got.rows.delta.values, net.noise("delta", "full")
        look.inner = gram(look.updates, None, noise)
        look.scatter = _scatter(gram_norms(look.inner), noise, look.updates.shape[1])


def fetch_split_model(net: ServerChannel, outbox: PendingUpdates, look: SplitStatistics) -> bool:
    """Get the model that a cluster is split at, before it moves on.

    Return False where no member posts it.
    """
    look.model = request_model(
        net, outbox, look.members, look.updates.shape[1] if look.mean is None else len(look.mean)
    )
    return len(look.model.displacement) > 0


def split_cluster(
    tree: ParameterTree, labels: list[int], look: SplitStatistics, number: int
) -> None:
    """Split a cluster in round `number`.

    The second half becomes a new cluster. The node keeps what newcomers will be compared with.
    """
    assert look.halves is not None
    new = 1 + max(labels)
    node = tree.branch(look.cluster, look.halves, new)
    node.round = number
    if len(look.model.displacement):
        node.model = look.model
        node.updates, node.step = look.updates[look.places].cpu(), look.step
    for i in look.halves[1]:
        labels[i] = new
