"""The view that a server which splits clusters has of one cluster in one round.

It is that of lines 15–21 of Algorithm 5 of Sattler et al. 2019.
"""

from __future__ import annotations

import math
from collections import Counter
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
    replied: list[int]  # who replied with what α compares
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
        return len(self.replied) == len(self.members)

    def line(self) -> Line:
        """For the history."""
        known = {
            name: getattr(self, name)
            for name in ("cluster", "mean_norm", "max_norm", "gap", "evidence", "p_value")
        }
        return {**known, "members": len(self.members), "split": self.halves is not None}


def server_view(weighted: bool, compresses: bool, tree: bool, judged: bool) -> list[str]:
    """What the server sees under every mask."""
    found = ["each client's number of samples"] * weighted
    found += [
        "norms and pairwise cosines of a round's updates (and full gradients, if asked for)",
        "the clusters, splits and members",
    ]
    found += [
        "the updates beside the compressed ones (the plain sum reads every reply)"
    ] * compresses + ["how far each node's model has moved"] * tree
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
    compresses: bool,
) -> tuple[Replies[Any], Sums[Any] | None]:
    """Collect the round's updates, which α compares.

    With compression, collect compressed updates and, for every cluster with two or more members,
    the sum of the whole ones.
    """
    method: Any = CFLClient.send_compressed_update if compresses else CFLClient.train
    replies = net.gather(method, outbox.message_for(asked), to=asked)
    outbox.acknowledge(replies.ids)
    if not compresses:
        return replies, None
    replied = Counter(labels[i] for i in replies.ids)
    company = [i for i in replies.ids if replied[labels[i]] >= MINIMUM]
    if not company:
        return replies, None
    clusters = [labels[i] for i in company]
    sums = net.sum(
        CFLClient.contribute_kept_update,
        Empty(),
        to=company,
        by=clusters,
        groups=1 + max(labels),
    )
    return replies, sums


def split_statistics(
    net: ServerChannel,
    replies: Replies[Any],
    cluster: int,
    members: list[int],
    labels: Sequence[int],
    total: Sums[Any] | None = None,
) -> SplitStatistics:
    """Estimate norms and similarities of a cluster's updates, with the known noise subtracted.

    α are the cosine similarities of the updates (eq. 51).

    Args:
        total: the sums of whole updates where clients compress them, which give the norm of the
            mean.
    """
    if replies.ids and isinstance(replies.rows, CompressedUpdate):
        return _of_compressed(net, replies, cluster, members, labels, total)
    places = [k for k, i in enumerate(replies.ids) if labels[i] == cluster]
    statistics = SplitStatistics(cluster, members, [replies.ids[k] for k in places])
    if not places:
        return statistics
    delta = replies.rows.delta.values
    if replies.rows.size is None:
        size = None
        share = torch.ones(len(places)) / len(places)
    else:
        size = replies.rows.size.values[places]
        share = size / size.sum()
    noise = net.noise("delta")
    noise_of_mean = noise * float(share.double().square().sum())
    statistics.inner = gram(delta, places, noise)
    norms = gram_norms(statistics.inner)
    statistics.mean = mean_row(delta, places, size)
    statistics.mean_norm = mean_norm(statistics.mean, norms, len(members), noise_of_mean)
    statistics.max_norm = _longest(norms, noise)
    statistics.updates, statistics.places, statistics.step = delta, places, replies.step
    statistics.scatter = _scatter(norms, noise, delta.shape[1])
    return statistics


def _of_compressed(
    net: ServerChannel,
    replies: Replies[Any],
    cluster: int,
    members: list[int],
    labels: Sequence[int],
    total: Sums[Any] | None,
) -> SplitStatistics:
    """‖Δ_c‖ from the sum, ‖Δ_i‖ and α from compressed updates."""
    places = [k for k, i in enumerate(replies.ids) if labels[i] == cluster]
    statistics = SplitStatistics(cluster, members, [replies.ids[k] for k in places])
    if not places:
        return statistics
    rows, noise = replies.rows.compressed.values, net.noise("compressed")
    statistics.inner = gram(rows, places, noise)
    norms = gram_norms(statistics.inner)
    statistics.max_norm = _longest(norms, noise)
    statistics.updates, statistics.places, statistics.step = rows, places, replies.step
    statistics.scatter = _scatter(norms, noise, rows.shape[1], net.agreed["sketch"] is not None)
    statistics.mean_norm = math.inf  # nobody knows
    if total is not None and total.counts[cluster]:
        in_sum = set(total.ids)
        summed = torch.stack([norms[n] for n, i in enumerate(statistics.replied) if i in in_sum])
        noise_of_mean = _noise_of_mean(net, total, cluster)
        statistics.mean = weighted_means(total)[cluster]
        statistics.mean_norm = mean_norm(statistics.mean, summed, len(members), noise_of_mean)
    return statistics


def _noise_of_mean(net: ServerChannel, total: Sums[Any], cluster: int) -> float:
    """Return the expected squared norm of the noise in a cluster's mean.

    The noise is every client's, or a trusted server's in the sum.
    """
    noise, clients = net.noise("delta"), float(total.counts[cluster])
    if net.agreed["placement"] == "central":
        return noise / clients**2
    return noise / clients


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
    variance_of_noise = (noise**2 + 2 * noise * square) / width / square**2
    variance_of_sketch = 1 / width if sketched else 0.0
    return math.sqrt(variance_of_noise + variance_of_sketch)


def queue_averages(
    outbox: PendingUpdates,
    round_statistics: Sequence[SplitStatistics],
    step: int,
    labels: Sequence[int],
) -> None:
    """Queue the clusters' means, under the mask of call `step`, for their members.

    The mean is zero for a cluster nobody replied from.
    """
    means = [statistics.mean for statistics in round_statistics if statistics.mean is not None]
    if not means:
        return
    zero = torch.zeros_like(means[0])
    rows = [zero if statistics.mean is None else statistics.mean for statistics in round_statistics]
    outbox.post(step, torch.stack(rows), labels)


def compare_gradients(
    net: ServerChannel, outbox: PendingUpdates, statistics: SplitStatistics
) -> None:
    """Ask those that came for their full gradients: α compares these instead (eq. 50)."""
    replies = net.gather(
        CFLClient.gradient, outbox.message_for(statistics.replied), to=statistics.replied
    )
    statistics.replied = list(replies.ids)
    statistics.places = list(range(len(replies.ids)))
    statistics.step = replies.step
    if replies.ids:
        noise = net.noise("delta", "full")
        statistics.updates = replies.rows.delta.values
        statistics.inner = gram(statistics.updates, None, noise)
        statistics.scatter = _scatter(
            gram_norms(statistics.inner), noise, statistics.updates.shape[1]
        )


def fetch_split_model(
    net: ServerChannel, outbox: PendingUpdates, statistics: SplitStatistics
) -> bool:
    """Get the model that a cluster is split at, before it moves on.

    Return False where no member posts it.
    """
    width = statistics.updates.shape[1] if statistics.mean is None else len(statistics.mean)
    statistics.model = request_model(net, outbox, statistics.members, width)
    return len(statistics.model.displacement) > 0


def split_cluster(
    tree: ParameterTree, labels: list[int], statistics: SplitStatistics, number: int
) -> None:
    """Split a cluster in round `number`.

    The second half becomes a new cluster. The node keeps what newcomers will be compared with.
    """
    assert statistics.halves is not None
    new = 1 + max(labels)
    node = tree.branch(statistics.cluster, statistics.halves, new)
    node.round = number
    if len(statistics.model.displacement):
        node.model = statistics.model
        node.updates, node.step = statistics.updates[statistics.places].cpu(), statistics.step
    for i in statistics.halves[1]:
        labels[i] = new
