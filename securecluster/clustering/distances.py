"""Pairwise distances of update rows, as (m, m) float64, by column blocks: what hierarchical
clustering merges by (Briggs et al. 2020).
"""

from __future__ import annotations

from securecluster.clustering.similarity import FLOOR, blocks, cosine, gram
from securecluster.core.lazy_torch import torch
from securecluster.errors import unknown

METRICS = ("l1", "l2", "cosine", "chord")
# numbers of a float64 column block: 2 MB, which stay in cache while every pair reads them
WIDE = 1 << 18
# rows whose squared distance is below this share of their squared norms are compared number by
# number
CLOSE = 1e-6


def distances(rows: torch.Tensor, metric: str, noise: float | torch.Tensor = 0.0) -> torch.Tensor:
    """Distances of all pairs of rows (m, d), symmetric and zero on the diagonal; one block of
    columns is held beside them.

    Args:
        noise: expected squared norm of the independent noise in each row, one for all or (m,). A
            squared L2 distance exceeds that of the rows without noise by both rows' noise, which is
            taken off (down to 0), as it is of norms in cosines; L1 has no such correction and stays
            as it is.

    Raises:
        UsageError: an unknown metric.
    """
    known = {
        "l1": lambda: manhattan(rows),
        "l2": lambda: euclidean(rows, noise),
        "cosine": lambda: angular(rows, noise),
        "chord": lambda: chordal(rows, noise),
    }
    if metric not in known:
        raise unknown("metric", metric, METRICS)
    return known[metric]()


def alike(rows: torch.Tensor, metric: str, noise: float = 0.0) -> torch.Tensor:
    """Similarities of all pairs of rows, (m, m) in [-1, 1], for clusterings that ask for more than
    distances (ours).

    Under cosine and chord the cosines; under L1 and L2, which do not mind where the origin is, the
    cosines of the rows less their mean: under L1 of points whose squared Euclidean distances are
    the L1 distances (such points exist: L1 is of negative type, Schoenberg 1938).
    """
    if metric in ("cosine", "chord"):
        return cosine(gram(rows, None, noise), FLOOR if noise else 0.0)
    m = len(rows)
    around = torch.eye(m, dtype=torch.float64, device=rows.device) - 1 / m
    inner = gram(rows, None, noise) if metric == "l2" else -distances(rows, metric) / 2
    return cosine(around @ inner @ around, FLOOR if noise else 0.0)


def manhattan(rows: torch.Tensor) -> torch.Tensor:
    """L1: Σ_k |x_k − y_k|."""
    total = torch.zeros(len(rows), len(rows), dtype=torch.float64, device=rows.device)
    for block in blocks(rows, size=WIDE):
        wide = block.double()
        total += torch.cdist(wide, wide, p=1.0)
    return total


def euclidean(rows: torch.Tensor, noise: float | torch.Tensor = 0.0) -> torch.Tensor:
    """L2: ‖x − y‖, relative error below 1e-9.

    From the Gram matrix of the rows less their mean; where that cancels, for rows much closer to
    each other than to the mean, from the differences themselves.

    Args:
        noise: as in `distances`.
    """
    square = torch.zeros(len(rows), len(rows), dtype=torch.float64, device=rows.device)
    for block in blocks(rows, size=WIDE):
        wide = block.double()
        wide = wide - wide.mean(0)
        square += wide @ wide.T
    size = square.diagonal()
    scale = size[:, None] + size[None, :]
    square = (scale - square - square.T).clamp_min(0)
    first, second = torch.triu(square <= CLOSE * scale, 1).nonzero().T
    if len(first):
        exact = _squared(rows, first, second)
        square[first, second] = square[second, first] = exact
    each = torch.as_tensor(noise, dtype=torch.float64, device=rows.device).expand(len(rows))
    return (square - each[:, None] - each).clamp_min(0).fill_diagonal_(0).sqrt()


def to_others(rows: torch.Tensor, others: torch.Tensor) -> torch.Tensor:
    """L2 of each row (m, d) to each of a few others (k, d), (m, k) float64; from the differences,
    by column blocks.
    """
    total = torch.zeros(len(rows), len(others), dtype=torch.float64, device=rows.device)
    width = max(1, WIDE // max(len(rows), 1))
    for block, few in zip(
        torch.split(rows, width, dim=1),
        torch.split(others.to(rows.device), width, dim=1),
        strict=True,
    ):
        wide = block.double()
        for c, other in enumerate(few.double()):
            total[:, c] += (wide - other).square().sum(1)
    return total.sqrt()


def _squared(rows: torch.Tensor, first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    """‖x − y‖² of given pairs, (p,), a block of columns and of pairs at a time."""
    total = torch.zeros(len(first), dtype=torch.float64, device=rows.device)
    for block in blocks(rows, size=WIDE):
        wide = block.double()
        for part in torch.split(
            torch.arange(len(first), device=rows.device), max(1, WIDE // wide.shape[1])
        ):
            total[part] += (wide[first[part]] - wide[second[part]]).square().sum(1)
    return total


def angular(rows: torch.Tensor, noise: float | torch.Tensor = 0.0) -> torch.Tensor:
    """Cosine distance 1 − cos, in [0, 2], absolute error below 1e-12; a zero row is at distance 1
    from every other (`cosine`).

    Args:
        noise: as in `distances`.
    """
    apart = 1 - cosine(gram(rows, None, noise), FLOOR if torch.as_tensor(noise).any() else 0.0)
    return ((apart + apart.T) / 2).fill_diagonal_(0)


def chordal(rows: torch.Tensor, noise: float | torch.Tensor = 0.0) -> torch.Tensor:
    """L2 of the rows scaled to unit norm, sqrt(2·(1 − cos)), in [0, 2], absolute error below 2e-6.

    A zero row is at distance √2 from every other (`cosine`).

    Args:
        noise: as in `distances`.
    """
    return (2 * angular(rows, noise)).clamp_min(0).sqrt()
