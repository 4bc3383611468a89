"""Settings of `benchmarks.robust`: twenty of the first table, and those of everyday federations.

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


# names: data, what differs, and clusters x clients or the clients of each cluster
SETTINGS: dict[str, Setting] = {
    "mnist-permutation-12x3": Setting(
        about="twelve small clusters",
        half="first",
        data="mnist",
        scenario=LabelPermutation(12),
        sizes=(3,) * 12,
        samples=(100,),
        dealt=200,
    ),
    "fashion-swap-9-5-2": Setting(
        about="swapped labels, clusters of unequal size, 30 to 300 samples a client",
        half="first",
        data="fashion_mnist",
        scenario=LabelSwap(3),
        sizes=(9, 5, 2),
        samples=(100, 30, 300),
        dealt=400,
    ),
    "digits-pathological-3x4": Setting(
        about="three labels a client, small images",
        half="first",
        data="digits",
        scenario=Pathological(labels=3, clusters=3),
        sizes=(4,) * 3,
        samples=(60,),
        dealt=88,
    ),
    "cifar10-dirichlet-2x5": Setting(
        about="two sets of label shares on colour images",
        half="first",
        data="cifar10",
        scenario=Dirichlet(alpha=0.2, clusters=2),
        sizes=(5, 5),
        samples=(150,),
        dealt=320,
    ),
    "mnist-rotation-5-2": Setting(
        about="seven clients, turned images, 60 to 600 samples a client",
        half="first",
        data="mnist",
        scenario=Rotation(2),
        sizes=(5, 2),
        samples=(600, 60, 240),
        dealt=800,
    ),
    "fashion-nested-4x6": Setting(
        about="swapped labels within negatives and images",
        half="first",
        data="fashion_mnist",
        scenario=LabelSwap(2) + Inversion(),
        sizes=(6,) * 4,
        samples=(120,),
        dealt=320,
    ),
    "fashion-mixture-25-5x4": Setting(
        about="permuted labels, a quarter of each client's samples of other clusters",
        half="first",
        data="fashion_mnist",
        scenario=LabelPermutation(5),
        sizes=(4,) * 5,
        samples=(120,),
        dealt=400,
        foreign=0.25,
    ),
    "mnist-iid-100": Setting(
        about="a hundred clients of one distribution",
        half="first",
        data="mnist",
        scenario=Iid(),
        sizes=(100,),
        samples=(40,),
        dealt=80,
        # IID clients are one true cluster, and k = 1 would make IFCA and Local-KMeans FedAvg
        k=3,
    ),
    "femnist-writers-permutation-12-8": Setting(
        about="writers, permuted labels, clusters of unequal size",
        half="first",
        data="femnist",
        scenario=Natural() + LabelPermutation(2),
        sizes=(12, 8),
        samples=(120,),
        dealt=120,
    ),
    # metric: position error in metres, where less is better
    "mobility-topics-2x5": Setting(
        about="trajectories, of which the groups by home and work area are only a reference",
        half="first",
        data="mobility",
        scenario=Topics(clusters=2),
        sizes=(5, 5),
        samples=(60,),
        dealt=160,
    ),
    # second half: run once, when the defaults no longer changed
    "fashion-permutation-9x4": Setting(
        about="nine clusters",
        half="second",
        data="fashion_mnist",
        scenario=LabelPermutation(9),
        sizes=(4,) * 9,
        samples=(90,),
        dealt=200,
    ),
    "mnist-swap-40-30-20-10": Setting(
        about="a hundred clients, clusters of unequal size, 20 to 60 samples a client",
        half="second",
        data="mnist",
        scenario=LabelSwap(4),
        sizes=(40, 30, 20, 10),
        samples=(20, 40, 60),
        dealt=80,
    ),
    "fashion-dirichlet-4x4": Setting(
        about="four sets of label shares",
        half="second",
        data="fashion_mnist",
        scenario=Dirichlet(alpha=0.2, clusters=4),
        sizes=(4,) * 4,
        samples=(200,),
        dealt=400,
    ),
    "cifar10-permutation-3x3": Setting(
        about="permuted labels on colour images",
        half="second",
        data="cifar10",
        scenario=LabelPermutation(3),
        sizes=(3,) * 3,
        samples=(160,),
        dealt=400,
    ),
    "fashion-rotation-7-3-2": Setting(
        about="turned images, clusters of unequal size, 40 to 400 samples a client",
        half="second",
        data="fashion_mnist",
        scenario=Rotation(3),
        sizes=(7, 3, 2),
        samples=(120, 40, 400),
        dealt=600,
    ),
    "digits-tasks-2x7": Setting(
        about="two tasks of five labels, small images",
        half="second",
        data="digits",
        scenario=Tasks(),
        sizes=(7, 7),
        samples=(80,),
        dealt=80,
    ),
    # in the first look SR-FCA's unweighted means counted clients with 30 samples as much as those
    # with 90; since then means are weighted by default
    "mobility-topics-7-3": Setting(
        about="trajectories, groups (a reference) of unequal size, 30 or 90 samples a client",
        half="second",
        data="mobility",
        scenario=Topics(clusters=2),
        sizes=(7, 3),
        samples=(30, 90),
        dealt=160,
    ),
    "mnist-mixture-40-3x6": Setting(
        about="permuted labels, 40 % of each client's samples of other clusters",
        half="second",
        data="mnist",
        scenario=LabelPermutation(3),
        sizes=(6,) * 3,
        samples=(150,),
        dealt=400,
        foreign=0.4,
    ),
    # in the first look three clients with 20 samples became tasks of their own in one-shot
    # clustering; since then no cut leaves one task and lone clients
    "fashion-iid-9": Setting(
        about="clients of one distribution, 20 to 600 samples a client",
        half="second",
        data="fashion_mnist",
        scenario=Iid(),
        sizes=(9,),
        samples=(20, 60, 180, 600),
        dealt=800,
        k=3,
    ),
    "femnist-writers-nested-4x5": Setting(
        about="writers, permuted labels within turned and upright images",
        half="second",
        data="femnist",
        scenario=Natural() + LabelPermutation(2) + Rotation(2),
        sizes=(5,) * 4,
        samples=(120,),
        dealt=120,
    ),
}

# what federations have every day, and the twenty settings above do not: label skew of each client
# within clusters, feature noise, outliers, one swapped pair, few foreign samples, unequal sizes
EVERYDAY: dict[str, Setting] = {
    "mnist-swap-skew-0.5-4x4": Setting(
        about="swapped labels, each client's shares of labels from Dir(0.5)",
        half="first",
        data="mnist",
        scenario=LabelSwap(4) + ClientDirichlet(0.5),
        sizes=(4,) * 4,
        samples=(120,),
        dealt=240,
    ),
    "fashion-permutation-skew-0.3-3x5": Setting(
        about="permuted labels, shares of labels from Dir(0.3)",
        half="first",
        data="fashion_mnist",
        scenario=LabelPermutation(3) + ClientDirichlet(0.3),
        sizes=(5,) * 3,
        samples=(120,),
        dealt=240,
    ),
    "mnist-rotation-skew-1-3x5": Setting(
        about="turned images, shares of labels from Dir(1)",
        half="first",
        data="mnist",
        scenario=Rotation(3) + ClientDirichlet(1.0),
        sizes=(5,) * 3,
        samples=(120,),
        dealt=240,
    ),
    "mnist-skew-0.5-14": Setting(
        about="one task, shares of labels from Dir(0.5)",
        half="first",
        data="mnist",
        scenario=ClientDirichlet(0.5),
        sizes=(14,),
        samples=(120,),
        dealt=240,
        k=3,
    ),
    "fashion-noise-14": Setting(
        about="one task, half of the clients with noise of 0.5 in their features",
        half="first",
        data="fashion_mnist",
        scenario=Iid(),
        sizes=(14,),
        samples=(100,),
        dealt=200,
        k=3,
        noise=0.5,
    ),
    "mnist-outlier-14-1": Setting(
        about="one client of 15 with permuted labels",
        half="first",
        data="mnist",
        scenario=LabelPermutation(2),
        sizes=(14, 1),
        samples=(80,),
        dealt=200,
    ),
    "fashion-pair-2x7": Setting(
        about="half of the clients swap one pair of labels",
        half="first",
        data="fashion_mnist",
        scenario=OnePair(),
        sizes=(7, 7),
        samples=(100,),
        dealt=200,
    ),
    "mnist-nested-4x4": Setting(
        about="permuted labels within upright and turned images",
        half="first",
        data="mnist",
        scenario=LabelPermutation(2) + Rotation(2),
        sizes=(4,) * 4,
        samples=(100,),
        dealt=200,
    ),
    "mnist-mixture-20-2x7": Setting(
        about="swapped labels, a fifth of each client's samples of the other cluster",
        half="first",
        data="mnist",
        scenario=LabelSwap(2),
        sizes=(7, 7),
        samples=(100,),
        dealt=200,
        foreign=0.2,
    ),
    "mnist-swap-2-4-8-16": Setting(
        about="swapped labels, clusters of sizes 1:2:4:8",
        half="first",
        data="mnist",
        scenario=LabelSwap(4),
        sizes=(2, 4, 8, 16),
        samples=(80,),
        dealt=160,
    ),
    "fashion-permutation-20-400": Setting(
        about="permuted labels, 20 to 400 samples a client",
        half="first",
        data="fashion_mnist",
        scenario=LabelPermutation(3),
        sizes=(5,) * 3,
        samples=(20, 40, 80, 160, 400),
        dealt=400,
    ),
    "digits-permutation-8x3": Setting(
        about="eight clusters, small images",
        half="first",
        data="digits",
        scenario=LabelPermutation(8),
        sizes=(3,) * 8,
        samples=(50,),
        dealt=56,
    ),
    # second half
    "fashion-swap-skew-0.3-3x5": Setting(
        about="swapped labels, shares of labels from Dir(0.3)",
        half="second",
        data="fashion_mnist",
        scenario=LabelSwap(3) + ClientDirichlet(0.3),
        sizes=(5,) * 3,
        samples=(120,),
        dealt=240,
    ),
    "mnist-permutation-skew-1-4x4": Setting(
        about="permuted labels, shares of labels from Dir(1)",
        half="second",
        data="mnist",
        scenario=LabelPermutation(4) + ClientDirichlet(1.0),
        sizes=(4,) * 4,
        samples=(120,),
        dealt=240,
    ),
    "fashion-rotation-skew-0.5-2x7": Setting(
        about="turned images, shares of labels from Dir(0.5)",
        half="second",
        data="fashion_mnist",
        scenario=Rotation(2) + ClientDirichlet(0.5),
        sizes=(7, 7),
        samples=(120,),
        dealt=240,
    ),
    "fashion-skew-0.3-14": Setting(
        about="one task, shares of labels from Dir(0.3)",
        half="second",
        data="fashion_mnist",
        scenario=ClientDirichlet(0.3),
        sizes=(14,),
        samples=(120,),
        dealt=240,
        k=3,
    ),
    "mnist-noise-14": Setting(
        about="one task, half of the clients with noise of 0.5 in their features",
        half="second",
        data="mnist",
        scenario=Iid(),
        sizes=(14,),
        samples=(100,),
        dealt=200,
        k=3,
        noise=0.5,
    ),
    "fashion-outlier-14-1": Setting(
        about="one client of 15 with permuted labels",
        half="second",
        data="fashion_mnist",
        scenario=LabelPermutation(2),
        sizes=(14, 1),
        samples=(80,),
        dealt=200,
    ),
    "mnist-pair-2x7": Setting(
        about="half of the clients swap one pair of labels",
        half="second",
        data="mnist",
        scenario=OnePair(),
        sizes=(7, 7),
        samples=(100,),
        dealt=200,
    ),
    "fashion-nested-pair-4x4": Setting(
        about="one swapped pair within permuted labels",
        half="second",
        data="fashion_mnist",
        scenario=LabelPermutation(2) + OnePair(),
        sizes=(4,) * 4,
        samples=(100,),
        dealt=200,
    ),
    "fashion-mixture-20-3x4": Setting(
        about="permuted labels, a fifth of each client's samples of other clusters",
        half="second",
        data="fashion_mnist",
        scenario=LabelPermutation(3),
        sizes=(4,) * 3,
        samples=(100,),
        dealt=200,
        foreign=0.2,
    ),
    "fashion-rotation-2-4-8": Setting(
        about="turned images, clusters of sizes 1:2:4",
        half="second",
        data="fashion_mnist",
        scenario=Rotation(3),
        sizes=(2, 4, 8),
        samples=(100,),
        dealt=200,
    ),
    "mnist-swap-20-400": Setting(
        about="swapped labels, 20 to 400 samples a client",
        half="second",
        data="mnist",
        scenario=LabelSwap(3),
        sizes=(5,) * 3,
        samples=(20, 40, 80, 160, 400),
        dealt=400,
    ),
    "fashion-swap-5x3": Setting(
        about="five clusters",
        half="second",
        data="fashion_mnist",
        scenario=LabelSwap(5),
        sizes=(3,) * 5,
        samples=(120,),
        dealt=240,
    ),
    "mnist-permutation-6x3": Setting(
        about="six clusters",
        half="second",
        data="mnist",
        scenario=LabelPermutation(6),
        sizes=(3,) * 6,
        samples=(100,),
        dealt=200,
    ),
    "mnist-permutation-10x3": Setting(
        about="ten clusters",
        half="second",
        data="mnist",
        scenario=LabelPermutation(10),
        sizes=(3,) * 10,
        samples=(100,),
        dealt=200,
    ),
    "mnist-swap-4x50": Setting(
        about="two hundred clients with 30 samples",
        half="second",
        data="mnist",
        scenario=LabelSwap(4),
        sizes=(50,) * 4,
        samples=(30,),
        dealt=60,
    ),
}
