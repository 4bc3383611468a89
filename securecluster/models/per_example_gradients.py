"""Gradients of single examples in factored form, and their clipping.

Tensors are (b, n, …): b clients, n examples each.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeVar

from securecluster.core.floating_point import margin
from securecluster.core.lazy_torch import torch

Change = Callable[["torch.Tensor"], "torch.Tensor"]

# norms beyond so many C have factors, or products with them, that are no normal float32
HUGE = 2.0**90


@dataclass(frozen=True)
class Outer:
    """Gradients of single examples as outer products g aᵀ, which are never made.

    Attributes:
        backprops: g, gradients at a dense layer's outputs, (b, n, o).
        activations: a, the layer's inputs, (b, n, i).
    """

    backprops: torch.Tensor
    activations: torch.Tensor

    def sides(self, norms: Change) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return the norms of g, which clipping scales, and of a, each (b, n).

        A gradient's norm is their product (Goodfellow 2015, "Efficient per-example gradient
        computations").

        Args:
            norms: computes the norms of the last axis.
        """
        return norms(self.backprops), norms(self.activations)

    def add_to(self, gradient_sum: torch.Tensor, factors: torch.Tensor, kept: int = 1) -> None:
        """Add Σ_n factors[n] g_n a_nᵀ to a sum of gradients.

        Args:
            gradient_sum: the sum, (b, o, i), changed in place.
            factors: (b, n).
            kept: 0 overwrites the sum, whatever it is.
        """
        # Scaling one side scales the product.
        scaled = self.backprops * factors[..., None]
        gradient_sum.baddbmm_(scaled.mT, self.activations, beta=kept)

    def changed(self, change: Change) -> Outer:
        """Return these gradients with a change of both sides.

        Args:
            change: the change of a tensor (b, n, …).
        """
        return Outer(change(self.backprops), change(self.activations))


@dataclass(frozen=True)
class Each:
    """Gradients of single examples, one row each.

    Attributes:
        rows: (b, n, numbers).
        turned: True if the numbers are in the order of the weights' transpose.
    """

    rows: torch.Tensor
    turned: bool = False

    @classmethod
    def of(cls, gradients: torch.Tensor) -> Each:
        """Return the gradients of one client in the order of their memory, without a copy.

        Args:
            gradients: (n, …) of one parameter; autograd's are often stored transposed.
        """
        turned = _is_transposed(gradients)
        if turned:
            gradients = gradients.mT
        return cls(gradients.reshape(1, len(gradients), -1), turned)

    def sides(self, norms: Change) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return the norms of the rows, (b, n), and no other side.

        Args:
            norms: computes the norms of the last axis.
        """
        return norms(self.rows), None

    def add_to(self, gradient_sum: torch.Tensor, factors: torch.Tensor, kept: int = 1) -> None:
        """Add Σ_n factors[n] rows_n to a sum of gradients.

        Args:
            gradient_sum: the sum, (b, …), changed in place.
            factors: (b, n).
            kept: 0 overwrites a sum of vectors on a GPU, whatever it is.
        """
        ordered = self._ordered(gradient_sum)
        if ordered.device.type != "cpu" and ordered.ndim == 2:
            ordered[:, None].baddbmm_(factors[:, None], self.rows, beta=kept)
            return
        sums = torch.bmm(factors[:, None], self.rows)
        ordered.add_(sums.view(ordered.shape))

    def deal_to(
        self, gradient_sum: torch.Tensor, factors: torch.Tensor, owners: torch.Tensor
    ) -> None:
        """Add factors[n] rows_n to the sums of several owners.

        Args:
            gradient_sum: the owners' sums, (k, …), changed in place.
            factors: (1, n).
            owners: row of `gradient_sum` to which each example belongs, (n,).
        """
        # There is one row of examples only, b = 1.
        rows = self.rows[0] * factors[0, :, None]
        shape = self._ordered(gradient_sum).shape[1:]
        shaped = rows.view(len(rows), *shape)
        gradient_sum.index_add_(0, owners, self._ordered(shaped))

    def changed(self, change: Change) -> Each:
        """Return these gradients with a change of their rows.

        Args:
            change: the change of a tensor (b, n, …).
        """
        return Each(change(self.rows), self.turned)

    def _ordered(self, gradient_sum: torch.Tensor) -> torch.Tensor:
        """Return a view with the rows' order of numbers, or back from it."""
        if self.turned:
            return gradient_sum.mT
        return gradient_sum


Part = TypeVar("Part", Each, Outer, Each | Outer)


def clip_factors(
    norms: torch.Tensor, others: torch.Tensor, weight: torch.Tensor, limit: float, largest: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the factors of examples, and which of them are wrong.

    Args:
        norms: norms of each part of their gradients, (parts, b, n) float64.
        others: other norms that must not be too large, (sides, b, n) float64.
        weight: weight of each example, (b, n).
        limit: bound of the norm over all parts.
        largest: bound of every norm.

    Returns:
        min(1, limit/‖g‖)·weight, (b, n), 0 for those that are wrong; and the mask of these.
    """
    joint_norms = torch.linalg.vector_norm(norms, dim=0)
    # A gradient of zeros has an infinite ratio, and the factor 1.
    shrinkage = (limit / joint_norms).clamp_(max=1)
    factors = shrinkage.to(weight.dtype).mul_(weight)
    # Negated, so that a norm that is not a number is wrong as well.
    wrong = ~(torch.cat([joint_norms[None], others]).amax(0) < largest)
    return factors.masked_fill_(wrong, 0), wrong


def clipped(
    gradients: Mapping[str, Part],
    weight: torch.Tensor,
    clip: float,
    importance: torch.Tensor | None = None,
) -> tuple[Mapping[str, Part], torch.Tensor]:
    """Return gradients g and the factors min(1, C/‖g‖)·weight that clip them.

    With an importance w of each example's loss they are min(1, C/‖w g‖)·w·weight: w g is clipped.

    Args:
        gradients: the examples' gradients at each parameter, by name.
        weight: weight of each example, (b, n).
        clip: C, the bound of the norm over all parameters.
        importance: w, (b, n), or None for 1.

    Returns:
        The gradients, and factors (b, n). An example whose norm is no finite number, or so large
        that float32 could not scale it down to C, has zeros for both: an error would reveal that it
        is there.
    """
    layer_norms: list[torch.Tensor] = []
    other_norms: list[torch.Tensor] = []
    norms_of = _once(_norms)
    for gradient in gradients.values():
        scaled, other = gradient.sides(norms_of)
        if other is not None:
            scaled = scaled * other
            other_norms.append(other)
        layer_norms.append(scaled)
    norms = torch.stack(layer_norms)
    others = torch.stack(other_norms) if other_norms else norms[:0]
    # The bound holds after rounding, too.
    limit = clip * (1 - margin(weight.dtype))
    if importance is not None:
        # what a small weight would hide is too large all the same
        norms, others = norms * importance, torch.cat([others, norms])
    factors, wrong = clip_factors(norms, others, weight, limit, clip * HUGE)
    if importance is not None:
        factors = factors * importance
    # A GPU would have to be waited for, and masks what is there.
    if weight.device.type != "cpu" or bool(wrong.any()):
        # A factor of 0 is not enough: 0 times an infinity would be NaN.
        zeros_for = _once(lambda values: values.masked_fill(wrong[..., None], 0))
        gradients = {name: gradient.changed(zeros_for) for name, gradient in gradients.items()}
    return gradients, factors


def _once(change: Change) -> Change:
    """Return a function of tensors that is computed once for each.

    A layer's bias and its weights have the gradients at its outputs in common.

    Args:
        change: the function. Its arguments must live as long as its use.
    """
    cached: dict[int, torch.Tensor] = {}

    def once(values: torch.Tensor) -> torch.Tensor:
        if id(values) not in cached:
            cached[id(values)] = change(values)
        return cached[id(values)]

    return once


def _is_transposed(gradients: torch.Tensor) -> bool:
    """Return True if matrices (n, o, i) are stored as their transposes."""
    if gradients.ndim != 3 or gradients.is_contiguous():
        return False
    return gradients.mT.is_contiguous()


def _norms(rows: torch.Tensor) -> torch.Tensor:
    """Return L2 norms of the last axis, in float64.

    In float32 a tiny side would be rounded to nothing before a huge one makes it large.
    """
    norms: torch.Tensor = torch.linalg.vector_norm(rows, dim=-1, dtype=torch.float64)
    return norms
