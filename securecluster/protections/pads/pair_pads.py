"""Pads on rows of pairs: a server learns r_ij + r_ji of each pair of clients, and nothing else.

Each sum has two contributors. Of every other member j, client i sends

    encode(r_ij) + PRF(k_ij)  if i < j,  else  encode(r_ij) - PRF(k_ij),   in Z_2^32 or Z_2^64,

where k_ij is a key that the two share and the PRF is taken of the whole context: run, purpose,
call, attempt, members, pair and field. The pads cancel in the sum of the pair. A client that is
lost needs no recovery: its row and column are dropped, and all other sums stay as they are.

Two rows under one pad would give away their difference. `PairGuard` is a client's record of what it
has sent, which is stored before a row leaves. A row may be sent again as it was; another row, or
one for other members, needs a new attempt.

What R itself tells stays: r_ij is known to within |r_ij - r_ji|/2, and a server that knows r_ji, or
colludes with j, reads r_ij.

A row is about the members that its frame names and nobody else, or a number would be padded in
another's place. Nobody sends r_ii, and R_ii is declared in `PairOptions.fields`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

from securecluster.core.lazy_torch import torch
from securecluster.errors import FrameError, PolicyError, UsageError
from securecluster.privacy.masking import pads
from securecluster.privacy.masking.pads import pad_sign

# calls of which a client keeps what it sent; it refuses older ones
KEPT_CALLS = 64


@dataclass(frozen=True)
class PairContext:
    """One attempt at one call for rows of pairs; pads are bound to all of it.

    Args:
        run: hash of the run's configuration.
        purpose: what the rows are, such as the client method.
        call: number of the call.
        attempt: number of the attempt at this call, from 0.
        members: clients that a row has numbers of, ascending.

    Raises:
        FrameError: members that do not ascend, or a negative number.
    """

    run: bytes
    purpose: str
    call: int
    attempt: int
    members: tuple[int, ...]

    def __post_init__(self) -> None:
        ascending = tuple(sorted(set(self.members)))
        if not self.members or self.members != ascending or self.members[0] < 0:
            raise FrameError("the members of padded pairs are distinct ids in ascending order")
        if min(self.call, self.attempt) < 0:
            raise FrameError("the call and attempt of padded pairs are not negative")

    @cached_property
    def rows_hash(self) -> bytes:
        """Return SHA-256 of all that an attempt does not change, 32 bytes."""
        members = pads.members_hash(self.members)
        text = pads.transcript(
            "securecluster pair rows v1", self.run, self.purpose, self.call, members
        )
        return hashlib.sha256(text).digest()


def pair_pad(pair_key: bytes, context: PairContext, field_name: str, bits: int) -> int:
    """Return the pad of a pair, the same at both ends.

    Args:
        pair_key: key that the two clients share for this purpose and run, 32 bytes. The pair is
            bound into it (`KeyPair.pair_key`).
        context: the attempt.
        field_name: name of the field.
        bits: 32 or 64.

    Returns:
        A number from 0 to 2^bits - 1.
    """
    # All that a request can vary is bound: no two rows of a client ever have the same pad.
    info = pads.transcript(
        "securecluster pair pad v1", context.rows_hash, context.attempt, field_name, bits
    )
    uniform = pads.expand(pair_key, info)
    return int.from_bytes(uniform[: bits // 8], "little")


def add_pair_pads(
    row: torch.Tensor,
    client: int,
    pair_keys: Mapping[int, bytes],
    context: PairContext,
    field_name: str,
) -> None:
    """Add a client's pads to its row, in place and in the ring.

    Numbers of the client itself, and of members that it shares no key with, become zeros: nobody
    would cover them.

    Args:
        row: encoded row (members,), int32 or int64.
        client: id of the client.
        pair_keys: other member -> key of the pair.
        context: the attempt.
        field_name: name of the field.

    Raises:
        UsageError: a row of another type.
        FrameError: a row of another length, or one of a client that is no member.
    """
    bits = {torch.int32: 32, torch.int64: 64}.get(row.dtype)
    if bits is None:
        raise UsageError(f"pads are added to int32 or int64 rows, not to {row.dtype}")
    if row.shape != (len(context.members),) or client not in context.members:
        raise FrameError(
            f"client {client} has a row of {tuple(row.shape)} numbers for {len(context.members)} "
            "members of padded pairs"
        )
    modulus = 1 << bits
    padded = []
    for value, peer in zip(row.tolist(), context.members, strict=True):
        number = 0
        # A number that no pad covers would be sent in the clear.
        if peer != client and peer in pair_keys:
            pad = pair_pad(pair_keys[peer], context, field_name, bits)
            # In Python's integers, which do not overflow for 64 bits.
            number = (value + pad_sign(client, peer) * pad) % modulus
        # two's complement
        padded.append(number - modulus if number >= modulus // 2 else number)
    row.copy_(torch.tensor(padded, dtype=row.dtype))


@dataclass
class PairRecord:
    """Record of what a client sent in the last attempt at a call.

    Args:
        attempt: number of the attempt.
        rows_hash: `PairContext.rows_hash` of what it was asked for.
        digest: digest of the encoded row.
        spent: True if it was asked for another row in this attempt, so that a next one is needed.
    """

    attempt: int
    rows_hash: bytes
    digest: bytes
    spent: bool = False


@dataclass
class PairState:
    """State of a client's guard, to be stored before any row leaves.

    Args:
        calls: call -> record of its last attempt.
        floor: number of the first call that the client still answers.
    """

    calls: dict[int, PairRecord] = field(default_factory=dict)
    floor: int = 0


class PairGuard:
    """Conditions of a client before it sends a padded row.

    Args:
        client: id of the client.
        state: what it has sent so far.
    """

    def __init__(self, client: int, state: PairState) -> None:
        self._client = client
        self.state = state

    def next_attempt(self, context: PairContext) -> int:
        """Return the attempt in which the client can send a row, whatever the context's own is.

        Args:
            context: the call and its members.
        """
        record = self.state.calls.get(context.call)
        if record is None:
            return 0
        # The same rows again: the reply was lost, and the same bytes are sent.
        if record.rows_hash == context.rows_hash and not record.spent:
            return record.attempt
        return record.attempt + 1

    def check(self, context: PairContext) -> None:
        """Raise PolicyError for an attempt that the client takes no part in.

        Args:
            context: the attempt.

        Raises:
            PolicyError: an old call or attempt, or one in which it sent a row for others.
        """
        if context.call < self.state.floor:
            raise self._refusal(context, "it has long answered later calls")
        record = self.state.calls.get(context.call)
        if record is None or record.attempt < context.attempt:
            return
        if record.attempt > context.attempt:
            raise self._refusal(context, f"it took part in attempt {record.attempt} already")
        if record.rows_hash != context.rows_hash:
            raise self._refusal(context, "it padded a row for other members in this attempt")

    def take_part(self, context: PairContext, digest: bytes) -> None:
        """Record that the client sends a padded row, or refuse.

        Args:
            context: the attempt.
            digest: digest of the encoded row.

        Raises:
            PolicyError: `check` refuses the attempt, or another row was sent in it.
        """
        self.check(context)
        record = self.state.calls.get(context.call)
        if record is not None and record.attempt == context.attempt:
            if record.digest != digest:
                record.spent = True
                raise self._refusal(context, "it padded another row in this attempt already")
            return
        self.state.calls[context.call] = PairRecord(context.attempt, context.rows_hash, digest)
        for call in sorted(self.state.calls)[:-KEPT_CALLS]:
            del self.state.calls[call]
            self.state.floor = call + 1

    def _refusal(self, context: PairContext, reason: str) -> PolicyError:
        return PolicyError(
            f"client {self._client} refuses a row of pairs of call {context.call}, attempt "
            f"{context.attempt}: {reason}"
        )
