"""What clients' noise is drawn from: ChaCha20 streams under a key of each client that nobody else
has.

A draw is a function of the client's key, the run's configuration, what it is for, the number of the
call, the mechanism with its noise, and the very numbers that noise is added to. A client that is
asked the same again therefore gives the same answer, also after a restart, and no second release of
the same numbers averages the noise out. Asked anything else under the same number, in another run,
or at another noise level, it draws anew: the noise of one answer cannot be taken off another.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Callable

from securecluster.core.lazy_torch import torch
from securecluster.core.randomness import Randomness
from securecluster.privacy.dp.grid_noise import GridNoise, deviation, spacing


class NoiseStreams:
    """The secret draws of some clients in one run.

    Args:
        key: a client's 32-byte key. The noise of who tells it is known.
        run: the hash of the run's configuration: under one key, runs that differ share no draw.
    """

    def __init__(self, key: Callable[[int], bytes], run: str) -> None:
        self._key = key
        self._run = run

    @classmethod
    def derived(cls, randomness: Randomness, run: str) -> NoiseStreams:
        """Take keys from a run's seed, for simulations: whoever knows the seed can take the noise
        off.
        """
        return cls(lambda client: randomness.key("client", client, "noise"), run)

    def __repr__(self) -> str:
        return "NoiseStreams(keys hidden)"

    def seed(self, client: int, purpose: str, step: int, about: bytes = b"") -> bytes:
        """Return 32 bytes for one draw; `about` is whatever else it must not be shared between."""
        head = f"{self._run} {purpose} {step} ".encode()
        return hashlib.blake2b(
            head + about, digest_size=32, key=self._key(client), person=b"securecluster dp"
        ).digest()

    def noised(
        self,
        client: int,
        purpose: str,
        step: int,
        row: torch.Tensor,
        multiplier: float,
        sensitivity: float,
    ) -> torch.Tensor:
        """Return a row with Gaussian noise on a grid (`grid_noise`), of its shape and type and
        where it is.

        Args:
            client: whose key the noise is drawn by.
            purpose: with `step`, the number of the call, it names the draw.
            row: finite numbers.
            multiplier: z, positive.
            sensitivity: how far two rows of neighbouring data can be apart, L2.
        """
        count = row.numel()
        if not count:
            return row.clone()
        grid, sigma = (
            spacing(multiplier, sensitivity, count),
            deviation(multiplier, sensitivity, count),
        )
        about = struct.pack("<2d", grid, sigma) + digest(row)
        out = row.reshape(1, -1).clone()
        GridNoise([self.seed(client, f"gaussian {purpose}", step, about)]).add_to(
            out, [grid], [sigma]
        )
        return out.view(row.shape)


def digest(row: torch.Tensor) -> bytes:
    """Return 32 bytes that stand for the numbers of a tensor."""
    return hashlib.blake2b(
        row.detach().cpu().contiguous().numpy().tobytes(), digest_size=32
    ).digest()
