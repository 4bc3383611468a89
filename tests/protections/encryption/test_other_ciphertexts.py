"""Ciphertexts that were damaged, and well-formed ones of another form: refused by one named error,
and no sum is changed by what is refused.
"""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from securecluster.attacks.ckks_release import length_delimited
from securecluster.errors import FrameError, SecureClusterError
from securecluster.protections.encryption.ciphers import (
    CiphertextSum,
    PublicCipher,
    SecretCipher,
    tenseal,
)
from securecluster.protections.encryption.packing import FieldShape, Layout, pack, unpack
from securecluster.protections.encryption.parameters import Parameters

LAYOUT = Layout((FieldShape("delta", 32, (2000,)),))
LARGEST = {"delta": 1 << 20}
# parameters with a level below that of fresh ciphertexts
THREE_MODULI = Parameters(16384, (47, 47, 47, 47, 48), scale_bits=81)
OTHER = "no ciphertext of this run's parameters, scale and level"
DAMAGES = ("flip head", "flip", "flip tail", "cut", "zeros", "twice", "random")


@pytest.fixture(scope="module")
def cipher() -> SecretCipher:
    return SecretCipher.generate(Parameters())


def ciphertext(cipher: PublicCipher) -> bytes:
    integers = np.arange(2000) - 1000
    (slots,) = pack({"delta": integers}, LAYOUT, LARGEST, cipher.parameters)
    return cipher.encrypt(slots)


def vector(cipher: PublicCipher, size: int, *scale: float) -> bytes:
    """A vector that a client makes with the public key as it likes."""
    data: bytes = tenseal().ckks_vector(cipher._context, [1] * size, *scale).serialize()
    return data


def by_seal(cipher: PublicCipher, method: str, folder: Path) -> bytes:
    """A fresh ciphertext after a step of SEAL's evaluator, in TenSEAL's bytes."""
    import tenseal.sealapi as seal

    fresh = cipher.load(cipher.encrypt(np.zeros(cipher.parameters.slots)))
    part = fresh.ciphertext()[0]
    evaluator = seal.Evaluator(cipher._context.seal_context().data)
    getattr(evaluator, method)(part)
    path = folder / method
    part.save(str(path))
    data = path.read_bytes()
    sizes = length_delimited(fresh.serialize())[1]
    message = b"\x0a" + varint(len(sizes)) + sizes + b"\x12" + varint(len(data)) + data
    return message + b"\x19" + struct.pack("<d", 2.0**cipher.parameters.scale_bits)


def varint(number: int) -> bytes:
    """A number as protocol buffers write it."""
    digits = []
    while number >= 128:
        digits.append(number % 128 + 128)
        number //= 128
    return bytes([*digits, number])


def assert_refused(cipher: SecretCipher, data: bytes, words: str) -> None:
    """The sum refuses a row with `data` in second place and is as before, and so does the key."""
    total = CiphertextSum(cipher)
    own = ciphertext(cipher)
    total.add([own, own])
    before = total.serialized()
    with pytest.raises(FrameError, match=words):
        total.add([own, data])
    assert total.serialized() == before
    with pytest.raises(FrameError, match=words):
        CiphertextSum(cipher).add([data])
    with pytest.raises(FrameError, match=words):
        cipher.decrypt(data)


@pytest.mark.parametrize("bits", [5, 20, 79, 81])
def test_another_scale_is_refused(bits: int) -> None:
    cipher = SecretCipher.generate(Parameters())
    assert_refused(cipher, vector(cipher, cipher.parameters.slots, 2.0**bits), OTHER)


@pytest.mark.parametrize("size", [1, 100])
def test_fewer_slots_are_refused(cipher: SecretCipher, size: int) -> None:
    assert_refused(cipher, vector(cipher, size), OTHER)


def test_other_parameters_are_refused(cipher: SecretCipher) -> None:
    data = vector(SecretCipher.generate(THREE_MODULI), THREE_MODULI.slots)
    assert_refused(cipher, data, f"{OTHER}|has 1 to")
    module = tenseal()
    context = module.context(
        module.SCHEME_TYPE.BFV, poly_modulus_degree=4096, plain_modulus=1032193
    )
    assert_refused(cipher, module.bfv_vector(context, [1]).serialize(), f"{OTHER}|has 1 to")


def test_another_level_and_a_third_polynomial_are_refused(tmp_path: Path) -> None:
    cipher = SecretCipher.generate(THREE_MODULI)
    message = by_seal(cipher, "mod_switch_to_next_inplace", tmp_path)
    with pytest.raises(FrameError, match=OTHER):
        cipher.load(message)
    with pytest.raises(FrameError, match=f"{OTHER}|has 1 to"):
        cipher.load(by_seal(cipher, "square_inplace", tmp_path))
    # what TenSEAL writes itself passes in the same bytes, so it is the form that is refused
    kept = by_seal(cipher, "negate_inplace", tmp_path)
    assert cipher.load(kept).size() == cipher.parameters.slots


def test_no_ciphertext_and_two_in_one_are_refused(cipher: SecretCipher) -> None:
    own = ciphertext(cipher)
    sizes = length_delimited(own)[1]
    assert_refused(cipher, b"\x0a" + varint(len(sizes)) + sizes, OTHER)
    assert_refused(cipher, own + own, f"has 1 to {cipher.parameters.ciphertext_bytes} bytes")


def test_a_row_that_cancels_the_sum_is_refused_and_leaves_it() -> None:
    """SEAL refuses a sum that anybody can read, in the middle of a row of several ciphertexts."""
    cipher = SecretCipher.generate(Parameters())
    own = ciphertext(cipher)
    negated = cipher.load(own).neg_().serialize()
    total = CiphertextSum(cipher)
    total.add([own, own])
    before = total.serialized()
    with pytest.raises(FrameError, match="cancel those of other clients"):
        total.add([own, negated])
    assert total.serialized() == before
    total.add([own, own])
    for data in total.serialized():
        sums = unpack([cipher.decrypt(data)], LAYOUT, LARGEST, cipher.parameters, 2)
        assert np.array_equal(sums["delta"], 2 * np.arange(-1000, 1000))


def damaged(data: bytes, how: str, draw: np.random.Generator) -> bytes:
    changed = bytearray(data)
    first, last = {"flip head": (0, 160), "flip tail": (-40, 0)}.get(how, (0, len(data)))
    if how.startswith("flip"):
        changed[draw.integers(first, last)] ^= 1 << draw.integers(8)
    elif how == "cut":
        del changed[draw.integers(1, len(data)) :]
    elif how == "zeros":
        start = draw.integers(len(data))
        changed[start : start + 64] = bytes(len(changed[start : start + 64]))
    elif how == "twice":
        changed += changed[: draw.integers(1, 300)]
    else:
        changed[:] = draw.bytes(int(draw.integers(1, len(data))))
    return bytes(changed)


@pytest.mark.parametrize("how", DAMAGES)
def test_damaged_ciphertexts_are_refused_or_a_sum_that_is_checked(
    how: str, cipher: SecretCipher
) -> None:
    """Content cannot be told from damage without the envelope, and no error has another name."""
    own = ciphertext(cipher)
    draw = np.random.default_rng(DAMAGES.index(how))
    refused = 0
    for _ in range(40):
        data = damaged(own, how, draw)
        total = CiphertextSum(cipher)
        total.add([own])
        try:
            total.add([data])
            numbers: Any = cipher.decrypt(total.serialized()[0])
            sums = unpack([numbers], LAYOUT, LARGEST, cipher.parameters, 2)
        except SecureClusterError:
            refused += 1
        else:
            assert np.abs(sums["delta"]).max() <= 2 * LARGEST["delta"]
    assert refused >= 20
