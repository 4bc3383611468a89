"""Clusters of short rows whose noise has a known standard deviation.

Two kinds of rows: plain ones, in which clients of a cluster agree up to noise, and class blocks,
which are compared class by class, so that clients with other shares of the classes are no further
apart. None of this is from a paper.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from securecluster.clustering.agglomerative import cut, merges, ratios, threshold
from securecluster.clustering.k_means import kmeans_of_points
from securecluster.clustering.labels import relabel
from securecluster.clustering.noise_robust import partition
from securecluster.clustering.pairs import check_pairs
from securecluster.clustering.significance import Array

# singular values count from this multiple of the edge of pure noise
EDGE_SLACK = 1.05
# counts below this multiple of their noise are taken to be as large, since means divide by them
LEAST_COUNT = 0.5
# mean difference, in standard deviations, from which two groups of class blocks are two clusters
APART = 2.0
# share of the pairs of class blocks that are taken to be within a cluster, and up to which multiple
# of what noise adds their squared distances are explained by it
NEAREST = 0.1
EXPLAINED = 1.2
# ratio of squared distances of consecutive merges from which groups of class blocks are clusters
GAP = 1.27
TINY = 1e-300  # divides by zero sums


@dataclass(frozen=True)
class NoisyRows:
    """Rows of clients with noise of a known size.

    Attributes:
        values: (m, q).
        deviations: (m,) the standard deviation of the noise in each number of a row; 0 without.
        sampling: (m,) variance that a client's finite sample adds to each number, at most.
        width: q, the numbers that noise was added to; a mask may have made rows longer.
        tested: (m, q) rows from which clusters are counted; None takes `values`.
    """

    values: Array
    deviations: Array
    sampling: Array
    width: int
    tested: Array | None = None

    @property
    def noisy(self) -> bool:
        """Return whether the numbers have noise."""
        return bool((self.deviations > 0).any())

    def clusters(self, k: int | None, seed: int) -> list[int]:
        """Return labels (m,) by k-means.

        Args:
            k: number of clusters; None takes `count`.
            seed: seed of the starts of k-means.
        """
        if k is None:
            k = self.count()
        if k < 2:
            return [0] * len(self.values)
        return relabel(kmeans_of_points(self.values, k, seed))

    def count(self) -> int:
        """Return 1 + the number of singular values of the centred rows above the edge of noise.

        Clusters in general position span one dimension less than they are. Noise of standard
        deviation 1 in each of m × q numbers has singular values up to about √m + √q; 5 % are added.
        Rows are divided by their own standard deviations before.
        """
        singular, edge = self._spectrum()
        return min(len(self.values), 1 + int((singular > edge).sum()))

    def shortfall(self) -> str:
        """Return in words how far rows that are one cluster are from two."""
        singular, edge = self._spectrum()
        return (
            f"the largest singular value of signatures is {singular[0]:.3g}, and clusters need "
            f"more than {edge:.3g}, the edge of noise"
        )

    def _spectrum(self) -> tuple[Array, float]:
        """Return the singular values of the centred rows, and the edge of noise."""
        rows = self.values
        if self.tested is not None:
            rows = self.tested
        m = len(rows)
        variance = self.deviations**2 + self.sampling
        # what rounding leaves of equal rows is not a cluster
        rounding = (1e-6 * float(np.linalg.norm(rows))) ** 2 / rows.size
        precision = 1 / np.maximum(variance, max(rounding, TINY))
        centre = np.average(rows, axis=0, weights=precision)
        scaled = (rows - centre) * np.sqrt(precision)[:, None]
        singular: Array = np.asarray(np.linalg.svd(scaled, compute_uv=False), dtype=np.float64)
        return singular, EDGE_SLACK * (math.sqrt(m) + math.sqrt(self.width))

    def select(self, positions: Sequence[int]) -> NoisyRows:
        """Return the rows of some clients.

        Args:
            positions: of the clients.
        """
        index = np.asarray(positions, dtype=np.int64)
        tested = None
        if self.tested is not None:
            tested = self.tested[index]
        return NoisyRows(
            self.values[index], self.deviations[index], self.sampling[index], self.width, tested
        )

    def pair_distances(self) -> Array:
        """Return squared distances of all pairs less noise, none of them negative, (m, m)."""
        return without_negative(self.squared_distances(self))

    def squared_distances(self, others: NoisyRows) -> Array:
        """Return squared distances from others' rows less what noise adds, (m, b).

        They scatter around those of exact rows, and can be negative.

        Args:
            others: b clients' rows, in the same coordinates.
        """
        squares = squared_gaps(self.values, others.values)
        noise = self.deviations[:, None] ** 2 + others.deviations[None] ** 2
        return np.asarray(squares - self.width * noise)


def leading_directions(rows: Array, count: int) -> Array:
    """Return the first right singular vectors of centred rows, (count, q).

    Directions beyond the rank are zeros, since rounding errors have no direction.

    Args:
        rows: (m, q).
        count: number of directions.
    """
    m, q = rows.shape
    centred = rows - rows.mean(0)
    _, singular, vectors = np.linalg.svd(centred, full_matrices=False)
    directions = np.zeros((count, q))
    present = min(count, m - 1, q)
    significant = singular[:present] > 1e-9 * max(1e-300, float(singular[0]))
    directions[:present][significant] = vectors[:present][significant]
    return directions


def weighted_mean(first: Array, first_noise: float, second: Array, second_noise: float) -> Array:
    """Return the mean of two measurements of the same rows, weighted by their precisions.

    Args:
        first: (m, r).
        first_noise: variance of the noise in each number of `first`, positive.
        second: (m, r).
        second_noise: variance of the noise in each number of `second`, positive.
    """
    first_weight = 1 / first_noise
    second_weight = 1 / second_noise
    weight = first_weight + second_weight
    return np.asarray((first_weight * first + second_weight * second) / weight)


@dataclass(frozen=True)
class BlockDistances:
    """Distances of clients by class blocks.

    Attributes:
        distance: (a, b) the mean over classes of squared distances of class means, less what noise
            and sampling add, weighted by precision.
        spread: (a, b) the same without subtracting anything.
        score: (a, b) their sum in standard deviations of what noise alone would give.
    """

    distance: Array
    spread: Array
    score: Array


@dataclass(frozen=True)
class NoisyBlocks:
    """Class blocks of clients, with noise of a known size.

    Attributes:
        blocks: (m, C, r + 1) for each class, its sum of projections and its share, over n.
        deviations: (m,) the standard deviation of the noise in each number; 0 without.
        sampling: (m,) the variance of one number within a class, over n, positive.
        width: r; a mask may have made projections longer.
    """

    blocks: Array
    deviations: Array
    sampling: Array
    width: int

    @property
    def noisy(self) -> bool:
        """Return whether the numbers have noise."""
        return bool((self.deviations > 0).any())

    def distances(self, others: NoisyBlocks) -> BlockDistances:
        """Return the distances of these clients from others, (m, b).

        Classes count by their precision; without noise each counts the same (`_exact_distances`).

        Args:
            others: b clients' blocks, by the same maps.
        """
        if not self.noisy and not others.noisy:
            return self._exact_distances(others)
        squared = np.zeros((len(self.blocks), len(others.blocks)))
        weights = np.zeros_like(squared)
        # class by class, so that memory grows with the pairs alone
        for squares, joint in _by_class(self._class_means(), others._class_means()):
            squared += (squares - self.width * joint) / joint
            weights += 1 / joint
        classes = self.blocks.shape[1]
        distance = squared / weights
        spread = distance + self.width * classes / weights
        score = squared / math.sqrt(2 * self.width * classes)
        return BlockDistances(distance, spread, score)

    def _exact_distances(self, others: NoisyBlocks) -> BlockDistances:
        """Return the distances of these clients from others, (m, b), without noise.

        Squared distances of class means are divided by what sampling adds, so that clients with few
        samples are no further apart, and averaged over the classes that both clients have: 1 is
        what two clients of one cluster have on average, if their samples are independent. Clients
        without a common class are as far apart as the others are on average.
        """
        summed = np.zeros((len(self.blocks), len(others.blocks)))
        common = np.zeros_like(summed)
        for squares, joint in _by_class(self._sampled_means(), others._sampled_means()):
            summed += squares / (self.width * joint)
            common += np.isfinite(joint)
        comparable = common > 0
        ratio = summed / np.maximum(common, 1)
        ratio[~comparable] = ratio[comparable].mean() if comparable.any() else 1.0
        score = (ratio - 1) * np.sqrt(self.width * common / 2)
        # 1 is not subtracted, so that distances are never negative and have ratios
        return BlockDistances(ratio, ratio, score)

    def clusters(self, k: int | None, seed: int) -> list[int]:
        """Return labels (m,) by spectral clustering.

        Args:
            k: number of clusters; None takes `count`, and without noise the clusters of average
                linkage by which it counts.
            seed: seed of the starts of k-means.
        """
        pairs = self.distances(self)
        if k is None and not self.noisy:
            return _cut_at_gap(pairs.spread)
        if k is None:
            k = self._count(pairs)
        if k < 2:
            return [0] * len(self.blocks)
        return partition(similarity_of(pairs.distance), "spectral", k, seed)

    def count(self) -> int:
        """Return the number of clusters.

        Where the known noise explains how far the nearest pairs are apart, it is the number of
        groups that are apart beyond it. Where sampling matters more, whose size nobody knows, it is
        the number before the largest relative gap of merges, if that is large.
        """
        return self._count(self.distances(self))

    def shortfall(self) -> str:
        """Return in words how far blocks that are one cluster are from two."""
        pairs = self.distances(self)
        if self._noise_alone():
            tree, lowest = _apart(pairs.score)
            return (
                f"the two last groups of signatures are {tree[-1, 2] + lowest:.3g} standard "
                f"deviations of the noise apart, and clusters need more than {APART:g}"
            )
        ratio = ratios(_average_merges(pairs.spread)).max(initial=0.0)
        return (
            "squared distances of signatures rise from merge to merge by a factor of at most "
            f"{ratio:.3g}, and clusters need {GAP:g}"
        )

    def _count(self, pairs: BlockDistances) -> int:
        """Return the number of clusters from the distances of these clients."""
        if self._noise_alone():
            return _count_apart(pairs.score)
        return len(set(_cut_at_gap(pairs.spread)))

    def _noise_alone(self) -> bool:
        """Return whether noise explains the squared distances of the nearest pairs."""
        if not self.noisy:
            return False
        exact = NoisyBlocks(self.blocks, self.deviations, np.zeros_like(self.sampling), self.width)
        class_means = exact._class_means()
        # 1 on average for a pair of one cluster, without sampling
        relative = np.zeros((len(self.blocks), len(self.blocks)))
        for squares, joint in _by_class(class_means, class_means):
            relative += squares / (self.width * joint)
        relative /= self.blocks.shape[1]
        pairs = ~np.eye(len(relative), dtype=bool)
        return float(np.quantile(relative[pairs], NEAREST)) <= EXPLAINED

    def select(self, positions: Sequence[int]) -> NoisyBlocks:
        """Return the blocks of some clients.

        Args:
            positions: of the clients.
        """
        index = np.asarray(positions, dtype=np.int64)
        return NoisyBlocks(
            self.blocks[index], self.deviations[index], self.sampling[index], self.width
        )

    def pair_distances(self) -> Array:
        """Return squared distances of all pairs less noise, none of them negative, (m, m)."""
        return without_negative(self.squared_distances(self))

    def squared_distances(self, others: NoisyBlocks) -> Array:
        """Return `distances` less what noise and sampling add, (m, b).

        Args:
            others: b clients' blocks, by the same maps.
        """
        return self.distances(others).distance

    def _sampled_means(self) -> tuple[Array, Array]:
        """Return the means of classes (m, C, r), and the variance that sampling gives them, (m, C).

        The variance of a class that a client lacks is infinite, and its mean is zero.
        """
        shares = self.blocks[:, :, -1]
        present = shares > 0
        divisor = np.where(present, shares, 1.0)
        means = np.where(present[:, :, None], self.blocks[:, :, :-1] / divisor[:, :, None], 0.0)
        # The shares of a row that was scaled to norm 1 do not sum to 1.
        relative = divisor / np.maximum(shares.sum(1), TINY)[:, None]
        variance = np.where(present, self.sampling[:, None] / relative, np.inf)
        return means, variance

    def _class_means(self) -> tuple[Array, Array]:
        """Return the means of classes (m, C, r), and the variance of a number in each, (m, C)."""
        noise = self.deviations[:, None] ** 2
        floor = np.maximum(LEAST_COUNT * self.deviations, 1e-6)[:, None]
        shares = np.maximum(self.blocks[:, :, -1], floor)
        means = self.blocks[:, :, :-1] / shares[:, :, None]
        # the noise of a ratio, of the sum and of the share, and what sampling adds
        squared_mean = np.square(means).sum(2) / self.width
        spread = noise * (1 + squared_mean) + self.sampling[:, None] * shares
        # a class that a client lacks has no mean: without noise its variance is as good as infinite
        variance = (spread + 1e-12) / np.square(shares)
        return means, variance


def squared_gaps(rows: Array, others: Array) -> Array:
    """Return squared distances of all pairs of rows, (m, b), without a row for each pair.

    Args:
        rows: (m, q).
        others: (b, q).
    """
    from scipy.spatial.distance import cdist

    check_pairs(min(len(rows), len(others)))
    return np.asarray(cdist(rows, others, "sqeuclidean"))


def _by_class(
    moments: tuple[Array, Array], others: tuple[Array, Array]
) -> Iterator[tuple[Array, Array]]:
    """Yield, for each class, squared distances of all pairs (m, b) and their joint variances.

    Args:
        moments: means (m, C, r) and variances (m, C) of clients' classes.
        others: (b, C, r) and (b, C).
    """
    means, variance = moments
    other_means, other_variance = others
    for label in range(means.shape[1]):
        squares = squared_gaps(means[:, label], other_means[:, label])
        yield squares, variance[:, label, None] + other_variance[None, :, label]


def without_negative(squared: Array) -> Array:
    """Return squared distances plus a constant by which the lowest is not negative, (m, m).

    What noise and sampling add is an estimate, and distances less this can be negative. A constant
    keeps the order of pairs.

    Args:
        squared: (m, m) of pairs; its diagonal is not read.
    """
    pairs = ~np.eye(len(squared), dtype=bool)
    symmetric = (squared + squared.T) / 2
    lowest = float(symmetric[pairs].min(initial=0.0))
    return np.asarray((symmetric - lowest) * pairs)


def centred_products(squared: Array) -> Array:
    """Return inner products of points less their mean, from squared distances, (m, m).

    They are −½·J·D·J with J = I − 1/m (classical scaling, Torgerson 1952).

    Args:
        squared: D, (m, m), symmetric, with zeros in the diagonal.
    """
    rows = squared.mean(1, keepdims=True)
    return np.asarray(-(squared - rows - rows.T + squared.mean()) / 2)


def similarity_of(distance: Array) -> Array:
    """Return similarities exp(−d/median d) of distances from the lowest one on, (m, m).

    Excess distances are about zero within a cluster, and often negative: what noise and sampling
    add is an estimate.

    Args:
        distance: (m, m) of pairs, squared; its diagonal is not read.
    """
    pairs = ~np.eye(len(distance), dtype=bool)
    above_lowest = distance - distance[pairs].min()
    np.fill_diagonal(above_lowest, 0.0)
    scale = float(np.median(above_lowest[pairs]))
    if not scale > 0:
        return np.ones_like(distance)
    return np.asarray(np.exp(-above_lowest / scale))


def _cut_at_gap(squared: Array) -> list[int]:
    """Return labels (m,) by average linkage, cut at the largest relative gap from `GAP` on.

    Args:
        squared: (m, m) squared distances of pairs; its diagonal is not read.
    """
    tree = _average_merges(squared)
    return cut(tree, threshold(tree, GAP))


def _average_merges(squared: Array) -> Array:
    """Return the merges of average linkage, (m − 1, 4).

    Args:
        squared: (m, m) squared distances of pairs; its diagonal is not read.
    """
    symmetric = (squared + squared.T) / 2
    np.fill_diagonal(symmetric, 0.0)
    return merges(symmetric, "average")


def _count_apart(score: Array) -> int:
    """Return the number of groups left by average linkage below `APART`.

    Args:
        score: (m, m) of pairs; its diagonal is not read.
    """
    tree, lowest = _apart(score)
    below = int((tree[:, 2] <= APART - lowest).sum())
    return len(score) - below


def _apart(score: Array) -> tuple[Array, float]:
    """Return the merges of average linkage on scores less the lowest one, and that.

    Args:
        score: (m, m) of pairs; its diagonal is not read.
    """
    symmetric = (score + score.T) / 2
    np.fill_diagonal(symmetric, 0.0)
    lowest = min(0.0, float(symmetric.min()))
    # linkage wants distances, and a constant added to all pairs changes no merge
    return _average_merges(symmetric - lowest), lowest
