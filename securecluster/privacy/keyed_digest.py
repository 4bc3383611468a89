"""Digests under a secret key, for rows of many numbers."""

from __future__ import annotations

import hashlib
from typing import Any

from numpy.typing import NDArray


def keyed_digest(key: bytes, about: bytes, row: NDArray[Any]) -> bytes:
    """Return 32 bytes that follow from a key and a row.

    They are a keyed function (BLAKE2b) of a universal hash (Wegman and Carter 1981), which is
    several times as fast as BLAKE2b of the row. The hash of two rows of n bytes is the same with a
    probability of at most 8⌈n/16⌉/2^106 over its key (Bernstein 2005, theorem 3.3). So both are
    kept secret: only the digest leaves this function.

    Args:
        key: 32 secret bytes.
        about: what the digest is for; the key of the hash follows from it, too.
        row: contiguous numbers of any type and shape.
    """
    from cryptography.hazmat.primitives.poly1305 import Poly1305

    hash_key = hashlib.blake2b(about, digest_size=32, key=key, person=b"universal hash").digest()
    contents = about + Poly1305.generate_tag(hash_key, row.reshape(-1).data.cast("B"))
    return hashlib.blake2b(contents, digest_size=32, key=key, person=b"keyed digest").digest()
