"""The clients' half of secure sums: a service of the endpoint, and the masking of its replies.

Keys are exchanged once a run: `sum_offer` brings a client's signed public key, and `sum_keys` those
of the others. The reply to the protocol's own call is masked, with sealed shares of its self mask.
Then, only where clients were lost, `reveal_pads` brings the call's pad keys with the lost ones, and
`reveal_shares` the shares of the survivors' self masks.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import numpy as np

from securecluster.core.lazy_torch import torch
from securecluster.errors import FrameError, PolicyError, UsageError
from securecluster.messaging.bounds import Octets, Upto, Whole
from securecluster.messaging.messages import Ack, Call, Empty, Picks, Rows, parse_ids
from securecluster.privacy.masking.identities import SIGNATURE
from securecluster.privacy.masking.key_agreement import MOST_CLIENTS, KeyRing
from securecluster.privacy.secure_sum.double_mask import ClientMasks, SumContext, UnmaskingGuard
from securecluster.privacy.secure_sum.graph import Graph, build_graph
from securecluster.privacy.secure_sum.pads import KEY, KeyPair, check_public_keys, transcript
from securecluster.privacy.secure_sum.shamir import VALUE
from securecluster.runtime.masked_replies import BOX, BOXES, SumRanges, bits_of, masked_class
from securecluster.runtime.services import MessageTypes, refuse_other_verbs

PURPOSE = "secure sums"  # of the keys of pairs
LOST = Upto("lost", "clients")


@dataclass(frozen=True, eq=False)
class SumKey:
    """Client's offer to the server."""

    key: Annotated[Rows, Octets((KEY,))]  # (b, 32) uint8, X25519
    signature: Annotated[Rows, Octets((SIGNATURE,))]  # (b, 64) uint8, zeros without an identity


OFFERS = Upto("offers", "clients", minimum=1)


@dataclass(frozen=True, eq=False)
class SumKeys:
    """Server's message to a client: the keys that it has not received yet."""

    ids: Annotated[Picks, Whole((OFFERS,), below=MOST_CLIENTS)]  # (k,) int64
    keys: Annotated[Picks, Octets((OFFERS, KEY))]  # (k, 32) uint8
    signatures: Annotated[Picks, Octets((OFFERS, SIGNATURE))]  # (k, 64) uint8, of the keys


@dataclass(frozen=True, eq=False)
class LostMembers:
    """Server's request for pad keys."""

    purpose: str  # the client method whose replies are summed
    # (k,) int64 members whose rows are not in the sum, ascending
    lost: Annotated[Picks, Whole((LOST,), below="clients")]


@dataclass(frozen=True, eq=False)
class PadKeys:
    """Client's reply: the call's pad keys with lost neighbours, in ascending order of these."""

    keys: Annotated[Picks, Octets((Upto("pads", "clients"), KEY))]  # (k, 32) uint8


@dataclass(frozen=True, eq=False)
class RelayedBoxes:
    """Server's request for shares of the survivors' self masks."""

    purpose: str  # the client method whose replies are summed
    # (k,) int64 members whose rows are not in the sum, ascending
    lost: Annotated[Picks, Whole((LOST,), below="clients")]
    # (n, 49) uint8, the boxes that surviving neighbours sealed for the client, in ascending order
    boxes: Annotated[Picks, Octets((BOXES, BOX))]


@dataclass(frozen=True, eq=False)
class SeedShares:
    """Client's reply: its shares, of its own seed too, in ascending order of the owners."""

    # (k, 33) uint8, numbers modulo a prime, in big-endian order
    shares: Annotated[Picks, Octets((Upto("shares", "clients"), VALUE))]


SUM_METHODS: Mapping[str, MessageTypes] = {
    "sum_offer": (Empty, SumKey),
    "sum_keys": (SumKeys, Ack),
    "reveal_pads": (LostMembers, PadKeys),
    "reveal_shares": (RelayedBoxes, SeedShares),
}


class SecureSumService:
    """The part of one endpoint's clients in secure sums.

    Args:
        run: hash of the run's configuration.
        keys: the clients' identities, roster and secrets.
        ranges: ranges of the fields that are summed.
        minimum: members of the smallest sum in which a client takes part.
        shares: smallest number of survivors, where noise is in as many shares.
    """

    methods = SUM_METHODS

    def __init__(
        self, run: str, keys: KeyRing, ranges: SumRanges, minimum: int, shares: int = 0
    ) -> None:
        self._run = run.encode()
        self._keys = keys
        self._ranges = ranges
        self._minimum = minimum
        self._shares = shares
        # Pair keys by (lower id, its public key, higher id, its public key); an endpoint with both
        # clients computes them once.
        self._pair_keys: dict[tuple[int, bytes, int, bytes], bytes] = {}
        self._pairs: dict[int, KeyPair] = {}

    def answer(self, call: Call) -> Any:
        """Return the clients' reply in the exchange of keys, or what they reveal.

        Args:
            call: requests to clients of the endpoint.

        Raises:
            PolicyError: something that a client does not reveal.
            FrameError: a message that was tampered with.
        """
        refuse_other_verbs(call)
        if call.method == "sum_offer":
            return self._offer(call.to)
        if call.method == "sum_keys":
            return self._take_keys(call)
        if call.method == "reveal_pads":
            return self._reveal_pads(call)
        return self._reveal_shares(call)

    def reply_class(self, reply: type, through: tuple[str, ...]) -> type:
        """Return the class of a reply as it leaves its client.

        Args:
            reply: class of the reply.
            through: fields that pass through the pipeline.
        """
        return masked_class(reply, through)

    def check(self, call: Call) -> None:
        """Raise an error for a sum that a client cannot or will not take part in.

        It comes before the client's method, so nothing is computed for such a call. The rules that
        need the row follow in `masked`.

        Args:
            call: requests for rows of a sum.

        Raises:
            FrameError: the frame does not name the members of the sum.
            PolicyError: too few members, or a member whose key the client does not have.
        """
        for client, members in members_of(call):
            if client not in members:
                raise PolicyError(
                    f"client {client} is no member of the secure sum that it is asked for a row of"
                )
            least = max(self._minimum, self._shares)
            if len(members) < least:
                raise PolicyError(
                    f"a secure sum over {len(members)} client(s) is refused: client {client} asks "
                    f"for {least} or more"
                )
            self._check_keys(client, members)

    def masked(self, call: Call, reply: Any, masked: type) -> Any:
        """Return a reply with masked rows, commitments and boxes.

        Args:
            call: the request.
            reply: the reply after the pipeline, with one row per recipient in each field.
            masked: class of the masked reply (`masked_class`).

        Raises:
            UpdateError: a number beyond the range of its field.
            PolicyError: a client sent another row in this sum already.
        """
        groups = list(members_of(call))
        bits = bits_of(masked)
        tables: dict[str, torch.Tensor] = {}
        for name, width in bits.items():
            value = getattr(reply, name)
            if value is not None:
                tables[name] = self._encoded(name, value.values.cpu(), width, groups)
        commitments = []
        boxes: list[bytes] = []
        picks = []
        for k, (client, members) in enumerate(groups):
            context, graph = self._context(call, call.method, members)
            self._take_part(client, context, graph, [table[k] for table in tables.values()])
            masks = self._masks(client, context, graph)
            for name, table in tables.items():
                masks.mask(table[k], name)
            commitments.append(masks.commitment())
            sealed = masks.boxes()
            first = len(boxes)
            boxes += [sealed[peer] for peer in sorted(sealed)]
            picks.append(tuple(range(first, len(boxes))))
        fields = {name: Rows(tables[name]) if name in tables else None for name in bits}
        return masked(
            **fields,
            commitment=Rows(as_table(commitments, KEY)),
            boxes=Picks(as_table(boxes, BOX), tuple(picks)),
        )

    def _encoded(
        self,
        name: str,
        rows: torch.Tensor,
        bits: int,
        groups: Sequence[tuple[int, tuple[int, ...]]],
    ) -> torch.Tensor:
        """Return a field's rows (b, …) as integers, each in the precision of its group."""
        dtype = torch.int32 if bits == 32 else torch.int64
        table = torch.empty(rows.shape, dtype=dtype)
        for k, (_, members) in enumerate(groups):
            codec = self._ranges.fixed_point(name, bits, len(members))
            table[k : k + 1] = codec.encode(rows[k : k + 1], self._ranges.saturates(name))
        return table

    def _take_part(
        self, client: int, context: SumContext, graph: Graph, rows: Sequence[torch.Tensor]
    ) -> None:
        """Record that a client sends its row, or refuse."""
        floor = self._keys.secrets.sums.floors.get(client, 0)
        if context.call < floor:
            raise PolicyError(
                f"client {client} refuses the secure sum of call {context.call}: it has long "
                "answered later ones"
            )
        digest = hashlib.blake2b(digest_size=32)
        for row in rows:
            digest.update(row.numpy().tobytes())
        guard = self._guard(client)
        guard.take_part(context, graph, digest.digest())
        self._keys.secrets.sums.forget(client)

    def _offer(self, clients: Sequence[int]) -> SumKey:
        """Return the signed public keys of some clients."""
        keys = []
        signatures = []
        for client in clients:
            public = self._pair(client).public
            keys.append(public)
            signatures.append(self._keys.sign(client, self._statement(client, public)))
        return SumKey(Rows(as_table(keys, KEY)), Rows(as_table(signatures, SIGNATURE)))

    def _take_keys(self, call: Call) -> Ack:
        """Store the public keys of other clients, which no later message can replace.

        Raises:
            FrameError: a key that its client did not sign, or another one than before, or one that
                no honest server relays.
        """
        query: SumKeys = call.query
        known = self._keys.secrets.sums.public
        for k, own in enumerate(call.to):
            picks = list(query.ids.picks[k])
            ids = query.ids.table[picks].tolist()
            keys = [as_bytes(row) for row in query.keys.table[picks]]
            signatures = [as_bytes(row) for row in query.signatures.table[picks]]
            relayed = dict(zip(ids, keys, strict=True))
            if len(relayed) < len(ids):
                raise FrameError("the keys of a secure sum name a client twice")
            for client, key, signature in zip(ids, keys, signatures, strict=True):
                if known.get(client, key) != key:
                    raise FrameError(
                        f"client {own} was sent another key of client {client} than before: the "
                        "keys were tampered with, start a new run"
                    )
                if client not in known:
                    self._keys.verify(client, self._statement(client, key), signature)
            merged = {**known, **relayed}
            check_public_keys(merged, own, self._pair(own).public)
            known.update(relayed)
        return Ack()

    def _reveal_pads(self, call: Call) -> PadKeys:
        """Return the call's pad keys with lost neighbours, as the guards allow."""
        query: LostMembers = call.query
        keys: list[bytes] = []
        picks = []
        for k, (client, members) in enumerate(members_of(call)):
            context, graph = self._context(call, query.purpose, members)
            lost = query.lost.table[list(query.lost.picks[k])].tolist()
            peers = self._guard(client).reveal_pads(context, lost)
            revealed = self._masks(client, context, graph).pad_keys(peers)
            first = len(keys)
            keys += [revealed[peer] for peer in peers]
            picks.append(tuple(range(first, len(keys))))
        return PadKeys(Picks(as_table(keys, KEY), tuple(picks)))

    def _reveal_shares(self, call: Call) -> SeedShares:
        """Return the clients' shares of the survivors' seeds, as the guards allow."""
        query: RelayedBoxes = call.query
        shares: list[bytes] = []
        picks = []
        for k, (client, members) in enumerate(members_of(call)):
            context, graph = self._context(call, query.purpose, members)
            lost = set(query.lost.table[list(query.lost.picks[k])].tolist())
            survivors = [member for member in members if member not in lost]
            owners = self._guard(client).reveal_shares(context, survivors)
            senders = [owner for owner in owners if owner != client]
            boxes = [as_bytes(row) for row in query.boxes.table[list(query.boxes.picks[k])]]
            if len(boxes) != len(senders):
                raise FrameError(
                    f"client {client} was sent {len(boxes)} boxes of {len(senders)} survivors: the "
                    "frame is refused"
                )
            masks = self._masks(client, context, graph)
            values = masks.shares(owners, dict(zip(senders, boxes, strict=True)))
            first = len(shares)
            shares += [values[owner].to_bytes(VALUE, "big") for owner in owners]
            picks.append(tuple(range(first, len(shares))))
        return SeedShares(Picks(as_table(shares, VALUE), tuple(picks)))

    def _context(
        self, call: Call, purpose: str, members: tuple[int, ...]
    ) -> tuple[SumContext, Graph]:
        """Return the attempt that a frame belongs to, and the graph of its members."""
        public = self._keys.secrets.sums.public
        self._check_keys(call.to[0], members)
        graph = sum_graph(self._run, members, public, self._minimum)
        context = SumContext(
            run=self._run,
            purpose=purpose,
            call=call.step,
            attempt=call.attempt,
            members=members,
            threshold=graph.threshold,
        )
        return context, graph

    def _check_keys(self, client: int, members: Sequence[int]) -> None:
        """Raise PolicyError for members whose keys were not relayed."""
        public = self._keys.secrets.sums.public
        strangers = [member for member in members if member not in public]
        if strangers:
            raise PolicyError(
                f"client {client} has no key of client {strangers[0]}, so it takes part in no "
                "secure sum with it"
            )

    def _guard(self, client: int) -> UnmaskingGuard:
        """Return a client's guard, with what it has allowed so far."""
        guard = UnmaskingGuard(client, self._minimum, self._shares)
        guard.state = self._keys.secrets.sums.guards.setdefault(client, guard.state)
        return guard

    def _pair(self, client: int) -> KeyPair:
        """Return a client's X25519 keys, drawn once a run."""
        private = self._keys.secrets.sums.private
        if client not in private:
            private[client] = self._keys.secret(client, "secure sum x25519")
        if client not in self._pairs:
            self._pairs[client] = KeyPair(private[client])
        return self._pairs[client]

    def _masks(self, client: int, context: SumContext, graph: Graph) -> ClientMasks:
        """Return a client's masks for one attempt."""
        secrets = self._keys.secrets.sums
        if client not in secrets.masks:
            secrets.masks[client] = self._keys.secret(client, "secure sum self masks")
        pair_keys = {peer: self._pair_key(client, peer) for peer in graph.neighbours(client)}
        return ClientMasks(client, secrets.masks[client], pair_keys, context, graph)

    def _pair_key(self, client: int, peer: int) -> bytes:
        """Return the key that a client shares with another one."""
        own = self._pair(client)
        peer_public = self._keys.secrets.sums.public[peer]
        lower, upper = sorted([(client, own.public), (peer, peer_public)])
        ends = (*lower, *upper)
        if ends not in self._pair_keys:
            self._pair_keys[ends] = own.pair_key(client, peer, peer_public, self._run, PURPOSE)
        return self._pair_keys[ends]

    def _statement(self, client: int, public: bytes) -> bytes:
        """Return what a client signs when it offers its key: it holds for this run and client."""
        return transcript("securecluster secure sum offer v1", self._run, client, public)


def members_of(call: Call) -> Iterator[tuple[int, tuple[int, ...]]]:
    """Yield each recipient of a call, and the members of its sum.

    Raises:
        FrameError: a frame does not name the members of its sum.
    """
    if not call.group:
        raise FrameError(
            f"{call.method} is asked for a sum without members, and this run's sums are secure: "
            "start both sides from the same configuration"
        )
    parsed: dict[str, tuple[int, ...]] = {}
    for client, text, count in zip(call.to, call.group, call.members, strict=True):
        if text not in parsed:
            parsed[text] = parse_ids(text, count)
        if len(parsed[text]) != count:
            raise FrameError("a frame names another number of members than it counts")
        yield client, parsed[text]


def sum_graph(
    run: bytes, members: Sequence[int], public: Mapping[int, bytes], minimum: int
) -> Graph:
    """Return the graph of a sum, the same at clients and server.

    Args:
        run: hash of the run's configuration.
        members: ids of the members.
        public: public key of each member. The order of large graphs follows from them.
        minimum: members of the smallest sum.

    Raises:
        UsageError: fewer members than any sum has.
    """
    if len(members) < minimum:
        raise UsageError(f"a secure sum has {minimum} members or more, not {len(members)}")
    keys = [public[member] for member in sorted(members)]
    seed = transcript("securecluster sum graph seed v1", run, *keys)
    return build_graph(members, hashlib.sha256(seed).digest(), minimum)


def as_table(rows: Sequence[bytes], width: int) -> torch.Tensor:
    """Return rows of bytes as a table (r, width), uint8.

    Args:
        rows: rows of `width` bytes.
        width: bytes of a row, where there is none.
    """
    data = np.frombuffer(b"".join(rows), dtype=np.uint8).reshape(len(rows), width)
    return torch.as_tensor(data.copy())


def as_bytes(row: torch.Tensor) -> bytes:
    """Return a row of uint8 as bytes.

    Args:
        row: bytes (n,).
    """
    data: bytes = row.numpy().tobytes()
    return data
