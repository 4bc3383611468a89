"""Messages of encrypted sums: of clients, of the server, and of the key authority."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

from securecluster.messaging.bounds import Octets, Ring, Upto
from securecluster.messaging.messages import Ack, Picks, Rows, Shared
from securecluster.privacy.masking.identities import SIGNATURE
from securecluster.privacy.masking.pads import KEY
from securecluster.protections.encryption.envelopes import BLOCK
from securecluster.protections.encryption.parameters import MOST_MEMBERS
from securecluster.protections.pair_rows import PairRange, range_of, row_field
from securecluster.protections.sum_ranges import summed_bits
from securecluster.runtime.services import MessageTypes

if TYPE_CHECKING:
    from securecluster.runtime.release_policy import ReleasePolicy

# Lengths that a sender may choose: no more is allocated than it has sent, and the receivers check
# envelopes and keys against the configuration's parameters.
BLOCKS = Upto("blocks", 1 << 24, minimum=1)
PUBLIC_KEY = Upto("public key", 1 << 24, minimum=1)
BOX = Upto("box", 1 << 24, minimum=1)
MEMBERS = Upto("members", MOST_MEMBERS, minimum=1)
NARROW = Upto("narrow numbers", 1 << 30)
WIDE = Upto("wide numbers", 1 << 30)


@dataclass(frozen=True, eq=False)
class EncryptionKey:
    """Server's message to a client: the key authority's public key, and the server's own."""

    scheme: str
    public: Annotated[Shared, Octets((PUBLIC_KEY,))]  # (n,) uint8
    exchange: Annotated[Shared, Octets((KEY,))]  # (32,) uint8, X25519, of the authority
    signature: Annotated[Shared, Octets((SIGNATURE,))]  # (64,) uint8, of the authority
    server: Annotated[Shared, Octets((KEY,))]  # (32,) uint8, X25519


@dataclass(frozen=True, eq=False)
class AuthorityRequest:
    """Server's request for the key authority's public key."""

    scheme: str


@dataclass(frozen=True, eq=False)
class AuthorityKey:
    """Key authority's reply: its public keys."""

    public: Annotated[Rows, Octets((PUBLIC_KEY,))]  # (1, n) uint8
    exchange: Annotated[Rows, Octets((KEY,))]  # (1, 32) uint8, X25519
    signature: Annotated[Rows, Octets((SIGNATURE,))]  # (1, 64) uint8


@dataclass(frozen=True, eq=False)
class EncryptedTotal:
    """Server's request to decrypt the sum of one group, whose members are in the header.

    What binds the sum to its clients is theirs: the server relays it, and can neither read nor make
    it.
    """

    scheme: str
    purpose: str  # the client method whose replies are summed
    layout: str  # fields in the ciphertexts
    survivors: str  # clients whose replies are in the sum, ascending (`format_ids`)
    server: Annotated[Shared, Octets((KEY,))]  # (32,) uint8, X25519
    envelope: Annotated[Picks, Octets((BLOCKS, BLOCK))]  # (k, 256) uint8
    # of each survivor, as it sent them: its key, its box of tags for the authority, its signature
    keys: Annotated[Shared, Octets((MEMBERS, KEY))]  # (m, 32) uint8, X25519
    boxes: Annotated[Shared, Octets((MEMBERS, BOX))]  # (m, n) uint8, AES-256-SIV
    signatures: Annotated[Shared, Octets((MEMBERS, SIGNATURE))]  # (m, 64) uint8, of the boxes


@dataclass(frozen=True, eq=False)
class ReleasedTotal:
    """Key authority's reply: sums of integers, field after field."""

    narrow: Annotated[Rows, Ring((NARROW,), 32)]  # (1, n) int32
    wide: Annotated[Rows, Ring((WIDE,), 64)]  # (1, k) int64


@dataclass(frozen=True, eq=False)
class EncryptedPairTotal:
    """Server's request for what a function tells of R, whose sum the ciphertexts hold."""

    scheme: str
    purpose: str  # the client method whose rows are summed
    then: str  # name of the function of R
    layout: str  # the field in the ciphertexts
    survivors: str  # clients whose rows are in the sum, ascending (`format_ids`)
    server: Annotated[Shared, Octets((KEY,))]  # (32,) uint8, X25519
    envelope: Annotated[Picks, Octets((BLOCKS, BLOCK))]  # (k, 256) uint8
    # of each survivor, as it sent them: its key, its box of tags for the authority, its signature
    keys: Annotated[Shared, Octets((MEMBERS, KEY))]  # (m, 32) uint8, X25519
    boxes: Annotated[Shared, Octets((MEMBERS, BOX))]  # (m, n) uint8, AES-256-SIV
    signatures: Annotated[Shared, Octets((MEMBERS, SIGNATURE))]  # (m, 64) uint8, of the boxes


@dataclass(frozen=True, eq=False)
class ReleasedPairs:
    """Key authority's reply: the survivors' labels, or R_ij for i < j in steps of a grid."""

    numbers: Annotated[Rows, Ring((WIDE,), 64)]  # (1, n) int64


# methods of the service of clients
ENCRYPTION_METHODS: Mapping[str, MessageTypes] = {"encryption_key": (EncryptionKey, Ack)}
# methods of the key authority
AUTHORITY_METHODS: Mapping[str, MessageTypes] = {
    "authority_key": (AuthorityRequest, AuthorityKey),
    "authority_sum": (EncryptedTotal, ReleasedTotal),
    "authority_pairs": (EncryptedPairTotal, ReleasedPairs),
}


@lru_cache(maxsize=256)
def encrypted_class(reply: Any, through: tuple[str, ...]) -> type:
    """Return the class of a reply whose rows are encrypted, all of them in one envelope.

    Args:
        reply: class of the reply.
        through: fields that pass through the pipeline.

    Raises:
        UsageError: a field that no secure sum can hold.
    """
    return _encrypted(reply, summed_bits(reply, through), pairs=False)


@lru_cache(maxsize=64)
def encrypted_pairs_class(reply: Any, bits: int) -> type:
    """Return the class of a reply whose row of pairs is encrypted.

    Args:
        reply: class of the reply.
        bits: 32 or 64.

    Raises:
        UsageError: a reply with other fields than one of rows.
    """
    return _encrypted(reply, {row_field(reply): bits}, pairs=True)


def encrypted_pairs_reply(reply: type, ranges: Mapping[str, PairRange]) -> type:
    """Return the class of a reply whose row of pairs is encrypted, as its field's range says.

    Args:
        reply: class of the reply.
        ranges: range of each field of rows.

    Raises:
        UsageError: a reply that cannot be encrypted, or a field without a range.
    """
    return encrypted_pairs_class(reply, range_of(reply, ranges).bits)


def _encrypted(reply: Any, bits: Mapping[str, int], pairs: bool) -> type:
    """Return the class of an encrypted reply, with the bits of its fields."""
    members: list[tuple[str, Any]] = [
        ("layout", str),
        ("key", Annotated[Rows, Octets((KEY,))]),  # (b, 32) uint8, X25519, of the sender
        ("envelope", Annotated[Picks, Octets((BLOCKS, BLOCK))]),  # (k, 256) uint8
        ("signature", Annotated[Rows, Octets((SIGNATURE,))]),  # (b, 64) uint8
        # tags of the ciphertexts, sealed to the key authority, and a signature of this box
        ("box", Annotated[Rows, Octets((BOX,))]),  # (b, n) uint8
        ("box_signature", Annotated[Rows, Octets((SIGNATURE,))]),  # (b, 64) uint8
    ]
    encrypted = dataclasses.make_dataclass(
        f"Encrypted{reply.__name__}", members, frozen=True, eq=False
    )
    encrypted.__module__ = __name__
    encrypted.__doc__ = f"{reply.__name__} as it leaves its client in an encrypted sum."
    encrypted.__reply__ = reply  # type: ignore[attr-defined]
    encrypted.__bits__ = dict(bits)  # type: ignore[attr-defined]
    encrypted.__hidden_fields__ = tuple(bits)  # type: ignore[attr-defined]
    encrypted.__pairs__ = pairs  # type: ignore[attr-defined]
    # resolved once, so that a class that cannot be sent fails here
    get_type_hints(encrypted)
    return encrypted


def is_encrypted(reply: type) -> bool:
    """Return whether a class of replies is of encrypted ones.

    Args:
        reply: the class.
    """
    return hasattr(reply, "__hidden_fields__")


def is_of_pairs(encrypted: type) -> bool:
    """Return whether a class of encrypted replies is of rows of pairs.

    Args:
        encrypted: class of an encrypted reply.
    """
    return bool(encrypted.__pairs__)  # type: ignore[attr-defined]


def encrypted_bits(encrypted: type) -> dict[str, int]:
    """Return the number of bits of each field of an encrypted reply, by its name.

    Args:
        encrypted: class of an encrypted reply.
    """
    return dict(encrypted.__bits__)  # type: ignore[attr-defined]


def decrypted_class(encrypted: type) -> type:
    """Return the class of the reply that an encrypted class was made from.

    Args:
        encrypted: class of an encrypted reply.
    """
    reply: type = encrypted.__reply__  # type: ignore[attr-defined]
    return reply


class EncryptedReplies:
    """Messages of encrypted sums."""

    methods: Mapping[str, MessageTypes] = {**ENCRYPTION_METHODS, **AUTHORITY_METHODS}

    def reply_class(self, reply: type, release: ReleasePolicy) -> type:
        """Return the class of a reply with encrypted rows.

        Args:
            reply: class of the reply.
            release: declaration of its method.
        """
        return encrypted_class(reply, release.through)


class EncryptedPairReplies:
    """Messages of encrypted pairs.

    Args:
        ranges: range of each field of rows.
    """

    methods = EncryptedReplies.methods

    def __init__(self, ranges: Mapping[str, PairRange]) -> None:
        self._ranges = ranges

    def reply_class(self, reply: type, release: ReleasePolicy) -> type:
        """Return the class of a reply with an encrypted row of pairs.

        Args:
            reply: class of the reply.
            release: declaration of its method.
        """
        return encrypted_pairs_reply(reply, self._ranges)
