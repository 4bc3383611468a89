"""Tags of ciphertexts: they bind a sum of ciphertexts to what its clients encrypted.

A tag is a secret linear form of a ciphertext's coefficients, t(c) = ⟨k, c⟩ mod q, with k uniform.
So the tags of a sum are the sums of its clients' tags, and whoever has the tags can check a sum
without a ciphertext of any client (homomorphic MACs, Agrawal and Boneh 2009). The key authority
does: it decrypts what has the tags of all listed clients added up, and nothing else.

Another sum than the right one has its tags with probability 1/q each, over k: below 2^-93 for the
two of each prime, whatever the sum may depend on but k. The clients of a run share k, which they
derive from the seed that they agree on; the server does not have it. A client that tells the server
k lets it forge sums; it could as well encrypt what the server likes.

The tags of one client tell nothing of its numbers, not even to the authority, whose secret key
would open the ciphertext. They are a universal hash, of at most 188 bits, of a ciphertext whose
randomness has 6,492 bits or more (4,096 ternary coefficients): by the leftover hash lemma they are
closer than 2^-3000 to uniform numbers that do not depend on what is encrypted.

A tag key of each client would protect no more, so clients agree on one seed, also where nothing
else is masked.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from securecluster.errors import FrameError
from securecluster.privacy.masking.keystream import words
from securecluster.privacy.masking.pads import KEY, transcript
from securecluster.protections.encryption.ciphers import data_primes
from securecluster.protections.encryption.parameters import Parameters

# linear forms of each prime's coefficients
TAGS = 2
# bytes of a tag
TAG_BYTES = 8
# bits of a limb of a coefficient, and limb products that a 64-bit sum holds: 2^(2·30 + 3) = 2^63
LIMB = 30
PRODUCTS = 8


def tag_key(seed: bytes, run: str, fingerprint: bytes) -> bytes:
    """Return the key of the tags of one encryption of a run, 32 secret bytes.

    Args:
        seed: seed that the clients of the run agreed on, 32 secret bytes.
        run: hash of the run's configuration.
        fingerprint: of the parameters and the public key of the encryption.
    """
    from cryptography.hazmat.primitives import hashes
    from cryptography.hazmat.primitives.kdf.hkdf import HKDF

    # The seed is also the key of masks and seals: the label keeps them apart.
    info = transcript("securecluster ciphertext tags v3", run, fingerprint)
    return HKDF(hashes.SHA256(), KEY, salt=None, info=info).derive(seed)


class LinearTags:
    """Tags under one key.

    Args:
        parameters: parameters of the ciphertexts.
        key: 32 secret bytes.
    """

    def __init__(self, parameters: Parameters, key: bytes) -> None:
        self._primes = data_primes(parameters)
        count = 2 * parameters.degree
        forms = []
        for number, prime in enumerate(self._primes):
            forms.append([_uniform(key, number * TAGS + k, count, prime) for k in range(TAGS)])
        # limbs of the forms: (primes, tags, n)
        self._low, self._high = _limbs(np.array(forms))

    def __repr__(self) -> str:
        return "LinearTags(key hidden)"

    def of(self, coefficients: NDArray[np.int64]) -> list[int]:
        """Return the tags of a ciphertext, all those of a prime together.

        Args:
            coefficients: of both polynomials, by prime (primes, 2·degree).
        """
        low, high = _limbs(coefficients[:, None])
        tags = []
        for number, prime in enumerate(self._primes):
            for k in range(TAGS):
                ours = (self._low[number, k], self._high[number, k])
                theirs = (low[number, 0], high[number, 0])
                tags.append(_inner_product(ours, theirs, prime))
        return tags

    def added(self, tags: list[list[int]]) -> list[int]:
        """Return the tags of a sum of ciphertexts.

        Args:
            tags: of each ciphertext.
        """
        moduli = [prime for prime in self._primes for _ in range(TAGS)]
        return [sum(column) % q for column, q in zip(zip(*tags, strict=True), moduli, strict=True)]


def text_bytes(ciphertexts: int, parameters: Parameters) -> int:
    """Return the bytes of what `as_text` returns.

    Args:
        ciphertexts: number of ciphertexts of a row.
        parameters: of the encryption.
    """
    return KEY + ciphertexts * TAG_BYTES * TAGS * (len(parameters.moduli) - 1)


def as_text(key: bytes, tags: list[list[int]]) -> bytes:
    """Return the tags of a row of ciphertexts after their key, for a sealed box.

    Args:
        key: key of the tags.
        tags: of each ciphertext.
    """
    return key + b"".join(tag.to_bytes(TAG_BYTES, "big") for row in tags for tag in row)


def from_text(
    data: bytes, ciphertexts: int, parameters: Parameters
) -> tuple[bytes, list[list[int]]]:
    """Return key and tags; inverse of `as_text`.

    Args:
        data: content of a box.
        ciphertexts: number of ciphertexts of a row.
        parameters: of the encryption.

    Raises:
        FrameError: another number of tags.
    """
    if len(data) != text_bytes(ciphertexts, parameters):
        raise FrameError("a client's box has other tags than its ciphertexts need: it is refused")
    numbers = np.frombuffer(data[KEY:], ">u8").reshape(ciphertexts, -1)
    return data[:KEY], numbers.tolist()


def _uniform(key: bytes, number: int, count: int, prime: int) -> NDArray[np.int64]:
    """Return uniform integers modulo a prime, (count,)."""
    bits = prime.bit_length()
    draw_count = count + count // 2
    while True:
        numbers = words(key, number, draw_count) >> np.uint64(64 - bits)
        # Those beyond the prime are left out: the others are uniform.
        below = numbers[numbers < np.uint64(prime)]
        if len(below) >= count:
            return below[:count].astype(np.int64)
        draw_count *= 2


def _limbs(numbers: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the lower 30 bits and the upper ones."""
    return numbers & ((1 << LIMB) - 1), numbers >> LIMB


def _inner_product(
    ours: tuple[NDArray[np.int64], NDArray[np.int64]],
    theirs: tuple[NDArray[np.int64], NDArray[np.int64]],
    prime: int,
) -> int:
    """Return the inner product of two vectors modulo a prime, from their limbs."""
    inner_product = 0
    for i, our_limb in enumerate(ours):
        for j, their_limb in enumerate(theirs):
            products = (our_limb * their_limb).reshape(-1, PRODUCTS).sum(1) % prime
            # as many residues below 2^60 as 64 bits hold, then Python's integers
            partial = sum((products.reshape(-1, PRODUCTS).sum(1) % prime).tolist())
            inner_product += partial << (LIMB * (i + j))
    return inner_product % prime
