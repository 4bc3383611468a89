"""Settings of `benchmarks.clusters.robust`: twenty of the first table, and those of everyday
federations.

Both come in two halves. The first half may be looked at while defaults are chosen; the second is
for one look at the end.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from securecluster import (
    ClientDirichlet,
    Dirichlet,
    Iid,
    Inversion,
    LabelPermutation,
    LabelSwap,
    Natural,
    Pathological,
    Rotation,
    Tasks,
)
from securecluster.core.randomness import Randomness
from securecluster.data import Scenario, Topics
from securecluster.data.pools import Features, Labels
from securecluster.data.scenario_base import Transform


@dataclass(frozen=True)
class OnePair(Transform):
    """Transform in which one of two clusters swaps one pair of labels, and the other none."""

    name: ClassVar[str] = "one-pair"
    clusters: int = 2

    def transform(
        self, cluster: int, x: Features, y: Labels, classes: int, randomness: Randomness
    ) -> tuple[Features, Labels]:
        """Swap a random pair of labels in the second cluster."""
        new_label = np.arange(classes)
        if cluster:
            pair = randomness.generator("scenario", "pair").permutation(classes)[:2]
            new_label[pair] = pair[::-1]
        return x, new_label[y].astype(np.int64)


@dataclass(frozen=True)
class Setting:
    """Clients with known true clusters.

    Attributes:
        about: what is special about it, in words.
        half: "first" or "second".
        data: a data set's name.
        scenario: how clusters differ.
        sizes: clients in each true cluster.
        samples: training samples of the first, second, ... client of each cluster, over and over.
        dealt: training samples dealt to a client before it keeps its first `samples` of them. A
            quarter as many are held out, so that clients with few samples are tested on enough.
        foreign: share of each client's samples, trained on and held out, that were swapped for
            samples of clients of the other clusters.
        k: clusters told; None is the true number.
        noise: standard deviation of Gaussian noise in the features of every second client.
    """

    about: str
    half: str
    data: str
    scenario: Scenario
    sizes: tuple[int, ...]
    samples: tuple[int, ...]
    dealt: int
    foreign: float = 0.0
    k: int | None = None
    noise: float = 0.0

    @property
    def told(self) -> int:
        """Return the number of clusters that is passed to protocols with a `k`."""
        if self.k is None:
            return len(self.sizes)
        return self.k


# names: data, what differs, and clusters x clients or the clients of each cluster; rows: what is
# special, then the fields in their order
# fmt: off
SETTINGS: dict[str, Setting] = {
    "mnist-permutation-12x3": Setting(
        "twelve small clusters",
        "first", "mnist", LabelPermutation(12), (3,) * 12, samples=(100,), dealt=200),
    "fashion-swap-9-5-2": Setting(
        "swapped labels, clusters of unequal size, 30 to 300 samples a client",
        "first", "fashion_mnist", LabelSwap(3), (9, 5, 2), samples=(100, 30, 300), dealt=400),
    "digits-pathological-3x4": Setting(
        "three labels a client, small images",
        "first", "digits", Pathological(labels=3, clusters=3), (4,) * 3, samples=(60,), dealt=88),
    "cifar10-dirichlet-2x5": Setting(
        "two sets of label shares on colour images",
        "first", "cifar10", Dirichlet(alpha=0.2, clusters=2), (5, 5), samples=(150,), dealt=320),
    "mnist-rotation-5-2": Setting(
        "seven clients, turned images, 60 to 600 samples a client",
        "first", "mnist", Rotation(2), (5, 2), samples=(600, 60, 240), dealt=800),
    "fashion-nested-4x6": Setting(
        "swapped labels within negatives and images",
        "first", "fashion_mnist", LabelSwap(2) + Inversion(), (6,) * 4, samples=(120,), dealt=320),
    "fashion-mixture-25-5x4": Setting(
        "permuted labels, a quarter of each client's samples of other clusters",
        "first", "fashion_mnist", LabelPermutation(5), (4,) * 5,
        samples=(120,), dealt=400, foreign=0.25),
    "mnist-iid-100": Setting(
        "a hundred clients of one distribution",
        "first", "mnist", Iid(), (100,), samples=(40,), dealt=80, k=3),
    "femnist-writers-permutation-12-8": Setting(
        "writers, permuted labels, clusters of unequal size",
        "first", "femnist", Natural() + LabelPermutation(2), (12, 8), samples=(120,), dealt=120),
    # metric: position error in metres, where less is better
    "mobility-topics-2x5": Setting(
        "trajectories, of which the groups by home and work area are only a reference",
        "first", "mobility", Topics(clusters=2), (5, 5), samples=(60,), dealt=160),
    # second half: run once, when the defaults no longer changed
    "fashion-permutation-9x4": Setting(
        "nine clusters",
        "second", "fashion_mnist", LabelPermutation(9), (4,) * 9, samples=(90,), dealt=200),
    "mnist-swap-40-30-20-10": Setting(
        "a hundred clients, clusters of unequal size, 20 to 60 samples a client",
        "second", "mnist", LabelSwap(4), (40, 30, 20, 10), samples=(20, 40, 60), dealt=80),
    "fashion-dirichlet-4x4": Setting(
        "four sets of label shares",
        "second", "fashion_mnist", Dirichlet(alpha=0.2, clusters=4), (4,) * 4,
        samples=(200,), dealt=400),
    "cifar10-permutation-3x3": Setting(
        "permuted labels on colour images",
        "second", "cifar10", LabelPermutation(3), (3,) * 3, samples=(160,), dealt=400),
    "fashion-rotation-7-3-2": Setting(
        "turned images, clusters of unequal size, 40 to 400 samples a client",
        "second", "fashion_mnist", Rotation(3), (7, 3, 2), samples=(120, 40, 400), dealt=600),
    "digits-tasks-2x7": Setting(
        "two tasks of five labels, small images",
        "second", "digits", Tasks(), (7, 7), samples=(80,), dealt=80),
    # in the first look SR-FCA's unweighted means counted clients with 30 samples as much as those
    # with 90; since then means are weighted by default
    "mobility-topics-7-3": Setting(
        "trajectories, groups (a reference) of unequal size, 30 or 90 samples a client",
        "second", "mobility", Topics(clusters=2), (7, 3), samples=(30, 90), dealt=160),
    "mnist-mixture-40-3x6": Setting(
        "permuted labels, 40 % of each client's samples of other clusters",
        "second", "mnist", LabelPermutation(3), (6,) * 3, samples=(150,), dealt=400, foreign=0.4),
    # in the first look three clients with 20 samples became tasks of their own in one-shot
    # clustering; since then no cut leaves one task and lone clients
    "fashion-iid-9": Setting(
        "clients of one distribution, 20 to 600 samples a client",
        "second", "fashion_mnist", Iid(), (9,), samples=(20, 60, 180, 600), dealt=800, k=3),
    "femnist-writers-nested-4x5": Setting(
        "writers, permuted labels within turned and upright images",
        "second", "femnist", Natural() + LabelPermutation(2) + Rotation(2), (5,) * 4,
        samples=(120,), dealt=120),
}

# what federations have every day, and the twenty settings above do not: label skew of each client
# within clusters, feature noise, outliers, one swapped pair, few foreign samples, unequal sizes
# fmt: off
EVERYDAY: dict[str, Setting] = {
    "mnist-swap-skew-0.5-4x4": Setting(
        "swapped labels, each client's shares of labels from Dir(0.5)",
        "first", "mnist", LabelSwap(4) + ClientDirichlet(0.5), (4,) * 4, samples=(120,), dealt=240),
    "fashion-permutation-skew-0.3-3x5": Setting(
        "permuted labels, shares of labels from Dir(0.3)",
        "first", "fashion_mnist", LabelPermutation(3) + ClientDirichlet(0.3), (5,) * 3,
        samples=(120,), dealt=240),
    "mnist-rotation-skew-1-3x5": Setting(
        "turned images, shares of labels from Dir(1)",
        "first", "mnist", Rotation(3) + ClientDirichlet(1.0), (5,) * 3, samples=(120,), dealt=240),
    "mnist-skew-0.5-14": Setting(
        "one task, shares of labels from Dir(0.5)",
        "first", "mnist", ClientDirichlet(0.5), (14,), samples=(120,), dealt=240, k=3),
    "fashion-noise-14": Setting(
        "one task, half of the clients with noise of 0.5 in their features",
        "first", "fashion_mnist", Iid(), (14,), samples=(100,), dealt=200, k=3, noise=0.5),
    "mnist-outlier-14-1": Setting(
        "one client of 15 with permuted labels",
        "first", "mnist", LabelPermutation(2), (14, 1), samples=(80,), dealt=200),
    "fashion-pair-2x7": Setting(
        "half of the clients swap one pair of labels",
        "first", "fashion_mnist", OnePair(), (7, 7), samples=(100,), dealt=200),
    "mnist-nested-4x4": Setting(
        "permuted labels within upright and turned images",
        "first", "mnist", LabelPermutation(2) + Rotation(2), (4,) * 4, samples=(100,), dealt=200),
    "mnist-mixture-20-2x7": Setting(
        "swapped labels, a fifth of each client's samples of the other cluster",
        "first", "mnist", LabelSwap(2), (7, 7), samples=(100,), dealt=200, foreign=0.2),
    "mnist-swap-2-4-8-16": Setting(
        "swapped labels, clusters of sizes 1:2:4:8",
        "first", "mnist", LabelSwap(4), (2, 4, 8, 16), samples=(80,), dealt=160),
    "fashion-permutation-20-400": Setting(
        "permuted labels, 20 to 400 samples a client",
        "first", "fashion_mnist", LabelPermutation(3), (5,) * 3,
        samples=(20, 40, 80, 160, 400), dealt=400),
    "digits-permutation-8x3": Setting(
        "eight clusters, small images",
        "first", "digits", LabelPermutation(8), (3,) * 8, samples=(50,), dealt=56),
    # second half
    "fashion-swap-skew-0.3-3x5": Setting(
        "swapped labels, shares of labels from Dir(0.3)",
        "second", "fashion_mnist", LabelSwap(3) + ClientDirichlet(0.3), (5,) * 3,
        samples=(120,), dealt=240),
    "mnist-permutation-skew-1-4x4": Setting(
        "permuted labels, shares of labels from Dir(1)",
        "second", "mnist", LabelPermutation(4) + ClientDirichlet(1.0), (4,) * 4,
        samples=(120,), dealt=240),
    "fashion-rotation-skew-0.5-2x7": Setting(
        "turned images, shares of labels from Dir(0.5)",
        "second", "fashion_mnist", Rotation(2) + ClientDirichlet(0.5), (7, 7),
        samples=(120,), dealt=240),
    "fashion-skew-0.3-14": Setting(
        "one task, shares of labels from Dir(0.3)",
        "second", "fashion_mnist", ClientDirichlet(0.3), (14,), samples=(120,), dealt=240, k=3),
    "mnist-noise-14": Setting(
        "one task, half of the clients with noise of 0.5 in their features",
        "second", "mnist", Iid(), (14,), samples=(100,), dealt=200, k=3, noise=0.5),
    "fashion-outlier-14-1": Setting(
        "one client of 15 with permuted labels",
        "second", "fashion_mnist", LabelPermutation(2), (14, 1), samples=(80,), dealt=200),
    "mnist-pair-2x7": Setting(
        "half of the clients swap one pair of labels",
        "second", "mnist", OnePair(), (7, 7), samples=(100,), dealt=200),
    "fashion-nested-pair-4x4": Setting(
        "one swapped pair within permuted labels",
        "second", "fashion_mnist", LabelPermutation(2) + OnePair(), (4,) * 4,
        samples=(100,), dealt=200),
    "fashion-mixture-20-3x4": Setting(
        "permuted labels, a fifth of each client's samples of other clusters",
        "second", "fashion_mnist", LabelPermutation(3), (4,) * 3,
        samples=(100,), dealt=200, foreign=0.2),
    "fashion-rotation-2-4-8": Setting(
        "turned images, clusters of sizes 1:2:4",
        "second", "fashion_mnist", Rotation(3), (2, 4, 8), samples=(100,), dealt=200),
    "mnist-swap-20-400": Setting(
        "swapped labels, 20 to 400 samples a client",
        "second", "mnist", LabelSwap(3), (5,) * 3, samples=(20, 40, 80, 160, 400), dealt=400),
    "fashion-swap-5x3": Setting(
        "five clusters",
        "second", "fashion_mnist", LabelSwap(5), (3,) * 5, samples=(120,), dealt=240),
    "mnist-permutation-6x3": Setting(
        "six clusters",
        "second", "mnist", LabelPermutation(6), (3,) * 6, samples=(100,), dealt=200),
    "mnist-permutation-10x3": Setting(
        "ten clusters",
        "second", "mnist", LabelPermutation(10), (3,) * 10, samples=(100,), dealt=200),
    "mnist-swap-4x50": Setting(
        "two hundred clients with 30 samples",
        "second", "mnist", LabelSwap(4), (50,) * 4, samples=(30,), dealt=60),
}
