"""Messages of encrypted pairs: of clients, of the server, and of the key authority."""

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
from securecluster.runtime.services import MessageTypes

if TYPE_CHECKING:
    from securecluster.runtime.release_policy import ReleasePolicy

# Lengths that a sender may choose: no more is allocated than it has sent, and the receivers check
# envelopes and keys against the configuration's parameters.
BLOCKS = Upto("blocks", 1 << 24, minimum=1)
PUBLIC_KEY = Upto("public key", 1 << 24, minimum=1)
BOX = Upto("box", 1 << 24, minimum=1)
MEMBERS = Upto("members", MOST_MEMBERS, minimum=1)
NUMBERS = Upto("wide numbers", 1 << 30)


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
class EncryptedPairTotal:
    """Server's request for what a function tells of R, whose sum the ciphertexts hold.

    The members are in the header. What binds the sum to its clients is theirs: the server relays
    it, and can neither read nor make it.
    """

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

    numbers: Annotated[Rows, Ring((NUMBERS,), 64)]  # (1, n) int64


# methods of the service of clients
ENCRYPTION_METHODS: Mapping[str, MessageTypes] = {"encryption_key": (EncryptionKey, Ack)}
# methods of the key authority
AUTHORITY_METHODS: Mapping[str, MessageTypes] = {
    "authority_key": (AuthorityRequest, AuthorityKey),
    "authority_pairs": (EncryptedPairTotal, ReleasedPairs),
}


@lru_cache(maxsize=64)
def encrypted_pairs_class(reply: Any, bits: int) -> type:
    """Return the class of a reply whose row of pairs is encrypted.

    Args:
        reply: class of the reply.
        bits: 32 or 64.

    Raises:
        UsageError: a reply with other fields than one of rows.
    """
    field = row_field(reply)
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
    encrypted.__doc__ = f"{reply.__name__} as it leaves its client in encrypted pairs."
    encrypted.__bits__ = {field: bits}  # type: ignore[attr-defined]
    encrypted.__hidden_fields__ = (field,)  # type: ignore[attr-defined]
    # resolved once, so that a class that cannot be sent fails here
    get_type_hints(encrypted)
    return encrypted


def encrypted_pairs_reply(reply: type, ranges: Mapping[str, PairRange]) -> type:
    """Return the class of a reply whose row of pairs is encrypted, as its field's range says.

    Args:
        reply: class of the reply.
        ranges: range of each field of rows.

    Raises:
        UsageError: a reply that cannot be encrypted, or a field without a range.
    """
    return encrypted_pairs_class(reply, range_of(reply, ranges).bits)


def is_encrypted(reply: type) -> bool:
    """Return whether a class of replies is of encrypted ones.

    Args:
        reply: the class.
    """
    return hasattr(reply, "__hidden_fields__")


def encrypted_bits(encrypted: type) -> dict[str, int]:
    """Return the number of bits of each field of an encrypted reply, by its name.

    Args:
        encrypted: class of an encrypted reply.
    """
    return dict(encrypted.__bits__)  # type: ignore[attr-defined]


class EncryptedPairReplies:
    """Messages of encrypted pairs.

    Args:
        ranges: range of each field of rows.
    """

    methods: Mapping[str, MessageTypes] = {**ENCRYPTION_METHODS, **AUTHORITY_METHODS}

    def __init__(self, ranges: Mapping[str, PairRange]) -> None:
        self._ranges = ranges

    def reply_class(self, reply: type, release: ReleasePolicy) -> type:
        """Return the class of a reply with an encrypted row of pairs.

        Args:
            reply: class of the reply.
            release: declaration of its method.
        """
        return encrypted_pairs_reply(reply, self._ranges)
