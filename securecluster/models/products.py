"""Matrix products by the faster of a CPU's two libraries.

Torch hands float32 products to MKL, which leaves AVX-512 alone on processors that are not Intel's,
and convolutions to oneDNN, which uses it on all. So products go to oneDNN as well where a processor
has AVX-512. Both are exact to float32's rounding. The operator is the one that torch's compiler
calls for a linear layer; a build of torch without it takes MKL.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch

# multiplications of the smallest product that gains by it
SMALLEST = 1 << 20


def product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Return a b, without gradients.

    Args:
        a: (m, p), which may be a transposed view.
        b: (p, n), which may be a transposed view.
    """
    multiplications = a.numel() * b.shape[1]
    linear = _linear()
    if linear is None or multiplications < SMALLEST or not _fits(a, b):
        return torch.mm(a, b)
    result: torch.Tensor = linear(a, b.T, None, "none", [], "")  # a (bᵀ)ᵀ
    return result


def products(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Return the products of pairs of matrices, without gradients.

    Args:
        a: (k, m, p), which may be a transposed view.
        b: (k, p, n), which may be a transposed view.

    Returns:
        The products, (k, m, n).
    """
    multiplications = a[:1].numel() * b.shape[2]
    if _linear() is None or multiplications < SMALLEST or not _fits(a, b):
        return torch.bmm(a, b)
    result = a.new_empty(len(a), a.shape[1], b.shape[2])
    for out, lhs, rhs in zip(result, a, b, strict=True):
        out.copy_(product(lhs, rhs))
    return result


def _fits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Return whether oneDNN takes the two factors."""
    return a.device.type == "cpu" and a.dtype == torch.float32 == b.dtype


@cache
def _linear() -> Any:
    """Return oneDNN's linear layer, or None where torch or the processor has no use for it."""
    onednn: Any = torch.backends.mkldnn
    if not onednn.is_available():
        return None
    if torch.backends.cpu.get_cpu_capability() != "AVX512":
        return None
    try:
        return torch.ops.mkldnn._linear_pointwise.default
    except AttributeError:
        return None
