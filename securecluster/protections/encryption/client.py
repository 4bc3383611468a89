"""The clients' half of encryption: a service of the endpoint, and the encryption of rows.

`encryption_key` brings a client the key authority's public keys, once a run. The replies to the
protocol's own calls then leave as ciphertexts, in an envelope for the server, which adds them, and
with a box for the authority, which decrypts no sum but that of the ciphertexts in the envelopes:
the box has their tags (`securecluster.protections.encryption.tags`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from securecluster.core.lazy_torch import torch
from securecluster.errors import FrameError, PolicyError
from securecluster.messaging.messages import Ack, Call, Picks, Rows
from securecluster.messaging.octets import as_bytes, as_table
from securecluster.privacy.masking.identities import AUTHORITY_NUMBER, SIGNATURE
from securecluster.privacy.masking.pads import KEY, KeyPair, transcript
from securecluster.protections.encryption.ciphers import PublicCipher, fingerprint
from securecluster.protections.encryption.envelopes import (
    BLOCK,
    EnvelopeContext,
    seal,
    seal_bytes,
    unpadded,
)
from securecluster.protections.encryption.messages import ENCRYPTION_METHODS, EncryptionKey
from securecluster.protections.encryption.packing import Layout, pack
from securecluster.protections.encryption.parameters import CKKS, Parameters, check_members
from securecluster.protections.encryption.tags import LinearTags, as_text, tag_key
from securecluster.protections.sum_calls import members_of
from securecluster.runtime.client_half import ClientHalf
from securecluster.runtime.services import refuse_other_verbs

if TYPE_CHECKING:
    from securecluster.privacy.masking.key_agreement import KeyRing

SERVER = "server"
AUTHORITY = "authority"


@dataclass(frozen=True, eq=False)
class EncodedRow:
    """One client's reply as integers, by field, and the largest integer of each field."""

    integers: Mapping[str, NDArray[Any]]
    largest: Mapping[str, int]


@dataclass(frozen=True, eq=False)
class SealedRow:
    """Encrypted row of one client: for the server, and for the key authority."""

    key: bytes
    envelope: bytes
    signature: bytes
    box: bytes
    box_signature: bytes


class EncryptionService(ClientHalf):
    """The keys of one endpoint's clients, and the envelopes of their ciphertexts.

    Args:
        run: hash of the run's configuration.
        keys: the clients' identities, roster and secrets.
        minimum: members of the smallest sum in which a client takes part.
        parameters: parameters of the encryption.
    """

    methods = ENCRYPTION_METHODS

    def __init__(self, run: str, keys: KeyRing, minimum: int, parameters: Parameters) -> None:
        self._run = run
        self._keys = keys
        self._minimum = minimum
        self._parameters = parameters
        self._cipher: PublicCipher | None = None
        # made once: thousands of numbers a key
        self._tags: tuple[bytes, LinearTags] | None = None

    def answer(self, call: Call) -> Any:
        """Take the key authority's public key.

        Args:
            call: requests to clients of the endpoint.

        Raises:
            FrameError: a key that the authority did not sign, or another one than before.
        """
        refuse_other_verbs(call)
        query: EncryptionKey = call.query
        # Checked before the key is parsed: TenSEAL would take any parameters.
        if query.scheme != CKKS:
            raise FrameError(
                f"a public key is of {query.scheme[:20]!r}, by which this run does not encrypt: "
                "start both sides from the same configuration"
            )
        public = unpadded(as_bytes(query.public.value))
        server = as_bytes(query.server.value)
        authority = as_bytes(query.exchange.value)
        encryption = self._keys.secrets.authority
        # The first keys stay: ciphertexts under another one would be for somebody else.
        same_public = encryption.public.get(CKKS, public) == public
        same_server = encryption.server.get(CKKS, server) == server
        same_authority = encryption.authority.get(CKKS, authority) == authority
        if not (same_public and same_server and same_authority):
            raise FrameError(
                "a client was sent another public key of the encryption than before: the keys were "
                "tampered with, start a new run"
            )
        # The signature comes first: TenSEAL parses what the authority wrote, and nothing else.
        self._check_authority(fingerprint(self._parameters, public), query)
        PublicCipher(self._parameters, public)
        for key in (server, authority):
            KeyPair(bytes(KEY)).exchange(key)  # refuses keys of low order
        encryption.public[CKKS] = public
        encryption.server[CKKS] = server
        encryption.authority[CKKS] = authority
        return Ack()

    def _check_authority(self, offered: bytes, query: EncryptionKey) -> None:
        """Raise FrameError unless the key authority on the roster signed the key's fingerprint."""
        statement = key_statement(self._run, offered, as_bytes(query.exchange.value))
        try:
            self._keys.verify(AUTHORITY_NUMBER, statement, as_bytes(query.signature.value))
        # The sentence names the authority: a wrong key is no fault of the client.
        except FrameError:
            raise FrameError(
                "the key authority did not sign the public key that the server relays: the key is "
                "refused"
            ) from None

    def _check_members(self, call: Call) -> None:
        """Raise an error for a sum of other clients, or of too few, or before there is a key."""
        for client, members in members_of(call):
            # A grid of more members is too coarse for their noise, and the authority refuses them.
            check_members(len(members))
            # Its row would be in a sum that it does not know.
            if client not in members:
                raise PolicyError(
                    f"client {client} is no member of the encrypted sum that it is asked for a "
                    "row of"
                )
            if len(members) < self._minimum:
                raise PolicyError(
                    f"an encrypted sum over {len(members)} client(s) is refused: client {client} "
                    f"asks for {self._minimum} or more"
                )
        self._public_cipher()

    def _closed(
        self, call: Call, layout: Layout, rows: Sequence[EncodedRow], encrypted: type
    ) -> Any:
        """Return encoded rows as a message with one envelope per recipient.

        Args:
            call: the request.
            layout: fields of the rows.
            rows: the integers of each recipient.
            encrypted: class of the encrypted reply.
        """
        sealed = [self._sealed(call, k, layout, row) for k, row in enumerate(rows)]
        return encrypted(
            layout=str(layout),
            key=Rows(as_table([row.key for row in sealed], KEY)),
            envelope=as_blocks([row.envelope for row in sealed]),
            signature=Rows(as_table([row.signature for row in sealed], SIGNATURE)),
            box=Rows(as_table([row.box for row in sealed], len(sealed[0].box))),
            box_signature=Rows(as_table([row.box_signature for row in sealed], SIGNATURE)),
        )

    def _sealed(self, call: Call, position: int, layout: Layout, row: EncodedRow) -> SealedRow:
        """Return one client's ciphertexts for the server, and their tags for the authority."""
        cipher = self._public_cipher()
        encryption = self._keys.secrets.authority
        client = call.to[position]
        # One key pair a client and run: the server sees who sent an envelope anyway.
        pair = KeyPair(self._keys.secret(client, "envelopes x25519"))
        # A count of one is packed beside the numbers, which tells the authority how many were
        # added.
        slots = pack(row.integers, layout, row.largest, self._parameters)
        ciphertexts = [cipher.encrypt(numbers) for numbers in slots]
        to_server = EnvelopeContext(
            fingerprint=cipher.fingerprint,
            run=self._run,
            purpose=call.method,
            call=call.step,
            attempt=call.attempt,
            sender=f"client/{client}",
            receiver=SERVER,
            group=call.group[position],
            layout=str(layout),
        )
        envelope = seal(ciphertexts, pair, encryption.server[CKKS], to_server)
        to_authority = replace(to_server, receiver=AUTHORITY)
        tags = self._tagged(client, ciphertexts)
        box = seal_bytes(tags, pair, encryption.authority[CKKS], to_authority)
        # A signature covers its context: an envelope or box of another call or group is refused.
        return SealedRow(
            key=pair.public,
            envelope=envelope,
            signature=self._keys.sign(client, to_server.signed(envelope)),
            box=box,
            box_signature=self._keys.sign(client, to_authority.signed(box)),
        )

    def _tagged(self, client: int, ciphertexts: Sequence[bytes]) -> bytes:
        """Return the key of the tags and those of a client's ciphertexts, for the authority."""
        cipher = self._public_cipher()
        seed = self._keys.secrets.seed.get(client)
        if seed is None:
            raise PolicyError(
                f"client {client} has not agreed on a seed with the other clients, so nothing "
                "would bind its ciphertexts to their sum: it takes part in no encrypted sum"
            )
        key = tag_key(seed, self._run, cipher.fingerprint)
        if self._tags is None or self._tags[0] != key:
            self._tags = (key, LinearTags(self._parameters, key))
        _, tags = self._tags
        return as_text(key, [tags.of(cipher.coefficients(data)) for data in ciphertexts])

    def _public_cipher(self) -> PublicCipher:
        """Return the public key, also after secrets were restored.

        Raises:
            PolicyError: no key came yet.
        """
        public = self._keys.secrets.authority.public.get(CKKS)
        if public is None:
            raise PolicyError(
                "a client has no public key of the key authority, so it takes part in no encrypted "
                "sum"
            )
        # Parsed again only where it is another one, as after a restored checkpoint.
        if self._cipher is None or self._cipher.public != public:
            self._cipher = PublicCipher(self._parameters, public)
        return self._cipher


def key_statement(run: str, fingerprint: bytes, exchange: bytes) -> bytes:
    """Return what the key authority signs when it offers its public keys.

    Args:
        run: hash of the run's configuration.
        fingerprint: of the parameters and the public key, 32 bytes.
        exchange: its public key for envelopes, 32 bytes.
    """
    return transcript("securecluster key authority v1", run, fingerprint, exchange)


def as_blocks(envelopes: list[bytes]) -> Picks:
    """Return envelopes as a field of a message with one frame per envelope.

    Args:
        envelopes: bytes of whole blocks.
    """
    picks = []
    first = 0
    for envelope in envelopes:
        blocks = len(envelope) // BLOCK
        picks.append(tuple(range(first, first + blocks)))
        first += blocks
    data = np.frombuffer(b"".join(envelopes), dtype=np.uint8).reshape(first, BLOCK)
    return Picks(torch.as_tensor(data.copy()), tuple(picks))


def from_blocks(field: Picks, position: int) -> bytes:
    """Return one frame's envelope; inverse of `as_blocks`.

    Args:
        field: of the message.
        position: position of the frame.
    """
    return as_bytes(field.table[list(field.picks[position])])
