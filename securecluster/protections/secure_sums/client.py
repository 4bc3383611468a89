"""The clients' half of secure sums: a service of the endpoint, and the masking of its replies.

Keys of neighbours are exchanged before they are needed, once a run where lists of members stay
(`key_exchange`). The reply to the protocol's own call is masked, with
covered shares of its self mask. Then, only where clients were lost, `reveal_pads` brings the call's
pad keys with the lost ones, and `reveal_shares` what opens shares of the survivors' self masks.

Security rules:

- The frames of a sum name its members, so a client holds the server to two members or more and to
  one list of survivors. What it has allowed is part of its state.
- A client that masks sums answers no plain one, and a group of which too few survive counts as if
  nobody had replied: a secure sum never becomes a plain one.
- Rows that never change are opened over one list, since sums over two lists differ by single rows.
  A method that is asked without a query has such rows, unless it declares `fixed=False`; one whose
  rows follow from data and public numbers declares `fixed=True`, since a server could ask for
  nearly the same numbers twice. A server that asks again leaves out who was not in the first sum.
- Keys of pads follow from what the client was sent to compute from (`runtime.origins`). They stay
  those of the row that it has masked, whatever it is sent later.
- A sum that follows another one names its fewest survivors, which clients derive for themselves
  (`FollowingSum`).
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from securecluster.core.lazy_torch import torch
from securecluster.errors import PolicyError, StaleError, UsageError
from securecluster.messaging.messages import Call, FrameRows, Picks, Rows, parse_ids
from securecluster.messaging.octets import as_table
from securecluster.privacy.cohorts import Cohort
from securecluster.privacy.keyed_digest import keyed_digest
from securecluster.privacy.masking.pads import KEY, derived, encoded, purpose_hash
from securecluster.protections.key_exchange import EXCHANGE_METHODS, KeyExchange
from securecluster.protections.secure_sums.double_mask import (
    TAG,
    ClientMasks,
    SumContext,
    UnmaskingGuard,
    covered_shares,
    deal,
    mask_tables,
    opened_shares,
    origin_tag,
)
from securecluster.protections.secure_sums.graph import Graph, Plan, build_graph
from securecluster.protections.secure_sums.messages import (
    BOX,
    SUM_METHODS,
    LostMembers,
    PadKeys,
    SeedShares,
    bits_of,
    masked_class,
)
from securecluster.protections.secure_sums.pair_secrets import Octets, Pairs, PairSecrets
from securecluster.protections.secure_sums.shamir import VALUE
from securecluster.protections.secure_sums.sum_record import SumRecord
from securecluster.protections.sum_calls import (
    FollowingSum,
    check_cohorts,
    check_sums_alone,
    members_of,
)
from securecluster.protections.sum_ranges import SumRanges
from securecluster.runtime.client_half import ClientHalf
from securecluster.runtime.services import refuse_other_verbs

if TYPE_CHECKING:
    from securecluster.privacy.masking.key_agreement import KeyRing
    from securecluster.runtime.release_policy import ReleasePolicy

NAME = "secagg"
PURPOSE = "secure sums"  # of the keys of pairs
ROW_DIGESTS = purpose_hash("securecluster row digests v2")  # what their keys are for
# graphs that are kept, such as those of the clusters of a round
KEPT_GRAPHS = 16
# pairs of clients, and members of graphs, whose places stay in memory
KEPT_PAIRS = 1 << 19


class SecureSumService(ClientHalf):
    """The part of one endpoint's clients in secure sums.

    Args:
        run: hash of the run's configuration.
        keys: the clients' identities, roster and secrets.
        ranges: ranges of the fields that are summed.
        plan: what the graphs of sums have to bear.
        shares: fewest members and survivors: the pipeline's noise is in as many shares, or the
            clients' owner asks for as many.
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
        plan: Plan,
        shares: int = 0,
        fixed: Collection[str] = (),
        cohorts: Sequence[Cohort] = (),
    ) -> None:
        self._cohorts = cohorts
        self._run = run.encode()
        self._keys = keys
        self._ranges = ranges
        self._plan = plan
        self._minimum = plan.minimum
        self._shares = shares
        self._fixed = fixed
        self._exchange = KeyExchange(self._run, keys, PURPOSE)
        # of the last call, by context and origin
        self._attempts: dict[tuple[bytes, bytes], _Attempt] = {}
        # of the last graphs, as far as `KEPT_PAIRS` allows
        self._pairs: OrderedDict[int, Pairs] = OrderedDict()  # they hold their graphs

    @property
    def least_survivors(self) -> Callable[[int], int] | None:
        """Return the function to the smallest number of survivors whose sum has enough noise.

        None where clients add all of their noise in the pipeline.
        """
        if self._ranges.noise is None:
            return None
        return self.least_members

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

    def check(self, call: Call, release: ReleasePolicy) -> None:
        """Raise an error for a sum that a client cannot or will not take part in.

        Args:
            call: requests for rows of a sum.
            release: declaration of the called method.

        Raises:
            FrameError: the frame does not name the members of the sum.
            PolicyError: replies that leave in other ways, too few members, or a neighbour whose key
                the client does not have.
        """
        check_sums_alone(call, release)
        if len(set(call.to)) < len(call.to):
            raise PolicyError("a client is asked for two rows of one secure sum")
        # Clients of one sum share a list, here by its identity: to hash it for each takes long.
        checked: dict[int, frozenset[int]] = {}
        graphs: dict[tuple[int, bytes], Graph] = {}
        for client, members in members_of(call):
            among = checked.get(id(members)) or frozenset(members)
            if client not in among:
                raise PolicyError(
                    f"client {client} is no member of the secure sum that it is asked for a row of"
                )
            minimum = self.least_members(len(members))
            if len(members) < minimum:
                raise PolicyError(
                    f"a secure sum over {len(members)} client(s) is refused: client {client} asks "
                    f"for {minimum} or more"
                )
            if id(members) not in checked:
                check_cohorts(client, members, self._cohorts)
                checked[id(members)] = among
            root = self._exchange.root(client)
            key = (id(members), root)
            if key not in graphs:
                graphs[key] = sum_graph(self._run, members, root, self._plan)
            self._exchange.check_neighbours(client, graphs[key].neighbours(client))
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

    def hidden(self, call: Call, reply: Any, expected: type, release: ReleasePolicy) -> Any:
        """Return a reply with masked rows, commitments and boxes.

        Args:
            call: the request.
            reply: the reply after the pipeline, with one row per recipient in each field.
            expected: class of the reply.
            release: declaration of the called method.

        Raises:
            UpdateError: a number beyond the range of its field.
            PolicyError: a client sent another row in this sum already.
        """
        masked = masked_class(expected, release.through)
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
                    # rows with shares of noise move every coordinate
                    if self.tap is not None:
                        largest = self._largest(name, width, groups)
                        self.tap(call, name, tables[name].numpy(), largest)
        all_masks = []
        tags = []
        arrays = [table.numpy() for table in tables.values()]
        for k, (client, context, pairs) in enumerate(self._contexts(call, call.method)):
            origin = call.origins[k]
            rows = [array[k] for array in arrays]
            self._take_part(client, context, pairs.graph, rows, minimum, origin)
            attempt = self._attempt(context, pairs, origin)
            all_masks.append(attempt.masks_of(client, self._mask_secret(client)))
            tags.append(attempt.tag)
        deal(all_masks)
        mask_tables(all_masks, tables)
        commitments = [masks.commitment() for masks in all_masks]
        fields = {name: Rows(tables[name]) if name in tables else None for name in bits}
        return masked(
            **fields,
            commitment=Rows(as_table(commitments, KEY)),
            boxes=_picks(covered_shares(all_masks), BOX),
            origin=Rows(as_table(tags, TAG)),
        )

    def _encoded(
        self,
        name: str,
        rows: torch.Tensor,
        bits: int,
        groups: Sequence[tuple[int, tuple[int, ...]]],
    ) -> torch.Tensor:
        """Return a field's rows (b, …) as integers, each in the precision of its group."""
        saturates = self._ranges.saturates(name)
        sizes = [len(members) for _, members in groups]
        if len(set(sizes)) == 1:
            return self._ranges.fixed_point(name, bits, sizes[0]).encode(rows, saturates)
        encoded = []
        for row, members in zip(rows, sizes, strict=True):
            codec = self._ranges.fixed_point(name, bits, members)
            encoded.append(codec.encode(row[None], saturates))
        return torch.cat(encoded)

    def _largest(
        self, name: str, bits: int, groups: Sequence[tuple[int, tuple[int, ...]]]
    ) -> list[int] | None:
        """Return by client the integer that larger ones are clamped to; None where none are."""
        if not self._ranges.saturates(name):
            return None
        codecs = [self._ranges.fixed_point(name, bits, len(members)) for _, members in groups]
        return [codec.largest for codec in codecs]

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
        rows: Sequence[NDArray[Any]],
        minimum: int,
        origin: bytes,
    ) -> None:
        """Record that a client sends its row, or refuse."""
        record = self._record(client)
        if context.call < record.floor:
            raise StaleError(
                f"client {client} refuses the secure sum of call {context.call}: it has long "
                "answered later ones"
            )
        key = derived(self._mask_secret(client), ROW_DIGESTS)
        digest = hashlib.blake2b(digest_size=32)
        for number, row in enumerate(rows):
            about = context.hash + encoded(number)
            digest.update(keyed_digest(key, about, row))
        guard = self._guard(client, len(context.members))
        guard.take_part(context, graph, digest.digest(), minimum, origin)
        record.forget()

    def _reveal_pads(self, call: Call) -> PadKeys:
        """Return the call's pad keys with lost neighbours, as the guards allow."""
        query: LostMembers = call.query
        revealed = []
        for k, (client, context, pairs) in enumerate(self._contexts(call, query.purpose)):
            lost = query.lost.table[list(query.lost.picks[k])].tolist()
            check_cohorts(client, set(context.members).difference(lost), self._cohorts)
            guard = self._guard(client, len(context.members))
            peers = guard.reveal_pads(context, lost)
            # the pads that it has added, whatever it was sent since
            attempt = self._attempt(context, pairs, guard.origin(context))
            masks = attempt.masks_of(client, self._mask_secret(client))
            keys = b"".join(masks.pad_keys(peers).values())
            revealed.append(np.frombuffer(keys, dtype=np.uint8).reshape(-1, KEY))
        return PadKeys(_picks(revealed, KEY))

    def _reveal_shares(self, call: Call) -> SeedShares:
        """Return what opens the clients' shares of the survivors' seeds, as the guards allow."""
        query: LostMembers = call.query
        all_masks = []
        allowed = []
        # of lists that clients of one sum share, by its context and rows of the message
        survivors_of: dict[tuple[bytes, FrameRows], tuple[int, ...]] = {}
        for k, (client, context, pairs) in enumerate(self._contexts(call, query.purpose)):
            about = (context.hash, query.lost.picks[k])
            if about not in survivors_of:
                lost = set(query.lost.table[list(query.lost.picks[k])].tolist())
                survivors = context.members
                if lost:
                    survivors = tuple(member for member in survivors if member not in lost)
                check_cohorts(client, survivors, self._cohorts)
                survivors_of[about] = survivors
            survivors = survivors_of[about]
            guard = self._guard(client, len(context.members))
            allowed.append(guard.reveal_shares(context, survivors))
            attempt = self._attempt(context, pairs, guard.origin(context))
            all_masks.append(attempt.masks_of(client, self._mask_secret(client)))
        deal(all_masks)
        return SeedShares(_picks(opened_shares(all_masks, allowed), VALUE))

    def _contexts(self, call: Call, purpose: str) -> Iterator[tuple[int, SumContext, Pairs]]:
        """Yield each client of a call, the attempt that it belongs to, and the members' pairs."""
        # clients of one sum that were told one root share both; lists are told apart as in `check`
        context_of: dict[tuple[int, bytes], tuple[SumContext, Pairs]] = {}
        for client, members in members_of(call):
            root = self._exchange.root(client)
            key = (id(members), root)
            if key not in context_of:
                context_of[key] = self._context(call, purpose, members, root)
            yield client, *context_of[key]

    def _context(
        self, call: Call, purpose: str, members: tuple[int, ...], root: bytes
    ) -> tuple[SumContext, Pairs]:
        """Return the attempt that a frame belongs to, and the pairs of its members."""
        graph = sum_graph(self._run, members, root, self._plan)
        # by identity: graphs of other keys may look the same
        pairs = self._pairs.get(id(graph))
        if pairs is None:
            pairs = self._pairs[id(graph)] = Pairs(graph, self._exchange.pair_key)
            self._forget_pairs()
        self._pairs.move_to_end(id(graph))
        context = SumContext(
            run=self._run,
            purpose=purpose,
            call=call.step,
            attempt=call.attempt,
            members=graph.members,
            threshold=graph.threshold,
            root=root,
            values=same_rows(purpose, self._fixed),
        )
        return context, pairs

    def _attempt(self, context: SumContext, pairs: Pairs, origin: bytes) -> _Attempt:
        """Return what the clients derive for one attempt and rows of one origin."""
        key = (context.hash, origin)
        attempt = self._attempts.get(key)
        if attempt is None or attempt.pairs is not pairs:
            # What is derived for a call outlives it in no memory: a late request derives it anew.
            for earlier, kept in list(self._attempts.items()):
                if kept.call != context.call:
                    del self._attempts[earlier]
            attempt = self._attempts[key] = _Attempt(context, pairs, origin)
            self._forget_pairs()
        return attempt

    def _forget_pairs(self) -> None:
        """Drop the pairs of the oldest graphs, but never those of the last one."""
        total = sum(len(pairs) for pairs in self._pairs.values())
        while total > KEPT_PAIRS and len(self._pairs) > 1:
            _, oldest = self._pairs.popitem(last=False)
            total -= len(oldest)

    def _guard(self, client: int, members: int) -> UnmaskingGuard:
        """Return a client's guard for a sum of some members, with what it has allowed so far."""
        minimum = self.least_members(members)
        guard = UnmaskingGuard(client, self._minimum, minimum)
        guard.state = self._record(client).guard
        return guard

    def _record(self, client: int) -> SumRecord:
        """Return what a client keeps between secure sums."""
        return self._keys.record(NAME, client, SumRecord)

    def least_members(self, members: int) -> int:
        """Return the smallest number of members and survivors of a sum over some clients.

        Args:
            members: number of clients that are asked for a row.
        """
        return max(self._shares, self._ranges.least_members(self._minimum, members))

    def _mask_secret(self, client: int) -> bytes:
        """Return the secret of a client's self masks, 32 bytes, drawn once a run."""
        record = self._record(client)
        if not record.mask:
            record.mask = self._keys.secret(client, "secure sum self masks")
        return record.mask


class _Attempt:
    """What clients of one machine derive for one attempt and rows of one origin.

    It follows from what they keep, and is only kept from the rows to the shares to save time.

    Args:
        context: the attempt.
        pairs: of its members.
        origin: of the rows.

    Attributes:
        call: number of the call.
        tag: tag of the origin, for the server.
    """

    def __init__(self, context: SumContext, pairs: Pairs, origin: bytes) -> None:
        self.pairs = pairs
        self.call = context.call
        self.tag = origin_tag(origin, context)
        self._context = context
        self._secrets = PairSecrets(pairs, context.hash, origin)
        self._masks: dict[int, ClientMasks] = {}

    def masks_of(self, client: int, secret: bytes) -> ClientMasks:
        """Return a client's masks.

        Args:
            client: its id.
            secret: key of its self masks.
        """
        masks = self._masks.get(client)
        if masks is None or masks.secret != secret:
            masks = self._masks[client] = ClientMasks(client, secret, self._context, self._secrets)
        return masks


def _picks(tables: Sequence[Octets], width: int) -> Picks:
    """Return the rows of each frame as a field of a message.

    Args:
        tables: bytes (r, width) of each frame.
        width: bytes of a row, where there is none.
    """
    picks = []
    first = 0
    for table in tables:
        picks.append(tuple(range(first, first + len(table))))
        first += len(table)
    rows = np.concatenate([np.empty((0, width), dtype=np.uint8), *tables])
    return Picks(torch.from_numpy(rows), tuple(picks))


def same_rows(purpose: str, fixed: Collection[str]) -> str:
    """Return the text that all sums of the same rows have in common (`SumContext.values`).

    Args:
        purpose: the client method whose replies are summed.
        fixed: methods whose rows are the same in every call.
    """
    if purpose in fixed:
        return purpose
    return ""


def sum_graph(run: bytes, members: Sequence[int], root: bytes, plan: Plan) -> Graph:
    """Return the graph of a sum, the same at clients and server.

    Args:
        run: hash of the run's configuration.
        members: ids of the members.
        root: of the tree of the clients' keys. The order of the members follows from it.
        plan: what the graph has to bear.

    Raises:
        UsageError: fewer members than any sum has.
    """
    if len(members) < plan.minimum:
        raise UsageError(f"a secure sum has {plan.minimum} members or more, not {len(members)}")
    seed = purpose_hash("securecluster sum graph seed v2", run, root)
    return _built(tuple(sorted(members)), seed, plan)


@lru_cache(KEPT_GRAPHS)
def _built(members: tuple[int, ...], seed: bytes, plan: Plan) -> Graph:
    """Return `build_graph`, which all sums over the same members have in common."""
    return build_graph(members, seed, plan)
