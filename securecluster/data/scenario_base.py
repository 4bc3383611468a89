"""What scenarios are made of: a dealing (who gets which samples) and changes (what a cluster does
to its own).
"""

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
    """How clients come to hold data from different distributions; `a + b` combines one dealing with
    changes.
    """

    @property
    @abstractmethod
    def parts(self) -> tuple[Part, ...]:
        """The parts in order."""
        ...

    def __add__(self, other: Scenario) -> Combined:
        return Combined(self.parts + other.parts)

    def __str__(self) -> str:
        return "+".join(part.name for part in self.parts)


class Part(Scenario):
    """A scenario that stands alone, or is combined with others."""

    name: ClassVar[str]
    classified: ClassVar[bool] = True
    """whether it deals or changes labels or images, which text and trajectories have not"""

    @property
    def parts(self) -> tuple[Part, ...]:
        """Itself."""
        return (self,)

    @property
    def declared(self) -> int:
        """The number of clusters this part makes, as far as that is known beforehand; 1 where it is
        not.
        """
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
        """The parts, one dealing at most among them and no part twice."""
        return self.members


@dataclass(frozen=True)
class Partition:
    """Rows of the train pool and of the test pool per client (where the source has no test pool,
    both are rows of the only one).

    `clusters` (clients,) holds each client's true cluster, None where it is not known; `names` the
    clients' own names.
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
        """Rows for each client; `samples` to train on per client, None for as many as can be dealt.

        Raises:
            UsageError: more than there is, or none.
        """
        ...


class Transform(Part):
    """What a cluster does to its samples; a change alone deals samples evenly at random."""

    clusters: int

    def truth(self, clients: int, randomness: Randomness) -> Labels:
        """Each client's cluster (clients,): as even as can be, in random order."""
        return spread(np.zeros(clients, np.int64), self.clusters, randomness)

    @abstractmethod
    def transform(
        self, cluster: int, x: Features, y: Labels, classes: int, randomness: Randomness
    ) -> tuple[Features, Labels]:
        """What cluster number `cluster` makes of its samples x (n, …) and labels y (n,)."""
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
    """The distinct rows of columns (clients,), numbered from 0 in ascending order."""
    return (
        np.unique(np.stack(columns, axis=1), axis=0, return_inverse=True)[1]
        .reshape(-1)
        .astype(np.int64)
    )


def arrange(
    scenario: Scenario, default: Partitioner, source: Source, clients: int
) -> tuple[Partitioner, list[Transform]]:
    """The dealing and the changes of a scenario, checked against the source.

    Raises:
        UsageError: two dealings, a part twice, or a part or combination that cannot be made.
    """
    parts = scenario.parts
    for k, part in enumerate(parts):
        if part.name in {p.name for p in parts[:k]}:
            raise UsageError(
                f"scenario {part.name!r} can be combined with others, not with itself: name it once"
            )
    dealings = [p for p in parts if isinstance(p, Partitioner)]
    if len(dealings) > 1:
        raise UsageError(
            f"scenarios {dealings[0].name!r} and {dealings[1].name!r} both say who gets which "
            "samples: choose one of them"
        )
    for part in parts:
        part.check(source, clients)
    clusters = int(np.prod([p.declared for p in parts]))
    _enough(clusters, clients)
    return (dealings[0] if dealings else default), [p for p in parts if isinstance(p, Transform)]


def _suited(source: Source) -> str:
    """The scenarios that need no classes."""
    pool = source.train
    return " or ".join(
        ["iid"] + ["natural"] * (pool.owners is not None) + ["topics"] * (pool.groups is not None)
    )


def _enough(clusters: int, clients: int) -> None:
    if clusters > clients:
        raise UsageError(
            f"{clusters} clusters among {clients} clients leave some cluster empty: use at most "
            f"{clients} clusters"
        )
