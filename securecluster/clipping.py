"""Gradients of single examples, as their layers have them, and what clipping leaves of them.

Tensors are (b, n, …): b clients, n examples each.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeVar

import torch


@dataclass(frozen=True)
class Outer:
    """Gradients of single examples as outer products left rightᵀ, never made: left (b, n, o), right (b, n, i)."""

    left: torch.Tensor
    right: torch.Tensor

    def norms(self) -> torch.Tensor:
        """L2 norms (b, n): ‖left‖‖right‖ (Goodfellow 2015, "Efficient per-example gradient computations")."""
        return _norms(self.left) * _norms(self.right)

    def add_to(self, total: torch.Tensor, factors: torch.Tensor) -> None:
        """Add Σ_n factors[n] left_n right_nᵀ, of factors (b, n), to (b, o, i)."""
        total.baddbmm_((self.left * factors[..., None]).mT, self.right)

    def without(self, wrong: torch.Tensor) -> Outer:
        """The same with zeros for some examples, (b, n)."""
        return Outer(self.left.masked_fill(wrong[..., None], 0), self.right.masked_fill(wrong[..., None], 0))


@dataclass(frozen=True)
class Each:
    """Gradients of single examples, (b, n, numbers)."""

    rows: torch.Tensor

    def norms(self) -> torch.Tensor:
        """L2 norms (b, n)."""
        return _norms(self.rows)

    def add_to(self, total: torch.Tensor, factors: torch.Tensor) -> None:
        """Add Σ_n factors[n] rows_n, of factors (b, n), to (b, …)."""
        total += torch.bmm(factors[:, None], self.rows).view(total.shape)

    def deal_to(self, total: torch.Tensor, factors: torch.Tensor, owners: torch.Tensor) -> None:
        """As `add_to`, of one row of examples (b = 1) that belong to several rows of `total`."""
        if len(total) == 1:
            self.add_to(total, factors)
        else:
            total.view(len(total), -1).index_add_(0, owners, self.rows[0] * factors[0, :, None])

    def without(self, wrong: torch.Tensor) -> Each:
        """The same with zeros for some examples, (b, n)."""
        return Each(self.rows.masked_fill(wrong[..., None], 0))


def _norms(rows: torch.Tensor) -> torch.Tensor:
    found: torch.Tensor = torch.linalg.vector_norm(rows, dim=-1)
    return found


Part = TypeVar("Part", Each, Outer, Each | Outer)


def clipped(found: Mapping[str, Part], weight: torch.Tensor, clip: float) -> tuple[Mapping[str, Part], torch.Tensor]:
    """The parts of gradients g, and the factors min(1, C/‖g‖)·weight of examples, (b, n).

    An example whose norm is no finite number counts as nothing: an error would tell that it is there.
    """
    norms = torch.linalg.vector_norm(torch.stack([own.norms() for own in found.values()]), dim=0)
    factors = (clip / norms).clamp_(max=1).mul_(weight)  # of a gradient of zeros min(1, ∞)
    wrong = ~norms.isfinite()
    if bool(wrong.any()):  # 0 times an infinity would be NaN
        found, factors = {name: own.without(wrong) for name, own in found.items()}, factors.masked_fill_(wrong, 0)
    return found, factors
