"""The server's half of secure sums: it reads the sum of a group, and no single reply.

An ordinary sum takes two exchanges: the masked rows, and shares of the survivors' self masks.
Between them is one more where clients were lost, in which the others reveal the call's pad keys
with these. Two exchanges of keys come before the first sum of a run, and before later ones where
a member lacks a neighbour's key.

Where clients are in cohorts, who does not reply is asked again, and a cohort that still lacks a
member is left out of the sum as a whole (`privacy.cohorts`).

Of a client whose reply is of no use, the others' sum does not suffer where that can be: its row is
left out, or its shares are, as if it had not replied, and it counts as refused. A sum that cannot
be read, since nobody can tell who altered what, is given up. So is one that is beyond its range
when it is unmasked: a pad of a lost client that a survivor made up is not seen before.

Pads of rows that follow from different models do not cancel (`runtime.origins`), and nothing of the
sum need show it. So rows bring tags of their origins, and those that differ from most are left out
before anything is revealed, as if their clients had been lost.
"""

from __future__ import annotations

from bisect import bisect
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from securecluster.core.lazy_torch import torch
from securecluster.errors import FrameError
from securecluster.messaging.messages import Call, Picks, Response, Rows, format_ids
from securecluster.messaging.octets import as_bytes
from securecluster.privacy.cohorts import Cohort, whole_cohorts
from securecluster.protections.key_exchange import KeyRelay
from securecluster.protections.secure_sums.client import NAME, same_rows, sum_graph
from securecluster.protections.secure_sums.double_mask import (
    MaskedSum,
    SumContext,
    TooFewSurvivorsError,
    Unmasking,
    broken_pairs,
)
from securecluster.protections.secure_sums.graph import Graph, Plan
from securecluster.protections.secure_sums.messages import LostMembers, bits_of, summed_class
from securecluster.protections.secure_sums.pair_secrets import Octets
from securecluster.protections.sum_calls import FollowingSum
from securecluster.protections.sum_ranges import SumRanges
from securecluster.runtime.aggregators import Exchange, Total, members_by_group
from securecluster.runtime.port import TRIES, Connected, Port

# bytes of masked rows that are kept until the sum is unmasked: a client that is lost after its row
# arrived can then be taken out again
KEPT_BYTES = 1 << 30


class SecureSums(Connected):
    """Aggregator of masked rows.

    Args:
        run: hash of the run's configuration.
        ranges: ranges of the fields that are summed.
        dtype: type of the models' numbers.
        plan: what the graphs of sums have to bear.
        fixed: client methods whose rows are the same in every call (`fixed_sums`). Clients open
            one list of survivors of these, so a sum that is asked for again is over that list.
    """

    name = NAME
    server_reads_replies = False
    hides_replies = True

    def __init__(
        self,
        run: str,
        ranges: SumRanges,
        dtype: torch.dtype,
        plan: Plan,
        fixed: Collection[str] = (),
    ) -> None:
        self._run = run.encode()
        self._ranges = ranges
        self._dtype = dtype
        self._plan = plan
        self._minimum = plan.minimum
        self._fixed = fixed
        # by method with fixed rows: lists of survivors that clients were asked to open
        self._asked: dict[str, list[tuple[int, ...]]] = {}
        self.keys: KeyRelay = KeyRelay(self._run, self._neighbours)

    def _neighbours(
        self, members: Sequence[int], root: bytes
    ) -> Callable[[int], Sequence[int]] | None:
        """Return each member's neighbours; None for members that are too few to be asked."""
        if len(members) < self._minimum:
            return None
        return sum_graph(self._run, members, root, self._plan).neighbours

    def run(
        self,
        exchange: Exchange,
        call: Call,
        by: Sequence[int],
        groups: int,
        cohorts: Sequence[Cohort] = (),
    ) -> Total:
        """Collect masked rows, and unmask the sum of each group that enough clients survive.

        A sum that follows another one needs nearly all of its members, so it is attempted again
        with all of them where too many are lost before anybody reveals a share.

        Args:
            exchange: sends a call and returns the replies that arrive.
            call: the call to all clients, which have the keys of their neighbours (`ready`).
            by: group of each recipient of the call, in its order.
            groups: number of groups.
            cohorts: of the recipients, each within a group; empty where clients are lost one by
                one.
        """
        attempts = 1
        if isinstance(call.query, FollowingSum):
            attempts = TRIES
        for attempt in range(attempts):
            attempted = self._attempt(exchange, replace(call, attempt=attempt), by, groups, cohorts)
            if attempted is not None:
                return attempted
        return Total(None, (0,) * groups, ())

    def _attempt(
        self,
        exchange: Exchange,
        call: Call,
        by: Sequence[int],
        groups: int,
        cohorts: Sequence[Cohort],
    ) -> Total | None:
        """Return the sums of one attempt; None if it ended before anybody revealed a share."""
        group_of = dict(zip(call.to, by, strict=True))
        sums = self._group_sums(call, by, groups)
        for cohort in cohorts:
            _add_cohort(sums.get(group_of[cohort[0]]), cohort)
        positions = [k for k, group in enumerate(by) if group in sums]
        if not positions:  # groups below the minimum are never asked
            return Total(None, (0,) * groups, ())
        texts = {group: format_ids(group_sum.context.members) for group, group_sum in sums.items()}
        call = replace(call, group=tuple(texts.get(group, "") for group in by))
        masked = self._collect_rows(exchange, call, positions, group_of, sums)
        if masked is None:
            return None
        for group_sum in sums.values():
            group_sum.hold_to(self._asked.get(group_sum.context.values, []))
        unmasking = _Rounds(self.keys.port, call, texts)
        unmasking.reveal_pads(sums)
        opened = [group_sum for group_sum in sums.values() if group_sum.can_finish]
        if not opened:
            return None
        for group_sum in opened:
            if group_sum.context.values:
                self._asked.setdefault(group_sum.context.values, []).append(group_sum.survivors)
        unmasking.reveal_shares(sums)
        return self._total(masked, call, sums, groups)

    def _group_sums(self, call: Call, by: Sequence[int], groups: int) -> dict[int, _GroupSum]:
        """Return the sums of the groups that are large enough, by group."""
        minimum = 0
        if isinstance(call.query, FollowingSum):
            minimum = call.query.least
        sums = {}
        for group, clients in enumerate(members_by_group(call.to, by, groups)):
            members = sorted(clients)
            if len(members) < max(self._minimum, minimum):
                continue
            root = self.keys.tree.root
            graph = sum_graph(self._run, members, root, self._plan)
            context = SumContext(
                run=self._run,
                purpose=call.method,
                call=call.step,
                attempt=call.attempt,
                members=tuple(members),
                threshold=graph.threshold,
                root=root,
                values=same_rows(call.method, self._fixed),
            )
            least_survivors = max(minimum, self._ranges.least_members(self._minimum, len(members)))
            sums[group] = _GroupSum(context, graph, least_survivors)
        return sums

    def _collect_rows(
        self,
        exchange: Exchange,
        call: Call,
        positions: Sequence[int],
        group_of: Mapping[int, int],
        sums: Mapping[int, _GroupSum],
    ) -> type | None:
        """Add the masked rows to their groups' sums, part by part.

        A silent client would keep its whole cohort out of the sum, or be missing where all are
        needed, so it is asked again.

        Returns:
            Class of the replies; None if nobody replied.
        """
        masked: type | None = None
        refused: set[int] = set()
        values = same_rows(call.method, self._fixed)
        budget = KEPT_BYTES
        needed = isinstance(call.query, FollowingSum) or bool(self._asked.get(values))
        tries = TRIES if needed or any(group_sum.cohorts for group_sum in sums.values()) else 1
        for _ in range(tries):
            silent = [k for k in positions if not sums[group_of[call.to[k]]].has(call.to[k])]
            silent = [k for k in silent if call.to[k] not in refused]
            if not silent:
                break
            for response in exchange.stream(call.select(silent)):
                if response.reply is None:  # all clients of the part dropped out
                    continue
                masked = type(response.reply)
                for k, client in enumerate(response.ids):
                    row = _MaskedRow.read(response.reply, k)
                    budget -= row.bytes
                    try:
                        sums[group_of[client]].add(client, row, keep=budget >= 0)
                    except FrameError as error:
                        self.keys.port.refuse(error, [client])
                        refused.add(client)
        for group_sum in sums.values():
            self._leave_out_strays(call, group_sum)
            group_sum.leave_out_parts()
        return masked

    def _leave_out_strays(self, call: Call, group_sum: _GroupSum) -> None:
        """Leave out of a sum the rows of other origins than most have.

        Without a majority all of them are left out, and nobody can tell who is to blame.
        """
        strays = group_sum.strays()
        if not strays:
            return
        blamed = [] if len(strays) == len(group_sum.survivors) else strays
        error = _stray_error(call, strays, len(group_sum.survivors) - len(strays))
        self.keys.port.refuse(error, blamed)
        group_sum.discard(strays)

    def _total(self, masked: type, call: Call, sums: Mapping[int, _GroupSum], groups: int) -> Total:
        """Return the sums without masks; zeros for groups that failed."""
        counts = [0] * groups
        survivors: set[int] = set()
        tables: dict[str, torch.Tensor] = {}
        for group, group_sum in sums.items():
            if group_sum.seeds is None:
                continue
            try:
                decoded = self._decoded(masked, group_sum)
            except FrameError as error:
                self.keys.port.refuse(error, [])  # whose row or pad it was cannot be told
                continue
            counts[group] = len(group_sum.survivors)
            survivors.update(group_sum.survivors)
            for name, row in decoded.items():
                if name not in tables:
                    tables[name] = torch.zeros((groups, *row.shape), dtype=row.dtype)
                tables[name][group] = row
        if not survivors:
            return Total(None, tuple(counts), ())
        rows = {name: Rows(tables[name]) if name in tables else None for name in bits_of(masked)}
        ids = tuple(client for client in call.to if client in survivors)
        return Total(summed_class(masked)(**rows), tuple(counts), ids)

    def _decoded(self, masked: type, group_sum: _GroupSum) -> dict[str, torch.Tensor]:
        """Return the sums of one group by field, without those that the replies do not have.

        Raises:
            FrameError: a sum beyond its range.
        """
        decoded = {}
        members = len(group_sum.context.members)
        for name, bits in bits_of(masked).items():
            unmasked = group_sum.unmasked(name)
            if unmasked is None:
                continue
            # Numbers beside updates are few, and are decoded in full.
            dtype = self._dtype if bits == 32 else torch.float64
            noise = self._ranges.noise_of(name)
            if noise is not None and bits == 32:
                plan = noise.plan(unmasked.numel(), members)
                decoded[name] = noise.decode(unmasked, plan, dtype)
            else:
                codec = self._ranges.fixed_point(name, bits, members)
                decoded[name] = codec.decode(unmasked, len(group_sum.survivors), dtype)
        return decoded


def _stray_error(call: Call, strays: Sequence[int], others: int) -> FrameError:
    """Return the error of rows that follow from other public numbers than those of most members.

    Args:
        call: for the rows.
        strays: their clients.
        others: number of the other members whose rows arrived.
    """
    few = ", ".join(map(str, strays[:5])) + (", …" if len(strays) > 5 else "")
    about = f"round {call.round}: {call.method} of client(s) {few}"
    if not others:
        return FrameError(
            f"{about} follows from several models, of which none is that of most of them, so no "
            "sum of theirs can be read: start a new run"
        )
    return FrameError(
        f"{about} follows from another model, or other public numbers, than that of the {others} "
        "other member(s) of the secure sum, so it cannot be added: give them the last state that "
        "they had, or start a new run without them"
    )


def _add_cohort(group_sum: _GroupSum | None, cohort: Cohort) -> None:
    """Add a cohort to the sum of its group, unless the group is below the minimum."""
    if group_sum is not None:
        group_sum.cohorts.append(cohort)


@dataclass
class _MaskedRow:
    """One client's masked reply."""

    fields: dict[str, torch.Tensor]  # by field; absent ones are left out
    commitment: bytes
    boxes: Octets  # (k, 32) for the client's neighbours, in ascending order
    origin: bytes  # tag of the public numbers that it follows from

    @classmethod
    def read(cls, reply: Any, position: int) -> _MaskedRow:
        """Return the reply of one client of a batch."""
        fields = {}
        for name in bits_of(type(reply)):
            value = getattr(reply, name)
            if value is not None:
                fields[name] = value.row(position)
        boxes = _rows_of(reply.boxes, position)
        commitment = as_bytes(reply.commitment.row(position))
        return cls(fields, commitment, boxes, as_bytes(reply.origin.row(position)))

    @property
    def bytes(self) -> int:
        """Return the bytes of the rows."""
        return sum(row.numel() * row.element_size() for row in self.fields.values())


@dataclass
class _GroupSum:
    """The sum of one group, from its masked rows to the seeds that unmask it."""

    context: SumContext
    graph: Graph
    least_survivors: int  # that noise in shares, or the call's query, asks for
    sums: dict[str, MaskedSum] = field(default_factory=dict)
    survivors: tuple[int, ...] = ()
    commitments: dict[int, bytes] = field(default_factory=dict)
    origins: dict[int, bytes] = field(default_factory=dict)  # tags
    boxes: dict[int, Octets] = field(default_factory=dict)  # covered shares, by owner
    rows: dict[int, _MaskedRow] = field(default_factory=dict)
    pad_keys: dict[tuple[int, int], bytes] = field(default_factory=dict)  # by (survivor, lost)
    seeds: dict[int, bytes] | None = None
    only: tuple[int, ...] | None = None  # the one list that clients open, of rows that never change
    cohorts: list[Cohort] = field(default_factory=list)  # of the members; none for no cohorts

    @property
    def lost(self) -> tuple[int, ...]:
        """Return the members whose rows are not in the sum, ascending."""
        return tuple(c for c in self.context.members if c not in self.survivors)

    @property
    def can_finish(self) -> bool:
        """Return whether every survivor will see enough of the others alive.

        These are the rules of `UnmaskingGuard`; a group that breaks them is not asked to reveal
        anything.
        """
        alive = set(self.survivors)
        if self.only is not None and self.survivors != self.only:
            return False
        if len(alive) < self.least_survivors or 2 * len(alive) <= len(self.context.members):
            return False
        if len(alive) == len(self.context.members):
            return True
        for client in self.survivors:
            reachable = alive.intersection(self.graph.holders(client))
            if len(reachable) < self.context.threshold:
                return False
        return True

    def add(self, client: int, row: _MaskedRow, keep: bool) -> None:
        """Add a client's masked row.

        Args:
            client: id of the client.
            row: its reply.
            keep: True to keep the row, so that `discard` can take it out again.

        Raises:
            FrameError: a row with other fields than the first one, or another number of boxes.
        """
        self._check(client, row)
        for name, values in row.fields.items():
            self.sums[name].add(client, values)
        place = bisect(self.survivors, client)
        self.survivors = (*self.survivors[:place], client, *self.survivors[place:])
        self.commitments[client] = row.commitment
        self.origins[client] = row.origin
        self.boxes[client] = row.boxes
        if keep:
            self.rows[client] = row

    def _check(self, client: int, row: _MaskedRow) -> None:
        """Raise FrameError for a row that cannot be added, before anything is.

        The first row has the fields that the others must have.
        """
        neighbours = self.graph.neighbours(client)
        if len(row.boxes) != len(neighbours):
            raise FrameError(
                f"client {client} sent {len(row.boxes)} boxes for {len(neighbours)} neighbours in "
                "a secure sum"
            )
        if not self.sums:
            for name, values in row.fields.items():
                self.sums[name] = MaskedSum(
                    self.context, self.graph, name, values.shape, values.dtype
                )
        if set(row.fields) != set(self.sums):
            raise FrameError("masked rows of a secure sum differ in their fields")
        for name, values in row.fields.items():
            self.sums[name].check(values)

    def has(self, client: int) -> bool:
        """Return whether a client's row has arrived."""
        return client in self.commitments

    def strays(self) -> list[int]:
        """Return the clients whose rows have other origins than most; all where most have none."""
        tags = Counter(self.origins[client] for client in self.survivors)
        for tag, count in tags.most_common(1):
            if 2 * count > len(self.survivors):
                return [client for client in self.survivors if self.origins[client] != tag]
        return list(self.survivors)

    def leave_out_parts(self) -> None:
        """Take cohorts that lack a member out of the sum."""
        if self.cohorts:
            self.discard(set(self.survivors) - whole_cohorts(self.survivors, self.cohorts))

    def discard(self, clients: Iterable[int]) -> None:
        """Take the rows of clients, and of their cohorts, out of the sum.

        Without one of these rows the whole sum is given up.

        Args:
            clients: ids of the clients.
        """
        gone = set(clients)
        for cohort in self.cohorts:
            if not gone.isdisjoint(cohort):
                gone.update(set(cohort).intersection(self.survivors))
        if not gone <= set(self.rows):
            self.survivors = ()
            return
        for client in gone:
            for name, values in self.rows[client].fields.items():
                self.sums[name].discard(client, values)
        self.survivors = tuple(c for c in self.survivors if c not in gone)

    def hold_to(self, lists: Iterable[tuple[int, ...]]) -> None:
        """Leave out of the sum who was not in an earlier sum of the same rows.

        Args:
            lists: survivors of earlier sums of these rows.
        """
        for earlier in lists:
            if not set(earlier).isdisjoint(self.survivors):
                self.only = earlier
                self.discard(set(self.survivors) - set(earlier))

    def missing_pads(self) -> dict[int, tuple[int, ...]]:
        """Return the lost neighbours with which a survivor has not revealed its pad key."""
        missing: dict[int, tuple[int, ...]] = {}
        for survivor, peer in broken_pairs(self.graph, self.survivors):
            if (survivor, peer) not in self.pad_keys:
                missing[survivor] = (*missing.get(survivor, ()), peer)
        return missing

    def unmasked(self, name: str) -> torch.Tensor | None:
        """Return one field's sum in the ring, without masks; None for an absent field."""
        if name not in self.sums or self.seeds is None:
            return None
        broken = set(broken_pairs(self.graph, self.survivors))
        keys = {pair: key for pair, key in self.pad_keys.items() if pair in broken}
        return self.sums[name].unmask(self.seeds, keys)


class _Rounds:
    """The exchanges that unmask the sums of one call, for all of its groups at once.

    Args:
        port: sends messages to clients, and notes whose replies are of no use.
        call: the call for the rows.
        texts: members of each group, as text.
    """

    def __init__(self, port: Port, call: Call, texts: Mapping[int, str]) -> None:
        self._port = port
        self._call = call
        self._texts = texts

    def reveal_pads(self, sums: Mapping[int, _GroupSum]) -> None:
        """Let survivors reveal their pad keys with lost members.

        Who does not reply is lost, too, and the others are asked again with the larger list.

        Args:
            sums: by group.
        """
        while True:
            for _ in range(TRIES):
                if not self._ask_for_pads(sums):
                    return
            for group_sum in sums.values():
                if group_sum.can_finish:
                    group_sum.discard(group_sum.missing_pads())

    def _ask_for_pads(self, sums: Mapping[int, _GroupSum]) -> bool:
        """Ask once for all pad keys that are missing; return False if there are none."""
        groups: list[int] = []
        clients: list[int] = []
        for group, group_sum in sums.items():
            if group_sum.can_finish:
                missing = group_sum.missing_pads()
                clients += missing
                groups += [group] * len(missing)
        if not clients:
            return False
        query = LostMembers(self._call.method, _lost([sums[group] for group in groups]))
        response = self._send("reveal_pads", clients, groups, query)
        group_of = dict(zip(clients, groups, strict=True))
        refused = []
        for k, client in enumerate(response.ids):
            group_sum = sums[group_of[client]]
            lost = set(group_sum.lost)
            peers = [peer for peer in group_sum.graph.neighbours(client) if peer in lost]
            keys = response.reply.keys.table[list(response.reply.keys.picks[k])]
            if len(keys) != len(peers):
                error = FrameError(f"client {client} revealed other pads than it was asked for")
                self._port.refuse(error, [client])
                refused.append(client)
                continue
            for peer, key in zip(peers, keys, strict=True):
                group_sum.pad_keys[client, peer] = as_bytes(key)
        # not before all replies are read: they are about those who were lost before
        for client in refused:
            sums[group_of[client]].discard([client])
        return True

    def reveal_shares(self, sums: Mapping[int, _GroupSum]) -> None:
        """Let survivors reveal shares of each other's self masks, and put the seeds together.

        A group of which too few clients reply keeps its sum masked.

        Args:
            sums: by group.
        """
        open_groups = {}
        for group, group_sum in sums.items():
            if group_sum.can_finish:
                open_groups[group] = Unmasking(
                    group_sum.context,
                    group_sum.graph,
                    group_sum.survivors,
                    group_sum.commitments,
                    group_sum.boxes,
                )
        replied: set[int] = set()
        for _ in range(TRIES):
            clients: list[int] = []
            groups: list[int] = []
            for group in open_groups:
                silent = [c for c in sums[group].survivors if c not in replied]
                clients += silent
                groups += [group] * len(silent)
            if not clients:
                break
            replied.update(self._ask_for_shares(sums, open_groups, clients, groups))
            for group, unmasking in list(open_groups.items()):
                if self._put_together(unmasking, sums[group]):
                    del open_groups[group]

    def _put_together(self, unmasking: Unmasking, group_sum: _GroupSum) -> bool:
        """Take the seeds that shares give; return whether no more shares can help."""
        try:
            group_sum.seeds = unmasking.seeds()
        except TooFewSurvivorsError:
            return False  # those that did not reply are asked again
        except FrameError as error:
            self._port.refuse(error, [])  # who altered a share cannot be told
        for client in sorted(unmasking.altered):
            altered = FrameError(f"client {client} altered a share of a secure sum")
            self._port.refuse(altered, [client])
        return True

    def _ask_for_shares(
        self,
        sums: Mapping[int, _GroupSum],
        unmaskings: Mapping[int, Unmasking],
        clients: Sequence[int],
        groups: Sequence[int],
    ) -> tuple[int, ...]:
        """Ask some survivors for their shares, and return those that replied."""
        query = LostMembers(self._call.method, _lost([sums[group] for group in groups]))
        response = self._send("reveal_shares", clients, groups, query)
        group_of = dict(zip(clients, groups, strict=True))
        for k, client in enumerate(response.ids):
            unmasking = unmaskings[group_of[client]]
            try:
                unmasking.add_shares(client, _rows_of(response.reply.shares, k))
            except FrameError as error:
                self._port.refuse(error, [client])
        return response.ids

    def _send(
        self, method: str, clients: Sequence[int], groups: Sequence[int], query: Any
    ) -> Response:
        texts = [self._texts[group] for group in groups]
        counts = dict(zip(self._call.to, self._call.members, strict=True))
        members = [counts[client] for client in clients]
        return self._port.to_clients(
            method, clients, query, call=self._call, group=texts, members=members
        )


def _rows_of(field: Picks, position: int) -> Octets:
    """Return the rows of one frame, (r, width) uint8."""
    picks = field.picks[position]
    table: Octets = field.table.numpy()
    if picks and picks[-1] - picks[0] == len(picks) - 1 and list(picks) == sorted(picks):
        return table[picks[0] : picks[-1] + 1]
    return table[list(picks)]


def _lost(sums: Sequence[_GroupSum]) -> Picks:
    """Return the lost members of each sum, as a field of a message with one frame per sum."""
    ids: list[int] = []
    rows: dict[int, tuple[int, ...]] = {}  # of a sum, by its identity: many frames share one
    picks = []
    for group_sum in sums:
        if id(group_sum) not in rows:
            first = len(ids)
            ids += group_sum.lost
            rows[id(group_sum)] = tuple(range(first, len(ids)))
        picks.append(rows[id(group_sum)])
    return Picks(torch.tensor(ids, dtype=torch.int64), tuple(picks))
