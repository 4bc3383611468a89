"""Train by this project's `FedAvg.fit` with a fresh permutation of the updates' coordinates."""

from __future__ import annotations

from .work import options
from .work_ours import main

if __name__ == "__main__":
    main(options(), mask="permutation")
