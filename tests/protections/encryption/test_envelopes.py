"""Envelopes of ciphertexts open at their receiver, in their context, unaltered, or not at all."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from securecluster.errors import FrameError
from securecluster.privacy.masking.identities import Identity, Roster
from securecluster.privacy.masking.pads import KeyPair
from securecluster.protections.encryption.envelopes import (
    BLOCK,
    EnvelopeContext,
    open_envelope,
    padded,
    seal,
    unpadded,
)
from securecluster.protections.encryption.parameters import Parameters

PARAMETERS = Parameters()
CLIENT, SERVER = KeyPair(b"c" * 32), KeyPair(b"s" * 32)
CONTEXT = EnvelopeContext(
    b"f" * 32, "run", "contribute", 3, 0, "client/1", "server", "0-5", "delta:32:9"
)
CIPHERTEXTS = [b"first", b"second" * 200]


def sealed() -> bytes:
    return seal(CIPHERTEXTS, CLIENT, SERVER.public, CONTEXT)


def opened(data: bytes, context: EnvelopeContext = CONTEXT, count: int = 2, **keys: Any) -> Any:
    own, sender = keys.get("own", SERVER), keys.get("sender", CLIENT.public)
    return open_envelope(data, own, sender, context, count, PARAMETERS)


def test_what_was_sealed_is_opened_and_lengths_do_not_tell_of_the_ciphertexts() -> None:
    assert opened(sealed()) == CIPHERTEXTS
    assert len(sealed()) % BLOCK == 0
    other = seal([b"other", b"second" * 201], CLIENT, SERVER.public, CONTEXT)
    assert len(other) == len(sealed())
    assert b"second" not in sealed()


# in place of each field of the context
OTHERS = (b"g" * 32, "other", "hand_over", 4, 1, "client/2", "authority", "0-4", "delta:32:8")


@pytest.mark.parametrize("place", range(len(dataclasses.fields(EnvelopeContext))))
def test_an_envelope_opens_in_its_own_context_alone(place: int) -> None:
    """Another key's fingerprint, a replay in another call, another sender's name, …"""
    name = dataclasses.fields(EnvelopeContext)[place].name
    other = dataclasses.replace(CONTEXT, **{name: OTHERS[place]})
    with pytest.raises(FrameError, match="belong to another key, run, call or sender"):
        opened(sealed(), other)


def test_every_flipped_bit_is_refused() -> None:
    data = sealed()
    for position in range(0, len(data), 7):
        altered = bytearray(data)
        altered[position] ^= 1 << position % 8
        with pytest.raises(FrameError, match="altered"):
            opened(bytes(altered))


@pytest.mark.parametrize("data", [b"", b"x" * 10, bytes(1 << 20)])
def test_other_lengths_are_refused_before_anything_is_computed(data: bytes) -> None:
    with pytest.raises(FrameError, match=r"holds no 2 ciphertexts"):
        opened(data)


def test_other_keys_and_other_numbers_of_ciphertexts_are_refused() -> None:
    stranger = KeyPair(b"x" * 32)
    for keys in ({"own": stranger}, {"sender": stranger.public}):
        with pytest.raises(FrameError, match="belong to another key"):
            opened(sealed(), **keys)
    with pytest.raises(FrameError, match="not a valid X25519 key"):
        opened(sealed(), sender=bytes(32))
    for count in (1, 3):
        with pytest.raises(FrameError, match=r"holds (more|fewer)"):
            opened(sealed(), count=count)
    with pytest.raises(FrameError, match="holds fewer"):
        opened(seal([b"", b"x"], CLIENT, SERVER.public, CONTEXT))


def test_a_signature_is_of_one_envelope_in_one_context() -> None:
    identity = Identity(b"i" * 32)
    roster, data = Roster({1: identity.public}), sealed()
    signature = identity.sign(CONTEXT.signed(data))
    roster.check(1, CONTEXT.signed(data), signature)
    replayed = dataclasses.replace(CONTEXT, call=4)
    for statement in (replayed.signed(data), CONTEXT.signed(data[:-1] + b"x")):
        with pytest.raises(FrameError, match="did not sign"):
            roster.check(1, statement, signature)


def test_padding_is_taken_off_and_nothing_else_passes() -> None:
    for data in (b"", b"a", b"a" * 1152, b"a" * 1153):
        assert unpadded(padded(data)) == data
        assert len(padded(data)) % 1152 == 4
    for other in (b"", padded(b"a") + b"\0", padded(b"a")[:-1], padded(b"a")[:-1] + b"b"):
        with pytest.raises(FrameError, match="malformed"):
            unpadded(other)
