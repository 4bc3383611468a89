"""NSIM: clusters of users by a predicted similarity of their data.

Pacheco, Rosário, Cerqueira, Braun, "Federated User Clustering for non-IID Federated Learning",
NetSys 2021 (EASST 80).

A_u       the users' architecture; D_u a user's data; their declared format is all the server knows
          beforehand
M_synth   models of synthetic users, made by random walks in that format, and trained as users train
          theirs
LCSS      the true similarity of two users' data; NSIM, a network that tells it from one layer of
          two models
C         clusters of real users: DBSCAN on the similarities that NSIM predicts from their layers

Ours: LCSS is divided by the shorter length, NSIM is symmetric, everyone starts from one θ_0 (or
each from weights of its own), what DBSCAN calls noise are clusters of one, since everyone must be
served, and FedAvg goes on in each cluster after the paper's one average.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from securecluster.clustering.density import check_dbscan, dbscan, most_similar, neighbourhood
from securecluster.clustering.labels import members, relabel
from securecluster.core.lazy_torch import torch
from securecluster.core.randomness import Randomness
from securecluster.data import Federation
from securecluster.errors import UsageError
from securecluster.messaging.messages import Empty
from securecluster.models.objectives import objective
from securecluster.privacy.pipeline import Pipeline
from securecluster.protocols.common.averaging import AveragingState, SumClient, average_clusters
from securecluster.protocols.common.base import ClusteringProtocol, ReleaseCounts
from securecluster.protocols.common.client import TrainingClient
from securecluster.protocols.common.messages import empty_tensor
from securecluster.protocols.common.newcomers import check_newcomers
from securecluster.protocols.common.pending_updates import PendingUpdates, flush
from securecluster.protocols.common.sampling import TRIES
from securecluster.protocols.nsim.client import (
    NSIMClient,
    check_layer_mask,
    find_layer,
    server_view,
)
from securecluster.protocols.nsim.random_walks import Format, RandomWalk
from securecluster.protocols.nsim.server import average_layers
from securecluster.protocols.nsim.similarity_model import GRID, predict
from securecluster.protocols.nsim.synthetic_users import (
    SyntheticUsersConfig,
    TrainedSimilarityModel,
    check_walks,
    correlations,
    some_pairs,
    true_similarity,
)
from securecluster.runtime.run import Line, Run
from securecluster.runtime.server_channel import ServerChannel
from securecluster.training.local_trainer import LocalTrainer


@dataclass
class NSIMState(AveragingState):
    """What the server's loop changes."""

    round: int = 0
    clustered: int = 0  # the round of the clustering; 0 before
    # the r clients that sent a layer, and their places in what follows
    ids: list[int] = field(default_factory=list)
    layers: torch.Tensor = field(default_factory=empty_tensor)  # (r, q)
    similarity: torch.Tensor = field(default_factory=empty_tensor)  # (r, r), predicted
    eps: float = 0.0
    known: TrainedSimilarityModel | None = None


@dataclass
class NSIM(ClusteringProtocol):
    """Clusters of users by similarities that a network, trained on synthetic users, predicts from a
    layer of their models.
    """

    mask: str = "rotation"
    """map of updates that the server does not know, a fresh one each round: none, permutation,
    signed-permutation, rotation or haar
    """
    layer_mask: str = "none"
    """of the layers that clients hand in: none, for the network that reads them is trained on
    weights as they are
    """
    local_rounds: int = 7
    """rounds, at most all, in which users train alone before they hand in a layer; synthetic users
    train as long
    """
    synthetic: int = 400
    """synthetic users; the more, the better the network tells others' similarity (the paper has
    100)
    """
    walks: Any = "random"
    """what makes synthetic users: random; in Python also a callable, see
    securecluster.protocols.nsim.random_walks.Generator
    """
    positions: tuple[int, int] = (150, 600)
    """declared format: positions of a user, fewest and most"""
    step: float = 0.033
    """declared format: the longest way between two positions, in units of the area"""
    radius: float = 0.2
    """LCSS: two positions match up to this distance, in units of the area"""
    stride: int = 2
    """LCSS of synthetic users compares one of so many of their positions: a quarter of the work at
    2
    """
    layer: str = "hidden"
    """what clients hand in: hidden, the last hidden layer; or last, the last one; of the dense
    ones, in the order they are declared
    """
    init: str = "common"
    """weights that training starts from: common, the same for all synthetic and real users; or
    independent, each one's own
    """
    grid: int = len(GRID)
    """architectures that the grid search compares: the first so many of similarity_model.GRID; 1 is
    no search
    """
    eps: float | None = None
    """DBSCAN: users are neighbours up to this value of 1 - similarity; None chooses one from the
    predicted similarities
    """
    min_samples: int | None = None
    """DBSCAN: neighbours, itself among them, that make a user a core of a cluster; None is a
    fortieth of the users, 2 or more
    """

    name: ClassVar[str] = "nsim"
    client: ClassVar[type[TrainingClient]] = NSIMClient

    def run_server(self, net: ServerChannel, run: Run) -> NSIMState:
        """Sections 3.1 and 3.2: the estimator first, without any client; then everyone alone, the
        clusters, and FedAvg in each.
        """
        known = run.once("estimator", lambda: self._estimator(net), TrainedSimilarityModel)
        state = NSIMState(
            list(net.clients),
            PendingUpdates.start(len(net.clients), fresh=self.mask != "none"),
            known=known,
        )
        for t in run.rounds("train", state, self.rounds):
            state.round = t
            if t > self._local:
                average_clusters(net, state, self.participation, t)
                continue
            net.gather(
                SumClient.train_locally,
                state.outbox.message_for(net.clients),
                to=net.clients,
                tries=TRIES,
            )
            if t == self._local:
                self._cluster(net, state, known)
                run.note(clustered=members(state.labels), eps=state.eps, **known.scores)
        flush(net, run, state)
        return state

    @property
    def _local(self) -> int:
        return min(self.local_rounds, self.rounds)

    def _estimator(self, net: ServerChannel) -> TrainedSimilarityModel:
        """Section 3.1, from what everyone knows."""
        agreed, draws = net.agreed, Randomness(net.randomness.integer("server", "synthetic"))
        flat = self._network(
            agreed["shape"], agreed["classes"], agreed["seed"], objective(agreed["objective"])
        )
        return self._synthesis(agreed["shape"], agreed["noise"]).learned(
            flat, self.training(agreed), agreed, draws
        )

    def _synthesis(self, shape: Sequence[int], noise: float = 0.0) -> SyntheticUsersConfig:
        """The declared format is (past positions, coordinates) of a sample; of other data a
        generator gives samples themselves. Synthetic users' training and layers have the noise of
        real users' (ours), so that the network learns from what it will read.
        """
        window, coordinates = shape if len(shape) == 2 else (1, 1)
        form = Format(coordinates, window, self.positions, step=self.step)
        walks = RandomWalk() if self.walks == "random" else self.walks
        rest = (
            self.stride,
            self.grid,
            tuple(shape),
            float(self.clip or 0),
            float(noise) if self.per_client else 0.0,
        )
        return SyntheticUsersConfig(
            self.synthetic, walks, form, self.radius, self.layer, self.init, self._local, *rest
        )

    def _cluster(self, net: ServerChannel, state: NSIMState, known: TrainedSimilarityModel) -> None:
        """Section 3.2: the layers, all pairs' similarities, DBSCAN, and the users' models averaged
        in each cluster.
        """
        got = net.gather(NSIMClient.send_model, Empty(), to=net.clients, tries=TRIES)
        if len(got) < 2:  # everyone goes on alone
            return
        state.ids, state.layers, state.clustered = (
            list(got.ids),
            got.rows.layer.values.cpu(),
            state.round,
        )
        state.similarity = predict(
            known.fitted.estimator, state.layers, state.layers
        ).fill_diagonal_(1)
        alike, least = state.similarity.double().numpy(), self.min_samples or max(2, len(got) // 40)
        state.eps = neighbourhood(alike, least) if self.eps is None else float(self.eps)
        place = dict(zip(state.ids, dbscan(1 - alike, state.eps, least), strict=True))
        state.labels = relabel([place.get(i, -1) for i in net.clients])
        average_layers(net, state)

    def assign_newcomers(
        self, net: ServerChannel, state: NSIMState, to: Sequence[int]
    ) -> list[int]:
        """Ours: newcomers train alone as long as the others did and join the cluster to whose
        members they are most similar, on average.
        """
        if not state.ids or state.known is None:
            raise UsageError(
                "no two clients sent a layer, so there is nothing to compare newcomers with: "
                "run it anew"
            )
        for _ in range(self._local):
            net.gather(
                SumClient.train_locally,
                PendingUpdates.start(0, fresh=False).message_for(to),
                to=to,
                tries=TRIES,
            )
        got = net.gather(NSIMClient.send_model, Empty(), to=to, tries=TRIES)
        check_newcomers(to, got.ids)
        near = predict(state.known.fitted.estimator, got.rows.layer.values.cpu(), state.layers)
        found = dict(
            zip(
                got.ids,
                most_similar(near.numpy(), [state.labels[i] for i in state.ids]),
                strict=True,
            )
        )
        return [found[i] for i in to]

    @property
    def weighted(self) -> bool:
        """Always: means are over samples."""
        return True

    def make_client(
        self, cohort: LocalTrainer, pipeline: Pipeline, config: Mapping[str, Any]
    ) -> NSIMClient:
        """Adds the layer, and where training starts."""
        layer = find_layer(cohort.model, self.layer)
        return NSIMClient(cohort, self.training(config), pipeline, self.weighted, layer, self.init)

    def shared_facts(self, federation: Federation) -> dict[str, Any]:
        """The declared format, and the numbers of the layer that clients send."""
        check_walks(self.walks, federation.objective)
        size = find_layer(self.flat_model(federation), self.layer).size
        return {"format": self._synthesis(federation.shape).form.as_json(), "layer_size": size}

    def shown_params(self) -> dict[str, Any]:
        """Of a generator of your own, that it is."""
        return super().shown_params() | (
            {} if isinstance(self.walks, str) else {"walks": {"own": "walks"}}
        )

    def check(self, clients: int) -> None:
        """Adds what belongs to synthetic users, their similarity and the clustering."""
        super().check(clients)
        check_layer_mask(self.layer_mask)
        self._synthesis((1, 1))
        check_dbscan(self.eps, self.min_samples)

    def frame_sizes(self, config: Mapping[str, Any]) -> dict[str, int]:
        """Add the numbers of the layer that clients send."""
        return {**super().frame_sizes(config), "layer": int(config["layer_size"])}

    def releases(self) -> ReleaseCounts:
        """Its layer, what it learned alone, and an update a round after that."""
        return ReleaseCounts(updates=2 + self.rounds - self._local, trainings=self.rounds)

    def multipliers(self, config: Mapping[str, Any]) -> dict[str, float]:
        """Of the layer: clipped and noised by its client, or of training with noise."""
        z = math.inf if self.per_example else float(config["noise"])
        return super().multipliers(config) | ({"layer": z} if config["noise"] else {})

    def server_view(self) -> list[str]:
        """What the server sees of the layers, and makes of them."""
        return server_view(
            self.layer, self.init, self.dp_unit if self.noisy else "", not self.per_client
        )

    def observe(
        self, federation: Federation, client: Any, state: Any, scores: NDArray[np.float64]
    ) -> Line:
        """After the clustering, adds how well NSIM, and kernels of the same layers, told the true
        LCSS of clients' training data.
        """
        line = super().observe(federation, client, state, scores)
        if not state.clustered or state.clustered != state.round:
            return line
        true, told = (
            true_similarity([federation.shards[i].y for i in state.ids], self.radius),
            state.similarity.numpy(),
        )
        layers = find_layer(client.cohort.model, self.layer).weights(state.layers)
        return {
            **line,
            **correlations(told, layers, true, "_real"),
            "pairs_real": some_pairs(told, true),
        }
