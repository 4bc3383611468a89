"""Where torch computes, and with how many threads."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from securecluster.backend import torch
from securecluster.errors import UsageError


@contextmanager
def cpu_threads(number: int) -> Iterator[None]:
    """Let torch use `number` threads for a while (0: as many as it uses now); sums round differently with another number."""
    before = torch.get_num_threads()
    torch.set_num_threads(number or before)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def choose_device(name: str) -> torch.device:
    """`auto` is the GPU where there is one."""
    if name not in ("auto", "cpu", "cuda"):
        raise UsageError(f"unknown device {name!r}: choose one of auto, cpu, cuda")
    if name == "cuda" and not torch.cuda.is_available():
        raise UsageError("no CUDA device is available here: use --device cpu, or auto")
    return torch.device("cuda" if name != "cpu" and torch.cuda.is_available() else "cpu")
