"""Data sets: pools to train and to test on, and what is known of them."""

from __future__ import annotations

from dataclasses import dataclass

from securecluster.data.pools import Pool
from securecluster.models.objectives import CLASSIFICATION, Objective


@dataclass(frozen=True)
class Task:
    """A group of labels that clients learn together (Ali & Arafa 2024).

    Args:
        name: of the task.
        labels: in the group.
        clients: relative number of clients.
        samples: relative number of samples per client.
    """

    name: str
    labels: tuple[int, ...]
    clients: float = 1
    samples: float = 1


@dataclass(frozen=True)
class Source:
    """A data set: a pool to train on and, where the set has an official one, a pool to test on.

    Samples have `shape`, images (channels, height, width) with values in [0, 1]; labels lie in 0 …
    classes − 1. Other objectives than classification have other samples and targets, and `classes`
    is the number of outputs: words, or coordinates.
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
        """Return whether samples are images (channels, height, width)."""
        return len(self.shape) == 3
