"""Gradient signatures: a few numbers by which clients are clustered before any training.

Softmax regression whose weights are zero predicts 1/C for each of C classes. So the gradient of one
example is known in closed form, (1/C − onehot(y)) ⊗ (x − c, 1), and needs no model: c is a public
constant. A client's signature is the mean of a public sketch of its examples' gradients, each
clipped to norm S after the sketch. Clipping after the sketch bounds what one example changes by S
whatever the sketch is.

Where clients have different shares of classes, the mean gradient follows the shares. The other kind
of signature keeps classes apart: C blocks of (r projections of x, 1), summed over the examples of
the class, so that a block is the class's mean times its share, followed by its share.

Blocks can be cleaned by a control variate: the means of classes over all clients, in which the
noise of single clients averages out, are subtracted from examples before their rows are clipped.
What is left, the residuals, depends on a client's shares of classes to second order alone, and
nothing of the clip is spent on what all clients have in common.

Of images, noisy signatures take the lowest frequencies alone (`LowFrequencies`): clipping and noise
are then for what classes differ in.

Sensitivities of the mean of n clipped rows, with n public: one example that is blanked (its row
becomes zero) moves it by at most S/n, one that is replaced by at most 2S/n. An example that is
added or removed also moves the divisor, and the noise, which is in proportion to 1/n: no ε covers
that. All data of one client move it by at most S, from zero; the same holds for a row that is
scaled to norm S.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

from securecluster.core.lazy_torch import torch
from securecluster.core.randomness import Randomness
from securecluster.privacy.low_frequencies import LowFrequencies

# rows of examples that are processed at once; bounds memory, not results beyond rounding
BLOCK = 4096
# Norm to which an example is scaled down before it is projected. A product in single precision
# errs by a share of its longest row, and by how much depends on how many rows it has: examples of
# any length would move the rows of others further than the sensitivity says.
LONGEST = 256.0
# examples that are shorter are not scaled to norm 1, but in proportion
SHORTEST = 1e-6
# factor of projections in class blocks: their norm is then near that of the 1 for digits
PROJECTION_SCALE = 1 / 6
# t, by which residuals of examples of norm 1 are multiplied, so that most are clipped: all examples
# count the same; found by trial
RESIDUAL_SCALE = 1.5


class ExampleMap(Protocol):
    """A public map from examples to rows, from which `signature_sum` makes signatures."""

    @property
    def width(self) -> int:
        """Return the numbers in a signature."""

    def sums(self, inputs: torch.Tensor, labels: torch.Tensor, clip: float) -> torch.Tensor:
        """Return the sum (width,) float64 of the examples' clipped rows.

        Args:
            inputs: (n, D) examples.
            labels: (n,) their classes, whole numbers from 0 to C − 1.
            clip: S, the norm to which each row is clipped.
        """


def clip_factors(rows: torch.Tensor, clip: float) -> torch.Tensor:
    """Return min(1, S/‖row‖) of each row, (n, 1).

    Args:
        rows: (n, q) of finite numbers.
        clip: S, positive.
    """
    norms = rows.norm(dim=1, keepdim=True)
    factors: torch.Tensor = clip / norms.clamp_min(clip)
    return factors


def clipped_rows(rows: torch.Tensor, clip: float) -> torch.Tensor:
    """Return rows (n, q) in float64, scaled down to norm S where they are longer.

    A row that is not finite becomes zero: an error would reveal that there is one.

    Args:
        rows: (n, q).
        clip: S, positive.
    """
    wide = rows.double()
    finite = wide.isfinite().all(1, keepdim=True)
    wide = wide.masked_fill(~finite, 0.0)
    return wide * clip_factors(wide, clip)


def shortened(rows: torch.Tensor) -> torch.Tensor:
    """Return examples (n, D), scaled down to norm `LONGEST` where they are longer.

    Others keep their bits. Rows that are not finite stay so.

    Args:
        rows: (n, D).
    """
    factors = clip_factors(rows.double(), LONGEST)
    return rows * factors.to(rows.dtype)


def scaled_to_norm(row: torch.Tensor, norm: float = 1.0) -> torch.Tensor:
    """Return a vector of the given norm in the same direction; zeros stay zeros.

    Args:
        row: (q,).
        norm: its norm afterwards.
    """
    length = row.norm()
    if not bool(length > 0):
        return torch.zeros_like(row)
    scaled: torch.Tensor = row * (norm / length)
    return scaled


@dataclass(frozen=True)
class GradientSketch:
    """Random sketches of the gradients of softmax regression at zero weights.

    The sketch is a matrix of random signs over √q, drawn for each class from public randomness, so
    that inner products are unbiased (Achlioptas 2003).

    Args:
        size: q, the numbers in a sketch.
        features: D, the numbers in an example.
        classes: C.
        centre: c, a public constant that is subtracted from each number of an example.
        randomness: public randomness, which all parties derive from the run's configuration.
        smooth: takes the lowest frequencies of examples less c; None takes all numbers.
    """

    size: int
    features: int
    classes: int
    centre: float
    randomness: Randomness
    smooth: LowFrequencies | None = None

    @property
    def width(self) -> int:
        """Return q."""
        return self.size

    def class_map(self, label: int) -> torch.Tensor:
        """Return the sketch (f + 1, q) of the part of gradients that belongs to one class.

        Args:
            label: the class.
        """
        generator = self.randomness.generator("public", "gradient signature", label)
        numbers = _numbers(self.features, self.smooth)
        bits = generator.integers(0, 2, (numbers + 1, self.size), dtype="int8")
        signs = torch.from_numpy(bits * 2 - 1)
        return signs.float() / math.sqrt(self.size)

    def rows(self, inputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Return the sketches (n, q) of the examples' gradients, not clipped.

        For an example of class y, Σ_c (1/C − [c = y])·B_cᵀa = (B̄ − B_y)ᵀa, where a = (x − c, 1):
        one product of matrices for each class, and no gradient of D·C numbers is made.

        Args:
            inputs: (n, D).
            labels: (n,) whole numbers from 0 to C − 1.
        """
        extended = _extended(inputs, self.centre, self.smooth)
        sketches = extended @ self._mean_map().to(extended.device)
        for label in sorted(set(labels.tolist())):
            examples = (labels == label).nonzero()[:, 0]
            class_map = self.class_map(label).to(extended.device)
            sketches[examples] -= extended[examples] @ class_map
        return sketches

    def sums(self, inputs: torch.Tensor, labels: torch.Tensor, clip: float) -> torch.Tensor:
        """Return the sum (q,) float64 of the examples' clipped sketches.

        Args:
            inputs: (n, D).
            labels: (n,) whole numbers from 0 to C − 1.
            clip: S.
        """
        return clipped_rows(self.rows(inputs, labels), clip).sum(0)

    def _mean_map(self) -> torch.Tensor:
        """Return the mean (f + 1, q) of all classes' maps."""
        summed = torch.zeros(_numbers(self.features, self.smooth) + 1, self.size)
        for label in range(self.classes):
            summed += self.class_map(label)
        return summed / self.classes


@dataclass(frozen=True)
class ClassBlocks:
    """Sums of random projections by class, with the number of examples of each class.

    The row of an example is zero but for the block of its class, which is (s·Pᵀ(x − c), 1).

    Args:
        size: r, the projections in a block.
        features: D, the numbers in an example.
        classes: C.
        centre: c, a public constant that is subtracted from each number of an example.
        randomness: public randomness, which all parties derive from the run's configuration.
        unit: whether x − c is scaled to norm 1, with s = 1, so that its scale does not matter.
        smooth: takes the lowest frequencies of x − c; None takes all numbers.
    """

    size: int
    features: int
    classes: int
    centre: float
    randomness: Randomness
    unit: bool = False
    smooth: LowFrequencies | None = None

    @property
    def width(self) -> int:
        """Return C·(r + 1)."""
        return self.classes * (self.size + 1)

    def projection(self) -> torch.Tensor:
        """Return s·P, (f, r): random signs over √r, times the scale s."""
        generator = self.randomness.generator("public", "class blocks")
        numbers = _numbers(self.features, self.smooth)
        bits = generator.integers(0, 2, (numbers, self.size), dtype="int8")
        signs = torch.from_numpy(bits * 2 - 1)
        scale = 1.0 if self.unit else PROJECTION_SCALE
        return signs.float() * (scale / math.sqrt(self.size))

    def rows(self, inputs: torch.Tensor) -> torch.Tensor:
        """Return the examples' blocks (n, r + 1), not clipped; all other blocks are zero.

        Args:
            inputs: (n, D).
        """
        centred = shortened(inputs.float() - self.centre)
        if self.smooth is not None:
            centred = self.smooth.of(centred)
        if self.unit:
            centred = centred / centred.norm(dim=1, keepdim=True).clamp_min(SHORTEST)
        projected = centred.float() @ self.projection().to(inputs.device)
        ones = projected.new_ones(len(projected), 1)
        return torch.cat([projected, ones], 1)

    def sums(self, inputs: torch.Tensor, labels: torch.Tensor, clip: float) -> torch.Tensor:
        """Return the sum (C·(r + 1),) float64 of the examples' clipped rows.

        Args:
            inputs: (n, D).
            labels: (n,) whole numbers from 0 to C − 1.
            clip: S.
        """
        rows = clipped_rows(self.rows(inputs), clip)
        blocks = rows.new_zeros(self.classes, self.size + 1)
        blocks.index_add_(0, labels.to(rows.device), rows)
        return blocks.view(-1)


@dataclass(frozen=True)
class Projected:
    """Examples' rows of a sketch in few directions, in which they are short.

    Args:
        sketch: the map whose rows are projected.
        directions: (r, q) of which each is a row; rows are clipped after the projection, so that
            the sensitivity holds whatever they are.
        first_clip: the norm to which sketches are clipped before they are projected.
    """

    sketch: GradientSketch
    directions: torch.Tensor
    first_clip: float = 1.0

    @property
    def width(self) -> int:
        """Return r."""
        return len(self.directions)

    def sums(self, inputs: torch.Tensor, labels: torch.Tensor, clip: float) -> torch.Tensor:
        """Return the sum (r,) float64 of the examples' clipped rows.

        Args:
            inputs: (n, D).
            labels: (n,) whole numbers from 0 to C − 1.
            clip: S, of the rows in these directions; before, they are clipped to `first_clip`.
        """
        rows = clipped_rows(self.sketch.rows(inputs, labels), self.first_clip)
        directions = self.directions.to(rows)
        return clipped_rows(rows @ directions.T, clip).sum(0)


def _finite(inputs: torch.Tensor) -> torch.Tensor:
    """Return whether all numbers of each example are finite, (n, 1)."""
    return inputs.flatten(1).isfinite().all(1, keepdim=True)


@dataclass(frozen=True)
class ClassResiduals:
    """Sums by class of projections less the means of their classes over all clients.

    The row of an example of class y is zero but for the block of its class, which is t·(p − μ_y),
    clipped, where p are its projections. So a client's share of a class matters to second order
    alone: a control variate. Where examples are not of norm 1, these rows are, so that the units of
    the data do not matter either.

    Args:
        blocks: the map of projections, of examples of norm 1.
        means: μ, (C, r), from anywhere: the sensitivity does not depend on them.
    """

    blocks: ClassBlocks
    means: torch.Tensor

    @property
    def width(self) -> int:
        """Return C·r."""
        return self.blocks.classes * self.blocks.size

    def rows(self, inputs: torch.Tensor, labels: torch.Tensor, clip: float) -> torch.Tensor:
        """Return the examples' clipped residuals (n, r) in float64; all other blocks are zero.

        An example that is not finite counts as zeros, and not as one at the origin.

        Args:
            inputs: (n, D).
            labels: (n,) whole numbers from 0 to C − 1.
            clip: S.
        """
        projected = self.blocks.rows(inputs)[:, :-1].double()
        means = self.means.to(projected)[labels.to(projected.device)]
        rest = RESIDUAL_SCALE * (projected - means)
        if not self.blocks.unit:
            rest = rest / rest.norm(dim=1, keepdim=True).clamp_min(SHORTEST)
        residuals = clipped_rows(rest, clip)
        return torch.where(_finite(inputs).to(residuals.device), residuals, 0.0)

    def sums(self, inputs: torch.Tensor, labels: torch.Tensor, clip: float) -> torch.Tensor:
        """Return the sum (C·r,) float64 of the examples' clipped rows.

        Args:
            inputs: (n, D).
            labels: (n,) whole numbers from 0 to C − 1.
            clip: S.
        """
        rows = self.rows(inputs, labels, clip)
        blocks = rows.new_zeros(self.blocks.classes, self.blocks.size)
        blocks.index_add_(0, labels.to(rows.device), rows)
        return blocks.view(-1)


@dataclass(frozen=True)
class ResidualCoordinates:
    """Examples' residuals in few directions, in which they are short.

    The row of an example of class y is ⟨V_a,y, e − ρ_y⟩ for each direction a, where e is its
    residual, and is clipped again: the sensitivity holds whatever shifts and directions are.

    Args:
        residuals: the map of residuals.
        shifts: ρ, (C, r), what residuals have in common over all clients.
        directions: V, (a, C, r).
        first_clip: the norm to which residuals are clipped before.
    """

    residuals: ClassResiduals
    shifts: torch.Tensor
    directions: torch.Tensor
    first_clip: float = 1.0

    @property
    def width(self) -> int:
        """Return a."""
        return len(self.directions)

    def sums(self, inputs: torch.Tensor, labels: torch.Tensor, clip: float) -> torch.Tensor:
        """Return the sum (a,) float64 of the examples' clipped rows.

        Args:
            inputs: (n, D).
            labels: (n,) whole numbers from 0 to C − 1.
            clip: S, of the rows in these directions.
        """
        rows = self.residuals.rows(inputs, labels, self.first_clip)
        shifts = self.shifts.to(rows)
        directions = self.directions.to(rows)
        coordinates = rows.new_zeros(len(rows), self.width)
        for label in sorted(set(labels.tolist())):
            members = (labels == label).nonzero()[:, 0].to(rows.device)
            coordinates[members] = (rows[members] - shifts[label]) @ directions[:, label].T
        counted = torch.where(_finite(inputs).to(rows.device), coordinates, 0.0)
        return clipped_rows(counted, clip).sum(0)


@dataclass(frozen=True)
class MeanNumber:
    """The mean of an example's numbers, clipped to [−S, S]: the centre of data without a known one.

    An example that is not finite counts as zeros, as it does in signatures.
    """

    width: int = 1

    def sums(self, inputs: torch.Tensor, labels: torch.Tensor, clip: float) -> torch.Tensor:
        """Return the sum (1,) float64 of the examples' means.

        Args:
            inputs: (n, D).
            labels: without effect.
            clip: S.
        """
        means = inputs.double().mean(1, keepdim=True)
        return torch.where(_finite(inputs), means, 0.0).clamp(-clip, clip).sum(0)


def signature_mean(
    examples: ExampleMap, inputs: torch.Tensor, labels: torch.Tensor, clip: float
) -> torch.Tensor:
    """Return the mean of a client's clipped rows, its signature without noise.

    Args:
        examples: the map from examples to rows.
        inputs: (n, ...) the client's examples.
        labels: (n,) their classes.
        clip: S, to which each example's row is clipped.

    Returns:
        (width,) float64, of norm S at most; zeros without examples.
    """
    flat = inputs.flatten(1)
    summed = torch.zeros(examples.width, dtype=torch.float64, device=inputs.device)
    for start in range(0, len(flat), BLOCK):
        block = slice(start, start + BLOCK)
        summed += examples.sums(flat[block], labels[block], clip)
    return summed / max(1, len(flat))


def example_sensitivity(clip: float, examples: int) -> float:
    """Return by how much blanking one example moves a signature of n examples: S/n.

    Args:
        clip: S.
        examples: n, which is public; a blanked example counts as a row of zeros.
    """
    return clip / max(1, examples)


def client_sensitivity(clip: float) -> float:
    """Return by how much blanking all data of one client moves its signature: S.

    Args:
        clip: S, of each example's row or of a signature that is scaled to this norm.
    """
    return clip


def _numbers(features: int, smooth: LowFrequencies | None) -> int:
    """Return f, the numbers of an example that are projected.

    Args:
        features: D, the numbers in an example.
        smooth: takes the lowest frequencies, or None.
    """
    return features if smooth is None else smooth.width


def _extended(inputs: torch.Tensor, centre: float, smooth: LowFrequencies | None) -> torch.Tensor:
    """Return (x − c, 1) of each example, (n, f + 1), scaled down where it is very long."""
    centred = inputs.float() - centre
    if smooth is not None:
        centred = smooth.of(shortened(centred)).float()
    ones = centred.new_ones(len(centred), 1)
    return shortened(torch.cat([centred, ones], 1))
