"""The factors that clip single examples, as one operation where gradients lie on a GPU.

On CUDA it is one kernel in place of ten operations on tables of b n numbers, each of which takes as
long as its launch.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from securecluster.models.per_example_gradients import clip_factors
from securecluster.privacy.dp.device_cipher import THREADS, compiled, usable

# Tests compile it for the CPU.
KERNEL = """
extern "C" __global__ void clip_factors(
    const double *norms, const double *others, const void *weights, void *factors, bool *wrong,
    int layers, int sides, int total, int wide, double limit, double largest)
{
    const int place = blockIdx.x * blockDim.x + threadIdx.x;
    if (place >= total) return;
    double squares = 0;
    for (int i = 0; i < layers; i++) {
        const double norm = norms[(long long)total * i + place];
        squares += norm * norm;
    }
    const double norm = sqrt(squares);
    bool right = norm < largest;
    for (int i = 0; i < sides; i++)
        right = right && others[(long long)total * i + place] < largest;
    const double shrinkage = limit / norm < 1 ? limit / norm : 1;
    wrong[place] = !right;
    if (wide)
        ((double *)factors)[place] = right ? shrinkage * ((const double *)weights)[place] : 0;
    else
        ((float *)factors)[place] = right ? (float)shrinkage * ((const float *)weights)[place] : 0;
}
"""


def factors_there(
    norms: torch.Tensor, others: torch.Tensor, weight: torch.Tensor, limit: float, largest: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return `clip_factors` of the same arguments by one operation."""
    result: tuple[torch.Tensor, torch.Tensor] = _operation()(norms, others, weight, limit, largest)
    return result


@functools.cache
def _operation() -> Any:
    """Return the operation as torch's dispatcher knows it."""

    # torch reads annotations, which are strings here: the schema says the types
    def factors(norms, others, weight, limit, largest):  # type: ignore[no-untyped-def]
        kernel = _kernel(norms.device.index) if norms.is_cuda else None
        if kernel is None:
            return clip_factors(norms, others, weight, limit, largest)
        return launched(kernel, norms, others, weight, limit, largest)

    schema = (
        "(Tensor norms, Tensor others, Tensor weight, float limit, float largest)"
        " -> (Tensor, Tensor)"
    )
    name = "securecluster::clip_factors"
    return torch.library.custom_op(name, factors, mutates_args=(), schema=schema)


def launched(
    kernel: Callable[..., None],
    norms: torch.Tensor,
    others: torch.Tensor,
    weight: torch.Tensor,
    limit: float,
    largest: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return `clip_factors` of the same arguments by a compiled kernel.

    Args:
        kernel: a function of a grid, a block and arguments that launches it.
        norms: as in `clip_factors`; so are the others.
    """
    contiguous = weight.contiguous()
    factors = torch.empty_like(contiguous)
    wrong = torch.empty_like(contiguous, dtype=torch.bool)
    example_count = contiguous.numel()
    wide = int(weight.dtype == torch.float64)
    arguments: list[Any] = [norms.contiguous(), others.contiguous(), contiguous, factors, wrong]
    arguments += [len(norms), len(others), example_count, wide, float(limit), float(largest)]
    if example_count:
        groups = -(-example_count // THREADS)
        kernel((groups, 1, 1), (THREADS, 1, 1), arguments)
    return factors, wrong


def right(kernel: Callable[..., None], device: torch.device) -> bool:
    """Return whether a kernel computes what the operations do.

    Args:
        kernel: a function of a grid, a block and arguments that launches it.
        device: of the kernel.
    """
    norms = torch.linspace(0, 3, 600, dtype=torch.float64).view(2, 3, 100)
    norms[0, 0, 1] = torch.nan
    others = norms * 4
    for dtype, error in ((torch.float32, 1e-6), (torch.float64, 1e-14)):
        weight = torch.linspace(0, 1, 300, dtype=dtype).view(3, 100)
        tensors = norms.to(device), others.to(device), weight.to(device)
        factors, wrong = launched(kernel, *tensors, 0.7, 9.0)
        expected, as_wrong = clip_factors(norms, others, weight, 0.7, 9.0)
        if not torch.equal(wrong.cpu(), as_wrong):
            return False
        if not torch.allclose(factors.cpu(), expected, rtol=error, atol=0):
            return False
    return True


@functools.cache
def _kernel(index: int) -> Callable[..., None] | None:
    """Return the compiled kernel of a CUDA device, or None where it is not to be had or wrong.

    Args:
        index: number of the device.
    """
    device = torch.device("cuda", index)
    return usable(
        "clipping",
        lambda: compiled(device, KERNEL)("clip_factors"),
        lambda kernel: right(kernel, device),
    )
