"""The one lazy import: `torch` takes over a second to load, and `--help` must not wait for it.

Modules that the command line reads before a run starts write `from securecluster.core.lazy_torch
import torch`.
"""

from __future__ import annotations

import importlib
import os
from types import ModuleType
from typing import Any

# What torch reads when it is loaded: threads that wait by spinning slow a busy machine down a
# hundredfold, and large pages save
# page faults where tensors are large.
ENVIRONMENT = {"OMP_WAIT_POLICY": "PASSIVE", "THP_MEM_ALLOC_ENABLE": "1"}


def prepare() -> None:
    """Set ENVIRONMENT where the user has not; of use before torch is loaded."""
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)


class _Lazy(ModuleType):
    def __getattr__(self, name: str) -> Any:
        return getattr(importlib.import_module(self.__name__), name)


torch = _Lazy("torch")
