"""Measure how well clients assign themselves by noisy sums, over ε of the clustering.

python -m securecluster.benchmarks.hidden [--seeds 3] [--minutes 10]

Four clusters of clients with 300 MNIST images each, of equal sizes, or the first one with 15 % of
the clients. ε is that of the four sums of clustering alone, for a whole client that is added or
removed, at δ = 1e-5; every cell has 8 draws of the noise. `right` is the share of clients whose
label is that of their true cluster, after the best matching of labels. `bound` is the largest share
that any labels can have that follow from the clients' replies to a server, by the same noise: its ε
is `replaced`, for a client that is replaced by another one. Clients that assign themselves tell
nobody, so the bound does not apply to them. The seeds are 20 and up: others were used to choose the
size of points and the shares of the budget. Skewed clients draw their labels by a Dirichlet
distribution (α = 1). MNIST is read from SECURECLUSTER_DATA or the hub.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache, lru_cache
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np

from securecluster import Dirichlet, Federation, Iid, LabelSwap, Rotation
from securecluster.benchmarks.papers.sheet import Cell, Row, Sheet, figure, options, summarise
from securecluster.clustering import noisy_centres
from securecluster.clustering.labels import Array
from securecluster.clustering.metrics import agreement
from securecluster.core.lazy_torch import torch
from securecluster.core.randomness import Randomness
from securecluster.privacy.dp.accounting import find_noise, gaussian_epsilon
from securecluster.protocols.hidden.class_means import ClassMeans
from securecluster.protocols.hidden.protocol import CELLS_PER_CLUSTER

CLUSTERS = 4
SAMPLES = 300
CLIENTS = (200, 1000)
EPSILONS = (0.5, 1.0, 2.0, 4.0, 8.0)
DELTA = 1e-5
DRAWS = 8
FIRST_SEED = 20
MINORITIES = (0.25, 0.15)  # share of the first cluster
TRANSFORMS: dict[str, Any] = {
    "label-swap": LabelSwap(clusters=CLUSTERS),
    "rotation": Rotation(clusters=CLUSTERS),
}
SIZE = 2 * CLUSTERS + 2  # of a point, as the protocol chooses it


def cells(seeds: int) -> list[Cell]:
    """Return clients by seed by labels by scenario by minority by ε.

    Args:
        seeds: how many.
    """
    grid: list[Cell] = []
    settings = product(CLIENTS, range(FIRST_SEED, FIRST_SEED + seeds), ("even", "skewed"))
    for clients, seed, labels in settings:
        if labels == "skewed" and clients != CLIENTS[0]:
            continue
        for scenario, minority, epsilon in product(TRANSFORMS, MINORITIES, EPSILONS):
            if labels == "skewed" and minority != MINORITIES[0]:
                continue
            cell = {
                "clients": clients,
                "labels": labels,
                "scenario": scenario,
                "minority": minority,
                "epsilon": epsilon,
                "seed": seed,
            }
            grid.append(cell)
    return grid


def measure(cell: Cell) -> dict[str, Any]:
    """Cluster clients by sums with several draws of noise.

    Args:
        cell: one of `cells`.

    Returns:
        Mean and lowest adjusted Rand index, mean share of clients with the right label, the same
        index without noise, and the bound on labels that follow from replies.
    """
    points, truth = points_of(
        cell["clients"], cell["labels"], cell["scenario"], cell["minority"], cell["seed"]
    )
    multiplier = noise_of(cell["epsilon"])
    found = []
    for draw in range(DRAWS):
        generator = Randomness(cell["seed"]).generator("noise", draw)
        found.append(assigned(points, CLUSTERS, multiplier, generator))
    indices = [agreement(labels, truth)["ari"] for labels in found]
    exact = assigned(points, CLUSTERS, 0.0, Randomness(0).generator())
    replaced = gaussian_epsilon(2 / multiplier, DELTA)
    return {
        "ari": float(np.mean(indices)),
        "lowest": min(indices),
        "right": float(np.mean([share_right(labels, truth) for labels in found])),
        "without_noise": agreement(exact, truth)["ari"],
        "replaced": replaced,
        "bound": bound(replaced, CLUSTERS, DELTA),
    }


def bound(epsilon: float, k: int, delta: float = 0.0) -> float:
    """Return the largest probability of a right label that follows from a private reply.

    docs/privacy.md has the proof.

    Args:
        epsilon: ε of the reply, for a client that is replaced by one of another cluster.
        k: number of equally likely clusters.
        delta: δ.
    """
    ratio = math.exp(epsilon)
    return (ratio + (k - 1) * delta) / (ratio + k - 1)


def share_right(labels: Sequence[int], truth: Sequence[int]) -> float:
    """Return the share of labels that are right after the best matching with true clusters."""
    from scipy.optimize import linear_sum_assignment

    pairs = np.zeros((CLUSTERS, CLUSTERS), dtype=np.int64)
    np.add.at(pairs, (np.asarray(labels), np.asarray(truth)), 1)
    rows, columns = linear_sum_assignment(-pairs)
    return float(pairs[rows, columns].sum() / len(truth))


@cache
def noise_of(epsilon: float) -> float:
    """Return the noise multiplier of the whole clustering."""
    return float(find_noise(lambda z: [(z, 1.0, 1)], epsilon, DELTA))


def assigned(points: Array, k: int, multiplier: float, generator: np.random.Generator) -> list[int]:
    """Return the labels that clients assign themselves, as the protocol's clients do.

    Args:
        points: (m, q) of norm 1.
        k: number of clusters.
        multiplier: noise multiplier of the four sums together; 0 adds no noise.
        generator: draws the noise.
    """
    deviations = [multiplier / math.sqrt(share) for share in noisy_centres.SHARES]

    def summed(rows: Array, deviation: float) -> Array:
        total = rows.sum(0)
        return np.asarray(total + deviation * generator.standard_normal(total.shape))

    r = k - 1
    mean = summed(points, deviations[0]) / len(points)
    directions = noisy_centres.directions_from(points, mean)
    moments = summed(noisy_centres.second_moments(directions), deviations[1])
    basis = noisy_centres.leading_directions(moments, r)
    places = noisy_centres.projections(directions, basis)
    book = noisy_centres.code_book(r, CELLS_PER_CLUSTER * k)
    reach = noisy_centres.CELL_REACH
    total = summed(noisy_centres.displacement_rows(places, book, reach), deviations[2])
    centres = noisy_centres.centres_from_cells(total, book, k, deviations[2], seed=0)
    reach = noisy_centres.STEP_REACH
    total = summed(noisy_centres.displacement_rows(places, centres, reach), deviations[3])
    centres = noisy_centres.moved_centres(total, centres, deviations[3])
    labels: list[int] = noisy_centres.nearest_centres(places, centres).tolist()
    return labels


@lru_cache(maxsize=1)
def dealt(clients: int, labels: str, seed: int) -> Federation:
    """Return clients that hold images of one distribution, or of skewed labels."""
    scenario: Any = Iid(overlap=True)
    if labels == "skewed":
        scenario = Dirichlet(alpha=1.0, overlap=True)
    return Federation.simulate(
        "mnist", scenario=scenario, clients=clients, samples=SAMPLES, seed=seed
    )


@lru_cache(maxsize=1)
def points_of(
    clients: int, labels: str, scenario: str, minority: float, seed: int
) -> tuple[Array, list[int]]:
    """Return the clients' points, (m, q) of norm 1, and their true clusters.

    Args:
        clients: m.
        labels: "even" or "skewed".
        scenario: one of `TRANSFORMS`.
        minority: share of the first cluster.
        seed: of the federation.
    """
    federation = dealt(clients, labels, seed)
    first = round(minority * clients)
    rest = [1 + i % (CLUSTERS - 1) for i in range(clients - first)]
    truth = [0] * first + rest
    sketch = ClassMeans(tuple(federation.shape), federation.classes, SIZE, seed)
    transform = TRANSFORMS[scenario]
    rows = []
    for cluster, shard in zip(truth, federation.shards, strict=True):
        x, y = transform.transform(cluster, shard.x, shard.y, federation.classes, Randomness(seed))
        rows.append(sketch.point(torch.as_tensor(np.ascontiguousarray(x)), y))
    return noisy_centres.unit(np.stack(rows)), truth


def main(argv: Sequence[str] | None = None) -> Path:
    """Measure what is missing, and print."""
    chosen = options(__doc__, argv)
    sheet = Sheet("hidden")
    rows = sheet.fill(cells(chosen.seeds), measure, chosen.minutes)
    by = ["clients", "labels", "scenario", "minority", "epsilon"]
    summarise(rows, by, ["ari", "right", "bound"])
    sheet.save(drawn(rows), chosen.scale)
    return sheet.path


def drawn(rows: Sequence[Row]) -> Any:
    """Return a figure of right labels over ε of a replaced client, and the bound as a line.

    Args:
        rows: of the sheet; those that were not run are left out.
    """
    picture, axes = figure(7.0, 3.2, columns=len(TRANSFORMS))
    line = np.linspace(0, 10, 101)
    for axis, scenario in zip(axes[0], TRANSFORMS, strict=True):
        for clients in CLIENTS:
            right: dict[float, list[float]] = {}
            for row in rows:
                wanted = (str(clients), "even", scenario)
                if (row["clients"], row["labels"], row["scenario"]) == wanted and row["right"]:
                    right.setdefault(float(row["replaced"]), []).append(float(row["right"]))
            epsilons = sorted(right)
            means = [float(np.mean(right[epsilon])) for epsilon in epsilons]
            axis.plot(epsilons, means, marker="o", label=f"{clients} clients, hidden")
        limit = [bound(epsilon, CLUSTERS) for epsilon in line]
        axis.plot(line, limit, color="black", linestyle="--", label="labels at a server, at most")
        axis.set_xlim(0, 10)
        axis.set_ylim(0.2, 1.02)
        axis.set_title(scenario)
        axis.set_xlabel("ε, for a replaced client")
        axis.set_ylabel("right labels")
    axes[0][0].legend(fontsize="small")
    return picture


if __name__ == "__main__":
    print(main())
