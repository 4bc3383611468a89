"""Gradients of single examples, as their layers have them, and what clipping leaves of them.

Tensors are (b, n, …): b clients, n examples each.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeVar

from securecluster.core.floating_point import margin
from securecluster.core.lazy_torch import torch

# norms beyond so many C have factors, or products with them, that are no normal float32
HUGE = 2.0**90


@dataclass(frozen=True)
class Outer:
    """Gradients of single examples as outer products left rightᵀ, never made: left (b, n, o), right
    (b, n, i).
    """

    left: torch.Tensor
    right: torch.Tensor

    def sides(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the norms (b, n) of the left sides, which clipping scales, and of the right ones.

        A gradient's norm is their product (Goodfellow 2015, "Efficient per-example gradient
        computations").
        """
        return _norms(self.left), _norms(self.right)

    def add_to(self, total: torch.Tensor, factors: torch.Tensor) -> None:
        """Add Σ_n factors[n] left_n right_nᵀ, of factors (b, n), to (b, o, i)."""
        total.baddbmm_((self.left * factors[..., None]).mT, self.right)

    def without(self, wrong: torch.Tensor) -> Outer:
        """The same with zeros for some examples, (b, n)."""
        return Outer(
            self.left.masked_fill(wrong[..., None], 0), self.right.masked_fill(wrong[..., None], 0)
        )


@dataclass(frozen=True)
class Each:
    """Gradients of single examples, (b, n, numbers).

    Args:
        turned: their numbers are in the order of the weights' transpose.
    """

    rows: torch.Tensor
    turned: bool = False

    @classmethod
    def of(cls, gradients: torch.Tensor) -> Each:
        """Those of one client (n, …), in the order in which they lie in memory: autograd's own is
        often the transpose.
        """
        turned = (
            gradients.ndim == 3 and not gradients.is_contiguous() and gradients.mT.is_contiguous()
        )
        return cls((gradients.mT if turned else gradients).reshape(1, len(gradients), -1), turned)

    def sides(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the norms (b, n) of the rows, which clipping scales, and ones."""
        norms = _norms(self.rows)
        return norms, torch.ones_like(norms)

    def add_to(self, total: torch.Tensor, factors: torch.Tensor) -> None:
        """Add Σ_n factors[n] rows_n, of factors (b, n), to (b, …)."""
        self._order(total).add_(
            torch.bmm(factors[:, None], self.rows).view(self._order(total).shape)
        )

    def deal_to(self, total: torch.Tensor, factors: torch.Tensor, owners: torch.Tensor) -> None:
        """As `add_to`, of one client's row of examples that belong to several rows of `total` (k,
        …).
        """
        rows = self.rows[0] * factors[0, :, None]
        total.index_add_(
            0, owners, self._order(rows.view(len(rows), *self._order(total).shape[1:]))
        )

    def without(self, wrong: torch.Tensor) -> Each:
        """The same with zeros for some examples, (b, n)."""
        return Each(self.rows.masked_fill(wrong[..., None], 0), self.turned)

    def _order(self, total: torch.Tensor) -> torch.Tensor:
        return total.mT if self.turned else total


def _norms(rows: torch.Tensor) -> torch.Tensor:
    """L2 norms, in float64: in float32 a tiny side is rounded to nothing before a huge one makes it
    large.
    """
    found: torch.Tensor = torch.linalg.vector_norm(rows, dim=-1, dtype=torch.float64)
    return found


Part = TypeVar("Part", Each, Outer, Each | Outer)


def clipped(
    found: Mapping[str, Part], weight: torch.Tensor, clip: float
) -> tuple[Mapping[str, Part], torch.Tensor]:
    """The parts of gradients g, and the factors min(1, C/‖g‖)·weight of examples, (b, n).

    An example whose norm is no finite number, or so large that float32 could not scale it down to
    C, counts as nothing: an error would tell that it is there.
    """
    sides: list[tuple[torch.Tensor, torch.Tensor]] = [own.sides() for own in found.values()]
    norms = torch.linalg.vector_norm(
        torch.stack([scaled * other for scaled, other in sides]), dim=0
    )
    limit = clip * (1 - margin(weight.dtype))
    # of a gradient of zeros min(1, ∞)
    factors = (limit / norms).clamp_(max=1).to(weight.dtype).mul_(weight)
    largest = torch.stack([norms, *(other for _, other in sides)]).amax(0)
    wrong = ~(largest < clip * HUGE)  # also where it is no number
    if bool(wrong.any()):  # 0 times an infinity would be NaN
        found, factors = (
            {name: own.without(wrong) for name, own in found.items()},
            factors.masked_fill_(wrong, 0),
        )
    return found, factors
