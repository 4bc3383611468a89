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
    """A data set whose tasks have so many users each, where `users` is given."""
    given = source(data)
    return (
        given
        if users is None
        else replace(
            given,
            tasks=tuple(replace(t, clients=n) for t, n in zip(given.tasks, users, strict=True)),
        )
    )


def mapped(
    clients: Sequence[NDArray[np.float32]], features: str, data: str, seed: int
) -> list[torch.Tensor]:
    """Φ of each client's samples, by name."""
    phi = build(
        features,
        clients[0].shape[1:],
        Randomness(seed),
        PUBLIC[data] if features == "pca" else None,
    )
    return [phi(torch.from_numpy(x)) for x in clients]


def matrices(features: Sequence[torch.Tensor], counts: Sequence[int]) -> Array:
    """R for each number of shared eigenvectors, (len(counts), m, m), from clients' features (n_i,
    D).
    """
    most, m = max(counts), len(features)
    spectra = [top(x, most) for x in features]
    vectors = torch.stack([own for _, own in spectra])
    images = [projected(x, vectors.flatten(0, 1)).view(m, most) for x in features]
    there = vectors.any(-1)
    r = np.empty((len(counts), m, m))
    for n, p in enumerate(counts):
        for i, ((values, _), image) in enumerate(zip(spectra, images, strict=True)):
            r[n, i] = relevance(values[:p], image[:, :p], shared=there[:, :p]).numpy()
    return np.asarray((r + r.transpose(0, 2, 1)) / 2, dtype=np.float64)


def parts(r: Array, truth: Sequence[int]) -> tuple[Array, Array]:
    """R's values of all pairs of clients within a task, and across tasks; r is (..., m, m)."""
    a, b = np.triu_indices(len(truth), 1)
    same = np.equal(np.array(truth)[a], np.array(truth)[b])
    return r[..., a[same], b[same]], r[..., a[~same], b[~same]]


def judged(r: Array, truth: Sequence[int]) -> dict[str, Any]:
    """How far R (m, m) tells tasks apart, and whether its clusters are the tasks, with T given and
    without.
    """
    within, across = parts(r, truth)
    labels = {
        name: agglomerate(t, None)(torch.from_numpy(r)).labels
        for name, t in (("exact", len(set(truth))), ("exact_without_T", None))
    }
    return {
        "within": within.mean(),
        "within_min": within.min(),
        "across": across.mean() if across.size else None,
        "across_max": across.max() if across.size else None,
        **{name: agreement(own, truth)["exact"] for name, own in labels.items()},
    }


def usable(cells: Sequence[Cell]) -> list[Cell]:
    """The cells whose features can be made here: resnet18 needs weights; says what is missing."""
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
        """Adds `by_truth`, a list over tasks."""
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
        found = super()._cluster(net)
        labels = np.repeat(np.arange(len(self.sizes)), self.sizes)
        drawn = net.randomness.generator("server", "clusters").permutation(labels)
        return replace(found, labels=[int(c) for c in drawn])


CLUSTERS: dict[str, type[Watched]] = {"one-shot": Watched, "random": RandomTasks}


def trained(cell: Cell) -> dict[str, Any]:
    """Accuracy by task over rounds (`task_0` …), in the last round (`last_0` …), and whether the
    clusters were the tasks.
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
    """One sentence a task: mean and variance over runs of the last round's accuracy, of both."""
    lines = []
    for k, task in enumerate(tasks):
        last = {
            name: [
                float(row[f"last_{k}"])
                for row in rows
                if row["clusters"] == name and row.get(f"last_{k}")
            ]
            for name in CLUSTERS
        }
        text = [
            f"{name} {np.mean(own):.3f} (variance {np.var(own):.1e}, {len(own)} runs)"
            for name, own in last.items()
            if own
        ]
        lines.append(f"{task}: {', '.join(text)}")
    return lines


def curves(rows: Sequence[Row], tasks: Sequence[str]) -> Any:
    """Accuracy over rounds, a panel a task: the mean of the runs, with their spread."""
    made, axes = figure(4.2 * len(tasks), 3.6, columns=len(tasks))
    for k, (place, task) in enumerate(zip(axes.flat, tasks, strict=True)):
        for n, name in enumerate(CLUSTERS):
            runs = [
                numbers(row[f"task_{k}"])
                for row in rows
                if row["clusters"] == name and row.get(f"task_{k}")
            ]
            if not runs:
                continue
            lines, over = np.array(runs), range(1, 1 + len(runs[0]))
            place.plot(over, lines.mean(0), color=f"C{n}", label=f"{name} clusters")
            place.fill_between(
                over,
                lines.mean(0) - lines.std(0),
                lines.mean(0) + lines.std(0),
                color=f"C{n}",
                alpha=0.2,
                linewidth=0,
            )
        place.set(title=task, xlabel="global round", ylabel="accuracy of the task's users")
        place.legend(fontsize=8)
    return made
