"""The clients of IFCA where sums are secure: choice and update stay with them.

A round has two secure sums over all participants (`common.counted_blocks`). In the first, each
client adds a row of k zeros with a one at the model that it chose: the server reads how many
clients chose each model. In the second, it adds k blocks of d numbers: its weighted update in the
block of its model, and zeros in the others.

A client whose model fewer than `least_choosers` clients chose adds zeros to every block, and trains
alone. It keeps the model that it trained until that model is averaged again.

Hidden clients count the same: numbers of samples in sums by cluster would tell clusters beside the
updates.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated

import numpy as np

from securecluster.core.lazy_torch import torch
from securecluster.protocols import authoring as fl
from securecluster.protocols.common.averages import counted_blocks, model_sets
from securecluster.protocols.ifca.client import IFCAClient


@dataclass(frozen=True, eq=False)
class ModelBlocks:
    """Client to server, in a secure sum: an update in the block of one model."""

    blocks: Annotated[fl.Rows, fl.Real(("models", "dimension"))]  # (b, k, d) weighted
    # (b, k) |D_i| at the model that the update is of; None where clients count the same
    weight: Annotated[fl.Rows | None, fl.Real(("models",), low=0, maximum=fl.MOST_SAMPLES)]


class HiddenChoiceClient(counted_blocks.CountedBlocks, IFCAClient):
    """Clients of IFCA, which hide their choice where sums are secure.

    Args:
        cohort: the clients' data and local training.
        training: local training between two averages.
        pipeline: the stages between a client's update and the wire.
        weighted: whether averages are weighted by |D_i|.
        hidden: True to hide choices.
        exact: True to weight hidden updates by |D_i|, and to send it to a sum by model.
        least_choosers: least number of clients whose updates are averaged where choices are hidden.
    """

    _trained_in = fl.ClientTensor(start=-1, dtype="int64")  # the last round of training alone

    def __init__(
        self,
        cohort: fl.LocalTrainer,
        training: fl.LocalTraining,
        pipeline: fl.Pipeline,
        weighted: bool,
        hidden: bool = False,
        exact: bool = False,
        least_choosers: int = fl.MINIMUM,
    ) -> None:
        super().__init__(cohort, training, pipeline, weighted)
        self.hidden = hidden
        self.least_choosers = least_choosers
        self._exact = exact and not pipeline.clips
        # models that clients trained alone, and that nobody has averaged since
        self._own = counted_blocks.OwnModels(3)  # by position of a client, start, model
        self._choices: dict[tuple[int, int], int] = {}  # by position and start

    @fl.answers(fl.SUM, unmasked=("count",))
    def count_choice(
        self, context: fl.CallContext, query: fl.ModelAverages
    ) -> counted_blocks.BlockCount:
        """Choose the model with the lowest loss, and return a one in its place.

        Raises:
            PolicyError: the request is late, or choices are not hidden.
        """
        self._refuse_unless_hidden("count_choice")
        chosen = self._choose(context, query).model.values
        ones = torch.nn.functional.one_hot(chosen, query.k) > 0
        about = counted_blocks.numbers_digest(torch.arange(query.k))
        return counted_blocks.BlockCount(self.counted(context, ones, about))

    @fl.answers(fl.SUM, through=("blocks",), trains="usual", unmasked=("weight",))
    def contribute_blocks(
        self, context: fl.CallContext, query: counted_blocks.FilledBlocks
    ) -> ModelBlocks:
        """Return n_i·Δ_i in the block of the model just chosen, and zeros in the others.

        A client whose model too few clients chose trains it without sending an update, once a
        round. Clients count the same, unless the run weights them by |D_i|.

        Raises:
            PolicyError: the request is late; or it contradicts what a client was told, or is about
                another choice.
            UpdateError: a model that was trained alone is not finite.
        """
        self._refuse_unless_hidden("contribute_blocks")
        self._check_chosen(context)
        start, _, _ = self._chosen[context.positions[0]].tolist()
        k = len(self.model_sets[start])
        about = counted_blocks.numbers_digest(torch.arange(k))
        filled = self.filled(context, query, k, about)
        shared: list[int] = []
        alone: list[int] = []
        chosen = self._chosen[context.positions].tolist()
        trained_in = self._trained_in[context.positions].tolist()
        for n, (_, j, _) in enumerate(chosen):
            if filled[j]:
                shared.append(n)
            elif trained_in[n] < context.round:
                alone.append(n)
        blocks = self.cohort.start.new_zeros(len(context.positions), k, self.cohort.model.dimension)
        weights = blocks.new_zeros(len(context.positions), k)
        updates = self._updates(context, shared, alone)
        for n in shared:
            _, j, _ = chosen[n]
            blocks[n, j] = updates[n]
            weights[n, j] = self._weight(context.positions[n])
        self._keep_own(context, alone, updates)
        weight_rows = fl.Rows(weights) if self._exact else None
        return ModelBlocks(fl.Rows(blocks), weight_rows)

    @fl.answers(fl.GATHER, private=False)
    def receive_models(self, context: fl.CallContext, query: fl.ModelAverages) -> fl.Ack:
        """Apply averages, and choose a model, without saying which.

        The last averages of a run reach all clients like this.
        """
        self._refuse_unless_hidden("receive_models")
        self._choose(context, query)
        return fl.Ack()

    @fl.answers(fl.GATHER, private=False)
    def join_unseen(self, context: fl.CallContext, query: fl.ModelAverages) -> fl.Ack:
        """Choose among the models of the query as a newcomer, without saying which.

        Raises:
            PolicyError: the query contains no models, or choices are not hidden.
        """
        self._refuse_unless_hidden("join_unseen")
        self._choose_offered(context, query)
        return fl.Ack()

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

    def held(self, query: fl.ModelAverages, positions: Sequence[int]) -> fl.Rows:
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
        for j, averages in enumerate(model_sets.averages_by_model(query)):
            advanced.append(models[j].advanced(positions, averages))
            for k, rows in zip(positions, averages.means.picks, strict=True):
                if rows:
                    loaded.add((k, j))
        picks = []
        for k, j in enumerate(self.choices(query.start)):
            row = self._own.get(k, query.start, j)
            if row is None or (k, j) in loaded:
                picks.append((advanced[j], k))
            else:
                picks.append((fl.Rows(row[None]), 0))
        return model_sets.selected_rows(picks)

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
            raise fl.PolicyError(
                f"{name} belongs to secure sums, and this run's sums are plain: the request is "
                "refused"
            )

    def _updates(
        self, context: fl.CallContext, shared: Sequence[int], alone: Sequence[int]
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
            row = self._own.get(k, start, j)
            if n in contributes or row is None:
                picks.append((self.model_sets[start][j].models, k))
            else:
                picks.append((fl.Rows(row[None]), 0))
            scale.append(self._weight(k) if n in contributes else 1.0)
        updates = self.cohort.train(
            model_sets.selected_rows(picks), positions, self.training, context.step, scale=scale
        )
        return dict(zip(frames, updates, strict=True))

    def _keep_own(
        self, context: fl.CallContext, alone: Sequence[int], updates: Mapping[int, torch.Tensor]
    ) -> None:
        """Move the models of clients that trained alone."""
        for n in alone:
            k = context.positions[n]
            if not bool(updates[n].isfinite().all()):
                raise fl.UpdateError(
                    f"round {context.round}: the model of client {context.ids[n]} is not finite: "
                    "lower the learning rate (--lr)"
                )
            start, j, _ = self._chosen[k].tolist()
            theta = self._own.get(k, start, j)
            if theta is None:
                theta = self.model_sets[start][j].models.row(k)
            self._own.keep(theta + updates[n], k, start, j)
            self._trained_in[k] = context.round

    def _weight(self, position: int) -> float:
        """Return |D_i|, or 1 where clients count the same."""
        if not self._exact:
            return 1.0
        return float(self.cohort.sizes[position])

    def _choose(self, context: fl.CallContext, query: fl.ModelAverages) -> fl.ModelChoice:
        """Store and return the models of lowest loss, by exact losses that leave nobody."""
        losses = torch.as_tensor(self.mean_losses(context, query))
        return self._take(context, query.start, losses)

    def _take(self, context: fl.CallContext, start: int, losses: torch.Tensor) -> fl.ModelChoice:
        """Store and return the models of lowest loss."""
        choice = super()._take(context, start, losses)
        for k, j in zip(context.positions, choice.model.values.tolist(), strict=True):
            self._choices[k, start] = j
        return choice

    def _best_models(
        self, context: fl.CallContext, start: int, losses: torch.Tensor
    ) -> torch.Tensor:
        """Return the models of lowest loss, the same for a call that is repeated.

        A repeated call must add the same row to a sum, also where a client has trained since.
        """
        losses = losses.clone()
        for n, (chosen_start, j, step) in enumerate(self._chosen[context.positions].tolist()):
            if self.hidden and (chosen_start, step) == (start, context.step):
                losses[n] = np.inf
                losses[n, j] = 0.0
        return super()._best_models(context, start, losses)

    def _catch_up(
        self, context: fl.CallContext, start: int, j: int, averages: fl.AverageDeltas
    ) -> None:
        """Apply the averages of one model, which replace what clients trained alone."""
        model = self.model_sets[start][j]
        before = model.had(context.positions, averages)
        super()._catch_up(context, start, j, averages)
        after = model.had(context.positions, averages)
        for k, earlier, count in zip(context.positions, before, after, strict=True):
            if count > earlier:
                self._own.drop(k, start, j)

    def evaluated_rows(self, start: int, j: int, positions: Sequence[int]) -> fl.Rows:
        """Return a model as clients evaluate it: as they trained it alone, where they did."""
        shared = self.model_sets[start][j].models
        picks = []
        for k in positions:
            row = self._own.get(k, start, j)
            if row is None:
                picks.append((shared, k))
            else:
                picks.append((fl.Rows(row[None]), 0))
        if all(models is shared for models, _ in picks):
            return super().evaluated_rows(start, j, positions)
        return model_sets.selected_rows(picks)

    def _open_start(self, query: fl.ModelAverages) -> model_sets.ModelSet:
        """Return the models of the query's start, and drop what belongs to starts not in use."""
        opened = (query.start, query.best)
        for key in self._own.keys:
            if key[1] not in opened:
                self._own.drop(*key)
        self._choices = {key: j for key, j in self._choices.items() if key[1] in opened}
        return super()._open_start(query)

    # models and choices are by start: no fixed rows
    def memory(self) -> dict[str, torch.Tensor]:
        """Add the models that clients trained alone, and what they chose."""
        memory = super().memory()
        if not self.hidden:
            return memory
        choices = [(*key, j) for key, j in self._choices.items()]
        return {**memory, **self._own.memory(), "choices": counted_blocks.table(choices, 3)}

    def recall(self, memory: Mapping[str, torch.Tensor]) -> None:
        """Restore what `memory` returned."""
        super().recall(memory)
        if not self.hidden:
            return
        self._own.recall(memory, self.cohort.start.device)
        self._choices = {(k, start): j for k, start, j in memory["choices"].tolist()}
