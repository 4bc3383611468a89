"""Pairwise distances of update rows for hierarchical clustering (Briggs et al. 2020).

Distances are (m, m) float64. They are computed by column blocks, so that no second (m, d) is made.

The known noise of both rows is subtracted from squared distances.
"""

from __future__ import annotations

from securecluster.clustering.pairs import check_pairs
from securecluster.clustering.similarity import FLOOR, blocks, cosine, cosine_, gram, symmetrise_
from securecluster.core.lazy_torch import torch
from securecluster.errors import unknown

METRICS = ("l1", "l2", "cosine", "chord")
# numbers of a float64 column block: 2 MB, which stay in cache while every pair reads them
WIDE = 1 << 18
# rows whose squared distance is below this share of their squared norms are compared number by
# number
CLOSE = 1e-6


def distances(rows: torch.Tensor, metric: str, noise: float | torch.Tensor = 0.0) -> torch.Tensor:
    """Return the distances of all pairs of rows.

    Args:
        rows: (m, d).
        metric: one of `METRICS`.
        noise: expected squared norm of the independent noise in each row, one for all or (m,). A
            squared L2 distance exceeds that of the rows without noise by the noise of both rows,
            which is subtracted (down to 0), as from the norms in cosines. L1 has no such correction
            and ignores it.

    Returns:
        (m, m) float64, symmetric and zero on the diagonal, on the rows' device.

    Raises:
        UsageError: an unknown metric, or too many rows (`check_pairs`).
    """
    if metric == "l1":
        return manhattan(rows)
    if metric == "l2":
        return euclidean(rows, noise)
    if metric == "cosine":
        return angular(rows, noise)
    if metric == "chord":
        return chordal(rows, noise)
    raise unknown("metric", metric, METRICS)


def alike(rows: torch.Tensor, metric: str, noise: float = 0.0) -> torch.Tensor:
    """Return similarities that suit a metric, for clusterings that need more than distances (not in
    the paper).

    For cosine and chord these are the cosines. L1 and L2 do not depend on the origin, so there they
    are the cosines of the rows less their mean; under L1, of points whose squared Euclidean
    distances are the L1 distances. Such points exist, as L1 is of negative type (Schoenberg 1938).

    Args:
        rows: (m, d).
        metric: one of `METRICS`.
        noise: expected squared norm of the independent noise in each row.

    Returns:
        (m, m) float64 in [-1, 1], on the rows' device.
    """
    floor = FLOOR if noise else 0.0
    if metric in ("cosine", "chord"):
        return cosine(gram(rows, None, noise), floor)
    m = len(rows)
    identity = torch.eye(m, dtype=torch.float64, device=rows.device)
    centring = identity - 1 / m
    inner = _uncentred_gram(rows, metric, noise)
    return cosine(centring @ inner @ centring, floor)


def manhattan(rows: torch.Tensor) -> torch.Tensor:
    """Return L1 distances Σ_k |x_k − y_k|.

    Args:
        rows: (m, d).

    Returns:
        (m, m) float64.
    """
    distance = _pair_zeros(rows)
    for block in blocks(rows, size=WIDE):
        wide = block.double()
        distance += torch.cdist(wide, wide, p=1.0)
    return distance


def euclidean(rows: torch.Tensor, noise: float | torch.Tensor = 0.0) -> torch.Tensor:
    """Return L2 distances ‖x − y‖, with a relative error below 1e-9.

    They are made from the Gram matrix of the rows less their mean. Where that cancels, for rows
    much closer to each other than to the mean, they are made from the differences themselves.

    Args:
        rows: (m, d).
        noise: as in `distances`.

    Returns:
        (m, m) float64.
    """
    inner = _centred_gram(rows)
    squared_norms = inner.diagonal()
    scale = squared_norms[:, None] + squared_norms[None, :]
    # ‖x‖² + ‖y‖² − 2⟨x, y⟩, with the mean of both triangles.
    squares = (scale - (inner + inner.T)).clamp_min(0)
    cancelled = squares <= CLOSE * scale
    first, second = torch.triu(cancelled, 1).nonzero().T
    if len(first):
        exact = _squared(rows, first, second)
        squares[first, second] = exact
        squares[second, first] = exact
    row_noise = torch.as_tensor(noise, dtype=torch.float64, device=rows.device)
    row_noise = row_noise.expand(len(rows))
    corrected = squares - row_noise[:, None] - row_noise
    return corrected.clamp_min(0).fill_diagonal_(0).sqrt()


def to_others(rows: torch.Tensor, others: torch.Tensor) -> torch.Tensor:
    """Return the L2 distances of rows to a few other rows, from the differences themselves.

    Args:
        rows: (m, d).
        others: (k, d), on any device.

    Returns:
        (m, k) float64, on the device of `rows`.
    """
    squares = torch.zeros(len(rows), len(others), dtype=torch.float64, device=rows.device)
    width = max(1, WIDE // max(len(rows), 1))
    row_blocks = torch.split(rows, width, dim=1)
    other_blocks = torch.split(others.to(rows.device), width, dim=1)
    for row_block, other_block in zip(row_blocks, other_blocks, strict=True):
        wide = row_block.double()
        # One other row at a time: all differences at once would be (m, k, width).
        for column, other in enumerate(other_block.double()):
            difference = wide - other
            squares[:, column] += difference.square().sum(1)
    return squares.sqrt()


def angular(rows: torch.Tensor, noise: float | torch.Tensor = 0.0) -> torch.Tensor:
    """Return cosine distances 1 − cos, with an absolute error below 1e-12.

    Args:
        rows: (m, d). A zero row is at distance 1 from every other (see `cosine`).
        noise: as in `distances`.

    Returns:
        (m, m) float64 in [0, 2].
    """
    floor = 0.0
    # Short rows are trustworthy unless there is noise.
    if torch.as_tensor(noise).any():
        floor = FLOOR
    similarity = cosine_(gram(rows, None, noise), floor)
    return symmetrise_(similarity.neg_().add_(1)).fill_diagonal_(0)


def chordal(rows: torch.Tensor, noise: float | torch.Tensor = 0.0) -> torch.Tensor:
    """Return L2 distances of the rows scaled to unit norm, sqrt(2·(1 − cos)).

    The absolute error is below 2e-6.

    Args:
        rows: (m, d). A zero row is at distance √2 from every other (see `cosine`).
        noise: as in `distances`.

    Returns:
        (m, m) float64 in [0, 2].
    """
    return angular(rows, noise).mul_(2).clamp_min_(0).sqrt_()


def _pair_zeros(rows: torch.Tensor) -> torch.Tensor:
    m = len(rows)
    check_pairs(m)
    return torch.zeros(m, m, dtype=torch.float64, device=rows.device)


def _uncentred_gram(rows: torch.Tensor, metric: str, noise: float) -> torch.Tensor:
    """Return inner products (m, m) of points with the metric's geometry, up to their origin."""
    if metric == "l2":
        return gram(rows, None, noise)
    # Of squared distances D, −D/2 are the points' inner products up to what centring removes.
    return -distances(rows, metric) / 2


def _centred_gram(rows: torch.Tensor) -> torch.Tensor:
    """Return the inner products (m, m) of the rows less their mean."""
    inner = _pair_zeros(rows)
    for block in blocks(rows, size=WIDE):
        wide = block.double()
        # Distances do not depend on the origin; near the mean less cancels.
        centred = wide - wide.mean(0)
        inner += centred @ centred.T
    return inner


def _squared(rows: torch.Tensor, first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    """Return ‖x − y‖² of p given pairs from their differences.

    Args:
        rows: (m, d).
        first: position of each pair's one row, (p,).
        second: position of its other row, (p,).

    Returns:
        (p,) float64.
    """
    squares = torch.zeros(len(first), dtype=torch.float64, device=rows.device)
    pairs = torch.arange(len(first), device=rows.device)
    for block in blocks(rows, size=WIDE):
        wide = block.double()
        # Blocks of pairs as well: there can be m² / 2 of them.
        chunk_size = max(1, WIDE // wide.shape[1])
        for chunk in torch.split(pairs, chunk_size):
            x = wide[first[chunk]]
            y = wide[second[chunk]]
            squares[chunk] += (x - y).square().sum(1)
    return squares
