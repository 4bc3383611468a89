"""Randomness that is derived from a seed and a path, and never consumed.

Every draw is a function of (run seed, party, purpose, round, step, …). A resumed run, another chunk
size or a batch of one client therefore makes the same draws: none depends on the draws before it.
"""

from __future__ import annotations

import hashlib
import json

import numpy as np

Part = str | int


class Randomness:
    """Independent random streams under one run seed.

    Args:
        seed: of the run, any integer.
    """

    def __init__(self, seed: int) -> None:
        self.seed = int(seed)

    def key(self, *path: Part) -> bytes:
        """Return 32 bytes for `path`: BLAKE2b over an unambiguous encoding of (seed, *path).

        Args:
            path: names and numbers that identify the stream.
        """
        # JSON tells 1 from "1" and ("a", "b") from ("a,b",), so no two paths have the same text
        text = json.dumps([self.seed, *path], separators=(",", ":"))
        return hashlib.blake2b(text.encode(), digest_size=32, person=b"securecluster").digest()

    def generator(self, *path: Part) -> np.random.Generator:
        """Return a fresh counter-based generator (Philox) for `path`."""
        # a Philox key has 128 bits
        philox_key = int.from_bytes(self.key(*path)[:16], "little")
        return np.random.Generator(np.random.Philox(key=philox_key))

    def integer(self, *path: Part) -> int:
        """Return a 63-bit integer for `path`, for libraries that take a seed."""
        return int.from_bytes(self.key(*path)[:8], "little") >> 1
