"""Measure how well signatures of gradients cluster clients, over ε.

python -m benchmarks.private.signatures [--seeds 20 21 22] [--draws 3] [--one-release]
python -m benchmarks.private.signatures --limits

Clustering alone, without training: 21 clients in four clusters, of which one has 3 clients, or in
one cluster; MNIST, Fashion-MNIST and FEMNIST with swapped labels or rotations; and the first two
with Dirichlet shares of classes (α = 1). Noise is for single examples, ε at δ = 1e-5, of one
Gaussian release, or of two with half of the budget each. The constants in the protocol were found
on seeds 0 to 2 and 100 to 102, which are not among the default ones. Rows are written as they are
measured, and a run that was cut off goes on. `--limits` tells whether clusters of few samples are
lost in the noise or in the search.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.table import RESULTS, Journal, write
from securecluster import Federation
from securecluster.clustering.metrics import agreement
from securecluster.clustering.noisy_rows import NoisyRows, leading_directions
from securecluster.core.lazy_torch import torch
from securecluster.core.randomness import Randomness
from securecluster.data import Iid
from securecluster.privacy.dp.accounting import gaussian_epsilon
from securecluster.privacy.gradient_signatures import (
    ClassBlocks,
    GradientSketch,
    clipped_rows,
    signature_mean,
)
from securecluster.protocols.common.comparison.packed_signatures import (
    SECOND_CLIP,
    BlockSignatures,
    SketchSignatures,
)
from securecluster.protocols.common.comparison.signature_plan import (
    AXES,
    CLIP,
    DEFAULT_SIZES,
    smoothing,
)

FloatArray = NDArray[np.float64]
CLIENTS = 21
SMALLEST = 3  # clients of the smallest of four clusters
EPSILONS = (0.5, 1.0, 2.0, 4.0, 8.0)
DELTA = 1e-5
# the mean value of a pixel, a public constant of each data set
CENTRES = {"mnist": 0.13, "fashion_mnist": 0.29, "femnist": 0.96}
SHIFTS = ("swap", "rotation")
CLASSES = {"mnist": 10, "fashion_mnist": 10, "femnist": 62}
ALPHA = 1.0
SKEWED_SAMPLES = 600
# images of a client, from which its samples are drawn; FEMNIST's are those of all writers
POOLS = {"mnist": 1500, "fashion_mnist": 1500, "femnist": 618}
SMOOTH = smoothing((1, 28, 28), noise=1.0)  # of all these data sets
KEY = ("data", "shift", "alpha", "clusters", "samples", "kind", "seed")
COLUMNS = (
    "data",
    "shift",
    "alpha",
    "clusters",
    "samples",
    "epsilon",
    "kind",
    "seed",
    "draw",
    "ari",
    "ari_found",
    "found",
    "right",
)


@dataclass(frozen=True)
class Setting:
    """One federation, and the signatures to compare on it.

    Attributes:
        data: "mnist" or "fashion_mnist".
        shift: "swap" or "rotation".
        alpha: of the Dirichlet distribution of classes; 0 is none.
        clusters: 4 or 1.
        samples: n of each client.
        kind: "two releases", "one release" or "blocks".
    """

    data: str
    shift: str
    alpha: float
    clusters: int
    samples: int
    kind: str


def settings(one_release: bool = False) -> Iterator[Setting]:
    """Yield all settings.

    Args:
        one_release: True yields sketches of one release, which are compared with those of two.
    """
    for data, shift in product(CENTRES, SHIFTS):
        if one_release:
            for samples in (100, 300):
                yield Setting(data, shift, 0.0, 4, samples, "one release")
        else:
            yield from _settings_of(data, shift)


def _settings_of(data: str, shift: str) -> Iterator[Setting]:
    """Yield the settings of a data set and a shift."""
    two = "two releases"
    if data == "femnist":
        # too few images for other sizes, and for shares of its 62 classes
        for clusters in (4, 1):
            yield Setting(data, shift, 0.0, clusters, 300, two)
        return
    for samples in (100, 300):
        yield Setting(data, shift, 0.0, 4, samples, two)
    for release_type in (two, "blocks"):
        yield Setting(data, shift, ALPHA, 4, SKEWED_SAMPLES, release_type)
    # one cluster: is it found to be one?
    yield Setting(data, shift, 0.0, 1, 300, two)
    yield Setting(data, shift, ALPHA, 1, SKEWED_SAMPLES, "blocks")


def noise_for(epsilon: float) -> float:
    """Return the noise multiplier of one Gaussian release at ε, to twelve digits.

    Args:
        epsilon: ε, at `DELTA`.
    """
    low, high = 1e-3, 1e3
    for _ in range(80):
        middle = math.sqrt(low * high)
        if gaussian_epsilon(1 / middle, DELTA) > epsilon:
            low = middle
        else:
            high = middle
    return high


def truth_of(clusters: int) -> NDArray[np.int64]:
    """Return the clusters (m,): all clients in one, or four of 3, 6, 6 and 6 clients.

    Args:
        clusters: 1 or 4.
    """
    if clusters == 1:
        return np.zeros(CLIENTS, dtype=np.int64)
    others = (CLIENTS - SMALLEST) // (clusters - 1)
    sizes = [SMALLEST, *[others] * (clusters - 1)]
    return np.repeat(np.arange(clusters), sizes)


def chosen(labels: NDArray[Any], alpha: float, samples: int, draw: Any) -> NDArray[np.int64]:
    """Return which of a client's images are its samples.

    Args:
        labels: (n,) of its images, before labels are swapped.
        alpha: of the Dirichlet distribution of classes; 0 takes the first images.
        samples: number of samples.
        draw: numpy generator.
    """
    if not alpha:
        return np.arange(samples)
    classes = 1 + int(labels.max())
    shares = draw.dirichlet(np.full(classes, alpha))
    weights = shares[labels] + 1e-9
    probabilities = weights / weights.sum()
    picked = draw.choice(len(labels), samples, replace=False, p=probabilities)
    return np.asarray(picked, dtype=np.int64)


@lru_cache(maxsize=2)
def dealt(data: str, seed: int) -> Federation:
    """Return clients with the images of `POOLS`.

    Args:
        data: name of the data set.
        seed: of the federation.
    """
    return Federation.simulate(
        data, scenario=Iid(), clients=CLIENTS, samples=POOLS[data], seed=seed
    )


def clients_of(setting: Setting, seed: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return the samples (n, 784) and labels (n,) of each client.

    Args:
        setting: of the federation.
        seed: of the federation, of swaps and of the shares of classes.
    """
    federation = dealt(setting.data, seed)
    draw = np.random.default_rng(seed)
    pairs = draw.permutation(CLASSES[setting.data])
    clients = []
    for cluster, shard in zip(truth_of(setting.clusters), federation.shards, strict=True):
        picked = chosen(shard.y, setting.alpha, setting.samples, draw)
        x = shard.x[picked]
        y = shard.y[picked]
        if setting.shift == "rotation":
            x = np.rot90(x, cluster, axes=(-2, -1)).copy()
        else:
            y = swapped_labels(pairs, cluster)[y]
        flat = x.reshape(len(x), -1)
        labels = np.asarray(y, dtype=np.int64)
        clients.append((torch.from_numpy(flat), torch.from_numpy(labels)))
    return clients


def swapped_labels(pairs: NDArray[np.int64], cluster: int) -> NDArray[np.int64]:
    """Return the new label (c,) of each label in a cluster, which swaps a pair of its own.

    Args:
        pairs: (c,) all labels, of which each two neighbours are a cluster's pair.
        cluster: its number.
    """
    start = 2 * cluster
    one, other = pairs[start : start + 2]
    labels = np.arange(len(pairs))
    labels[[one, other]] = other, one
    return labels


class Sketches:
    """Clients' clipped sketches, from which releases are drawn.

    Args:
        clients: samples and labels.
        data: name of the data set.
        seed: of the public map.
    """

    def __init__(self, clients: list[Any], data: str, seed: int) -> None:
        size = DEFAULT_SIZES["plain"]
        public = Randomness(seed)
        self._samples, features = clients[0][0].shape
        sketch = GradientSketch(size, features, CLASSES[data], CENTRES[data], public, SMOOTH)
        self._rows: list[FloatArray] = []
        for x, y in clients:
            rows = clipped_rows(sketch.rows(x, y), CLIP)
            self._rows.append(rows.numpy())

    def labels(self, z: float, releases: int, k: int | None, draw: Any) -> list[int]:
        """Return the clusters by one draw of the noise.

        Args:
            z: noise multiplier of all releases together.
            releases: 1 or 2.
            k: number of clusters; None finds it.
            draw: numpy generator.
        """
        return self.compared(z, releases, draw).clusters(k, 0)

    def compared(self, z: float, releases: int, draw: Any) -> NoisyRows:
        """Return the rows that the server compares, by one draw of the noise.

        Args:
            z: noise multiplier of all releases together.
            releases: 1 or 2.
            draw: numpy generator.
        """
        deviation = z * math.sqrt(releases) * CLIP / self._samples
        first = np.stack([rows.mean(0) for rows in self._rows])
        noise = draw.standard_normal(first.shape)
        first = first + deviation * noise
        directions = leading_directions(first, AXES)
        second = np.zeros((len(first), 0))
        if releases == 2:
            second = np.stack([self._second(rows, directions) for rows in self._rows])
            ratio = SECOND_CLIP / CLIP
            noise = draw.standard_normal(second.shape)
            second = second + ratio * deviation * noise
        count, width = first.shape
        deviations = np.full(count, deviation)
        samples = np.full(count, float(self._samples))
        signatures = SketchSignatures(first, second, deviations, samples, width)
        return signatures.comparable(directions)

    def _second(self, rows: FloatArray, directions: FloatArray) -> FloatArray:
        """Return the mean of rows that are clipped in a few directions."""
        coordinates = torch.from_numpy(rows @ directions.T)
        clipped = clipped_rows(coordinates, SECOND_CLIP)
        return np.asarray(clipped.mean(0).numpy())


class Blocks:
    """Clients' class blocks, from which releases are drawn.

    Args:
        clients: samples and labels.
        data: name of the data set.
        seed: of the public map.
    """

    def __init__(self, clients: list[Any], data: str, seed: int) -> None:
        self._size = DEFAULT_SIZES["blocks"]
        classes = CLASSES[data]
        public = Randomness(seed)
        self._samples, features = clients[0][0].shape
        examples = ClassBlocks(self._size, features, classes, CENTRES[data], public, smooth=SMOOTH)
        rows = [signature_mean(examples, x, y, CLIP).numpy() for x, y in clients]
        shape = (len(rows), classes, self._size + 1)
        self._blocks = np.stack(rows).reshape(shape)

    def labels(self, z: float, k: int | None, draw: Any) -> list[int]:
        """Return the clusters by one draw of the noise.

        Args:
            z: noise multiplier.
            k: number of clusters; None finds it.
            draw: numpy generator.
        """
        deviation = z * CLIP / self._samples
        noise = draw.standard_normal(self._blocks.shape)
        noisy = self._blocks + deviation * noise
        deviations = np.full(len(noisy), deviation)
        samples = np.full(len(noisy), float(self._samples))
        signatures = BlockSignatures(noisy, deviations, samples, self._size)
        return signatures.comparable().clusters(k, 0)


def measured(setting: Setting, seed: int, draws: int) -> Iterator[dict[str, Any]]:
    """Yield a row for each ε and draw of the noise.

    Args:
        setting: of the federation and the signatures.
        seed: of the federation and the public map.
        draws: number of draws of the noise.
    """
    clients = clients_of(setting, seed)
    truth = truth_of(setting.clusters).tolist()
    sketches: Any = None
    blocks: Any = None
    if setting.kind == "blocks":
        blocks = Blocks(clients, setting.data, seed)
    else:
        sketches = Sketches(clients, setting.data, seed)
    for epsilon in EPSILONS:
        z = noise_for(epsilon)
        for number in range(draws):
            labels = []
            for k in (setting.clusters, None):
                draw = np.random.default_rng((seed, number, int(10 * epsilon)))
                if blocks is not None:
                    labels.append(blocks.labels(z, k, draw))
                else:
                    releases = 1 + (setting.kind == "two releases")
                    labels.append(sketches.labels(z, releases, k, draw))
            told_labels, found_labels = labels
            count = len(set(found_labels))
            yield {
                "data": setting.data,
                "shift": setting.shift,
                "alpha": setting.alpha,
                "clusters": setting.clusters,
                "samples": setting.samples,
                "epsilon": epsilon,
                "kind": setting.kind,
                "seed": seed,
                "draw": number,
                "ari": round(agreement(told_labels, truth)["ari"], 4),
                "ari_found": round(agreement(found_labels, truth)["ari"], 4),
                "found": count,
                "right": count == setting.clusters,
            }


def limits(seeds: Sequence[int], draws: int) -> Iterator[dict[str, Any]]:
    """Yield what clusters of few samples lose, and whether another clusterer could find more.

    `wrong` says that clusters are not the true ones, and `cheaper` that they are not although their
    sum of squares is no larger: the noisy rows prefer them, and no better search finds others.

    Args:
        seeds: of the federations.
        draws: number of draws of the noise.
    """
    for data, shift in product(("mnist", "fashion_mnist"), SHIFTS):
        for samples, epsilon in ((100, 2.0), (300, 0.5)):
            setting = Setting(data, shift, 0.0, 4, samples, "two releases")
            truth = truth_of(setting.clusters)
            for seed in seeds:
                sketches = Sketches(clients_of(setting, seed), data, seed)
                for number in range(draws):
                    draw = np.random.default_rng((seed, number, int(10 * epsilon)))
                    compared = sketches.compared(noise_for(epsilon), 2, draw)
                    labels = np.asarray(compared.clusters(4, 0))
                    rows = compared.values
                    ari = agreement(labels.tolist(), truth.tolist())["ari"]
                    preferred = _squares(rows, labels) <= _squares(rows, truth) + 1e-15
                    yield {
                        "data": data,
                        "shift": shift,
                        "samples": samples,
                        "epsilon": epsilon,
                        "seed": seed,
                        "draw": number,
                        "ari": round(ari, 4),
                        "wrong": ari < 1,
                        "cheaper": ari < 1 and preferred,
                    }


def _squares(rows: FloatArray, labels: NDArray[np.int64]) -> float:
    """Return the sum of squared distances of rows from their clusters' means."""
    squares = 0.0
    for cluster in set(labels.tolist()):
        members = rows[labels == cluster]
        deviations = members - members.mean(0)
        squares += float(np.square(deviations).sum())
    return squares


def main(arguments: list[str] | None = None) -> None:
    """Measure what the file does not have yet.

    Args:
        arguments: of the command line.
    """
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seeds", type=int, nargs="+", default=[20, 21, 22])
    parser.add_argument("--draws", type=int, default=3)
    parser.add_argument("--out", type=Path, default=RESULTS / "signatures.csv")
    parser.add_argument("--one-release", action="store_true", help="measure single releases")
    parser.add_argument("--limits", action="store_true", help="measure what stops few samples")
    options = parser.parse_args(arguments)
    if options.limits:
        rows = limits(options.seeds, options.draws)
        print(write("signatures_limits", rows))
        return
    journal = Journal(options.out, KEY, COLUMNS)
    for seed in options.seeds:
        for setting in settings(options.one_release):
            if journal.lacks({**vars(setting), "seed": seed}):
                journal.append(measured(setting, seed, options.draws))


if __name__ == "__main__":
    main()
