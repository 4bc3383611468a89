"""Clusterings of similarity matrices."""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from numbers import Integral, Real
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from securecluster.errors import UsageError

Array = NDArray[np.float64]
TRIED = 50  # values of DBSCAN's eps


def members(labels: Sequence[int]) -> list[list[int]]:
    """The clients of each cluster 0 … max(labels), in order."""
    found: list[list[int]] = [[] for _ in range(1 + max(labels, default=-1))]
    for i, label in enumerate(labels):
        found[label].append(i)
    return found


def largest(labels: Sequence[int]) -> int:
    """The cluster with most clients, of equal ones the first: where a client of which nothing is known most likely belongs (ours)."""
    return max(range(1 + max(labels)), key=list(labels).count)


def check_number(k: object, clients: int, name: str = "k") -> None:
    """Raise UsageError for a number of clusters that cannot be made of so many clients."""
    if not isinstance(k, Integral) or not 1 <= int(k) <= clients:
        raise UsageError(f"{name} = {k!r} clusters cannot be made of {clients} clients: it is a whole number from 1 to that of clients")


def kmeans(inner: Array, k: int, seed: int) -> list[int]:
    """k-means clusters, numbered from 0, of points that are known by their inner products (m, m).

    Points of m or fewer numbers have the same inner products, and so the same distances: the clusters are those of the points
    themselves. Of ten starts the best is taken; there are fewer clusters where fewer points differ.
    """
    from sklearn.cluster import KMeans
    from sklearn.exceptions import ConvergenceWarning

    centred = inner - inner.mean(0) - inner.mean(1)[:, None] + inner.mean()
    values, vectors = np.linalg.eigh((centred + centred.T) / 2)
    points = vectors * np.sqrt(values.clip(0))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)  # points that coincide
        found = KMeans(min(k, len(points)), n_init=10, random_state=seed % (1 << 32)).fit_predict(points)
    labels: list[int] = np.unique(found, return_inverse=True)[1].tolist()
    return labels


def numbered(labels: Sequence[int]) -> list[int]:
    """Clusters numbered from 0 in the order of their first members; each of those labelled -1 is one of its own."""
    found: dict[tuple[int, int], int] = {}
    return [found.setdefault((label, k if label < 0 else -1), len(found)) for k, label in enumerate(labels)]


def dbscan(distance: Array, eps: float, least: int) -> list[int]:
    """DBSCAN's clusters, numbered from 0, of points that are known by their distances (m, m) (Ester et al. 1996); noise is -1.

    Args:
        eps: points are neighbours up to this distance.
        least: neighbours, itself among them, that make a point a core of a cluster.
    """
    from sklearn.cluster import DBSCAN

    found: list[int] = DBSCAN(eps=max(eps, np.finfo(float).tiny), min_samples=least, metric="precomputed").fit_predict(distance).tolist()
    return found


def check_dbscan(eps: object, least: object) -> None:
    """Raise UsageError for what is no distance, or no number of neighbours; None leaves either open."""
    if eps is not None and not (isinstance(eps, Real) and 0 <= float(eps) < np.inf):
        raise UsageError(f"eps = {eps!r} is no distance: give a finite number from 0, or leave it out")
    if least is not None and not (isinstance(least, Integral) and int(least) >= 1):
        raise UsageError(f"min_samples = {least!r} is not possible: it is a whole number from 1, or left out")


def most_similar(similarity: Array, labels: Sequence[int]) -> list[int]:
    """For each of some points, the cluster to whose members it is most similar on average (ours).

    Args:
        similarity: to the m points that are in clusters, (n, m).
        labels: of these, (m,).
    """
    clusters = sorted(set(labels))
    means = np.stack([similarity[:, np.equal(labels, c)].mean(1) for c in clusters], axis=1)
    return [clusters[k] for k in means.argmax(1)]


def neighbourhood(similarity: Array, least: int) -> float:
    """An eps for `dbscan` on 1 - similarity (m, m): of those at which users become cores, the one of the largest modularity (ours)."""
    distance = 1 - similarity
    cores = np.sort(distance, axis=1)[:, min(least, len(distance)) - 1]  # where each has `least` neighbours
    tried = np.unique(np.quantile(cores, np.linspace(0, 1, TRIED)).clip(0))
    return max((modularity(similarity, numbered(dbscan(distance, float(eps), least))), float(eps)) for eps in tried)[1]


def modularity(similarity: Array, labels: Sequence[int]) -> float:
    """How far the similarity within clusters exceeds what the clusters' shares of all similarity let expect (Newman 2004, weighted).

    One cluster has 0, and clusters of one less than that. The diagonal is not read.
    """
    weight = similarity - np.diag(np.diag(similarity))
    member = np.equal.outer(np.unique(labels), np.asarray(labels)).astype(np.float64)  # (K, m)
    between = member @ weight @ member.T
    total = max(float(between.sum()), np.finfo(float).tiny)
    return float(np.trace(between) / total - ((between.sum(1) / total) ** 2).sum())


class Bipartition(NamedTuple):
    """Two halves (sorted positions; the first holds position 0) and the largest similarity across them."""

    first: tuple[int, ...]
    second: tuple[int, ...]
    cross_max: float


def bipartition(alpha: Array) -> Bipartition:
    """The bipartition whose largest cross-similarity is smallest, in O(m²) (Sattler et al. 2019, eq. 35 and Algorithm 1).

    An optimum is the cut of the weakest edge of the maximum spanning tree, which is the last merge of single linkage on -alpha.
    Cutting at that merge, and not at its height, gives two non-empty halves under ties as well.

    Args:
        alpha: similarities, (m, m), symmetric, m >= 2; the diagonal is not read.

    Raises:
        UsageError: fewer than two rows, not square, or not finite.
    """
    from scipy.cluster.hierarchy import linkage
    from scipy.spatial.distance import squareform

    m = len(alpha)
    if m < 2 or alpha.shape != (m, m) or not np.isfinite(alpha).all():
        raise UsageError(f"a bipartition needs a finite square similarity matrix of at least two clients, not {alpha.shape}")
    if m == 2:
        return Bipartition((0,), (1,), float(alpha[0, 1]))
    distance = -alpha.astype(np.float64)
    np.fill_diagonal(distance, 0.0)
    groups = {k: {k} for k in range(m)}
    for n, (a, b, *_) in enumerate(linkage(squareform(distance, checks=False), "single")[:-1]):
        groups[m + n] = groups.pop(int(a)) | groups.pop(int(b))
    left, _ = groups.values()
    here = tuple(k for k in range(m) if (k in left) == (0 in left))
    there = tuple(k for k in range(m) if (k in left) != (0 in left))
    return Bipartition(here, there, float(alpha[np.ix_(here, there)].max()))


def intra_min(alpha: Array, members: tuple[int, ...]) -> float:
    """The smallest similarity within a group (1 for a group of one)."""
    inside = alpha[np.ix_(members, members)][~np.eye(len(members), dtype=bool)]
    return float(inside.min()) if inside.size else 1.0


class Separated(NamedTuple):
    """How far the best separated cluster stands apart, and all clusters that stand apart at all."""

    score: float
    labels: list[int]
    best: tuple[int, ...]


def separated(alpha: Array) -> Separated:
    """Score clusters C by (|C| - 1)·(α_intra^min(C) - α_cross^max(C, rest)), in O(m²) (ours).

    A positive score is Sattler et al.'s separation gap (2019, eq. 28) of one cluster against all others, so it does not vanish
    where both halves of a correct bipartition hold several clusters. Clusters count by size, since two of many noisy updates
    align by chance while larger groups do not. A cluster whose least similarity exceeds those to the rest is one of single
    linkage, so only these are looked at; α_cross^max of each is where it is merged with another.

    Args:
        alpha: similarities, (m, m), symmetric and finite, m >= 2; the diagonal is not read.

    Returns:
        The largest score, minus infinity for two clients; a partition (m,): disjoint clusters with a positive score, those with
        larger scores first, and one group of all clients that are in none; and the members of the best cluster.
    """
    from scipy.cluster.hierarchy import linkage
    from scipy.spatial.distance import squareform

    m = len(alpha)
    distance = -alpha.astype(np.float64)
    np.fill_diagonal(distance, 0.0)
    tree = linkage(squareform(distance, checks=False), "single")
    groups: dict[int, list[int]] = {k: [k] for k in range(m)}
    least = dict.fromkeys(range(m), math.inf)  # of the similarities within
    scored: list[tuple[float, list[int]]] = []
    for new, (left, right, height, _) in enumerate(tree, start=m):
        first, second = groups.pop(int(left)), groups.pop(int(right))
        for child, own in ((int(left), first), (int(right), second)):
            if len(own) > 1:
                scored.append(((len(own) - 1) * (least[child] + float(height)), own))
        across = float(alpha[np.ix_(first, second)].min())
        least[new] = min(across, least[int(left)], least[int(right)])
        groups[new] = first + second
    scored.sort(key=lambda one: -one[0])
    clusters = np.full(m, -1)
    for number, (score, own) in enumerate(scored):
        if score > 0 and (clusters[own] < 0).all():
            clusters[own] = number
    labels: list[int] = np.unique(clusters, return_inverse=True)[1].tolist()
    score, best = scored[0] if scored else (-math.inf, [])
    return Separated(score, labels, tuple(sorted(best)))
