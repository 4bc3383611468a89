"""Randomness that is derived from a seed and a path, and never consumed.

Every draw is a function of (run seed, party, purpose, round, step, …). A resumed run, another chunk
size or a batch of one client therefore makes the same draws: none depends on the draws before it.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
from numpy.random.bit_generator import ISeedSequence
from numpy.typing import NDArray

Part = str | int
Words = NDArray[np.uint64]


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
        return _hashed(self._text(path))

    def generator(self, *path: Part) -> np.random.Generator:
        """Return a fresh counter-based generator (Philox) for `path`."""
        return np.random.Generator(_philox(_words(self.key(*path))))

    def generators(
        self, before: Sequence[Part], components: Iterable[Part], after: Sequence[Part]
    ) -> Iterator[np.random.Generator]:
        """Yield what `generator` returns for each path (*before, component, *after), in order.

        It is one object, which is set to each stream in turn: draw from it before the next one is
        taken. For thousands of clients this takes a quarter of the time.

        Args:
            before: beginning of each path.
            components: the next component of each.
            after: rest of each path.
        """
        # the text of a path but for this component; JSON writes a number as Python does
        start = self._text(before)[:-1] + ","
        end = "".join("," + json.dumps(component) for component in after) + "]"
        philox = _philox(np.zeros(2, np.uint64))
        generator = np.random.Generator(philox)
        state: Any = philox.state  # of a stream of which nothing was drawn
        for component in components:
            text = component if isinstance(component, int) else json.dumps(component)
            words = _words(_hashed(f"{start}{text}{end}"))
            philox.state = state | {"state": state["state"] | {"key": words}}
            yield generator

    def integer(self, *path: Part) -> int:
        """Return a 63-bit integer for `path`, for libraries that take a seed."""
        return int.from_bytes(self.key(*path)[:8], "little") >> 1

    def _text(self, path: Sequence[Part]) -> str:
        """Return an encoding of (seed, *path)."""
        # JSON tells 1 from "1" and ("a", "b") from ("a,b",), so no two paths have the same text
        return json.dumps([self.seed, *path], separators=(",", ":"))


class _Key(ISeedSequence):
    """Key of a stream in place of a seed, for which numpy would ask the system for entropy."""

    def __init__(self, words: Words) -> None:
        self._words = words

    def generate_state(self, n_words: int, dtype: Any = np.uint32) -> Words:
        """Return the two words of 64 bits that Philox asks for."""
        return self._words


def _philox(words: Words) -> np.random.Philox:
    """Return a stream by its key."""
    # numpy takes any `ISeedSequence`, which its annotations leave out
    return np.random.Philox(_Key(words))  # type: ignore[arg-type]


def _hashed(text: str) -> bytes:
    """Return the 32 bytes of a path's text."""
    return hashlib.blake2b(text.encode(), digest_size=32, person=b"securecluster").digest()


def _words(key: bytes) -> Words:
    """Return the key of a Philox stream, which has 128 bits, as two words."""
    return np.frombuffer(key[:16], dtype="<u8")
