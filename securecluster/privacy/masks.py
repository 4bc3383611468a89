"""Masks: orthonormal maps that all clients of a run share and the server does not know.

A mask is obfuscation, not encryption: it hides which coordinate is which, it protects against the server only, and one client that
tells the server the shared seed undoes it.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from securecluster.backend import torch
from securecluster.errors import UsageError, unknown
from securecluster.privacy.stages import Kind, Stage

MASKS = ("none", "permutation")


@dataclass(frozen=True)
class MaskInfo:
    """What the result says of a mask: what stays visible to the server, and what is assumed."""

    shows: str
    not_covered: str


INFO = {
    "none": MaskInfo("the values themselves", ""),
    "permutation": MaskInfo(
        "its sorted values, exact zeros, sum, norm and inner products with the others of that call",
        "the permutation is obfuscation: it hides nothing from a client, and falls when one client tells the server the shared seed",
    ),
}


class Permutation:
    """Coordinates in an order drawn from PRF(seed, step), fresh for every call (Sattler et al. 2019, V-B; fresh maps are ours).

    The order is the argsort of 64-bit words of a ChaCha20 stream with the shared seed as key and the step as nonce.
    """

    kind: ClassVar[Kind] = Kind.MASK
    name: ClassVar[str] = "permutation"
    _CACHED = 4

    def __init__(self) -> None:
        self._seed: bytes | None = None
        self._orders: OrderedDict[tuple[int, int], torch.Tensor] = OrderedDict()

    def __repr__(self) -> str:
        return "Permutation(seed hidden)"

    def unlock(self, seed: bytes) -> None:
        """Hand in the 32-byte seed that the clients agreed on."""
        if seed != self._seed:
            self._orders.clear()
        self._seed = seed

    def forward(self, rows: torch.Tensor, step: int) -> torch.Tensor:
        """P_step applied to rows (b, d)."""
        return rows[..., self._order(rows.shape[-1], step).to(rows.device)]

    def inverse(self, rows: torch.Tensor, step: int) -> torch.Tensor:
        """P_step⁻¹ applied to rows (b, d); exact."""
        out = torch.empty_like(rows)
        out[..., self._order(rows.shape[-1], step).to(rows.device)] = rows
        return out

    def _order(self, d: int, step: int) -> torch.Tensor:
        if self._seed is None:
            raise UsageError("this client has no mask seed yet: it must take part in the key agreement before it can mask")
        if (d, step) not in self._orders:
            self._orders[d, step] = torch.from_numpy(np.argsort(_words(self._seed, step, d), kind="stable"))
            while len(self._orders) > self._CACHED:
                self._orders.popitem(last=False)
        return self._orders[d, step]


def _words(seed: bytes, step: int, count: int) -> np.ndarray[tuple[int], np.dtype[np.uint64]]:
    from cryptography.hazmat.primitives.ciphers import Cipher
    from cryptography.hazmat.primitives.ciphers.algorithms import ChaCha20

    # 32-bit block counter (zero), then 96 bits of nonce as in RFC 8439: the step
    stream = Cipher(ChaCha20(seed, bytes(4) + step.to_bytes(12, "little")), mode=None).encryptor()
    return np.frombuffer(stream.update(bytes(8 * count)), dtype="<u8")


def build(name: str) -> tuple[Stage, ...]:
    """The stages of a mask name."""
    if name not in MASKS:
        raise unknown("mask", name, MASKS)
    return () if name == "none" else (Permutation(),)
