"""The package's one lazy import: `torch` takes over a second to load, and `--help` must not wait.

Modules that the command line reads before a run starts write `from securecluster.core.lazy_torch
import torch`.
"""

from __future__ import annotations

import importlib
import os
import sys
from types import ModuleType
from typing import Any

# Environment variables that torch reads when it is loaded. Threads that wait by spinning slow a
# busy machine down a hundredfold; large pages save page faults where tensors are large.
ENVIRONMENT = {"OMP_WAIT_POLICY": "PASSIVE", "THP_MEM_ALLOC_ENABLE": "1"}


def prepare() -> None:
    """Set the variables of `ENVIRONMENT` that the user has not set.

    This has an effect only before torch is loaded.
    """
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)


class _Lazy(ModuleType):
    """Stand-in that loads the module of its name on the first access to an attribute."""

    def __getattr__(self, name: str) -> Any:
        module = sys.modules.get(self.__name__)
        # A module that is still being loaded is left to the import system, which waits for it.
        if module is None or getattr(module.__spec__, "_initializing", False):
            module = importlib.import_module(self.__name__)
        return getattr(module, name)


torch = _Lazy("torch")
