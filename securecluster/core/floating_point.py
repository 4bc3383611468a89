"""Rounding margins of floating-point types."""

from __future__ import annotations

from securecluster.core.lazy_torch import torch


def margin(dtype: torch.dtype) -> float:
    """Return the relative margin that clipping leaves below a bound for rounding errors.

    It covers the rounding of norms and of products, and numbers close to underflow.

    Args:
        dtype: floating-point type in which norms and products are computed.
    """
    if dtype == torch.float32:
        return 2.0**-16
    return 2.0**-40
