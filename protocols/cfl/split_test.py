"""CFL's split test: norms, cosine similarities and candidate sides of one cluster in one round.

The server computes lines 15–21 of Algorithm 5 of Sattler et al. 2019 from masked updates, whose
norms and inner products are those of the updates themselves. The corrections for noise and for
compressed updates are not in the paper, nor are gradient signatures: these have no norms to test
(eq. 32 and 33), and their clients' updates leave in sums only.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from securecluster.clustering.bipartition import Bipartition
from securecluster.clustering.similarity import FLOOR, mean_norm, mean_row
from securecluster.core.lazy_torch import torch
from securecluster.protocols import authoring as fl
from securecluster.protocols.cfl.client import CFLClient
from securecluster.protocols.cfl.parameter_tree import ParameterTree
from securecluster.protocols.common.comparison.compressed_updates import CompressedUpdate
from securecluster.protocols.common.comparison.evidence import Evidence, UpdateEvidence


@dataclass
class SplitStatistics:
    """Statistics of one cluster in one round, and the split that follows from them."""

    cluster: int
    members: list[int]
    evidence: Evidence  # of the members that can be compared
    compared: Evidence  # of those that α compares pair by pair: the same, or landmarks
    mean: torch.Tensor | None = None  # Δ_c, (d,)
    mean_norm: float = 0.0  # ‖Δ_c‖
    max_norm: float = 0.0  # max ‖Δ_i‖
    gap: float | None = None
    separation: float | None = None  # None in a round where an earlier condition failed
    p_value: float | None = None
    sides: tuple[list[int], list[int]] | None = None
    alpha: torch.Tensor = field(default_factory=fl.empty_tensor)  # of a split without landmarks
    cross_max: float = 0.0
    model: fl.ModelDelta = field(default_factory=fl.ModelDelta)  # θ*

    @property
    def candidates(self) -> list[int]:
        """Return the members that may be compared in some round."""
        return self.members if self.evidence.of_round else self.evidence.ids

    @property
    def noise(self) -> float:
        """Return the norm of privacy's noise in an update, over that of the update without it."""
        if not isinstance(self.evidence, UpdateEvidence) or not self.max_norm:
            return 0.0
        return math.sqrt(self.evidence.noise) / self.max_norm

    @property
    def complete(self) -> bool:
        """Return whether none of the members that may be compared is missing."""
        return len(self.evidence.ids) == len(self.candidates)

    def sides_of_all(self, sides: Bipartition) -> tuple[list[int], list[int]]:
        """Return the members of each half; those that cannot be compared join the larger one.

        Args:
            sides: by position in `compared`.
        """
        first, second = self.evidence.sides(self.compared, sides)
        placed = {*first, *second}
        larger = max(first, second, key=len)
        larger += [i for i in self.members if i not in placed]
        return sorted(first), sorted(second)

    def line(self) -> fl.Line:
        """Return the entry of the history."""
        return {
            "cluster": self.cluster,
            "mean_norm": self.mean_norm,
            "max_norm": self.max_norm,
            "gap": self.gap,
            "evidence": self.separation,
            "p_value": self.p_value,
            "members": len(self.members),
            "split": self.sides is not None,
        }


def server_view(
    weighted: bool,
    compresses: bool,
    tree: bool,
    evaluates_paths: bool,
    signatures: Sequence[str] = (),
) -> list[str]:
    """Return what the server sees under every mask.

    Args:
        weighted: clients send |D_i|.
        compresses: clients send compressed updates for clustering.
        tree: the server keeps the parameter tree.
        evaluates_paths: clients evaluate the models on their paths at the end.
        signatures: what gradient signatures show, which are compared in place of updates.
    """
    view: list[str] = []
    if weighted:
        view.append(fl.OfPlainSums("each client's number of samples"))
    if signatures:
        view += signatures
        view.append(fl.OfPlainSums("each client's update (the plain sum reads every reply)"))
    else:
        view.append(
            "norms and pairwise cosines of a round's updates (and full gradients, if asked for)"
        )
    view.append("the clusters, splits and members")
    if compresses:
        view.append(
            fl.OfPlainSums(
                "the updates beside the compressed ones (the plain sum reads every reply)"
            )
        )
    if tree:
        view.append("how far each node's model has moved")
    if evaluates_paths:
        view.append(
            fl.OfPlainSums(
                "each client's losses under the models on its path, and the number of samples kept "
                "aside (the plain sum reads both)"
            )
        )
    return view


def collect_updates(
    net: fl.ServerChannel,
    outbox: fl.PendingUpdates,
    recipients: Sequence[int],
    labels: Sequence[int],
    compresses: bool,
) -> tuple[fl.Replies[Any], fl.Sums[Any] | None]:
    """Collect the round's updates.

    Args:
        recipients: the clients that are sampled in this round.
        labels: (m,) each client's cluster.
        compresses: clients send compressed updates individually, and the full ones in sums only.

    Returns:
        The replies that α compares, and, with compression, the sums of the full updates of each
        cluster from which enough clients replied for a sum.
    """
    method: Any = CFLClient.send_compressed_update if compresses else CFLClient.train
    # A silent client would keep its whole cohort out of the sum that follows.
    tries = fl.TRIES if net.cohorts else 1
    replies = net.gather(method, outbox.message_for(recipients), to=recipients, tries=tries)
    outbox.acknowledge(replies.ids)
    if not compresses:
        return replies, None
    replied = Counter(labels[i] for i in replies.ids)
    # A sum over one client would show its update.
    contributors = [i for i in replies.ids if replied[labels[i]] >= net.least_members]
    if not contributors:
        return replies, None
    sums = net.sum(
        CFLClient.contribute_kept_update,
        fl.Empty(),
        to=contributors,
        by=[labels[i] for i in contributors],
        groups=1 + max(labels),
        rosters=fl.members(labels),
    )
    return replies, sums


def split_statistics(
    net: fl.ServerChannel,
    replies: fl.Replies[Any],
    cluster: int,
    members: list[int],
    update_sums: fl.Sums[Any] | None = None,
    landmarks: int | None = None,
) -> SplitStatistics:
    """Estimate norms of a cluster's updates, with the known noise subtracted.

    α are the cosine similarities of the updates (eq. 51).

    Args:
        replies: updates or compressed updates of all clusters in this round.
        cluster: the cluster's label.
        members: its clients.
        update_sums: with compression, the sums of the full updates; the norm of the mean is
            theirs.
        landmarks: the number of clients that α compares; None for all.
    """
    evidence = UpdateEvidence.of(net, replies).select(members)
    compressed = isinstance(replies.rows, CompressedUpdate)
    if compressed and net.agreed["sketch"] is not None:
        evidence = replace(evidence, floor=FLOOR)  # a sketch blurs cosines as noise does
    compared = evidence
    if landmarks is not None:
        compared = evidence.landmarks(net, landmarks, net.round, cluster)
    statistics = SplitStatistics(cluster, members, evidence, compared)
    if not evidence.ids:
        return statistics
    norms = evidence.norms(compared)
    statistics.max_norm = _largest_norm(norms, evidence.noise)
    if compressed:
        _measure_sum(net, statistics, norms, update_sums)
    else:
        _measure_mean(replies, statistics, evidence, norms)
    return statistics


def _measure_mean(
    replies: fl.Replies[Any],
    statistics: SplitStatistics,
    evidence: UpdateEvidence,
    norms: torch.Tensor,
) -> None:
    """Compute Δ_c and ‖Δ_c‖ from full updates."""
    positions = evidence.positions
    if replies.rows.size is None:
        size = None
        share = torch.ones(len(positions)) / len(positions)
    else:
        size = replies.rows.size.values[positions]
        share = size / size.sum()
    # Independent noise of squared norm N in each row gives Σ w_i²·N in the mean with weights w.
    noise_of_mean = evidence.noise * float(share.double().square().sum())
    statistics.mean = mean_row(evidence.table, positions, size)
    statistics.mean_norm = mean_norm(statistics.mean, norms, len(statistics.members), noise_of_mean)


def _measure_sum(
    net: fl.ServerChannel,
    statistics: SplitStatistics,
    norms: torch.Tensor,
    update_sums: fl.Sums[Any] | None,
) -> None:
    """Compute Δ_c and ‖Δ_c‖ from the sum of full updates, whose compressed form was read."""
    # Without a sum ‖Δ_c‖ is unknown, so the cluster must not count as stationary.
    statistics.mean_norm = math.inf
    cluster = statistics.cluster
    if update_sums is None or not update_sums.counts[cluster]:
        return
    contributors = set(update_sums.ids)
    summed_norms = []
    for n, i in enumerate(statistics.evidence.ids):
        if i in contributors:
            summed_norms.append(norms[n])
    statistics.mean = fl.weighted_means(update_sums)[cluster]
    statistics.mean_norm = mean_norm(
        statistics.mean,
        torch.stack(summed_norms),
        len(statistics.members),
        _noise_of_mean(net, update_sums, cluster),
    )


def _noise_of_mean(net: fl.ServerChannel, update_sums: fl.Sums[Any], cluster: int) -> float:
    """Return the expected squared norm of the noise in a cluster's mean."""
    noise = net.noise("delta")
    clients = float(update_sums.counts[cluster])
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


def average_by_sums(
    net: fl.ServerChannel,
    outbox: fl.PendingUpdates,
    recipients: Sequence[int],
    labels: Sequence[int],
    signatures: Evidence,
) -> tuple[list[SplitStatistics], int]:
    """Run lines 5–8 and 15 by one sum for each cluster, whose clients sent their evidence before.

    A cluster without a mean has no model to split at, so it has no evidence in this round.

    Args:
        recipients: the clients that are sampled in this round.
        labels: (m,) each client's cluster.
        signatures: of all clients.

    Returns:
        Statistics of all clusters with their means, and the call whose mask these carry.
    """
    clusters = fl.members(labels)
    sums: fl.Sums[Any] = net.sum(
        CFLClient.contribute,
        outbox.message_for(recipients),
        to=recipients,
        by=[labels[i] for i in recipients],
        groups=len(clusters),
        rosters=clusters,
    )
    outbox.acknowledge(sums.ids)
    means: dict[int, torch.Tensor] = {}
    if sums.ids:
        rows = fl.weighted_means(sums)
        summed_clusters = {labels[i] for i in sums.ids}
        means = {c: rows[c] for c in summed_clusters}
    round_statistics = []
    for c, members in enumerate(clusters):
        with_mean = members if c in means else []
        evidence = signatures.select(with_mean)
        round_statistics.append(SplitStatistics(c, members, evidence, evidence, means.get(c)))
    return round_statistics, sums.step


def queue_averages(
    outbox: fl.PendingUpdates,
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
    net: fl.ServerChannel,
    outbox: fl.PendingUpdates,
    statistics: SplitStatistics,
    landmarks: int | None = None,
) -> None:
    """Request full gradients of the clients that replied, for α to compare instead (eq. 50)."""
    clients = statistics.evidence.ids
    replies = net.gather(CFLClient.gradient, outbox.message_for(clients), to=clients)
    statistics.evidence = UpdateEvidence.of(net, replies, "full")
    statistics.compared = statistics.evidence.landmarks(
        net, landmarks, net.round, statistics.cluster
    )


def fetch_split_model(
    net: fl.ServerChannel, outbox: fl.PendingUpdates, statistics: SplitStatistics
) -> bool:
    """Fetch the cluster's model θ* before the round's average changes it.

    Returns:
        False if no member posts it.
    """
    assert statistics.mean is not None  # what α compares may be shorter than the model
    statistics.model = fl.request_model(net, outbox, statistics.members, len(statistics.mean))
    return len(statistics.model.displacement) > 0


def shortfall(tests: Sequence[Mapping[str, Any]], method: Any) -> str | None:
    """Return which condition of a split was not met, the first of those that no round met.

    Args:
        tests: of all rounds, as `SplitStatistics.line` has them, in their order.
        method: the `CFL` of the run.

    Returns:
        None without a test.
    """
    if not tests:
        return None
    members = max(test["members"] for test in tests)
    if members < method.additions.min_size:
        return f"{members} clients are fewer than min_size {method.additions.min_size}"
    relative = method.additions.criterion == "relative"
    longest = list(itertools.accumulate((test["max_norm"] for test in tests), max))
    unit = " of the longest" if relative else ""
    settled = [test["mean_norm"] / ((test["max_norm"] or 1) if relative else 1) for test in tests]
    if min(settled) >= method.eps1:
        return (
            f"the mean update was never shorter than {min(settled):.3g}{unit}, and a cluster is "
            f"split where it is shorter than {method.eps1:g} (eps1)"
        )
    apart = [
        test["max_norm"] / ((so_far or 1) if relative else 1)
        for test, so_far, mean in zip(tests, longest, settled, strict=True)
        if mean < method.eps1
    ]
    if max(apart) <= method.eps2:
        of_any = " of the longest of any round" if relative else ""
        return (
            f"once the mean update was short, the longest was at most {max(apart):.3g}{of_any}, "
            f"and clients pull apart above {method.eps2:g} (eps2)"
        )
    levels = [test["p_value"] for test in tests if test["p_value"] is not None]
    if levels and min(levels) > method.additions.level:
        return (
            "clients without clusters would be as separated with a probability of "
            f"{min(levels):.2g}, and a split needs {method.additions.level:g} (level)"
        )
    return (
        f"no round had two sides that are large enough and unlike (gamma_max {method.gamma_max:g})"
    )


def split_cluster(
    tree: ParameterTree, labels: list[int], statistics: SplitStatistics, number: int
) -> None:
    """Split a cluster: its second half becomes a new cluster.

    The tree's node keeps the model and the updates that newcomers will be compared with.

    Args:
        tree: changed in place.
        labels: (m,) each client's cluster, changed in place.
        statistics: of the cluster, with its sides.
        number: the round of the split.
    """
    assert statistics.sides is not None
    new = 1 + max(labels)
    node = tree.branch(statistics.cluster, statistics.sides, new)
    node.round = number
    node.compared = list(statistics.compared.ids) if len(statistics.alpha) else []
    node.alpha = statistics.alpha
    node.cross_max = statistics.cross_max
    node.noise = statistics.noise
    if len(statistics.model.displacement):
        node.model = statistics.model
        node.updates = statistics.evidence.updates.cpu()
        node.step = statistics.evidence.step
    for i in statistics.sides[1]:
        labels[i] = new
