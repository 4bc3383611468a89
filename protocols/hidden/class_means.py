"""A client's point: the means of its samples by class, sketched to a few numbers.

Clients whose labels mean other things, or whose samples look different, have other class means,
with whatever frequencies the classes occur. Nothing here is learned from data: the lowest
frequencies of images and the sketch are public. At the unit of a whole client, a mean over its
samples costs no more than their sum, since the point is scaled to norm 1 before it is used.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from securecluster.clustering.labels import Array
from securecluster.core.lazy_torch import torch
from securecluster.privacy.low_frequencies import lowest_waves
from securecluster.protocols import authoring as fl

# A class of n samples counts n/(n + PRIOR) of its mean: few samples say little about a class.
PRIOR = 2.0
LONGEST_ROW = 256  # numbers of a class mean by itself


@dataclass(frozen=True)
class ClassMeans:
    """A public map from a client's samples to q numbers.

    Args:
        shape: of a sample.
        classes: number of classes.
        size: q.
        seed: of the run, which determines the sketch.
    """

    shape: tuple[int, ...]
    classes: int
    size: int
    seed: int

    def point(self, inputs: torch.Tensor, labels: Sequence[int]) -> Array:
        """Return a client's point, (q,) float64, of any norm.

        It has no number of samples in it, but that rare classes count less.

        Args:
            inputs: (n, ...) samples.
            labels: (n,) their classes.
        """
        return self.point_of_means(*self._means(inputs, labels))

    def parts(self, inputs: torch.Tensor, labels: Sequence[int]) -> tuple[Array, Array]:
        """Return what each class adds to a client's point, (c, q), and its weight, (c,).

        Args:
            inputs: (n, ...) samples.
            labels: (n,) their classes.
        """
        return self.parts_of_means(*self._means(inputs, labels))

    def class_rows(self, inputs: torch.Tensor, labels: Sequence[int]) -> tuple[Array, Array]:
        """Return a client's class means by themselves, (c, g), and their weights, (c,).

        Args:
            inputs: (n, ...) samples.
            labels: (n,) their classes.
        """
        return self.class_rows_of_means(*self._means(inputs, labels))

    def class_rows_of_means(self, means: Array, counts: Array) -> tuple[Array, Array]:
        """Return class means without what they have in common, (c, g), and weights, (c,).

        Images lose their mean brightness, which varies most and tells least about a class. Longer
        rows are sketched, by one public map for all classes.

        Args:
            means: (c, f) of `smooth`; zeros for a class without samples.
            counts: (c,) numbers of samples.
        """
        rows = self._centred(means, counts)
        if len(self.shape) == 3:
            # the first frequency of each channel is its mean
            by_channel = rows.reshape(self.classes, self.shape[0], -1)
            rows = by_channel[:, :, 1:].reshape(self.classes, -1)
        if rows.shape[1] > LONGEST_ROW:
            rows = rows @ self._row_sketch(rows.shape[1])
        return np.asarray(rows), _weights(counts)

    @property
    def row_length(self) -> int:
        """Return g, the numbers of a row of `class_rows`."""
        nothing = np.zeros((self.classes, math.prod(self.shape)))
        rows, _ = self.class_rows_of_means(self.smooth(nothing), np.zeros(self.classes))
        return int(rows.shape[1])

    @cached_property
    def first_anchors(self) -> Array:
        """Return public draws, (c, g), that class means are matched to first."""
        generator = fl.Randomness(self.seed).generator("hidden", "anchors")
        return generator.standard_normal((self.classes, self.row_length))

    def _row_sketch(self, length: int) -> Array:
        """Return the public sketch of long rows, (length, g)."""
        generator = fl.Randomness(self.seed).generator("hidden", "rows")
        return generator.standard_normal((length, LONGEST_ROW))

    def _means(self, inputs: torch.Tensor, labels: Sequence[int]) -> tuple[Array, Array]:
        """Return a client's smoothed class means, (c, f), and its counts, (c,)."""
        flat = inputs.flatten(1).cpu().double()
        numbers = torch.as_tensor(np.asarray(labels), dtype=torch.int64)
        sums = torch.zeros(self.classes, flat.shape[1], dtype=torch.float64)
        sums.index_add_(0, numbers, flat)
        counts = torch.bincount(numbers, minlength=self.classes).double().numpy()
        divisors = np.maximum(counts, 1.0)  # a class without samples has the sum 0
        return self.smooth(sums.numpy() / divisors[:, None]), counts

    def point_of_means(self, means: Array, counts: Array) -> Array:
        """Return the point of a client, (q,), from its smoothed class means.

        Args:
            means: (c, f) of `smooth`; zeros for a class without samples.
            counts: (c,) numbers of samples.
        """
        return np.asarray(self._centred(means, counts).ravel() @ self._sketch)

    def parts_of_means(self, means: Array, counts: Array) -> tuple[Array, Array]:
        """Return what each class adds to the point of a client, (c, q), and its weight, (c,).

        Args:
            means: (c, f) of `smooth`; zeros for a class without samples.
            counts: (c,) numbers of samples.
        """
        centred = self._centred(means, counts)
        by_class = self._sketch.reshape(*centred.shape, self.size)
        contributions = (centred[:, None] @ by_class)[:, 0]
        return np.asarray(contributions), _weights(counts)

    def _centred(self, means: Array, counts: Array) -> Array:
        """Return the weighted class means of a client without what they have in common, (c, f)."""
        weights = _weights(counts)
        # What all of a client's classes have in common tells nothing about its labels, and with
        # few samples it varies more than anything else.
        weight_sum = max(weights.sum(), np.finfo(np.float64).tiny)
        centre = weights @ means / weight_sum
        return np.asarray(weights[:, None] * (means - centre))

    def smooth(self, means: Array) -> Array:
        """Return the lowest frequencies of images, (c, f); other samples as they are, (c, D).

        Args:
            means: (c, D) of samples, or sums of them.
        """
        if len(self.shape) != 3:
            return means
        channels, height, width = self.shape
        images = means.reshape(len(means), channels, height, width)
        # a two-dimensional DCT is one along columns and one along rows
        spectra = lowest_waves(height) @ images @ lowest_waves(width).T
        return np.asarray(spectra.reshape(len(means), -1))

    @property
    def length(self) -> int:
        """Return c·f, the numbers of all class means."""
        return self.smooth(np.zeros((self.classes, math.prod(self.shape)))).size

    @cached_property
    def _sketch(self) -> Array:
        """Return the public sketch, (c·f, q)."""
        generator = fl.Randomness(self.seed).generator("hidden", "sketch")
        return generator.standard_normal((self.length, self.size))


def _weights(counts: Array) -> Array:
    """Return the weights of classes in a point, (c,), of their numbers of samples."""
    return np.asarray(counts / (counts + PRIOR))
