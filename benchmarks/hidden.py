"""Measure how well clients assign themselves by noisy sums, over ε of the clustering.

python -m benchmarks.hidden [--seeds 10] [--minutes 15]

Clients with images of their own: no two share one, so that ε, which is that of the four sums of
clustering alone for a whole client that is blanked at δ = 1e-5, is that of a client's images, too.
Each of `SETTINGS` names the clusters, their sizes, the images of a client and the skew of its
labels, which are drawn by a Dirichlet distribution for each client. Every cell has 4 draws of the
noise; `ari` and `separation` (`noisy_centres.separation`) are their means, `lowest` is the lowest
index, and `exact` the share of draws in which every client is right. `warned` is the share of draws
after which a run would say that the clusters are not told apart. `right` is the share of clients
whose label is that of their true cluster, after the best matching of labels. `bound` is the largest
share that any labels can have that follow from the clients' replies to a server, by the same noise:
its ε is `replaced`, for a client that is replaced by another one. Clients that assign themselves
tell nobody, so the bound does not apply to them.

Two numbers without privacy say what stops the clustering: `without_noise` is the index of the same
four sums as they are, and `oracle` that of k-means with 50 starts on the points themselves.

The seeds are 40 and up. On seeds 20 to 25 the number of cells and the threshold of the warning were
chosen, and on 100 to 103, with shared images of MNIST alone, the size of points, the shares of the
budget and the lengths of displacements. The data are read from SECURECLUSTER_DATA or the hub.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Any

import numpy as np

from benchmarks.grid import Grid, product, with_seeds
from benchmarks.sheet import Cell, Row, figure
from securecluster import Dirichlet, Federation, Iid, LabelPermutation, LabelSwap, Rotation
from securecluster.clustering import noisy_centres
from securecluster.clustering.labels import Array
from securecluster.clustering.metrics import agreement
from securecluster.core.randomness import Randomness
from securecluster.privacy.dp.accounting import find_noise, gaussian_epsilon
from securecluster.protocols.hidden.class_means import ClassMeans
from securecluster.protocols.hidden.protocol import POINT_SIZE
from securecluster.protocols.hidden.separation import APART

EVEN = (50, 50, 50, 50)


@dataclass(frozen=True)
class Setting:
    """Clusters of clients.

    Args:
        data: name of the data set.
        shift: how clusters differ, a name of `SHIFTS`.
        sizes: clients of each true cluster.
        samples: images of a client.
        told: k, the number of clusters that is told.
        alpha: of the Dirichlet distribution of a client's labels; None for equal labels.
    """

    data: str
    shift: str
    sizes: tuple[int, ...] = EVEN
    samples: int = 300
    told: int = 4
    alpha: float | None = None


SHIFTS: dict[str, Any] = {
    "swaps": LabelSwap,
    "permutations": LabelPermutation,
    "rotations": Rotation,
}
UNEQUAL = (13, 27, 53, 107)
SETTINGS = {
    "swaps": Setting("mnist", "swaps"),
    "rotations": Setting("mnist", "rotations"),
    "swaps, sizes 1:2:4:8": Setting("mnist", "swaps", UNEQUAL),
    "rotations, sizes 1:2:4:8": Setting("mnist", "rotations", UNEQUAL),
    "8 permutations": Setting("mnist", "permutations", (25,) * 8, told=8),
    "swaps, 100 images": Setting("mnist", "swaps", samples=100),
    # fewer images, since skewed clients cannot share out all images of every class
    "swaps, α = 1, 200 images": Setting("mnist", "swaps", samples=200, alpha=1.0),
    "swaps, α = 0.3, 200 images": Setting("mnist", "swaps", samples=200, alpha=0.3),
    "one cluster, k = 4": Setting("mnist", "swaps", (200,)),
    "fashion, swaps": Setting("fashion_mnist", "swaps"),
    "fashion, rotations": Setting("fashion_mnist", "rotations"),
    "fashion, one cluster, k = 4": Setting("fashion_mnist", "swaps", (200,)),
    "1000 clients, swaps, 60 images": Setting("mnist", "swaps", (250,) * 4, samples=60),
    "1000 clients, rotations, 60 images": Setting("mnist", "rotations", (250,) * 4, samples=60),
}
EPSILONS = (0.5, 1.0, 2.0, 4.0)
DELTA = 1e-5
DRAWS = 4
FIRST_SEED = 40
STARTS = 50  # of the oracle


def cells(scale: str, seeds: int) -> list[Cell]:
    """Return setting by ε by seed; there is one scale."""
    grid = product(setting=SETTINGS, epsilon=EPSILONS)
    settings = [{**cell, "clients": sum(SETTINGS[cell["setting"]].sizes)} for cell in grid]
    return with_seeds(settings, range(FIRST_SEED, FIRST_SEED + seeds))


def measure(cell: Cell) -> dict[str, Any]:
    """Cluster clients by sums with several draws of noise.

    Args:
        cell: one of `cells`.

    Returns:
        Mean and lowest adjusted Rand index, share of exact draws, mean share of clients with the
        right label, the index without noise and the oracle's, the separation, and the bound on
        labels that follow from replies.
    """
    k = SETTINGS[cell["setting"]].told
    points, truth = points_of(cell["setting"], cell["seed"])
    multiplier = noise_of(cell["epsilon"])
    found = []
    for draw in range(DRAWS):
        generator = Randomness(cell["seed"]).generator("noise", draw)
        found.append(clustered(points, k, multiplier, generator))
    indices = [agreement(labels, truth)["ari"] for labels, _ in found]
    separations = [separation for _, separation in found]
    exact = assigned(points, k, 0.0, Randomness(0).generator())
    replaced = gaussian_epsilon(2 / multiplier, DELTA)
    return {
        "ari": float(np.mean(indices)),
        "lowest": min(indices),
        "exact": float(np.mean([index == 1.0 for index in indices])),
        "right": float(np.mean([share_right(labels, truth, k) for labels, _ in found])),
        "separation": float(np.mean(separations)),
        "warned": float(np.mean([value < APART for value in separations])),
        "without_noise": agreement(exact, truth)["ari"],
        "oracle": oracle(points, truth, k),
        "replaced": replaced,
        "bound": bound(replaced, k, DELTA),
    }


def oracle(points: Array, truth: Sequence[int], k: int) -> float:
    """Return the index of k-means on the points themselves.

    Args:
        points: (m, q).
        truth: (m,) true clusters.
        k: number of clusters.
    """
    from sklearn.cluster import KMeans

    labels = KMeans(k, n_init=STARTS, random_state=0).fit_predict(points)
    return float(agreement(labels.tolist(), truth)["ari"])


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


def share_right(labels: Sequence[int], truth: Sequence[int], k: int) -> float:
    """Return the share of labels that are right after the best matching with true clusters."""
    from scipy.optimize import linear_sum_assignment

    pairs = np.zeros((k, k), dtype=np.int64)
    np.add.at(pairs, (np.asarray(labels), np.asarray(truth)), 1)
    rows, columns = linear_sum_assignment(-pairs)
    return float(pairs[rows, columns].sum() / len(truth))


@cache
def noise_of(epsilon: float) -> float:
    """Return the noise multiplier of the whole clustering."""
    return float(find_noise(lambda z: [(z, 1.0, 1)], epsilon, DELTA))


def assigned(points: Array, k: int, multiplier: float, generator: np.random.Generator) -> list[int]:
    """Return the labels of `clustered`."""
    labels, _ = clustered(points, k, multiplier, generator)
    return labels


def clustered(
    points: Array, k: int, multiplier: float, generator: np.random.Generator
) -> tuple[list[int], float]:
    """Return the labels that clients assign themselves, and the separation of the centres.

    Both are as in the protocol.

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
    return labels, noisy_centres.separation(centres, noisy_centres.counts_of(total))


@lru_cache(maxsize=1)
def points_of(setting: str, seed: int) -> tuple[Array, list[int]]:
    """Return the clients' points, (m, q) of norm 1, and their true clusters, (m,).

    Args:
        setting: a name of `SETTINGS`.
        seed: of the federation.
    """
    chosen = SETTINGS[setting]
    k = len(chosen.sizes)
    scenario: Any = Iid()
    if chosen.alpha is not None:
        scenario = Dirichlet(alpha=chosen.alpha)
    federation = Federation.simulate(
        chosen.data, scenario=scenario, clients=sum(chosen.sizes), samples=chosen.samples, seed=seed
    )
    truth: list[int] = np.repeat(range(k), chosen.sizes).tolist()
    classes = federation.classes
    size = POINT_SIZE * chosen.told
    sketch = ClassMeans(tuple(federation.shape), classes, size, seed)
    points = []
    for cluster, shard in zip(truth, federation.shards, strict=True):
        x, y = shard.x, shard.y
        if k > 1:
            shift = SHIFTS[chosen.shift](clusters=k)
            x, y = shift.transform(cluster, x, y, classes, Randomness(seed))
        flat = np.reshape(x, (len(x), -1)).astype(np.float64)
        one_hot = np.eye(classes)[np.asarray(y)]
        points.append(sketch.point_of(one_hot.T @ flat, one_hot.sum(0)))
    return noisy_centres.unit(np.stack(points)), truth


def draw(rows: Sequence[Row]) -> Any:
    """Return a figure of right labels over ε of a replaced client, and the bound.

    Args:
        rows: of the sheet; those that were not run are left out.
    """
    settings = ("swaps", "rotations")
    picture, axes = figure(7.0, 3.2, columns=len(settings))
    line = np.linspace(0, 10, 101)
    for axis, setting in zip(axes[0], settings, strict=True):
        for name in (setting, f"1000 clients, {setting}, 60 images"):
            right: dict[float, list[float]] = {}
            for row in rows:
                if row["setting"] == name and row.get("right"):
                    values = right.setdefault(float(row["replaced"]), [])
                    values.append(float(row["right"]))
            epsilons = sorted(right)
            means = [float(np.mean(right[epsilon])) for epsilon in epsilons]
            clients = sum(SETTINGS[name].sizes)
            axis.plot(epsilons, means, marker="o", label=f"{clients} clients, hidden")
        limit = [bound(epsilon, len(EVEN)) for epsilon in line]
        axis.plot(line, limit, color="black", linestyle="--", label="labels at a server, at most")
        axis.set_xlim(0, 10)
        axis.set_ylim(0.2, 1.02)
        axis.set_title(setting)
        axis.set_xlabel("ε, for a replaced client")
        axis.set_ylabel("right labels")
    axes[0][0].legend(fontsize="small")
    return picture


GRID = Grid(
    __doc__,
    "hidden",
    cells,
    measure,
    by=["setting", "epsilon"],
    values=["ari", "exact", "oracle", "separation"],
    seeds=10,
    minutes=15.0,
    draw=draw,
)

if __name__ == "__main__":
    print(GRID.main())
