"""What the scripts for Ali & Arafa 2024 share: R from clients' features, and training in one-shot
or random clusters.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from securecluster import Federation
from securecluster.benchmarks.papers.cfl_runs import training
from securecluster.benchmarks.papers.sheet import Cell, Row, figure, numbers
from securecluster.clustering.eigenvectors import projected, relevance, top
from securecluster.clustering.metrics import agreement
from securecluster.core.randomness import Randomness
from securecluster.data.datasets import Source, source
from securecluster.data.scenarios import Tasks
from securecluster.errors import UsageError
from securecluster.protocols import OneShot
from securecluster.protocols.oneshot.feature_maps import build
from securecluster.protocols.oneshot.server import ClusteringResult, agglomerate
from securecluster.runtime.run import Line
from securecluster.runtime.server_channel import ServerChannel

Array = NDArray[np.float64]
# of one shape, for pca
PUBLIC = {
    "cifar10": "cifar100",
    "fashion_mnist": "mnist",
    "mnist": "fashion_mnist",
}


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
    phi = build(features, clients[0].shape[1:], Randomness(seed), public)
    return [phi(torch.from_numpy(x)) for x in clients]


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
    images = [projected(x, flat).view(m, largest) for x in features]
    r = np.empty((len(counts), m, m))
    for n, p in enumerate(counts):
        for i, (values, _) in enumerate(spectra):
            row = relevance(values[:p], images[i][:, :p], shared=present[:, :p])
            r[n, i] = row.numpy()
    symmetric = (r + r.transpose(0, 2, 1)) / 2
    return np.asarray(symmetric, dtype=np.float64)


def parts(r: Array, truth: Sequence[int]) -> tuple[Array, Array]:
    """Return R's values of all pairs of clients within a task, and across tasks.

    Args:
        r: R, (..., m, m).
        truth: the clients' tasks, (m,).
    """
    tasks = np.array(truth)
    first, second = np.triu_indices(len(truth), 1)
    same = np.equal(tasks[first], tasks[second])
    within = r[..., first[same], second[same]]
    across = r[..., first[~same], second[~same]]
    return within, across


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
    if across.size:
        results["across"] = across.mean()
        results["across_max"] = across.max()
    for name, count in (("exact", len(set(truth))), ("exact_without_T", None)):
        labels = agglomerate(count, None)(torch.from_numpy(r)).labels
        results[name] = agreement(labels, truth)["exact"]
    return results


def usable(cells: Sequence[Cell]) -> list[Cell]:
    """Return the cells whose features can be made here, and print what is missing.

    resnet18 needs weights.
    """
    try:
        if any(cell["features"] == "resnet18" for cell in cells):
            build("resnet18", (3, 32, 32), Randomness(0))
    except UsageError as error:
        print(error)
        return [cell for cell in cells if cell["features"] != "resnet18"]
    return list(cells)


@dataclass
class Watched(OneShot):
    """One-shot clustering whose observer adds the mean accuracy of each task's users."""

    def observe(
        self, federation: Federation, client: Any, state: Any, accuracy: NDArray[np.float64]
    ) -> Line:
        """Add `by_truth`, a list over tasks."""
        truth = federation.truth
        assert truth is not None
        by_truth = [float(np.nanmean(accuracy[np.equal(truth, c)])) for c in sorted(set(truth))]
        return {**super().observe(federation, client, state, accuracy), "by_truth": by_truth}


@dataclass
class RandomTasks(Watched):
    """The paper's baseline: clusters as large as the tasks that pay no heed to R, and the same
    hierarchical training.
    """

    sizes = tuple[int, ...]()  # without an annotation, so no hyper-parameter

    def _cluster(self, net: ServerChannel) -> ClusteringResult:
        clustering = super()._cluster(net)
        labels = np.repeat(np.arange(len(self.sizes)), self.sizes)
        drawn = net.randomness.generator("server", "clusters").permutation(labels)
        return replace(clustering, labels=[int(c) for c in drawn])


CLUSTERS: dict[str, type[Watched]] = {"one-shot": Watched, "random": RandomTasks}


def trained(cell: Cell) -> dict[str, Any]:
    """Return accuracy by task over rounds (`task_0` …) and in the last round (`last_0` …).

    `exact` and `ari` compare the clusters with the tasks.
    """
    scenario = Tasks(minority=cell["minority"])
    federation = Federation.simulate(
        cell["data"],
        scenario=scenario,
        clients=cell["clients"],
        samples=cell["samples"],
        seed=cell["seed"],
    )
    assert federation.truth is not None
    sizes = tuple(np.bincount(federation.truth).tolist())
    protocol = CLUSTERS[cell["clusters"]](
        **training(cell),
        gps_every=cell["gps_every"],
        features=cell["features"],
        tasks=len(sizes),
        mask="none",
    )
    if isinstance(protocol, RandomTasks):
        protocol.sizes = sizes
    fitted = protocol.fit(federation)
    assert fitted.agreement_ is not None
    over = np.array([line["by_truth"] for line in fitted.history_])
    return {
        "exact": fitted.agreement_["exact"],
        "ari": fitted.agreement_["ari"],
        **{f"last_{k}": curve[-1] for k, curve in enumerate(over.T)},
        **{f"task_{k}": curve for k, curve in enumerate(over.T)},
    }


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
        texts = []
        for name in CLUSTERS:
            finished = [row for row in rows if row["clusters"] == name and row.get(f"last_{k}")]
            last = [float(row[f"last_{k}"]) for row in finished]
            if last:
                variance = f"variance {np.var(last):.1e}, {len(last)} runs"
                texts.append(f"{name} {np.mean(last):.3f} ({variance})")
        lines.append(f"{task}: {', '.join(texts)}")
    return lines


def curves(rows: Sequence[Row], tasks: Sequence[str]) -> Any:
    """Draw accuracy over rounds, with a panel for each task: the mean of the runs and their spread.

    Args:
        rows: the rows.
        tasks: the tasks' names.
    """
    picture, axes = figure(4.2 * len(tasks), 3.6, columns=len(tasks))
    for k, (axis, task) in enumerate(zip(axes.flat, tasks, strict=True)):
        for n, name in enumerate(CLUSTERS):
            finished = [row for row in rows if row["clusters"] == name and row.get(f"task_{k}")]
            if not finished:
                continue
            lines = np.array([numbers(row[f"task_{k}"]) for row in finished])
            rounds = range(1, 1 + lines.shape[1])
            mean = lines.mean(0)
            deviation = lines.std(0)
            axis.plot(rounds, mean, color=f"C{n}", label=f"{name} clusters")
            axis.fill_between(
                rounds,
                mean - deviation,
                mean + deviation,
                color=f"C{n}",
                alpha=0.2,
                linewidth=0,
            )
        axis.set(title=task, xlabel="global round", ylabel="accuracy of the task's users")
        axis.legend(fontsize=8)
    return picture
