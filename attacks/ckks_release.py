"""Recovery of the CKKS secret key from two decryptions in full precision.

A decryption is m' = c0 + c1·s exactly, noise included (Li and Micciancio 2021). TenSEAL returns the
real parts of the slots, which reveals p = m' + conj(m') with conj: X → 1/X. Two decryptions then
give two linear equations for each pair s(ω), s(1/ω) at the roots ω of X^N + 1. In a run clients
encrypt integers, and the key authority releases their exact sums. These follow from what clients
encrypted alone, so the equations lack the noise and have no more to say than the ciphertexts.

A run's frames never hold full decryptions. The attack therefore generates keys and sums of its own,
and reads the sums as they are released, but for the flooding noise that a run's authority adds
before it rounds: its parameters are smaller than a run's and leave no room for it (`Textbook`), and
in return a decryption in double precision holds all of the ciphertexts' noise.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from securecluster.attacks.arrays import Array
from securecluster.attacks.base import (
    ENCRYPTION,
    Attack,
    Guess,
    Harm,
    Knowledge,
    Scorer,
    Truth,
    View,
)
from securecluster.protections.encryption.ciphers import CiphertextSum, SecretCipher
from securecluster.protections.encryption.packing import FieldShape, Layout, pack, unpack
from securecluster.protections.encryption.parameters import CKKS, Parameters


class Textbook(Parameters):
    """Parameters of CKKS without room for flooding noise, which no run has."""

    def _check_precision(self) -> None:
        """Accept any scale."""


PARAMETERS = Textbook(4096, (53, 53), scale_bits=40)
DEGREE = PARAMETERS.degree
LAYOUT = Layout((FieldShape("delta", 32, (PARAMETERS.slots - 1,)),))
MEMBERS = 3  # clients in a sum
LARGEST = {"delta": 1 << PARAMETERS.grid_bits(MEMBERS)}
SUMS = 2
# wire types of protocol buffers
FIXED_64 = 1
LENGTH_DELIMITED = 2
MIRROR = slice(None, None, -1)  # root 1/ω of root i is root N - 1 - i


@dataclass(frozen=True)
class Sums:
    """Sums of ciphertexts under one key.

    Args:
        cipher: with the secret key.
        ciphertexts: one for each sum.
        truths: the true sums of integers, by field.
    """

    cipher: SecretCipher
    ciphertexts: list[bytes]
    truths: list[dict[str, Array]]


def new_sums(seed: int = 0) -> Sums:
    """Return two sums of a few clients' random rows, under a new key.

    Args:
        seed: of the rows.
    """
    cipher = SecretCipher.generate(PARAMETERS)
    draw = np.random.default_rng(seed)
    ciphertexts: list[bytes] = []
    truths: list[dict[str, Array]] = []
    for _ in range(SUMS):
        ciphertext_sum = CiphertextSum(cipher)
        shape = (MEMBERS, PARAMETERS.slots - 1)
        rows = draw.integers(-LARGEST["delta"], LARGEST["delta"], shape)
        for row in rows:
            (slots,) = pack({"delta": row}, LAYOUT, LARGEST, PARAMETERS)
            ciphertext_sum.add([cipher.encrypt(slots)])
        ciphertexts += ciphertext_sum.serialized()
        truths.append({"delta": rows.sum(0)})
    return Sums(cipher, ciphertexts, truths)


def as_released(sums: dict[str, Array]) -> Array:
    """Return the slots as a reader of a released sum knows them: count and unused ones exactly.

    Args:
        sums: integers by field.
    """
    (slots,) = pack(sums, LAYOUT, LARGEST, PARAMETERS)
    # slot 0 holds the number of clients, which a release tells exactly
    slots[0] = MEMBERS
    released: Array = slots
    return released


def exact_release(cipher: SecretCipher, ciphertext: bytes) -> Array:
    """Return the slots of a sum as a run's key authority releases it.

    Args:
        cipher: with the secret key.
        ciphertext: the sum.
    """
    slots = cipher.decrypt(ciphertext)
    return as_released(unpack([slots], LAYOUT, LARGEST, PARAMETERS, MEMBERS))


class SealReader:
    """Microsoft SEAL's own objects, which TenSEAL's bytes are loaded into.

    Args:
        folder: for temporary files, since SEAL loads from files only.
    """

    def __init__(self, folder: Path) -> None:
        import tenseal.sealapi as seal

        self._seal = seal
        self._folder = folder
        parameters = seal.EncryptionParameters(seal.SCHEME_TYPE.CKKS)
        parameters.set_poly_modulus_degree(DEGREE)
        moduli = seal.CoeffModulus.Create(DEGREE, list(PARAMETERS.moduli))
        parameters.set_coeff_modulus(moduli)
        self._context = seal.SEALContext(parameters, True, seal.SEC_LEVEL_TYPE.TC128)
        self._encoder = seal.CKKSEncoder(self._context)
        self.modulus: int = moduli[0].value()

    def ciphertext(self, data: bytes) -> Array:
        """Return c0 and c1 at the roots ω of X^N + 1, (2, N).

        Args:
            data: TenSEAL's bytes of a ciphertext.
        """
        loaded = self._load("Ciphertext", length_delimited(data)[2])
        # Python integers, since products modulo q exceed 64 bits
        numbers = [int(loaded[k]) for k in range(2 * DEGREE)]
        return np.array(numbers, object).reshape(2, DEGREE)

    def secret(self, cipher: SecretCipher) -> Array:
        """Return the secret key s at the roots, (N,).

        Args:
            cipher: with the secret key.
        """
        private = length_delimited(cipher.secret)[3]
        # `key` owns the memory that data() points to, so it must stay referenced
        key = self._load("SecretKey", length_delimited(private)[1])
        return np.array([int(key.data()[k]) for k in range(DEGREE)], object)

    def encoded(self, numbers: Array) -> Array:
        """Return the polynomial of real numbers, at the roots, (N,).

        Args:
            numbers: slots.
        """
        plain = self._seal.Plaintext()
        self._encoder.encode(numbers.tolist(), 2.0**PARAMETERS.scale_bits, plain)
        return np.array([int(plain[k]) for k in range(DEGREE)], object)

    def _load(self, type_name: str, data: bytes) -> Any:
        """Return an object of SEAL from its bytes."""
        path = self._folder / type_name
        path.write_bytes(data)
        loaded = getattr(self._seal, type_name)()
        loaded.load(self._context, str(path))
        return loaded


def recovered_key(
    seal: SealReader, ciphertexts: Sequence[bytes], released: Sequence[Array]
) -> Array:
    """Return the secret key at the roots that follows from two released sums, (N,).

    Args:
        seal: reader of TenSEAL's bytes.
        ciphertexts: two ciphertexts under one key.
        released: what was released of each, slots.
    """
    q = seal.modulus
    rows = []
    for data, numbers in zip(ciphertexts, released, strict=True):
        c0, c1 = seal.ciphertext(data)
        # p = 2·Re(m'), so c1·s + conj(c1·s) = p − c0 − conj(c0)
        right_side = (seal.encoded(2 * numbers) - c0 - c0[MIRROR]) % q
        rows.append((c1, c1[MIRROR], right_side))
    # Cramer's rule, at each root, for  a·s(ω) + b·s(1/ω) = e  and  c·s(ω) + d·s(1/ω) = f  mod q.
    (a, b, e), (c, d, f) = rows
    determinant = (a * d - b * c) % q
    inverse = np.array([pow(int(x), -1, q) for x in determinant], object)
    key: Array = (d * e - b * f) * inverse % q
    return key


def length_delimited(data: bytes) -> dict[int, bytes]:
    """Return the length-delimited fields of a message of protocol buffers, by number.

    Args:
        data: the message.
    """
    fields = {}
    position = 0

    def varint() -> int:
        # seven bits a byte, the lowest first; the top bit says that another byte follows
        nonlocal position
        value = 0
        shift = 0
        while True:
            byte = data[position]
            position += 1
            value |= (byte & 127) << shift
            shift += 7
            if byte < 128:
                return value

    while position < len(data):
        # a tag is the field's number, shifted by three bits, and the wire type
        tag = varint()
        if tag & 7 == LENGTH_DELIMITED:
            length = varint()
            fields[tag >> 3] = data[position : position + length]
            position += length
        elif tag & 7 == FIXED_64:
            position += 8
        else:
            varint()
    return fields


class KeyCoefficients(Scorer):
    """Share of the secret key's coefficients that are right.

    The keys are the attack's own, so the truth about them is in the details of its guess.
    """

    metric = "share of the key's coefficients recovered"

    def units(self, guess: Guess, truth: Truth) -> Array:
        """Return 1 for each coefficient that is right, (N,).

        Args:
            guess: coefficients by number.
            truth: of the run, unused.
        """
        keys = np.array(guess.listed, object)
        right: Array = (keys == guess.details["secret"]).astype(float)
        return right

    def shuffled(self, guess: Guess, truth: Truth, draw: np.random.Generator) -> Array:
        """Return the same against the key's coefficients in another order.

        Args:
            guess: coefficients by number.
            truth: of the run, unused.
            draw: of the order.
        """
        keys = np.array(guess.listed, object)
        right: Array = (keys == draw.permutation(guess.details["secret"])).astype(float)
        return right


class CkksRelease(Attack):
    """The secret key of CKKS, from two released sums.

    Args:
        exact: False for sums as TenSEAL decrypts them, which no run releases.
    """

    name = "ckks-release"
    learns = "the secret key that opens every client's ciphertext, from released sums"
    harm = Harm.MESSAGES
    source = "Li and Micciancio 2021, On the Security of Homomorphic Encryption"
    needs = "two released sums of ciphertexts, and the ciphertexts"
    scorer = KeyCoefficients()
    hidden_by = (ENCRYPTION,)
    of_mechanism = True

    def __init__(self, exact: bool = True) -> None:
        self._exact = exact

    def applies(self, view: View, knowledge: Knowledge) -> str | None:
        """Return why the attack is not applicable; None if it is.

        Args:
            view: what the adversary observed.
            knowledge: what it knows besides.
        """
        if knowledge.config.get("relevance") != CKKS:
            return "not applicable: no pairs are encrypted with CKKS"
        if not any(party.kind == "server" for party in view.parties):
            return "not applicable: ciphertexts and sums are read by the server alone"
        return None

    def run(self, view: View, knowledge: Knowledge) -> Guess:
        """Return the key that follows from two sums; the true one is in the details.

        Args:
            view: what the adversary observed.
            knowledge: what it knows besides.
        """
        sums = new_sums()
        released = []
        for ciphertext in sums.ciphertexts:
            if self._exact:
                released.append(exact_release(sums.cipher, ciphertext))
            else:
                released.append(sums.cipher.decrypt(ciphertext))
        with tempfile.TemporaryDirectory() as folder:
            seal = SealReader(Path(folder))
            key = recovered_key(seal, sums.ciphertexts, released)
            secret = seal.secret(sums.cipher)
        return Guess("secret key", dict(enumerate(key)), {"secret": secret})
