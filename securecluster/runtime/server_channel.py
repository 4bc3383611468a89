"""All that server code ever holds: client ids and three verbs.

Whatever the server learns went through a verb, so bytes, releases and transcripts are complete by
construction.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar, cast

from securecluster.core.lazy_torch import torch
from securecluster.core.randomness import Randomness
from securecluster.errors import FrameError, UsageError
from securecluster.messaging.bounds import Limits, check
from securecluster.messaging.digests import reply_digests, tells_noise
from securecluster.messaging.messages import (
    FIRST_SEPARATE_STEP,
    RELAY,
    Call,
    Empty,
    Response,
    Rows,
    Shared,
    frames,
    placed,
    select,
    stack,
)
from securecluster.messaging.replies import Pairs, Replies, Sums, check_finite, check_squares
from securecluster.privacy.dp.ledger import CHOICE, Event, Ledger
from securecluster.privacy.masking.key_agreement import Peers, SealedSeed
from securecluster.privacy.pipeline import Pipeline
from securecluster.runtime.aggregators import Aggregator, Plain
from securecluster.runtime.endpoint import (
    GATHER,
    MINIMUM,
    PAIRS,
    SUM,
    CallContext,
    Release,
    release_of,
)
from securecluster.runtime.release_accounting import ReleaseAccounting
from securecluster.runtime.transport import Transport

C = TypeVar("C")
Q = TypeVar("Q")
A = TypeVar("A")
B = TypeVar("B")


@dataclass
class ChannelState:
    """What the server's side of the network remembers between calls."""

    # of calls to protocol methods: batches and masks are drawn from it, so the key agreement counts
    # apart
    step: int = 0
    key_step: int = 0
    post_step: int = FIRST_SEPARATE_STEP
    keyed: list[int] = field(default_factory=list)
    lost: dict[int, list[int]] = field(default_factory=dict)
    ledger: Ledger = field(default_factory=Ledger)


class ServerChannel:
    """Client ids and three verbs; no client object, no data.

    Args:
        clients: how many.
        randomness: the server's own draws (who is invited); public.
        agreed: what clients and server agreed on, whose hash is in every frame.
        pipeline: the stages of clients' replies, whose noise is known here.
        costs: what the run has for its noise, beside the pipeline's.
        device: where the server computes with what went through the pipeline, wherever replies come
            from; main memory by default. All other fields of replies lie in main memory. A replay
            on the same device therefore rounds as the run did.
        limits: what the configuration lets replies hold; without it replies are held to nothing but
            their own types.
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
    ) -> None:
        self.clients = tuple(range(clients))
        self.limits = limits or Limits()
        self.state = ChannelState()
        self.round = 0
        self.randomness, self.agreed = randomness, dict(agreed or {})
        self._costs = costs or ReleaseAccounting(pipeline)
        self.aggregator = aggregator or Plain(wide=self._costs.curator is not None)
        self._transport, self._config = transport, config
        if pipeline.shares > 1 and self.aggregator.server_reads_replies:
            raise UsageError(
                "noise in shares protects sums alone, and this aggregator reads every reply: let "
                "each client add all of it"
            )
        self.common = pipeline.common  # the first numbers of an average that are the common layers'
        self._keyed = pipeline.keyed
        self._asker: dict[int, int] = {}
        self._device = device or torch.device("cpu")
        self.record: Callable[[list[Event]], None] = self.add

    def add(self, events: list[Event]) -> None:
        """Add the events of one call to the ledger; `record` may be set to what does more, before a
        verb returns the replies.
        """
        for event in events:
            self.state.ledger.add(event)

    def gather(
        self,
        method: Callable[[C, CallContext, Q], A],
        query: Q,
        to: Sequence[int],
        step: int | None = None,
        tries: int = 1,
    ) -> Replies[A]:
        """Each client's reply on its own, in the order of `to`.

        Args:
            step: of an earlier call that these clients were not part of: their replies then compare
                with its replies under one mask.
            tries: how often who does not reply is asked, for the mask's key and then, in the same
                words and under the same mask, for this.
        """
        ready, step = self._open(method, query, to, step, tries)
        answer = self._insist(
            method, self._call(method, GATHER, query, to, ready, step, [1] * len(ready)), tries
        )
        reply = self._costs.read(release_of(method), answer.reply, step)
        if not self._recorded_at_once(method):
            # who trains for itself may have done so though no reply came
            own = not release_of(method).private
            self._record(method, GATHER, ready if own else answer.ids, reply, step)
        check_squares(self.round, answer.ids, reply)
        return Replies(answer.ids, cast(A, reply), self._missing(to, answer.ids), step)

    def post(
        self, method: Callable[[C, CallContext, Q], A], query: Q, to: Sequence[int]
    ) -> Replies[A]:
        """As `gather`, with a number, hence a mask, of its own that no other call's batches depend
        on.
        """
        self.state.post_step += 1
        return self.gather(method, query, to, self.state.post_step)

    def sum(
        self,
        method: Callable[[C, CallContext, Q], A],
        query: Q,
        to: Sequence[int],
        by: Sequence[int] | None = None,
        groups: int | None = None,
    ) -> Sums[A]:
        """Only sums, one per group: `by[k]` is the group of `to[k]` (one group without it). The
        client weighs what it sends.

        Where the answer may leave in sums only, a group that shrank below what clients ask for,
        since members lack the mask seed, waits.
        """
        ready, step = self._open(method, query, to)
        release = release_of(method)
        group = dict(zip(to, by if by is not None else [0] * len(to), strict=True))
        number = groups if groups is not None else 1 + max(group.values(), default=0)
        if GATHER not in release.via:
            ready = _in_large_groups(ready, group)
        groups_of_ready = [group[i] for i in ready]
        members = [groups_of_ready.count(g) for g in groups_of_ready]
        call = self._call(method, SUM, query, to, ready, step, members)
        exchange = partial(self._exchange, method)
        total = self.aggregator.run(exchange, call, groups_of_ready, number)
        rows = self._costs.read(release, total.rows, step, total.counts)
        rows = self._in_run_type(release, rows)
        if total.ids and not self._recorded_at_once(method):
            # The noise is the sum's: another sum has other noise, so the digest is of the sum.
            digests = reply_digests(rows, number)
            own_digests = [digests[group[i]] for i in total.ids]
            self._record(method, SUM, total.ids, rows, step, own_digests)
        return Sums(total.ids, cast(A, rows), total.counts, self._missing(to, total.ids), step)

    def _in_run_type(self, release: Release, rows: A) -> A:
        """Return sums of model rows in the run's own number type.

        They may have been added up in any number type.
        """
        kind = {"float32": torch.float32}.get(str(self.agreed.get("dtype")))
        if kind is None or rows is None:
            return rows
        fields = {name: getattr(rows, name) for name in release.through}
        wide = {name: own for name, own in fields.items() if own.table.dtype == torch.float64}
        narrow = {name: Rows(own.table.to(kind), own.index) for name, own in wide.items()}
        return dataclasses.replace(rows, **narrow) if narrow else rows  # type: ignore[type-var]

    def divide(self, labels: Sequence[int]) -> None:
        """From now on the local parameter server of cluster `labels[i]`, and not the server, asks
        client i; [] takes that back.
        """
        self._asker = dict(enumerate(labels))

    def relay(self, method: Callable[[Q], A], query: Q, to: Sequence[int]) -> A:
        """A frame of each of the local parameter servers `to` to the server, and its replies: what
        `method` makes of them.
        """
        call = Call(
            self._config,
            method.__name__,
            RELAY,
            self.round,
            self.state.step,
            tuple(to),
            query,
            (1,) * len(to),
        )
        reply = method(query)
        self._transport.relay(call, Response(call.to, reply))
        return reply

    def pairs(
        self,
        method: Callable[[C, CallContext, Q], A],
        query: Q,
        to: Sequence[int],
        then: Callable[[torch.Tensor], B] = lambda r: r,  # type: ignore[assignment, return-value]
        tries: int = 1,
    ) -> Pairs[B]:
        """R_ij = (row_i[j] + row_j[i]) / 2 over the clients that replied, or only what `then`
        computes from R.

        The reply's one field is a row of len(to) numbers per client, in the order of `to`. Under
        the plain aggregator the server reads the rows themselves.

        Args:
            tries: how often who does not reply is asked.
        """
        ready, step = self._open(method, query, to, tries=tries)
        answer = self._insist(
            method, self._call(method, PAIRS, query, to, ready, step, [2] * len(ready)), tries
        )
        self._missing(to, answer.ids)
        if len(answer.ids) < 2:
            raise UsageError(f"pairs needs at least two replies, {len(answer.ids)} came: try again")
        (rows,) = (v.values for v in vars(answer.reply).values())
        if rows.shape != (len(answer.ids), len(to)):
            raise FrameError(
                f"pairs needs a row of {len(to)} numbers per client, {tuple(rows.shape[1:])} came"
            )
        square = rows[:, [list(to).index(i) for i in answer.ids]]
        return Pairs(answer.ids, then((square + square.T) / 2), step)

    def _open(
        self,
        method: Callable[..., Any],
        query: Any,
        to: Sequence[int],
        step: int | None = None,
        tries: int = 1,
    ) -> tuple[list[int], int]:
        """The clients that can answer now, and the number of this call: the next one, where it is
        not given.
        """
        expected = frames(query, len(to))
        if expected != len(to):
            raise UsageError(f"a query with {expected} rows cannot go to {len(to)} clients")
        ready = list(to)
        release_of(method)
        if self._keyed:  # also a client that only receives must undo the mask
            for _ in range(tries):
                self._agree(to)
            ready = [i for i in to if i in self.state.keyed]
        if step is None:
            self.state.step += 1
        return ready, self.state.step if step is None else step

    def _call(
        self,
        method: Callable[..., Any],
        verb: str,
        query: Any,
        to: Sequence[int],
        ready: Sequence[int],
        step: int,
        members: Sequence[int],
    ) -> Call:
        asker = tuple(self._asker[i] for i in to) if self._asker else ()
        whole = Call(
            self._config,
            method.__name__,
            verb,
            self.round,
            step,
            tuple(to),
            query,
            (1,) * len(to),
            asker,
        )
        place = {i: k for k, i in enumerate(to)}
        return dataclasses.replace(whole.select([place[i] for i in ready]), members=tuple(members))

    def _insist(self, method: Callable[..., Any], call: Call, tries: int) -> Response:
        """The replies of all who answer one of several tries."""
        found: dict[int, tuple[Response, int]] = {}
        for _ in range(tries):
            left = [k for k, i in enumerate(call.to) if i not in found]
            if left:
                answer = self._exchange(method, call.select(left))
                found |= {i: (answer, k) for k, i in enumerate(answer.ids)}
        answers = list({id(a): a for a, _ in found.values()}.values())
        if len(answers) < 2:
            return answers[0] if answers else Response((), None)
        ids, joined = tuple(i for a in answers for i in a.ids), stack([a.reply for a in answers])
        order = [ids.index(i) for i in call.to if i in found]
        return Response(tuple(ids[k] for k in order), select(joined, order))

    def _exchange(self, method: Callable[..., Any], call: Call) -> Response:
        """Return the replies to a call, which are in the ledger before anybody uses them."""
        answer = self._transport.exchange(call)
        if answer.reply is None:
            return answer
        release = release_of(method)
        through = {name: name in release.sealed for name in release.through}
        check(answer.reply, self.limits.beside(call.query), through, finite=False)
        reply = placed(answer.reply, release.through, self._device)
        answer = dataclasses.replace(answer, reply=reply)
        if self._recorded_at_once(method):
            self._record(method, call.verb, answer.ids, reply, call.step)
        check_finite(call, answer)
        return answer

    def _missing(self, to: Sequence[int], came: Sequence[int]) -> tuple[int, ...]:
        lost = tuple(i for i in to if i not in set(came))
        for i in lost:
            rounds = self.state.lost.setdefault(i, [])
            if not rounds or rounds[-1] != self.round:
                rounds.append(self.round)
        return lost

    def noise(self, field: str, trains: str = "usual") -> float:
        """The expected squared norm of the noise in one row of this field, whoever added it; tests
        of norms take it off.

        Args:
            trains: the kind of training behind it.
        """
        return self._costs.noise(field, int(self.agreed.get("dimension", 0)), trains)

    def _recorded_at_once(self, method: Callable[..., Any]) -> bool:
        """Return whether replies are releases as they come, and not only once a trusted server has
        added its noise.
        """
        release = release_of(method)
        return release.private and not self._costs.per_group(release)

    def _record(
        self,
        method: Callable[..., Any],
        verb: str,
        ids: Sequence[int],
        reply: Any,
        step: int,
        digests: Sequence[str] | None = None,
    ) -> None:
        """Write into the ledger what the clients `ids` released.

        Args:
            reply: as it came; under a trusted server with its noise, since a digest of what that
                was sent would tell it.
            digests: of each client's release, where `reply` is a sum.
        """
        if not ids:
            return
        release = release_of(method)
        found: Sequence[str] = ()
        if self._costs.repeatable(release, reply):
            found = reply_digests(reply, len(ids)) if digests is None else digests
            if not tells_noise(reply):
                found = [CHOICE] * len(ids)
        call = Event(
            method.__name__,
            verb,
            (),
            self.round,
            tuple(ids),
            reader="lps" if self._asker else "server",
            step=step,
            digests=tuple(found),
        )
        self.record(list(self._costs.events(release, call, reply)))

    def _agree(self, to: Sequence[int]) -> None:
        """Bring the clients that have no mask seed yet into the key agreement, as far as they
        reply.
        """
        new = [i for i in to if i not in self.state.keyed]
        if not new:
            return
        offers = self._key("key_offer", new, Empty())
        if offers.reply is None:
            return
        most = len(self.clients)  # what one frame may name, however many join
        for first in range(0, len(offers.ids), most):
            part = range(first, min(first + most, len(offers.ids)))
            self._agree_with(Response(offers.ids[first : first + most], select(offers.reply, part)))

    def _agree_with(self, offers: Response) -> None:
        """Have the mask seed sealed to some clients by the first that can, and hand it on."""
        peers, table = offers.ids, offers.reply.key.values
        query = Peers(
            Shared(torch.as_tensor(peers)), Shared(table), Shared(offers.reply.signature.values)
        )
        seeded = dict(zip(offers.ids, offers.reply.seeded.values.tolist(), strict=True))
        for leader in self.state.keyed or sorted(peers, key=lambda i: not seeded[i]):
            sealed = self._key("key_seal", [leader], query)
            if sealed.reply is not None:
                boxes, signatures = (
                    Rows(sealed.reply.ciphertexts.values[0]),
                    Rows(sealed.reply.signatures.values[0]),
                )
                box = SealedSeed(leader, Shared(sealed.reply.key.values[0]), boxes, signatures)
                opened = self._key("key_open", peers, box)
                self.state.keyed = sorted({*self.state.keyed, *opened.ids})
                return

    def _key(self, name: str, to: Sequence[int], query: Any) -> Response:
        self.state.key_step += 1
        call = Call(
            self._config,
            name,
            GATHER,
            self.round,
            self.state.key_step,
            tuple(to),
            query,
            (1,) * len(to),
        )
        answer = self._transport.exchange(call)
        if answer.reply is not None:
            check(answer.reply, self.limits.beside(query))
        return answer


def _in_large_groups(ready: Sequence[int], group: Mapping[int, int]) -> list[int]:
    """Return the clients whose group is still large enough for a sum that hides its members.

    A group may have shrunk, since clients without the mask's seed are left out. Members refuse a
    sum over fewer than `MINIMUM`, unless the group had fewer from the start.

    Args:
        ready: clients that can answer.
        group: of every client that was to be asked.
    """
    asked = Counter(group.values())
    left = Counter(group[i] for i in ready)
    return [i for i in ready if left[group[i]] >= min(MINIMUM, asked[group[i]])]
