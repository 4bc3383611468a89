"""Train by `FedAvg.fit` of an earlier version of this project."""

from __future__ import annotations

from .work import options
from .work_ours import Ordered, main

# the method's name in earlier versions
Ordered._batches = Ordered.batches  # type: ignore[attr-defined]

if __name__ == "__main__":
    main(options())
