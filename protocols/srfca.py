"""SR-FCA: Vardhan, Ghosh, Mazumdar, "An Improved Federated Clustering Algorithm with Model-based Clustering", TMLR 2024. Algorithms 1–4.

w_0    where everyone starts; w_i client i's model after training alone, f_i its mean training loss
λ, t   models within λ of each other are joined by an edge; connected components with t clients or more are clusters
ω_c    cluster c's model: the (trimmed) mean of its members' updates, round after round, from w_0 anew in each of R refinements
dist   ½(mean_{j∈c'} f_j(w_c) + mean_{i∈c} f_i(w_c')), the cross-cluster loss of the authors' code, or the L2 distance of the weights

The number of clusters is not given. What the paper leaves open, and is decided here, is marked "ours".
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar

from securecluster.protocols.base import Protocol, Releases

from securecluster import refinement
from securecluster.averaging import Contributor
from securecluster.checks import check_choice, check_number, check_whole
from securecluster.cohort import Cohort, LocalTraining
from securecluster.components import OUTSIDE, check_clustering, groups
from securecluster.displacements import Outbox, Trainee, check_newcomers, deliver, nothing
from securecluster.endpoint import config_hash
from securecluster.errors import UsageError
from securecluster.messages import Rows
from securecluster.nearness import TRIES, Clusters
from securecluster.network import Network
from securecluster.privacy.keys import Hello
from securecluster.privacy.masks import ENTRYWISE, build
from securecluster.privacy.seals import Seal
from securecluster.privacy.stages import Pipeline
from securecluster.refinement import Graphing, State, first_clusters, nearness
from securecluster.refiner import Refiner, Refining, seen, seen_by_clients
from securecluster.run import Run


@dataclass
class SRFCA(Protocol):
    """Clusters of models that were trained alone, refined by averaging, reassigning and merging."""

    mask: str = "permutation"
    """map of updates that the server does not know, a fresh one each round: none, permutation, signed-permutation, rotation or haar"""
    rounds: int = 40
    """rounds of each refinement, besides local_rounds and retrain; each begins from the first weights"""
    distance: str = "loss"
    """of models: loss (cross-cluster loss; every model goes to every client once) or l2 (of the weights, which the server compares)"""
    threshold: float | None = None
    """λ: models within this distance are joined. In the unit of the distance: for loss the mean training loss of a sample, in nats
    (cross-entropy; of texts that of a token, of trajectories a squared error in units of the area), for l2 the norm of a difference of
    weights. The authors' λ is that loss over the number of samples in a batch: their 0.02 is about 1.0 here. None takes the quantile, or
    tells clusters apart without a λ (ours)"""
    quantile: float | None = None
    """λ as a quantile of all pairwise distances, in [0, 1]"""
    size: int = 2
    """t: the fewest clients of a cluster, at least 2"""
    trim: float = 0.0
    """β: share of the updates left out at each end of every coordinate, in [0, 0.5). Algorithm 3 trims; the default 0 does not (ours):
    a plain mean needs no more than a secure sum, and trimming has the server read every update"""
    average: str = "auto"
    """mean over a cluster's clients: uniform (Algorithm 3), weighted by |D_i| (ours), or auto: weighted unless updates are trimmed or
    clipped, which count the same"""
    refine: int = 1
    """R: refinements; the paper's experiments take at most 2, and 1 on real data"""
    local_rounds: int = 20
    """rounds in which clients train alone before they are clustered"""
    variant: str = "fedavg"
    """what is averaged: fedavg (updates after local epochs) or gradient (full gradients: one step of lr a round)"""
    radius: float = 0.0
    """of the ball around the initial weights that models are projected into; 0 does not"""
    retrain: int = 0
    """rounds of averaging after the last merge"""
    sealed: bool = False
    """loss only: the models that clients trained alone can be read by the run's clients only; otherwise the server sees them masked"""

    name: ClassVar[str] = "srfca"
    client: ClassVar[type[Trainee]] = Refiner
    one_model: ClassVar[bool] = False

    def serve(self, net: Network, run: Run) -> State:
        """Algorithm 1."""
        state = State([OUTSIDE] * len(net.clients), Outbox.start(len(net.clients), fresh=False))
        for t in run.rounds("train", state, self.total):
            if t <= self.local_rounds:
                net.gather(Contributor.alone, state.outbox.letter(net.clients), to=net.clients)
                if t == self.local_rounds:
                    self._one_shot(net, run, state)
                continue
            r, s = divmod(t - self.local_rounds - 1, self.rounds)
            if s == self.rounds - 1 and r < self.refine:  # members post the models with this round's average
                run.commit(state, partial(self._average, net, state, t))
                self._refine(net, run, state, last=r == self.refine - 1)
            else:
                self._average(net, state, t)
        deliver(net, run, state)
        if self.retrain:
            state.models = run.once("models", lambda: refinement.cluster_models(net, state, None), Clusters)
        return state

    def _average(self, net: Network, state: State, t: int) -> None:
        """Round t, one of averaging; the first of each refinement starts from w_0."""
        r, s = divmod(t - self.local_rounds - 1, self.rounds)
        if s == 0 and r < self.refine:
            state.restart(self._fresh)
        refinement.trimmed(net, state, self.participation, self.trim, t)

    def _one_shot(self, net: Network, run: Run, state: State) -> None:
        """ONE_SHOT(λ, t). Without a component of t clients everyone is one cluster (ours)."""
        got = net.gather(Refiner.hand_in, Hello(), to=net.clients, tries=TRIES)
        distance = refinement.compared(net, state, got, self.distance, self.local_rounds if self.per_example else 1)
        edges = first_clusters(state, distance, self._graphing)
        run.note(**{"lambda": state.reach}, edges=edges.tolist(), clustered=groups(state.clusters))

    def _refine(self, net: Network, run: Run, state: State, last: bool) -> None:
        """RECLUSTER and MERGE. Where no member of any cluster replies, clusters and models stay as they are (ours)."""
        models = refinement.cluster_models(net, state, state.step if self.distance == "l2" else None)
        if models.kept:
            near = nearness(net, state, models, self.distance, scattered=not self._graphing.given)
            before = [models.kept.index(c) if c in models.kept else OUTSIDE for c in state.clusters]
            taken = refinement.recluster(near, before, len(models.kept))
            state.clusters, table = refinement.merge(near, taken, models, state.reach, self.size)
            state.models = Clusters(table, models.step, list(range(len(table))))
            run.note(reclustered=groups(taken), clustered=groups(state.clusters))
        if models.kept or not state.outbox.number:
            state.hand_out(self._fresh)
        if last:
            state.rows = nothing()

    def place(self, net: Network, state: State, to: Sequence[int]) -> list[int]:
        """Newcomers get the models and say which is nearest: to the one they train alone (l2), or by their own loss (ours)."""
        if not len(state.models.table):
            raise UsageError("no member of any cluster posted its model, so newcomers have none to choose from: run it anew")
        for _ in range(self.local_rounds if self.distance == "l2" else 0):
            net.gather(Contributor.alone, Outbox.start(0, fresh=False).letter(to), to=to)
        method: Any = Refiner.join if self.distance == "l2" else Refiner.choose
        got = net.gather(method, refinement.offered(state.models, len(to)), to=to, tries=TRIES)
        check_newcomers(to, got.ids)
        return [state.models.kept[c] for c in (got.rows.near if self.distance == "l2" else got.rows.model).values.tolist()]

    def frame_sizes(self, config: Mapping[str, Any]) -> dict[str, int]:
        """Add how often models start from w_0 anew: before and after each refinement."""
        return {**super().frame_sizes(config), "restarts": 2 * int(self.refine) + 2}

    @property
    def _graphing(self) -> Graphing:
        """How one-shot models are clustered."""
        return Graphing(self.distance, self.size, self.threshold, self.quantile)

    @property
    def weighted(self) -> bool:
        """Whether clients tell |D_i|."""
        return self.average == "weighted" or (self.average == "auto" and not self.trim and self.clip is None)

    @property
    def total(self) -> int:
        """Local rounds, refinements, and what comes after."""
        return self.local_rounds + self.refine * self.rounds + self.retrain

    @property
    def rows_a_round(self) -> int:
        """An update up and an average down; spread over all rounds, about one more of those that everyone judges."""
        return 3 if self.distance == "loss" else 2

    @property
    def _fresh(self) -> bool:
        """Whether averages stay apart: the server cannot add them up under fresh masks, nor foresee what a projection makes of them."""
        return self.mask != "none" or self.radius > 0

    def pipeline(self, config: Mapping[str, Any]) -> Pipeline:
        """The mask, and what seals the models that are relayed."""
        return Pipeline([*self.stages(config), *build(self.mask, config["dimension"])], Seal(config_hash(config)) if self.sealed else None)

    def make_client(self, cohort: Cohort, pipeline: Pipeline, config: Mapping[str, Any]) -> Trainee:
        """A `Refiner`, told what it averages."""
        kinds = self.trainings(self.training(config), config)
        plan = Refining(kinds["refine"], self.trim > 0, self.radius)
        return Refiner(cohort, kinds["usual"], pipeline, self.weighted, plan)

    def trainings(self, usual: LocalTraining, config: Mapping[str, Any]) -> dict[str, LocalTraining]:
        """What is averaged."""
        found = super().trainings(usual, config)
        return found | {"refine": replace(found["full"], lr=config["lr"]) if self.variant == "gradient" else usual}

    def releases(self) -> Releases:
        """Its model, and an update a round; a row of losses for the models of ONE_SHOT and one in each refinement."""
        averaged = self.refine * self.rounds + self.retrain
        full = averaged if self.variant == "gradient" else 0
        losses = 1 + self.refine if self.distance == "loss" else 0
        return Releases(updates=1 + averaged, losses=losses, trainings=self.local_rounds + averaged - full, full=full)

    def multipliers(self, config: Mapping[str, Any]) -> dict[str, float]:
        """Of losses, and of the choices made of them; `near` is a newcomer's own model."""
        z = float(config["noise"])
        own = {"loss": z, "model": z, "near": math.inf if self.per_example else z} if z else {}
        return super().multipliers(config) | own

    def replacements(self) -> dict[str, float]:
        """A row of losses moves as far (`noisy_losses`)."""
        return {"loss": 1.0, "model": 1.0}

    def served(self, client: Any, state: Any) -> Rows:
        """As of every method; who has no cluster yet uses the model it trained alone."""
        at = [k for k, i in enumerate(client.cohort.ids) if state.clusters[i] != OUTSIDE]
        models: Rows = client.advanced(at, state.outbox.letter([client.cohort.ids[k] for k in at]))
        return models

    def check(self, clients: int) -> None:
        """Adds λ, t, β and the rounds."""
        super().check(clients)
        check_clustering(self.size, clients, self.threshold, self.quantile)
        check_choice(self, distance=("loss", "l2"), variant=("fedavg", "gradient"), average=("auto", "uniform", "weighted"))
        check_whole(self, refine=1, local_rounds=1, retrain=0)
        check_number(self, "trim", 0, 0.5)
        check_number(self, "radius", 0)
        if self.trim and self.mask not in ENTRYWISE:
            raise UsageError(f"the mask {self.mask!r} mixes coordinates, and each is trimmed apart: use a permutation, or trim 0")
        if self.average == "weighted" and (self.trim or self.clip is not None):
            raise UsageError("updates that are trimmed or clipped count the same: take average auto or uniform")
        if self.sealed and self.distance == "l2":
            raise UsageError("the server compares weights for the distance l2, so it must read them: use distance loss, or sealed=False")
        if self.sealed and self.noisy and self.placement == "central":
            raise UsageError("the server cannot add noise to models that are sealed: use placement local, or sealed=False")

    def sees(self) -> list[str]:
        """What stays visible under every mask."""
        return seen(self.distance, self.sealed, self.trim > 0, self.noisy, self.weighted)

    def client_sees(self) -> list[str]:
        """Models of others."""
        return seen_by_clients(self.distance)
