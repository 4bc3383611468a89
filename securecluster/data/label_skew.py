"""Partitioners with label skew: the shares of the labels differ between clients."""

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
from securecluster.data.scenario_base import Partition, Partitioner, even_clusters
from securecluster.errors import UsageError


class ByLabel(Partitioner):
    """Base class of partitioners that prescribe the shares of the labels of each client."""

    overlap: bool

    @abstractmethod
    def wanted(
        self, source: Source, clients: int, randomness: Randomness
    ) -> tuple[Labels, Shares, Shares]:
        """Return the target distribution of each client.

        Args:
            source: the data set, with K labels.
            clients: number of clients m.
            randomness: of the federation.

        Returns:
            True clusters (m,), shares of the labels (m, K), and relative numbers of samples (m,).
        """
        ...

    def deal(
        self, source: Source, clients: int, samples: int | None, randomness: Randomness
    ) -> Partition:
        """Assign each client training and test samples with the same shares of the labels."""
        truth, shares, sizes = self.wanted(source, clients, randomness)
        # one target for both, so clients are tested on the distribution that they train on
        target = Wanted(shares, sizes, self.overlap)
        train, test = halves(source, randomness)
        train_size = amount(source, target, train, samples, randomness)
        test_size = held_out(source, target, test, train_size, samples, randomness)
        train_rows = hand_out(train, target, train_size, randomness)
        test_rows = hand_out(test, target, test_size, randomness)
        return Partition(train_rows, test_rows, truth)


@dataclass(frozen=True)
class Pathological(Partitioner):
    """Partitioner that gives each client few labels (McMahan et al. 2017; Briggs et al. 2020).

    Without `clusters`, as in the papers, samples sorted by label are cut into clients × labels
    shards of equal size, and each client gets `labels` of them. Clients with the same set of labels
    form a true cluster. With `clusters` (not in the papers) there are that many disjoint groups of
    `labels` labels, and the clients of a cluster draw from its group.

    Args:
        labels: number of shards per client, or of labels per cluster.
        clusters: number of true clusters, or None.
        overlap: clients of a cluster may share samples; only with `clusters`.
    """

    name: ClassVar[str] = "pathological"
    labels: int = 2
    clusters: int | None = None
    overlap: bool = False

    def check(self, source: Source, clients: int) -> None:
        """Raise UsageError for more labels or clusters than the data set has labels for."""
        super().check(source, clients)
        if not 1 <= self.labels <= source.classes:
            raise UsageError(
                f"scenario 'pathological' gives each client 1 to {source.classes} of "
                f"{source.name}'s labels, not {self.labels}"
            )
        # shards are disjoint by construction
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
        """Assign each client shards, or samples of its cluster's labels."""
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
        """Assign each client samples of its cluster's random group of labels."""
        draw = randomness.generator("scenario", "labels")
        order = draw.permutation(source.classes).tolist()
        # consecutive slices of one random order are disjoint
        groups = []
        for cluster in range(clusters):
            start = cluster * self.labels
            group = order[start : start + self.labels]
            groups.append(tuple(group))
        partitioner = _Windows(tuple(groups), self.overlap)
        return partitioner.deal(source, clients, samples, randomness)

    def _shards(
        self, source: Source, clients: int, samples: int | None, randomness: Randomness
    ) -> Partition:
        """Assign each client `labels` shards, each of which has few labels."""
        train, test = halves(source, randomness)
        shard_size = self._shard_size(source, len(train.y), clients, samples)
        train_rows = self._draw_shards(train, clients, shard_size, randomness)
        counts = np.zeros((clients, source.classes), np.int64)
        for client, rows in enumerate(train_rows):
            labels = source.train.y[rows]
            counts[client] = np.bincount(labels, minlength=source.classes)
        # clients with the same set of labels form a true cluster
        has_label = counts > 0
        _, truth = np.unique(has_label, axis=0, return_inverse=True)
        # test samples have the shares of the labels that the training samples came to have
        shares = counts / counts.sum(axis=1, keepdims=True)
        target = Wanted(shares, np.ones(clients))
        train_size = shard_size * self.labels
        test_size = held_out(source, target, test, train_size, samples, randomness)
        test_rows = hand_out(test, target, test_size, randomness)
        truth = truth.reshape(-1).astype(np.int64)
        return Partition(train_rows, test_rows, truth)

    def _shard_size(self, source: Source, available: int, clients: int, samples: int | None) -> int:
        """Return the number of samples in a shard.

        Args:
            source: the data set, for errors.
            available: number of samples to train on.
            clients: number of clients.
            samples: number per client that the user asked for; None is the maximum.

        Raises:
            UsageError: too many samples, or a number that does not divide into shards.
        """
        maximum = available // clients
        requested = samples
        if requested is None:
            requested = maximum
        shard_size, remainder = divmod(requested, self.labels)
        if shard_size < 1 or shard_size * self.labels * clients > available:
            # the largest number that divides into equal shards
            maximum -= maximum % self.labels
            raise too_many(source, available, clients, maximum, samples)
        if remainder and samples is not None:
            raise UsageError(
                f"each client gets {self.labels} shards of equal size, which {samples} samples do "
                f"not make: use {samples - remainder}"
            )
        return shard_size

    def _draw_shards(
        self, supply: SampleSupply, clients: int, shard_size: int, randomness: Randomness
    ) -> list[Labels]:
        """Return the rows of each client: `labels` random shards of samples sorted by label."""
        draw = randomness.generator("scenario", "shards")
        shard_count = clients * self.labels
        # a random subset, where the shards do not take all samples
        order = draw.permutation(len(supply.y))
        positions = order[: shard_count * shard_size]
        by_label = np.argsort(supply.y[positions], kind="stable")
        sorted_rows = supply.rows[positions[by_label]]
        shards = sorted_rows.reshape(shard_count, shard_size)
        shuffled = shards[draw.permutation(shard_count)]
        shards_of_clients = shuffled.reshape(clients, self.labels * shard_size)
        return [draw.permutation(rows) for rows in shards_of_clients]


@dataclass(frozen=True)
class Dirichlet(ByLabel):
    """Partitioner with shares of the labels from Dir(alpha, …, alpha) (Hsu et al. 2019).

    Without `clusters` the shares are drawn for each client, which is then a true cluster of its
    own. With `clusters`, the clients of a cluster have the same shares.

    Args:
        alpha: concentration; the smaller it is, the fewer labels dominate.
        clusters: number of true clusters, or None.
        overlap: clients may share samples.
    """

    name: ClassVar[str] = "dirichlet"
    alpha: float = 0.5
    clusters: int | None = None
    overlap: bool = False

    def check(self, source: Source, clients: int) -> None:
        """Raise UsageError for an alpha that is not a positive number."""
        super().check(source, clients)
        _check_alpha(self)

    def wanted(
        self, source: Source, clients: int, randomness: Randomness
    ) -> tuple[Labels, Shares, Shares]:
        """Return shares of the labels that are drawn for each cluster."""
        if self.clusters is None:
            clusters = clients
            # no two clients have the same shares
            truth = np.arange(clients)
        else:
            clusters = self.clusters
            truth = even_clusters(clients, clusters, randomness)
        shares = _drawn(source, self.alpha, clusters, randomness)
        return truth, shares[truth], np.ones(clients)


@dataclass(frozen=True)
class ClientDirichlet(ByLabel):
    """Partitioner with label skew within clusters: each client's shares are from Dir(alpha, …).

    Clients have different shares of the labels and one task, so they are one true cluster; a
    transform beside it makes the clusters, as in `LabelSwap(4) + ClientDirichlet(0.5)`. `Dirichlet`
    takes the shares themselves for what clusters differ in.

    Args:
        alpha: concentration; the smaller it is, the fewer labels dominate.
        overlap: clients may share samples.
    """

    name: ClassVar[str] = "client-dirichlet"
    alpha: float = 0.5
    overlap: bool = False

    def check(self, source: Source, clients: int) -> None:
        """Raise UsageError for an alpha that is not a positive number."""
        super().check(source, clients)
        _check_alpha(self)

    def wanted(
        self, source: Source, clients: int, randomness: Randomness
    ) -> tuple[Labels, Shares, Shares]:
        """Return shares of the labels that are drawn for each client, and one cluster."""
        one_cluster = np.zeros(clients, np.int64)
        shares = _drawn(source, self.alpha, clients, randomness)
        return one_cluster, shares, np.ones(clients)


def _check_alpha(scenario: Dirichlet | ClientDirichlet) -> None:
    """Raise UsageError for an alpha that is not a positive number."""
    if not (math.isfinite(scenario.alpha) and scenario.alpha > 0):
        raise UsageError(f"scenario {scenario.name!r} needs an alpha above 0, not {scenario.alpha}")


def _drawn(source: Source, alpha: float, count: int, randomness: Randomness) -> Shares:
    """Return shares of the labels from Dir(alpha, …, alpha), (count, K)."""
    draw = randomness.generator("scenario", "dirichlet")
    concentration = np.full(source.classes, alpha)
    shares: Shares = draw.dirichlet(concentration, size=count)
    return shares


@dataclass(frozen=True)
class _Windows(ByLabel):
    """Partitioner that gives each cluster the samples of prescribed labels.

    Within a cluster, the labels have the same relative frequencies as in the train pool.

    Args:
        windows: the labels of each cluster.
        overlap: clients may share samples.
    """

    windows: tuple[tuple[int, ...], ...]
    overlap: bool

    def wanted(
        self, source: Source, clients: int, randomness: Randomness
    ) -> tuple[Labels, Shares, Shares]:
        """Return the shares of its cluster's window for each client."""
        truth = even_clusters(clients, len(self.windows), randomness)
        shares = [within(source, window) for window in self.windows]
        return truth, np.stack(shares)[truth], np.ones(clients)


@dataclass(frozen=True)
class LabelSplit(Partitioner):
    """Partitioner that gives each cluster a window of successive labels (Vardhan et al. 2024).

    The paper's Label CIFAR-10 has the first and the last 7 of 10 labels. The windows' starts are
    spread evenly (not in the paper for more than two). Labels that several windows share limit the
    number of samples per client, unless clients may share samples.

    Args:
        clusters: number of true clusters.
        labels: width of a window; None is 0.7 of all labels.
        overlap: clients may share samples, which the paper's 4375 samples per client need.
    """

    name: ClassVar[str] = "label-split"
    clusters: int = 2
    labels: int | None = None
    overlap: bool = False

    def check(self, source: Source, clients: int) -> None:
        """Raise UsageError for windows that the data set's labels do not allow."""
        super().check(source, clients)
        width = self._width(source)
        if not 1 <= width <= source.classes:
            raise UsageError(
                f"scenario 'label-split' gives each client 1 to {source.classes} of "
                f"{source.name}'s labels, not {width}"
            )
        # so many labels can be the first one of a window
        windows = source.classes - width + 1
        if self.clusters > windows:
            raise UsageError(
                f"scenario 'label-split' has {windows} different windows of {width} of "
                f"{source.classes} labels, not {self.clusters}: ask for fewer clusters or labels"
            )

    def deal(
        self, source: Source, clients: int, samples: int | None, randomness: Randomness
    ) -> Partition:
        """Assign each client samples of its cluster's window of labels."""
        width = self._width(source)
        positions = np.linspace(0, source.classes - width, self.clusters)
        starts = np.round(positions).astype(int).tolist()
        windows = []
        for start in starts:
            window = range(start, start + width)
            windows.append(tuple(window))
        partitioner = _Windows(tuple(windows), self.overlap)
        return partitioner.deal(source, clients, samples, randomness)

    def _width(self, source: Source) -> int:
        """Return the number of labels in a window."""
        if self.labels is None:
            # 7 of 10 labels in the paper
            return round(0.7 * source.classes)
        return self.labels


@dataclass(frozen=True)
class Tasks(ByLabel):
    """Partitioner by the data set's tasks, which are groups of labels (Ali & Arafa 2024).

    Each client has samples of one task, and a minority of samples of the other tasks. The numbers
    of clients per task follow the data set (Fashion-MNIST 5 : 3 : 2, else even). Within a task, and
    within the minority, labels have the same relative frequencies as in the train pool.

    Args:
        minority: share of samples of other tasks, from 0 to 0.5.
        sizes: relative numbers of samples per client of each task, where the largest is `samples`;
            None is the data set's own (Fashion-MNIST 12 : 10 : 5, else equal).
        overlap: clients may share samples.
    """

    name: ClassVar[str] = "tasks"
    minority: float = 0.1
    sizes: tuple[float, ...] | None = None
    overlap: bool = False

    def check(self, source: Source, clients: int) -> None:
        """Raise UsageError for a data set without tasks, or an invalid minority or size."""
        super().check(source, clients)
        if not source.tasks:
            raise UsageError(
                f"scenario 'tasks' needs groups of labels, and none are defined for {source.name}: "
                "use another scenario"
            )
        # beyond one half, the other tasks would be the majority
        if not 0 <= self.minority <= 0.5:
            raise UsageError(
                "the minority of a client's samples is a share between 0 and 0.5, not "
                f"{self.minority}"
            )
        tasks = len(source.tasks)
        if clients < tasks:
            raise UsageError(
                f"{tasks} tasks of {source.name} need at least as many clients, not {clients}"
            )
        if self.sizes is not None and not _are_sizes(self.sizes, tasks):
            raise UsageError(
                f"{source.name} has {tasks} tasks, so their sizes are as many numbers above 0, not "
                f"{self.sizes}"
            )

    def wanted(
        self, source: Source, clients: int, randomness: Randomness
    ) -> tuple[Labels, Shares, Shares]:
        """Return the shares and the size of its task for each client."""
        weights = [task.clients for task in source.tasks]
        counts = apportion(clients, weights)
        task_of_client = np.repeat(np.arange(len(counts)), counts)
        draw = randomness.generator("scenario", "truth")
        # a random order, so that a client's number does not determine its task
        truth = draw.permutation(task_of_client)
        sizes = self.sizes
        if not sizes:
            sizes = tuple(task.samples for task in source.tasks)
        relative_sizes = np.array(sizes, np.float64)
        relative_sizes /= relative_sizes.max()
        shares = [self._share(source, task.labels) for task in source.tasks]
        return truth, np.stack(shares)[truth], relative_sizes[truth]

    def _share(self, source: Source, labels: tuple[int, ...]) -> Shares:
        """Return the shares (K,) of a task's clients, including the minority of other labels."""
        all_labels: set[int] = set()
        for task in source.tasks:
            all_labels.update(task.labels)
        # labels that belong to no task are left out of the minority, too
        others = tuple(all_labels - set(labels))
        shares = within(source, labels)
        if not others:
            return shares
        shares_of_others = within(source, others)
        return (1 - self.minority) * shares + self.minority * shares_of_others


def _are_sizes(sizes: tuple[float, ...], tasks: int) -> bool:
    """Return True if there is one positive finite number for each task."""
    if len(sizes) != tasks:
        return False
    return all(0 < size < math.inf for size in sizes)


def within(source: Source, labels: tuple[int, ...]) -> Shares:
    """Return shares (K,) that are positive for some labels only.

    These labels have the same relative frequencies as in the train pool.

    Args:
        source: the data set, with K labels.
        labels: with positive shares.

    Raises:
        UsageError: the pool has no sample with one of the labels.
    """
    counts = np.bincount(source.train.y, minlength=source.classes)
    selected = list(labels)
    counts_within = np.zeros(source.classes)
    counts_within[selected] = counts[selected]
    if not counts_within.sum():
        raise UsageError(
            f"{source.name} here has no sample with a label among {sorted(labels)}: use the whole "
            "data set"
        )
    shares: Shares = counts_within / counts_within.sum()
    return shares


def apportion(clients: int, weights: list[float]) -> Labels:
    """Return the number of clients per group, in proportion to weights and at least 1.

    The largest-remainder method settles the difference between rounded counts and `clients`.

    Args:
        clients: number of clients, at least as many as groups.
        weights: of the groups.
    """
    ideal = clients * np.array(weights) / sum(weights)
    counts = np.maximum(1, np.floor(ideal)).astype(np.int64)
    while counts.sum() != clients:
        # the minimum of 1 may have made the sum too large
        step = -1
        if counts.sum() < clients:
            step = 1
        deficit = step * (ideal - counts)
        deficit[counts + step < 1] = -np.inf
        counts[np.argmax(deficit)] += step
    return counts
