"""Detection of models that have learned nothing: no better than an answer that ignores its input.

The observer computes it when a run is over, outside the protocol.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from securecluster.messaging.messages import Rows
from securecluster.training.local_trainer import LocalTrainer

ENOUGH_ROUNDS = 10
"""rounds of averaging from which on a user is warned of a model that has learned nothing"""
SHARE = 0.25
"""share of clients from which on a user is warned"""
# accuracies are means over samples, which float64 rounds
TOLERANCE = 1e-9


FloatArray = NDArray[np.float64]


@dataclass(frozen=True)
class Chance:
    """Clients whose model does no better than chance.

    Args:
        clients: their positions.
        tested: number of clients whose models can be tested.
        loss: mean training loss of these clients' samples.
        chance: mean training loss of chance, as the objective defines it.
    """

    clients: list[int]
    tested: int
    loss: float
    chance: float

    @property
    def notable(self) -> bool:
        """True if so many clients are concerned that a user should be warned."""
        affected = len(self.clients)
        return affected > 0 and affected >= SHARE * self.tested


def at_chance(cohort: LocalTrainer, models: Rows, scores: FloatArray) -> Chance:
    """Return the clients whose model has learned nothing.

    A model that ignores its input, as after too large steps, has at least the training loss of the
    best single answer to the samples of all clients that share it, and at most the share of the
    most frequent label as its accuracy. Both must hold. Models whose clients' targets are all equal
    are not tested, since there a single answer is right.

    Args:
        cohort: the clients' data.
        models: each client's own model, (m, d).
        scores: the metric on each client's held-out samples, (m,); NaN for a client without any.
    """
    if not cohort.measures:
        return Chance([], 0, 0.0, 0.0)
    clients: list[int] = []
    losses: list[float] = []
    chances: list[float] = []
    tested = 0
    objective = cohort.model.objective
    for members in _clients_by_model(models):
        targets = cohort.training_samples.targets(members)
        chance = objective.chance_loss(targets, cohort.classes)
        if chance <= 0:  # all targets are equal
            continue
        tested += len(members)
        if _above_frequent_label(cohort, members, scores):
            continue
        sizes = [cohort.sizes[k] for k in members]
        client_losses = cohort.loss(models.select(members), members)
        # weighted, so that it is the mean over samples, as the loss of chance is
        loss = float(np.average(client_losses, weights=sizes))
        if not loss < chance:  # also a loss that is not a number
            clients += members
            losses += [loss] * len(members)
            chances += [chance] * len(members)
    if not clients:
        return Chance([], tested, 0.0, 0.0)
    mean_loss = float(np.mean(losses))
    mean_chance = float(np.mean(chances))
    return Chance(sorted(clients), tested, mean_loss, mean_chance)


def _clients_by_model(models: Rows) -> list[list[int]]:
    """Return the positions of the clients that share a model, for each model."""
    index = models.index
    if index is None:
        index = tuple(range(len(models.table)))
    groups: dict[int, list[int]] = {}
    for client, row in enumerate(index):
        groups.setdefault(row, []).append(client)
    return list(groups.values())


def _above_frequent_label(
    cohort: LocalTrainer, members: Sequence[int], scores: NDArray[np.float64]
) -> bool:
    """Return True if a model's accuracy exceeds that of the best answer without input.

    Args:
        cohort: the clients' data.
        members: positions of the clients that share the model.
        scores: accuracy on each client's held-out samples, (m,); NaN for a client without any.
    """
    samples = cohort.test_samples
    tested = [k for k in members if not np.isnan(scores[k])]
    # only accuracies grow with quality; perplexities and errors have no share of labels
    if not cohort.model.objective.higher or not tested:
        return False
    all_sizes = np.diff(samples.offsets)
    sizes = all_sizes[tested]
    accuracy = float(np.average(scores[tested], weights=sizes))
    largest_share = cohort.model.objective.constant_score(samples.targets(tested))
    return accuracy > largest_share + TOLERANCE
