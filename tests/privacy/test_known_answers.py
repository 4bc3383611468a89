"""Known answers of others for the primitives: Wycheproof, and RFC 5297 for AES-SIV.

Those of RFC 5869, 7748 and 8032, of AES-CTR and of SHAKE256 are in
`tests/privacy/masking/test_pads.py`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.ciphers import Cipher
from cryptography.hazmat.primitives.ciphers.aead import AESSIV
from cryptography.hazmat.primitives.ciphers.algorithms import AES
from cryptography.hazmat.primitives.ciphers.modes import CTR
from cryptography.hazmat.primitives.cmac import CMAC
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from scipy import stats

from securecluster.errors import FrameError
from securecluster.privacy.dp.exponential_mechanism import choice
from securecluster.privacy.dp.grid_noise import GridNoise
from securecluster.privacy.dp.noise_streams import NoiseStreams
from securecluster.privacy.masking.identities import Roster
from securecluster.privacy.masking.pads import KeyPair
from securecluster.privacy.masking.sealing import Seal
from securecluster.protections.encryption import envelopes

VECTORS: dict[str, Any] = json.loads(Path(__file__).with_name("wycheproof.json").read_text())


def fields(row: Sequence[Any]) -> list[bytes]:
    """Return the hexadecimal fields of a vector as bytes."""
    return [bytes.fromhex(text) for text in row]


@pytest.mark.parametrize("vector", VECTORS["x25519"], ids=lambda vector: f"tc{vector[0]}")
def test_x25519_agrees_with_wycheproof_and_refuses_secrets_that_everyone_knows(
    vector: list[Any],
) -> None:
    public, private, shared = fields(vector[1:])
    if not any(shared):
        with pytest.raises(FrameError, match="not a valid X25519 key"):
            KeyPair(private).exchange(public)
    else:
        assert KeyPair(private).exchange(public) == shared


@pytest.mark.parametrize("vector", VECTORS["ed25519"], ids=lambda vector: f"tc{vector[0]}")
def test_a_roster_accepts_the_signatures_that_wycheproof_does(vector: list[Any]) -> None:
    public, message, signature = fields(vector[1:4])
    roster = Roster({0: public})
    if vector[4] == "valid":
        roster.check(0, message, signature)
    else:
        with pytest.raises(FrameError, match="client 0 did not sign"):
            roster.check(0, message, signature)


# AES-SIV as RFC 5297 prints it, by CMAC and CTR


def doubled(block: bytes) -> bytes:
    """Return dbl(S): a shift to the left, modulo x^128 + x^7 + x^2 + x + 1."""
    number = int.from_bytes(block, "big") << 1
    if number >> 128:
        number = (number & (1 << 128) - 1) ^ 0x87
    return number.to_bytes(16, "big")


def xor(one: bytes, other: bytes) -> bytes:
    return bytes(a ^ b for a, b in zip(one, other, strict=True))


def siv(key: bytes, associated: Sequence[bytes], plain: bytes) -> bytes:
    """Return V and the ciphertext (RFC 5297, sections 2.4 to 2.6)."""
    half = len(key) // 2

    def mac(data: bytes) -> bytes:
        state = CMAC(AES(key[:half]))
        state.update(data)
        return state.finalize()

    block = mac(bytes(16))
    for data in associated:
        block = xor(doubled(block), mac(data))
    if len(plain) >= 16:
        end = plain[:-16] + xor(plain[-16:], block)
    else:
        end = xor(doubled(block), (plain + b"\x80").ljust(16, b"\0"))
    synthetic = mac(end)
    counter = bytearray(synthetic)
    counter[8] &= 0x7F
    counter[12] &= 0x7F
    cipher = Cipher(AES(key[half:]), CTR(bytes(counter))).encryptor()
    return synthetic + cipher.update(plain)


# RFC 5297, appendices A.1 and A.2: key, associated data, plaintext, output
RFC_5297 = [
    (
        "fffefdfcfbfaf9f8f7f6f5f4f3f2f1f0f0f1f2f3f4f5f6f7f8f9fafbfcfdfeff",
        ("101112131415161718191a1b1c1d1e1f2021222324252627",),
        "112233445566778899aabbccddee",
        "85632d07c6e8f37f950acd320a2ecc9340c02b9690c4dc04daef7f6afe5c",
    ),
    (
        "7f7e7d7c7b7a79787776757473727170404142434445464748494a4b4c4d4e4f",
        (
            "00112233445566778899aabbccddeeffdeaddadadeaddadaffeeddccbbaa99887766554433221100",
            "102030405060708090a0",
            "09f911029d74e35bd84156c5635688c0",
        ),
        "7468697320697320736f6d6520706c61696e7465787420746f20656e6372797074207573696e6720534956"
        "2d414553",
        "7bdb6e3b432667eb06f4d14bff2fbd0fcb900f2fddbe404326601965c889bf17dba77ceb094fa663b7a3f7"
        "48ba8af829ea64ad544a272e9c485b62a3fd5c0d",
    ),
]


@pytest.mark.parametrize(("key", "associated", "plain", "output"), RFC_5297)
def test_aes_siv_agrees_with_rfc_5297(
    key: str, associated: Sequence[str], plain: str, output: str
) -> None:
    found = siv(bytes.fromhex(key), fields(associated), bytes.fromhex(plain))
    assert found.hex() == output
    library = AESSIV(bytes.fromhex(key)).encrypt(bytes.fromhex(plain), fields(associated))
    assert library == found


@pytest.mark.parametrize("vector", VECTORS["aes_siv_cmac"], ids=lambda vector: f"tc{vector[0]}")
def test_the_aes_siv_of_all_seals_agrees_with_wycheproof(vector: list[Any]) -> None:
    key, associated, plain, box = fields(vector[1:5])
    cipher = AESSIV(key)
    if vector[5] == "valid":
        assert siv(key, [associated], plain) == box
        assert cipher.decrypt(box, [associated]) == plain
    else:
        with pytest.raises(InvalidTag):
            cipher.decrypt(box, [associated])


def test_both_seals_are_aes_siv_under_a_derived_key() -> None:
    row = torch.arange(5, dtype=torch.float32)
    seal = Seal("run")
    seal.unlock(bytes(range(32)))
    key = HKDF(hashes.SHA512(), 64, salt=None, info=b"securecluster seal v2").derive(
        bytes(range(32))
    )
    (box,) = seal.close(row[None], [7], 3, "train", "delta")
    context = [b"run", b"train", b"delta", b"7", b"3"]
    assert box.numpy().tobytes() == siv(key, context, row.numpy().tobytes())

    own, peer = KeyPair(bytes([1]) * 32), KeyPair(bytes([2]) * 32)
    about = envelopes.EnvelopeContext(
        bytes(32), "run", "contribute", 1, 0, "client/0", "server", "0-1", ""
    )
    envelope = envelopes.seal([b"ciphertext"], own, peer.public, about)
    key = envelopes._key(own, peer.public, own.public, peer.public, about)
    payload = envelopes.padded(b"ciphertext")
    payload += bytes(len(envelope) - 16 - len(payload))
    assert envelope == siv(key, [about.encoded()], payload)


# samplers against exact probabilities


def test_choices_pass_a_chi_square_test_of_the_exponential_mechanism() -> None:
    counts = np.array([40.0, 44.0, 43.0, 30.0, 41.0])
    eta = 0.6
    weights = np.exp(eta * (counts - 44))
    expected = weights / weights.sum()
    draws = NoiseStreams(lambda client: bytes([client]) * 32, "run")
    chosen = [choice(counts, eta, draws, 1, "choose", step) for step in range(20_000)]
    seen = np.bincount(chosen, minlength=5)
    assert stats.chisquare(seen, expected * len(chosen)).pvalue > 1e-4
    # the test can fail: a mechanism that is 5 % less private
    sharper = np.exp(1.05 * eta * (counts - 44))
    wrong = sharper / sharper.sum()
    assert stats.chisquare(seen, wrong * len(chosen)).pvalue < 1e-3


@pytest.mark.parametrize("deviation", [0.6, 2.5, 9.0])
def test_noise_on_the_grid_passes_a_chi_square_test_of_every_likely_integer(
    deviation: float,
) -> None:
    rows = torch.zeros(2, 1 << 18)
    GridNoise([bytes([5]) * 32, bytes([6]) * 32]).add_to(rows, [1.0] * 2, [deviation] * 2)
    drawn = rows.flatten().numpy().astype(int)
    reach = math.ceil(3.5 * deviation)
    bins = np.arange(-reach, reach + 1)
    counts = np.bincount(np.clip(drawn, -reach, reach) + reach, minlength=len(bins))

    def p_value(sigma: float) -> float:
        edges = np.concatenate([[-np.inf], (bins[:-1] + 0.5) / sigma, [np.inf]])
        return float(stats.chisquare(counts, np.diff(stats.norm.cdf(edges)) * len(drawn)).pvalue)

    assert p_value(deviation) > 1e-4
    assert p_value(0.98 * deviation) < 1e-6
