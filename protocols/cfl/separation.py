"""The Separation Theorem: conditions under which the bipartition of clients is correct.

It is Theorem 1 of Sattler, Müller, Samek 2019 (II and VIII-A).

v_l, l = 1 … k   the gradients of the true risks, with Σ a_l·v_l = 0 for positive a_l: a stationary
                 point (eq. 104)
X_i, i = 1 … m   the difference of client i's gradient from that of its distribution I(i):
                 r_i = v_I(i) + X_i
γ_i              ‖X_i‖ / ‖v_I(i)‖, the relative approximation noise, which the theorem needs in
                 [0, 1)

In angles the theorem is short. Noise γ turns a gradient by at most arcsin γ, so two clients of one
distribution are at most φ_ij = arcsin γ_i + arcsin γ_j apart, and H_ij = cos φ_ij. Vectors with a
positive sum of zero can be halved with all cross angles at least π/(k−1) (Lemma 4), so the clients'
can with at least π/(k−1) − φ_ij.

Lemma 4 in more than two dimensions, by another argument than the paper's projection (not in the
paper): if the optimal cross angle were below π/(k−1), the minimum spanning tree of the k directions
would be shorter than π on the sphere. Walked there and back it is a closed curve shorter than 2π,
which lies in an open hemisphere, where no positive sum is zero.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from securecluster.clustering.bipartition import bipartition
from securecluster.clustering.labels import Array
from securecluster.protocols import authoring as fl


def separation_gap(alpha: Array, truth: Sequence[int]) -> float | None:
    """Return g = α_intra^min − α_cross^max (Sattler et al. 2019, eq. 28, 29).

    α_intra^min is over all i, j of one distribution; a client alone in its own has α_ii = 1.
    α_cross^max is that of the optimal bipartition, whatever the true clusters are. So clients of a
    single distribution have g <= 0, and g > 0 implies a correct bipartition. The paper's "if and
    only if" (Remark 2) is too strong: chained clusters, with α_intra^min <= α_cross^max, may be
    split correctly.

    Args:
        alpha: similarities, (m, m), symmetric.
        truth: each client's distribution, (m,).

    Returns:
        None for fewer than two clients.
    """
    if len(truth) < 2:
        return None
    intra_min = float(alpha[_same_distribution(truth)].min(initial=1.0))
    return intra_min - bipartition(alpha).cross_max


def is_correct(first: Sequence[int], second: Sequence[int], truth: Sequence[int]) -> bool:
    """Return whether a bipartition leaves clients of one distribution together.

    This is Definition 1 of Sattler et al. 2019.

    Args:
        first: clients of one half.
        second: clients of the other half.
        truth: each client's distribution, (m,).
    """
    first_distributions = {truth[i] for i in first}
    second_distributions = {truth[j] for j in second}
    return not first_distributions & second_distributions


def approximation_noise(
    empirical: ArrayLike, true: ArrayLike, truth: Sequence[int]
) -> NDArray[np.float64]:
    """Return γ_i = ‖v_I(i) − r_i‖ / ‖v_I(i)‖, (m,) (Sattler et al. 2019, eq. 16).

    Args:
        empirical: the clients' gradients r_i, (m, d).
        true: the gradients v_l of the k distributions, (k, d).
        truth: I, (m,) ints in 0 … k − 1.

    Raises:
        UsageError: a true gradient is zero, where γ is undefined and the clients' distributions are
            congruent.
    """
    expected = np.asarray(true, np.float64)[list(truth)]
    norm = np.linalg.norm(expected, axis=1)
    if not (norm > 0).all():
        raise fl.UsageError(
            "a distribution's gradient is zero, so γ is undefined: there is nothing to separate it "
            "by"
        )
    difference = np.asarray(empirical, np.float64) - expected
    gamma: NDArray[np.float64] = np.linalg.norm(difference, axis=1) / norm
    return gamma


def noise_cosines(gamma: ArrayLike) -> NDArray[np.float64]:
    """Return H_ij = −γ_i·γ_j + sqrt(1 − γ_i²)·sqrt(1 − γ_j²), (m, m) in (−1, 1].

    This is eq. 20 of Sattler et al. 2019.

    Args:
        gamma: (m,) in [0, 1).

    Raises:
        UsageError: γ outside [0, 1), where noise can turn a gradient into any direction.
    """
    gamma = np.asarray(gamma, np.float64)
    sine = np.atleast_1d(gamma)
    in_range = (sine >= 0) & (sine < 1)
    if not in_range.all():
        raise fl.UsageError(
            f"the theorem is about noise γ in [0, 1), not {sine.min():.3g} to {sine.max():.3g}"
        )
    # γ is the sine of the largest angle of the noise. This form of 1 − γ² is exact near γ = 1.
    cosine_squared = (1 - sine) * (1 + sine)
    cosine = np.sqrt(cosine_squared)
    products: NDArray[np.float64] = np.outer(cosine, cosine)
    return products - np.outer(sine, sine)


def cross_bound(gamma: ArrayLike, k: int, truth: Sequence[int] | None = None) -> float:
    """Return the upper bound of α_cross^max (Sattler et al. 2019, eq. 19 and 101).

    It is the largest bound of two clients of different distributions. The bound of a pair is
    cos(π/(k−1))·H_ij + sin(π/(k−1))·sqrt(1 − H_ij²) where H_ij >= cos(π/(k−1)), else 1; for k = 2
    it is −H_ij.

    Args:
        gamma: (m,) in [0, 1).
        k: number of distributions, at least 2.
        truth: I, (m,); without it all pairs count, which can only weaken the bound.

    Raises:
        UsageError: γ outside [0, 1), or k below 2.
    """
    if k < 2:
        raise fl.UsageError(f"{k} distributions have nothing to cross: k is at least 2")
    inner = noise_cosines(gamma)
    if truth is None:
        truth = range(len(inner))
    distribution = np.asarray(truth)
    different = np.not_equal.outer(distribution, distribution)
    if not different.any():
        raise fl.UsageError("all clients have one distribution: there is no pair to bound")
    # The bound is cos(π/(k−1) − φ_ij), which falls as H_ij = cos φ_ij grows.
    smallest = min(1.0, float(inner[different].min()))
    angle = math.pi / (k - 1) - math.acos(smallest)
    return math.cos(max(0.0, angle))


def intra_bound(gamma: ArrayLike, truth: Sequence[int] | None = None) -> float:
    """Return the lower bound of α_intra^min.

    It is min H_ij over pairs of one distribution (eq. 37), and without `truth` 1 − 2·γ_max²
    (eq. 38). A client alone in its distribution bounds nothing, which gives 1.

    Args:
        gamma: (m,) in [0, 1).
        truth: I, (m,).

    Raises:
        UsageError: γ outside [0, 1).
    """
    inner = noise_cosines(gamma)
    if truth is None:
        return float(inner.diagonal().min())  # H_ii = 1 − 2·γ_i²
    return float(inner[_same_distribution(truth)].min(initial=1.0))


def largest_noise(cross_max: float) -> float:
    """Return sqrt((1 − α_cross^max) / 2) (Sattler et al. 2019, eq. 39).

    If γ_max is below it the bipartition is correct, for any k.

    Args:
        cross_max: the largest similarity across the sides, in [−1, 1].
    """
    # Rounding can make a cosine larger than 1.
    return math.sqrt(max(0.0, (1 - cross_max) / 2))


def guaranteed_noise(k: int) -> float:
    """Return the γ_max below which Theorem 1 guarantees g > 0 (not in the paper).

    It is sin(π / (4·(k−1))), whatever the vectors. In angles, eq. 38 stays above eq. 19 where
    2·arcsin γ < π/(k−1) − 2·arcsin γ. It bounds the green region of Fig. 3.

    Args:
        k: number of distributions, at least 2.

    Raises:
        UsageError: k below 2.
    """
    if k < 2:
        raise fl.UsageError(f"{k} distributions cannot be separated: k is at least 2")
    return math.sin(math.pi / (4 * (k - 1)))


def observed_noise(alpha: Array, labels: Sequence[int]) -> NDArray[np.float64]:
    """Return γ̂_i = sin ∠(r_i, v_I(i)) by how far clients are from their cluster (not in the paper).

    It is the smallest γ_i that turns v_I(i) into the direction of r_i, and lengths do not matter to
    cosines. v is the mean of the cluster's other clients, whose squared norm is that of their
    different pairs, so what they scatter does not count as a shorter mean.

    Args:
        alpha: similarities, (m, m), symmetric; the diagonal is not read.
        labels: each client's cluster, (m,).

    Returns:
        (m,) in [0, 1]; NaN of a client alone in its cluster.
    """
    gamma = np.full(len(labels), np.nan)
    for i, label in enumerate(labels):
        others = [j for j, other in enumerate(labels) if other == label and j != i]
        if not others:
            continue
        cosine = float(alpha[i, others].mean())
        pairs = alpha[np.ix_(others, others)][~np.eye(len(others), dtype=bool)]
        # of two clients each is as far from what they share
        squared = float(pairs.mean()) if pairs.size else cosine
        along = cosine / math.sqrt(squared) if squared > 0 else 0.0
        gamma[i] = math.sqrt(1 - min(1.0, max(0.0, along)) ** 2)
    return gamma


def assurance(
    alpha: Array, labels: Sequence[int], cross_max: float, noise: float, number: int
) -> dict[str, Any]:
    """Return the noise of a split's clients beside what eq. 39 and Theorem 1 allow.

    Privacy's noise ν, relative to a row, is independent of what sampling adds: it divides the
    cosine of a row with its cluster by √(1 + ν²), and that of two rows by 1 + ν². So sines add up
    in quadrature: γ² = (γ̂² + ν²) / (1 + ν²).

    Args:
        alpha: similarities of the clients that were split, without that noise, (m, m).
        labels: the cluster in which each ended, (m,).
        cross_max: α_cross^max of the split.
        noise: ν.
        number: of the round.

    Returns:
        An entry of result.json.
    """
    sampling = float(np.nanmax(observed_noise(alpha, labels), initial=0.0))
    gamma = math.sqrt((sampling**2 + noise**2) / (1 + noise**2))
    allowed = largest_noise(cross_max / (1 + noise**2))
    clusters = len(set(labels))
    guaranteed = guaranteed_noise(clusters)
    verdict = "so it is right if these clusters are" if gamma < allowed else "so it is not assured"
    of_noise = ""
    if noise:
        of_noise = f" ({sampling:.2f} of samples, and ν = {noise:.2f} of privacy's noise)"
    sentence = (
        f"the {len(labels)} clients split in round {number} are at most γ = {gamma:.2f} off the "
        f"cluster that they end in{of_noise}; a split is right below {allowed:.2f} (eq. 39), "
        f"{verdict}, and certain to be found below {guaranteed:.2f} (Theorem 1, {clusters} "
        "clusters)"
    )
    return {
        "sentence": sentence,
        "round": number,
        "members": len(labels),
        "gamma": gamma,
        "noise": noise,
        "allowed": allowed,
        "clusters": clusters,
        "guaranteed": guaranteed,
    }


def _same_distribution(truth: Sequence[int]) -> NDArray[np.bool_]:
    """Return the pairs (m, m) of different clients that share a distribution."""
    distribution = np.asarray(truth)
    same: NDArray[np.bool_] = np.equal.outer(distribution, distribution)
    return same & ~np.eye(len(same), dtype=bool)
