"""Shared code of the scripts for Ali & Arafa 2024.

It computes R from clients' features, and trains in one-shot or random clusters.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from benchmarks.grid import federation_of
from benchmarks.papers.cfl.runs import training
from benchmarks.sheet import Cell, Row, figure, numbers
from benchmarks.table import SEEDED
from securecluster import Federation
from securecluster.clustering.eigenvectors import projected, relevance, top
from securecluster.clustering.metrics import agreement
from securecluster.core.randomness import Randomness
from securecluster.data.datasets import Source, source
from securecluster.data.federation import Shard
from securecluster.data.scenarios import Tasks
from securecluster.errors import UsageError
from securecluster.protocols import OneShot
from securecluster.protocols.common.observer import Observer
from securecluster.protocols.oneshot.feature_maps import build
from securecluster.protocols.oneshot.server import ClusteringResult, agglomerate
from securecluster.runtime.run import Line
from securecluster.runtime.server_channel import ServerChannel

Array = NDArray[np.float64]
# public data of the same shape as the clients', for pca
PUBLIC = {"cifar10": "cifar100", "fashion_mnist": "mnist", "mnist": "fashion_mnist"}


def dealt(data: str, users: Sequence[int] | None = None) -> Source:
    """Return a data set whose tasks have the given numbers of users.

    Args:
        data: the data set.
        users: users of each task; by default the data set's own.
    """
    data_set = source(data)
    if users is None:
        return data_set
    tasks = []
    for task, clients in zip(data_set.tasks, users, strict=True):
        tasks.append(replace(task, clients=clients))
    return replace(data_set, tasks=tuple(tasks))


def mapped(
    clients: Sequence[NDArray[np.float32]], features: str, data: str, seed: int
) -> list[torch.Tensor]:
    """Apply a feature map Φ to each client's samples.

    Args:
        clients: each one's samples, (n_i, ...).
        features: the name of Φ.
        data: the data set, which has a public one of the same shape for "pca".
        seed: the seed of a random Φ.

    Returns:
        Features, (n_i, D) each.
    """
    public = None
    if features == "pca":
        public = PUBLIC[data]
    shape = clients[0].shape[1:]
    phi = build(features, shape, Randomness(seed), public)
    return [phi(torch.from_numpy(x)) for x in clients]


def by_task(federation: Federation) -> tuple[list[Shard], list[int]]:
    """Return the clients' data and their tasks, with the clients of one task in a row.

    Args:
        federation: with true clusters, which are the tasks.
    """
    truth = federation.truth
    assert truth is not None
    order = sorted(range(len(federation)), key=truth.__getitem__)
    shards = [federation.shards[i] for i in order]
    tasks = [truth[i] for i in order]
    return shards, tasks


def matrices(features: Sequence[torch.Tensor], counts: Sequence[int]) -> Array:
    """Return R for each number of shared eigenvectors.

    Args:
        features: clients' features, (n_i, D) each.
        counts: numbers of shared eigenvectors.

    Returns:
        R, (len(counts), m, m).
    """
    m = len(features)
    largest = max(counts)
    spectra = [top(x, largest) for x in features]
    vectors = torch.stack([basis for _, basis in spectra])
    flat = vectors.flatten(0, 1)
    # eigenvectors beyond a client's rank are zero, and are not compared
    present = vectors.any(-1)
    # eq. 2: λ̂_k^(j) = ‖G_i·v_k^(j)‖, for all j and k at once
    images = [projected(x, flat).view(m, largest) for x in features]
    r = np.empty((len(counts), m, m))
    for n, p in enumerate(counts):
        shared = present[:, :p]
        for i, (values, _) in enumerate(spectra):
            image = images[i][:, :p]
            # eq. 3 and 4, with p and not d eigenvalues (the exponent 1/p is not in the paper)
            row = relevance(values[:p], image, shared=shared)
            r[n, i] = row.numpy()
    # eq. 5: the mean of both users' views
    transposed = r.transpose(0, 2, 1)
    return np.asarray((r + transposed) / 2, dtype=np.float64)


def parts(r: Array, truth: Sequence[int]) -> tuple[Array, Array]:
    """Return R's values of all pairs of clients within a task, and across tasks.

    Args:
        r: R, (..., m, m).
        truth: the clients' tasks, (m,).
    """
    tasks = np.array(truth)
    # each pair once, without the diagonal
    first, second = np.triu_indices(len(truth), 1)
    pairs = r[..., first, second]
    same = np.equal(tasks[first], tasks[second])
    return pairs[..., same], pairs[..., ~same]


def judged(r: Array, truth: Sequence[int]) -> dict[str, Any]:
    """Return how clearly R separates tasks, and if its clusters are the tasks.

    Args:
        r: R, (m, m).
        truth: the clients' tasks, (m,).

    Returns:
        R's means and extremes, and `exact` with T given and without.
    """
    within, across = parts(r, truth)
    results: dict[str, Any] = {
        "within": within.mean(),
        "within_min": within.min(),
        "across": None,
        "across_max": None,
    }
    # with one task there are no pairs across
    if across.size:
        results["across"] = across.mean()
        results["across_max"] = across.max()
    matrix = torch.from_numpy(r)
    counts = {"exact": len(set(truth)), "exact_without_T": None}
    for name, count in counts.items():
        labels = agglomerate(matrix, count, None).labels
        results[name] = agreement(labels, truth)["exact"]
    return results


def usable(cells: Sequence[Cell]) -> list[Cell]:
    """Return the cells whose features can be made here, and print what is missing.

    Args:
        cells: the cells; resnet18 needs weights.
    """
    pretrained = [cell for cell in cells if cell["features"] == "resnet18"]
    try:
        if pretrained:
            # of CIFAR-10's shape
            build("resnet18", (3, 32, 32), Randomness(0))
    except UsageError as error:
        print(error)
        return [cell for cell in cells if cell not in pretrained]
    return list(cells)


class TaskObserver(Observer):
    """The observer adds the mean accuracy of each task's users."""

    def observe(
        self, federation: Federation, client: Any, state: Any, accuracy: NDArray[np.float64]
    ) -> Line:
        """Add `by_truth`, a list over tasks.

        Args:
            federation: the clients' data and their tasks.
            client: the clients' side of the run.
            state: the server's state.
            accuracy: each client's test accuracy, (m,).
        """
        line = super().observe(federation, client, state, accuracy)
        truth = federation.truth
        assert truth is not None
        by_truth = []
        for c in sorted(set(truth)):
            members = np.equal(truth, c)
            # a client without test samples has no accuracy
            mean = np.nanmean(accuracy[members])
            by_truth.append(float(mean))
        return {**line, "by_truth": by_truth}


@dataclass
class Watched(OneShot):
    """One-shot clustering whose observer adds the mean accuracy of each task's users."""

    @property
    def observer(self) -> TaskObserver:
        """Return what the experimenter computes outside the protocol."""
        return TaskObserver(self)


@dataclass
class RandomTasks(Watched):
    """The paper's baseline: clusters as large as the tasks that do not depend on R, and the same
    hierarchical training.
    """

    # without an annotation, so that it is no hyper-parameter
    sizes = tuple[int, ...]()

    @classmethod
    def of_sizes(cls, sizes: tuple[int, ...]) -> type[RandomTasks]:
        """Return the baseline with clusters of given sizes.

        Args:
            sizes: clients of each task.
        """
        return type(cls.__name__, (cls,), {"sizes": sizes})

    def _cluster(self, net: ServerChannel) -> ClusteringResult:
        clustering = super()._cluster(net)
        tasks = np.arange(len(self.sizes))
        labels = np.repeat(tasks, self.sizes)
        rng = net.randomness.generator("server", "clusters")
        drawn = [int(c) for c in rng.permutation(labels)]
        return replace(clustering, labels=drawn)


CLUSTERS: dict[str, type[Watched]] = {"one-shot": Watched, "random": RandomTasks}


def trained(cell: Cell) -> dict[str, Any]:
    """Return accuracy by task over rounds (`task_0` …) and in the last round (`last_0` …).

    `exact` and `ari` compare the clusters with the tasks.

    Args:
        cell: the kind of clusters, and the setting of the run.
    """
    federation = federation_of(cell, Tasks(minority=cell["minority"]))
    assert federation.truth is not None
    sizes = tuple(np.bincount(federation.truth).tolist())
    protocol_class = CLUSTERS[cell["clusters"]]
    if issubclass(protocol_class, RandomTasks):
        protocol_class = protocol_class.of_sizes(sizes)
    protocol = protocol_class(
        **training(cell),
        gps_every=cell["gps_every"],
        features=cell["features"],
        tasks=len(sizes),
        mask="none",
    )
    fitted = protocol.fit(federation, SEEDED)
    agreement_with_tasks = fitted.agreement_
    assert agreement_with_tasks is not None
    results: dict[str, Any] = {
        "exact": agreement_with_tasks["exact"],
        "ari": agreement_with_tasks["ari"],
    }
    accuracies = np.array([line["by_truth"] for line in fitted.history_])
    for k, curve in enumerate(accuracies.T):
        results[f"last_{k}"] = curve[-1]
    for k, curve in enumerate(accuracies.T):
        results[f"task_{k}"] = curve
    return results


def compared(rows: Sequence[Row], tasks: Sequence[str]) -> list[str]:
    """Return a sentence for each task, with the last round's accuracy of both kinds of clusters.

    Args:
        rows: the rows.
        tasks: the tasks' names.

    Returns:
        Sentences with means and variances over runs.
    """
    lines = []
    for k, task in enumerate(tasks):
        column = f"last_{k}"
        texts = []
        for name in CLUSTERS:
            finished = _finished(rows, name, column)
            accuracies = [float(row[column]) for row in finished]
            if not accuracies:
                continue
            mean = np.mean(accuracies)
            # the paper claims a lower variance over runs than with random clusters
            variance = np.var(accuracies)
            runs = len(accuracies)
            texts.append(f"{name} {mean:.3f} (variance {variance:.1e}, {runs} runs)")
        joined = ", ".join(texts)
        lines.append(f"{task}: {joined}")
    return lines


def _finished(rows: Sequence[Row], clusters: str, value: str) -> list[Row]:
    """Return the rows of one kind of clusters that have a value.

    Args:
        rows: the rows.
        clusters: a name of `CLUSTERS`.
        value: the value's column.
    """
    return [row for row in rows if row["clusters"] == clusters and row.get(value)]


def curves(rows: Sequence[Row], tasks: Sequence[str]) -> Any:
    """Draw accuracy over rounds, with a panel for each task: the mean of the runs and their spread.

    Args:
        rows: the rows.
        tasks: the tasks' names.
    """
    columns = len(tasks)
    picture, axes = figure(4.2 * columns, 3.6, columns=columns)
    for k, (axis, task) in enumerate(zip(axes.flat, tasks, strict=True)):
        column = f"task_{k}"
        for n, name in enumerate(CLUSTERS):
            finished = _finished(rows, name, column)
            if not finished:
                continue
            lines = np.array([numbers(row[column]) for row in finished])
            rounds = range(1, 1 + lines.shape[1])
            mean = lines.mean(0)
            deviation = lines.std(0)
            colour = f"C{n}"
            axis.plot(rounds, mean, color=colour, label=f"{name} clusters")
            lower = mean - deviation
            upper = mean + deviation
            axis.fill_between(rounds, lower, upper, color=colour, alpha=0.2, linewidth=0)
        axis.set(title=task, xlabel="global round", ylabel="accuracy of the task's users")
        axis.legend(fontsize=8)
    return picture
