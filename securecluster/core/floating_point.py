"""Room that rounding needs."""

from __future__ import annotations

from securecluster.core.lazy_torch import torch


def margin(dtype: torch.dtype) -> float:
    """Return the share of a bound that clipping leaves to rounding: of norms, of products, and of
    the smallest numbers.
    """
    return 2.0**-16 if dtype == torch.float32 else 2.0**-40
