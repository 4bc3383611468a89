"""Clustered Federated Learning (CFL): Algorithm 5, with Algorithms 1, 3 and 4.

Sattler, Müller, Samek, "Clustered Federated Learning: Model-Agnostic Distributed Multi-Task
Optimization under Privacy Constraints", arXiv 1910.01991 (2019) / IEEE TNNLS 32(8), 2021.

θ      a client's model; the server never needs it (it may know θ_0)
Δ_i    client i's masked update P(SGD_n(θ_i, D_i) − θ_i); Δ_c the mean over cluster c
α      cosine similarities of updates (eq. 51) or full gradients (eq. 50); α_cross^max the largest
       across the sides of a split (eq. 35)
       With gradient signatures α is of these, less their mean, and updates leave in sums only
       (`SignatureEvidence`; not in the paper).
ε1, ε2 the split test: ‖Δ_c‖ < ε1 and max ‖Δ_i‖ > ε2 (eq. 32–34); γ_max the assumed approximation
       noise (eq. 39)

A split needs every member's reply in one round, since fresh masks forbid collecting updates over
rounds: when only some were asked, the server estimates ‖mean Δ‖ (`mean_norm`), and asks everyone
once the test would pass. Clusters below `min_size` are not split (not in the paper). The models of
the fallback are chosen in one phase and sent in the next.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Annotated, Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from securecluster.clustering import noise_robust
from securecluster.clustering.bipartition import Bipartition
from securecluster.core.lazy_torch import torch
from securecluster.core.progress import progress_logger
from securecluster.protocols import authoring as fl
from securecluster.protocols.cfl import parameter_tree, split_test
from securecluster.protocols.cfl.client import CFLClient
from securecluster.protocols.cfl.separation import assurance, largest_noise, separation_gap
from securecluster.protocols.common.averages.stored_models import opened
from securecluster.protocols.common.comparison import signature_collection
from securecluster.protocols.common.comparison.evidence import SignatureEvidence
from securecluster.protocols.common.options.compression_options import CompressionOptions
from securecluster.results.fitted import FittedRun
from securecluster.results.predictions import read_samples
from securecluster.results.preparation import own_numbers, preparation

# p-value at which a cluster with missing replies waits for a complete round (not in the paper)
HINT = 0.1


@dataclass
class CFLState:
    """State of the server's loop."""

    labels: list[int]
    outbox: fl.PendingUpdates
    tree: parameter_tree.ParameterTree
    # the largest max ‖Δ_i‖ of any round, the unit of the relative criterion's eps2
    longest: float = 0.0
    # clusters that wait for a round in which every member replies
    wanted: list[int] = field(default_factory=list)
    # (m, m), of the last round in which all clients shared one model
    alpha: torch.Tensor = field(default_factory=lambda: torch.zeros(0, 0))
    shared: bool = True  # alpha is of this round
    fallback_models: parameter_tree.FallbackResult | None = None
    signatures: signature_collection.Collected | None = None  # what α compares in place of updates

    def doubt(self, method: fl.ClusteringProtocol) -> str | None:
        """Return a sentence where clients' shares of classes contradict the clusters."""
        return None if self.signatures is None else self.signatures.doubt(self.labels)

    def shortfall(self, method: CFL, history: Sequence[fl.Line]) -> str | None:
        """Return which condition of a split was not met.

        Args:
            method: of the run.
            history: of the run.
        """
        if self.signatures is not None:
            return self.signatures.shortfall()
        tests = [test for line in history for test in line["split_tests"]]
        return split_test.shortfall(tests, method)


@dataclass(kw_only=True)
class SumsOfSplits(fl.SumOptions):
    """Options of sums of CFL, which compares single updates, or something shorter."""

    def refusal(self, method: Any) -> str | None:
        """Return that CFL compares single updates, unless it compares something shorter."""
        if method.compression.used or method.signatures.by_gradients:
            return None
        return (
            "CFL compares clients' single updates, which secure sums do not show: let it compare "
            "sketches (--sketch 256) or compressed updates (compress='8bit'), take signature "
            "gradient, or take aggregation plain"
        )

    def weights_updates(self, method: Any) -> bool:
        """Return whether averages are weighted."""
        return bool(method.weighted)

    def fields(self, method: Any, config: Mapping[str, Any]) -> dict[str, float]:
        """Add the losses of the fallback, times numbers of samples."""
        largest_loss = fl.LARGEST_LOSS * float(config.get("most_samples", 1))
        return {**super().fields(method, config), "loss": largest_loss}


class FittedCFL(FittedRun):
    """Result of a run of CFL, as its user gets it.

    Attributes:
        tree_: the parameter tree: models before each split, and who was split from whom.
    """

    @property
    def tree_(self) -> parameter_tree.ParameterTree:
        """Return the parameter tree."""
        tree: parameter_tree.ParameterTree = self.state_.tree
        return tree

    def node_model(self, node: int) -> dict[str, Any]:
        """Return the `state_dict` of a node's model (V-C).

        `tree_.path(tree_.leaf(c))` are the nodes of cluster c, the most general first.

        Args:
            node: its number in `tree_`.
        """
        displacement = self.tree_.nodes[node].model
        theta = opened(self.method, self.kept_, displacement)
        return self.network_.state_dict(theta)

    def ensemble(self, cluster: int, x: Any) -> torch.Tensor:
        """Return the mean prediction of the models on a cluster's path, root to leaf (V-C).

        Args:
            cluster: its label.
            x: n samples (n, …), an array, a tensor or a table.

        Returns:
            Probabilities of the classes, (n, classes).
        """
        config = self.kept_.learned.config
        dtype = getattr(torch, config["dtype"])
        flat = self.network_.to(torch.device("cpu"), dtype)
        samples = read_samples(x, self.kept_)
        numbers = preparation(config, own_numbers(self.kept_, None))
        if numbers is not None:
            from securecluster.results.exported_models import Prepared

            samples = Prepared(torch.nn.Identity(), numbers, dtype)(samples)
        predictions = []
        leaf = self.tree_.leaf(cluster)
        for v in self.tree_.path(leaf):
            theta = opened(self.method, self.kept_, self.tree_.nodes[v].model)
            weights = flat.views(theta)
            outputs = flat.call(weights, samples)
            predictions.append(flat.objective.predicted(outputs))
        return torch.stack(predictions).mean(0)


class CFLObserver(fl.Observer):
    """The experimenter's measurements of CFL, with the norms that splits are decided by."""

    def observe(
        self, federation: fl.Federation, client: Any, state: Any, scores: NDArray[np.float64]
    ) -> fl.Line:
        """Add the true separation gap g (eq. 28) while all clients share one model."""
        line = super().observe(federation, client, state, scores)
        line["gap"] = None
        if state.shared and len(state.alpha) and federation.truth:
            line["gap"] = separation_gap(state.alpha.numpy(), federation.truth)
        return line


@dataclass(kw_only=True)
class CFLTraining(fl.TrainingOptions):
    """Options of local training, beside samples that the fallback compares models on."""

    def validation_share(self, method: Any) -> float:
        """Return the share of the samples on which the fallback or the client compares models."""
        return float(method.fallback) or super().validation_share(method)


@dataclass(kw_only=True)
class CFLAdditions(fl.Additions):
    """What the split test has besides the paper's: a test of significance, and no tiny clusters.

    The paper's examples of two clients need clusters of two.
    """

    criterion: Annotated[str, fl.OneOf("relative", "absolute"), fl.IN_PYTHON] = "relative"
    """split test: relative (eps1 and eps2 are shares, clusters must be significant) or absolute
    (norms; the authors' need keep_momentum)
    """
    evidence: Annotated[float, fl.Number(0, low_in=False), fl.IN_PYTHON] = 0.25
    """relative criterion: and some cluster C has (|C| − 1)·(α_intra^min(C) − α_cross^max(C, rest))
    above this
    """
    level: Annotated[float, fl.Number(0, 1, low_in=False), fl.IN_PYTHON] = 0.001
    """relative criterion: and clients without clusters would be as separated with at most this
    probability, in (0, 1)
    """
    min_size: Annotated[int, fl.AtLeast(2)] = 3
    """clusters with fewer members are not split"""
    landmarks: Annotated[int | None, fl.IN_PYTHON] = None
    """clients of a cluster whose updates α compares pair by pair, drawn anew each round; the others
    join the half with the most similar one, so time and memory are linear in the clients; None
    compares all pairs
    """

    absent: ClassVar[Mapping[str, Any]] = {"criterion": "absolute", "min_size": 2}


@fl.protocol
class CFL(fl.Published, fl.ClusteringProtocol):
    """Recursive bipartition of the clients once federated learning has become stationary."""

    training: fl.TrainingOptions = fl.group(CFLTraining)
    sums: fl.SumOptions = fl.group(SumsOfSplits)
    compression: CompressionOptions = fl.group(CompressionOptions)
    signatures: fl.GradientSignatureOptions = fl.group(fl.GradientSignatureOptions)
    additions: CFLAdditions = fl.group(CFLAdditions)
    mask: str = "permutation"
    """map of updates that the server does not know, a fresh one each round: none, permutation,
    signed-permutation, rotation or haar
    """
    eps1: Annotated[float, fl.Number(0, low_in=False)] = 0.5
    """a cluster has settled when its mean update is shorter than this share of the longest; with
    criterion absolute, than this
    """
    eps2: Annotated[float, fl.Number(0, low_in=False)] = 0.25
    """and its clients pull apart when its longest update is longer than this share of the longest
    of any round; with criterion absolute, than this
    """
    gamma_max: Annotated[float, fl.Number(0, 1), fl.IN_PYTHON] = 0.5
    """accept a split only if γ_max < sqrt((1 − α_cross^max) / 2), in [0, 1)"""
    similarity: Annotated[str, fl.OneOf("update", "gradient"), fl.IN_PYTHON] = "update"
    """what α compares: update, or gradient (the full one, which members of a stationary cluster
    compute in addition)
    """
    average: Annotated[str, fl.OneOf("uniform", "weighted"), fl.IN_PYTHON] = "uniform"
    """mean over clients: uniform (Algorithm 5) or weighted by |D_i| (Algorithm 2)"""
    tree: Annotated[bool, fl.IN_PYTHON] = True
    """store models and updates of splits at the server (at each level as much as a round's
    updates): newcomers and the fallback need them
    """
    fallback: Annotated[float, fl.Number(0, 1)] = 0.0
    """share of each client's training samples held out to evaluate at the end whether splits
    helped, in [0, 1); 0 evaluates nothing
    """

    name: ClassVar[str] = "cfl"
    # VI; learning rate, momentum and thresholds are those of the authors' program
    _in_paper: ClassVar[Mapping[str, Any]] = {
        "mask": "permutation",  # V-B
        "epochs": 3, "batch_size": 100, "lr": 0.1, "momentum": 0.9, "keep_momentum": True,
        "eps1": 0.4, "eps2": 1.6,
    }  # fmt: skip
    fitted_class: ClassVar[type[FittedRun]] = FittedCFL
    client: ClassVar[type[fl.TrainingClient]] = CFLClient

    def run_server(self, net: fl.ServerChannel, run: fl.Run) -> CFLState:
        """Run Algorithm 5, "Server does", then the parameter tree's leaves and the fallback."""
        if not self.signatures.by_gradients:
            fl.check_compared(net, self.additions.landmarks)
        m = len(net.clients)
        outbox = fl.PendingUpdates.start(m, fresh=self.mask != "none")
        state = CFLState([0] * m, outbox, parameter_tree.ParameterTree.start(m))  # line 3
        if self.signatures.by_gradients:
            collect = partial(signature_collection.collect_gradient_signatures, net, net.clients)
            state.signatures = run.once("signatures", collect, signature_collection.Collected)
        for t in run.rounds("train", state, self.rounds):  # line 4
            invited = self._invited(net, state, t)
            round_statistics, step = self._average(net, state, invited)  # lines 5–8 and 15
            self._test_clusters(net, state, round_statistics)  # lines 16–21
            # Line 7 of the next round. Algorithm 5 leaves the updates of new clusters undefined:
            # both sides receive the mean of their parent (not in the paper).
            split_test.queue_averages(state.outbox, round_statistics, step, state.labels)
            self._note(run, state, round_statistics)
            for statistics in round_statistics:
                if statistics.sides:  # lines 22 and 28
                    split_test.split_cluster(state.tree, state.labels, statistics, t)
        fl.flush(net, run, state)
        if self.tree:
            self._complete_tree(net, run, state)
        if self.fallback:
            self._fall_back(net, run, state)
        return state

    def _average(
        self, net: fl.ServerChannel, state: CFLState, invited: Sequence[int]
    ) -> tuple[list[split_test.SplitStatistics], int]:
        """Let clients train, and return each cluster's mean and evidence.

        Args:
            invited: the clients that train in this round.

        Returns:
            Statistics of all clusters, and the call whose mask their means carry.
        """
        if state.signatures is not None:
            signatures = SignatureEvidence.of(state.signatures)
            return split_test.average_by_sums(net, state.outbox, invited, state.labels, signatures)
        updates, sums = split_test.collect_updates(
            net, state.outbox, invited, state.labels, self.compression.used
        )
        round_statistics = []
        for c, members in enumerate(fl.members(state.labels)):
            statistics = split_test.split_statistics(
                net, updates, c, members, sums, self.additions.landmarks
            )
            round_statistics.append(statistics)
        return round_statistics, updates.step if sums is None else sums.step

    def _note(
        self, run: fl.Run, state: CFLState, round_statistics: Sequence[split_test.SplitStatistics]
    ) -> None:
        """Write the splits and the statistics of a round into the history."""
        splits = []
        split_tests = []
        for statistics in round_statistics:
            if statistics.sides:
                splits.append([statistics.members, *statistics.sides])
            # No norms are tested of signatures.
            if statistics.mean is not None and statistics.evidence.of_round:
                split_tests.append(statistics.line())
        run.note(splits=splits, split_tests=split_tests, wanted=list(state.wanted))

    def _complete_tree(self, net: fl.ServerChannel, run: fl.Run, state: CFLState) -> None:
        """Fetch the final models of the tree's leaves."""
        leaves = run.once(
            "leaves", lambda: state.tree.leaf_models(net, state.outbox), parameter_tree.LeafModels
        )
        state.tree.complete(leaves)

    def assign_newcomers(self, net: fl.ServerChannel, state: Any, to: Sequence[int]) -> list[int]:
        """Return the clusters of newcomers by Algorithm 4, down the parameter tree.

        With gradient signatures each joins the cluster whose signatures are nearest on average.

        Args:
            net: a channel to the newcomers.
            state: the final state of the run.
            to: the newcomers' numbers.

        Raises:
            UsageError: the run did not store the tree.
            UpdateError: a newcomer does not reply.
        """
        if self.signatures.by_gradients:
            return signature_collection.assign_by_signatures(
                net, state.labels, state.signatures, to
            )
        if not self.tree:
            raise fl.UsageError(
                "newcomers find their cluster down the parameter tree, and this run kept none: run "
                "it with tree=True"
            )
        if self.similarity == "gradient":
            method: Any = CFLClient.gradient
        elif self.compression.used:
            method = CFLClient.send_compressed_update
        else:
            method = CFLClient.train
        return parameter_tree.find_leaves(net, state.tree, method, to)

    def _fall_back(self, net: fl.ServerChannel, run: fl.Run, state: CFLState) -> None:
        """Return clusters to the model before a split that made validation worse (end of II-A)."""
        tree = state.tree
        outbox = state.outbox
        labels = state.labels
        chosen = run.once(
            "judged",
            lambda: parameter_tree.choose_fallback_models(net, tree, outbox, labels),
            parameter_tree.FallbackResult,
        )
        state.fallback_models = run.once(
            "fallback_models",
            lambda: parameter_tree.send_fallback_models(net, tree, outbox, labels, chosen),
            parameter_tree.FallbackResult,
        )

    def _test_clusters(
        self,
        net: fl.ServerChannel,
        state: CFLState,
        round_statistics: Sequence[split_test.SplitStatistics],
    ) -> None:
        """Test each cluster, and fetch the models that the tree stores of splits.

        Without its model a cluster is not split yet.

        Args:
            round_statistics: of all clusters; changed in place.
        """
        state.shared = False
        for statistics in round_statistics:
            if statistics.evidence.ids:
                self._test(net, state, statistics)
            if statistics.sides and self.tree:
                fetched = split_test.fetch_split_model(net, state.outbox, statistics)
                if not fetched:
                    statistics.sides = None

    def _test(
        self, net: fl.ServerChannel, state: CFLState, statistics: split_test.SplitStatistics
    ) -> None:
        """Test whether a cluster is split in this round (lines 16–21), and record its sides.

        The gap and the similarities are measured in every round, also where the cluster is not
        split.

        Args:
            statistics: of the cluster; changed in place.
        """
        state.longest = max(state.longest, statistics.max_norm)
        state.wanted = [c for c in state.wanted if c != statistics.cluster]
        stationary = self._stationary(statistics)  # line 16, first condition
        large_enough = len(statistics.candidates) >= self.additions.min_size
        if self.similarity == "gradient":
            # Gradients take another call, so only a cluster that may be split computes them.
            if not (stationary and large_enough):
                return
            split_test.compare_gradients(net, state.outbox, statistics, self.additions.landmarks)
        if len(statistics.evidence.ids) < 2:
            return
        alpha = self._similarities(state, statistics)  # line 17
        if not large_enough:
            return
        seed = net.randomness.integer("server", "clusterer", net.round, statistics.cluster)
        sides = self._bipartition(alpha, seed)  # lines 19 and 20
        statistics.gap = noise_robust.gap_between(alpha, sides)
        smaller = min(len(sides.first), len(sides.second))
        if smaller < self._smallest_cluster:
            return
        # Line 16, both conditions.
        if not (stationary and self._incongruent(state, statistics)):
            return
        if self._significant(statistics, alpha, seed):
            self._accept(state, statistics, sides, alpha)  # line 21

    def _stationary(self, statistics: split_test.SplitStatistics) -> bool:
        """Return whether federated learning has converged in a cluster: ‖Δ_c‖ < ε1 (eq. 32).

        The relative criterion compares ‖Δ_c‖ / max ‖Δ_i‖ (not in the paper). Signatures are those
        of a stationary point in every round.
        """
        if not statistics.evidence.of_round:
            return True
        if self.additions.criterion == "relative":
            return statistics.mean_norm < self.eps1 * statistics.max_norm
        return statistics.mean_norm < self.eps1

    def _incongruent(self, state: CFLState, statistics: split_test.SplitStatistics) -> bool:
        """Return whether single clients are far from a stationary point: max ‖Δ_i‖ > ε2 (eq. 33).

        The relative criterion compares with the largest norm of any round (not in the paper).
        Signatures have one scale.
        """
        if not statistics.evidence.of_round:
            return True
        if self.additions.criterion == "relative":
            return statistics.max_norm > self.eps2 * state.longest
        return statistics.max_norm > self.eps2

    def _similarities(
        self, state: CFLState, statistics: split_test.SplitStatistics
    ) -> NDArray[np.float64]:
        """Return α of the clients that replied, (n, n) (eq. 50 or 51).

        The state stores it for the observer where it is of all clients.
        """
        alpha = statistics.compared.similarities()
        state.shared = len(alpha) == len(state.labels)
        if state.shared:
            state.alpha = torch.from_numpy(alpha)
        return alpha

    def _bipartition(self, alpha: NDArray[np.float64], seed: int) -> Bipartition:
        """Return two sides of a cluster, by position, and α_cross^max across them (eq. 35).

        Args:
            alpha: (n, n) similarities.
            seed: of the clusterers that need one.
        """
        sides = noise_robust.split_into_two(alpha, self.compression.clusterer, seed)
        if self.additions.criterion == "relative" and self.compression.clusterer == "paper":
            return noise_robust.without_isolated_client(alpha, sides)
        return sides

    def _significant(
        self, statistics: split_test.SplitStatistics, alpha: NDArray[np.float64], seed: int
    ) -> bool:
        """Return whether the clients' separation is significant (not in the paper).

        It is where clients without clusters would rarely be as separated. The absolute criterion
        has no such condition.

        Args:
            alpha: (n, n) similarities.
            seed: of the draws of clients without clusters.
        """
        if self.additions.criterion == "absolute":
            return True
        count = statistics.compared.count()
        if count is not None:
            # The null model of `evidence_for_split` is noise of an unknown size; this one is known.
            # Stand-ins have no clusters, and release what a run with splits does.
            return count > 1 or self.privacy.stand_ins
        watch = progress_logger(
            f"split test of cluster {statistics.cluster}, {len(alpha)} clients: draw"
        )
        test = noise_robust.evidence_for_split(
            alpha,
            self.compression.clusterer,
            self.additions.evidence,
            self.additions.level,
            seed,
            watch,
        )
        # The separation of two clients is infinite: they contain no cluster.
        statistics.separation = test.separation if math.isfinite(test.separation) else None
        statistics.p_value = test.p_value
        # A few of a cluster's clients seldom reach the level, so a weaker hint is enough to wait
        # for a complete round.
        if not statistics.complete:
            return statistics.p_value <= max(self.additions.level, HINT)
        return statistics.p_value <= self.additions.level

    def _accept(
        self,
        state: CFLState,
        statistics: split_test.SplitStatistics,
        sides: Bipartition,
        alpha: NDArray[np.float64],
    ) -> None:
        """Record a split where γ_max < √((1 − α_cross^max)/2) (eq. 39).

        A cluster with missing replies waits for a complete round, since a client without an update
        cannot be assigned to a half.

        Args:
            sides: by position among the clients that α compares, with α_cross^max.
            alpha: of these clients, (n, n).
        """
        if not statistics.complete:
            state.wanted.append(statistics.cluster)
            return
        if self.gamma_max < largest_noise(sides.cross_max):
            statistics.sides = statistics.sides_of_all(sides)
            statistics.cross_max = sides.cross_max
            known = statistics.evidence.of_round or not self.privacy.noisy
            if statistics.compared is statistics.evidence and known:
                statistics.alpha = torch.from_numpy(alpha)

    def _invited(self, net: fl.ServerChannel, state: CFLState, t: int) -> list[int]:
        """Return the clients that train in round t, a random share of each cluster.

        A cluster that waits for a complete round to be split is invited as a whole.
        """
        invited: list[int] = []
        minimum = self._smallest_cluster
        for c, members in enumerate(fl.members(state.labels)):
            share = self.participation
            if c in state.wanted:
                share = 1.0
            invited += fl.sample_clients(net, members, share, t, c, minimum=minimum)
        return sorted(invited)

    def report_fields(self, state: CFLState) -> dict[str, Any]:
        """Return what Sattler et al.'s theory says of each split, from what it was decided by.

        Args:
            state: the final state.
        """
        entries = []
        for node in state.tree.nodes:
            labels = [state.labels[i] for i in node.compared]
            # clients that all ended alone are off no cluster
            if node.children and len(set(labels)) < len(labels):
                alpha = node.alpha.double().numpy()
                entries.append(assurance(alpha, labels, node.cross_max, node.noise, node.round))
        return {"theory": entries} if entries else {}

    def dry_runs(self) -> Sequence[Mapping[str, Any]]:
        """Return a run that tests its cluster in every round, and one that splits it.

        Tests may ask for gradients, and the fallback asks for losses after splits.
        """
        # down to clusters of two or three, whose members compare losses
        splits = {"gamma_max": 0.0, "clusterer": "paper", "min_size": 4}
        if self.signatures.by_gradients:
            return (splits,)
        every_round = {"criterion": "absolute", "eps1": 1e30, "eps2": 1e-30}
        return ({**every_round, "gamma_max": 1 - 1e-9}, {**every_round, **splits})

    @property
    def weighted(self) -> bool:
        """Return whether clients send |D_i|: for the weighted average only."""
        return self.average == "weighted"

    def check(self, clients: int) -> None:
        """Check the options of the split test, too."""
        super().check(clients)
        fl.check_landmarks(self.additions.landmarks)
        if self.signatures.by_gradients:
            self._check_signatures()
        if self.fallback and not self.tree:
            raise fl.UsageError("the fallback judges the models in the tree: leave tree on")

    def _check_signatures(self) -> None:
        """Raise UsageError for options of a split test by updates."""
        if self.additions.criterion == "absolute":
            raise fl.UsageError(
                "the absolute criterion is of norms of updates, and gradient signatures are "
                "compared: take criterion relative, or signature update"
            )
        if self.similarity == "gradient":
            raise fl.UsageError(
                "similarity gradient is of full gradients of the current model, and gradient "
                "signatures are compared: take similarity update, or signature update"
            )

    @property
    def _smallest_cluster(self) -> int:
        """Return the smallest size of a cluster after a split: where updates leave in sums, that of
        a sum, to which no client can contribute alone.
        """
        if self.signatures.by_gradients or self.compression.used:
            return self.sums.least_members
        return 1

    def disclosures(self) -> fl.Disclosures:
        """Return what stays visible under every mask."""
        views = split_test.server_view(
            self.weighted,
            self.compression.used,
            self.tree,
            self.fallback > 0,
            self.signatures.views,
        )
        return fl.Disclosures(server=views, not_covered=self.signatures.assumptions(self.privacy))

    @property
    def observer(self) -> CFLObserver:
        """Return what the experimenter computes outside the protocol."""
        return CFLObserver(self)
