"""ChaCha20 streams of a mask, from the seed that the clients share.

There is one stream for each step and purpose, the same on every machine.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Sequence
from typing import ClassVar, Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from securecluster.core.devices import to_device
from securecluster.core.lazy_torch import torch
from securecluster.core.threads import each_in_a_thread
from securecluster.errors import UsageError
from securecluster.privacy.dp.device_cipher import WORDS_IN_BLOCK, keystream, words_of
from securecluster.privacy.pipeline import Kind

D = TypeVar("D")

# Numbers in the narrowest row that is gathered by itself, and in rows that are worth threads.
WIDE_ROW = 1 << 13
# Numbers that are worked on at a time, on a CPU and on a GPU.
CACHED_NUMBERS = 1 << 18
NUMBERS_ON_GPU = 1 << 26
MANY_NUMBERS = 1 << 20

# Purposes of a draw. Each has a stream of its own, so that no two of them share words.
ORDER, SIGNS, LAYERS, GAUSSIANS = range(4)


def words(seed: bytes, step: int, count: int, purpose: int = ORDER) -> NDArray[np.uint64]:
    """Return the first 64-bit words of the stream of (seed, step, purpose), (count,).

    The stream is ChaCha20 (RFC 8439) with the seed as key.

    Args:
        seed: 32 secret bytes.
        step: number of the call, below 2^64, so that purposes stay apart: the nonce is the step in
            its low 64 bits and the purpose in its high 32.
        count: number of words.
        purpose: purpose of the draw.
    """
    from cryptography.hazmat.primitives.ciphers import Cipher
    from cryptography.hazmat.primitives.ciphers.algorithms import ChaCha20

    # 32-bit block counter (zero), then 96 bits of nonce
    block_counter = bytes(4)
    algorithm = ChaCha20(seed, block_counter + _nonce(step, purpose))
    stream = Cipher(algorithm, mode=None).encryptor()
    # Encrypted zeros are the stream itself.
    zeros = bytes(8 * count)
    data = stream.update(zeros)
    return np.frombuffer(data, dtype="<u8")


def _nonce(step: int, purpose: int) -> bytes:
    """Return the 12 bytes of a nonce."""
    number = step + (purpose << 64)
    return number.to_bytes(12, "little")


def order(seed: bytes, step: int, count: int) -> NDArray[np.int64]:
    """Return a uniform permutation: the stable argsort of random words, (count,).

    Args:
        seed: 32 secret bytes.
        step: number of the call.
        count: number of positions.
    """
    keys = words(seed, step, count, ORDER)
    # Sorting numbers is much faster than an argsort. So each position is put into the lower bits of
    # its key, and the sorted numbers contain the positions in order.
    position_bits = max(0, count - 1).bit_length()
    mask = np.uint64((1 << position_bits) - 1)
    upper = keys & ~mask
    packed = upper | np.arange(count, dtype=np.uint64)
    packed.sort()
    positions = (packed & mask).view(np.int64)
    # Keys that agree in their upper bits, which is rare, are compared as a whole.
    differences = packed[1:] ^ packed[:-1]
    ties = np.flatnonzero(differences <= mask)
    for run in _runs(ties):
        # A tie is between a number and the next one.
        end = run[-1] + 2
        tied = slice(run[0], end)
        members = positions[tied].copy()  # ascending
        ranking = np.argsort(keys[members], kind="stable")
        positions[tied] = members[ranking]
    return positions


def _runs(numbers: NDArray[np.int64]) -> list[NDArray[np.int64]]:
    """Return ascending numbers split into runs of consecutive ones."""
    if not len(numbers):
        return []
    gaps = np.diff(numbers) > 1
    starts = np.flatnonzero(gaps) + 1
    return np.split(numbers, starts)


def signs(seed: bytes, step: int, count: int, purpose: int) -> NDArray[np.float32]:
    """Return fair signs ±1 (count,), one for each bit of the stream, lowest bit first.

    Args:
        seed: 32 secret bytes.
        step: number of the call.
        count: number of signs.
        purpose: purpose of the draw.
    """
    word_count = -(-count // 64)
    data = words(seed, step, word_count, purpose)
    bits = np.unpackbits(data.view(np.uint8), count=count, bitorder="little")
    return np.float32(1) - np.float32(2) * bits


def words_there(
    seed: bytes, step: int, count: int, purpose: int, device: torch.device
) -> torch.Tensor:
    """Return `words` of the same arguments, computed on a device, (count,) int64.

    Args:
        seed: 32 secret bytes.
        step: number of the call.
        count: number of words.
        purpose: purpose of the draw.
        device: of the words, on which none is copied from main memory.
    """
    nonce = np.frombuffer(bytearray(_nonce(step, purpose)), dtype="<i4")
    nonces = to_device(nonce[None], device)
    blocks = -(-2 * count // WORDS_IN_BLOCK)
    stream = keystream(words_of([seed], device), nonces, blocks)
    return stream[0].view(torch.int64)[:count]


def order_there(seed: bytes, step: int, count: int, device: torch.device) -> torch.Tensor:
    """Return `order` of the same arguments, computed on a device, (count,) int64."""
    keys = words_there(seed, step, count, ORDER, device)
    # signed words are in the order of unsigned ones once their highest bit is the other
    return keys.bitwise_xor(-(1 << 63)).sort(stable=True).indices


def signs_there(
    seed: bytes, step: int, count: int, purpose: int, device: torch.device
) -> torch.Tensor:
    """Return `signs` of the same arguments, computed on a device, (count,) float32."""
    data = words_there(seed, step, -(-count // 64), purpose, device)
    bits = (data[:, None] >> torch.arange(64, device=device)).bitwise_and_(1)
    return 1 - 2 * bits.flatten()[:count].float()


def gaussians(seed: bytes, step: int, count: int) -> NDArray[np.float64]:
    """Return standard Gaussians (count,): Φ⁻¹ of the upper 52 bits of a word each.

    Args:
        seed: 32 secret bytes.
        step: number of the call.
        count: number of Gaussians.
    """
    from scipy.special import ndtri

    numbers = words(seed, step, count, GAUSSIANS)
    upper = numbers >> np.uint64(12)
    # The middle of a cell has 53 bits, so no number rounds to 0 or 1, where Φ⁻¹ is infinite.
    middles = upper.astype(np.float64) + 0.5
    uniform = middles * 2.0**-52
    return np.asarray(ndtri(uniform))


class Keyed(ABC, Generic[D]):
    """Base of masks that are drawn from the shared seed.

    It keeps the maps of the last few steps: a client that missed rounds undoes several.
    """

    kind: ClassVar[Kind] = Kind.MASK
    name: ClassVar[str]
    _CACHED = 4

    def __init__(self) -> None:
        self._seed: bytes | None = None
        self._drawn: OrderedDict[tuple[int, int, str], D] = OrderedDict()

    def __repr__(self) -> str:
        return f"{type(self).__name__}(seed hidden)"

    def unlock(self, seed: bytes) -> None:
        """Set the seed that the clients agreed on.

        Args:
            seed: 32 secret bytes.
        """
        # Maps of another seed must not be used again.
        if seed != self._seed:
            self._drawn.clear()
        self._seed = seed

    def width(self, d: int) -> int:
        """Return the numbers in a masked row.

        Args:
            d: numbers in a row.
        """
        return d

    def _of(self, d: int, step: int, device: torch.device | None = None) -> D:
        """Return the map of one step.

        Args:
            d: numbers in a row.
            step: number of the call.
            device: where `_draw_there` computes it; None for main memory.

        Raises:
            UsageError: no seed was set.
        """
        if self._seed is None:
            raise UsageError(
                "this client has no mask seed yet: it must take part in the key agreement before "
                "it can mask"
            )
        there = device is not None and device.type != "cpu"
        key = (d, step, str(device) if there else "cpu")
        if key not in self._drawn:
            if device is not None and there:
                self._drawn[key] = self._draw_there(self._seed, d, step, device)
            else:
                self._drawn[key] = self._draw(self._seed, d, step)
            while len(self._drawn) > self._CACHED:
                self._drawn.popitem(last=False)
        return self._drawn[key]

    def _draw_there(self, seed: bytes, d: int, step: int, device: torch.device) -> D:
        """Return the map of one step, computed on a device where a mask can do that."""
        return self._draw(seed, d, step)

    @abstractmethod
    def _draw(self, seed: bytes, d: int, step: int) -> D: ...


def blocks(rows: torch.Tensor, numbers: int | None = None) -> Sequence[torch.Tensor]:
    """Return views of whole rows, so that work on them needs no second matrix.

    Args:
        rows: contiguous rows (…, d).
        numbers: approximate numbers in a view; None for as many as caches hold, or as many as keep
            a GPU busy.
    """
    if numbers is None:
        numbers = CACHED_NUMBERS if rows.device.type == "cpu" else NUMBERS_ON_GPU
    d = rows.shape[-1]
    table = rows.view(-1, d)
    row_count = max(1, numbers // d)
    return torch.split(table, row_count)


def gather(
    rows: torch.Tensor, positions: torch.Tensor, factors: torch.Tensor | None = None
) -> None:
    """Replace y_j by x_π(j), times a factor, in every row, in place.

    Args:
        rows: contiguous rows (…, d).
        positions: π, (d,).
        factors: factor of each new number, (d,); None for 1.
    """
    table = rows.view(-1, rows.shape[-1])
    if rows.device.type != "cpu" or rows.shape[-1] < WIDE_ROW:
        for block in blocks(rows):
            gathered = block.index_select(-1, positions)
            if factors is None:
                block.copy_(gathered)
            else:
                torch.mul(gathered, factors, out=block)
        return

    def work(chunk: torch.Tensor) -> None:
        # A copy in cache is read at random, and the row itself is written in order.
        row_in_cache = chunk.new_empty(chunk.shape[1])
        for row in chunk.unbind():
            row_in_cache.copy_(row)
            torch.index_select(row_in_cache, 0, positions, out=row)
            if factors is not None:
                row.mul_(factors)

    threads = 1
    if table.numel() >= MANY_NUMBERS:
        threads = min(len(table), torch.get_num_threads())
    each_in_a_thread(work, table.tensor_split(threads))
