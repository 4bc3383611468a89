"""Distances of clients' one-shot models from clusters, and of clusters from each other.

They are those of Vardhan et al. 2024. `WeightDistance` tells them from weights, under a mask that
all of them carry, `CrossClusterLoss` by asking clients for losses, of which only sums and choices
leave.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from securecluster.clustering.distances import euclidean, to_others
from securecluster.core.lazy_torch import torch
from securecluster.errors import FrameError
from securecluster.messaging.messages import Empty, Picks, Rows
from securecluster.protocols.common.messages import empty_tensor
from securecluster.protocols.common.newcomers import check_offered
from securecluster.protocols.common.sampling import TRIES
from securecluster.protocols.srfca.client import OfferedClusters, SRFCAClient
from securecluster.protocols.srfca.graph import pairwise
from securecluster.runtime.endpoint import MINIMUM
from securecluster.runtime.server_channel import ServerChannel

Array = NDArray[np.float64]


@dataclass
class ClusterModels:
    """The clusters' models as the server holds them: displacements since w_0 under one mask."""

    table: torch.Tensor = field(default_factory=empty_tensor)  # (K, d)
    step: int = 0  # the call whose mask they carry
    kept: list[int] = field(default_factory=list)  # the label of each row, ascending
    # expected squared norm of the noise in each row
    noise: list[float] = field(default_factory=list)


def pairwise_l2(rows: torch.Tensor, noise: float) -> Array:
    """Return the L2 distances of all pairs of rows, (n, n), without the noise in them.

    The noise of each row has the expected squared norm `noise`.
    """
    found: Array = euclidean(rows).cpu().numpy()
    return np.sqrt(np.maximum(found**2 - 2 * noise, 0)) if noise else found


class ModelDistance(Protocol):
    """The dist between one-shot models and clusters, and between clusters.

    Cluster c here is row c of the `ClusterModels` that it was made for.
    """

    def nearest(self, who: Sequence[int], among: Sequence[int]) -> dict[int, int]:
        """Return the nearest of the clusters `among` to the one-shot model of each of `who`.

        Clients for which it cannot be told are left out.
        """
        ...

    def between(self, labels: Sequence[int]) -> Array:
        """dist of all pairs of clusters, (K, K); `labels[i]` is where client i belongs now."""
        ...


class WeightDistance:
    """L2 between weights, which the server sees through any orthonormal mask.

    Args:
        scattered: MERGE compares clusters as two clients of theirs would be compared (ours), and
            not their models alone.
        noise: expected squared norm of the noise in each row. It and that of the clusters' models
            are taken off squared distances.
    """

    def __init__(
        self,
        ids: Sequence[int],
        rows: torch.Tensor,
        models: ClusterModels,
        scattered: bool,
        noise: float = 0.0,
    ) -> None:
        self._models, self._scattered, self._noise = models, scattered, noise
        self._blur = np.array(models.noise or [0.0] * len(models.table))
        self._away = (
            dict(zip(ids, to_others(rows, models.table).numpy() ** 2 - self._blur, strict=True))
            if ids
            else {}
        )

    def nearest(self, who: Sequence[int], among: Sequence[int]) -> dict[int, int]:
        """Of the clients whose model came."""
        return {
            i: min(among, key=lambda c: float(self._away[i][c])) for i in who if i in self._away
        }

    def between(self, labels: Sequence[int]) -> Array:
        """Return ‖ω_c − ω_c'‖ of all pairs of clusters.

        Scattered, it is sqrt(‖ω_c − ω_c'‖² + v_c + v_c') with v_c the mean of ‖w_i − ω_c‖² over c's
        members. One-shot models differ by what averaging takes away, so a λ that tells them apart
        may lie above all distances of averages.
        """
        found: Array = euclidean(self._models.table).numpy() ** 2 - self._blur - self._blur[:, None]
        np.fill_diagonal(found, 0)
        spread = np.zeros(len(found))
        for c in set(labels) if self._scattered else ():
            own = [
                self._away[i][c] for i, label in enumerate(labels) if label == c and i in self._away
            ]
            spread[c] = max(0.0, np.mean(own) - self._noise) if own else 0.0
        return np.asarray(np.sqrt(np.maximum(found, 0) + spread[:, None] + spread))


class CrossClusterLoss:
    """The cross-cluster loss, by sums over clusters and by choices.

    It is ½(mean_{j∈c'} f_j(w_c) + mean_{i∈c} f_i(w_c')) (from the authors' code).

    Args:
        ids: the clients whose one-shot models came.
        judges: those that have judged them all.
        old: each client's cluster when the models were made.
        one_shot: distances of the judges' one-shot models, (r, r), where MERGE compares clusters as
            two clients of theirs would be compared (ours); without it, by their models alone.
    """

    def __init__(
        self,
        net: ServerChannel,
        ids: Sequence[int],
        judges: Sequence[int],
        models: ClusterModels,
        old: Sequence[int],
        one_shot: Array | None = None,
    ) -> None:
        self._net, self._models = net, models
        self._judges, self._one_shot = judges, one_shot
        self._others = self._mean_losses(ids, judges, old)
        self._judged: set[int] = set()

    def _mean_losses(self, ids: Sequence[int], judges: Sequence[int], old: Sequence[int]) -> Array:
        """mean_{j∈c} f_j(w_i), (m, K); NaN where nobody can tell."""
        row = {label: n for n, label in enumerate(self._models.kept)}
        own = {i: row[old[i]] for i in judges if old[i] in row}
        sums, counts = _sums(self._net, SRFCAClient.known_losses, own, len(row), len(old))
        found = np.full((len(old), len(row)), math.nan)
        for n in (n for n, count in enumerate(counts) if count):
            found[list(ids), n] = sums[n, list(ids)] / counts[n]
        return found

    def nearest(self, who: Sequence[int], among: Sequence[int]) -> dict[int, int]:
        """Return the nearest clusters as the clients themselves name them.

        Who does not reply is asked again. Who has judged the models answers by what it found.
        """
        known, new = (
            [i for i in who if i in self._judged],
            [i for i in who if i not in self._judged],
        )
        found: dict[int, int] = {}
        step = None
        for method, to in ((SRFCAClient.choose_again, known), (SRFCAClient.choose, new)):
            if to:  # both under one number, so that later calls draw the same batches
                got = self._net.gather(
                    method, self._query(to, among), to=to, step=step, tries=TRIES
                )
                step = got.step
                found |= (
                    check_offered(got.ids, got.rows.model.values.tolist(), among) if got.ids else {}
                )
        self._judged |= set(found)
        return found

    def _query(self, to: Sequence[int], among: Sequence[int]) -> OfferedClusters:
        others = np.full((len(to), len(self._models.table)), math.inf)
        others[:, list(among)] = self._others[list(to)][:, list(among)]
        everything = tuple(range(len(self._models.table)))
        picks = tuple(() if i in self._judged else everything for i in to)
        return OfferedClusters(
            Picks(self._models.table, picks), self._models.step, Rows(torch.as_tensor(others))
        )

    def between(self, labels: Sequence[int]) -> Array:
        """Return ½(F[c, c']/|c| + F[c', c]/|c'|) of F[c, c'] = Σ_{i∈c} f_i(ω_c'), (K, K).

        Where nobody tells one of the halves, it is the other half alone.

        Where `one_shot` is given, ½(v_c + v_c') is added: v_c is how much less c's model loses on
        c's clients than their one-shot models lose on each other. Averaging takes that away, so a λ
        of one-shot models may lie above all losses of averages.
        """
        K = len(self._models.table)
        sums, counts = _sums(
            self._net,
            SRFCAClient.cluster_losses,
            {i: labels[i] for i in sorted(self._judged)},
            K,
            K,
        )
        mean = np.full((K, K), math.nan)
        told = [c for c, count in enumerate(counts) if count]
        mean[told] = sums[told] / np.array(counts)[told, None]
        half = np.where(np.isnan(mean), mean.T, mean)
        spread = self._spread(labels, np.diag(mean))
        return np.nan_to_num((half + half.T) / 2, nan=math.inf) + (spread[:, None] + spread) / 2

    def _spread(self, labels: Sequence[int], own: Array) -> Array:
        """Return v_c of every cluster, (K,); 0 where it cannot be told."""
        spread = np.zeros(len(own))
        if self._one_shot is None:
            return spread
        cluster = np.array([labels[i] for i in self._judges])
        for c in np.flatnonzero(~np.isnan(own)):
            members = np.flatnonzero(cluster == c)
            if len(members) >= MINIMUM:
                distances = pairwise(self._one_shot[np.ix_(members, members)])
                spread[c] = max(0.0, float(distances.mean()) - float(own[c]))
        return spread


def _sums(
    net: ServerChannel, method: Any, own: dict[int, int], groups_: int, width: int
) -> tuple[Array, tuple[int, ...]]:
    """Return sums of losses over groups, (groups, width), and how many clients each holds.

    There is no sum of fewer than two clients.
    """
    left = {i: g for i, g in own.items() if list(own.values()).count(g) >= MINIMUM}
    total, counts = np.zeros((groups_, width)), [0] * groups_
    for _ in range(TRIES):
        open_ = {i: g for i, g in left.items() if not counts[g]}
        if open_:
            got = net.sum(method, Empty(), to=list(open_), by=list(open_.values()), groups=groups_)
            for g in (g for g, count in enumerate(got.counts) if count >= MINIMUM):
                row = got.rows.loss.table[g].numpy()
                if row.shape != (width,):
                    raise FrameError(
                        f"LossSums.loss has {len(row)} numbers where {width} were expected: the "
                        "replies are refused"
                    )
                total[g], counts[g] = row, got.counts[g]
    return total, tuple(counts)
