"""The clients of SR-FCA (Vardhan et al. 2024).

They train alone, judge each other's models and the clusters', and average within their cluster,
from θ_0 anew at every restart.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated

import numpy as np
from numpy.typing import NDArray

from securecluster.clustering.distances import to_others
from securecluster.core.lazy_torch import torch
from securecluster.errors import FrameError, PolicyError
from securecluster.messaging.bounds import Between, Exactly, Real, Upto, Whole
from securecluster.messaging.messages import Ack, Empty, Picks, Rows, Shared
from securecluster.privacy.dp.loss_mechanism import WORST, loss_clip, noised, noised_rows
from securecluster.privacy.pipeline import Pipeline
from securecluster.protocols.common.averaging import SumClient
from securecluster.protocols.common.messages import NO_END, AverageDeltas, ModelChoice, Update
from securecluster.runtime.endpoint import GATHER, PAIRS, SUM, CallContext, answers
from securecluster.training.local_trainer import LocalTrainer, LocalTraining

Array = NDArray[np.float64]
LARGEST = 10 * WORST  # magnitude of a loss that a client tells, noise included


OWNERS = Upto("owners", "clients")
JUDGED = Upto("judged", "clients")


@dataclass(frozen=True, eq=False)
class RelayedModels:
    """Server to client: the others' one-shot models, for it to judge."""

    # (n − 1, d) displacements since θ_0, masked where updates are; or (n − 1, ·) uint8, sealed; n
    # with its own
    models: Annotated[Picks, Real((OWNERS, "dimension"), sent="delta", sealed=True)]
    owner: Annotated[Picks, Whole((OWNERS,), below="clients")]  # (n − 1,) int64, whose
    # (n,) int64, the clients in the order of the reply
    order: Annotated[Shared, Whole((Upto("judged", "clients", minimum=1),), below="clients")]
    clients: Annotated[int, Exactly("clients")]  # of the run
    step: Annotated[int, Between(maximum="steps")]  # the call whose mask the rows carry


@dataclass(frozen=True, eq=False)
class LossSums:
    """Client to server."""

    # (b, n) float64, nats: mean training losses f_i of n models, with noise where the run adds some
    loss: Annotated[Rows, Real((JUDGED,), low=-LARGEST, maximum=LARGEST)]


@dataclass(frozen=True, eq=False)
class OfferedClusters:
    """Server to client: the clusters' models.

    The client is to name the nearest of them to its own one-shot model.
    """

    # (K, d) displacements since θ_0; none for a client that has judged them already
    models: Annotated[Picks, Real((Upto("brought", "clients"), "dimension"), sent="delta")]
    step: Annotated[int, Between(maximum="steps")]  # the call whose mask they carry
    # (b, K) float64, mean over the cluster's members of the loss of the client's model; NaN: not
    # known; inf: no choice
    others: Annotated[Rows, Real((Upto("models", "clients", minimum=1),), finite=False)]


@dataclass(frozen=True, eq=False)
class NearestCluster:
    """Newcomer to server."""

    # (b,) int64, the cluster whose model is nearest to its own
    nearest: Annotated[Rows, Whole(below="models")]


@dataclass(frozen=True)
class OneShotTraining:
    """What a client does after ONE_SHOT."""

    plan: LocalTraining
    trims: bool  # whether its updates may be read one by one
    radius: float  # of the ball W around θ_0; 0: no bound


class SRFCAClient(SumClient):
    """Clients of Algorithms 1 to 4."""

    def __init__(
        self,
        cohort: LocalTrainer,
        training: LocalTraining,
        pipeline: Pipeline,
        weighted: bool,
        refining: OneShotTraining,
    ) -> None:
        super().__init__(cohort, training, pipeline, weighted)
        self.refining = refining
        # the last one each client heard of; before the first it holds its one-shot model
        self._restart = [0] * len(cohort.ids)
        self._model_losses = torch.zeros(len(cohort.ids), 0, dtype=torch.float64)  # (·, m) f_i(w_j)
        # by position: f_i(ω_c) of the models that were last judged, (K,)
        self._cluster_losses: dict[int, Array] = {}
        self._judged_in = [0] * len(cohort.ids)  # the call in which they were

    @answers(GATHER, through=("delta",), sealed=("delta",), fresh=True)
    def send_model(self, context: CallContext, query: Empty) -> Update:
        """Return w_i − w_0 (Algorithm 1, "Send w_i,T to Server"), masked or sealed on the way out.

        Asked again, the client answers the same.
        """
        self._check_one_shot(context, "send_model")
        return self.displaced(context.positions)

    @answers(GATHER, private=False, trains="usual")
    def train_locally(self, context: CallContext, query: AverageDeltas) -> Ack:
        """Train alone as every contributor does, but before the first restart only.

        What is trained alone is not to be posted as a cluster's model.
        """
        self._check_one_shot(context, "train_locally")
        return super().train_locally(context, query)

    def _check_one_shot(self, context: CallContext, name: str) -> None:
        if any(self._restart[k] for k in context.positions):
            raise PolicyError(
                f"{name} comes before the first average: after it a client trains with its cluster"
            )

    @answers(PAIRS, unmasked=("loss",))
    def losses(self, context: CallContext, query: RelayedModels) -> LossSums:
        """Return f_i of everyone's one-shot model, its own too.

        They are a row of m values, of which each costs, with noise where the run adds some. The
        client keeps them as they left, so that no model is relayed twice and whatever else it makes
        of them tells nothing new.
        """
        self._check_one_shot(context, "losses")
        self._check_relay(context, query)
        order = query.order.value.tolist()
        place = {i: n for n, i in enumerate(order)}
        found = np.zeros((len(context.positions), len(order)))
        clip = loss_clip(self._pipeline.guard)
        own = self.cohort.loss(self._rows(context.positions), context.positions, clip)
        found[range(len(own)), [place[i] for i in context.ids]] = own
        readers: dict[int, list[int]] = {}
        for k, picks in enumerate(query.models.picks):
            for row in picks:
                readers.setdefault(row, []).append(k)
        for row, near in readers.items():  # one model unmasked at a time
            theta = self._relayed(query, row)
            found[near, place[int(query.owner.table[row])]] = self.cohort.losses(
                theta[None], [context.positions[k] for k in near], clip
            )[:, 0]
        rows = torch.as_tensor(self._released("losses", context, found))
        if self._model_losses.shape[1] != query.clients:
            self._model_losses = self._model_losses.new_zeros(
                len(self._model_losses), query.clients
            )
        self._model_losses[torch.as_tensor(context.positions)[:, None], torch.as_tensor(order)] = (
            rows
        )
        return LossSums(Rows(rows))

    def _check_relay(self, context: CallContext, query: RelayedModels) -> None:
        """Raise FrameError unless the order has every client once.

        The clients that are asked, and those whose models come, must be in the order.
        """
        order = query.order.value.tolist()
        known = set(order)
        if len(known) < len(order) or not known.issuperset(context.ids):
            raise FrameError(
                "RelayedModels.order has a client twice, or lacks the one that is asked: the "
                "frame is refused"
            )
        for picks in query.owner.picks:
            owners = query.owner.table[list(picks)].tolist()
            if len(set(owners)) < len(owners) or not known.issuperset(owners):
                raise FrameError(
                    "RelayedModels.owner has a client twice, or one that is not in the order: the "
                    "frame is refused"
                )

    def _relayed(self, query: RelayedModels, row: int) -> torch.Tensor:
        """Another client's one-shot model, (d,)."""
        if self._pipeline.seal is None:
            return self.model_at(query.models.table[row], query.step)
        d = self.cohort.model.dimension
        like, owner = self._start.new_empty(self._pipeline.room(d)), int(query.owner.table[row])
        return (
            self._start
            + self._pipeline.seal.open(
                query.models.table[row][None], [owner], query.step, "send_model", "delta", like
            )[0, :d]
        )

    @answers(SUM, derived=True, unmasked=("loss",))
    def known_losses(self, context: CallContext, query: Empty) -> LossSums:
        """f_i(w_j) of every client j, as `losses` told them; 0 where it has not judged w_j."""
        return LossSums(Rows(self._model_losses[torch.as_tensor(context.positions)]))

    @answers(GATHER)
    def choose(self, context: CallContext, query: OfferedClusters) -> ModelChoice:
        """Return the nearest cluster by losses (Algorithm 2).

        It is argmin_c ½(mean_{j∈c} f_j(w_i) + f_i(ω_c)), or, where the first term is not known,
        argmin_c f_i(ω_c) (ours). The client judges the models that the query brings: its f_i have
        noise where the run adds some, drawn here once for all that follows.
        """
        if not all(query.models.picks):
            raise PolicyError(
                "choose brings models to judge: by those it has judged a client answers in "
                "choose_again"
            )
        self._check_all_brought(query)
        return self._nearest(self._judge(context, query), query)

    @answers(GATHER, derived=True)
    def choose_again(self, context: CallContext, query: OfferedClusters) -> ModelChoice:
        """The same among fewer clusters, by what it found when it judged their models."""
        if any(query.models.picks):
            raise PolicyError("choose_again brings no models: a client judges new ones in choose")
        return self._nearest(self._judged(context), query)

    def _check_all_brought(self, query: OfferedClusters) -> None:
        """Raise FrameError unless a client is brought all the models that it is to choose from.

        These are as many as there are clusters.
        """
        clusters = query.others.table.shape[1]
        if any(len(picks) != clusters for picks in query.models.picks):
            raise FrameError(
                f"OfferedClusters.models does not bring {clusters} models, as many as "
                "OfferedClusters.others has: the frame is refused"
            )

    def _nearest(self, own: Array, query: OfferedClusters) -> ModelChoice:
        others = query.others.values.numpy()
        if others.shape != own.shape:
            raise FrameError(
                f"OfferedClusters.others is about {others.shape[1]} clusters, and {own.shape[1]} "
                "were judged: the frame is refused"
            )
        return ModelChoice(
            Rows(torch.as_tensor(np.where(np.isnan(others), own, (own + others) / 2).argmin(1)))
        )

    @answers(GATHER)
    def join(self, context: CallContext, query: OfferedClusters) -> NearestCluster:
        """Return argmin_c ‖w_i − ω_c‖ of a newcomer's own one-shot model (ours).

        Where models leave with noise, the one-shot model has such noise, too.
        """
        self._check_all_brought(query)
        models = torch.stack([self.model_at(row, query.step) for row in query.models.table])
        own, guard = self._rows(context.positions).values, self._pipeline.guard
        if guard is not None and guard.unit == "client":
            own = self._start + noised_rows(
                guard, "join", context.ids, context.step, own - self._start
            )
        return NearestCluster(Rows(to_others(own, models).argmin(1)))

    @answers(SUM, derived=True, unmasked=("loss",))
    def cluster_losses(self, context: CallContext, query: Empty) -> LossSums:
        """f_i of the clusters' models, as judged last: what MERGE needs."""
        return LossSums(Rows(torch.as_tensor(self._judged(context))))

    @answers(SUM, through=("delta",), fresh=True, trains="refine", unmasked=("size",))
    def contribute(self, context: CallContext, query: AverageDeltas) -> Update:
        """θ_i ← θ_i + P⁻¹Δ_c(i); reply its update, or n_i times it and n_i where these are weights.

        Without weights it counts as much as everyone's (Algorithm 3 with β = 0).
        """
        scale = [self.cohort.sizes[k] for k in context.positions] if self._weighted else None
        return self.trained(context, query, scale, self.refining.plan)

    @answers(GATHER, through=("delta",), fresh=True, trains="refine")
    def train(self, context: CallContext, query: AverageDeltas) -> Update:
        """The same, to be read one by one: only where a trimmed mean needs it."""
        if not self.refining.trims:
            raise PolicyError(
                "train may leave its client only where β > 0: without trimming a sum is all the "
                "server needs"
            )
        return self.trained(context, query, plan=self.refining.plan)

    @answers(GATHER, through=("delta",), fresh=True, derived=True)
    def post(self, context: CallContext, query: AverageDeltas) -> Update:
        """ω_c − w_0 of its cluster, after what it lacks of it."""
        if query.restart is None or query.restart < 1:
            raise PolicyError(
                "post shows a cluster's model: before the first average a client holds one of its "
                "own"
            )
        self.catch_up(context, query)
        return self.displaced(context.positions)

    def take(self, at: Sequence[int], query: AverageDeltas) -> None:
        """As of every trainee; and remember the restart."""
        super().take(at, query)
        for k in at:
            self._restart[k] = max(self._restart[k], query.restart or 0)

    def had(self, k: int, query: AverageDeltas) -> int:
        """Return how many averages a client has applied.

        It has applied none of a restart that is new to it, and all of one that is over.
        """
        restart = query.restart or 0
        if restart != self._restart[k]:
            return 0 if restart > self._restart[k] else NO_END
        return super().had(k, query)

    def starting_over(self, at: Sequence[int], query: AverageDeltas) -> set[int]:
        """Return the positions of the clients that hear of this restart for the first time.

        They start from w_0 ("ω_c,0 ← w_0").
        """
        return {k for k in at if self._restart[k] < (query.restart or 0)}

    def bounded(self, theta: torch.Tensor) -> torch.Tensor:
        """proj_W (Algorithm 3): into the ball of this radius around w_0 (W a ball: ours)."""
        away = theta - self._start
        norm = float(torch.linalg.vector_norm(away))
        return (
            theta
            if not 0 < self.refining.radius < norm
            else self._start + away * (self.refining.radius / norm)
        )

    def _judge(self, context: CallContext, query: OfferedClusters) -> Array:
        """Return f_i of the models that the query brings, (b, K), the same ones to each client.

        They have noise where the run adds some. The client keeps them, unless it has judged others
        since: what a late request brings must not replace those.
        """
        rows = sorted({row for picks in query.models.picks for row in picks})
        found = np.full((len(context.positions), len(query.models.table)), math.inf)
        for row in rows:
            theta = self.model_at(query.models.table[row], query.step)
            found[:, row] = self.cohort.losses(
                theta[None], context.positions, loss_clip(self._pipeline.guard)
            )[:, 0]
        own = np.stack([found[n, list(picks)] for n, picks in enumerate(query.models.picks)])
        told = self._released("choose", context, own)
        for k, losses in zip(context.positions, told, strict=True):
            if context.step >= self._judged_in[k]:
                self._cluster_losses[k], self._judged_in[k] = losses, context.step
        return told

    def _judged(self, context: CallContext) -> Array:
        """What it found of the models that were judged last, (b, K)."""
        if not all(k in self._cluster_losses for k in context.positions):
            raise PolicyError(
                "choose comes first: a client tells of the clusters' models only what it has judged"
            )
        if len({len(self._cluster_losses[k]) for k in context.positions}) > 1:
            raise PolicyError(
                "these clients have judged different models: ask those apart that have judged the "
                "same"
            )
        return np.stack([self._cluster_losses[k] for k in context.positions])

    def _released(self, purpose: str, context: CallContext, losses: Array) -> Array:
        """Losses (b, k) as they may leave."""
        sizes = [self.cohort.sizes[k] for k in context.positions]
        return np.nan_to_num(
            noised(self._pipeline.guard, purpose, context.ids, context.step, losses, sizes),
            nan=WORST,
            posinf=WORST,
        )

    def memory(self) -> dict[str, torch.Tensor]:
        """Add restarts, and what clients found of others' models and of the clusters'."""
        return {
            **super().memory(),
            "restart": torch.as_tensor(self._restart),
            "known": self._model_losses,
            "judged_in": torch.as_tensor(self._judged_in),
            "judges": torch.tensor(list(self._cluster_losses), dtype=torch.int64),
            "widths": torch.tensor(
                [len(own) for own in self._cluster_losses.values()], dtype=torch.int64
            ),
            "cluster_losses": torch.from_numpy(
                np.concatenate([np.zeros(0), *self._cluster_losses.values()])
            ),
        }

    def recall(self, memory: Mapping[str, torch.Tensor]) -> None:
        """Take over what `memory` returned."""
        super().recall(memory)
        self._restart, self._judged_in = memory["restart"].tolist(), memory["judged_in"].tolist()
        self._model_losses = memory["known"].clone()
        losses = np.split(
            memory["cluster_losses"].numpy().copy(), np.cumsum(memory["widths"].numpy())[:-1]
        )
        self._cluster_losses = dict(zip(memory["judges"].tolist(), losses, strict=False))


def server_view(distance: str, sealed: bool, trims: bool, noisy: bool, weighted: bool) -> list[str]:
    """What the server sees of clients under every mask."""
    own = "with noise, " if noisy else ""
    one_shot = f"{own}norms and inner products of the models that clients trained alone"
    losses = (
        f"{own}each client's losses under everyone's model and the clusters' (the plain sum reads "
        "all replies), and its choices"
    )
    compared = (
        f"{one_shot}, their distances, and those to and between the clusters' models, all under "
        "one mask"
    )
    relayed = [*[f"{one_shot}, each of which goes to every client"] * (not sealed), losses]
    updates = f"{own}each client's update" + (
        ", one by one" if trims else " (the plain sum reads all replies)"
    )
    return [
        *([compared] if distance == "l2" else relayed),
        updates,
        *["each client's number of samples"] * weighted,
        "λ, the clusters, and how far their models have moved",
    ]


def client_view(distance: str) -> list[str]:
    """What clients see of each other's models."""
    models = [
        "all other clients' models that were trained alone",
        "all clusters' models, and how well its own does in each on average",
    ]
    return models if distance == "loss" else ["newcomers only: all clusters' models"]
