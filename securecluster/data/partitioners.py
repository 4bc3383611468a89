"""Partitioners without label skew: random subsets, and the data set's own clients."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from securecluster.core.randomness import Randomness
from securecluster.data.allocation import SampleSupply, halves
from securecluster.data.datasets import Source
from securecluster.data.pools import Labels
from securecluster.data.scenario_base import Partition, Partitioner, numbered
from securecluster.errors import UsageError


@dataclass(frozen=True)
class Iid(Partitioner):
    """Partitioner that gives each client a random subset of the same data: one true cluster.

    Samples of trajectories are random windows. Neighbouring windows have positions in common, and
    they may belong to different clients, or one to the training and one to the test samples.

    Args:
        clusters: number of true clusters, which is 1.
        overlap: clients may share samples.
    """

    name: ClassVar[str] = "iid"
    classified: ClassVar[bool] = False
    clusters: int = 1
    overlap: bool = False

    def check(self, source: Source, clients: int) -> None:
        """Raise UsageError for more than one cluster."""
        super().check(source, clients)
        if self.clusters != 1:
            raise UsageError(
                f"scenario 'iid' has one cluster, not {self.clusters}: use --clusters 1, or "
                "another scenario"
            )

    def deal(
        self, source: Source, clients: int, samples: int | None, randomness: Randomness
    ) -> Partition:
        """Partition the samples into random subsets of equal size."""
        if self.overlap:
            draw_rows = self._deal_shared
        elif source.test is None:
            draw_rows = self._deal_one_pool
        else:
            draw_rows = self._deal_two_pools
        train, test = draw_rows(source, clients, samples, randomness)
        return Partition(train, test, np.zeros(clients, np.int64))

    def _deal_one_pool(
        self, source: Source, clients: int, samples: int | None, randomness: Randomness
    ) -> tuple[list[Labels], list[Labels]]:
        """Return disjoint training and test rows of each client, from a source with one pool."""
        pool_size = len(source.train.y)
        share = pool_size // clients
        if samples is None:
            # a fifth is held out by default everywhere
            test_size = round(share / 5)
            train_size = share - test_size
        else:
            # the user asks for training samples only, so test samples come in addition
            test_size = _quarter(samples)
            train_size = samples
        size = train_size + test_size
        # four fifths of an even share is the most that leaves a fifth to test on
        if train_size < 1 or size * clients > pool_size:
            raise too_many(source, pool_size, clients, share * 4 // 5, samples)
        order = randomness.generator("scenario", "deal").permutation(pool_size)
        train = []
        test = []
        for client in range(clients):
            start = client * size
            rows = order[start : start + size]
            train.append(rows[:train_size])
            test.append(rows[train_size:])
        return train, test

    def _deal_two_pools(
        self, source: Source, clients: int, samples: int | None, randomness: Randomness
    ) -> tuple[list[Labels], list[Labels]]:
        """Return disjoint rows of the train pool, and of the test pool, of each client."""
        train, test = halves(source, randomness)
        train_maximum = len(train.y) // clients
        test_size = len(test.y) // clients
        train_size = samples
        if train_size is None:
            train_size = train_maximum
        if not test_size:
            raise too_many(source, len(train.y), clients, 0, samples)
        if not 1 <= train_size <= train_maximum:
            raise too_many(source, len(train.y), clients, train_maximum, samples)
        if samples is not None:
            test_size = min(test_size, _quarter(samples))
        train_rows = _disjoint(train, clients, train_size, randomness)
        test_rows = _disjoint(test, clients, test_size, randomness)
        return train_rows, test_rows

    def _deal_shared(
        self, source: Source, clients: int, samples: int | None, randomness: Randomness
    ) -> tuple[list[Labels], list[Labels]]:
        """Return rows of each client, which other clients may have as well."""
        train, test = halves(source, randomness)
        maximum = len(train.y)
        if samples is None or not 1 <= samples <= maximum or not len(test.y):
            raise UsageError(
                f"clients that may share samples of {source.name} train on 1 to {maximum} each, "
                f"not {samples or 'all'}: say how many (samples, --samples)"
            )
        test_size = min(len(test.y), _quarter(samples))
        train_rows = _overlapping(train, clients, samples, randomness)
        test_rows = _overlapping(test, clients, test_size, randomness)
        return train_rows, test_rows


@dataclass(frozen=True)
class Natural(Partitioner):
    """Partitioner by the data set's own clients, such as FEMNIST's writers.

    The clients that take part are drawn at random. True clusters are unknown. If the set has groups
    of clients (mobility's home and work areas), they take the place of true clusters as a
    reference. A fifth of each client's samples is held out, at random. If samples are in the order
    of time, the last fifth is held out, and the set's gap is left out before it. With `samples`, a
    client trains on the first `samples` of its training samples at most, and holds out a quarter
    as many.
    """

    name: ClassVar[str] = "natural"
    classified: ClassVar[bool] = False

    def check(self, source: Source, clients: int) -> None:
        """Raise UsageError for a data set without clients, or with fewer."""
        if source.train.owners is None:
            raise UsageError(
                "scenario 'natural' needs a data set whose samples belong to clients, as "
                f"femnist's do, not {source.name}"
            )
        available = len(np.unique(source.train.owners))
        if clients > available:
            raise UsageError(
                f"{source.name} here has {available} clients of its own, not {clients}: use at "
                f"most {available} clients"
            )

    def deal(
        self, source: Source, clients: int, samples: int | None, randomness: Randomness
    ) -> Partition:
        """Assign each drawn client its own samples."""
        owned = OwnedSamples.of(source)
        draw = randomness.generator("scenario", "clients")
        order = draw.permutation(len(owned.names))
        # sorted, so that clients are in the order of the set's names
        owners = np.sort(order[:clients])
        return owned.deal(owners, samples, randomness)


@dataclass(frozen=True)
class OwnedSamples:
    """Owners of a pool's rows, for data sets with clients of their own.

    Args:
        names: of the owners (o,).
        groups: reference groups of the owners (o,), or None.
        owner_of_row: position in `names` of each row's owner (n,).
        gap: see `Pool.gap`; if there is one, each owner's rows are in the order of time.
    """

    names: NDArray[Any]
    groups: Labels | None
    owner_of_row: Labels
    gap: int | None

    @classmethod
    def of(cls, source: Source) -> OwnedSamples:
        """Return the owners of a source's train pool."""
        pool = source.train
        assert pool.owners is not None
        names, first_rows, owner_of_row = np.unique(
            pool.owners, return_index=True, return_inverse=True
        )
        groups = None
        if pool.groups is not None:
            # one row tells an owner's group, since all rows of an owner have the same
            group_of_owner = pool.groups[first_rows]
            _, group_numbers = np.unique(group_of_owner, return_inverse=True)
            groups = group_numbers.reshape(-1)
        return cls(names, groups, owner_of_row.reshape(-1), pool.gap)

    def deal(self, owners: Labels, samples: int | None, randomness: Randomness) -> Partition:
        """Return a partition in which each client has the samples of one owner.

        Args:
            owners: position in `names` of each client's owner (clients,).
            samples: largest number of training samples; None is all.
            randomness: of the federation.

        Raises:
            UsageError: fewer than one sample is requested.
        """
        if samples is not None and samples < 1:
            raise UsageError(f"a client trains on at least one sample, not {samples}")
        train = []
        test = []
        for owner in owners.tolist():
            train_rows, test_rows = self._split_rows(owner, samples, randomness)
            train.append(train_rows)
            test.append(test_rows)
        clusters = None
        if self.groups is not None:
            clusters = numbered([self.groups[owners]])
        names = tuple(str(self.names[owner]) for owner in owners)
        return Partition(train, test, clusters, names)

    def _split_rows(
        self, owner: int, samples: int | None, randomness: Randomness
    ) -> tuple[Labels, Labels]:
        """Return an owner's rows to train on, and its rows to test on."""
        rows = np.flatnonzero(self.owner_of_row == owner)
        test_size = len(rows) // 5
        if self.gap is None:
            # by the owner's name, so that its split does not depend on who else takes part
            name = str(self.names[owner])
            draw = randomness.generator("scenario", "natural", name)
            rows = draw.permutation(rows)
            test = rows[:test_size]
            train = rows[test_size:]
        else:
            # an owner without held-out rows needs no gap
            train_size = len(rows)
            if test_size:
                train_size = max(0, len(rows) - test_size - self.gap)
            train = rows[:train_size]
            test = rows[len(rows) - test_size :]
        if samples is None or samples >= len(train):
            return train, test
        return train[:samples], test[: _quarter(samples)]


def _quarter(samples: int) -> int:
    """Return the number of test samples of a client that trains on `samples` samples."""
    return max(1, round(samples / 4))


def _disjoint(
    supply: SampleSupply, clients: int, size: int, randomness: Randomness
) -> list[Labels]:
    """Return random subsets of `size` rows without a common row, one per client."""
    draw = randomness.generator("scenario", "deal", supply.split)
    order = draw.permutation(supply.rows)
    # consecutive slices of one random order are disjoint
    starts = range(0, clients * size, size)
    return [order[start : start + size] for start in starts]


def _overlapping(
    supply: SampleSupply, clients: int, size: int, randomness: Randomness
) -> list[Labels]:
    """Return random subsets of `size` rows, drawn independently for each client."""
    rows_of_clients = []
    for client in range(clients):
        draw = randomness.generator("scenario", "deal", supply.split, "shared", client)
        order = draw.permutation(supply.rows)
        # a prefix of a permutation, so a client has no row twice
        rows_of_clients.append(order[:size])
    return rows_of_clients


def too_many(
    source: Source, pool_size: int, clients: int, maximum: int, samples: int | None
) -> UsageError:
    """Return the error for a request of more samples than are available.

    Args:
        source: the data set.
        pool_size: number of samples in the pool.
        clients: number of clients.
        maximum: largest possible number of training samples per client.
        samples: number that the user asked for; None if not every client can get a sample.
    """
    refusal = (
        f"{source.name} has {pool_size} samples: {clients} clients can train on at most {maximum} "
        "each"
    )
    if samples is None:
        return UsageError(f"{refusal}: use fewer clients")
    return UsageError(f"{refusal}, not {samples}")
