"""Envelopes of ciphertexts: sealed to their receiver, signed, and bound to one call of one run.

Homomorphic ciphertexts can be altered at will, and none of it shows when they are decrypted. So
they travel in envelopes alone: AES-256-SIV (RFC 5297) under a key of X25519 (RFC 7748) and
HKDF-SHA256 (RFC 5869) between sender and receiver, and an Ed25519 signature of the sender, where it
has an identity. Key and signature are bound to the context, so an envelope opens in no other run,
call, attempt or purpose, from no other sender, and under no other parameters or public key.

The context also names members and fields. After decryption the count of contributors, unused slots
and all ranges are checked (`packing`).
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

from securecluster.errors import FrameError
from securecluster.privacy.masking.pads import KeyPair, transcript
from securecluster.protections.encryption.parameters import Parameters

# bytes of a row of an envelope in a frame
BLOCK = 256
TAG = 16
SEAL_KEY = 64
LENGTH = 4
# Ciphertexts and keys are padded to a multiple: compression makes their lengths differ by some
# bytes, and frames of one call then still have equal lengths. No multiple is near to the lengths of
# the default parameters.
PADDED_TO = 1152


@dataclass(frozen=True)
class EnvelopeContext:
    """Context that an envelope is bound to.

    Args:
        fingerprint: of the parameters and the public key, 32 bytes.
        run: hash of the run's configuration.
        purpose: client method whose replies are summed.
        call: number of the call.
        attempt: number of the attempt at the sum.
        sender: party that encrypted or added.
        receiver: party that opens the envelope.
        group: clients of the sum, as text.
        layout: fields in the ciphertexts, as text.
    """

    fingerprint: bytes
    run: str
    purpose: str
    call: int
    attempt: int
    sender: str
    receiver: str
    group: str
    layout: str

    def encoded(self) -> bytes:
        """Return an unambiguous encoding."""
        return transcript(
            "securecluster ciphertexts v1",
            self.fingerprint,
            self.run,
            self.purpose,
            self.call,
            self.attempt,
            self.sender,
            self.receiver,
            self.group,
            self.layout,
        )

    def signed(self, envelope: bytes) -> bytes:
        """Return the statement that the sender of an envelope signs.

        Args:
            envelope: the sealed bytes.
        """
        digest = hashlib.sha256(envelope).digest()
        return transcript("securecluster signed ciphertexts v1", self.encoded(), digest)


def padded(data: bytes) -> bytes:
    """Return bytes after their length, with zeros up to a whole number of blocks.

    Args:
        data: a ciphertext or a public key.
    """
    blocks = -(-len(data) // PADDED_TO)
    return len(data).to_bytes(LENGTH, "big") + data.ljust(blocks * PADDED_TO, b"\0")


def unpadded(data: bytes) -> bytes:
    """Return what was padded; inverse of `padded`.

    Args:
        data: bytes that another party has sent.

    Raises:
        FrameError: bytes that `padded` does not return.
    """
    content = data[LENGTH : LENGTH + int.from_bytes(data[:LENGTH], "big")]
    if padded(content) != data:
        raise FrameError("a padded key is malformed: it is refused")
    return content


def seal(
    ciphertexts: Sequence[bytes],
    own_keys: KeyPair,
    receiver_public: bytes,
    context: EnvelopeContext,
) -> bytes:
    """Return ciphertexts in an envelope, padded to whole blocks.

    Args:
        ciphertexts: one or more ciphertexts.
        own_keys: keys of the sender.
        receiver_public: public key of the receiver, 32 bytes.
        context: what the envelope is bound to.
    """
    payload = b"".join(padded(data) for data in ciphertexts)
    # The padding is inside of the seal, so that no bit of an envelope can be flipped unnoticed.
    payload += bytes(-(len(payload) + TAG) % BLOCK)
    return seal_bytes(payload, own_keys, receiver_public, context)


def seal_bytes(
    payload: bytes, own_keys: KeyPair, receiver_public: bytes, context: EnvelopeContext
) -> bytes:
    """Return bytes sealed to their receiver, 16 bytes longer.

    Args:
        payload: bytes.
        own_keys: keys of the sender.
        receiver_public: public key of the receiver, 32 bytes.
        context: what the seal is bound to.
    """
    from cryptography.hazmat.primitives.ciphers.aead import AESSIV

    # The mode needs no nonce: the same envelope is made again where a run is repeated.
    key = _key(own_keys, receiver_public, own_keys.public, receiver_public, context)
    return AESSIV(key).encrypt(payload, [context.encoded()])


def open_envelope(
    envelope: bytes,
    own_keys: KeyPair,
    sender_public: bytes,
    context: EnvelopeContext,
    count: int,
    parameters: Parameters,
) -> list[bytes]:
    """Return the ciphertexts of an envelope.

    Args:
        envelope: bytes that another party has sent.
        own_keys: keys of the receiver.
        sender_public: public key of the sender, 32 bytes.
        context: what the envelope must be bound to.
        count: number of ciphertexts that it must hold.
        parameters: parameters of the scheme.

    Raises:
        FrameError: an envelope of another size or context, or one that was altered.
    """
    largest = count * (parameters.ciphertext_bytes + LENGTH + PADDED_TO) + BLOCK
    if not TAG < len(envelope) <= largest:
        raise FrameError(
            f"an envelope of {len(envelope)} bytes holds no {count} ciphertexts: it is refused"
        )
    return _ciphertexts(open_bytes(envelope, own_keys, sender_public, context), count)


def open_bytes(
    sealed: bytes, own_keys: KeyPair, sender_public: bytes, context: EnvelopeContext
) -> bytes:
    """Return sealed bytes; inverse of `seal_bytes`.

    Args:
        sealed: bytes that another party has sent.
        own_keys: keys of the receiver.
        sender_public: public key of the sender, 32 bytes.
        context: what the seal must be bound to.

    Raises:
        FrameError: another context, or bytes that were altered.
    """
    from cryptography.exceptions import InvalidTag
    from cryptography.hazmat.primitives.ciphers.aead import AESSIV

    key = _key(own_keys, sender_public, sender_public, own_keys.public, context)
    try:
        return AESSIV(key).decrypt(sealed, [context.encoded()])
    # a ValueError is of fewer bytes than a tag
    except (InvalidTag, ValueError):
        raise FrameError(
            f"ciphertexts of {context.sender} were altered, or belong to another key, run, call or "
            "sender: they are refused"
        ) from None


def _ciphertexts(payload: bytes, count: int) -> list[bytes]:
    """Return the ciphertexts in the contents of an envelope."""
    ciphertexts = []
    first = 0
    for _ in range(count):
        length = int.from_bytes(payload[first : first + LENGTH], "big")
        first += LENGTH
        data = payload[first : first + length]
        if not length or len(data) < length:
            raise FrameError("an envelope holds fewer ciphertexts than its call: it is refused")
        ciphertexts.append(data)
        first += -(-length // PADDED_TO) * PADDED_TO
    if not first <= len(payload) < first + BLOCK or any(payload[first:]):
        raise FrameError("an envelope holds more than the ciphertexts of its call: it is refused")
    return ciphertexts


def _key(
    own_keys: KeyPair, peer: bytes, sender: bytes, receiver: bytes, context: EnvelopeContext
) -> bytes:
    """Return the key of one envelope, the same at both ends."""
    from cryptography.hazmat.primitives import hashes
    from cryptography.hazmat.primitives.kdf.hkdf import HKDF

    info = transcript("securecluster envelope v1", sender, receiver, context.encoded())
    derivation = HKDF(algorithm=hashes.SHA256(), length=SEAL_KEY, salt=None, info=info)
    return derivation.derive(own_keys.exchange(peer))
