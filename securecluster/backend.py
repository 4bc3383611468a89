"""The one lazy import: `torch` takes over a second to load, and `--help` must not wait for it.

Modules that the command line reads before a run starts write `from securecluster.backend import torch`.
"""

from __future__ import annotations

import importlib
from types import ModuleType
from typing import Any


class _Lazy(ModuleType):
    def __getattr__(self, name: str) -> Any:
        return getattr(importlib.import_module(self.__name__), name)


torch = _Lazy("torch")
