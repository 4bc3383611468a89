"""Train by an earlier version's `FedAvg.fit` with a fresh permutation of coordinates."""

from __future__ import annotations

from .work import options
from .work_ours import main

if __name__ == "__main__":
    main(options(), mask="permutation")
