"""The clients of IFCA where sums are secure: choice and update stay with them.

A round has two secure sums over all participants. In the first, each client adds a row of k zeros
with a one at the model that it chose: the server reads how many clients chose each model. In the
second, it adds k blocks of d numbers: its weighted update in the block of its model, and zeros in
the others.

A client whose model nobody else chose adds zeros to every block, and trains alone: a block over one
client would be its update. It keeps the model that it trained until that model is averaged again.

Hidden clients count the same: numbers of samples in sums by cluster would tell clusters beside the
updates. After the counts only as many clients may be lost as the smallest averaged block can spare,
so that no block has a single contributor. Clients derive that number from the counts, and reveal no
share below it; they cannot check who else chose their model.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, ClassVar

import numpy as np

from securecluster.core.lazy_torch import torch
from securecluster.errors import PolicyError, UpdateError
from securecluster.messaging.bounds import Real, Whole
from securecluster.messaging.messages import Ack, Rows, Shared
from securecluster.privacy.pipeline import Pipeline
from securecluster.protections.sum_calls import FollowingSum
from securecluster.protocols.common.client_tensors import ClientTensor
from securecluster.protocols.common.messages import MOST_SAMPLES, AverageDeltas, ModelChoice
from securecluster.protocols.common.model_sets import (
    ModelAverages,
    ModelSet,
    averages_by_model,
    selected_rows,
)
from securecluster.protocols.ifca.client import IFCAClient
from securecluster.runtime.call_context import CallContext
from securecluster.runtime.endpoint import GATHER, MINIMUM, SUM, answers
from securecluster.training.local_trainer import LocalTrainer, LocalTraining

OwnKey = tuple[int, int, int]  # position of a client, start, model


@dataclass(frozen=True, eq=False)
class ChoiceCount:
    """Client to server, in a secure sum: a one at the model that the client chose."""

    count: Annotated[Rows, Real(("models",), low=0, maximum=1)]  # (b, k)


@dataclass(frozen=True, eq=False)
class ModelCounts(FollowingSum):
    """Server to client: how many clients chose each model.

    Those of two clients or more are averaged.
    """

    counts: Annotated[Shared, Whole(("models",), maximum="clients")]  # (k,) int64


@dataclass(frozen=True, eq=False)
class ModelBlocks:
    """Client to server, in a secure sum: an update in the block of one model."""

    blocks: Annotated[Rows, Real(("models", "dimension"))]  # (b, k, d) weighted
    # (b, k) |D_i| at the model that the update is of; None where clients count the same
    weight: Annotated[Rows | None, Real(("models",), low=0, maximum=MOST_SAMPLES)]


def least_survivors(counts: Sequence[int]) -> int:
    """Return how many of the counted clients a sum of blocks needs.

    Every block that is not zero has two contributors or more, whichever of the other clients are
    lost: no more are lost than the smallest of these blocks can spare.

    Args:
        counts: (k,) clients that chose each model.
    """
    averaged = [count for count in counts if count >= MINIMUM]
    spare = 0
    if averaged:
        spare = min(averaged) - MINIMUM
    return max(MINIMUM, sum(counts) - spare)


class HiddenChoiceClient(IFCAClient):
    """Clients of IFCA, which hide their choice where sums are secure.

    Args:
        cohort: the clients' data and local training.
        training: local training between two averages.
        pipeline: the stages between a client's update and the wire.
        weighted: whether averages are weighted by |D_i|.
        hidden: True to hide choices.
        exact: True to weight hidden updates by |D_i|, and to send it to a sum by model.
    """

    by_client: ClassVar[tuple[str, ...]] = ("choices", "trained_alone")

    _trained_in = ClientTensor(start=-1, dtype="int64")  # the last round of training alone

    def __init__(
        self,
        cohort: LocalTrainer,
        training: LocalTraining,
        pipeline: Pipeline,
        weighted: bool,
        hidden: bool = False,
        exact: bool = False,
    ) -> None:
        super().__init__(cohort, training, pipeline, weighted)
        self.hidden = hidden
        self._exact = exact and not pipeline.clips
        # models that clients trained alone, and that nobody has averaged since
        self._own: dict[OwnKey, torch.Tensor] = {}
        self._choices: dict[tuple[int, int], int] = {}  # by position and start
        # by position: call of the last counts that a client was told, call of its blocks, counts
        self._told: dict[int, tuple[int, ...]] = {}

    @answers(SUM, unmasked=("count",))
    def count_choice(self, context: CallContext, query: ModelAverages) -> ChoiceCount:
        """Choose the model with the lowest loss, and return a one in its place.

        Raises:
            PolicyError: the request is late, or choices are not hidden.
        """
        self._refuse_unless_hidden("count_choice")
        choice = self._choose(context, query)
        chosen = choice.model.values
        count = self.cohort.start.new_zeros(len(context.positions), query.k)
        count[torch.arange(len(chosen)), chosen] = 1
        return ChoiceCount(Rows(count))

    @answers(SUM, through=("blocks",), trains="usual", unmasked=("weight",))
    def contribute_blocks(self, context: CallContext, query: ModelCounts) -> ModelBlocks:
        """Return n_i·Δ_i in the block of the model just chosen, and zeros in the others.

        A client that alone chose its model trains it without sending an update, once a round.
        Clients count the same, unless the run weights them by |D_i|.

        Raises:
            PolicyError: the request is late; or the counts contradict what a client chose or was
                told, or are of another choice.
            UpdateError: a model that was trained alone is not finite.
        """
        self._refuse_unless_hidden("contribute_blocks")
        self._check_chosen(context)
        counts = query.counts.value.tolist()
        self._check_counts(context, query, counts)
        shared: list[int] = []
        alone: list[int] = []
        chosen = self._chosen[context.positions].tolist()
        trained_in = self._trained_in[context.positions].tolist()
        for n, (_, j, _) in enumerate(chosen):
            if counts[j] >= MINIMUM:
                shared.append(n)
            elif trained_in[n] < context.round:
                alone.append(n)
        blocks = self.cohort.start.new_zeros(
            len(context.positions), len(counts), self.cohort.model.dimension
        )
        weights = blocks.new_zeros(len(context.positions), len(counts))
        updates = self._updates(context, shared, alone)
        for n in shared:
            _, j, _ = chosen[n]
            blocks[n, j] = updates[n]
            weights[n, j] = self._weight(context.positions[n])
        self._keep_own(context, alone, updates)
        return ModelBlocks(Rows(blocks), Rows(weights) if self._exact else None)

    @answers(GATHER, private=False)
    def receive_models(self, context: CallContext, query: ModelAverages) -> Ack:
        """Apply averages, and choose a model, without saying which.

        The last averages of a run reach all clients like this.
        """
        self._refuse_unless_hidden("receive_models")
        self._choose(context, query)
        return Ack()

    @answers(GATHER, private=False)
    def join_unseen(self, context: CallContext, query: ModelAverages) -> Ack:
        """Choose among the models of the query as a newcomer, without saying which.

        Raises:
            PolicyError: the query contains no models, or choices are not hidden.
        """
        self._refuse_unless_hidden("join_unseen")
        self._choose_offered(context, query)
        return Ack()

    def choices(self, start: int) -> list[int]:
        """Return the model that each client chose last, (m,), which only the clients know.

        Args:
            start: the start of the models; 0 is returned where a client chose none of them.
        """
        return [self._choices.get((k, start), 0) for k in range(len(self.cohort.ids))]

    def trained_alone(self, start: int) -> list[bool]:
        """Return whether each client's chosen model is one that it trained alone, (m,).

        Args:
            start: the start of the models.
        """
        return [(k, start, j) in self._own for k, j in enumerate(self.choices(start))]

    def held(self, query: ModelAverages, positions: Sequence[int]) -> Rows:
        """Return every client's chosen model after the query's averages; nothing is stored.

        Args:
            query: the averages.
            positions: of the clients that receive them.
        """
        models = self.model_sets.get(query.start)
        if not models:
            models = self.first_models(query.start, query.k)
        advanced = []
        loaded: set[tuple[int, int]] = set()  # position and model
        for j, averages in enumerate(averages_by_model(query)):
            advanced.append(models[j].advanced(positions, averages))
            for k, rows in zip(positions, averages.means.picks, strict=True):
                if rows:
                    loaded.add((k, j))
        picks = []
        for k, j in enumerate(self.choices(query.start)):
            row = self._own.get((k, query.start, j))
            if row is None or (k, j) in loaded:
                picks.append((advanced[j], k))
            else:
                picks.append((Rows(row[None]), 0))
        return selected_rows(picks)

    @property
    def unshared(self) -> frozenset[int]:
        """Return the positions of clients whose last choice is a model that they trained alone."""
        positions = set()
        for k, (start, j, _) in enumerate(self._chosen.values.tolist()):
            if (k, start, j) in self._own:
                positions.add(k)
        return frozenset(positions)

    def _refuse_unless_hidden(self, name: str) -> None:
        """Raise PolicyError in a run of plain sums, which do not hide a reply."""
        if not self.hidden:
            raise PolicyError(
                f"{name} belongs to secure sums, and this run's sums are plain: the request is "
                "refused"
            )

    def _check_counts(
        self, context: CallContext, query: ModelCounts, counts: Sequence[int]
    ) -> None:
        """Check counts against what each client knows, and store what it was told.

        Security rule: a block over one client is that client's update. A client cannot verify how
        many others chose its model; it knows its own choice, how many clients were counted, and
        what it was told before.

        Raises:
            PolicyError: counts that cannot be those of the client's choice, a sum that may lose
                more clients than the counts allow, or a second sum of blocks for one choice.
        """
        for i, k in zip(context.ids, context.positions, strict=True):
            _, j, step = self._chosen[k].tolist()
            if step != query.earlier:
                raise PolicyError(f"client {i} made its last choice in another call")
            if sum(counts) != query.counted or counts[j] < 1:
                raise PolicyError(
                    f"client {i} was sent counts that contradict its own choice, or the number of "
                    "clients that were counted"
                )
            if query.least < least_survivors(counts):
                raise PolicyError(
                    f"client {i} is asked for a sum that {query.least} clients may survive: then a "
                    "block of it could be over a single client"
                )
            told = (query.earlier, context.step, *counts)
            before = self._told.get(k, told)
            if before[0] == query.earlier and before != told:
                raise PolicyError(
                    f"client {i} was told other counts for the same choice, or has sent its blocks"
                )
        for k in context.positions:
            self._told[k] = (query.earlier, context.step, *counts)

    def _updates(
        self, context: CallContext, shared: Sequence[int], alone: Sequence[int]
    ) -> dict[int, torch.Tensor]:
        """Return the weighted updates of some frames' clients, and plain ones of others.

        Args:
            context: the clients.
            shared: frames whose clients train the shared model.
            alone: frames whose clients train alone.

        Returns:
            (d,) by frame.
        """
        frames = sorted([*shared, *alone])
        if not frames:
            return {}
        positions = [context.positions[n] for n in frames]
        contributes = set(shared)
        picks = []
        scale = []
        for n, k in zip(frames, positions, strict=True):
            start, j, _ = self._chosen[k].tolist()
            row = self._own.get((k, start, j))
            if n in contributes or row is None:
                picks.append((self.model_sets[start][j].models, k))
            else:
                picks.append((Rows(row[None]), 0))
            scale.append(self._weight(k) if n in contributes else 1.0)
        updates = self.cohort.train(
            selected_rows(picks), positions, self.training, context.step, scale=scale
        )
        return dict(zip(frames, updates, strict=True))

    def _keep_own(
        self, context: CallContext, alone: Sequence[int], updates: Mapping[int, torch.Tensor]
    ) -> None:
        """Move the models of clients that trained alone."""
        for n in alone:
            k = context.positions[n]
            if not bool(updates[n].isfinite().all()):
                raise UpdateError(
                    f"round {context.round}: the model of client {context.ids[n]} is not finite: "
                    "lower the learning rate (--lr)"
                )
            start, j, _ = self._chosen[k].tolist()
            key = (k, start, j)
            theta = self._own.get(key)
            if theta is None:
                theta = self.model_sets[start][j].models.row(k)
            self._own[key] = theta + updates[n]
            self._trained_in[k] = context.round

    def _weight(self, position: int) -> float:
        """Return |D_i|, or 1 where clients count the same."""
        if not self._exact:
            return 1.0
        return float(self.cohort.sizes[position])

    def _choose(self, context: CallContext, query: ModelAverages) -> ModelChoice:
        """Store and return the models of lowest loss, by exact losses that leave nobody."""
        losses = torch.as_tensor(self.mean_losses(context, query))
        return self._take(context, query.start, losses)

    def _take(self, context: CallContext, start: int, losses: torch.Tensor) -> ModelChoice:
        """Store and return the models of lowest loss."""
        choice = super()._take(context, start, losses)
        for k, j in zip(context.positions, choice.model.values.tolist(), strict=True):
            self._choices[k, start] = j
        return choice

    def _best_models(self, context: CallContext, start: int, losses: torch.Tensor) -> torch.Tensor:
        """Return the models of lowest loss, the same for a call that is repeated.

        A repeated call must add the same row to a sum, also where a client has trained since.
        """
        losses = losses.clone()
        for n, (known, j, step) in enumerate(self._chosen[context.positions].tolist()):
            if self.hidden and (known, step) == (start, context.step):
                losses[n] = np.inf
                losses[n, j] = 0.0
        return super()._best_models(context, start, losses)

    def _catch_up(self, context: CallContext, start: int, j: int, averages: AverageDeltas) -> None:
        """Apply the averages of one model, which replace what clients trained alone."""
        model = self.model_sets[start][j]
        before = model.had(context.positions, averages)
        super()._catch_up(context, start, j, averages)
        after = model.had(context.positions, averages)
        for k, earlier, count in zip(context.positions, before, after, strict=True):
            if count > earlier:
                self._own.pop((k, start, j), None)

    def evaluated_rows(self, start: int, j: int, positions: Sequence[int]) -> Rows:
        """Return a model as clients evaluate it: as they trained it alone, where they did."""
        shared = self.model_sets[start][j].models
        picks = []
        for k in positions:
            row = self._own.get((k, start, j))
            picks.append((shared, k) if row is None else (Rows(row[None]), 0))
        if all(models is shared for models, _ in picks):
            return super().evaluated_rows(start, j, positions)
        return selected_rows(picks)

    def _open_start(self, query: ModelAverages) -> ModelSet:
        """Return the models of the query's start, and drop what belongs to starts not in use."""
        opened = (query.start, query.best)
        self._own = {key: row for key, row in self._own.items() if key[1] in opened}
        self._choices = {key: j for key, j in self._choices.items() if key[1] in opened}
        return super()._open_start(query)

    # models and choices are by start, and what a client was told is as wide as k: no fixed rows
    def memory(self) -> dict[str, torch.Tensor]:
        """Add the models that clients trained alone, and what they chose and were told."""
        memory = super().memory()
        if not self.hidden:
            return memory
        rows = torch.zeros(0, 0)
        if self._own:
            rows = torch.stack(list(self._own.values()))
        choices = [(*key, j) for key, j in self._choices.items()]
        return {
            **memory,
            "own": rows,
            "own_keys": _table(list(self._own), 3),
            "choices": _table(choices, 3),
            "told": _table([(k, *told) for k, told in self._told.items()], 1),
        }

    def recall(self, memory: Mapping[str, torch.Tensor]) -> None:
        """Restore what `memory` returned."""
        super().recall(memory)
        if not self.hidden:
            return
        rows = memory["own"].to(self.cohort.start.device)
        keys = memory["own_keys"].tolist()
        self._own = {(k, start, j): row for (k, start, j), row in zip(keys, rows, strict=True)}
        self._choices = {(k, start): j for k, start, j in memory["choices"].tolist()}
        self._told = {k: tuple(told) for k, *told in memory["told"].tolist()}


def _table(rows: Sequence[Sequence[int]], width: int) -> torch.Tensor:
    """Return rows of integers as a tensor (r, width), or with the rows' own width if there are."""
    if not rows:
        return torch.zeros(0, width, dtype=torch.int64)
    return torch.tensor([list(row) for row in rows], dtype=torch.int64)
