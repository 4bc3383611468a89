"""Partitioners with label skew: clients hold some labels more than others."""

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
    """A partitioner that gives each client shares of the labels."""

    overlap: bool

    @abstractmethod
    def wanted(
        self, source: Source, clients: int, randomness: Randomness
    ) -> tuple[Labels, Shares, Shares]:
        """Return the shares of the labels that clients should get.

        Returns:
            True clusters (m,), shares (m, K), and relative numbers of samples (m,).
        """
        ...

    def deal(
        self, source: Source, clients: int, samples: int | None, randomness: Randomness
    ) -> Partition:
        """Deal each client its shares, in training and held-out samples."""
        truth, shares, sizes = self.wanted(source, clients, randomness)
        wanted = Wanted(shares, sizes, self.overlap)
        train, test = halves(source, randomness)
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
        """Raise UsageError beyond this scenario's own limits."""
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
        needed = self.labels * (self.clusters or 1)
        if needed > source.classes:
            raise UsageError(
                f"{self.clusters} clusters with {self.labels} labels of their own need "
                f"{needed} labels, and {source.name} has {source.classes}: ask for fewer clusters "
                "or labels"
            )

    def deal(
        self, source: Source, clients: int, samples: int | None, randomness: Randomness
    ) -> Partition:
        """Deal shards, or groups of labels where the number of clusters is given."""
        if self.clusters is None:
            return self._shards(source, clients, samples, randomness)
        return self._groups(self.clusters, source, clients, samples, randomness)

    def _groups(
        self,
        clusters: int,
        source: Source,
        clients: int,
        samples: int | None,
        randomness: Randomness,
    ) -> Partition:
        """Deal samples of a random group of labels to each cluster."""
        order = randomness.generator("scenario", "labels").permutation(source.classes).tolist()
        starts = range(0, clusters * self.labels, self.labels)
        groups = tuple(tuple(order[start : start + self.labels]) for start in starts)
        return _Windows(groups, self.overlap).deal(source, clients, samples, randomness)

    def _shards(
        self, source: Source, clients: int, samples: int | None, randomness: Randomness
    ) -> Partition:
        """Deal `labels` shards of successive labels to each client."""
        train, test = halves(source, randomness)
        most = len(train.y) // clients
        size, rest = divmod(most if samples is None else samples, self.labels)
        if size < 1 or size * self.labels * clients > len(train.y):
            most -= most % self.labels
            raise too_many(source, len(train.y), clients, most, samples)
        if rest and samples is not None:
            raise UsageError(
                f"each client gets {self.labels} shards of equal size, which {samples} samples do "
                f"not make: use {samples - rest}"
            )
        rows_of = self._cut(train, clients, size, randomness)
        labels_of = [source.train.y[rows] for rows in rows_of]
        counts = np.array([np.bincount(y, minlength=source.classes) for y in labels_of])
        # clients with the same set of labels are a true cluster
        _, truth = np.unique(counts > 0, axis=0, return_inverse=True)
        wanted = Wanted(counts / counts.sum(axis=1, keepdims=True), np.ones(clients))
        each = held_out(source, wanted, test, size * self.labels, samples, randomness)
        held = hand_out(test, wanted, each, randomness)
        return Partition(rows_of, held, truth.reshape(-1).astype(np.int64))

    def _cut(
        self, train: SampleSupply, clients: int, size: int, randomness: Randomness
    ) -> list[Labels]:
        """Return the rows of each client: `labels` shards of `size` samples, sorted by label."""
        draw = randomness.generator("scenario", "shards")
        count = clients * self.labels
        chosen = draw.permutation(len(train.y))[: count * size]
        by_label = chosen[np.argsort(train.y[chosen], kind="stable")]
        shards = train.rows[by_label].reshape(count, size)
        shuffled = shards[draw.permutation(count)]
        return [draw.permutation(rows) for rows in shuffled.reshape(clients, self.labels * size)]


@dataclass(frozen=True)
class Dirichlet(ByLabel):
    """Shares of the labels drawn from Dir(alpha, …, alpha) (Hsu et al. 2019).

    The smaller alpha, the fewer labels dominate. Each client draws its own shares and so is a true
    cluster of its own; with `clusters` given, the clients of a cluster have the same shares.
    """

    name: ClassVar[str] = "dirichlet"
    alpha: float = 0.5
    clusters: int | None = None
    overlap: bool = False

    def check(self, source: Source, clients: int) -> None:
        """Raise UsageError beyond this scenario's own limit."""
        super().check(source, clients)
        if not (math.isfinite(self.alpha) and self.alpha > 0):
            raise UsageError(f"scenario 'dirichlet' needs an alpha above 0, not {self.alpha}")

    def wanted(
        self, source: Source, clients: int, randomness: Randomness
    ) -> tuple[Labels, Shares, Shares]:
        """Return shares drawn for each cluster."""
        truth = np.arange(clients)
        if self.clusters is not None:
            truth = spread(np.zeros(clients, np.int64), self.clusters, randomness)
        draw = randomness.generator("scenario", "dirichlet")
        shares = draw.dirichlet(np.full(source.classes, self.alpha), size=self.clusters or clients)
        return truth, shares[truth], np.ones(clients)


@dataclass(frozen=True)
class _Windows(ByLabel):
    """A partitioner whose clusters hold given labels each.

    The labels are as frequent among themselves as in the pool.
    """

    windows: tuple[tuple[int, ...], ...]
    overlap: bool

    def wanted(
        self, source: Source, clients: int, randomness: Randomness
    ) -> tuple[Labels, Shares, Shares]:
        """Return the shares of one window for each cluster."""
        truth = spread(np.zeros(clients, np.int64), len(self.windows), randomness)
        shares = np.stack([within(source, window) for window in self.windows])
        return truth, shares[truth], np.ones(clients)


@dataclass(frozen=True)
class LabelSplit(Partitioner):
    """Each cluster holds a window of successive labels (Vardhan et al. 2024).

    The paper's Label CIFAR-10 has the first and the last 7 of 10. `labels` is the width of a
    window, 0.7 of all where None is given; the windows' starts are spread evenly (ours for more
    than two). Labels that several windows share limit what can be dealt; with `overlap` clients may
    hold the same samples, as the paper's 4375 need.
    """

    name: ClassVar[str] = "label-split"
    clusters: int = 2
    labels: int | None = None
    overlap: bool = False

    def check(self, source: Source, clients: int) -> None:
        """Raise UsageError beyond this scenario's own limits."""
        super().check(source, clients)
        width = self._width(source)
        if not 1 <= width <= source.classes:
            raise UsageError(
                f"scenario 'label-split' gives each client 1 to {source.classes} of "
                f"{source.name}'s labels, not {width}"
            )
        windows = source.classes - width + 1
        if self.clusters > windows:
            raise UsageError(
                f"scenario 'label-split' has {windows} different windows of {width} of "
                f"{source.classes} labels, not {self.clusters}: ask for fewer clusters or labels"
            )

    def deal(
        self, source: Source, clients: int, samples: int | None, randomness: Randomness
    ) -> Partition:
        """Deal the samples of one window to each cluster."""
        width = self._width(source)
        starts = np.round(np.linspace(0, source.classes - width, self.clusters)).astype(int)
        windows = tuple(tuple(range(start, start + width)) for start in starts.tolist())
        return _Windows(windows, self.overlap).deal(source, clients, samples, randomness)

    def _width(self, source: Source) -> int:
        """Return the number of labels in a window."""
        if self.labels is None:
            return round(0.7 * source.classes)
        return self.labels


@dataclass(frozen=True)
class Tasks(ByLabel):
    """Clients learn one of the data set's tasks, which are groups of labels (Ali & Arafa 2024).

    They hold a minority of samples of the other tasks. Clients are apportioned to tasks as the data
    set says (Fashion-MNIST 5 : 3 : 2, else evenly). `sizes` are relative numbers of samples per
    client of each task (None: the data set's own, Fashion-MNIST 12 : 10 : 5, else equal); the
    largest get `samples`. Within a task, and within the minority, labels are as frequent as in the
    pool.
    """

    name: ClassVar[str] = "tasks"
    minority: float = 0.1
    sizes: tuple[float, ...] | None = None
    overlap: bool = False

    def check(self, source: Source, clients: int) -> None:
        """Raise UsageError beyond this scenario's own limits."""
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
        if self.sizes is not None and not _are_sizes(self.sizes, len(source.tasks)):
            raise UsageError(
                f"{source.name} has {len(source.tasks)} tasks, so their sizes are as many numbers "
                f"above 0, not {self.sizes}"
            )

    def wanted(
        self, source: Source, clients: int, randomness: Randomness
    ) -> tuple[Labels, Shares, Shares]:
        """Return the shares of one task for each client."""
        counts = apportion(clients, [task.clients for task in source.tasks])
        in_order = np.repeat(np.arange(len(counts)), counts)
        truth = randomness.generator("scenario", "truth").permutation(in_order)
        sizes = np.array(self.sizes or [task.samples for task in source.tasks], np.float64)
        relative = sizes / sizes.max()
        shares = np.stack([self._share(source, task.labels) for task in source.tasks])
        return truth, shares[truth], relative[truth]

    def _share(self, source: Source, labels: tuple[int, ...]) -> Shares:
        """Return the shares (K,) of a task's clients, the minority of other labels included."""
        of_all_tasks: set[int] = set()
        for task in source.tasks:
            of_all_tasks.update(task.labels)
        others = tuple(of_all_tasks - set(labels))
        share = within(source, labels)
        if not others:
            return share
        return (1 - self.minority) * share + self.minority * within(source, others)


def _are_sizes(sizes: tuple[float, ...], tasks: int) -> bool:
    """Return whether there is one positive finite number for each task."""
    return len(sizes) == tasks and all(0 < size < math.inf for size in sizes)


def within(source: Source, labels: tuple[int, ...]) -> Shares:
    """Return shares (K,) of some labels, as frequent among themselves as in the train pool.

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
    """Return clients per group in proportion to weights, at least one each.

    Clients that are left go to the largest remainders.
    """
    ideal = clients * np.array(weights) / sum(weights)
    counts = np.maximum(1, np.floor(ideal)).astype(np.int64)
    while counts.sum() != clients:
        step = 1 if counts.sum() < clients else -1
        behind = step * (ideal - counts)
        allowed = counts + step >= 1
        counts[np.argmax(np.where(allowed, behind, -np.inf))] += step
    return counts
