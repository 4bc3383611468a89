"""Whether models have learned anything: more than an answer that ignores its input knows.

It is the observer's question, asked once a run is over, outside the protocol.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from securecluster.messaging.messages import Rows
from securecluster.training.local_trainer import LocalTrainer

ENOUGH_ROUNDS = 10
"""rounds of averaging that are asked for, from which on a model that has learned nothing is worth a
word
"""
SHARE = 0.25
"""share of clients from which on it is"""


@dataclass(frozen=True)
class Chance:
    """Clients whose model does no better than chance.

    Args:
        clients: their positions.
        judged: how many clients could be judged.
        loss: the mean training loss of these clients' samples.
        chance: that of chance, as the objective has it.
    """

    clients: list[int]
    judged: int
    loss: float
    chance: float

    @property
    def notable(self) -> bool:
        """Whether so many clients are concerned that a user should know."""
        return len(self.clients) > 0 and len(self.clients) >= SHARE * self.judged


def at_chance(cohort: LocalTrainer, models: Rows, scores: NDArray[np.float64]) -> Chance:
    """Return the clients whose model has learned nothing.

    A model that ignores its input, as after too large steps, has at least the training loss of the
    best single answer to the samples of all clients that hold it, and at most the share of the most
    frequent label as its accuracy. Both must be so. Models whose clients' targets are all the same
    are not judged, since there a single answer is right.

    Args:
        models: each client's own, (m, d).
        scores: the metric on each client's held-out samples, (m,); NaN where it has none.
    """
    found: list[int] = []
    losses: list[float] = []
    chances: list[float] = []
    judged = 0
    for members in _sharing(models):
        targets = cohort.training_samples.targets(members)
        chance = cohort.model.objective.chance_loss(targets, cohort.classes)
        if chance <= 0:
            continue
        judged += len(members)
        if _above_frequent_label(cohort, members, scores):
            continue
        sizes = [cohort.sizes[k] for k in members]
        loss = float(np.average(cohort.loss(models.select(members), members), weights=sizes))
        if not loss < chance:
            found += members
            losses += [loss] * len(members)
            chances += [chance] * len(members)
    if not found:
        return Chance([], judged, 0.0, 0.0)
    return Chance(sorted(found), judged, float(np.mean(losses)), float(np.mean(chances)))


def _sharing(models: Rows) -> list[list[int]]:
    """Return the clients of each model."""
    groups: dict[int, list[int]] = {}
    index = range(len(models.table)) if models.index is None else models.index
    for k, row in enumerate(index):
        groups.setdefault(row, []).append(k)
    return list(groups.values())


def _above_frequent_label(
    cohort: LocalTrainer, members: Sequence[int], scores: NDArray[np.float64]
) -> bool:
    """Return whether a model's accuracy is above the share of the most frequent label among its
    clients' held-out samples.
    """
    tested = [k for k in members if not np.isnan(scores[k])]
    if not cohort.model.objective.higher or not tested:
        return False
    sizes = np.diff(cohort.test_samples.offsets)[tested]
    accuracy = float(np.average(scores[tested], weights=sizes))
    labels = cohort.test_samples.targets(tested)
    most = float(np.bincount(labels).max()) / len(labels)
    return accuracy > most + 1e-9
