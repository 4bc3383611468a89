"""Clusters of clients whose rows depend on their shares of classes in a known way.

The sums of a client's residuals by class (`ClassResiduals`) are its shares times what its cluster's
classes have of their own. So a client that has little of a class moves little in that class's
directions, and k-means is a regression: the row of client i in cluster c is W_i·b_c and noise, and
the design W_i follows from its shares. Where all clients have equal shares, W_i is one matrix, and
this is k-means. None of this is from a paper.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from securecluster.clustering.k_means import kmeans_of_points
from securecluster.clustering.labels import relabel
from securecluster.clustering.noisy_rows import squared_gaps, without_negative
from securecluster.clustering.pairs import check_pairs
from securecluster.clustering.significance import Array

Labels = NDArray[np.int64]

# counts of a class over all clients below this share of the mean class are taken to be as large,
# since means divide by them
LEAST_SHARE = 0.2
LEAST_COUNT = 1e-6  # of all examples together, over n
# ridges, over the mean eigenvalue of a client's design: of a client's own estimate, of a cluster's
CLIENT_RIDGE = 0.1
CLUSTER_RIDGE = 0.02
STARTS = 10  # random initializations, of which the best one is returned
STEPS = 30  # of k-means, at most
# what a parameter of a cluster costs, at least: with few clients, the best of many partitions gains
# more than log m; found by trial
LEAST_COST = 3.0
MOST_CLUSTERS = 16  # that are tried where their number is not given
# share of what is beyond noise and sampling that clusters of shares explain, at least: of clients
# with Dirichlet shares, clusters explain less unless most have one class; found by trial
EXPLAINED = 0.9
SHARE_MEMBERS = 3  # clients of a cluster of shares on average, at least
SHARE_SEED = 0  # of the starts of k-means on shares
TINY = 1e-300  # divides by zero sums


@dataclass(frozen=True)
class CrowdMeans:
    """Means of all clients together and shares of single clients, from noisy class blocks.

    Attributes:
        means: μ, (C, w), of the projections of each class.
        trust: in means of single classes, from 0 to 1: the share of their variance over classes
            that is not noise.
        shares: (m, C) of each client's examples, drawn to those of all by their noise.
        crowd: (C,) shares of all clients' examples, none of them zero.
        spread: mean square of what clients' shares differ from the crowd's by, beyond the noise,
            over that of equal shares, C⁻².
        spread_error: standard deviation that noise gives `spread`.
    """

    means: Array
    trust: float
    shares: Array
    crowd: Array
    spread: float
    spread_error: float

    @classmethod
    def of(cls, blocks: Array, deviations: Array, examples: Array, width: int) -> CrowdMeans:
        """Return the means and the shares.

        Args:
            blocks: (m, C, w + 1) for each class, its sum of projections and its count, over n.
            deviations: (m,) the standard deviation of the noise in each number; 0 without.
            examples: (m,) numbers of examples, as far as they are public.
            width: r, the projections that noise was added to; a mask may have made rows longer.
        """
        precision = 1 / np.maximum(deviations, 1e-12) ** 2
        weights = precision / precision.sum()
        mean_block = np.einsum("i,icw->cw", weights, blocks)
        deviation = float(np.sqrt(np.square(weights) @ np.square(deviations)))
        counts = mean_block[:, -1]
        # no less than what noise makes of nothing
        minimum = max(deviation * math.sqrt(len(counts)), LEAST_COUNT)
        all_counts = max(float(counts.sum()), minimum)
        divisor = np.maximum(counts, LEAST_SHARE * all_counts / len(counts))
        means = mean_block[:, :-1] / divisor[:, None]
        # means of noisy counts are drawn to that of all classes (James and Stein 1961)
        joint = means.mean(0)
        noise = float(np.mean((deviation / divisor) ** 2)) * width / means.shape[1]
        variance = float(np.mean(np.square(means - joint)))
        trust = max(0.0, 1 - noise / max(variance, TINY))
        means = joint + trust * (means - joint)
        crowd = divisor / divisor.sum()
        noisy_shares = blocks[:, :, -1] / all_counts
        variances = np.square(deviations / all_counts)
        spread, error = _spread(noisy_shares, variances, examples, crowd)
        shares = shares_of(blocks, deviations, crowd, spread)
        return cls(means, trust, shares, crowd, spread, error)

    def select(self, positions: Sequence[int]) -> CrowdMeans:
        """Return it with the shares of some clients.

        Args:
            positions: of the clients.
        """
        return replace(self, shares=self.shares[np.asarray(positions, dtype=np.int64)])

    @property
    def ratios(self) -> Array:
        """Return each client's shares over those of all, (m, C)."""
        return np.asarray(self.shares / self.crowd)


def shares_of(blocks: Array, deviations: Array, crowd: Array, spread: float) -> Array:
    """Return clients' shares of classes, drawn to those of all as far as noise hides them, (m, C).

    Args:
        blocks: (m, C, w + 1) of the clients, whose last numbers are counts over n.
        deviations: (m,) the standard deviation of the noise in each number.
        crowd: (C,) shares of all clients of the run.
        spread: of the clients of the run, as in `CrowdMeans`.
    """
    counts = blocks[:, :, -1]
    minimum = max(float(deviations.mean()) * math.sqrt(counts.size), LEAST_COUNT)
    all_counts = max(float(counts.sum(1).mean()), minimum / len(counts))
    variances = np.square(deviations / all_counts)
    beyond = spread / len(crowd) ** 2
    trust = beyond / np.maximum(beyond + variances, TINY)
    return np.maximum(crowd + trust[:, None] * (counts / all_counts - crowd), 0.0)


def _spread(
    noisy_shares: Array, variances: Array, examples: Array, crowd: Array
) -> tuple[float, float]:
    """Return by how much shares differ beyond noise and sampling, and the error of that.

    Args:
        noisy_shares: (m, C).
        variances: (m,) of the noise in each.
        examples: (m,) numbers of examples.
        crowd: (C,) shares of all clients.
    """
    m, classes = noisy_shares.shape
    sampling = crowd * (1 - crowd) / np.maximum(examples, 1.0)[:, None]
    expected = variances[:, None] + sampling
    beyond = float(np.mean(np.square(noisy_shares - crowd) - expected))
    error = math.sqrt(2 * float(np.mean(np.square(expected))) / (m * classes))
    return max(0.0, beyond) * classes**2, error * classes**2


def without_common(
    sums: Array, deviations: Array, crowd: CrowdMeans, width: int
) -> tuple[Array, Array]:
    """Return residuals less what they have in common over all clients, and that, by class.

    The means that clients subtract are noisy, so residuals have a common rest.

    Args:
        sums: (m, C, w) residuals by class, over n.
        deviations: (m,) the standard deviation of the noise in each number.
        crowd: of the same clients.
        width: r, the numbers that noise was added to.

    Returns:
        Residuals (m, C, w), and the common rest ρ (C, w) of one example.
    """
    precision = 1 / np.maximum(deviations, 1e-12) ** 2
    weights = precision / precision.sum()
    common = np.einsum("i,icw->cw", weights, sums) / crowd.crowd[:, None]
    variance = float(np.square(weights) @ np.square(deviations)) / np.square(crowd.crowd)
    size = np.maximum(np.square(common).sum(1), TINY)
    common = common * np.maximum(0.0, 1 - variance * width / size)[:, None]
    return sums - crowd.shares[:, :, None] * common, common


def designs(ratios: Array, directions: Array) -> Array:
    """Return W_i, (m, a, a): what shares do to coordinates in some directions.

    W_i = Σ_y (h_iy / h_y) V_y V_yᵀ; with equal shares it is the identity for orthonormal rows.

    Args:
        ratios: (m, C) each client's shares over those of all.
        directions: V, (a, C, w).
    """
    return np.asarray(np.einsum("iy,ayw,byw->iab", ratios, directions, directions, optimize=True))


def information_criterion(loss: float, labels: Labels, k: int, width: int) -> float:
    """Return minus twice the likelihood of rows and labels, and what k clusters cost.

    This is the integrated classification likelihood (Biernacki, Celeux and Govaert 2000). What

    Args:
        loss: sum of squares of rows from their clusters', over their variances.
        labels: (m,) of the clusters.
        k: number of clusters.
        width: numbers of a row.
    """
    m = len(labels)
    factor = max(1.0, loss / ((m - k) * width))
    sizes = np.bincount(labels)
    sizes = sizes[sizes > 0]
    of_labels = -2 * float(sizes @ np.log(sizes / m))
    of_rows: float = m * width * math.log(factor) + loss / factor
    cost = max(math.log(m), LEAST_COST)
    return of_rows + of_labels + cost * k * width


def share_clusters(counts: Array, deviations: Array, examples: Array) -> list[int]:
    """Return labels (m,) of clusters of alike shares; one cluster where shares show none.

    Shares that each client draws for itself (a Dirichlet distribution, say) differ without any
    clusters, and no few clusters explain how: what clusters leave unexplained tells the two apart.

    Args:
        counts: (m, C) of each client's examples by class, over n, with noise.
        deviations: (m,) the standard deviation of the noise in each number; 0 without.
        examples: (m,) n, as far as it is public.
    """
    m, classes = counts.shape
    if m < 2 * SHARE_MEMBERS:
        return [0] * m
    total = max(float(counts.sum(1).mean()), LEAST_COUNT)
    shares = counts / total
    crowd = shares.mean(0).clip(0, 1)
    sampling = float(np.mean(crowd * (1 - crowd))) / np.maximum(examples, 1.0)
    variances = np.maximum(np.square(deviations / total) + sampling, LEAST_COUNT)
    alone = np.zeros(m, dtype=np.int64)
    loss_alone = _squares(shares, variances, alone)
    best = information_criterion(loss_alone, alone, 1, classes)
    labels, left = alone, 1.0
    beyond = loss_alone - (m - 1) * classes
    for k in range(2, min(MOST_CLUSTERS, m // SHARE_MEMBERS) + 1):
        candidate = np.asarray(kmeans_of_points(shares, k, SHARE_SEED))
        loss = _squares(shares, variances, candidate)
        criterion = information_criterion(loss, candidate, k, classes)
        if criterion < best:
            best, labels = criterion, candidate
            within = loss * (m - 1) / (m - k) - (m - 1) * classes
            left = within / max(beyond, LEAST_COUNT)
    return relabel(labels.tolist()) if left <= 1 - EXPLAINED else [0] * m


def _squares(rows: Array, variances: Array, labels: Labels) -> float:
    """Return the sum of squares of rows from their clusters' means, over their variances."""
    members = np.eye(int(labels.max()) + 1)[labels] / variances[:, None]
    means = (members.T @ rows) / members.sum(0)[:, None]
    return float((np.square(rows - means[labels]).sum(1) / variances).sum())


@dataclass(frozen=True)
class NoisyResiduals:
    """Coordinates of clients with noise of a known size, and their designs.

    Attributes:
        values: (m, a).
        designs: W, (m, a, a).
        noise: (m,) variance of the noise in each number of a row; 0 without.
        sampling: (m,) variance that a client's finite sample adds to it, positive; an estimate.
    """

    values: Array
    designs: Array
    noise: Array
    sampling: Array

    @property
    def noisy(self) -> bool:
        """Return whether the numbers have noise."""
        return bool((self.noise > 0).any())

    @property
    def variances(self) -> Array:
        """Return the variances of noise and sampling together, (m,)."""
        return np.asarray(self.noise + self.sampling)

    def clusters(self, k: int | None, seed: int) -> list[int]:
        """Return labels (m,) by k-means with designs.

        Args:
            k: number of clusters; None takes that of `count`.
            seed: seed of the starts.
        """
        if k is None:
            return self._counted(seed)
        if k < 2:
            return [0] * len(self.values)
        return relabel(self._best(k, seed)[1].tolist())

    def count(self) -> int:
        """Return the number of clusters, by the Bayesian information criterion (Schwarz 1978)."""
        return len(set(self._counted(0)))

    def select(self, positions: Sequence[int]) -> NoisyResiduals:
        """Return the rows of some clients.

        Args:
            positions: of the clients.
        """
        index = np.asarray(positions, dtype=np.int64)
        return NoisyResiduals(
            self.values[index], self.designs[index], self.noise[index], self.sampling[index]
        )

    def pair_distances(self) -> Array:
        """Return squared distances of all pairs less noise, none of them negative, (m, m)."""
        return without_negative(self.squared_distances(self))

    def squared_distances(self, others: NoisyResiduals) -> Array:
        """Return squared distances of clients' own estimates less what noise adds, (m, b).

        Args:
            others: b clients' rows, in the same directions.
        """
        squares = squared_gaps(self._estimates, others._estimates)
        width = self.values.shape[1]
        noise = self.variances[:, None] + others.variances[None]
        return np.asarray(squares - width * noise)

    @cached_property
    def _grams(self) -> Array:
        """Return W_iᵀW_i over the variance of each client's numbers, (m, a, a)."""
        gram = np.einsum("iab,iac->ibc", self.designs, self.designs)
        return np.asarray(gram / self.variances[:, None, None])

    @cached_property
    def _moments(self) -> Array:
        """Return W_iᵀx_i over the variance of each client's numbers, (m, a)."""
        moment = np.einsum("iab,ia->ib", self.designs, self.values)
        return np.asarray(moment / self.variances[:, None])

    @cached_property
    def _estimates(self) -> Array:
        """Return b of each client as if it were a cluster, (m, a)."""
        # The ridge is scaled out again, so that equal shares leave rows as they are.
        return np.asarray((1 + CLIENT_RIDGE) * _solved(self._grams, self._moments, CLIENT_RIDGE))

    @cached_property
    def _trees(self) -> list[Array]:
        """Return the merges of Ward's method on rows, and on clients' own estimates."""
        from scipy.cluster.hierarchy import linkage

        check_pairs(len(self.values))
        return [np.asarray(linkage(rows, "ward")) for rows in (self.values, self._estimates)]

    def _counted(self, seed: int) -> list[int]:
        """Return labels by the number of clusters of least information criterion."""
        (one, labels), *others = self._candidates(seed)
        best = one
        for criterion, candidate in others:
            if criterion < best:
                best, labels = criterion, candidate
        return relabel(labels.tolist())

    def shortfall(self) -> str:
        """Return in words how far rows that are one cluster are from several."""
        (one, _), *others = self._candidates(0)
        least = min((criterion for criterion, _ in others), default=math.inf)
        return (
            f"the information criterion of several clusters of signatures is {least:.4g} at "
            f"least, and they need less than {one:.4g}, that of one cluster"
        )

    def _candidates(self, seed: int) -> list[tuple[float, Labels]]:
        """Return the information criterion and the labels of each number of clusters from 1."""
        m, width = self.values.shape
        single = np.zeros(m, dtype=np.int64)
        candidates = [(information_criterion(self._loss(single, 1), single, 1, width), single)]
        for k in range(2, min(MOST_CLUSTERS, m // 2) + 1):
            loss, labels = self._best(k, seed)
            candidates.append((information_criterion(loss, labels, k, width), labels))
        return candidates

    def _best(self, k: int, seed: int) -> tuple[float, Labels]:
        """Return the least sum of squares over their variances that was found, and its labels.

        Args:
            k: number of clusters.
            seed: of the starts.
        """
        k = min(k, len(self.values))
        best = math.inf
        labels = np.zeros(len(self.values), dtype=np.int64)
        for start in self._starts(k, seed):
            loss, candidate = self._descended(start, k)
            if loss < best - 1e-12 * abs(loss):
                best, labels = loss, candidate
        return best, labels

    def _starts(self, k: int, seed: int) -> Iterator[Labels]:
        """Yield labels to begin with: of clusters without designs, and around random clients."""
        from scipy.cluster.hierarchy import cut_tree

        for tree in self._trees:
            yield cut_tree(tree, n_clusters=k)[:, 0].astype(np.int64)
        generator = np.random.default_rng(seed)
        estimates = self._estimates
        for _ in range(STARTS):
            # k-means++ (Arthur and Vassilvitskii 2007)
            first = generator.integers(len(estimates))
            centres = estimates[first][None]
            for _ in range(k - 1):
                nearest = self._losses(centres).min(1)
                if not nearest.sum() > 0:
                    break
                chances = nearest / nearest.sum()
                chosen = generator.choice(len(estimates), p=chances)
                centres = np.vstack([centres, estimates[chosen]])
            yield self._losses(centres).argmin(1)

    def _descended(self, labels: Labels, k: int) -> tuple[float, Labels]:
        """Return the loss and the labels after steps of k-means."""
        loss = math.inf
        for _ in range(STEPS):
            losses = self._losses(self._centres(labels, k))
            nearest = losses.argmin(1)
            loss = float(losses.min(1).sum())
            if np.array_equal(nearest, labels):
                break
            labels = nearest
        return loss, labels

    def _loss(self, labels: Labels, k: int) -> float:
        """Return the sum of squares of rows from their clusters', over their variances."""
        losses = self._losses(self._centres(labels, k))
        return float(losses[np.arange(len(labels)), labels].sum())

    def _losses(self, centres: Array) -> Array:
        """Return squared distances of rows from what centres predict, over variances, (m, k)."""
        predicted = np.einsum("iab,kb->ika", self.designs, centres)
        squares = np.square(self.values[:, None] - predicted).sum(2)
        return np.asarray(squares / self.variances[:, None])

    def _centres(self, labels: Labels, k: int) -> Array:
        """Return b of each cluster by least squares, (k, a); zeros of an empty one."""
        members = np.eye(k)[labels]
        gram = np.tensordot(members.T, self._grams, 1)
        moment = members.T @ self._moments
        ridges = CLUSTER_RIDGE / np.maximum(members.sum(0), 1.0)
        return _solved(gram, moment, ridges)


def _solved(grams: Array, moments: Array, ridge: float | Array) -> Array:
    """Return the solutions of least squares with ridges, (b, a); zeros where there is nothing.

    Args:
        grams: (b, a, a).
        moments: (b, a).
        ridge: over the mean eigenvalue of each gram.
    """
    width = grams.shape[1]
    scale = np.maximum(np.trace(grams, axis1=1, axis2=2) / width, TINY)
    diagonal = (ridge * scale)[:, None, None] * np.eye(width)
    return np.asarray(np.linalg.solve(grams + diagonal, moments[..., None])[..., 0])
