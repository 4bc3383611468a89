"""Parts of scenarios: a partitioner, which deals samples to clients, and transforms of clusters."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from securecluster.core.randomness import Randomness
from securecluster.data.datasets import Source
from securecluster.data.pools import Features, Labels
from securecluster.errors import UsageError
from securecluster.models.objectives import Classification


class Scenario(ABC):
    """A way in which clients come to hold data from different distributions.

    `a + b` combines one partitioner with transforms.
    """

    @property
    @abstractmethod
    def parts(self) -> tuple[Part, ...]:
        """Return the parts in order."""
        ...

    def __add__(self, other: Scenario) -> Combined:
        return Combined(self.parts + other.parts)

    def __str__(self) -> str:
        return "+".join(part.name for part in self.parts)


class Part(Scenario):
    """A scenario that stands alone, or is combined with others."""

    name: ClassVar[str]
    classified: ClassVar[bool] = True
    """true for a part that deals or changes labels or images, which text and trajectories lack"""

    @property
    def parts(self) -> tuple[Part, ...]:
        """Return the part itself."""
        return (self,)

    @property
    def declared(self) -> int:
        """Return the number of clusters this part makes; 1 where it is not known beforehand."""
        return getattr(self, "clusters", None) or 1

    def check(self, source: Source, clients: int) -> None:
        """Raise UsageError where the combination cannot be made."""
        if self.classified and source.objective.kind != Classification.kind:
            raise UsageError(
                f"scenario {self.name!r} deals with labelled samples, and those of {source.name} "
                f"have no labels: use {_suited(source)}"
            )
        clusters = getattr(self, "clusters", None)
        if clusters is not None and clusters < 1:
            raise UsageError(f"{clusters} clusters cannot be made: ask for at least one")
        _enough(self.declared, clients)


@dataclass(frozen=True)
class Combined(Scenario):
    """Several parts at once; the true clusters are the distinct combinations of the parts' own."""

    members: tuple[Part, ...]

    @property
    def parts(self) -> tuple[Part, ...]:
        """Return the parts, one partitioner at most among them and no part twice."""
        return self.members


@dataclass(frozen=True)
class Partition:
    """Rows that each client gets.

    Args:
        train: each client's rows of the train pool.
        test: each client's rows of the test pool, or of the only pool where a source has one.
        clusters: each client's true cluster (clients,); None where it is not known.
        names: the clients' own names, where the data set has some.
    """

    train: list[Labels]
    test: list[Labels]
    clusters: Labels | None
    names: tuple[str, ...] | None = None


class Partitioner(Part):
    """Deals samples to clients, training and held-out samples from the same distribution."""

    @abstractmethod
    def deal(
        self, source: Source, clients: int, samples: int | None, randomness: Randomness
    ) -> Partition:
        """Deal rows to each client.

        Args:
            source: the data set.
            clients: their number.
            samples: to train on per client; None is as many as can be dealt.
            randomness: of the federation.

        Raises:
            UsageError: more than there is, or none.
        """
        ...


class Transform(Part):
    """A change that each cluster makes to its samples.

    A transform without a partitioner has samples dealt evenly at random.
    """

    clusters: int

    def truth(self, clients: int, randomness: Randomness) -> Labels:
        """Return each client's cluster (clients,): as even as can be, in random order."""
        return spread(np.zeros(clients, np.int64), self.clusters, randomness)

    @abstractmethod
    def transform(
        self, cluster: int, x: Features, y: Labels, classes: int, randomness: Randomness
    ) -> tuple[Features, Labels]:
        """Return what cluster number `cluster` makes of samples x (n, …) and labels y (n,)."""
        ...


def spread(groups: Labels, clusters: int, randomness: Randomness) -> Labels:
    """Return a cluster for each client, in random order.

    Clusters are as even as can be over all clients and within each group.
    """
    rank = randomness.generator("scenario", "truth").permutation(len(groups))
    place = np.empty(len(groups), np.int64)
    place[np.lexsort((rank, groups))] = np.arange(len(groups))
    return place % clusters


def numbered(columns: Sequence[Labels]) -> Labels:
    """Return a number (clients,) for each distinct row of columns, from 0 in ascending order."""
    rows = np.stack(columns, axis=1)
    _, number = np.unique(rows, axis=0, return_inverse=True)
    return number.reshape(-1).astype(np.int64)


def arrange(
    scenario: Scenario, default: Partitioner, source: Source, clients: int
) -> tuple[Partitioner, list[Transform]]:
    """Return the partitioner and the transforms of a scenario, checked against the source.

    Args:
        scenario: one part, or several.
        default: the partitioner of a scenario that has transforms alone.
        source: the data set.
        clients: their number.

    Raises:
        UsageError: two partitioners, a part twice, or a part or combination that cannot be made.
    """
    parts = scenario.parts
    names: set[str] = set()
    for part in parts:
        if part.name in names:
            raise UsageError(
                f"scenario {part.name!r} can be combined with others, not with itself: name it once"
            )
        names.add(part.name)
    partitioners = [part for part in parts if isinstance(part, Partitioner)]
    transforms = [part for part in parts if isinstance(part, Transform)]
    if len(partitioners) > 1:
        raise UsageError(
            f"scenarios {partitioners[0].name!r} and {partitioners[1].name!r} both say who gets "
            "which samples: choose one of them"
        )
    for part in parts:
        part.check(source, clients)
    _enough(int(np.prod([part.declared for part in parts])), clients)
    partitioner = partitioners[0] if partitioners else default
    return partitioner, transforms


def _suited(source: Source) -> str:
    """Return the scenarios that need no classes, in words."""
    names = ["iid"]
    if source.train.owners is not None:
        names.append("natural")
    if source.train.groups is not None:
        names.append("topics")
    return " or ".join(names)


def _enough(clusters: int, clients: int) -> None:
    """Raise UsageError for more clusters than clients."""
    if clusters > clients:
        raise UsageError(
            f"{clusters} clusters among {clients} clients leave some cluster empty: use at most "
            f"{clients} clusters"
        )
