"""SR-FCA, successive refine federated clustering: Algorithms 1 to 4.

Vardhan, Ghosh, Mazumdar, "An Improved Federated Clustering Algorithm with Model-based Clustering",
TMLR 2024.

w_0    the initial weights; w_i client i's model after training alone, f_i its mean training loss
λ, t   models within λ of each other are joined by an edge; connected components with t clients or
       more are clusters
ω_c    cluster c's model: the (trimmed) mean of its members' updates, round after round, from w_0
       again in each of R refinements
dist   ½(mean_{j∈c'} f_j(w_c) + mean_{i∈c} f_i(w_c')), the cross-cluster loss of the authors' code,
       or the L2 distance of the weights

The number of clusters is not an input. What the paper leaves open is marked "not in the paper".
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, ClassVar

from securecluster.clustering.pairs import check_pairs
from securecluster.privacy.masking.masks import ENTRYWISE, build
from securecluster.privacy.masking.sealing import Seal
from securecluster.protections.pair_rows import PairRange
from securecluster.protocols import authoring as fl
from securecluster.protocols.common.averages.sampling import sample_landmarks
from securecluster.protocols.common.options.pair_options import PairOptions
from securecluster.protocols.srfca import graph, server
from securecluster.protocols.srfca.client import (
    OneShotTraining,
    SRFCAClient,
    client_view,
    server_view,
)
from securecluster.protocols.srfca.model_distance import ClusterModels
from securecluster.runtime.endpoint import config_hash


@dataclass(kw_only=True)
class SumsOfClusters(fl.SumOptions):
    """Options of sums of updates, and of losses under the models of clients and clusters."""

    def refusal(self, method: Any) -> str | None:
        """Return that some options read single models or updates."""
        if method.distance == "l2":
            return (
                "the distance l2 compares clients' own models one by one, which secure sums do not "
                "show: take distance loss, or aggregation plain"
            )
        if method.trim:
            return (
                "a trimmed mean reads clients' updates one by one, which secure sums do not show: "
                "take trim 0, or aggregation plain"
            )
        return None

    def weights_updates(self, method: Any) -> bool:
        """Return whether averages are weighted."""
        return bool(method.weighted)

    def fields(self, method: Any, config: Mapping[str, Any]) -> dict[str, float]:
        """Add the losses."""
        return {**super().fields(method, config), "loss": fl.LARGEST_LOSS}


@dataclass(kw_only=True)
class PairsOfLosses(PairOptions):
    """Options of the losses of pairs of clients under each other's models."""

    fields: ClassVar[Mapping[str, PairRange]] = {
        "loss": PairRange(
            low=-fl.LARGEST_LOSS, high=fl.LARGEST_LOSS, bits=64, itself=0.0, clamped=True
        )
    }

    def refusal(self, method: Any) -> str | None:
        """Return that some options form no pairs, or show what these hide."""
        if method.distance == "l2":
            return (
                "the distance l2 compares clients' own models, and no losses of pairs: take "
                "distance loss, or relevance plain"
            )
        if not method.sums.hide_replies:
            return (
                "clients' losses under each other's models leave again in sums, which show them "
                "unless they are secure: take aggregation secagg, or relevance plain"
            )
        return super().refusal(method)


class SRFCAObserver(fl.Observer):
    """The experimenter's measurements of SR-FCA."""

    def models_after_round(self, client: Any, state: Any) -> fl.Rows:
        """Return all clients' models after the averages that they have yet to receive.

        A client without a cluster uses the model that it trained alone.

        Args:
            client: a `SRFCAClient`.
            state: the server's `SRFCAState`.
        """
        positions = []
        for k, i in enumerate(client.cohort.ids):
            if state.clusters[i] != graph.UNASSIGNED:
                positions.append(k)
        recipients = [client.cohort.ids[k] for k in positions]
        models: fl.Rows = client.advanced(positions, state.outbox.message_for(recipients))
        return models


@dataclass(kw_only=True)
class SRFCAAdditions(fl.Additions):
    """What makes ONE_SHOT of SR-FCA linear in the clients, or its models unreadable."""

    landmarks: Annotated[int | None, fl.IN_PYTHON] = None
    """clients whose models are compared pair by pair after training alone; the others join the
    nearest of their clusters in RECLUSTER, so work and bytes are linear in the
    clients; None compares all pairs
    """
    sealed: bool = False
    """loss only: the models that clients trained alone can be read by the run's clients only;
    otherwise the server sees them masked
    """

    absent: ClassVar[Mapping[str, Any]] = {"trim": 0.15, "average": "uniform"}


@fl.protocol
class SRFCA(fl.Published, fl.ClusteringProtocol):
    """Clusters of models that were trained alone, refined by averaging, reassigning and merging."""

    mask: str = "permutation"
    """map of updates that the server does not know, a fresh one each round: none, permutation,
    signed-permutation, rotation or haar
    """
    rounds: int = 40
    """rounds of each refinement, besides local_rounds and retrain; each refinement begins from the
    initial weights
    """
    distance: Annotated[str, fl.OneOf("loss", "l2")] = "loss"
    """of models: loss (cross-cluster loss; every model is sent to every client once) or l2 (of the
    weights, which the server compares)
    """
    threshold: float | None = None
    """λ: models within this distance are joined. In the unit of the distance: for loss the mean
    training loss of a sample, in nats (cross-entropy; of texts that of a token, of trajectories a
    squared error in units of the area), for l2 the norm of a difference of weights. The authors' λ
    is that loss over the number of samples in a batch: their 0.02 is about 1.0 here. None takes the
    quantile, or determines clusters without a λ (not in the paper)
    """
    quantile: float | None = None
    """λ as a quantile of all pairwise distances, in [0, 1]"""
    size: int = 2
    """t: the fewest clients of a cluster, at least 2"""
    trim: Annotated[float, fl.Number(0, 0.5)] = 0.0
    """β: share of the updates left out at each end of every coordinate, in [0, 0.5). Algorithm 3
    trims; the default 0 does not (not in the paper): a plain mean needs no more than a secure sum,
    while for trimming the server reads every update
    """
    average: Annotated[str, fl.OneOf("auto", "uniform", "weighted"), fl.IN_PYTHON] = "auto"
    """mean over a cluster's clients: uniform (Algorithm 3), weighted by |D_i| (not in the paper),
    or auto: weighted unless updates are trimmed or clipped, which are averaged uniformly
    """
    refine: Annotated[int, fl.AtLeast(1)] = 1
    """R: refinements; the paper's experiments use at most 2, and 1 on real data"""
    local_rounds: Annotated[int, fl.AtLeast(1)] = 20
    """rounds in which clients train alone before they are clustered"""
    variant: Annotated[str, fl.OneOf("fedavg", "gradient"), fl.IN_PYTHON] = "fedavg"
    """what is averaged: fedavg (updates after local epochs) or gradient (full gradients: one step
    of lr a round)
    """
    radius: Annotated[float, fl.Number(0), fl.IN_PYTHON] = 0.0
    """of the ball around the initial weights that models are projected onto; 0 means no projection
    """
    retrain: Annotated[int, fl.AtLeast(0), fl.IN_PYTHON] = 0
    """rounds of averaging after the last merge"""

    additions: SRFCAAdditions = fl.group(SRFCAAdditions)
    pairs: PairOptions = fl.group(PairsOfLosses)
    sums: fl.SumOptions = fl.group(SumsOfClusters)
    name: ClassVar[str] = "srfca"
    # the experiments on MNIST, with the optimizer and β of the authors' program
    _in_paper: ClassVar[Mapping[str, Any]] = {
        "rounds": 21, "local_rounds": 21, "refine": 2, "epochs": 1, "batch_size": 50,
        "optimizer": "adam", "lr": 2e-4,
    }  # fmt: skip
    _inputs_of_paper: ClassVar[tuple[str, ...]] = ("threshold",)
    _length: ClassVar[str] = "retrain"
    client: ClassVar[type[fl.TrainingClient]] = SRFCAClient

    def run_server(self, net: fl.ServerChannel, run: fl.Run) -> server.SRFCAState:
        """Run the server's side of Algorithm 1.

        Args:
            net: the server's channel.
            run: rounds, checkpoints and history.
        """
        fl.check_compared(net, self.additions.landmarks)
        clients = len(net.clients)
        check_pairs(clients)  # with landmarks, too, each client keeps a row of losses of all models
        state = server.SRFCAState(
            clusters=[graph.UNASSIGNED] * clients,
            outbox=fl.PendingUpdates.start(clients, fresh=False),
        )
        for t in run.rounds("train", state, self.local_rounds):  # ONE_SHOT
            self._train_alone(net, state)
            if t == self.local_rounds:
                self._one_shot(net, run, state)

        refinements = run.stages("train", state, self.refine, self.rounds, after=self.local_rounds)
        for refinement in refinements:  # REFINE
            if refinement.fresh:  # RECLUSTER compares models after as many rounds from w_0
                state.restart(self._fresh)
            for t in refinement.rounds:  # TRIMMED_MEAN_GD
                server.average_trimmed(net, state, self.participation, self.trim, t)
            # RECLUSTER and MERGE, of models with the last round's average
            self._refine(net, run, state, last=refinement.number == self.refine - 1)

        for t in run.rounds("train", state, self.total_rounds):  # `retrain`
            server.average_trimmed(net, state, self.participation, self.trim, t)

        fl.flush(net, run, state)
        if self.retrain:
            # newcomers choose among the models after retraining
            state.models = run.once(
                "models", lambda: server.cluster_models(net, state, None), ClusterModels
            )
        return state

    def _train_alone(self, net: fl.ServerChannel, state: server.SRFCAState) -> None:
        """Let every client train its own model: one round of the T iterations of ONE_SHOT."""
        # Silent clients catch up later, from what is pending for them.
        query = state.outbox.message_for(net.clients)
        net.gather(fl.SumClient.train_locally, query, to=net.clients)

    def _one_shot(self, net: fl.ServerChannel, run: fl.Run, state: server.SRFCAState) -> None:
        """Run ONE_SHOT(λ, t) of Algorithm 1.

        Without a component of t clients, all clients are one cluster (not in the paper).
        """
        landmarks = sample_landmarks(net, net.clients, self.additions.landmarks)
        senders = landmarks
        if self.distance == "l2":
            senders = list(net.clients)  # RECLUSTER compares the model of every client
        replies = net.gather(SRFCAClient.send_model, fl.Empty(), to=senders, tries=fl.TRIES)
        # under DP-SGD every round of training alone has added noise to the models
        noisy_trainings = self.local_rounds if self.privacy.per_example else 1
        distance = server.one_shot_distances(
            net, state, replies, self.distance, noisy_trainings, landmarks
        )
        # The graph is told in the history, for λ cannot be judged without it.
        edges = server.first_clusters(state, distance, self._graphing)
        line = {
            "lambda": state.threshold,
            "edges": edges.tolist(),
            "clustered": graph.groups(state.clusters),
        }
        run.note(**line)

    def _refine(
        self, net: fl.ServerChannel, run: fl.Run, state: server.SRFCAState, last: bool
    ) -> None:
        """Run RECLUSTER and MERGE (Algorithms 2 and 4).

        If no member of any cluster replies, clusters and models are unchanged (not in the paper).

        Args:
            net: the server's channel.
            run: takes the history line.
            state: its clusters and models are updated.
            last: whether this is the last refinement.
        """
        # weights are comparable only under the mask of the one-shot models
        step = state.step if self.distance == "l2" else None
        models = server.cluster_models(net, state, step)
        if models.kept:
            scattered = not self._graphing.given
            distance = server.model_distance(net, state, models, self.distance, scattered)
            # Clusters without a model are out: their members join others by distance.
            row_of = {c: row for row, c in enumerate(models.kept)}
            before = [row_of.get(c, graph.UNASSIGNED) for c in state.clusters]
            cluster_count = len(models.kept)
            assigned = server.recluster(distance, before, cluster_count, self.sums.least_members)
            state.clusters, table = server.merge(
                distance, assigned, models, state.threshold, self._graphing.size
            )
            labels = list(range(len(table)))
            state.models = ClusterModels(table, models.step, labels)
            run.note(reclustered=graph.groups(assigned), clustered=graph.groups(state.clusters))
        # Otherwise a round of this refinement waits to be handed out already.
        if models.kept or not state.outbox.number:
            state.hand_out(self._fresh)
        if last:
            state.rows = fl.empty_tensor()  # no later step compares one-shot models

    def assign_newcomers(
        self, net: fl.ServerChannel, state: server.SRFCAState, to: Sequence[int]
    ) -> list[int]:
        """Return the cluster of each newcomer, as the newcomer chooses it (not in the paper).

        It is the one whose model is nearest to the model that the newcomer trains alone (l2), or
        has the lowest loss on its data (loss).

        Args:
            net: the server's channel.
            state: the run's final state.
            to: the newcomers.

        Raises:
            UsageError: the run ended without clusters' models.
            UpdateError: a newcomer does not reply.
        """
        if not len(state.models.table):
            raise fl.UsageError(
                "no member of any cluster posted its model, so newcomers have none to choose from: "
                "run it anew"
            )
        offer = server.offer_to_newcomers(state.models, len(to))
        if self.distance == "l2":
            for _ in range(self.local_rounds):
                # Newcomers missed no round: they train from w_0, as the clients did.
                nothing_pending = fl.PendingUpdates.start(0, fresh=False).message_for(to)
                net.gather(fl.SumClient.train_locally, nothing_pending, to=to)
            joined = net.gather(SRFCAClient.join, offer, to=to, tries=fl.TRIES)
            fl.check_newcomers(to, joined.ids)
            rows = joined.rows.nearest.values.tolist()
        else:
            chosen = net.gather(SRFCAClient.choose, offer, to=to, tries=fl.TRIES)
            fl.check_newcomers(to, chosen.ids)
            # The newcomer names a row and nothing of its losses.
            rows = chosen.rows.model.values.tolist()
        return [state.models.kept[row] for row in rows]

    def report_fields(self, state: server.SRFCAState) -> dict[str, Any]:
        """Return the distances of models within and across first clusters, beside λ.

        Args:
            state: the final state.
        """
        entry = None if state.graph is None else state.graph.theory()
        return {} if entry is None else {"theory": [entry]}

    def frame_sizes(self, config: Mapping[str, Any]) -> dict[str, int]:
        """Add the number of restarts from w_0: before and after each refinement."""
        sizes = super().frame_sizes(config)
        return {**sizes, "restarts": 2 * int(self.refine) + 2}

    @property
    def _graphing(self) -> server.GraphOptions:
        """Return the options of ONE_SHOT(λ, t), where t is that of a sum or more."""
        size = max(self.size, self.sums.least_members)
        return server.GraphOptions(self.distance, size, self.threshold, self.quantile)

    @property
    def weighted(self) -> bool:
        """Return whether averages are weighted, so that clients send |D_i|."""
        if self.average == "auto":
            return not self.trim and self.privacy.clip is None
        return self.average == "weighted"

    @property
    def total_rounds(self) -> int:
        """Return the number of rounds: alone, in refinements, and after the last merge."""
        return self.local_rounds + self.refine * self.rounds + self.retrain

    @property
    def vectors_per_round(self) -> int:
        """Return the vectors of d numbers that a client exchanges in a round, for estimates.

        These are one update and one average; the one-shot models that every client evaluates are
        about one more, spread over all rounds.
        """
        return 3 if self.distance == "loss" else 2

    @property
    def _fresh(self) -> bool:
        """Return whether averages of different rounds are stored separately.

        They are if the server cannot add them up under fresh masks, or cannot predict the result of
        a projection.
        """
        return self.mask != "none" or self.radius > 0

    def pipeline(self, config: Mapping[str, Any]) -> fl.Pipeline:
        """Return the mask of updates, and the seal of models that are relayed.

        Args:
            config: the run's configuration.
        """
        mask = build(self.mask, config["dimension"])
        stages = [*self.privacy.stages(config), *mask]
        seal = Seal(config_hash(config)) if self.additions.sealed else None
        return fl.Pipeline(stages, seal)

    def trainings(
        self, usual: fl.LocalTraining, config: Mapping[str, Any]
    ) -> dict[str, fl.LocalTraining]:
        """Add the training of REFINE.

        Args:
            usual: the training of a round.
            config: what clients and server agreed on.
        """
        plans = super().trainings(usual, config)
        plans["refine"] = usual
        if self.variant == "gradient":
            # one step of lr along the full gradient, as Algorithm 3 prints
            plans["refine"] = replace(plans["full"], lr=config["lr"])
        return plans

    def make_client(
        self, cohort: fl.LocalTrainer, pipeline: fl.Pipeline, config: Mapping[str, Any]
    ) -> fl.TrainingClient:
        """Return the clients, with their two kinds of training.

        Args:
            cohort: the clients' data and local training.
            pipeline: the stages between a client's update and the wire.
            config: the run's configuration.
        """
        plans = self.trainings(self.training.usual(self, config), config)
        refining = OneShotTraining(plan=plans["refine"], trims=self.trim > 0, radius=self.radius)
        return SRFCAClient(cohort, plans["usual"], pipeline, self.weighted, refining)

    def check(self, clients: int) -> None:
        """Add checks of λ, t, β and the rounds.

        Args:
            clients: m.

        Raises:
            UsageError: a hyper-parameter is out of range, or two of them contradict each other.
        """
        super().check(clients)
        graph.check_clustering(self.size, clients, self.threshold, self.quantile)
        fl.check_landmarks(self.additions.landmarks)
        self._check_average()
        self._check_sealed()

    def _check_average(self) -> None:
        """Raise UsageError for a mask or weights that the average does not allow."""
        if self.trim and self.mask not in ENTRYWISE:
            raise fl.UsageError(
                f"the mask {self.mask!r} mixes coordinates, and each is trimmed apart: use a "
                "permutation, or trim 0"
            )
        unweighted = self.trim or self.privacy.clip is not None
        if self.average == "weighted" and unweighted:
            raise fl.UsageError(
                "updates that are trimmed or clipped count the same: take average auto or uniform"
            )

    def _check_sealed(self) -> None:
        """Raise UsageError where the server has to read models that are sealed."""
        if self.additions.sealed and self.distance == "l2":
            raise fl.UsageError(
                "the server compares weights for the distance l2, so it must read them: use "
                "distance loss, or sealed=False"
            )
        if self.additions.sealed and self.privacy.noisy and self.privacy.placement == "central":
            raise fl.UsageError(
                "the server cannot add noise to models that are sealed: use placement local, or "
                "sealed=False"
            )

    def disclosures(self) -> fl.Disclosures:
        """Return what stays visible under every mask, and what clients see of others' models."""
        to_server = server_view(
            self.distance, self.additions.sealed, self.trim > 0, self.privacy.noisy, self.weighted
        )
        to_clients = client_view(self.distance)
        return fl.Disclosures(server=to_server, clients=to_clients)

    @property
    def observer(self) -> SRFCAObserver:
        """Return what the experimenter computes outside the protocol."""
        return SRFCAObserver(self)
