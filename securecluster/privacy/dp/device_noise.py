"""The noise of `grid_noise` for many rows at once, made where the rows are.

On a GPU each party's own calls would take longer than its numbers, and a row that is copied to main
memory to be hashed makes the host wait. So all rows get their noise from the same operations, whose
number does not depend on how many rows there are, and the cipher's words never leave the device.

A stream is ChaCha20 (RFC 8439) under a secret key of 32 bytes, with the 96 bits of a tag of the row
as nonce: rows that differ get other noise under the same key. The tag is the upper half of
Σ_i k_i m_i modulo 2^64 over the row's signed 32-bit words m, three times with other secret keys k
(Dietzfelbinger 1996, "Universal hashing and k-wise independent random variables via integer
arithmetic without primes"). Words that differ do so by c = 2^v · an odd number, v < 32, so k_i c is
uniform among the multiples of 2^v, of which at most a share of 2^-31 lies within 2^32 of a given
one. Hence two rows share one of the three with a probability of at most 2^-31, and all three with
at most 2^-93. Tags stay secret.

The integers are exact as in `grid_noise`: float64 computes them, and a draw that it may have
rounded wrongly is made again in main memory. The host waits for these draws, once or twice for a
block of rows.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

from securecluster.core.devices import to_device
from securecluster.core.lazy_torch import torch
from securecluster.privacy.dp.device_cipher import WORDS_IN_BLOCK, gaussians, keystream, words_of
from securecluster.privacy.dp.grid_noise import rounded

# numbers that are drawn together: about 6 GiB of temporaries
BLOCK = 1 << 26
# hashes of 32 bits in a tag: the words of a nonce
HASHES = 3


class Tags:
    """Tags of rows under secret keys.

    Args:
        secrets: a secret of 32 bytes for each of k rows, used for nothing else.
        prototype: rows (k, d) of the type and on the device of those to come.
    """

    def __init__(self, secrets: Sequence[bytes], prototype: torch.Tensor) -> None:
        words = prototype.shape[1] * prototype.element_size() // 4
        numbers = HASHES * words
        blocks = -(-2 * numbers // WORDS_IN_BLOCK)
        keys = words_of(secrets, prototype.device)
        stream = keystream(keys, keys.new_zeros(len(keys), 3), blocks).view(torch.int64)
        self._keys = stream[:, :numbers].reshape(len(keys), HASHES, words)

    def __repr__(self) -> str:
        return f"Tags({len(self._keys)} rows, keys hidden)"

    def of(self, rows: torch.Tensor, first: int) -> torch.Tensor:
        """Return the tags of some rows, (c, 3) int32.

        Args:
            rows: contiguous rows (c, d).
            first: position of the first of them.
        """
        keys = self._keys[first : first + len(rows)]
        words = rows.view(torch.int32).long()[:, None]
        # integers wrap around
        hashes = (keys * words).sum(-1)
        return hashes.view(torch.int32)[..., 1::2]  # the upper halves


def add_noise(
    rows: torch.Tensor,
    secrets: Sequence[bytes],
    grid: Sequence[float],
    sigma: Sequence[float],
    tags: Tags | None = None,
) -> None:
    """Round rows to their grids and add noise, in place.

    Args:
        rows: finite contiguous rows (k, d).
        secrets: 32 secret bytes for each row. Without tags they must follow from the row, and no
            other use may be made of them.
        grid: spacing g of each row (k,), powers of two.
        sigma: standard deviation of the noise for each row (k,).
        tags: tags of rows, by which each row has a stream of its own.
    """
    count = max(1, BLOCK // max(1, rows.shape[1]))
    for first in range(0, len(rows), count):
        selected = slice(first, first + count)
        block = rows[selected]
        spacings = to_device(grid[selected], rows.device, torch.float64)[:, None]
        scale = [s / g for s, g in zip(sigma[selected], grid[selected], strict=True)]
        # exact: spacings are powers of two, and a rounded number needs no more bits than before
        block.div_(spacings).round_()
        keys = words_of(secrets[selected], rows.device)
        nonces = keys.new_zeros(len(keys), 3) if tags is None else tags.of(block, first)
        noise = _integers(keys, nonces, block.shape[1], scale, secrets[selected])
        # whole numbers below 2^53: no error
        torch.mul(noise.add_(block), spacings, out=block)


def _integers(
    keys: torch.Tensor,
    nonces: torch.Tensor,
    width: int,
    steps: Sequence[float],
    secrets: Sequence[bytes],
) -> torch.Tensor:
    """Return rounded Gaussians (k, width), float64.

    Args:
        keys: keys of the streams, (k, 8).
        nonces: their nonces, (k, 3).
        width: integers from each stream.
        steps: standard deviation of each row (k,), in steps of its grid.
        secrets: the keys as bytes.
    """
    # A pair of words gives two Gaussians: the cosine and the sine of one angle.
    half = -(-width // 2)
    scales = to_device(steps, keys.device, torch.float64)
    integers, unsure, words = gaussians(keys, nonces, scales, half)
    unsure_positions = unsure.nonzero()  # the host waits for their number
    if len(unsure_positions):
        row, sine, pair = unsure_positions.unbind(1)
        drawn = torch.cat([unsure_positions, words[row, :, pair]], 1)
        settled = _settled(drawn.tolist(), steps, secrets)
        integers[row, sine, pair] = integers.new_tensor(settled)
    # An odd width leaves one Gaussian of the last pair unused.
    return integers.view(len(keys), 2 * half)[:, :width]


def _settled(
    drawn: Sequence[Sequence[int]], steps: Sequence[float], secrets: Sequence[bytes]
) -> list[float]:
    """Return the right integers where float64 may have rounded to wrong ones.

    Args:
        drawn: row, 1 for a sine, pair, and both words of each draw.
        steps: standard deviation of each row (k,), in steps of its grid.
        secrets: keys of the rows' streams.
    """
    settled = []
    for row, sine, pair, radius_word, angle_word in drawn:
        # the words stand for the nonce, which the key alone does not determine
        name = f"more bits {pair} {radius_word} {angle_word}".encode()
        key = hashlib.blake2b(name, digest_size=32, key=secrets[row]).digest()
        settled.append(rounded(radius_word, angle_word, steps[row], bool(sine), key))
    return settled
