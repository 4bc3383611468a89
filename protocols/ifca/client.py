"""The clients of IFCA, which average several models at once.

Each client chooses the model that fits its own samples best. An `IFCAClient` holds k models for
each start that is still in use, and sends its choice. The server's counterpart is `Restart`, which
has a queue of averages for each of its k models: under fresh masks, a client must receive all
averages of all models.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Annotated

import numpy as np
from numpy.typing import NDArray

from securecluster.core.lazy_torch import torch
from securecluster.errors import PolicyError
from securecluster.messaging.bounds import Between, Exactly, Real, Upto, Whole
from securecluster.messaging.messages import Empty, Picks, Rows
from securecluster.privacy.dp.loss_mechanism import loss_clip, noised
from securecluster.privacy.masking.key_agreement import Secrets
from securecluster.privacy.pipeline import Pipeline
from securecluster.protocols.common.client import (
    ClientState,
    TrainingClient,
    UpdateClient,
    late_request_error,
)
from securecluster.protocols.common.messages import MOST_SAMPLES, AverageDeltas, ModelChoice, Update
from securecluster.protocols.common.sum_options import LARGEST_LOSS
from securecluster.runtime.endpoint import GATHER, SUM, CallContext, answers
from securecluster.training.local_trainer import LocalTrainer, LocalTraining

AVERAGES = Upto("moved", "ifca_averages")  # averages of all models in one frame


@dataclass(frozen=True, eq=False)
class ModelAverages:
    """Server to client: the averages of each of the k models that it lacks, oldest first."""

    means: Annotated[Picks, Real((AVERAGES, "dimension"), sent="delta")]  # (r, d)
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
class ModelAssignment:
    """Server to client: the model to train, which need not be the client's own choice."""

    model: Annotated[Rows, Whole(below="models")]  # (b,) int64
    start: Annotated[int, Between(below="starts")]


@dataclass(frozen=True, eq=False)
class LowestLoss:
    """Client to server: the training loss of the client's best model."""

    # (b,) |D_i| times the lowest mean loss, float64, nats; without sizes the lowest mean loss
    loss: Annotated[Rows, Real()]
    # (b,) |D_i|, only where means are over samples
    size: Annotated[Rows | None, Real(low=0, maximum=MOST_SAMPLES)]


ModelSet = list[UpdateClient]  # the k models of a start, each as all clients of a cohort hold it


class IFCAClient(TrainingClient):
    """Clients that choose the best of k models (Ghosh et al. 2020, Algorithm 1, lines 5 to 8).

    Args:
        cohort: the clients' data and local training.
        training: local training between two averages.
        pipeline: the stages between a client's update and the wire.
        weighted: whether averages are weighted by |D_i|.

    Attributes:
        hidden: True where a client's choice must not leave it.
    """

    hidden = False

    def __init__(
        self,
        cohort: LocalTrainer,
        training: LocalTraining,
        pipeline: Pipeline,
        weighted: bool,
    ) -> None:
        super().__init__(cohort, training, pipeline, weighted)
        self.model_sets: dict[int, ModelSet] = {}  # by start
        # by position: start and model of the last choice, and its call
        self._chosen: dict[int, tuple[int, int, int]] = {}
        # by position: the last call that contained averages, and their start
        self._last_call: dict[int, tuple[int, int]] = {}

    @answers(GATHER)
    def choose(self, context: CallContext, query: ModelAverages) -> ModelChoice:
        """Return the model with the lowest loss on all training samples.

        It is the lowest noisy loss where the run adds noise, and the first of equal ones.

        Raises:
            PolicyError: the request is late, and is about a start or averages before the current
                ones; or choices are hidden.
        """
        self._refuse_if_hidden("choose")
        exact = self._losses(context, query)
        losses = self._released("choose", context, exact)
        return self._take(context, query.start, losses)

    @answers(GATHER)
    def join(self, context: CallContext, query: ModelAverages) -> ModelChoice:
        """Return a newcomer's choice among the models of the query (not in the paper).

        Raises:
            PolicyError: the query contains no models, or choices are hidden.
        """
        self._refuse_if_hidden("join")
        return self._choose_offered(context, query)

    def _choose_offered(self, context: CallContext, query: ModelAverages) -> ModelChoice:
        """Store and return a newcomer's choice among the models of the query."""
        offered = sorted(set(query.models.table.tolist()))
        if not offered:
            raise PolicyError("join needs models to choose from, and this request has none")
        exact = self._losses(context, query)
        shape = (len(context.positions), query.k)
        losses = np.full(shape, math.inf)
        losses[:, offered] = self._released(
            "join",
            context,
            exact[:, offered],
        )
        return self._take(context, query.start, losses)

    @answers(GATHER, SUM, through=("delta",), fresh=True, trains="usual", unmasked=("size",))
    def contribute(self, context: CallContext, query: Empty) -> Update:
        """Return n_i·Δ_i and n_i, from the model just chosen.

        Clipped updates are not weighted. A cluster of one is allowed, as in the paper.

        Raises:
            PolicyError: a client has not chosen a model, or has gone on since; or choices are
                hidden.
        """
        self._refuse_if_hidden("contribute")
        self._check_chosen(context)
        chosen = []
        for k in context.positions:
            start, j, _ = self._chosen[k]
            chosen.append((start, j))
        return self._contribution(context, chosen)

    @answers(GATHER, SUM, through=("delta",), fresh=True, trains="usual", unmasked=("size",))
    def contribute_to(self, context: CallContext, query: ModelAssignment) -> Update:
        """Return n_i·Δ_i and n_i, from the model that the server assigned (RR-Cluster).

        Raises:
            PolicyError: a client has not chosen a model of this start, or has gone on since; or
                choices are hidden.
        """
        self._refuse_if_hidden("contribute_to")
        self._check_chosen(context)
        for k in context.positions:
            start, _, _ = self._chosen[k]
            if start != query.start:
                raise PolicyError("a client trains models of the start that it has chosen from")
        assigned = [(query.start, j) for j in query.model.values.tolist()]
        return self._contribution(context, assigned)

    def _contribution(self, context: CallContext, models: Sequence[tuple[int, int]]) -> Update:
        """Train, and return the updates with their weights.

        Args:
            context: the clients.
            models: (b,) start and number of the model of each client.
        """
        # clients of one call may train different models, in one batch
        picks = []
        for k, (start, j) in zip(context.positions, models, strict=True):
            picks.append((self.model_sets[start][j].models, k))
        rows = selected_rows(picks)
        # clipped updates count the same, so the numbers of samples stay at the clients
        weighted = not self._pipeline.clips
        sizes = None
        if weighted:
            sizes = [self.cohort.sizes[k] for k in context.positions]
        delta = self.cohort.train(
            rows,
            context.positions,
            self.training,
            context.step,
            self._pipeline.room(self.cohort.model.dimension),
            sizes,
        )
        return Update(Rows(delta), self._sizes(context) if weighted else None)

    @answers(SUM, unmasked=("loss", "size"))
    def lowest_loss(self, context: CallContext, query: ModelAverages) -> LowestLoss:
        """Return n_i times the lowest loss, and n_i, by which starts are compared.

        Where updates are clipped, losses are not weighted either.
        """
        lowest = self._losses(context, query).min(1, keepdims=True)
        # The minimum of k means moves by no more than each of them does, so its noise is that of a
        # single mean (not in the paper).
        means = self._released("least", context, lowest)[:, 0]
        if self.hidden:  # no sum of fixed-point numbers holds an infinite one
            means = np.minimum(means, LARGEST_LOSS)
        if self._pipeline.clips:
            return LowestLoss(Rows(torch.as_tensor(means)), None)
        sizes = [self.cohort.sizes[k] for k in context.positions]
        sums = torch.as_tensor(means * np.array(sizes))
        return LowestLoss(Rows(sums), self._sizes(context))

    @answers(GATHER, through=("delta",), fresh=True, derived=True)
    def send_model(self, context: CallContext, query: ModelRequest) -> Update:
        """Return a model's delta since its start began, which newcomers receive.

        It is masked on the way out (not in the paper).
        """
        requested = query.model.values.tolist()
        models = self.model_sets.get(query.start)
        if not models:
            # a client that was never asked has no models of this start yet
            models = self._first(query.start, 1 + max(requested))
        deltas = []
        for j, i, k in zip(requested, context.ids, context.positions, strict=True):
            single = CallContext(
                (i,),
                (k,),
                context.round,
                context.step,
            )
            reply = models[j].post(single, Empty())
            deltas.append(reply.delta.values)
        return Update(Rows(torch.cat(deltas)), None)

    def taken(
        self,
        query: ModelAverages,
        positions: Sequence[int],
        choice: Sequence[int],
    ) -> Rows:
        """Return every client's chosen model after the query's averages; nothing is stored.

        Args:
            query: the averages.
            positions: of the clients that receive them.
            choice: (m,) the model of each client.
        """
        models = self.model_sets.get(query.start)
        if not models:
            models = self._first(query.start, query.k)
        advanced = []
        for model, averages in zip(models, averages_by_model(query), strict=True):
            advanced.append(model.advanced(positions, averages))
        picks = [(advanced[model], k) for k, model in enumerate(choice)]
        return selected_rows(picks)

    def _take(
        self,
        context: CallContext,
        start: int,
        losses: NDArray[np.float64],
    ) -> ModelChoice:
        """Store and return the models of lowest loss.

        Args:
            context: the clients.
            start: the start of the models.
            losses: (b, k) as released.
        """
        best = losses.argmin(1)
        for k, model in zip(context.positions, best.tolist(), strict=True):
            # a late request does not replace a later choice
            _, _, last_choice = self._chosen.get(k, (0, 0, 0))
            if context.step >= last_choice:
                self._chosen[k] = (start, model, context.step)
        return ModelChoice(Rows(torch.as_tensor(best)))

    def _refuse_if_hidden(self, name: str) -> None:
        """Raise PolicyError where the reply would tell a client's choice, and choices are hidden.

        Args:
            name: the client method that was called.
        """
        if self.hidden:
            raise PolicyError(
                f"{name} would tell a client's choice, and this run hides choices: the request is "
                "refused"
            )

    def _check_chosen(self, context: CallContext) -> None:
        """Raise PolicyError for clients that have not chosen, or have gone on since.

        The server asks for the model that they chose in this round.
        """
        for k in context.positions:
            if k not in self._chosen or self._chosen[k][0] not in self.model_sets:
                raise PolicyError(
                    "choose comes first: a client contributes to the model that it has chosen"
                )
        late = []
        for i, k in zip(context.ids, context.positions, strict=True):
            last_averages, _ = self._last_call[k]
            _, _, last_choice = self._chosen[k]
            if context.step < max(last_averages, last_choice):
                late.append(i)
        if late:
            raise late_request_error(late)

    def _check_start(self, context: CallContext, query: ModelAverages) -> None:
        """Raise PolicyError for a late request about an earlier start, whose models are dropped."""
        late = []
        for i, k in zip(context.ids, context.positions, strict=True):
            step, start = self._last_call.get(k, (0, query.start))
            if context.step < step and query.start != start:
                late.append(i)
        if late:
            raise late_request_error(late)

    def _losses(self, context: CallContext, query: ModelAverages) -> NDArray[np.float64]:
        """Apply the query's averages, and return F_i(θ_j) of each client and model.

        Returns:
            (b, k) in nats; inf for a loss that is not finite.
        """
        self._check_start(context, query)
        models = self._open_start(query)
        for j, averages in enumerate(averages_by_model(query)):
            self._catch_up(context, query.start, j, averages)
        for k in context.positions:
            last = self._last_call.get(k, (0, query.start))
            self._last_call[k] = max((context.step, query.start), last)

        clip = loss_clip(self._pipeline.guard)
        columns = []
        for j in range(len(models)):
            rows = self._rows_to_try(query.start, j, context.positions)
            columns.append(self.cohort.loss(rows, context.positions, clip))
        return np.nan_to_num(
            np.stack(columns, 1),
            nan=math.inf,
            posinf=math.inf,
        )

    def _catch_up(self, context: CallContext, start: int, j: int, averages: AverageDeltas) -> None:
        """Apply the averages of one model.

        Args:
            context: the clients.
            start: the start of the model.
            j: the model's number.
            averages: those that each client lacks.
        """
        self.model_sets[start][j].catch_up(context, averages)

    def _rows_to_try(self, start: int, j: int, positions: Sequence[int]) -> Rows:
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
            model_sets = {query.start: self._first(query.start, query.k), **model_sets}
        self.model_sets = model_sets
        return model_sets[query.start]

    def _released(
        self,
        purpose: str,
        context: CallContext,
        losses: NDArray[np.float64],
    ) -> NDArray[np.float64]:
        """Return losses as they may leave their clients.

        Args:
            purpose: names the draw of the noise.
            context: the clients.
            losses: (b, k) mean losses in nats.
        """
        sizes = [self.cohort.sizes[k] for k in context.positions]
        return noised(
            self._pipeline.guard,
            purpose,
            context.ids,
            context.step,
            losses,
            sizes,
        )

    def _first(self, start: int, k: int) -> ModelSet:
        """Return the initial models of a start.

        The first model of all is θ_0; the others are drawn from the same distribution.

        Args:
            start: the start's number.
            k: number of models.
        """
        models = []
        for j in range(k):
            if start == 0 and j == 0:
                theta = self.cohort.start
            else:
                theta = self.cohort.drawn("start", start, j)
            models.append(
                UpdateClient(self.cohort, self.training, self._pipeline, self._weighted, theta)
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
        return ClientState(
            table,
            index,
            secrets,
            list(self.model_sets),
            self.memory(),
        )

    def _all_models(self) -> list[UpdateClient]:
        """Return the k models of every start in use, start by start."""
        return list(chain.from_iterable(self.model_sets.values()))

    def memory(self) -> dict[str, torch.Tensor]:
        """Add the counts of averages by model, and each client's last choice and call."""
        counts = [model.memory()["had"] for model in self._all_models()]
        applied = torch.zeros(0, 0, dtype=torch.int64)
        if counts:
            applied = torch.stack(counts)
        chosen = [(k, *choice) for k, choice in self._chosen.items()]
        calls = [(k, *last) for k, last in self._last_call.items()]
        return {
            **super().memory(),
            "model_sets": applied,
            "chosen": torch.tensor(chosen, dtype=torch.int64).view(-1, 4),
            "last_call": torch.tensor(calls, dtype=torch.int64).view(-1, 3),
        }

    def recall(self, memory: Mapping[str, torch.Tensor]) -> None:
        """Restore what `memory` returned, except for the models and their counts of averages.

        These are restored by `restore`.
        """
        super().recall(memory)
        self._chosen = {}
        for k, start, model, step in memory["chosen"].tolist():
            self._chosen[k] = (start, model, step)
        self._last_call = {}
        for k, step, start in memory["last_call"].tolist():
            self._last_call[k] = (step, start)

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
                self.model_sets[start] = self._first(start, len(models))
                for model, clients in zip(self.model_sets[start], models, strict=True):
                    model.models = rows.select(clients)
        self.recall(state.extra)
        applied = state.extra["model_sets"]
        for model, counts in zip(self._all_models(), applied, strict=True):
            TrainingClient.recall(model, {"had": counts})


def server_view(noisy: bool, clipped: bool) -> list[str]:
    """Return what the server sees of clients under every mask, one phrase each.

    Args:
        noisy: whether the run adds noise.
        clipped: whether updates are clipped, and thus not weighted.
    """
    noise = "with noise, " if noisy else ""
    chosen = "the model each client takes, in every round"
    if noisy:
        chosen += ", which is the best by losses with noise"
    update = "update (the plain sum reads all replies; a cluster of one shows one)"
    if clipped:
        update = f"{noise}each client's clipped {update}"
    else:
        update = f"{noise}each client's number of samples and weighted {update}"
    loss = "lowest training loss in each start (the plain sum reads all replies)"
    return [
        chosen,
        update,
        f"{noise}each client's {loss}",
        "at the end how far each model has moved (masked where updates are)",
    ]


def hidden_view(k: int) -> list[str]:
    """Return what the server sees of clients where choices are hidden, one phrase each.

    Args:
        k: number of models.
    """
    return [
        "how many clients chose each model, in every round and at the end, and never which ones: "
        "the labels of the results are the clients' own, and no server saw them",
        "by the difference of two such counts, what a client chose that is in one of them only, "
        "where all others keep their choice",
        f"the sum of updates of each of the {k} models over two clients or more; of a model that "
        "one client chose it reads zeros, and that client trains alone",
        "with a block of two clients, each of them can subtract its own update from the average",
        "a server that reports false counts to clients, or names other survivors to each of them, "
        "could read a block of one client: clients check their own choice and the number of "
        "clients, and cannot check who else chose their model",
        "at the end how far each model has moved (masked where updates are)",
    ]


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
        messages.append(
            AverageDeltas(
                means,
                steps,
                query.absolute,
                Rows(counts[:, j]),
            )
        )
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
