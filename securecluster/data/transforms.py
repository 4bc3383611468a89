"""Transforms of clusters: changes to samples, training and held-out ones alike."""

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

TURNS = {2: (0, 2), 3: (0, 1, 2), 4: (0, 1, 2, 3)}


@dataclass(frozen=True)
class LabelSwap(Transform):
    """Each cluster swaps a pair of labels of its own.

    Sattler et al. 2019, VI-A; Briggs et al. 2020.
    """

    name: ClassVar[str] = "label-swap"
    clusters: int = 4

    def check(self, source: Source, clients: int) -> None:
        """Raise UsageError beyond this scenario's own limit."""
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
        one, other = order[2 * cluster : 2 * cluster + 2]
        swapped = np.arange(classes)
        swapped[[one, other]] = other, one
        return x, swapped[y].astype(np.int64)


@dataclass(frozen=True)
class LabelPermutation(Transform):
    """Each cluster permutes all labels by a random permutation of its own.

    Sattler et al. 2019, Fig. 8.
    """

    name: ClassVar[str] = "label-permutation"
    clusters: int = 4

    def check(self, source: Source, clients: int) -> None:
        """Raise UsageError beyond this scenario's own limit."""
        super().check(source, clients)
        # 6! is more than anyone asks for
        if source.classes < 6 and self.clusters > math.factorial(source.classes):
            raise UsageError(
                f"scenario 'label-permutation' has only {math.factorial(source.classes)} "
                f"permutations of {source.classes} labels, "
                f"not {self.clusters}: ask for fewer clusters"
            )

    def transform(
        self, cluster: int, x: Features, y: Labels, classes: int, randomness: Randomness
    ) -> tuple[Features, Labels]:
        """Permute the labels."""
        return x, self.permutation(cluster, classes, randomness)[y].astype(np.int64)

    def permutation(self, cluster: int, classes: int, randomness: Randomness) -> Labels:
        """Return the cluster's permutation (classes,).

        It is the first in a random sequence that no earlier cluster has.
        """
        draw = randomness.generator("scenario", "permutation")
        different: list[list[int]] = []
        while len(different) <= cluster:
            permutation = draw.permutation(classes).tolist()
            if permutation not in different:
                different.append(permutation)
        return np.array(different[cluster], np.int64)


@dataclass(frozen=True)
class Rotation(Transform):
    """Clusters see images turned by quarters (Vardhan et al. 2024, rotated MNIST).

    Two, three and four clusters have images turned counterclockwise by 0/180, 0/90/180 and
    0/90/180/270 degrees.
    """

    name: ClassVar[str] = "rotation"
    clusters: int = 4

    def check(self, source: Source, clients: int) -> None:
        """Raise UsageError beyond this scenario's own limits."""
        super().check(source, clients)
        if self.clusters not in TURNS:
            raise UsageError(
                "scenario 'rotation' turns by quarters and makes 2, 3 or 4 clusters, not "
                f"{self.clusters}"
            )
        if not source.is_image or source.shape[-1] != source.shape[-2]:
            raise UsageError(
                f"scenario 'rotation' turns square images, and samples of {source.name} have shape "
                f"{source.shape}"
            )

    def transform(
        self, cluster: int, x: Features, y: Labels, classes: int, randomness: Randomness
    ) -> tuple[Features, Labels]:
        """Turn the images (n, channels, side, side), exactly."""
        return np.rot90(x, TURNS[self.clusters][cluster], axes=(-2, -1)), y


@dataclass(frozen=True)
class Inversion(Transform):
    """The second of two clusters sees negatives, 1 − x (Vardhan et al. 2024, inverted MNIST)."""

    name: ClassVar[str] = "inversion"
    clusters: int = 2

    def check(self, source: Source, clients: int) -> None:
        """Raise UsageError beyond this scenario's own limits."""
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
