"""Scales of features over all clients, from sums of bounded rows with noise.

A value on its public bounds lies in [−1, 1], and contributes (1, x, x²) to means and deviations, or
1 in its bin to quartiles; a gap contributes zeros. A row of f features has norm √(3f) or √f at
most. Noise has a known deviation. Means, mean squares and shares of values below a bin are shrunk
towards those of a feature that is uniform on its bounds, as far as the noise makes the sums
unreliable (ridge regression with the prior's variance); without noise they are those of all rows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from securecluster.data.scaling import QUANTILES, SHARED

Array = NDArray[np.float64]
Pairs = Sequence[tuple[Any, Any]]  # samples (x, y) of each client
BINS = 32  # of equal width between the bounds
QUARTERS = (0.25, 0.5, 0.75)
NORMAL_RANGE = 1.349  # between the quartiles of a normal distribution of deviation 1
# of a value that is uniform on [−1, 1]: variance, which is the mean square, too, and its variance
VARIANCE = 1 / 3
SQUARES_VARIANCE = 4 / 45
SHARES_VARIANCE = 1 / 12  # of a share that may be any
# what rounding of sums in single precision leaves of the variance of a constant feature
ROUNDING = 2.0**-20


@dataclass(frozen=True)
class Statistics:
    """What values contribute to the sums of a shared scale, and the scale that follows from them.

    Args:
        count: s, numbers of a feature.
        squares: the largest sum of squares of what one value contributes.
        sums_of: the sums (s, f) of samples (n, f) in [−1, 1], NaN for gaps.
        scale_of: centre and width of each feature (2, f) of sums (s, f), the deviation of the noise
            in each of them, and the largest count.
    """

    count: int
    squares: int
    sums_of: Callable[[Array], Array]
    scale_of: Callable[[Array, float, float], Array]

    def row_norm(self, features: int) -> float:
        """Return the largest norm of what one sample contributes to the sums, S.

        Args:
            features: f, numbers of a sample.
        """
        return float(np.sqrt(self.squares * features))


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
    noise = deviation**2
    means = np.clip(_shrunk(sums[1], counts, 0.0, noise / VARIANCE), -1.0, 1.0)
    squares = _shrunk(sums[2], counts, VARIANCE, noise / SQUARES_VARIANCE)
    squares = np.clip(squares, means**2, 1.0)
    variances = squares - means**2
    if deviation:
        variances = np.maximum(variances, np.minimum(deviation / counts, VARIANCE))
    else:
        variances = np.where(variances > ROUNDING * squares, variances, 0.0)
    return np.stack([means, np.sqrt(variances)])


def _shrunk(sums: Array, counts: Array, middle: Any, weight: Any) -> Array:
    """Return sums over counts, drawn to the middle of what they may be by a weight."""
    shrunk: Array = (sums * counts + weight * middle) / (counts**2 + weight)
    return shrunk


def histograms_of(samples: Array) -> Array:
    """Return how many values of each feature lie in each bin, (b, f).

    Args:
        samples: (n, f) in [−1, 1], NaN for gaps.
    """
    present = ~np.isnan(samples)
    places = np.floor((np.where(present, samples, 0.0) + 1) * BINS / 2)
    bins = np.clip(places, 0, BINS - 1).astype(np.int64)
    features = samples.shape[1]
    cells = (bins * features + np.arange(features))[present]
    sums: Array = np.bincount(cells, minlength=BINS * features).astype(np.float64)
    return sums.reshape(BINS, features)


def quartile_scale_of(sums: Array, deviation: float, most: float) -> Array:
    """Return each feature's median, and its interquartile range over that of a normal one, (2, f).

    Values are taken as uniform within a bin, so that a range is half a bin at least. Shares with
    noise are brought into order by isotonic regression in the largest error (Ubhaya 1974).

    Args:
        sums: (b, f) counts of the bins over all clients.
        deviation: of the noise in each of these numbers; 0 for none.
        most: the largest count.
    """
    counts = np.clip(sums.sum(axis=0), ROUNDING, most)
    below = np.cumsum(np.pad(sums, ((1, 0), (0, 0))), axis=0)
    edges = np.arange(BINS + 1)[:, None]
    # noise of all bins below an edge adds up
    weight = edges * (deviation**2 + ROUNDING**2) / SHARES_VARIANCE
    shares = np.clip(_shrunk(below, counts, edges / BINS, weight), 0.0, 1.0)
    from_below = np.maximum.accumulate(shares)
    from_above = np.minimum.accumulate(shares[::-1])[::-1]
    columns = ((from_below + from_above) / 2).T
    points = np.linspace(-1.0, 1.0, BINS + 1)
    quartiles = np.array([np.interp(QUARTERS, column, points) for column in columns])
    first, median, third = quartiles.T
    return np.stack([median, (third - first) / NORMAL_RANGE])


STATISTICS = {
    SHARED: Statistics(3, 3, sums_of, scale_of),
    QUANTILES: Statistics(BINS, 1, histograms_of, quartile_scale_of),
}


def applied(samples: Any, scale: Any) -> NDArray[np.float32]:
    """Return samples on a shared scale, gaps at its centre.

    Args:
        samples: (n, f) in [−1, 1], NaN for gaps.
        scale: (2, f) centres and widths; a feature of width 0 counts for nothing.
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
        statistics: of which the run finds the scale.
    """

    def __init__(
        self, numbers: Sequence[int], sets: Sequence[Pairs], statistics: Statistics
    ) -> None:
        self._numbers = list(numbers)
        self._sets = sets
        self._statistics = statistics
        # (m, 2, f): centres and widths of the features that are numbers
        self.scales = np.zeros((len(sets[0]), 2, len(self._numbers)))
        self.scales[:, 1] = 1.0

    def sums(self, clients: Sequence[int], means: bool, norm: float | None) -> Array:
        """Return the sums of the statistics of clients' samples to train on, (b, sf).

        Args:
            clients: their positions.
            means: divide them by the client's number of samples.
            norm: to which they are scaled, where that is the largest of one sample; None for none.
        """
        trained, sums_of = self._sets[0], self._statistics.sums_of
        rows = np.stack([sums_of(trained[k][0][:, self._numbers]).ravel() for k in clients])
        if means:
            rows /= np.array([[max(len(trained[k][0]), 1)] for k in clients])
        if norm is not None:
            rows *= norm / self._statistics.row_norm(len(self._numbers))
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
