"""Randomness that is derived, never consumed.

Every draw is a function of (run seed, party, purpose, round, step, …), so that a resumed run,
another chunk size or a batch of one client makes the same draws, and nothing depends on what was
drawn before.
"""

from __future__ import annotations

import hashlib
import json

import numpy as np

Part = str | int


class Randomness:
    """Independent streams under one run seed (any integer)."""

    def __init__(self, seed: int) -> None:
        self.seed = int(seed)

    def key(self, *path: Part) -> bytes:
        """32 bytes for `path`: BLAKE2b over an unambiguous encoding of (seed, *path)."""
        text = json.dumps([self.seed, *path], separators=(",", ":"))
        return hashlib.blake2b(text.encode(), digest_size=32, person=b"securecluster").digest()

    def generator(self, *path: Part) -> np.random.Generator:
        """A fresh counter-based generator (Philox) for `path`."""
        return np.random.Generator(
            np.random.Philox(key=int.from_bytes(self.key(*path)[:16], "little"))
        )

    def integer(self, *path: Part) -> int:
        """A 63-bit integer for `path`, for libraries that want a seed."""
        return int.from_bytes(self.key(*path)[:8], "little") >> 1
