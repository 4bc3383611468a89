"""Where torch computes, and with how many threads."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from securecluster.core.lazy_torch import torch
from securecluster.errors import UsageError


@contextmanager
def cpu_threads(number: int) -> Iterator[None]:
    """Let torch use `number` threads for a while (0: as many as it uses now); sums round
    differently with another number.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(number or before)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextmanager
def reproducible(device: torch.device) -> Iterator[None]:
    """Let a GPU compute float32 in float32, and every time in the same order, for a while.

    By default cuDNN rounds float32 to 10 bits of mantissa (TF32), and some kernels add numbers up
    in whatever order threads come. A run could then neither equal the CPU's to float32, nor be
    resumed or replayed bit for bit. Kernels that have no deterministic form run all the same. The
    settings are the process's; they are put back at the end. Nothing changes on a CPU.
    """
    if device.type != "cuda":
        yield
        return
    # cuBLAS reads it, and repeats itself
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    changes = _exact_settings()
    before = [getattr(place, name) for place, name, _ in changes]
    mode = torch.get_deterministic_debug_mode()
    for place, name, value in changes:
        setattr(place, name, value)
    torch.set_deterministic_debug_mode(max(mode, 1))
    try:
        yield
    finally:
        torch.set_deterministic_debug_mode(mode)
        for (place, name, _), value in zip(changes, before, strict=True):
            setattr(place, name, value)


def _exact_settings() -> list[tuple[Any, str, Any]]:
    """Return what `reproducible` sets, as (object, attribute, value)."""
    from torch.utils import deterministic

    cudnn, matmul = torch.backends.cudnn, torch.backends.cuda.matmul
    found: list[tuple[Any, str, Any]] = [
        (cudnn, "benchmark", False),
        (cudnn, "deterministic", True),
        (
            deterministic,
            "fill_uninitialized_memory",
            False,
        ),  # every tensor is written before it is read
    ]
    if hasattr(cudnn, "conv"):  # torch 2.9 and later
        return [
            *found,
            *((place, "fp32_precision", "ieee") for place in (matmul, cudnn.conv, cudnn.rnn)),
        ]
    return [*found, (matmul, "allow_tf32", False), (cudnn, "allow_tf32", False)]


def choose_device(name: str) -> torch.device:
    """`auto` is the GPU where there is one."""
    if name not in ("auto", "cpu", "cuda"):
        raise UsageError(f"unknown device {name!r}: choose one of auto, cpu, cuda")
    if name == "cuda" and not torch.cuda.is_available():
        raise UsageError("no CUDA device is available here: use --device cpu, or auto")
    return torch.device("cuda" if name != "cpu" and torch.cuda.is_available() else "cpu")
