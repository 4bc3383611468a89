"""Both ends of averaging several models at once.

Each client takes the one of them that fits its own samples best. The client's end is an
`IFCAClient`, which holds k models for each start that is still of use, and tells which of them it
takes. The server's end is a `Restart`, which keeps `PendingUpdates` for each of its k models, since
under fresh masks a client must be sent the averages of all of them that it lacks.
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
from securecluster.runtime.endpoint import GATHER, SUM, CallContext, answers
from securecluster.training.local_trainer import LocalTrainer, LocalTraining

AVERAGES = Upto("moved", "ifca_averages")  # averages of all models in one frame


@dataclass(frozen=True, eq=False)
class ModelAverages:
    """Server to client: the averages of each of the k models that it lacks, oldest first."""

    means: Annotated[Picks, Real((AVERAGES, "dimension"), sent="delta")]  # (r, d) as in `Means`
    steps: Annotated[Picks, Whole((AVERAGES,), maximum="steps")]  # (r,) int64, as in `Means`
    # (r,) int64, the model that each average moves
    models: Annotated[Picks, Whole((AVERAGES,), below="models")]
    k: Annotated[int, Exactly("models")]
    # whose models; the first ones follow from the public configuration
    start: Annotated[int, Between(below="starts")]
    # another start whose models are still of use, or the same
    best: Annotated[int, Between(below="starts")]
    absolute: bool  # one row a model at most, its whole displacement
    # (b, k) int64, as in `Means`, of each model
    count: Annotated[Rows, Whole(("models",), maximum="averages")]


@dataclass(frozen=True, eq=False)
class ModelRequest:
    """Server to client: the model it is to show."""

    model: Annotated[Rows, Whole(below="models")]  # (b,) int64
    start: Annotated[int, Between(below="starts")]


@dataclass(frozen=True, eq=False)
class LowestLoss:
    """Client to server: how well the best of the models fits."""

    # (b,) |D_i| times the least mean loss, float64, nats; without sizes the least mean loss
    loss: Annotated[Rows, Real()]
    # (b,) |D_i|, only where means are over samples
    size: Annotated[Rows | None, Real(low=0, maximum=MOST_SAMPLES)]


ModelSet = list[UpdateClient]  # k models, each as all clients of a cohort have it


class IFCAClient(TrainingClient):
    """Clients that take the best of k models (Ghosh et al. 2020, Algorithm 1, lines 5–8)."""

    def __init__(
        self, cohort: LocalTrainer, training: LocalTraining, pipeline: Pipeline, weighted: bool
    ) -> None:
        super().__init__(cohort, training, pipeline, weighted)
        self.model_sets: dict[int, ModelSet] = {}  # by start
        # by position: the start and the model it took last, and in which call
        self._chosen: dict[int, tuple[int, int, int]] = {}
        # by position: the last call that brought it averages, and of which start
        self._last_call: dict[int, tuple[int, int]] = {}

    @answers(GATHER)
    def choose(self, context: CallContext, query: ModelAverages) -> ModelChoice:
        """The model with the lowest loss on all training samples, where the run adds noise to
        losses the lowest noisy one; of equal ones the first.
        """
        return self._take(
            context, query.start, self._released("choose", context, self._losses(context, query))
        )

    @answers(GATHER)
    def join(self, context: CallContext, query: ModelAverages) -> ModelChoice:
        """A newcomer's choice, among the models that the query moves (ours)."""
        offered = sorted(set(query.models.table.tolist()))
        if not offered:
            raise PolicyError("join brings models to choose from: without one there is no choice")
        losses = np.full((len(context.positions), query.k), math.inf)
        losses[:, offered] = self._released(
            "join", context, self._losses(context, query)[:, offered]
        )
        return self._take(context, query.start, losses)

    @answers(GATHER, SUM, through=("delta",), fresh=True, trains="usual", unmasked=("size",))
    def contribute(self, context: CallContext, query: Empty) -> Update:
        """n_i·Δ_i and n_i, from the model just chosen; a cluster of one is allowed, as printed.
        Clipped, updates count the same.
        """
        self._check_chosen(context)
        picks = []
        for k in context.positions:
            start, j, _ = self._chosen[k]
            picks.append((self.model_sets[start][j].models, k))
        models = _selected_rows(picks)
        room = self._pipeline.room(self.cohort.model.dimension)
        sizes = None if self._pipeline.clips else [self.cohort.sizes[k] for k in context.positions]
        delta = self.cohort.train(
            models, context.positions, self.training, context.step, room, sizes
        )
        return Update(Rows(delta), None if sizes is None else self._sizes(context))

    @answers(SUM, unmasked=("loss", "size"))
    def lowest_loss(self, context: CallContext, query: ModelAverages) -> LowestLoss:
        """n_i times the lowest loss, and n_i: what a start is judged by. Where updates are clipped,
        losses count the same, too.

        The least of k means moves by no more than each of them does, so its noise is that of a
        single one (ours).
        """
        lowest = self._losses(context, query).min(1, keepdims=True)
        means = self._released("least", context, lowest)[:, 0]
        if self._pipeline.clips:
            return LowestLoss(Rows(torch.as_tensor(means)), None)
        sums = means * np.array([self.cohort.sizes[k] for k in context.positions])
        return LowestLoss(Rows(torch.as_tensor(sums)), self._sizes(context))

    @answers(GATHER, through=("delta",), fresh=True, derived=True)
    def send_model(self, context: CallContext, query: ModelRequest) -> Update:
        """How far a model has moved since its start began, masked on the way out: so it reaches
        newcomers (ours).
        """
        requested = query.model.values.tolist()
        # a client that was never asked has no models of this start yet
        models = self.model_sets.get(query.start) or self._first(query.start, 1 + max(requested))
        deltas = []
        for j, i, k in zip(requested, context.ids, context.positions, strict=True):
            alone = CallContext((i,), (k,), context.round, context.step)
            deltas.append(models[j].post(alone, Empty()).delta.values)
        return Update(Rows(torch.cat(deltas)), None)

    def taken(self, query: ModelAverages, at: Sequence[int], choice: Sequence[int]) -> Rows:
        """Everyone's model, `choice[i]` client i's, where those at positions `at` have what the
        query brings them.
        """
        models = self.model_sets.get(query.start) or self._first(query.start, query.k)
        advanced = []
        for model, averages in zip(models, _averages_by_model(query), strict=True):
            advanced.append(model.advanced(at, averages))
        return _selected_rows([(advanced[j], k) for k, j in enumerate(choice)])

    def _take(self, context: CallContext, start: int, losses: NDArray[np.float64]) -> ModelChoice:
        best = losses.argmin(1)
        for k, j in zip(context.positions, best.tolist(), strict=True):
            if k not in self._chosen or context.step >= self._chosen[k][2]:
                self._chosen[k] = (start, j, context.step)
        return ModelChoice(Rows(torch.as_tensor(best)))

    def _check_chosen(self, context: CallContext) -> None:
        """Raise PolicyError for clients that have not chosen, or have gone on since: the server
        asks for what they chose in this round.
        """
        if not all(
            k in self._chosen and self._chosen[k][0] in self.model_sets for k in context.positions
        ):
            raise PolicyError(
                "choose comes first: a client contributes to the model that it has chosen"
            )
        late = [
            i
            for i, k in zip(context.ids, context.positions, strict=True)
            if context.step < max(self._last_call[k][0], self._chosen[k][2])
        ]
        if late:
            raise late_request_error(late)

    def _check_start(self, context: CallContext, query: ModelAverages) -> None:
        """Raise PolicyError for a late request about a start that clients have left: its models are
        gone.
        """
        late = []
        for i, k in zip(context.ids, context.positions, strict=True):
            step, start = self._last_call.get(k, (0, query.start))
            if context.step < step and query.start != start:
                late.append(i)
        if late:
            raise late_request_error(late)

    def _losses(self, context: CallContext, query: ModelAverages) -> NDArray[np.float64]:
        """F_i(θ_j) of each model for each client that is asked, (b, k), after it has what the query
        brings; inf where it is none.
        """
        self._check_start(context, query)
        models = self._open_start(query)
        for model, averages in zip(models, _averages_by_model(query), strict=True):
            model.catch_up(context, averages)
        for k in context.positions:
            last = self._last_call.get(k, (0, query.start))
            self._last_call[k] = max((context.step, query.start), last)
        clip = loss_clip(self._pipeline.guard)
        columns = []
        for model in models:
            columns.append(
                self.cohort.loss(model.models.select(context.positions), context.positions, clip)
            )
        return np.nan_to_num(np.stack(columns, 1), nan=math.inf, posinf=math.inf)

    def _open_start(self, query: ModelAverages) -> ModelSet:
        """Return the models of the query's start, and drop those of starts out of use."""
        in_use = (query.start, query.best)
        model_sets = {start: models for start, models in self.model_sets.items() if start in in_use}
        if query.start not in model_sets:
            model_sets = {query.start: self._first(query.start, query.k), **model_sets}
        self.model_sets = model_sets
        return model_sets[query.start]

    def _released(
        self, purpose: str, context: CallContext, losses: NDArray[np.float64]
    ) -> NDArray[np.float64]:
        """Losses (b, k) as they may leave."""
        sizes = [self.cohort.sizes[k] for k in context.positions]
        return noised(self._pipeline.guard, purpose, context.ids, context.step, losses, sizes)

    def _first(self, start: int, k: int) -> ModelSet:
        """Return the models a start begins with.

        θ_0 is the first of all, and the others are drawn as it was.
        """
        models = []
        for j in range(k):
            is_first = start == 0 and j == 0
            theta = self.cohort.start if is_first else self.cohort.drawn("start", start, j)
            models.append(
                UpdateClient(self.cohort, self.training, self._pipeline, self._weighted, theta)
            )
        return models

    def state(self, secrets: Secrets) -> ClientState:
        """For a checkpoint."""
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
        return ClientState(table, index, secrets, list(self.model_sets), self.memory())

    def _all_models(self) -> list[UpdateClient]:
        """Return the k models of every start that is held, start by start."""
        return list(chain.from_iterable(self.model_sets.values()))

    def memory(self) -> dict[str, torch.Tensor]:
        """Add the averages that each model has had, and each client's last choice and call."""
        had = [model.memory()["had"] for model in self._all_models()]
        chosen = [(k, *choice) for k, choice in self._chosen.items()]
        calls = [(k, *last) for k, last in self._last_call.items()]
        return {
            **super().memory(),
            "model_sets": torch.stack(had) if had else torch.zeros(0, 0, dtype=torch.int64),
            "chosen": torch.tensor(chosen, dtype=torch.int64).view(-1, 4),
            "last_call": torch.tensor(calls, dtype=torch.int64).view(-1, 3),
        }

    def recall(self, memory: Mapping[str, torch.Tensor]) -> None:
        """Take over what `memory` returned, but for the models and what they have had, which
        `restore` puts in place.
        """
        super().recall(memory)
        self._chosen = {
            k: (start, model, step) for k, start, model, step in memory["chosen"].tolist()
        }
        self._last_call = {k: (step, start) for k, step, start in memory["last_call"].tolist()}

    def restore(self, state: ClientState) -> None:
        """From a checkpoint."""
        self.model_sets = {}
        if state.starts:
            rows = Rows(state.table.to(self.cohort.start.device), tuple(state.index))
            # (starts, k, clients), as `state` stacks them
            positions = np.arange(len(rows)).reshape(len(state.starts), -1, len(self.cohort.ids))
            for start, models in zip(state.starts, positions.tolist(), strict=True):
                self.model_sets[start] = self._first(start, len(models))
                for model, clients in zip(self.model_sets[start], models, strict=True):
                    model.models = rows.select(clients)
        self.recall(state.extra)
        for model, had in zip(self._all_models(), state.extra["model_sets"], strict=True):
            TrainingClient.recall(model, {"had": had})


def server_view(noisy: bool, clipped: bool) -> list[str]:
    """What the server sees of clients."""
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


def _averages_by_model(query: ModelAverages) -> list[AverageDeltas]:
    """Return the averages of each of the k models."""
    model_of_row = query.models.table.tolist()
    counts = query.count.values
    messages = []
    for j in range(query.k):
        rows = []
        for picks in query.means.picks:
            rows.append(tuple(row for row in picks if model_of_row[row] == j))
        means = Picks(query.means.table, tuple(rows))
        steps = Picks(query.steps.table, tuple(rows))
        messages.append(AverageDeltas(means, steps, query.absolute, Rows(counts[:, j])))
    return messages


def _selected_rows(picks: Sequence[tuple[Rows, int]]) -> Rows:
    """Return row `k` of `models` for each pick (models, k); equal rows stay stored once."""
    position: dict[tuple[int, int], int] = {}
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
