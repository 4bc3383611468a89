"""FL+HC: federated learning with hierarchical clustering, Algorithm 1.

Briggs, Fan, Andras, "Federated learning with hierarchical clustering of local updates to improve
training on non-IID data", IJCNN 2020, arXiv 2004.11791.

n      rounds of FedAvg before the clustering round, which asks every client once, from the model
       the n rounds have led to
Δw_k   client k's masked update in the clustering round; P the hyper-parameters of the clustering:
       metric, linkage, threshold
c, K_c a cluster and its clients, who go on alone from that same model, to the same total number of
       rounds
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from numbers import Integral, Real
from typing import Any, ClassVar

from securecluster.clustering.agglomerative import (
    check_linkage,
    cut,
    gap_of,
    merges,
    nearest,
    representatives,
)
from securecluster.clustering.distances import METRICS, alike, distances
from securecluster.clustering.labels import largest
from securecluster.clustering.labels import members as clusters_of
from securecluster.clustering.noise_robust import default_threshold, partition
from securecluster.core.lazy_torch import torch
from securecluster.core.validation import check_choice
from securecluster.errors import PolicyError, UsageError
from securecluster.messaging.messages import Empty, Picks, Rows
from securecluster.messaging.replies import Replies
from securecluster.privacy.masking.masks import ENTRYWISE
from securecluster.protocols.common.averaging import AveragingState, SumClient, average_clusters
from securecluster.protocols.common.base import ReleaseCounts
from securecluster.protocols.common.client import TrainingClient
from securecluster.protocols.common.compressed_updates import (
    CompressedUpdateClient,
    gather_until_complete,
    updates_of,
)
from securecluster.protocols.common.compression_options import CompressionOptions
from securecluster.protocols.common.messages import AverageDeltas, ModelDelta, Update
from securecluster.protocols.common.newcomers import check_newcomers
from securecluster.protocols.common.pending_updates import PendingUpdates, flush, request_model
from securecluster.runtime.endpoint import GATHER, CallContext, answers
from securecluster.runtime.run import Run
from securecluster.runtime.server_channel import ServerChannel


@dataclass
class LinkageRecord:
    """The clustering round, as the server saw it."""

    ids: list[int]  # the r clients that replied, and their places in what follows
    distance: torch.Tensor  # (r, r)
    merges: torch.Tensor  # (r − 1, 4), scipy's linkage matrix
    threshold: float


@dataclass
class NewcomerReference:
    """What newcomers start from and are compared with."""

    joint: ModelDelta  # the model of the clustering round
    step: int  # the call of the clustering round
    rows: torch.Tensor  # (r, d) the updates, or (K, d) their means where the linkage needs no more
    labels: list[int]
    sizes: list[int]  # how many clients a row stands for
    linkage: str  # what newcomers are placed by


@dataclass
class FLHCState(AveragingState):
    """What the server's loop changes."""

    linkage: LinkageRecord | None = None
    memory: NewcomerReference | None = None
    absent: list[int] = field(default_factory=list)  # who never replied in the clustering round


class FLHCClient(SumClient, CompressedUpdateClient):
    """Clients that contribute to means, and whose updates may be read one by one (FL+HC's
    clustering round).
    """

    keeps: ClassVar[bool] = False

    @answers(GATHER, through=("delta",), fresh=True, derived=True)
    def post(self, context: CallContext, query: Empty) -> Update:
        """As of every discloser, of models that averages alone have made: what was trained alone
        would leave without noise.
        """
        if not self._unshared.isdisjoint(context.positions):
            raise PolicyError(
                "post shows the model of averages: who has trained alone holds one of its own"
            )
        return super().post(context, query)


@dataclass
class FLHC(CompressionOptions):
    """FedAvg, then one clustering of all clients' updates, then FedAvg in each cluster."""

    mask: str = "permutation"
    """map of updates that the server does not know, a fresh one each round: none, permutation,
    signed-permutation, rotation or haar
    """
    metric: str = "chord"
    """distance of updates: l1, l2, cosine, or chord, which is l2 of updates scaled to unit norm, so
    that clients with more samples and larger updates are no cluster (ours); l1 needs a mask that
    keeps it: none, permutation or signed-permutation
    """
    linkage: str = "ward"
    """distance of clusters: single, complete, average, or, with l2 and chord only, centroid or ward
    """
    threshold: float | None = None
    """merges up to this distance are made; None cuts at the largest relative gap of the merges'
    distances, if it is large or significant
    """
    pre_rounds: int = 10
    """rounds of FedAvg before the clustering"""

    name: ClassVar[str] = "flhc"
    client: ClassVar[type[TrainingClient]] = FLHCClient

    def run_server(self, net: ServerChannel, run: Run) -> FLHCState:
        """Algorithm 1, "On server": lines 3–5, 6–10 and 11–16 in one loop over rounds."""
        m = len(net.clients)
        state = FLHCState([0] * m, PendingUpdates.start(m, fresh=self.mask != "none"))
        for t in run.rounds("train", state, self.rounds):
            # the clusters stand before any of these clients trains alone
            if t == self.pre_rounds + 1:
                run.commit(state, partial(self._divide, net, run, state))
            average_clusters(net, state, self.participation, t)
        flush(net, run, state)
        return state

    def _divide(self, net: ServerChannel, run: Run, state: FLHCState) -> None:
        """Cluster, and say so in the history."""
        self._cluster(net, state)
        self._note(run, state)

    def _cluster(self, net: ServerChannel, state: FLHCState) -> None:
        """Lines 6–10: everyone's update from the joint model, merged up to the threshold. These
        updates move no model.
        """
        ids, rows, step = gather_until_complete(
            net,
            state.outbox,
            FLHCClient.send_compressed_update if self.compresses else FLHCClient.train,
        )
        state.absent = [i for i in net.clients if i not in ids]
        if len(ids) < 2:
            return
        noise = net.noise("compressed" if self.compresses else "delta")
        distance = distances(rows, self.metric, noise).cpu()
        tree = merges(distance.numpy(), self.linkage)
        seed = net.randomness.integer("server", "clusterer")
        cosines = alike(rows, "cosine", noise).cpu().numpy()
        gap = gap_of(self.metric, self.linkage)
        at = (
            default_threshold(tree, gap, cosines, seed)
            if self.threshold is None
            else self.threshold
        )
        labels = cut(tree, at)
        if self.clusterer != "paper":
            labels = partition(
                alike(rows, self.metric, noise).cpu().numpy(), self.clusterer, None, seed
            )
        state.linkage = LinkageRecord(ids, distance, torch.from_numpy(tree), float(at))
        state.memory = self._memory(net, state, ids, rows, labels, step)
        place = dict(zip(ids, labels, strict=True))
        state.labels = [place.get(i, largest(labels)) for i in net.clients]

    def _memory(
        self,
        net: ServerChannel,
        state: FLHCState,
        ids: list[int],
        rows: torch.Tensor,
        labels: list[int],
        step: int,
    ) -> NewcomerReference | None:
        """Return what newcomers need.

        Return None where nobody posts the joint model, which all who replied hold.
        """
        joint = request_model(
            net,
            state.outbox,
            ids,
            int(net.agreed["dimension"]) if self.compresses else rows.shape[1],
        )
        if not len(joint.displacement):
            return None
        linkage = self.linkage if self.clusterer == "paper" else "average"
        kept, of, sizes = representatives(rows, labels, linkage)
        return NewcomerReference(joint, step, kept.cpu(), of, sizes, linkage)

    def assign_newcomers(
        self, net: ServerChannel, state: FLHCState, to: Sequence[int]
    ) -> list[int]:
        """Ours: a newcomer trains from the clustering round's model and joins the cluster at the
        least linkage distance.

        Its update carries that round's mask.
        """
        known = state.memory
        if known is None:
            raise UsageError(
                "nobody replied in the clustering round, so there is nothing to compare newcomers "
                "with: run it anew"
            )
        picks = ((0,),) * len(to)
        first = Rows(torch.ones(len(to), dtype=torch.int64))
        steps = Picks(torch.tensor([known.joint.step]), picks)
        query = AverageDeltas(
            Picks(known.joint.displacement[None], picks), steps, absolute=True, count=first
        )
        got: Replies[Any] = net.gather(
            FLHCClient.send_compressed_update if self.compresses else FLHCClient.train,
            query,
            to=to,
            step=known.step,
        )
        check_newcomers(to, got.ids)
        updates = updates_of(got)
        noise = net.noise("compressed" if self.compresses else "delta") / torch.tensor(
            [*known.sizes, *(1 for _ in got.ids)]
        )
        apart = (
            distances(torch.cat([known.rows.to(updates), updates]), self.metric, noise)
            .cpu()
            .numpy()
        )
        r = len(known.rows)
        found = dict(
            zip(
                got.ids,
                nearest(apart[r:, :r], known.labels, known.sizes, known.linkage),
                strict=True,
            )
        )
        return [found[i] for i in to]

    def _note(self, run: Run, state: FLHCState) -> None:
        linkage = state.linkage
        seen = (
            {}
            if linkage is None or self.clusterer != "paper"
            else {"threshold": linkage.threshold, "merges": linkage.merges.tolist()}
        )
        run.note(clustered=clusters_of(state.labels), absent=list(state.absent), **seen)

    def check(self, clients: int) -> None:
        """Adds what belongs to the clustering."""
        super().check(clients)
        check_choice(self, metric=METRICS)
        check_linkage(self.metric, self.linkage)
        if self.metric == "l1" and self.mask not in ENTRYWISE:
            raise UsageError(
                f"the mask {self.mask!r} mixes coordinates, which changes l1 distances: use a "
                "permutation, or metric chord"
            )
        if not (isinstance(self.pre_rounds, Integral) and 0 <= self.pre_rounds < self.rounds):
            raise UsageError(
                f"pre_rounds = {self.pre_rounds!r} of {self.rounds} rounds: the clustering comes "
                "after pre_rounds, a whole number from 0 to"
                " rounds - 1; lower pre_rounds or ask for more rounds"
            )
        if self.threshold is not None and not (
            isinstance(self.threshold, Real) and 0 <= float(self.threshold) < math.inf
        ):
            raise UsageError(
                f"threshold = {self.threshold!r} is no distance: give a finite number from 0, or "
                "leave it out for the largest gap"
            )
        if self.threshold is not None and self.clusterer != "paper":
            raise UsageError(
                f"a threshold cuts the paper's merges, and the clusterer {self.clusterer!r} has "
                "none: leave one of them out"
            )

    def releases(self) -> ReleaseCounts:
        """What every round takes, and an update, or a compressed one, in the clustering round."""
        return ReleaseCounts(updates=self.rounds + 1, trainings=self.rounds + 1)

    def server_view(self) -> list[str]:
        """What stays visible under every mask."""
        found = [
            "pairwise distances, norms and inner products of all clients' updates of the "
            "clustering round",
            "how far the model of the clustering round has moved from the first one",
            "the clusters, and each client's cluster",
        ]
        return found + ["each client's number of samples (the plain sum reads every reply)"] * (
            not self.per_client
        )
