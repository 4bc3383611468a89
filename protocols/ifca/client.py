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

AVERAGES = Upto("moved", "moves")  # averages of all models in one frame


@dataclass(frozen=True, eq=False)
class ModelAverages:
    """Server to client: the averages of each of the k models that it lacks, oldest first."""

    means: Annotated[Picks, Real((AVERAGES, "dimension"), sent="delta")]  # (r, d) as in `Means`
    steps: Annotated[Picks, Whole((AVERAGES,), most="steps")]  # (r,) int64, as in `Means`
    # (r,) int64, the model that each average moves
    models: Annotated[Picks, Whole((AVERAGES,), below="models")]
    k: Annotated[int, Exactly("models")]
    # whose models; the first ones follow from the public configuration
    start: Annotated[int, Between(below="starts")]
    # another start whose models are still of use, or the same
    best: Annotated[int, Between(below="starts")]
    absolute: bool  # one row a model at most, its whole displacement
    # (b, k) int64, as in `Means`, of each model
    count: Annotated[Rows, Whole(("models",), most="averages")]


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
    size: Annotated[Rows | None, Real(low=0, most=MOST_SAMPLES)]


ModelSet = list[UpdateClient]  # k models, each as all clients of a cohort have it


class IFCAClient(TrainingClient):
    """Clients that take the best of k models (Ghosh et al. 2020, Algorithm 1, lines 5–8)."""

    def __init__(
        self, cohort: LocalTrainer, training: LocalTraining, pipeline: Pipeline, weighted: bool
    ) -> None:
        super().__init__(cohort, training, pipeline, weighted)
        self.banks: dict[int, ModelSet] = {}  # by start
        # by position: the start and the model it took last, and in which call
        self._chosen: dict[int, tuple[int, int, int]] = {}
        # by position: the last call that brought it averages, and of which start
        self._heard: dict[int, tuple[int, int]] = {}

    @answers(GATHER)
    def choose(self, turn: CallContext, query: ModelAverages) -> ModelChoice:
        """The model with the lowest loss on all training samples, where the run adds noise to
        losses the lowest noisy one; of equal ones the first.
        """
        return self._take(turn, query.start, self._told("choose", turn, self._losses(turn, query)))

    @answers(GATHER)
    def join(self, turn: CallContext, query: ModelAverages) -> ModelChoice:
        """A newcomer's choice, among the models that the query moves (ours)."""
        offered = sorted(set(query.models.table.tolist()))
        if not offered:
            raise PolicyError("join brings models to choose from: without one there is no choice")
        losses = np.full((len(turn.at), query.k), math.inf)
        losses[:, offered] = self._told("join", turn, self._losses(turn, query)[:, offered])
        return self._take(turn, query.start, losses)

    @answers(GATHER, SUM, through=("delta",), fresh=True, trains="usual", unmasked=("size",))
    def contribute(self, turn: CallContext, query: Empty) -> Update:
        """n_i·Δ_i and n_i, from the model just chosen; a cluster of one is allowed, as printed.
        Clipped, updates count the same.
        """
        self._check_chosen(turn)
        chosen = [self._chosen[k] for k in turn.at]
        start = _gathered(
            [
                (self.banks[start][j].models, k)
                for k, (start, j, _) in zip(turn.at, chosen, strict=True)
            ]
        )
        room = self._pipeline.room(self.cohort.model.dimension)
        sizes = None if self._pipeline.clips else [self.cohort.sizes[k] for k in turn.at]
        delta = self.cohort.train(start, turn.at, self.training, turn.step, room, sizes)
        return Update(Rows(delta), None if sizes is None else self._sizes(turn))

    @answers(SUM, unmasked=("loss", "size"))
    def least(self, turn: CallContext, query: ModelAverages) -> LowestLoss:
        """n_i times the lowest loss, and n_i: what a start is judged by. Where updates are clipped,
        losses count the same, too.

        The least of k means moves by no more than each of them does, so its noise is that of a
        single one (ours).
        """
        found = self._told("least", turn, self._losses(turn, query).min(1, keepdims=True))[:, 0]
        if self._pipeline.clips:
            return LowestLoss(Rows(torch.as_tensor(found)), None)
        return LowestLoss(
            Rows(torch.as_tensor(found * np.array([self.cohort.sizes[k] for k in turn.at]))),
            self._sizes(turn),
        )

    @answers(GATHER, through=("delta",), fresh=True, derived=True)
    def show(self, turn: CallContext, query: ModelRequest) -> Update:
        """How far a model has moved since its start began, masked on the way out: so it reaches
        newcomers (ours).
        """
        wanted = zip(query.model.values.tolist(), turn.ids, turn.at, strict=True)
        # it was never asked
        bank = self.banks.get(query.start) or self._first(
            query.start, 1 + int(query.model.values.max())
        )
        parts = [
            bank[j].post(CallContext((i,), (k,), turn.round, turn.step), Empty()).delta.values
            for j, i, k in wanted
        ]
        return Update(Rows(torch.cat(parts)), None)

    def taken(self, query: ModelAverages, at: Sequence[int], choice: Sequence[int]) -> Rows:
        """Everyone's model, `choice[i]` client i's, where those at positions `at` have what the
        query brings them.
        """
        bank = self.banks.get(query.start) or self._first(query.start, query.k)
        moved = [
            model.advanced(at, means) for model, means in zip(bank, _split(query), strict=True)
        ]
        return _gathered([(moved[j], k) for k, j in enumerate(choice)])

    def _take(self, turn: CallContext, start: int, losses: NDArray[np.float64]) -> ModelChoice:
        found = losses.argmin(1)
        for k, j in zip(turn.at, found.tolist(), strict=True):
            if k not in self._chosen or turn.step >= self._chosen[k][2]:
                self._chosen[k] = (start, j, turn.step)
        return ModelChoice(Rows(torch.as_tensor(found)))

    def _check_chosen(self, turn: CallContext) -> None:
        """Raise PolicyError for clients that have not chosen, or have gone on since: the server
        asks for what they chose in this round.
        """
        if not all(k in self._chosen and self._chosen[k][0] in self.banks for k in turn.at):
            raise PolicyError(
                "choose comes first: a client contributes to the model that it has chosen"
            )
        late = [
            i
            for i, k in zip(turn.ids, turn.at, strict=True)
            if turn.step < max(self._heard[k][0], self._chosen[k][2])
        ]
        if late:
            raise late_request_error(late)

    def _check_start(self, turn: CallContext, query: ModelAverages) -> None:
        """Raise PolicyError for a late request about a start that clients have left: its models are
        gone.
        """
        last = {k: self._heard.get(k, (0, query.start)) for k in turn.at}
        late = [
            i
            for i, k in zip(turn.ids, turn.at, strict=True)
            if turn.step < last[k][0] and query.start != last[k][1]
        ]
        if late:
            raise late_request_error(late)

    def _losses(self, turn: CallContext, query: ModelAverages) -> NDArray[np.float64]:
        """F_i(θ_j) of each model for each client that is asked, (b, k), after it has what the query
        brings; inf where it is none.
        """
        self._check_start(turn, query)
        kept = {
            start: bank for start, bank in self.banks.items() if start in (query.start, query.best)
        }
        self.banks = (
            kept
            if query.start in kept
            else {query.start: self._first(query.start, query.k), **kept}
        )
        for model, means in zip(self.banks[query.start], _split(query), strict=True):
            model.catch_up(turn, means)
        for k in turn.at:
            step, start = max((turn.step, query.start), self._heard.get(k, (0, query.start)))
            self._heard[k] = (step, start)
        found = [
            self.cohort.loss(model.models.select(turn.at), turn.at, loss_clip(self._pipeline.guard))
            for model in self.banks[query.start]
        ]
        return np.nan_to_num(np.stack(found, 1), nan=math.inf, posinf=math.inf)

    def _told(
        self, purpose: str, turn: CallContext, losses: NDArray[np.float64]
    ) -> NDArray[np.float64]:
        """Losses (b, k) as they may leave."""
        return noised(
            self._pipeline.guard,
            purpose,
            turn.ids,
            turn.step,
            losses,
            [self.cohort.sizes[k] for k in turn.at],
        )

    def _first(self, start: int, k: int) -> ModelSet:
        """Return the models a start begins with.

        θ_0 is the first of all, and the others are drawn as it was.
        """
        drawn = [
            self.cohort.drawn("start", start, j) if start or j else self.cohort.start
            for j in range(k)
        ]
        return [
            UpdateClient(self.cohort, self.training, self._pipeline, self._weighted, theta)
            for theta in drawn
        ]

    def state(self, secrets: Secrets) -> ClientState:
        """For a checkpoint."""
        models = [model.models for bank in self.banks.values() for model in bank]
        if not models:
            return super().state(secrets)
        index = [
            torch.as_tensor(own.index) + sum(len(m.table) for m in models[:n])
            for n, own in enumerate(models)
        ]
        table = torch.cat([own.table for own in models])
        return ClientState(
            table, torch.cat(index).tolist(), secrets, list(self.banks), self.memory()
        )

    def memory(self) -> dict[str, torch.Tensor]:
        """Add the averages that each model has had, and what clients chose and heard last."""
        had = [model.memory()["had"] for bank in self.banks.values() for model in bank]
        chosen = [(k, *own) for k, own in self._chosen.items()]
        heard = [(k, *own) for k, own in self._heard.items()]
        return {
            **super().memory(),
            "banks": torch.stack(had) if had else torch.zeros(0, 0, dtype=torch.int64),
            "chosen": torch.tensor(chosen, dtype=torch.int64).view(-1, 4),
            "heard": torch.tensor(heard, dtype=torch.int64).view(-1, 3),
        }

    def recall(self, memory: Mapping[str, torch.Tensor]) -> None:
        """Take over what `memory` returned, but for the models and what they have had, which
        `restore` puts in place.
        """
        super().recall(memory)
        self._chosen = {
            k: (start, model, step) for k, start, model, step in memory["chosen"].tolist()
        }
        self._heard = {k: (step, start) for k, step, start in memory["heard"].tolist()}

    def restore(self, state: ClientState) -> None:
        """From a checkpoint."""
        m, self.banks = len(self.cohort.ids), {}
        rows = Rows(state.table.to(self.cohort.start.device), tuple(state.index))
        places = (
            np.arange(len(rows)).reshape(len(state.starts), -1, m)
            if state.starts
            else np.zeros((0, 0, m), np.int64)
        )
        for start, models in zip(state.starts, places.tolist(), strict=True):
            self.banks[start] = self._first(start, len(models))
            for model, own in zip(self.banks[start], models, strict=True):
                model.models = rows.select(own)
        self.recall(state.extra)
        held = [model for bank in self.banks.values() for model in bank]
        for model, had in zip(held, state.extra["banks"], strict=True):
            TrainingClient.recall(model, {"had": had})


def server_view(noisy: bool, clipped: bool) -> list[str]:
    """What the server sees of clients."""
    own = "with noise, " if noisy else ""
    chosen = "the model each client takes, in every round" + (
        ", which is the best by losses with noise" if noisy else ""
    )
    update = "update (the plain sum reads all replies; a cluster of one shows one)"
    return [
        chosen,
        f"{own}each client's clipped {update}"
        if clipped
        else f"{own}each client's number of samples and weighted {update}",
        f"{own}each client's lowest training loss in each start (the plain sum reads all replies)",
        "at the end how far each model has moved (masked where updates are)",
    ]


def _split(query: ModelAverages) -> list[AverageDeltas]:
    """The averages of each model apart."""
    model = query.models.table.tolist()
    own = [
        tuple(tuple(p for p in picks if model[p] == j) for picks in query.means.picks)
        for j in range(query.k)
    ]
    counts = query.count.values
    return [
        AverageDeltas(
            Picks(query.means.table, picks),
            Picks(query.steps.table, picks),
            query.absolute,
            Rows(counts[:, j]),
        )
        for j, picks in enumerate(own)
    ]


def _gathered(picks: Sequence[tuple[Rows, int]]) -> Rows:
    """Row `k` of `models` for each pick (models, k); equal rows stay stored once."""
    place: dict[tuple[int, int], int] = {}
    rows: list[torch.Tensor] = []
    index = []
    for models, k in picks:
        own = (id(models), k if models.index is None else models.index[k])
        if own not in place:
            place[own] = len(rows)
            rows.append(models.row(k))
        index.append(place[own])
    return Rows(torch.stack(rows), tuple(index))
