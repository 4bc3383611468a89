"""Pads of pairs of clients: X25519 keys once a run, and a stream for each call and field.

Two clients agree on a pair key (X25519, RFC 7748; one-step key derivation, NIST SP 800-56C), bound
to the run and to both ends. Each call takes a key of its own from it, so a revealed call key tells
nothing of other calls (as in Flamingo, Ma et al. 2023), and each field's pad is the AES-256-CTR
stream (NIST SP 800-38A) of a key that follows from the call's. What follows from keys is SHAKE256
(FIPS 202) of the key and of what it is for: a keyed sponge is a pseudorandom function, and takes a
fifth of the time of HMAC in OpenSSL. A short pad is its output itself, since a cipher takes longer
to begin.

Python gives no constant time: this code protects against what parties send, not against one who
measures the client's processor.
"""

from __future__ import annotations

import hashlib
import hmac
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from securecluster.core.lazy_torch import torch
from securecluster.errors import FrameError, UsageError

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PublicKey
    from cryptography.hazmat.primitives.ciphers import CipherContext

# bytes of public, private and derived keys
KEY = 32
# bytes of a pad that are made at once: they stay in a core's cache
BLOCK_BYTES = 1 << 16
# bytes of short pads that are gathered at once
GATHERED_BYTES = 1 << 22
ZEROS = memoryview(bytes(BLOCK_BYTES))
# encodings of public names and numbers that are kept in memory
KEPT = 64
# public keys that are kept in memory
KEPT_PUBLIC = 1 << 12
# bytes of the longest pad that is derived without a cipher
SHORT = 1 << 10
# prime of Curve25519
FIELD_PRIME = (1 << 255) - 19


@dataclass(frozen=True)
class Places:
    """Which pads are added to some rows of a table, of as many pads each.

    Args:
        rows: numbers of the rows (r,).
        pads: which pads are added to each row (r, p).
        signs: their signs, 1 or -1 (r, p).
    """

    rows: Sequence[int]
    pads: NDArray[np.int64]
    signs: NDArray[np.int64]


def transcript(label: str, *pieces: bytes | str | int) -> bytes:
    """Return an unambiguous encoding of a label and parts, each after its length.

    Args:
        label: purpose of the encoding; labels keep derived keys apart.
        parts: bytes, text in UTF-8, or integers between 0 and 2^64 - 1.
    """
    return label.encode() + b"".join(encoded(piece) for piece in pieces)


def encoded(piece: bytes | str | int) -> bytes:
    """Return one part of a `transcript`, after its length.

    Args:
        piece: bytes, text in UTF-8, or an integer between 0 and 2^64 - 1.
    """
    if isinstance(piece, int):
        data = piece.to_bytes(8, "big")
    elif isinstance(piece, str):
        data = piece.encode()
    else:
        data = piece
    return len(data).to_bytes(8, "big") + data


def members_hash(members: Sequence[int]) -> bytes:
    """Return SHA-256 of a list of clients, 32 bytes, whatever its order.

    Args:
        members: ids of the clients.
    """
    ids = sorted(members)
    text = transcript("securecluster sum members v1", *ids)
    return hashlib.sha256(text).digest()


class KeyPair:
    """X25519 key pair of a client, used for one run.

    Args:
        private: 32 secret bytes.

    Attributes:
        public: public key, 32 bytes.

    Raises:
        UsageError: not 32 bytes.
    """

    def __init__(self, private: bytes) -> None:
        from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

        if len(private) != KEY:
            raise UsageError(f"a private key is {KEY} secret bytes, not {len(private)}")
        self._key = X25519PrivateKey.from_private_bytes(private)
        self.public = self._key.public_key().public_bytes_raw()
        self._point = point(self.public)

    def __repr__(self) -> str:
        # the public key: no secret may be printed
        return f"KeyPair({self.public.hex()[:16]}…)"

    def exchange(self, peer_public: bytes) -> bytes:
        """Return the shared secret of X25519, 32 bytes.

        Args:
            peer_public: public key of the other end, 32 bytes.

        Raises:
            FrameError: a malformed key, or one of low order, whose secret everyone knows (RFC 7748,
                section 6.1).
        """
        try:
            secret = self._key.exchange(_read_public(peer_public))
        except ValueError:
            raise FrameError(
                "a public key of the secure sum is not a valid X25519 key: its sender must be left "
                "out"
            ) from None
        if not any(secret):
            raise FrameError(
                "a public key of the secure sum has low order: its sender must be left out"
            )
        return secret

    def pair_key(self, own: int, peer: int, peer_public: bytes, run: bytes, purpose: str) -> bytes:
        """Return the key that two clients share for a run, 32 bytes, the same at both ends.

        It costs a scalar multiplication: derive it once for each pair and run.

        Args:
            own: id of this client.
            peer: id of the other client.
            peer_public: public key of the other client, 32 bytes.
            run: hash of the run's configuration.
            purpose: what the key is for; keys of two purposes are independent.

        Raises:
            FrameError: this client's own id or key, or an invalid key.
        """
        if peer == own or point(peer_public) == self._point:
            raise FrameError(
                f"client {own} was named itself as a peer of its secure sum: the keys were "
                "tampered with, start a new run"
            )
        secret = self.exchange(peer_public)
        lower, upper = sorted([(own, self.public), (peer, peer_public)])
        about = _of_pairs(run, purpose) + _end(*lower) + _end(*upper)
        return _extracted(secret, about)


@lru_cache(KEPT)
def _of_pairs(run: bytes, purpose: str) -> bytes:
    """Return the beginning of what a pair's key is for, which all pairs have in common."""
    return transcript("securecluster sum pair v1", run, purpose)


@lru_cache(KEPT_PUBLIC)
def _end(client: int, public: bytes) -> bytes:
    """Return one end of a pair, as a `transcript` has it."""
    return encoded(client) + encoded(public)


@lru_cache(KEPT_PUBLIC)
def _read_public(public: bytes) -> X25519PublicKey:
    """Return a public key, which each client of a machine reads anew otherwise.

    Raises:
        ValueError: not 32 bytes.
    """
    from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PublicKey

    return X25519PublicKey.from_public_bytes(public)


def check_order(public: bytes) -> None:
    """Raise FrameError for a malformed public key, or one of low order.

    Args:
        public: of a client, 32 bytes.
    """
    _any_pair().exchange(public)


@cache
def _any_pair() -> KeyPair:
    """Return a pair of keys: the secret of a point of low order is zero with every private key."""
    return KeyPair(bytes(KEY))


def check_public_keys(
    keys: Mapping[int, bytes],
    client_id: int,
    own_public: bytes,
    known: Mapping[int, int] = MappingProxyType({}),
) -> None:
    """Raise FrameError for public keys that no honest server relays.

    Args:
        keys: client id -> public key, 32 bytes; this client's entry may be absent.
        client_id: id of this client.
        own_public: public key of this client.
        known: owners of the points of further keys, which were checked before.

    Raises:
        FrameError: a key of another length, one that two clients have, also as two encodings of one
            point, or another key in this client's name.
    """
    # checked like the others, also where the server relays no key in this client's name
    points: dict[int, int] = {}
    for client, key in ((client_id, own_public), *keys.items()):
        if client == client_id and key != own_public:
            raise FrameError(
                f"client {client_id} was sent another public key in its own name: the keys were "
                "tampered with, start a new run"
            )
        at = point(key)
        first = points.setdefault(at, known.get(at, client))
        if first != client:
            raise FrameError(
                f"clients {first} and {client} of a secure sum have the same public key: the keys "
                "were tampered with, start a new run"
            )


def point(public: bytes) -> int:
    """Return the point that a public key stands for, so that all encodings of it compare equal.

    The highest bit is ignored, and numbers count modulo the prime (RFC 7748, section 5).

    Args:
        public: 32 bytes.

    Raises:
        FrameError: not 32 bytes.
    """
    if len(public) != KEY:
        raise FrameError(f"a public key of a secure sum has {KEY} bytes, not {len(public)}")
    number = int.from_bytes(public, "little") & ((1 << 255) - 1)
    return number % FIELD_PRIME


def purpose_hash(label: str, *pieces: bytes | str | int) -> bytes:
    """Return what derived bytes are for, 32 bytes: SHA-256 of a `transcript`.

    Args:
        label: as in `transcript`.
        pieces: as in `transcript`.
    """
    return hashlib.sha256(transcript(label, *pieces)).digest()


@lru_cache(KEPT)
def _of_field(label: str, field: str) -> bytes:
    """Return what a field's pads are for."""
    return purpose_hash(label, field)


def derived(key: bytes, about: bytes, size: int = KEY) -> bytes:
    """Return bytes that follow from a key: SHAKE256 of it and of what they are for.

    Fewer bytes are the first ones of more.

    Args:
        key: a uniform key, 32 bytes.
        about: what the bytes are for, 32 bytes (`purpose_hash`): inputs of one length tell key and
            purpose apart.
        size: number of bytes.
    """
    return hashlib.shake_256(key + about).digest(size)


def expand(key: bytes, info: bytes) -> bytes:
    """Return HKDF-Expand with SHA-256, 32 bytes (RFC 5869, section 2.3).

    Args:
        key: a uniform key, 32 bytes, for which the step of extraction is not needed (section 3.3).
        info: what the new key is for.
    """
    # its one block of output, at half the time that HKDFExpand takes: clients derive three keys for
    # each neighbour and call
    return hmac.digest(key, info + b"\x01", "sha256")


def _extracted(secret: bytes, about: bytes) -> bytes:
    """Return a key from a shared secret, 32 bytes: one step with SHA-256 (NIST SP 800-56C, 4.1).

    Args:
        secret: shared secret, not uniform.
        about: what the key is for.
    """
    return hashlib.sha256(b"\0\0\0\1" + secret + about).digest()


def pad_sign(client: int, peer: int) -> int:
    """Return the sign with which a client adds the pad of a pair: the lower id adds.

    Args:
        client: id of the client.
        peer: id of the other client.
    """
    # Both ends of a pair derive the same pad, so their signs must be opposite.
    if client < peer:
        return 1
    return -1


def add_pads(buffer: torch.Tensor, pads: Sequence[tuple[bytes, int]], field: str) -> None:
    """Add the pads of several keys to a buffer, in place and in the ring.

    Args:
        buffer: contiguous int32 or int64 tensor (…) on the CPU.
        pads: (key of 32 bytes, sign 1 or -1) of each pad.
        field: name of the field; each field's pads are independent.

    Raises:
        UsageError: another buffer or sign.
    """
    keys = [key for key, _ in pads]
    signs = np.array([[sign for _, sign in pads]], dtype=np.int64)
    add_shared_pads(buffer[None], keys, [Places([0], np.arange(len(keys))[None], signs)], field)


def add_shared_pads(
    table: torch.Tensor, keys: Sequence[bytes], places: Sequence[Places], field: str
) -> None:
    """Add each of several keys' pads to some rows of a table, in place and in the ring.

    A pad of two rows is made once. All pads of a block of columns are added before the next block
    is read, so that the block stays in the cache.

    Args:
        table: contiguous int32 or int64 tensor (k, …) on the CPU.
        keys: keys of the pads, 32 bytes each.
        places: which pads are added to which rows.
        field: name of the field; each field's pads are independent.

    Raises:
        UsageError: another table or sign.
    """
    rows = _words(table)
    if not all((np.abs(own.signs) == 1).all() for own in places):
        raise UsageError("the sign of a pad is 1 or -1")
    if rows.shape[1] * rows.itemsize <= SHORT:
        _add_short_pads(rows, keys, places, field)
    else:
        _add_streams(rows, keys, places, field)


def _add_short_pads(
    rows: NDArray[Any], keys: Sequence[bytes], places: Sequence[Places], field: str
) -> None:
    """Add pads that are derived whole, as `add_shared_pads` does."""
    about = _of_field("securecluster short pad v2", field)
    size = rows.shape[1] * rows.itemsize
    # `derived` in line: there is one for each pair of clients
    shake = hashlib.shake_256
    made = b"".join([shake(key + about).digest(size) for key in keys])
    # Pads are bytes: the words of all machines are in one order.
    words = np.frombuffer(made, dtype=rows.dtype.newbyteorder("<"))
    pads = words.reshape(len(keys), rows.shape[1])
    for own in places:
        signs = own.signs.astype(rows.dtype)
        # rows whose pads are in memory at once
        step = max(1, GATHERED_BYTES // max(1, own.pads.shape[1] * size))
        for start in range(0, len(own.rows), step):
            part = slice(start, start + step)
            rows[own.rows[part]] += np.einsum("kp,kpn->kn", signs[part], pads[own.pads[part]])


def _add_streams(
    rows: NDArray[Any], keys: Sequence[bytes], places: Sequence[Places], field: str
) -> None:
    """Add pads that are streams of a cipher, as `add_shared_pads` does."""
    about = _of_field("securecluster pad stream v2", field)
    # typed as Any: numpy's ufuncs have no common type
    operations: list[list[tuple[int, Any]]] = [[] for _ in keys]
    for own in places:
        for row, chosen, signs in zip(own.rows, own.pads.tolist(), own.signs.tolist(), strict=True):
            for pad, sign in zip(chosen, signs, strict=True):
                operations[pad].append((row, np.add if sign == 1 else np.subtract))
    streams = [_stream(derived(key, about)) for key in keys]
    block_words = BLOCK_BYTES // rows.itemsize
    scratch = np.empty(block_words, dtype=rows.dtype.newbyteorder("<"))
    scratch_bytes = scratch.data.cast("B")
    for start in range(0, rows.shape[1], block_words):
        blocks = list(rows[:, start : start + block_words])
        block = scratch[: len(blocks[0])]
        zeros = ZEROS[: block.nbytes]
        for stream, added in zip(streams, operations, strict=True):
            # Encrypted zeros are the stream itself.
            stream.update_into(zeros, scratch_bytes)
            for row, operation in added:
                operation(blocks[row], block, blocks[row])


def _words(table: torch.Tensor) -> NDArray[Any]:
    """Return a view of a table's memory as rows of integers, which wrap.

    Args:
        table: contiguous int32 or int64 tensor (k, …) on the CPU.

    Raises:
        UsageError: another table.
    """
    is_ring = table.dtype in (torch.int32, torch.int64)
    if not is_ring or table.device.type != "cpu" or not table.is_contiguous():
        raise UsageError(
            "pads are added to contiguous int32 or int64 tensors on the CPU, not to "
            f"{table.dtype} on {table.device}"
        )
    words: NDArray[Any] = table.view(len(table), math.prod(table.shape[1:])).numpy()
    return words


def _stream(key: bytes) -> CipherContext:
    """Return the AES-256-CTR stream of a key, from block 0.

    Every key makes one stream only, so the counter need not begin elsewhere.

    Args:
        key: 32 secret bytes.
    """
    cipher, aes, counter = _ciphers()
    stream: CipherContext = cipher(aes(key), counter(bytes(16))).encryptor()
    return stream


@cache
def _ciphers() -> tuple[Any, Any, Any]:
    """Return the classes of a stream, which take longer to import again than a stream to begin."""
    from cryptography.hazmat.primitives.ciphers import Cipher
    from cryptography.hazmat.primitives.ciphers.algorithms import AES256
    from cryptography.hazmat.primitives.ciphers.modes import CTR

    return Cipher, AES256, CTR
