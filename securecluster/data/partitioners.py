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
    """Everyone holds a random subset of the same data: one true cluster.

    Of trajectories these are random windows, and neighbouring ones, which have positions in common,
    may be held by different clients, or be trained on and held out.
    """

    name: ClassVar[str] = "iid"
    classified: ClassVar[bool] = False
    clusters: int = 1
    overlap: bool = False

    def check(self, source: Source, clients: int) -> None:
        """Raise UsageError beyond this scenario's own limit."""
        super().check(source, clients)
        if self.clusters != 1:
            raise UsageError(
                f"scenario 'iid' has one cluster, not {self.clusters}: use --clusters 1, or "
                "another scenario"
            )

    def deal(
        self, source: Source, clients: int, samples: int | None, randomness: Randomness
    ) -> Partition:
        """Deal random subsets of equal size."""
        if self.overlap:
            deal = self._deal_shared
        elif source.test is None:
            deal = self._deal_one_pool
        else:
            deal = self._deal_two_pools
        train, test = deal(source, clients, samples, randomness)
        return Partition(train, test, np.zeros(clients, np.int64))

    def _deal_one_pool(
        self, source: Source, clients: int, samples: int | None, randomness: Randomness
    ) -> tuple[list[Labels], list[Labels]]:
        """Return disjoint training and held-out rows of the only pool."""
        pool = len(source.train.y)
        if samples is None:
            test = round(pool // clients / 5)
            train = pool // clients - test
        else:
            test = max(1, round(samples / 4))
            train = samples
        each = train + test
        if train < 1 or each * clients > pool:
            raise too_many(source, pool, clients, pool // clients * 4 // 5, samples)
        order = randomness.generator("scenario", "deal").permutation(pool)
        rows_of = [order[k * each : (k + 1) * each] for k in range(clients)]
        return [rows[:train] for rows in rows_of], [rows[train:] for rows in rows_of]

    def _deal_two_pools(
        self, source: Source, clients: int, samples: int | None, randomness: Randomness
    ) -> tuple[list[Labels], list[Labels]]:
        """Return disjoint rows of the train pool, and of the test pool."""
        train, test = halves(source, randomness)
        most = len(train.y) // clients
        held = len(test.y) // clients
        each = most if samples is None else samples
        if not held:
            raise too_many(source, len(train.y), clients, 0, samples)
        if not 1 <= each <= most:
            raise too_many(source, len(train.y), clients, most, samples)
        if samples is not None:
            held = min(held, max(1, round(samples / 4)))
        return _disjoint(train, clients, each, randomness), _disjoint(
            test, clients, held, randomness
        )

    def _deal_shared(
        self, source: Source, clients: int, samples: int | None, randomness: Randomness
    ) -> tuple[list[Labels], list[Labels]]:
        """Return rows that several clients may hold."""
        train, test = halves(source, randomness)
        if samples is None or not 1 <= samples <= len(train.y) or not len(test.y):
            raise UsageError(
                f"clients that may share samples of {source.name} train on 1 to {len(train.y)} "
                f"each, not {samples or 'all'}: say how many (samples, --samples)"
            )
        held = min(len(test.y), max(1, round(samples / 4)))
        return _overlapping(train, clients, samples, randomness), _overlapping(
            test, clients, held, randomness
        )


@dataclass(frozen=True)
class Natural(Partitioner):
    """The data set's own clients, such as FEMNIST's writers; which ones take part is drawn.

    True clusters are not known, but where the set has groups of clients (mobility's home and work
    areas) they stand in their place as a reference. A fifth of each client's samples is held out,
    at random, or the last fifth where samples are in the order of time, with the set's gap left out
    before it. With `samples`, a client trains on at most so many, the first ones, and holds out a
    quarter as many.
    """

    name: ClassVar[str] = "natural"
    classified: ClassVar[bool] = False

    def check(self, source: Source, clients: int) -> None:
        """Raise UsageError beyond this scenario's own limits."""
        if source.train.owners is None:
            raise UsageError(
                "scenario 'natural' needs a data set whose samples belong to clients, as "
                f"femnist's do, not {source.name}"
            )
        known = len(np.unique(source.train.owners))
        if clients > known:
            raise UsageError(
                f"{source.name} here has {known} clients of its own, not {clients}: use at most "
                f"{known} clients"
            )

    def deal(
        self, source: Source, clients: int, samples: int | None, randomness: Randomness
    ) -> Partition:
        """Deal each chosen client's own samples."""
        owned = OwnedSamples.of(source)
        order = randomness.generator("scenario", "clients").permutation(len(owned.names))
        return owned.deal(np.sort(order[:clients]), samples, randomness)


@dataclass(frozen=True)
class OwnedSamples:
    """The owners of a pool's rows.

    Args:
        names: of the owners (o,).
        groups: the owners' reference groups (o,), where the pool has some.
        owner: the owner of each row (n,).
        gap: as in `Pool`; with one, each owner's rows are in the order of time.
    """

    names: NDArray[Any]
    groups: Labels | None
    owner: Labels
    gap: int | None

    @classmethod
    def of(cls, source: Source) -> OwnedSamples:
        """Return the owners of a source that has some."""
        pool = source.train
        assert pool.owners is not None
        names, first, owner = np.unique(pool.owners, return_index=True, return_inverse=True)
        groups = None
        if pool.groups is not None:
            _, number = np.unique(pool.groups[first], return_inverse=True)
            groups = number.reshape(-1)
        return cls(names, groups, owner.reshape(-1), pool.gap)

    def deal(self, chosen: Labels, samples: int | None, randomness: Randomness) -> Partition:
        """Deal the own samples of the chosen owners.

        Raises:
            UsageError: no sample is asked for.
        """
        if samples is not None and samples < 1:
            raise UsageError(f"a client trains on at least one sample, not {samples}")
        halved = [self._halves(owner, samples, randomness) for owner in chosen.tolist()]
        train = [kept for kept, _ in halved]
        test = [held for _, held in halved]
        clusters = None
        if self.groups is not None:
            clusters = numbered([self.groups[chosen]])
        names = tuple(str(self.names[owner]) for owner in chosen)
        return Partition(train, test, clusters, names)

    def _halves(
        self, owner: int, samples: int | None, randomness: Randomness
    ) -> tuple[Labels, Labels]:
        """Return an owner's rows to train on, and those that are held out."""
        rows = np.flatnonzero(self.owner == owner)
        held = len(rows) // 5
        if self.gap is None:
            draw = randomness.generator("scenario", "natural", str(self.names[owner]))
            rows = draw.permutation(rows)
            train, test = rows[held:], rows[:held]
        else:
            gap = self.gap if held else 0
            train = rows[: max(0, len(rows) - held - gap)]
            test = rows[len(rows) - held :]
        if samples is None or samples >= len(train):
            return train, test
        return train[:samples], test[: max(1, round(samples / 4))]


def _disjoint(stock: SampleSupply, clients: int, each: int, randomness: Randomness) -> list[Labels]:
    """Return subsets of equal size without a common row."""
    order = randomness.generator("scenario", "deal", stock.part).permutation(stock.rows)
    return [order[k * each : (k + 1) * each] for k in range(clients)]


def _overlapping(
    stock: SampleSupply, clients: int, each: int, randomness: Randomness
) -> list[Labels]:
    """Return subsets of equal size, drawn for each client alone."""
    rows_of = []
    for client in range(clients):
        draw = randomness.generator("scenario", "deal", stock.part, "shared", client)
        rows_of.append(draw.permutation(stock.rows)[:each])
    return rows_of


def too_many(source: Source, pool: int, clients: int, most: int, samples: int | None) -> UsageError:
    """Return the error for more samples than `most` per client.

    Args:
        source: named in the error.
        pool: samples in all.
        clients: that share them.
        most: samples per client that there are.
        samples: that the user asked for; None where there is none for each client.
    """
    held = f"{source.name} has {pool} samples: {clients} clients can train on at most {most} each"
    if samples is None:
        return UsageError(f"{held}: use fewer clients")
    return UsageError(f"{held}, not {samples}")
