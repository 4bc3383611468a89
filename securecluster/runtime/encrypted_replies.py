"""Messages of encrypted sums: of clients, of the server, and of the key authority."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Annotated, Any, get_type_hints

from securecluster.messaging.bounds import Octets, Ring, Upto
from securecluster.messaging.messages import Ack, Picks, Rows, Shared
from securecluster.privacy.homomorphic.envelopes import BLOCK
from securecluster.privacy.masking.identities import SIGNATURE
from securecluster.privacy.secure_sum.pads import KEY
from securecluster.runtime.masked_replies import bits_of, masked_class, summed_class
from securecluster.runtime.services import MessageTypes

# Lengths that a sender may choose: no more is allocated than it has sent, and the receivers check
# envelopes and keys against the configuration's parameters.
BLOCKS = Upto("blocks", 1 << 24, minimum=1)
PUBLIC_KEY = Upto("public key", 1 << 24, minimum=1)
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
    """Server's request to decrypt the sum of one group, whose members are in the header."""

    scheme: str
    purpose: str  # the client method whose replies are summed
    layout: str  # fields in the ciphertexts
    survivors: str  # clients whose replies are in the sum, ascending (`format_ids`)
    server: Annotated[Shared, Octets((KEY,))]  # (32,) uint8, X25519
    envelope: Annotated[Picks, Octets((BLOCKS, BLOCK))]  # (k, 256) uint8


@dataclass(frozen=True, eq=False)
class ReleasedTotal:
    """Key authority's reply: sums of integers, field after field."""

    narrow: Annotated[Rows, Ring((NARROW,), 32)]  # (1, n) int32
    wide: Annotated[Rows, Ring((WIDE,), 64)]  # (1, k) int64


# methods of the service of clients
ENCRYPTION_METHODS: Mapping[str, MessageTypes] = {"encryption_key": (EncryptionKey, Ack)}
# methods of the key authority
AUTHORITY_METHODS: Mapping[str, MessageTypes] = {
    "authority_key": (AuthorityRequest, AuthorityKey),
    "authority_sum": (EncryptedTotal, ReleasedTotal),
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
    masked = masked_class(reply, through)  # the same rules hold for its fields
    members: list[tuple[str, Any]] = [
        ("layout", str),
        ("key", Annotated[Rows, Octets((KEY,))]),  # (b, 32) uint8, X25519, of the sender
        ("envelope", Annotated[Picks, Octets((BLOCKS, BLOCK))]),
        ("signature", Annotated[Rows, Octets((SIGNATURE,))]),
    ]
    encrypted = dataclasses.make_dataclass(
        f"Encrypted{reply.__name__}", members, frozen=True, eq=False
    )
    encrypted.__module__ = __name__
    encrypted.__doc__ = f"{reply.__name__} as it leaves its client in an encrypted sum."
    encrypted.__masked__ = masked  # type: ignore[attr-defined]
    get_type_hints(encrypted)
    return encrypted


def encrypted_bits(encrypted: type) -> dict[str, int]:
    """Return the number of bits of each field of an encrypted reply, by its name.

    Args:
        encrypted: class that `encrypted_class` returned.
    """
    return bits_of(encrypted.__masked__)  # type: ignore[attr-defined]


def decrypted_class(encrypted: type) -> type:
    """Return the class of the reply that an encrypted class was made from.

    Args:
        encrypted: class that `encrypted_class` returned.
    """
    return summed_class(encrypted.__masked__)  # type: ignore[attr-defined]
