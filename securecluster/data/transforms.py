"""Transforms of clusters, which change training and test samples alike."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from securecluster.core.randomness import Randomness
from securecluster.data.datasets import Source
from securecluster.data.pools import Features, Labels
from securecluster.data.scenario_base import Transform
from securecluster.errors import UsageError

# quarter turns of each cluster's images, by the number of clusters (Vardhan et al. 2024)
TURNS = {2: (0, 2), 3: (0, 1, 2), 4: (0, 1, 2, 3)}


@dataclass(frozen=True)
class LabelSwap(Transform):
    """Transform in which each cluster swaps one pair of labels.

    Pairs of different clusters are disjoint (Sattler et al. 2019, VI-A; Briggs et al. 2020).

    Args:
        clusters: number of true clusters.
    """

    name: ClassVar[str] = "label-swap"
    clusters: int = 4

    def check(self, source: Source, clients: int) -> None:
        """Raise UsageError for more clusters than there are disjoint pairs of labels."""
        super().check(source, clients)
        if self.clusters > source.classes // 2:
            raise UsageError(
                f"scenario 'label-swap' makes at most {source.classes // 2} clusters of "
                f"{source.classes} classes, a pair each, not {self.clusters}"
            )

    def transform(
        self, cluster: int, x: Features, y: Labels, classes: int, randomness: Randomness
    ) -> tuple[Features, Labels]:
        """Swap the cluster's pair of labels."""
        order = randomness.generator("scenario", "swap").permutation(classes)
        # consecutive pairs of a random order are disjoint
        first = order[2 * cluster]
        second = order[2 * cluster + 1]
        new_label = np.arange(classes)
        new_label[first] = second
        new_label[second] = first
        return x, new_label[y].astype(np.int64)


@dataclass(frozen=True)
class LabelPermutation(Transform):
    """Transform in which each cluster permutes all labels (Sattler et al. 2019, Fig. 8).

    Permutations are random and differ between clusters.

    Args:
        clusters: number of true clusters.
    """

    name: ClassVar[str] = "label-permutation"
    clusters: int = 4

    def check(self, source: Source, clients: int) -> None:
        """Raise UsageError for more clusters than there are permutations."""
        super().check(source, clients)
        # 6! = 720 permutations exceed any plausible number of clusters
        if source.classes >= 6:
            return
        permutations = math.factorial(source.classes)
        if self.clusters > permutations:
            raise UsageError(
                f"scenario 'label-permutation' has only {permutations} permutations of "
                f"{source.classes} labels, not {self.clusters}: ask for fewer clusters"
            )

    def transform(
        self, cluster: int, x: Features, y: Labels, classes: int, randomness: Randomness
    ) -> tuple[Features, Labels]:
        """Permute the labels."""
        new_label = self.permutation(cluster, classes, randomness)
        return x, new_label[y].astype(np.int64)

    def permutation(self, cluster: int, classes: int, randomness: Randomness) -> Labels:
        """Return the cluster's permutation of the labels (classes,).

        Args:
            cluster: number of the cluster.
            classes: number of labels.
            randomness: of the federation.
        """
        # All clusters take their permutations from one random sequence without its repetitions.
        draw = randomness.generator("scenario", "permutation")
        distinct: list[list[int]] = []
        while len(distinct) <= cluster:
            permutation = draw.permutation(classes).tolist()
            if permutation not in distinct:
                distinct.append(permutation)
        return np.array(distinct[cluster], np.int64)


@dataclass(frozen=True)
class Rotation(Transform):
    """Transform that rotates each cluster's images (Vardhan et al. 2024, rotated MNIST).

    Images of two, three and four clusters are rotated counterclockwise by 0/180, 0/90/180 and
    0/90/180/270 degrees.

    Args:
        clusters: number of true clusters.
    """

    name: ClassVar[str] = "rotation"
    clusters: int = 4

    def check(self, source: Source, clients: int) -> None:
        """Raise UsageError for other clusters than quarter turns make, or samples not square."""
        super().check(source, clients)
        if self.clusters not in TURNS:
            raise UsageError(
                "scenario 'rotation' turns by quarters and makes 2, 3 or 4 clusters, not "
                f"{self.clusters}"
            )
        # only squares have the same shape after a quarter turn
        if not source.is_image or source.shape[-1] != source.shape[-2]:
            raise UsageError(
                f"scenario 'rotation' turns square images, and samples of {source.name} have shape "
                f"{source.shape}"
            )

    def transform(
        self, cluster: int, x: Features, y: Labels, classes: int, randomness: Randomness
    ) -> tuple[Features, Labels]:
        """Rotate the images (n, channels, side, side), without interpolation."""
        quarter_turns = TURNS[self.clusters][cluster]
        return np.rot90(x, quarter_turns, axes=(-2, -1)), y


@dataclass(frozen=True)
class Inversion(Transform):
    """Transform that inverts the second cluster's images (Vardhan et al. 2024, inverted MNIST).

    A pixel x becomes 1 − x.

    Args:
        clusters: number of true clusters, which is 2.
    """

    name: ClassVar[str] = "inversion"
    clusters: int = 2

    def check(self, source: Source, clients: int) -> None:
        """Raise UsageError for other than two clusters, or samples that are no images."""
        super().check(source, clients)
        if self.clusters != 2:
            raise UsageError(
                "scenario 'inversion' has two clusters, images and their negatives, not "
                f"{self.clusters}"
            )
        if not source.is_image:
            raise UsageError(
                f"scenario 'inversion' needs images, and samples of {source.name} have shape "
                f"{source.shape}"
            )

    def transform(
        self, cluster: int, x: Features, y: Labels, classes: int, randomness: Randomness
    ) -> tuple[Features, Labels]:
        """Invert the second cluster's images."""
        if cluster:
            return np.float32(1) - x, y
        return x, y
