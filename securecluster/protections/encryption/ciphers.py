"""Ciphers over TenSEAL: encryption and addition with a public key, decryption with the secret one.

TenSEAL draws its keys and the randomness of its ciphertexts from the operating system, and takes no
seed. All functions run on one thread: its thread pool is far slower on a machine that is busy.

Flipped bits and wrong keys decrypt to garbage without an error, and empty bytes load: ciphertexts
from elsewhere come here only out of an envelope (`envelopes`).

So keys and ciphertexts differ between runs of one seed; sums of integers do not. A row that is
refused has changed nothing of a sum of several ciphertexts.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from securecluster.errors import FrameError, UsageError
from securecluster.privacy.masking.keystream import gaussians
from securecluster.privacy.masking.pads import KEY, transcript
from securecluster.protections.encryption.parameters import CKKS, Parameters

ONE_THREAD = 1
NOT_SAVED = {
    "save_public_key": False,
    "save_secret_key": False,
    "save_galois_keys": False,
    "save_relin_keys": False,
}
# polynomials of a ciphertext that was never multiplied
POLYNOMIALS = 2
# bytes of a public key beside its two polynomials
KEY_OVERHEAD = 4096


def tenseal() -> Any:
    """Return the module TenSEAL, which is imported when it is needed first.

    Raises:
        UsageError: it is not installed.
    """
    try:
        import tenseal as module
    except ImportError:
        raise UsageError(
            "encryption needs the package tenseal: install it (pip install tenseal), or take "
            "relevance pads, which needs nothing more"
        ) from None
    return module


class PublicCipher:
    """Encryption and addition, which need no secret key.

    Args:
        parameters: of the encryption.
        public: serialized parameters and public key.

    Attributes:
        fingerprint: SHA-256 of the parameters and the public key, 32 bytes.

    Raises:
        FrameError: not a public key of these parameters, or more than that.
    """

    def __init__(self, parameters: Parameters, public: bytes) -> None:
        # Sizes first: nothing is allocated for bytes that cannot be a key.
        largest = 2 * parameters.degree * 8 * len(parameters.moduli) + KEY_OVERHEAD
        if not 0 < len(public) <= largest:
            raise FrameError(
                f"a public key of the encryption has 1 to {largest} bytes, not {len(public)}: it "
                "is refused"
            )
        self.parameters = parameters
        self.public = public
        self._context = _loaded(parameters, public)
        # After the sizes and before any use: a key that does more than sums is refused.
        self._check_key(public)
        self.fingerprint = fingerprint(parameters, public)

    def _check_key(self, public: bytes) -> None:
        """Raise FrameError for a key of other parameters, and for other keys than the public one.

        Keys for rotations and products let a server compute more than sums, and a secret key that
        is sent protects nothing.
        """
        context = self._context
        only_public = context.has_public_key() and not context.is_private()
        if not only_public or context.has_galois_keys() or context.has_relin_keys():
            raise FrameError("sums need the public key alone, and other keys came: refused")
        # Compared as TenSEAL writes them, since it offers no way to read all of them.
        expected = _new_context(self.parameters).serialize(**NOT_SAVED)
        if context.serialize(**NOT_SAVED) != expected:
            raise FrameError(
                "a public key has other parameters than the configuration: it is refused"
            )
        # One encoding for each key, so that equal keys have equal fingerprints.
        if context.serialize(**{**NOT_SAVED, "save_public_key": True}) != public:
            raise FrameError("a public key is not in its canonical form: it is refused")

    def encrypt(self, numbers: NDArray[Any]) -> bytes:
        """Return a ciphertext of as many numbers as it has slots.

        Args:
            numbers: of magnitude 1 at most, (slots,).

        Raises:
            UsageError: another number of numbers.
        """
        if numbers.shape != (self.parameters.slots,):
            raise UsageError(
                f"a ciphertext holds {self.parameters.slots} numbers, not {numbers.shape}"
            )
        # TenSEAL takes lists: floats pass bit for bit.
        data: bytes = tenseal().ckks_vector(self._context, numbers.tolist()).serialize()
        return data

    def load(self, data: bytes) -> Any:
        """Return a ciphertext as TenSEAL's object, after checks of its form.

        Security rule: whoever has the public key can make well-formed ciphertexts of another scale
        or form. They cannot be added, or give sums that mean nothing.

        Args:
            data: bytes out of an envelope.

        Raises:
            FrameError: bytes that are no ciphertext as `encrypt` returns it.
        """
        # TenSEAL parses in C++: only bytes of a plausible size reach it.
        if not 0 < len(data) <= self.parameters.ciphertext_bytes:
            raise FrameError(
                f"a ciphertext has 1 to {self.parameters.ciphertext_bytes} bytes, not {len(data)}: "
                "it is refused"
            )
        try:
            vector = tenseal().ckks_vector_from(self._context, data)
            form = _form(vector)
        # What TenSEAL raises depends on where parsing fails; the sender is told one thing.
        except (ValueError, RuntimeError):
            form = ()
        if form != self._fresh_form():
            raise FrameError(
                "bytes are no ciphertext of this run's parameters, scale and level: they are "
                "refused"
            )
        return vector

    def coefficients(self, data: bytes) -> NDArray[np.int64]:
        """Return the coefficients of a ciphertext, by prime of its modulus: (primes, 2·degree).

        Sums of ciphertexts have the sums of their coefficients, modulo each prime.

        Args:
            data: a ciphertext.

        Raises:
            FrameError: bytes that are no ciphertext as `encrypt` returns it.
        """
        (ciphertext,) = self.load(data).ciphertext()
        primes = len(self.parameters.moduli) - 1
        count = POLYNOMIALS * primes * self.parameters.degree
        # TenSEAL offers one coefficient at a time; all of them are below 2^60.
        numbers = np.fromiter(map(ciphertext.__getitem__, range(count)), np.int64, count)
        table = numbers.reshape(POLYNOMIALS, primes, self.parameters.degree)
        return np.concatenate(list(table), axis=1)

    def _fresh_form(self) -> tuple[Any, ...]:
        """Return the form of ciphertexts that clients encrypt, and of their sums."""
        parameters = self.parameters
        # SEAL names levels by hashes: the first one is that of fresh ciphertexts.
        level = self._context.seal_context().data.first_parms_id()
        scale = 2.0**parameters.scale_bits
        at_roots = True  # polynomials are kept as values at roots, and not as coefficients
        return parameters.slots, 1, POLYNOMIALS, level, scale, at_roots


class CiphertextSum:
    """Sum of rows of ciphertexts, which is formed as they come, without a secret key.

    Args:
        cipher: the public key that all of them are under.
    """

    def __init__(self, cipher: PublicCipher) -> None:
        self._cipher = cipher
        self._totals: list[Any] = []

    def add(self, ciphertexts: Sequence[bytes]) -> None:
        """Add a client's ciphertexts.

        Args:
            ciphertexts: as many for every client.

        Raises:
            FrameError: bytes that are no ciphertext of these parameters, or another number of them;
                the sum is then as it was.
        """
        vectors = [self._cipher.load(data) for data in ciphertexts]
        if not self._totals:
            # The first row is the sum so far: no ciphertext of zeros is needed.
            self._totals = vectors
            return
        if len(vectors) != len(self._totals):
            raise FrameError(
                f"{len(vectors)} ciphertexts cannot be added to {len(self._totals)}: all clients "
                "of a sum send as many"
            )
        try:
            for vector, running_sum in zip(vectors, self._totals, strict=True):
                # The new row becomes the sum, and not the other way round: where a later ciphertext
                # is refused, no earlier one has been changed.
                vector.add_(running_sum)
        # SEAL refuses a sum whose second polynomial is zero, which needs no key to be read.
        except (ValueError, RuntimeError):
            raise FrameError(
                "they cancel those of other clients, and their sum would hide nothing"
            ) from None
        self._totals = vectors

    def serialized(self) -> list[bytes]:
        """Return the ciphertexts of the sum."""
        return [ciphertext.serialize() for ciphertext in self._totals]


class SecretCipher(PublicCipher):
    """Cipher with the secret key, for the key authority alone.

    Args:
        parameters: of the encryption.
        secret: serialized parameters and both keys, as `secret` returned.
    """

    def __init__(self, parameters: Parameters, secret: bytes) -> None:
        context = _loaded(parameters, secret)
        self.secret = secret
        super().__init__(parameters, context.serialize(**{**NOT_SAVED, "save_public_key": True}))
        # Without this, decryption would fail in the middle of a run.
        if not context.is_private():
            raise FrameError("the key authority's file has no secret key: start a new run")
        self._context = context

    def __repr__(self) -> str:
        # the fingerprint of the public key: no secret may be printed
        return f"SecretCipher({self.fingerprint.hex()[:16]}…)"

    @classmethod
    def generate(cls, parameters: Parameters) -> SecretCipher:
        """Return a cipher with new keys from the operating system's generator.

        Args:
            parameters: of the encryption.
        """
        context = _new_context(parameters)
        saved = {**NOT_SAVED, "save_public_key": True, "save_secret_key": True}
        return cls(parameters, context.serialize(**saved))

    def decrypt(self, ciphertext: bytes) -> NDArray[Any]:
        """Return the numbers of a ciphertext in float64, (slots,).

        Security rule: the numbers carry noise that gives the secret key away (Li and Micciancio
        2021), so nobody else reads them, but the integers that they stand for (`packing.unpack`).

        Args:
            ciphertext: a ciphertext under this key; under another one the numbers are garbage.

        Raises:
            FrameError: bytes that are no ciphertext of these parameters.
        """
        return self._decrypted(self.load(ciphertext))

    def flooded(self, ciphertext: bytes, members: int) -> NDArray[Any]:
        """Return the numbers of a sum as `decrypt` does, with flooding noise.

        What is computed of them, also whether they are refused, tells next to nothing of the noise
        of the ciphertexts (`Parameters.flooding`). The Gaussians come from the operating system.
        They are added to the ciphertext itself, which is exact, before anything is rounded.

        Args:
            ciphertext: sum of ciphertexts under this key.
            members: number of clients that the sum was planned for.

        Raises:
            FrameError: bytes that are no ciphertext of these parameters.
        """
        vector = self.load(ciphertext)
        noise = gaussians(os.urandom(KEY), 0, self.parameters.slots)
        vector += (self.parameters.flooding(members) * noise).tolist()
        return self._decrypted(vector)

    def _decrypted(self, vector: Any) -> NDArray[Any]:
        """Return the numbers of a loaded ciphertext."""
        try:
            numbers = vector.decrypt()
        except (ValueError, RuntimeError):
            raise FrameError("a ciphertext cannot be decrypted: it is refused") from None
        return np.asarray(numbers, dtype=np.float64)


@lru_cache(maxsize=8)
def data_primes(parameters: Parameters) -> tuple[int, ...]:
    """Return the primes of the modulus of ciphertexts.

    Args:
        parameters: of the encryption.
    """
    from tenseal import sealapi

    # those that SEAL chooses for numbers of bits, the last one of keys alone
    primes = sealapi.CoeffModulus.Create(parameters.degree, list(parameters.moduli))
    return tuple(prime.value() for prime in primes[:-1])


def fingerprint(parameters: Parameters, public: bytes) -> bytes:
    """Return SHA-256 of parameters and a public key, 32 bytes.

    Args:
        parameters: of the encryption.
        public: serialized parameters and public key.
    """
    text = transcript(
        "securecluster encryption key v1",
        CKKS,
        parameters.degree,
        " ".join(map(str, parameters.moduli)),
        0,  # a plain modulus, which other schemes have
        parameters.scale_bits,
        public,
    )
    return hashlib.sha256(text).digest()


def _form(vector: Any) -> tuple[Any, ...]:
    """Return slots, ciphertexts, and each one's polynomials, level, scale and representation."""
    ciphertexts = vector.ciphertext()
    forms = []
    for ciphertext in ciphertexts:
        forms += [
            ciphertext.size(),
            ciphertext.parms_id(),
            ciphertext.scale,
            ciphertext.is_ntt_form(),
        ]
    return (vector.size(), len(ciphertexts), *forms)


def _new_context(parameters: Parameters) -> Any:
    """Return a TenSEAL context with new keys."""
    module = tenseal()
    options: dict[str, Any] = {
        "poly_modulus_degree": parameters.degree,
        "coeff_mod_bit_sizes": list(parameters.moduli),
        "n_threads": ONE_THREAD,
    }
    context = module.context(module.SCHEME_TYPE.CKKS, **options)
    context.global_scale = 2.0**parameters.scale_bits
    return context


def _loaded(parameters: Parameters, data: bytes) -> Any:
    """Return a TenSEAL context from its serialized form."""
    try:
        return tenseal().context_from(data, ONE_THREAD)
    except (ValueError, RuntimeError, TypeError):
        raise FrameError(
            "bytes are no key of the encryption: they are refused, start a new run"
        ) from None
