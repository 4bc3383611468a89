"""The clients' half of padded pairs: a service of the endpoint, and the padding of its rows.

Keys are exchanged once a run (`key_exchange`). Before each call for rows, `pair_attempt` asks which
attempt a client can take part in, so that a server that was restarted does not ask for other rows
under pads that were used. The reply to the protocol's own call is padded.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

from securecluster.core.lazy_torch import torch
from securecluster.errors import FrameError, PolicyError
from securecluster.messaging.bounds import Real, Ring, Whole, declared
from securecluster.messaging.messages import Call, Rows
from securecluster.protections.key_exchange import EXCHANGE_METHODS, KeyExchange
from securecluster.protections.pads.pair_pads import (
    PairContext,
    PairGuard,
    PairState,
    add_pair_pads,
)
from securecluster.protections.pair_rows import (
    PairRange,
    check_pairs_alone,
    columns_of,
    range_of,
    row_field,
)
from securecluster.protections.sum_calls import members_of
from securecluster.runtime.client_half import ClientHalf
from securecluster.runtime.services import MessageTypes, refuse_other_verbs

if TYPE_CHECKING:
    from securecluster.privacy.masking.key_agreement import KeyRing
    from securecluster.runtime.release_policy import ReleasePolicy

NAME = "pads"
PURPOSE = "pads of pairs"  # of the keys of pairs
# attempts at one call are below
MOST_ATTEMPTS = 1 << 31


@dataclass(frozen=True, eq=False)
class PairsRequest:
    """Server's question before it asks for rows."""

    purpose: str  # the client method whose replies are rows of pairs


@dataclass(frozen=True, eq=False)
class NextAttempt:
    """Client's reply: the attempt in which it can send its row."""

    attempt: Annotated[Rows, Whole(below=MOST_ATTEMPTS)]  # (b,) int64


PAD_METHODS: Mapping[str, MessageTypes] = {
    **EXCHANGE_METHODS,
    "pair_attempt": (PairsRequest, NextAttempt),
}


class PaddedReplies:
    """Messages of padded pairs.

    Args:
        ranges: range of each field of rows.
    """

    methods = PAD_METHODS

    def __init__(self, ranges: Mapping[str, PairRange]) -> None:
        self._ranges = ranges

    def reply_class(self, reply: type, release: ReleasePolicy) -> type:
        """Return the class of a reply with padded rows.

        Args:
            reply: class of the reply.
            release: declaration of its method.
        """
        return padded_class(reply, range_of(reply, self._ranges).bits)


class PadService(ClientHalf):
    """The part of one endpoint's clients in padded pairs.

    Args:
        run: hash of the run's configuration.
        keys: the clients' identities, roster and secrets.
        ranges: range of each field of rows.
        saturate: True to clamp numbers of every field, in runs with noise, where an error would be
            a release.
        minimum: fewest members of a call in which a client takes part.
    """

    methods = PAD_METHODS

    def __init__(
        self, run: str, keys: KeyRing, ranges: Mapping[str, PairRange], saturate: bool, minimum: int
    ) -> None:
        self._run = run.encode()
        self._keys = keys
        self._ranges = ranges
        self._saturate = saturate
        self._minimum = minimum
        self._exchange = KeyExchange(self._run, keys, PURPOSE)

    def answer(self, call: Call) -> Any:
        """Return the clients' reply in the exchange of keys, or the attempts they can take part in.

        Args:
            call: requests to clients of the endpoint.

        Raises:
            FrameError: a message that was tampered with.
        """
        refuse_other_verbs(call)
        if call.method in EXCHANGE_METHODS:
            return self._exchange.answer(call)
        attempts = []
        for client, members in self._members(call):
            context = self._context(call, call.query.purpose, members)
            attempts.append(self._guard(client).next_attempt(context))
        return NextAttempt(Rows(torch.tensor(attempts, dtype=torch.int64)))

    def check(self, call: Call, release: ReleasePolicy) -> None:
        """Raise an error for a call that a client cannot or will not send a row in.

        Args:
            call: requests for rows of pairs.
            release: declaration of the called method.

        Raises:
            FrameError: the frame does not name the members, or asks about others than these.
            PolicyError: replies that leave in other ways, too few members, or an attempt that the
                client refuses.
        """
        check_pairs_alone(call, release)
        for k, (client, members) in enumerate(self._members(call)):
            if client not in members or len(members) < self._minimum:
                raise PolicyError(
                    f"client {client} is asked for a row of pairs of {len(members)} member(s): it "
                    f"takes part with {self._minimum} or more, itself among them"
                )
            # A number in another's place would be padded with the wrong key, and one in the
            # client's own place would be known: with either, a server could read single numbers.
            if columns_of(call.query, release.columns, k, client) != members:
                raise FrameError(
                    f"client {client} is asked about other clients than the members of its pairs: "
                    "the frame is refused"
                )
            self._guard(client).check(self._context(call, call.method, members))

    def hidden(self, call: Call, reply: Any, expected: type, release: ReleasePolicy) -> Any:
        """Return a reply with padded rows.

        Args:
            call: the request.
            reply: the reply, with one row per recipient.
            expected: class of the reply.
            release: declaration of the called method.

        Raises:
            UpdateError: a number beyond its range.
            FrameError: a row of another length.
            PolicyError: a client sent another row in this attempt already.
        """
        ((name, value),) = vars(reply).items()
        pair_range = self._ranges[name]
        padded = padded_class(expected, pair_range.bits)
        rows = value.values.cpu()
        table = pair_range.fixed_point(name).encode(rows, pair_range.clamped or self._saturate)
        for row, (client, members) in zip(table, self._members(call), strict=True):
            context = self._context(call, call.method, members)
            digest = hashlib.blake2b(row.numpy().tobytes(), digest_size=32).digest()
            self._guard(client).take_part(context, digest)
            peers = [c for c in members if c != client and c in self._exchange.public]
            keys = {peer: self._exchange.pair_key(client, peer) for peer in peers}
            add_pair_pads(row, client, keys, context, name)
        return padded(**{name: Rows(table)})

    def _members(self, call: Call) -> list[tuple[int, tuple[int, ...]]]:
        """Return each recipient of a call, and the members that its frame names."""
        if not call.group:
            raise FrameError(
                f"{call.method} is asked for rows of pairs without members, and this run's are "
                "padded: start both sides from the same configuration"
            )
        return list(members_of(call))

    def _context(self, call: Call, purpose: str, members: tuple[int, ...]) -> PairContext:
        return PairContext(self._run, purpose, call.step, call.attempt, members)

    def _guard(self, client: int) -> PairGuard:
        """Return a client's guard, with what it has sent so far."""
        return PairGuard(client, self._keys.record(NAME, client, PairState))


@lru_cache(maxsize=64)
def padded_class(reply: Any, bits: int) -> type:
    """Return the class of a reply whose rows are padded, with the same field.

    Args:
        reply: class of the reply.
        bits: 32 or 64.

    Raises:
        UsageError: a reply with other fields than one of rows.
    """
    name = row_field(reply)
    bound = declared(reply)[name]
    assert isinstance(bound, Real)
    hint: Any = Annotated[Rows, Ring(bound.axes, bits)]
    padded = dataclasses.make_dataclass(
        f"Padded{reply.__name__}", [(name, hint)], frozen=True, eq=False
    )
    padded.__module__ = __name__
    padded.__doc__ = f"{reply.__name__} as it leaves its client in padded pairs."
    # resolved once, so that a class that cannot be sent fails here
    get_type_hints(padded)
    return padded
