"""The server's only access to clients: their ids and three verbs.

Everything that the server learns passes through a verb, so bytes, releases and transcripts are
complete by construction.

Local parameter servers (LPS) are parties: after `divide` the LPS of its cluster asks each client.
What they `relay` to the global server and back is recorded, counted under `servers`, and made again
on replay, where it must be the same; the ledger's events name their readers. Replay runs all
servers together, so it cannot show that an LPS used frames of its own members only.

State and transcripts are in main memory. What went through a pipeline is put on the server's
device, wherever replies come from, so that a replay on that device rounds as the run did.
"""

from __future__ import annotations

import copy
import dataclasses
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar, cast

from securecluster.core.lazy_torch import torch
from securecluster.core.randomness import Randomness
from securecluster.errors import RefusedError, UsageError
from securecluster.messaging import run_number
from securecluster.messaging.bounds import Limits, check
from securecluster.messaging.messages import (
    AUTHORITY_CALL,
    RELAY,
    Call,
    Response,
    Rows,
    frames,
    placed,
    select,
    stack,
)
from securecluster.messaging.outcomes import VerbOutcome
from securecluster.messaging.parties import SERVER, Party, lps
from securecluster.messaging.refusals import SENTENCES, code_of
from securecluster.messaging.replies import Pairs, Replies, Sums, check_finite, check_squares
from securecluster.privacy.cohorts import Cohort, Cohorts, RowSpace
from securecluster.privacy.dp.ledger import Event
from securecluster.privacy.pipeline import Pipeline
from securecluster.runtime.aggregators import Aggregator, Plain, members_by_group
from securecluster.runtime.call_context import CallContext
from securecluster.runtime.channel_state import ChannelState
from securecluster.runtime.endpoint import GATHER, PAIRS, SUM, least_members
from securecluster.runtime.mask_keys import MaskKeys
from securecluster.runtime.pair_aggregators import IDENTITY, PairAggregator, PlainPairs
from securecluster.runtime.port import TRIES, KeyMessage, Lists, Port
from securecluster.runtime.relays import Gathered
from securecluster.runtime.release_accounting import ReleaseAccounting
from securecluster.runtime.release_billing import Asked, Billing, Remote
from securecluster.runtime.release_policy import ReleasePolicy
from securecluster.runtime.transport import Transport

C = TypeVar("C")
Q = TypeVar("Q")
A = TypeVar("A")
ClientMethod = Callable[[C, CallContext, Q], A]
# what came of a request that nobody refused
REPLIED, SILENT = "replied", "silent"


class ServerChannel:
    """Server side of the network: client ids and three verbs, without client objects or data.

    Args:
        clients: number of clients; their ids are 0 … clients - 1.
        transport: delivers calls to clients and returns their replies.
        config: hash of the shared configuration, part of every frame.
        pipeline: stages that clients' replies pass through; its noise is accounted for here.
        randomness: the server's own draws, such as the sampling of clients; public.
        aggregator: forms the sums of `sum`; `Plain` by default.
        agreed: configuration that clients and server share, whose hash is in every frame.
        costs: accounting of the run's noise beyond the pipeline's own.
        device: where the server computes with fields that passed through the pipeline, wherever
            replies come from; main memory by default. All other fields of replies lie in main
            memory. A replay on the same device therefore rounds as the run did.
        limits: bounds that the configuration sets on replies; without it only the types of their
            fields are checked.
        pair_aggregator: forms R of `pairs`; `PlainPairs` by default.
        cohorts: by which clients take part in secure sums; None takes them one by one.

    Raises:
        UsageError: clients add noise in shares, but the aggregator reads single replies.
    """

    def __init__(  # noqa: PLR0913 (what the server of one run is made of)
        self,
        clients: int,
        transport: Transport,
        config: str,
        pipeline: Pipeline,
        randomness: Randomness,
        aggregator: Aggregator | None = None,
        agreed: Mapping[str, Any] | None = None,
        costs: ReleaseAccounting | None = None,
        device: torch.device | None = None,
        limits: Limits | None = None,
        pair_aggregator: PairAggregator | None = None,
        cohorts: Cohorts | None = None,
    ) -> None:
        self.cohorts = cohorts
        self._row_space = RowSpace(clients)
        self.clients = tuple(range(clients))
        self.limits = limits or Limits()
        self.state = ChannelState()
        self.round = 0
        self.randomness = randomness
        self.agreed = dict(agreed or {})
        self._costs = costs or ReleaseAccounting(pipeline)
        # A trusted server adds noise to sums, so their rounding must stay below the clip norm.
        self.aggregator = aggregator or Plain(wide=self._costs.curator is not None)
        self.pair_aggregator = pair_aggregator or PlainPairs()
        self._transport = transport
        self._refusing: set[int] = set()  # who refused its last request
        # what came of the last request to each client, since somebody refused one
        self._outcomes: dict[int, str] = {}
        self._config = config
        # A share of the noise protects a sum only; a single reply would carry too little of it.
        if pipeline.shares > 1 and self.aggregator.server_reads_replies:
            raise UsageError(
                "noise in shares protects sums alone, and this aggregator reads every reply: let "
                "each client add all of it"
            )
        # number of leading coordinates of an average that belong to the common layers
        self.common = pipeline.common
        self._mask_keys: MaskKeys | None = None
        if pipeline.keyed or self.aggregator.needs_seed or self.pair_aggregator.needs_seed:
            self._mask_keys = MaskKeys(clients)
        # Not in checkpoints: a resumed run remembers the replies since it was resumed.
        self._gathered = Gathered()
        # index of the local parameter server that calls a client, by client id
        self._asker: dict[int, int] = {}
        self._device = device or torch.device("cpu")
        self.record: Callable[[list[Event]], None] = self.add
        self._billing = Billing(
            costs=self._costs,
            state=lambda: self.state,
            record=lambda events: self.record(events),
            # nodes have ledgers of their own; clients in this process tell whether they were asked
            of_nodes=run_number.NAME in self.agreed,
            pads_pairs=not self.pair_aggregator.server_reads_rows,
        )
        # called with what each verb gives its reader; audits set it in a replay
        self.observe: Callable[[VerbOutcome], None] | None = None
        # called with the clients of each sum of a call, by its method and step; simulations set it
        self.settle: Callable[[str, int, Sequence[Sequence[int]]], None] | None = None
        self.connect()

    def connect(self) -> None:
        """Give each part of the channel the port by which it sends messages of its own."""
        port = Port(
            to_clients=partial(self._send, from_server=False),
            from_server=self._send,
            to_authority=partial(self._send, verb=AUTHORITY_CALL),
            all_to_clients=self._send_all,
            state=lambda: self.state,
            refuse=self._refuse,
        )
        self.aggregator.connect(port)
        self.pair_aggregator.connect(port)
        if self._mask_keys is not None:
            self._mask_keys.connect(port)

    def add(self, events: list[Event]) -> None:
        """Add the events of one call to the ledger.

        `record` is this method by default. A run may set it to a function that also writes the
        events to disk, before a verb returns the replies.

        Args:
            events: releases of one call.
        """
        for event in events:
            self.state.ledger.add(event)

    def gather(
        self,
        method: ClientMethod[C, Q, A],
        query: Q,
        to: Sequence[int],
        step: int | None = None,
        tries: int = 1,
        keys: bool = True,
    ) -> Replies[A]:
        """Collect each client's reply individually, in the order of `to`.

        Args:
            method: client method to call.
            query: message with one frame per recipient.
            to: ids of the recipients.
            step: number of an earlier call that these clients were not part of: their replies then
                have the mask of that call and compare with its replies. The next number by default.
            tries: number of requests to a client that does not reply, for the mask's key and then,
                with the same frame and under the same mask, for this call.
            keys: where the mask's key is agreed on, exchange those of later sums or pairs, too;
                False where the clients may have none.

        Returns:
            The replies that arrived, and the ids of the clients that did not reply.
        """
        key_source: Aggregator | PairAggregator | None = None
        if keys:  # of the part that needs some: pairs come before sums
            key_source = self.pair_aggregator if self.pair_aggregator.keys else self.aggregator
        remote = Remote.of(method)
        ready, step = self._open(query, to, key_source, step=step, tries=tries)
        members = [1] * len(ready)  # each reply is read on its own
        call = self._call(
            remote=remote, verb=GATHER, query=query, to=to, ready=ready, step=step, members=members
        )
        response = self._calls_of(remote, tries)(call)
        replies: Replies[A] = self._gathered_replies(remote, to, call, response)
        return replies

    def begin(
        self, method: ClientMethod[C, Q, A], query: Q, to: Sequence[int]
    ) -> Callable[[], Replies[A]]:
        """Gather beside the calls that follow: return the function that collects the replies.

        Args:
            method: client method to call.
            query: message with one frame per recipient.
            to: ids of the recipients, which none of the calls beside asks.
        """
        remote = Remote.of(method)
        ready, step = self._open(query, to, None)
        call = self._call(remote, GATHER, query, to, ready, step, [1] * len(ready))
        finish = self._transport.begin(call)

        def collected() -> Replies[A]:
            return self._gathered_replies(remote, to, call, self._begun(remote, call, finish))

        return collected

    def _begun(self, remote: Remote, call: Call, finish: Callable[[], Response]) -> Response:
        """Return the replies to a call that was sent before, after their checks."""
        response = finish()
        self._note_refusals(call, response)
        return self._checked(remote, call, response)

    def _gathered_replies(
        self, remote: Remote, to: Sequence[int], call: Call, response: Response
    ) -> Replies[Any]:
        """Return the single replies to a call, after they were recorded.

        Args:
            to: ids of all that were to be asked.
            call: to those of them that could answer.
            response: to the call, after its checks.
        """
        step = call.step
        reply = self._costs.read(remote.release, response.reply, step)
        self._remember(remote, response, reply, step)
        request = self._asked(remote, GATHER, step)
        if not self._billing.at_once(remote.release):
            recorded = response.ids
            if not remote.release.private:
                # Such replies report on local training, which may have happened at any client
                # that was called, although its reply did not arrive.
                recorded = call.to
            self._billing.record(request, recorded, reply)
        self._billing.record_unseen(request, response.ids)
        check_squares(self.round, response.ids, reply)
        self._observe(remote, GATHER, step, [(client,) for client in response.ids], reply)
        lost = self._note_lost(to, response.ids)
        return Replies(ids=response.ids, rows=reply, lost=lost, step=step)

    def post(self, method: ClientMethod[C, Q, A], query: Q, to: Sequence[int]) -> Replies[A]:
        """Gather under a call number, and so a mask, that no other call's batches depend on.

        Calls that only masked runs make are numbered apart, so that all later calls draw the same
        batches with and without a mask.

        Args:
            method: client method to call.
            query: message with one frame per recipient.
            to: ids of the recipients.
        """
        return self.gather(method, query, to, self._next_post())

    def post_each(
        self, method: ClientMethod[C, Q, A], query: Q, to: Sequence[int]
    ) -> list[Replies[A]]:
        """Post to several clients together, to each under a number, and so a mask, of its own.

        Args:
            method: client method to call.
            query: message with one frame, the same for each.
            to: ids of the recipients.
        """
        remote = Remote.of(method)
        calls = []
        for client in to:
            ready, step = self._open(query, [client], None, step=self._next_post())
            members = [1] * len(ready)
            calls.append(self._call(remote, GATHER, query, [client], ready, step, members))
        # a client that lacks the mask's key is not asked
        responses = iter(self._posted(remote, [call for call in calls if call.to]))
        replies = []
        for client, call in zip(to, calls, strict=True):
            response = next(responses) if call.to else Response((), None)
            replies.append(self._gathered_replies(remote, [client], call, response))
        return replies

    def _posted(self, remote: Remote, calls: Sequence[Call]) -> list[Response]:
        """Send calls of a method at once, and return the replies to each after their checks."""
        checked = []
        for call, response in zip(calls, self._transport.exchange_all(calls), strict=True):
            self._note_refusals(call, response)
            checked.append(self._checked(remote, call, response))
        return checked

    def _next_post(self) -> int:
        """Return the number of the next posted call."""
        self.state.post_step += 1
        return self.state.post_step

    def sum(
        self,
        method: ClientMethod[C, Q, A],
        query: Q,
        to: Sequence[int],
        by: Sequence[int] | None = None,
        groups: int | None = None,
        rosters: Sequence[Sequence[int]] | None = None,
    ) -> Sums[A]:
        """Collect one sum per group of clients, without single replies.

        Clients weight what they send: an aggregator cannot weight values that it does not see.
        Where replies may leave in sums only, groups that are too small for now are postponed
        (`_without_shrunken_groups`). Where the run has cohorts, a cohort that is not asked, ready
        and heard as a whole is left out.

        Args:
            method: client method to call.
            query: message with one frame per recipient.
            to: ids of the recipients.
            by: group of each recipient; one group for all by default.
            groups: number of groups; the largest of `by` plus one by default.
            rosters: all clients of each group, of which some are asked, for their cohorts; by
                default all clients where there is one group, and else those that are asked.

        Returns:
            Sums with (groups, …) fields, and the number of members of each.
        """
        remote = Remote.of(method)
        release = remote.release
        if by is None:
            by = [0] * len(to)
            rosters = [self.clients]
        group_of = dict(zip(to, by, strict=True))
        if groups is None:
            groups = 1 + max(group_of.values(), default=0)
        lists = partial(self._lists, group_of, rosters, groups)
        ready, step = self._open(query, to, self.aggregator, lists, tries=self._sum_tries)
        if GATHER not in release.via:
            ready = _without_shrunken_groups(ready, group_of, self.least_members)
        ready = self.aggregator.ready(ready, lists)
        ready, cohorts = self._in_cohorts(ready, group_of, rosters)
        ready_groups = [group_of[client] for client in ready]
        # Frames carry the size of the client's group, and clients refuse one that is too small.
        group_sizes = Counter(ready_groups)
        members = [group_sizes[group] for group in ready_groups]
        call = self._call(
            remote=remote, verb=SUM, query=query, to=to, ready=ready, step=step, members=members
        )
        exchange = self._calls_of(remote)
        if self.aggregator.hides_replies:
            exchange = self._hidden_calls_of(remote)
        sums = self.aggregator.run(exchange, call, ready_groups, groups, cohorts)
        rows = sums.rows
        if self.aggregator.hides_replies and rows is not None:
            rows = placed(rows, release.through, self._device)
        rows = self._costs.read(release, rows, step, sums.counts)
        rows = self._in_run_dtype(release, rows)
        # Rows that are hidden release nothing before their sum is read.
        request = self._asked(remote, SUM, step)
        at_once = self._billing.at_once(release) and not self.aggregator.hides_replies
        summed_groups = [group_of[client] for client in sums.ids]
        members_of = members_by_group(sums.ids, summed_groups, groups)
        if sums.ids and not at_once:
            self._remember_lists(members_of)
            self._billing.record_sums(request, sums, rows, group_of, ready_groups)
        self._billing.record_unseen(request, sums.ids)
        if self.settle is not None:
            self.settle(remote.name, step, members_of)
        self._observe(remote, SUM, step, members_of, rows)
        lost = self._note_lost(to, sums.ids)
        return Sums(ids=sums.ids, rows=cast(A, rows), counts=sums.counts, lost=lost, step=step)

    @property
    def least_members(self) -> int:
        """Return the members of the smallest sum that clients take part in."""
        return least_members(self.agreed)

    @property
    def _sum_tries(self) -> int:
        """Return how often a client without the mask seed is asked to agree on it before a sum."""
        # Where there are cohorts, it would keep its whole cohort out of the sum.
        return TRIES if self.cohorts is not None else 1

    def _in_cohorts(
        self,
        ready: Sequence[int],
        group_of: Mapping[int, int],
        rosters: Sequence[Sequence[int]] | None,
    ) -> tuple[list[int], list[Cohort]]:
        """Return the clients of cohorts that can answer as a whole, and these cohorts.

        Without cohorts these are all that can answer, and none.

        Args:
            ready: ids of the clients that can answer.
            group_of: group of every recipient of the call, by client id.
            rosters: all clients of each group; None where those are the recipients.
        """
        if self.cohorts is None:
            return list(ready), []
        if rosters is None:
            count = 1 + max(group_of.values(), default=0)
            rosters = members_by_group(group_of, group_of.values(), count)
        answering = set(ready)
        cohorts = []
        for roster in rosters:
            if not answering.isdisjoint(roster):
                cohorts += [c for c in self.cohorts.of(roster) if answering.issuperset(c)]
        complete = {client for cohort in cohorts for client in cohort}
        return [client for client in ready if client in complete], cohorts

    def _lists(
        self,
        group_of: Mapping[int, int],
        rosters: Sequence[Sequence[int]] | None,
        groups: int,
        able: Sequence[int],
    ) -> Sequence[Sequence[int]]:
        """Return the members of each of a call's sums, by the clients that can take part."""
        asked, _ = self._in_cohorts(able, group_of, rosters)
        return members_by_group(asked, [group_of[client] for client in asked], groups)

    def _remember_lists(self, groups: Sequence[Sequence[int]]) -> None:
        """Store the clients of secure sums, where they enlarge the row space of earlier ones.

        The size of each client's smallest sum is stored whatever the list.
        """
        if not self.aggregator.hides_replies:
            return
        lists = self.state.sum_lists
        smallest = self.state.smallest_sums
        for members in groups:
            for client in members:
                smallest[client] = min(len(members), smallest.get(client, len(members)))
        if self._row_space.rank != len(lists):  # the state was restored
            self._row_space = RowSpace(len(self.clients), lists)
        for members in groups:
            if members and self._row_space.add(members):
                lists.append(sorted(members))

    def pairs(
        self,
        method: ClientMethod[C, Q, A],
        query: Q,
        to: Sequence[int],
        then: str = IDENTITY,
        tries: int = 1,
    ) -> Pairs[Any]:
        """Compute R_ij = (row_i[j] + row_j[i]) / 2 over the clients that replied.

        The reply's one field is a row of len(to) numbers per client, in the order of `to`. Who
        reads the rows, and who reads R, depends on the aggregator for pairs.

        Args:
            method: client method to call.
            query: message with one frame per recipient.
            to: ids of the recipients.
            then: name of the function of R, (r, r), whose result is all that is returned
                (`PairOptions.functions` of the protocol); R itself by default.
            tries: number of requests to a client that does not reply.

        Raises:
            UsageError: fewer than two clients replied, or no function has this name.
            FrameError: the rows have another length.
        """
        self.pair_aggregator.check(then)
        remote = Remote.of(method)
        ready, step = self._open(query, to, self.pair_aggregator, tries=tries)
        ready = self.pair_aggregator.ready(ready, lambda able: [able])
        members = [2] * len(ready)  # a pair combines the rows of two clients
        call = self._call(
            remote=remote, verb=PAIRS, query=query, to=to, ready=ready, step=step, members=members
        )
        pairs = self.pair_aggregator.run(self._calls_of(remote, tries), call, tuple(to), then)
        self._billing.record_unseen(self._asked(remote, PAIRS, step), pairs.ids)
        self._note_lost(to, pairs.ids)
        self._observe(remote, PAIRS, step, [pairs.ids], pairs.relevance)
        return Pairs(pairs.ids, pairs.value, step)

    def _observe(
        self, remote: Remote, verb: str, step: int, groups: Sequence[Sequence[int]], content: Any
    ) -> None:
        """Report what a verb gives each of its readers, if anyone wants to know.

        Args:
            groups: the clients behind each row of the content.
            content: of the outcome; None if nobody replied.
        """
        if self.observe is None or content is None:
            return
        rows_of: dict[Party, list[int]] = {}
        for row, members in enumerate(groups):
            if not members:  # a sum over nobody
                continue
            # Local parameter servers call the clients, so each reads the replies of its own.
            askers = sorted({self._asker[client] for client in members if client in self._asker})
            readers = [lps(index) for index in askers] or [SERVER]
            for reader in readers:
                rows_of.setdefault(reader, []).append(row)
        for reader, rows in rows_of.items():
            shown = content
            if verb != PAIRS:
                shown = select(content, rows)
            outcome = VerbOutcome(
                reader=reader,
                method=remote.name,
                verb=verb,
                round=self.round,
                step=step,
                groups=tuple(tuple(groups[row]) for row in rows),
                content=copy.deepcopy(shown),  # protocols may compute in place
            )
            self.observe(outcome)

    def divide(self, labels: Sequence[int]) -> None:
        """Assign clients to local parameter servers, which send all later calls to them.

        Args:
            labels: cluster of each client, by client id; its local parameter server calls the
                client. Empty to let the server call all clients again.
        """
        self._asker = dict(enumerate(labels))

    def relay(self, method: Callable[[Q], A], query: Q, to: Sequence[int]) -> A:
        """Send a frame from each of some local parameter servers to the server, and its replies.

        Args:
            method: computes the server's replies from the frames.
            query: message with one frame per local parameter server.
            to: indices of the local parameter servers.
        """
        call = Call(
            config=self._config,
            method=method.__name__,
            verb=RELAY,
            round=self.round,
            step=self.state.step,
            to=tuple(to),
            query=query,
            members=(1,) * len(to),
        )
        reply = method(query)
        self._transport.relay(call, Response(call.to, reply))
        return reply

    def noise(self, field: str, trains: str = "usual") -> float:
        """Return the expected squared norm of the noise in one row of a field, whoever added it.

        Statistics of norms subtract it.

        Args:
            field: name of the field.
            trains: kind of training that the row comes from (`ReleasePolicy.trains`).
        """
        dimension = int(self.agreed.get("dimension", 0))
        return self._costs.noise(field, dimension, trains, self.round)

    def _open(
        self,
        query: Any,
        to: Sequence[int],
        key_source: Aggregator | PairAggregator | None,
        lists: Lists = lambda able: [able],
        step: int | None = None,
        tries: int = 1,
    ) -> tuple[list[int], int]:
        """Prepare a call: check its query, agree on the mask's key and number the call.

        Args:
            key_source: whose keys are exchanged beside the mask's; None for none.
            lists: members of each of the sums that need the keys, by the clients that can answer;
                one sum over all of them by default.
            step: number of an earlier call to continue; the next number by default.
            tries: number of key agreements with clients that do not have the seed.

        Returns:
            The recipients that can answer now, and the number of the call.
        """
        expected = frames(query, len(to))
        if expected != len(to):
            raise UsageError(f"a query with {expected} rows cannot go to {len(to)} clients")
        self._billing.begin()
        ready = list(to)
        if self._mask_keys is not None:
            # A client that only receives needs the seed, too: it must undo the mask.
            members = [client for client in to if client < len(self.clients)]  # no newcomers
            for _ in range(tries):
                beside = () if key_source is None else (key_source.beside(members, lists),)
                ready = self._mask_keys.ready(to, *beside)
        if step is None:  # calls that continue an earlier one draw the same batches and masks
            self.state.step += 1
            step = self.state.step
        return ready, step

    def _call(
        self,
        remote: Remote,
        verb: str,
        query: Any,
        to: Sequence[int],
        ready: Sequence[int],
        step: int,
        members: Sequence[int],
    ) -> Call:
        """Return the call to those recipients that can answer.

        Args:
            query: message with one frame for each of `to`.
            ready: the recipients that can answer, a subset of `to`.
            members: size of the sum that each reply of `ready` becomes part of.
        """
        asker: tuple[int, ...] = ()
        if self._asker:
            asker = tuple(self._asker[client] for client in to)
        call_to_all = Call(
            config=self._config,
            method=remote.name,
            verb=verb,
            round=self.round,
            step=step,
            to=tuple(to),
            query=query,
            members=(1,) * len(to),  # replaced below, for the clients that can answer
            asker=asker,
        )
        position_of = {client: position for position, client in enumerate(to)}
        positions = [position_of[client] for client in ready]
        call = dataclasses.replace(call_to_all.select(positions), members=tuple(members))
        self._gathered.check(remote.name, remote.release.relays, call)
        return call

    def _remember(self, remote: Remote, response: Response, reply: Any, step: int) -> None:
        """Store what single clients replied, as it arrived and as the protocol reads it.

        What depends on no data, or follows from averages, is not theirs alone.
        """
        release = remote.release
        if reply is None or not release.private or release.derived:
            return
        name = remote.name
        arrived = vars(response.reply)
        self._gathered.remember(name, step, response.ids, arrived.values())
        read = [value for field, value in vars(reply).items() if value is not arrived.get(field)]
        self._gathered.remember(name, step, response.ids, read)

    def _calls_of(self, remote: Remote, tries: int = 1) -> _MethodCalls:
        """Return what sends the calls of a method, whose replies the server reads."""
        checked = partial(self._checked, remote)
        return _MethodCalls(self._carried, self._carried_in_parts, checked, tries)

    def _hidden_calls_of(self, remote: Remote) -> _MethodCalls:
        """Return what sends the calls of a method, whose replies arrive hidden.

        Raises:
            UsageError: a method whose replies may leave in other ways than sums.
        """
        if remote.release.via != (SUM,):
            raise UsageError(
                f"{remote.name} may also leave in other ways than sums, so a secure sum would "
                "hide nothing: declare it with @answers(SUM), or take aggregation plain"
            )
        return _MethodCalls(self._carried, self._carried_in_parts, self._checked_hidden)

    def _checked(self, remote: Remote, call: Call, response: Response) -> Response:
        """Return the replies to a call after the checks that do not need them decoded.

        Releases are in the ledger before any other code can use the replies, so that a run that is
        stopped has accounted for everything that it received.

        Raises:
            FrameError: a reply exceeds the bounds of the configuration.
            UpdateError: a reply has numbers that are not finite.
        """
        if response.reply is None:
            return response
        self._billing.keep_receipts(response)
        release = remote.release
        through = {name: name in release.sealed for name in release.through}
        limits = self.limits.beside(call.query)
        check(response.reply, limits, through, finite=False)
        reply = placed(response.reply, release.through, self._device)
        response = dataclasses.replace(response, reply=reply)
        if self._billing.at_once(release):
            request = self._asked(remote, call.verb, call.step)
            self._billing.record(request, response.ids, reply)
        # After the ledger: a reply that is not finite has left its client all the same.
        check_finite(call, response)
        return response

    def _checked_hidden(self, call: Call, response: Response) -> Response:
        """Return the hidden replies to a call, after a check of their bounds.

        Raises:
            FrameError: a reply exceeds the bounds of the configuration.
        """
        if response.reply is not None:
            self._billing.keep_receipts(response)
            check(response.reply, self.limits.beside(call.query))
        return response

    def _send(  # noqa: PLR0913 (what messages of all parts have)
        self,
        method: str,
        to: Sequence[int],
        query: Any,
        step: int = 0,
        call: Call | None = None,
        group: Sequence[str] = (),
        members: Sequence[int] = (),
        verb: str = GATHER,
        from_server: bool = True,
    ) -> Response:
        """Send a message of a part of the channel, as `Send` declares.

        Args:
            verb: by which clients, or the key authority, are asked.
            from_server: False for a message from whoever calls the clients.
        """
        attempt = 0
        if call is not None:
            step = call.step
            attempt = call.attempt
        request = self._message(method, to, query, step, verb, from_server)
        request = dataclasses.replace(
            request, members=tuple(members) or request.members, group=tuple(group), attempt=attempt
        )
        return self._within_bounds(request, self._carried(request))

    def _send_all(self, messages: Sequence[KeyMessage]) -> list[Response]:
        """Send messages of exchanges of keys to clients, all at once."""
        requests = [
            self._message(
                message.method, message.to, message.query, message.step, GATHER, message.from_server
            )
            for message in messages
        ]
        responses = self._transport.exchange_all(requests)
        for request, response in zip(requests, responses, strict=True):
            self._note_refusals(request, response)
            self._within_bounds(request, response)
        return responses

    def _message(
        self, method: str, to: Sequence[int], query: Any, step: int, verb: str, from_server: bool
    ) -> Call:
        """Return a message of a part of the channel, which is of no sum."""
        asker: tuple[int, ...] = ()
        if self._asker and not from_server:
            asker = tuple(self._asker[client] for client in to)
        return Call(
            config=self._config,
            method=method,
            verb=verb,
            round=self.round,
            step=step,
            to=tuple(to),
            query=query,
            members=(1,) * len(to),
            asker=asker,
        )

    def _within_bounds(self, request: Call, response: Response) -> Response:
        """Return a response whose reply is within its bounds.

        Raises:
            FrameError: it is not.
        """
        if response.reply is not None:
            # The bounds of what clients send are the run's; the authority's have no sizes of it.
            limits = self.limits.beside(request.query)
            if request.verb == AUTHORITY_CALL:
                limits = Limits()
            check(response.reply, limits)
        return response

    def _asked(self, remote: Remote, verb: str, step: int) -> Asked:
        """Return a call as the ledger has it."""
        reader = "lps" if self._asker else "server"
        return Asked(remote, verb, self.round, step, reader)

    def end(self) -> None:
        """Write to the ledger what is left to write when the run has ended."""
        self._billing.end()

    def _note_lost(self, to: Sequence[int], received: Sequence[int]) -> tuple[int, ...]:
        """Store which recipients did not reply in this round, and return their ids.

        Args:
            to: ids of the recipients.
            received: ids of the clients whose replies arrived.
        """
        arrived = set(received)
        lost = tuple(client for client in to if client not in arrived)
        for client in lost:
            if client not in self._refusing:
                self._note_round(self.state.lost.setdefault(client, []))
        return lost

    def _carried(self, call: Call) -> Response:
        """Return what the transport brings for a call, and store who refused it.

        A client that refuses is alive and will refuse again: it is not lost.
        """
        response = self._transport.exchange(call)
        self._note_refusals(call, response)
        return response

    def _carried_in_parts(
        self, call: Call, chunk: int | None = None
    ) -> Iterator[tuple[Call, Response]]:
        """Yield what the transport brings for the parts of a call, and store who refused it."""
        for subcall, response in self._transport.stream(call, chunk):
            self._note_refusals(subcall, response)
            yield subcall, response

    def _note_refusals(self, call: Call, response: Response) -> None:
        """Store who refused a call, and who may have answered it unseen."""
        self._refusing.difference_update(call.to)
        for client, code in response.refused.items():
            self._note_refusal(client, code)
        self._billing.note(call, response)
        self._give_up_if_all_refuse(call, response)

    def _give_up_if_all_refuse(self, call: Call, response: Response) -> None:
        """End a run whose clients all refused their last request for one reason, or are silent."""
        if call.verb == AUTHORITY_CALL or not (response.refused or self._outcomes):
            return
        self._outcomes.update(dict.fromkeys(call.to, SILENT))
        self._outcomes.update(dict.fromkeys(response.ids, REPLIED))
        self._outcomes.update(response.refused)
        reasons = set(self._outcomes.values()) - {SILENT}
        everybody = self._outcomes.keys() >= set(self.clients)
        if not response.refused or not everybody or len(reasons) > 1:
            return
        (code,) = reasons
        silent = sum(outcome == SILENT for outcome in self._outcomes.values())
        refusers = f"all clients but {silent} that do not reply" if silent else "all clients"
        self._transport.give_up(
            RefusedError(
                f"{refusers} refuse, {call.method} of round {call.round} for instance: "
                f"{SENTENCES[code]} (their own logs say more)",
                code,
            )
        )

    def _refuse(self, error: Exception, clients: Sequence[int]) -> None:
        """Store whose replies were of no use, unless that ends the run, as `Port` declares."""
        self._transport.tolerate(error)
        for client in clients:
            self._note_refusal(client, code_of(error))

    def _note_refusal(self, client: int, code: str) -> None:
        """Store that a client refused a request, or that its reply was refused."""
        self._refusing.add(client)
        by_code = self.state.refused.setdefault(client, {})
        self._note_round(by_code.setdefault(code, []))

    def _note_round(self, rounds: list[int]) -> None:
        """Append this round, of which there may be several calls."""
        if not rounds or rounds[-1] != self.round:
            rounds.append(self.round)

    def _in_run_dtype(self, release: ReleasePolicy, rows: A) -> A:
        """Return sums of model rows in the run's own number type.

        A trusted server's sums are formed in float64, whatever the run's type is.
        """
        if rows is None or self.agreed.get("dtype") != "float32":
            return rows
        narrowed: dict[str, Rows] = {}
        for name in release.through:
            value = getattr(rows, name)
            if value.table.dtype == torch.float64:
                table = value.table.to(torch.float32)
                narrowed[name] = Rows(table, value.index)
        if not narrowed:
            return rows
        return dataclasses.replace(rows, **narrowed)  # type: ignore[type-var]


@dataclass(frozen=True)
class _MethodCalls:
    """Sends the calls of one client method, again to clients that do not reply.

    Args:
        carried: sends a call.
        carried_in_parts: sends a call, and yields its parts with their responses.
        checked: returns a response after its checks.
        tries: number of requests to a client that does not reply.
    """

    carried: Callable[[Call], Response]
    carried_in_parts: Callable[[Call, int | None], Iterator[tuple[Call, Response]]]
    checked: Callable[[Call, Response], Response]
    tries: int = 1

    def __call__(self, call: Call) -> Response:
        """Return the replies of all clients that answer one of several tries."""
        answered: set[int] = set()
        responses: list[Response] = []
        for attempt in self._attempts(call, answered):
            response = self.checked(attempt, self.carried(attempt))
            if response.ids:
                responses.append(response)
                answered.update(response.ids)
        if not responses:
            return Response((), None)
        if len(responses) == 1:
            return responses[0]
        return _merged(responses, call.to)

    def stream(self, call: Call, chunk: int | None = None) -> Iterator[Response]:
        """Yield the replies in parts, of all clients that answer one of several tries."""
        answered: set[int] = set()
        for attempt in self._attempts(call, answered):
            for subcall, response in self.carried_in_parts(attempt, chunk):
                answered.update(response.ids)
                yield self.checked(subcall, response)

    def _attempts(self, call: Call, answered: set[int]) -> Iterator[Call]:
        """Yield the call to the clients that have not answered yet, once for each try.

        Args:
            call: to all clients.
            answered: clients that have answered, which grows between two tries.
        """
        for _ in range(self.tries):
            silent = [k for k, client in enumerate(call.to) if client not in answered]
            if not silent:
                break
            yield call.select(silent)


def _without_shrunken_groups(
    ready: Sequence[int], group_of: Mapping[int, int], minimum: int
) -> list[int]:
    """Return the clients whose group is still large enough for a sum that hides its members.

    Security rule: where replies may leave in sums only, no sum is requested over fewer than
    the least members of a group that was larger, since a sum over one client is that client's own
    update. A group shrinks when members lack the mask seed; it is postponed to a later call.

    Args:
        ready: ids of the clients that can answer.
        group_of: group of every recipient of the call, by client id.
        minimum: members of the smallest sum.
    """
    requested = Counter(group_of.values())
    remaining = Counter(group_of[client] for client in ready)
    permitted = []
    for client in ready:
        group = group_of[client]
        # A group that was too small from the start is a mistake of the protocol and no temporary
        # shortage: its call goes out, and the endpoints refuse it with an error.
        required = min(minimum, requested[group])
        if remaining[group] >= required:
            permitted.append(client)
    return permitted


def _merged(responses: Sequence[Response], to: Sequence[int]) -> Response:
    """Return several responses, over disjoint clients, as one in the order of the recipients."""
    ids: list[int] = []
    replies = []
    for response in responses:
        ids.extend(response.ids)
        replies.append(response.reply)
    joined = stack(replies)
    position_of = {client: position for position, client in enumerate(ids)}
    order = [position_of[client] for client in to if client in position_of]
    ordered_ids = tuple(ids[k] for k in order)
    receipts = [response.receipts_at(k) for response in responses for k in range(len(response.ids))]
    ordered = tuple(receipts[k] for k in order) if any(receipts) else ()
    return Response(ordered_ids, select(joined, order), ordered)
