"""Pads, their keys, and the primitives that they call, on the vectors of the RFCs."""

from __future__ import annotations

import hashlib
import hmac
import itertools
import sys
from typing import Any

import numpy as np
import pytest
import torch

from securecluster.errors import FrameError, UsageError
from securecluster.privacy.masking import pads
from securecluster.privacy.masking.identities import Identity, Roster
from securecluster.privacy.masking.pads import (
    KeyPair,
    add_pad,
    add_pads,
    byte_source,
    call_key,
    check_public_keys,
    field_key,
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

# RFC 8439, appendix A.1, without the one whose nonce is not zero: key, block, stream
CHACHA20 = [
    (
        "00" * 32,
        0,
        "76b8e0ada0f13d90405d6ae55386bd28bdd219b8a08ded1aa836efcc8b770dc7"
        "da41597c5157488d7724e03fb8d84a376a43b8f41518a11cc387b669b2ee6586",
    ),
    (
        "00" * 32,
        1,
        "9f07e7be5551387a98ba977c732d080dcb0f29a048e3656912c6533e32ee7aed"
        "29b721769ce64e43d57133b074d839d531ed1f28510afb45ace10a1f4b794d6f",
    ),
    (
        "00" * 31 + "01",
        1,
        "3aeb5224ecf849929b9d828db1ced4dd832025e8018b8160b82284f3c949aa5a"
        "8eca00bbb4a73bdad192b5c42f73f2fd4e273644c8b36125a64addeb006c13a0",
    ),
    (
        "00ff" + "00" * 30,
        2,
        "72d54dfbf12ec44b362692df94137f328fea8da73990265ec1bbbea1ae9af0ca"
        "13b25aa26cb4a648cb9b9d1be65b2c0924a66c54d545ec1b7374f4872e99f096",
    ),
]

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
# RFC 5869, appendix A.3: input, no salt and no info, first 32 bytes of OKM
HKDF_WHOLE = ("0b" * 22, "8da4e775a563c18f715f802a063c5a31b8a11f5c5ee1879ec3454e5f3c738d2d")

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


@pytest.mark.parametrize(("secret", "block", "stream"), CHACHA20)
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_pads_agree_with_rfc_8439(secret: str, block: int, stream: str, dtype: torch.dtype) -> None:
    buffer = torch.zeros(3 * 64 // dtype.itemsize, dtype=dtype)
    add_pad(buffer, bytes.fromhex(secret), 1)
    assert sys.byteorder == "little"
    words = buffer.numpy().tobytes()
    assert words[64 * block : 64 * block + 64].hex() == stream
    source = byte_source(bytes.fromhex(secret))
    assert source(10) + source(3 * 64 - 10) == words


@pytest.mark.parametrize(("prk", "info", "okm"), HKDF_EXPAND)
def test_expansion_agrees_with_rfc_5869(prk: str, info: str, okm: str) -> None:
    assert pads.expand(bytes.fromhex(prk), bytes.fromhex(info)).hex() == okm


def test_extraction_agrees_with_rfc_5869() -> None:
    secret, okm = HKDF_WHOLE
    assert pads._extract_and_expand(bytes.fromhex(secret), b"").hex() == okm


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


def test_every_call_attempt_list_and_field_has_a_key_of_its_own() -> None:
    members = members_hash([1, 2, 3])
    assert members == members_hash([3, 1, 2])
    assert members != members_hash([1, 2])
    told = itertools.product((0, 1), (0, 1), (members, members_hash([1, 2])), (b"", b"model"))
    assert len({call_key(key(), *parts) for parts in told}) == 16
    fields = {field_key(key(), name) for name in ("delta", "size", "")}
    assert len(fields) == 3


def test_a_transcript_tells_its_parts_apart() -> None:
    parts: list[tuple[Any, ...]] = [("ab", "c"), ("a", "bc"), ("abc",), ("abc", ""), (1,), (256,)]
    assert len({transcript("label", *own) for own in parts}) == 6


def test_a_pad_that_rows_share_is_the_one_that_each_gets_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(pads, "BLOCK_BYTES", 128)
    draw = torch.Generator().manual_seed(0)
    table = torch.randint(-(2**31), 2**31, (3, 2, 35), dtype=torch.int64, generator=draw)
    start = table.clone()
    shared = [(b"a" * 32, [(0, 1), (2, -1)]), (b"b" * 32, [(1, -1)]), (b"c" * 32, [(2, 1), (1, 1)])]
    pads.add_shared_pads(table, shared)
    for row, own in enumerate(start):
        alone = own.clone()
        add_pads(alone, [(key, sign) for key, places in shared for k, sign in places if k == row])
        assert torch.equal(table[row], alone)
    with pytest.raises(UsageError, match="1 or -1"):
        pads.add_shared_pads(table, [(b"a" * 32, [(0, 2)])])


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("count", [0, 1, 63, 64, 65, 1000])
def test_pads_wrap_cancel_and_do_not_depend_on_blocks(
    dtype: torch.dtype, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    info = torch.iinfo(dtype)
    values = np.random.default_rng(0).integers(info.min, info.max, count, endpoint=True)
    start = torch.from_numpy(values.astype(str(dtype).removeprefix("torch.")))
    streams = [(bytes([k]) * 32, sign) for k, sign in ((1, 1), (2, -1), (3, 1))]
    whole = start.clone()
    add_pads(whole, streams)
    monkeypatch.setattr(pads, "BLOCK_BYTES", 128)
    blocks = start.clone()
    add_pads(blocks, streams)
    assert torch.equal(blocks, whole)
    modulus = 2**info.bits
    expected = [int(x) for x in values]
    for secret, sign in streams:
        stream = byte_source(secret)(count * dtype.itemsize)
        if len(stream) <= 32:
            # RFC 5869, section 2.3, by hand
            about = b"securecluster short pad v1" + b"\x01"
            stream = hmac.new(secret, about, hashlib.sha256).digest()
        for k in range(count):
            word = int.from_bytes(stream[k * dtype.itemsize : (k + 1) * dtype.itemsize], "little")
            expected[k] += sign * word
    assert [x % modulus for x in whole.tolist()] == [x % modulus for x in expected]
    for secret, sign in streams:
        add_pad(whole, secret, -sign)
    assert torch.equal(whole, start)


def test_what_pads_cannot_be_added_to_is_refused() -> None:
    for buffer in (torch.zeros(3), torch.zeros(3, dtype=torch.int16), torch.zeros(2, 2).int().T):
        with pytest.raises(UsageError, match="contiguous int32 or int64"):
            add_pad(buffer, bytes(32), 1)
    with pytest.raises(UsageError, match="sign"):
        add_pad(torch.zeros(3, dtype=torch.int32), bytes(32), 0)


def test_no_secret_is_printed() -> None:
    assert ALICE[:8] not in repr(pair())
    assert ALICE_PUBLIC[:16] in repr(pair())
