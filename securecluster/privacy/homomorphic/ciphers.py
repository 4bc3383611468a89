"""Ciphers over TenSEAL: encryption and addition with a public key, decryption with the secret one.

TenSEAL draws its keys and the randomness of its ciphertexts from the operating system, and takes no
seed. All functions run on one thread: its thread pool is far slower on a machine that is busy.

Flipped bits and wrong keys decrypt to garbage without an error, and empty bytes load: ciphertexts
from elsewhere come here only out of an envelope (`envelopes`).
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from securecluster.errors import FrameError, UsageError
from securecluster.privacy.homomorphic.parameters import BFV, Parameters
from securecluster.privacy.secure_sum.pads import transcript

ONE_THREAD = 1
NOT_SAVED = {
    "save_public_key": False,
    "save_secret_key": False,
    "save_galois_keys": False,
    "save_relin_keys": False,
}
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
            "aggregation secagg, which needs nothing more"
        ) from None
    return module


class PublicCipher:
    """Encryption and addition, which need no secret key.

    Args:
        parameters: parameters of the scheme.
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
            numbers: integers for BFV, numbers of magnitude 1 at most for CKKS; shape (slots,).

        Raises:
            UsageError: another number of numbers.
        """
        if numbers.shape != (self.parameters.slots,):
            raise UsageError(
                f"a ciphertext holds {self.parameters.slots} numbers, not {numbers.shape}"
            )
        module = tenseal()
        if self.parameters.scheme == BFV:
            # TenSEAL takes lists: integers pass as they are, and floats bit for bit.
            vector = module.bfv_vector(self._context, numbers.tolist())
        else:
            vector = module.ckks_vector(self._context, numbers.tolist())
        data: bytes = vector.serialize()
        return data

    def load(self, data: bytes) -> Any:
        """Return a ciphertext as TenSEAL's object, after checks of its size.

        Args:
            data: bytes out of an envelope.

        Raises:
            FrameError: bytes that are no ciphertext of these parameters.
        """
        # TenSEAL parses in C++: only bytes of a plausible size reach it.
        if not 0 < len(data) <= self.parameters.ciphertext_bytes:
            raise FrameError(
                f"a ciphertext has 1 to {self.parameters.ciphertext_bytes} bytes, not {len(data)}: "
                "it is refused"
            )
        module = tenseal()
        load = module.ckks_vector_from
        if self.parameters.scheme == BFV:
            load = module.bfv_vector_from
        try:
            vector = load(self._context, data)
            slots = vector.size()
        # What TenSEAL raises depends on where parsing fails; the sender is told one thing.
        except (ValueError, RuntimeError):
            slots = 0
        if slots != self.parameters.slots:
            raise FrameError("bytes are no ciphertext of this run's parameters: they are refused")
        return vector


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
            FrameError: bytes that are no ciphertext of these parameters, or another number of them.
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
        for ciphertext, vector in zip(self._totals, vectors, strict=True):
            # In place: TenSEAL replaces the content of the object.
            ciphertext += vector

    def serialized(self) -> list[bytes]:
        """Return the ciphertexts of the sum."""
        return [ciphertext.serialize() for ciphertext in self._totals]


class SecretCipher(PublicCipher):
    """Cipher with the secret key, for the key authority alone.

    Args:
        parameters: parameters of the scheme.
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
            parameters: parameters of the scheme.
        """
        context = _new_context(parameters)
        saved = {**NOT_SAVED, "save_public_key": True, "save_secret_key": True}
        return cls(parameters, context.serialize(**saved))

    def decrypt(self, ciphertext: bytes) -> NDArray[Any]:
        """Return the numbers of a ciphertext: int64 of BFV, float64 of CKKS, (slots,).

        Security rule: CKKS numbers carry noise that gives the secret key away (Li and Micciancio
        2021), so they are rounded before anybody else reads them (`packing.unpack`).

        Args:
            ciphertext: a ciphertext under this key; under another one the numbers are garbage.
        """
        numbers = self.load(ciphertext).decrypt()
        if self.parameters.scheme == BFV:
            return np.asarray(numbers, dtype=np.int64)
        return np.asarray(numbers, dtype=np.float64)


def fingerprint(parameters: Parameters, public: bytes) -> bytes:
    """Return SHA-256 of parameters and a public key, 32 bytes.

    Args:
        parameters: parameters of the scheme.
        public: serialized parameters and public key.
    """
    text = transcript(
        "securecluster encryption key v1",
        parameters.scheme,
        parameters.degree,
        " ".join(map(str, parameters.moduli)),
        parameters.plain_modulus,
        parameters.scale_bits,
        public,
    )
    return hashlib.sha256(text).digest()


def _new_context(parameters: Parameters) -> Any:
    """Return a TenSEAL context with new keys."""
    module = tenseal()
    options: dict[str, Any] = {
        "poly_modulus_degree": parameters.degree,
        "coeff_mod_bit_sizes": list(parameters.moduli),
        "n_threads": ONE_THREAD,
    }
    if parameters.scheme == BFV:
        return module.context(
            module.SCHEME_TYPE.BFV,
            plain_modulus=parameters.plain_modulus,
            **options,
        )
    context = module.context(module.SCHEME_TYPE.CKKS, **options)
    context.global_scale = 2.0**parameters.scale_bits
    return context


def _loaded(parameters: Parameters, data: bytes) -> Any:
    """Return a TenSEAL context from its serialized form."""
    try:
        return tenseal().context_from(data, ONE_THREAD)
    except (ValueError, RuntimeError, TypeError):
        raise FrameError(
            f"bytes are no {parameters.scheme} key: they are refused, start a new run"
        ) from None
