"""Centres of clusters from noisy sums of points, where nobody sees a point.

Each point stays with its owner. The server learns four sums of rows of norm 1 at most, and after
each of them it tells everyone a public summary, by which the owners make their next row:

1. the sum of unit vectors x_i: the mean
2. the sum of v_i v_iᵀ, v_i the direction of x_i from the mean: the leading directions
3. the sum of rows that say which cell of a public code book the projection of v_i is in, and where
   in the cell: a small weighted set of points, on which k-means finds centres
4. the sum of rows that say which centre is the nearest, and the displacement from it, clipped: one
   step of Lloyd's algorithm

Before these, a sum of parts of points may be released: what of each point comes from which of some
classes, and how much the class weighs in it. The mean part of a class is then subtracted from every
owner's, in proportion to its weight, so that owners who lack a class differ from others in nothing
else by it (`residuals`).

In the end each owner takes the centre that is nearest to its own point. Noise is the caller's: it
adds it to the sums, and every function of the server is post-processing of them.
"""

from __future__ import annotations

import math
import warnings

import numpy as np

from securecluster.clustering.k_means import SEEDS
from securecluster.clustering.labels import Array

# Shares of the inverse squared noise multiplier, by sum; chosen by trial.
SHARES = (0.2, 0.45, 0.25, 0.1)
# The same with a sum of parts before them; chosen on seeds 100 to 109 of
# `benchmarks.private.hidden`.
SHARES_WITH_PARTS = (0.2, 0.12, 0.4, 0.2, 0.08)
# The mean part of a class is subtracted in full if its weight in the sum is this many deviations.
PART_DEVIATIONS = 2.0
# Largest displacement of a point from its cell, and from its centre. The noise in a mean is in
# proportion to it, so that a short reach, which clips some displacements, finds better centres.
CELL_REACH = 0.4
STEP_REACH = 0.3
# Cells of the code book for each cluster. More tell unequal clusters apart, and are noise alone
# where a cell has few points: the number is the larger one if the average count of a cell is this
# many deviations of its noise. Chosen by trial on seeds 20 to 25.
CELLS_PER_CLUSTER = (4, 2)
POINTS_PER_DEVIATION = 1.5
CELL_RADIUS = 0.8  # norm of the code book's centres, in the unit ball that all points lie in
# A cell is used, and a centre moves, if its count is this many standard deviations of its noise.
CELL_DEVIATIONS = math.sqrt(2)
STEP_DEVIATIONS = 1.5 * math.sqrt(2)
SURE_DEVIATIONS = 3.0
COUNT_ROUNDING = 0.1  # counts of sums without noise are whole numbers up to rounding
STARTS = 20  # random initializations of k-means on the cells
SPREAD_POINTS = 4000  # random directions whose clusters are the code book's


def unit(rows: Array) -> Array:
    """Return rows (b, q) of norm 1.

    Zeros stay zeros, and a row that is not finite becomes zeros: an error would tell of the data.
    """
    wide = np.asarray(rows, dtype=np.float64)
    finite = np.isfinite(wide).all(-1, keepdims=True)
    wide = np.where(finite, wide, 0.0)
    # Divided by the largest number first, since squares may overflow.
    largest = np.abs(wide).max(-1, keepdims=True, initial=0.0)
    wide = wide / np.where(largest > 0, largest, 1.0)
    norms = np.linalg.norm(wide, axis=-1, keepdims=True)
    return np.asarray(wide / np.where(norms > 0, norms, 1.0))


def directions_from(points: Array, mean: Array) -> Array:
    """Return the unit directions of points (b, q) from the mean (q,)."""
    return unit(points - mean)


def part_rows(contributions: Array, weights: Array) -> Array:
    """Return rows (b, c, 1 + q) of norm 1 of parts of points and of their weights.

    Args:
        contributions: (b, c, q) what each class adds to a point.
        weights: (b, c) of the classes in it.

    Returns:
        (b, c, 1 + q) the weights w/‖w‖ and the parts p/‖p‖, each divided by √2.
    """
    flat = unit(contributions.reshape(len(contributions), -1)).reshape(contributions.shape)
    halves = [unit(weights)[:, :, None], flat]
    return np.asarray(math.sqrt(0.5) * np.concatenate(halves, axis=2))


def mean_parts(row_sum: Array, deviation: float) -> Array:
    """Return what a class of weight 1 adds to a point on average, (c, q).

    Classes whose weight may be noise alone are divided by more, and thus subtracted in part.

    Args:
        row_sum: (c, 1 + q) sum of `part_rows`.
        deviation: standard deviation of the noise in each number of the sum.
    """
    minimum = max(PART_DEVIATIONS * deviation, np.finfo(np.float64).eps)
    return np.asarray(row_sum[:, 1:] / np.maximum(row_sum[:, :1], minimum))


def residuals(rows: Array, means: Array) -> Array:
    """Return unit points (b, q) without the mean parts of their classes.

    Args:
        rows: (b, c, 1 + q) of `part_rows`.
        means: (c, q) of `mean_parts`.
    """
    # elementwise, since a matrix product may round a row by the other rows of its batch
    remainders = rows[:, :, 1:] - rows[:, :, :1] * means[None]
    return unit(remainders.sum(1))


def second_moments(directions: Array) -> Array:
    """Return v vᵀ of each unit vector, packed to a vector of the same norm.

    Args:
        directions: (b, q).

    Returns:
        (b, q(q + 1)/2) the numbers v_i², and √2·v_i·v_j for i < j, whose norm is ‖v‖².
    """
    i, j = np.triu_indices(directions.shape[-1])
    factors = np.where(i == j, 1.0, math.sqrt(2))
    return np.asarray(factors * directions[:, i] * directions[:, j])


def leading_directions(packed: Array, count: int) -> Array:
    """Return the eigenvectors of the largest eigenvalues of a packed symmetric matrix.

    Args:
        packed: (q(q + 1)/2,) sum of `second_moments`.
        count: r, number of eigenvectors.

    Returns:
        (q, r) orthonormal columns, each with a positive largest number.
    """
    q = math.isqrt(2 * len(packed))
    i, j = np.triu_indices(q)
    matrix = np.zeros((q, q))
    matrix[i, j] = np.where(i == j, 1.0, math.sqrt(0.5)) * packed
    matrix[j, i] = matrix[i, j]
    _, vectors = np.linalg.eigh(matrix)
    leading = vectors[:, ::-1][:, :count]
    largest = np.abs(leading).argmax(0)
    signs = np.sign(leading[largest, np.arange(leading.shape[1])])
    return np.asarray(leading * signs)


def projections(directions: Array, basis: Array) -> Array:
    """Return the coordinates (b, r) of unit vectors (b, q) along a basis (q, r)."""
    # A matrix product may round a row by the other rows of its batch, and noise follows the bits.
    coordinates = (directions[:, :, None] * basis[None]).sum(1)
    return within(coordinates, 1.0)


def within(rows: Array, radius: float) -> Array:
    """Return rows (b, r) scaled down to a norm of at most `radius`."""
    norms = np.linalg.norm(rows, axis=-1, keepdims=True)
    factors = np.minimum(1.0, radius / np.maximum(norms, np.finfo(np.float64).tiny))
    return np.asarray(rows * factors)


def nearest_centres(points: Array, centres: Array) -> Array:
    """Return the number of the nearest centre of each point, (b,); the first of equal ones.

    Args:
        points: (b, r).
        centres: (c, r).
    """
    differences = points[:, None] - centres[None]
    return np.asarray((differences**2).sum(-1).argmin(1))


def displacement_rows(points: Array, centres: Array, reach: float) -> Array:
    """Return for each point a one at its nearest centre, and its displacement from it.

    Args:
        points: (b, r).
        centres: (c, r).
        reach: norm that displacements are clipped to.

    Returns:
        (b, c, 1 + r): zeros but for the block of the nearest centre, which is (1, δ/reach)/√2, of
        norm 1 at most.
    """
    nearest = nearest_centres(points, centres)
    displacements = within(points - centres[nearest], reach)
    count, r = points.shape
    rows = np.zeros((count, len(centres), 1 + r))
    positions = np.arange(count)
    rows[positions, nearest, 0] = 1.0
    rows[positions, nearest, 1:] = displacements / reach
    return np.asarray(rows * math.sqrt(0.5))


def counts_of(row_sum: Array) -> Array:
    """Return the number of points at each centre, (c,), with noise where the sum has some.

    Args:
        row_sum: (c, 1 + r) sum of `displacement_rows`.
    """
    return np.asarray(row_sum[:, 0] * math.sqrt(2))


def _mean_displacements(row_sum: Array, reach: float) -> Array:
    """Return the mean displacement of the points at each centre, (c, r), at most `reach` long."""
    sums = row_sum[:, 1:] * (math.sqrt(2) * reach)
    counts = np.maximum(counts_of(row_sum), 1.0)
    return within(sums / counts[:, None], reach)


def code_book(r: int, count: int) -> Array:
    """Return the centres of a public code book of the unit ball, (c, r), spread evenly.

    Args:
        r: dimensions, positive.
        count: number of centres; with one dimension there are two at most.
    """
    if r == 1:
        return np.array([[-CELL_RADIUS], [CELL_RADIUS]])
    draws = np.random.default_rng(11).standard_normal((SPREAD_POINTS, r))
    spread = _k_means(unit(draws), np.ones(len(draws)), count, starts=1, seed=11)
    return CELL_RADIUS * unit(spread)


def cells_for(k: int, points: int, deviation: float) -> int:
    """Return the number of cells of the code book, by what is known before any point is.

    Args:
        k: number of clusters.
        points: their number.
        deviation: standard deviation of the noise in each number of the sum over cells.
    """
    fine, coarse = CELLS_PER_CLUSTER
    noise_of_count = math.sqrt(2) * deviation
    if points < POINTS_PER_DEVIATION * noise_of_count * fine * k:
        return coarse * k
    return fine * k


def centres_from_cells(row_sum: Array, cells: Array, k: int, deviation: float, seed: int) -> Array:
    """Return k centres of the points that a sum describes by cells.

    Cells whose count may be noise alone are left out, as long as k others remain.

    Args:
        row_sum: (c, 1 + r) sum of `displacement_rows` from the cells.
        cells: (c, r) the code book, k centres or more.
        k: number of clusters.
        deviation: standard deviation of the noise in each number of the sum.
        seed: of the random starts.

    Returns:
        (k, r)
    """
    counts = counts_of(row_sum)
    noise_of_count = math.sqrt(2) * deviation
    occupied = np.flatnonzero(counts > CELL_DEVIATIONS * noise_of_count)
    if len(occupied) < k:
        occupied = np.argsort(-counts, kind="stable")[:k]
    means = cells + _mean_displacements(row_sum, CELL_REACH)
    points = within(means[occupied], 1.0)
    weights = np.maximum(counts[occupied], 1.0)
    return _k_means(points, weights, k, STARTS, seed)


def centres_from_counts(counts: Array, cells: Array, k: int, seed: int) -> Array:
    """Return k centres of points of which only the number in each cell is known.

    Args:
        counts: (c,) exact numbers of points.
        cells: (c, r) the code book, k centres or more.
        k: number of clusters.
        seed: of the random starts.

    Returns:
        (k, r)
    """
    occupied = np.flatnonzero(counts)
    if len(occupied) < k:
        occupied = np.argsort(-counts, kind="stable")[:k]
    return _k_means(cells[occupied], np.maximum(counts[occupied], 1.0), k, STARTS, seed)


def moved_centres(row_sum: Array, centres: Array, deviation: float) -> Array:
    """Return the centres (k, r) after a step of Lloyd's algorithm.

    A centre whose count may be noise alone stays where it is.

    Args:
        row_sum: (k, 1 + r) sum of `displacement_rows` from the centres.
        centres: (k, r).
        deviation: standard deviation of the noise in each number of the sum.
    """
    noise_of_count = math.sqrt(2) * deviation
    clear = counts_of(row_sum) > STEP_DEVIATIONS * noise_of_count
    steps = _mean_displacements(row_sum, STEP_REACH)
    return np.asarray(centres + np.where(clear[:, None], steps, 0.0))


def separation(centres: Array, counts: Array) -> float:
    """Return the share of the points' squared length that the differences of centres account for.

    Points are unit vectors, so that the sum of their squared lengths is their number, and nothing
    more has to be released. The centres of clusters that are far apart beside their spread account
    for nearly all of it, and centres that cut one cluster in pieces for little. Noise in the
    centres adds to it: a small value is a sure sign, and a large one is none.

    Args:
        centres: (k, r) where the points are directions from their mean.
        counts: (k,) of the points at each centre, with noise where sums have some.

    Returns:
        From 0 to 1.
    """
    sizes = np.maximum(counts, 0.0)
    if not sizes.sum():
        return 0.0
    weights = sizes / sizes.sum()
    differences = centres - weights @ centres
    return float(weights @ (differences**2).sum(1))


def weakest_direction(centres: Array, counts: Array) -> float:
    """Return how far centres are apart in the direction in which they differ least.

    k centres of clusters differ in k − 1 directions. Where one has few points, or lies between
    others, they differ in fewer: it may be a piece of a cluster, or of noise, however far the
    others are apart.

    Args:
        centres: as for `separation`.
        counts: as for `separation`.

    Returns:
        From 0, where one centre says nothing, to 1, where all differ alike and account for all of
        the points' squared length; 1 for one centre.
    """
    directions = len(centres) - 1
    if not directions:
        return 1.0
    sizes = np.maximum(counts, 0.0)
    if not sizes.sum() or centres.shape[1] < directions:
        return 0.0
    weights = sizes / sizes.sum()
    differences = (centres - weights @ centres) * np.sqrt(weights)[:, None]
    singular = np.linalg.svd(differences, compute_uv=False)
    return float(singular[directions - 1]) * math.sqrt(directions)


def large_enough(counts: Array, deviation: float, minimum: int) -> list[int]:
    """Return which centres are kept, (k',) ascending; the one with the highest count always is.

    A centre is left out if its count is surely below a minimum: noise alone must not dissolve a
    small cluster.

    Args:
        counts: (k,) of the clients at each centre, with noise where sums have some.
        deviation: standard deviation of the noise in each number of the sum.
        minimum: smallest size of a cluster.
    """
    sure = SURE_DEVIATIONS * math.sqrt(2) * deviation
    enough = counts + sure >= minimum - COUNT_ROUNDING
    enough[counts.argmax()] = True
    return [int(c) for c in np.flatnonzero(enough)]


def _k_means(points: Array, weights: Array, k: int, starts: int, seed: int) -> Array:
    """Return the k centres of weighted points."""
    from sklearn.cluster import KMeans
    from sklearn.exceptions import ConvergenceWarning

    estimator = KMeans(k, n_init=starts, random_state=seed % SEEDS)
    with warnings.catch_warnings():
        # Points that coincide give equal centres, which scikit-learn warns of.
        warnings.simplefilter("ignore", ConvergenceWarning)
        estimator.fit(points, sample_weight=weights)
    return np.asarray(estimator.cluster_centers_)
