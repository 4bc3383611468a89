"""Measure how well clients assign themselves by label maps, beside the four sums of points.

python -m benchmarks.private.label_maps [--seeds 10] [--minutes 25]

The clients, and ε, are those of `benchmarks.private.hidden`. `means` is the index of the four sums,
`labels` that of the histogram of label maps, and `auto` that of what a run takes that may choose:
means over draws of the noise. `gain` is what `auto` has more than `means`. `chosen` is the share of
draws in which `auto` took the label maps, and `warned` that in which a run of `labels` would say
that they tell no clusters; `lost` is the share of draws of `labels` below 0.8 that had no warning,
`silent` that of `auto`, and `alarms` that of draws of `auto` from 0.95 on that had one.

The seeds are 400 and up; constants were chosen on 7101 to 7108, on MNIST, and what tells centres
apart in their weakest direction on 7201 to 7216.
The part `new` has other data on seeds from 7301. `table` is simulated, ten
normal classes in 30 columns, and `news` has articles in the directions of
`benchmarks.clusters.text`, 250 of each client, as CIFAR-10 has images.
"""

from __future__ import annotations

import math
from functools import lru_cache, partial
from typing import Any

import numpy as np

from benchmarks.grid import Grid, product, with_seeds
from benchmarks.private import hidden
from benchmarks.sheet import Cell
from securecluster.clustering import label_maps, noisy_centres
from securecluster.clustering.labels import Array
from securecluster.clustering.metrics import agreement
from securecluster.core.randomness import Randomness
from securecluster.protocols.hidden import label_search
from securecluster.protocols.hidden.class_means import ClassMeans
from securecluster.protocols.hidden.protocol import POINT_SIZE
from securecluster.protocols.hidden.separation import hardly_apart

EIGHT = (25,) * 8
SETTINGS = {
    **{name: setting for name, setting in hidden.SETTINGS.items() if sum(setting.sizes) == 200},
    "fashion swaps": hidden.Setting("fashion_mnist", "swaps"),
    "fashion 8 permutations": hidden.Setting("fashion_mnist", "permutations", EIGHT, told=8),
    "fashion rotations": hidden.Setting("fashion_mnist", "rotations"),
}
OTHERS = {
    "cifar swaps": hidden.Setting("cifar10", "swaps", samples=250),
    "cifar 8 permutations": hidden.Setting("cifar10", "permutations", EIGHT, 250, told=8),
    "table swaps": hidden.Setting("table", "swaps"),
    "table 8 permutations": hidden.Setting("table", "permutations", EIGHT, told=8),
    "news permutations": hidden.Setting("news", "permutations", samples=250),
}
# 20 clients of each cluster
FEW = {
    "swaps (80 clients)": hidden.Setting("mnist", "swaps", (20,) * 4),
    "rotations (80 clients)": hidden.Setting("mnist", "rotations", (20,) * 4),
}
SETTINGS |= {**OTHERS, **FEW}
EPSILONS = (1.0,)
EPSILONS_OF_OTHERS = (2.0,)
EPSILONS_OF_FEW = (2.0, 4.0)
DRAWS = 1
FIRST_SEED = 400
NEW_SEED = 7301  # of the part "new"
POOR, GOOD = 0.8, 0.95


def cells(scale: str, seeds: int) -> list[Cell]:
    """Return setting by ε by seed, some settings also at larger ε; there is one scale."""
    settings = product(setting=SETTINGS, epsilon=EPSILONS)
    settings += product(setting=OTHERS, epsilon=EPSILONS_OF_OTHERS)
    settings += product(setting=FEW, epsilon=EPSILONS_OF_FEW)
    # one setting after the other, whose clients are kept
    settings.sort(key=lambda cell: list(SETTINGS).index(cell["setting"]))
    first = [{"part": "first", **cell} for cell in settings]
    others = product(part=["new"], setting=OTHERS, epsilon=(*EPSILONS, *EPSILONS_OF_OTHERS))
    return [
        *with_seeds(first, range(FIRST_SEED, FIRST_SEED + seeds)),
        *with_seeds(others, range(NEW_SEED, NEW_SEED + seeds)),
    ]


def measure(cell: Cell) -> dict[str, Any]:
    """Cluster clients in three ways, with several draws of noise.

    Args:
        cell: one of `cells`.
    """
    setting = SETTINGS[cell["setting"]]
    points, rows, truth = clients_of(cell["setting"], cell["seed"])
    multiplier = hidden.noise_of(cell["epsilon"])
    found: dict[str, list[float]] = {"means": [], "labels": [], "auto": []}
    chosen = []
    warned = []
    silent = []
    alarms = []
    for draw in range(DRAWS):
        randomness = Randomness(cell["seed"])
        ways = {
            "means": hidden.clustered(
                points, setting.told, multiplier, randomness.generator("noise", draw)
            )
        }
        for way in ("labels", "auto"):
            generator = randomness.generator(way, draw)
            other_way = way == "auto"
            ways[way] = clustered(
                rows, points, setting.told, multiplier, generator, other_way, cell["seed"]
            )
        for way, (labels, _) in ways.items():
            found[way].append(float(agreement(labels, truth)["ari"]))
        chosen.append(not isinstance(ways["auto"][1], tuple))
        warned.append(ways["labels"][1] is not None)
        told = _told(ways["auto"][1])
        silent.append(found["auto"][-1] < POOR and not told)
        alarms.append(found["auto"][-1] >= GOOD and told)
    lost = [
        ari < POOR and not warning for ari, warning in zip(found["labels"], warned, strict=True)
    ]
    return {
        **{way: float(np.mean(indices)) for way, indices in found.items()},
        "lowest": min(found["auto"]),
        "exact": float(np.mean([ari == 1.0 for ari in found["auto"]])),
        "gain": float(np.mean(found["auto"]) - np.mean(found["means"])),
        "chosen": float(np.mean(chosen)),
        "warned": float(np.mean(warned)),
        "lost": float(np.mean(lost)),
        "silent": float(np.mean(silent)),
        "alarms": float(np.mean(alarms)),
    }


def _told(said: Any) -> bool:
    """Return whether a run says that it hardly tells clusters.

    Args:
        said: the second result of `clustered`.
    """
    return hardly_apart(*said) if isinstance(said, tuple) else said is not None


def clustered(
    rows: Array,
    points: Array,
    k: int,
    multiplier: float,
    generator: np.random.Generator,
    other_way: bool,
    seed: int,
) -> tuple[list[int], Any]:
    """Return the labels that clients assign themselves, and what the run says of them.

    Args:
        rows: (m, c, g) class means of norm 1.
        points: (m, q) of norm 1.
        k: number of clusters.
        multiplier: noise multiplier of all sums together.
        generator: draws the noise.
        other_way: True where the sums may choose the four sums of points.
        seed: of the hash.

    Returns:
        Labels, and the warning of label maps, or None, or the separation of centres.
    """
    buckets = label_maps.buckets_for(k)
    once = label_search.HISTOGRAM_SHARE
    if other_way:
        once /= label_search.MOST_TIMES
    deviations = {
        "anchors": multiplier / math.sqrt(label_search.ANCHOR_SHARE),
        "maps": multiplier / math.sqrt(once),
    }
    summed = partial(_summed, rows, deviations, buckets, seed, generator)
    found = label_search.search(summed, lambda name, clients: deviations[name], k, 2, other_way)
    if isinstance(found, int):
        noise = multiplier / math.sqrt(found * once)
        return hidden.clustered(points, k, noise, generator)
    maps = label_maps.label_maps(rows, found.anchors)
    labels = []
    for own, label_map in zip(rows, maps, strict=True):
        place = label_maps.nearest_place(own, found.anchors, label_map, found.places, buckets, seed)
        labels.append(place)
    return labels, label_search.labels_warning(found, len(found.places), True)


def _summed(
    rows: Array,
    deviations: dict[str, float],
    buckets: int,
    seed: int,
    generator: np.random.Generator,
    name: str,
    anchors: Array | None,
) -> tuple[Array, int]:
    """Return a noisy sum over clients, and their number."""
    if anchors is None:
        maps = np.tile(np.arange(rows.shape[1]), (len(rows), 1))
    else:
        maps = label_maps.label_maps(rows, anchors)
    if name == label_search.MAPS:
        total = np.zeros(buckets)
        for label_map in maps:
            total[label_maps.bucket_of(label_map, buckets, seed)] += 1
        deviation = deviations["maps"]
    else:
        total = label_maps.in_order(rows, maps).sum(0)
        deviation = deviations["anchors"]
    return total + deviation * generator.standard_normal(total.shape), len(rows)


@lru_cache(maxsize=1)
def clients_of(name: str, seed: int) -> tuple[Array, Array, list[int]]:
    """Return the clients' points, their class means, and their true clusters.

    Args:
        name: of `SETTINGS`.
        seed: of the federation.
    """
    setting = SETTINGS[name]
    means, counts, truth = hidden.class_means_of(setting, seed)
    sketch = ClassMeans(
        hidden.shape_of(setting.data), means.shape[1], POINT_SIZE * setting.told, seed
    )
    of_classes, weights = zip(*map(sketch.parts_of_means, means, counts), strict=True)
    parts = noisy_centres.part_rows(np.stack(of_classes), np.stack(weights))
    rows, weights = zip(*map(sketch.class_rows_of_means, means, counts), strict=True)
    by_class = label_maps.unit_means(np.stack(rows), np.stack(weights))
    return hidden.points_of(parts), by_class, truth


GRID = Grid(
    __doc__,
    "label_maps",
    cells,
    measure,
    by=["setting", "epsilon"],
    values=["means", "labels", "auto", "gain"],
    seeds=10,
    minutes=25.0,
)

if __name__ == "__main__":
    print(GRID.main())
