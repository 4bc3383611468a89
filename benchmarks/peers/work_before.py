"""Train by `FedAvg.fit` of an earlier version of this project."""

from __future__ import annotations

from .work import options
from .work_ours import main

if __name__ == "__main__":
    main(options())
