"""Means and deviations of features over all clients, from sums of bounded rows with noise.

A value on its public bounds lies in [−1, 1], and contributes (1, x, x²), a gap (0, 0, 0): a row of
f features has norm √(3f) at most. Noise has a known deviation. The mean and the mean square are
shrunk towards those of a feature that is uniform on its bounds, as far as the noise makes the sums
unreliable (ridge regression with the prior's variance); without noise they are those of all rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
Pairs = Sequence[tuple[Any, Any]]  # samples (x, y) of each client
STATISTICS = 3  # of a feature: counts, values, squares
# of a value that is uniform on [−1, 1]: variance, which is the mean square, too, and its variance
VARIANCE = 1 / 3
SQUARES_VARIANCE = 4 / 45
# what rounding of sums in single precision leaves of the variance of a constant feature
ROUNDING = 2.0**-20


def row_norm(features: int) -> float:
    """Return the largest norm of what one sample contributes to the sums, S = √(3f).

    Args:
        features: f, numbers of a sample.
    """
    return float(np.sqrt(STATISTICS * features))


def sums_of(samples: Array) -> Array:
    """Return counts, sums and sums of squares of the values of each feature, (3, f).

    Args:
        samples: (n, f) in [−1, 1], NaN for gaps.
    """
    present = ~np.isnan(samples)
    values = np.where(present, np.clip(samples, -1.0, 1.0), 0.0)
    sums: Array = np.stack([present.sum(0).astype(np.float64), values.sum(0), (values**2).sum(0)])
    return sums


def scale_of(sums: Array, deviation: float, most: float) -> Array:
    """Return the mean and the deviation of each feature, (2, f).

    A deviation is 0 for a feature that is constant; with noise, none is smaller than what the noise
    makes of one.

    Args:
        sums: (3, f) counts, sums and sums of squares over all clients.
        deviation: of the noise in each of these numbers; 0 for none.
        most: the largest count.
    """
    counts = np.clip(sums[0], 1.0, max(most, 1.0))

    def mean(row: Array, middle: float, spread: float) -> Array:
        weight = deviation**2 / spread
        shrunk: Array = (row * counts + weight * middle) / (counts**2 + weight)
        return shrunk

    means = np.clip(mean(sums[1], 0.0, VARIANCE), -1.0, 1.0)
    squares = np.clip(mean(sums[2], VARIANCE, SQUARES_VARIANCE), means**2, 1.0)
    variances = squares - means**2
    if deviation:
        variances = np.maximum(variances, np.minimum(deviation / counts, VARIANCE))
    else:
        variances = np.where(variances > ROUNDING * squares, variances, 0.0)
    return np.stack([means, np.sqrt(variances)])


def applied(samples: Any, scale: Any) -> NDArray[np.float32]:
    """Return samples on a shared scale, gaps at its mean.

    Args:
        samples: (n, f) in [−1, 1], NaN for gaps.
        scale: (2, f) means and deviations; a feature of deviation 0 counts for nothing.
    """
    centre, width = np.asarray(scale, np.float64)
    scaled = np.where(width > 0, (samples - centre) / np.where(width > 0, width, 1.0), 0.0)
    return np.nan_to_num(scaled).astype(np.float32)


class WaitingSamples:
    """Samples of clients on public bounds, and the scale that each client has of the run.

    Before the run has told a client its scale, its samples stay as they are, gaps in the middle.

    Args:
        numbers: positions of the features that are numbers; the others stay as they are.
        sets: samples (x, y) of each client for training, validation and tests, NaN for gaps.
    """

    def __init__(self, numbers: Sequence[int], sets: Sequence[Pairs]) -> None:
        self._numbers = list(numbers)
        self._sets = sets
        # (m, 2, f): means and deviations of the features that are numbers
        self.scales = np.zeros((len(sets[0]), 2, len(self._numbers)))
        self.scales[:, 1] = 1.0

    def sums(self, clients: Sequence[int], means: bool, norm: float | None) -> Array:
        """Return counts, sums and sums of squares of clients' samples to train on, (b, 3f).

        Args:
            clients: their positions.
            means: divide them by the client's number of samples.
            norm: to which they are scaled, where that is the largest of one sample; None for none.
        """
        trained = self._sets[0]
        rows = np.stack([sums_of(trained[k][0][:, self._numbers]).ravel() for k in clients])
        if means:
            rows /= np.array([[max(len(trained[k][0]), 1)] for k in clients])
        if norm is not None:
            rows *= norm / row_norm(len(self._numbers))
        return rows

    def scaled(self) -> list[list[tuple[Any, Any]]]:
        """Return the samples of each set as networks take them."""
        return [
            [(self._scaled(x, scale), y) for (x, y), scale in zip(pairs, self.scales, strict=True)]
            for pairs in self._sets
        ]

    def _scaled(self, samples: NDArray[Any], scale: NDArray[Any]) -> NDArray[Any]:
        """Return samples on a scale (2, f)."""
        if not samples.size:  # which may have any shape
            return samples.astype(np.float32)
        scaled = samples.astype(np.float32)
        scaled[:, self._numbers] = applied(samples[:, self._numbers], scale)
        return scaled
