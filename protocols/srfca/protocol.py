"""SR-FCA: Algorithms 1–4.

Vardhan, Ghosh, Mazumdar, "An Improved Federated Clustering Algorithm with Model-based Clustering",
TMLR 2024.

w_0    where everyone starts; w_i client i's model after training alone, f_i its mean training loss
λ, t   models within λ of each other are joined by an edge; connected components with t clients or
       more are clusters
ω_c    cluster c's model: the (trimmed) mean of its members' updates, round after round, from w_0
       anew in each of R refinements
dist   ½(mean_{j∈c'} f_j(w_c) + mean_{i∈c} f_i(w_c')), the cross-cluster loss of the authors' code,
       or the L2 distance of the weights

The number of clusters is not given. What the paper leaves open, and is decided here, is marked
"ours".
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar

from securecluster.core.validation import check_choice, check_number, check_whole
from securecluster.errors import UsageError
from securecluster.messaging.messages import Empty, Rows
from securecluster.privacy.masking.masks import ENTRYWISE, build
from securecluster.privacy.masking.sealing import Seal
from securecluster.privacy.pipeline import Pipeline
from securecluster.protocols.common.averaging import SumClient
from securecluster.protocols.common.base import ClusteringProtocol, ReleaseCounts
from securecluster.protocols.common.client import TrainingClient
from securecluster.protocols.common.messages import empty_tensor
from securecluster.protocols.common.newcomers import check_newcomers
from securecluster.protocols.common.pending_updates import PendingUpdates, flush
from securecluster.protocols.common.sampling import TRIES
from securecluster.protocols.srfca import server
from securecluster.protocols.srfca.client import (
    OneShotTraining,
    SRFCAClient,
    client_view,
    server_view,
)
from securecluster.protocols.srfca.graph import UNASSIGNED, check_clustering, groups
from securecluster.protocols.srfca.model_distance import ClusterModels
from securecluster.protocols.srfca.server import (
    GraphOptions,
    SRFCAState,
    first_clusters,
    model_distance,
)
from securecluster.runtime.endpoint import config_hash
from securecluster.runtime.run import Run
from securecluster.runtime.server_channel import ServerChannel
from securecluster.training.local_trainer import LocalTrainer, LocalTraining


@dataclass
class SRFCA(ClusteringProtocol):
    """Clusters of models that were trained alone, refined by averaging, reassigning and merging."""

    mask: str = "permutation"
    """map of updates that the server does not know, a fresh one each round: none, permutation,
    signed-permutation, rotation or haar
    """
    rounds: int = 40
    """rounds of each refinement, besides local_rounds and retrain; each begins from the first
    weights
    """
    distance: str = "loss"
    """of models: loss (cross-cluster loss; every model goes to every client once) or l2 (of the
    weights, which the server compares)
    """
    threshold: float | None = None
    """λ: models within this distance are joined. In the unit of the distance: for loss the mean
    training loss of a sample, in nats (cross-entropy; of texts that of a token, of trajectories a
    squared error in units of the area), for l2 the norm of a difference of weights. The authors' λ
    is that loss over the number of samples in a batch: their 0.02 is about 1.0 here. None takes the
    quantile, or tells clusters apart without a λ (ours)
    """
    quantile: float | None = None
    """λ as a quantile of all pairwise distances, in [0, 1]"""
    size: int = 2
    """t: the fewest clients of a cluster, at least 2"""
    trim: float = 0.0
    """β: share of the updates left out at each end of every coordinate, in [0, 0.5). Algorithm 3
    trims; the default 0 does not (ours): a plain mean needs no more than a secure sum, and trimming
    has the server read every update
    """
    average: str = "auto"
    """mean over a cluster's clients: uniform (Algorithm 3), weighted by |D_i| (ours), or auto:
    weighted unless updates are trimmed or clipped, which count the same
    """
    refine: int = 1
    """R: refinements; the paper's experiments take at most 2, and 1 on real data"""
    local_rounds: int = 20
    """rounds in which clients train alone before they are clustered"""
    variant: str = "fedavg"
    """what is averaged: fedavg (updates after local epochs) or gradient (full gradients: one step
    of lr a round)
    """
    radius: float = 0.0
    """of the ball around the initial weights that models are projected into; 0 does not"""
    retrain: int = 0
    """rounds of averaging after the last merge"""
    sealed: bool = False
    """loss only: the models that clients trained alone can be read by the run's clients only;
    otherwise the server sees them masked
    """

    name: ClassVar[str] = "srfca"
    client: ClassVar[type[TrainingClient]] = SRFCAClient
    one_model: ClassVar[bool] = False

    def run_server(self, net: ServerChannel, run: Run) -> SRFCAState:
        """Algorithm 1."""
        state = SRFCAState(
            [UNASSIGNED] * len(net.clients), PendingUpdates.start(len(net.clients), fresh=False)
        )
        for t in run.rounds("train", state, self.total_rounds):
            if t <= self.local_rounds:
                net.gather(
                    SumClient.train_locally, state.outbox.message_for(net.clients), to=net.clients
                )
                if t == self.local_rounds:
                    self._one_shot(net, run, state)
                continue
            r, s = divmod(t - self.local_rounds - 1, self.rounds)
            # members post the models with this round's average
            if s == self.rounds - 1 and r < self.refine:
                run.commit(state, partial(self._average, net, state, t))
                self._refine(net, run, state, last=r == self.refine - 1)
            else:
                self._average(net, state, t)
        flush(net, run, state)
        if self.retrain:
            state.models = run.once(
                "models", lambda: server.cluster_models(net, state, None), ClusterModels
            )
        return state

    def _average(self, net: ServerChannel, state: SRFCAState, t: int) -> None:
        """Round t, one of averaging; the first of each refinement starts from w_0."""
        r, s = divmod(t - self.local_rounds - 1, self.rounds)
        if s == 0 and r < self.refine:
            state.restart(self._fresh)
        server.average_trimmed(net, state, self.participation, self.trim, t)

    def _one_shot(self, net: ServerChannel, run: Run, state: SRFCAState) -> None:
        """ONE_SHOT(λ, t). Without a component of t clients everyone is one cluster (ours)."""
        got = net.gather(SRFCAClient.send_model, Empty(), to=net.clients, tries=TRIES)
        distance = server.one_shot_distances(
            net, state, got, self.distance, self.local_rounds if self.per_example else 1
        )
        edges = first_clusters(state, distance, self._graphing)
        run.note(
            **{"lambda": state.threshold}, edges=edges.tolist(), clustered=groups(state.clusters)
        )

    def _refine(self, net: ServerChannel, run: Run, state: SRFCAState, last: bool) -> None:
        """Run RECLUSTER and MERGE.

        Where no member of any cluster replies, clusters and models stay as they are (ours).
        """
        models = server.cluster_models(net, state, state.step if self.distance == "l2" else None)
        if models.kept:
            near = model_distance(
                net, state, models, self.distance, scattered=not self._graphing.given
            )
            before = [
                models.kept.index(c) if c in models.kept else UNASSIGNED for c in state.clusters
            ]
            taken = server.recluster(near, before, len(models.kept))
            state.clusters, table = server.merge(near, taken, models, state.threshold, self.size)
            state.models = ClusterModels(table, models.step, list(range(len(table))))
            run.note(reclustered=groups(taken), clustered=groups(state.clusters))
        if models.kept or not state.outbox.number:
            state.hand_out(self._fresh)
        if last:
            state.rows = empty_tensor()

    def assign_newcomers(
        self, net: ServerChannel, state: SRFCAState, to: Sequence[int]
    ) -> list[int]:
        """Send newcomers the models, and return which each of them says is nearest (ours).

        It is the nearest to the model they train alone (l2), or by their own loss.
        """
        if not len(state.models.table):
            raise UsageError(
                "no member of any cluster posted its model, so newcomers have none to choose from: "
                "run it anew"
            )
        for _ in range(self.local_rounds if self.distance == "l2" else 0):
            net.gather(
                SumClient.train_locally, PendingUpdates.start(0, fresh=False).message_for(to), to=to
            )
        method: Any = SRFCAClient.join if self.distance == "l2" else SRFCAClient.choose
        got = net.gather(
            method, server.offer_to_newcomers(state.models, len(to)), to=to, tries=TRIES
        )
        check_newcomers(to, got.ids)
        return [
            state.models.kept[c]
            for c in (got.rows.nearest if self.distance == "l2" else got.rows.model).values.tolist()
        ]

    def frame_sizes(self, config: Mapping[str, Any]) -> dict[str, int]:
        """Add how often models start from w_0 anew: before and after each refinement."""
        return {**super().frame_sizes(config), "restarts": 2 * int(self.refine) + 2}

    @property
    def _graphing(self) -> GraphOptions:
        """How one-shot models are clustered."""
        return GraphOptions(self.distance, self.size, self.threshold, self.quantile)

    @property
    def weighted(self) -> bool:
        """Whether clients tell |D_i|."""
        return self.average == "weighted" or (
            self.average == "auto" and not self.trim and self.clip is None
        )

    @property
    def total_rounds(self) -> int:
        """Local rounds, refinements, and what comes after."""
        return self.local_rounds + self.refine * self.rounds + self.retrain

    @property
    def vectors_per_round(self) -> int:
        """Count an update up and an average down, and the models that everyone judges.

        Spread over all rounds, these models are about one more.
        """
        return 3 if self.distance == "loss" else 2

    @property
    def _fresh(self) -> bool:
        """Return whether averages stay apart.

        They do where the server cannot add them up under fresh masks, nor foresee what a projection
        makes of them.
        """
        return self.mask != "none" or self.radius > 0

    def pipeline(self, config: Mapping[str, Any]) -> Pipeline:
        """The mask, and what seals the models that are relayed."""
        return Pipeline(
            [*self.stages(config), *build(self.mask, config["dimension"])],
            Seal(config_hash(config)) if self.sealed else None,
        )

    def make_client(
        self, cohort: LocalTrainer, pipeline: Pipeline, config: Mapping[str, Any]
    ) -> TrainingClient:
        """A `SRFCAClient`, told what it averages."""
        kinds = self.trainings(self.training(config), config)
        plan = OneShotTraining(kinds["refine"], self.trim > 0, self.radius)
        return SRFCAClient(cohort, kinds["usual"], pipeline, self.weighted, plan)

    def trainings(
        self, usual: LocalTraining, config: Mapping[str, Any]
    ) -> dict[str, LocalTraining]:
        """What is averaged."""
        found = super().trainings(usual, config)
        return found | {
            "refine": replace(found["full"], lr=config["lr"])
            if self.variant == "gradient"
            else usual
        }

    def releases(self) -> ReleaseCounts:
        """Return how often a client releases its model, updates and losses.

        It releases its model, and an update a round; a row of losses for the models of ONE_SHOT and
        one in each refinement.
        """
        averaged = self.refine * self.rounds + self.retrain
        full = averaged if self.variant == "gradient" else 0
        losses = 1 + self.refine if self.distance == "loss" else 0
        return ReleaseCounts(
            updates=1 + averaged,
            losses=losses,
            trainings=self.local_rounds + averaged - full,
            full=full,
        )

    def multipliers(self, config: Mapping[str, Any]) -> dict[str, float]:
        """Of losses, and of the choices made of them; `nearest` is a newcomer's own model."""
        z = float(config["noise"])
        own = {"loss": z, "model": z, "nearest": math.inf if self.per_example else z} if z else {}
        return super().multipliers(config) | own

    def replacement_factors(self) -> dict[str, float]:
        """A row of losses moves as far (`noisy_losses`)."""
        return {"loss": 1.0, "model": 1.0}

    def models_after_round(self, client: Any, state: Any) -> Rows:
        """As of every method; who has no cluster yet uses the model it trained alone."""
        at = [k for k, i in enumerate(client.cohort.ids) if state.clusters[i] != UNASSIGNED]
        models: Rows = client.advanced(
            at, state.outbox.message_for([client.cohort.ids[k] for k in at])
        )
        return models

    def check(self, clients: int) -> None:
        """Adds λ, t, β and the rounds."""
        super().check(clients)
        check_clustering(self.size, clients, self.threshold, self.quantile)
        check_choice(
            self,
            distance=("loss", "l2"),
            variant=("fedavg", "gradient"),
            average=("auto", "uniform", "weighted"),
        )
        check_whole(self, refine=1, local_rounds=1, retrain=0)
        check_number(self, "trim", 0, 0.5)
        check_number(self, "radius", 0)
        if self.trim and self.mask not in ENTRYWISE:
            raise UsageError(
                f"the mask {self.mask!r} mixes coordinates, and each is trimmed apart: use a "
                "permutation, or trim 0"
            )
        if self.average == "weighted" and (self.trim or self.clip is not None):
            raise UsageError(
                "updates that are trimmed or clipped count the same: take average auto or uniform"
            )
        if self.sealed and self.distance == "l2":
            raise UsageError(
                "the server compares weights for the distance l2, so it must read them: use "
                "distance loss, or sealed=False"
            )
        if self.sealed and self.noisy and self.placement == "central":
            raise UsageError(
                "the server cannot add noise to models that are sealed: use placement local, or "
                "sealed=False"
            )

    def server_view(self) -> list[str]:
        """What stays visible under every mask."""
        return server_view(self.distance, self.sealed, self.trim > 0, self.noisy, self.weighted)

    def client_view(self) -> list[str]:
        """Models of others."""
        return client_view(self.distance)
