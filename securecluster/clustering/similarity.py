"""Geometry of update rows, computed from their Gram matrix.

Every orthonormal mask preserves the Gram matrix, so all of this works on masked rows.

The noise in rows is known, and `gram` subtracts its expected squared norm from the diagonal, so
norms, cosines and the tests that use them are those without noise. Under noise cosines do not
divide by norms below half their median (`FLOOR`).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from securecluster.clustering.pairs import check_pairs
from securecluster.core.lazy_torch import torch

BLOCK = 1 << 24  # numbers of a column block
TILE = 2048  # side of a part of a large matrix of pairs, beside which no second one is made
FLOOR = 0.5  # share of the median norm: under noise no row counts as shorter


def gram(
    rows: torch.Tensor, positions: Sequence[int] | None = None, noise: float | torch.Tensor = 0.0
) -> torch.Tensor:
    """Return the inner products of rows, without a second copy of them in memory.

    Args:
        rows: (n, d).
        positions: the m rows to take; None for all.
        noise: expected squared norm of the independent noise in each row, one for all or (m,). It
            is subtracted from the diagonal, since ‖Δ + noise‖² exceeds ‖Δ‖² by about σ²d. Norms and
            cosines of the result are then those of the rows without noise.

    Returns:
        (m, m) float64, symmetric, on the rows' device.

    Raises:
        UsageError: too many rows (`check_pairs`).
    """
    m = len(rows)
    if positions is not None:
        m = len(positions)
    check_pairs(m)
    inner = torch.zeros(m, m, dtype=torch.float64, device=rows.device)
    for block in blocks(rows, positions):
        wide = block.double()
        for first in range(0, m, TILE):
            tile = slice(first, first + TILE)
            inner[tile] += wide[tile] @ wide.T
    # A matrix product need not round (i, j) and (j, i) alike.
    symmetrise_(inner)
    inner.diagonal().sub_(torch.as_tensor(noise, dtype=inner.dtype, device=inner.device))
    return inner


def symmetrise_(matrix: torch.Tensor) -> torch.Tensor:
    """Replace a square matrix by the mean of itself and its transpose, and return it.

    Args:
        matrix: (m, m), changed in place.
    """
    starts = range(0, len(matrix), TILE)
    for row in starts:
        for column in starts[row // TILE :]:
            rows = slice(row, row + TILE)
            columns = slice(column, column + TILE)
            mean = (matrix[rows, columns] + matrix[columns, rows].T) / 2
            matrix[rows, columns] = mean
            matrix[columns, rows] = mean.T
    return matrix


def cross_cosine(rows: torch.Tensor, others: torch.Tensor) -> torch.Tensor:
    """Return the cosine similarities between two sets of rows.

    Args:
        rows: (n, d).
        others: (m, d).

    Returns:
        (n, m) float64 in [-1, 1], on the CPU; 0 for zero rows, as in `cosine`.
    """
    inner = torch.zeros(len(rows), len(others), dtype=torch.float64)
    row_squares = torch.zeros(len(rows), dtype=torch.float64)
    other_squares = torch.zeros(len(others), dtype=torch.float64)
    height = max(len(rows), len(others), 1)
    width = max(1, BLOCK // height)
    row_blocks = torch.split(rows, width, dim=1)
    other_blocks = torch.split(others, width, dim=1)
    for row_block, other_block in zip(row_blocks, other_blocks, strict=True):
        # The two sets may be on different devices.
        row_wide = row_block.double().cpu()
        other_wide = other_block.double().cpu()
        inner += row_wide @ other_wide.T
        row_squares += row_wide.square().sum(1)
        other_squares += other_wide.square().sum(1)
    row_scale = _inverse_roots(row_squares)[:, None]
    other_scale = _inverse_roots(other_squares)
    alpha = inner * row_scale * other_scale
    return alpha.clamp(-1, 1)


def mean_row(
    rows: torch.Tensor, positions: Sequence[int] | None = None, weight: torch.Tensor | None = None
) -> torch.Tensor:
    """Return the mean of rows, without a second copy of them in memory.

    Args:
        rows: (n, d).
        positions: the m rows to take; None for all.
        weight: weight of each of these, (m,); None for equal weights.

    Returns:
        (d,), of the rows' type.
    """
    if weight is None:
        means = [block.mean(0) for block in blocks(rows, positions)]
        return torch.cat(means)
    # Normalised before the conversion, in the weights' own precision.
    shares = weight / weight.sum()
    shares = shares.to(rows.device, rows.dtype)
    weighted = [shares @ block for block in blocks(rows, positions)]
    return torch.cat(weighted)


def blocks(
    rows: torch.Tensor, positions: Sequence[int] | None = None, size: int | None = None
) -> Iterator[torch.Tensor]:
    """Yield consecutive column blocks of rows, so that work on them needs little memory.

    Args:
        rows: (n, d).
        positions: the m rows to take; None for all.
        size: about how many numbers of `rows` a block holds; `BLOCK` if None.

    Yields:
        Blocks (m, c).
    """
    index = _row_index(rows, positions)
    numbers = size or BLOCK
    width = max(1, numbers // max(len(rows), 1))
    for block in torch.split(rows, width, dim=1):
        if index is None:
            yield block
        else:
            yield block[index]


def gram_norms(inner: torch.Tensor) -> torch.Tensor:
    """Return the norms of rows from their Gram matrix.

    Args:
        inner: Gram matrix, (m, m). A diagonal that noise correction made negative counts as 0.

    Returns:
        (m,), of the matrix's type.
    """
    return inner.diagonal().clamp_min(0).sqrt()


def row_norms(
    rows: torch.Tensor, positions: Sequence[int] | None = None, noise: float = 0.0
) -> torch.Tensor:
    """Return the norms of rows without their Gram matrix.

    Args:
        rows: (n, d).
        positions: the m rows to take; None for all.
        noise: expected squared norm of the noise in each row, which is subtracted from its square.

    Returns:
        (m,) float64, on the rows' device; 0 where the noise exceeds the square.
    """
    m = len(rows)
    if positions is not None:
        m = len(positions)
    squares = torch.zeros(m, dtype=torch.float64, device=rows.device)
    for block in blocks(rows, positions):
        squares += block.double().square().sum(1)
    return (squares - noise).clamp_min(0).sqrt()


def cosine(inner: torch.Tensor, floor: float = 0.0) -> torch.Tensor:
    """Return cosine similarities from a Gram matrix (Sattler et al. 2019, eq. 44).

    A zero row has no direction: its similarity is defined as 0 to every other row and 1 to itself
    (not in the paper).

    Args:
        inner: Gram matrix, (m, m).
        floor: norms below this share of their median count as that share (not in the paper). With
            noise subtracted, a short row's squared norm can be next to nothing, and its cosines
            would be noise alone.

    Returns:
        (m, m) in [-1, 1], of the matrix's type.
    """
    return cosine_(inner.clone(), floor)


def cosine_(inner: torch.Tensor, floor: float = 0.0) -> torch.Tensor:
    """Replace a Gram matrix by cosine similarities, as `cosine` returns them.

    Args:
        inner: Gram matrix, (m, m), changed in place.
        floor: as in `cosine`.

    Returns:
        The matrix.
    """
    norms = gram_norms(inner)
    if floor and len(norms):
        median = float(norms.quantile(0.5))
        norms = norms.clamp_min(floor * median)
    inverse = 1 / norms
    scale = torch.where(norms > 0, inverse, torch.zeros_like(norms))
    column_scale = scale[:, None]
    row_scale = scale[None, :]
    # Rounding, or the subtracted noise, can lead out of [-1, 1].
    return inner.mul_(column_scale).mul_(row_scale).clamp_(-1, 1).fill_diagonal_(1.0)


def mean_norm(mean: torch.Tensor, norms: torch.Tensor, members: int, noise: float = 0.0) -> float:
    """Estimate ‖mean‖ over all members from a sample of them (not in the paper).

    The mean of s of m rows scatters around the mean of all by (1/s − 1/m)·variance, which is
    subtracted. The result is exact if all members are in the sample.

    Args:
        mean: mean of the sampled rows, (d,).
        norms: norms of the sampled rows without their noise, (s,).
        members: m, the number of members.
        noise: expected squared norm of the noise in `mean`, about σ²d/s.
    """
    noisy_square = mean.double().square().sum()
    square = float(noisy_square) - noise
    sampled = len(norms)
    # A single row has no variance to estimate.
    if 1 < sampled < members:
        mean_square = float(norms.square().mean())
        # Bessel's correction, of a variance that noise correction can make negative.
        variance = max(0.0, mean_square - square) * sampled / (sampled - 1)
        excess = (1 / sampled - 1 / members) * variance
        square -= excess
    return math.sqrt(max(square, 0.0))


def _row_index(rows: torch.Tensor, positions: Sequence[int] | None) -> torch.Tensor | None:
    """Return positions as an index on the rows' device, or None where it would select all rows."""
    # Indexing copies a block, which is saved where the rows are wanted as they are.
    if positions is None:
        return None
    all_positions = list(range(len(rows)))
    if list(positions) == all_positions:
        return None
    return torch.as_tensor(positions, dtype=torch.long, device=rows.device)


def _inverse_roots(squares: torch.Tensor) -> torch.Tensor:
    """Return 1/√s of each square (m,), 0 where it is 0."""
    zero = torch.zeros_like(squares)
    return torch.where(squares > 0, squares.rsqrt(), zero)
