"""SR-FCA: Vardhan, Ghosh, Mazumdar, "An Improved Federated Clustering Algorithm with Model-based Clustering", TMLR 2024. Algorithms 1–4.

w_0    where everyone starts; w_i client i's model after training alone, f_i its mean training loss
λ, t   models within λ of each other are joined by an edge; connected components with t clients or more are clusters
ω_c    cluster c's model: the (trimmed) mean of its members' updates, round after round, from w_0 anew in each of R refinements
dist   ½(mean_{j∈c'} f_j(w_c) + mean_{i∈c} f_i(w_c')), the cross-cluster loss of the authors' code, or the L2 distance of the weights

The number of clusters is not given. What the paper leaves open, and is decided here, is marked "ours".
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Integral, Real
from typing import Any, ClassVar

from securecluster.protocols.base import Protocol

from securecluster.averaging import Contributor, handed_in
from securecluster.backend import torch
from securecluster.cohort import Cohort
from securecluster.components import OUTSIDE, check_clustering, choose_reach, components, groups, tree_edges
from securecluster.displacements import Outbox, Trainee, check_newcomers, deliver
from securecluster.distances import euclidean
from securecluster.errors import UsageError, unknown
from securecluster.messages import Rows
from securecluster.network import Network
from securecluster.privacy.masks import ENTRYWISE
from securecluster.privacy.stages import Pipeline
from securecluster.refinement import (
    ByDistance,
    ByLoss,
    Clustered,
    Clusters,
    cluster_models,
    cross_losses,
    merge,
    offered,
    recluster,
    trimmed,
)
from securecluster.refiner import Refiner, Refining
from securecluster.run import Run
from securecluster.tree import FULL


@dataclass
class State(Clustered):
    """What the server's loop changes."""

    reach: float = 0.0  # λ
    step: int = 0  # the call in which clients handed in their models: it names the mask
    ids: list[int] = field(default_factory=list)  # who did
    judges: list[int] = field(default_factory=list)  # and, for the cross-cluster loss, who judged them all
    rows: torch.Tensor = field(default_factory=lambda: torch.zeros(0, 0))  # (m, d) what they handed in; L2, until the last RECLUSTER
    models: Clusters = field(default_factory=Clusters)  # ω_c


@dataclass
class SRFCA(Protocol):
    """Clusters of models that were trained alone, refined by averaging, reassigning and merging."""

    mask: str = "permutation"
    """map of updates that the server does not know, a fresh one each round: none, permutation, signed-permutation, rotation or haar"""
    rounds: int = 20
    """rounds of each refinement, besides local_rounds and retrain"""
    distance: str = "loss"
    """of models: loss (cross-cluster loss; every model goes to every client once) or l2 (of the weights, which the server compares)"""
    threshold: float | None = None
    """λ: models within this distance are joined; None takes quantile, or the middle of the largest gap of the spanning tree's edges"""
    quantile: float | None = None
    """λ as a quantile of all pairwise distances, in [0, 1]"""
    size: int = 2
    """t: the fewest clients of a cluster, at least 2"""
    trim: float = 0.0
    """β: share of the updates left out at each end of every coordinate, in [0, 0.5); 0 needs no more than a sum"""
    refine: int = 2
    """R: refinements"""
    local_rounds: int = 20
    """rounds in which clients train alone before they are clustered"""
    variant: str = "fedavg"
    """what is averaged: fedavg (updates after local epochs) or gradient (full gradients: one step of lr a round)"""
    radius: float = 0.0
    """of the ball around the initial weights that models are projected into; 0 does not"""
    retrain: int = 0
    """rounds of averaging after the last merge"""

    name: ClassVar[str] = "srfca"
    client: ClassVar[type[Trainee]] = Refiner

    def serve(self, net: Network, run: Run) -> State:
        """Algorithm 1."""
        m = len(net.clients)
        state = State([OUTSIDE] * m, Outbox.start(m, fresh=False))
        for t in run.rounds("train", state, self.total):
            if t <= self.local_rounds:
                net.gather(Contributor.alone, state.outbox.letter(net.clients), to=net.clients)
                if t == self.local_rounds:
                    self._one_shot(net, run, state)
                continue
            r, s = divmod(t - self.local_rounds - 1, self.rounds)
            if s == 0 and r < self.refine:
                state.restart(self._fresh)
            trimmed(net, state, self.participation, self.trim, t)
            if s == self.rounds - 1 and r < self.refine:
                self._refine(net, run, state, last=r == self.refine - 1)
        deliver(net, run, state)
        if self.retrain:
            state.models = run.once("models", lambda: cluster_models(net, state, None), Clusters)
        return state

    def _one_shot(self, net: Network, run: Run, state: State) -> None:
        """ONE_SHOT(λ, t). Without a component of t clients everyone is one cluster (ours)."""
        state.ids, rows, state.step = handed_in(net, Refiner.hand_in, net.clients)
        if self.distance == "l2":
            distance, judges, state.rows = euclidean(rows).cpu().numpy(), tuple(state.ids), rows.cpu()
        else:
            distance, judges = cross_losses(net, state.ids, rows, state.step)
        state.judges, edges = list(judges), tree_edges(distance)
        state.reach = choose_reach(distance, edges, self.size, self.threshold, self.quantile)
        found = dict(zip(judges, components(distance, state.reach, self.size), strict=True))
        state.clusters = [found.get(i, OUTSIDE) for i in net.clients]
        none = max(state.clusters) == OUTSIDE
        if none:
            state.clusters = [0] * len(net.clients)
        run.note(**{"lambda": state.reach}, edges=edges.tolist(), clustered=groups(state.clusters), none=none)

    def _refine(self, net: Network, run: Run, state: State, last: bool) -> None:
        """RECLUSTER and MERGE. Where no member of any cluster replies, clusters stay as they are (ours)."""
        l2 = self.distance == "l2"
        models = cluster_models(net, state, state.step if l2 else None)
        if not models.kept:
            return
        near = ByDistance(state.ids, state.rows, models) if l2 else ByLoss(net, state.ids, state.judges, models, state.clusters)
        before = [models.kept.index(c) if c in models.kept else OUTSIDE for c in state.clusters]
        taken = recluster(near, before, len(models.kept))
        state.clusters, table = merge(near, taken, models, state.reach, self.size)
        state.models = Clusters(table, models.step, list(range(len(table))))
        state.restart(self._fresh)
        state.outbox.post(models.step, table, state.clusters)  # counted from w_0, whatever a client held
        if last:
            state.rows = torch.zeros(0, 0)
        run.note(reclustered=groups(taken), clustered=groups(state.clusters))

    def place(self, net: Network, state: State, to: Sequence[int]) -> list[int]:
        """Newcomers get the models and say which is nearest: to the one they train alone (l2), or by their own loss (ours)."""
        if not len(state.models.table):
            raise UsageError("no member of any cluster posted its model, so newcomers have none to choose from: run it anew")
        for _ in range(self.local_rounds if self.distance == "l2" else 0):
            net.gather(Contributor.alone, Outbox.start(0, fresh=False).letter(to), to=to)
        method = Refiner.join if self.distance == "l2" else Refiner.choose
        got = net.gather(method, offered(state.models, len(to)), to=to)
        check_newcomers(to, got.ids)
        found = dict(zip(got.ids, got.rows.model.values.tolist(), strict=True))
        return [found[i] for i in to]

    @property
    def total(self) -> int:
        """Local rounds, refinements, and what comes after."""
        return self.local_rounds + self.refine * self.rounds + self.retrain

    @property
    def _fresh(self) -> bool:
        """Whether averages stay apart: the server cannot add them up under fresh masks, nor foresee what a projection makes of them."""
        return self.mask != "none" or self.radius > 0

    def make_client(self, cohort: Cohort, pipeline: Pipeline, config: Mapping[str, Any]) -> Trainee:
        """A `Refiner`, told what it averages."""
        plan = self.training() if self.variant == "fedavg" else dataclasses.replace(FULL, lr=self.lr)
        return Refiner(cohort, self.training(), pipeline, self.weighted, Refining(plan, self.trim > 0, self.radius))

    def served(self, client: Any, state: Any) -> Rows:
        """As of every method; who has no cluster yet uses the model it trained alone."""
        at = [k for k, i in enumerate(client.cohort.ids) if state.clusters[i] != OUTSIDE]
        models: Rows = client.advanced(at, state.outbox.letter([client.cohort.ids[k] for k in at]))
        return models

    def check(self, clients: int) -> None:
        """Adds λ, t, β and the rounds."""
        super().check(clients)
        check_clustering(self.size, clients, self.threshold, self.quantile)
        for what, of in (("distance", ("loss", "l2")), ("variant", ("fedavg", "gradient"))):
            if getattr(self, what) not in of:
                raise unknown(what, getattr(self, what), of)
        for what, least in (("refine", 1), ("local_rounds", 1), ("retrain", 0)):
            value = getattr(self, what)
            if not (isinstance(value, Integral) and value >= least):
                raise UsageError(f"{what} = {value!r} is not possible: it is a whole number from {least}")
        known = isinstance(self.trim, Real) and isinstance(self.radius, Real)
        if not (known and 0 <= self.trim < 0.5 and 0 <= self.radius < math.inf):
            raise UsageError("trim is a share in [0, 0.5), and radius a finite number from 0")
        if self.trim and self.mask not in ENTRYWISE:
            raise UsageError(
                f"the mask {self.mask!r} mixes coordinates, and each is trimmed apart: use a permutation, signed or not, or trim 0"
            )

    def sees(self) -> list[str]:
        """What stays visible under every mask."""
        relayed = "norms and inner products of all models that clients trained alone (the cross-cluster loss relays each to every client)"
        losses = "each client's losses under all one-shot and cluster models (the plain sum reads every reply), and the cluster it chooses"
        compared = "norms, inner products and distances of all models that clients trained alone, and of all clusters' models"
        updates = (
            "each client's update, of which norms and inner products stay visible" if self.trim else "each client's update (the plain sum)"
        )
        return [*([compared] if self.distance == "l2" else [relayed, losses]), updates, "λ, the clusters, and each client's cluster"]
