"""One-shot clustering for multi-task hierarchical federated learning: Algorithms 1 and 2.

Ali, Arafa, "Data Similarity-Based One-Shot Clustering for Multi-Task Hierarchical Federated
Learning", 2024.

G_i        Φ(X_i)ᵀΦ(X_i)/n_i, the Gram matrix of client i's features; λ_k, v_k its p leading
           eigenvalues and eigenvectors
r(i, j)    relevance of j's data to i: Π_k (min/max of λ_k^(i) and λ̂_k = ‖G_i v_k^(j)‖)^(1/p).
           With noisy Gram matrices r(i, j) compares Σ_k λ_k² and Σ_k λ̂_k² instead:
           `eigenvectors.span_relevance` (not in the paper)
R          (r(i, j) + r(j, i)) / 2, from which clusters are computed: before any training, without
           a model or a loss
GPS, LPS   the global parameter server, and the local one of each cluster
T, G       the number of tasks, and of rounds

The GPS relays eigenvectors, which by default are sealed client to client (not in the paper),
clusters the clients, and averages the common layers. An LPS sees the updates of its own members
only; the GPS sees none.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

from securecluster.clustering.noise_robust import CLUSTERERS
from securecluster.privacy.masking.block_mask import Blocks
from securecluster.privacy.masking.masks import build, width
from securecluster.privacy.masking.sealing import Seal
from securecluster.protections.pair_rows import PairRange
from securecluster.protocols import authoring as fl
from securecluster.protocols.common.averages.sampling import sample_landmarks
from securecluster.protocols.common.comparison.eigenvectors import check_objective
from securecluster.protocols.common.newcomers import check_offered
from securecluster.protocols.common.options.pair_options import PairOptions
from securecluster.protocols.oneshot import (
    feature_maps,
    hierarchical_averaging,
    naive_mechanism,
    server,
)
from securecluster.protocols.oneshot.client import (
    RELEVANCE,
    VIEWS,
    OneShotClient,
    OtherEigenvectors,
    RelevanceOptions,
)
from securecluster.results.fitted import FittedRun
from securecluster.results.fitted_state import FittedState
from securecluster.runtime.endpoint import config_hash
from securecluster.runtime.pair_aggregators import LabelledValue, PairFunction


@dataclass(kw_only=True)
class RelevanceOfPairs(PairOptions):
    """Options of the relevance of pairs of clients, which the server clusters."""

    functions: ClassVar[Mapping[str, PairFunction]] = {"cluster_tasks": server.cluster_tasks}
    fields: ClassVar[Mapping[str, PairRange]] = {"row": RELEVANCE}
    labels: ClassVar[Mapping[str, LabelledValue]] = {"cluster_tasks": server.tasks_of_labels}


class FittedOneShot(FittedRun):
    """Result of a run of one-shot clustering, as its user gets it."""

    def __init__(self, method: Any, fitted: FittedState, *others: Any) -> None:
        """Refuse a user's own feature map that is not the run's."""
        config = fitted.learned.config
        if not isinstance(config["features"], str):
            phi = method.feature_map_of(config["shape"], config["seed"])
            phi.agreed(config["phi"])
        super().__init__(method, fitted, *others)


@dataclass(kw_only=True)
class OneShotAdditions(fl.Additions):
    """What hides eigenvectors, and makes their comparison robust to noise and many clients."""

    floor: Annotated[float, fl.Number(0, 1), fl.IN_PYTHON] = 0.0
    """a client leaves out its own eigenvalues below this share of its largest, in [0, 1)"""
    sealed: bool = True
    """eigenvectors can be read by the run's clients only; otherwise the GPS sees them under the
    mask
    """
    clusterer: Annotated[str, fl.OneOf(*CLUSTERERS)] = "paper"
    """method that clusters R: paper (average linkage), average (the same), spectral or kmeans;
    without T into as many clusters as the paper's has
    """
    landmarks: Annotated[int | None, fl.IN_PYTHON] = None
    """clients whose data are compared pair by pair; the others compare theirs with these and choose
    a cluster, so bytes are linear in the clients; None compares all pairs
    """
    gram_mechanism: Annotated[str, fl.OneOf("gram", "naive"), fl.IN_PYTHON] = "gram"
    """gram, or naive: noise on unit eigenvectors by their trivial sensitivity 2√p, for research;
    relevance is exact, and ε infinite
    """

    absent: ClassVar[Mapping[str, Any]] = {"sealed": False}


@fl.protocol
class OneShot(fl.Published, fl.EigenvectorProtocol):
    """Clusters from eigenvectors of clients' data, trained hierarchically with common layers."""

    mask: str = "permutation"
    """map of eigenvectors and updates that servers do not know, fresh each call: none, permutation,
    signed-permutation, rotation or haar
    """
    tasks: int | None = None
    """T, the number of clusters; None determines it from the data, or from the height"""
    height: Annotated[float | None, fl.Number(0, 1, high_in=True)] = None
    """merges are made up to this value of 1 - R; None makes them until `tasks` are left, or to the
    largest gap
    """
    features: Any = "identity"
    """public feature map Φ: identity, pca, dct, conv or resnet18; in Python also a callable or
    nn.Module of (n, ...)
    """
    public: str | None = None
    """data set whose samples are public, for pca"""
    components: Annotated[int | None, fl.IN_PYTHON] = None
    """numbers a sample has after pca (64), dct (16) or conv (512)"""
    common: Annotated[str, fl.IN_PYTHON] = "auto"
    """first layers that all clusters share: their names, joined by commas; none; or auto, all up to
    the last convolution, else the first
    """
    gps_every: Annotated[int, fl.AtLeast(1), fl.IN_PYTHON] = 1
    """rounds of the LPSs between two averages of the common layers at the GPS"""

    gram_noise: float = 0.0
    """noise multiplier of each client's Gram matrix, whose samples are clipped to norm 1, for its
    dp_unit; relevance then compares spans
    """

    additions: OneShotAdditions = fl.group(OneShotAdditions)
    name: ClassVar[str] = "oneshot"
    _inputs_of_paper: ClassVar[tuple[str, ...]] = ("tasks",)
    client: ClassVar[type[fl.TrainingClient]] = OneShotClient
    pairs: PairOptions = fl.group(RelevanceOfPairs)
    fitted_class: ClassVar[type[FittedRun]] = FittedOneShot
    gps: ClassVar[type] = hierarchical_averaging.GPS
    scenario: ClassVar[str | None] = "tasks"

    def run_server(self, net: fl.ServerChannel, run: fl.Run) -> server.OneShotState:
        """Run the servers' side of Algorithm 1.

        Args:
            net: the servers' channel.
            run: rounds, checkpoints and history.
        """
        fl.check_compared(net, self.additions.landmarks)
        # line 2: Algorithm 2
        result = run.once("cluster", lambda: self._cluster(net), server.ClusteringResult)
        net.divide(result.labels)  # from here on, the LPS of its cluster asks each client
        state = server.OneShotState(
            labels=result.labels,
            outbox=fl.PendingUpdates.start(len(net.clients), fresh=self.mask != "none"),
            found=result,
        )
        # lines 3–9: FedAvg at each LPS, and averages of the common layers at the GPS
        for t in run.rounds("train", state, self.rounds):
            # also after the last round: all clusters end with the same common layers
            mix = t % self.gps_every == 0 or t == self.rounds
            hierarchical_averaging.average_in_layers(
                net, state, hierarchical_averaging.GPS(), self.participation, t, mix
            )
            if t == 1:
                run.note(clustered=fl.members(result.labels))
                if state.linkage is not None:
                    run.note(height=result.linkage.threshold, merges=result.linkage.merges.tolist())
        fl.flush(net, run, state)
        return state

    def _unlike_longer(self, longer: Any) -> str | None:
        """Return that the last round averages the common layers of all clusters."""
        if self.rounds % self.gps_every == 0:
            return None
        return f"round {self.rounds} was the last, and averaged the common layers of all clusters"

    def _cluster(self, net: fl.ServerChannel) -> server.ClusteringResult:
        """Run Algorithm 2.

        Clients that never reply are assigned to the largest cluster (not in the paper).

        Raises:
            UpdateError: fewer than two clients sent eigenvectors.
        """
        landmarks = sample_landmarks(net, net.clients, self.additions.landmarks)
        # lines 2–5: clients share eigenvectors
        # only pairs need keys of all: a client may turn out to be alone in its cluster
        keys = net.pair_aggregator.keys is not None
        shared = net.gather(
            OneShotClient.eigen, fl.Empty(), to=landmarks, tries=fl.TRIES, keys=keys
        )
        if len(shared) < 2:
            raise fl.UpdateError(
                f"{len(shared)} client(s) sent eigenvectors, and clustering needs two or more: run "
                "it anew, with another seed"
            )
        vectors = shared.rows.vectors.values.cpu()
        query = server.eigenvectors_of_others(shared.ids, vectors, shared.step, to=shared.ids)

        # lines 6–19: clients compute relevance, and R is clustered
        pairs = net.pairs(
            OneShotClient.relevance, query, to=shared.ids, then="cluster_tasks", tries=fl.TRIES
        )
        clusters = pairs.value
        label_of = dict(zip(pairs.ids, clusters.labels, strict=True))
        default = fl.largest(clusters.labels)
        # newcomers are compared with the clients that have a row in R
        related = set(pairs.ids)
        compared = [k for k, i in enumerate(shared.ids) if i in related]
        compared_vectors = vectors[compared]
        others = sorted(set(net.clients) - set(landmarks))
        if others:
            query = server.eigenvectors_of_others(
                pairs.ids, compared_vectors, shared.step, to=others, labels=clusters.labels
            )
            label_of |= self._choices(net, query, others, clusters.labels)
        return server.ClusteringResult(
            labels=[label_of.get(i, default) for i in net.clients],
            vectors=compared_vectors,
            step=shared.step,
            relevance=clusters.relevance,
            linkage=server.LinkageRecord(list(pairs.ids), clusters.merges, clusters.height),
        )

    def _choices(
        self,
        net: fl.ServerChannel,
        query: OtherEigenvectors,
        to: Sequence[int],
        labels: Sequence[int],
    ) -> dict[int, int]:
        """Return the clusters that clients choose by the landmarks' eigenvectors.

        Args:
            net: the servers' channel.
            query: the landmarks' eigenvectors and clusters.
            to: the clients that are no landmarks.
            labels: the landmarks' clusters.

        Returns:
            The cluster of each client that replied.
        """
        replies = net.gather(OneShotClient.choose, query, to=to, tries=fl.TRIES)
        if not replies.ids:
            return {}
        choices = replies.rows.cluster.values.tolist()
        return dict(check_offered(replies.ids, choices, labels))

    def assign_newcomers(
        self, net: fl.ServerChannel, state: server.OneShotState, to: Sequence[int]
    ) -> list[int]:
        """Send newcomers all eigenvectors, and return the clusters they choose (not in the paper).

        Each chooses the cluster whose members' data are most relevant to its own, and sends nothing
        else.

        Args:
            net: the servers' channel.
            state: the run's final state.
            to: the newcomers.

        Raises:
            UpdateError: a newcomer does not reply.
        """
        result = state.found
        assert result is not None
        ids = result.linkage.ids
        labels = [result.labels[i] for i in ids]
        query = server.eigenvectors_of_others(ids, result.vectors, result.step, to, labels)
        replies = net.gather(OneShotClient.choose, query, to=to, tries=fl.TRIES)
        fl.check_newcomers(to, replies.ids)
        choices = replies.rows.cluster.values.tolist()
        cluster_of = check_offered(replies.ids, choices, result.labels)
        return [cluster_of[i] for i in to]

    @property
    def weighted(self) -> bool:
        """Return True: averages are over samples."""
        return True

    def shared_facts(self, facts: fl.Facts) -> dict[str, Any]:
        """Return the number of common parameters, and the description of Φ.

        Args:
            facts: of the clients and their data.

        Raises:
            UsageError: the data are text, or the layers or the feature map do not fit.
        """
        check_objective(facts)
        phi = self.feature_map_of(facts.shape, facts.seed)
        return {
            "shared": hierarchical_averaging.common_layers(
                fl.initial_model(self, facts), self.common
            ),
            "phi": phi.describe(),
            "width": phi.dimension,
        }

    def pipeline(self, config: Mapping[str, Any]) -> fl.Pipeline:
        """Return the masks of updates and eigenvectors, and the seal of eigenvectors.

        Args:
            config: the run's configuration.
        """
        d = config["dimension"]
        shared = config["shared"]
        # the GPS averages common layers that it cannot read, so they have a mask of their own
        masks: Sequence[Any] = build(self.mask, d)
        if self.mask != "none" and 0 < shared < d:
            masks = (Blocks(self.mask, shared, d - shared),)
        # eigenvectors are sealed, or masked as features would be
        vector_stages = () if self.additions.sealed else build(self.mask, config["width"])
        return fl.Pipeline(
            [*self.privacy.stages(config), *masks],
            Seal(config_hash(config)) if self.additions.sealed else None,
            {"vectors": fl.Pipeline(vector_stages)},
            width(self.mask, shared) if shared else 0,
        )

    @property
    def mechanism(self) -> str:
        """Return the mechanism of the noise, "gram" or "naive"."""
        return self.additions.gram_mechanism

    def eigenvector_options(self, config: Mapping[str, Any]) -> RelevanceOptions:
        """Return the clients' options, with Φ and the noise of Gram matrices.

        Args:
            config: the run's configuration.

        Raises:
            UsageError: the feature map differs from the run's.
        """
        phi = self.feature_map_of(config["shape"], config["seed"]).agreed(config["phi"])
        return RelevanceOptions(
            features=phi,
            count=min(int(self.vectors), phi.dimension),
            noise=self.gram_noise_of(config),
            floor=self.additions.floor,
        )

    def feature_map_of(self, shape: Sequence[int], seed: int) -> feature_maps.Features:
        """Return the feature map of samples of a shape, in a run of a seed."""
        return feature_maps.build(
            self.features, tuple(shape), fl.Randomness(seed), self.public, self.components
        )

    def check(self, clients: int) -> None:
        """Add checks of the features, the clustering and the servers.

        Args:
            clients: m.

        Raises:
            UsageError: a hyper-parameter is out of range, or two of them contradict each other.
        """
        super().check(clients)
        feature_maps.check(self.features, self.public, self.components)
        server.check_options(self, clients)
        fl.check_landmarks(self.additions.landmarks)

    def disclosures(self) -> fl.Disclosures:
        """Return what the servers and clients see, and what ε assumes of features."""
        lps = list(VIEWS["lps"])
        if self.privacy.per_client:
            # clipped updates count the same, so clients do not send their numbers of samples
            lps = lps[1:]
        not_covered = []
        if self.gram.noisy(self.privacy):
            not_covered += feature_maps.assumptions(self.features, self.public)
        if self.gram.gram_noise and self.additions.gram_mechanism == "naive":
            not_covered.append(
                naive_mechanism.price(self.gram.gram_noise, int(self.vectors), self.privacy.delta)
            )
        clients = list(VIEWS["client"])
        if self.additions.landmarks is not None:
            clients.append("clients that are no landmarks: the landmarks' clusters, too")
        return fl.Disclosures(
            server=VIEWS["gps"], lps=lps, clients=clients, not_covered=not_covered
        )
