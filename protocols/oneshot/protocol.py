"""One-shot clustering for multi-task hierarchical federated learning: Algorithms 1 and 2.

Ali, Arafa, "Data Similarity-Based One-Shot Clustering for Multi-Task Hierarchical Federated
Learning", 2024.

G_i        Φ(X_i)ᵀΦ(X_i)/n_i, the Gram matrix of client i's features; λ_k, v_k its p leading
           eigenvalues and eigenvectors
r(i, j)    relevance of j's data to i: Π_k (min/max of λ_k^(i) and λ̂_k = ‖G_i v_k^(j)‖)^(1/p)
           of noisy Gram matrices r(i, j) compares Σ_k λ_k² and Σ_k λ̂_k² instead:
           `spectra.span_relevance` (ours)
R          (r(i, j) + r(j, i)) / 2, all that clusters are made from: before any training, without a
           model or a loss
GPS, LPS   the global parameter server, and the local one of each cluster
T, G       the number of tasks, and of rounds

The GPS relays eigenvectors, sealed client to client by default (ours), clusters, and averages the
common layers. An LPS sees its own members' updates, and no other's; the GPS sees none.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Self

from securecluster.clustering.labels import largest
from securecluster.clustering.labels import members as clusters_of
from securecluster.core.randomness import Randomness
from securecluster.data import Federation
from securecluster.errors import UsageError
from securecluster.messaging.messages import Empty
from securecluster.privacy.masking.block_mask import Blocks
from securecluster.privacy.masking.masks import build, width
from securecluster.privacy.masking.sealing import Seal
from securecluster.privacy.pipeline import Pipeline
from securecluster.protocols.common.base import ClusteringProtocol, FittedState, ReleaseCounts
from securecluster.protocols.common.client import TrainingClient
from securecluster.protocols.common.newcomers import check_newcomers, check_offered
from securecluster.protocols.common.pending_updates import PendingUpdates, flush
from securecluster.protocols.common.sampling import TRIES
from securecluster.protocols.oneshot import feature_maps
from securecluster.protocols.oneshot import gram_mechanism as noisy_gram
from securecluster.protocols.oneshot.client import VIEWS, EigenvectorOptions, OneShotClient
from securecluster.protocols.oneshot.hierarchical_averaging import (
    GPS,
    average_in_layers,
    common_layers,
)
from securecluster.protocols.oneshot.server import (
    ClusteringResult,
    LinkageRecord,
    OneShotState,
    agglomerate,
    check_options,
    eigenvectors_of_others,
)
from securecluster.runtime.endpoint import config_hash
from securecluster.runtime.run import Run
from securecluster.runtime.server_channel import ServerChannel
from securecluster.training.local_trainer import LocalTrainer


@dataclass
class OneShot(ClusteringProtocol):
    """Clusters from eigenvectors of clients' data, trained hierarchically with common layers."""

    mask: str = "permutation"
    """map of eigenvectors and updates that servers do not know, fresh each call: none, permutation,
    signed-permutation, rotation or haar
    """
    tasks: int | None = None
    """T, the number of clusters; None finds it, or takes it from the height"""
    height: float | None = None
    """merges are made up to this value of 1 - R; None makes them until `tasks` are left, or to the
    largest gap
    """
    vectors: int = 5
    """p, eigenvectors that each client shares"""
    features: Any = "identity"
    """feature map Φ that everyone knows: identity, pca, dct, conv or resnet18; in Python also a
    callable or nn.Module of (n, ...)
    """
    public: str | None = None
    """data set whose samples are public, for pca"""
    components: int | None = None
    """numbers a sample has after pca (64), dct (16) or conv (512)"""
    floor: float = 0.0
    """a client leaves out its own eigenvalues below this share of its largest, in [0, 1)"""
    common: str = "auto"
    """first layers that all clusters share: their names, joined by commas; none; or auto, all up to
    the last convolution, else the first
    """
    gps_every: int = 1
    """rounds of the LPSs between two averages of the common layers at the GPS"""
    sealed: bool = True
    """eigenvectors can be read by the run's clients only; otherwise the GPS sees them under the
    mask
    """
    clusterer: str = field(default="paper", kw_only=True)
    """what parts R: paper (average linkage), average (the same), spectral or kmeans; without T into
    as many clusters as the paper's has
    """
    dp_unit: str = field(default="example", kw_only=True)
    """what is protected: client (all data of one) or example (one sample of one client: DP-SGD in
    local training)
    """
    gram_noise: float = field(default=0.0, kw_only=True)
    """noise multiplier of each client's Gram matrix, whose samples are clipped to norm 1, for its
    dp_unit; relevance is then of spans
    """
    gram_mechanism: str = field(default="gram", kw_only=True)
    """gram, or naive: noise on unit eigenvectors by their trivial sensitivity 2√p, for research;
    relevance is exact, and ε infinite
    """

    name: ClassVar[str] = "oneshot"
    client: ClassVar[type[TrainingClient]] = OneShotClient
    gps: ClassVar[type] = GPS
    scenario: ClassVar[str | None] = "tasks"

    def run_server(self, net: ServerChannel, run: Run) -> OneShotState:
        """Algorithm 1."""
        found = run.once("cluster", lambda: self._cluster(net), ClusteringResult)  # line 2
        net.divide(found.labels)
        state = OneShotState(
            found.labels,
            PendingUpdates.start(len(net.clients), fresh=self.mask != "none"),
            found=found,
        )
        for t in run.rounds("train", state, self.rounds):  # lines 3–9
            average_in_layers(
                net,
                state,
                GPS(),
                self.participation,
                t,
                mix=t % self.gps_every == 0 or t == self.rounds,
            )
            if t == 1:
                run.note(
                    clustered=clusters_of(found.labels),
                    height=found.linkage.threshold,
                    merges=found.linkage.merges.tolist(),
                )
        flush(net, run, state)
        return state

    def _cluster(self, net: ServerChannel) -> ClusteringResult:
        """Algorithm 2; who never replies goes to the largest cluster (ours)."""
        shared = net.gather(OneShotClient.eigen, Empty(), to=net.clients, tries=TRIES)  # lines 2–5
        if len(shared) < 2:
            raise UsageError(
                f"{len(shared)} client(s) sent eigenvectors, and clustering needs two or more: run "
                "it anew, with another seed"
            )
        vectors = shared.rows.vectors.values.cpu()
        letters = eigenvectors_of_others(shared.ids, vectors, shared.step, to=shared.ids)
        seed, noisy = net.randomness.integer("server", "clusterer"), net.agreed["gram_noise"] > 0
        part = agglomerate(self.tasks, self.height, self.clusterer, seed, noisy)
        # lines 6–19
        pairs = net.pairs(OneShotClient.relevance, letters, to=shared.ids, then=part, tries=TRIES)
        group = pairs.value
        of, kept = (
            dict(zip(pairs.ids, group.labels, strict=True)),
            [k for k, i in enumerate(shared.ids) if i in pairs.ids],
        )
        everyone = [of.get(i, largest(group.labels)) for i in net.clients]
        return ClusteringResult(
            everyone,
            vectors[kept],
            shared.step,
            group.relevance,
            LinkageRecord(list(pairs.ids), group.merges, group.height),
        )

    def assign_newcomers(
        self, net: ServerChannel, state: OneShotState, to: Sequence[int]
    ) -> list[int]:
        """Ours: a newcomer is sent all eigenvectors and names the cluster whose members' are most
        relevant to it, nothing else.
        """
        found = state.found
        assert found is not None
        ids = found.linkage.ids
        letters = eigenvectors_of_others(
            ids, found.vectors, found.step, to, [found.labels[i] for i in ids]
        )
        got = net.gather(OneShotClient.choose, letters, to=to, tries=TRIES)
        check_newcomers(to, got.ids)
        chosen = check_offered(got.ids, got.rows.cluster.values.tolist(), found.labels)
        return [chosen[i] for i in to]

    @property
    def weighted(self) -> bool:
        """Always: means are over samples."""
        return True

    def shared_facts(self, federation: Federation) -> dict[str, Any]:
        """The common layers' size, and Φ."""
        feature_maps.check_objective(federation.objective)
        phi = self._phi(federation.shape, federation.seed)
        return {
            "shared": common_layers(self.flat_model(federation), self.common),
            "phi": phi.describe(),
            "width": phi.dimension,
        }

    def _restore_fitted(self, kept: FittedState) -> Self:
        """Refuses features of your own that are not the run's."""
        config = kept.learned.config
        if not isinstance(config["features"], str):
            self._phi(config["shape"], config["seed"]).agreed(config["phi"])
        return super()._restore_fitted(kept)

    def shown_params(self) -> dict[str, Any]:
        """Of features of your own, that they are."""
        return super().shown_params() | (
            {} if isinstance(self.features, str) else {"features": {"own": "features"}}
        )

    def pipeline(self, config: Mapping[str, Any]) -> Pipeline:
        """A map of the common layers, and another of the others; eigenvectors are sealed, or mapped
        as features would be.
        """
        d, shared = config["dimension"], config["shared"]
        apart = self.mask != "none" and 0 < shared < d
        masks = (Blocks(self.mask, shared, d - shared),) if apart else build(self.mask, d)
        fields = {"vectors": Pipeline(() if self.sealed else build(self.mask, config["width"]))}
        seal = Seal(config_hash(config)) if self.sealed else None
        return Pipeline(
            [*self.stages(config), *masks], seal, fields, width(self.mask, shared) if shared else 0
        )

    def frame_sizes(self, config: Mapping[str, Any]) -> dict[str, int]:
        """Add the eigenvectors that a client shares, and their numbers."""
        width = int(config["width"])
        return {
            **super().frame_sizes(config),
            "vectors": min(int(self.vectors), width),
            "features": width,
        }

    def releases(self) -> ReleaseCounts:
        """Adds the Gram matrix; what the GPS averages has been released to the LPSs."""
        return replace(super().releases(), gram=1)

    def keeps_local_models(self, config: Mapping[str, Any]) -> bool:
        """Return whether models that clients trained alone stay out of the results: also where only
        Gram matrices have noise.
        """
        return super().keeps_local_models(config) or float(config["gram_noise"]) > 0

    def resolve_defaults(self, federation: Federation) -> dict[str, Any]:
        """Adds the Gram matrices' noise: with a `target_epsilon` that of everything else."""
        found = super().resolve_defaults(federation)
        return found | {
            "gram_noise": float(self.gram_noise if self.target_epsilon is None else found["noise"])
        }

    def multipliers(self, config: Mapping[str, Any]) -> dict[str, float]:
        """Adds eigenvectors, and what is made of the same matrix."""
        return super().multipliers(config) | noisy_gram.multipliers(
            config["gram_noise"], self.gram_mechanism
        )

    def replacement_factors(self) -> dict[str, float]:
        """Of the Gram matrix; of eigenvectors any change is bounded alike."""
        return {
            "cluster": noisy_gram.REPLACE,
            "vectors": 1.0 if self.gram_mechanism == "naive" else noisy_gram.REPLACE,
        }

    def make_client(
        self, cohort: LocalTrainer, pipeline: Pipeline, config: Mapping[str, Any]
    ) -> OneShotClient:
        """Adds Φ, and the noise of Gram matrices."""
        phi = self._phi(config["shape"], config["seed"]).agreed(config["phi"])
        options = EigenvectorOptions(
            features=phi,
            count=min(int(self.vectors), phi.dimension),
            floor=self.floor,
            noise=noisy_gram.hidden(config, cohort.secret),
        )
        return OneShotClient(cohort, self.training(config), pipeline, self.weighted, options)

    def _phi(self, shape: Sequence[int], seed: int) -> feature_maps.Features:
        return feature_maps.build(
            self.features, tuple(shape), Randomness(seed), self.public, self.components
        )

    def check(self, clients: int) -> None:
        """Adds what belongs to the clustering and the servers."""
        super().check(clients)
        feature_maps.check(self.features, self.public, self.components)
        check_options(self, clients)

    def server_view(self) -> list[str]:
        """What the GPS sees."""
        return list(VIEWS["gps"])

    def not_covered(self) -> list[str]:
        """Adds naive noise, whose own price is not the run's, and what features are made of."""
        own = (
            noisy_gram.trusted(self.features, self.public)
            if self.gram_noise or self.target_epsilon
            else []
        )
        return (
            super().not_covered()
            + own
            + noisy_gram.said(self.gram_noise, self.gram_mechanism, int(self.vectors), self.delta)
        )

    def client_view(self) -> list[str]:
        """Eigenvectors."""
        return list(VIEWS["client"])

    def lps_view(self) -> list[str]:
        """What an LPS sees of its own cluster."""
        # clipped updates count the same, and how many samples is not told
        return list(VIEWS["lps"][int(self.per_client) :])
