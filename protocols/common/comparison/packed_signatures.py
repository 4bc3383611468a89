"""Signatures of clients as one tensor holds them, which checkpoints keep, and their comparison."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from securecluster.clustering.noisy_residuals import NoisyResiduals
from securecluster.clustering.noisy_rows import NoisyBlocks, NoisyRows, weighted_mean
from securecluster.core.lazy_torch import torch
from securecluster.protocols.common.comparison.signature_plan import AXES, CLIP, Array

# norm to which an example is clipped in the directions of the second release; found by trial
SECOND_CLIP = 0.2
# variance that sampling adds in these directions, over that of examples of equal variance in all of
# them: examples vary most in the directions in which clients differ; found by trial
SAMPLING = 2.0
# assumed variance of a number within a class of examples, in class blocks
WITHIN = 0.05
# directions over which the variance of clipped residuals is taken to be divided
SPREAD_AXES = 6
# first number of a row, by the kind of signature
SKETCH = 0.0
RESIDUAL = 1.0


@dataclass(frozen=True)
class SketchSignatures:
    """Signatures of clients by sketches, of one or two releases, as one tensor holds them.

    Attributes:
        first: (m, w) the first release, under the mask; w is q or more.
        second: (m, r) the second release, or (m, 0).
        deviations: (m,) of the noise in each number of the first release.
        examples: (m,) numbers of examples, as far as they are public.
        width: q.
    """

    first: Array
    second: Array
    deviations: Array
    examples: Array
    width: int

    def packed(self) -> torch.Tensor:
        """Return all of it in rows (m, 5 + w + r) of float64."""
        m, axes = self.second.shape
        sizes = np.broadcast_to([self.width, axes], (m, 2))
        tags = np.full(m, SKETCH)
        header = np.column_stack([tags, self.deviations, self.examples, sizes])
        return torch.from_numpy(np.hstack([header, self.first, self.second]))

    @classmethod
    def unpacked(cls, rows: torch.Tensor) -> SketchSignatures:
        """Return the signatures that `packed` made rows of.

        Args:
            rows: (m, 5 + w + r).
        """
        table = rows.double().numpy()
        header = table[:, 1:5]
        width = int(header[0, 2])
        axes = int(header[0, 3])
        end = table.shape[1] - axes
        return cls(table[:, 5:end], table[:, end:], header[:, 0], header[:, 1], width)

    def comparable(self, directions: Array) -> NoisyRows:
        """Return the rows that are compared.

        With a second release these are the coordinates in its directions, by both releases, and
        the noise is that of the second alone, since the directions follow the noise of the first.

        Args:
            directions: (r, w) of the second release.
        """
        if not self.second.shape[1]:
            sampling = SAMPLING * CLIP**2 / (self.width * self.examples)
            return NoisyRows(self.first, self.deviations, sampling, self.width)
        ratio = SECOND_CLIP / CLIP
        second = self.second
        coordinates = self.first @ directions.T
        combined = weighted_mean(coordinates, 1.0, second, ratio**2)
        axes = second.shape[1]
        sampling = SAMPLING * SECOND_CLIP**2 / (AXES * self.examples)
        return NoisyRows(combined, ratio * self.deviations, sampling, axes, second)


@dataclass(frozen=True)
class BlockSignatures:
    """Signatures of clients by class blocks, as one tensor holds them.

    Attributes:
        blocks: (m, C, w + 1) projections, under the mask, and shares; w is r or more.
        deviations: (m,) of the noise in each number.
        examples: (m,) numbers of examples, as far as they are public.
        width: r.
    """

    blocks: Array
    deviations: Array
    examples: Array
    width: int

    def packed(self) -> torch.Tensor:
        """Return all of it in rows (m, C, 3 + w + 1) of float64."""
        m, classes, _ = self.blocks.shape
        widths = np.full(m, float(self.width))
        header = np.column_stack([self.deviations, self.examples, widths])
        repeated = np.repeat(header[:, None], classes, axis=1)
        return torch.from_numpy(np.concatenate([repeated, self.blocks], axis=2))

    @classmethod
    def unpacked(cls, rows: torch.Tensor) -> BlockSignatures:
        """Return the signatures that `packed` made rows of.

        Args:
            rows: (m, C, 3 + w + 1).
        """
        table = rows.double().numpy()
        header = table[:, 0, :3]
        return cls(table[:, :, 3:], header[:, 0], header[:, 1], int(header[0, 2]))

    def comparable(self) -> NoisyBlocks:
        """Return the blocks with what noise and sampling add."""
        return NoisyBlocks(self.blocks, self.deviations, WITHIN / self.examples, self.width)


@dataclass(frozen=True)
class ResidualSignatures:
    """Signatures of clients by residuals of class blocks, as one tensor holds them.

    Attributes:
        first: (m, a) the sums of residuals, in the directions of the second release.
        second: (m, a) the second release.
        designs: (m, a, a) what shares of classes do to coordinates.
        deviations: (m,) of the noise in each number of the first release.
        examples: (m,) numbers of examples, as far as they are public.
    """

    first: Array
    second: Array
    designs: Array
    deviations: Array
    examples: Array

    def packed(self) -> torch.Tensor:
        """Return all of it in rows (m, 4 + 2·a + a²) of float64."""
        m, axes = self.second.shape
        sizes = np.broadcast_to([RESIDUAL, axes], (m, 2))
        header = np.column_stack([sizes, self.deviations, self.examples])
        designs = self.designs.reshape(m, -1)
        return torch.from_numpy(np.hstack([header, self.first, self.second, designs]))

    @classmethod
    def unpacked(cls, rows: torch.Tensor) -> ResidualSignatures:
        """Return the signatures that `packed` made rows of.

        Args:
            rows: (m, 4 + 2·a + a²).
        """
        table = rows.double().numpy()
        axes = int(table[0, 1])
        end = 4 + 2 * axes
        designs = table[:, end:].reshape(-1, axes, axes)
        return cls(
            table[:, 4 : 4 + axes], table[:, 4 + axes : end], designs, table[:, 2], table[:, 3]
        )

    def comparable(self) -> NoisyResiduals:
        """Return the rows that are compared: the mean of both releases by their precisions."""
        ratio = SECOND_CLIP / CLIP
        values = weighted_mean(self.first, 1.0, self.second, ratio**2)
        noise = self.deviations**2 / (1 + 1 / ratio**2)
        sampling = SAMPLING * SECOND_CLIP**2 / (SPREAD_AXES * self.examples)
        return NoisyResiduals(values, self.designs, noise, sampling)


def is_sketch(rows: torch.Tensor) -> bool:
    """Return whether rows that were packed are of sketches.

    Args:
        rows: (m, ...).
    """
    return rows.ndim == 2 and float(rows[0, 0]) == SKETCH


def compared(
    rows: torch.Tensor, directions: Array | None = None
) -> NoisyRows | NoisyBlocks | NoisyResiduals:
    """Return signatures of any kind as they are compared, with what is known of their noise.

    Args:
        rows: (m, ...) as they were packed.
        directions: (r, w) of the second release of sketches.
    """
    if rows.ndim == 3:
        return BlockSignatures.unpacked(rows).comparable()
    if not is_sketch(rows):
        return ResidualSignatures.unpacked(rows).comparable()
    assert directions is not None
    return SketchSignatures.unpacked(rows).comparable(directions)
