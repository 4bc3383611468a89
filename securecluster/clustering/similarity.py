"""Geometry of update rows, all from their Gram matrix.

Every orthonormal mask leaves the Gram matrix in place.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from securecluster.core.lazy_torch import torch

BLOCK = 1 << 24  # numbers of a column block
FLOOR = 0.5  # share of the median norm: under noise no row counts as shorter


def gram(
    rows: torch.Tensor, who: Sequence[int] | None = None, noise: float | torch.Tensor = 0.0
) -> torch.Tensor:
    """Inner products of rows (m, d), or of those of `who`, as (m, m) float64; by column blocks, so
    no second (m, d) is made.

    Args:
        noise: expected squared norm of the independent noise in each row, one for all or (m,),
            which is taken off the diagonal: ‖Δ + noise‖² exceeds ‖Δ‖² by about σ²d. Norms and
            cosines that are made from it are then those of the rows without noise.
    """
    m = len(rows) if who is None else len(who)
    total = torch.zeros(m, m, dtype=torch.float64, device=rows.device)
    for block in blocks(rows, who):
        wide = block.double()
        total += wide @ wide.T
    return (total + total.T) / 2 - torch.as_tensor(noise) * torch.eye(
        m, dtype=total.dtype, device=total.device
    )


def cross_cosine(rows: torch.Tensor, others: torch.Tensor) -> torch.Tensor:
    """Cosine similarities (n, m) of rows (n, d) with others (m, d), float64 on the CPU; that of a
    zero row is 0, as in `cosine`.
    """
    inner = torch.zeros(len(rows), len(others), dtype=torch.float64)
    sizes = [torch.zeros(len(t), dtype=torch.float64) for t in (rows, others)]
    width = max(1, BLOCK // max(len(rows), len(others), 1))
    for one, two in zip(
        torch.split(rows, width, dim=1), torch.split(others, width, dim=1), strict=True
    ):
        left, right = one.double().cpu(), two.double().cpu()
        inner += left @ right.T
        for size, block in zip(sizes, (left, right), strict=True):
            size += block.square().sum(1)
    scale = [torch.where(size > 0, size.rsqrt(), torch.zeros_like(size)) for size in sizes]
    return (inner * scale[0][:, None] * scale[1]).clamp(-1, 1)


def mean_row(
    rows: torch.Tensor, who: Sequence[int] | None = None, weight: torch.Tensor | None = None
) -> torch.Tensor:
    """The mean of rows (m, d), or of those of `who`, (d,), weighted by `weight` (one each); by
    column blocks too.
    """
    if weight is None:
        return torch.cat([block.mean(0) for block in blocks(rows, who)])
    share = (weight / weight.sum()).to(rows.device, rows.dtype)
    return torch.cat([share @ block for block in blocks(rows, who)])


def blocks(
    rows: torch.Tensor, who: Sequence[int] | None = None, size: int | None = None
) -> Iterator[torch.Tensor]:
    """Column blocks (m, c) of rows (m, d), or of those of `who`, in order; each holds about `size`
    numbers of `rows`.
    """
    pick = (
        None
        if who is None or list(who) == list(range(len(rows)))
        else torch.as_tensor(who, dtype=torch.long, device=rows.device)
    )
    for block in torch.split(rows, max(1, (size or BLOCK) // max(len(rows), 1)), dim=1):
        yield block if pick is None else block[pick]


def gram_norms(inner: torch.Tensor) -> torch.Tensor:
    """Norms (m,) from a Gram matrix (m, m)."""
    return inner.diagonal().clamp_min(0).sqrt()


def cosine(inner: torch.Tensor, floor: float = 0.0) -> torch.Tensor:
    """Cosine similarities (m, m) in [-1, 1] from a Gram matrix (Sattler et al. 2019, eq. 44).

    A zero row has no direction: its similarity to every other row is 0 by definition (ours), and 1
        to itself.

    Args:
        floor: norms below this share of their median count as that share (ours). What is left of a
            short row's squared norm when noise is taken off may be next to nothing, and its cosines
            would be noise alone.
    """
    size = gram_norms(inner)
    size = size.clamp_min(floor * float(size.quantile(0.5))) if floor and len(size) else size
    scale = torch.where(size > 0, 1 / size, torch.zeros_like(size))
    alpha = (inner * scale[:, None] * scale[None, :]).clamp(-1, 1)
    return alpha.fill_diagonal_(1.0)


def mean_norm(mean: torch.Tensor, norms: torch.Tensor, members: int, noise: float = 0.0) -> float:
    """‖mean‖ over all members, estimated from those that came (ours).

    The mean of s of m rows scatters around theirs by (1/s − 1/m)·variance, which is taken off;
    exact where all came.

    Args:
        mean: of the rows that came, (d,).
        norms: of the rows that came, (s,).
        members: m.
        noise: expected squared norm of the noise in the mean, about σ²d/s; `norms` are without
            noise already.
    """
    square, came = float(mean.double().square().sum()) - noise, len(norms)
    if 1 < came < members:
        variance = max(0.0, float(norms.square().mean()) - square) * came / (came - 1)
        square -= (1 / came - 1 / members) * variance
    return math.sqrt(max(square, 0.0))
