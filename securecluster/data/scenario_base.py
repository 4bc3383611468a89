"""Parts of scenarios: a partitioner of samples to clients, and transforms of clusters.

A partitioner says which rows of the train and test pools a client gets; a transform is what a
cluster does to its samples, to train and to test alike. The clusters of several parts are crossed
evenly.
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
    """Description of how the distributions of clients' data differ.

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
        return "+".join(component.name for component in self.parts)


class Part(Scenario):
    """Scenario that can be used alone or in combination with others."""

    name: ClassVar[str]
    classified: ClassVar[bool] = True
    """True if the part needs labels or images, which text and trajectories do not have."""

    @property
    def parts(self) -> tuple[Part, ...]:
        """Return the part itself."""
        return (self,)

    @property
    def declared(self) -> int:
        """Return the number of clusters that this part makes, or 1 if the data determine it."""
        # None stands for a number that the data determine
        return getattr(self, "clusters", None) or 1

    def check(self, source: Source, clients: int) -> None:
        """Raise UsageError if the part does not suit a data set or a number of clients.

        Args:
            source: the data set.
            clients: number of clients.
        """
        if self.classified and source.objective.kind != Classification.kind:
            raise UsageError(
                f"scenario {self.name!r} deals with labelled samples, and those of {source.name} "
                f"have no labels: use {_unlabelled_scenarios(source)}"
            )
        clusters = getattr(self, "clusters", None)
        if clusters is not None and clusters < 1:
            raise UsageError(f"{clusters} clusters cannot be made: ask for at least one")
        # `arrange` checks the clusters of a combination as well
        _check_clusters(self.declared, clients)


@dataclass(frozen=True)
class Combined(Scenario):
    """Combination of parts, whose true clusters are the distinct combinations of the parts' own.

    Args:
        members: the parts, among them one partitioner at most and no part twice.
    """

    members: tuple[Part, ...]

    @property
    def parts(self) -> tuple[Part, ...]:
        """Return the combined parts."""
        return self.members


@dataclass(frozen=True)
class Partition:
    """Assignment of a data set's rows to clients.

    Args:
        train: each client's rows of the train pool.
        test: each client's rows of the test pool, or of the train pool of a source without one.
        clusters: each client's true cluster (clients,), or None if it is unknown.
        names: the clients' names in the data set, or None.
    """

    train: list[Labels]
    test: list[Labels]
    clusters: Labels | None
    names: tuple[str, ...] | None = None


class Partitioner(Part):
    """Base class of scenario parts that assign samples to clients.

    A client's training and test samples have the same distribution.
    """

    @abstractmethod
    def deal(
        self, source: Source, clients: int, samples: int | None, randomness: Randomness
    ) -> Partition:
        """Assign rows to each client.

        Args:
            source: the data set.
            clients: number of clients.
            samples: number of training samples per client; None is the maximum.
            randomness: of the federation.

        Raises:
            UsageError: fewer samples are available, or none.
        """
        ...


class Transform(Part):
    """Base class of scenario parts that change the samples of each cluster.

    Without a partitioner, samples are assigned to clients evenly at random.
    """

    clusters: int

    def truth(self, clients: int, randomness: Randomness) -> Labels:
        """Return each client's cluster (clients,), in random order.

        The sizes of clusters differ by one at most.

        Args:
            clients: number of clients.
            randomness: of the federation.
        """
        return even_clusters(clients, self.clusters, randomness)

    @abstractmethod
    def transform(
        self, cluster: int, x: Features, y: Labels, classes: int, randomness: Randomness
    ) -> tuple[Features, Labels]:
        """Return the transformed samples and labels of a client.

        Args:
            cluster: number of the client's cluster.
            x: samples (n, …).
            y: labels (n,).
            classes: number of labels.
            randomness: of the federation.
        """
        ...


def spread(groups: Labels, clusters: int, randomness: Randomness) -> Labels:
    """Return a cluster for each client (clients,), in random order.

    The sizes of clusters differ by one at most, over all clients and within each group, so clusters
    are crossed evenly with the groups.

    Args:
        groups: a group of each client (clients,), such as its cluster by an earlier part.
        clusters: number of clusters.
        randomness: of the federation.
    """
    clients = len(groups)
    draw = randomness.generator("scenario", "truth")
    random_rank = draw.permutation(clients)
    # clusters take turns along all clients, sorted by group and at random within a group
    order = np.lexsort((random_rank, groups))
    position = np.empty(clients, np.int64)
    position[order] = np.arange(clients)
    return position % clusters


def even_clusters(clients: int, clusters: int, randomness: Randomness) -> Labels:
    """Return a cluster for each client (clients,), in random order.

    The sizes of clusters differ by one at most.

    Args:
        clients: number of clients.
        clusters: number of clusters.
        randomness: of the federation.
    """
    one_group = np.zeros(clients, np.int64)
    return spread(one_group, clusters, randomness)


def numbered(columns: Sequence[Labels]) -> Labels:
    """Return a number for each distinct combination of values, from 0 in ascending order.

    Args:
        columns: values of each client (clients,), one array per property.

    Returns:
        The number of each client's combination (clients,).
    """
    rows = np.stack(columns, axis=1)
    _, number = np.unique(rows, axis=0, return_inverse=True)
    # numpy 2.0 returns an inverse of two dimensions
    return number.reshape(-1).astype(np.int64)


def arrange(
    scenario: Scenario, default: Partitioner, source: Source, clients: int
) -> tuple[Partitioner, list[Transform]]:
    """Return the partitioner and the transforms of a scenario, checked against a data set.

    Args:
        scenario: one part, or several.
        default: partitioner of a scenario that has only transforms.
        source: the data set.
        clients: number of clients.

    Raises:
        UsageError: two partitioners, a part twice, or a part or combination that is impossible.
    """
    components = scenario.parts
    _check_distinct(components)
    partitioners = [component for component in components if isinstance(component, Partitioner)]
    transforms = [component for component in components if isinstance(component, Transform)]
    if len(partitioners) > 1:
        first = partitioners[0].name
        second = partitioners[1].name
        raise UsageError(
            f"scenarios {first!r} and {second!r} both say who gets which samples: choose one of "
            "them"
        )
    for component in components:
        component.check(source, clients)
    # clusters of a combination are all combinations of its parts' clusters
    clusters = np.prod([component.declared for component in components])
    _check_clusters(int(clusters), clients)
    partitioner = default
    if partitioners:
        partitioner = partitioners[0]
    return partitioner, transforms


def _check_distinct(components: Sequence[Part]) -> None:
    """Raise UsageError if a part occurs twice."""
    names: set[str] = set()
    for component in components:
        name = component.name
        if name in names:
            raise UsageError(
                f"scenario {name!r} can be combined with others, not with itself: name it once"
            )
        names.add(name)


def _unlabelled_scenarios(source: Source) -> str:
    """Return the names of the scenarios that suit samples without labels, as a phrase."""
    names = ["iid"]
    if source.train.owners is not None:
        names.append("natural")
    if source.train.groups is not None:
        names.append("topics")
    return " or ".join(names)


def _check_clusters(clusters: int, clients: int) -> None:
    """Raise UsageError for more clusters than clients."""
    if clusters > clients:
        raise UsageError(
            f"{clusters} clusters among {clients} clients leave some cluster empty: use at most "
            f"{clients} clusters"
        )
