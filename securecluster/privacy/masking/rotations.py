"""Two rotations: a fast structured one for models of any size, and the uniform (Haar) one for small
models.
"""

from __future__ import annotations

import math
from typing import ClassVar

from securecluster.core.lazy_torch import torch
from securecluster.errors import FrameError, UsageError
from securecluster.privacy.masking import hadamard
from securecluster.privacy.masking.keystream import LAYERS, Keyed, blocks, gaussians, signs

DENSEST = 2048  # d² float64 numbers: 34 MB and a QR of about a second
HADAMARD_LAYERS = 2  # one layer with a public H shows |x_i| in place


class Rotation(Keyed["tuple[torch.Tensor, ...]"]):
    """y = D_2·H·D_1·H·D_0·(x, 0): secret fresh signs D around public orthonormal Hadamard matrices
    H of order n ≥ d, in O(d log d).

    Layers of signs and Hadamard matrices are those of fast random rotations (Ailon, Chazelle 2009;
    Yu et al. 2016); Kronecker products of small Hadamard matrices instead of powers of two, to pad
    little, are ours. The n − d added numbers travel with every masked row. Undone to 1e-6 of the
    norm in float32, 1e-13 in float64; machines that round differently get averages that differ by
    as much.

    Args:
        dimension: d; needed to undo.
    """

    name: ClassVar[str] = "rotation"

    def __init__(self, dimension: int | None = None) -> None:
        super().__init__()
        self._dimension = dimension

    def width(self, d: int) -> int:
        """n."""
        return padded(d)

    def forward(self, rows: torch.Tensor, step: int) -> torch.Tensor:
        """Rows (b, d) to a new (b, n), block by block."""
        d = rows.shape[-1]
        out = rows.new_zeros(*rows.shape[:-1], padded(d))
        out[..., :d] = rows
        return self._turn(out, step)

    def overwrite(self, rows: torch.Tensor, step: int) -> torch.Tensor:
        """The same, written over `rows` where they are (b, n) already, zeros after the first d;
        rows (b, d) go to a new (b, n).
        """
        ready = self._dimension is not None and rows.shape[-1] == padded(self._dimension)
        return self._turn(rows, step) if ready else self.forward(rows, step)

    def inverse(self, rows: torch.Tensor, step: int) -> torch.Tensor:
        """Rows (b, n) back to (b, d).

        Raises:
            FrameError: rows of another width.
        """
        if self._dimension is None:
            raise UsageError(
                "a rotation is undone with the dimension it was built for: build it with one"
            )
        n = padded(self._dimension)
        if rows.shape[-1] != n:
            raise FrameError(
                f"a rotated average has {n} numbers, {rows.shape[-1]} came: both sides must run "
                "the same configuration"
            )
        out = rows.reshape(-1, n).clone()
        around, parts = self._on(out, step)
        for block in blocks(out):
            for flips in reversed(around[1:]):
                block.copy_(hadamard.transform(block.mul_(flips), [part.T for part in parts]))
            block.mul_(around[0])
        return out[:, : self._dimension].reshape(*rows.shape[:-1], self._dimension)

    def _turn(self, rows: torch.Tensor, step: int) -> torch.Tensor:
        """D_2·H·D_1·H·D_0 in place on rows (b, n)."""
        around, parts = self._on(rows, step)
        for block in blocks(rows):
            block.mul_(around[0])
            for flips in around[1:]:
                torch.mul(hadamard.transform(block, parts), flips, out=block)
        return rows

    def _on(self, rows: torch.Tensor, step: int) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """D_0, D_1/√n, D_2/√n and the factors of √n·H, where and in what type the rows are."""
        n = rows.shape[-1]
        first, *others = (flips.to(rows.device, rows.dtype) for flips in self._of(n, step))
        # scaled once a layer: factors of ±1 are exact in float32, while 1/√k rounded in each would
        # add up
        around = [first, *(flips / math.sqrt(n) for flips in others)]
        return around, [
            torch.from_numpy(hadamard.matrix(k)).to(rows.device, rows.dtype)
            for k in hadamard.factors(n)
        ]

    def _draw(self, seed: bytes, d: int, step: int) -> tuple[torch.Tensor, ...]:
        layers = 1 + HADAMARD_LAYERS
        return torch.from_numpy(signs(seed, step, layers * d, LAYERS)).view(layers, d).unbind()


class Haar(Keyed["torch.Tensor"]):
    """An orthonormal matrix drawn uniformly from O(d): the Q of a Gaussian's QR, with R's signs in
    it (Mezzadri 2007).

    The rows go through it in float64. Machines whose linear algebra rounds differently hold the
    same Q to about 1e-12.
    """

    name: ClassVar[str] = "haar"

    def forward(self, rows: torch.Tensor, step: int) -> torch.Tensor:
        """Q_step·x for rows (b, d), d ≤ 2,048, new ones."""
        return (rows.double() @ self._on(rows, step).T).to(rows.dtype)

    def overwrite(self, rows: torch.Tensor, step: int) -> torch.Tensor:
        """The same, written over `rows`; beside it there is one block of rows."""
        q = self._on(rows, step)
        for block in blocks(rows):
            block.copy_(block.double() @ q.T)
        return rows

    def inverse(self, rows: torch.Tensor, step: int) -> torch.Tensor:
        """Q_stepᵀ·y for rows (b, d)."""
        return (rows.double() @ self._on(rows, step)).to(rows.dtype)

    def _on(self, rows: torch.Tensor, step: int) -> torch.Tensor:
        check_dense(rows.shape[-1])
        return self._of(rows.shape[-1], step).to(rows.device)

    def _draw(self, seed: bytes, d: int, step: int) -> torch.Tensor:
        q, r = torch.linalg.qr(torch.from_numpy(gaussians(seed, step, d * d)).view(d, d))
        signed: torch.Tensor = q * torch.where(r.diagonal() < 0, -1.0, 1.0).double()
        return signed


def padded(d: int) -> int:
    """n, the order of the Hadamard matrix that mixes d numbers."""
    return math.prod(hadamard.factors(d))


def check_dense(dimension: int | None) -> None:
    """Raise UsageError for a dimension that is too large for a dense matrix."""
    if dimension is not None and dimension > DENSEST:
        raise UsageError(
            f"a Haar rotation of {dimension:,} numbers would need a matrix of "
            f"{8 * dimension**2 / 1e9:,.1f} GB: it is there up to d = "
            f"{DENSEST:,}, above that use the mask 'rotation'"
        )
