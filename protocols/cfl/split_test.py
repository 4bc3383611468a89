"""CFL's split test: norms, cosine similarities and candidate halves of one cluster in one round.

The server computes lines 15–21 of Algorithm 5 of Sattler et al. 2019 from masked updates, whose
norms and inner products are those of the updates themselves. The corrections for noise and for
compressed updates are not in the paper.

Under noise, the largest norm is the root mean square of the norms, since that of many noisy norms
depends on the noise most. With compressed updates ‖mean Δ‖ is from the sum, ‖Δ_i‖ and α from the
compressed updates. A split waits until a member that has all averages has posted the cluster's
model.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from securecluster.clustering.bipartition import Bipartition
from securecluster.clustering.labels import members as clusters_of
from securecluster.clustering.landmarks import extended_halves
from securecluster.clustering.similarity import gram, gram_norms, mean_norm, mean_row, row_norms
from securecluster.core.lazy_torch import torch
from securecluster.messaging.messages import Empty
from securecluster.messaging.replies import Replies, Sums
from securecluster.protocols.cfl.client import CFLClient
from securecluster.protocols.cfl.parameter_tree import ParameterTree
from securecluster.protocols.common.averaging import weighted_means
from securecluster.protocols.common.compressed_updates import CompressedUpdate
from securecluster.protocols.common.disclosures import OfPlainSums
from securecluster.protocols.common.messages import ModelDelta, empty_tensor
from securecluster.protocols.common.pending_updates import PendingUpdates, request_model
from securecluster.protocols.common.sampling import TRIES, sample_landmarks
from securecluster.runtime.endpoint import MINIMUM
from securecluster.runtime.run import Line
from securecluster.runtime.server_channel import ServerChannel


@dataclass
class SplitStatistics:
    """Statistics of one cluster's updates in one round, and the split that follows from them."""

    cluster: int
    members: list[int]
    replied: list[int]  # the n clients that sent what α compares
    mean: torch.Tensor | None = None  # Δ_c, (d,)
    mean_norm: float = 0.0  # ‖Δ_c‖
    max_norm: float = 0.0  # max ‖Δ_i‖
    # positions in `replied` of the s clients that α compares: all, or the landmarks
    compared: list[int] = field(default_factory=list)
    # (s, s) Gram matrix of what α compares; empty in a round without a test
    inner: torch.Tensor = field(default_factory=empty_tensor)
    updates: torch.Tensor = field(default_factory=empty_tensor)  # what α compares, (·, d)
    positions: list[int] = field(default_factory=list)  # (n,) rows of `updates`, of `replied`
    step: int = 0  # the call whose mask the updates carry
    scatter: float = 0.0  # approximate standard deviation of a cosine under noise and sketch
    gap: float | None = None
    evidence: float | None = None  # None in a round where an earlier condition failed
    p_value: float | None = None
    halves: tuple[list[int], list[int]] | None = None
    model: ModelDelta = field(default_factory=ModelDelta)  # θ*

    @property
    def complete(self) -> bool:
        """Return whether every member replied."""
        return len(self.replied) == len(self.members)

    def compare(self, net: ServerChannel, noise: float, landmarks: int | None) -> torch.Tensor:
        """Compute the Gram matrix of all rows, or of landmarks among them.

        Args:
            net: draws the landmarks.
            noise: expected squared norm of the noise in each row of `updates`.
            landmarks: the number of rows to compare; None for all.

        Returns:
            The norms of all rows without noise, (n,).
        """
        self.compared = list(range(len(self.positions)))
        if landmarks is not None:
            self.compared = sample_landmarks(net, self.compared, landmarks, net.round, self.cluster)
        positions = [self.positions[k] for k in self.compared]
        self.inner = gram(self.updates, positions, noise)
        if len(self.compared) == len(self.positions):
            return gram_norms(self.inner)
        return row_norms(self.updates, self.positions, noise)

    def halves_of_all(self, halves: Bipartition) -> tuple[Sequence[int], Sequence[int]]:
        """Return the halves of all clients that replied, by position in `replied`.

        Args:
            halves: by position in `compared`.
        """
        if len(self.compared) == len(self.positions):
            return halves.first, halves.second
        return extended_halves(self.updates[self.positions], self.compared, halves)

    def line(self) -> Line:
        """Return the entry of the history."""
        return {
            "cluster": self.cluster,
            "mean_norm": self.mean_norm,
            "max_norm": self.max_norm,
            "gap": self.gap,
            "evidence": self.evidence,
            "p_value": self.p_value,
            "members": len(self.members),
            "split": self.halves is not None,
        }


def server_view(
    weighted: bool, compresses: bool, tree: bool, judged: bool, signatures: Sequence[str] = ()
) -> list[str]:
    """Return what the server sees under every mask.

    Args:
        weighted: clients send |D_i|.
        compresses: clients send compressed updates for clustering.
        tree: the server keeps the parameter tree.
        judged: clients evaluate the models on their paths at the end.
        signatures: what gradient signatures show, which are compared in place of updates.
    """
    view: list[str] = []
    if weighted:
        view.append(OfPlainSums("each client's number of samples"))
    if signatures:
        view += signatures
        view.append(OfPlainSums("each client's update (the plain sum reads every reply)"))
    else:
        view.append(
            "norms and pairwise cosines of a round's updates (and full gradients, if asked for)"
        )
    view.append("the clusters, splits and members")
    if compresses:
        view.append(
            OfPlainSums("the updates beside the compressed ones (the plain sum reads every reply)")
        )
    if tree:
        view.append("how far each node's model has moved")
    if judged:
        view.append(
            OfPlainSums(
                "each client's losses under the models on its path, and the number of samples kept "
                "aside (the plain sum reads both)"
            )
        )
    return view


def collect_updates(
    net: ServerChannel,
    outbox: PendingUpdates,
    recipients: Sequence[int],
    labels: Sequence[int],
    compresses: bool,
) -> tuple[Replies[Any], Sums[Any] | None]:
    """Collect the round's updates.

    Args:
        recipients: the clients that are sampled in this round.
        labels: (m,) each client's cluster.
        compresses: clients send compressed updates individually, and the full ones in sums only.

    Returns:
        The replies that α compares, and, with compression, the sums of the full updates of each
        cluster from which two clients or more replied.
    """
    method: Any = CFLClient.send_compressed_update if compresses else CFLClient.train
    # A silent client would keep its whole cohort out of the sum that follows.
    tries = TRIES if net.cohorts else 1
    replies = net.gather(method, outbox.message_for(recipients), to=recipients, tries=tries)
    outbox.acknowledge(replies.ids)
    if not compresses:
        return replies, None
    replied = Counter(labels[i] for i in replies.ids)
    # A sum over one client would show its update.
    contributors = [i for i in replies.ids if replied[labels[i]] >= MINIMUM]
    if not contributors:
        return replies, None
    sums = net.sum(
        CFLClient.contribute_kept_update,
        Empty(),
        to=contributors,
        by=[labels[i] for i in contributors],
        groups=1 + max(labels),
        rosters=clusters_of(labels),
    )
    return replies, sums


def split_statistics(
    net: ServerChannel,
    replies: Replies[Any],
    cluster: int,
    members: list[int],
    labels: Sequence[int],
    total: Sums[Any] | None = None,
    landmarks: int | None = None,
) -> SplitStatistics:
    """Estimate norms and similarities of a cluster's updates, with the known noise subtracted.

    α are the cosine similarities of the updates (eq. 51).

    Args:
        replies: updates or compressed updates of all clusters in this round.
        cluster: the cluster's label.
        members: its clients.
        labels: (m,) each client's cluster.
        total: with compression, the sums of the full updates, which give the norm of the mean.
        landmarks: the number of clients that α compares; None for all.
    """
    positions = [k for k, i in enumerate(replies.ids) if labels[i] == cluster]
    replied = [replies.ids[k] for k in positions]
    statistics = SplitStatistics(cluster, members, replied, positions=positions)
    if not positions:
        return statistics
    statistics.step = replies.step
    if isinstance(replies.rows, CompressedUpdate):
        _measure_compressed(net, replies, statistics, total, landmarks)
    else:
        _measure_updates(net, replies, statistics, landmarks)
    return statistics


def _measure_updates(
    net: ServerChannel, replies: Replies[Any], statistics: SplitStatistics, landmarks: int | None
) -> None:
    """Compute the statistics of full updates."""
    positions = statistics.positions
    delta = replies.rows.delta.values
    if replies.rows.size is None:
        size = None
        share = torch.ones(len(positions)) / len(positions)
    else:
        size = replies.rows.size.values[positions]
        share = size / size.sum()
    noise = net.noise("delta")
    # Independent noise of squared norm N in each row gives Σ w_i²·N in the mean with weights w.
    noise_of_mean = noise * float(share.double().square().sum())
    statistics.updates = delta
    norms = statistics.compare(net, noise, landmarks)
    statistics.mean = mean_row(delta, positions, size)
    statistics.mean_norm = mean_norm(statistics.mean, norms, len(statistics.members), noise_of_mean)
    statistics.max_norm = _largest_norm(norms, noise)
    statistics.scatter = _cosine_deviation(norms, noise, delta.shape[1])


def _measure_compressed(
    net: ServerChannel,
    replies: Replies[Any],
    statistics: SplitStatistics,
    total: Sums[Any] | None,
    landmarks: int | None,
) -> None:
    """Compute ‖Δ_c‖ from the sum of full updates, and ‖Δ_i‖ and α from compressed ones."""
    rows = replies.rows.compressed.values
    noise = net.noise("compressed")
    statistics.updates = rows
    norms = statistics.compare(net, noise, landmarks)
    statistics.max_norm = _largest_norm(norms, noise)
    sketched = net.agreed["sketch"] is not None
    statistics.scatter = _cosine_deviation(norms, noise, rows.shape[1], sketched)
    # Without a sum ‖Δ_c‖ is unknown, so the cluster must not count as stationary.
    statistics.mean_norm = math.inf
    cluster = statistics.cluster
    if total is None or not total.counts[cluster]:
        return
    contributors = set(total.ids)
    summed_norms = []
    for n, i in enumerate(statistics.replied):
        if i in contributors:
            summed_norms.append(norms[n])
    statistics.mean = weighted_means(total)[cluster]
    statistics.mean_norm = mean_norm(
        statistics.mean,
        torch.stack(summed_norms),
        len(statistics.members),
        _noise_of_mean(net, total, cluster),
    )


def _noise_of_mean(net: ServerChannel, total: Sums[Any], cluster: int) -> float:
    """Return the expected squared norm of the noise in a cluster's mean."""
    noise = net.noise("delta")
    clients = float(total.counts[cluster])
    if net.agreed["placement"] == "central":
        # A trusted server adds noise once to the sum, which is divided by the number of clients.
        return noise / clients**2
    # Every client's noise is in the sum.
    return noise / clients


def _largest_norm(norms: torch.Tensor, noise: float) -> float:
    """Return max ‖Δ_i‖, or under noise √(mean ‖Δ_i‖²) (not in the paper).

    The largest of several noisy norms is mostly the one with the most noise.
    """
    if noise:
        return float(norms.square().mean().sqrt())
    return float(norms.max())


def _cosine_deviation(
    norms: torch.Tensor, noise: float, width: int, sketched: bool = False
) -> float:
    """Return the standard deviation of a cosine of two noisy rows (not in the paper).

    The rows have the median norm r, and each has noise of squared norm N in q numbers.
    ⟨x + n, y + n'⟩ scatters by √(N²/q + 2·N·r²/q) around ⟨x, y⟩, and a sketch by about r²/√q.

    Args:
        norms: (n,) norms without noise.
        noise: N.
        width: q.
        sketched: whether the rows are sketches.
    """
    if not noise and not sketched:
        return 0.0
    square = float(norms.quantile(0.5)) ** 2
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
    """Queue each cluster's masked mean update for its members.

    Clusters without replies get zeros.

    Args:
        round_statistics: of all clusters, by label.
        step: the call whose mask the means carry.
        labels: (m,) each client's cluster.
    """
    means = [statistics.mean for statistics in round_statistics]
    measured = [mean for mean in means if mean is not None]
    if not measured:
        return
    zero = torch.zeros_like(measured[0])
    rows = [zero if mean is None else mean for mean in means]
    outbox.post(step, torch.stack(rows), labels)


def compare_gradients(
    net: ServerChannel,
    outbox: PendingUpdates,
    statistics: SplitStatistics,
    landmarks: int | None = None,
) -> None:
    """Request full gradients of the clients that replied, for α to compare instead (eq. 50)."""
    query = outbox.message_for(statistics.replied)
    replies = net.gather(CFLClient.gradient, query, to=statistics.replied)
    statistics.replied = list(replies.ids)
    statistics.positions = list(range(len(replies.ids)))
    statistics.step = replies.step
    if not replies.ids:
        return
    noise = net.noise("delta", "full")
    gradients = replies.rows.delta.values
    statistics.updates = gradients
    norms = statistics.compare(net, noise, landmarks)
    statistics.scatter = _cosine_deviation(norms, noise, gradients.shape[1])


def fetch_split_model(
    net: ServerChannel, outbox: PendingUpdates, statistics: SplitStatistics
) -> bool:
    """Fetch the cluster's model θ* before the round's average changes it.

    Returns:
        False if no member posts it.
    """
    # What α compares may be shorter than the model.
    mean = statistics.mean
    width = statistics.updates.shape[1] if mean is None else len(mean)
    statistics.model = request_model(net, outbox, statistics.members, width)
    return len(statistics.model.displacement) > 0


def split_cluster(
    tree: ParameterTree, labels: list[int], statistics: SplitStatistics, number: int
) -> None:
    """Split a cluster: its second half becomes a new cluster.

    The tree's node keeps the model and the updates that newcomers will be compared with.

    Args:
        tree: changed in place.
        labels: (m,) each client's cluster, changed in place.
        statistics: of the cluster, with its halves.
        number: the round of the split.
    """
    assert statistics.halves is not None
    new = 1 + max(labels)
    node = tree.branch(statistics.cluster, statistics.halves, new)
    node.round = number
    if len(statistics.model.displacement):
        node.model = statistics.model
        node.updates = statistics.updates[statistics.positions].cpu()
        node.step = statistics.step
    for i in statistics.halves[1]:
        labels[i] = new
