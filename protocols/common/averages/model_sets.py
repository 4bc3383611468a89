"""Clients that average several models at once, as those of IFCA, CLoVE and R-DPCFL do.

A `ModelSetClient` holds k models for each start that is still in use. The server's counterpart is
`Restart`, which has a queue of averages for each of its k models: under fresh masks, a client must
receive all averages of all models.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING, Annotated, ClassVar

import numpy as np
from numpy.typing import NDArray

from securecluster.core.lazy_torch import torch
from securecluster.core.validation import Between
from securecluster.errors import PolicyError
from securecluster.messaging.bounds import Exactly, Real, Upto, Whole
from securecluster.messaging.messages import Ack, Empty, Picks, Rows
from securecluster.parties.client_state import ClientState
from securecluster.privacy.pipeline import Pipeline
from securecluster.protocols.common import client
from securecluster.protocols.common.client_tensors import ClientTensor
from securecluster.protocols.common.messages import MOST_SAMPLES, AverageDeltas, ModelChoice, Update
from securecluster.runtime.call_context import CallContext
from securecluster.runtime.endpoint import GATHER, SUM, answers
from securecluster.runtime.origins import chained
from securecluster.training.local_trainer import LocalTrainer, LocalTraining

if TYPE_CHECKING:
    from securecluster.privacy.masking.key_agreement import Secrets

AVERAGES = Upto("moved", "model_averages")  # averages of all models in one frame


@dataclass(frozen=True, eq=False)
class ModelAverages:
    """Server to client: the averages of each of the k models that it lacks, oldest first."""

    # (r, d), in hidden sums of blocks
    means: Annotated[
        Picks, Real((AVERAGES, "dimension"), sent="delta", average=True, made_of=("blocks",))
    ]
    # (r,) int64, the call whose updates each row averages: it names the mask
    steps: Annotated[Picks, Whole((AVERAGES,), maximum="steps")]
    # (r,) int64, the model that each average moves
    models: Annotated[Picks, Whole((AVERAGES,), below="models")]
    k: Annotated[int, Exactly("models")]
    # the start of these models; their initial weights follow from the public configuration
    start: Annotated[int, Between(below="starts")]
    # another start whose models are still in use, or the same
    best: Annotated[int, Between(below="starts")]
    absolute: bool  # one row a model at most: its delta since the start began
    # (b, k) int64, the averages of each model that a client will have applied in all
    count: Annotated[Rows, Whole(("models",), maximum="averages")]


@dataclass(frozen=True, eq=False)
class ModelRequest:
    """Server to client: the model to send."""

    model: Annotated[Rows, Whole(below="models")]  # (b,) int64
    start: Annotated[int, Between(below="starts")]


@dataclass(frozen=True, eq=False)
class LowestLoss:
    """Client to server: the training loss of the client's best model."""

    # (b,) |D_i| times the lowest mean loss, float64, nats; without sizes the lowest mean loss
    loss: Annotated[Rows, Real()]
    # (b,) |D_i|, only where means are over samples
    size: Annotated[Rows | None, Real(low=0, maximum=MOST_SAMPLES)]


@dataclass(frozen=True, eq=False)
class AssignedModel:
    """Server to client: the model to train."""

    model: Annotated[Rows, Whole(below="models")]  # (b,) int64


ModelSet = list[
    client.UpdateClient
]  # the k models of a start, each as all clients of a cohort hold it


class ModelSetClient(client.TrainingClient):
    """Clients that hold k models, and train one of them.

    Attributes:
        one_start: True where all models begin at θ_0; False where only the first does, and the
            others are drawn from the same distribution.

    Args:
        cohort: the clients' data and local training.
        training: local training between two averages.
        pipeline: the stages between a client's update and the wire.
        weighted: whether averages are weighted by |D_i|.
    """

    one_model: ClassVar[bool] = False  # a client's model may be another one in each round

    one_start: ClassVar[bool] = False

    # the last call that contained averages, and their start; zeros before
    _last_call = ClientTensor(2, dtype="int64")

    def __init__(
        self, cohort: LocalTrainer, training: LocalTraining, pipeline: Pipeline, weighted: bool
    ) -> None:
        super().__init__(cohort, training, pipeline, weighted)
        self.model_sets: dict[int, ModelSet] = {}  # by start

    def train_chosen(self, context: CallContext, chosen: Sequence[tuple[int, int]]) -> Update:
        """Return n_i·Δ_i and n_i, from one of the models of each client.

        Clipped updates are not weighted.

        Args:
            context: the clients.
            chosen: start and number of each client's model.
        """
        # Clients of one call may train different models, and still train as one batch.
        picks = []
        for k, (start, j) in zip(context.positions, chosen, strict=True):
            model = self.model_sets[start][j]
            picks.append((model.models, k))
        models = selected_rows(picks)
        # clipped updates count the same, so the numbers of samples stay at the clients
        weighted = not self._pipeline.clips
        sizes = None
        if weighted:
            sizes = [self.cohort.sizes[k] for k in context.positions]
        delta = self.cohort.train(
            models,
            context.positions,
            self.training,
            context.step,
            self._pipeline.buffer_width(self.cohort.model.dimension),
            sizes,
            self.loss_term(context),
        )
        size = self._sizes(context) if weighted else None
        return Update(Rows(delta), size)

    def sample_losses(self, positions: Sequence[int], j: int) -> list[torch.Tensor]:
        """Return the loss of each training sample of clients under model j, (n_i,) for each client.

        Args:
            positions: of the clients.
            j: number of the model, of the first start.
        """
        network = self.cohort.model
        losses = []
        with torch.no_grad():
            for k in positions:
                views = network.views(self.evaluated_rows(0, j, [k]).values[0])
                outputs = network.call(views, self.cohort.inputs(k))
                losses.append(network.objective.losses(outputs, self.cohort.labels(k)))
        return losses

    def offered_losses(self, context: CallContext, query: ModelAverages) -> torch.Tensor:
        """Return newcomers' losses (b, k) of the models of the query; inf for all others.

        They are released, with noise where the run adds noise.

        Args:
            context: the clients.
            query: the models on offer.

        Raises:
            PolicyError: the query contains no models.
        """
        offered = sorted(set(query.models.table.tolist()))
        if not offered:
            raise PolicyError("join needs models to choose from, and this request has none")
        exact = self.mean_losses(context, query)

        def among_all(losses: torch.Tensor) -> torch.Tensor:
            rows = losses.new_full((len(losses), query.k), math.inf)
            rows[:, offered] = losses
            return rows

        return context.postprocess(among_all, self.release_losses(context, exact[:, offered]))

    @answers(GATHER, through=("delta",), fresh=True, derived=True)
    def send_model(self, context: CallContext, query: ModelRequest) -> Update:
        """Return a model's delta since its start began, which newcomers receive.

        It is masked on the way out (not in the paper).
        """
        requested = query.model.values.tolist()
        models = self.model_sets.get(query.start)
        if not models:
            # a client that was never asked draws the same initial models as all others
            models = self.first_models(query.start, 1 + max(requested))
        deltas = []
        for n, j in enumerate(requested):
            reply = models[j].post(context.select([n]), Empty())
            deltas.append(reply.delta.values)
        return Update(Rows(torch.cat(deltas)), None)

    def taken(self, query: ModelAverages, positions: Sequence[int], choice: Sequence[int]) -> Rows:
        """Return every client's chosen model after the query's averages; nothing is stored.

        Args:
            query: the averages.
            positions: of the clients that receive them.
            choice: (m,) the model of each client.
        """
        models = self.model_sets.get(query.start)
        if not models:
            models = self.first_models(query.start, query.k)
        advanced = []
        for model, averages in zip(models, averages_by_model(query), strict=True):
            advanced.append(model.advanced(positions, averages))
        picks = [(advanced[model], k) for k, model in enumerate(choice)]
        return selected_rows(picks)

    def _check_start(self, context: CallContext, query: ModelAverages) -> None:
        """Raise PolicyError for a late request about an earlier start, whose models are dropped."""
        late = []
        last = self._last_call[context.positions].tolist()
        for i, (step, start) in zip(context.ids, last, strict=True):
            if context.step < step and query.start != start:
                late.append(i)
        if late:
            raise client.late_request_error(late)

    def mean_losses(self, context: CallContext, query: ModelAverages) -> NDArray[np.float64]:
        """Apply the query's averages, and return F_i(θ_j) of each client and model.

        They are exact: what leaves a client is `release_losses` of them.

        Args:
            context: the clients.
            query: the averages that each of them lacks.

        Returns:
            (b, k) in nats; inf for a loss that is not finite.
        """
        models = self.apply_averages(context, query)
        clip = context.loss_bound
        columns = []
        for j in range(len(models)):
            rows = self.evaluated_rows(query.start, j, context.positions)
            columns.append(self.cohort.loss(rows, context.positions, clip))
        return np.nan_to_num(np.stack(columns, 1), nan=math.inf, posinf=math.inf)

    def bind_models(self, context: CallContext, starts: Sequence[int]) -> None:
        """Bind replies to all models of a start.

        To all of them, since which one a client trains may be what nobody is to learn.

        Args:
            context: the clients (b,).
            starts: of the models of each client, (b,).
        """
        lineages = {}
        for start in set(starts):
            models = self.model_sets[start]
            lineages[start] = [model.lineage(context.positions) for model in models]
        origins = []
        for n, start in enumerate(starts):
            origins.append(chained(b"", start, *(of_model[n] for of_model in lineages[start])))
        context.bind(origins)

    def apply_averages(self, context: CallContext, query: ModelAverages) -> ModelSet:
        """Apply the query's averages, and return the k models of its start.

        `models[j].models.select(context.positions).values` is model j as each client holds it,
        (b, d).

        Args:
            context: the clients.
            query: the averages that each of them lacks.

        Raises:
            PolicyError: the request is late, and is about averages before the current ones.
        """
        self._check_start(context, query)
        models = self._open_start(query)
        for j, averages in enumerate(averages_by_model(query)):
            self._catch_up(context, query.start, j, averages)
        # A late request leaves the last call as it is, so that later ones are still told apart.
        current = [context.step, query.start]
        last = self._last_call[context.positions].tolist()
        self._last_call[context.positions] = [max(current, earlier) for earlier in last]
        return models

    def _catch_up(self, context: CallContext, start: int, j: int, averages: AverageDeltas) -> None:
        """Apply the averages of one model.

        Args:
            context: the clients.
            start: the start of the model.
            j: the model's number.
            averages: those that each client lacks.
        """
        self.model_sets[start][j].catch_up(context, averages)

    def evaluated_rows(self, start: int, j: int, positions: Sequence[int]) -> Rows:
        """Return a model as clients evaluate it, (b, d).

        Args:
            start: the start of the model.
            j: the model's number.
            positions: of the clients.
        """
        return self.model_sets[start][j].models.select(positions)

    def _open_start(self, query: ModelAverages) -> ModelSet:
        """Return the models of the query's start, and drop those of starts no longer in use."""
        model_sets = {}
        for start, models in self.model_sets.items():
            if start in (query.start, query.best):
                model_sets[start] = models
        if query.start not in model_sets:
            # never received: every client draws the initial models from the seed
            model_sets = {query.start: self.first_models(query.start, query.k), **model_sets}
        self.model_sets = model_sets
        return model_sets[query.start]

    def release_losses(self, context: CallContext, losses: NDArray[np.float64]) -> torch.Tensor:
        """Return losses on training samples as they may leave their clients.

        Args:
            context: the clients.
            losses: (b, k) mean losses in nats.
        """
        sizes = [self.cohort.sizes[k] for k in context.positions]
        return context.release_losses(losses, sizes)

    def first_models(self, start: int, k: int) -> ModelSet:
        """Return the initial models of a start.

        The first model of all is θ_0; the others are drawn from the same distribution, unless the
        class says `one_start`.

        Args:
            start: the start's number.
            k: number of models.
        """
        models = []
        for j in range(k):
            if self.one_start or (start == 0 and j == 0):
                theta = self.cohort.start
            else:
                theta = self.cohort.drawn("start", start, j)
            models.append(
                client.UpdateClient(
                    self.cohort, self.training, self._pipeline, self._weighted, theta
                )
            )
        return models

    def state(self, secrets: Secrets) -> ClientState:
        """Return the clients' state for a checkpoint."""
        models = [model.models for model in self._all_models()]
        if not models:
            return super().state(secrets)
        index: list[int] = []
        offset = 0
        for rows in models:
            assert rows.index is not None
            index += [offset + row for row in rows.index]
            offset += len(rows.table)
        table = torch.cat([rows.table for rows in models])
        return ClientState(table, index, secrets, list(self.model_sets), self.checked_memory())

    def _all_models(self) -> list[client.UpdateClient]:
        """Return the k models of every start in use, start by start."""
        return list(chain.from_iterable(self.model_sets.values()))

    # each start has models of its own, and they their counts: no fixed rows
    def memory(self) -> dict[str, torch.Tensor]:
        """Add the counts of averages by model, which `restore` restores with the models."""
        applied = torch.zeros(0, 0, dtype=torch.int64)
        lineages = torch.zeros(0, 0, client.LINEAGE, dtype=torch.uint8)
        models = self._all_models()
        if models:
            applied = torch.stack([model._had.values for model in models])
            lineages = torch.stack([model._lineage.values for model in models])
        return {**super().memory(), "model_sets": applied, "model_lineages": lineages}

    def restore(self, state: ClientState) -> None:
        """Restore the clients' state from a checkpoint."""
        self.model_sets = {}
        if state.starts:
            table = state.table.to(self.cohort.start.device)
            rows = Rows(table, tuple(state.index))
            # (starts, k, clients), as `state` stacks them
            shape = (len(state.starts), -1, len(self.cohort.ids))
            positions = np.arange(len(rows)).reshape(shape)
            for start, models in zip(state.starts, positions.tolist(), strict=True):
                self.model_sets[start] = self.first_models(start, len(models))
                for model, clients in zip(self.model_sets[start], models, strict=True):
                    model.models = rows.select(clients)
        self.recall(state.extra)
        applied = state.extra["model_sets"]
        # an earlier version did not keep them
        unkept = torch.zeros(*applied.shape, client.LINEAGE, dtype=torch.uint8)
        saved = zip(applied, state.extra.get("model_lineages", unkept), strict=True)
        for model, (counts, lineages) in zip(self._all_models(), saved, strict=True):
            model._had = counts
            model._lineage = lineages


class AssignedModelClient(ModelSetClient):
    """Clients that train the one of k models that the server assigns to them in a round."""

    @answers(GATHER, private=False)
    def receive_models(self, context: CallContext, query: ModelAverages) -> Ack:
        """Apply the averages of all models, and answer nothing about them."""
        self.apply_averages(context, query)
        return Ack()

    @answers(SUM, through=("delta",), fresh=True, trains="usual", unmasked=("size",))
    def contribute(self, context: CallContext, query: AssignedModel) -> Update:
        """Return n_i·Δ_i and n_i, from the model that the client is assigned.

        Clipped updates are not weighted.

        Raises:
            PolicyError: a client has no models yet, or has received later averages.
        """
        return self.train_assigned(context, query)

    @answers(GATHER)
    def join(self, context: CallContext, query: ModelAverages) -> ModelChoice:
        """Return the model of lowest loss of a newcomer, by noisy losses where there is noise.

        Raises:
            PolicyError: the query contains no models.
        """
        losses = self.offered_losses(context, query)
        return ModelChoice(Rows(context.postprocess(first_of_least, losses)))

    def assigned_models(self, context: CallContext, query: AssignedModel) -> torch.Tensor:
        """Return the model that each client is assigned, as it is before training, (b, d).

        Args:
            context: the clients.
            query: their models.
        """
        picks = []
        for k, j in zip(context.positions, query.model.values.tolist(), strict=True):
            picks.append((self.model_sets[0][j].models, k))
        return selected_rows(picks).values

    def own_updates(self, update: Update) -> torch.Tensor:
        """Return Δ_i of clients, (b, d), of updates that may be weighted.

        Args:
            update: what `train_assigned` returned: n_i·Δ_i with n_i, or Δ_i.
        """
        delta = update.delta.values[:, : self.cohort.model.dimension]
        if update.size is None:
            return delta
        return delta / update.size.values.to(delta)[:, None]

    def train_assigned(self, context: CallContext, query: AssignedModel) -> Update:
        """Return n_i·Δ_i and n_i, from the model that each client is assigned.

        Args:
            context: the clients.
            query: their models.

        Raises:
            PolicyError: a client has no models yet, or has received later averages.
        """
        late = []
        last = self._last_call[context.positions].tolist()
        for i, (last_averages, _) in zip(context.ids, last, strict=True):
            if not last_averages:
                raise PolicyError(
                    "a client is assigned a model before it received any: send it the averages "
                    "first"
                )
            # its models have moved on, so an update from the earlier ones cannot be computed
            if context.step < last_averages:
                late.append(i)
        if late:
            raise client.late_request_error(late)
        start = 0
        self.bind_models(context, [start] * len(context.ids))
        chosen = [(start, model) for model in query.model.values.tolist()]
        return self.train_chosen(context, chosen)


def averages_by_model(query: ModelAverages) -> list[AverageDeltas]:
    """Return the averages of each of the k models, in messages of their own."""
    model_of_row = query.models.table.tolist()
    counts = query.count.values
    messages = []
    for j in range(query.k):
        rows = []
        for picks in query.means.picks:
            rows_of_model = [row for row in picks if model_of_row[row] == j]
            rows.append(tuple(rows_of_model))
        means = Picks(query.means.table, tuple(rows))
        steps = Picks(query.steps.table, tuple(rows))
        messages.append(AverageDeltas(means, steps, query.absolute, Rows(counts[:, j])))
    return messages


def selected_rows(picks: Sequence[tuple[Rows, int]]) -> Rows:
    """Return one row of several sets of models for each pick; equal rows are stored once.

    Args:
        picks: for each client, all clients' models and the client's position among them.
    """
    position: dict[tuple[int, int], int] = {}  # by table and row, the row of the result
    rows: list[torch.Tensor] = []
    index = []
    for models, k in picks:
        stored = k if models.index is None else models.index[k]
        key = (id(models), stored)
        if key not in position:
            position[key] = len(rows)
            rows.append(models.row(k))
        index.append(position[key])
    return Rows(torch.stack(rows), tuple(index))


def first_of_least(losses: torch.Tensor) -> torch.Tensor:
    """Return the first of the least losses of each client, (b,) int64.

    Args:
        losses: (b, k).
    """
    # torch does not say which of equal ones it returns
    return torch.as_tensor(losses.numpy().argmin(1))
