"""What clients' noise is drawn from: ChaCha20 streams under a key of each client that nobody else has.

A draw is a function of the client's key, what it is for, the number of the call, and the very numbers it is added to. A client that is
asked the same again therefore gives the same answer, also after a restart, and no second release of the same numbers averages the noise
out; asked anything else under the same number, it draws anew, so that the noise of one answer cannot be taken off another.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable

import numpy as np

from securecluster.backend import torch
from securecluster.normals import Normals
from securecluster.randomness import Randomness


class Draws:
    """The secret draws of some clients.

    Args:
        key: a client's 32-byte key. The noise of who tells it is known.
    """

    def __init__(self, key: Callable[[int], bytes]) -> None:
        self._key = key

    @classmethod
    def derived(cls, randomness: Randomness) -> Draws:
        """Keys from a run's seed, for simulations: whoever knows the seed can take the noise off."""
        return cls(lambda client: randomness.key("client", client, "noise"))

    def __repr__(self) -> str:
        return "Draws(keys hidden)"

    def seed(self, client: int, purpose: str, step: int, about: bytes = b"") -> bytes:
        """32 bytes for one draw; `about` is whatever it must not be shared with anything else than."""
        head = f"{purpose} {step} ".encode()
        return hashlib.blake2b(head + about, digest_size=32, key=self._key(client), person=b"securecluster dp").digest()

    def normal(self, client: int, purpose: str, step: int, row: torch.Tensor, count: int | None = None) -> torch.Tensor:
        """Standard Gaussians for a row of numbers, of its shape and type and where it is; or `count` of them, (count,).

        They are those of this client, purpose, call and row alone.
        """
        out = row.new_empty(row.numel() if count is None else count)
        Normals([self.seed(client, purpose, step, digest(row))]).fill(out[None], out.new_ones(1))
        return out.view(row.shape) if count is None else out

    def generator(self, client: int, purpose: str, step: int, about: bytes = b"") -> np.random.Generator:
        """For draws that are not Gaussian (which examples are in a batch); Philox, keyed by 128 secret bits."""
        return np.random.Generator(np.random.Philox(key=int.from_bytes(self.seed(client, purpose, step, about)[:16], "little")))


def digest(row: torch.Tensor) -> bytes:
    """32 bytes that stand for the numbers of a tensor."""
    return hashlib.blake2b(row.detach().cpu().contiguous().numpy().tobytes(), digest_size=32).digest()
