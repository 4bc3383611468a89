"""Devices and numbers of threads that torch computes with."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from securecluster.core.lazy_torch import torch
from securecluster.errors import UsageError

DEVICES = ("auto", "cpu", "cuda")

_generator_lock = threading.RLock()


@contextmanager
def cpu_threads(number: int) -> Iterator[None]:
    """Let torch use `number` CPU threads within the context.

    Sums round differently with another number of threads, so the number is a setting of the run.

    Args:
        number: of threads; 0 leaves the current number.
    """
    previous = torch.get_num_threads()
    torch.set_num_threads(number or previous)
    try:
        yield
    finally:
        torch.set_num_threads(previous)


@contextmanager
def reproducible(device: torch.device) -> Iterator[None]:
    """Let a GPU compute float32 in full precision and in a fixed order within the context.

    By default cuDNN rounds float32 to 10 bits of mantissa (TF32), and some kernels add numbers in
    the order in which threads finish. A run could then neither equal the CPU's to float32, nor be
    resumed or replayed bit for bit. Kernels without a deterministic form still run. The settings
    are global to the process and are restored at the end. Nothing changes on a CPU.

    Args:
        device: that the run computes on.
    """
    if device.type != "cuda":
        yield
        return
    # cuBLAS reads this variable, and repeats its results with it
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    settings = _exact_settings()
    previous = [getattr(owner, name) for owner, name, _ in settings]
    previous_mode = torch.get_deterministic_debug_mode()
    for owner, name, value in settings:
        setattr(owner, name, value)
    # mode 1 warns about kernels without a deterministic form, mode 2 of the caller refuses them
    torch.set_deterministic_debug_mode(max(previous_mode, 1))
    try:
        yield
    finally:
        torch.set_deterministic_debug_mode(previous_mode)
        for (owner, name, _), value in zip(settings, previous, strict=True):
            setattr(owner, name, value)


def _exact_settings() -> list[tuple[Any, str, Any]]:
    """Return the settings of `reproducible` as (object, attribute, value)."""
    from torch.utils import deterministic

    cudnn = torch.backends.cudnn
    matmul = torch.backends.cuda.matmul
    settings: list[tuple[Any, str, Any]] = [
        (cudnn, "benchmark", False),
        (cudnn, "deterministic", True),
        # filling is needless, since every tensor is written before it is read
        (deterministic, "fill_uninitialized_memory", False),
    ]
    if not hasattr(cudnn, "conv"):  # before torch 2.9
        settings.append((matmul, "allow_tf32", False))
        settings.append((cudnn, "allow_tf32", False))
        return settings
    for owner in (matmul, cudnn.conv, cudnn.rnn):
        settings.append((owner, "fp32_precision", "ieee"))
    return settings


@contextmanager
def global_generator(seed: int | None = None) -> Iterator[None]:
    """Let this thread alone draw from torch's global generator, and restore it at the end.

    Layers draw their initial weights from it. Other threads wait: runs that train together build
    their models at the same time. No device's generator is touched.

    Args:
        seed: of the draws; None goes on with the generator as it is.
    """
    with _generator_lock, torch.random.fork_rng(devices=[]):
        if seed is not None:
            torch.default_generator.manual_seed(seed)
        yield


def to_device(values: Any, device: torch.device, dtype: torch.dtype | None = None) -> torch.Tensor:
    """Return numbers of main memory as a tensor on a device.

    They go to a GPU from page-locked memory, so that the host does not wait for the copy.

    Args:
        values: array or list; a tensor on the CPU may share its memory.
        device: of the tensor.
        dtype: its type; that of the values by default.
    """
    table = torch.as_tensor(values, dtype=dtype)
    if device.type == "cuda":
        return table.pin_memory().to(device, non_blocking=True)
    return table.to(device)


def choose_device(name: str) -> torch.device:
    """Return the torch device of a name on the command line.

    Args:
        name: "cpu", "cuda", or "auto" for the GPU if there is one.

    Raises:
        UsageError: an unknown name, or "cuda" without a GPU.
    """
    if name not in DEVICES:
        raise UsageError(f"unknown device {name!r}: choose one of {', '.join(DEVICES)}")
    if name == "cpu":
        return torch.device("cpu")
    if torch.cuda.is_available():
        return torch.device("cuda")
    if name == "cuda":
        raise UsageError("no CUDA device is available here: use --device cpu, or auto")
    return torch.device("cpu")
