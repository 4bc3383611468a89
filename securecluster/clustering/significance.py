"""Whether clusters are more than chance: Monte-Carlo tests against clients without clusters.

The null hypothesis is that of SigClust (Liu, Hayes, Nobel, Marron 2008, "Statistical significance
of clustering for high-dimension, low-sample-size data", JASA 103): the clients' vectors are
independent draws of one Gaussian. It is simulated from the similarities alone, so nothing more has
to leave the clients. Unlike a fixed threshold it allows for how many clients there are and in how
few directions their vectors vary: few clients, and vectors of few directions, look clustered by
chance.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from securecluster.clustering.labels import members

Array = NDArray[np.float64]
Statistic = Callable[[Array], float]


@dataclass(frozen=True)
class Null:
    """A Gaussian distribution of unit-scale vectors of clients without clusters.

    Attributes:
        clients: m, how many are drawn.
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
        """Estimate the distribution from what is left of the similarities once each group's mean is
        taken off.

        So clusters do not widen the null that they are tested against. Orthonormal contrasts within
        groups are n independent draws of the noise. The least eigenvalue of their similarities,
        times 1 - 1 / n², is the bulk, of which a single contrast tells nothing; the eigenvalues
        less the bulk, over n, are variances. That overstates variances of noise in many directions
        by up to five times, so the test errs on the side of no clusters.

        Args:
            similarity: cosines or inner products, (m, m), symmetric.
            labels: the groups, (m,) ints from 0; fewer than m - 1 of them.
        """
        contrasts = _contrasts(labels)
        eigenvalues = np.linalg.eigvalsh(contrasts.T @ similarity @ contrasts).clip(0)
        n = len(eigenvalues)
        bulk = float(eigenvalues[0]) * (1 - 1 / n**2)
        spread = (eigenvalues - bulk) / n
        noise_of_mean = (float(spread.sum()) + bulk) / len(labels)
        return cls(len(labels), spread, bulk, max(0.0, float(similarity.mean()) - noise_of_mean))

    def cosines(self, generator: np.random.Generator) -> Array:
        """Draw the cosines of the vectors of m clients, (m, m)."""
        rows = generator.standard_normal((self.clients, len(self.spread))) * np.sqrt(self.spread)
        inner = rows @ rows.T + self.mean
        inner[np.diag_indices(self.clients)] += self.bulk
        norms = np.sqrt(np.maximum(inner.diagonal(), np.finfo(float).tiny))
        found: Array = (inner / np.outer(norms, norms)).clip(-1, 1)
        return found


def p_value(
    statistic: Statistic, observed: float, null: Null, level: float, generator: np.random.Generator
) -> float:
    """Return how often chance reaches the observed statistic, or at least whether it does so more
    rarely than `level`.

    Draws stop at the first that reaches it (Besag, Clifford 1991, "Sequential Monte Carlo
    p-values", Biometrika 78).

    Args:
        statistic: of the cosines (m, m); the larger, the more clustered.
        observed: its value for the clients.
        level: in (0, 1); `ceil(1 / level) - 1` draws are made at most.

    Returns:
        One over the number of draws up to the first that reaches `observed`. Without such a draw at
        most `level`.
    """
    draws = math.ceil(1 / level) - 1
    for made in range(1, draws + 1):
        if statistic(null.cosines(generator)) >= observed:
            return 1 / made
    return 1 / (draws + 1)


def _contrasts(labels: Sequence[int]) -> Array:
    """Return orthonormal columns (m, m - k) whose sum within each of the k groups is zero."""
    columns = []
    for group in members(labels):
        if len(group) < 2:
            continue
        square = np.eye(len(group))
        square[:, 0] = 1.0
        within = np.zeros((len(labels), len(group) - 1))
        within[group] = np.linalg.qr(square)[0][:, 1:]
        columns.append(within)
    return np.hstack(columns)
