"""Boxes of Shamir shares, sealed client to client: the server relays and cannot read them.

A box is AES-256-SIV (RFC 5297), as for sealed rows: it is deterministic, so a client that is asked
again sends the same bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import TYPE_CHECKING

from securecluster.errors import FrameError, UsageError
from securecluster.privacy.masking.pads import KEPT, KEY, encoded, transcript
from securecluster.protections.secure_sums.shamir import PRIME, VALUE

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.ciphers.aead import AESSIV

# names of pairs that are kept in memory
KEPT_ENDS = 1 << 18
# bytes by which a box is longer than its shares
OVERHEAD = 16


def box_size(count: int) -> int:
    """Return the bytes of a box.

    Args:
        count: number of shares in it.
    """
    return OVERHEAD + VALUE * count


class ShareSeal:
    """Seal of the shares that two clients send to each other.

    Args:
        pair_key: key of the two clients, 32 bytes.
        run: hash of the run's configuration, bound into every box.

    Raises:
        UsageError: a key of another length.
    """

    def __init__(self, pair_key: bytes, run: bytes) -> None:
        self._run = run
        self._siv = _cipher(pair_key)

    def __repr__(self) -> str:
        return "ShareSeal(key hidden)"

    def close(self, values: Sequence[int], block: bytes, sender: int, receiver: int) -> bytes:
        """Return a box of shares, `box_size(n)` bytes.

        Args:
            values: values of shares (n,), below PRIME, at least one.
            block: the calls that the shares are for, such as the hash of one call's context.
            sender: client that seals the box.
            receiver: client that may open it.
        """
        plain = b"".join(value.to_bytes(VALUE, "big") for value in values)
        context = self._context(block, sender, receiver)
        return self._siv.encrypt(plain, context)

    def open(
        self, box: bytes, count: int, block: bytes, sender: int, receiver: int
    ) -> tuple[int, ...]:
        """Return the values (n,) of the shares in a box.

        Args:
            box: sealed box.
            count: number n of shares that it holds.
            block: the calls that the shares are for.
            sender: client that sealed the box.
            receiver: client that opens it.

        Raises:
            FrameError: a box that was altered, that belongs to another run, block, sender or
                receiver, or that holds anything else than `count` shares.
        """
        from cryptography.exceptions import InvalidTag

        if len(box) != box_size(count):
            raise FrameError(
                f"the box of client {sender} for client {receiver} has {len(box)} bytes, not "
                f"{box_size(count)}"
            )
        context = self._context(block, sender, receiver)
        try:
            plain = self._siv.decrypt(box, context)
        except InvalidTag:
            raise FrameError(
                f"client {receiver} cannot open the box of client {sender}: it was altered, or "
                "belongs to another run, call or client"
            ) from None
        values = []
        for start in range(0, len(plain), VALUE):
            value = int.from_bytes(plain[start : start + VALUE], "big")
            if value >= PRIME:
                raise FrameError(f"the box of client {sender} holds a number that is no share")
            values.append(value)
        return tuple(values)

    def _context(self, block: bytes, sender: int, receiver: int) -> list[bytes]:
        """Return the associated data of a box.

        The key is that of a pair, so sender and receiver keep its two directions apart.

        Args:
            block: the calls that the shares are for.
            sender: client that seals the box.
            receiver: client that may open it.
        """
        return [_about(self._run, block) + _ends(sender, receiver)]


@lru_cache(KEPT_ENDS)
def _ends(sender: int, receiver: int) -> bytes:
    """Return the end of the associated data of boxes."""
    return encoded(sender) + encoded(receiver)


@lru_cache(KEPT)
def _about(run: bytes, block: bytes) -> bytes:
    """Return the beginning of the associated data of boxes, which all pairs have in common."""
    return transcript("securecluster share box v1", run, block)


def _cipher(pair_key: bytes) -> AESSIV:
    """Return AES-256-SIV under a key from a pair's key.

    Args:
        pair_key: key of two clients, 32 bytes.

    Raises:
        UsageError: a key of another length.
    """
    from cryptography.hazmat.primitives.ciphers.aead import AESSIV
    from cryptography.hazmat.primitives.hashes import SHA512
    from cryptography.hazmat.primitives.kdf.hkdf import HKDFExpand

    if len(pair_key) != KEY:
        raise UsageError(f"the key of a pair has {KEY} bytes, not {len(pair_key)}")
    # The pair's key is also that of its pads: the label keeps the two apart.
    derivation = HKDFExpand(SHA512(), 64, info=b"securecluster share seal v1")
    return AESSIV(derivation.derive(pair_key))
