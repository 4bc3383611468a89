"""Dealings that give clients some labels more than others."""

from __future__ import annotations

import math
from abc import abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from securecluster.core.randomness import Randomness
from securecluster.data.allocation import (
    SampleSupply,
    Shares,
    Wanted,
    amount,
    halves,
    hand_out,
    held_out,
)
from securecluster.data.datasets import Source
from securecluster.data.partitioners import too_many
from securecluster.data.pools import Labels
from securecluster.data.scenario_base import Partition, Partitioner, spread
from securecluster.errors import UsageError


class ByLabel(Partitioner):
    """Dealings that give each client shares of the labels."""

    overlap: bool

    @abstractmethod
    def wanted(
        self, source: Source, clients: int, randomness: Randomness
    ) -> tuple[Labels, Shares, Shares]:
        """True clusters (m,), shares (m, K) of the labels, and relative numbers of samples (m,)."""
        ...

    def deal(
        self, source: Source, clients: int, samples: int | None, randomness: Randomness
    ) -> Partition:
        """Each client's shares, in training and held-out samples."""
        truth, shares, sizes = self.wanted(source, clients, randomness)
        wanted, (train, test) = Wanted(shares, sizes, self.overlap), halves(source, randomness)
        each = amount(source, wanted, train, samples, randomness)
        held = held_out(source, wanted, test, each, samples, randomness)
        return Partition(
            hand_out(train, wanted, each, randomness),
            hand_out(test, wanted, held, randomness),
            truth,
        )


@dataclass(frozen=True)
class Pathological(Partitioner):
    """A few labels per client (McMahan et al. 2017; Briggs et al. 2020).

    As printed (`clusters` None): samples sorted by label are cut into clients × labels shards of
        equal size, and each client gets
    `labels` of them; clients that hold the same set of labels are a true cluster. With `clusters`
    given (ours) there are that many disjoint groups of `labels` labels, and the clients of a
    cluster draw from its group.
    """

    name: ClassVar[str] = "pathological"
    labels: int = 2
    clusters: int | None = None
    overlap: bool = False

    def check(self, source: Source, clients: int) -> None:
        """Adds this scenario's own limits."""
        super().check(source, clients)
        if not 1 <= self.labels <= source.classes:
            raise UsageError(
                f"scenario 'pathological' gives each client 1 to {source.classes} of "
                f"{source.name}'s labels, not {self.labels}"
            )
        if self.clusters is None and self.overlap:
            raise UsageError(
                "scenario 'pathological' deals shards, which clients cannot share: give the number "
                "of clusters, or no overlap"
            )
        if self.labels * (self.clusters or 1) > source.classes:
            raise UsageError(
                f"{self.clusters} clusters with {self.labels} labels of their own need "
                f"{self.labels * (self.clusters or 1)} labels, and "
                f"{source.name} has {source.classes}: ask for fewer clusters or labels"
            )

    def deal(
        self, source: Source, clients: int, samples: int | None, randomness: Randomness
    ) -> Partition:
        """Shards, or groups of labels."""
        return (self._shards if self.clusters is None else self._groups)(
            source, clients, samples, randomness
        )

    def _groups(
        self, source: Source, clients: int, samples: int | None, randomness: Randomness
    ) -> Partition:
        order = randomness.generator("scenario", "labels").permutation(source.classes)
        windows = [
            order[k * self.labels : (k + 1) * self.labels] for k in range(self.clusters or 1)
        ]
        return _Windows(tuple(tuple(w.tolist()) for w in windows), self.overlap).deal(
            source, clients, samples, randomness
        )

    def _shards(
        self, source: Source, clients: int, samples: int | None, randomness: Randomness
    ) -> Partition:
        train, test = halves(source, randomness)
        size, rest = divmod(len(train.y) // clients if samples is None else samples, self.labels)
        if size < 1 or size * self.labels * clients > len(train.y):
            raise too_many(
                source,
                len(train.y),
                clients,
                len(train.y) // clients // self.labels * self.labels,
                samples,
            )
        if rest and samples is not None:
            raise UsageError(
                f"each client gets {self.labels} shards of equal size, which {samples} samples do "
                f"not make: use {samples - rest}"
            )
        hands = self._cut(train, clients, size, randomness)
        held = np.array(
            [np.bincount(source.train.y[hand], minlength=source.classes) for hand in hands]
        )
        truth = np.unique(held > 0, axis=0, return_inverse=True)[1].reshape(-1).astype(np.int64)
        wanted = Wanted(held / held.sum(axis=1, keepdims=True), np.ones(clients))
        each = held_out(source, wanted, test, size * self.labels, samples, randomness)
        return Partition(hands, hand_out(test, wanted, each, randomness), truth)

    def _cut(
        self, train: SampleSupply, clients: int, size: int, randomness: Randomness
    ) -> list[Labels]:
        draw = randomness.generator("scenario", "shards")
        chosen = draw.permutation(len(train.y))[: clients * self.labels * size]
        chosen = chosen[np.argsort(train.y[chosen], kind="stable")]
        shards = train.rows[chosen].reshape(clients * self.labels, size)
        dealt = shards[draw.permutation(len(shards))].reshape(clients, self.labels * size)
        return [draw.permutation(hand) for hand in dealt]


@dataclass(frozen=True)
class Dirichlet(ByLabel):
    """Shares of the labels drawn from Dir(alpha, …, alpha) (Hsu et al. 2019): the smaller alpha,
    the fewer labels dominate.

    Each client draws its own and so is a true cluster of its own; with `clusters` given, the
    clients of a cluster have the same shares.
    """

    name: ClassVar[str] = "dirichlet"
    alpha: float = 0.5
    clusters: int | None = None
    overlap: bool = False

    def check(self, source: Source, clients: int) -> None:
        """Adds this scenario's own limit."""
        super().check(source, clients)
        if not (math.isfinite(self.alpha) and self.alpha > 0):
            raise UsageError(f"scenario 'dirichlet' needs an alpha above 0, not {self.alpha}")

    def wanted(
        self, source: Source, clients: int, randomness: Randomness
    ) -> tuple[Labels, Shares, Shares]:
        """Shares as drawn."""
        truth = (
            np.arange(clients)
            if self.clusters is None
            else spread(np.zeros(clients, np.int64), self.clusters, randomness)
        )
        draw = randomness.generator("scenario", "dirichlet")
        shares = draw.dirichlet(np.full(source.classes, self.alpha), size=self.clusters or clients)
        return truth, shares[truth], np.ones(clients)


@dataclass(frozen=True)
class _Windows(ByLabel):
    """Clusters that hold given labels each, as frequent among themselves as in the pool."""

    windows: tuple[tuple[int, ...], ...]
    overlap: bool

    def wanted(
        self, source: Source, clients: int, randomness: Randomness
    ) -> tuple[Labels, Shares, Shares]:
        """A window for each cluster."""
        truth = spread(np.zeros(clients, np.int64), len(self.windows), randomness)
        shares = np.stack([within(source, window) for window in self.windows])
        return truth, shares[truth], np.ones(clients)


@dataclass(frozen=True)
class LabelSplit(Partitioner):
    """Each cluster holds a window of successive labels (Vardhan et al. 2024, Label CIFAR-10: the
    first and the last 7 of 10).

    `labels` is the width of a window, 0.7 of all where None is given; the windows' starts are
    spread evenly (ours for more than two). Labels that several windows share limit what can be
    dealt; with `overlap` clients may hold the same samples, as the paper's 4375 need.
    """

    name: ClassVar[str] = "label-split"
    clusters: int = 2
    labels: int | None = None
    overlap: bool = False

    def check(self, source: Source, clients: int) -> None:
        """Adds this scenario's own limits."""
        super().check(source, clients)
        width = self._width(source)
        if not 1 <= width <= source.classes:
            raise UsageError(
                f"scenario 'label-split' gives each client 1 to {source.classes} of "
                f"{source.name}'s labels, not {width}"
            )
        if self.clusters > source.classes - width + 1:
            raise UsageError(
                f"scenario 'label-split' has {source.classes - width + 1} different windows of "
                f"{width} of {source.classes} labels, "
                f"not {self.clusters}: ask for fewer clusters or labels"
            )

    def deal(
        self, source: Source, clients: int, samples: int | None, randomness: Randomness
    ) -> Partition:
        """A window for each cluster."""
        width = self._width(source)
        starts = np.round(np.linspace(0, source.classes - width, self.clusters)).astype(int)
        windows = tuple(tuple(range(start, start + width)) for start in starts.tolist())
        return _Windows(windows, self.overlap).deal(source, clients, samples, randomness)

    def _width(self, source: Source) -> int:
        return round(0.7 * source.classes) if self.labels is None else self.labels


@dataclass(frozen=True)
class Tasks(ByLabel):
    """Clients learn one of the data set's tasks, groups of labels, and hold a minority of samples
    of the others (Ali & Arafa 2024).

    Clients are apportioned to tasks as the data set says (Fashion-MNIST 5 : 3 : 2, else evenly).
    `sizes` are relative numbers of samples per client of each task (None: the data set's own,
    Fashion-MNIST 12 : 10 : 5, else equal); the largest get `samples`. Within a task, and within the
    minority, labels are as frequent as in the pool.
    """

    name: ClassVar[str] = "tasks"
    minority: float = 0.1
    sizes: tuple[float, ...] | None = None
    overlap: bool = False

    def check(self, source: Source, clients: int) -> None:
        """Adds this scenario's own limits."""
        super().check(source, clients)
        if not source.tasks:
            raise UsageError(
                f"scenario 'tasks' needs groups of labels, and none are defined for {source.name}: "
                "use another scenario"
            )
        if not 0 <= self.minority <= 0.5:
            raise UsageError(
                "the minority of a client's samples is a share between 0 and 0.5, not "
                f"{self.minority}"
            )
        if clients < len(source.tasks):
            raise UsageError(
                f"{len(source.tasks)} tasks of {source.name} need at least as many clients, not "
                f"{clients}"
            )
        if self.sizes is not None and (
            len(self.sizes) != len(source.tasks) or not all(0 < s < math.inf for s in self.sizes)
        ):
            raise UsageError(
                f"{source.name} has {len(source.tasks)} tasks, so their sizes are as many numbers "
                f"above 0, not {self.sizes}"
            )

    def wanted(
        self, source: Source, clients: int, randomness: Randomness
    ) -> tuple[Labels, Shares, Shares]:
        """A task for each client."""
        counts = apportion(clients, [t.clients for t in source.tasks])
        truth = randomness.generator("scenario", "truth").permutation(
            np.repeat(np.arange(len(counts)), counts)
        )
        sizes = np.array(self.sizes or [t.samples for t in source.tasks], np.float64)
        shares = np.stack([self._share(source, t.labels) for t in source.tasks])
        return truth, shares[truth], (sizes / sizes.max())[truth]

    def _share(self, source: Source, labels: tuple[int, ...]) -> Shares:
        others = tuple({label for task in source.tasks for label in task.labels} - set(labels))
        share = within(source, labels)
        return (
            (1 - self.minority) * share + self.minority * within(source, others)
            if others
            else share
        )


def within(source: Source, labels: tuple[int, ...]) -> Shares:
    """Shares (K,) of some labels, as frequent among themselves as in the train pool.

    Raises:
        UsageError: the pool has no sample of them.
    """
    counts = np.bincount(source.train.y, minlength=source.classes).astype(np.float64)
    chosen = np.zeros(source.classes)
    chosen[list(labels)] = counts[list(labels)]
    if not chosen.sum():
        raise UsageError(
            f"{source.name} here has no sample with a label among {sorted(labels)}: use the whole "
            "data set"
        )
    share: Shares = chosen / chosen.sum()
    return share


def apportion(clients: int, weights: list[float]) -> Labels:
    """Clients per group in proportion to weights, at least one each; largest remainders first."""
    ideal = clients * np.array(weights) / sum(weights)
    counts = np.maximum(1, np.floor(ideal)).astype(np.int64)
    while counts.sum() != clients:
        step = 1 if counts.sum() < clients else -1
        behind = step * (ideal - counts)
        counts[np.argmax(np.where(counts + step >= 1, behind, -np.inf))] += step
    return counts
