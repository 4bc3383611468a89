"""Measure how well clients assign themselves by noisy sums, over ε of the clustering.

python -m benchmarks.private.hidden [--seeds 10] [--minutes 15]

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
`told_labels` bounds what sums can do: a server that is told the true labels, the directions in
which the clusters differ and their sizes releases one sum of the points of each cluster, with the
whole budget; clients take the nearest of these means.

Columns that begin with `residual` are the same of points from which the mean parts of their classes
are subtracted (`--residuals`): the means have one more sum. `gain` is what `residual` has more
than `ari`.

The seeds are 200 and up. On seeds 20 to 25 the number of cells and the threshold of the warning
were chosen, on 100 to 103, with shared images of MNIST alone, the size of points, the shares of the
budget and the lengths of displacements, and on 100 to 109 the shares with residuals. The data are
read from SECURECLUSTER_DATA or the hub.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Any

import numpy as np

from benchmarks.grid import Grid, product, with_seeds
from benchmarks.sheet import Cell
from securecluster import Federation, Iid, LabelPermutation, LabelSwap, Rotation
from securecluster.clustering import noisy_centres
from securecluster.clustering.labels import Array
from securecluster.clustering.metrics import agreement
from securecluster.core.randomness import Randomness
from securecluster.privacy.dp.accounting import find_noise, gaussian_epsilon
from securecluster.protocols.hidden.class_means import ClassMeans
from securecluster.protocols.hidden.protocol import POINT_SIZE
from securecluster.protocols.hidden.separation import hardly_apart

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
    "swaps (1:2:4:8)": Setting("mnist", "swaps", UNEQUAL),
    "8 permutations": Setting("mnist", "permutations", (25,) * 8, told=8),
    "swaps (100 images)": Setting("mnist", "swaps", samples=100),
    # fewer images, since skewed clients cannot share out all images of every class
    "swaps (α = 1)": Setting("mnist", "swaps", samples=200, alpha=1.0),
    "swaps (α = 0.3)": Setting("mnist", "swaps", samples=200, alpha=0.3),
    "one cluster": Setting("mnist", "swaps", (200,)),
    "swaps (1000 clients)": Setting("mnist", "swaps", (250,) * 4, samples=60),
    "8 permutations (800 clients)": Setting(
        "mnist", "permutations", (100,) * 8, samples=75, told=8
    ),
}
EPSILONS = (1.0, 2.0, 4.0)
DELTA = 1e-5
DRAWS = 4
FIRST_SEED = 200
STARTS = 50  # of the oracle
SHAPE = (1, 28, 28)
# of other data sets; those of tables have their number of columns
SHAPES: dict[str, tuple[int, ...]] = {"cifar10": (3, 32, 32), "table": (30,), "news": (20,)}
POOL = 60_000  # images of each data set
POOLS = {"cifar10": 50_000}
SEPARATION = 0.4  # of the classes of `gaussian_table`, over their deviation, in each column
CHUNK = 5000  # images that are turned at once


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
        right label, the index of residuals, of told labels, without noise and the oracle's, the
        separation, and the bound on labels that follow from replies.
    """
    k = SETTINGS[cell["setting"]].told
    rows, truth = parts_of(cell["setting"], cell["seed"])
    points = points_of(rows)
    multiplier = noise_of(cell["epsilon"])
    clusterings = []
    residual = []
    told_clusterings = []
    for draw in range(DRAWS):
        randomness = Randomness(cell["seed"])
        clusterings.append(clustered(points, k, multiplier, randomness.generator("noise", draw)))
        residual.append(of_residuals(rows, k, multiplier, randomness.generator("residual", draw)))
        told_clusterings.append(
            told_labels(points, truth, multiplier, randomness.generator("told", draw))
        )
    indices = [agreement(labels, truth)["ari"] for labels, _ in clusterings]
    residual_indices = [agreement(labels, truth)["ari"] for labels, _ in residual]
    separations = [apart for _, (apart, _) in clusterings]
    replaced = gaussian_epsilon(2 / multiplier, DELTA)
    return {
        "ari": float(np.mean(indices)),
        "lowest": min(indices),
        "exact": float(np.mean([index == 1.0 for index in indices])),
        "right": float(np.mean([share_right(labels, truth, k) for labels, _ in clusterings])),
        "separation": float(np.mean(separations)),
        "warned": float(np.mean([hardly_apart(*told) for _, told in clusterings])),
        "residual": float(np.mean(residual_indices)),
        "gain": float(np.mean(residual_indices) - np.mean(indices)),
        "residual_exact": float(np.mean([index == 1.0 for index in residual_indices])),
        "told_labels": float(
            np.mean([agreement(labels, truth)["ari"] for labels in told_clusterings])
        ),
        **without_privacy(cell["setting"], cell["seed"]),
        "replaced": replaced,
        "bound": bound(replaced, k, DELTA),
    }


@lru_cache(maxsize=1)
def without_privacy(setting: str, seed: int) -> dict[str, float]:
    """Return the index of the same sums without noise, and that of k-means on the points.

    Both are of points, and of their residuals.

    Args:
        setting: a name of `SETTINGS`.
        seed: of the federation.
    """
    from sklearn.cluster import KMeans

    k = SETTINGS[setting].told
    rows, truth = parts_of(setting, seed)
    indices = {}
    for name, points in (("", points_of(rows)), ("residual_", residuals_of(rows))):
        exact = assigned(points, k, 0.0, Randomness(0).generator())
        labels = KMeans(k, n_init=STARTS, random_state=0).fit_predict(points)
        indices[f"{name}without_noise"] = float(agreement(exact, truth)["ari"])
        indices[f"{name}oracle"] = float(agreement(labels.tolist(), truth)["ari"])
    return indices


def told_labels(
    points: Array, truth: Sequence[int], multiplier: float, generator: np.random.Generator
) -> list[int]:
    """Return the nearest of the true clusters' means, of which one noisy sum has the whole budget.

    The mean of all points, the sizes of clusters, and the directions in which their means differ
    are told as they are, so that this is a bound on what sums of these points can do.

    Args:
        points: (m, q) of norm 1.
        truth: (m,) the true clusters.
        multiplier: noise multiplier of the sum.
        generator: draws the noise.
    """
    directions = noisy_centres.directions_from(points, points.mean(0))
    members = np.eye(max(truth) + 1)[np.asarray(truth)]
    sizes = members.sum(0)[:, None]
    means = members.T @ directions / sizes
    _, _, axes = np.linalg.svd(means - means.mean(0), full_matrices=False)
    places = directions @ axes[: len(means) - 1].T
    sums = members.T @ places
    noisy = sums + multiplier * generator.standard_normal(sums.shape)
    labels: list[int] = noisy_centres.nearest_centres(places, noisy / sizes).tolist()
    return labels


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
) -> tuple[list[int], tuple[float, float]]:
    """Return the labels that clients assign themselves, and the separation of the centres.

    Both are as in the protocol; the second number is that in their weakest direction.

    Args:
        points: (m, q) of norm 1.
        k: number of clusters.
        multiplier: noise multiplier of the four sums together; 0 adds no noise.
        generator: draws the noise.
    """
    return _clustered(points, k, multiplier, generator, noisy_centres.SHARES)


def points_of(rows: Array) -> Array:
    """Return points, (m, q) of norm 1, from the rows of their parts, (m, c, 1 + q)."""
    return noisy_centres.residuals(rows, np.zeros_like(rows[0, :, 1:]))


def residuals_of(
    rows: Array, deviation: float = 0.0, generator: np.random.Generator | None = None
) -> Array:
    """Return points without the mean parts of their classes, (m, q) of norm 1.

    Args:
        rows: (m, c, 1 + q) of `noisy_centres.part_rows`.
        deviation: of the noise in each number of their sum.
        generator: draws the noise; None if there is none.
    """
    row_sum = rows.sum(0)
    if generator is not None:
        row_sum = row_sum + deviation * generator.standard_normal(row_sum.shape)
    return noisy_centres.residuals(rows, noisy_centres.mean_parts(row_sum, deviation))


def of_residuals(
    rows: Array, k: int, multiplier: float, generator: np.random.Generator
) -> tuple[list[int], tuple[float, float]]:
    """Return the labels and the separation of a run with `--residuals`.

    Args:
        rows: (m, c, 1 + q) of `noisy_centres.part_rows`.
        k: number of clusters.
        multiplier: noise multiplier of the five sums together; 0 adds no noise.
        generator: draws the noise.
    """
    first, *others = noisy_centres.SHARES_WITH_PARTS
    points = residuals_of(rows, multiplier / math.sqrt(first), generator)
    return _clustered(points, k, multiplier, generator, others)


def _clustered(
    points: Array,
    k: int,
    multiplier: float,
    generator: np.random.Generator,
    shares: Sequence[float],
) -> tuple[list[int], tuple[float, float]]:
    """Return the labels and the separation of four sums that have these shares of the budget."""
    # of the sums of points, of moments, of cells and of a step
    of_points, of_moments, of_cells, of_step = (multiplier / math.sqrt(share) for share in shares)

    def summed(rows: Array, deviation: float) -> Array:
        noisy_sum = rows.sum(0)
        noise = generator.standard_normal(noisy_sum.shape)
        return np.asarray(noisy_sum + deviation * noise)

    r = k - 1
    mean = summed(points, of_points) / len(points)
    directions = noisy_centres.directions_from(points, mean)
    moments = summed(noisy_centres.second_moments(directions), of_moments)
    basis = noisy_centres.leading_directions(moments, r)
    places = noisy_centres.projections(directions, basis)
    count = noisy_centres.cells_for(k, len(points), of_cells)
    book = book_of(r, count)
    rows = noisy_centres.displacement_rows(places, book, noisy_centres.CELL_REACH)
    noisy_sum = summed(rows, of_cells)
    centres = noisy_centres.centres_from_cells(noisy_sum, book, k, of_cells, seed=0)
    rows = noisy_centres.displacement_rows(places, centres, noisy_centres.STEP_REACH)
    noisy_sum = summed(rows, of_step)
    centres = noisy_centres.moved_centres(noisy_sum, centres, of_step)
    labels: list[int] = noisy_centres.nearest_centres(places, centres).tolist()
    counts = noisy_centres.counts_of(noisy_sum)
    apart = noisy_centres.separation(centres, counts)
    return labels, (apart, noisy_centres.weakest_direction(centres, counts))


def shape_of(data: str) -> tuple[int, ...]:
    """Return the shape of a data set's samples."""
    return SHAPES.get(data, SHAPE)


def gaussian_table() -> tuple[Array, Any]:
    """Return rows of ten normally distributed classes, (60000, 30), and their labels."""
    draw = Randomness(0).generator("table")
    centres = SEPARATION * draw.normal(size=(10, *SHAPES["table"]))
    labels = draw.integers(10, size=POOL)
    return centres[labels] + draw.normal(size=(POOL, *SHAPES["table"])), labels


def news() -> tuple[Array, Any]:
    """Return articles of AG-News in 20 directions of hashed words, and their topics."""
    from benchmarks.clusters import text

    texts, topics = text.articles()
    own = slice(text.PUBLIC, text.PUBLIC + POOL)
    return text.features("swaps, directions", texts[own]).astype(np.float64), topics[own]


TABLES = {"table": gaussian_table, "news": news}


@cache
def pool_of(data: str) -> tuple[Array, Array]:
    """Return all images of a data set, turned by the four rotations, as low frequencies.

    Args:
        data: name of the data set.

    Returns:
        (4, n, f) and labels (n,); of a table rows as they are, (1, n, f).
    """
    if data in TABLES:
        rows, of_rows = TABLES[data]()
        return rows[None], np.asarray(of_rows)
    federation = Federation.simulate(
        data, scenario=Iid(), clients=2, samples=POOLS.get(data, POOL) // 2, seed=FIRST_SEED
    )
    classes = federation.classes
    low = ClassMeans(tuple(federation.shape), classes, 1, 0)
    rotation = Rotation(clusters=len(EVEN))
    turned: list[list[Array]] = [[] for _ in EVEN]
    labels = []
    for shard in federation.shards:
        labels.append(np.asarray(shard.y))
        for cluster, images in enumerate(turned):
            for start in range(0, len(shard.y), CHUNK):
                x, y = shard.x[start : start + CHUNK], shard.y[start : start + CHUNK]
                x, _ = rotation.transform(cluster, x, y, classes, Randomness(0))
                images.append(low.smooth(np.reshape(x, (len(x), -1)).astype(np.float64)))
    return np.stack([np.concatenate(images) for images in turned]), np.concatenate(labels)


def rows_of(setting: Setting, labels: Array, draw: np.random.Generator) -> list[Array]:
    """Return the images of each client, of which no two clients have one in common.

    Args:
        setting: says how many clients and images there are, and how labels are skewed.
        labels: (n,) of all images.
        draw: of the images.
    """
    clients = sum(setting.sizes)
    order = draw.permutation(len(labels))
    if setting.alpha is None:
        return list(order[: clients * setting.samples].reshape(clients, setting.samples))
    classes = int(labels.max()) + 1
    remaining = [list(order[labels[order] == label]) for label in range(classes)]
    dealt = []
    for shares in draw.dirichlet(np.full(classes, setting.alpha), size=clients):
        counts = draw.multinomial(setting.samples, shares)
        rows: list[int] = []
        for label, count in enumerate(counts):
            # a class that has run out leaves a client with fewer images
            rows += remaining[label][:count]
            del remaining[label][:count]
        dealt.append(np.array(rows))
    return dealt


@lru_cache(maxsize=1)
def parts_of(setting: str, seed: int) -> tuple[Array, list[int]]:
    """Return the parts of the clients' points, (m, c, 1 + q), and their true clusters, (m,).

    Args:
        setting: a name of `SETTINGS`.
        seed: of the federation.
    """
    chosen = SETTINGS[setting]
    means, counts, truth = class_means_of(chosen, seed)
    sketch = ClassMeans(shape_of(chosen.data), means.shape[1], POINT_SIZE * chosen.told, seed)
    of_classes, weights = zip(*map(sketch.parts_of_means, means, counts), strict=True)
    return noisy_centres.part_rows(np.stack(of_classes), np.stack(weights)), truth


def class_means_of(chosen: Setting, seed: int) -> tuple[Array, Array, list[int]]:
    """Return the clients' smoothed class means, (m, c, f), counts, (m, c), and true clusters.

    Args:
        chosen: the setting.
        seed: of the federation.
    """
    k = len(chosen.sizes)
    truth: list[int] = np.repeat(range(k), chosen.sizes).tolist()
    turned, labels = pool_of(chosen.data)
    classes = int(labels.max()) + 1
    names = [np.arange(classes)] * k
    if chosen.shift != "rotations" and k > 1:
        shift = SHIFTS[chosen.shift](clusters=k)
        blank = np.zeros((classes, *shape_of(chosen.data)), np.float32)
        for cluster in range(k):
            _, y = shift.transform(cluster, blank, names[cluster], classes, Randomness(seed))
            names[cluster] = np.asarray(y)
    class_means = []
    class_counts = []
    dealt = rows_of(chosen, labels, Randomness(seed).generator("images"))
    for cluster, rows in zip(truth, dealt, strict=True):
        images = turned[cluster if chosen.shift == "rotations" else 0][rows]
        one_hot = np.eye(classes)[names[cluster][labels[rows]]]
        counts = one_hot.sum(0)
        # low frequencies are linear in the images: their means are those of the mean image
        class_means.append(one_hot.T @ images / np.maximum(counts, 1.0)[:, None])
        class_counts.append(counts)
    return np.stack(class_means), np.stack(class_counts), truth


@cache
def book_of(r: int, count: int) -> Array:
    """Return `noisy_centres.code_book`, which is the same in every draw."""
    return noisy_centres.code_book(r, count)


GRID = Grid(
    __doc__,
    "hidden",
    cells,
    measure,
    by=["setting", "epsilon"],
    values=["ari", "residual", "told_labels", "oracle"],
    seeds=10,
    minutes=15.0,
)

if __name__ == "__main__":
    print(GRID.main())
