"""CUDA kernels compiled for the CPU, which takes one thread of a GPU after the other."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

SHIM = """
#include <math.h>
#define __global__
#define __device__ static
struct Index { int x; };
static Index blockIdx, blockDim, threadIdx;
%s
#define LAUNCH(call) \\
    blockDim.x = block; \\
    for (blockIdx.x = 0; blockIdx.x < grid; blockIdx.x++) \\
        for (threadIdx.x = 0; threadIdx.x < block; threadIdx.x++) call;
%s
"""


def compiled(folder: Path, source: str, launchers: str) -> Callable[[str], Callable[..., None]]:
    """Return name -> a function of a grid, a block and arguments that launches a kernel.

    Args:
        folder: for the library.
        source: CUDA C.
        launchers: a function launch_NAME(int grid, int block, …) for each kernel, with C linkage,
            whose body is LAUNCH(NAME(…)).
    """
    compiler = shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        pytest.skip("no C++ compiler")
    text = folder / "kernels.cpp"
    text.write_text(SHIM % (source, launchers))
    library = folder / "kernels.so"
    command = [compiler, "-O1", "-shared", "-fPIC", "-o", str(library), str(text)]
    subprocess.run(command, check=True, timeout=120)
    loaded = ctypes.CDLL(str(library))

    def kernel(name: str) -> Callable[..., None]:
        def launch(grid: Any, block: Any, arguments: list[Any]) -> None:
            given: list[Any] = [ctypes.c_int(grid[0]), ctypes.c_int(block[0])]
            for argument in arguments:
                if isinstance(argument, torch.Tensor):
                    given.append(ctypes.c_void_p(argument.data_ptr()))
                else:
                    made = ctypes.c_int if isinstance(argument, int) else ctypes.c_double
                    given.append(made(argument))
            getattr(loaded, f"launch_{name}")(*given)

        return launch

    return kernel
