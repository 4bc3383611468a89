"""Distances of one-shot models from clusters, and of clusters from each other.

These are the two distances of Vardhan et al. 2024. `WeightDistance` computes them from weights that
all carry the same mask. `CrossClusterLoss` obtains them from losses that clients evaluate, of which
only sums and choices leave the clients.

`WeightDistance` subtracts the known noise of one-shot models, and that of clusters' models,
averages over few members, from squared distances. Without λ, MERGE also corrects for averaging:
averages lie closer together than models that clients trained alone. With a given λ it compares as
the paper does.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from securecluster.clustering.distances import euclidean, to_others
from securecluster.core.lazy_torch import torch
from securecluster.protocols import authoring as fl
from securecluster.protocols.common.newcomers import check_offered
from securecluster.protocols.srfca.client import OfferedClusters, SRFCAClient
from securecluster.protocols.srfca.graph import pairwise

Array = NDArray[np.float64]


@dataclass
class ClusterModels:
    """The clusters' models as the server stores them: deltas since w_0 under one mask."""

    table: torch.Tensor = field(default_factory=fl.empty_tensor)  # (K, d)
    step: int = 0  # the call whose mask the rows carry
    kept: list[int] = field(default_factory=list)  # the cluster of each row, ascending
    # expected squared norm of the noise in each row
    noise: list[float] = field(default_factory=list)


def pairwise_l2(rows: torch.Tensor, noise: float) -> Array:
    """Return the L2 distances of all pairs of rows, corrected for noise.

    Args:
        rows: (n, d) models.
        noise: expected squared norm of the noise in each row. It is subtracted from squared
            distances, twice for each pair.

    Returns:
        (n, n)
    """
    distance: Array = euclidean(rows).cpu().numpy()
    if not noise:
        return distance
    # noise may make a squared distance smaller than its own expectation
    squared = distance**2 - 2 * noise
    return np.sqrt(np.maximum(squared, 0))


class ModelDistance(Protocol):
    """The function dist of the paper, for one-shot models and clusters.

    Cluster c is row c of the `ClusterModels` that the distance was made for.
    """

    def nearest(self, clients: Sequence[int], candidates: Sequence[int]) -> dict[int, int]:
        """Return the nearest cluster to each client's one-shot model.

        Args:
            clients: the clients to assign.
            candidates: the clusters to choose from.

        Returns:
            The nearest candidate of each client; without clients whose distance is unknown.
        """
        ...

    def between(self, labels: Sequence[int]) -> Array:
        """Return the distances of all pairs of clusters.

        Args:
            labels: (m,) each client's current cluster.

        Returns:
            (K, K)
        """
        ...


class WeightDistance:
    """The L2 distance of weights, which is the same under any orthonormal mask.

    Args:
        ids: (r,) the clients whose one-shot models were received.
        rows: (r, d) these models.
        models: the clusters' models under the same mask.
        scattered: if True, MERGE compares clusters as two of their clients would be compared (not
            in the paper), otherwise by their models alone.
        noise: expected squared norm of the noise in each of the rows. It and that of the clusters'
            models are subtracted from squared distances.
    """

    def __init__(
        self,
        ids: Sequence[int],
        rows: torch.Tensor,
        models: ClusterModels,
        scattered: bool,
        noise: float = 0.0,
    ) -> None:
        self._models = models
        self._scattered = scattered
        self._noise = noise
        # (K,) noise of the clusters' models
        no_noise = [0.0] * len(models.table)
        self._model_noise = np.array(models.noise or no_noise)
        # by client: (K,) squared distances to the clusters' models
        self._squared: dict[int, Array] = {}
        if ids:
            distance = to_others(rows, models.table).numpy()
            squared = distance**2 - self._model_noise
            self._squared = dict(zip(ids, squared, strict=True))

    def nearest(self, clients: Sequence[int], candidates: Sequence[int]) -> dict[int, int]:
        """Return the nearest of the candidates to each client whose model was received."""
        chosen = {}
        for i in clients:
            if i in self._squared:
                squared = self._squared[i]
                chosen[i] = min(candidates, key=lambda c: float(squared[c]))
        return chosen

    def between(self, labels: Sequence[int]) -> Array:
        """Return ‖ω_c − ω_c'‖ of all pairs of clusters, (K, K).

        If clusters are scattered, it is sqrt(‖ω_c − ω_c'‖² + v_c + v_c'), where v_c is the mean of
        ‖w_i − ω_c‖² over c's members.
        """
        squared: Array = euclidean(self._models.table).numpy() ** 2
        squared = squared - self._model_noise - self._model_noise[:, None]
        np.fill_diagonal(squared, 0)
        spread = self._spread(labels, len(squared))
        squared = np.maximum(squared, 0) + spread[:, None] + spread
        return np.asarray(np.sqrt(squared))

    def _spread(self, labels: Sequence[int], clusters: int) -> Array:
        """Return v_c of every cluster, (K,); 0 where no member's model was received."""
        spread = np.zeros(clusters)
        # One-shot models differ by components that averaging removes, so a λ that separates them
        # may exceed all distances of averages.
        if not self._scattered:
            return spread
        squared: dict[int, list[float]] = {}
        for i, label in enumerate(labels):
            if i in self._squared:
                members = squared.setdefault(label, [])
                members.append(self._squared[i][label])
        for c, members in squared.items():
            mean = float(np.mean(members))
            spread[c] = max(0.0, mean - self._noise)
        return spread


class CrossClusterLoss:
    """The cross-cluster loss, computed from sums over clusters and from clients' choices.

    It is ½(mean_{j∈c'} f_j(w_c) + mean_{i∈c} f_i(w_c')), as in the authors' code.

    Args:
        net: the server's channel.
        ids: the clients whose one-shot models were received.
        evaluators: the clients that have evaluated all of them.
        models: the clusters' models.
        old: (m,) each client's cluster when the models were made.
        one_shot: (r, r) distances of the evaluators' one-shot models. If present, MERGE compares
            clusters as two of their clients would be compared (not in the paper), otherwise by
            their models alone.
    """

    def __init__(
        self,
        net: fl.ServerChannel,
        ids: Sequence[int],
        evaluators: Sequence[int],
        models: ClusterModels,
        old: Sequence[int],
        one_shot: Array | None = None,
    ) -> None:
        self._net = net
        self._models = models
        self._evaluators = evaluators
        self._one_shot = one_shot
        # sums of losses that clients have stored: no model is sent for them
        self._others = self._mean_losses(ids, evaluators, old)
        self._evaluated: set[int] = set()  # clients that have evaluated the clusters' models

    def _mean_losses(
        self, ids: Sequence[int], evaluators: Sequence[int], old: Sequence[int]
    ) -> Array:
        """Return mean_{j∈c} f_j(w_i), (m, K); NaN where it is unknown."""
        row_of = {label: row for row, label in enumerate(self._models.kept)}
        cluster_of = {}
        for i in evaluators:
            if old[i] in row_of:
                cluster_of[i] = row_of[old[i]]
        sums, counts = _sums(
            self._net, SRFCAClient.known_losses, cluster_of, len(row_of), width=len(old)
        )
        shape = (len(old), len(row_of))
        means = np.full(shape, math.nan)
        clients = list(ids)
        for c, count in enumerate(counts):
            if count:
                means[clients, c] = sums[c, clients] / count
        return means

    def nearest(self, clients: Sequence[int], candidates: Sequence[int]) -> dict[int, int]:
        """Return the nearest clusters as the clients themselves choose them.

        Clients that do not reply are asked again. Those that have evaluated the models choose by
        the losses that they stored.
        """
        again = [i for i in clients if i in self._evaluated]
        first = [i for i in clients if i not in self._evaluated]
        chosen: dict[int, int] = {}
        # both calls under one number, so that later calls draw the same batches
        step = None
        for method, recipients in ((SRFCAClient.choose_again, again), (SRFCAClient.choose, first)):
            if not recipients:
                continue
            query = self._query(recipients, candidates)
            replies = self._net.gather(method, query, to=recipients, step=step, tries=fl.TRIES)
            step = replies.step
            if replies.ids:
                choices = replies.rows.model.values.tolist()
                chosen |= check_offered(replies.ids, choices, candidates)
        self._evaluated |= set(chosen)
        return chosen

    def _query(self, recipients: Sequence[int], candidates: Sequence[int]) -> OfferedClusters:
        """Return the clusters to choose from, with their members' mean losses.

        The models themselves are sent to clients that have not evaluated them yet.
        """
        clusters = len(self._models.table)
        others = np.full((len(recipients), clusters), math.inf)  # inf: not a candidate
        rows = list(recipients)
        columns = list(candidates)
        losses = self._others[rows]
        others[:, columns] = losses[:, columns]
        # a client evaluates the clusters' models once
        all_models = tuple(range(clusters))
        picks: list[tuple[int, ...]] = []
        for i in recipients:
            picks.append(() if i in self._evaluated else all_models)
        return OfferedClusters(
            models=fl.Picks(self._models.table, tuple(picks)),
            step=self._models.step,
            others=fl.Rows(torch.as_tensor(others)),
        )

    def between(self, labels: Sequence[int]) -> Array:
        """Return ½(F[c, c']/|c| + F[c', c]/|c'|) of F[c, c'] = Σ_{i∈c} f_i(ω_c'), (K, K).

        Where one of the two terms is unknown, it is the other one alone.

        If `one_shot` is given, ½(v_c + v_c') is added: v_c is the amount by which c's model has
        lower loss on c's clients than their one-shot models have on each other.
        """
        clusters = len(self._models.table)
        cluster_of = {i: labels[i] for i in sorted(self._evaluated)}
        sums, counts = _sums(
            self._net, SRFCAClient.cluster_losses, cluster_of, clusters, width=clusters
        )
        mean = np.full((clusters, clusters), math.nan)
        replied = [c for c, count in enumerate(counts) if count]
        members = np.array(counts)[replied]
        mean[replied] = sums[replied] / members[:, None]

        half = np.where(np.isnan(mean), mean.T, mean)
        distance = np.nan_to_num((half + half.T) / 2, nan=math.inf)
        # Averaging removes v_c, so a λ of one-shot models may exceed all losses of averages.
        spread = self._spread(labels, np.diag(mean))
        return distance + (spread[:, None] + spread) / 2

    def _spread(self, labels: Sequence[int], within: Array) -> Array:
        """Return v_c of every cluster; 0 where it is unknown.

        Args:
            labels: (m,) each client's cluster.
            within: (K,) the mean loss of each cluster's model on its own members, or NaN.

        Returns:
            (K,)
        """
        spread = np.zeros(len(within))
        if self._one_shot is None:
            return spread
        label_of_evaluator = np.array([labels[i] for i in self._evaluators])
        for c in np.flatnonzero(~np.isnan(within)):
            members = np.flatnonzero(label_of_evaluator == c)
            if len(members) >= fl.MINIMUM:
                distances = pairwise(self._one_shot[np.ix_(members, members)])
                one_shot = float(distances.mean())
                spread[c] = max(0.0, one_shot - float(within[c]))
        return spread


def _sums(
    net: fl.ServerChannel, method: Any, cluster_of: Mapping[int, int], clusters: int, width: int
) -> tuple[Array, tuple[int, ...]]:
    """Return sums of clients' losses over clusters.

    No sum is over too few clients, since it would reveal the losses of one.

    Args:
        net: the server's channel.
        method: the client method that replies with a `LossSums`.
        cluster_of: the cluster of each client to be asked.
        clusters: K.
        width: numbers of a client's row.

    Returns:
        The sums (K, width) and the number of clients in each, (K,).

    Raises:
        FrameError: rows of another width were received.
    """
    sizes = Counter(cluster_of.values())
    large_enough = {i: c for i, c in cluster_of.items() if sizes[c] >= net.least_members}
    totals = np.zeros((clusters, width))
    counts = [0] * clusters
    for _ in range(fl.TRIES):
        open_clients = {i: c for i, c in large_enough.items() if not counts[c]}
        if not open_clients:
            break
        sums = net.sum(
            method,
            fl.Empty(),
            to=list(open_clients),
            by=list(open_clients.values()),
            groups=clusters,
        )
        for c, count in enumerate(sums.counts):
            if count < net.least_members:
                continue
            row = sums.rows.loss.table[c].numpy()
            if row.shape != (width,):
                raise fl.FrameError(
                    f"LossSums.loss has {len(row)} numbers where {width} were expected: the "
                    "replies are refused"
                )
            totals[c] = row
            counts[c] = count
    return totals, tuple(counts)
