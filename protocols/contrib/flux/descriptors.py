"""Descriptors of a client's distribution: moments of its latent vectors, of all and by class.

Fenoglio, Li, Barbiero, Lane, Langheinrich, Gjoreski, "FLUX: Efficient Descriptor-Driven Clustered
Federated Learning under Arbitrary Distribution Shifts", NeurIPS 2025 (arXiv 2511.22305).

A sample's latent vector passes the public map ξ: the l leading principal directions of random
points. The descriptor is d = [μ_x, σ_x, μ_1 … μ_U, σ_1 … σ_U]: means and standard deviations of the
l numbers over all samples, and over those of each class u. A class of fewer than two samples has
`LACKING` in place of its moments, as in the authors' program.

With noise (not in the paper), a client first sums over its samples

    φ(x, u) = a · (e_u, e_u ⊗ z, e_u ⊗ z²),  |z| ≤ 1,  a = 1/√3,

where e_u has a 1 at the sample's class, and z is the projection, scaled and clipped (`bounded`).
Since |z²| ≤ |z| ≤ 1, ‖φ‖ ≤ 1: blanking a sample moves the sum by at most 1. Replacing one moves it
by at most √2: two samples of other classes have orthogonal φ, and for two of one class the square
is at most a²(4 + 2). Without second moments a = 1/√2, and the square is at most 4a². The mean of φ
over a client's samples lies in the convex hull, so it keeps both bounds for a whole client. The
moments are then computed from the noisy sum, and cost nothing more.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from securecluster.protocols import authoring as fl

torch = fl.torch

Array = NDArray[np.float64]
LACKING = -1.0  # moments of a class of fewer than `FEWEST` samples
FEWEST = 2
POINTS = 200  # random points whose principal directions are ξ, as in the authors' program
REACH = 1.0  # the largest ‖φ‖
REPLACE = math.sqrt(2)  # ‖φ − φ'‖ of any two samples over it
# A class counts as this many standard deviations of the noise of its number of samples at least.
DEVIATIONS = 2.0


@dataclass(frozen=True)
class DescriptorMap:
    """Public map from samples to descriptors, which clients and server agreed on.

    Args:
        latents: D, numbers of a latent vector.
        components: l.
        classes: U.
        seed: of the run, which determines ξ.
        second: whether there are standard deviations beside means.
        clip: norm to which the scaled projection of a sample is clipped in runs with noise.
    """

    latents: int
    components: int
    classes: int
    seed: int
    second: bool = True
    clip: float = 1.0

    @property
    def kinds(self) -> int:
        """Return how many moments there are, 1 or 2."""
        return 2 if self.second else 1

    @property
    def blocks(self) -> int:
        """Return the rows of a descriptor, each of l numbers: moments of all and of each class."""
        return self.kinds * (self.classes + 1)

    @property
    def weight(self) -> float:
        """Return a, by which ‖φ‖ is at most 1."""
        return 1 / math.sqrt(1 + self.kinds)

    @cached_property
    def directions(self) -> Array:
        """Return ξ, orthonormal rows (l, D).

        The authors' program draws the points between 0 and the largest latent number of any client.
        The scale changes no direction, so nobody has to tell that number here.
        """
        generator = fl.Randomness(self.seed).generator("flux", "points")
        points = generator.random((POINTS, self.latents))
        centred = points - points.mean(0)
        _, _, principal = np.linalg.svd(centred, full_matrices=False)
        leading = principal[: self.components]
        # The sign of a direction is arbitrary, and all machines have to choose the same one.
        largest = np.abs(leading).argmax(1)
        signs = np.sign(leading[np.arange(len(leading)), largest])
        return np.ascontiguousarray(signs[:, None] * leading)

    def projected(self, latents: Array) -> Array:
        """Return ξ of latent vectors, (n, l).

        Args:
            latents: (n, D).
        """
        return np.asarray(latents @ self.directions.T)

    def bounded(self, latents: Array) -> Array:
        """Return ξ of latent vectors at a public scale, with rows of norm 1 at most, (n, l).

        A latent vector is scaled to norm √(D/l), so that its projection has about norm 1 whatever
        the network, and the projection is clipped (not in the paper). The rule considers one sample
        at a time. A vector that is not finite becomes zeros.

        Args:
            latents: (n, D).
        """
        finite = np.isfinite(latents).all(1, keepdims=True)
        rows = np.where(finite, latents, 0.0)
        # A norm whose square overflows would turn a row into zeros and another into NaN.
        largest = np.abs(rows).max(1, keepdims=True, initial=0.0)
        rows = rows / np.where(largest > 0, largest, 1.0)
        norms = np.linalg.norm(rows, axis=1, keepdims=True)
        unit = rows / np.where(norms > 0, norms, 1.0)
        z = math.sqrt(self.latents / self.components) * self.projected(unit)
        lengths = np.linalg.norm(z, axis=1, keepdims=True)
        clipped: Array = z / np.maximum(lengths, self.clip)
        return clipped

    def moments(self, latents: Array, labels: NDArray[np.int64]) -> Array:
        """Return the exact descriptor of a client, (blocks, l).

        Args:
            latents: (n, D).
            labels: (n,) classes.
        """
        z = self.projected(latents)
        of_all = self._moments_of(z)
        means = []
        deviations = []
        for u in range(self.classes):
            mean, deviation = self._moments_of(z[labels == u])
            means.append(mean)
            deviations.append(deviation)
        return self._stacked(*of_all, np.array(means), np.array(deviations))

    def _moments_of(self, z: Array) -> tuple[Array, Array]:
        """Return mean and standard deviation of each number, (l,), or `LACKING`."""
        if len(z) < FEWEST:
            lacking = np.full(z.shape[1], LACKING)
            return lacking, lacking
        return z.mean(0), z.std(0)

    def feature_moments(self, latents: Array) -> Array:
        """Return the part of the descriptor that needs no labels, (kinds, l).

        Args:
            latents: (n, D).
        """
        return np.stack(self._moments_of(self.projected(latents)))[: self.kinds]

    def sums(self, latents: Array, labels: NDArray[np.int64] | None) -> Array:
        """Return Σ φ over a client's samples, (U, 1 + kinds · l); (1, …) without labels.

        A sample whose latent vector is not finite counts as blank, φ = 0: an error would be a
        release without noise.

        Args:
            latents: (n, D).
            labels: (n,) classes; None takes all samples as one class.
        """
        z = self.bounded(latents)
        finite = np.isfinite(latents).all(1, keepdims=True)
        columns = [finite.astype(np.float64), z]
        if self.second:
            columns.append(z**2)
        phi = self.weight * np.hstack(columns)
        classes = 1 if labels is None else self.classes
        class_sums = np.zeros((classes, phi.shape[1]))
        of_class = np.zeros(len(z), dtype=np.int64) if labels is None else labels
        np.add.at(class_sums, of_class, phi)
        return class_sums

    def moments_of_sums(self, sums: Array, deviation: float) -> Array:
        """Return the descriptor that follows from a noisy sum, (blocks, l).

        A class's number of samples has noise, too. It counts as `DEVIATIONS` of its standard
        deviations at least, so that moments of rare classes shrink instead of having noise without
        bounds (not in the paper). No class is `LACKING`.

        Args:
            sums: (U, 1 + kinds · l) with noise; (1, …) for the part that needs no labels.
            deviation: standard deviation of the noise of each number.
        """
        unweighted = sums / self.weight
        minimum_count = max(DEVIATIONS * deviation / self.weight, np.finfo(np.float64).tiny)
        means, deviations = self._shrunk(unweighted, minimum_count)
        # Numbers of all samples are sums over classes, whose noise adds up.
        over_classes = unweighted.sum(0, keepdims=True)
        mean, spread = self._shrunk(over_classes, minimum_count * math.sqrt(len(unweighted)))
        if len(sums) == 1:
            return np.stack([mean[0], spread[0]])[: self.kinds]
        return self._stacked(mean[0], spread[0], means, deviations)

    def _shrunk(self, unweighted: Array, minimum_count: float) -> tuple[Array, Array]:
        """Return means and deviations, (c, l) each, by counts of samples from `minimum_count`."""
        counts = np.maximum(unweighted[:, :1], minimum_count)
        end = 1 + self.components
        means = unweighted[:, 1:end] / counts
        if not self.second:
            return means, np.zeros_like(means)
        squares = unweighted[:, end:] / counts
        return means, np.sqrt(np.maximum(squares - means**2, 0.0))

    def _stacked(self, mean: Array, spread: Array, means: Array, spreads: Array) -> Array:
        """Return the moments in the paper's order, (blocks, l)."""
        rows = [mean[None], spread[None], means, spreads]
        if not self.second:
            rows = rows[::2]
        return np.concatenate(rows)

    def torch_moments_of_sums(self, sums: torch.Tensor, deviation: float) -> torch.Tensor:
        """Return the descriptors of several clients' noisy sums, (b, blocks, l) or (b, kinds, l).

        Args:
            sums: (b, U, 1 + kinds · l) or (b, 1, …).
            deviation: standard deviation of the noise of each number.
        """
        array = sums.double().cpu().numpy()
        descriptors = [self.moments_of_sums(rows, deviation) for rows in array]
        return torch.from_numpy(np.stack(descriptors))


def latent_layer(module: torch.nn.Module) -> torch.nn.Linear | None:
    """Return the dense layer whose inputs are the latent vectors; None without one.

    After convolutions it is the first dense layer, as in the authors' program; of other networks it
    is the last one (not in the paper).

    Args:
        module: the network.
    """
    dense = [layer for layer in module.modules() if isinstance(layer, torch.nn.Linear)]
    if not dense:
        return None
    convolves = any(isinstance(m, torch.nn.modules.conv._ConvNd) for m in module.modules())
    return dense[0] if convolves else dense[-1]
