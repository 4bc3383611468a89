"""Rotations: a fast structured one for models of any size, and the uniform (Haar) one."""

from __future__ import annotations

import math
from typing import ClassVar

from securecluster.core.lazy_torch import torch
from securecluster.errors import FrameError, UsageError
from securecluster.privacy.masking import hadamard
from securecluster.privacy.masking.keystream import LAYERS, Keyed, blocks, gaussians, signs

# largest d of a dense rotation: 34 MB of d² float64 numbers, and a QR of about a second
DENSEST = 2048
# One layer with a public H would show |x_i| in place.
HADAMARD_LAYERS = 2


class RotationMask(Keyed["tuple[torch.Tensor, ...]"]):
    """Structured rotation y = D_2·H·D_1·H·D_0·(x, 0) in O(d log d).

    D are secret fresh signs, H public orthonormal Hadamard matrices of order n ≥ d. Layers of signs
    and Hadamard matrices are those of fast random rotations (Ailon, Chazelle 2009; Yu et al. 2016).
    Kronecker products of small Hadamard matrices instead of powers of two, to pad little, are not
    in the papers. The n − d added numbers are part of every masked row. The inverse is accurate to
    1e-6 of the norm in float32, 1e-13 in float64; machines that round differently get averages that
    differ by as much.

    Args:
        dimension: d; needed for the inverse.
    """

    name: ClassVar[str] = "rotation"

    def __init__(self, dimension: int | None = None) -> None:
        super().__init__()
        self._dimension = dimension

    def width(self, d: int) -> int:
        """Return the numbers in a rotated row: n.

        Args:
            d: numbers in a row.
        """
        return padded(d)

    def forward(self, rows: torch.Tensor, step: int) -> torch.Tensor:
        """Return rotated rows (b, n) in new memory.

        Args:
            rows: rows (b, d).
            step: number of the call.
        """
        d = rows.shape[-1]
        shape = (*rows.shape[:-1], padded(d))
        widened = rows.new_zeros(shape)
        widened[..., :d] = rows
        return self._rotate(widened, step)

    def overwrite(self, rows: torch.Tensor, step: int) -> torch.Tensor:
        """Return rotated rows (b, n), in the memory of `rows` where they are as wide.

        Args:
            rows: rows (b, n) that are zero after their first d numbers, or (b, d).
            step: number of the call.
        """
        if self._dimension is None:
            return self.forward(rows, step)
        if rows.shape[-1] != padded(self._dimension):
            return self.forward(rows, step)
        return self._rotate(rows, step)

    def inverse(self, rows: torch.Tensor, step: int) -> torch.Tensor:
        """Return rows (b, d) with the rotation undone.

        Args:
            rows: rotated rows (b, n).
            step: number of the call that they were rotated in.

        Raises:
            UsageError: the rotation was built without a dimension.
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
        restored = rows.reshape(-1, n).clone()
        first, scaled, factors = self._layers(restored, step)
        transposed = [factor.T for factor in factors]
        # H and D are orthonormal: the inverses are their transposes, in reverse order.
        for block in blocks(restored):
            for flips in reversed(scaled):
                block.mul_(flips)
                block.copy_(hadamard.transform(block, transposed))
            block.mul_(first)
        shape = (*rows.shape[:-1], self._dimension)
        restored = restored[:, : self._dimension]
        return restored.reshape(shape)

    def _rotate(self, rows: torch.Tensor, step: int) -> torch.Tensor:
        """Apply D_2·H·D_1·H·D_0 to rows (b, n) in place."""
        first, scaled, factors = self._layers(rows, step)
        for block in blocks(rows):
            block.mul_(first)
            for flips in scaled:
                mixed = hadamard.transform(block, factors)
                torch.mul(mixed, flips, out=block)
        return rows

    def _layers(
        self, rows: torch.Tensor, step: int
    ) -> tuple[torch.Tensor, list[torch.Tensor], list[torch.Tensor]]:
        """Return D_0, the list of D_1/√n and D_2/√n, and the Kronecker factors of √n·H.

        Args:
            rows: rows (b, n), whose device and type the results have.
            step: number of the call.
        """
        n = rows.shape[-1]
        layers = [flips.to(rows.device, rows.dtype) for flips in self._of(n, step)]
        first = layers[0]
        # Scaled once a layer: factors of ±1 are exact in float32, while 1/√k rounded in each would
        # add up.
        scaled = [flips / math.sqrt(n) for flips in layers[1:]]
        return first, scaled, hadamard.factor_matrices(n, rows)

    def _draw(self, seed: bytes, d: int, step: int) -> tuple[torch.Tensor, ...]:
        layers = 1 + HADAMARD_LAYERS
        flips = signs(seed, step, layers * d, LAYERS)
        return torch.from_numpy(flips).view(layers, d).unbind()


class Haar(Keyed["torch.Tensor"]):
    """Orthonormal matrix Q drawn uniformly from O(d), for small models (Mezzadri 2007).

    Q is that of a Gaussian's QR factorisation, with R's signs in it. Rows are multiplied in
    float64. Machines whose linear algebra rounds differently have the same Q to about 1e-12.
    """

    name: ClassVar[str] = "haar"

    def forward(self, rows: torch.Tensor, step: int) -> torch.Tensor:
        """Return rotated rows Q·x (b, d) in new memory.

        Args:
            rows: rows (b, d), d ≤ 2,048.
            step: number of the call.
        """
        q = self._matrix(rows, step)
        return (rows.double() @ q.T).to(rows.dtype)

    def overwrite(self, rows: torch.Tensor, step: int) -> torch.Tensor:
        """Rotate `rows` (b, d) in place; the only new memory is one block of rows.

        Args:
            rows: rows (b, d), d ≤ 2,048.
            step: number of the call.
        """
        q = self._matrix(rows, step)
        for block in blocks(rows):
            block.copy_(block.double() @ q.T)
        return rows

    def inverse(self, rows: torch.Tensor, step: int) -> torch.Tensor:
        """Return rows Qᵀ·y (b, d) with the rotation undone.

        Args:
            rows: rotated rows (b, d).
            step: number of the call that they were rotated in.
        """
        q = self._matrix(rows, step)
        return (rows.double() @ q).to(rows.dtype)

    def _matrix(self, rows: torch.Tensor, step: int) -> torch.Tensor:
        """Return Q (d, d) float64 of a step, on the rows' device."""
        d = rows.shape[-1]
        check_dense(d)
        return self._of(d, step).to(rows.device)

    def _draw(self, seed: bytes, d: int, step: int) -> torch.Tensor:
        drawn = gaussians(seed, step, d * d)
        gaussian = torch.from_numpy(drawn).view(d, d)
        q, r = torch.linalg.qr(gaussian)
        # R with a positive diagonal is unique, and its Q uniform: a factorisation as the library
        # returns it is not.
        flips = torch.where(r.diagonal() < 0, -1.0, 1.0)
        uniform: torch.Tensor = q * flips.double()
        return uniform


def padded(d: int) -> int:
    """Return n, the order of the Hadamard matrix for rows of d numbers.

    Args:
        d: numbers in a row.
    """
    return math.prod(hadamard.factors(d))


def check_dense(dimension: int | None) -> None:
    """Raise UsageError for a dimension that is too large for a dense matrix.

    Args:
        dimension: numbers in a row; None passes.
    """
    if dimension is not None and dimension > DENSEST:
        gigabytes = 8 * dimension**2 / 1e9
        raise UsageError(
            f"a Haar rotation of {dimension:,} numbers would need a matrix of "
            f"{gigabytes:,.1f} GB: it is there up to d = "
            f"{DENSEST:,}, above that use the mask 'rotation'"
        )
