"""Monte-Carlo tests of clusters against clients without clusters.

The null hypothesis is that of SigClust (Liu, Hayes, Nobel, Marron 2008, "Statistical significance
of clustering for high-dimension, low-sample-size data", JASA 103): the clients' vectors are
independent draws of one Gaussian. It is simulated from the similarities alone, so nothing more has
to leave the clients. Unlike a fixed threshold it allows for how many clients there are and in how
few directions their vectors vary: few clients, and vectors of few directions, look clustered by
chance.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from securecluster.clustering.labels import members

Array = NDArray[np.float64]
# cosines of several draws, (draws, m, m) -> the value of each draw, in order
Statistic = Callable[[Array], Iterable[float]]
# the number of draws that are tested, and of all that may be
Watch = Callable[[int, int], None]
# Most draws need few operations on many numbers: draws are made together. The first ones are few,
# since a large p-value is known after a few draws.
FIRST_DRAWS = 8
# largest number of cosines that are drawn together, unless one draw has more: 4 MB
DRAWN_TOGETHER = 1 << 19


@dataclass(frozen=True)
class Null:
    """A Gaussian distribution of unit-scale vectors of clients without clusters.

    Attributes:
        clients: m, the number of clients to draw.
        spread: variances of the directions that vectors of different clients share, (r,).
        bulk: variance in so many further directions that those of different clients are orthogonal.
        mean: squared norm of the mean vector.
    """

    clients: int
    spread: Array
    bulk: float
    mean: float

    @classmethod
    def within(cls, similarity: Array, labels: Sequence[int]) -> Null:
        """Estimate the distribution from similarities with each group's mean removed.

        So clusters do not widen the null that they are tested against. Orthonormal contrasts within
        groups are n independent draws of the noise. The smallest eigenvalue of their similarities,
        times 1 − 1 / n², is the bulk, on which a single contrast has no information; the
        eigenvalues less the bulk, over n, are variances.

        Args:
            similarity: cosines or inner products, (m, m), symmetric.
            labels: the groups, (m,) ints from 0; fewer than m - 1 of them.
        """
        contrasts = _contrasts(labels)
        noise_similarity = contrasts.T @ similarity @ contrasts
        # Rounding and noise correction can make the smallest eigenvalues negative.
        eigenvalues = np.linalg.eigvalsh(noise_similarity).clip(0)
        n = len(eigenvalues)
        bulk = float(eigenvalues[0]) * (1 - 1 / n**2)
        # This overstates variances of noise in many directions by up to five times, so the test
        # errs on the side of no clusters.
        spread = (eigenvalues - bulk) / n
        noise_of_mean = (float(spread.sum()) + bulk) / len(labels)
        noisy_mean = float(similarity.mean())
        mean = max(0.0, noisy_mean - noise_of_mean)
        return cls(len(labels), spread, bulk, mean)

    def cosines(self, draws: int, generator: np.random.Generator) -> Array:
        """Draw the cosines of the vectors of m clients, several times.

        Args:
            draws: number of independent draws.
            generator: source of the draws.

        Returns:
            (draws, m, m) in [-1, 1].
        """
        shape = (draws, self.clients, len(self.spread))
        rows = generator.standard_normal(shape)
        # In place, here and below: to allocate a new array takes as long as to fill it.
        rows *= np.sqrt(self.spread)
        inner: Array = rows @ rows.swapaxes(1, 2)
        inner += self.mean
        # Vectors are orthogonal in the bulk's directions, which add to their norms only.
        clients = np.arange(self.clients)
        inner[:, clients, clients] += self.bulk
        # Positive, so that a vector of zeros does not divide by zero.
        tiny = np.finfo(float).tiny
        norms = np.sqrt(np.maximum(inner[:, clients, clients], tiny))
        inner /= norms[:, :, None] * norms[:, None, :]
        return inner.clip(-1, 1, out=inner)


def p_value(
    statistic: Statistic,
    observed: float,
    null: Null,
    level: float,
    generator: np.random.Generator,
    watch: Watch = lambda tested, draws: None,
) -> float:
    """Return a sequential Monte-Carlo p-value, which is exact above `level` only.

    Draws stop at the first that reaches the observed statistic (Besag, Clifford 1991, "Sequential
    Monte Carlo p-values", Biometrika 78).

    Args:
        statistic: function of the cosines of several draws, (draws, m, m), that returns the value
            of each; the larger, the more clustered. It may be a generator: no value is asked for
            after the first that reaches `observed`.
        observed: its value for the clients.
        null: distribution of clients without clusters.
        level: in (0, 1); at most `ceil(1 / level) - 1` draws are made.
        generator: source of the draws. It may be asked for more draws than are tested.
        watch: called after each draw that is tested.

    Returns:
        One over the number of draws up to the first that reaches `observed`. Without such a draw at
        most `level`.
    """
    draws = math.ceil(1 / level) - 1
    tested = 0
    for size in _batch_sizes(draws, null.clients):
        for value in statistic(null.cosines(size, generator)):
            tested += 1
            watch(tested, draws)
            if value >= observed:
                return 1 / tested
    return 1 / (draws + 1)


def _batch_sizes(draws: int, clients: int) -> Iterator[int]:
    """Yield numbers of draws to make together: each twice the last, up to `DRAWN_TOGETHER`.

    Args:
        draws: sum of the numbers.
        clients: m, the number of clients of a draw.
    """
    largest = max(1, DRAWN_TOGETHER // clients**2)
    size = FIRST_DRAWS
    while draws > 0:
        size = min(size, largest, draws)
        yield size
        draws -= size
        size *= 2


def _contrasts(labels: Sequence[int]) -> Array:
    """Return orthonormal columns (m, m − k) whose sum within each of the k groups is zero."""
    columns = []
    for group in members(labels):
        # A group of one has no contrast.
        if len(group) < 2:
            continue
        # QR makes the other columns orthogonal to the first, which is constant.
        square = np.eye(len(group))
        square[:, 0] = 1.0
        orthonormal, _ = np.linalg.qr(square)
        shape = (len(labels), len(group) - 1)
        within = np.zeros(shape)
        within[group] = orthonormal[:, 1:]
        columns.append(within)
    return np.hstack(columns)
