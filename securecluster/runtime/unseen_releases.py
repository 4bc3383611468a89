"""Releases that a server of nodes asked for and never saw, which its ledger counts as well.

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
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from securecluster.messaging.messages import Call, Response
from securecluster.privacy.dp.ledger import (
    COSTLESS,
    UNSEEN,
    Event,
    History,
    expense_of,
    joint_price,
)
from securecluster.runtime.channel_state import ChannelState

if TYPE_CHECKING:
    from securecluster.privacy.dp.ledger import Ledger


class UnseenReleases:
    """What nodes were asked for in the current calls, and what of it the server has not seen.

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
        asked = self._asked.setdefault((call.method, call.step), set())
        asked.update(set(call.to).difference(response.without_release))

    def of(self, call: Event, seen: Collection[int]) -> list[Event]:
        """Return the unseen releases of a call that has ended, and of earlier ones with a price.

        Args:
            call: event with the call's names and numbers, and the names of what it asks for.
            seen: nodes whose releases the server has read.
        """
        state = self._state()
        asked = self._asked.pop((call.method, call.step), set()).difference(seen)
        if asked:
            for event in state.ledger.events:
                if (event.method, event.step) == (call.method, call.step):
                    asked.difference_update(event.ids)
        if asked:
            state.unpriced.append(_unseen(call, sorted(asked)))
        events: list[Event] = []
        waiting: list[Event] = []
        for each in state.unpriced:
            priced = _priced(each, state.ledger)
            events += priced
            if not priced:
                waiting.append(each)
        state.unpriced = waiting
        return events

    def rest(self) -> list[Event]:
        """Return as exact what nobody ever replied to, at the end of a run."""
        state = self._state()
        events = []
        for each in state.unpriced:
            events += [replace(each, fields=(name,), mechanism="exact") for name in each.fields]
        state.unpriced = []
        return events


def _unseen(event: Event, clients: Sequence[int]) -> Event:
    """Return an event of clients whose replies nobody has seen."""
    return replace(event, ids=tuple(clients), digests=(UNSEEN,) * len(clients))


def _priced(asked: Event, ledger: Ledger) -> list[Event]:
    """Return the events of releases that were asked for; none where nobody's has a price yet.

    Args:
        asked: the call, with the clients.
        ledger: of the run.
    """
    known = [event for event in ledger.events if event.method == asked.method and not event.kept]
    shown = [event for event in known if UNSEEN not in event.digests]
    # the same method may leave in sums and in single replies, with other noise
    shown = [event for event in shown if event.verb == asked.verb] or shown
    by_reply: dict[tuple[int, tuple[int, ...]], list[Event]] = {}
    for event in shown:
        by_reply.setdefault((event.step, event.ids), []).append(event)
    if not by_reply:
        return []
    dearest = _dearest(list(by_reply.values()), ledger)
    # what is repeated to the bit however often it is asked for is paid for once
    paid = {client for event in known if event.once for client in event.ids}
    events = []
    for clients in (set(asked.ids) - paid, paid.intersection(asked.ids)):
        for event in dearest if clients else ():
            made = replace(event, verb=asked.verb, round=asked.round, step=asked.step)
            made = replace(made, reader=asked.reader, again=False, once=(), digests=())
            made = _unseen(made, sorted(clients))
            if event.once and clients <= paid:
                made = replace(made, mechanism="free", noise_multiplier=None)
            elif event.once:
                made = replace(made, once=made.digests)
            events.append(made)
    return events


def _dearest(replies: Sequence[list[Event]], ledger: Ledger) -> list[Event]:
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
