"""The clients' half of secure sums: a service of the endpoint, and the masking of its replies.

Keys are exchanged once a run (`key_exchange`). The reply to the protocol's own call is masked, with
sealed shares of its self mask. Then, only where clients were lost, `reveal_pads` brings the call's
pad keys with the lost ones, and `reveal_shares` the shares of the survivors' self masks.

Security rules:

- The frames of a sum name its members, so a client holds the server to two members or more and to
  one list of survivors. What it has allowed is part of its state.
- A client that masks sums answers no plain one, and a group of which too few survive counts as if
  nobody had replied: a secure sum never becomes a plain one.
- Rows that never change are opened over one list, since sums over two lists differ by single rows.
  A method that is asked without a query has such rows, unless it declares `fixed=False`; one whose
  rows follow from data and public numbers declares `fixed=True`, since a server could ask for
  nearly the same numbers twice. A server that asks again leaves out who was not in the first sum.
- A sum that follows another one names its fewest survivors, which clients derive for themselves
  (`FollowingSum`).
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

from securecluster.core.lazy_torch import torch
from securecluster.errors import FrameError, PolicyError, UsageError
from securecluster.messaging.bounds import Between, Octets, Upto, Whole
from securecluster.messaging.messages import Call, Picks, Rows, parse_ids
from securecluster.privacy.masking.key_agreement import KeyRing
from securecluster.privacy.secure_sum.cohorts import Cohort, whole_cohorts
from securecluster.privacy.secure_sum.double_mask import ClientMasks, SumContext, UnmaskingGuard
from securecluster.privacy.secure_sum.graph import Graph, build_graph
from securecluster.privacy.secure_sum.pads import KEY, transcript
from securecluster.privacy.secure_sum.shamir import VALUE
from securecluster.runtime.key_exchange import EXCHANGE_METHODS, KeyExchange, as_bytes, as_table
from securecluster.runtime.masked_replies import BOX, BOXES, SumRanges, bits_of, masked_class
from securecluster.runtime.services import MessageTypes, refuse_other_verbs

PURPOSE = "secure sums"  # of the keys of pairs
LOST = Upto("lost", "clients")


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


@dataclass(frozen=True, eq=False)
class FollowingSum:
    """Request for rows that only hide a client if nearly all clients of an earlier sum send theirs.

    A message of this class, or of a subclass, is the query of a second sum. Clients send their rows
    to a sum over clients of the earlier one, and reveal nothing of them unless enough survive.
    """

    earlier: Annotated[int, Between(maximum="steps")]  # call of the earlier sum
    among: str  # clients whose rows are in the earlier sum, as text
    counted: Annotated[int, Between(maximum="clients")]  # their number
    least: Annotated[int, Between(maximum="clients")]  # smallest number of survivors of this sum


SUM_METHODS: Mapping[str, MessageTypes] = {
    **EXCHANGE_METHODS,
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
        shares: smallest number of survivors, where the pipeline's noise is in as many shares.
        fixed: client methods whose rows are the same in every call (`fixed_sums`).
        cohorts: of all clients of the run, where every sum is over whole ones; empty where clients
            take lists as they come, or cohorts follow from clusters that the server forms.
    """

    methods = SUM_METHODS

    def __init__(
        self,
        run: str,
        keys: KeyRing,
        ranges: SumRanges,
        minimum: int,
        shares: int = 0,
        fixed: Collection[str] = (),
        cohorts: Sequence[Cohort] = (),
    ) -> None:
        self._cohorts = cohorts
        self._run = run.encode()
        self._keys = keys
        self._ranges = ranges
        self._minimum = minimum
        self._shares = shares
        self._fixed = fixed
        self._exchange = KeyExchange(self._run, keys, PURPOSE)

    @property
    def adds_noise(self) -> bool:
        """Return whether rows get their noise here, and not in the pipeline."""
        return self._ranges.noise is not None

    def answer(self, call: Call) -> Any:
        """Return the clients' reply in the exchange of keys, or what they reveal.

        Args:
            call: requests to clients of the endpoint.

        Raises:
            PolicyError: something that a client does not reveal.
            FrameError: a message that was tampered with.
        """
        refuse_other_verbs(call)
        if call.method in EXCHANGE_METHODS:
            return self._exchange.answer(call)
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
            minimum = self.least_members(len(members))
            if len(members) < minimum:
                raise PolicyError(
                    f"a secure sum over {len(members)} client(s) is refused: client {client} asks "
                    f"for {minimum} or more"
                )
            check_cohorts(client, members, self._cohorts)
            self._exchange.check_members(client, members)
            if isinstance(call.query, FollowingSum):
                self._check_earlier_sum(client, members, call.query)

    def _check_earlier_sum(self, client: int, members: Sequence[int], query: FollowingSum) -> None:
        """Raise PolicyError unless a sum is over clients whose rows are in the earlier one."""
        among = parse_ids(query.among, query.counted)
        if not set(members) <= set(among):
            raise PolicyError(
                f"client {client} is asked for a row beside other clients than those of the "
                f"earlier sum of call {query.earlier}"
            )
        if not self._guard(client, len(among)).settle(query.earlier, among):
            raise PolicyError(
                f"client {client} did not take part in a sum of call {query.earlier} with these "
                "clients"
            )

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
        minimum = 0
        if isinstance(call.query, FollowingSum):
            minimum = call.query.least
        tables: dict[str, torch.Tensor] = {}
        for name, width in bits.items():
            value = getattr(reply, name)
            if value is not None:
                rows = value.values.cpu()
                if self._ranges.noise is not None and width == 32:
                    tables[name] = self._noised(name, rows, groups, call.step)
                else:
                    tables[name] = self._encoded(name, rows, width, groups)
        commitments = []
        boxes: list[bytes] = []
        picks = []
        for k, (client, members) in enumerate(groups):
            context, graph = self._context(call, call.method, members)
            rows = [table[k] for table in tables.values()]
            self._take_part(client, context, graph, rows, minimum)
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

    def _noised(
        self,
        name: str,
        rows: torch.Tensor,
        groups: Sequence[tuple[int, tuple[int, ...]]],
        step: int,
    ) -> torch.Tensor:
        """Return a field's rows (b, …) as integers, each with its client's share of the noise."""
        noise = self._ranges.noise_of(name)
        assert noise is not None
        table = torch.empty(rows.shape, dtype=torch.int32)
        for k, (client, members) in enumerate(groups):
            plan = noise.plan(rows[k].numel(), len(members))
            table[k] = noise.encode(rows[k], plan, client, name, step)
        return table

    def _take_part(
        self,
        client: int,
        context: SumContext,
        graph: Graph,
        rows: Sequence[torch.Tensor],
        least: int,
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
        guard = self._guard(client, len(context.members))
        guard.take_part(context, graph, digest.digest(), least)
        self._keys.secrets.sums.forget(client)

    def _reveal_pads(self, call: Call) -> PadKeys:
        """Return the call's pad keys with lost neighbours, as the guards allow."""
        query: LostMembers = call.query
        keys: list[bytes] = []
        picks = []
        for k, (client, members) in enumerate(members_of(call)):
            context, graph = self._context(call, query.purpose, members)
            lost = query.lost.table[list(query.lost.picks[k])].tolist()
            check_cohorts(client, set(members).difference(lost), self._cohorts)
            peers = self._guard(client, len(context.members)).reveal_pads(context, lost)
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
            check_cohorts(client, survivors, self._cohorts)
            owners = self._guard(client, len(context.members)).reveal_shares(context, survivors)
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
        self._exchange.check_members(call.to[0], members)
        graph = sum_graph(self._run, members, self._exchange.public, self._minimum)
        context = SumContext(
            run=self._run,
            purpose=purpose,
            call=call.step,
            attempt=call.attempt,
            members=members,
            threshold=graph.threshold,
            values=same_rows(purpose, self._fixed),
        )
        return context, graph

    def _guard(self, client: int, members: int) -> UnmaskingGuard:
        """Return a client's guard for a sum of some members, with what it has allowed so far."""
        minimum = self.least_members(members)
        guard = UnmaskingGuard(client, self._minimum, minimum)
        guard.state = self._keys.secrets.sums.guards.setdefault(client, guard.state)
        return guard

    def least_members(self, members: int) -> int:
        """Return the smallest number of members and survivors of a sum over some clients.

        Args:
            members: number of clients that are asked for a row.
        """
        return max(self._shares, self._ranges.least_members(self._minimum, members))

    def _masks(self, client: int, context: SumContext, graph: Graph) -> ClientMasks:
        """Return a client's masks for one attempt."""
        secrets = self._keys.secrets.sums
        if client not in secrets.masks:
            secrets.masks[client] = self._keys.secret(client, "secure sum self masks")
        neighbours = graph.neighbours(client)
        pair_keys = {peer: self._exchange.pair_key(client, peer) for peer in neighbours}
        return ClientMasks(client, secrets.masks[client], pair_keys, context, graph)


def check_cohorts(client: int, members: Collection[int], cohorts: Sequence[Cohort]) -> None:
    """Raise PolicyError for a list of a sum's clients that has a part of a cohort.

    Security rule: sums over whole cohorts alone cannot be solved for one of their clients, however
    many there are. Each client derives the cohorts from the configuration, so this binds a server
    that breaks the protocol as well, and needs no memory of earlier sums.

    Args:
        client: id of the client that refuses.
        members: the clients in the sum.
        cohorts: of all clients of the run; empty checks nothing.
    """
    if not cohorts:
        return
    parts = set(members) - whole_cohorts(members, cohorts)
    if parts:
        raise PolicyError(
            f"client {client} refuses a secure sum over part of a cohort (client {min(parts)} is "
            "in it without others of its cohort): sums over ever other clients can be solved for "
            "each of them"
        )


def members_of(call: Call) -> Iterator[tuple[int, tuple[int, ...]]]:
    """Yield each recipient of a call, and the members of its sum.

    Args:
        call: requests to clients.

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


def same_rows(purpose: str, fixed: Collection[str]) -> str:
    """Return the text that all sums of the same rows have in common (`SumContext.values`).

    Args:
        purpose: the client method whose replies are summed.
        fixed: methods whose rows are the same in every call.
    """
    if purpose in fixed:
        return purpose
    return ""


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
