"""The server's half of encrypted sums: it adds ciphertexts, and the key authority decrypts the sum.

A sum takes two exchanges: the clients' ciphertexts, and the sums of the groups with the key
authority. Clients that do not reply are asked again where there are cohorts, and then left out with
theirs; nothing has to be recovered. So is a client whose ciphertexts are of no use, which the
server sees before it adds them to the others'. What a client sealed for the authority alone only
the authority sees: where that is of no use, the sum is given up. Before the first sum of a run, the
server asks the authority for its public key, and relays it to the clients.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from securecluster.core.lazy_torch import torch
from securecluster.errors import FrameError, RefusedError
from securecluster.messaging.messages import Call, Rows, Shared, format_ids
from securecluster.messaging.octets import as_bytes, as_table
from securecluster.messaging.refusals import FRAME
from securecluster.privacy.cohorts import Cohort
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
    EncryptedTotal,
    EncryptionKey,
    decrypted_class,
    encrypted_bits,
)
from securecluster.protections.encryption.packing import Layout
from securecluster.protections.encryption.parameters import Parameters, check_members
from securecluster.protections.encryption.tags import text_bytes
from securecluster.protections.sum_ranges import SumRanges
from securecluster.runtime.aggregators import Exchange, Total, members_by_group
from securecluster.runtime.channel_state import KeyRecord
from securecluster.runtime.port import TRIES, Connected, KeyMessages, Port

if TYPE_CHECKING:
    from securecluster.privacy.masking.identities import Roster

# clients whose ciphertexts are in memory at once
CHUNK = 16


class EncryptedSums(Connected):
    """Aggregator of ciphertexts.

    Args:
        run: hash of the run's configuration.
        ranges: ranges of the fields that are summed.
        dtype: type of the models' numbers.
        minimum: members of the smallest sum.
        parameters: parameters of the encryption.
        private: the server's private key for envelopes, 32 bytes.
        roster: identities whose signatures count; None verifies nothing.
    """

    server_reads_replies = False
    hides_replies = True
    needs_seed = True  # clients tag their ciphertexts under it

    def __init__(
        self,
        run: str,
        ranges: SumRanges,
        dtype: torch.dtype,
        minimum: int,
        parameters: Parameters,
        private: bytes,
        roster: Roster | None,
    ) -> None:
        self.name = parameters.scheme
        self._run = run
        self._ranges = ranges
        self._dtype = dtype
        self._minimum = minimum
        self.keys: EncryptionKeyRelay = EncryptionKeyRelay(run, parameters, private, roster)

    def run(
        self,
        exchange: Exchange,
        call: Call,
        by: Sequence[int],
        groups: int,
        cohorts: Sequence[Cohort] = (),
    ) -> Total:
        """Collect ciphertexts, and have the sum of each group that is large enough decrypted.

        Args:
            exchange: sends a call and returns the replies that arrive.
            call: the call to all clients, which have the public key (`ready`).
            by: group of each recipient of the call, in its order.
            groups: number of groups.
            cohorts: of the recipients, each within a group; empty where clients are lost one by
                one.
        """
        texts = {}
        members_of = [sorted(members) for members in members_by_group(call.to, by, groups)]
        for group, members in enumerate(members_of):
            if len(members) >= self._minimum:  # others are never asked
                # Before anything is sent: the authority would refuse the sum.
                check_members(len(members))
                texts[group] = format_ids(members)
        call = replace(call, group=tuple(texts.get(group, "") for group in by))
        sums = {group: GroupSum(self.keys) for group in texts}
        encrypted = self._collect(exchange, call, by, sums, cohorts)
        counts = [0] * groups
        survivors: set[int] = set()
        tables: dict[str, torch.Tensor] = {}
        for group, group_sum in sums.items():
            # The authority would refuse a smaller sum: nothing is sent to it.
            if len(group_sum.survivors) < self._minimum:
                continue
            totals = self._decrypted(group_sum, call, texts[group])
            if totals is None:
                continue
            counts[group] = len(group_sum.survivors)
            survivors.update(group_sum.survivors)
            self._decode(totals, group_sum, len(members_of[group]), group, groups, tables)
        # Without a reply, or a group that is large enough, there is no class of the result.
        if encrypted is None or not survivors:
            return Total(None, tuple(counts), ())
        fields: dict[str, Rows | None] = dict.fromkeys(encrypted_bits(encrypted))
        for name, table in tables.items():
            fields[name] = Rows(table)
        ids = tuple(client for client in call.to if client in survivors)
        return Total(decrypted_class(encrypted)(**fields), tuple(counts), ids)

    def _decrypted(
        self, group_sum: GroupSum, call: Call, text: str
    ) -> dict[str, torch.Tensor] | None:
        """Return a group's sums of integers; None where what clients sealed is of no use."""
        try:
            return group_sum.decrypted(call, text)
        except RefusedError as error:
            if error.code != FRAME:
                raise
            self.keys.refuse(error, [])  # whose box it was only the authority knows
            return None

    def _collect(
        self,
        exchange: Exchange,
        call: Call,
        by: Sequence[int],
        sums: Mapping[int, GroupSum],
        cohorts: Sequence[Cohort],
    ) -> type | None:
        """Add the clients' ciphertexts to their groups' sums, cohort by cohort.

        Returns:
            Class of the replies; None if nobody replied.
        """
        waiting = _WaitingCohorts(call.to, by, cohorts, sums, self.keys.refuse)
        positions = [k for k, group in enumerate(by) if group in sums]
        if cohorts:
            # Few ciphertexts wait for the rest of their cohort in this order.
            positions.sort(key=lambda k: waiting.cohort_of[call.to[k]])
        arrived: set[int] = set()
        encrypted: type | None = None
        for _ in range(TRIES if cohorts else 1):
            silent = [k for k in positions if call.to[k] not in arrived]
            if not silent:
                break
            request = call.select(silent)
            for response in exchange.stream(request, CHUNK):
                if response.reply is None:  # all clients of the part dropped out
                    continue
                encrypted = type(response.reply)
                arrived.update(response.ids)
                for k, client in enumerate(response.ids):
                    waiting.add(request, client, response.reply, k)
        return encrypted

    def _decode(
        self,
        totals: dict[str, torch.Tensor],
        group_sum: GroupSum,
        members: int,
        group: int,
        groups: int,
        tables: dict[str, torch.Tensor],
    ) -> None:
        """Write the numbers of one group's sums into the tables (groups, …)."""
        for shape in group_sum.layout.fields:
            largest_integer = self.keys.parameters.largest_integer(shape.bits, members)
            codec = self._ranges.fixed_point(shape.name, shape.bits, members, largest_integer)
            # Numbers beside updates are few, and are decoded in full.
            dtype = self._dtype if shape.bits == 32 else torch.float64
            decoded = codec.decode(totals[shape.name], len(group_sum.survivors), dtype)
            # Groups that failed keep zeros, and a count of zero.
            zeros = torch.zeros((groups, *decoded.shape), dtype=dtype)
            table = tables.setdefault(shape.name, zeros)
            if table.shape[1:] != decoded.shape:
                raise FrameError(f"{shape.name}: the groups of an encrypted sum differ in shape")
            table[group] = decoded


class _WaitingCohorts:
    """Sums of cohorts that have not arrived as a whole.

    Ciphertexts that were added to the sum of their group could not be taken out again as cheaply as
    the sum of a cohort is dropped.

    Args:
        clients: recipients of the call.
        by: group of each.
        cohorts: of the clients; a client that is in none is one of its own.
        sums: of the groups, to which cohorts are added.
        refuse: notes that replies are of no use, as `Port` declares.
    """

    def __init__(
        self,
        clients: Sequence[int],
        by: Sequence[int],
        cohorts: Sequence[Cohort],
        sums: Mapping[int, GroupSum],
        refuse: Callable[[Exception, Sequence[int]], None],
    ) -> None:
        self._refuse = refuse
        self.cohort_of: dict[int, Cohort] = {client: (client,) for client in clients}
        for cohort in cohorts:
            self.cohort_of.update(dict.fromkeys(cohort, cohort))
        self._group_of = dict(zip(clients, by, strict=True))
        self._sums = sums
        self._parts: dict[Cohort, GroupSum] = {}

    def add(self, call: Call, client: int, reply: Any, position: int) -> None:
        """Add a client's ciphertexts to its cohort's sum, and that to its group's once it is whole.

        Args:
            call: the request.
            client: id of the client.
            reply: a batch of encrypted replies.
            position: position of the client's reply in the batch.
        """
        cohort = self.cohort_of[client]
        group_sum = self._sums[self._group_of[client]]
        cohort_sum = self._parts.setdefault(cohort, group_sum.part())
        try:
            cohort_sum.add(call, client, reply, position)
        except FrameError as error:
            self._refuse(error, [client])
            return
        if len(cohort_sum.survivors) < len(cohort):
            return
        del self._parts[cohort]
        try:
            group_sum.join(cohort_sum)
        except FrameError as error:
            # whose ciphertexts cancel others' cannot be told of several clients
            self._refuse(error, cohort if len(cohort) == 1 else ())


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
        return self._port.state().encryption.setdefault(self.parameters.scheme, KeyRecord())

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

    def ready(self, clients: Sequence[int]) -> list[int]:
        """Return the clients that have the public key, after an exchange where needed.

        Args:
            clients: ids of the clients.
        """
        record = self._record
        if not record.public:
            reply = self.ask_authority("authority_key", AuthorityRequest(self.parameters.scheme))
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
                scheme=self.parameters.scheme,
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

    def beside(self, clients: Sequence[int]) -> KeyMessages:
        """Yield nothing: the key authority's key comes first.

        Args:
            clients: ids of the clients.
        """
        yield from ()


class GroupSum:
    """The sum of one group's ciphertexts.

    Args:
        relay: the server's keys.
    """

    def __init__(self, relay: EncryptionKeyRelay) -> None:
        self._relay = relay
        self._sum: CiphertextSum | None = None
        # what each client sent for the authority: its key, its box of tags, its signature
        self._boxes: dict[int, tuple[bytes, bytes, bytes]] = {}
        self._layout: list[Layout] = []  # of the first row, which all parts of the sum share
        self.survivors: tuple[int, ...] = ()

    @property
    def layout(self) -> Layout:
        """Return the fields of the rows; none before the first row."""
        return self._layout[0] if self._layout else Layout(())

    def part(self) -> GroupSum:
        """Return a part of the sum, whose rows must have the fields of the other parts'."""
        cohort_sum = GroupSum(self._relay)
        cohort_sum._layout = self._layout
        return cohort_sum

    def join(self, cohort_sum: GroupSum) -> None:
        """Add the sum of a part.

        Args:
            cohort_sum: of this sum, whose clients have no row in it.

        Raises:
            FrameError: ciphertexts that cancel those of the other parts.
        """
        assert cohort_sum._sum is not None
        ciphertext_sum = self._sum
        if ciphertext_sum is None:
            ciphertext_sum = CiphertextSum(self._relay.cipher)
        try:
            ciphertext_sum.join(cohort_sum._sum)
        except FrameError as error:
            clients = format_ids(cohort_sum.survivors)
            raise FrameError(f"ciphertexts of client {clients} cannot be added: {error}") from None
        self._sum = ciphertext_sum
        self._boxes.update(cohort_sum._boxes)
        self.survivors = tuple(sorted((*self.survivors, *cohort_sum.survivors)))

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
        if self._layout and layout != self.layout:
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
        self._layout[:] = [layout]
        self.survivors = tuple(sorted((*self.survivors, client)))

    def decrypted(self, call: Call, group: str) -> dict[str, torch.Tensor]:
        """Return the sums of integers of each field, which the key authority decrypts.

        Args:
            call: the call for the rows.
            group: members of the sum, as text.

        Raises:
            FrameError: the authority's reply has other numbers than the sum.
        """
        query = self.sealed(call, group)
        reply = self._relay.ask_authority("authority_sum", query, call, group, len(self.survivors))
        # Fields of one width lie one after the other, in the order of the layout.
        remaining = {32: reply.narrow.row(0), 64: reply.wide.row(0)}
        totals = {}
        for shape in self.layout.fields:
            numbers = remaining[shape.bits]
            if len(numbers) < shape.numbers:
                raise FrameError("the key authority released fewer numbers than the sum has")
            totals[shape.name] = numbers[: shape.numbers].reshape(shape.shape).clone()
            remaining[shape.bits] = numbers[shape.numbers :]
        if len(remaining[32]) or len(remaining[64]):
            raise FrameError("the key authority released more numbers than the sum has")
        return totals

    def sealed(self, call: Call, group: str) -> EncryptedTotal:
        """Return the sum as a message to the key authority.

        Args:
            call: the call for the rows.
            group: members of the sum, as text.
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
        return EncryptedTotal(
            scheme=relay.parameters.scheme,
            purpose=call.method,
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
