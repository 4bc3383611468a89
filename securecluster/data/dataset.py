"""Data sets: pools to train and to test on, with their metadata."""

from __future__ import annotations

from dataclasses import dataclass

from securecluster.data.pools import Pool
from securecluster.models.objectives import CLASSIFICATION, Objective


@dataclass(frozen=True)
class Task:
    """Group of labels that the same clients learn (Ali & Arafa 2024).

    Args:
        name: of the task.
        labels: of the task.
        clients: relative number of clients.
        samples: relative number of samples per client.
    """

    name: str
    labels: tuple[int, ...]
    clients: float = 1
    samples: float = 1


@dataclass(frozen=True)
class Source:
    """Data set with a pool to train on and, if the set has an official one, a pool to test on.

    Args:
        name: of the data set.
        classes: number of outputs: classes, whose labels are 0 … classes − 1, or words, or
            coordinates.
        shape: of one sample; images have (channels, height, width) and values in [0, 1].
        train: pool to train on.
        test: pool to test on, or None.
        tasks: groups of labels, if the set has some.
        objective: of training, which determines the type of samples and targets.
    """

    name: str
    classes: int
    shape: tuple[int, ...]
    train: Pool
    test: Pool | None = None
    tasks: tuple[Task, ...] = ()
    objective: Objective = CLASSIFICATION

    @property
    def is_image(self) -> bool:
        """Return True if samples are images (channels, height, width)."""
        return len(self.shape) == 3
