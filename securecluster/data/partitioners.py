"""Who gets which samples."""

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
        """Adds this scenario's own limit."""
        super().check(source, clients)
        if self.clusters != 1:
            raise UsageError(
                f"scenario 'iid' has one cluster, not {self.clusters}: use --clusters 1, or "
                "another scenario"
            )

    def deal(
        self, source: Source, clients: int, samples: int | None, randomness: Randomness
    ) -> Partition:
        """Random subsets of equal size."""
        deal = self._shared if self.overlap else self._pool if source.test is None else self._pools
        return Partition(*deal(source, clients, samples, randomness), np.zeros(clients, np.int64))

    def _pool(
        self, source: Source, clients: int, samples: int | None, randomness: Randomness
    ) -> tuple[list[Labels], list[Labels]]:
        pool = len(source.train.y)
        if samples is None:
            each = pool // clients
            train, test = each - round(each / 5), round(each / 5)
        else:
            train, test = samples, max(1, round(samples / 4))
        if train < 1 or (train + test) * clients > pool:
            raise too_many(source, pool, clients, pool // clients * 4 // 5, samples)
        order = randomness.generator("scenario", "deal").permutation(pool)
        hands = [order[k * (train + test) :][: train + test] for k in range(clients)]
        return [hand[:train] for hand in hands], [hand[train:] for hand in hands]

    def _pools(
        self, source: Source, clients: int, samples: int | None, randomness: Randomness
    ) -> tuple[list[Labels], list[Labels]]:
        train, test = halves(source, randomness)
        most, held = len(train.y) // clients, len(test.y) // clients
        each = most if samples is None else samples
        if not 1 <= each <= most or not held:
            raise too_many(source, len(train.y), clients, most if held else 0, samples)
        if samples is not None:
            held = min(held, max(1, round(samples / 4)))
        return _subsets(train, clients, each, randomness), _subsets(test, clients, held, randomness)

    def _shared(
        self, source: Source, clients: int, samples: int | None, randomness: Randomness
    ) -> tuple[list[Labels], list[Labels]]:
        train, test = halves(source, randomness)
        if samples is None or not 1 <= samples <= len(train.y) or not len(test.y):
            raise UsageError(
                f"clients that may share samples of {source.name} train on 1 to {len(train.y)} "
                f"each, not {samples or 'all'}: say how many (samples, --samples)"
            )
        held = min(len(test.y), max(1, round(samples / 4)))
        return _drawn(train, clients, samples, randomness), _drawn(test, clients, held, randomness)


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
        """Adds this scenario's own limits."""
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
        """Each chosen client's own samples."""
        owned = OwnedSamples.of(source)
        chosen = np.sort(
            randomness.generator("scenario", "clients").permutation(len(owned.names))[:clients]
        )
        return owned.deal(chosen, samples, randomness)


@dataclass(frozen=True)
class OwnedSamples:
    """A pool's owners: names (o,) and reference groups (o,), and whose each row is (n,), in the
    order of time where there is a gap.
    """

    names: NDArray[Any]
    groups: Labels | None
    owner: Labels
    gap: int | None

    @classmethod
    def of(cls, source: Source) -> OwnedSamples:
        """The owners of a source that has some."""
        pool = source.train
        assert pool.owners is not None
        names, first, owner = np.unique(pool.owners, return_index=True, return_inverse=True)
        groups = (
            None
            if pool.groups is None
            else np.unique(pool.groups[first], return_inverse=True)[1].reshape(-1)
        )
        return cls(names, groups, owner.reshape(-1), pool.gap)

    def deal(self, chosen: Labels, samples: int | None, randomness: Randomness) -> Partition:
        """The own samples of the chosen owners.

        Raises:
            UsageError: no sample is asked for.
        """
        if samples is not None and samples < 1:
            raise UsageError(f"a client trains on at least one sample, not {samples}")
        halved = [self._halves(k, samples, randomness) for k in chosen.tolist()]
        clusters = None if self.groups is None else numbered([self.groups[chosen]])
        return Partition(
            [train for train, _ in halved],
            [test for _, test in halved],
            clusters,
            tuple(str(self.names[k]) for k in chosen),
        )

    def _halves(self, k: int, samples: int | None, randomness: Randomness) -> tuple[Labels, Labels]:
        rows = np.flatnonzero(self.owner == k)
        held = len(rows) // 5
        if self.gap is None:
            rows = randomness.generator("scenario", "natural", str(self.names[k])).permutation(rows)
            train, test = rows[held:], rows[:held]
        else:
            train, test = (
                rows[: max(0, len(rows) - held - (self.gap if held else 0))],
                rows[len(rows) - held :],
            )
        if samples is None or samples >= len(train):
            return train, test
        return train[:samples], test[: max(1, round(samples / 4))]


def _subsets(stock: SampleSupply, clients: int, each: int, randomness: Randomness) -> list[Labels]:
    order = randomness.generator("scenario", "deal", stock.part).permutation(stock.rows)
    return [order[k * each :][:each] for k in range(clients)]


def _drawn(stock: SampleSupply, clients: int, each: int, randomness: Randomness) -> list[Labels]:
    """Subsets that may overlap."""
    return [
        randomness.generator("scenario", "deal", stock.part, "shared", k).permutation(stock.rows)[
            :each
        ]
        for k in range(clients)
    ]


def too_many(source: Source, pool: int, clients: int, most: int, samples: int | None) -> UsageError:
    """The error for more samples than `most` per client, or where None were asked for and there is
    none.
    """
    return UsageError(
        f"{source.name} has {pool} samples: {clients} clients can train on at most {most} each"
        + (f", not {samples}" if samples is not None else ": use fewer clients")
    )
