"""What a mask draws from the seed that the clients share: a ChaCha20 stream for each step and
purpose, the same on every machine.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Sequence
from typing import ClassVar, Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from securecluster.core.lazy_torch import torch
from securecluster.errors import UsageError
from securecluster.privacy.pipeline import Kind

D = TypeVar("D")

# purposes: what draws for one of them never meets another's stream
ORDER, SIGNS, LAYERS, GAUSSIANS = range(4)


def words(seed: bytes, step: int, count: int, purpose: int = ORDER) -> NDArray[np.uint64]:
    """The first `count` 64-bit words of the stream that (seed, step, purpose) names: RFC 8439, the
    seed as key.

    Args:
        seed: 32 bytes.
        step: below 2^64, so that purposes stay apart: the nonce is the step in its low 64 bits and
            the purpose in its high 32.
    """
    from cryptography.hazmat.primitives.ciphers import Cipher
    from cryptography.hazmat.primitives.ciphers.algorithms import ChaCha20

    # 32-bit block counter (zero), then 96 bits of nonce
    stream = Cipher(
        ChaCha20(seed, bytes(4) + (step + (purpose << 64)).to_bytes(12, "little")), mode=None
    ).encryptor()
    return np.frombuffer(stream.update(bytes(8 * count)), dtype="<u8")


def order(seed: bytes, step: int, count: int) -> NDArray[np.int64]:
    """A uniform order of `count` things: the stable argsort of as many words, on every machine.

    Sorting numbers is much faster than sorting places by number, so the places are sorted in the
    words' lower bits; where words agree in their upper bits, which is rare, their order is settled
    afterwards.
    """
    keys = words(seed, step, count, ORDER)
    low = np.uint64((1 << max(0, count - 1).bit_length()) - 1)
    packed = (keys & ~low) | np.arange(count, dtype=np.uint64)
    packed.sort()
    found = (packed & low).view(np.int64)
    agreed = np.flatnonzero((packed[1:] ^ packed[:-1]) <= low)
    for run in np.split(agreed, np.flatnonzero(np.diff(agreed) > 1) + 1) if len(agreed) else []:
        members = found[run[0] : run[-1] + 2].copy()  # ascending places
        found[run[0] : run[-1] + 2] = members[np.argsort(keys[members], kind="stable")]
    return found


def signs(seed: bytes, step: int, count: int, purpose: int) -> NDArray[np.float32]:
    """`count` fair signs ±1, one per bit of the stream, lowest bit first."""
    data = words(seed, step, -(-count // 64), purpose).view(np.uint8)
    return np.float32(1) - np.float32(2) * np.unpackbits(data, count=count, bitorder="little")


def gaussians(seed: bytes, step: int, count: int) -> NDArray[np.float64]:
    """`count` standard Gaussians: Φ⁻¹ of the upper 52 bits of a word each, in the middle of their
    cell: 53 bits, so none rounds to 1.
    """
    from scipy.special import ndtri

    upper = words(seed, step, count, GAUSSIANS) >> np.uint64(12)
    return np.asarray(ndtri((upper.astype(np.float64) + 0.5) * 2.0**-52))


class Keyed(ABC, Generic[D]):
    """A mask's keeper of the shared seed, and of what it drew for the last few steps (a client that
    missed rounds undoes several).
    """

    kind: ClassVar[Kind] = Kind.MASK
    name: ClassVar[str]
    _CACHED = 4

    def __init__(self) -> None:
        self._seed: bytes | None = None
        self._drawn: OrderedDict[tuple[int, int], D] = OrderedDict()

    def __repr__(self) -> str:
        return f"{type(self).__name__}(seed hidden)"

    def unlock(self, seed: bytes) -> None:
        """Hand in the 32-byte seed that the clients agreed on."""
        if seed != self._seed:
            self._drawn.clear()
        self._seed = seed

    def width(self, d: int) -> int:
        """Numbers in a masked row of d."""
        return d

    def _of(self, d: int, step: int) -> D:
        """The map of one step on rows of width d."""
        if self._seed is None:
            raise UsageError(
                "this client has no mask seed yet: it must take part in the key agreement before "
                "it can mask"
            )
        if (d, step) not in self._drawn:
            self._drawn[d, step] = self._draw(self._seed, d, step)
            while len(self._drawn) > self._CACHED:
                self._drawn.popitem(last=False)
        return self._drawn[d, step]

    @abstractmethod
    def _draw(self, seed: bytes, d: int, step: int) -> D: ...


def blocks(rows: torch.Tensor, numbers: int = 1 << 18) -> Sequence[torch.Tensor]:
    """Rows (…, d) as views of whole rows, about `numbers` numbers each: what works on them needs no
    second matrix.
    """
    return torch.split(rows.view(-1, rows.shape[-1]), max(1, numbers // rows.shape[-1]))
