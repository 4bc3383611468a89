"""How clients come to hold data from different distributions, with each client's true cluster known."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from securecluster.errors import UsageError
from securecluster.randomness import Randomness

Features = NDArray[np.float32]
Labels = NDArray[np.int64]


@dataclass(frozen=True)
class Scenario:
    """Deals a pool to clients and makes the clusters differ; training and test data are treated alike."""

    name: ClassVar[str]
    clusters: int = 1

    def check(self, clients: int, classes: int) -> None:
        """Raise UsageError where the combination cannot be made."""
        if self.clusters < 1:
            raise UsageError(f"{self.clusters} clusters cannot be made: ask for at least one")
        if self.clusters > clients:
            raise UsageError(f"{self.clusters} clusters among {clients} clients leave some cluster empty: use at most {clients} clusters")

    def truth(self, clients: int, randomness: Randomness) -> Labels:
        """Each client's cluster, (clients,): as even as can be, in random order."""
        return randomness.generator("scenario", "truth").permutation(np.arange(clients) % self.clusters)

    def deal(self, y: Labels, clients: int, each: int, randomness: Randomness) -> list[Labels]:
        """Disjoint random subsets of the pool, `each` indices a client."""
        order = randomness.generator("scenario", "deal").permutation(len(y))
        return [order[k * each : (k + 1) * each] for k in range(clients)]

    def transform(self, cluster: int, x: Features, y: Labels, classes: int, randomness: Randomness) -> tuple[Features, Labels]:
        """What cluster number `cluster` does to its samples."""
        return x, y


@dataclass(frozen=True)
class Iid(Scenario):
    """Everyone holds a random subset of the same data: one true cluster."""

    name: ClassVar[str] = "iid"

    def check(self, clients: int, classes: int) -> None:
        """Adds this scenario's own limit."""
        super().check(clients, classes)
        if self.clusters != 1:
            raise UsageError(f"scenario 'iid' has one cluster, not {self.clusters}: use --clusters 1, or another scenario")


@dataclass(frozen=True)
class LabelSwap(Scenario):
    """Each cluster swaps two labels of its own, disjoint pairs (Sattler et al. 2019, VI-A)."""

    name: ClassVar[str] = "label-swap"
    clusters: int = 4

    def check(self, clients: int, classes: int) -> None:
        """Adds this scenario's own limit."""
        super().check(clients, classes)
        if self.clusters > classes // 2:
            raise UsageError(
                f"scenario 'label-swap' makes at most {classes // 2} clusters of {classes} classes, a pair each, not {self.clusters}"
            )

    def transform(self, cluster: int, x: Features, y: Labels, classes: int, randomness: Randomness) -> tuple[Features, Labels]:
        """Swap the cluster's pair of labels."""
        one, other = randomness.generator("scenario", "swap").permutation(classes)[2 * cluster : 2 * cluster + 2]
        swapped = np.arange(classes)
        swapped[[one, other]] = other, one
        return x, swapped[y].astype(np.int64)


SCENARIOS: dict[str, type[Scenario]] = {s.name: s for s in (Iid, LabelSwap)}
