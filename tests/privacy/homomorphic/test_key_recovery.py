"""A full-precision CKKS decryption gives the secret key away (Li and Micciancio 2021), and sums as
they are released do not.

A decryption is m' = c0 + c1·s exactly, noise included. TenSEAL returns the real parts of the slots,
so it tells p = m' + conj(m') with conj: X → 1/X, and two decryptions give two linear equations for
each pair of s(ω), s(1/ω).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from securecluster.privacy.homomorphic.ciphers import CiphertextSum, SecretCipher
from securecluster.privacy.homomorphic.packing import GRID_BITS, FieldShape, Layout, pack, unpack
from securecluster.privacy.homomorphic.parameters import CKKS, default_parameters

PARAMETERS = default_parameters(CKKS)
N, SLOTS = PARAMETERS.degree, PARAMETERS.slots
LAYOUT = Layout((FieldShape("delta", 32, (SLOTS - 1,)),))
LARGEST = {"delta": (1 << 31) // 8}
MEMBERS = 3


def protobuf(data: bytes) -> dict[int, bytes]:
    """The length-delimited fields of a message of protocol buffers, by number."""
    fields = {}
    position = 0

    def varint() -> int:
        nonlocal position
        value = shift = 0
        while True:
            byte = data[position]
            position += 1
            value |= (byte & 127) << shift
            shift += 7
            if byte < 128:
                return value

    while position < len(data):
        tag = varint()
        if tag & 7 == 2:
            length = varint()
            fields[tag >> 3] = data[position : position + length]
            position += length
        elif tag & 7 == 1:
            position += 8
        else:
            varint()
    return fields


class Seal:
    """Microsoft SEAL's own objects, which TenSEAL's bytes are loaded into."""

    def __init__(self, folder: Path) -> None:
        import tenseal.sealapi as seal

        self._seal, self._folder = seal, folder
        parameters = seal.EncryptionParameters(seal.SCHEME_TYPE.CKKS)
        parameters.set_poly_modulus_degree(N)
        moduli = seal.CoeffModulus.Create(N, list(PARAMETERS.moduli))
        parameters.set_coeff_modulus(moduli)
        self.context = seal.SEALContext(parameters, True, seal.SEC_LEVEL_TYPE.TC128)
        self.encoder = seal.CKKSEncoder(self.context)
        self.q = moduli[0].value()

    def load(self, kind: str, data: bytes) -> Any:
        loaded, path = getattr(self._seal, kind)(), self._folder / kind
        path.write_bytes(data)
        loaded.load(self.context, str(path))
        return loaded

    def ciphertext(self, data: bytes) -> NDArray[Any]:
        """c0 and c1 at the roots ω of X^N + 1, (2, N)."""
        loaded = self.load("Ciphertext", protobuf(data)[2])
        return np.array([int(loaded[k]) for k in range(2 * N)], object).reshape(2, N)

    def secret(self, cipher: SecretCipher) -> NDArray[Any]:
        """The secret key s at the roots, (N,)."""
        private = protobuf(cipher.secret)[3]
        key = self.load("SecretKey", protobuf(private)[1])  # its data live as long as it does
        return np.array([int(key.data()[k]) for k in range(N)], object)

    def encoded(self, numbers: NDArray[np.float64]) -> NDArray[Any]:
        """The polynomial of real numbers, at the roots, (N,)."""
        plain = self._seal.Plaintext()
        self.encoder.encode(numbers.tolist(), 2.0**PARAMETERS.scale_bits, plain)
        return np.array([int(plain[k]) for k in range(N)], object)


def recovered(
    seal: Seal, ciphertexts: list[bytes], numbers: list[NDArray[np.float64]]
) -> NDArray[Any]:
    """The secret key that follows from two ciphertexts and what was released of them."""
    q, mirror = seal.q, slice(None, None, -1)  # root 1/ω of root i is root N - 1 - i
    rows = []
    for data, released in zip(ciphertexts, numbers, strict=True):
        c0, c1 = seal.ciphertext(data)
        known = (seal.encoded(2 * released) - c0 - c0[mirror]) % q
        rows.append((c1, c1[mirror], known))
    (a, b, e), (c, d, f) = rows
    determinant = (a * d - b * c) % q
    inverse = np.array([pow(int(x), -1, q) for x in determinant], object)
    return (d * e - b * f) * inverse % q


@pytest.fixture(scope="module")
def sums() -> tuple[SecretCipher, list[bytes], list[dict[str, NDArray[Any]]]]:
    """Two sums of ciphertexts, and their true values."""
    cipher = SecretCipher.generate(PARAMETERS)
    draw = np.random.default_rng(0)
    ciphertexts, truths = [], []
    for _ in range(2):
        total = CiphertextSum(cipher)
        rows = draw.integers(-LARGEST["delta"], LARGEST["delta"], (MEMBERS, SLOTS - 1))
        for row in rows:
            (slots,) = pack({"delta": row}, LAYOUT, LARGEST, PARAMETERS)
            total.add([cipher.encrypt(slots)])
        ciphertexts += total.serialized()
        truths.append({"delta": rows.sum(0)})
    return cipher, ciphertexts, truths


def as_released(sums: dict[str, NDArray[Any]]) -> NDArray[np.float64]:
    """The slots as a reader of a released sum knows them: the count and unused ones exactly."""
    (slots,) = pack(sums, LAYOUT, LARGEST, PARAMETERS)
    slots[0] = MEMBERS
    return slots


def test_two_full_precision_decryptions_give_the_secret_key(sums: Any, tmp_path: Path) -> None:
    cipher, ciphertexts, _ = sums
    seal = Seal(tmp_path)
    found = recovered(seal, ciphertexts, [cipher.decrypt(data) for data in ciphertexts])
    assert np.array_equal(found, seal.secret(cipher))


def test_sums_as_they_are_released_do_not(sums: Any, tmp_path: Path) -> None:
    cipher, ciphertexts, truths = sums
    seal = Seal(tmp_path)
    released = []
    for data, truth in zip(ciphertexts, truths, strict=True):
        slots = cipher.decrypt(data)
        total = unpack([slots], LAYOUT, LARGEST, PARAMETERS, MEMBERS)
        off = np.abs(as_released(total) - as_released(truth)).max()
        assert off < 2.0**-20  # half a step of the grid, and noise
        released.append(as_released(total))
        steps = released[-1] * 2.0**GRID_BITS
        assert np.abs(steps - np.rint(steps)).max() < 0.01  # nothing between two steps
    found = recovered(seal, ciphertexts, released)
    assert np.mean(found == seal.secret(cipher)) < 0.01
    # one bit beyond a float's 53 would do no more harm than the noise: it is its digits that tell
    nearly = [np.round(cipher.decrypt(data), 9) for data in ciphertexts]
    assert np.mean(recovered(seal, ciphertexts, nearly) == seal.secret(cipher)) < 0.01
