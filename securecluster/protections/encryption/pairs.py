"""Encrypted pairs: the clients' service, and the server's aggregator.

Each client encrypts its part of R, half of which the other client of a pair has: a row of all pairs
i < j, with zeros but for its own, all rounded to 2^-14. The server adds ciphertexts. The authority
decrypts the sum, and releases the clusters' labels alone, or R, in steps of 2^-15.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from securecluster.core.lazy_torch import torch
from securecluster.errors import FrameError, UsageError
from securecluster.messaging.messages import Call, format_ids
from securecluster.protections.encryption.client import EncodedRow, EncryptionService
from securecluster.protections.encryption.messages import encrypted_bits, encrypted_pairs_class
from securecluster.protections.encryption.packing import Layout
from securecluster.protections.encryption.pair_release import (
    from_grid,
    own_pairs,
    pair_layout,
    rounding,
)
from securecluster.protections.encryption.parameters import Parameters, check_members
from securecluster.protections.encryption.server import CHUNK, EncryptionKeyRelay, GroupSum
from securecluster.protections.pair_rows import PairRange, check_pairs_alone, columns_of
from securecluster.protections.sum_calls import members_of
from securecluster.runtime.aggregators import Exchange
from securecluster.runtime.pair_aggregators import (
    LabelledValue,
    PairFunctions,
    PairTotal,
    check_replies,
)
from securecluster.runtime.port import Connected

if TYPE_CHECKING:
    from securecluster.privacy.masking.identities import Roster
    from securecluster.privacy.masking.key_agreement import KeyRing
    from securecluster.runtime.release_policy import ReleasePolicy


class EncryptedPairService(EncryptionService):
    """The part of one endpoint's clients in encrypted pairs.

    Args:
        ranges: range of each field of rows.
        saturate: True to clamp numbers of every field, in runs with noise, where an error would be
            a release.
        run: as of `EncryptionService`, and so are all others.
    """

    def __init__(
        self,
        ranges: Mapping[str, PairRange],
        saturate: bool,
        run: str,
        keys: KeyRing,
        minimum: int,
        parameters: Parameters,
    ) -> None:
        super().__init__(run, keys, minimum, parameters)
        self._ranges = ranges
        self._saturate = saturate

    def check(self, call: Call, release: ReleasePolicy) -> None:
        """Raise an error for a call that a client cannot or will not send a row in.

        Args:
            call: requests for rows of pairs.
            release: declaration of the called method.

        Raises:
            FrameError: the frame does not name the members, or asks about others than these.
            PolicyError: replies that leave in other ways, too few members, or no public key yet.
        """
        check_pairs_alone(call, release)
        # The order of the columns is part of R: another one would permute its rows.
        self._check_members(call)
        for k, (client, members) in enumerate(members_of(call)):
            if columns_of(call.query, release.columns, k, client) != members:
                raise FrameError(
                    f"client {client} is asked about other clients than the members of its pairs: "
                    "the frame is refused"
                )

    def hidden(self, call: Call, reply: Any, expected: type, release: ReleasePolicy) -> Any:
        """Return a reply with encrypted rows.

        Args:
            call: the request.
            reply: the reply, with one row per recipient.
            expected: class of the reply.
            release: declaration of the called method.

        Raises:
            UpdateError: a number beyond its range.
            FrameError: a row of another length.
        """
        # A reply of pairs has one field: its row.
        ((name, value),) = vars(reply).items()
        pair_range = self._ranges[name]
        codec = rounding(name, pair_range)
        # Noise may leave the range, and is clamped; a number without noise that does is a mistake.
        table = codec.encode(value.values.cpu(), pair_range.clamped or self._saturate).numpy()
        rows = []
        size = 0
        for row, (client, members) in zip(table, members_of(call), strict=True):
            size = len(members)
            if row.shape != (size,):
                raise FrameError(f"a row of pairs has {size} numbers, not {row.shape}")
            position = members.index(client)
            # Its numbers stand where both ends of a pair have them, so the sum adds the two.
            rows.append(EncodedRow({name: own_pairs(row, position)}, {name: codec.largest}))
        layout = pair_layout(name, pair_range, size)
        encrypted = encrypted_pairs_class(expected, pair_range.bits)
        return self._closed(call, layout, rows, encrypted)


class EncryptedPairs(Connected):
    """Aggregator for pairs whose server reads no row, and of R what the key authority releases.

    Args:
        run: hash of the run's configuration.
        parameters: parameters of the encryption.
        private: the server's private key for envelopes, 32 bytes.
        roster: identities whose signatures count; None verifies nothing.
        ranges: range of each field of rows.
        functions: functions of R.
        labelled: makes a function's value of the labels alone, by its name; of functions that are
            not here, R is released.
    """

    name = "ckks"
    server_reads_rows = False
    needs_seed = True  # clients tag their ciphertexts under it

    def __init__(
        self,
        run: str,
        parameters: Parameters,
        private: bytes,
        roster: Roster | None,
        ranges: Mapping[str, PairRange],
        functions: PairFunctions,
        labelled: Mapping[str, LabelledValue],
    ) -> None:
        self._ranges = ranges
        self._functions = functions
        self._labelled = dict(labelled)
        self.keys: EncryptionKeyRelay = EncryptionKeyRelay(run, parameters, private, roster)

    def check(self, then: str) -> None:
        """Raise UsageError for a function of R that is not declared.

        Args:
            then: name of the function of R.
        """
        self._functions.check(then)

    def run(self, exchange: Exchange, call: Call, columns: Sequence[int], then: str) -> PairTotal:
        """Add encrypted rows, and return what the key authority tells of R.

        Args:
            exchange: sends a call, again to clients that do not reply, and returns the replies.
            call: the call to the clients that are ready.
            columns: the clients that a row has numbers of, ascending.
            then: name of the function of R.

        Raises:
            UsageError: fewer than two clients replied, or clients that do not ascend.
            FrameError: ciphertexts that were altered, or numbers that R cannot have.
        """
        # Frames name members as ranges of ids, which have no order of their own.
        if list(columns) != sorted(set(columns)):
            raise UsageError(
                "encrypted pairs name each client once, in ascending order: ask them so"
            )
        # Before anything is sent: the authority would refuse the sum.
        check_members(len(columns))
        text = format_ids(columns)
        count = len(call.to)
        call = replace(call, members=(len(columns),) * count, group=(text,) * count)
        group_sum = GroupSum(self.keys)
        # Rows are added as they arrive: memory holds a chunk of them, and one sum.
        for response in exchange.stream(call, CHUNK):
            for k, client in enumerate(response.ids):
                try:
                    self._check_length(response.reply, len(columns))
                    group_sum.add(call, client, response.reply, k)
                except FrameError as error:
                    self.keys.refuse(error, [client])
        # A client that answered a second request arrived after others that follow it.
        ids = [client for client in call.to if client in group_sum.survivors]
        check_replies(ids)
        (shape,) = group_sum.layout.fields
        pair_range = self._ranges[shape.name]
        numbers = self._told(group_sum, call, text, then)
        survivors = len(ids)
        if then in self._labelled:
            labels = numbers.tolist()
            # The authority is another party: its reply is checked as a client's is.
            if len(labels) != survivors or not set(labels) <= set(range(survivors)):
                raise FrameError("the key authority released no labels of the clients")
            return PairTotal(tuple(ids), self._labelled[then](labels), None)
        relevance = from_grid(numbers, survivors, shape.name, pair_range)
        return PairTotal(tuple(ids), self._functions.apply(then, relevance), relevance)

    def _check_length(self, reply: Any, columns: int) -> None:
        """Raise FrameError for rows of another length than their call has columns."""
        bits = encrypted_bits(type(reply))
        (name,) = bits
        # Clients might all agree with each other, and be wrong about the call.
        if Layout.parse(reply.layout, bits) != pair_layout(name, self._ranges[name], columns):
            raise FrameError("encrypted rows of pairs have another length than their call")

    def _told(self, group_sum: GroupSum, call: Call, group: str, then: str) -> torch.Tensor:
        """Return what the key authority tells, (n,) int64."""
        query = group_sum.sealed(call, group, then)
        reply = self.keys.ask_authority(
            "authority_pairs", query, call, group, len(group_sum.survivors)
        )
        numbers: torch.Tensor = reply.numbers.row(0)
        return numbers
