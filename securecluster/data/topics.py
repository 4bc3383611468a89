"""Partitioner by groups of samples, such as articles of one topic."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from securecluster.core.randomness import Randomness
from securecluster.data.allocation import SampleSupply, Wanted, amount, halves, hand_out, held_out
from securecluster.data.datasets import Source
from securecluster.data.partitioners import OwnedSamples
from securecluster.data.pools import Labels
from securecluster.data.scenario_base import Partition, Partitioner, even_clusters
from securecluster.errors import UsageError


@dataclass(frozen=True)
class Topics(Partitioner):
    """Partitioner that gives each client samples of one group; each group is a true cluster.

    Sattler et al. 2019, Fig. 9, have AG News, 20 clients and four topics. The groups are the set's
    largest ones, with the same number of clients each, up to one. Clients have equally many
    training samples, and test samples of the same group. From a set with clients of its own
    (mobility, whose groups are a reference), the clients of each group are drawn at random and
    have their own samples, as in `Natural`.

    Args:
        clusters: number of groups.
        overlap: clients of a group may share samples.
    """

    name: ClassVar[str] = "topics"
    classified: ClassVar[bool] = False
    clusters: int = 4
    overlap: bool = False

    def check(self, source: Source, clients: int) -> None:
        """Raise UsageError for a data set without enough groups, or an impossible overlap."""
        super().check(source, clients)
        groups = source.train.groups
        if groups is None:
            raise UsageError(
                "scenario 'topics' needs a data set whose samples lie in groups, as those of "
                f"ag_news and mobility, not {source.name}"
            )
        available = len(np.unique(groups))
        if self.clusters > available:
            raise UsageError(
                f"scenario 'topics' makes at most {available} clusters of {source.name}, a group "
                f"each, not {self.clusters}"
            )
        if self.overlap and source.train.owners is not None:
            raise UsageError(
                f"clients of {source.name} hold their own samples and share none: leave the "
                "overlap out, or use iid"
            )

    def deal(
        self, source: Source, clients: int, samples: int | None, randomness: Randomness
    ) -> Partition:
        """Assign each client samples of its group."""
        truth = even_clusters(clients, self.clusters, randomness)
        if source.train.owners is not None:
            return self._deal_owned(source, truth, samples, randomness)
        # groups take the place of labels, and each client has all of its share in one group
        shares = np.eye(self.clusters)[truth]
        target = Wanted(shares, np.ones(clients), self.overlap)
        train, test = self._supplies(source, randomness)
        train_size = amount(source, target, train, samples, randomness)
        test_size = held_out(source, target, test, train_size, samples, randomness)
        train_rows = hand_out(train, target, train_size, randomness)
        test_rows = hand_out(test, target, test_size, randomness)
        return Partition(train_rows, test_rows, truth)

    def _supplies(
        self, source: Source, randomness: Randomness
    ) -> tuple[SampleSupply, SampleSupply]:
        """Return the samples of the largest groups available for training, and for testing.

        Their labels are the numbers of the groups, from 0.
        """
        assert source.train.groups is not None
        names, counts = np.unique(source.train.groups, return_counts=True)
        # by name: test samples are matched with the groups of the training samples
        selected = names[_largest(counts, self.clusters)].tolist()
        train, test = halves(source, randomness)
        test_groups: NDArray[Any] | None = source.train.groups
        if source.test is not None:
            test_groups = source.test.groups
        if test_groups is None:
            raise UsageError(
                f"the test samples of {source.name} lie in no groups: give its test pool groups, "
                "as its train pool has"
            )
        train = _with_groups(train, source.train.groups, selected)
        test = _with_groups(test, test_groups, selected)
        return train, test

    def _deal_owned(
        self, source: Source, truth: Labels, samples: int | None, randomness: Randomness
    ) -> Partition:
        """Assign each client the own samples of an owner that is drawn from its group.

        Args:
            source: a data set with clients of its own.
            truth: each client's group (clients,).
            samples: largest number of training samples per client; None is all.
            randomness: of the federation.
        """
        owned = OwnedSamples.of(source)
        assert owned.groups is not None
        owner_of_client = np.empty(len(truth), np.int64)
        # owners of other groups take no part
        largest = _largest(np.bincount(owned.groups), self.clusters)
        for cluster, group in enumerate(largest.tolist()):
            clients = np.flatnonzero(truth == cluster)
            owners = np.flatnonzero(owned.groups == group)
            needed = len(clients)
            available = len(owners)
            if needed > available:
                raise UsageError(
                    f"a group of {source.name} has {available} clients, not {needed}: use fewer "
                    "clients, or fewer clusters"
                )
            draw = randomness.generator("scenario", "topics", cluster)
            owner_of_client[clients] = draw.permutation(owners)[:needed]
        partition = owned.deal(owner_of_client, samples, randomness)
        return replace(partition, clusters=truth)


def _largest(counts: Labels, clusters: int) -> Labels:
    """Return the positions of the largest counts, ascending; of equal counts the first ones."""
    descending = np.argsort(-counts, kind="stable")
    return np.sort(descending[:clusters])


def _with_groups(supply: SampleSupply, groups: NDArray[Any], selected: list[Any]) -> SampleSupply:
    """Return the rows of the selected groups, labelled with the groups' positions.

    Args:
        supply: rows of a pool.
        groups: name of the group of each row of the pool (n,).
        selected: names of the groups.
    """
    names = groups[supply.rows]
    number = np.full(len(names), -1)  # −1: in none of the selected groups
    for position, name in enumerate(selected):
        number[names == name] = position
    is_selected = number >= 0
    return SampleSupply(supply.split, supply.rows[is_selected], number[is_selected])
