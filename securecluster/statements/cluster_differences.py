"""Whether the clusters of a finished run are worth having, by scores on held-out samples.

The observer computes it when a run is over, outside the protocol, and only where the run has no
noise: what it reads of clients' data is in no ε.

Two questions have an answer in scores. Do clients that share one model differ? Then a round of
training alone raises the scores on their held-out samples. Do clients of two clusters differ? Then
the model of their own cluster scores higher on their samples than that of the other.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations

import numpy as np
from numpy.typing import NDArray

from securecluster.clustering.labels import members as clusters_of

FloatArray = NDArray[np.float64]

ENOUGH = 0.03
"""gain of accuracy by a round of training alone from which on clients are said to differ"""
NOTHING = 0.01
"""gain of accuracy by the own cluster's model up to which two clusters are said to look like one"""
POSSIBLE = 0.04
"""gain that must be implausible for two clusters to be said to look like one"""
ERRORS = 2.0
"""standard errors by which a gain is told from chance"""
MOST_CLUSTERS = 20
"""of more clusters no pairs are compared: each of their models is evaluated on all clients"""


@dataclass(frozen=True)
class Gain:
    """Gain in clients' scores with one model over those with another.

    Args:
        before: mean score with the other model.
        after: mean score with the one.
        error: standard error of the difference; infinite of a single client.
    """

    before: float
    after: float
    error: float

    @classmethod
    def of(cls, before: FloatArray, after: FloatArray) -> Gain | None:
        """Return the gain over clients with held-out samples; None where there is none.

        Args:
            before: (m,) scores with the other model; NaN for a client without held-out samples.
            after: (m,) scores with the one.
        """
        tested = ~(np.isnan(before) | np.isnan(after))
        if not tested.any():
            return None
        gains = after[tested] - before[tested]
        error = math.inf
        if len(gains) > 1:
            error = float(gains.std(ddof=1)) / math.sqrt(len(gains))
        return cls(float(before[tested].mean()), float(after[tested].mean()), error)

    @property
    def difference(self) -> float:
        """Return how much higher clients score."""
        return self.after - self.before


def clients_differ(before: FloatArray, after: FloatArray) -> Gain | None:
    """Return the gain by training alone, if it says that clients of one model differ.

    Args:
        before: (m,) accuracies with the shared model.
        after: (m,) accuracies after training alone.
    """
    gain = Gain.of(before, after)
    if gain is None or gain.difference < ENOUGH + ERRORS * gain.error:
        return None
    return gain


def alike(labels: Sequence[int], scores: FloatArray) -> tuple[int, int, Gain] | None:
    """Return the two clusters that look most like one, with the gain by the own cluster's model.

    Args:
        labels: (m,) each client's cluster.
        scores: (k, m) accuracy of each cluster's model on each client's held-out samples.

    Returns:
        None where all clusters differ, or too few clients say so.
    """
    candidates: list[tuple[float, int, int, Gain]] = []
    clusters = clusters_of(labels)
    for first, second in combinations(range(len(clusters)), 2):
        one, other = clusters[first], clusters[second]
        own_scores = np.concatenate([scores[first, one], scores[second, other]])
        swapped = np.concatenate([scores[second, one], scores[first, other]])
        gain = Gain.of(swapped, own_scores)
        if gain is None or gain.difference > NOTHING:
            continue
        if gain.difference + ERRORS * gain.error < POSSIBLE:
            candidates.append((gain.difference, first, second, gain))
    if not candidates:
        return None
    _, first, second, gain = min(candidates, key=lambda pair: pair[:3])
    return first, second, gain
