"""The clients of SR-FCA (Vardhan et al. 2024).

They train alone, evaluate each other's models and the clusters' models, and then train within their
cluster, from θ_0 again after every restart.

A client keeps its losses, not the models: it evaluates everyone's one-shot model once, and later
sends sums of these losses by cluster. Of clusters' models it sends its choice, and sums. A sum over
fewer than two is neither asked for nor used; then the client decides by its own loss.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, ClassVar

import numpy as np
from numpy.typing import NDArray

from securecluster.clustering.distances import to_others
from securecluster.core.lazy_torch import torch
from securecluster.errors import StaleError
from securecluster.messaging.bounds import Exactly
from securecluster.messaging.octets import as_rows
from securecluster.privacy.dp.loss_mechanism import LARGEST_SENT_LOSS, WORST_LOSS
from securecluster.protocols import authoring as fl
from securecluster.protocols.common.client import LINEAGE
from securecluster.protocols.common.disclosures import OfHiddenSums, OfPaddedPairs, OfPlainPairs
from securecluster.protocols.common.messages import NO_END
from securecluster.runtime.origins import chained, digest

Array = NDArray[np.float64]

OWNERS = fl.Upto("owners", "clients")
EVALUATED = fl.Upto("evaluated", "clients")
ORDER = fl.Upto("evaluated", "clients", minimum=1)
OFFERED = fl.Upto("offered", "clients")
CLUSTERS = fl.Upto("models", "clients", minimum=1)


@dataclass(frozen=True, eq=False)
class RelayedModels:
    """Server to client: other clients' one-shot models, to be evaluated."""

    # (n − 1, d) deltas since θ_0, masked where updates are; or (n − 1, ·) uint8, sealed; n rows if
    # the client's own model is among them
    models: Annotated[fl.Picks, fl.Real((OWNERS, "dimension"), sent="delta", sealed=True)]
    owner: Annotated[fl.Picks, fl.Whole((OWNERS,), below="clients")]  # (n − 1,) int64, clients
    # (n,) int64, the clients in the order of the reply
    order: Annotated[fl.Shared, fl.Whole((ORDER,), below="clients")]
    clients: Annotated[int, Exactly("clients")]  # of the run
    step: Annotated[int, fl.Between(maximum="steps")]  # the call whose mask the rows carry


@dataclass(frozen=True, eq=False)
class LossSums:
    """Client to server: mean training losses of several models."""

    # (b, n) float64, nats: mean training losses f_i of n models, with noise where the run adds some
    loss: Annotated[
        fl.Rows, fl.Real((EVALUATED,), low=-LARGEST_SENT_LOSS, maximum=LARGEST_SENT_LOSS)
    ]


@dataclass(frozen=True, eq=False)
class OfferedClusters:
    """Server to client: the clusters' models, of which the client names the nearest to its own."""

    # (K, d) deltas since θ_0; none for a client that has evaluated them already
    models: Annotated[fl.Picks, fl.Real((OFFERED, "dimension"), sent="delta")]
    step: Annotated[int, fl.Between(maximum="steps")]  # the call whose mask the rows carry
    # (b, K) float64, mean over the cluster's members of the loss of the client's model; NaN:
    # unknown; inf: not to be chosen
    others: Annotated[fl.Rows, fl.Real((CLUSTERS,), finite=False)]


@dataclass(frozen=True, eq=False)
class NearestCluster:
    """Newcomer to server: the cluster to join."""

    # (b,) int64, the cluster whose model is nearest to the client's own
    nearest: Annotated[fl.Rows, fl.Whole(below="models")]


@dataclass(frozen=True)
class OneShotTraining:
    """Options of the training within clusters, which follows ONE_SHOT.

    Args:
        plan: local training between two averages.
        trims: whether updates may be read individually, as a trimmed mean requires.
        radius: of the ball W around θ_0; 0 means no bound.
    """

    plan: fl.LocalTraining
    trims: bool
    radius: float


class SRFCAClient(fl.SumClient):
    """Clients of Algorithms 1 to 4.

    Args:
        cohort: the clients' data and local training.
        training: training alone, before clients are clustered.
        pipeline: the stages between a client's update and the wire.
        weighted: whether averages are weighted by |D_i|.
        refining: options of the training within clusters.
    """

    one_model: ClassVar[bool] = False  # models restart from w_0

    # the latest restart received; 0: the client holds its one-shot model
    _restart = fl.ClientTensor(dtype="int64")
    # the call in which the clusters' models were evaluated last
    _judged_in = fl.ClientTensor(dtype="int64")
    # and a digest of these models, as they were sent
    _judged = fl.ClientTensor(LINEAGE, dtype="uint8")

    def __init__(
        self,
        cohort: fl.LocalTrainer,
        training: fl.LocalTraining,
        pipeline: fl.Pipeline,
        weighted: bool,
        refining: OneShotTraining,
    ) -> None:
        super().__init__(cohort, training, pipeline, weighted)
        self.refining = refining
        # (·, m) f_i(w_j), as they were released
        self._model_losses = torch.zeros(len(cohort.ids), 0, dtype=torch.float64)
        # by position: f_i(ω_c) of the models that were evaluated last, (K,)
        self._cluster_losses: dict[int, Array] = {}

    @fl.answers(fl.GATHER, through=("delta",), sealed=("delta",), fresh=True)
    def send_model(self, context: fl.CallContext, query: fl.Empty) -> fl.Update:
        """Return w_i − w_0 (Algorithm 1, "Send w_i,T to Server"), masked or sealed on the way out.

        The reply is the same whenever the client is asked.

        Raises:
            PolicyError: the client has restarted since.
        """
        self._check_one_shot(context, "send_model")
        return self.displaced(context.positions)

    @fl.answers(fl.GATHER, private=False, trains="usual")
    def train_locally(self, context: fl.CallContext, query: fl.AverageDeltas) -> fl.Ack:
        """Train alone, which is possible before the first restart only.

        Otherwise a model that one client trained alone could be posted as that of its cluster.

        Raises:
            PolicyError: the client has restarted since.
        """
        self._check_one_shot(context, "train_locally")
        return super().train_locally(context, query)

    def _check_one_shot(self, context: fl.CallContext, name: str) -> None:
        """Raise StaleError for clients that no longer hold their one-shot model."""
        if self._restart[context.positions].any():
            raise StaleError(
                f"{name} comes before the first average: after it a client trains with its cluster"
            )

    @fl.answers(fl.PAIRS, unmasked=("loss",), columns="order", relays=("models",))
    def losses(self, context: fl.CallContext, query: RelayedModels) -> LossSums:
        """Return f_i of all one-shot models, the client's own included.

        Each of the m values in a row is released, with noise where the run adds some.

        Raises:
            FrameError: the frame has a client twice, or lacks one.
            PolicyError: the client has restarted since.
        """
        self._check_one_shot(context, "losses")
        self._check_relay(context, query)
        exact = self._exact_losses(context, query)
        released = self._released_losses(context, exact)
        # Clients store the rows as they were released. So no model is relayed twice, and all that
        # is computed from the rows later is post-processing.
        if self._model_losses.shape[1] != query.clients:
            # numpy's zeros take memory only once they are written, and few clients may be landmarks
            unwritten = np.zeros((len(self._model_losses), query.clients))
            self._model_losses = torch.from_numpy(unwritten)
        rows = torch.as_tensor(context.positions)[:, None]
        columns = torch.as_tensor(query.order.value.tolist())
        self._model_losses[rows, columns] = released
        return LossSums(fl.Rows(released))

    def _exact_losses(self, context: fl.CallContext, query: RelayedModels) -> Array:
        """Return f_i of the models in the query's order, (b, n), without noise."""
        order = query.order.value.tolist()
        column_of = {client: column for column, client in enumerate(order)}
        losses = np.zeros((len(context.positions), len(order)))
        clip = context.loss_bound
        own_models = self._rows(context.positions)
        own_losses = self.cohort.loss(own_models, context.positions, clip)
        own_columns = [column_of[i] for i in context.ids]
        losses[range(len(own_losses)), own_columns] = own_losses

        recipients: dict[int, list[int]] = {}  # by row of the table: the clients that receive it
        for k, picks in enumerate(query.models.picks):
            for row in picks:
                recipients.setdefault(row, []).append(k)
        # one model at a time, so that a single one is unmasked in memory
        for row, clients in recipients.items():
            theta = self._relayed(query, row)
            positions = [context.positions[k] for k in clients]
            column = column_of[int(query.owner.table[row])]
            of_model = self.cohort.losses(theta[None], positions, clip)
            losses[clients, column] = of_model[:, 0]
        return losses

    def _check_relay(self, context: fl.CallContext, query: RelayedModels) -> None:
        """Raise FrameError unless the order contains each client once.

        Both the recipients and the owners of the models must be in the order.
        """
        order = query.order.value.tolist()
        clients = set(order)
        has_duplicates = len(clients) < len(order)
        if has_duplicates or not clients.issuperset(context.ids):
            raise fl.FrameError(
                "RelayedModels.order has a client twice, or lacks the one that is asked: the "
                "frame is refused"
            )
        for picks in query.owner.picks:
            owners = query.owner.table[list(picks)].tolist()
            has_duplicates = len(set(owners)) < len(owners)
            if has_duplicates or not clients.issuperset(owners):
                raise fl.FrameError(
                    "RelayedModels.owner has a client twice, or one that is not in the order: the "
                    "frame is refused"
                )

    def _relayed(self, query: RelayedModels, row: int) -> torch.Tensor:
        """Return another client's one-shot model, (d,), unmasked or opened."""
        seal = self._pipeline.seal
        table = query.models.table
        if seal is None:
            return self.model_at(table[row], query.step)
        d = self.cohort.model.dimension
        template = self._start.new_empty(self._pipeline.buffer_width(d))
        owner = int(query.owner.table[row])
        opened = seal.open(table[row][None], [owner], query.step, "send_model", "delta", template)
        return self._start + opened[0, :d]

    # not fixed: losses of models that others have sent, summed anew over each round's clusters
    @fl.answers(fl.SUM, derived=True, unmasked=("loss",), fixed=False)
    def known_losses(self, context: fl.CallContext, query: fl.Empty) -> LossSums:
        """Return f_i(w_j) of every client j as `losses` released them; 0 if not evaluated."""
        positions = torch.as_tensor(context.positions)
        return LossSums(fl.Rows(self._model_losses[positions]))

    @fl.answers(fl.GATHER)
    def choose(self, context: fl.CallContext, query: OfferedClusters) -> fl.ModelChoice:
        """Return the nearest cluster by losses (Algorithm 2, RECLUSTER).

        It is argmin_c ½(mean_{j∈c} f_j(w_i) + f_i(ω_c)), or argmin_c f_i(ω_c) where the first term
        is unknown (not in the paper). The client evaluates the models of the query. The noise of
        these losses, if any, is drawn here once for all that is computed from them.

        Raises:
            PolicyError: the query contains no models.
            FrameError: the query lacks the model of some cluster.
        """
        if not all(query.models.picks):
            raise fl.PolicyError(
                "choose brings models to judge: by those it has judged a client answers in "
                "choose_again"
            )
        self._check_all_offered(query)
        released = self._evaluate(context, query)
        nearest = context.postprocess(lambda noisy: self._nearest(noisy.numpy(), query), released)
        return fl.ModelChoice(fl.Rows(nearest))

    @fl.answers(fl.GATHER, derived=True)
    def choose_again(self, context: fl.CallContext, query: OfferedClusters) -> fl.ModelChoice:
        """Return the nearest among fewer clusters, by the losses that `choose` stored.

        Raises:
            PolicyError: the query contains models, or the client has evaluated none.
        """
        if any(query.models.picks):
            raise fl.PolicyError(
                "choose_again brings no models: a client judges new ones in choose"
            )
        nearest = self._nearest(self._stored_losses(context), query)
        return fl.ModelChoice(fl.Rows(nearest))

    def _check_all_offered(self, query: OfferedClusters) -> None:
        """Raise FrameError unless each client receives the models of all clusters."""
        clusters = query.others.table.shape[1]
        if any(len(picks) != clusters for picks in query.models.picks):
            raise fl.FrameError(
                f"OfferedClusters.models has other than {clusters} models, as many as "
                "OfferedClusters.others has: the frame is refused"
            )

    def _nearest(self, losses: Array, query: OfferedClusters) -> torch.Tensor:
        """Return the cluster with the smallest cross-cluster loss, (b,).

        Args:
            losses: (b, K) f_i(ω_c) of each client.
            query: contains the members' mean losses, (b, K).
        """
        others = query.others.values.numpy()
        if others.shape != losses.shape:
            raise fl.FrameError(
                f"OfferedClusters.others is about {others.shape[1]} clusters, and "
                f"{losses.shape[1]} were evaluated: the frame is refused"
            )
        mean = (losses + others) / 2
        cross = np.where(np.isnan(others), losses, mean)
        return torch.as_tensor(cross.argmin(1))

    @fl.answers(fl.GATHER)
    def join(self, context: fl.CallContext, query: OfferedClusters) -> NearestCluster:
        """Return argmin_c ‖w_i − ω_c‖ of a newcomer's one-shot model (not in the paper).

        Where models leave with noise, the one-shot model gets such noise, too.

        Raises:
            FrameError: the query lacks the model of some cluster.
        """
        self._check_all_offered(query)
        table = query.models.table
        models = torch.stack([self.model_at(row, query.step) for row in table])
        one_shot = self._rows(context.positions).values
        noisy_change = self.release_training(context, one_shot - self._start)
        nearest = context.postprocess(
            lambda change: to_others(self._start + change, models).argmin(1), noisy_change
        )
        return NearestCluster(fl.Rows(nearest))

    @fl.answers(fl.SUM, derived=True, unmasked=("loss",), fixed=False)  # of each round's models
    def cluster_losses(self, context: fl.CallContext, query: fl.Empty) -> LossSums:
        """Return f_i of the clusters' models as evaluated last, which MERGE compares."""
        losses = torch.as_tensor(self._stored_losses(context))
        context.bind(as_rows(self._judged[context.positions]))
        return LossSums(fl.Rows(losses))

    @fl.answers(fl.SUM, through=("delta",), fresh=True, trains="refine", unmasked=("size",))
    def contribute(self, context: fl.CallContext, query: fl.AverageDeltas) -> fl.Update:
        """Apply the averages, train, and contribute the update to the cluster's sum.

        θ_i ← θ_i + P⁻¹Δ_c(i); the reply is Δ_i, or n_i·Δ_i and n_i if averages are weighted.
        Without weights all clients count the same (Algorithm 3 with β = 0).
        """
        scale = None
        if self._weighted:
            scale = [self.cohort.sizes[k] for k in context.positions]
        return self.trained(context, query, scale, self.refining.plan)

    @fl.answers(fl.GATHER, through=("delta",), fresh=True, trains="refine")
    def train(self, context: fl.CallContext, query: fl.AverageDeltas) -> fl.Update:
        """Apply the averages, train, and send an update that is read individually.

        Raises:
            PolicyError: updates are not trimmed, so that a sum is sufficient.
        """
        if not self.refining.trims:
            raise fl.PolicyError(
                "train may leave its client only where β > 0: without trimming a sum is all the "
                "server needs"
            )
        return self.trained(context, query, plan=self.refining.plan)

    @fl.answers(fl.GATHER, through=("delta",), fresh=True, derived=True)
    def post(self, context: fl.CallContext, query: fl.AverageDeltas) -> fl.Update:
        """Return ω_c − w_0 of the client's cluster, after the averages of the query.

        Raises:
            PolicyError: the query is of no restart: the model would be the client's own.
        """
        if query.restart is None or query.restart < 1:
            raise fl.PolicyError(
                "post shows a cluster's model: before the first average a client holds one of its "
                "own"
            )
        self.catch_up(context, query)
        return self.displaced(context.positions)

    def take(self, positions: Sequence[int], query: fl.AverageDeltas) -> None:
        """Apply averages, and store the restart that they belong to."""
        super().take(positions, query)
        self._restart[positions] = self._restart[positions].clamp(min=query.restart or 0)

    def had(self, positions: Sequence[int], query: fl.AverageDeltas) -> list[int]:
        """Return how many averages of the query's restart each client has applied.

        The count is 0 for a restart that is new to the client, and unlimited for an earlier one, so
        that averages of a restart that is over are never applied.
        """
        restart = query.restart or 0
        applied = super().had(positions, query)
        for n, latest in enumerate(self._restart[positions].tolist()):
            if restart > latest:
                applied[n] = 0
            elif restart < latest:
                applied[n] = NO_END
        return applied

    def starting_over(self, positions: Sequence[int], query: fl.AverageDeltas) -> set[int]:
        """Return the positions of clients to which the query's restart is new.

        They start from w_0 ("ω_c,0 ← w_0" of Algorithm 3).
        """
        restart = query.restart or 0
        latest = self._restart[positions].tolist()
        return {k for k, earlier in zip(positions, latest, strict=True) if earlier < restart}

    def bounded(self, theta: torch.Tensor) -> torch.Tensor:
        """Return proj_W(θ) of Algorithm 3.

        W is the ball of the given radius around w_0 (the shape is not in the paper).

        Args:
            theta: (d,) a model after an average.
        """
        displacement = theta - self._start
        norm = float(torch.linalg.vector_norm(displacement))
        radius = self.refining.radius
        if not 0 < radius < norm:
            return theta
        return self._start + displacement * (radius / norm)

    def _evaluate(self, context: fl.CallContext, query: OfferedClusters) -> torch.Tensor:
        """Return f_i of the query's models, (b, K), with noise where the run adds some."""
        clip = context.loss_bound
        table = query.models.table
        rows = sorted({row for picks in query.models.picks for row in picks})
        losses = np.full((len(context.positions), len(table)), math.inf)
        for row in rows:
            theta = self.model_at(table[row], query.step)
            of_model = self.cohort.losses(theta[None], context.positions, clip)
            losses[:, row] = of_model[:, 0]

        offered = []
        for n, picks in enumerate(query.models.picks):
            offered.append(losses[n, list(picks)])
        released = self._released_losses(context, np.stack(offered))
        judged_in = self._judged_in[context.positions].tolist()
        digests = [digest(row) for row in table]
        of_clients = zip(
            context.positions, released.numpy(), judged_in, query.models.picks, strict=True
        )
        for k, row_of_client, last, picks in of_clients:
            # a late request must not replace losses of models that were evaluated since
            if context.step >= last:
                self._cluster_losses[k] = row_of_client
                self._judged_in[k] = context.step
                models_digest = chained(b"", query.step, *(digests[row] for row in picks))
                self._judged[k] = list(models_digest)
        return released

    def _stored_losses(self, context: fl.CallContext) -> Array:
        """Return f_i of the models that were evaluated last, (b, K).

        Raises:
            PolicyError: a client has evaluated no models, or others than its peers.
        """
        if not all(k in self._cluster_losses for k in context.positions):
            raise fl.PolicyError(
                "choose comes first: a client sends losses of clusters' models only once it has "
                "evaluated them"
            )
        rows = [self._cluster_losses[k] for k in context.positions]
        widths = {len(row) for row in rows}
        if len(widths) > 1:
            raise fl.PolicyError(
                "these clients have evaluated different models: ask only those together that have "
                "evaluated the same"
            )
        return np.stack(rows)

    def _released_losses(self, context: fl.CallContext, losses: Array) -> torch.Tensor:
        """Return losses as they may leave their clients, (b, k).

        Args:
            context: the clients.
            losses: (b, k) mean losses in nats; numbers that are not finite become WORST_LOSS.
        """
        sizes = [self.cohort.sizes[k] for k in context.positions]
        released = context.release_losses(losses, sizes)
        return context.postprocess(
            lambda noisy: noisy.nan_to_num(nan=WORST_LOSS, posinf=WORST_LOSS), released
        )

    # losses of as many models as a call brings, which differ between clients: no fixed rows
    def memory(self) -> dict[str, torch.Tensor]:
        """Add the losses of other clients' and the clusters' models."""
        rows = list(self._cluster_losses.values())
        widths = [len(row) for row in rows]
        flat = np.concatenate([np.zeros(0), *rows])
        return {
            **super().memory(),
            "known": self._model_losses,
            "judges": torch.tensor(list(self._cluster_losses), dtype=torch.int64),
            "widths": torch.tensor(widths, dtype=torch.int64),
            "cluster_losses": torch.from_numpy(flat),
        }

    def recall(self, memory: Mapping[str, torch.Tensor]) -> None:
        """Restore what `memory` returned."""
        super().recall(memory)
        self._model_losses = memory["known"].clone()
        flat = memory["cluster_losses"].numpy().copy()
        ends = np.cumsum(memory["widths"].numpy())
        rows = np.split(flat, ends[:-1])
        positions = memory["judges"].tolist()
        # of no positions, np.split returns one empty row
        self._cluster_losses = dict(zip(positions, rows, strict=False))


def server_view(distance: str, sealed: bool, trims: bool, noisy: bool, weighted: bool) -> list[str]:
    """Return what the server sees of clients under every mask, one phrase each.

    Args:
        distance: "loss" or "l2".
        sealed: whether one-shot models are sealed client to client.
        trims: whether updates are read individually.
        noisy: whether the run adds noise.
        weighted: whether averages are weighted by |D_i|.
    """
    noise = "with noise, " if noisy else ""
    one_shot = f"{noise}norms and inner products of the models that clients trained alone"
    views = []
    if distance == "l2":
        views.append(
            f"{one_shot}, their distances, and those to and between the clusters' models, all "
            "under one mask"
        )
    else:
        if not sealed:
            views.append(f"{one_shot}, each of which goes to every client")
        views.append(
            fl.OfPlainSums(
                f"{noise}each client's losses under the clusters' models (the plain sum reads all "
                "replies), and its choices"
            )
        )
        views.append(
            OfHiddenSums(
                f"{noise}its choices; of its losses under the clusters' models only sums over "
                "clusters"
            )
        )
        views.append(
            OfPlainPairs(
                f"{noise}each client's losses under everyone's model, which leave in pairs"
            )
        )
        views.append(
            OfPaddedPairs(
                f"{noise}the cross-losses of all pairs of clients: f_i(w_j) to within half its "
                "difference from f_j(w_i), and exactly where the server knows that"
            )
        )
    if trims:
        views.append(f"{noise}each client's update, one by one")
    else:
        views.append(
            fl.OfPlainSums(f"{noise}each client's update (the plain sum reads all replies)")
        )
    if weighted:
        views.append(fl.OfPlainSums("each client's number of samples"))
    views.append("λ, the clusters, and how far their models have moved")
    return views


def client_view(distance: str) -> list[str]:
    """Return what clients see of each other's models, one phrase each.

    Args:
        distance: "loss" or "l2".
    """
    if distance == "l2":
        return ["newcomers only: all clusters' models"]
    return [
        "all other clients' models that were trained alone",
        "all clusters' models, and how well its own does in each on average",
    ]
