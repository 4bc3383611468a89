"""Measure how well clients assign themselves by noisy sums, over ε of the clustering.

python -m benchmarks.hidden [--seeds 3] [--minutes 10]

Four clusters of clients with 300 images each, of equal sizes, or the first one with 15 % of the
clients. ε is that of the four sums of clustering alone, for a whole client that is added or
removed, at δ = 1e-5; every cell has 8 draws of the noise. `right` is the share of clients whose
label is that of their true cluster, after the best matching of labels. `bound` is the largest share
that any labels can have that follow from the clients' replies to a server, by the same noise: its ε
is `replaced`, for a client that is replaced by another one. Clients that assign themselves tell
nobody, so the bound does not apply to them.

Two numbers without noise say what stops the clustering. `known_centres` is the index of labels by
the nearest of the true clusters' mean points: what is missing there, the points have lost.
`likelihood` is that of the most likely cluster by its class means, which are those of its other
clients: what is missing there, the samples do not tell to this classifier.

The seeds are 0 and up: 100 to 103 were used to choose the size of points, the shares of the budget
and the lengths of displacements, on MNIST alone. Skewed clients draw their labels by a Dirichlet
distribution (α = 1). Clients of all data sets draw from all images, femnist's from those of all
writers, which have fewer than 300 each. The data are read from SECURECLUSTER_DATA or the hub.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from functools import cache, lru_cache
from typing import Any

import numpy as np

from benchmarks.grid import Grid, product
from benchmarks.sheet import Cell, Row, figure
from securecluster import Dirichlet, Federation, Iid, LabelSwap, Rotation
from securecluster.clustering import noisy_centres
from securecluster.clustering.labels import Array
from securecluster.clustering.metrics import agreement
from securecluster.core.randomness import Randomness
from securecluster.privacy.dp.accounting import find_noise, gaussian_epsilon
from securecluster.protocols.hidden.class_means import ClassMeans
from securecluster.protocols.hidden.protocol import POINT_SIZE

CLUSTERS = 4
SAMPLES = 300
CLIENTS = (200, 1000)
# femnist's 100 writers have too few images for 1000 clients
SETTINGS = (
    ("mnist", 200),
    ("fashion_mnist", 200),
    ("femnist", 200),
    ("mnist", 1000),
    ("fashion_mnist", 1000),
)
EPSILONS = (0.5, 1.0, 2.0, 4.0)
DELTA = 1e-5
DRAWS = 8
MINORITIES = (0.25, 0.15)  # share of the first cluster
TRANSFORMS: dict[str, Any] = {
    "label-swap": LabelSwap(clusters=CLUSTERS),
    "rotation": Rotation(clusters=CLUSTERS),
}
SIZE = POINT_SIZE * CLUSTERS  # of a point, as the protocol chooses it


def cells(scale: str, seeds: int) -> list[Cell]:
    """Return data by labels by scenario by share of the first cluster by ε; there is one scale."""
    grid: list[Cell] = []
    for (data, clients), seed, labels in itertools.product(
        SETTINGS, range(seeds), ("even", "skewed")
    ):
        skewed = labels == "skewed"
        if skewed and clients != CLIENTS[0]:
            continue
        grid += product(
            data=[data],
            clients=[clients],
            labels=[labels],
            scenario=TRANSFORMS,
            minority=MINORITIES[:1] if skewed else MINORITIES,
            epsilon=EPSILONS,
            seed=[seed],
        )
    return grid


def measure(cell: Cell) -> dict[str, Any]:
    """Cluster clients by sums with several draws of noise.

    Args:
        cell: one of `cells`.

    Returns:
        Mean and lowest adjusted Rand index, mean share of clients with the right label, the same
        index without noise, with known centres and by likelihood, and the bound on labels that
        follow from replies.
    """
    points, truth, likely = points_of(
        cell["data"],
        cell["clients"],
        cell["labels"],
        cell["scenario"],
        cell["minority"],
        cell["seed"],
    )
    known = noisy_centres.nearest_centres(points, mean_points(points, truth))
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
        "known_centres": agreement(known.tolist(), truth)["ari"],
        "likelihood": agreement(likely, truth)["ari"],
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
    # of the sums of points, of moments, of cells and of a step
    of_points, of_moments, of_cells, of_step = (
        multiplier / math.sqrt(share) for share in noisy_centres.SHARES
    )

    def summed(rows: Array, deviation: float) -> Array:
        total = rows.sum(0)
        noise = generator.standard_normal(total.shape)
        return np.asarray(total + deviation * noise)

    r = k - 1
    mean = summed(points, of_points) / len(points)
    directions = noisy_centres.directions_from(points, mean)
    moments = summed(noisy_centres.second_moments(directions), of_moments)
    basis = noisy_centres.leading_directions(moments, r)
    places = noisy_centres.projections(directions, basis)
    count = noisy_centres.cells_for(k, len(points), of_cells)
    book = noisy_centres.code_book(r, count)
    rows = noisy_centres.displacement_rows(places, book, noisy_centres.CELL_REACH)
    total = summed(rows, of_cells)
    centres = noisy_centres.centres_from_cells(total, book, k, of_cells, seed=0)
    rows = noisy_centres.displacement_rows(places, centres, noisy_centres.STEP_REACH)
    total = summed(rows, of_step)
    centres = noisy_centres.moved_centres(total, centres, of_step)
    labels: list[int] = noisy_centres.nearest_centres(places, centres).tolist()
    return labels


def mean_points(points: Array, truth: Sequence[int]) -> Array:
    """Return the mean point of each true cluster, (k, q).

    Args:
        points: (m, q).
        truth: (m,) true clusters.
    """
    clusters = np.asarray(truth)
    means = [points[clusters == c].mean(0) for c in range(CLUSTERS)]
    return np.stack(means)


def most_likely(sums: Array, counts: Array, truth: Sequence[int]) -> list[int]:
    """Return the most likely cluster of each client, (m,), by the class means of all others.

    Samples of a class of a cluster are normal about a mean, with one variance for all numbers. The
    mean is that of the cluster's clients, without the one that is assigned.

    Args:
        sums: (m, c, f) of the clients' samples by class.
        counts: (m, c) numbers of samples.
        truth: (m,) true clusters.
    """
    members = np.eye(CLUSTERS)[np.asarray(truth)]
    total = np.einsum("mk,mcf->kcf", members, sums)
    number = members.T @ counts
    labels = []
    for own, own_counts, cluster in zip(sums, counts, truth, strict=True):
        others = total.copy()
        others[cluster] -= own
        others_number = number.copy()
        others_number[cluster] -= own_counts
        # a class that another cluster has no sample of tells nothing
        usable = (others_number > 0).all(0) & (own_counts > 0)
        means = others[:, usable] / others_number[:, usable, None]
        weights = own_counts[usable]
        own_means = own[usable] / weights[:, None]
        distances = ((own_means - means) ** 2).sum(2)
        costs = distances @ weights
        labels.append(int(costs.argmin()))
    return labels


@lru_cache(maxsize=1)
def dealt(data: str, clients: int, labels: str, seed: int) -> Federation:
    """Return clients that hold images of one distribution, or of skewed labels."""
    scenario: Any = Iid(overlap=True)
    if labels == "skewed":
        scenario = Dirichlet(alpha=1.0, overlap=True)
    return Federation.simulate(data, scenario=scenario, clients=clients, samples=SAMPLES, seed=seed)


@lru_cache(maxsize=1)
def points_of(
    data: str, clients: int, labels: str, scenario: str, minority: float, seed: int
) -> tuple[Array, list[int], list[int]]:
    """Return the clients' points, their true clusters, and their most likely ones.

    Args:
        data: name of the data set.
        clients: m.
        labels: "even" or "skewed".
        scenario: one of `TRANSFORMS`.
        minority: share of the first cluster.
        seed: of the federation.

    Returns:
        The points, (m, q) of norm 1, and twice (m,) clusters.
    """
    federation = dealt(data, clients, labels, seed)
    first = round(minority * clients)
    rest = [1 + i % (CLUSTERS - 1) for i in range(clients - first)]
    truth = [0] * first + rest
    classes = federation.classes
    sketch = ClassMeans(tuple(federation.shape), classes, SIZE, seed)
    transform = TRANSFORMS[scenario]
    points = []
    sums = []
    counts = []
    for cluster, shard in zip(truth, federation.shards, strict=True):
        x, y = transform.transform(cluster, shard.x, shard.y, classes, Randomness(seed))
        flat = np.reshape(x, (len(x), -1)).astype(np.float64)
        one_hot = np.eye(classes)[np.asarray(y)]
        sum_by_class = one_hot.T @ flat
        count_by_class = one_hot.sum(0)
        points.append(sketch.point_of(sum_by_class, count_by_class))
        sums.append(sketch.smooth(sum_by_class))
        counts.append(count_by_class)
    likely = most_likely(np.stack(sums), np.stack(counts), truth)
    units = noisy_centres.unit(np.stack(points))
    return units, truth, likely


def draw(rows: Sequence[Row]) -> Any:
    """Return a figure of right MNIST labels over ε of a replaced client, and the bound.

    Args:
        rows: of the sheet; those that were not run are left out.
    """
    picture, axes = figure(7.0, 3.2, columns=len(TRANSFORMS))
    line = np.linspace(0, 10, 101)
    for axis, scenario in zip(axes[0], TRANSFORMS, strict=True):
        for clients in CLIENTS:
            wanted = {
                "data": "mnist",
                "clients": str(clients),
                "labels": "even",
                "scenario": scenario,
                # the bound is for clusters of equal sizes
                "minority": "0.25",
            }
            right: dict[float, list[float]] = {}
            for row in rows:
                if wanted.items() <= row.items() and row.get("right"):
                    values = right.setdefault(float(row["replaced"]), [])
                    values.append(float(row["right"]))
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


GRID = Grid(
    __doc__,
    "hidden",
    cells,
    measure,
    by=["data", "clients", "labels", "scenario", "minority", "epsilon"],
    values=["ari", "right", "bound"],
    draw=draw,
)

if __name__ == "__main__":
    print(GRID.main())
