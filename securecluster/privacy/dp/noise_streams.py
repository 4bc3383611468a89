"""Sources of clients' noise: ChaCha20 streams under a secret key of each client.

A draw is a function of the client's key, the run's configuration, the purpose, the number of the
call, the mechanism with its noise, and the very numbers that noise is added to. A client that is
asked the same again therefore gives the same answer, also after a restart, and no second release of
the same numbers averages the noise out. Asked anything else under the same number, in another run,
or at another noise level, it draws anew: the noise of one answer cannot be subtracted from another.

Keys follow from the secret of the run in simulations; nodes take them from the operating system and
keep them.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import numpy as np

from securecluster.core.lazy_torch import torch
from securecluster.core.randomness import Randomness
from securecluster.privacy.dp import skellam_noise
from securecluster.privacy.dp.device_noise import add_noise
from securecluster.privacy.dp.grid_noise import GridNoise, deviation, spacing
from securecluster.privacy.dp.skellam_noise import Integers

# Rows that were clipped exceed their norm by rounding; those of the grid's noise have room for it.
ROUNDING = 1e-6


class NoiseStreams:
    """Secret draws of some clients in one run.

    Args:
        key: client -> its 32-byte key. Noise can be computed by everyone who has the key.
        run: hash of the run's configuration: under one key, runs that differ share no draw.
        bounds_rows: True scales rows that are longer than their sensitivity down to it before the
            noise: where a whole client is the unit of privacy, blanking it leaves zeros, so that no
            row may be longer. Rows of the unit "example" may be, and so may sums.
    """

    def __init__(self, key: Callable[[int], bytes], run: str, bounds_rows: bool = False) -> None:
        self._key = key
        self._run = run
        self._bounds_rows = bounds_rows
        self._log: list[tuple[int, float]] | None = None

    @classmethod
    def derived(cls, randomness: Randomness, run: str) -> NoiseStreams:
        """Return streams of a simulation, whose keys follow from the run's secret.

        Everyone who knows the secret can remove the noise.

        Args:
            randomness: secret random streams of the run.
            run: hash of the run's configuration.
        """
        return cls(lambda client: randomness.key("client", client, "noise"), run)

    def __repr__(self) -> str:
        return "NoiseStreams(keys hidden)"

    def seed(self, client: int, purpose: str, step: int, about: bytes = b"") -> bytes:
        """Return the 32-byte seed of one draw.

        Args:
            client: client by whose key the seed is derived.
            purpose: name of the draw.
            step: number of the call.
            about: further bytes; draws with different ones share no seed.
        """
        name = f"{self._run} {purpose} {step} "
        digest = hashlib.blake2b(
            name.encode() + about, digest_size=32, key=self._key(client), person=b"securecluster dp"
        )
        return digest.digest()

    def stream(self, client: int, purpose: str, step: int, about: bytes, length: int) -> bytes:
        """Return secret random bytes of one draw.

        Args:
            client: client by whose key they are derived.
            purpose: name of the draw.
            step: number of the call.
            about: further bytes; draws with different ones share no bytes.
            length: number of bytes.
        """
        return _stream(self.seed(client, purpose, step, about), length)

    @contextmanager
    def logged(self) -> Iterator[list[tuple[int, float]]]:
        """Yield the client and the noise multiplier of each draw until the end of the context."""
        self._log = []
        try:
            yield self._log
        finally:
            self._log = None

    def log(self, client: int, multiplier: float) -> None:
        """Add a draw to the log, where somebody reads it.

        Args:
            client: by whose key it was drawn.
            multiplier: z of the noise.
        """
        if self._log is not None:
            self._log.append((client, multiplier))

    def noised(
        self,
        client: int,
        purpose: str,
        step: int,
        row: torch.Tensor,
        multiplier: float,
        sensitivity: float,
    ) -> torch.Tensor:
        """Return a row with Gaussian noise on a grid (`grid_noise`).

        Args:
            client: client by whose key the noise is drawn.
            purpose: name of the draw, together with `step`.
            step: number of the call.
            row: finite numbers, of any shape.
            multiplier: z, positive.
            sensitivity: Δ, largest L2 distance of rows of neighbouring data.

        Returns:
            New memory of the row's shape, type and device.
        """
        count = row.numel()
        self.log(client, multiplier)
        # The grid's spacing depends on 1/√d, and an empty row has nothing to hide.
        if not count:
            return row.clone()
        if self._bounds_rows:
            row = _within(row, sensitivity)
        grid = spacing(multiplier, sensitivity, count)
        row = _within_precision(row, grid)
        sigma = deviation(multiplier, sensitivity, count)
        seed = self._gaussian_seed(client, purpose, step, row, (grid, sigma))
        noisy = row.reshape(1, -1).clone()
        GridNoise([seed]).add_to(noisy, [grid], [sigma])
        return noisy.view(row.shape)

    def noise_together(
        self,
        clients: Sequence[int],
        purpose: str,
        step: int,
        rows: torch.Tensor,
        multiplier: float,
        sensitivity: float,
    ) -> None:
        """Add the noise of `noised` to rows on a GPU in place, with one copy to main memory.

        Args:
            clients: clients by whose keys the noise is drawn, (b,).
            purpose: name of the draws, together with `step`.
            step: number of the call.
            rows: finite numbers (b, d).
            multiplier: z, positive.
            sensitivity: Δ, largest L2 distance of rows of neighbouring data.
        """
        for client in clients:
            self.log(client, multiplier)
        if not rows.numel():
            return
        if self._bounds_rows:
            lengths = torch.linalg.vector_norm(rows.double(), dim=1, keepdim=True)
            longer = lengths > sensitivity * (1 + ROUNDING)
            rows.copy_(torch.where(longer, rows * (sensitivity / lengths), rows))
        count = rows.shape[1]
        grid = spacing(multiplier, sensitivity, count)
        rows.copy_(_within_precision(rows, grid))
        sigma = deviation(multiplier, sensitivity, count)
        level = (grid, sigma)
        seeds = [
            self._gaussian_seed(client, purpose, step, row, level)
            for client, row in zip(clients, rows.cpu(), strict=True)
        ]
        add_noise(rows, seeds, [grid] * len(seeds), [sigma] * len(seeds))

    def _gaussian_seed(
        self, client: int, purpose: str, step: int, row: torch.Tensor, level: tuple[float, float]
    ) -> bytes:
        """Return the seed of Gaussian noise on a row.

        Args:
            client: client by whose key the noise is drawn.
            purpose: name of the draw, together with `step`.
            step: number of the call.
            row: the numbers that get noise.
            level: spacing of the grid, and standard deviation of the noise.
        """
        # The noise level and the row itself are in the seed: two answers under one number with
        # equal noise would reveal the difference of their rows.
        mechanism = struct.pack("<2d", *level)
        about = mechanism + digest(row)
        return self.seed(client, f"gaussian {purpose}", step, about)

    def skellam(
        self,
        client: int,
        purpose: str,
        step: int,
        row: Integers,
        exponent: int,
        variance: int,
        draws: int,
    ) -> Integers:
        """Return Skellam noise for a row of whole numbers (`skellam_noise`).

        Args:
            client: client by whose key the noise is drawn.
            purpose: name of the draw, together with `step`.
            step: number of the call.
            row: the numbers that noise is added to (d,).
            exponent: e; a step of the grid that they are on is 2^-e.
            variance: variance of a draw.
            draws: draws of which each number is the sum.

        Returns:
            Noise (d,).
        """
        mechanism = struct.pack("<3q", exponent, variance, draws)
        about = mechanism + hashlib.blake2b(row.tobytes(), digest_size=32).digest()
        seed = self.seed(client, f"skellam {purpose}", step, about)
        words = np.frombuffer(_stream(seed, 8 * draws * len(row)), dtype="<u8")
        return skellam_noise.draw(words, variance, draws, seed)


def _within_precision(row: torch.Tensor, grid: float) -> torch.Tensor:
    """Return a row whose numbers are small enough for their type to tell a step of the grid.

    A larger one would swallow its noise.

    Args:
        row: numbers.
        grid: spacing of the noise.
    """
    largest = grid / torch.finfo(row.dtype).eps
    return row.clamp(-largest, largest)


def _within(row: torch.Tensor, norm: float) -> torch.Tensor:
    """Return a row scaled down to a norm, or the row itself if it is no longer."""
    length = float(torch.linalg.vector_norm(row.double()))
    if length <= norm * (1 + ROUNDING):
        return row
    return row * (norm / length)


def _stream(seed: bytes, length: int) -> bytes:
    """Return the first bytes of the ChaCha20 stream of a seed (RFC 8439).

    Args:
        seed: 32 secret bytes, of this stream alone.
        length: number of bytes.
    """
    from cryptography.hazmat.primitives.ciphers import Cipher
    from cryptography.hazmat.primitives.ciphers.algorithms import ChaCha20

    cipher = Cipher(ChaCha20(seed, bytes(16)), mode=None)
    return cipher.encryptor().update(bytes(length))


def digest(row: torch.Tensor) -> bytes:
    """Return a 32-byte digest of a tensor's numbers.

    Args:
        row: tensor of any shape, on any device.
    """
    numbers = row.detach().cpu().contiguous().numpy()
    return hashlib.blake2b(numbers.tobytes(), digest_size=32).digest()
