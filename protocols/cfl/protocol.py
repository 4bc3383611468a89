"""Clustered Federated Learning (CFL): Algorithm 5, with Algorithms 1, 3 and 4.

Sattler, Müller, Samek, "Clustered Federated Learning: Model-Agnostic Distributed Multi-Task
Optimization under Privacy Constraints", arXiv 1910.01991 (2019) / IEEE TNNLS 32(8), 2021.

θ      a client's model; the server never needs it (it may know θ_0)
Δ_i    client i's masked update P(SGD_n(θ_i, D_i) − θ_i); Δ_c the mean over cluster c
α      cosine similarities of updates (eq. 51) or full gradients (eq. 50); α_cross^max the largest
       across the halves of a split (eq. 35)
ε1, ε2 the split test: ‖Δ_c‖ < ε1 and max ‖Δ_i‖ > ε2 (eq. 32–34); γ_max the assumed approximation
       noise (eq. 39)
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Self

import numpy as np
from numpy.typing import NDArray

from securecluster.clustering.labels import members as clusters_of
from securecluster.clustering.noise_robust import (
    evidence_for_split,
    gap_between,
    split_into_two,
    with_company,
)
from securecluster.clustering.similarity import FLOOR, cosine
from securecluster.core.lazy_torch import torch
from securecluster.core.validation import check_choice, check_number, check_whole
from securecluster.data import Federation
from securecluster.errors import UsageError
from securecluster.protocols.cfl.client import CFLClient
from securecluster.protocols.cfl.parameter_tree import (
    FallbackResult,
    LeafModels,
    ParameterTree,
    choose_fallback_models,
    find_leaves,
    send_fallback_models,
)
from securecluster.protocols.cfl.separation import largest_noise, separation_gap
from securecluster.protocols.cfl.split_test import (
    SplitStatistics,
    collect_updates,
    compare_gradients,
    fetch_split_model,
    queue_averages,
    server_view,
    split_cluster,
    split_statistics,
)
from securecluster.protocols.common.base import FittedState, ReleaseCounts, opened
from securecluster.protocols.common.client import TrainingClient
from securecluster.protocols.common.compression_options import CompressionOptions
from securecluster.protocols.common.pending_updates import PendingUpdates, flush
from securecluster.protocols.common.sampling import sample_clients
from securecluster.runtime.run import Line, Run
from securecluster.runtime.server_channel import ServerChannel

HINT = 0.1  # the p-value at which a cluster that replied in part is asked for a complete round


@dataclass
class CFLState:
    """What the server's loop changes."""

    labels: list[int]
    outbox: PendingUpdates
    tree: ParameterTree
    # the largest max ‖Δ_i‖ of any round, the unit of the relative criterion's eps2
    longest: float = 0.0
    # clusters that wait for a round with every member
    wanted: list[int] = field(default_factory=list)
    # (m, m), of the last round that all clients shared
    alpha: torch.Tensor = field(default_factory=lambda: torch.zeros(0, 0))
    shared: bool = True  # whether alpha is of this round
    handed: FallbackResult | None = None  # whose model each cluster got in the end


@dataclass
class CFL(CompressionOptions):
    """Recursive bipartition of the clients once federated learning has become stationary."""

    mask: str = "permutation"
    """map of updates that the server does not know, a fresh one each round: none, permutation,
    signed-permutation, rotation or haar
    """
    criterion: str = "relative"
    """split test: relative (eps1 and eps2 are shares, clusters must be significant) or absolute
    (norms; the authors' need keep_momentum)
    """
    eps1: float = 0.5
    """a cluster is stationary when ‖mean Δ‖ is below this; relative: below this share of max ‖Δ‖"""
    eps2: float = 0.25
    """and its clients are not content when max ‖Δ‖ is above this; relative: above this share of the
    largest max ‖Δ‖ of any round
    """
    evidence: float = 0.25
    """relative criterion: and some cluster C has (|C| − 1)·(α_intra^min(C) − α_cross^max(C, rest))
    above this
    """
    level: float = 0.001
    """relative criterion: and clients without clusters would be as separated with at most this
    probability, in (0, 1)
    """
    gamma_max: float = 0.5
    """accept a split only if γ_max < sqrt((1 − α_cross^max) / 2), in [0, 1)"""
    min_size: int = 3
    """clusters with fewer members are not split (ours; the paper's examples of two clients need 2)
    """
    similarity: str = "update"
    """what α compares: update, or gradient (the full one, for which members of a stationary cluster
    are asked besides)
    """
    average: str = "uniform"
    """mean over clients: uniform (Algorithm 5) or weighted by |D_i| (Algorithm 2)"""
    tree: bool = True
    """keep models and updates of splits at the server (at each level as much as a round's updates):
    newcomers and the fallback need them
    """
    fallback: float = 0.0
    """share of each client's training samples kept aside to judge in the end whether splits helped,
    in [0, 1); 0 trusts them
    """

    name: ClassVar[str] = "cfl"
    client: ClassVar[type[TrainingClient]] = CFLClient

    def run_server(self, net: ServerChannel, run: Run) -> CFLState:
        """Algorithm 5, "Server does"."""
        m = len(net.clients)
        state = CFLState(
            [0] * m, PendingUpdates.start(m, fresh=self.mask != "none"), ParameterTree.start(m)
        )
        for t in run.rounds("train", state, self.rounds):
            got, total = collect_updates(
                net, state.outbox, self._invited(net, state, t), state.labels, self.briefs
            )
            looks, state.shared = [], False
            for c, members in enumerate(clusters_of(state.labels)):
                looks.append(look := split_statistics(net, got, c, members, state.labels, total))
                if look.came:
                    self._test(net, state, look)
                if look.halves and self.tree and not fetch_split_model(net, state.outbox, look):
                    look.halves = None  # nobody posts the model: the split waits
            queue_averages(
                state.outbox, looks, got.step if total is None else total.step, state.labels
            )
            splits, seen = (
                [k for k in looks if k.halves],
                [k.line() for k in looks if k.mean is not None],
            )
            run.note(
                splits=[[k.members, *(k.halves or ())] for k in splits],
                looks=seen,
                wanted=list(state.wanted),
            )
            for look in splits:
                split_cluster(state.tree, state.labels, look, t)
        flush(net, run, state)
        if self.tree:
            state.tree.complete(
                run.once("leaves", lambda: state.tree.leaf_models(net, state.outbox), LeafModels)
            )
        if self.fallback:
            judged = run.once(
                "judged",
                lambda: choose_fallback_models(net, state.tree, state.outbox, state.labels),
                FallbackResult,
            )
            state.handed = run.once(
                "handed",
                lambda: send_fallback_models(net, state.tree, state.outbox, state.labels, judged),
                FallbackResult,
            )
        return state

    def place(self, net: ServerChannel, state: Any, to: Sequence[int]) -> list[int]:
        """Algorithm 4, down the parameter tree."""
        if not self.tree:
            raise UsageError(
                "newcomers find their cluster down the parameter tree, and this run kept none: run "
                "it with tree=True"
            )
        usual = CFLClient.send_compressed_update if self.briefs else CFLClient.train
        return find_leaves(
            net, state.tree, CFLClient.gradient if self.similarity == "gradient" else usual, to
        )

    def _test(self, net: ServerChannel, state: CFLState, look: SplitStatistics) -> None:
        """Lines 16–21: ε1, ε2, bipartition, γ_max. A cluster waits for a reply of every member."""
        state.longest = max(state.longest, look.max_norm)
        state.wanted = [w for w in state.wanted if w != look.cluster]
        stationary = look.mean_norm < self.eps1 * (
            look.max_norm if self.criterion == "relative" else 1
        )
        tested = len(look.members) >= self.min_size
        if self.similarity == "gradient":
            if not (stationary and tested):
                return
            compare_gradients(net, state.outbox, look)
        if len(look.came) < 2:
            return
        alpha = cosine(look.inner, FLOOR if look.scatter else 0.0).cpu()
        state.shared = look.complete and len(look.members) == len(state.labels)
        state.alpha = alpha if state.shared else state.alpha
        if not tested:
            return
        seed = net.randomness.integer("server", "clusterer", net.round, look.cluster)
        found = split_into_two(alpha.numpy(), self.clusterer, seed)
        if self.criterion == "relative" and self.clusterer == "paper":
            found = with_company(alpha.numpy(), found)
        look.gap = gap_between(alpha.numpy(), found)
        enough = min(len(found.first), len(found.second)) >= self.least
        if not (stationary and enough and self._incongruent(state, look)):
            return
        if not self._significant(look, alpha.numpy(), seed):
            return
        if not look.complete:
            state.wanted.append(look.cluster)
        elif self.gamma_max < largest_noise(found.cross_max):
            look.halves = (
                [look.members[k] for k in found.first],
                [look.members[k] for k in found.second],
            )

    def _incongruent(self, state: CFLState, look: SplitStatistics) -> bool:
        """Return whether clients of a stationary cluster still pull.

        They do where max ‖Δ_i‖ > ε2 (eq. 33), or where it is above that as a share (ours).
        """
        return look.max_norm > self.eps2 * (state.longest if self.criterion == "relative" else 1)

    def _significant(self, look: SplitStatistics, alpha: NDArray[np.float64], seed: int) -> bool:
        """Return whether clients are separated, and would rarely be so without clusters (ours).

        The absolute criterion does not ask for this.
        """
        if self.criterion == "absolute":
            return True
        found = evidence_for_split(alpha, self.clusterer, self.evidence, self.level, seed)
        # two clients have no cluster among them
        look.evidence = found.separation if math.isfinite(found.separation) else None
        look.p_value = found.p_value
        # a few of a cluster's clients seldom reach the level, so a hint is enough to ask them all
        if not look.complete:
            return look.p_value <= max(self.level, HINT)
        return look.p_value <= self.level

    def _invited(self, net: ServerChannel, state: CFLState, t: int) -> list[int]:
        """Return the clients that are asked in round t, a share of each cluster.

        Where a cluster only waits for complete replies to be split, all of its clients are asked.
        """
        clusters, share = enumerate(clusters_of(state.labels)), self.participation
        return sorted(
            i
            for c, own in clusters
            for i in sample_clients(
                net, own, 1.0 if c in state.wanted else share, t, c, least=self.least
            )
        )

    def releases(self) -> ReleaseCounts:
        """Return how often a client releases updates, full gradients and losses.

        It releases an update a round, or a brief and the update. The losses are those that the
        fallback goes by.
        """
        full = self.rounds * (self.similarity == "gradient")
        return ReleaseCounts(
            self.rounds * (1 + self.briefs) + full,
            int(self.fallback > 0),
            trainings=self.rounds,
            full=full,
        )

    @property
    def weighted(self) -> bool:
        """Whether clients tell |D_i|: only for the weighted average."""
        return self.average == "weighted"

    @property
    def aside(self) -> float:
        """The samples that the fallback is judged by."""
        return self.fallback

    def check(self, clients: int) -> None:
        """Adds the split test's own fields."""
        super().check(clients)
        check_choice(
            self,
            criterion=("relative", "absolute"),
            average=("uniform", "weighted"),
            similarity=("update", "gradient"),
        )
        check_whole(self, min_size=2)
        for name, most in {
            "eps1": math.inf,
            "eps2": math.inf,
            "evidence": math.inf,
            "gamma_max": 1,
            "fallback": 1,
        }.items():
            check_number(self, name, 0, most, low_in=most == 1)
        check_number(self, "level", 0, 1, low_in=False)
        if self.fallback and not self.tree:
            raise UsageError("the fallback judges the models in the tree: leave tree on")

    def server_view(self) -> list[str]:
        """What stays visible under every mask."""
        return server_view(self.weighted, self.briefs, self.tree, self.fallback > 0)

    def observe(
        self, federation: Federation, client: Any, state: Any, scores: NDArray[np.float64]
    ) -> Line:
        """Adds the true separation gap g (eq. 28) while all clients share one model."""
        truth = federation.truth if state.shared and len(state.alpha) else None
        gap = separation_gap(state.alpha.numpy(), truth) if truth else None
        return {**super().observe(federation, client, state, scores), "gap": gap}

    def adopt(self, kept: FittedState) -> Self:
        """Adds the parameter tree."""
        super().adopt(kept)
        self.tree_: ParameterTree = self.state_.tree
        return self

    def node_model(self, node: int) -> dict[str, Any]:
        """Return the `state_dict` of a node's model (V-C).

        `tree_.path(tree_.leaf(c))` are the nodes of cluster c, the most general first.
        """
        return self._flat.state_dict(opened(self, self.tree_.nodes[node].model))

    def ensemble(self, cluster: int, x: torch.Tensor) -> torch.Tensor:
        """Return the probabilities (n, classes) of the classes of samples x (n, …).

        They are the mean over the models on the cluster's path, root to leaf (V-C).
        """
        path = [
            opened(self, self.tree_.nodes[v].model)
            for v in self.tree_.path(self.tree_.leaf(cluster))
        ]
        return torch.stack(
            [self._flat.objective.predicted(self._flat.call(self._flat.views(w), x)) for w in path]
        ).mean(0)
