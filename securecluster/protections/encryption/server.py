"""The server's half of encryption: it adds ciphertexts, and the key authority opens their sum.

It takes two exchanges: the clients' ciphertexts, and their sum with the key authority. A client
whose ciphertexts are of no use is left out, which the server sees before it adds them to the
others'. What a client sealed for the authority alone only the authority sees: where that is of no
use, the sum is refused. Before the first sum of a run, the server asks the authority for its public
key, and relays it to the clients.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from securecluster.core.lazy_torch import torch
from securecluster.errors import FrameError
from securecluster.messaging.messages import Call, Shared, format_ids
from securecluster.messaging.octets import as_bytes, as_table
from securecluster.privacy.masking.identities import SIGNATURE
from securecluster.privacy.masking.pads import KEY, KeyPair
from securecluster.protections.encryption.ciphers import CiphertextSum, PublicCipher
from securecluster.protections.encryption.client import AUTHORITY, SERVER, as_blocks, from_blocks
from securecluster.protections.encryption.envelopes import (
    TAG,
    EnvelopeContext,
    open_envelope,
    padded,
    seal,
    unpadded,
)
from securecluster.protections.encryption.messages import (
    AuthorityRequest,
    EncryptedPairTotal,
    EncryptionKey,
    encrypted_bits,
)
from securecluster.protections.encryption.packing import Layout
from securecluster.protections.encryption.parameters import CKKS, Parameters
from securecluster.protections.encryption.tags import text_bytes
from securecluster.runtime.channel_state import KeyRecord
from securecluster.runtime.port import TRIES, KeyMessages, Lists, Port

if TYPE_CHECKING:
    from securecluster.privacy.masking.identities import Roster

# clients whose ciphertexts are in memory at once
CHUNK = 16


class EncryptionKeyRelay:
    """The server's keys, and its exchanges with clients and the key authority.

    Args:
        run: hash of the run's configuration.
        parameters: parameters of the encryption.
        private: the server's private key for envelopes, 32 bytes.
        roster: identities whose signatures count; None verifies nothing.
    """

    def __init__(
        self, run: str, parameters: Parameters, private: bytes, roster: Roster | None
    ) -> None:
        self.run = run
        self.parameters = parameters
        self.pair = KeyPair(private)
        self.roster = roster
        self._cipher: PublicCipher | None = None

    def connect(self, port: Port) -> None:
        """Take the channel's port.

        Args:
            port: its state has the record of the keys.
        """
        self._port = port

    def refuse(self, error: Exception, clients: Sequence[int]) -> None:
        """Note that replies are of no use, or raise the error where that ends the run.

        Args:
            error: that the replies caused.
            clients: that are to blame; none where nobody can be named.
        """
        self._port.refuse(error, clients)

    @property
    def _record(self) -> KeyRecord:
        """Return the record of the key authority's keys."""
        return self._port.state().encryption.setdefault(CKKS, KeyRecord())

    @property
    def cipher(self) -> PublicCipher:
        """Return the public key, also in a new process."""
        public = self._record.public
        # A resumed run brings the record: keys are parsed again only where they are others.
        if self._cipher is None or self._cipher.public != public:
            self._cipher = PublicCipher(self.parameters, public)
        return self._cipher

    @property
    def exchange(self) -> bytes:
        """Return the key authority's public key for envelopes."""
        return self._record.exchange

    def ask_authority(
        self, method: str, query: Any, call: Call | None = None, group: str = "", members: int = 1
    ) -> Any:
        """Return the key authority's reply to a message.

        Args:
            method: name of the method.
            query: message of one frame.
            call: the call whose sum it belongs to; None for the authority's keys.
            group: members of the sum, as text.
            members: number of clients whose replies are in the sum.

        Raises:
            FrameError: it does not reply.
        """
        groups = (group,) if group else ()
        for _ in range(TRIES):
            response = self._port.to_authority(
                method, (0,), query, call=call, group=groups, members=(members,)
            )
            if response.reply is not None:
                return response.reply
        raise FrameError("the key authority does not reply: start it, and resume the run")

    def ready(self, clients: Sequence[int], lists: Lists) -> list[int]:
        """Return the clients that have the public key, after an exchange where needed.

        Args:
            clients: ids of the clients.
            lists: unused: one key is for all sums.
        """
        record = self._record
        if not record.public:
            reply = self.ask_authority("authority_key", AuthorityRequest(CKKS))
            # Kept as sent: clients check the authority's signature of these very bytes.
            record.public = unpadded(as_bytes(reply.public.row(0)))
            record.exchange = as_bytes(reply.exchange.row(0))
            record.signature = as_bytes(reply.signature.row(0))
        state = self._port.state()
        for _ in range(TRIES):
            silent = [client for client in clients if client not in record.told]
            if not silent:
                break
            query = EncryptionKey(
                scheme=CKKS,
                public=_shared(padded(self.cipher.public)),
                exchange=_shared(record.exchange),
                signature=_shared(record.signature),
                server=_shared(self.pair.public),
            )
            state.sum_step += 1
            response = self._port.to_clients("encryption_key", silent, query, step=state.sum_step)
            # Who did not reply may not have it: it is told again, and not asked for a row before.
            record.told = sorted({*record.told, *response.ids})
        return [client for client in clients if client in record.told]

    def beside(self, clients: Sequence[int], lists: Lists) -> KeyMessages:
        """Yield nothing: the key authority's key comes first.

        Args:
            clients: ids of the clients.
            lists: unused: one key is for all sums.
        """
        yield from ()


class GroupSum:
    """The sum of the ciphertexts of a call.

    Args:
        relay: the server's keys.
    """

    def __init__(self, relay: EncryptionKeyRelay) -> None:
        self._relay = relay
        self._sum: CiphertextSum | None = None
        # what each client sent for the authority: its key, its box of tags, its signature
        self._boxes: dict[int, tuple[bytes, bytes, bytes]] = {}
        self.layout = Layout(())  # of the first row
        self.survivors: tuple[int, ...] = ()

    def add(self, call: Call, client: int, reply: Any, position: int) -> None:
        """Add a client's ciphertexts, out of its envelope.

        Args:
            call: the request.
            client: id of the client.
            reply: a batch of encrypted replies.
            position: position of the client's reply in the batch.

        Raises:
            FrameError: an envelope that was altered, or that belongs to another key, run, call or
                sender; fields other than those of the other clients; or ciphertexts that cannot be
                added to theirs.
        """
        relay = self._relay
        layout = Layout.parse(reply.layout, encrypted_bits(type(reply)))
        # Sums of other fields would decrypt to numbers that mean nothing.
        if self.survivors and layout != self.layout:
            raise FrameError("encrypted rows of a sum differ in their fields")
        context = EnvelopeContext(
            fingerprint=relay.cipher.fingerprint,
            run=relay.run,
            purpose=call.method,
            call=call.step,
            attempt=call.attempt,
            sender=f"client/{client}",
            receiver=SERVER,
            group=call.group[call.to.index(client)],
            layout=reply.layout,
        )
        # The signature covers the sealed bytes, so it is checked before anything is opened.
        envelope = from_blocks(reply.envelope, position)
        key = as_bytes(reply.key.row(position))
        if relay.roster is not None:
            signature = as_bytes(reply.signature.row(position))
            relay.roster.check(client, context.signed(envelope), signature)
        ciphertexts = open_envelope(
            envelope,
            relay.pair,
            key,
            context,
            layout.ciphertexts(relay.parameters),
            relay.parameters,
        )
        # The server cannot open a box, but boxes of a sum are relayed as one table.
        box = as_bytes(reply.box.row(position))
        tags = text_bytes(layout.ciphertexts(relay.parameters), relay.parameters)
        if len(box) != tags + TAG:
            raise FrameError(
                f"the box of client {client} for the key authority has {len(box)} bytes, not "
                f"{tags + TAG}: it is refused"
            )
        ciphertext_sum = self._sum
        if ciphertext_sum is None:
            ciphertext_sum = CiphertextSum(relay.cipher)
        try:
            ciphertext_sum.add(ciphertexts)
        # The sentence names the client: its envelope is valid, and what it holds is not.
        except FrameError as error:
            raise FrameError(f"ciphertexts of client {client} cannot be added: {error}") from None
        # Last: a refused envelope leaves the sum without the client.
        self._sum = ciphertext_sum
        self._boxes[client] = (key, box, as_bytes(reply.box_signature.row(position)))
        self.layout = layout
        self.survivors = tuple(sorted((*self.survivors, client)))

    def sealed(self, call: Call, group: str, then: str) -> EncryptedPairTotal:
        """Return the sum as a message to the key authority.

        Args:
            call: the call for the rows.
            group: members of the sum, as text.
            then: name of the function of R that the authority tells.
        """
        assert self._sum is not None
        relay = self._relay
        survivors = format_ids(self.survivors)
        context = EnvelopeContext(
            fingerprint=relay.cipher.fingerprint,
            run=relay.run,
            purpose=call.method,
            call=call.step,
            attempt=call.attempt,
            sender=SERVER,
            receiver=AUTHORITY,
            # The authority compares these survivors with those it is told.
            group=f"{group}/{survivors}",
            layout=str(self.layout),
        )
        envelope = seal(self._sum.serialized(), relay.pair, relay.exchange, context)
        keys, boxes, signatures = zip(*(self._boxes[k] for k in self.survivors), strict=True)
        return EncryptedPairTotal(
            scheme=CKKS,
            purpose=call.method,
            then=then,
            layout=str(self.layout),
            survivors=survivors,
            server=_shared(relay.pair.public),
            envelope=as_blocks([envelope]),
            keys=Shared(as_table(list(keys), KEY)),
            boxes=Shared(as_table(list(boxes), len(boxes[0]))),
            signatures=Shared(as_table(list(signatures), SIGNATURE)),
        )


def _shared(data: bytes) -> Shared:
    """Return bytes as a field that all frames share."""
    return Shared(torch.as_tensor(np.frombuffer(data, dtype=np.uint8).copy()))
