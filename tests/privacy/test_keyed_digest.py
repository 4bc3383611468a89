"""Keyed digests against their definition in whole numbers."""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from securecluster.privacy.keyed_digest import keyed_digest


def defined(key: bytes, about: bytes, sent: bytes) -> bytes:
    """Return the digest with Poly1305 by its definition (RFC 8439, section 2.5)."""
    hash_key = hashlib.blake2b(about, digest_size=32, key=key, person=b"universal hash").digest()
    r = int.from_bytes(hash_key[:16], "little") & 0x0FFFFFFC0FFFFFFC0FFFFFFC0FFFFFFF
    value = 0
    for k in range(0, len(sent), 16):
        part = sent[k : k + 16] + b"\1"
        value = (value + int.from_bytes(part, "little")) * r % (2**130 - 5)
    value = (value + int.from_bytes(hash_key[16:], "little")) % 2**128
    contents = about + value.to_bytes(16, "little")
    return hashlib.blake2b(contents, digest_size=32, key=key, person=b"keyed digest").digest()


@pytest.mark.parametrize("shape", [(1,), (4,), (3, 53)])
@pytest.mark.parametrize("dtype", [np.float32, np.int64])
def test_a_digest_is_a_keyed_function_of_a_universal_hash(
    shape: tuple[int, ...], dtype: type
) -> None:
    key = bytes(range(32))
    row: NDArray[Any] = (100 * np.random.default_rng(0).normal(size=shape)).astype(dtype)
    assert keyed_digest(key, b"about", row) == defined(key, b"about", row.tobytes())


def test_key_purpose_and_every_bit_of_the_row_decide() -> None:
    key, row = bytes(32), np.arange(40, dtype=np.float32)
    found = {keyed_digest(key, b"about", row), keyed_digest(key, b"else", row)}
    found.add(keyed_digest(bytes([1] * 32), b"about", row))
    for bit in range(32 * len(row)):
        changed = row.copy()
        changed.view(np.uint32)[bit // 32] ^= np.uint32(1 << bit % 32)
        found.add(keyed_digest(key, b"about", changed))
    assert len(found) == 3 + 32 * len(row)
