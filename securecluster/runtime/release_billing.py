"""Billing of a server's calls: what clients released in each becomes events of the ledger.

Releases are written before any other code can use the replies. Prices are those of
`release_accounting`; here they meet the calls: who replied, what a sum was over, and what nobody
saw.

A node that was asked, and neither replied nor refused beforehand, may have released what it was
asked for: its reply was lost or came too late, or it was killed after it had written the release
into its own ledger. In a secure sum it may have sent a row that is in no sum. What lies outside of
the nodes is then more than the server read, and the server's ledger is to be a bound of it.

A reply that nobody saw has no receipt. It costs as much as the dearest one of the same method in
this run; as long as there is none, the release waits to be priced, and where there never is one it
counts as exact.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from securecluster.messaging.digests import reply_digests, tells_noise
from securecluster.messaging.messages import Call, Response
from securecluster.privacy.dp.ledger import (
    CHOICE,
    COSTLESS,
    UNSEEN,
    Event,
    History,
    PaidOnce,
    expense_of,
    joint_price,
)
from securecluster.runtime.aggregators import Total, members_by_group
from securecluster.runtime.channel_state import ChannelState
from securecluster.runtime.endpoint import PAIRS, release_of
from securecluster.runtime.release_accounting import ReleaseAccounting, without_digests

if TYPE_CHECKING:
    from securecluster.messaging.receipts import Receipts
    from securecluster.privacy.dp.ledger import Ledger
    from securecluster.runtime.release_policy import ReleasePolicy


@dataclass(frozen=True)
class Remote:
    """A client method that is called, with its declaration, which is asked for once.

    Args:
        name: of the method.
        release: how its replies may leave.
    """

    name: str
    release: ReleasePolicy

    @classmethod
    def of(cls, method: Callable[..., Any]) -> Remote:
        """Return a client method with its declaration.

        Raises:
            PolicyError: the method has none, so it is not remote.
        """
        return cls(method.__name__, release_of(method))


@dataclass(frozen=True)
class Asked:
    """A call as the ledger has it.

    Args:
        remote: the client method that was called.
        verb: the verb that it was called through.
        round: the protocol's round.
        step: number of the call.
        reader: of the replies, "server" or "lps".
    """

    remote: Remote
    verb: str
    round: int
    step: int
    reader: str

    def event(self, **entries: Any) -> Event:
        """Return an event of the call."""
        return Event(
            method=self.remote.name,
            verb=self.verb,
            round=self.round,
            step=self.step,
            reader=self.reader,
            **entries,
        )


class Billing:
    """Record of clients' releases in a server's calls, as events of the ledger.

    Args:
        costs: accounting of the run's releases.
        state: returns the state of the channel, which a resumed run replaces.
        record: writes the events of one call to the ledger.
        of_nodes: whether clients are nodes, which may have released what nobody saw.
        pads_pairs: whether rows of pairs are padded.
    """

    def __init__(
        self,
        costs: ReleaseAccounting,
        state: Callable[[], ChannelState],
        record: Callable[[list[Event]], None],
        of_nodes: bool,
        pads_pairs: bool,
    ) -> None:
        self._costs = costs
        self._state = state
        self._write = record
        self._unseen = UnseenReleases(state) if of_nodes else None
        self._pads_pairs = pads_pairs
        # of the replies to the current call, by client id
        self._receipts: dict[int, Receipts] = {}
        self._paid: tuple[int, PaidOnce] = (0, PaidOnce())  # of so many events of the ledger

    def begin(self) -> None:
        """Forget the receipts of calls that have ended."""
        self._receipts.clear()
        if self._unseen is not None:
            self._unseen.begin()

    def keep_receipts(self, response: Response) -> None:
        """Store the receipts of replies until these are recorded.

        Args:
            response: to a call.
        """
        for position, client in enumerate(response.ids):
            self._receipts[client] = response.receipts_at(position)

    def note(self, call: Call, response: Response) -> None:
        """Note who may have released what a call asks for.

        Args:
            call: requests to clients.
            response: what came of them.
        """
        if self._unseen is not None:
            self._unseen.note(call, response)

    def at_once(self, release: ReleasePolicy) -> bool:
        """Return whether replies are releases as they arrive.

        Otherwise a trusted server adds noise to them first, and what is released is the result.

        Args:
            release: declaration of the called method.
        """
        return release.private and not self._costs.per_group(release)

    def record(
        self,
        request: Asked,
        ids: Sequence[int],
        reply: Any,
        digests: Sequence[str] | None = None,
        members: int = 1,
    ) -> None:
        """Write what some clients released in one call to the ledger.

        Args:
            request: the call.
            ids: the clients.
            reply: as it arrived; under a trusted server with its noise, since a digest of the rows
                without noise would distinguish them.
            digests: of each client's release, where `reply` is a sum; else of its frame.
            members: clients that were asked for a row of the sum, in which `ids` survived.
        """
        if not ids:
            return
        release = request.remote.release
        paid = self._paid_once()
        due: list[Receipts] = []
        positions_of: dict[Receipts, list[int]] = {}
        for position, client in enumerate(ids):
            receipts = self._costs.receipts_or_assumed(release, self._receipts.get(client))
            due.append(paid.due(client, receipts, request.remote.name, request.step))
            positions_of.setdefault(without_digests(due[-1]), []).append(position)
        events: list[Event] = []
        for receipts, positions in positions_of.items():
            release_digests = self._digests(request, reply, receipts, digests, positions, len(ids))
            event = request.event(
                fields=(),  # set by `events`, field by field
                ids=tuple(ids[k] for k in positions),
                digests=release_digests,
            )
            due_receipts = [due[k] for k in positions]
            events += self._costs.events(
                release, event, reply, due_receipts, members, survivors=len(ids)
            )
        self._write(events)

    def record_sums(
        self,
        request: Asked,
        sums: Total,
        rows: Any,
        group_of: Mapping[int, int],
        asked_groups: Sequence[int],
    ) -> None:
        """Write the sums of one call to the ledger.

        Args:
            request: the call.
            sums: the clients whose rows are in sums.
            rows: the sums as the protocol sees them.
            group_of: group of every recipient of the call, by client id.
            asked_groups: group of each client that was asked for a row.
        """
        groups = [group_of[client] for client in sums.ids]
        survivors_of = members_by_group(sums.ids, groups, len(sums.counts))
        # The noise is the sum's: another sum has other noise, so the digest is of the sum.
        digests = reply_digests(rows, len(sums.counts))
        if self._costs.sum_noise is None:
            of_clients = [digests[group_of[client]] for client in sums.ids]
            self.record(request, sums.ids, rows, of_clients)
            return
        # Noise in shares differs with the numbers of clients, so each sum has an event of its own.
        row_counts = Counter(asked_groups)
        for group, survivors in enumerate(survivors_of):
            of_survivors = [digests[group]] * sums.counts[group]
            row_count = row_counts[group]
            self.record(request, survivors, rows, of_survivors, row_count)

    def record_unseen(self, request: Asked, recorded: Sequence[int]) -> None:
        """Write to the ledger what clients may have released in a call without being heard.

        Args:
            request: the call.
            recorded: clients whose replies, or whose rows in a sum, are recorded.
        """
        release = request.remote.release
        if self._unseen is None or not release.private:
            return
        call = request.event(fields=(*release.through, *release.unmasked), ids=())
        events = self._unseen.of(call, recorded)
        if events:
            self._write(events)

    def end(self) -> None:
        """Write to the ledger what is left to write when the run has ended."""
        if self._unseen is not None and self._state().unpriced:
            self._write(self._unseen.rest())

    def _digests(
        self,
        request: Asked,
        reply: Any,
        receipts: Receipts,
        digests: Sequence[str] | None,
        positions: Sequence[int],
        clients: int,
    ) -> tuple[str, ...]:
        """Return the digests of the replies of some clients with equal receipts.

        Args:
            request: the call.
            reply: of all clients.
            receipts: of the clients.
            digests: of each client's release, where `reply` is a sum; else of its frame.
            positions: of the clients.
            clients: number of all clients.

        Returns:
            Nothing where a repetition has no cost of its own.
        """
        # One attempt pads one row only, so a repetition shows by its bits, which are integers.
        padded = request.verb == PAIRS and self._pads_pairs
        if not self._costs.repeatable(request.remote.release, reply, receipts):
            return ()
        if not padded and not tells_noise(reply):
            # Equal choices may come from different noise, so bits cannot show a repetition.
            return (CHOICE,) * len(positions)
        if digests is None:
            digests = reply_digests(reply, clients)
        return tuple(digests[k] for k in positions)

    def _paid_once(self) -> PaidOnce:
        """Return what clients have paid for once, by the ledger as it is now."""
        count, paid = self._paid
        events = self._state().ledger.events
        if count > len(events):  # the state was restored
            count, paid = 0, PaidOnce()
        paid.learn(events[count:])
        self._paid = (len(events), paid)
        return paid


class UnseenReleases:
    """Releases asked of nodes in the current calls, and those of them that nobody has seen.

    Args:
        state: returns the state of the channel, which a resumed run replaces.
    """

    def __init__(self, state: Callable[[], ChannelState]) -> None:
        self._state = state
        # by method and number of a call: who may have released what it asks for
        self._asked: dict[tuple[str, int], set[int]] = {}

    def begin(self) -> None:
        """Forget the calls that have ended."""
        self._asked.clear()

    def note(self, call: Call, response: Response) -> None:
        """Note who may have released what a call asks for.

        Args:
            call: requests to nodes.
            response: what came of them.
        """
        pending = self._asked.setdefault((call.method, call.step), set())
        pending.update(set(call.to).difference(response.without_release))

    def of(self, call: Event, observed: Collection[int]) -> list[Event]:
        """Return the unseen releases of a call that has ended, and of earlier ones with a price.

        Args:
            call: event with the call's names and numbers, and the names of what it asks for.
            observed: nodes whose releases the server has read.
        """
        state = self._state()
        unseen = self._asked.pop((call.method, call.step), set()).difference(observed)
        if unseen:
            for event in state.ledger.events:
                if (event.method, event.step) == (call.method, call.step):
                    unseen.difference_update(event.ids)
        if unseen:
            state.unpriced.append(_unseen(call, sorted(unseen)))
        events: list[Event] = []
        waiting: list[Event] = []
        for unpriced in state.unpriced:
            priced = _priced(unpriced, state.ledger)
            events += priced
            if not priced:
                waiting.append(unpriced)
        state.unpriced = waiting
        return events

    def rest(self) -> list[Event]:
        """Return as exact what nobody ever replied to, at the end of a run."""
        state = self._state()
        events = []
        for unpriced in state.unpriced:
            events += [
                replace(unpriced, fields=(name,), mechanism="exact") for name in unpriced.fields
            ]
        state.unpriced = []
        return events


def _unseen(event: Event, clients: Sequence[int]) -> Event:
    """Return an event of clients whose replies nobody has seen."""
    return replace(event, ids=tuple(clients), digests=(UNSEEN,) * len(clients))


def _priced(call: Event, ledger: Ledger) -> list[Event]:
    """Return the events of releases that were asked for; none where nobody's has a price yet.

    Args:
        call: the call, with the clients.
        ledger: of the run.
    """
    method_events = [
        event for event in ledger.events if event.method == call.method and not event.kept
    ]
    shown = [event for event in method_events if UNSEEN not in event.digests]
    # the same method may leave in sums and in single replies, with other noise
    shown = [event for event in shown if event.verb == call.verb] or shown
    by_reply: dict[tuple[int, tuple[int, ...]], list[Event]] = {}
    for event in shown:
        by_reply.setdefault((event.step, event.ids), []).append(event)
    if not by_reply:
        return []
    costliest = _costliest(list(by_reply.values()), ledger)
    # what is repeated to the bit however often it is asked for is paid for once
    paid = {client for event in method_events if event.once for client in event.ids}
    events = []
    for clients in (set(call.ids) - paid, paid.intersection(call.ids)):
        for event in costliest if clients else ():
            made = replace(event, verb=call.verb, round=call.round, step=call.step)
            made = replace(made, reader=call.reader, again=False, once=(), digests=())
            made = _unseen(made, sorted(clients))
            if event.once and clients <= paid:
                made = replace(made, mechanism="free", noise_multiplier=None)
            elif event.once:
                made = replace(made, once=made.digests)
            events.append(made)
    return events


def _costliest(replies: Sequence[list[Event]], ledger: Ledger) -> list[Event]:
    """Return the events of the reply that costs most.

    Args:
        replies: events of each kind of reply.
        ledger: that has the clients' numbers of samples.
    """
    kinds: dict[History, list[Event]] = {}
    for events in replies:
        samples = ledger.samples.get(events[0].ids[0])
        costly = [event for event in events if event.mechanism not in COSTLESS]
        history = frozenset(Counter(expense_of(event, samples) for event in costly).items())
        kinds.setdefault(history, events)
    if len(kinds) == 1:
        return replies[0]
    return kinds[max(kinds, key=lambda history: joint_price([history]).epsilon)]
