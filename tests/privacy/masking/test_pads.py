"""Pads, their keys, and the primitives that they call, on the vectors of the RFCs."""

from __future__ import annotations

import hashlib
import itertools
import sys
from typing import Any

import numpy as np
import pytest
import torch
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes

from securecluster.errors import FrameError, UsageError
from securecluster.privacy.masking import pads
from securecluster.privacy.masking.identities import Identity, Roster
from securecluster.privacy.masking.pads import (
    KeyPair,
    add_pads,
    check_public_keys,
    members_hash,
    point,
    transcript,
)

ALICE = "77076d0a7318a57d3c16c17251b26645df4c2f87ebc0992ab177fba51db92c2a"
ALICE_PUBLIC = "8520f0098930a754748b7ddcb43ef75a0dbf3a0d26381af4eba4a98eaa9b4e6a"
BOB = "5dab087e624a8a4b79e17f8b83800ee66f3bb1292618b6fd1c2f8b27ff88e0eb"
BOB_PUBLIC = "de9edb7d7b7dc1b4d35b61c2ece435373f8343c85b78674dadfc7e146f882b4f"
SHARED = "4a5d9d5ba4ce2de1728e3bf480350f25e07e21c947d19e3376f09b3c1e161742"

THIRD_PUBLIC = "e5210f12786811d3f4b7959d0538ae2c31dbe7106fc03c3efc4cd549c715a493"
# RFC 7748, section 5.2: X25519 of nine and nine, applied to its results
ONCE = "422c8e7a6227d7bca1350b3e2bb7279f7897b87bb6854b783c60e80311ae3079"
THOUSAND_TIMES = "684cf59ba83309552800ef566f2f4d3c1c3887c49360e3875f2eb94d99532c51"

# AES-256 of 0, 1 and 2 under a key of zeros (McGrew and Viega 2005, "The Galois/Counter Mode of
# Operation", test cases 13 and 14: the hash key, the tag and the ciphertext of zeros)
AES_256 = (
    "dc95c078a2408989ad48a21492842087",
    "530f8afbc74536b9a963b4f1c4cb738b",
    "cea7403d4d606b6e074ec5d3baf39d18",
)
# FIPS 202, SHAKE256 of the empty message
SHAKE_256 = "46b9dd2b0ba88d13233b3feb743eeb243fcd52ea62b81b82b50c27646ed5762f"

# RFC 5869, appendix A.1 to A.3: PRK, info, first 32 bytes of OKM
HKDF_EXPAND = [
    (
        "077709362c2e32df0ddc3f0dc47bba6390b6c73bb50f9c3122ec844ad7c2b3e5",
        "f0f1f2f3f4f5f6f7f8f9",
        "3cb25f25faacd57a90434f64d0362f2a2d2d0a90cf1a5a4c5db02d56ecc4c5bf",
    ),
    (
        "06a6b88c5853361a06104c9ceb35b45cef760014904671014a193f40c15fc244",
        bytes(range(0xB0, 0x100)).hex(),
        "b11e398dc80327a1c8e7f78c596a49344f012eda2d4efad8a050cc4c19afa97c",
    ),
    (
        "19ef24a32c717b167f33a91d6f648bdf96596776afdb6377ac434c1c293ccb04",
        "",
        "8da4e775a563c18f715f802a063c5a31b8a11f5c5ee1879ec3454e5f3c738d2d",
    ),
]
# RFC 8032, section 7.1, tests 1 to 3: private key, public key, message, signature
ED25519 = [
    (
        "9d61b19deffd5a60ba844af492ec2cc44449c5697b326919703bac031cae7f60",
        "d75a980182b10ab7d54bfed3c964073a0ee172f3daa62325af021a68f707511a",
        "",
        "e5564300c360ac729086e2cc806e828a84877f1eb8e5d974d873e06522490155"
        "5fb8821590a33bacc61e39701cf9b46bd25bf5f0595bbe24655141438e7a100b",
    ),
    (
        "4ccd089b28ff96da9db6c346ec114e0f5b8a319f35aba624da8cf6ed4fb8a6fb",
        "3d4017c3e843895a92b70aa74d1b7ebc9c982ccf2ec4968cc0cd55f12af4660c",
        "72",
        "92a009a9f0d4cab8720e820b5f642540a2b27b5416503f8fb3762223ebdb69da"
        "085ac1e43e15996e458f3613d0f11d8c387b2eaeb4302aeeb00d291612bb0c00",
    ),
    (
        "c5aa8df43f9f837bedb7442f31dcb7b166d38535076f094b85ce3a2e0b4458f7",
        "fc51cd8e6218a1a38da47ed00230f0580816ed13ba3303ac5deb911548908025",
        "af82",
        "6291d657deec24024827e69c3abe01a30ce548a284743a445e3680d7db5ac3ac"
        "18ff9b538d16f290ae67f760984dc6594a7c15e9716ed28dc027beceea1ec40a",
    ),
]

# u-coordinates of points of low order, also in encodings that are not reduced modulo the prime
PRIME = 2**255 - 19
ORDER_EIGHT = (
    "e0eb7a7c3b41b8ae1656e3faf19fc46ada098deb9c32b1fd866205165f49b800",
    "5f9c95bca3508c24b1d0b1559c83ef5b04445cc4581c8e86d8224eddd09f1157",
)
LOW_ORDER = [
    *(number.to_bytes(32, "little") for number in (0, 1, PRIME - 1, PRIME, PRIME + 1)),
    *map(bytes.fromhex, ORDER_EIGHT),
]


def pair(own: str = ALICE) -> KeyPair:
    return KeyPair(bytes.fromhex(own))


def key(
    own: int = 3,
    peer: int = 5,
    peer_public: str = BOB_PUBLIC,
    run: bytes = b"run",
    purpose: str = "pads",
) -> bytes:
    return pair().pair_key(own, peer, bytes.fromhex(peer_public), run, purpose)


def test_a_thousand_steps_of_x25519_agree_with_rfc_7748() -> None:
    scalar = point = (9).to_bytes(32, "little")
    seen = []
    for _ in range(1000):
        result = KeyPair(scalar).exchange(point)
        point = scalar
        scalar = result
        seen.append(result.hex())
    assert seen[0] == ONCE
    assert seen[-1] == THOUSAND_TIMES


def test_diffie_hellman_agrees_with_rfc_7748() -> None:
    assert pair(ALICE).public.hex() == ALICE_PUBLIC
    assert pair(BOB).public.hex() == BOB_PUBLIC
    assert pair(ALICE).exchange(bytes.fromhex(BOB_PUBLIC)).hex() == SHARED
    assert pair(BOB).exchange(bytes.fromhex(ALICE_PUBLIC)).hex() == SHARED


def test_streams_and_derived_keys_agree_with_published_vectors() -> None:
    assert pads._stream(bytes(32)).update(bytes(48)).hex() == "".join(AES_256)
    assert pads.derived(b"", b"").hex() == SHAKE_256
    assert pads.derived(b"k" * 32, b"a" * 32, 7) == pads.derived(b"k" * 32, b"a" * 32)[:7]


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("size", [8, 1024, 1032, 200_000])
def test_pads_are_the_streams_of_their_fields_keys(dtype: torch.dtype, size: int) -> None:
    """By `hashlib` and a cipher of `cryptography`, put together by hand."""
    label = "securecluster short pad v2" if size <= 1024 else "securecluster pad stream v2"
    text = label.encode() + (5).to_bytes(8, "big") + b"delta"
    derived = hashlib.shake_256(b"k" * 32 + hashlib.sha256(text).digest())
    if size <= 1024:
        expected = derived.digest(size)
    else:
        cipher = Cipher(algorithms.AES(derived.digest(32)), modes.CTR(bytes(16)))
        expected = cipher.encryptor().update(bytes(size))
    buffer = torch.zeros(size // dtype.itemsize, dtype=dtype)
    add_pads(buffer, [(b"k" * 32, 1)], "delta")
    assert sys.byteorder == "little"
    assert buffer.numpy().tobytes() == expected


@pytest.mark.parametrize(("prk", "info", "okm"), HKDF_EXPAND)
def test_expansion_agrees_with_rfc_5869(prk: str, info: str, okm: str) -> None:
    assert pads.expand(bytes.fromhex(prk), bytes.fromhex(info)).hex() == okm


def test_a_pairs_key_is_one_step_of_sp_800_56c_with_both_ends() -> None:
    """The counter, the shared secret, and what the key is for (section 4.1, option 1)."""
    about = transcript(
        "securecluster sum pair v1", b"run", "pads", 3, pair().public, 5, bytes.fromhex(BOB_PUBLIC)
    )
    text = (1).to_bytes(4, "big") + bytes.fromhex(SHARED) + about
    assert key() == hashlib.sha256(text).digest()


@pytest.mark.parametrize(("private", "public", "message", "signature"), ED25519)
def test_signatures_agree_with_rfc_8032(
    private: str, public: str, message: str, signature: str
) -> None:
    identity = Identity(bytes.fromhex(private))
    assert identity.public.hex() == public
    assert identity.sign(bytes.fromhex(message)).hex() == signature
    roster = Roster({0: bytes.fromhex(public)})
    roster.check(0, bytes.fromhex(message), bytes.fromhex(signature))
    with pytest.raises(FrameError):
        roster.check(0, bytes.fromhex(message) + b"!", bytes.fromhex(signature))


def test_both_ends_have_the_same_key_and_every_part_of_the_transcript_changes_it() -> None:
    other_end = pair(BOB).pair_key(5, 3, bytes.fromhex(ALICE_PUBLIC), b"run", "pads")
    assert key() == other_end
    others = [
        key(run=b"another run"), key(purpose="shares"), key(peer=6), key(own=4),
        key(own=5, peer=3), key(peer_public=THIRD_PUBLIC),
    ]  # fmt: skip
    assert len({key(), *others}) == 1 + len(others)


@pytest.mark.parametrize("public", LOW_ORDER)
@pytest.mark.parametrize("high_bit", [0, 128])
def test_keys_of_low_order_are_refused(public: bytes, high_bit: int) -> None:
    sent = public[:-1] + bytes([public[-1] | high_bit])
    with pytest.raises(FrameError, match="must be left out"):
        pair().pair_key(0, 1, sent, b"run", "pads")


def test_own_and_malformed_keys_are_refused() -> None:
    own = pair().public
    other_encoding = own[:-1] + bytes([own[-1] | 128])
    for public in (own, other_encoding):
        with pytest.raises(FrameError, match="itself"):
            pair().pair_key(0, 1, public, b"run", "pads")
    with pytest.raises(FrameError, match="itself"):
        pair().pair_key(1, 1, bytes.fromhex(BOB_PUBLIC), b"run", "pads")
    with pytest.raises(FrameError, match="31"):
        pair().pair_key(0, 1, own[:31], b"run", "pads")
    with pytest.raises(UsageError, match="31"):
        KeyPair(own[:31])


def test_duplicate_keys_are_refused_in_every_encoding() -> None:
    own, bob = pair().public, bytes.fromhex(BOB_PUBLIC)
    third = bytes.fromhex(THIRD_PUBLIC)
    check_public_keys({0: own, 1: bob, 2: third}, 0, own)
    check_public_keys({1: bob, 2: third}, 0, own)
    high_bit = bob[:-1] + bytes([bob[-1] | 128])
    for forged in (
        {1: bob, 2: bob},
        {1: bob, 2: high_bit},
        {1: own},
        {0: bob, 1: third},
        {1: (3).to_bytes(32, "little"), 2: (PRIME + 3).to_bytes(32, "little")},
    ):
        with pytest.raises(FrameError):
            check_public_keys(forged, 0, own)
    checked = {point(bob): 1, point(third): 2}
    check_public_keys({}, 0, own, checked)
    check_public_keys({0: own, 1: bob}, 0, own, {**checked, point(own): 0})
    for forged, known in (
        ({3: bob}, checked),
        ({3: high_bit}, checked),
        ({}, {**checked, point(own): 3}),
        ({0: bob}, {point(third): 2}),
    ):
        with pytest.raises(FrameError):
            check_public_keys(forged, 0, own, known)


def test_members_have_one_hash_in_every_order_and_fields_have_pads_of_their_own() -> None:
    members = members_hash([1, 2, 3])
    assert members == members_hash([3, 1, 2])
    assert members != members_hash([1, 2])
    made = set()
    for count, field in itertools.product((4, 400), ("delta", "size", "")):
        buffer = torch.zeros(count, dtype=torch.int64)
        add_pads(buffer, [(bytes(32), 1)], field)
        made.add(tuple(buffer[:4].tolist()))
    assert len(made) == 6


def test_a_transcript_tells_its_parts_apart() -> None:
    parts: list[tuple[Any, ...]] = [("ab", "c"), ("a", "bc"), ("abc",), ("abc", ""), (1,), (256,)]
    assert len({transcript("label", *own) for own in parts}) == 6


def test_a_pad_that_rows_share_is_the_one_that_each_gets_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(pads, "BLOCK_BYTES", 128)
    draw = torch.Generator().manual_seed(0)
    monkeypatch.setattr(pads, "GATHERED_BYTES", 500)
    draw = torch.Generator().manual_seed(0)
    keys = [b"a" * 32, b"b" * 32, b"c" * 32]
    places = [
        pads.Places([2, 0], np.array([[0, 2], [0, 1]]), np.array([[-1, 1], [1, 1]])),
        pads.Places([1], np.array([[1, 2, 0]]), np.array([[-1, 1, -1]])),
    ]
    for width in (3, 35, 350):
        table = torch.randint(-(2**31), 2**31, (3, 2, width), dtype=torch.int64, generator=draw)
        start = table.clone()
        pads.add_shared_pads(table, keys, places, "delta")
        for own in places:
            for row, chosen, signs in zip(own.rows, own.pads, own.signs, strict=True):
                alone = start[row].clone()
                signed = [(keys[k], int(s)) for k, s in zip(chosen, signs, strict=True)]
                add_pads(alone, signed, "delta")
                assert torch.equal(table[row], alone)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("count", [0, 1, 63, 64, 65, 1000])
def test_pads_wrap_cancel_and_do_not_depend_on_blocks(
    dtype: torch.dtype, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    info = torch.iinfo(dtype)
    values = np.random.default_rng(0).integers(info.min, info.max, count, endpoint=True)
    start = torch.from_numpy(values.astype(str(dtype).removeprefix("torch.")))
    signed = [(bytes([k]) * 32, sign) for k, sign in ((1, 1), (2, -1), (3, 1))]
    whole = start.clone()
    add_pads(whole, signed, "delta")
    monkeypatch.setattr(pads, "BLOCK_BYTES", 128)
    blocks = start.clone()
    add_pads(blocks, signed, "delta")
    assert torch.equal(blocks, whole)
    modulus = 2**info.bits
    expected = [int(x) for x in values]
    for secret, sign in signed:
        alone = torch.zeros(count, dtype=dtype)
        add_pads(alone, [(secret, 1)], "delta")
        expected = [x + sign * pad for x, pad in zip(expected, alone.tolist(), strict=True)]
    assert [x % modulus for x in whole.tolist()] == [x % modulus for x in expected]
    for secret, sign in signed:
        add_pads(whole, [(secret, -sign)], "delta")
    assert torch.equal(whole, start)


def test_what_pads_cannot_be_added_to_is_refused() -> None:
    for buffer in (torch.zeros(3), torch.zeros(3, dtype=torch.int16), torch.zeros(2, 2).int().T):
        with pytest.raises(UsageError, match="contiguous int32 or int64"):
            add_pads(buffer, [(bytes(32), 1)], "delta")
    with pytest.raises(UsageError, match="sign"):
        add_pads(torch.zeros(3, dtype=torch.int32), [(bytes(32), 0)], "delta")


def test_no_secret_is_printed() -> None:
    assert ALICE[:8] not in repr(pair())
    assert ALICE_PUBLIC[:16] in repr(pair())
